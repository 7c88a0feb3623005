"""Tables fit into the width of the terminal, whatever is in them."""

from celery_dislock.operating.cli.table import columns, cut, table

ID = "9b1d0c5e-77aa-4c3e-9d2b-0123456789ab"
WIDTH = 80


def lines(*rows, width=WIDTH):
    names = ("KEY", "WAITING", "HOLDER")
    cells = {name: lambda row, at=at: row[at] for at, name in enumerate(names)}
    return table(cells, rows, width)


def test_what_fits_is_whole():
    """No id is shortened without need; no line ends in spaces."""
    assert lines(("k", 2, f"t[{ID}]"), ("kk", None, "")) == [
        "KEY  WAITING  HOLDER",
        f"k    2        t[{ID}]",
        "kk   -        -",
    ]


def test_ids_are_shortened_before_anything_is_cut():
    """The task and its worker are read whole; also of ids and digests without dashes."""
    who = f"shop.export[{ID}] on celery@w1.example.com (pid 7)"
    assert lines(("export:7", 2, who))[1] == (
        "export:7  2        shop.export[9b1d0c5e..] on celery@w1.example.com (pid 7)"
    )
    key = f"task:{ID.replace('-', '')}"
    assert lines((key, 1, "h" * 50))[1].startswith("task:9b1d0c5e..  ")


def test_the_end_of_a_key_is_kept():
    """Keys often differ there only."""
    assert cut("tenant:acme:2024-01", 14, from_middle=True) == "tenant:a..4-01"
    assert cut("tenant:acme:2024-01", 14) == "tenant:acme:.."
    assert cut("\u4e2d\u6587\u4e2d", 5) == "\u4e2d.."


def test_a_pipe_has_80_columns(monkeypatch):
    """As a program that reads it sees; COLUMNS says otherwise."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda _fd: (_ for _ in ()).throw(OSError()))
    assert columns() == WIDTH
    monkeypatch.setenv("COLUMNS", "132")
    assert columns() == 132

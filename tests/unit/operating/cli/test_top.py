"""The command ``top``: what is kept of all locks, how keys are shown, and how it ends."""

from __future__ import annotations

import builtins
import io
import os
import pty
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.cli import dislock, top
from celery_dislock.operating.cli.top import Screen, look
from celery_dislock.servers.view import Holder, LockState, Waiter


def holder(held, **given):
    known = dict.fromkeys(Holder._fields)
    about = {"remaining": 20.0, "expiring": False, "who": "t[1] on w1", "renewed": 2.0}
    return Holder(**{**known, **about, "held": held, **given})


def lock(key="k", **given):
    known = dict.fromkeys(LockState._fields)
    empty = {"holders": [], "line": [], "turns": [], "waiting": 0, "aside": 0}
    return LockState(**{**known, **empty, "key": key, "name": f"dislock:{{{key}}}", **given})


class Overview:
    """Tells the locks of the test."""

    def __init__(self, *states):
        self.states = states

    def locks(self, failed):
        yield from self.states

    def lock(self, name, most):
        return next(one for one in self.states if one.name == name)


def drawn(screen, width=100, error=""):
    """What a terminal of this width shows."""
    rich = top._rich()
    console = rich.Console(file=io.StringIO(), width=width, height=20, highlight=False)
    opened = SimpleNamespace(
        runtime=SimpleNamespace(settings=SimpleNamespace(dislock_prefix="dislock")),
        process=SimpleNamespace(store=SimpleNamespace(server="redis://:***@h/0")),
    )
    console.print(top._drawn(rich, opened, screen, error, width))
    return console.file.getvalue()


def test_the_longest_held_and_the_longest_lines_are_kept():
    """Of ten thousand locks no more than fit are remembered."""
    states = [
        lock(f"k{number}", holders=[holder(float(number))], waiting=number)
        for number in range(1000)
    ]
    screen = look(Overview(*states), 3)
    assert [one.key for _, one in screen.held] == ["k999", "k998", "k997"]
    assert [one.key for one in screen.lines] == ["k999", "k998", "k997"]
    assert (screen.locks, screen.leases, screen.waiting) == (1000, 1000, 499_500)


def test_locks_that_are_alike_are_no_problem():
    """Two leases may be of the same age."""
    states = [lock(f"k{nth}", holders=[holder(1.0)] * 2, waiting=1) for nth in range(9)]
    assert len(look(Overview(*states), 5).held) == 5


def test_the_figures_count_what_else_there_is():
    """Reservations, pauses, limits, what was set aside, and what cannot be read."""
    states = [
        lock(reservation=object()),
        lock(limit=0),
        lock(limit=3),
        lock(aside=2),
        StoreError("redis://h", "x"),
    ]
    screen = look(Overview(*states), 5)
    counted = (screen.reserved, screen.paused, screen.limited, screen.aside, screen.unread)
    assert counted == (1, 1, 1, 2, 1)


def test_a_lock_whose_line_cannot_be_read_costs_no_other():
    """It counts as unreadable, as one does that cannot be looked at."""
    states = [lock("a", waiting=3), lock("b", waiting=2), lock("c", waiting=1)]
    error = DamagedLockError("redis://fake", "wrong type", states[1].name)

    class Damaged(Overview):
        def lock(self, name, most):
            if name == error.lock:
                raise error
            return super().lock(name, most)

    screen = look(Damaged(*states), 10)
    assert ([one.key for one in screen.lines], screen.unread) == (["a", "c"], 1)


def test_markup_and_escapes_of_strangers_are_shown_as_text():
    """A key may contain what rich or a terminal takes for a command."""
    place = dict.fromkeys(Waiter._fields) | {"who": "[bold]b[/bold]\x1b[2J", "waiting": 2.0}
    state = lock(
        "[red]x[/red]\x1b[31m\n",
        holders=[holder(1.0, who="[link=file:///etc]t[/link]")],
        waiting=1,
        line=[Waiter(**place)],
    )
    text = drawn(look(Overview(state), 5), width=160)
    assert "[red]x[/red]\\x1b[31m\\n" in text
    assert "[link=file:///etc]t[/link]" in text
    assert "[bold]b[/bold]\\x1b[2J" in text
    assert "\x1b" not in text


def test_a_narrow_terminal_has_the_key_and_the_time():
    """Two of the times are left out, and no line is too long."""
    state = lock("export:7", holders=[holder(61.0)], limit=0, waiting=3)
    text = drawn(look(Overview(state), 5), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert "export:7" in text
    assert "61 s" in text
    assert "RENEWED" not in text
    assert "RENEWED" in drawn(look(Overview(state), 5), width=100)


def test_an_empty_server_has_an_empty_screen():
    """With all figures, which are 0."""
    text = drawn(Screen(), error="lock server redis://h: no answer in time")
    assert "held 0   leases 0   waiting 0" in text
    assert "no answer in time" in text


@pytest.mark.parametrize(("height", "rows"), [(0, 3), (10, 3), (24, 8), (50, 21)])
def test_the_tables_fill_the_terminal(height, rows):
    """And have a few rows in a low one."""
    assert top._rows(height) == rows


def test_without_rich_the_error_names_the_extra(monkeypatch):
    """It is no dependency of workers."""
    real = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    result = CliRunner().invoke(dislock, ["top"], obj=SimpleNamespace(app=app))
    assert result.exit_code == 1
    assert 'pip install "celery-dislock[cli]"' in result.output


@pytest.fixture
def keyboard():
    """A terminal's two ends: what is typed, and what the command reads."""
    typed, read = pty.openpty()
    with os.fdopen(read, "r") as keys:
        yield typed, keys
    os.close(typed)


@pytest.mark.parametrize("pressed", [b"q", b"Q", b"xq"])
def test_q_ends_it(keyboard, pressed):
    """At once, and other keys do nothing."""
    typed, keys = keyboard
    with top._keys_at_once(keys):
        os.write(typed, b"x")
        assert not top._quits(keys, 0.01)
        os.write(typed, pressed)
        assert top._quits(keys, 60)


def test_without_a_keyboard_it_waits(monkeypatch):
    """Its input may be /dev/null."""
    waited = []
    clock = iter([0.0, 0.0, 5.0])
    monkeypatch.setattr(top.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(top.time, "sleep", waited.append)
    with top._keys_at_once(None):
        assert not top._quits(None, 1.0)
    assert waited == [1.0]

"""Which lock a command is about, what a terminal is shown, and how errors end a command."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DamagedLockError, SettingsError, StoreError
from celery_dislock.keys.names import reserved_lock
from celery_dislock.operating import locks
from celery_dislock.operating.cli import dislock as command
from celery_dislock.operating.cli.session import AWAY, FOUND, write_table
from celery_dislock.operating.locks import AppLocks
from celery_dislock.parking.process import runtime_of
from tests.unit.operating.cli.conftest import lock


def test_columns_stand_below_each_other(capsys):
    """Each is as wide as its widest cell; no line ends in spaces, none is broken by a cell."""
    write_table({"A": lambda a, _: a, "B": lambda _, b: b}, [("one", "1"), ("\n{x}", 22), ("", 0)])
    assert capsys.readouterr().out == "A      B\none    1\n\\n{x}  22\n-      -\n"


def test_errors_have_their_exit_codes(dislock, overview):
    """A server that is away is no finding, and a damaged lock is one."""
    overview.put(lock("k"))
    overview.known["dislock:{k}"] = DamagedLockError("redis://fake", "wrong type", "dislock:{k}")
    answer = dislock("show", "k")
    assert answer.exit_code == FOUND
    assert "cannot be used: wrong type" in answer.stderr
    overview.error = StoreError("redis://fake", "away")
    answer = dislock("show", "k")
    assert (answer.exit_code, answer.stderr) == (AWAY, "Error: lock server redis://fake: away\n")


def test_an_app_without_a_lock_server_is_told_what_to_give(dislock):
    """The error names the two ways."""
    dislock.app.conf.dislock_url = None
    answer = dislock("drop", "t", "--yes")
    assert answer.exit_code == 2
    assert "Name the app" in answer.stderr
    assert "--dislock-url" in answer.stderr


def test_locks_inside_another_process_are_out_of_reach(dislock):
    """An empty list would be a lie."""
    dislock.app.conf.dislock_url = "memory://"
    answer = dislock("ls")
    assert answer.exit_code == 2
    assert "inside the process that uses them" in answer.stderr


@pytest.mark.parametrize(
    "asked",
    [
        "show",
        "line",
        "free --yes",
        "pause",
        "resume",
        "limit {} 3",
        "run {} -- true",
        "put-back",
        "drop id --key",
    ],
)
@pytest.mark.parametrize("key", ["export:<corp_id>", "export:%s", "export:{corp_id}"])
def test_the_template_of_a_task_is_no_key(dislock, asked, key):
    """It would be another lock, which nobody holds."""
    words = [key if word == "{}" else word for word in asked.split()]
    answer = dislock(*words, *([] if key in words else [key]))
    assert answer.exit_code == 2
    assert f"lock_key {key!r}: " in answer.stderr


@pytest.fixture
def tasks(dislock):
    app = dislock.app

    @app.task(base=SingletonTask, name="shop.export", lock_key="export:<corp>", shared=False)
    def export(corp): ...

    @app.task(name="shop.move", lock_key=["to:<b>", "from:<a>"], shared=False)
    def move(a, b): ...

    @app.task(base=SingletonTask, name="shop.open", lock_key=False, shared=False)
    def opened(): ...


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["export:7"], ["dislock:{export:7}"]),
        (["--task", "shop.export", "--args", "[7]"], ["dislock:{export:7}"]),
        (["--task", "shop.export", "--kwargs", '{"corp": 7}'], ["dislock:{export:7}"]),
        (["--task", "shop.move", "--args", "[1, 2]"], ["dislock:{from:1}", "dislock:{to:2}"]),
    ],
)
def test_a_key_or_a_task_names_locks(dislock, tasks, overview, args, names):
    """The key as people write it; or what the task computes, in the order in which it locks."""
    dislock("show", *args)
    asked = names if len(names) == 1 else [*names, reserved_lock(names)]
    assert [name for name, *_ in overview.asked] == asked


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Give KEY, or --task"),
        (["k", "--task", "shop.export"], "Give KEY, or --task"),
        (["k", "--kwargs", "{}"], "are the arguments of --task"),
        (["--task", "shop.expor"], "Did you mean 'shop.export'?"),
        (["--task", "x"], "Does -A name the right app?"),
        (["--task", "shop.open"], "takes no lock"),
        (["--task", "shop.export"], "corp"),
        (["--task", "shop.export", "--args", "{}"], "--args must be a list"),
        (["--task", "shop.export", "--kwargs", "[]"], "--kwargs must be an object"),
        (["--task", "shop.export", "--args", "["], "--args is no JSON"),
        (["--task", "shop.export", "--args", "[" * 100_000], "--args is no JSON"),
        (["{k}"], "which no key may"),
        ([""], "the key is empty"),
    ],
)
def test_what_names_no_lock_is_wrong_usage(dislock, tasks, overview, args, words):
    """The message says what is missing; nothing is asked of the server."""
    answer = dislock("show", *args)
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert overview.asked == []


def test_it_takes_an_app_or_its_dislock(app, monkeypatch):
    """Actions need the app: a lock server alone cannot store a parked task's result."""
    monkeypatch.setattr(locks, "Actions", lambda app, _process: app)
    for given in (app, Dislock(app)):
        assert AppLocks(given).actions is app
    with pytest.raises(SettingsError, match="Celery app"):
        _ = AppLocks(SimpleNamespace(runtime=runtime_of(app))).actions
    with pytest.raises(SettingsError, match="Celery app"):
        AppLocks("redis://")


def test_each_command_has_a_line_of_help():
    """``celery dislock --help`` says of each what it is for."""
    for name, one in command.commands.items():
        assert one.get_short_help_str(limit=100), name


def test_a_server_that_is_given_takes_the_place_of_the_apps(dislock):
    """One, or several of which a majority decides."""
    dislock("--dislock-url", "redis://a", "show", "k")
    assert dislock.app.conf.dislock_url == "redis://a"
    urls = ["redis://a", "redis://b", "redis://c"]
    dislock(*(part for url in urls for part in ("--dislock-url", url)), "show", "k")
    assert dislock.app.conf.dislock_url == urls

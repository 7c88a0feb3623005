"""Which lock a command is about, and which app's."""

import shlex
from types import SimpleNamespace

import pytest

from celery_dislock import Dislock, SettingsError, SingletonTask
from celery_dislock.operating.locks import AppLocks
from celery_dislock.parking.process import runtime_of
from tests.commands import USAGE
from tests.unit.operating.examining import told_in


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (None, ["Name the app", "--dislock-url"]),
        ("memory://", ["inside the process that uses them"]),
    ],
)
def test_an_app_without_a_lock_server_is_told_what_to_give(dislock, url, told):
    """Of locks inside another process an empty list would be a lie."""
    dislock.app.conf.dislock_url = url
    runtime_of(dislock.app).close()
    answer = dislock("ls")
    assert answer.exit_code == USAGE
    assert [words for words in told if words not in answer.stderr] == []


def test_a_server_that_is_given_takes_the_place_of_the_apps(dislock):
    """One, or several of which a majority decides."""
    for urls in (["redis://a"], ["redis://a", "redis://b", "redis://c"]):
        dislock(*(part for url in urls for part in ("--dislock-url", url)), "show", "k")
        assert dislock.app.conf.dislock_url == (urls[0] if len(urls) == 1 else tuple(urls))


@pytest.mark.parametrize(
    "asked",
    [
        *("show", "line", "free --yes", "pause", "resume", "put-back", "drop id --key"),
        *("limit {} 3", "run {} -- true"),
    ],
)
@pytest.mark.parametrize("key", ["export:<corp_id>", "export:%s", "export:{corp_id}"])
def test_the_template_of_a_task_is_no_key(dislock, asked, key):
    """It would be another lock, which nobody holds."""
    words = [key if word == "{}" else word for word in asked.split()]
    answer = dislock(*words, *([] if key in words else [key]))
    assert answer.exit_code == USAGE
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
    ("args", "keys"),
    [
        (["export:7"], ["export:7"]),
        (["--task", "shop.export", "--args", "[7]"], ["export:7"]),
        (["--task", "shop.export", "--kwargs", '{"corp": 7}'], ["export:7"]),
        (["--task", "shop.move", "--args", "[1, 2]"], ["from:1", "to:2"]),
    ],
)
def test_a_key_or_a_task_names_locks(dislock, tasks, args, keys):
    """The key as people write it; or what the task computes, in the order in which it locks."""
    told = dislock.json("show", *args)
    assert [one["key"] for one in (told if len(keys) > 1 else [told])] == keys


TOLD = told_in("wrong-usage.txt")


@pytest.mark.parametrize("command", TOLD)
def test_wrong_usage_is_told_with_the_remedy(dislock, tasks, server, command):
    """Nothing is asked of the server, and nothing is set by halves or on another lock."""
    answer = dislock(*shlex.split(command)[3:])
    assert (answer.exit_code, answer.stdout) == (USAGE, "")
    assert [answer.stderr.partition("Error: ")[2].strip()] == TOLD[command]
    assert server.looks == [] or "pattern" in answer.stderr
    assert server.contents() == {}


def test_what_nobody_could_read_is_wrong_usage(dislock, tasks, server):
    """Arguments that are nested too deep for a parser, and a limit that no script could compare."""
    answer = dislock("show", "--task", "shop.export", "--args", "[" * 100_000)
    assert (answer.exit_code, "--args is no JSON" in answer.stderr) == (USAGE, True)
    assert dislock("limit", "k", "1000000001").exit_code == USAGE
    assert server.contents() == {}


def test_it_takes_an_app_or_its_dislock(app):
    """Actions need the app: a lock server alone cannot store a parked task's result."""
    for given in (app, Dislock(app)):
        assert AppLocks(given).actions.limit("dislock:{k}", None) is None
    with pytest.raises(SettingsError, match="Celery app"):
        _ = AppLocks(SimpleNamespace(runtime=runtime_of(app))).actions
    with pytest.raises(SettingsError, match="Celery app"):
        AppLocks("redis://")

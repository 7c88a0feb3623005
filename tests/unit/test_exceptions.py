"""The error tree."""

import pickle
import time

import click
import pytest
from celery import Celery
from celery.backends.base import Backend
from click.testing import CliRunner

from celery_dislock import exceptions
from celery_dislock.servers.records import Conflict
from celery_dislock.words import time_of_day

ERRORS = [
    exceptions.SettingsError("shop.export", "lock_key", "<x>", "no such argument"),
    exceptions.LockKeyError("export:<x>", "x", "it is a float"),
    exceptions.LockKeyError("plan_of", None, "0 is no limit", "lock_limit"),
    exceptions.LockHeldError("export:7", "shop.export[1] on w1 (pid 5)", 12.5),
    exceptions.LockHeldError("export:7", "shop.export[1] on w1 (pid 5)", 12.5, 720.0, 3.1),
    Conflict("k", {"task": "t", "id": "1"}, 9.5, 2, 7.0, 1.5, "1@w").error("a hint"),
    Conflict("k", {"thread": "T"}, 9.5).error(),
    exceptions.DuplicateTaskError("edit:7", "a1"),
    exceptions.NoResultError("edit:7", "a1", "its sender has asked for none"),
    exceptions.TaskCrashedError("shop.export", "a1", 3, 3, "signal 9 (SIGKILL)"),
    exceptions.LockTermsError("export:7", "this very thread", 12.5, "limit=1", "limit=2"),
    exceptions.NotOwnerError("export:7", "thread MainThread on host (pid 5)"),
    exceptions.LockLostError("export:7", "expired"),
    exceptions.StoreError("redis://x", "refused"),
    exceptions.DamagedLockError("redis://x", "it is a string", "dislock:{k}"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling_and_a_json_result_backend(error):
    """A pool process hands its error to the main process whole, and so does get() to a caller."""
    backend = Backend(app=Celery(set_as_current=False), serializer="json")
    stored = backend.decode(backend.encode(backend.prepare_exception(error)))
    for copy in (pickle.loads(pickle.dumps(error)), backend.exception_to_python(stored)):
        assert type(copy) is type(error)
        assert vars(copy) == vars(error)
        assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("known", "words", "args"),
    [
        ((), "", (None, None)),
        ((720.0,), ", for 12 min so far", (720.0, None)),
        ((720.0, 3.1), ", for 12 min so far, last renewed 3.1 s ago", (720.0, 3.1)),
    ],
)
def test_who_is_refused_reads_for_how_long_the_lock_has_been_held(known, words, args):
    """Before what is left of the lease; without those times it reads as it always did."""
    error = exceptions.LockHeldError("k", "t[1] on w (pid 5)", 12.5, *known)
    more = "for 12.5 s more unless renewed"
    assert str(error) == f"lock 'k' is held by t[1] on w (pid 5){words}, {more}"
    assert error.args == ("k", "t[1] on w (pid 5)", 12.5, *args)
    assert repr(error).startswith("LockHeldError('k', 't[1] on w (pid 5)', 12.5")


@pytest.mark.parametrize("hint", ["", "this very thread has entered it"])
def test_who_is_refused_has_the_conflict_as_data(hint):
    """As the strategy gets it, also after its way through a result backend; the log is as short."""
    conflict = Conflict(
        "k", {"task": "t", "id": "1", "pid": 7}, 9.5, 2, 7.0, 1.5, "1@w:7/a.1", True
    )
    error = conflict.error(hint)
    backend = Backend(app=Celery(set_as_current=False), serializer="json")
    stored = backend.decode(backend.encode(backend.prepare_exception(error)))
    for one in (error, pickle.loads(pickle.dumps(error)), backend.exception_to_python(stored)):
        assert one.conflict == conflict
        told = one.conflict.held_for, one.conflict.renewed, one.conflict.is_copy
        assert told == (7.0, 1.5, True)
        assert one.conflict.holder["id"] == "1"
        assert repr(one) == f"LockHeldError('k', 't[1] on ? (pid 7)', 9.5, 7.0, 1.5, {hint!r})"
    assert exceptions.LockHeldError("k", "t", 1.0).conflict is None


def test_a_pause_is_no_holder():
    """Its refusal tells neither a holder nor seconds, also after it was pickled."""
    holder = {"paused": True, "note": "by ana: reindex"}
    error = Conflict("k", holder, 5.0).error()
    assert str(pickle.loads(pickle.dumps(error))) == (
        "lock 'k' is kept free by an operator, who has paused it (by ana: reindex)"
    )


def test_when_the_next_may_start_is_a_time_of_day(monkeypatch):
    """The text is stored, and read later and elsewhere: so many seconds from when, nobody knows."""
    now = 1.8e9
    monkeypatch.setattr(time, "time", lambda: now)
    error = Conflict("k", {"early": True, "most": 1, "window_ms": 86_400_000}, 86394.9).error()
    starts = time_of_day(now + 86394.9)
    now += 3600.0
    assert str(pickle.loads(pickle.dumps(error))) == (
        f"lock 'k' cannot be taken yet, too early: 1 a day, the next may start at {starts}"
    )


@pytest.mark.parametrize("copied", [False, True])
def test_a_command_that_ends_with_a_bad_setting_shows_one_message(copied):
    """Celery's commands are click's: they end with status 1, without a traceback."""
    error = pickle.loads(pickle.dumps(ERRORS[0])) if copied else ERRORS[0]

    @click.command()
    def command():
        raise error

    result = CliRunner().invoke(command)
    assert result.exit_code == 1
    assert result.output == (
        "Cannot start with locks: shop.export: lock_key='<x>': no such argument\n"
    )
    assert error.message == str(error)

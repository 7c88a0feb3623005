"""A task that kills its process each time its message comes."""

import os
from types import SimpleNamespace

import celery
import pytest
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states, worker
from celery.exceptions import Reject
from celery.signals import task_failure

from celery_dislock import TaskCrashedError, scripts
from celery_dislock.tasks import request as recovery
from tests.declaring import declare
from tests.unit.deliveries import arrived, noted

CRASHES = "dislock:{k}:crashes:1:0:0"
KILLED = WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL) Job: 3.")
WEEK = 7 * 86400 * 1000  # milliseconds
COMES_BACK = {"acks_late": True, "reject_on_worker_lost": True}


@pytest.fixture(autouse=True)
def alive(monkeypatch):
    """Say that all processes have ended."""
    monkeypatch.setattr(recovery, "is_alive", lambda _pid: False)


@pytest.fixture
def dies(app):
    """Let the process of a task die; return whether its message is given back; None: it is gone."""

    def die(exc=KILLED, headers=None, **options):
        app.tasks.pop("shop.t", None)
        task = declare(app, **{**COMES_BACK, "lock_crash_limit": 3, **options})
        request = arrived(task, **(headers or {}))
        request.worker_pid, die.heard, given_back = os.getpid() + 1, [], []
        request.send_event = lambda *event, **_: die.heard.extend(event)
        request._on_ack = lambda *_: given_back.append(False)
        request._on_reject = lambda *args: given_back.append(args[-1])
        request.on_failure(SimpleNamespace(exception=exc, exc_info=None, traceback=""))
        assert len(given_back) < 2
        return given_back[0] if given_back else None

    return die


def times(lock_server, key=CRASHES):
    """Return how often a delivery has crashed, as the lock server has it."""
    return len(lock_server.contents().get(key, ()))


def test_a_task_that_kills_its_process_each_time_fails_at_its_limit(dies, app, lock_server, caplog):
    """Twice it comes back; the third time it ends as any failure does, and says why."""
    failures = []

    @task_failure.connect
    def hear(einfo, **_):
        failures.append(einfo)

    assert [dies(), dies()] == [True, True]
    assert (app.AsyncResult("1").state, "fails" in caplog.text) == (states.PENDING, False)
    assert dies() is False
    assert dies.heard == ["task-failed"]
    error = app.AsyncResult("1").result
    assert isinstance(error, TaskCrashedError)
    assert error.args == ("shop.t", "1", 3, 3, repr(KILLED))
    assert lock_server.ttls() == {CRASHES: WEEK}
    (line,) = [
        line
        for line in caplog.messages
        if "lock_crash_limit=3 admits" in line and "Find out" in line
    ]
    assert line.startswith("Task shop.t[1] (key 'k') fails and is not delivered again: its process")
    assert "signal 9 (SIGKILL)" in line
    assert isinstance(failures[-1].exception.exc.__cause__, WorkerLostError)


def test_without_the_option_it_comes_back_for_ever_and_leaves_nothing(dies, lock_server):
    """The count costs nobody anything who has not asked for it."""
    asked = lock_server.requests
    assert all(dies(lock_crash_limit=None) for _ in range(5))
    assert (lock_server.contents(), lock_server.requests - asked) == ({}, 5)  # five releases


NO_CRASH = {  # what ends it, options, whether its message comes back
    "a hard time limit": (TimeLimitExceeded(5), {"acks_on_failure_or_timeout": False}, True),
    "terminated": (Terminated(9), {}, False),
    "its body gives it back": (Reject("later", requeue=True), {}, True),
    "Celery lets it fail": (KILLED, {"reject_on_worker_lost": False}, False),
    "it is dead-lettered": (
        *(KILLED, {"reject_on_worker_lost": False, "acks_on_failure_or_timeout": False}, False),
    ),
    "acknowledged early": (KILLED, {"acks_late": False}, None),
}


@pytest.mark.parametrize("how", NO_CRASH)
def test_what_does_not_come_back_by_itself_is_not_counted(dies, app, lock_server, how):
    """Nor is what was ended from outside."""
    exc, options, comes_back = NO_CRASH[how]
    assert dies(exc, lock_crash_limit=1, **options) is comes_back
    assert times(lock_server) == 0
    assert not isinstance(app.AsyncResult("1").result, TaskCrashedError)


@pytest.mark.parametrize("flag", ["should_stop", "should_terminate"])
@pytest.mark.parametrize("status", [0, True])
def test_nothing_is_counted_while_the_worker_shuts_down(
    dies, lock_server, monkeypatch, flag, status
):
    """Whoever stops the worker may end its processes, too."""
    monkeypatch.setattr(worker.state, flag, status)
    assert dies(lock_crash_limit=1) is True
    assert times(lock_server) == 0


def test_nothing_is_counted_where_locks_are_off(dies, app, lock_server):
    """There may be no lock server."""
    app.conf.dislock_enabled = False
    assert dies(lock_crash_limit=1) is True
    assert lock_server.requests == 0


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="older Celery asks nobody")
def test_a_task_that_has_succeeded_does_not_fail(dies, app, lock_server):
    """Its process died after its result was stored."""
    app.backend.mark_as_done("1", 7)
    assert dies(lock_crash_limit=1) is False
    assert (app.AsyncResult("1").result, times(lock_server)) == (7, 0)


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="older Celery does not give it back")
def test_a_body_that_leaves_its_process_counts(dies, app):
    """Celery gives its message back, as if the process was killed."""
    assert dies(SystemExit(1), lock_crash_limit=2) is True
    assert dies(SystemExit(1), lock_crash_limit=2) is False
    assert app.AsyncResult("1").result.reason == "SystemExit(1)"


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="older Celery sends no retry")
def test_a_retry_after_a_crash_starts_a_wait_of_its_own(dies, app, broker):
    """Celery sends the headers of the message again; the retry is as one that a body asks for."""
    unique = ["dislock:{k}", "end", "-", 0]
    notes = noted(
        retry_until=1.0, put_off=7, held=["1@w1:1/x.1", "dislock:{k}"], since=1.0, unique=unique
    )
    options = {"lock_on_conflict": "retry", "lock_unique_until": "end"}
    assert dies(headers=notes, retry_on_worker_lost=True, **options) is False
    assert broker.last.headers["retries"] == 1
    assert broker.last.headers["dislock"].keys() == {"v", "unique"}
    assert app.AsyncResult("1").state == states.RETRY


def test_a_retry_is_counted_by_itself(dies, lock_server):
    """It is new work; so is another task under the same key."""
    assert [dies(), dies(), dies(headers={"retries": 1}), dies(headers={"id": "2"})] == [True] * 4
    assert times(lock_server) == 2
    assert dies() is False


def test_a_task_of_several_keys_is_counted_once(dies, lock_server):
    """Beside the first of them by name."""
    assert [dies(lock_key=["z", "k"]), dies(lock_key=["z", "k"])] == [True, True]
    assert {name for name in lock_server.contents() if "crashes" in name} == {CRASHES}
    assert dies(lock_key=["z", "k"]) is False


def test_a_count_that_fails_costs_one_more_run(dies, lock_server, caplog):
    """The message goes back, as without a limit."""
    lock_server.away = True
    assert dies(lock_crash_limit=1) is True
    line = "Task shop.t[1] has killed its process, which is not counted; it is delivered again: "
    assert line in caplog.text
    lock_server.away = False
    assert dies(lock_crash_limit=1) is False


def test_a_count_whose_reply_was_lost_counts_once(lock_server):
    """It is sent again as it was."""
    for nonce, expected in [("a", 1), ("a", 1), ("b", 2)]:
        assert lock_server.run(scripts.CRASH, [CRASHES], nonce, 1000) == expected


@pytest.mark.parametrize("dead_lettered", [False, True])
def test_no_copy_of_a_parked_task_runs_after_it(dies, app, lock_server, dead_lettered):
    """Its turn ends with it, and leaves a mark, unless its message may come back."""
    lock_server.send("HSET", "dislock:{k}:running", "1:0:0", "1 1 1 0 x:1")
    options = {"acks_on_failure_or_timeout": False} if dead_lettered else {}
    options |= {"lock_crash_limit": 1, "lock_on_conflict": "queue"}
    assert dies(headers=noted(ticket=["dislock:{k}", "1:0:0"]), **options) is False
    assert isinstance(app.AsyncResult("1").result, TaskCrashedError)
    mark = set() if dead_lettered else {"dislock:{k}:done:1:0:0"}
    assert lock_server.contents().keys() == {CRASHES, *mark}

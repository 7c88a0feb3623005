"""What a worker's main process does about a pool process that has died, and tells monitors."""

import os
import pickle
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import control, state
from celery.worker.request import Request

from celery_dislock.hooks import recovering
from celery_dislock.tasks import request as recovery
from tests.declaring import declare, never
from tests.driven import Child, held
from tests.unit.deliveries import arrived, deliver, noted, run

CHILD = Child.pid
NO_POOL = [None, os.getpid(), sys.maxsize]


class Users(Request):
    """A Request class that a user set; notes what comes to it, and who has the lock then."""

    def __init__(self, *args, **kwargs):
        self.heard = []
        super().__init__(*args, **kwargs)

    def send_event(self, *event, **about):
        self.heard.append((*event, about))

    def on_failure(self, exc_info, *_):
        self.heard.append(("on_failure", self.task.lock_server.locks()))

    def on_timeout(self, soft, timeout):
        self.heard.append(("on_timeout", self.task.lock_server.locks()))


@pytest.fixture
def alive(monkeypatch):
    """Process ids that are said to live; and what was put off until later."""
    state = SimpleNamespace(pids=set(), later=[])
    monkeypatch.setattr(recovery, "is_alive", lambda pid: pid in state.pids)
    monkeypatch.setattr(recovery, "_soon", state.later.append)
    return state


@pytest.fixture
def running(app, lock_server, alive):
    """The main process's request of a task that runs in a child."""

    def start(pid=CHILD, **options):
        children.append(Child(app, Request=Users, **options))
        request = children[-1].request
        request.task.lock_server, request.worker_pid = lock_server, pid
        return request

    children = []
    yield start
    for one in children:
        with suppress(Exception):
            one.go_on()


def failure(exc):
    return SimpleNamespace(exception=exc)


DIED = failure(WorkerLostError("x"))
LIMIT = failure(TimeLimitExceeded(10))


def test_a_process_that_ignores_a_signal_is_sent_another(running):
    """For Celery the task has ended, and monitors are told so once; a revoke finds it yet."""
    told = []
    pool = SimpleNamespace(terminate_job=lambda *how: told.append(how))
    request = running()
    request.time_start = 1.0
    for name in ("TERM", "KILL"):
        request.terminate(pool, name)
        assert [*control._find_requests_by_id([request.id])] == [request]
    assert told == [(CHILD, signal.SIGTERM), (CHILD, signal.SIGKILL)]
    assert [event for event, *_ in request.heard] == ["task-revoked"]
    state.task_ready(request)  # as Celery says when it hears of the end
    assert [*control._find_requests_by_id([request.id])] == []


@pytest.mark.parametrize("exc", [WorkerLostError("x"), Terminated(9), SystemExit()])
def test_a_dead_childs_lock_is_released_before_celery_hears_of_it(running, caplog, exc):
    """The message may go back to its queue, so the lock must be free by then."""
    caplog.set_level("INFO", "celery_dislock")
    request = running()
    request.on_failure(failure(exc))
    assert request.heard == [("on_failure", [])]
    line = f"Released the lock of shop.t[1] (key 'k'), whose process {CHILD} died."
    assert caplog.messages == [line]


def test_a_dead_childs_turn_is_ended_at_the_lock_that_it_waited_for(running, lock_server):
    """Its lock_key was changed since; the main process reads the turn in its message."""
    lock_server.send("HSET", "dislock:{old}:running", "1:0:0", "1 1 1 0 x:1")
    request = running(
        headers=noted(ticket=["dislock:{old}", "1:0:0"]), lock_key="new", lock_on_conflict="queue"
    )
    assert lock_server.locks() == ["old"]
    request.on_failure(DIED)
    assert request.heard == [("on_failure", [])]


@pytest.mark.parametrize("other", ["1@w1:{}/x.1", "11@w1:{}/x.1", "1@w2:{}/x.1", "1@w1:{}9/x.1"])
def test_a_death_ends_no_lease_of_another_execution(running, lock_server, other):
    """An owner is known by task id, worker and process, and by no beginning of one of them."""
    request = running(lock_limit=2)
    record = lock_server.contents()["dislock:{k}"]
    [lease] = record.values()
    lock_server.send("HSET", "dislock:{k}", other.format(CHILD), lease)
    request.on_failure(DIED)
    assert bool(lock_server.locks()) is not other.startswith("1@w1:{}/")


@pytest.mark.parametrize(
    ("pid", "tells", "heard"),
    [
        (CHILD, lambda request: request.on_failure(failure(ValueError())), "on_failure"),
        (CHILD, lambda request: request.on_timeout(True, 10), "on_timeout"),
        *(
            (pid, lambda one: one.on_failure(failure(SystemExit())), "on_failure")
            for pid in NO_POOL
        ),
    ],
    ids=["an error of the body", "a soft time limit", "no process", "own process", "greenlet"],
)
def test_what_is_no_death_of_a_pool_process_releases_nothing(running, pid, tells, heard):
    """The body releases by itself; threads run in the worker's process, greenlets in none."""
    request = running(pid)
    tells(request)
    assert request.heard == [(heard, ["k"])]


def test_a_hard_time_limit_waits_for_the_child_to_be_gone(running, lock_server, alive):
    """The limit is reported before the child is killed; its lock is its own until then."""
    request = running()
    alive.pids.add(CHILD)
    request.on_failure(LIMIT)
    request.on_timeout(False, 10)
    assert request.heard == [("on_failure", ["k"]), ("on_timeout", ["k"])]
    alive.later.pop()()
    assert lock_server.locks() == ["k"]
    alive.pids.clear()
    alive.later.pop()()
    assert lock_server.locks() == []


def test_a_child_that_does_not_die_is_given_up_on(running, lock_server, alive):
    """After one timeout the lease has ended by itself, and nobody looks any more."""
    request = running()
    alive.pids.add(CHILD)
    request.on_failure(LIMIT)
    lock_server.stall(31)
    alive.later.pop()()
    assert alive.later == []


def test_a_release_that_fails_does_not_disturb_the_worker(running, lock_server, caplog):
    """The lease is left to expire, and the log says so; also if its key cannot be built."""
    keys = iter(["k", "k"])
    request = running(lock_key=lambda *_: next(keys), name="x")
    lock_server.away = True
    request.on_failure(DIED)
    lock_server.away = False
    request.on_failure(DIED)
    assert request.heard == [("on_failure", ["k"])] * 2
    first, second = caplog.messages
    assert first.startswith(f"Could not release the lock of x[1] (key 'k'), whose process {CHILD}")
    assert second.startswith("Could not release the lock of x[1] (key unknown: StopIteration")


@pytest.mark.parametrize(("released", "seconds"), [(True, 5), (False, 30)])
def test_a_crash_is_a_failure(running, lock_server, released, seconds):
    """With release_on_failure=False the lease is left to expire; lock_at_least_for counts."""
    request = running(lock_at_least_for=5, release_on_failure=released)
    request.on_failure(DIED)
    lock_server.stall(seconds - 1)
    assert lock_server.locks() == ["k"]
    lock_server.stall(1.01)
    assert lock_server.locks() == []


# What monitors hear

REVOKED = {"terminated": False, "signum": None, "expired": False, "state": "REVOKED"}


@pytest.mark.parametrize("strategy", ["skip", "queue"])
def test_who_watches_the_worker_hears_what_became_of_a_task(app, lock_server, alive, strategy):
    """Celery says nothing of a task that is ignored: it would be seen as started for ever."""
    task = declare(app, never, lock_on_conflict=strategy, Request=Users)
    task.lock_server = lock_server
    with held(app):
        lock_server.advance(720)
        request = arrived(task, "2")
        crossed = pickle.dumps(run(task, request).retval.exception)  # from a pool process
        request.on_failure(failure(pickle.loads(crossed)))
        (event, about), *_ = request.heard
        if strategy == "skip":
            assert (event, about) == (
                "task-revoked",
                {**REVOKED, "reason": str(app.AsyncResult("2").result)},
            )
        else:
            who = task.lock_for().holders()[0].who
            told = {"key": "k", "place": 1, "holder": who, "held_for": pytest.approx(720)}
            assert (event, about) == ("task-parked", told)
        assert request.heard[1:] == [("on_failure", ["k"])]


@pytest.mark.parametrize("sends_events", [True, False])
def test_who_watches_the_worker_hears_of_those_that_made_room(app, lock_server, sends_events):
    """After the one that took their place: it may have made room itself."""
    options = {"lock_queue_limit": 1, "lock_queue_overflow": "replace", "send_events": sends_events}
    task = declare(app, never, lock_on_conflict="queue", Request=Users, **options)
    task.lock_server = lock_server
    with held(app):
        deliver(task, "7")
        request = arrived(task, "2")
        request._eventer = SimpleNamespace(send=lambda *event, **about: told.append((event, about)))
        told = []
        request.on_failure(failure(run(task, request).retval.exception))
    assert request.heard[0][0] == "task-parked"
    reason = str(app.AsyncResult("7").result)
    assert "7" not in reason
    expected = [(("task-revoked",), {"uuid": "7", "reason": reason, **REVOKED})]
    assert told == (expected if sends_events else [])


@pytest.mark.parametrize(
    ("parked", "event", "fields", "state"),
    [
        (False, "task-started", {}, None),
        (False, "task-revoked", {"terminated": False}, None),
        (False, "task-revoked", {"terminated": True}, "REVOKED"),
        (True, "task-started", {}, "STARTED"),
        (True, "task-revoked", {}, "REVOKED"),
        (True, "task-succeeded", {}, None),
    ],
)
def test_monitors_see_a_parked_task_start(app, parked, event, fields, state):
    """They would keep PARKED until its end; for other tasks Celery's order is the right one."""
    headers = noted(ticket=["dislock:{k}", "1:0:0"]) if parked else {}
    request = arrived(declare(app, Request=Users), **headers)
    request.send_event(event, **fields)
    assert request.heard == [(event, {**fields, **({"state": state} if state else {})})]


def test_the_users_request_class_is_kept_and_extended():
    """A class or a dotted path; the same base gives the same class."""
    assert issubclass(recovering(Users), Users)
    assert issubclass(recovering("celery.worker.request:Request"), Request)
    assert recovering(Users) is recovering(Users)


def test_processes_that_have_ended_are_told_from_those_that_live():
    """This process lives; one that has ended does not, waited for or not."""
    assert recovery.is_alive(os.getpid())
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if Path("/proc/self/stat").exists():
        assert not recovery.is_alive(pid)
    os.waitpid(pid, 0)
    assert not recovery.is_alive(pid)


def test_a_process_of_another_user_lives(monkeypatch):
    """It may not be signalled, and so it is there."""

    def kill(_pid, _signal):
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert recovery.is_alive(1)

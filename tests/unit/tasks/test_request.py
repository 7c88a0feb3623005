"""Release after the death of a pool process, with processes that are said to live or not."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from billiard.exceptions import Terminated, WorkerLostError
from celery.app.task import Context
from celery.worker.request import Request

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.hooks import recovering
from celery_dislock.messages.message import TaskParked, TaskSkipped
from celery_dislock.servers.reservations import Reservation
from celery_dislock.tasks import request as recovery
from tests.unit.deliveries import noted
from tests.unit.fakes import FakeRecord

CHILD = os.getpid() + 1


class Base:
    """Stands for a Request class that a user set."""

    def __init__(self, guard, pid=CHILD):
        self.id, self.hostname, self.worker_pid = "1", "w1", pid
        self.args, self.kwargs = (7,), {}
        self.task = SimpleNamespace(name="t", dislock_guard=guard)
        self.app, self._context = None, Context({"id": "1", **(guard.headers or {})})
        self.message = SimpleNamespace(headers=guard.headers)
        self.events = guard.events

    def send_event(self, *event, **about):
        self.events.append((*event, about))

    def on_failure(self, exc_info, send_failed_event=True, return_ok=False):
        self.events.append("on_failure")

    def on_timeout(self, soft, timeout):
        self.events.append("on_timeout")


class Guard:
    timeout = 30.0
    headers = None
    runtime = SimpleNamespace(off=True)

    def __init__(self):
        self.events = []
        self.error = None

    def keys_in_words(self, args, kwargs):
        return "'k'"

    def release_dead(self, args, kwargs, start):
        if self.error:
            raise self.error
        self.events.append(("released", args, kwargs, start))
        return 1


@pytest.fixture
def alive(monkeypatch):
    """Process ids that are said to live; and what was put off until later."""
    state = SimpleNamespace(pids=set(), later=[])
    monkeypatch.setattr(recovery, "is_alive", lambda pid: pid in state.pids)
    monkeypatch.setattr(recovery, "_soon", state.later.append)
    return state


def failure(exc):
    return SimpleNamespace(exception=exc)


RELEASED = ("released", (7,), {}, f"1@w1:{CHILD}/")


@pytest.mark.parametrize("exc", [WorkerLostError("x"), Terminated(9), SystemExit()])
def test_a_dead_childs_lock_is_released_before_celery_hears_of_it(alive, exc):
    """The message may go back to its queue, so the lock must be free by then."""
    guard = Guard()
    recovering(Base)(guard).on_failure(failure(exc))
    assert guard.events == [RELEASED, "on_failure"]


def test_a_dead_child_s_key_is_free_before_celery_hears_of_it(app, world, alive):
    """Whatever lock it has: an execution without one leaves no lease to release."""

    @app.task(base=SingletonTask, lock_key="k", lock_unique_until="end")
    def export(number): ...

    there = world.store.reservations
    mine = Reservation("dislock:{k}", "1", mark="ab", number=3)
    there.records[mine.lock] = FakeRecord("ab", "running", "1", number=3, ends=2000.0)
    request = recovering(Base)(Guard())
    request.app, request.task = app, export
    vars(request._context).update(noted(unique=[mine.lock, "end", "ab", 3]))
    request.on_failure(failure(WorkerLostError("x")))
    assert there.asked == [("end", mine)]
    assert there.of(mine.lock) is None


def test_a_failed_body_has_released_by_itself(alive):
    """An exception of the task's own is no death."""
    guard = Guard()
    recovering(Base)(guard).on_failure(failure(ValueError()))
    assert guard.events == ["on_failure"]


@pytest.mark.parametrize(
    ("known", "told"), [((), {}), ((720.0,), {"held_for": 720.0})], ids=["not known", "known"]
)
def test_who_watches_the_worker_hears_of_a_parked_task(alive, known, told):
    """Its process sends nothing: the event comes with the outcome, and no lock is released."""
    guard = Guard()
    recovering(Base)(guard).on_failure(failure(TaskParked("k", 3, "t[1]", *known)))
    event = ("task-parked", {"key": "k", "place": 3, "holder": "t[1]", **told})
    assert guard.events == [event, "on_failure"]


REVOKED = {"terminated": False, "signum": None, "expired": False, "state": "REVOKED"}


def test_who_watches_the_worker_hears_of_a_skipped_task(alive):
    """Celery says nothing of a task that is ignored: it would be seen as started for ever."""
    guard = Guard()
    skipped = pickle.loads(pickle.dumps(TaskSkipped("lock 'k' is held")))
    recovering(Base)(guard).on_failure(failure(skipped))
    told = {**REVOKED, "reason": "lock 'k' is held"}
    assert guard.events == [("task-revoked", told), "on_failure"]


@pytest.mark.parametrize("of_this_task", [True, False])
def test_who_watches_the_worker_hears_of_those_that_made_room(alive, of_this_task):
    """After the one that took their place: it may have made room itself."""
    guard = Guard()
    request = recovering(Base)(guard)
    request.task.send_events = of_this_task
    request.eventer = SimpleNamespace(
        send=lambda *event, **about: guard.events.append((event, about))
    )
    parked = TaskParked("k", 3, "t[1]")
    parked.replaced = {"7": "a newer task took its place"}
    request.on_failure(failure(pickle.loads(pickle.dumps(parked))))
    told = {"uuid": "7", "reason": "a newer task took its place", **REVOKED}
    expected = [(("task-revoked",), told)] if of_this_task else []
    assert guard.events[1:] == [*expected, "on_failure"]


@pytest.mark.parametrize(
    ("headers", "event", "fields", "state"),
    [
        (None, "task-started", {}, None),
        (None, "task-revoked", {"terminated": False}, None),
        (None, "task-revoked", {"terminated": True}, "REVOKED"),
        (noted(ticket=["dislock:{k}", "1:0:0"]), "task-started", {}, "STARTED"),
        (noted(ticket=["dislock:{k}", "1:0:0"]), "task-revoked", {}, "REVOKED"),
        (noted(ticket=["dislock:{k}", "1:0:0"]), "task-succeeded", {}, None),
    ],
)
def test_monitors_see_a_parked_task_start(monkeypatch, headers, event, fields, state):
    """They would keep PARKED until its end; for other tasks Celery's order is the right one."""
    monkeypatch.setattr(recovery, "keep_message", lambda _request: None)
    guard = Guard()
    guard.headers = headers
    recovering(Base)(guard).send_event(event, **fields)
    assert guard.events == [(event, {**fields, **({"state": state} if state else {})})]


@pytest.mark.parametrize("off", [True, False])
def test_the_message_is_kept_where_the_task_may_be_sent_again(monkeypatch, off):
    """Any task that locks may be."""
    requests = []
    monkeypatch.setattr(recovery, "keep_message", requests.append)
    guard = Guard()
    guard.runtime = SimpleNamespace(off=off)
    recovering(Base)(guard)
    assert len(requests) == (not off)


def test_a_hard_time_limit_waits_for_the_child_to_be_gone(alive):
    """The limit is reported before the child is killed; its lock is its own until then."""
    guard = Guard()
    alive.pids.add(CHILD)
    recovering(Base)(guard).on_timeout(False, 10)
    assert guard.events == ["on_timeout"]
    alive.later.pop()()
    assert guard.events == ["on_timeout"]
    alive.pids.clear()
    alive.later.pop()()
    assert guard.events == ["on_timeout", RELEASED]


def test_a_soft_time_limit_is_no_death(alive):
    """The body goes on, and releases by itself."""
    guard = Guard()
    recovering(Base)(guard).on_timeout(True, 10)
    assert guard.events == ["on_timeout"]


def test_a_child_that_does_not_die_is_given_up_on(alive, monkeypatch):
    """After one timeout the lease has ended by itself, and nobody looks any more."""
    now = [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    guard = Guard()
    alive.pids.add(CHILD)
    recovering(Base)(guard).on_timeout(False, 10)
    now[0] = 31.0
    alive.later.pop()()
    assert alive.later == []


@pytest.mark.parametrize("error", [StoreError("redis://x", "away"), TypeError("no such argument")])
def test_a_release_that_fails_does_not_disturb_the_worker(alive, caplog, error):
    """The lease is left to expire, and the log says so."""
    guard = Guard()
    guard.error = error
    recovering(Base)(guard).on_failure(failure(WorkerLostError("x")))
    assert guard.events == ["on_failure"]
    assert "left to expire" in caplog.text


@pytest.mark.parametrize("pid", [None, os.getpid(), sys.maxsize], ids=["none", "own", "greenlet"])
def test_only_a_pool_process_can_die(alive, pid):
    """Threads run in the worker's own process, and greenlets have no process id at all."""
    guard = Guard()
    recovering(Base)(guard, pid).on_failure(failure(SystemExit()))
    assert guard.events == ["on_failure"]


@pytest.mark.parametrize(
    ("release_on_failure", "at_least", "held", "said"), [(True, 5.0, 0, 1), (False, None, 1, 0)]
)
def test_a_crash_is_a_failure(  # noqa: PLR0917
    app, world, alive, caplog, release_on_failure, at_least, held, said
):
    """With release_on_failure=False the lease is left to expire, the place in line is given up."""
    caplog.set_level("INFO", "celery_dislock")

    @app.task(
        base=SingletonTask,
        lock_key="k",
        lock_at_least_for=5,
        release_on_failure=release_on_failure,
    )
    def export(number): ...

    world.lease("k", owner=f"1@w1:{CHILD}/1")
    request = recovering(Base)(Guard())
    request.task = export
    request.on_failure(failure(WorkerLostError("x")))
    [asked] = world.store.asked("release_dead")
    assert asked == ("dislock:{k}", f"1@w1:{CHILD}/", at_least)
    assert len(world.store.leases) == held
    line = f"Released the lock of {export.name}[1] (key 'k'), whose process {CHILD} died."
    assert caplog.messages == [line] * said


def test_the_line_about_a_death_needs_no_key(app, world, alive, caplog):
    """A key that cannot be built keeps no line from being written, and the worker from nothing."""

    def key(number):
        raise ValueError(number)

    @app.task(base=SingletonTask, lock_key=key)
    def export(number): ...

    request = recovering(Base)(Guard())
    request.task = export
    request.on_failure(failure(WorkerLostError("x")))
    [line] = caplog.messages
    assert line.startswith(
        f"Could not release the lock of {export.name}[1] (key unknown: ValueError"
    )


def test_the_users_request_class_is_kept_and_extended():
    """A class or a dotted path; the same base gives the same class."""
    assert issubclass(recovering(Base), Base)
    assert issubclass(recovering("celery.worker.request:Request"), Request)
    assert recovering(Base) is recovering(Base)


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

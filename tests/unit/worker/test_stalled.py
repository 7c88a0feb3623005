"""The main process renews for pool processes, with requests and a store that the tests drive."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from celery.concurrency import prefork, solo

from celery_dislock import SingletonTask
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.servers.replies import Looked
from celery_dislock.servers.requests import Execution
from celery_dislock.worker import stalled
from celery_dislock.worker.stalled import LATE, StalledKeeper, StalledStep

CHILD = os.getpid() + 1
INTERVAL = 10.0  # seconds


class Request:
    """An execution in a pool process, as the main process knows it."""

    def __init__(self, guard, pid=CHILD, id="1"):  # noqa: A002 -- as Celery has it
        self.id, self.hostname, self.worker_pid, self.name = id, "w1", pid, "t"
        self.args, self.kwargs = (7,), {}
        self.task = SimpleNamespace(name="t")
        if guard is not None:
            self.task.dislock_guard = guard


class Guard:
    """Names the lock of the first argument, or raises the *error*."""

    timeout, interval = 3 * INTERVAL, INTERVAL
    options = SimpleNamespace(max_renew_times=360)
    error = None
    asked = 0

    def lock_names(self, args, kwargs):
        self.asked += 1
        if self.error:
            raise self.error
        return (f"dislock:{{export:{args[0]}}}",)


class Store:
    """Gives the next of the answers, the last of them for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def renew_stalled(self, executions, *, within):
        assert within > 0
        self.asked.append(executions)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(executions)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(autouse=True)
def alive(monkeypatch):
    """All processes live; a test may end some."""
    dead = set()
    monkeypatch.setattr(stalled, "is_alive", lambda pid: pid not in dead)
    return dead


def run(keeper, clock, requests, seconds, every=INTERVAL / 4):
    """Let the worker's timer step for so long."""
    for _ in range(int(seconds / every)):
        keeper.look(requests)
        clock.advance(every)


HEALTHY = Looked(0.0, INTERVAL)


def test_no_cap_means_no_limit(clock):
    """max_renew_times=0 renews for ever."""
    guard, store = Guard(), Store(HEALTHY)
    guard.options = SimpleNamespace(max_renew_times=-1)
    run(StalledKeeper(store, clock), clock, [Request(guard)], 1.5 * INTERVAL)
    assert store.asked[0][0].longest == 0


def test_a_healthy_process_costs_a_look_per_renewal(clock):
    """A short execution costs nothing; the others share a round trip, and a key is computed once.

    They are asked for as dead ones would be released: by the lock's name and the start of the
    owner, up to the cap that the watchdog keeps.
    """
    guard, store = Guard(), Store(HEALTHY)
    keeper, requests = StalledKeeper(store, clock), [Request(guard), Request(guard, id="2")]
    run(keeper, clock, requests, INTERVAL)
    assert (store.asked, guard.asked) == ([], 0)
    run(keeper, clock, requests, 0.5 * INTERVAL)
    [[execution, _]] = store.asked
    assert execution == Execution(
        locks=("dislock:{export:7}",),
        owner_start=f"1@w1:{CHILD}/",
        ttl=3 * INTERVAL,
        overdue=LATE * INTERVAL,
        longest=pytest.approx(360 * INTERVAL * 0.95),
    )
    run(keeper, clock, requests, 18.5 * INTERVAL)
    assert 18 <= len(store.asked) <= 20
    assert guard.asked == 2


def test_a_stalled_process_is_said_once(clock, caplog):
    """One warning per execution: which process, which task, since when, and what happens."""
    store = Store(HEALTHY, Looked(13.0, 0.0))
    run(StalledKeeper(store, clock), clock, [Request(Guard())], 10 * INTERVAL)
    [said] = caplog.messages
    assert said == (
        f"Process {CHILD} has not renewed the lock of t[1] for 25.5 s: it was stopped, its body "
        "holds the GIL, it cannot reach the lock server, or its body has ended and the release "
        "does not get through. The main process renews the lock, up to its cap."
    )
    assert len(store.asked) >= 7


def test_one_renewal_is_not_worth_a_line(clock, caplog):
    """After an outage the main process may be the first to renew, and the process goes on."""
    store = Store(Looked(0.0, 1.0), Looked(13.0, 0.0), HEALTHY, HEALTHY, HEALTHY)
    run(StalledKeeper(store, clock), clock, [Request(Guard())], 2 * INTERVAL)
    assert len(store.asked) == 2  # the server knows when it is overdue
    run(StalledKeeper(store, clock), clock, [Request(Guard())], 8 * INTERVAL)
    assert caplog.messages == []


class Fixed(Guard):
    """The guard of a task whose lease is not renewed."""

    interval = None


@pytest.mark.parametrize(
    "request_",
    [
        Request(None),
        Request(Guard(), pid=os.getpid()),
        Request(Guard(), pid=None),
        Request(Fixed()),
        Request(Guard(), pid=CHILD + 1),
    ],
    ids=["without a lock", "in a thread of this process", "not begun", "fixed expiry", "dead"],
)
def test_others_are_left_alone(clock, alive, request_):
    """Only what runs under a renewed lock in a pool process that lives is looked at."""
    store = Store(HEALTHY)
    alive.add(CHILD + 1)
    run(StalledKeeper(store, clock), clock, [request_], 10 * INTERVAL)
    assert store.asked == []


def test_an_outage_is_said_once_and_tried_again_soon(clock, caplog):
    """Within the time that the lease has left there are several tries."""
    store = Store(StoreError("redis://x", "away"))
    keeper, request = StalledKeeper(store, clock), Request(Guard())
    caplog.set_level("INFO", "celery_dislock")
    run(keeper, clock, [request], 2 * INTERVAL)
    assert len(store.asked) >= 3
    store.answers = [HEALTHY]
    run(keeper, clock, [request], 2 * INTERVAL)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "Cannot look after pool processes that may be stalled, trying again",
        "Pool processes that may be stalled are looked after again.",
    ]


@pytest.mark.parametrize(
    ("error", "looks", "said"),
    [
        (StoreError("redis://x", "away"), 7, 1),
        (DamagedLockError("redis://x", "unreadable", "dislock:{k}"), 1, 0),
    ],
    ids=["a node that is away is asked again soon", "a damaged lock is not asked for again"],
)
def test_an_answer_that_is_an_error_harms_no_other(clock, caplog, error, looks, said):
    """The executions of other nodes and locks are looked at as ever."""
    store = Store(HEALTHY)
    caplog.set_level("INFO", "celery_dislock")

    def renew(executions, *, within):
        store.asked += [one.owner_start[0] for one in executions]
        return [error if one.owner_start.startswith("1@") else HEALTHY for one in executions]

    store.renew_stalled = renew
    requests = [Request(Guard()), Request(Guard(), id="2")]
    run(StalledKeeper(store, clock), clock, requests, 2.75 * INTERVAL)
    assert store.asked.count("1") == looks
    assert store.asked.count("2") == 2
    assert len(caplog.messages) == said


def test_a_key_that_cannot_be_computed_is_said_once(clock, caplog):
    """A user's callable raises in the main process: the lock is that of the child alone."""
    guard, store = Guard(), Store(HEALTHY)
    guard.error = ValueError("no such corporation")
    run(StalledKeeper(store, clock), clock, [Request(guard)], 10 * INTERVAL)
    [said] = caplog.messages
    assert "its key is unknown: ValueError('no such corporation')" in said
    assert guard.asked == 1


def test_nothing_stops_it(clock, caplog, monkeypatch):
    """An unexpected error is logged, and the next look is made."""
    store = Store(HEALTHY)
    keeper, request = StalledKeeper(store, clock), Request(Guard())
    monkeypatch.setattr(stalled, "is_alive", lambda _: 1 / 0)
    run(keeper, clock, [request], 2 * INTERVAL)
    assert store.asked == []
    monkeypatch.setattr(stalled, "is_alive", lambda _: True)
    keeper.look([request])
    assert len(store.asked) == 1


@pytest.fixture
def app(plain_app):

    @plain_app.task(name="quick", base=SingletonTask, lock_watchdog_timeout=6, shared=False)
    def quick(): ...

    @plain_app.task(name="slow", base=SingletonTask, shared=False)
    def slow(): ...

    return plain_app


def included(app, pool=prefork.TaskPool):
    step = StalledStep(SimpleNamespace(app=app))
    return step.include_if(SimpleNamespace(app=app, pool_cls=pool)), step


def test_the_step_belongs_to_prefork_workers(app):
    """In others the body runs in the process that would have to renew.  It steps often enough."""
    is_there, step = included(app)
    assert is_there
    assert step._every == pytest.approx(6 / 3 / 4)  # of the shortest timeout
    assert not included(app, solo.TaskPool)[0]


@pytest.mark.parametrize("setting", ["dislock_renew_for_stalled", "dislock_enabled"])
def test_a_setting_turns_the_step_off(app, setting):
    """A process that stalls loses its locks; without locks there is nothing to do."""
    app.conf[setting] = False
    assert not included(app)[0]


def test_without_tasks_that_renew_their_locks_there_is_no_step(plain_app):
    """No tasks, or fixed expiries alone."""
    assert not included(plain_app)[0]

    @plain_app.task(name="fixed", base=SingletonTask, lock_expire=60, shared=False)
    def fixed(): ...

    assert not included(plain_app)[0]

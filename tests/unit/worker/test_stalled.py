"""The main process renews for pool processes that stand still, and only for those."""

import os
import signal
import threading
from functools import partial

import pytest
from celery import Task
from celery.concurrency import prefork, solo

from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.worker import stalled
from celery_dislock.worker.stalled import StalledKeeper, StalledStep
from tests.declaring import declare
from tests.driven import Child

INTERVAL = 10.0  # seconds


@pytest.fixture(autouse=True)
def dead(lock_server, monkeypatch):
    """All processes live, but for these."""
    dead = set()
    monkeypatch.setattr(stalled, "is_alive", lambda pid: pid not in dead)
    monkeypatch.setattr(stalled, "StalledKeeper", partial(StalledKeeper, clock=lock_server.clock))
    return dead


@pytest.fixture
def start(app, worker):
    """Let the worker run tasks in children, and look after them."""
    children = []

    def start(nth=1, **options):
        declare(app, name="another")
        options = {"name": f"t{nth}", "lock_key": f"k{nth}", **options}
        child = Child(app, task_id=f"{nth}", **options)
        worker.state.active_requests.add(child.request)
        children.append(child)
        if nth == 1:
            step = StalledStep(worker)
            worker.steps = [step]
            assert step.include_if(worker)
            step.start(worker)
        return child

    yield start
    for child in children:
        child.go_on()


def frozen_for(lock_server, seconds, child=Child):
    lock_server.frozen.add(child.pid)
    lock_server.advance(seconds)


def test_a_healthy_process_costs_a_look_per_renewal(start, lock_server):
    """A short execution costs nothing; others share a round trip, and a key is computed once."""
    keys = []
    start(lock_key=lambda: keys.append(1) or "k1")
    start(2)
    keys.clear()
    before = lock_server.requests
    lock_server.advance(INTERVAL - 1)
    assert (lock_server.requests, keys) == (before, [])
    lock_server.advance(18.5 * INTERVAL)
    # Two renewals of the child's own for each of both, and one look at each.
    assert 4 * 17 <= lock_server.requests - before <= 4 * 20
    assert keys == [1]


@pytest.mark.parametrize(("cap", "lasts"), [(0, 1000), (20, 190), (1000, 1000)])
def test_a_process_that_stands_still_keeps_its_lock_up_to_the_cap(
    start, lock_server, caplog, cap, lasts
):
    """One warning per execution: which process, which task, since when, and what happens."""
    start(max_renew_times=cap)
    frozen_for(lock_server, lasts)
    assert lock_server.locks() == ["k1"]
    [said] = caplog.messages
    assert said.startswith(f"Process {Child.pid} has not renewed the lock of t1[1] for 2")
    assert said.endswith("The main process renews the lock, up to its cap.")
    lock_server.advance(60)
    assert bool(lock_server.locks()) is (cap != 20)


def test_one_renewal_is_not_worth_a_line(start, lock_server, caplog):
    """After an outage the main process may be the first to renew, and the process goes on."""
    start()
    frozen_for(lock_server, 1.6 * INTERVAL)
    lock_server.frozen.clear()
    lock_server.advance(8 * INTERVAL)
    assert caplog.messages == []


@pytest.mark.parametrize("other", ["no lock", "own", None, "fixed", "dead"])
def test_others_are_left_alone(start, lock_server, dead, other):
    """Only what runs under a renewed lock in a pool process that lives is looked at."""
    no_lock = {"base": Task, "lock_key": None}
    options = {"no lock": no_lock, "fixed": {"lock_expire": 25}}.get(other, {})
    child = start(**options)
    if other in {"own", None}:
        child.request.worker_pid = other and os.getpid()
    elif other == "dead":
        dead.add(child.pid)
    frozen_for(lock_server, 0)
    before = lock_server.requests
    lock_server.advance(50)
    assert lock_server.requests == before
    assert lock_server.locks() == []


CANCEL = {"lock_on_conflict": "cancel"}


@pytest.fixture
def killed(monkeypatch, dead):
    """The signals that processes were sent; what was killed is dead."""
    sent = []

    def kill(pid, number):
        sent.append((pid, number))
        dead.add(pid)

    monkeypatch.setattr(os, "kill", kill)
    return sent


def newer_comes(lock_server, task="2"):
    """Park a task that was sent later."""
    lines = Lines(lock_server, "dislock", "h", print)
    ticket = Ticket(f"{task}:0:0", False, b"message", sent=10**17)  # no later than now
    assert isinstance(lines.park(["dislock:{k1}"], f"{task}@w:1/1", 30.0, "{}", ticket), Parked)
    return lines


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({"lock_on_cancel": "terminate"}, 25),
        ({"lock_cancel_after": 60}, 85),
        ({"lock_on_cancel": "warn", "lock_cancel_after": 60}, 85),
        ({"lock_on_cancel": "terminate", "lock_cancel_not_before": 100}, 100),
        ({"lock_on_cancel": "terminate", "max_renew_times": 0}, 25),
        ({"lock_on_cap": "terminate", "max_renew_times": 12}, 120),
    ],
)
def test_who_stands_still_is_killed_if_it_has_to_end(
    start, lock_server, caplog, killed, options, after
):
    """Nothing in that process can stop its body; one that goes on would do so by itself."""
    start(**CANCEL, **options)
    frozen_for(lock_server, 0)
    newer_comes(lock_server)
    lock_server.advance(after - 4)
    assert killed == []
    lock_server.advance(2 * INTERVAL)
    assert killed == [(Child.pid, signal.SIGKILL)]
    why = "its lease is at its cap" if "lock_on_cap" in options else "replaces it: task 2"
    assert why in caplog.text


@pytest.mark.parametrize(("cap", "goes_on_for"), [(1, 0.0), (20, 18.9), (20, 19.8)])
def test_who_stands_still_only_at_its_cap_is_killed(start, lock_server, killed, cap, goes_on_for):
    """Its lease is renewed no more: when that has ended, the next one would run beside it."""
    child = start(lock_on_cap="terminate", max_renew_times=cap)
    lock_server.advance(goes_on_for * INTERVAL)
    assert killed == []
    lock_server.frozen.add(child.pid)
    lock_server.advance(1.9 * INTERVAL)
    assert lock_server.locks() == ["k1"]
    assert killed == [(child.pid, signal.SIGKILL)]


@pytest.mark.parametrize("cap", [1, 20])
def test_who_goes_on_at_its_cap_ends_by_itself(start, lock_server, killed, cap):
    """Its own watchdog ends the body, and lets that clean up."""
    start(lock_on_cap="terminate", max_renew_times=cap)
    lock_server.advance((cap + 0.9) * INTERVAL)
    assert killed == []


@pytest.mark.parametrize("why", ["nobody is newer", "it left", "raise", "skip", "cap"])
def test_who_need_not_end_by_force_lives(start, lock_server, killed, why):
    """There is no newer task any more, or no option that says so."""
    plain = {"raise": CANCEL, "skip": {}, "cap": {"max_renew_times": 12}}
    options = plain.get(why, {**CANCEL, "lock_on_cancel": "terminate"})
    start(**options)
    if why in {"it left", "raise"}:
        lines = newer_comes(lock_server)
    frozen_for(lock_server, 1.5 * INTERVAL)
    if why == "it left":
        lines.drop("dislock:{k1}", "2:0:0", '"replaced":"x"')
    lock_server.advance(200)
    assert killed == []


def test_an_outage_is_said_once_and_tried_again_soon(start, lock_server, caplog):
    """Within the time that the lease has left there are several tries."""
    start()
    caplog.set_level("INFO", "celery_dislock")
    before, lock_server.away = lock_server.requests, True
    frozen_for(lock_server, 2.5 * INTERVAL)
    assert lock_server.requests >= before + 3
    lock_server.away = False
    lock_server.advance(4)
    assert lock_server.locks() == ["k1"]
    assert [message.split(":")[0] for message in caplog.messages[:2]] == [
        "Cannot look after pool processes that may be stalled, trying again",
        "Pool processes that may be stalled are looked after again.",
    ]


def test_what_is_wrong_with_one_harms_no_other(start, lock_server, caplog, monkeypatch):
    """A damaged lock is not asked for again; a key that cannot be computed is said once."""
    keys = iter(["k1"])
    start(lock_key=lambda: next(keys))
    start(2)
    start(3)
    lock_server.send("SET", "dislock:{k2}", "x")
    frozen_for(lock_server, 10 * INTERVAL)
    assert lock_server.locks() == ["k2", "k3"]
    assert [one for one in caplog.messages if "its key is unknown: StopIteration()" in one] != []
    assert len([one for one in caplog.messages if "its key is unknown" in one]) == 1
    monkeypatch.setattr(stalled, "is_alive", lambda _: 1 / 0)  # nothing stops it
    lock_server.advance(INTERVAL)
    monkeypatch.setattr(stalled, "is_alive", lambda _: True)
    lock_server.advance(4 * INTERVAL)
    assert lock_server.locks() == ["k2", "k3"]


@pytest.mark.parametrize(
    ("options", "conf", "pool", "is_there"),
    [
        ({}, {}, prefork.TaskPool, True),
        ({}, {}, solo.TaskPool, False),
        ({"lock_expire": 60}, {}, prefork.TaskPool, False),
        ({}, {"dislock_renew_for_stalled": False}, prefork.TaskPool, False),
        ({}, {"dislock_enabled": False}, prefork.TaskPool, False),
    ],
)
def test_the_step_belongs_to_prefork_workers_whose_tasks_renew_their_locks(
    app, worker, options, conf, pool, is_there
):
    """In others the body runs in the process that would have to renew; fixed expiries need none."""
    app.conf.update(conf)
    worker.pool_cls = pool
    declare(app, **options)
    assert StalledStep(worker).include_if(worker) is is_there


def test_a_thread_goes_on_while_the_worker_waits_for_its_broker(app, worker, monkeypatch):
    """It has ended when the event loop goes on; but not in a worker that shuts down."""
    declare(app)
    step, worked = StalledStep(worker), threading.Event()
    monkeypatch.setattr(step, "work", worked.set)
    assert step.include_if(worker)
    step.every = 0.01
    step.start(worker)
    worker.state.active_requests.add("one")
    worker.use_eventloop = False  # its timer has a thread, and goes on by itself
    step.bridge(worker)
    assert step._thread is None
    worker.use_eventloop = True
    step.bridge(worker)
    assert worked.wait(5)
    step.go_on(worker)
    assert not step._thread.is_alive()
    step.bridge(worker)
    goes_on = step._thread
    step.stop(worker)
    step.go_on(worker)
    assert goes_on.is_alive()
    assert step._thread is goes_on
    worker.state.active_requests.clear()
    goes_on.join(5)
    assert not goes_on.is_alive()

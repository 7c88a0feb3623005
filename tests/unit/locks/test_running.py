"""Stopping a body whose lease has ended, with a target that only notes what is thrown."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import LockLostError
from celery_dislock.locks import running
from celery_dislock.locks.running import KILL_AFTER, Running, StopTask


@pytest.fixture
def target(monkeypatch):
    target = SimpleNamespace(thrown=[], armed=True)
    target.throw = target.thrown.append
    target.disarm = lambda: setattr(target, "armed", False)
    monkeypatch.setattr(running, "running_here", lambda _block: target)
    return target


@pytest.fixture
def timers(monkeypatch):
    """Timers that the test lets run, and the signals that are sent when they do."""
    timers = SimpleNamespace(due=[], sent=[])

    def timer(after, call, args):
        timers.due.append((after, lambda: call(*args)))
        return SimpleNamespace(start=lambda: None, daemon=None)

    monkeypatch.setattr(running.threading, "Timer", timer)
    monkeypatch.setattr(running.os, "kill", lambda _pid, number: timers.sent.append(number))
    return timers


def in_a(process, monkeypatch):
    monkeypatch.setattr(running, "current_process", lambda: SimpleNamespace(name=process))


@pytest.mark.parametrize(("action", "thrown"), [("raise", [LockLostError]), ("warn", [])])
def test_a_body_is_stopped_where_its_task_asks_for_that(world, target, action, thrown):
    """With "warn" nothing is thrown; with "raise" the error that says which lock, and why."""
    lease = world.lease(lock_on_lost=action)
    Running(lease).begin()
    lease.lose("stolen")
    world.watchdog.channel.lost(lease)
    assert [type(exc) for exc in target.thrown] == thrown
    assert all((exc.key, exc.reason) == ("k", "stolen") for exc in target.thrown)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"lock_on_lost": "raise"}, True),
        ({"lock_on_lost": "terminate"}, True),
        ({"lock_on_lost": "warn"}, False),
        ({"lock_on_lost": "warn", "lock_on_cap": "raise"}, False),
    ],
)
def test_a_body_whose_lease_has_ended_does_not_begin(world, target, options, refused):
    """What was lost before the body began stops it where a loss in the body would have."""
    lease = world.lease(**options)
    body = Running(lease)
    lease.lose("expired")
    if refused:
        with pytest.raises(LockLostError, match="expired"):
            body.begin()
    else:
        body.begin()


def test_terminate_is_not_caught_by_except_exception(world, target, timers, monkeypatch):
    """What is thrown is no Exception, and carries the error that the task fails with."""
    in_a("MainProcess", monkeypatch)
    lease = world.lease(lock_on_lost="terminate")
    Running(lease)
    lease.lose("stolen")
    world.watchdog.channel.lost(lease)
    [exc] = target.thrown
    assert isinstance(exc, StopTask)
    assert not isinstance(exc, Exception)
    assert exc.error.reason == "stolen"
    assert timers.due == []  # a solo worker is not to kill itself


@pytest.mark.parametrize(("ends", "sent"), [(False, [signal.SIGKILL]), (True, [])])
def test_a_pool_process_whose_body_does_not_stop_is_killed(
    world, target, timers, monkeypatch, caplog, ends, sent
):
    """A second after it was thrown; not where the body has ended by then."""
    in_a("ForkPoolWorker-1", monkeypatch)
    lease = world.lease(lock_on_lost="terminate")
    body = Running(lease)
    lease.lose("stolen")
    world.watchdog.channel.lost(lease)
    [(after, run)] = timers.due
    assert after == KILL_AFTER
    if ends:
        body.end()
    run()
    assert timers.sent == sent
    assert ("t[1] on w (pid 7) does not stop" in caplog.text) is not ends


def test_the_end_of_a_body_disarms_its_target(world, target):
    """What the thread runs next is not stopped for this lease."""
    body = Running(world.lease(lock_on_lost="raise"))
    assert target.armed
    body.end()
    assert not target.armed

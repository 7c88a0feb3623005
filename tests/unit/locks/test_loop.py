"""The loop, with jobs that only note when they run."""

from __future__ import annotations

import threading

import pytest

from celery_dislock.clock import FOREVER
from celery_dislock.locks.loop import STALL_LEAST, WAITS, Loop
from tests.unit.fakes import FakeClock


class Note:
    """A job that is due at given times, and notes when it ran; it raises errors that are given."""

    def __init__(self, *due):
        self.due = list(due)
        self.ran = []
        self.errors = []
        self.happened = threading.Event()

    def due_at(self):
        return self.due[0] if self.due else FOREVER

    def run(self, now):
        self.ran.append(now)
        if self.errors:
            raise self.errors.pop()
        del self.due[0]
        self.happened.set()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def loop(clock):
    return Loop(clock=clock, threaded=False)


def test_each_job_runs_when_it_is_due(loop, clock):
    """The loop sleeps until the first job is due, and for ever if none is."""
    often, once = Note(1005, 1010, 1010), Note(1010)
    loop.jobs = [often, once]
    assert loop.tick() == 5
    clock.advance(5)
    assert loop.tick() == 5
    clock.advance(5)
    assert loop.tick() == 0
    assert loop.tick() is None
    assert (often.ran, once.ran) == ([1005, 1010, 1010], [1010])


@pytest.mark.parametrize(("when", "rings"), [(1004, True), (1006, False)])
def test_only_an_earlier_job_rings(loop, when, rings):
    """What is due after the loop wakes anyway does not wake it."""
    loop.jobs = [Note(1005)]
    loop.tick()
    loop.wake(when)
    assert loop._bell._silent.acquire(blocking=False) is rings


def test_one_lease_after_the_other_wakes_the_loop_once(loop, clock):
    """What has ended before the loop looked does not make each that follows wake it, too."""
    loop.jobs = [Note()]
    loop.tick()
    loop.wake(1010)
    loop._bell.wait(0)
    assert loop.tick() == 10
    clock.advance(1)
    loop.wake(1011)
    assert not loop._bell._silent.acquire(blocking=False)
    clock.advance(9)
    assert loop.tick() is None


def test_what_becomes_due_while_the_loop_looks_is_not_missed(loop):
    """A job that was looked at already rings: the loop is about to sleep until a later time."""
    first, last = Note(), Note(1100)
    loop.jobs = [first, last]

    def due_at():
        first.due = [1050]
        loop.wake(1050)
        return 1100

    last.due_at = due_at
    loop.tick()
    assert loop._bell._silent.acquire(blocking=False)


def test_a_late_beat_is_a_stall(loop, clock):
    """Between two beats only the time of a planned sleep, or of a round trip, may pass."""
    stalls = []
    loop.on_stall = lambda *times: stalls.append(times)
    loop.beat(1010)
    clock.now = 1010 + STALL_LEAST / 2
    loop.beat(within=1)
    clock.advance(WAITS + STALL_LEAST / 2)
    loop.beat()
    assert stalls == []
    began = clock.now
    clock.advance(STALL_LEAST)
    loop.beat()
    assert stalls == [(began, clock.now)]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_job_that_raises_is_run_again(caplog, error):
    """The thread goes on, whatever a job raises; the error is logged and counted."""
    loop, job = Loop(), Note(0.0)
    job.errors = [error()]
    loop.jobs = [job]
    loop.wake(0.0)
    assert job.happened.wait(30)
    loop.stop()
    assert loop.errors == 1
    assert "Unexpected error while watching leases" in caplog.text


def test_a_stopped_loop_starts_again_when_it_is_woken():
    """Its thread ends, and closes what belongs to it; the next wake starts another."""
    closed = []
    loop, job = Loop(close=lambda: closed.append(1)), Note(0.0)
    loop.wake(FOREVER)
    loop.stop()
    assert closed == [1]
    loop.jobs = [job]
    loop.wake(0.0)
    assert job.happened.wait(30)
    loop.stop()

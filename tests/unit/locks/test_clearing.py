"""Releases that got no reply, driven tick by tick."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.locks.clearing import BATCH, CLEAR_FOR, RETRY_EVERY
from celery_dislock.servers.requests import Ending, LateRelease


def test_an_owner_that_was_released_meanwhile_is_left_alone(world):
    """The watchdog does only what its caller could not do."""
    world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], "gone"))
    world.watchdog.clearing.cleared("gone")
    world.run(100)
    assert world.store.calls == []


def test_what_cannot_be_released_is_not_tried_for_ever(world):
    """After the time of a place in line all of it has run out by itself."""
    world.store.away = True
    world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], "gone"))
    world.run(CLEAR_FOR + 5)
    calls = len(world.store.calls)
    world.run(100)
    assert len(world.store.calls) == calls


def test_the_ticket_of_a_task_that_is_done_is_ended_after_any_outage(world):
    """Nothing else ends it for days, and a copy of the task would run."""
    world.store.away = True
    world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], "gone", Ending(ticket="1:0:0")))
    world.run(10 * CLEAR_FOR)
    world.store.away = False
    world.store.calls.clear()
    world.run(2)
    assert world.store.asked("clear") == [(["gone"],)]
    assert world.store.done == ["1:0:0"]


def test_what_the_server_refuses_to_release_is_tried_again(world):
    """An error of one node, or of a full server, is no answer; the others are done with."""
    for owner in ("refused", "gone"):
        world.watchdog.clearing.clear(LateRelease([f"dislock:{{{owner}}}"], owner))
    world.store.answers["refused"] = StoreError("redis://fake", "OOM")
    world.run(3)
    del world.store.answers["refused"]
    world.run(3)
    calls = world.store.asked("clear")
    assert calls[0] == (["refused", "gone"],)
    assert calls[1:] == [(["refused"],)] * len(calls[1:])
    assert len(calls) > 1
    world.run(100)
    assert world.store.asked("clear") == calls


def test_a_lock_that_is_damaged_is_not_released_for_ever(world):
    """It stays damaged; its own tasks say so."""
    world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], "gone"))
    world.store.answers["gone"] = DamagedLockError("redis://fake", "damaged", "dislock:{k}")
    world.run(100)
    assert world.store.asked("clear") == [(["gone"],)]


def test_a_long_lease_is_tried_to_be_released_until_it_has_ended(world):
    """The main process of a worker may renew it until then."""
    world.store.away = True
    world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], "gone"), timeout=3 * CLEAR_FOR)
    world.run(2 * CLEAR_FOR)
    world.store.away = False
    world.store.calls.clear()
    world.run(2)
    assert world.store.asked("clear") == [(["gone"],)]


def test_more_than_one_batch_is_released_without_a_pause(world):
    """A thousand waiters that are cancelled together do not stand in line for seconds."""
    for number in range(3 * BATCH):
        world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], f"gone {number}"))
    world.watchdog.clearing.hurry()
    started = world.clock()
    while world.watchdog.tick() == 0:
        pass
    assert len(world.store.asked("clear")) == 3
    assert world.clock() == started


def test_what_waits_is_sent_when_the_watchdog_s_thread_ends(world):
    """A program that is interrupted closes its locks soon after."""
    world.watchdog.clearing.clear(LateRelease(["dislock:{k}"], "gone"))
    world.watchdog._run(object())  # a thread that is not the current one ends
    assert world.store.asked("clear") == [(["gone"],)]


@pytest.mark.parametrize("hurries", [False, True])
def test_a_late_release_goes_out_though_no_lease_keeps_the_watchdog_awake(world, hurries):
    """It sleeps for good where there is none, and is woken; also if it is to come at once."""
    clearing, bell = world.watchdog.clearing, world.watchdog._bell
    assert world.watchdog.tick() is None
    clearing.clear(LateRelease(["dislock:{k}"], "gone"))
    if hurries:
        assert world.watchdog.tick() == RETRY_EVERY
        bell.wait(0)
        clearing.hurry()
    assert bell._silent.acquire(blocking=False), "nobody has woken it"
    bell.ring()
    world.run(RETRY_EVERY)
    assert world.store.asked("clear") == [(["gone"],)]
    assert world.watchdog.tick() is None

"""Which thread or greenlet has which leases."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

import pytest

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import LockHeldError, LockTermsError
from celery_dislock.locks import callers
from celery_dislock.locks.attempt import Attempt
from celery_dislock.locks.callers import Caller, CallerLease, check_terms, current_caller

HOLDER = {"task": "t", "id": "1", "worker": "w", "pid": 7}


@pytest.fixture
def caller():
    return Caller()


@pytest.fixture
def take(world, caller):
    """Take a lock for the caller, as one entry of it."""

    def take(key="k", owner="me", *, execution=False, **options):
        lock = world.lock(key, **options)
        attempt = Attempt(owner, HOLDER)
        held = CallerLease(lock, lock.try_acquire(attempt), execution=execution)
        held.entries["first"] = None
        caller.hold(held)
        return held

    return take


def test_one_of_several_keys_is_found_and_is_not_the_same_lock(world, caller, take):
    """A lock of one key has a lease in its way that was taken with another key."""
    held = take("k")
    both = world.lock("k")
    both.names = ("dislock:{k}", "dislock:{other}")
    assert caller.find(both) is held
    assert not held.is_of(both)


def test_leaving_twice_releases_once(world, take):
    """A step that an exception has cut short can be repeated."""
    held = take()
    held.leave("first")
    held.leave("first")
    assert len(world.store.asked("release")) == 1


def test_the_lease_of_an_execution_is_not_released_by_a_block_in_its_body(world, take):
    """A task's lease ends with the body, whatever takes the lock once more inside."""
    held = take(execution=True)
    held.leave("first")
    assert held.lease.held


def test_what_an_eager_task_held_uncovers_the_lease_around_it(world, caller, take):
    """After the inner task the caller has the outer task's lease of that key again."""
    outer = take(owner="outer", execution=True)
    inner = CallerLease(world.lock(), outer.lease, execution=True)
    caller.hold(inner)
    assert caller.find(world.lock()) is inner
    caller.forget(inner)
    assert caller.find(world.lock()) is outer


def test_a_lease_that_has_ended_is_not_found(world, caller, take):
    """What was released behind the caller's back is forgotten when it is looked for."""
    held = take()
    held.lease.release()
    assert caller.find(world.lock()) is None
    assert caller._leases == []


@pytest.mark.parametrize(("execution", "who"), [(True, "the task"), (False, "this very thread")])
def test_a_wait_for_oneself_is_refused(world, caller, take, execution, who):
    """Nobody else could end it: the error names the key and who has it."""
    take(execution=execution)
    with pytest.raises(LockHeldError) as caught:
        caller.refuse_to_wait(world.lock())
    assert caught.value.key == "k"
    assert caught.value.holder.startswith(who)


def test_a_lease_that_was_lost_is_waited_for_like_any_other(world, caller, take):
    """Somebody else has the lock by now, and will release it."""
    take().lease.lose("stolen")
    caller.refuse_to_wait(world.lock())


@pytest.mark.parametrize(
    ("has", "asked", "differs"),
    [
        ({}, {}, None),
        ({}, {"lock_mode": "shared"}, None),
        ({"lock_mode": "shared"}, {}, "mode='shared'"),
        ({"lock_limit": 2}, {"lock_mode": "shared"}, "mode='exclusive'"),
        ({"lock_limit": 2}, {"lock_limit": 3}, "limit=2"),
        ({"lock_watchdog_timeout": 9.0}, {}, "watchdog_timeout=9.0"),
        ({"lock_expire": 9.0}, {"lock_watchdog_timeout": 9.0}, "expire=9.0"),
        ({}, {"lock_on_lost": "raise"}, "on_lost='warn'"),
        ({"lock_on_lost": "raise"}, {}, None),
    ],
)
def test_a_lock_is_taken_once_more_on_no_stronger_terms(caller, take, has, asked, differs):
    """Shared under exclusive is no more than one has; all else would change the lease in place."""
    held = take(**has)
    if differs is None:
        check_terms(held, TaskOptions(**asked), caller)
        return
    with pytest.raises(LockTermsError) as caught:
        check_terms(held, TaskOptions(**asked), caller)
    assert differs in str(caught.value)


def test_the_lease_of_a_task_lasts_as_long_as_it_says_unless_a_block_states_it(caller, take):
    """The body need not repeat the task's own timeout."""
    held = take(execution=True, lock_watchdog_timeout=9.0)
    check_terms(held, TaskOptions(), caller)
    with pytest.raises(LockTermsError):
        check_terms(held, TaskOptions(), caller, ["lock_watchdog_timeout"])


def test_a_thread_is_one_caller_until_its_process_is_forked(monkeypatch):
    """A child does not believe that it holds what its parent holds."""
    mine = current_caller()
    assert current_caller() is mine
    monkeypatch.setattr(callers.os, "getpid", os.getppid)
    assert current_caller() is not mine


def test_a_greenlet_that_has_ended_or_is_gone_is_dead():
    """The watchdog asks, and nobody is left to release what such a caller holds."""

    class Greenlet:
        dead = False

    greenlet = Greenlet()
    caller = Caller("greenlet", greenlet)
    assert caller.kind == "greenlet"
    assert not caller.dead
    greenlet.dead = True
    assert caller.dead
    greenlet.dead = False
    del greenlet
    gc.collect()
    assert caller.dead


def test_each_greenlet_is_a_caller_of_its_own(monkeypatch):
    """A greenlet of a thread does not have what another one of that thread has."""
    hub = SimpleNamespace(parent=None)

    class Greenlet:
        parent = hub

    first, second = Greenlet(), Greenlet()
    for here in (first, second):
        module = SimpleNamespace(getcurrent=lambda here=here: here)
        monkeypatch.setitem(sys.modules, "greenlet", module)
        here.caller = current_caller()
        assert current_caller() is here.caller
        assert here.caller.kind == "greenlet"
    assert first.caller is not second.caller

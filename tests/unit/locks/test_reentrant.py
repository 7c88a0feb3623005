"""Locks for plain Python, on a store that the test drives; threads are in the integration tests."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import (
    EventLoopError,
    LockHeldError,
    LockLostError,
    LockTermsError,
    NotOwnerError,
    SettingsError,
)
from celery_dislock.locks import reentrant as reentrant_module
from celery_dislock.locks.attempt import Attempt


@pytest.fixture
def others(world):
    """Let somebody else hold the lock."""
    return lambda: world.lock().try_acquire(Attempt("other", {"task": "t"}))


def test_a_thread_is_named_as_it_is_called_now(world, make):
    """The holder is the thread's current name, also if the thread held a lock under another."""
    thread = threading.current_thread()
    before = thread.name
    try:
        for name in (before, "renamed", before):
            thread.name = name
            with make() as lease:
                holder = {"thread": name, "worker": "here", "pid": 42, "timeout": 30.0}
                assert lease.holder == world.store.leases["dislock:{k}"][2] == holder
                assert lease.owner.startswith(f"here:42:{threading.get_ident()}/")
    finally:
        thread.name = before


def test_a_lock_with_a_fixed_expiry_is_not_said_to_be_renewed(make):
    """Its holder tells no timeout, from which others could tell when it was renewed."""
    with make(lock_expire=5) as lease:
        assert "timeout" not in lease.holder
    with make(lock_watchdog_timeout=5) as lease:
        assert lease.holder["timeout"] == 5


def test_two_objects_of_one_key_count_together_without_a_round_trip(world, make):
    """What one took the other may take again, and the lock is free after the last release."""
    first, second = make(), make()
    assert first.acquire()
    assert second.acquire()
    assert len(world.store.asked("acquire")) == 1
    first.release()
    assert second.lease.held
    second.release()
    assert world.store.leases == {}


def test_what_is_not_held_is_not_released(world, make, others):
    """The error says who holds the lock, and that one keeps it."""
    others()
    with pytest.raises(NotOwnerError) as caught:
        make().release()
    assert "t[?]" in str(caught.value)
    assert world.store.leases["dislock:{k}"][0] == "other"


def test_an_exception_between_grant_and_return_gives_the_lock_back(world, make, monkeypatch):
    """A signal handler may raise before the caller is known to hold it: nobody could release it."""
    monkeypatch.setattr(reentrant_module, "CallerLease", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make().acquire()
    assert world.store.leases == {}


def test_a_block_that_waits_in_vain_is_not_entered(world, make, others):
    """After its timeout the error says who holds the lock."""
    others()
    with pytest.raises(LockHeldError), make(timeout=5.0):
        raise AssertionError
    assert world.store.leases["dislock:{k}"][0] == "other"


def test_a_block_whose_lock_was_lost_ends_with_the_error(make):
    """Who has gone on in good faith is told at the end."""
    with pytest.raises(LockLostError, match="stolen"), make() as lease:
        lease.lose("stolen")


def test_an_exception_of_the_block_goes_on_with_a_note(make):
    """A loss does not hide what the block itself ended with."""
    with pytest.raises(KeyError) as caught, make() as lease:
        lease.lose("stolen")
        raise KeyError
    assert "stolen" in caught.value.__notes__[0]


def test_a_lock_that_was_lost_is_not_taken_again_from_memory(make):
    """Taking it once more asks the lease, not the count."""
    lock = make()
    lock.acquire()
    lock.lease.lose("stolen")
    with pytest.raises(LockLostError):
        lock.acquire()


def test_extend_renews_or_tells(world, make, others):
    """A lease that the server no longer knows is lost, whatever was believed of it."""
    others()
    with pytest.raises(NotOwnerError):
        make().extend()
    lock = make("mine")
    lock.acquire()
    world.store.extend = lambda *_: True
    lock.extend()
    world.store.extend = lambda *_: False
    with pytest.raises(LockLostError):
        lock.extend()


@pytest.mark.parametrize(
    ("blocking", "timeout"), [(True, -1), (True, float("inf")), (True, float("nan")), (False, 1)]
)
def test_a_timeout_that_means_nothing_is_refused(world, make, blocking, timeout):
    """It is an error of the caller's, and asks nobody."""
    with pytest.raises(SettingsError, match="timeout"):
        make().acquire(blocking, timeout)
    assert world.store.calls == []


@pytest.mark.parametrize("method", ["acquire", "try_acquire"])
def test_only_a_block_can_be_interrupted(make, method):
    """on_lost="raise" needs to know where what it stops has its end."""
    with pytest.raises(SettingsError, match="use one"):
        getattr(make(lock_on_lost="raise"), method)()


def test_a_thread_with_an_event_loop_is_not_blocked(world, make):
    """All coroutines of the loop would stand still, and count as one owner."""

    async def take():
        make().try_acquire()

    with pytest.raises(EventLoopError):
        asyncio.run(take())
    assert world.store.calls == []


def test_async_with_is_answered_with_what_to_do(world, make):
    """Python's own message would tell of a protocol, and not of the thread that owns the lock."""

    async def take():
        async with make():
            pass

    with pytest.raises(EventLoopError, match="to_thread"):
        asyncio.run(take())
    assert world.store.calls == []


def test_a_thread_in_which_trio_runs_is_not_blocked(world, make, monkeypatch):
    """Trio has no loop of asyncio; its tasks would all count as one owner, too."""
    running = [True]

    def current_task():  # as trio.lowlevel.current_task()
        if not running[0]:
            raise RuntimeError("must be called from async context")

    trio = SimpleNamespace(current_task=current_task)
    monkeypatch.setitem(sys.modules, "trio.lowlevel", trio)
    with pytest.raises(EventLoopError, match="to_thread"):
        make().try_acquire()
    assert world.store.calls == []
    running[0] = False
    lock = make()
    assert lock.try_acquire()
    lock.release()


def test_other_terms_are_refused(world, make):
    """A lease that is held is not changed by taking the lock with other options."""
    with make(), pytest.raises(LockTermsError):
        make(lock_limit=3).acquire()
    assert world.store.leases == {}

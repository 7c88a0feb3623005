"""Blocks and stacks of locks, which end in the place or thread in which they were not begun."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack, suppress

import pytest

from celery_dislock.exceptions import LockLostError, StoreError


@pytest.fixture
def lock(make):
    return make()


def block(lock):
    """Stay in a block until the generator is closed."""
    with lock:
        yield


def stack(lock):
    """Stay in a stack."""
    with ExitStack() as stack:
        stack.enter_context(lock)
        yield


@pytest.mark.parametrize("stay", [block, stack])
def test_what_another_thread_closes_ends_where_it_was_begun(world, lock, stay):
    """As when the garbage collector, which runs in any thread, closes a generator."""
    generator = stay(lock)
    next(generator)
    closing = threading.Thread(target=generator.close)
    closing.start()
    closing.join()
    assert world.store.leases == {}
    assert lock.lease is None


@pytest.mark.parametrize("stay", [block, stack])
def test_blocks_of_one_lock_end_in_any_order(world, lock, stay):
    generators = [stay(lock) for _ in range(3)]
    for generator in generators:
        next(generator)
    for generator in generators:
        assert len(world.store.leases) == 1
        generator.close()
    assert world.store.leases == {}


def test_a_stack_that_is_dropped_releases_its_locks(world, lock):
    """As the interpreter drops a block."""
    stack = ExitStack()
    stack.enter_context(lock)
    moved = stack.pop_all()
    del stack
    gc.collect()
    assert world.store.leases
    del moved
    gc.collect()
    assert world.store.leases == {}


def test_a_stack_releases_a_lock_that_it_did_not_take(world, lock):
    lock.acquire()
    with ExitStack() as stack:
        stack.push(lock)
        assert world.store.leases
    assert world.store.leases == {}


def test_a_lock_that_was_not_taken_leaves_nothing_to_a_stack(world, lock):
    world.store.away = True
    with ExitStack() as stack, suppress(StoreError):
        stack.enter_context(lock)
    world.store.away = False
    with lock:
        assert world.store.leases
    assert world.store.leases == {}


def test_a_stack_tells_of_a_loss(world, lock):
    with pytest.raises(LockLostError), ExitStack() as stack:
        stack.enter_context(lock)
        world.store.leases.clear()

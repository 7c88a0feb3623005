"""Locks of asyncio tasks: losses and cancellations, on a store and a clock that the test drives."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

import pytest

from celery_dislock import signals
from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import LockLostError, StoreError
from celery_dislock.locks.asynchronous import AsyncLock
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.locks.runtime import Runtime
from celery_dislock.servers import bridge
from celery_dislock.servers.bridge import current_call

counted = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="asyncio counts cancellations since Python 3.11"
)


@pytest.fixture
def make(world, monkeypatch):
    """Make a lock of the running asyncio task; each round trip lets the event loop go round."""
    numbers = count(1)
    trip_really = world.store._round_trip

    def round_trip(*call):
        trip_really(*call)
        if current_call() is not None:
            bridge.sleep(0)

    monkeypatch.setattr(world.store, "_round_trip", round_trip)
    process = SimpleNamespace(
        store_here=world.store,
        watchdog=world.watchdog,
        host="here",
        pid=42,
        owner_name=lambda start: f"{start}{next(numbers)}",
    )
    runtime = SimpleNamespace(
        process=process,
        lock_names=lambda keys: tuple(f"dislock:{{{key}}}" for key in keys),
        lock=lambda keys, options: world.lock(*keys, **vars(options)),
    )
    runtime.on_loop = functools.partial(Runtime.on_loop, runtime)

    def make(key="k", **options):
        options = {"lock_on_lost": "raise", **options}
        return AsyncLock(
            ReentrantLock([key], TaskOptions(**options), runtime, timeout=None, fair=True), runtime
        )

    return make


@pytest.fixture
def lose(world):
    """Let the watchdog find at its next renewal that somebody has freed the locks."""

    def lose():
        world.store.leases.clear()
        world.run(11)

    return lose


def on_loop(test):
    """Run a coroutine as the test; at its end, nobody has asked to cancel it."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            await test(*args, **kwargs)
            if sys.version_info >= (3, 11):
                assert asyncio.current_task().cancelling() == 0
            await asyncio.sleep(0)  # where a late cancellation is raised
            await asyncio.sleep(0)

        asyncio.run(main())

    return run


async def cancelled(coroutine):
    """Run a coroutine as a task, which must end as cancelled."""
    task = asyncio.create_task(coroutine)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def forever():
    await asyncio.get_running_loop().create_future()


@on_loop
async def test_a_body_whose_lock_is_lost_is_cancelled(make, lose):
    with pytest.raises(LockLostError) as caught:
        async with make():
            lose()
            await forever()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


@on_loop
async def test_a_body_may_be_told_only(make, lose):
    """With on_lost="warn" it runs to its end, and then learns of the loss."""
    ran = []
    with pytest.raises(LockLostError):
        async with make(lock_on_lost="warn"):
            lose()
            await asyncio.sleep(0)
            ran.append(True)
    assert ran


@on_loop
async def test_a_body_that_outlives_the_cap_is_not_cancelled(make, world):
    """As in a thread, its lease says so, and the block ends with the loss."""
    with pytest.raises(LockLostError, match="its cap"):
        async with make(max_renew_times=2) as lease:
            world.run(49)
            assert lease.capped
            assert lease.held
            world.run(10)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not lease.held


@on_loop
async def test_a_lock_that_is_lost_as_its_body_ends_says_so_and_cancels_nothing(make, lose):
    """The event loop does not go round between the loss and the end."""
    with pytest.raises(LockLostError):
        async with make():
            lose()


@on_loop
async def test_a_lock_that_is_gone_when_it_is_released_says_so_and_cancels_nothing(make, world):
    with pytest.raises(LockLostError, match="gone when it was released"):
        async with make():
            world.store.leases.clear()


@on_loop
async def test_a_lock_that_is_lost_as_it_is_entered_runs_no_body(make, world, receiving):
    def lose(lease, **_):
        lease.lose("taken")
        world.watchdog.channel.lost(lease)

    with receiving(signals.lock_acquired, lose), pytest.raises(LockLostError):
        async with make():
            pytest.fail("the body runs")
    assert world.store.leases == {}


@on_loop
async def test_a_body_that_hides_the_cancellation_ends_with_the_loss(make, lose):
    with pytest.raises(LockLostError) as caught:
        async with make():
            lose()
            with suppress(asyncio.CancelledError):
                await forever()
    assert caught.value.__cause__ is None


@on_loop
async def test_an_error_of_the_body_stays_and_gets_a_note(make, lose):
    with pytest.raises(LookupError) as caught:
        async with make():
            lose()
            try:
                await forever()
            finally:
                raise LookupError
    assert "lost" in caught.value.__notes__[0]


async def spin():
    while True:  # noqa: ASYNC110 -- it is always about to go on
        await asyncio.sleep(0)


@pytest.mark.parametrize("waits", [forever, spin])
@pytest.mark.parametrize("first", ["loss", "cancel"])
@on_loop
async def test_a_body_that_is_also_cancelled_from_outside_is_cancelled(make, lose, first, waits):
    async def body():
        async with make():
            soon = asyncio.get_running_loop().call_soon
            if first == "cancel":
                soon(soon, task.cancel)
            soon(lose)  # which has the event loop cancel the task in its next round
            if first == "loss":
                soon(soon, task.cancel)
            await waits()

    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert getattr(task, "cancelling", lambda: 1)() == 1


@pytest.mark.parametrize("ends", ["hidden", "error", "cancelled"])
@on_loop
async def test_a_cancellation_during_the_release_of_a_lost_lock_is_not_hidden(make, lose, ends):
    async def body():
        async with make():
            lose()
            try:
                await forever()
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_soon(task.cancel)
                if ends == "cancelled":
                    raise
                if ends == "error":
                    raise LookupError from None

    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError):
        await task


@counted
@on_loop
async def test_a_timeout_around_the_block_and_one_in_it_keep_to_their_own(make, lose):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout, make():
            timeout.reschedule(0)
            await forever()
    with pytest.raises(LockLostError):
        async with asyncio.timeout(None), make(), asyncio.timeout(None):
            lose()
            await forever()
    # At the same moment the outer one wins, as with two timeouts.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout, make():
            lose()
            timeout.reschedule(0)
            await forever()
    with pytest.raises(LockLostError):
        async with make():
            async with asyncio.timeout(None) as timeout:
                lose()
                timeout.reschedule(0)
                await forever()


@on_loop
async def test_a_task_group_in_the_block_is_cancelled_with_it(make, lose):
    if sys.version_info < (3, 11):
        pytest.skip("task groups came with Python 3.11")
    children = []
    with pytest.raises(LockLostError):
        async with make(), asyncio.TaskGroup() as group:
            children.append(group.create_task(forever()))
            lose()
    assert children[0].cancelled()


@counted
@on_loop
async def test_of_two_blocks_that_lose_their_locks_the_outer_one_says_so(make, lose):
    with pytest.raises(LockLostError) as caught:
        async with make("outer"), make("inner"):
            lose()
            await forever()
    assert caught.value.key == "outer"


@on_loop
async def test_an_inner_block_that_loses_its_lock_leaves_the_outer_one_alone(make, world):
    async with make("outer") as outer:
        with pytest.raises(LockLostError) as caught:
            async with make("inner"):
                del world.store.leases["dislock:{inner}"]
                world.run(11)
                await forever()
        assert caught.value.key == "inner"
        assert outer.held
    assert world.store.leases == {}


@on_loop
async def test_nested_blocks_of_one_lock_lose_it_together(make, lose):
    lock, ends = make(), []
    with pytest.raises(LockLostError):
        async with lock:
            try:
                async with lock:
                    lose()
                    await forever()
            except LockLostError:
                ends.append("inner")
                raise
    assert ends == ["inner"]


@on_loop
async def test_an_outer_lock_that_is_lost_while_an_inner_one_is_taken_or_released(make, world):
    """The inner one is given back, and the outer block tells its own loss."""

    def lose():
        world.store.leases.pop("dislock:{outer}")
        world.run(11)

    for entering in (True, False):
        with pytest.raises(LockLostError) as caught:
            async with make("outer"):
                if entering:
                    asyncio.get_running_loop().call_soon(lose)
                async with make("inner"):
                    if not entering:
                        asyncio.get_running_loop().call_soon(lose)
        assert caught.value.key == "outer"
        world.watchdog.clearing.hurry()
        world.watchdog.tick()
        assert world.store.leases == {}


@on_loop
async def test_a_lock_without_a_block_is_lost_without_a_cancellation(make, lose):
    lock = make()
    await lock.acquire()
    lose()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(LockLostError):
        await lock.extend()
    with pytest.raises(LockLostError):
        await lock.release()
    assert lock.lease is None


@on_loop
async def test_nothing_is_cancelled_after_a_block_that_leaves_its_lock_held(make, lose):
    """The lock was taken before the block, or in it, and is lost after the block."""
    lock = make()
    for before in (True, False):
        if before:
            await lock.acquire()
        async with lock:
            if not before:
                await lock.acquire()
        lose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(LockLostError):
            await lock.release()


@on_loop
async def test_a_block_in_a_lock_that_was_taken_before_is_cancelled(make, lose):
    lock = make()
    await lock.acquire()
    for _ in range(2):
        async with lock:
            pass
    with pytest.raises(LockLostError):
        async with lock:
            lose()
            await forever()
    with pytest.raises(LockLostError):
        await lock.release()


@on_loop
async def test_a_body_that_releases_its_lost_lock_takes_the_cancellation_back(make, lose):
    """Else every timeout around it would count one cancellation too many."""
    lock = make()
    with pytest.raises(LockLostError):
        async with lock:
            lose()
            try:
                await forever()
            finally:
                await lock.release()


@on_loop
async def test_a_release_that_is_cancelled_happens_and_is_told_once(make, world, heard):
    lock = make()

    async def body():
        await lock.acquire()
        asyncio.get_running_loop().call_soon(task.cancel)
        await lock.release()

    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError):
        await task
    world.watchdog.tick()
    assert world.store.leases == {}
    assert [name for name, _ in heard] == ["lock_acquired", "lock_released"]


@on_loop
async def test_a_release_that_fails_does_not_hide_the_cancellation(make, world):
    async def body():
        async with make():
            world.store.away = True
            asyncio.current_task().cancel()
            await forever()

    await cancelled(body())
    world.store.away = False
    world.run(2)
    assert world.store.leases == {}


@on_loop
async def test_an_acquisition_that_is_cancelled_is_given_up_at_once(make, world):
    """The watchdog does not wait for its usual interval."""

    async def body():
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await make().acquire()

    await cancelled(body())
    world.watchdog.tick()
    assert world.store.leases == {}


def test_a_lease_of_an_event_loop_that_was_closed_is_renewed_no_more(make, world):
    """Its task has not ended, and never will."""
    loop = asyncio.new_event_loop()

    async def body():
        async with make():
            await forever()

    task = loop.create_task(body())
    for _ in range(5):
        loop.run_until_complete(asyncio.sleep(0))
    assert len(world.watchdog) == 1
    loop.close()
    world.run(11)
    assert len(world.watchdog) == 0
    with suppress(RuntimeError):  # no task runs there that could leave its block
        task.get_coro().close()
    task._log_destroy_pending = False


@on_loop
async def test_an_error_of_the_lock_server_is_the_caller_s(make, world):
    world.store.away = True
    with pytest.raises(StoreError):
        await make().acquire()


def test_pyright_takes_it_for_an_asynchronous_context_manager():
    """It tells what ``async def`` returns from other coroutines, as AsyncExitStack's types do."""
    assert inspect.iscoroutinefunction(AsyncLock.__aenter__)

"""Locks of asyncio tasks: losses and cancellations; time is the test's."""

import asyncio
import functools
import inspect
import sys
from contextlib import suppress

import pytest

from celery_dislock import AsyncLock, LockLostError, scripts
from tests.holding import name_of
from tests.integration.coroutines import on_loop, some_rounds
from tests.programs import run_code

counted = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="asyncio counts cancellations since Python 3.11"
)


@pytest.fixture
def make(driven):
    """Make a lock of the running asyncio task."""
    return driven.dislock.async_lock


async def cancelled(coroutine):
    """Run a coroutine, or a task that does: it must end as cancelled."""
    task = asyncio.ensure_future(coroutine)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def forever():
    await asyncio.get_running_loop().create_future()


@on_loop
async def test_a_body_whose_lock_is_lost_is_cancelled(make, driven):
    """It ends with LockLostError, caused by the cancellation."""
    with pytest.raises(LockLostError) as caught:
        async with make("k"):
            driven.lose("k")
            await forever()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


@on_loop
async def test_a_body_may_be_told_only(make, driven):
    """With on_lost="warn" it runs to its end, and then learns of the loss."""
    ran = []
    with pytest.raises(LockLostError):
        async with make("k", on_lost="warn"):
            driven.lose("k")
            await asyncio.sleep(0)
            ran.append(True)
    assert ran


@on_loop
async def test_a_body_that_outlives_the_cap_is_not_cancelled(make, driven):
    """As in a thread, its lease says so, and the block ends with the loss."""
    with pytest.raises(LockLostError, match="its cap"):
        async with make("k", max_renew_times=2) as lease:
            driven.advance(49)
            assert lease.capped
            assert lease.held
            driven.advance(10)
            await some_rounds()
            assert not lease.held


@pytest.mark.parametrize(
    ("is_told", "words"), [(True, "no longer has it"), (False, "gone when it was released")]
)
@on_loop
async def test_a_lock_that_is_lost_as_its_body_ends_says_so_and_cancels_nothing(
    make, driven, is_told, words
):
    """Told of it or not, the event loop does not go round between the loss and the end."""
    with pytest.raises(LockLostError, match=words):
        async with make("k"):
            driven.lose("k") if is_told else driven.client.delete(name_of("k"))


@on_loop
async def test_a_lock_that_is_lost_as_it_is_entered_runs_no_body(make, driven, receive):
    """A receiver of the signal may have lost it before the body begins."""
    receive("lock_acquired", lambda **_: driven.lose("k"))
    with pytest.raises(LockLostError):
        async with make("k"):
            pytest.fail("the body runs")
    driven.assert_free("k")


@on_loop
async def test_a_body_that_hides_the_cancellation_ends_with_the_loss(make, driven):
    """It may swallow CancelledError, and still cannot pass for a body that held its lock."""
    with pytest.raises(LockLostError) as caught:
        async with make("k"):
            driven.lose("k")
            with suppress(asyncio.CancelledError):
                await forever()
    assert caught.value.__cause__ is None


@on_loop
async def test_an_error_of_the_body_stays_and_gets_a_note(make, driven):
    """What the body raises is not replaced by the loss, which is told beside it."""
    with pytest.raises(LookupError) as caught:
        async with make("k"):
            driven.lose("k")
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
async def test_a_body_that_is_also_cancelled_from_outside_is_cancelled(make, driven, first, waits):
    """Whichever comes first, the outer cancellation wins and is counted once."""

    async def body():
        async with make("k"):
            soon = asyncio.get_running_loop().call_soon
            if first == "cancel":
                soon(soon, task.cancel)
            soon(driven.lose, "k")  # which has the event loop cancel the task in its next round
            if first == "loss":
                soon(soon, task.cancel)
            await waits()

    task = asyncio.create_task(body())
    await cancelled(task)
    assert getattr(task, "cancelling", lambda: 1)() == 1


@pytest.mark.parametrize("ends", ["hidden", "error", "cancelled"])
@on_loop
async def test_a_cancellation_during_the_release_of_a_lost_lock_is_not_hidden(make, driven, ends):
    """However the body ended, who cancels the task sees it cancelled."""

    async def body():
        async with make("k"):
            driven.lose("k")
            try:
                await forever()
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
                if ends == "cancelled":
                    raise
                if ends == "error":
                    raise LookupError from None

    await cancelled(body())


@counted
@on_loop
async def test_a_timeout_around_the_block_and_one_in_it_keep_to_their_own(make, driven):
    """A timeout raises TimeoutError where it stands, and a loss LockLostError at its block."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout, make("k"):
            timeout.reschedule(0)
            await forever()
    with pytest.raises(LockLostError):
        async with asyncio.timeout(None), make("k"), asyncio.timeout(None):
            driven.lose("k")
            await forever()
    # At the same moment the outer one wins, as with two timeouts.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout, make("k"):
            driven.lose("k")
            timeout.reschedule(0)
            await forever()
    with pytest.raises(LockLostError):
        async with make("k"):
            async with asyncio.timeout(None) as timeout:
                driven.lose("k")
                timeout.reschedule(0)
                await forever()


@on_loop
async def test_a_task_group_in_the_block_is_cancelled_with_it(make, driven):
    """Its children do not outlive the lock."""
    if sys.version_info < (3, 11):
        pytest.skip("task groups came with Python 3.11")
    children = []
    with pytest.raises(LockLostError):
        async with make("k"), asyncio.TaskGroup() as group:
            children.append(group.create_task(forever()))
            driven.lose("k")
    assert children[0].cancelled()


@counted
@on_loop
async def test_of_two_blocks_that_lose_their_locks_the_outer_one_says_so(make, driven):
    """One cancellation ends both, and the outer error replaces the inner one."""
    with pytest.raises(LockLostError) as caught:
        async with make("outer"), make("inner"):
            driven.lose(["inner", "outer"])
            await forever()
    assert caught.value.key == "outer"


@on_loop
async def test_an_inner_block_that_loses_its_lock_leaves_the_outer_one_alone(make, driven):
    """Its body goes on after the error was caught, and its lock stays held."""
    async with make("outer") as outer:
        with pytest.raises(LockLostError) as caught:
            async with make("inner"):
                driven.lose("inner")
                await forever()
        assert caught.value.key == "inner"
        assert outer.held
    driven.assert_free(["outer", "inner"])


@on_loop
async def test_nested_blocks_of_one_lock_lose_it_together(make, driven):
    """There is one lease, so each block ends with the loss."""
    lock, ends = make("k"), []
    with pytest.raises(LockLostError):
        async with lock:
            try:
                async with lock:
                    driven.lose("k")
                    await forever()
            except LockLostError:
                ends.append("inner")
                raise
    assert ends == ["inner"]


@pytest.mark.parametrize("entering", [True, False])
@on_loop
async def test_an_outer_lock_that_is_lost_while_an_inner_one_is_taken_or_released(
    make, driven, entering
):
    """The inner one is given back, and the outer block tells its own loss."""
    lose = functools.partial(asyncio.get_running_loop().call_soon, driven.lose, "outer")
    with pytest.raises(LockLostError) as caught:
        async with make("outer"):
            if entering:
                lose()
            async with make("inner"):
                if not entering:
                    lose()
    assert caught.value.key == "outer"
    driven.advance(1.1)
    driven.assert_free("inner")


@on_loop
async def test_a_lock_without_a_block_is_lost_without_a_cancellation(make, driven):
    """Nothing says where its body ends, so the next call tells."""
    lock = make("k")
    await lock.acquire()
    driven.lose("k")
    await some_rounds()
    with pytest.raises(LockLostError):
        await lock.extend()
    with pytest.raises(LockLostError):
        await lock.release()
    assert lock.lease is None


@on_loop
async def test_nothing_is_cancelled_after_a_block_that_leaves_its_lock_held(make, driven):
    """The lock was taken before the block, or in it, and is lost after the block."""
    lock = make("k")
    for before in (True, False):
        if before:
            await lock.acquire()
        async with lock:
            if not before:
                await lock.acquire()
        driven.lose("k")
        await some_rounds()
        with pytest.raises(LockLostError):
            await lock.release()


@on_loop
async def test_a_block_in_a_lock_that_was_taken_before_is_cancelled(make, driven):
    """The block has a body to cancel, and the release after it tells of the loss, too."""
    lock = make("k")
    await lock.acquire()
    for _ in range(2):
        async with lock:
            pass
    with pytest.raises(LockLostError):
        async with lock:
            driven.lose("k")
            await forever()
    with pytest.raises(LockLostError):
        await lock.release()


@on_loop
async def test_a_body_that_releases_its_lost_lock_takes_the_cancellation_back(make, driven):
    """Else every timeout around it would count one cancellation too many."""
    lock = make("k")
    with pytest.raises(LockLostError):
        async with lock:
            driven.lose("k")
            try:
                await forever()
            finally:
                await lock.release()


@on_loop
async def test_a_release_that_is_cancelled_happens_and_is_told_once(make, driven, heard):
    """It is shielded, and the caller is cancelled all the same."""
    lock = make("k")

    async def body():
        await lock.acquire()
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await lock.release()

    await cancelled(body())
    driven.advance(0)
    driven.assert_free("k")
    assert [name for name, _ in heard] == ["lock_acquired", "lock_released"]


@on_loop
async def test_a_release_that_fails_does_not_hide_the_cancellation(make, driven):
    """The watchdog sends the release again."""

    async def body():
        async with make("k"):
            driven.fault(scripts.RELEASE, "-ERR not now")
            asyncio.current_task().cancel()
            await forever()

    await cancelled(body())
    driven.proxy.forget_faults()
    driven.advance(2)
    driven.assert_free("k")


@on_loop
async def test_an_acquisition_that_is_cancelled_is_given_up_at_once(make, driven):
    """The watchdog does not wait for its usual interval."""

    async def body():
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await make("k").acquire()

    await cancelled(body())
    driven.advance(0)
    driven.assert_free("k")


CLOSED = """
import asyncio, logging, os
from tests.integration.driven import driving

logging.disable()

async def body(lock, entered):
    async with lock:
        entered.set()
        await asyncio.Event().wait()

with driving() as driven:
    loop, entered = asyncio.new_event_loop(), asyncio.Event()
    task = loop.create_task(body(driven.dislock.async_lock("k"), entered))
    loop.run_until_complete(entered.wait())
    loop.close()
    driven.advance(35)
    driven.assert_free("k")
    print("free", flush=True)
    os._exit(0)
"""


def test_a_lease_of_an_event_loop_that_was_closed_is_renewed_no_more():
    """Its task has not ended, and never will."""
    done = run_code(CLOSED)
    assert (done.stdout, done.stderr) == ("free\n", "")


def test_pyright_takes_it_for_an_asynchronous_context_manager():
    """It tells what ``async def`` returns from other coroutines, as AsyncExitStack's types do."""
    assert inspect.iscoroutinefunction(AsyncLock.__aenter__)


@on_loop
async def test_a_coroutine_says_what_it_has_spent(make):
    """It counts in place of what was said before, and the event loop goes on."""
    async with make("k", rate="100/m", cost=60) as lease:
        assert await lease.async_spent(20)
    async with make("k", rate="100/m", cost=80, timeout=0):
        pass

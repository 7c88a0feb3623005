"""Locks of asyncio tasks on a real server, also in ways that they are not made for."""

import asyncio
import contextlib
import contextvars
import gc
import os
import sys
import threading
import traceback
import weakref
from functools import partial

import pytest
from celery import Celery
from kombu import Producer

from celery_dislock import (
    Dislock,
    LockHeldError,
    LockLostError,
    NotOwnerError,
    SettingsError,
    SingletonTask,
    StoreError,
    signals,
)
from celery_dislock.exceptions import LockTermsError
from tests.holding import wait_for
from tests.integration.coroutines import on_loop
from tests.pace import LEASE
from tests.programs import run as run_program
from tests.programs import run_code

LIMIT = 30.0  # seconds


@pytest.fixture
def dislock(redis_url):
    with Dislock.from_url(redis_url) as dislock:
        yield dislock


def run(function):
    """Run a coroutine function on a new event loop."""
    return asyncio.run(asyncio.wait_for(function(), LIMIT))


async def use(lock):
    """Take and release a lock."""
    async with lock as lease:
        assert lease.held
        return lease


class TestTasks:
    @on_loop
    async def test_tasks_exclude_each_other_and_a_task_does_not_exclude_itself(self, dislock):
        """The owner is the asyncio task, whose second block has the lease of its first."""
        inside, order = [], []

        async def body(lock):
            async with lock as lease:
                inside.append(lease)
                assert len(inside) == 1
                async with lock as again:
                    assert again is lease
                await asyncio.sleep(0)
                order.append(lease.token)
                inside.clear()

        lock = dislock.async_lock("k")
        await asyncio.gather(*(body(lock) for _ in range(20)))
        assert await lock.holders() == []
        assert lock.lease is None
        assert order == sorted(set(order))
        assert len(order) == 20

    def test_threads_and_tasks_stand_in_one_line(self, redis_url):
        """A lock that a thread holds is held for coroutines, in the same process, too."""

        async def main():
            async with Dislock.from_url(redis_url) as dislock:
                with pytest.raises(LockHeldError):
                    async with dislock.async_lock("k", timeout=0.05):
                        pytest.fail("two have it")
                assert not await dislock.async_lock("k").try_acquire()
                with pytest.raises(SettingsError, match="use one"):
                    await dislock.async_lock("k", on_lost="raise").acquire()

        with Dislock.from_url(redis_url) as other, other.lock("k"):
            run(main)

    @on_loop
    async def test_a_task_that_is_not_the_owner_is_told_who_is(self, dislock):
        """Before Python 3.12 wait_for() takes the lock in a task of its own, which ends."""
        lock = dislock.async_lock("k")
        assert await asyncio.create_task(lock.acquire(), name="another")
        with pytest.raises(NotOwnerError, match=r"not held here, but by .*, another on "):
            await lock.release()
        await asyncio.to_thread(dislock.lock_of("k").free)
        with pytest.raises(NotOwnerError, match=r"is not held$"):
            await lock.release()

    @on_loop
    async def test_a_task_of_asyncio_is_not_taken_for_one_of_celery(self, dislock):
        """The error of a stronger second lease names the asyncio task."""
        async with dislock.async_lock("k", mode="shared"):
            with pytest.raises(LockTermsError, match="by this very asyncio task with mode"):
                await dislock.async_lock("k").try_acquire()


class TestLoops:
    def test_one_loop_after_the_other(self, dislock, redis_client):
        """A Dislock and its lock serve each loop; connections end with theirs, without aclose()."""

        def connections():
            return len(redis_client.client_list())

        lock = dislock.async_lock("k")
        before = connections()
        for _ in range(3):
            run(lambda: use(lock))
        wait_for(lambda: connections() <= before + 2, "the end of connections")

    def test_a_loop_that_was_closed_by_hand_is_forgotten(self, dislock, monkeypatch):
        """Nobody shut down its generators, and Python complains of its connections."""
        monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what it is told
        lock = dislock.async_lock("k")
        loop = asyncio.new_event_loop()
        loop.run_until_complete(use(lock))
        loop.close()
        run(lambda: use(lock))
        known = weakref.ref(loop)
        del loop
        gc.collect()
        assert known() is None

    def test_loops_in_several_threads(self, dislock):
        """Their tasks exclude each other, with connections of their own."""
        lock = dislock.async_lock("k", timeout=LIMIT)
        inside, held = [], []

        async def body():
            for _ in range(10):
                async with lock as lease:
                    inside.append(lease)
                    await asyncio.sleep(0)
                    assert inside == [lease]
                    inside.clear()
                    held.append(lease.token)

        threads = [threading.Thread(target=run, args=(body,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert held == sorted(set(held))
        assert len(held) == 30

    def test_a_lock_that_is_held_in_another_loop(self, dislock):
        """It is waited for like any other owner's."""
        lock = dislock.async_lock("k", timeout=0)
        loop = asyncio.new_event_loop()

        async def main():
            assert await lock.acquire()
            assert not await asyncio.to_thread(run, lock.try_acquire)
            await lock.release()
            assert await asyncio.to_thread(run, lock.try_acquire)
            await dislock.aclose()

        loop.run_until_complete(main())
        loop.close()

    @on_loop
    async def test_a_lock_that_is_held_while_all_is_closed(self, dislock, redis_client):
        """It is released all the same, and its connection is not kept."""
        before = len(redis_client.client_list())
        async with dislock.async_lock("k"):
            await dislock.aclose()
        assert not redis_client.exists("dislock:{k}")
        ended = partial(wait_for, lambda: len(redis_client.client_list()) == before)
        await asyncio.to_thread(ended, "the end of connections")

    def test_uvloop(self, dislock):
        """Its loop runs the locks as that of asyncio does."""
        uvloop = pytest.importorskip("uvloop")

        async def main():
            lock = dislock.async_lock("k", timeout=LIMIT)
            await asyncio.gather(*(use(lock) for _ in range(20)))
            await dislock.aclose()

        loop = uvloop.new_event_loop()
        loop.run_until_complete(main())
        loop.close()

    def test_anyio_on_asyncio(self, dislock):
        """A task group's tasks are owners; a cancelled scope leaves no lock.

        Such a scope, as those of Starlette, cancels each wait in it, so also that for the release.
        """
        anyio = pytest.importorskip("anyio")

        async def main():
            lock = dislock.async_lock("k", timeout=LIMIT)
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(use, lock)
            with anyio.CancelScope() as around:
                async with lock:
                    with anyio.move_on_after(0.05) as scope:
                        await asyncio.shield(asyncio.create_task(use(lock)))
                    assert scope.cancelled_caught
                    around.cancel()
                    await anyio.sleep_forever()
            assert around.cancelled_caught
            await use(lock)
            with pytest.raises(LockLostError), anyio.fail_after(LIMIT):
                async with dislock.async_lock("k", watchdog_timeout=LEASE):
                    await asyncio.to_thread(dislock.lock_of("k").free)
                    await anyio.sleep_forever()
            await use(lock)

        anyio.run(main, backend="asyncio")

    def test_trio_is_refused(self, dislock):
        """The message says what to do there."""
        trio = pytest.importorskip("trio")
        with pytest.raises(RuntimeError, match=r"trio\.to_thread\.run_sync"):
            trio.run(use, dislock.async_lock("k"))

    @on_loop
    async def test_a_callback_of_a_loop_is_refused(self, dislock):
        """No task runs there that could own a lock."""
        told = []
        coroutine = use(dislock.async_lock("k"))

        def call():
            with pytest.raises(RuntimeError, match="tasks of asyncio") as refused:
                coroutine.send(None)
            told.append(refused)

        asyncio.get_running_loop().call_soon(call)
        await asyncio.sleep(0.01)
        assert told


def fork(act):
    """Run a function in a forked child, which ends with 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException:  # noqa: BLE001 -- this process ends here
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


class TestForks:
    def test_a_child_has_its_own(self, redis_url, redis_client):
        """A child does not hold its parent's lock, and takes others over connections of its own."""

        async def child():
            lock = dislock.async_lock("k", timeout=0)
            assert lock.lease is None
            assert not await lock.try_acquire()
            await use(dislock.async_lock("other"))

        async def parent():
            async with dislock.async_lock("k"):
                pid = fork(lambda: run(child))
                _, status = await asyncio.to_thread(os.waitpid, pid, 0)
                assert status == 0
                assert (await dislock.async_lock("k").holders())[0].who
            await dislock.aclose()

        dislock = Dislock.from_url(redis_url)
        run(parent)


class TestBlocking:
    def test_a_lock_of_the_thread_that_runs_the_loop_is_not_waited_for(self, dislock):
        """As in the body of a task that calls asyncio.run(): it would wait for itself."""
        with dislock.lock("k"), pytest.raises(LockHeldError, match="this very thread"):
            run(lambda: use(dislock.async_lock("k")))

    def test_with_on_an_async_lock_is_refused(self, dislock):
        """It would block the loop; the error says what to write."""
        assert repr(dislock.async_lock("k")) == "<AsyncLock 'k'>"
        with pytest.raises(TypeError, match="async with"), dislock.async_lock("k"):
            pytest.fail("it was taken")

    @pytest.mark.parametrize("where", ["in the loop", "in a thread"])
    @on_loop
    async def test_a_lease_that_is_released_directly(self, dislock, caplog, where):
        """Its connections can not be used there: the watchdog releases it, which is logged."""
        async with dislock.async_lock("k") as lease:
            other = await dislock.async_lock("other").try_acquire()
            for one in (other, lease):  # the second finds no idle connection
                if where == "in a thread":
                    await asyncio.to_thread(one.release)
                else:
                    one.release()
                assert not one.held
        await use(dislock.async_lock("other", timeout=LIMIT))
        await use(dislock.async_lock("k", timeout=LIMIT))
        assert "await the async lock's own methods" in caplog.text

    def test_without_greenlet_the_command_is_named(self, redis_url):
        """No async lock is made, and blocking ones work."""
        program = f"""
import sys
sys.modules["greenlet"] = None
from celery_dislock import Dislock
with Dislock.from_url({redis_url!r}) as dislock:
    with dislock.lock("k"):
        pass
    try:
        dislock.async_lock("k")
    except ImportError as exc:
        assert "pip install 'celery-dislock[asyncio]'" in str(exc), exc
    else:
        raise AssertionError
"""
        run_code(program)


class TestOwners:
    @pytest.mark.parametrize("how", ["never closed", "dropped"])
    @on_loop
    async def test_a_generator_that_is_not_closed(self, dislock, caplog, how):
        """Its lock ends with its task at the latest; the loop closes elsewhere what is garbage."""
        kept = []

        async def numbers():
            timeout = LEASE if how == "never closed" else 2 * LIMIT
            async with dislock.async_lock("k", watchdog_timeout=timeout):
                yield 1

        async def first():
            generator = numbers()
            await generator.__anext__()
            if how == "never closed":
                kept.append(generator)
                return
            del generator
            gc.collect()
            await asyncio.sleep(0.05)

        await asyncio.create_task(first())
        await use(dislock.async_lock("k", timeout=LIMIT))
        assert how == "never closed" or "await the async lock's own methods" in caplog.text

    @on_loop
    async def test_a_generator_with_a_stack_that_is_closed(self, dislock):
        """AsyncExitStack knows no statement: the lock of the task that closes it is released."""

        async def numbers(lock):
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(lock)
                yield 1

        lock = dislock.async_lock("k")
        async with contextlib.aclosing(numbers(lock)) as generator:
            await generator.__anext__()
        assert await lock.holders() == []

    @pytest.mark.parametrize("through", ["block", "stack"])
    def test_a_task_that_is_garbage(self, dislock, caplog, through):
        """Its block ends outside of any task, and the watchdog releases its lock.

        The block of the task that runs just then goes on.
        """

        async def body():
            lock = dislock.async_lock("k", mode="shared")
            async with lock if through == "block" else contextlib.AsyncExitStack() as stack:
                if through == "stack":
                    await stack.enter_async_context(lock)
                inside.set()
                await asyncio.get_running_loop().create_future()

        async def main():
            nonlocal inside
            inside = asyncio.Event()
            task = asyncio.ensure_future(body())
            await inside.wait()
            async with dislock.async_lock("k", mode="shared") as lease:
                del task
                gc.collect()
                lock = dislock.async_lock("k")
                while len(await lock.holders()) > 1:  # noqa: ASYNC110 -- nothing tells of it
                    await asyncio.sleep(0.01)
                assert lease.held
                assert lock.lease is lease
            assert await lock.holders() == []

        inside = None
        run(main)
        assert "'k'" in caplog.text


class TestSurroundings:
    @on_loop
    async def test_a_receiver_that_takes_blocking_locks(self, dislock, receive):
        """A receiver that runs for a coroutine waits as the coroutine does; the loop goes on."""
        order = []

        def receiver(**_kwargs):
            signals.lock_acquired.disconnect(receiver)
            with dislock.lock("log", timeout=LIMIT):
                order.append("received")

        async def hold(held):
            async with dislock.async_lock("log"):
                held.set()
                await asyncio.sleep(0.1)
                order.append("held")

        held = asyncio.Event()
        holder = asyncio.create_task(hold(held))
        await held.wait()
        receive("lock_acquired", receiver)
        await use(dislock.async_lock("k"))
        await holder
        assert order == ["held", "received"]

    def test_context_variables(self, dislock, receive):
        """What runs for a coroutine sees its context, and changes it."""
        variable, seen = contextvars.ContextVar("variable", default=0), []

        def receiver(**_kwargs):
            seen.append(variable.get())
            variable.set(variable.get() + 10)

        async def body(number):
            variable.set(number)
            await use(dislock.async_lock("k", timeout=LIMIT))
            return variable.get()

        async def main():
            return await asyncio.gather(*(body(number) for number in range(5)))

        receive("lock_acquired", receiver)
        assert run(main) == [10, 11, 12, 13, 14]
        assert sorted(seen) == [0, 1, 2, 3, 4]

    def test_a_parked_task_gets_its_turn_from_a_coroutine(self, driven, monkeypatch):
        """The release of an async lock publishes it, in a thread: the loop goes on."""
        app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        dislock = Dislock(app)
        driven.use(app)
        publish, threads = Producer.publish, []

        def publishing(*args, **options):
            threads.append(threading.current_thread())
            return publish(*args, **options)

        @app.task(base=SingletonTask, lock_key="k", lock_on_conflict="queue", shared=False)
        def export(): ...

        async def main():
            async with dislock.async_lock("k"):
                sent = export.delay()
                assert driven.run_parked() == 1
                monkeypatch.setattr(Producer, "publish", publishing)
            return sent

        sent = run(main)
        assert threads
        assert threading.main_thread() not in threads
        assert driven.run_parked() == 1
        assert sent.state == "SUCCESS"


PROGRAM = """
import asyncio, gc
from celery_dislock import Dislock

dislock = Dislock.from_url({url!r})

async def use(lock):
    async with lock:
        await asyncio.sleep(0)

async def main():
    lock = dislock.async_lock("k", timeout=30)
    await asyncio.gather(*(use(lock) for _ in range(5)))
    {end}

asyncio.run(main())
gc.collect()
dislock.close()
"""


@pytest.mark.extra
@pytest.mark.parametrize("end", ["await dislock.aclose()", ""], ids=["aclose", "nothing"])
def test_nothing_is_left_open_at_the_end_of_a_loop(redis_url, end):
    """As Python's development mode tells it, with warnings as errors."""
    program = PROGRAM.format(url=redis_url, end=end)
    ended = run_program(sys.executable, "-W", "error", "-X", "dev", "-c", program)
    assert "Warning" not in ended.stderr


@pytest.mark.parametrize("timeout", [0.5, None])
def test_a_server_that_does_not_answer_is_given_up_in_time(own_redis_server, timeout):
    """Also after replies that came in time; without a time it is waited for."""
    options = {"socket_timeout": timeout}

    async def main():
        async with Dislock.from_url(own_redis_server.url, transport_options=options) as dislock:
            lock = dislock.async_lock("k")
            for _ in range(3):
                await lock.acquire()
                await lock.release()
            own_redis_server.pause()
            try:
                with pytest.raises(asyncio.TimeoutError if timeout is None else StoreError):
                    await asyncio.wait_for(lock.acquire(), 1.0 if timeout is None else 30.0)
            finally:
                own_redis_server.resume()

    asyncio.run(main())

"""Who may take a lock again: code inside the block that holds it, and nobody else in its thread."""

import asyncio
import gc
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import LockHeldError, LockLostError, NotOwnerError
from celery_dislock.locks.callers import current_caller
from tests.declaring import declare
from tests.holding import PATIENCE, name_of, wait_for
from tests.pace import LEASE
from tests.programs import run

ROOT = Path(__file__).parents[2]
KEY = "export:7"
NAME = name_of(KEY)
LONG = 60.0  # seconds: no lease of these tests runs out by itself
MANY = 12  # requests at a time


@pytest.fixture
def dislock(redis_url):
    with Dislock.from_url(redis_url, watchdog_timeout=LONG) as dislock:
        yield dislock


@pytest.fixture
def lock(dislock):
    return dislock.lock(KEY)


@pytest.fixture
def pool():
    """A pool of one thread, which runs one job after the other."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield lambda job, *args: pool.submit(job, *args).result(PATIENCE)


class Inside:
    """Counts who is inside at a time."""

    def __init__(self):
        self.now = self.most = self.total = 0

    def enter(self):
        self.now += 1
        self.total += 1
        self.most = max(self.most, self.now)

    def leave(self):
        self.now -= 1

    @property
    def counted(self):
        return self.most, self.total


@pytest.fixture
def inside():
    return Inside()


def block(lock):
    """Stay in a block until the generator is closed."""
    with lock as lease:
        yield lease


def test_a_thread_that_has_released_keeps_nothing(dislock, lock):
    """It would keep a record of each lock it ever had."""
    before = len(current_caller().leases)  # other tests leave some
    for nth in range(3):
        with lock, dislock.lock(f"other:{nth}"):
            assert len(current_caller().leases) == before + 2
    lock.acquire()
    lock.release()
    assert len(current_caller().leases) == before


class TestFrameworks:
    """They enter a block in one thread, leave it in another, and serve others in between."""

    @pytest.fixture
    def send(self):
        """Send requests, each while those before it are served; return their statuses."""
        httpx = pytest.importorskip("httpx")

        async def send(api):
            transport = httpx.ASGITransport(app=api)
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                replies = []
                for _ in range(MANY):
                    replies.append(asyncio.create_task(client.get("/", timeout=PATIENCE)))
                    await asyncio.sleep(0.01)
                return {reply.status_code for reply in await asyncio.gather(*replies)}

        return lambda api: asyncio.run(send(api))

    def test_a_dependency_of_fastapi_lets_one_request_in_at_a_time(self, lock, inside, send):
        """A sync one with ``yield``, around a sync endpoint."""
        fastapi = pytest.importorskip("fastapi")
        api = fastapi.FastAPI()

        def alone():
            with lock:
                inside.enter()
                yield
                inside.leave()

        @api.get("/", dependencies=[fastapi.Depends(alone)])
        async def endpoint():
            await asyncio.sleep(0.03)

        assert send(api) == {200}
        assert inside.counted == (1, MANY)

    def test_a_stream_of_starlette_is_written_by_one_at_a_time(self, lock, inside, send):
        """Each step of a sync generator runs in any thread, in a copy of the context."""
        applications = pytest.importorskip("starlette.applications")
        from starlette.responses import StreamingResponse
        from starlette.routing import Route

        def rows():
            with lock:
                inside.enter()
                for row in range(5):
                    yield str(row)
                    time.sleep(0.005)
                inside.leave()

        async def endpoint(_request):
            return StreamingResponse(rows())

        assert send(applications.Starlette(routes=[Route("/", endpoint)])) == {200}
        assert inside.counted == (1, MANY)

    @pytest.mark.parametrize("server", ["wsgi", "asgi"])
    def test_a_middleware_of_django_holds_the_lock_for_its_view(self, redis_url, server):
        """The view is called inside the block, also by way of an event loop."""
        pytest.importorskip("django")
        program = ["-W", "ignore", "-m", "tests.integration.reentry_django", redis_url, server]
        assert run(sys.executable, *program, cwd=ROOT).stdout == "inside"


@pytest.mark.parametrize("call", ["to_thread", "run_in_executor"])
def test_coroutines_that_take_and_release_in_threads_exclude_each_other(dislock, inside, call):
    """Two calls of one coroutine come to any threads, in copies of its context or in none."""

    async def body(thread):
        lock = dislock.lock(KEY)
        assert await thread(lock.acquire, True, PATIENCE)
        inside.enter()
        await asyncio.sleep(0.002)
        inside.leave()
        await thread(lock.release)

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2 * MANY))
        in_executor = partial(loop.run_in_executor, None)
        thread = asyncio.to_thread if call == "to_thread" else in_executor
        await asyncio.gather(*(body(thread) for _ in range(MANY)))

    asyncio.run(main())
    assert inside.counted == (1, MANY)


def futures():
    pool = ThreadPoolExecutor(max_workers=1)
    return lambda job, *args: pool.submit(job, *args).result(PATIENCE), pool.shutdown


def multiprocessing():
    pool = ThreadPool(1)
    return lambda job, *args: pool.apply(job, args), pool.terminate


WAYS = {
    "acquire": lambda lock: lock.acquire,
    "enter": lambda lock: lock.__enter__,
    "generator": lambda lock: partial(next, block(lock)),
}


@pytest.mark.parametrize("make", [futures, multiprocessing])
@pytest.mark.parametrize("way", WAYS)
def test_a_job_of_a_pool_that_leaves_its_lock_held_leaves_it_to_no_other_job(
    dislock, lock, make, way
):
    """Of the same thread, without a context of its own; the lock object releases it anywhere."""
    pool, end = make()
    try:
        leaves_its_lock_held(dislock, lock, pool, way)
    finally:
        end()


def leaves_its_lock_held(dislock, lock, pool, way):
    enter = WAYS[way](lock)
    pool(enter)
    assert not pool(dislock.lock(KEY).try_acquire)
    assert not pool(dislock.lock(KEY).acquire, False)
    del enter
    if way == "acquire":
        lock.release()
    elif way == "enter":
        lock.__exit__(None, None, None)
    gc.collect()  # closes the generator
    assert pool(takes_twice, dislock)


def takes_twice(dislock):
    """Take the lock in a block, and again in a function inside it."""
    with wrapped(dislock.lock(KEY, timeout=0)) as lease:
        return dislock.lock(KEY).try_acquire() is lease


@contextmanager
def wrapped(lock):
    with lock as lease:
        yield lease


def stacked(lock):
    """Enter a stack, and return."""
    stack = ExitStack()
    stack.enter_context(lock)
    return stack


def delegated(lock):
    """Begin a generator that the caller is inside of."""
    stack = ExitStack()
    generator = block(lock)
    stack.callback(generator.close)
    next(generator)
    return stack


def acquired(lock):
    """Acquire it in a function that returns."""
    stack = ExitStack()
    lock.acquire()
    stack.callback(lock.release)
    return stack


INSIDE = {
    "block": lambda lock: lock,
    "wrapper": wrapped,
    "stack": stacked,
    "generator": delegated,
    "acquire": acquired,
}


@pytest.mark.parametrize("way", INSIDE)
@pytest.mark.parametrize("where", ["here", "job", "thread", "context"])
def test_code_inside_a_block_may_take_its_lock_again(dislock, lock, pool, way, where):
    """However the block was entered, and in a copy of its context, too."""

    def inner():
        with dislock.lock(KEY, timeout=0) as lease:
            return lease

    def outer():
        with INSIDE[way](lock):
            lease = dislock.lock(KEY).lease
            assert inner() is lease
            assert copy_context().run(inner) is lease
            assert lease.held
        assert not lease.held
        return True

    def in_a_thread(call):
        ended = []
        thread = threading.Thread(target=lambda: ended.append(call()))
        thread.start()
        thread.join()
        return ended[0]

    run = {"here": lambda call: call(), "job": pool, "thread": in_a_thread}
    assert run.get(where, copy_context().run)(outer)


@pytest.fixture
def held(lock):
    with lock as lease:
        yield lease


def test_in_the_body_of_a_task_a_list_of_its_keys_is_its_lock(shop):
    """The task takes them narrow before wide, and a list takes them by name."""

    def body(t):
        with shop.dislock.lock(["api", "tenant:7"]) as lease:
            return lease is task.lease

    task = declare(shop.app, body, lock_key=["tenant:<t>", "api"], lock_on_conflict="queue")
    shop.app.finalize()
    assert shop.run(task, "2", 7).get(timeout=1) is True


@pytest.mark.parametrize("_again", range(2))
def test_a_test_is_inside_the_block_of_its_fixture(dislock, held, _again):
    """Both run in one thread, and the second block has the lease of the first."""
    with dislock.lock(KEY, timeout=0) as lease:
        assert lease is held


class TestContexts:
    def test_a_thread_alone_says_nothing(self, dislock, lock):
        """A block that was entered in another context may belong to other work."""
        copy_context().run(lock.acquire)
        assert not dislock.lock(KEY).try_acquire()
        assert dislock.lock(KEY).lease is None
        lock.release()
        assert not lock.locked()

    def test_a_context_alone_says_nothing(self, dislock, lock, pool):
        """A copy of it may run beside the block."""
        with lock:
            assert not pool(copy_context().run, dislock.lock(KEY).try_acquire)

    def test_a_thread_that_waits_for_itself_is_told_so(self, dislock, lock):
        """As far as is known: it has entered the lock, and not left it."""
        copy_context().run(lock.acquire)
        with pytest.raises(LockHeldError, match="this very thread has entered it") as caught:
            dislock.lock(KEY, timeout=0).__enter__()
        assert threading.current_thread().name in caught.value.holder
        with pytest.raises(NotOwnerError, match="this very thread has entered it"):
            dislock.lock(KEY).release()
        lock.release()

    def test_a_thread_that_has_lost_it_waits_for_others(self, dislock, lock):
        """It has entered the lock, and has it no more: that is not why it is refused."""
        copy_context().run(lock.acquire)
        current_caller().leases[-1].lease.lose("gone")
        with pytest.raises(LockHeldError) as caught:
            dislock.lock(KEY, timeout=0).__enter__()
        assert "this very thread" not in str(caught.value)
        with pytest.raises(LockLostError):
            lock.release()

    def test_a_wait_without_a_limit_for_oneself_is_logged_once(self, dislock, pool, caplog):
        """The operator of a program that hangs finds the reason."""
        key = "logged once"
        holding = dislock.lock(key)
        pool(holding.acquire)

        def take():
            with dislock.lock(key):
                pass

        for _ in range(2):
            threading.Timer(0.1, holding.release).start()
            pool(take)
            pool(holding.acquire)
        holding.release()
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(said) == 1
        assert "waits without a limit for lock 'logged once': this very thread" in said[0]


class TestReleases:
    def test_an_object_that_holds_releases_in_any_thread(self, dislock, lock, pool):
        """Also where that thread holds a lock of its own by another object."""
        slots = [dislock.lock(KEY, limit=2) for _ in range(2)]
        slots[0].acquire()

        def release_theirs():
            slots[1].acquire()
            slots[0].release()
            return slots[1].lease

        lease = pool(release_theirs)
        assert lease.held
        assert [holder.token for holder in lock.holders()] == [lease.token]
        slots[1].release()
        assert not lock.locked()

    def test_threads_that_share_an_object_release_each_its_own(self, dislock, pool):
        """With two slots, a release in one thread leaves the lease of the other."""
        slots = dislock.lock(KEY, limit=2)
        slots.acquire()
        theirs = pool(slots.try_acquire)
        slots.release()
        assert theirs.held
        pool(slots.release)
        assert not slots.locked()

    def test_a_block_elsewhere_is_not_released_by_hand(self, lock, pool):
        """Its end releases it."""
        with lock as lease:
            with pytest.raises(NotOwnerError):
                pool(lock.release)
            assert lease.held

    def test_what_was_released_by_its_lease_is_not_held_any_more(self, lock, pool):
        """A second release is refused in each thread."""
        lock.acquire()
        lock.lease.release()
        for call in (lock.release, partial(pool, lock.release)):
            with pytest.raises(NotOwnerError, match=r"is not held$"):
                call()

    def test_an_extension_works_in_any_thread(self, lock, pool):
        """As a release does, if the thread itself holds nothing."""
        lock.acquire()
        pool(lock.extend)
        lock.release()


class TestEnds:
    """A lease is renewed until nobody is left who could release it."""

    def start(self, call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def test_a_block_that_goes_on_elsewhere_keeps_its_lock(self, redis_url):
        """A thread pool ends the threads that are idle."""
        with Dislock.from_url(redis_url, watchdog_timeout=LEASE) as dislock:
            running, leases = block(dislock.lock(KEY)), []
            self.start(lambda: leases.append(next(running)))
            (lease,) = leases
            wait_for(lambda: lease.renewals > 6 or not lease.held, "renewals")
            assert lease.held
            running.close()
            assert not dislock.lock(KEY).locked()

    def test_a_lock_object_keeps_what_its_thread_has_left_held(self, redis_url):
        """It is renewed as long as the object lives, and expires after it."""
        with Dislock.from_url(redis_url, watchdog_timeout=LEASE) as dislock:
            lock = dislock.lock(KEY)
            self.start(lock.acquire)
            wait_for(lambda: dislock.lock(KEY).holders()[0].held > 3 * LEASE, "renewals")
            lock.release()
            assert not lock.locked()
            self.start(lock.acquire)
            del lock
            gc.collect()  # a traceback of the first script, in Python 3.10
            wait_for(lambda: not dislock.lock(KEY).locked(), "the expiry")


def test_a_block_that_is_lost_interrupts_no_other_job_of_its_thread(redis_url, redis_client, pool):
    """With on_lost="raise" it is told at its end, in whatever thread that comes."""
    with Dislock.from_url(redis_url, watchdog_timeout=LEASE) as dislock:
        running = block(dislock.lock(KEY, on_lost="raise"))
        lease = pool(next, running)
        redis_client.delete(NAME)
        pool(wait_for, lambda: lease.lost, "the loss")
        pool(sum, range(100_000))
        with pytest.raises(LockLostError):
            next(running)


class TestTasks:
    def test_what_a_task_holds_belongs_to_its_body(self, redis_url, pool):
        """Not to another job of its thread, nor to another thread in a copy of its context."""
        app = Celery("reentry", broker=redis_url, set_as_current=False)
        with Dislock(app) as dislock:

            @app.task(base=SingletonTask, lock_key=KEY, shared=False)
            def task():
                with dislock.lock(KEY, timeout=0) as lease:
                    assert lease is task.lease
                with ThreadPoolExecutor(1) as other:
                    taken = other.submit(copy_context().run, dislock.lock(KEY).try_acquire)
                    assert not taken.result()
                return True

            assert pool(task.apply).get()
            assert pool(dislock.lock(KEY).acquire, False)


class Wrapped:
    """A lock whose block is begun and ended by methods, not by a statement of its own."""

    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *exc_info):
        return self._lock.__exit__(*exc_info)


def ends_what_it_took(lock):
    """It acquires the lock, and leaves the end to a stack."""
    lock.acquire()
    with ExitStack() as stack:
        stack.push(lock)


def ends_what_another_object_has_released(lock, other):
    """It is released in its block by another object, and the lock object is used meanwhile."""
    with lock:
        other.release()
        yield


@pytest.mark.parametrize("how", ["stack", "released", "wrapped"])
def test_an_end_elsewhere_ends_no_block_of_another_thread(redis_url, how):
    """The lock object is shared by all threads, and admits several."""
    with Dislock.from_url(redis_url) as dislock, ThreadPoolExecutor(1) as thread:
        lock, other = dislock.lock(KEY, limit=2), dislock.lock(KEY, limit=2)
        begun = None
        if how == "released":
            begun = ends_what_another_object_has_released(lock, other)
            thread.submit(next, begun).result()
        elif how == "wrapped":
            begun = Wrapped(lock)
            thread.submit(begun.__enter__).result()
        with lock as lease:
            if how == "stack":
                thread.submit(ends_what_it_took, lock).result()
            elif how == "released":
                thread.submit(next, begun, None).result()
            else:
                thread.submit(begun.__exit__, None, None, None).result()
            assert lease.held
            assert [one.token for one in lock.holders()] == [lease.token]

"""A cancelled coroutine leaves no lease, no place in line and no connection with a reply in it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import redis

from celery_dislock import Dislock, scripts
from proof.proxy import Proxy, lose_reply, runs, swallow_reply
from tests.holding import PATIENCE
from tests.integration.coroutines import on_loop
from tests.integration.servers import MASTER_NAME, Watched, several
from tests.programs import run_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.redis_server import RedisServer

# When a wait is cancelled: before it has begun, while it lasts, or when its result has arrived.
BEFORE, DURING, ARRIVED = "before", "during", "arrived"
WAITS_MOST = 30  # of one operation
AWAY = "redis://127.0.0.1:1/0"
LASTS = 20 * PATIENCE  # seconds: a lease that is left does not end by itself in time
GRANTS = runs(scripts.ACQUIRE)
RELEASES = runs(scripts.RELEASE)


async def until(condition, what):
    """Wait until *condition* gives something true, while the event loop runs."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {PATIENCE:g} s"
        await asyncio.sleep(0.005)
    return found


async def ended(task):
    """Wait until a task has ended; it must not wait for ever."""
    done, _ = await asyncio.wait([task], timeout=PATIENCE)
    assert done, task
    return task


class Strike:
    """Runs an operation as a task, which is cancelled at its nth wait; counts the waits."""

    def __init__(self, operation, nth, when, times=1):
        self.nth, self.when, self.times = nth, when, times
        self.waits = 0
        self._operation = operation
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        return await self

    def cancel(self, *_):
        for _ in range(self.times):
            self.task.cancel()

    def __await__(self):
        steps, go_on = self._operation.__await__(), None
        while True:
            try:
                waits_for = steps.send(None) if go_on is None else steps.throw(go_on)
            except StopIteration as done:
                return done.value
            self.waits += 1
            if self.waits == self.nth:
                if self.when == BEFORE:
                    self.cancel()
                elif self.when == ARRIVED and waits_for is not None:
                    waits_for.add_done_callback(self.cancel)  # before that of the task
                else:
                    asyncio.get_running_loop().call_soon(self.cancel)
            try:
                yield waits_for
                go_on = None
            except BaseException as exc:  # noqa: BLE001 -- it is the operation's
                go_on = exc


async def takes(lock):
    await lock.acquire()
    await lock.release()


async def tries(lock):
    if await lock.try_acquire():
        await lock.release()


async def extends(lock):
    async with lock:
        await lock.extend()


async def nests(lock):
    async with lock, lock:
        pass


async def looks(lock):
    await lock.locked()
    await lock.holders()


class Servers(NamedTuple):
    """A lock server, of any kind, and those of its processes that may have a lock."""

    url: str | list[str]
    settings: dict[str, Any]
    processes: Sequence[RedisServer]

    @contextlib.contextmanager
    def clients(self):
        """Yield a client of each process, with nothing in it."""
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(one.client()) for one in self.processes]
            for client in clients:
                client.flushall()
            yield clients


@pytest.fixture(scope="module")
def single(redis_server):
    return Servers(redis_server.url, {}, [redis_server])


@pytest.fixture(scope="module")
def cluster(cluster):
    return Servers(cluster.url, {}, cluster.masters)


@pytest.fixture(scope="module")
def sentinel(redis_program, tmp_path_factory):
    with Watched(tmp_path_factory.mktemp("sentinel")) as watched:
        settings = {"transport_options": {"master_name": MASTER_NAME}}
        yield Servers(watched.url, settings, [watched.master])


@pytest.fixture(scope="module")
def quorum(redis_program, tmp_path_factory):
    with several(3, tmp_path_factory.mktemp("quorum")) as servers:
        yield Servers([server.url for server in servers], {}, servers)


async def nothing_is_left(*clients):
    """Assert it; the watchdog's thread may need a moment."""
    for client in clients:
        await until(lambda client=client: not client.keys("dislock:*"), "the end of all keys")


OTHERS = "sentinel", "cluster", "quorum"
ALL = BEFORE, DURING, ARRIVED
CASES = [
    *product(["single"], [takes, tries, extends, nests, looks], ["free", "held"], ALL),
    *product(OTHERS, [takes], ["held"], [BEFORE, ARRIVED]),
    *product(OTHERS, [extends], ["free"], [DURING]),
]


@pytest.mark.parametrize(("kind", "operation", "held", "when"), CASES)
def test_a_cancellation_at_each_wait_leaves_nothing(request, kind, operation, held, when):
    """Each wait in turn, over connections that are new and that are not; others then go on."""
    servers = request.getfixturevalue(kind)

    async def once(dislock, nth, clients):
        lock = dislock.async_lock(["a", "b"] if operation is nests else "a")
        holder = dislock.async_lock("a")
        if held == "held":
            await holder.acquire()
        strike = Strike(operation(lock), nth, when, times=1 + nth % 2)
        if held == "held":
            await asyncio.sleep(0.01)
            await holder.release()
        await ended(strike.task)
        assert strike.task.cancelled() == (strike.waits >= nth)
        if not strike.task.cancelled():
            strike.task.result()
        await asyncio.wait_for(takes(dislock.async_lock(["a", "b"])), PATIENCE)
        await nothing_is_left(*clients)
        return strike.waits

    async def main(clients):
        for nth in range(1, WAITS_MOST):
            settings = {"watchdog_timeout": LASTS, **servers.settings}
            async with Dislock.from_url(servers.url, **settings) as dislock:
                waits = [await once(dislock, nth, clients) for _ in range(2)]
                if max(waits) < nth:
                    return nth
        pytest.fail("it never ends")

    with servers.clients() as clients:
        assert asyncio.run(main(clients)) >= 2


class LateProxy(Proxy):
    """Lets acquisitions through when it is told to; everything else passes."""

    def __init__(self, port):
        super().__init__(port)
        self.came, self.passes = threading.Event(), threading.Event()

    def _what_happens(self, command):
        if GRANTS(command):
            self.came.set()
            self.passes.wait(PATIENCE)
        return super()._what_happens(command)


@pytest.mark.parametrize("kind", ["single", "quorum"])
def test_an_acquisition_that_comes_after_its_release_is_undone(request, kind):
    """The watchdog has released it before it arrives; what undoes it follows on its connection."""
    servers = request.getfixturevalue(kind)
    late, *others = servers.processes

    async def main(proxy, clients):
        # The late one has to grant it, too, for a majority.
        urls = [proxy.url, *(server.url for server in others[1:]), AWAY] if others else proxy.url
        options = {"socket_timeout": PATIENCE}
        async with Dislock.from_url(urls, transport_options=options) as dislock:
            task = asyncio.create_task(takes(dislock.async_lock("a")))
            await until(proxy.came.is_set, "the acquisition")
            task.cancel()
            await ended(task)
            await until(lambda: proxy.count(RELEASES), "the release of the watchdog")
            await asyncio.sleep(0.1)  # it is done; a slow machine only makes the test find less
            before = proxy.count(RELEASES)  # of the watchdog: by digest, and perhaps by text
            proxy.passes.set()
            await until(lambda: proxy.count(RELEASES) > before, "the undoing")
            await until(lambda: not clients[0].exists("dislock:{a}"), "its end")
            await nothing_is_left(*clients)

    with LateProxy(late.port) as proxy, servers.clients() as clients:
        asyncio.run(main(proxy, clients))


@pytest.mark.parametrize("happens", [lose_reply, swallow_reply])
@pytest.mark.parametrize("command", [GRANTS, RELEASES], ids=["acquire", "release"])
def test_a_cancellation_while_a_reply_is_lost_leaves_nothing(
    redis_url, redis_server, redis_client, command, happens
):
    """No lease and no place, in the pause before the command is sent again either."""

    async def main(proxy):
        async with Dislock.from_url(proxy.url) as dislock:
            for after in (0.0, 0.001, 0.01, 0.05):  # before it is resent, and in the pause
                before = proxy.count(command)
                proxy.fault(command, happens, times=3)
                task = asyncio.create_task(takes(dislock.async_lock("a")))
                await until(lambda before=before: proxy.count(command) > before, "the command")
                asyncio.get_running_loop().call_later(after, task.cancel)
                await ended(task)
                if not task.cancelled():
                    task.result()  # it was done before
                proxy.forget_faults()
                await nothing_is_left(redis_client)

    with Proxy(redis_server.port) as proxy:
        asyncio.run(main(proxy))


async def holds(lock, entered):
    async with lock:
        entered.set()
        await asyncio.sleep(3600)


@on_loop
async def test_nobody_waits_for_a_server_that_stands_still(own_redis_server):
    """Who is cancelled ends at once; when the server goes on, nothing is left there."""
    async with Dislock.from_url(own_redis_server.url) as dislock:
        entered = asyncio.Event()
        tasks = [asyncio.create_task(holds(dislock.async_lock("a"), entered))]
        await asyncio.wait_for(entered.wait(), PATIENCE)
        tasks += [asyncio.create_task(takes(dislock.async_lock("a"))) for _ in range(5)]
        with own_redis_server.client() as client:
            await until(lambda: len(list(client.scan_iter("*"))) > 1, "the line")
            await asyncio.sleep(0.05)
            own_redis_server.pause()
            try:
                for key in ("a", "b"):
                    tasks += [asyncio.create_task(tries(dislock.async_lock(key)))]
                await asyncio.sleep(0.05)
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    assert (await ended(task)).cancelled()
            finally:
                own_redis_server.resume()
            await nothing_is_left(client)


@pytest.mark.extra
@pytest.mark.parametrize("how", ["close_a_loop", "close_loops"])
def test_a_loop_that_is_closed_leaves_nothing(redis_url, redis_client, how):
    """Its tasks are dropped where they wait; the next loop of their thread ends them as well."""
    run_code(f"from {__name__} import {how}; {how}({redis_url!r})")
    assert list(redis_client.scan_iter("dislock:*")) == []


def close_a_loop(redis_url):
    """Close an event loop with tasks that have a lock, wait in line, or wait for a reply."""
    dislock = Dislock.from_url(redis_url)
    with ThreadPoolExecutor(1) as thread:
        held = dislock.lock("a")
        thread.submit(held.acquire).result(PATIENCE)
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(takes(dislock.async_lock(key))) for key in ("a", "a", "b")]
        loop.run_until_complete(asyncio.wait_for(tasks[2], PATIENCE))
        loop.close()
        assert [task.done() for task in tasks] == [False, False, True]
        for task in tasks:
            task._log_destroy_pending = False
            task.get_coro().close()
        thread.submit(held.release).result(PATIENCE)
    dislock.close()


def close_loops(redis_url):
    """Close event loops in each of which a task waits in line; count places and connections."""
    dislock, others = Dislock.from_url(redis_url), Dislock.from_url(redis_url)
    counts = []

    def run(coroutine):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(coroutine)
        loop.close()

    async def begin():
        waiter = asyncio.create_task(takes(dislock.async_lock("a")))
        waiter._log_destroy_pending = False
        await takes(dislock.async_lock("b"))
        await until(lambda: len(others.lock_of("a").line()) == 1, "the end of all places but this")

    async def look():
        gc.collect()
        with redis.Redis.from_url(redis_url) as client:
            counts.append(len(client.client_list()))
        await begin()

    with ThreadPoolExecutor(1) as thread:
        held = others.lock("a")
        thread.submit(held.acquire).result(PATIENCE)
        for _ in range(5):
            run(look())
        run(takes(dislock.async_lock("b")))
        thread.submit(held.release).result(PATIENCE)
    assert len(set(counts[2:])) == 1, counts
    dislock.close()
    others.close()


@on_loop
async def test_a_loop_that_is_blocked_for_three_timeouts_keeps_its_locks(redis_url):
    """A thread renews them, and the same thread however many there are."""
    timeout = 2.0  # seconds
    async with Dislock.from_url(redis_url, watchdog_timeout=timeout) as dislock:
        locks = [dislock.async_lock(f"k{number}") for number in range(300)]
        await locks[0].acquire()
        threads = threading.active_count()
        for lock in locks[1:]:
            await lock.acquire()
        assert threading.active_count() <= threads
        before = [lock.lease.renewals for lock in locks]
        time.sleep(3 * timeout)  # noqa: ASYNC251 -- it is to block
        for lock, renewals in zip(locks, before, strict=True):
            assert lock.lease.renewals >= renewals + 3
            lock.lease.ensure_held()
        assert not await asyncio.to_thread(dislock.lock("k0").acquire, False)
        for lock in locks:
            await lock.release()

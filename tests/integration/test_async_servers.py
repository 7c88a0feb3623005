"""Locks of asyncio tasks on every kind of lock server, and what happens to them when one fails."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_dislock import DamagedLockError, Dislock, LockHeldError, StoreError
from tests.holding import wait_for
from tests.integration.coroutines import on_loop
from tests.integration.servers import (
    MASTER_NAME,
    RedisCluster,
    Watched,
    is_master,
    several,
    wait_for_replicas,
)
from tests.pace import REPLY

KEY, LIMIT = "export:7", 60.0  # seconds
MASTER = {"transport_options": {"master_name": MASTER_NAME}}


@pytest.fixture
def watched(redis_program, tmp_path):
    with Watched(tmp_path) as watched:
        yield watched


@pytest.fixture
def cluster(redis_program, tmp_path):
    with RedisCluster(tmp_path, node_timeout=1000) as cluster:
        yield cluster


@pytest.fixture
def five(redis_program, tmp_path):
    with several(5, tmp_path) as servers:
        yield servers


async def use(dislock, *, waits=True, key=KEY, **options):
    """Take, take again, refuse, wait, renew, look at and release: all that a lock is for."""
    lock = dislock.async_lock(key, timeout=LIMIT, **options)

    async def other():
        assert not await lock.try_acquire()
        with pytest.raises(LockHeldError) as refused:
            async with dislock.async_lock(key, timeout=0, **options):
                pytest.fail("two have it")
        assert refused.value.remaining > 0
        refusal.set()
        async with lock as lease:
            return lease.token

    async with lock as lease:
        async with lock as again:
            assert again is lease
        refusal = asyncio.Event()
        waiter = asyncio.create_task(other())
        await refusal.wait()
        await lock.extend()
        holders = await lock.holders()
        assert [held.owner for held in holders] == [lease.owner] * len(lease.tokens)
        assert lease.held
        if waits:
            await asyncio.to_thread(wait_in_line, dislock, key)
    assert await waiter > lease.token
    assert not await lock.locked()
    return lease


def wait_in_line(dislock, key):
    """Wait until somebody stands in line."""
    wait_for(lambda: dislock.lock_of(key).line(), "the waiter")


def used(url, *, waits=True, **settings):
    """Use a lock on this server; return its lease."""

    async def main():
        async with Dislock.from_url(url, **settings) as dislock:
            return await use(dislock, waits=waits)

    return asyncio.run(main())


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [False, True])
def test_no_option_of_a_client_changes_an_answer(
    redis_url, redis_client, protocol, decode_responses
):
    """Neither RESP2 or RESP3 nor decode_responses; of a blocking lock or one of tasks."""
    options = {"protocol": protocol, "decode_responses": decode_responses}
    used(redis_url, transport_options=options)
    redis_client.set("dislock:{bad}", "by hand")
    with (
        Dislock.from_url(redis_url, transport_options=options) as dislock,
        dislock.lock("ü") as lease,
        ThreadPoolExecutor(1) as thread,
    ):
        redis_client.script_flush()
        assert thread.submit(dislock.lock("ü").try_acquire).result().holder == lease.holder
        redis_client.script_flush()
        dislock.lock("ü").extend()
        assert [one.owner for one in dislock.lock("ü").holders()] == [lease.owner]
        with pytest.raises(DamagedLockError, match="is a string, not a hash"):
            dislock.lock("bad").try_acquire()


@on_loop
async def test_what_a_server_pushes_is_no_reply(redis_url, redis_client):
    """RESP3 lets a server send what was not asked for."""
    before = {one["id"] for one in redis_client.client_list()}
    async with Dislock.from_url(redis_url, transport_options={"protocol": 3}) as dislock:
        await use(dislock)
        ours = [one["id"] for one in redis_client.client_list() if one["id"] not in before]
        assert ours
        for one in ours:  # which is told of each key that changes, also by its own commands
            redis_client.execute_command("CLIENT", "TRACKING", "OFF")
            redis_client.execute_command("CLIENT", "TRACKING", "ON", "REDIRECT", one, "BCAST")
            redis_client.set("x", one)
            await use(dislock)


@pytest.mark.extra
@on_loop
async def test_a_failover_while_tasks_wait(watched, caplog):
    """Who waits at a master that dies gets the lock at the next one, one after the other."""
    inside, order = [], []

    async def body(lock):
        async with lock as lease:
            inside.append(lease)
            assert len(inside) == 1
            order.append(lease.token)
            await asyncio.sleep(0)
            inside.clear()

    async def taken(lock):
        while True:
            with contextlib.suppress(StoreError):
                return await body(lock)
            await asyncio.sleep(0.1)

    async with Dislock.from_url(watched.url, **MASTER) as dislock:
        await use(dislock)
        lock = dislock.async_lock(KEY, timeout=LIMIT)
        async with lock as lease:
            waiters = [asyncio.create_task(taken(lock)) for _ in range(5)]
            await asyncio.to_thread(wait_in_line, dislock, KEY)
            dead = watched.master
            await asyncio.to_thread(wait_for_replicas, dead, 2)
            dead.kill()
            await asyncio.to_thread(watched.wait_for_master, other_than=dead)
            assert lease.held
        await asyncio.wait_for(asyncio.gather(*waiters), LIMIT)
        assert order == sorted(set(order))
        await use(dislock)


@on_loop
async def test_sentinels_are_asked_once_for_many_tasks(watched):
    """Tasks that need the master at the same time share one answer, and one connection."""

    def connections():
        with watched.sentinels[0].client() as client:
            return client.info("stats")["total_connections_received"]

    async with Dislock.from_url(watched.url, **MASTER) as dislock:
        await use(dislock)
        await asyncio.sleep(1.0)  # seconds: the last answer counts for half of it
        before = connections()
        locks = [dislock.async_lock(f"k{n}") for n in range(50)]
        assert all(await asyncio.gather(*(lock.try_acquire() for lock in locks)))
        assert connections() - before <= 4  # one of them is the test's own


@pytest.mark.extra
def test_a_slot_that_moves_and_a_master_that_dies(cluster):
    """A waiter in a cluster follows its lock; so does the owner's release."""

    async def main():
        async with Dislock.from_url(cluster.url) as dislock:
            lock = dislock.async_lock(KEY, timeout=LIMIT)
            await use(dislock)
            name = f"dislock:{{{KEY}}}"
            _, target = cluster.nodes_of(name)
            async with lock as lease:
                waiter = asyncio.create_task(token(lock))
                await asyncio.to_thread(wait_in_line, dislock, KEY)
                await asyncio.to_thread(move, cluster, name)
            assert await asyncio.wait_for(waiter, LIMIT) > lease.token
            assert cluster.nodes_of(name)[0] is target
            await use(dislock)

            async with lock as lease:
                waiter = asyncio.create_task(token(lock))
                await asyncio.to_thread(wait_in_line, dislock, KEY)
                await asyncio.to_thread(wait_for_replicas, target, 1)
                target.kill()
                await asyncio.to_thread(wait_for, lambda: writable(cluster, target))
            assert await asyncio.wait_for(waiter, LIMIT) > lease.token

    async def token(lock):
        while True:
            with contextlib.suppress(StoreError):
                async with lock as lease:
                    return lease.token
            await asyncio.sleep(0.1)

    def move(cluster, name):
        with cluster.moving(name):
            pass

    asyncio.run(main())


def writable(cluster, dead):
    """Tell whether the slots of a dead master have another one."""
    with next(one for one in cluster.servers if one is not dead).client() as client:
        is_up = client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
    return is_up and any(is_master(one) for one in cluster.servers[3:])


def test_a_quorum_of_five_with_one_two_and_three_away(five):
    """A majority decides; without one nobody gets a lock, and the lease in hand is kept."""

    async def main():
        urls = [server.url for server in five]
        async with Dislock.from_url(urls, transport_options={"socket_timeout": REPLY}) as dislock:
            await use(dislock, waits=False)
            for away in five[:2]:
                away.kill()
                await use(dislock, waits=False)
            async with dislock.async_lock("kept") as kept:
                five[2].kill()
                with pytest.raises(StoreError, match="only 2 of 5"):
                    await dislock.async_lock(KEY).acquire(timeout=0)
                assert kept.held
                five[2].start()
                await asyncio.to_thread(wait_for, lambda: took(urls))
            await use(dislock, waits=False)

    def took(urls):
        with Dislock.from_url(urls) as dislock, contextlib.suppress(StoreError):
            lock = dislock.lock("other")
            return lock.acquire(timeout=0) and lock.release() is None

    asyncio.run(main())

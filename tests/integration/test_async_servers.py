"""Locks of asyncio tasks on every kind of lock server, and what happens to them when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
import subprocess

import pytest
import redis
import redis.asyncio

from celery_dislock import Dislock, LockHeldError, SettingsError, StoreError
from celery_dislock.servers.bridge import run_on_loop
from celery_dislock.servers.connections import send
from celery_dislock.servers.loop_connection import LoopConnection
from tests.holding import wait_for
from tests.integration.servers import (
    FAST_SYNC,
    MASTER_NAME,
    RedisCluster,
    TlsServer,
    Watched,
    make_certificates,
    wait_for_replicas,
)
from tests.programs import missing
from tests.redis_server import RedisServer

KEY, LIMIT = "export:7", 60.0  # seconds
ASYNC_TLS = inspect.signature(redis.asyncio.SSLConnection).parameters
MASTER = {"transport_options": {"master_name": MASTER_NAME}}


class Provider(redis.CredentialProvider):
    """What a cloud's library gives, to log in with tokens that change."""

    def get_credentials(self):
        return "locker", "se:cr@et"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if not shutil.which("openssl"):
        missing("openssl")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(redis_program, certificates, tmp_path_factory):
    asked = [str(redis_program), "--tls-auth-clients", "yes", "--port", "no"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    if "'tls-auth-clients" in said.stdout + said.stderr:
        missing("a Redis with TLS")
    with TlsServer(tmp_path_factory.mktemp("tls"), certificates) as server:
        yield server


@pytest.fixture(scope="module")
def verified(certificates):
    """Options of a client that shows its certificate, and verifies the server's."""
    return {
        "ssl_cert_reqs": "required",
        "ssl_ca_certs": str(certificates.authority),
        "ssl_certfile": str(certificates.client),
        "ssl_keyfile": str(certificates.client_key),
    }


@pytest.fixture(scope="module")
def on_unix_socket(redis_program, tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("unix"), unix_socket=True) as server:
        yield server


@pytest.fixture(scope="module")
def with_users(redis_program, tmp_path_factory):
    """A server with one user."""
    with RedisServer(tmp_path_factory.mktemp("users")) as server, server.client() as client:
        rules = {"keys": ["dislock:*"], "categories": ["+@all"]}
        client.acl_setuser("locker", enabled=True, passwords=["+se:cr@et"], **rules)
        client.acl_setuser("default", enabled=False)
        yield server


@pytest.fixture(scope="module")
def replicated(redis_program, tmp_path_factory):
    """A master that has one replica."""
    with RedisServer(tmp_path_factory.mktemp("master"), args=FAST_SYNC) as master:
        follow = [*FAST_SYNC, "--replicaof", "127.0.0.1", str(master.port)]
        with RedisServer(tmp_path_factory.mktemp("replica"), args=follow):
            wait_for_replicas(master, 1)
            yield master


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
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RedisServer(tmp_path / str(n))) for n in range(5)]


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


@pytest.mark.parametrize("protocol", [None, 2, 3])
def test_one_server_in_each_protocol(redis_url, protocol):
    """RESP2 and RESP3 say the same."""
    options = {} if protocol is None else {"protocol": protocol}
    used(redis_url, transport_options=options)


def test_what_a_server_pushes_is_no_reply(redis_url, redis_client):
    """RESP3 lets a server send what was not asked for."""

    async def main():
        connection = LoopConnection(redis.Connection, where)
        await run_on_loop(connection.connect)

        def ask():
            send(connection, "CLIENT", "TRACKING", "ON", "BCAST")
            assert connection.read_response() == b"OK"
            redis_client.set("x", "1")  # which the server tells before it answers
            send(connection, "PING")
            assert connection.read_response() == b"PONG"
            connection.disconnect()

        await run_on_loop(ask)

    where = {**redis.ConnectionPool.from_url(redis_url).connection_kwargs, "protocol": 3}
    asyncio.run(main())


def test_a_unix_socket(on_unix_socket):
    used(on_unix_socket.url)


def test_tls_is_verified_on_both_sides(tls_server, verified):
    """An unknown authority, and a client without a certificate, get no lock."""
    used(tls_server.tls_url, transport_options=verified)
    for left_out in ("ssl_ca_certs", "ssl_certfile"):
        some = {name: value for name, value in verified.items() if name != left_out}
        some.pop("ssl_keyfile" if left_out == "ssl_certfile" else "", None)
        with pytest.raises(StoreError):
            used(tls_server.tls_url, transport_options=some)


@pytest.mark.skipif("ssl_validate_ocsp" in ASYNC_TLS, reason="it is an option there, too")
def test_an_option_that_asyncio_does_not_have_is_named(tls_server, verified):
    """redis-py's connections of asyncio have fewer of them; no command is sent."""
    with pytest.raises(SettingsError, match="no option 'ssl_validate_ocsp"):
        used(tls_server.tls_url, transport_options={**verified, "ssl_validate_ocsp": True})


def test_a_cluster_over_tls(tls_server, certificates, verified, tmp_path):
    with RedisCluster(tmp_path, node_timeout=60_000, certificates=certificates) as cluster:
        used(cluster.url, transport_options=verified)


def test_user_and_password(with_users):
    """They are in the URL, or come from a provider, which wins."""
    url = f"redis://{{}}127.0.0.1:{with_users.port}/0"
    used(url.format("locker:se%3Acr%40et@"))
    for provider in (Provider(), f"{__name__}.Provider"):
        used(url.format("locker:wrong@"), transport_options={"credential_provider": provider})
    with pytest.raises(StoreError):
        used(url.format("locker:wrong@"))


def test_replicas_that_must_have_the_lock(replicated):
    used(replicated.url, min_replicas=1)
    with pytest.raises(StoreError, match="only 1 of 2 replicas"):
        used(replicated.url, min_replicas=2)
    used(replicated.url)  # it was given back


def test_options_of_locks(redis_url):
    """Shared, limited, several keys, a fixed expiry, and without the line."""

    async def main():
        async with Dislock.from_url(redis_url) as dislock:
            shared = dislock.async_lock("s", mode="shared")
            limited = dislock.async_lock("l", limit=2)
            for lock, most in ((shared, 5), (limited, 2)):
                inside = asyncio.Semaphore(0)
                done = asyncio.Event()

                async def body(lock=lock, inside=inside, done=done):
                    async with lock:
                        inside.release()
                        await done.wait()

                tasks = [asyncio.create_task(body()) for _ in range(5)]
                for _ in range(most):
                    await inside.acquire()
                assert len(await lock.holders()) == most
                assert not await dislock.async_lock(lock.keys[0]).try_acquire()
                done.set()
                await asyncio.gather(*tasks)
                assert not await lock.locked()

            both = dislock.async_lock(["a", "b"], timeout=0)
            async with dislock.async_lock("b"):
                task = asyncio.create_task(both.acquire(blocking=False))
                assert not await task
                assert not await dislock.async_lock("a").locked()
            lease = await use(dislock, waits=False, key=["a", "b"])
            assert set(lease.tokens) == {"a", "b"}

            async with dislock.async_lock("e", expire=LIMIT) as lease:
                assert LIMIT - 5 < lease.remaining <= LIMIT

            async with dislock.async_lock("f") as lease:
                first = asyncio.create_task(dislock.async_lock("f").acquire(timeout=LIMIT))
                await asyncio.to_thread(wait_in_line, dislock, "f")
                assert not await asyncio.create_task(
                    dislock.async_lock("f", fair=False).acquire(blocking=False)
                )
            assert await first

    asyncio.run(main())


def test_a_failover_while_tasks_wait(watched, caplog):
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

    async def main():
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

    asyncio.run(main())


def test_sentinels_are_asked_once_for_many_tasks(watched):
    """Tasks that need the master at the same time share one answer, and one connection."""

    def connections():
        with watched.sentinels[0].client() as client:
            return client.info("stats")["total_connections_received"]

    async def main():
        async with Dislock.from_url(watched.url, **MASTER) as dislock:
            await use(dislock)
            await asyncio.sleep(1.0)  # seconds: the last answer counts for half of it
            before = connections()
            locks = [dislock.async_lock(f"k{n}") for n in range(50)]
            assert all(await asyncio.gather(*(lock.try_acquire() for lock in locks)))
            assert connections() - before <= 4  # one of them is the test's own

    asyncio.run(main())


def test_a_slot_that_moves_and_a_master_that_dies(cluster):
    """A waiter in a cluster follows its lock; so does the owner's release."""

    async def main():
        async with Dislock.from_url(cluster.url) as dislock:
            lock = dislock.async_lock(KEY, timeout=LIMIT)
            await use(dislock)
            name = f"dislock:{{{KEY}}}"
            source = next(one for one in cluster.masters if owns(one, name))
            target = next(one for one in cluster.masters if one is not source)
            async with lock as lease:
                waiter = asyncio.create_task(token(lock))
                await asyncio.to_thread(wait_in_line, dislock, KEY)
                await asyncio.to_thread(move, cluster, name, source, target)
            assert await asyncio.wait_for(waiter, LIMIT) > lease.token
            assert owns(target, name)
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

    def move(cluster, name, source, target):
        with cluster.moving(name, source, target):
            pass

    asyncio.run(main())


def owns(server, name):
    """Tell whether a master of a cluster has the slot of a key."""
    with server.client() as client:
        try:
            client.execute_command("EXISTS", name)
        except redis.ResponseError:
            return False
        return True


def writable(cluster, dead):
    """Tell whether the slots of a dead master have another one."""
    with next(one for one in cluster.servers if one is not dead).client() as client:
        return client.execute_command("CLUSTER INFO")["cluster_state"] == "ok" and (
            str(dead.port) not in str(client.execute_command("CLUSTER SLOTS"))
            or any(
                one.running and one is not dead and is_new_master(one)
                for one in cluster.servers[3:]
            )
        )


def is_new_master(server):
    with server.client() as client:
        return client.info("replication")["role"] == "master"


def test_a_quorum_of_five_with_one_two_and_three_away(five):
    """A majority decides; without one nobody gets a lock, and the lease in hand is kept."""

    async def main():
        urls = [server.url for server in five]
        async with Dislock.from_url(urls, transport_options={"socket_timeout": 0.5}) as dislock:
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

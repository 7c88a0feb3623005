from __future__ import annotations

import contextlib
import gc
import inspect
import queue
import re
import shutil
import ssl
import threading
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
import redis
from celery import Celery
from redis.crc import key_slot

from celery_dislock import Dislock
from celery_dislock.config.terms import Rate, Terms
from celery_dislock.exceptions import SettingsError, StoreError, UnreachableError
from celery_dislock.parking.answers import Done, Parked
from celery_dislock.parking.store import ASIDE, OVER, RUNS, Lines, Ticket
from celery_dislock.scripts import ACQUIRE
from celery_dislock.servers import cluster as cluster_module
from celery_dislock.servers.connecting import Driver
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.store import Store
from celery_dislock.servers.trial import check_scripts
from proof.proxy import Proxy, runs
from tests.holding import PATIENCE, Holding, all_locks, wait_for
from tests.integration.acl import RULES
from tests.integration.parked import Broker, owner_of
from tests.integration.servers import (
    FAST_SYNC,
    HOLDER,
    LOCK,
    LONG,
    MASTER_NAME,
    WITHIN,
    RedisCluster,
    SentinelServer,
    TlsServer,
    Watched,
    is_master,
    make_certificates,
    round_trip,
    take,
    tls_args,
    wait_for_replicas,
)
from tests.integration.test_async_servers import used
from tests.leaks import SECRET
from tests.pace import LEASE, REPLY
from tests.programs import missing, run
from tests.redis_server import RedisServer, ServerFailed, free_port

ASYNC_TLS = inspect.signature(redis.asyncio.SSLConnection).parameters
ONE_LINE = 500  # characters, more or less


@pytest.fixture
def connect():
    """Make stores that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def connect(*args, **options):
            store = Store(*args, **options)
            stack.callback(store.close)
            return store

        yield connect


@pytest.fixture
def connect_to(connect):
    """Make stores that ask Sentinels."""
    return lambda watched, **options: connect(watched.url, {"master_name": MASTER_NAME, **options})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if not shutil.which("openssl"):
        missing("openssl")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(redis_program, certificates, tmp_path_factory):
    said = run(redis_program, "--tls-auth-clients", "yes", "--port", "no", status=None)
    if "'tls-auth-clients" in said.stdout + said.stderr:
        missing("a Redis with TLS")
    server = TlsServer(tmp_path_factory.mktemp("tls"), certificates)
    try:
        server.start()
    except ServerFailed as exc:
        if "TLS support" not in str(exc):  # as Valkey says it
            raise
        missing("a Redis with TLS")
    with server:
        yield server


@pytest.fixture
def options(certificates):
    """Of a client that shows its certificate."""
    return {
        "ssl_ca_certs": str(certificates.authority),
        "ssl_certfile": str(certificates.client),
        "ssl_keyfile": str(certificates.client_key),
    }


class TestTls:
    def test_both_sides_show_their_certificate(self, connect, tls_server, options):
        """However verification is spelt, in options or in the URL's query."""
        for required in ("required", "CERT_REQUIRED"):
            query = urlencode({"ssl_cert_reqs": required, **options})
            round_trip(connect(f"{tls_server.tls_url}?{query}"))
        options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
        round_trip(connect(tls_server.tls_url, options))
        used(tls_server.tls_url, transport_options=options)

    @pytest.mark.filterwarnings("ignore:unclosed")  # asyncio leaves it to the garbage collector
    @pytest.mark.parametrize(
        ("without", "told"), [("ssl_ca_certs", "(?i)certificate"), ("ssl_certfile", None)]
    )
    def test_without_a_certificate_no_lock_is_taken(
        self, connect, tls_server, options, without, told
    ):
        """Neither from a server of an unknown authority, nor by a client that shows none."""
        del options[without]
        if without == "ssl_certfile":
            del options["ssl_keyfile"]
        with pytest.raises(StoreError, match=told):
            take(connect(tls_server.tls_url, options), "a/1")
        with pytest.raises(StoreError):
            used(tls_server.tls_url, transport_options=options)
        gc.collect()

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"ssl_cert_reqs": "sometimes"}, "ssl_cert_reqs='sometimes': give required, optional"),
            ({"ssl_ca_certs": "gone.pem"}, "ssl_ca_certs='gone.pem': No such file or directory: "),
            ({"ssl_ca_certs": __file__}, "ssl_ca_certs='.*': give a file in PEM"),
            ({"ssl_ca_path": "gone"}, "ssl_ca_path='gone': No such file or directory: give a fold"),
            ({"ssl_ca_data": "s3cret"}, r"ssl_ca_data='\*\*\*': give certificates"),
            ({"ssl_certfile": "gone.pem"}, "ssl_certfile='gone.pem': No such file"),
            ({"ssl_certfile": None}, "ssl_keyfile='.*': give its certificate, too"),
            ({"ssl_keyfile": None}, "ssl_certfile='.*': it has no private key: give ssl_keyfile"),
            ({"ssl_keyfile": "gone.pem"}, "ssl_keyfile='gone.pem': No such file"),
            ({"ssl_keyfile": __file__}, "ssl_keyfile='.*': it is not the private key of ssl_cert"),
            ({"ssl_ciphers": "NONE-OF-THESE"}, "ssl_ciphers='NONE-OF-THESE': OpenSSL knows none"),
            ({"ssl_min_version": "9"}, "ssl_min_version='9': give a member of ssl.TLSVersion"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("in_url", [True, False])
    def test_an_option_of_tls_that_cannot_be_used_is_named(self, options, given, told, in_url):
        """With its value and what to give instead, before anything is connected to."""
        in_url = in_url and "ssl_min_version" not in given  # redis-py's versions read it apart
        options = {name: value for name, value in {**options, **given}.items() if value}
        told = f"lock server rediss?://127.0.0.1:1(?:/0)?: {told}"
        with pytest.raises(SettingsError, match=told):
            if in_url:
                Store(f"rediss://127.0.0.1:1/0?{urlencode(options)}")
            else:
                Store("redis://127.0.0.1:1", {"ssl": True, **options})

    def test_a_file_that_is_away_for_a_moment_is_no_wrong_option(self, options, tmp_path):
        """A task is put off then, as the lock server is away; it does not fail."""
        copied = tmp_path / "authority.pem"
        copied.write_bytes(Path(options["ssl_ca_certs"]).read_bytes())
        options["ssl_ca_certs"] = str(copied)
        Store("rediss://127.0.0.1:1", options)
        copied.unlink()
        Store("rediss://127.0.0.1:1", options)

    @pytest.mark.skipif("ssl_validate_ocsp" in ASYNC_TLS, reason="it is an option there, too")
    def test_an_option_that_asyncio_does_not_have_is_named(self, tls_server, options):
        """redis-py's connections of asyncio have fewer of them; no command is sent."""
        with pytest.raises(SettingsError, match="no option 'ssl_validate_ocsp"):
            used(tls_server.tls_url, transport_options={**options, "ssl_validate_ocsp": True})

    def test_a_port_without_tls_is_asked_once(self, own_redis_server):
        """A handshake that nobody answers takes one timeout, not one for each attempt."""
        store = Store(
            f"rediss://127.0.0.1:{own_redis_server.port}/0",
            {"socket_timeout": REPLY, "socket_connect_timeout": REPLY},
        )
        with own_redis_server.client() as client:
            before = client.info("stats")["total_connections_received"]
            with pytest.raises(UnreachableError, match="TLS"):
                take(store, "a/1")
            assert client.info("stats")["total_connections_received"] == before + 1

    def test_a_cluster(self, connect, tls_server, certificates, options, tmp_path):
        """The nodes of a rediss+cluster:// are found and reached over TLS, each with its locks."""
        with RedisCluster(tmp_path, node_timeout=60_000, certificates=certificates) as cluster:
            store = connect(cluster.url, options)
            for number, master in enumerate(cluster.masters):
                lock = name_on(cluster.masters, number)
                round_trip(store, lock)
                take(store, "a/1", lock=lock)
                assert exists(master, lock)
            used(cluster.url, transport_options=options)

    def test_sentinels(self, tls_server, certificates, options, tmp_path):
        """Sentinels are asked over TLS, and so is the master that they name."""
        port = free_port()
        args = [*tls_args(certificates, port), "--tls-replication", "yes"]
        with SentinelServer(tmp_path, tls_server.tls_port, others=0, args=args):
            options |= {"ssl": True}
            asked = {"master_name": MASTER_NAME, "sentinel_kwargs": options, **options}
            store = Store(f"sentinel://127.0.0.1:{port}", asked)
            round_trip(store)
            store.close()


class Provider(redis.CredentialProvider):
    """What a cloud's library gives, to log in with tokens that change."""

    def get_credentials(self):
        return "locker", "se:cr@et"


PROVIDER = "tests.integration.test_servers.Provider"


@pytest.fixture(scope="module")
def url(redis_program, tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("users")) as server, server.client() as client:
        rules = {"keys": ["dislock:*"], "categories": ["+@all"]}
        client.acl_setuser("locker", enabled=True, passwords=["+se:cr@et"], **rules)
        client.acl_setuser("default", enabled=False)
        yield f"redis://locker:se%3Acr%40et@127.0.0.1:{server.port}/0"


class TestUserAndPassword:
    def test_a_user_of_the_acl_takes_locks(self, connect, url):
        """User and password of the URL are used, special characters as %XX; a wrong one is not."""
        round_trip(connect(url))
        used(url)
        wrong = url.replace("se%3Acr", "wrong")
        with pytest.raises(StoreError):
            take(connect(wrong), "a/1")
        with pytest.raises(StoreError):
            used(wrong)

    @pytest.mark.parametrize("provider", [Provider(), PROVIDER], ids=["object", "name"])
    def test_credentials_may_come_from_a_provider(self, connect, url, provider):
        """A credential_provider, an object or its class's name, wins over the URL's user."""
        wrong, options = url.replace("se%3Acr", "wrong"), {"credential_provider": provider}
        round_trip(connect(wrong, options))
        used(wrong, transport_options=options)

    def test_the_provider_of_the_broker_is_taken_over(self, url):
        """In the broker's URL, its transport options, or as the result backend's setting."""
        bare = url.replace("locker:se%3Acr%40et@", "")
        for conf in (
            {"broker_url": f"{bare}?credential_provider={PROVIDER}"},
            {"broker_url": bare, "broker_transport_options": {"credential_provider": PROVIDER}},
            {"result_backend": bare, "redis_backend_credential_provider": Provider()},
        ):
            app = Celery(set_as_current=False)
            app.conf.update(conf)
            with Dislock(app) as dislock, dislock.lock("k") as lease:
                assert lease.held

    @pytest.mark.parametrize("tls", [False, True])
    def test_what_the_sentinels_are_given_is_in_no_text(self, redis_server, tls):
        """No error tells the Sentinels' password, whatever is wrong there."""
        options = {
            "master_name": MASTER_NAME,
            "password": SECRET,
            "socket_timeout": REPLY,
            "sentinel_kwargs": {"password": SECRET, "ssl": tls},
        }
        sentinels = f"127.0.0.1:{redis_server.port};127.0.0.1:{free_port()}"
        store = Store(f"sentinel://{sentinels}", options)
        for ask in (store.ping, lambda: store.renew([([LOCK], "a/1", LONG)], within=1.0)):
            with pytest.raises(StoreError) as raised:
                ask()
            said = "".join(traceback.format_exception(raised.value))
            assert str(redis_server.port) in said
            assert SECRET not in said
            assert len(str(raised.value)) < ONE_LINE
        store.close()


@pytest.fixture(scope="module")
def watched(redis_program, tmp_path_factory):
    """A master with replicas and Sentinels, for the tests that end none of them."""
    with Watched(tmp_path_factory.mktemp("watched")) as watched:
        yield watched


@pytest.fixture
def own_watched(redis_program, tmp_path):
    """One that a test may break."""
    with Watched(tmp_path) as watched:
        yield watched


class TestSentinel:
    def test_the_sentinels_user_of_the_page_is_enough(self, connect_to, watched):
        """Sentinels that allow these two alone name the master; without them they say so."""
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(one.client()) for one in watched.sentinels]

            def allow(*rules):
                for client in clients:
                    given = ("reset", "on", f">{SECRET}", "-@all", *rules)
                    client.execute_command("ACL", "SETUSER", "asks", *given)

            store = connect_to(watched, sentinel_kwargs={"username": "asks", "password": SECRET})
            allow("+sentinel|master", "+sentinel|get-master-addr-by-name")
            round_trip(store)
            store.close()  # the next connection asks anew
            allow()
            with pytest.raises(StoreError, match=r"no permissions to run the 'sentinel"):
                take(store, "a/1")

    @pytest.mark.parametrize("how", ["kill", "pause"])
    def test_sentinels_that_are_away(self, connect_to, own_watched, how, caplog):
        """One that answers is enough; without any, the last master counts where it is known."""
        store = connect_to(own_watched, socket_timeout=REPLY)
        round_trip(store)
        for sentinel in own_watched.sentinels[:2]:
            getattr(sentinel, how)()
        for _ in range(20):
            round_trip(store)
            assert renewed(store) is False
        getattr(own_watched.sentinels[2], how)()
        wait_for(lambda: round_trip(store) or "No Sentinel answers" in caplog.text, "the log line")
        for _ in range(20):
            round_trip(store)
        assert caplog.text.count("No Sentinel answers") == 1
        assert f"127.0.0.1:{own_watched.master.port} counts as the master" in caplog.text
        store = connect_to(own_watched, socket_timeout=REPLY)
        with pytest.raises(StoreError, match="no Sentinel names a master") as raised:
            take(store, "a/1")
        for sentinel in own_watched.sentinels if how == "kill" else ():
            assert f"127.0.0.1:{sentinel.port}: Connection refused" in str(raised.value)

    def test_a_replica_counts_as_away(self, own_redis_server):
        """A server that says it is a replica has taken no lock, and its connections are dropped."""
        store = Store(own_redis_server.url)
        round_trip(store)
        with own_redis_server.client() as client:
            before = client.info("stats")["total_connections_received"]
            client.replicaof("127.0.0.1", 1)
            for ask in (
                lambda: take(store, "a/1"),
                lambda: store.renew([([LOCK], "a/1", LONG)], within=WITHIN),
            ):
                with pytest.raises(StoreError, match="no longer the master"):
                    ask()
                client.replicaof("no", "one")
                take(store, "a/1")
                client.replicaof("127.0.0.1", 1)
            client.replicaof("no", "one")
            assert client.info("stats")["total_connections_received"] > before + 2
        assert store.release([LOCK], "a/1") is True
        store.close()


@pytest.mark.extra
class TestAMasterThatReturns:
    """It stood still, another took its place, and it goes on as if nothing had happened."""

    @pytest.fixture
    def stores(self, connect_to, own_watched):
        """Two stores, as two processes have them, whose connections are from before."""
        stores = [connect_to(own_watched) for _ in range(2)]
        for store in stores:
            round_trip(store)
        return stores

    def returned(self, watched, meanwhile=lambda: None):
        """Replace the master by another while it stands still, and let it go on."""
        old = watched.master
        wait_for_replicas(old, 2)
        old.pause()
        try:
            meanwhile()
            new = watched.wait_for_master(other_than=old)
            wait_for(lambda: new.port in watched.named(), "a Sentinel that names the next master")
        finally:
            old.resume()
        assert is_master(old)  # for some seconds more
        return old, new

    def test_no_two_hold_a_lock(self, own_watched, stores):
        """Old connections take none where they would be alone with it, and renew none there."""
        with Holding(own_watched.url, {"master_name": MASTER_NAME}) as holding:
            round_trip(holding.store)
            old, new = self.returned(own_watched)
            one, other = stores
            alone = Store(old.url)
            take(alone, "a/1")  # as by one who asked in the moment of the change
            alone.close()
            assert renewed(one) is False
            assert one.renew([([LOCK], "a/1", LONG)]) == [False]
            lease = holding.take("export:7", timeout=LEASE)
            assert exists(new, LOCK)
            assert isinstance(other.acquire([LOCK], "b/1", LONG, HOLDER), Conflict)
            holding.wait_renewed(lease)
            assert isinstance(other.acquire([LOCK], "b/1", LONG, HOLDER), Conflict)

    def test_a_task_is_parked_on_the_next_one(self, own_watched, stores):
        """Its message is acknowledged when it is where it will be kept."""
        _, new = self.returned(own_watched)
        lines = Lines(stores[0].lock_server, "dislock", "here", [].extend)
        take(stores[0], "a/1")
        lines.enlist(LOCK)
        ticket = Ticket("b:0:0", marked=False, message=b"{}")
        assert isinstance(lines.park([LOCK], "b@w/1", LONG, HOLDER, ticket), Parked)
        with new.client() as client:
            assert client.hexists(f"{LOCK}:tickets", "b:0:0")
            assert client.hexists("dislock:lines:here", LOCK)

    def test_an_answer_of_one_that_was_replaced_meanwhile_does_not_count(
        self, connect_to, own_watched, stores
    ):
        """What it hands over is not taken; what reached it while it stood still is asked again."""
        told = queue.Queue()

        def wait():
            try:
                told.put(stores[0].wait(LOCK, "w/1", LONG))
            except StoreError as exc:
                told.put(exc)

        store = connect_to(own_watched, socket_timeout=PATIENCE)
        round_trip(store)
        taking = threading.Thread(target=take, args=(store, "a/1"))
        waiter = threading.Thread(target=wait)
        with own_watched.master.client() as client:
            waiter.start()
            wait_for(lambda: client.info("clients")["blocked_clients"] == 1, "the waiter")
        old, new = self.returned(own_watched, meanwhile=taking.start)
        with old.client() as client:
            client.rpush(f"{LOCK}:wake:w/1", "1 30000 30000")
        waiter.join()
        assert isinstance(told.get(), StoreError)
        taking.join()
        assert exists(new, LOCK)


def renewed(store):
    """Renew a lease of a/1 as the watchdog does, which tries again where there is no answer."""
    while True:
        with contextlib.suppress(StoreError):
            answer = store.renew([([LOCK], "a/1", LONG)], within=2 * REPLY)[0]
            assert isinstance(answer, bool), answer
            return answer


@pytest.fixture(scope="module")
def pair(redis_program, tmp_path_factory):
    """A master and its one replica."""
    with RedisServer(tmp_path_factory.mktemp("master"), args=FAST_SYNC) as master:
        follow = [*FAST_SYNC, "--replicaof", "127.0.0.1", str(master.port)]
        with RedisServer(tmp_path_factory.mktemp("replica"), args=follow) as replica:
            yield master, replica


class TestReplicas:
    @pytest.fixture
    def replicated(self, pair):
        """The two of them, empty."""
        with pair[0].client() as client:
            client.flushall()
        wait_for_replicas(pair[0], 1)
        return pair

    def test_an_acquisition_counts_when_the_replicas_have_it(self, connect, replicated):
        """As many as dislock_min_replicas asks for; nobody waits for them without it."""
        master, replica = replicated
        store = connect(master.url)
        round_trip(store)
        with master.client() as client:
            assert "cmdstat_wait" not in client.info("commandstats")
        used(master.url, min_replicas=1)
        store = connect(master.url, {"min_replicas": 1})
        take(store, "a/1")
        assert exists(replica, LOCK)
        assert isinstance(store.acquire([LOCK], "b/1", LONG, HOLDER), Conflict)
        assert store.release([LOCK], "a/1") is True

    def test_an_acquisition_that_too_few_replicas_have_is_given_back(self, connect, replicated):
        """With too few replicas an acquisition is a StoreError, and the lock is free again."""
        master, replica = replicated
        store = connect(master.url, {"min_replicas": 1})
        take(store, "a/1")
        replica.pause()
        assert isinstance(store.acquire([LOCK], "b/1", LONG, HOLDER), Conflict)  # at once, as ever
        other = "dislock:{other}"
        with pytest.raises(StoreError, match="only 0 of 1 replicas"):
            take(store, "b/1", lock=other)
        assert not exists(master, other)
        replica.resume()
        wait_for_replicas(master, 1)
        take(store, "c/1", lock=other)

    def test_a_task_counts_as_parked_when_the_replicas_have_it(self, connect, replicated):
        """Else its message is not acknowledged: it comes again, and finds the place that it has."""
        master, replica = replicated
        store = connect(master.url, {"min_replicas": 1})
        lines = Lines(store.lock_server, "dislock", "here", [].extend)
        take(store, "a/1")

        def park(task):
            ticket = Ticket(f"{task}:0:0", marked=False, message=b"{}")
            return lines.park([LOCK], f"{task}@w/1", LONG, HOLDER, ticket)

        assert isinstance(park("b"), Parked)
        assert exists(replica, f"{LOCK}:tickets")
        replica.pause()
        with pytest.raises(StoreError, match="only 0 of 1 replicas"):
            park("c")
        replica.resume()
        wait_for_replicas(master, 1)
        assert park("c").place == 2

    def test_a_user_that_may_not_wait_for_replicas_is_told(self, connect, replicated):
        """With dislock_min_replicas WAIT is needed, and named where it is missing."""
        master, _ = replicated
        rules = RULES.replace("PASSWORD", SECRET).split()
        with master.client() as client:
            client.execute_command("ACL", "SETUSER", "limited", *rules)
            store = connect(
                f"redis://limited:{SECRET}@127.0.0.1:{master.port}", {"min_replicas": 1}
            )
            with pytest.raises(StoreError, match="may not run WAIT;"):
                check_scripts(store.lock_server, "dislock")
            client.execute_command("ACL", "SETUSER", "limited", "+wait")
            check_scripts(store.lock_server, "dislock")
            take(store, "a/1")

    def test_replicas_of_a_cluster_count_for_their_master(self, cluster):
        """In a cluster the replicas of the lock's own node are asked."""
        store = Store(cluster.url, {"min_replicas": 1})
        round_trip(store)
        store.close()
        store = Store(cluster.url, {"min_replicas": 2})
        with pytest.raises(StoreError, match="only 1 of 2 replicas"):
            take(store, "a/1")
        store.close()


class TestCluster:
    def test_a_batch_over_all_nodes_is_answered_in_its_order(self, connect, cluster):
        """Renewals of leases on all nodes come back each in its place."""
        store = connect(cluster.url)
        locks = [f"dislock:{{batch-{number}}}" for number in range(60)]
        for lock in locks[::2]:
            take(store, "a/1", lock=lock)
        leases = [([lock], "a/1", LONG) for lock in locks]
        assert store.renew(leases, within=WITHIN) == [True, False] * 30
        assert all(store.release([lock], "a/1") for lock in locks[::2])

    def test_a_node_that_is_away_hides_no_others_locks(self, connect, cluster):
        """What is on the others comes first, then the error; their leases are renewed in time."""
        store = connect(cluster.url, {"socket_timeout": REPLY})
        locks = [name_on(cluster.masters, number, "away") for number in range(3)]
        for lock in locks:
            take(store, "a/1", lock=lock)
        leases = [([lock], "a/1", LONG) for lock in locks]
        assert store.renew(leases, within=WITHIN) == [True, True, True]
        cluster.masters[0].pause()
        try:
            for _ in range(2):
                away, *renewals = store.renew(leases, within=2 * REPLY)
                assert isinstance(away, StoreError)
                assert renewals == [True, True]
            failed = []
            overview = Overview(store.lock_server, "dislock")
            found = [one.name for one in all_locks(overview, failed)]
            assert set(locks) & set(found) == set(locks[1:])
            assert len(failed) == 1
        finally:
            cluster.masters[0].resume()
        assert all(store.release([lock], "a/1") for lock in locks)

    def test_what_a_start_has_cost_is_counted_on_each_node(self, connect, cluster):
        """Of several locks, each by its own terms."""
        store, terms = connect(cluster.url), (Terms(limit=9, cost=3), Terms(limit=8, cost=2))
        locks = [name_on(cluster.masters, number, "spent") for number in (0, 1)]
        assert store.acquire(locks, "a/1", LONG, "{}", terms=terms)
        assert store.spent(locks, "a/1", 1, terms)
        assert store.release(locks, "a/1")
        assert not store.spent(locks, "a/1", 1, terms)

    def test_an_acquisition_that_fails_halfway_is_given_back(self, connect, cluster):
        """The error is the caller's, and no lock is left taken for nobody."""
        store = connect(cluster.url, {"socket_timeout": REPLY})
        locks = [name_on(cluster.masters, number, "halfway") for number in (0, 1)]
        round_trip(store, locks[0])
        cluster.masters[1].pause()
        try:
            with pytest.raises(StoreError):
                store.acquire(locks, "a/1", LONG, HOLDER)
            assert not exists(cluster.masters[0], locks[0])
        finally:
            cluster.masters[1].resume()

    @pytest.mark.parametrize(("says", "times"), [("MOVED", 6), ("OOM", 1)])
    def test_a_node_that_refuses_is_left(self, connect, cluster, says, times):
        """Those that send on in a circle after a few times; another error is the caller's."""
        lock, ports = name_on(cluster.masters, 0, "circle"), {}
        with Proxy(cluster.masters[0].port, ports) as proxy:
            ports[b"%d" % cluster.masters[0].port] = b"%d" % proxy.port
            store = connect(f"redis+cluster://127.0.0.1:{proxy.port}")
            round_trip(store, lock)
            answer = {
                "MOVED": f"-MOVED {key_slot(lock.encode())} 127.0.0.1:{proxy.port}",
                "OOM": "-OOM no memory",
            }
            asked = proxy.count(runs(ACQUIRE))
            proxy.fault(runs(ACQUIRE), answer[says], times=1000)
            with pytest.raises(StoreError):
                take(store, "a/1", lock=lock)
            assert proxy.count(runs(ACQUIRE)) - asked == times

    def test_what_is_closed_leaves_no_connection_after_a_later_use(self, cluster):
        """A lock may be released after that, at a node that was not asked before."""
        clients = [server.client() for server in cluster.masters]
        before = sum(len(client.client_list()) for client in clients)
        store = Store(cluster.url)
        store.close()
        for key in ("a", "b", "c", "d", "e", "f"):
            round_trip(store, f"dislock:{{{key}}}")
        assert sum(len(client.client_list()) for client in clients) == before
        for client in clients:
            client.close()

    def test_one_seed_is_enough_and_dead_ones_are_passed_over(self, connect, cluster):
        """The nodes are found from any that answers."""
        store = connect(
            f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.servers[5].port}"
        )
        round_trip(store)

    def test_a_slot_that_moves_is_followed(self, connect, cluster):
        """While a slot moves and after it has, a lock in it is renewed where it is."""
        store = connect(cluster.url)
        lock = name_on(cluster.masters, 0, "renewed")
        take(store, "a/1", lock=lock)
        asked = [([lock], "a/1", LONG)]
        assert store.renew(asked, within=WITHIN) == [True]
        with cluster.moving(lock):
            # The key has left already, but the slot is still the old node's: it says ASK.
            for _ in range(2):
                assert store.renew(asked, within=WITHIN) == [True]
        for _ in range(2):  # now MOVED
            assert store.renew(asked, within=WITHIN) == [True]
        assert store.release([lock], "a/1") is True

    def test_a_slot_that_was_on_no_node_is_looked_for_again(self, connect, cluster):
        """Also by one who only renews; an operator has mended the cluster meanwhile."""
        store = connect(cluster.url)
        lock = name_on(cluster.masters, 0, "uncovered")
        take(store, "a/1", lock=lock)
        asked, slot = [([lock], "a/1", LONG)], key_slot(lock.encode())

        def on(servers, command):
            for server in servers:
                with server.client() as client, contextlib.suppress(redis.ResponseError):
                    client.execute_command("CLUSTER", command, slot)

        def renewal():
            return store.renew(asked, within=WITHIN)[0]

        def is_up(server):
            with server.client() as client:
                return client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"

        try:
            on(cluster.servers, "DELSLOTS")
            wait_for(lambda: "is on no node" in str(renewal()), "a map without the slot")
        finally:
            on(cluster.masters[:1], "ADDSLOTS")
            wait_for(lambda: all(map(is_up, cluster.servers)), "the cluster")
        wait_for(lambda: renewal() is True, "a renewal")
        assert store.release([lock], "a/1") is True

    def test_a_lock_of_a_slot_that_moves_is_refused_and_kept(self, connect, cluster):
        """Its holder goes on, and is told to others; a free one is taken when the slot is there."""
        store = connect(cluster.url)
        lock = name_on(cluster.masters, 0, "alone")
        token = take(store, "a/1", lock=lock)
        with cluster.moving(lock, first=[f"{lock}:of-another"]):
            assert store.acquire([lock], "b/1", LONG, HOLDER).owner == "a/1"  # on the old node
            assert take(store, "a/1", lock=lock) == token
            assert store.renew([([lock], "a/1", LONG)], within=WITHIN) == [True]
            assert [holding.owner for holding in store.holders(lock)] == ["a/1"]
            with cluster.masters[0].client() as client:
                client.delete(lock)
            with pytest.raises(StoreError, match="its slot is being moved"):
                store.acquire([lock], "b/1", LONG, HOLDER)
        take(store, "b/1", lock=lock)
        assert store.release([lock], "b/1") is True

    @pytest.mark.parametrize("moved", ["limit", "starts", "a mark"])
    @pytest.mark.parametrize("barred", ["paused", "rated"])
    def test_a_pause_is_heeded_while_its_slot_moves(
        self, connect, cluster, barred, moved, monkeypatch
    ):
        """So is a rate; whichever node has which key: the lock is refused, or not to be had now."""
        monkeypatch.setattr(cluster_module, "WHOLE_LOOKS", 2)
        store, terms = connect(cluster.url), (Terms(limit=9, rate=Rate(1, 3600.0)),)
        lines = Lines(store.lock_server, "dislock", "home", lambda _turns: None)
        lock = name_on(cluster.masters, 0, f"{barred}-{moved}")
        if barred == "paused":
            store.override(lock, limit=0)
        assert bool(store.acquire([lock], "a/1", LONG, HOLDER, terms=terms)) is (barred == "rated")
        store.release([lock], "a/1")
        store.remember(lock, "1", "what moves first", LONG)
        first = [f"{lock}:mark:1" if moved == "a mark" else f"{lock}:{moved}"]
        with cluster.moving(lock, first=first):
            for ask in (
                lambda: store.acquire([lock], "b/1", LONG, HOLDER, terms=terms),
                lambda: lines.park(
                    [lock], "1@w/1", LONG, HOLDER, Ticket("1:0:0", False, terms=terms)
                ),
            ):
                with contextlib.suppress(StoreError):
                    assert isinstance(ask(), Conflict)
            assert list(store.holders(lock)) == []
        answer = store.acquire([lock], "b/1", LONG, HOLDER, terms=terms)
        assert (type(answer), answer.early) == (Conflict, barred == "rated")

    def test_a_mark_of_a_slot_that_moves_is_found(self, connect, cluster):
        """What is remembered of a task is found on either node, though its lock is elsewhere."""
        store = connect(cluster.url)
        lock = name_on(cluster.masters, 0, "mark")
        for task_id in ("1", "2"):
            store.remember(lock, task_id, f"done {task_id}", LONG)
        first = [f"{lock}:done:1"]
        with cluster.moving(lock, first=first):
            assert store.recall(lock, "1") == "done 1"
            assert store.recall(lock, "2") == "done 2"
            assert store.recall(lock, "3") is None
            store.remember(lock, "3", "done 3", LONG)
        assert [store.recall(lock, task_id) for task_id in "123"] == ["done 1", "done 2", "done 3"]

    @pytest.mark.parametrize(
        ("more", "missing"),
        [
            ("+asking +cluster|slots", ""),
            ("+cluster|slots", "may not run ASKING;"),
            ("+asking", "'cluster"),
            ("+asking +cluster|slots -hscan", "may not run HSCAN;"),
            ("+asking +cluster|slots -blpop", "may not run BLPOP;"),
            ("+asking +cluster|slots resetkeys ~a", "may not touch all keys"),
        ],
    )
    def test_the_user_of_the_page_is_enough_on_every_node(self, cluster, more, missing):
        """The documented rules are enough on all nodes; what one of them forbids is named."""
        rules = [*RULES.replace("PASSWORD", SECRET).split(), "+asking", "+cluster|slots"]
        given = [*RULES.replace("PASSWORD", SECRET).split(), *more.split()]
        with contextlib.ExitStack() as stack:
            for number, server in enumerate(cluster.servers):
                client = stack.enter_context(server.client())
                own = given if number == 2 or "cluster|" not in more else rules
                client.execute_command("ACL", "SETUSER", "limited", "reset", *own)
                stack.callback(client.execute_command, "ACL", "DELUSER", "limited")
            store = Store(cluster.url.replace("://", f"://limited:{SECRET}@"))
            stack.callback(store.close)
            if missing:
                with pytest.raises(StoreError, match=re.escape(missing)):
                    check_scripts(store.lock_server, "dislock")
                return
            check_scripts(store.lock_server, "dislock")
            for number in range(3):
                round_trip(store, name_on(cluster.masters, number, "allowed"))
            lock = name_on(cluster.masters, 0, "allowed")
            take(store, "a/1", lock=lock)
            with cluster.moving(lock):
                assert store.acquire([lock], "b/1", LONG, HOLDER).owner == "a/1"
                assert store.wait(lock, "b/1", 0.01) is None
            assert store.release([lock], "a/1") is True


class TestParkedInAClusterThatMoves:
    """Parked tasks while the slot of their lock moves, its keys on two nodes."""

    def line_on(self, cluster, name, pause):
        """A line with a task in each state: done, running, with its turn, and two that wait."""
        server = SimpleNamespace(store=partial(Store, cluster.url, driver=Driver(pause)))
        line = Broker(server, lock=name_on(cluster.masters, 0, name))
        line.ask("first")
        for task in ("done", "runs", "turn", "a", "b"):
            assert isinstance(line.park(task, ttl=LONG), Parked)
        line.end("first")
        assert isinstance(line.ask("done", marked=True), Granted)
        assert line.end("done")
        assert isinstance(line.ask("runs", marked=True), Granted)
        line.store.release([line.lock], owner_of("runs"))  # it is killed: the next has its turn
        assert line.given() == ["done", "runs", "turn"]
        return line

    def keys(self, lock, server):
        with server.client() as client:
            return {name.decode(): client.dump(name) for name in client.keys(f"{lock}*")}

    @pytest.mark.parametrize(
        ("which", "first"),
        [
            *((which, True) for which in ("", ":line", ":tickets", ":handed", ":running")),
            *((which, False) for which in ("", ":line", ":done:done:0:0")),
        ],
    )
    def test_nothing_is_done_while_its_keys_are_on_two_nodes(
        self, cluster, which, first, monkeypatch
    ):
        """Whichever of them moves first, or last, what would need another one changes nothing."""
        monkeypatch.setattr(cluster_module, "WHOLE_LOOKS", 1)
        name = f"halves-{which}-{first}".replace(":", "-")
        line = self.line_on(cluster, name, pause=lambda _seconds: None)
        lock, store = line.lock, line.store
        source, target = cluster.nodes_of(lock)
        before = self.keys(lock, source)
        moved = {lock + which} if first else set(before) - {lock + which}
        assert len(before) == 7
        with cluster.moving(lock, first=sorted(moved)):
            for ask in (
                *(partial(line.ask, task, marked=True) for task in ("done", "runs", "turn", "a")),
                partial(line.ask, "x", marked=True),
                partial(line.park, "x"),
                *(partial(line.leave, "a", how) for how in (OVER, ASIDE, RUNS)),
                partial(line.lines.give_back, lock, "turn:0:0"),
                partial(store.acquire, [lock], "c/1", LONG, HOLDER, place=LONG),
                partial(line.end, "done"),
                partial(store.release_dead, [lock], "done@w:1/"),
            ):
                with pytest.raises(StoreError, match="is being moved to another node"):
                    ask()
            assert line.lines.sweep([lock]) == {}
            assert self.keys(lock, source).keys() == before.keys() - moved
        assert self.keys(lock, target) == before
        assert line.published == []
        assert line.ask("done", marked=True) == Done()
        store.close()

    def test_a_lease_that_ends_meanwhile_is_handed_on_when_the_slot_has_arrived(self, cluster):
        """The lock is free at once, and the first in line has its turn."""
        free = []

        def arrive(_seconds):
            free.append(line.store.holders(line.lock) == [])
            finish()

        line = self.line_on(cluster, "ends", pause=arrive)
        assert isinstance(line.ask("turn", marked=True), Granted)
        with cluster.moving(line.lock, first=[f"{line.lock}:line"]) as finish:
            assert line.end("turn") is True  # it was not lost
        assert free == [True]
        assert line.given() == ["a"]
        line.store.close()

    @pytest.mark.extra
    def test_none_is_lost_or_runs_twice_while_its_slot_moves(self, cluster):
        """A line is worked off while its slot goes to and fro; each task of it runs once."""
        tasks, sent, ran = [f"t{number}" for number in range(150)], queue.Queue(), []
        server = SimpleNamespace(store=partial(Store, cluster.url))
        line = Broker(server, lock=name_on(cluster.masters, 0, "to-and-fro"))
        line.ask("first")
        for task in tasks:
            line.park(task, ttl=LONG)

        def send():
            with contextlib.suppress(IndexError):  # two threads send
                while True:
                    sent.put(line.published.pop(0).ticket.removesuffix(":0:0"))

        def work():
            while (task := sent.get()) != "":
                try:
                    if isinstance(line.ask(task, marked=True), Granted):
                        ran.append(task)
                        line.end(task)
                    send()
                except StoreError:
                    sent.put(task)  # put off

        worker = threading.Thread(target=work)
        worker.start()
        try:
            line.end("first")
            send()
            moves = 0
            while len(ran) < len(tasks) or moves < 4:
                with cluster.moving(line.lock, first=[f"{line.lock}:tickets"]):
                    moves += 1
                with contextlib.suppress(StoreError):
                    line.lines.sweep([line.lock])
                send()
            assert sorted(ran) == sorted(tasks)
        finally:
            sent.put("")
            worker.join()
            line.store.close()


def name_on(masters, number, what="any"):
    """Return a lock in one of the slots that this master has at the start."""
    size = 16384 // len(masters)
    return next(
        name
        for name in (f"dislock:{{{what}-{i}}}" for i in range(1000))
        if key_slot(name.encode()) // size == number
    )


def exists(server, name):
    """Look whether this server has the lock."""
    with server.client() as client:
        return bool(client.exists(name))

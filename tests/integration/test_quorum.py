import contextlib
import random

import pytest

from celery_dislock.scripts import ACQUIRE, CRASH
from celery_dislock.scripts.names import crashes_of
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.quorum import Names
from celery_dislock.servers.replies import Granted, StalledState
from celery_dislock.servers.requests import Execution
from celery_dislock.servers.store import Store
from proof.proxy import Proxy, runs, swallow_reply
from tests.holding import Holding, all_locks, wait_for
from tests.integration.servers import HOLDER, LOCK, LONG, WITHIN, round_trip, several, take
from tests.pace import LEASE, REPLY
from tests.redis_server import RedisServer

TRANSPORT = {"socket_timeout": REPLY}  # how long a server that is frozen is waited for at first
PATIENT = {
    "socket_timeout": 4 * REPLY
}  # where one that is slow must not be taken for one that is away

DOWN = {"dead": (RedisServer.kill, RedisServer.start), "frozen": (RedisServer.pause, None)}


@pytest.fixture(autouse=True)
def names_are_the_tests_own(monkeypatch):
    """These tests use the same owners again and again, which no process does."""
    monkeypatch.setattr(Names, "_changed", {})


@pytest.fixture(scope="module")
def five(redis_program, tmp_path_factory):
    """The servers of all these tests."""
    with several(5, tmp_path_factory.mktemp("five")) as servers:
        yield servers


@pytest.fixture
def servers(five):
    """Five servers that run and are empty."""
    for server in five:
        if server.running:
            server.resume()
        server.start()
    yield five
    for server in five:
        if server.running:
            server.resume()
            with server.client() as client:
                client.flushall()


@pytest.fixture
def urls(servers):
    return [server.url for server in servers]


@pytest.fixture
def store(urls):
    store = Store(urls, TRANSPORT)
    yield store
    store.close()


@pytest.fixture
def patient(urls):
    store = Store(urls, PATIENT)
    yield store
    store.close()


@pytest.fixture
def holding(urls):
    with Holding(urls, TRANSPORT) as holding:
        yield holding


@pytest.fixture
def others(urls):
    """Another process's locks."""
    with Holding(urls, TRANSPORT) as others:
        yield others


def down(servers, how):
    for server in servers:
        DOWN[how][0](server)


def up(servers, how):
    for server in servers:
        if how == "frozen":
            server.resume()
        else:
            server.start()


def fail(servers, store):
    """Let servers not answer once."""
    down(servers, "frozen")
    take(store, "a/1", lock="dislock:{other}")
    up(servers, "frozen")


def names_on(server):
    with server.client(decode_responses=True) as client:
        return client.keys("*")


def nothing_on(servers):
    """Tell whether none of these servers keeps anything."""
    return not any(names_on(server) for server in servers)


class TestAllHolders:
    def test_every_lock_of_a_majority_is_found(self, servers, store):
        """Locks are found though servers are dead and others have forgotten them."""
        lock, fresh = LOCK, "dislock:{export:8}"
        take(store, "a/1", lock=lock)
        for server in servers[:2]:
            with server.client() as client:
                client.delete(lock)
        with servers[0].client() as client:  # granted there, and never by a majority
            client.hset("dislock:{export:9}", "c/1", f"1 {10**14} 5 500 x {{}}")
        take(store, "b/1", lock=fresh)
        assert found(store) == {lock: ["a/1"], fresh: ["b/1"]}
        down(servers[:2], "dead")
        assert found(store) == {lock: ["a/1"], fresh: ["b/1"]}

    def test_servers_that_were_restarted_are_read_at_once(self, servers, store):
        """The old connections are replaced, without an error to the caller."""
        take(store, "a/1")
        assert found(store) == {LOCK: ["a/1"]}
        for server in servers:
            server.restart()
        assert found(store) == {}


def found(store):
    return {
        lock.name: [holder.owner for holder in lock.holders]
        for lock in all_locks(Overview(store.lock_server, "dislock"))
        if lock.holders
    }


class TestMinority:
    @pytest.mark.parametrize("how", DOWN)
    def test_two_of_five_may_be_away(self, servers, store, urls, how):
        """Every operation works, also of a process that starts then; both are asked again later."""
        round_trip(store)
        away = random.sample(servers, 2)
        down(away, how)
        late = Store(urls, TRANSPORT)
        for one in (store, late) * 2:
            round_trip(one)
            assert one.ping()["role"] == "master"
        late.close()
        up(away, how)
        wait_for(lambda: nothing_on(servers), "what frozen servers had been sent to be undone")

        def on_all_five():
            take(store, "a/1")
            try:
                return all(names_on(server) for server in servers)
            finally:
                store.release([LOCK], "a/1")

        wait_for(on_all_five, "a lock on all servers")

    @pytest.mark.parametrize("place", [0.0, LONG], ids=["asks", "waits"])
    def test_nobody_is_refused_because_of_servers_left_alone(self, servers, patient, place):
        """Two servers missed a release, two others failed a moment ago: a majority is free."""
        for server in servers[:2]:
            with contextlib.closing(Store(server.url)) as one:
                take(one, "gone/1")
        fail(servers[2:4], patient)
        assert isinstance(patient.acquire([LOCK], "b/1", LONG, HOLDER, place=place), Granted)

    def test_no_lease_is_lost_because_of_servers_that_are_left_alone(self, servers, patient):
        """A majority has the lease, and two of it failed a moment ago: it is renewed."""
        take(patient, "a/1")
        for server in servers[:2]:
            with server.client() as client:
                client.delete(LOCK)
        fail(servers[2:4], patient)
        assert patient.renew([([LOCK], "a/1", LONG)], within=WITHIN) == [True]
        fail(servers[2:4], patient)
        assert patient.renew([([LOCK], "a/1", LONG)]) == [True]

    def test_connections_that_were_cut_are_not_an_outage(self, servers, patient, caplog):
        """A server that was restarted, or forgot its scripts, is asked anew without a word."""
        round_trip(patient)
        for server in servers[:3]:
            with server.client() as client:
                client.script_flush()
        for server in servers[2:]:
            server.restart()
        take(patient, "a/1")
        assert [names_on(server) for server in servers] == [[LOCK]] * 5
        assert patient.renew([([LOCK], "a/1", LONG)]) == [True]
        assert patient.release([LOCK], "a/1") is True
        assert not [said for said in caplog.messages if "server" in said]


def test_the_name_of_an_owner_is_forgotten_an_hour_after_its_last_use():
    """A process that runs for months does not collect the names of all that failed."""
    now = 0.0
    names = Names(lambda: now)
    for owner in ("used", "done"):
        names.change(owner)
        assert names.of(owner) == owner
        assert names.of(owner, attempts=True) == f"{owner}#1"
    for now in (3000.0, 6000.0):  # noqa: B007 -- the clock
        assert names.of("used") == "used#1"
    names.change("another")
    assert [names.of(owner, attempts=True) for owner in ("used", "done", "another")] == [
        "used#1",
        "done",
        "another#1",
    ]


class TestHeld:
    def test_two_frozen_servers_delay_no_renewal_for_long(self, servers, holding):
        """The leases of a process are renewed in time on the others."""
        leases = [holding.take(f"export:{number}", timeout=1.2 * LEASE) for number in range(20)]
        wait_for(lambda: all(lease.renewals for lease in leases), "a renewal of each")
        down(servers[3:], "frozen")
        wait_for(lambda: all(lease.renewals > 3 for lease in leases), "three more of each")
        assert holding.named("lock_lost") == []
        assert all(lease.held for lease in leases)
        up(servers[3:], "frozen")

    def test_a_dead_execution_is_released_by_the_start_of_its_name(self, servers, store):
        """Who has seen a process end frees its locks on all servers; so does an operator."""
        servers[0].kill()
        take(store, "id@w:7/1")
        assert store.release_dead([LOCK], "id@w:7/") == 1
        assert nothing_on(servers[1:])
        assert store.free(LOCK, "a/1", take(store, "a/1")) is True
        assert store.holders(LOCK) == []

    def test_a_crash_is_counted_on_a_majority(self, servers, store):
        """As often as it was counted on most servers; the same one counts once."""
        crashes = [crashes_of(LOCK, "id:0:0")]
        servers[0].kill()
        run = store.lock_server.run
        assert [run(CRASH, crashes, nonce, 60_000) for nonce in ("a", "b", "b")] == [1, 2, 2]

    def test_a_stalled_execution_is_renewed_by_the_start_of_its_name(self, servers, store):
        """On a majority; and where no majority has the lease, on none that counts."""
        take(store, "id@w:7/1")
        before = store.holders(LOCK)[0].remaining
        servers[0].kill()
        wait_for(lambda: store.holders(LOCK)[0].remaining < before - 0.1, "an older lease")
        execution = Execution([LOCK], "id@w:7/", LONG, 0.05, 0.0)
        (found,) = store.renew_stalled([execution], within=WITHIN)
        assert found.unrenewed >= 0.05
        assert store.holders(LOCK)[0].remaining > before - 0.1
        for server in servers[1:3]:
            with server.client() as client:
                client.delete(LOCK)
        (found,) = store.renew_stalled([execution._replace(overdue=0.0)], within=WITHIN)
        assert found == StalledState(0, 0)


class TestLostReplies:
    @pytest.fixture
    def proxied(self, servers):
        """A store that reaches the first of the servers through a proxy, and that proxy."""
        with Proxy(servers[0].port) as proxy:
            store = Store([proxy.url, *(server.url for server in servers[1:])], PATIENT)
            round_trip(store)
            yield store, proxy
            store.close()

    def test_an_acquisition_that_one_server_did_not_confirm_is_undone_there(self, proxied, servers):
        """A server whose answer did not come is not counted, and keeps nothing."""
        store, proxy = proxied
        proxy.fault(runs(ACQUIRE), swallow_reply)
        take(store, "a/1")
        assert proxy.count(runs(ACQUIRE), swallow_reply) == 1
        wait_for(lambda: nothing_on(servers[:1]), "the undoing on the first server")
        assert store.renew([([LOCK], "a/1", LONG)], within=WITHIN) == [True]
        assert store.release([LOCK], "a/1") is True

import signal
import threading
import time

import hiredis
import pytest

from celery_dislock.config.terms import Terms
from celery_dislock.exceptions import StoreError
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import StalledState
from celery_dislock.servers.requests import Ending, Execution, LateRelease
from celery_dislock.servers.store import Store
from celery_dislock.servers.view import LockState
from tests.conftest import BOTH
from tests.holding import all_locks
from tests.integration.lua_server import LuaServer
from tests.integration.servers import HOLDER, LOCK, LONG, WITHIN, take
from tests.integration.test_async_servers import used
from tests.redis_server import RedisServer

OTHER = "dislock:{other}"


def renew(store, owner, ttl=LONG, lock=LOCK):
    """Renew one lease."""
    (answer,) = store.renew([([lock], owner, ttl)], within=WITHIN)
    return answer


@BOTH
class TestAcquire:
    def test_of_two_leases_that_end_at_once_the_older_is_named(self, store, redis_client):
        """Each refusal names the same holder, in any order in which the server keeps the leases."""
        ends = (int(redis_client.time()[0]) + 60) * 1000
        for owner, token in ("younger", 2), ("older", 1):
            record = f"1 {ends} {token} {ends - 60_000} s {{}}"
            redis_client.hset(LOCK, owner, record)
        assert store.acquire([LOCK], "asker", LONG, HOLDER).owner == "older"

    def test_an_expired_lease_beside_a_live_one_is_swept_out(self, store, redis_client):
        """A lease that ended in a hash that lives on is removed by the next one that is granted."""
        take(store, "a/1")
        redis_client.hset(LOCK, "dead/1", "1 1000 5 500 x {}")
        take(store, "a/1")
        assert redis_client.hkeys(LOCK) == ["a/1"]


@pytest.mark.parametrize("task", ["7", "a:7"])
@pytest.mark.parametrize(
    ("holder", "is_copy"),
    [
        ("{}@w1:1/1", True),
        ("~{}@w1:1/1", True),  # left to expire
        ("{}:~1@w1:1:MainThread/", True),  # of a lock that its body takes
        ("{}:2:0#", True),  # its own turn
        ("11/dislock:{{b}}{}:0:0##", True),  # kept for it, as it waits for the next lock
        ("b:{}@w1:1/1", False),
        ("{}7@w1:1/1", False),
        ("w1:1:MainThread/{}@", False),
        ("{}:2:0:0:0#", False),
    ],
)
def test_a_refusal_says_whether_the_same_task_is_in_the_way(task, holder, is_copy):
    """A copy of it must not be skipped: its message may be the only one of that work."""
    store = LuaServer().store()
    take(store, holder.format(task))
    assert store.acquire([LOCK], f"{task}@w2:2/1", LONG, HOLDER).is_copy is is_copy


@pytest.mark.parametrize(("ttl", "lasts"), [(0.0000001, 1), (0.0105, 11), (30.0, 30_000)])
def test_no_lease_ends_before_its_time(ttl, lasts):
    """A part of a millisecond counts as a whole one, in a grant and in a renewal."""
    server = LuaServer()
    store = server.store()
    take(store, "a/1", ttl=ttl)
    assert server.ttls() == {LOCK: lasts}
    assert renew(store, "a/1", ttl=ttl)
    assert server.ttls() == {LOCK: lasts}


class TestRenewStalled:
    """What the main process of a worker does for a pool process that has stopped."""

    START, OWNER = "id-1@w:7/", "id-1@w:7/123"
    OVERDUE = 20.0  # seconds

    @pytest.fixture
    def server(self):
        return LuaServer()

    @pytest.fixture
    def store(self, server):
        return server.store()

    def renew_stalled(self, store, *, start=START, overdue=OVERDUE, longest=0.0, locks=(LOCK,)):
        execution = Execution(list(locks), start, LONG, overdue, longest)
        (answer,) = store.renew_stalled([execution], within=WITHIN)
        return answer

    @pytest.mark.parametrize(
        "start", ["id-1@w:8/", "id-2@w:7/", "d-1@w:7/", "id-1@x:7/", "id-1@w:7/1234", "id-1@w.7/"]
    )
    def test_no_other_executions_lease_is_touched(self, store, server, start):
        """Another process, task or host, a part of its name, or a pattern: neither of the two."""
        take(store, self.OWNER)
        server.advance(self.OVERDUE)
        before = server.contents()
        assert self.renew_stalled(store, start=start) == StalledState(0, 0)
        assert store.release_dead([LOCK], start) == 0
        assert server.contents() == before

    @pytest.mark.parametrize("ended", ["expired", "left", "handed over", "gone"])
    def test_what_its_owner_does_not_hold_is_not_renewed(self, store, server, ended):
        """A stopped process that waited must not keep the lock from the next in line."""
        if ended == "handed over":
            take(store, "a/1")
            assert isinstance(store.acquire([LOCK], self.OWNER, LONG, HOLDER, place=LONG), Conflict)
            store.release([LOCK], "a/1")
        else:
            take(store, self.OWNER)
        if ended == "left":
            store.release([LOCK], self.OWNER, Ending(at_least=LONG))
        if ended == "expired":  # beside another
            store.acquire([LOCK], "b/1", 2 * LONG, HOLDER, terms=(Terms(limit=2),))
            server.advance(LONG)
        if ended == "gone":
            server.lose()
        before = server.contents()
        assert self.renew_stalled(store, overdue=0.0) == StalledState(0, 0)
        assert server.contents() == before

    def test_of_several_keys_each_is_renewed(self, store, server):
        """The longest time without a renewal is told, and what is damaged."""
        other = "dislock:{export:8}"
        take(store, self.OWNER)
        server.advance(self.OVERDUE)
        take(store, self.OWNER, lock=other)
        answer = self.renew_stalled(store, locks=(LOCK, other))
        assert answer == StalledState(self.OVERDUE, self.OVERDUE)

    def test_after_the_clock_was_set_back_it_is_renewed(self, store, server):
        """Its process has renewed it since, and then stopped."""
        take(store, self.OWNER)
        server.advance(-70)
        assert renew(store, self.OWNER, ttl=LONG)
        server.advance(self.OVERDUE)
        assert self.renew_stalled(store) == StalledState(self.OVERDUE, 0)

    def test_at_its_cap_it_is_renewed_no_more(self, store, server):
        """The answer says so when it is overdue: a process that runs needs no help before."""
        take(store, self.OWNER)
        server.advance(self.OVERDUE - 1)
        assert self.renew_stalled(store, longest=5.0) == StalledState(0, 1)
        server.advance(2)
        before = server.contents()
        assert self.renew_stalled(store, longest=5.0) == StalledState(0, 0, capped=True)
        assert server.contents() == before


class TestAllHolders:
    @pytest.mark.parametrize(
        "prefix", ["*", "d[ia]slock", "d?slock", "\\dislock", "dislöck", "a{b"]
    )
    def test_a_prefix_is_no_pattern(self, store, prefix):
        """Characters that are special to Redis stand for themselves."""
        mine = f"{prefix}:{{export:7}}"
        take(store, "a/1", lock=mine)
        take(store, "b/1")
        assert list(all_holders(store, prefix)) == [mine]


def all_holders(store, prefix="dislock"):
    """Collect who holds which lock."""
    found = all_locks(Overview(store.lock_server, prefix))
    return {lock.name: lock.holders for lock in found if isinstance(lock, LockState)}


@BOTH
class TestFencingToken:
    @pytest.mark.parametrize("ghost", [False, True], ids=["nobody waits", "a dead waiter"])
    def test_it_grows_though_the_servers_clock_was_set_back(self, store, redis_client, ghost):
        """While an older lease is still written there, the next token is greater than its."""
        future = (int(time.time()) + 10**6) * 10**6
        redis_client.hset(LOCK, "dead/1", f"1 1000 {future} 500 x {{}}")
        if ghost:  # so that the leases are counted before it is passed over
            redis_client.zadd(f"{LOCK}:line", {"ghost/1": 1})
            redis_client.hset(f"{LOCK}:places", "ghost/1", "1 1000 1000 x:1 {}")
        for part in ("", ":line", ":places"):
            redis_client.expire(LOCK + part, int(LONG))
        assert take(store, "b/1") == future + 1


class TestPacking:
    def test_commands_are_packed_as_text_alone(self, redis_url, monkeypatch):
        """Hiredis can crash where a signal handler raises while it packs a number."""
        packed = []
        pack = hiredis.pack_command

        def recording(command):
            packed.append(command)
            return pack(command)

        monkeypatch.setattr(hiredis, "pack_command", recording)
        store = Store(f"{redis_url}/3?protocol=3", {"min_replicas": 0})  # redis-py 5: 2
        store.lock_server.send(b"SCRIPT", b"FLUSH")  # so that a script is sent as text, too
        lines = Lines(store.lock_server, "dislock", "here", lambda _turns: None)
        store.acquire([LOCK], "a/1", LONG, HOLDER)
        store.acquire([LOCK], "b/1", LONG, HOLDER, place=LONG)
        store.wait(LOCK, "b/1", 0.01)
        store.renew([([LOCK], "a/1", LONG)], within=5)
        store.clear([LateRelease([LOCK], "b/1")], within=5)
        lines.park([LOCK], "c@w:1/1", LONG, HOLDER, Ticket("c:0:0", False, b"message"))
        lines.sweep([LOCK])
        all_locks(Overview(store.lock_server, "dislock"))
        store.release([LOCK], "a/1")
        store.ping()
        store.close()
        assert {b"HELLO", b"SELECT", b"EVALSHA", b"EVAL", b"BLPOP"} <= {one[0] for one in packed}
        for command in packed:
            assert all(isinstance(part, (str, bytes)) for part in command), command


@pytest.mark.parametrize("batch", [False, True])
def test_a_connection_is_not_used_again_after_an_error(store, redis_client, batch):
    """The next reply on it could belong to the command before."""
    first = store.lock_server.send("CLIENT", "ID")
    assert store.lock_server.send("CLIENT", "ID") == first
    redis_client.set(LOCK, "no lock")
    if batch:
        assert isinstance(renew(store, "a/1"), StoreError)
    else:
        with pytest.raises(StoreError):
            take(store, "a/1")
    assert store.lock_server.send("CLIENT", "ID") != first


def test_a_server_that_comes_back_is_used_again(own_redis_server):
    """After a restart the old connections are replaced, without an error to the caller."""
    store = Store(own_redis_server.url)
    take(store, "a/1")
    assert renew(store, "a/1") is True
    own_redis_server.restart()
    take(store, "b/1")
    assert renew(store, "b/1") is True
    store.close()


class Interrupted(BaseException):
    """As a soft time limit or a terminated task raises it, from a signal handler."""


class TestInterruptedConnection:
    """A connection that was left in the middle of a reply must not be used again."""

    def test_the_next_command_gets_its_own_reply(self, own_redis_server):
        """
        A release is not answered as an interrupted acquire, nor a renewal as another.

        Both get a new connection, when they are sent.  An interruption makes none: it would wait.
        """

        def interrupt(signum, frame):
            raise Interrupted

        def interrupted(call, *args, **options):
            strike = (threading.main_thread().ident, signal.SIGUSR1)
            timer = threading.Timer(0.3, signal.pthread_kill, strike)
            with pytest.raises(Interrupted):
                timer.start()
                call(*args, **options)
            timer.join()

        previous = signal.signal(signal.SIGUSR1, interrupt)
        store = Store(own_redis_server.url, {"socket_timeout": 60.0})
        with own_redis_server.client() as client:
            take(store, "a/1")
            renew(store, "a/1")
            before = client.info("stats")["total_connections_received"]
            own_redis_server.pause()
            interrupted(store.acquire, [OTHER], "b/1", LONG, HOLDER)
            interrupted(store.renew, [([LOCK], "a/1", LONG)], within=60.0)
            own_redis_server.resume()
            assert renew(store, "nobody") is False
            assert store.release([LOCK], "nobody") is False
            assert store.release([OTHER], "b/1") is True  # it had reached the server
            assert client.info("stats")["total_connections_received"] == before + 2
        signal.signal(signal.SIGUSR1, previous)
        store.close()


class TestConnections:
    def test_a_unix_socket_in_both_spellings(self, redis_program, tmp_path):
        """redis-py's unix:// and Celery's redis+socket:// lead to the same locks."""
        with RedisServer(tmp_path, unix_socket=True) as server:
            ours, celerys = Store(server.url), Store(server.broker_url)
            used(server.url)
            take(ours, "a/1")
            assert isinstance(celerys.acquire([LOCK], "b/1", LONG, HOLDER), Conflict)
            assert renew(celerys, "a/1") is True
            ours.close()
            celerys.close()

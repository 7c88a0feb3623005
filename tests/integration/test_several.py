"""Locks of several keys: all or none, in one order for everybody, and without a deadlock."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from celery_dislock import Dislock
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.store import Store
from tests.holding import PATIENCE, name_of, wait_for

LONG = 60.0  # seconds: no lease of these tests runs out by itself
SHORT = 0.5
WITHIN = 10.0
HOLDER = '{"task": "tests.other", "id": "o-1", "worker": "w", "pid": 1}'
A, B, C = NAMES = [name_of(key) for key in "abc"]


@pytest.fixture(params=["single", "cluster"])
def url(request):
    """A server that can be given all keys in one script, and one that cannot."""
    return request.getfixturevalue("redis_url" if request.param == "single" else "cluster_url")


@pytest.fixture
def cluster_url(cluster):
    for master in cluster.masters:
        with master.client() as client:
            client.flushall()
    return cluster.url


@pytest.fixture
def store(url):
    store = Store(url)
    yield store
    store.close()


@pytest.fixture
def dislock(url):
    dislock = Dislock.from_url(url, watchdog_timeout=LONG)
    yield dislock
    dislock.runtime.process.store.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool


def owners(store):
    """Who holds each of the three locks."""
    return [[held.owner for held in store.holders(name)] for name in NAMES]


class TestStore:
    @pytest.mark.parametrize("nth", [0, 1, 2])
    def test_one_that_is_held_is_named_and_none_is_taken(self, store, nth):
        """Whichever is held, the refusal tells which and by whom, and the others stay free."""
        store.acquire([NAMES[nth]], "other", LONG, HOLDER)
        answer = store.acquire(NAMES, "me", LONG, HOLDER)
        assert isinstance(answer, Conflict)
        assert (answer.key, answer.owner) == ("abc"[nth], "other")
        assert owners(store) == [["other"] if n == nth else [] for n in range(3)]

    def test_a_renewal_is_of_all_or_says_no(self, store):
        """A lease of several locks is renewed on each; where one is gone, it is lost."""
        store.acquire(NAMES, "me", SHORT * 20, HOLDER)
        assert store.renew([(NAMES, "me", LONG)], within=WITHIN) == [True]
        assert all(store.holders(name)[0].remaining > LONG / 2 for name in NAMES)
        assert store.renew([(NAMES, "me", LONG)]) == [True]
        store.release([B], "me")
        assert store.renew([(NAMES, "me", LONG), ([A], "me", LONG)], within=WITHIN) == [False, True]
        assert store.renew([(NAMES, "me", LONG)]) == [False]

    def test_the_dead_hold_nothing(self, store):
        """What a dead process held or waited for is freed on each lock."""
        store.acquire([B], "other", LONG, HOLDER)
        store.acquire(NAMES, "dead/1", LONG, HOLDER, place=LONG)
        store.acquire([A], "next", LONG, HOLDER, place=LONG)
        assert store.release_dead(NAMES, "dead/") == 1
        assert owners(store) == [["next"], ["other"], []]
        store.release([B], "other")
        assert owners(store)[1] == []


class TestPlainPython:
    def test_the_block_has_all_of_them(self, dislock, store):
        """The lease tells its keys and their tokens; all are free after the block."""
        with dislock.lock(["b", "a", "b"]) as lease:
            assert lease.key == "a + b"
            assert list(lease.tokens) == ["a", "b"]
            assert [len(found) for found in owners(store)] == [1, 1, 0]
        assert owners(store) == [[], [], []]

    def test_a_waiter_is_handed_one_after_the_other(self, dislock, store, threads):
        """It waits at the first lock that is held, then at the next, and has both in the end."""
        store.acquire([A], "one", LONG, HOLDER)
        store.acquire([B], "two", LONG, HOLDER)
        waiting = threads.submit(acquired, dislock.lock(["a", "b"]))
        wait_for(lambda: in_line(store, A), "its place at the first")
        store.release([A], "one")
        wait_for(lambda: in_line(store, B), "its place at the second")
        assert not waiting.done()
        store.release([B], "two")
        lease = waiting.result(PATIENCE)
        assert [len(found) for found in owners(store)] == [1, 1, 0]
        lease.release()

    def test_a_timeout_gives_all_of_it_up(self, dislock, store):
        """One that waited in vain holds nothing and is in no line; it is told what was held."""
        store.acquire([B], "other", LONG, HOLDER)
        conflict = dislock.lock(["a", "b", "c"]).try_acquire()
        assert (conflict.key, conflict.holder["id"]) == ("b", "o-1")
        assert dislock.lock(["a", "b", "c"]).acquire(timeout=0.05) is False
        assert owners(store) == [[], ["other"], []]
        assert not in_line(store, B)


def acquired(lock):
    """Wait for the lock in this thread; another is to release it, or its watchdog goes on."""
    assert lock.acquire(timeout=PATIENCE)
    assert lock.lease
    return lock.lease


def in_line(store, name):
    """Tell whether somebody waits for the lock."""
    return bool(Overview(store.lock_server, "dislock").lock(name).waiting)


def test_who_has_lost_a_lock_before_waits_without_those_after_it(redis_url):
    """An operator frees the first of two: its owner would wait for one who waits for the second."""
    with closing(Store(redis_url)) as store:
        store.acquire([C], "other/1", LONG, HOLDER)
        assert store.acquire([B, C], "first/1", LONG, HOLDER, place=LONG).key == "c"
        assert store.acquire([B, C], "second/1", LONG, HOLDER, place=LONG).key == "b"
        (holder,) = store.holders(B)
        store.free(B, holder.owner, holder.token)
        store.release([C], "other/1")
        assert store.acquire([B, C], "first/1", LONG, HOLDER, place=LONG).key == "b"
        assert isinstance(store.acquire([B, C], "second/1", LONG, HOLDER, place=LONG), Granted)

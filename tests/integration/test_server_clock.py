"""What comes of it that the clock of the lock server is set; clients go by no wall clock."""

import os
import time
from contextlib import ExitStack, closing

import pytest

from celery_dislock import LockLostError
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.store import Store
from proof.clocks import Clocks, can_be_set
from tests.holding import Holding, wait_for
from tests.programs import NOT_HERE
from tests.redis_server import Client, RedisServer

pytestmark = pytest.mark.skipif(not can_be_set(), reason=f"{NOT_HERE}a C compiler")

KEY, LOCK = "export:7", "dislock:{export:7}"
HOUR = 3600  # seconds
LONG = 30.0  # seconds


@pytest.fixture
def clocks(tmp_path):
    return Clocks(tmp_path / "clocks")


@pytest.fixture
def start(redis_program, tmp_path, clocks):
    """Start servers, each with a clock of its own; return their URLs."""

    def start(names):
        return [
            stack.enter_context(
                RedisServer(tmp_path / name, environment={**os.environ, **clocks.of(name)})
            ).url
            for name in names
        ]

    with ExitStack() as stack:
        yield start


@pytest.fixture
def url(start):
    return start("a")[0]


@pytest.fixture
def store(url):
    with closing(Store(url)) as store:
        yield store


@pytest.fixture
def set_clock(clocks):
    """Set a server's clock; return when it goes by it: Valkey looks at its own now and then."""

    def set_clock(url, name, seconds):
        clocks.set(name, seconds)
        with Client.from_url(url) as client:
            wait_for(lambda: abs(client.time()[0] - time.time() - seconds) < HOUR / 2, "its clock")

    return set_clock


def acquire(store, owner):
    return store.acquire([LOCK], owner, LONG, "{}")


def test_set_forward_it_ends_leases_and_their_holders_are_told(url, store, set_clock):
    """The next holder has a larger token; the first is told at its next renewal."""
    with Holding(url) as holding:
        lease = holding.take(KEY, timeout=LONG)
        set_clock(url, "a", HOUR)
        after = acquire(store, "b/1")
        assert isinstance(after, Granted)
        assert after.tokens[0] > lease.token
        with pytest.raises(LockLostError):
            holding.lock(KEY, timeout=LONG).extend()
        assert lease.lost


def test_set_back_it_keeps_the_leases_of_the_dead_for_longer(url, store, set_clock):
    """A lease that nobody renews or ends lasts for as much longer; a release ends it at once."""
    assert isinstance(acquire(store, "gone/1"), Granted)
    set_clock(url, "a", -HOUR)
    refused = acquire(store, "b/1")
    assert isinstance(refused, Conflict)
    assert HOUR < refused.remaining < HOUR + LONG + 1
    assert store.release([LOCK], "gone/1") is True
    assert isinstance(acquire(store, "b/1"), Granted)


def test_set_back_it_gives_smaller_tokens(url, store, set_clock):
    """A lease that is renewed lasts no longer than it should; the token after it may be smaller."""
    first = acquire(store, "a/1").tokens[0]
    set_clock(url, "a", -HOUR)
    assert store.renew([([LOCK], "a/1", LONG)]) == [True]
    assert acquire(store, "b/1").remaining < LONG + 1
    store.release([LOCK], "a/1")
    assert acquire(store, "b/1").tokens[0] < first


def test_one_of_five_ends_no_lease(start, set_clock):
    """What a majority keeps is kept, whatever one clock says."""
    urls = start("abcde")
    with closing(Store(urls)) as store:
        assert isinstance(acquire(store, "a/1"), Granted)
        for seconds in (HOUR, -HOUR):
            set_clock(urls[2], "c", seconds)
            assert isinstance(acquire(store, "b/1"), Conflict)
            assert store.renew([([LOCK], "a/1", LONG)]) == [True]


def test_one_of_five_ends_a_lease_that_two_others_do_not_have(start, set_clock):
    """The three that have it are just a majority: without one of them, others can make another."""
    urls = start("abcde")
    with ExitStack() as stack:
        quorum, *busy = (stack.enter_context(closing(Store(url))) for url in (urls, *urls[3:]))
        for one in busy:
            acquire(one, "before/1")
        assert isinstance(acquire(quorum, "a/1"), Granted)
        for one in busy:
            one.release([LOCK], "before/1")
        set_clock(urls[2], "c", HOUR)
        assert isinstance(acquire(quorum, "b/1"), Granted)
        assert quorum.renew([([LOCK], "a/1", LONG)]) == [False]

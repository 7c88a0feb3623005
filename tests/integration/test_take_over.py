"""What passes from one execution of a task to another through Redis: a left lease, and a mark."""

import pytest

from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending
from tests.conftest import BOTH

LOCKS = ["dislock:{export:7}", "dislock:{export:8}"]
LOCK = LOCKS[0]
TTL = 60.0  # seconds: no lease of these tests runs out by itself
OLD, NEW = '{"id":"1","pid":7}', '{"id":"1","pid":8}'


pytestmark = BOTH


def leave(store, locks, owner="first", at_least=300.0):
    """Acquire, and leave the leases to run out."""
    granted = store.acquire(locks, owner, TTL, OLD)
    assert isinstance(granted, Granted)
    assert store.release(locks, owner, Ending(at_least=at_least))
    return granted


def test_a_left_lease_goes_on_under_a_new_owner_and_token(store, redis_client):
    """Expiry, mode and time of acquisition stay; holder and token are the new owner's."""
    before = leave(store, [LOCK])
    (left,) = redis_client.hgetall(LOCK).values()
    assert store.take_over([LOCK], "first", "second", NEW) == 1
    ((owner, lease),) = redis_client.hgetall(LOCK).items()
    expires, token, acquired = lease.split()[1:4]
    assert (owner, [expires, acquired]) == ("second", left.split()[1:4:2])
    assert int(token) > before.tokens[0]
    assert lease.endswith("x " + NEW)
    assert 0 < redis_client.pttl(LOCK) <= 300_000
    assert store.acquire([LOCK], "second", TTL, NEW) == Granted((int(token),))
    assert store.release([LOCK], "second")
    assert redis_client.keys() == []


def test_of_two_that_try_one_takes_over(store):
    """The second finds nothing; sent twice, the same owner's second answers so, too."""
    leave(store, LOCKS)
    assert store.take_over(LOCKS, "first", "second", NEW) == 2
    assert store.take_over(LOCKS, "first", "third", NEW) == 0
    assert store.take_over(LOCKS, "first", "second", NEW) == 0
    refused = store.acquire(LOCKS, "third", TTL, NEW)
    assert isinstance(refused, Conflict)
    assert refused.owner == "second"


def test_a_lost_reply_of_one_node_is_no_loss_of_its_leases(store, monkeypatch):
    """The command is sent again, and finds what the first one did."""
    leave(store, LOCKS)
    exchange = store.lock_server.exchange

    def lossy(script, locks, *call):
        first = exchange(script, locks, *call)
        return first if locks == LOCKS[:1] else (exchange(script, locks, *call)[0], True)

    monkeypatch.setattr(store.lock_server, "together", lambda locks: [[one] for one in locks])
    monkeypatch.setattr(store.lock_server, "exchange", lossy)
    assert store.take_over(LOCKS, "first", "second", NEW) == 2


@pytest.mark.parametrize("how", ["held", "released", "run out"])
def test_only_what_is_left_is_taken_over(store, redis_client, how):
    """A lease that its owner has still, or that has ended, is not there for others."""
    store.acquire([LOCK], "first", TTL, OLD)
    if how == "released":
        store.release([LOCK], "first")
    elif how == "run out":
        store.release([LOCK], "first", Ending(at_least=300.0))
        seconds = redis_client.time()[0] - 1
        redis_client.hset(LOCK, "~first", f"1 {seconds}000 5 {seconds}000 x {OLD}")
    assert store.take_over([LOCK], "first", "second", NEW) == 0
    assert redis_client.hget(LOCK, "second") is None


class TestPlaces:
    """An owner gives its slot back while it waits, and its task comes again as another owner."""

    @pytest.fixture
    def wait(self, store):
        def wait(owner):
            answer = store.acquire([LOCK], owner, TTL, OLD, place=TTL)
            assert isinstance(answer, Conflict)

        store.acquire([LOCK], "holder", TTL, OLD)
        return wait

    def test_a_place_in_line_is_kept(self, store, redis_client, wait):
        """It comes before those who have joined since."""
        wait("first")
        wait("later")
        assert store.take_over([LOCK], "first", "second", NEW) == 0
        assert redis_client.zrange(f"{LOCK}:line", 0, -1) == ["second", "later"]
        store.release([LOCK], "holder")
        assert store.wait(LOCK, "second", 1.0)
        assert store.release([LOCK], "second")
        assert store.wait(LOCK, "later", 1.0)

    @pytest.mark.parametrize("is_read", [False, True])
    def test_a_lock_that_was_handed_over_is_taken_if_nobody_has_read_so(self, store, wait, is_read):
        """Its lease would end in seconds; an owner that has read it runs."""
        wait("first")
        store.release([LOCK], "holder")
        assert not is_read or store.wait(LOCK, "first", 1.0)
        assert store.take_over([LOCK], "first", "second", NEW) == (not is_read)
        answer = store.acquire([LOCK], "second", TTL, NEW)
        assert type(answer) is (Conflict if is_read else Granted)
        assert store.release([LOCK], "first") is is_read

"""A server over maxmemory that evicts nothing takes no new lock, and keeps and ends the others."""

from __future__ import annotations

import pytest
import redis

from celery_dislock.exceptions import StoreError
from celery_dislock.parking.identity import OURS, StoreIdentity
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.servers.replies import Granted, Parked
from celery_dislock.servers.reservations import Reservation
from celery_dislock.servers.store import Ending, Execution, LateRelease, Store

LOCK, OTHER = "dislock:{k}", "dislock:{other}"
LONG = 60.0
WITHIN = 10.0
HOLDER = '{"id":"t"}'


@pytest.fixture
def given():
    """The turns that were given to be published."""
    return []


@pytest.fixture
def store(own_redis_server, given):
    store = Store(own_redis_server.url, home="here", hand_over=given.extend)
    yield store
    store.close()


@pytest.fixture
def lines(store, given):
    return Lines(store.lock_server, "dislock", "here", given.extend)


@pytest.fixture
def client(own_redis_server):
    with redis.Redis.from_url(own_redis_server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def fill(store, client):
    """Return a function that leaves the server without memory; it takes no lock then."""

    def fill():
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match="maxmemory"):
            store.acquire([OTHER], "late@w/1", LONG, HOLDER)

    return fill


def take(store, owner="t@w/1", ttl=LONG, **terms):
    assert isinstance(store.acquire([LOCK], owner, ttl, HOLDER, **terms), Granted)


@pytest.mark.parametrize("longest", [LONG, 10 * LONG], ids=["alone", "beside a longer one"])
def test_a_lock_is_renewed(store, client, fill, longest):
    """The first write of the script is one that needs no memory, also beside a longer lease."""
    take(store, limit=2)
    take(store, "b@w/1", longest, limit=2)
    fill()
    before = client.hgetall(LOCK)
    assert store.renew([([LOCK], "t@w/1", 2 * LONG)], within=WITHIN) == [True]
    assert store.extend([LOCK], "t@w/1", 3 * LONG)
    assert client.hget(LOCK, "t@w/1") != before["t@w/1"]
    assert client.hget(LOCK, "b@w/1") == before["b@w/1"]
    assert client.pttl(LOCK) > max(2 * LONG, longest - LONG) * 1000


def test_a_stalled_process_keeps_its_lock(store, client, fill):
    """The main process renews for it."""
    take(store)
    fill()
    overdue = Execution([LOCK], "t@w/", LONG, overdue=0.0, longest=0.0)
    (found,) = store.renew_stalled([overdue], within=WITHIN)
    assert not isinstance(found, StoreError)
    assert found.unrenewed >= 0


def test_an_owner_that_asks_again_is_answered(store, fill):
    """A resent acquisition renews what it has."""
    take(store)
    fill()
    take(store)


@pytest.mark.parametrize("at_least", [0.0, LONG])
def test_a_lock_is_released(store, client, fill, at_least):
    """At once, or left to run out after its minimum."""
    take(store)
    fill()
    assert store.release([LOCK], "t@w/1", Ending(at_least=at_least))
    assert list(client.hgetall(LOCK)) == (["~t@w/1"] if at_least else [])


@pytest.mark.parametrize("at_least", [0.0, LONG])
def test_the_lock_of_a_dead_process_is_released(store, client, fill, at_least):
    """By the main process, or by the watchdog of another."""
    take(store)
    fill()
    assert store.release_dead([LOCK], "t@w/", at_least) == 1
    assert list(client.hgetall(LOCK)) == (["~t@w/1"] if at_least else [])


def test_a_release_in_place_of_another_is_carried_out(store, client, fill):
    """The watchdog's, for an owner that is done."""
    take(store)
    fill()
    late = LateRelease([LOCK], "t@w/1", Ending(at_least=LONG))
    assert store.clear([late], within=WITHIN) == [None]
    assert list(client.hgetall(LOCK)) == ["~t@w/1"]


def test_a_lock_is_freed_by_hand(store, client, fill):
    """By an operator."""
    take(store)
    fill()
    (held,) = store.holders(LOCK)
    assert store.free(LOCK, "t@w/1", held.token)
    assert not client.exists(LOCK)


def test_a_retry_takes_its_lock_over(store, client, fill):
    """It is not taken anew."""
    take(store)
    store.release([LOCK], "t@w/1", Ending(at_least=LONG))
    fill()
    assert store.take_over([LOCK], "t@w/1", "t@w/2", HOLDER) == 1
    assert list(client.hgetall(LOCK)) == ["t@w/2"]


@pytest.mark.parametrize("ends", ["release", "release_dead", "free"])
def test_a_lock_is_handed_to_a_waiter(store, fill, ends):
    """It goes from one to the other."""
    take(store)
    store.acquire([LOCK], "w@w/1", LONG, HOLDER, place=LONG)
    fill()
    if ends == "free":
        store.free(LOCK, "t@w/1", store.holders(LOCK)[0].token)
    else:
        getattr(store, ends)([LOCK], "t@w/1")
    assert store.wait(LOCK, "w@w/1", WITHIN)
    assert store.renew([([LOCK], "w@w/1", LONG)], within=WITHIN) == [True]


def test_a_parked_task_has_its_turn_and_ends(store, lines, given, client, fill):
    """It is in memory already, and leaves less there than it takes away."""
    take(store)
    parked = lines.park(LOCK, "p@w/1", LONG, HOLDER, Ticket("p:0:0", "p@", False, b"message"))
    assert isinstance(parked, Parked)
    fill()
    store.release([LOCK], "t@w/1")
    assert [turn.ticket for turn in given] == ["p:0:0"]
    claimed = lines.park(LOCK, "p@w/2", LONG, HOLDER, Ticket("p:0:0", "p@", True, b""))
    assert isinstance(claimed, Granted)
    assert store.release([LOCK], "p@w/2", Ending(ticket="p:0:0", settles=LONG))
    store.release([LOCK], "p@w/2", Ending(ticket="p:0:0", settles=LONG))  # resent
    store.release([LOCK], "p@w/2", Ending(ticket="p:0:0"))
    assert not client.exists(LOCK, f"{LOCK}:running")


def test_the_name_of_its_store_is_kept(store, client, fill):
    """The sweep asks for it in each round, and hands on what stands still."""
    known, new = (StoreIdentity(store.lock_server, "dislock") for _ in range(2))
    name = known.name()
    client.pexpire("dislock:lines:@store", 1000)
    fill()
    for identity in (known, new):
        assert (identity.confirm(), identity.whose(name)) == (name, OURS)
    assert client.ttl("dislock:lines:@store") > LONG


@pytest.mark.parametrize("how", ["drop", "withdraw", "leave"])
def test_a_parked_task_can_be_taken_out(store, lines, client, fill, how):
    """An operator's drop, a revoked message, a task that must not run."""
    take(store)
    lines.park(LOCK, "p@w/1", LONG, HOLDER, Ticket("p:0:0", "p@", False, b"message"))
    fill()
    getattr(lines, how)(LOCK, "p:0:0", *(["note"] if how == "drop" else []))
    assert not client.exists(f"{LOCK}:tickets")


def test_a_task_that_runs_without_its_lock_is_remembered(lines, client, fill):
    """Nothing is known of it, and a copy must not run."""
    fill()
    assert lines.withdraw(LOCK, "p:0:0", "delivery")
    assert client.exists(f"{LOCK}:done:p:0:0")


@pytest.mark.parametrize("number", [0, 2], ids=["first", "newest"])
@pytest.mark.parametrize("until", ["end", "expiry"])
def test_a_reservation_is_kept_and_ends(store, client, fill, until, number):
    """It is there already; a new one is refused, and the message sent without."""
    reservations = store.reservations
    wanted = Reservation(LOCK, "t", until=until, ttl=LONG)
    reserved = reservations.reserve(wanted, "nonce", replaces=number > 0)
    mine = wanted._replace(mark=reserved.mark, number=reserved.number)
    fill()
    with pytest.raises(StoreError, match="maxmemory"):
        reservations.reserve(wanted._replace(lock=OTHER), "nonce")
    assert reservations.confirm(mine)
    reservations.keep([mine], runs=False, within=WITHIN)
    reservations.begin(mine)
    reservations.keep([mine], runs=True, within=WITHIN)
    assert reservations.end(mine)
    record = reservations.look(LOCK).reservation
    assert (record.state if record else None) == ("ended" if until == "expiry" else None)

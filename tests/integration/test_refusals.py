"""What a refusal says of the lease in the way: since when it is held, and when it was renewed."""

from __future__ import annotations

import json

import pytest

from celery_dislock.parking.store import Bounds, Lines, Ticket
from celery_dislock.servers.replies import Full, Parked, Refused
from celery_dislock.servers.requests import ALONE, Terms
from celery_dislock.servers.reservations import Reservation
from celery_dislock.servers.store import Store

LOCK, OTHER = "dislock:{k}", "dislock:{k}:and:0a"
LONG = 60.0
HELD_FOR, RENEWED, TIMEOUT = 720.0, 3.0, 300.0  # seconds
TICKET = Ticket("2:0:0", "2@", marked=False)
SLACK = 30.0  # seconds that a slow machine may take


def hold(client, lock=LOCK, *, owner="a/1", held_for=HELD_FOR, mode="x", **about):
    """Write a lease as it is after that time."""
    seconds, microseconds = client.time()
    now = seconds * 1000 + microseconds // 1000
    holder = json.dumps({"id": "1", "timeout": TIMEOUT, **about})
    expires = int(now + (TIMEOUT - RENEWED) * 1000)
    client.hset(lock, owner, f"1 {expires} 5 {int(now - held_for * 1000)} {mode} {holder}")
    client.pexpire(lock, 600_000)


@pytest.fixture
def store(redis_url):
    store = Store(redis_url)
    yield store
    store.close()


@pytest.fixture
def lines(store):
    return Lines(store.lock_server, "dislock", "here", lambda _turns: None)


def tells_both(refused: Refused) -> bool:
    return (
        HELD_FOR <= refused.held_for < HELD_FOR + SLACK
        and RENEWED - 0.01 <= refused.renewed < RENEWED + SLACK
    )


@pytest.mark.parametrize("place", [0.0, LONG])
@pytest.mark.parametrize(
    "terms", [ALONE, Terms(limit=2), Terms("shared")], ids=["usual", "limit", "shared"]
)
def test_an_acquisition_is_told(store, redis_client, terms, place):
    """By the head of the script in the usual case, and by the rest of it in all others."""
    hold(redis_client)
    if terms.limit == 2:
        hold(redis_client, owner="b/1")
    assert tells_both(store.acquire([LOCK], "me", LONG, "{}", place=place, terms=terms))


def test_a_unique_task_is_told(store, lines, redis_client):
    """Its scripts answer as the others do."""
    hold(redis_client)
    reservation = Reservation(LOCK, "2", "end", LONG)
    assert tells_both(store.acquire([LOCK], "me", LONG, "{}", reservation=reservation))
    assert tells_both(lines.park(LOCK, "me", LONG, "{}", TICKET._replace(reservation=reservation)))


def test_a_task_that_may_be_parked_is_told(lines, redis_client):
    """Where it only asks, where it is parked, and where the line is full."""
    hold(redis_client)
    assert tells_both(lines.park(LOCK, "2@w/1", LONG, "{}", TICKET))
    parked = lines.park(LOCK, "2@w/1", LONG, "{}", TICKET._replace(message=b"m"))
    assert isinstance(parked, Parked)
    assert tells_both(parked.conflict)
    third = Ticket("3:0:0", "3@", marked=False, message=b"m", bounds=Bounds(most=1))
    full = lines.park(LOCK, "3@w/1", LONG, "{}", third)
    assert isinstance(full, Full)
    assert tells_both(full.conflict)


def test_a_copy_is_told_of_its_own_task(lines, redis_client):
    """It is another delivery of that task that holds the lock."""
    hold(redis_client, owner="2@w/7")
    assert tells_both(lines.park(LOCK, "2@w/8", LONG, "{}", TICKET))


@pytest.mark.parametrize("by", ["acquire", "park"])
def test_a_copy_is_told_for_how_long_its_task_has_held_the_lock(store, lines, redis_client, by):
    """An operator admits two, and the task's other delivery is in the way nevertheless."""
    hold(redis_client, owner="2@w/1", id="2")
    hold(redis_client, owner="b/1", held_for=0)
    lines.limit(LOCK, 3)
    if by == "acquire":
        refused = store.acquire([LOCK], "2@w/2", LONG, "{}")
    else:
        refused = lines.park(LOCK, "2@w/2", LONG, "{}", TICKET._replace(message=b"m"))
    assert refused.owner == "2@w/1"
    assert tells_both(refused)


def test_a_lock_that_waits_for_a_parked_task_has_no_holder(store, lines, redis_client):
    """Nobody knows since when: nothing is said."""
    hold(redis_client, owner="a/1")
    lines.enlist(LOCK)
    lines.park(LOCK, "2@w/1", LONG, "{}", TICKET._replace(message=b"m"))
    redis_client.delete(LOCK)
    refused = store.acquire([LOCK], "b/1", LONG, "{}")
    assert (refused.holder, refused.held_for, refused.renewed) == ({"parked": True}, None, None)


def test_a_lease_without_renewals_says_when_it_was_taken_only(store, redis_client):
    """A fixed expiry, or a holder of an older version."""
    hold(redis_client, timeout=None)
    refused = store.acquire([LOCK], "me", LONG, "{}")
    assert refused.held_for >= HELD_FOR
    assert refused.renewed is None

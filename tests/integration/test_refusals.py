"""What a refusal says of the lease in the way: since when it is held, and when it was renewed."""

import json

import pytest

from celery_dislock.config.terms import ALONE, Terms
from celery_dislock.parking.answers import Full, Parked
from celery_dislock.parking.store import Bounds
from celery_dislock.servers.reservations import Reservation
from tests.integration.parked import LOCK, LONG, Broker, owner_of

HELD_FOR, RENEWED, TIMEOUT = 720.0, 3.0, 300.0  # seconds
BOTH = HELD_FOR, RENEWED


@pytest.fixture
def broker(server):
    return Broker(server)


@pytest.fixture
def hold(server):
    """Return what writes a lease as it is after that time."""
    server.begin()
    now = server.now_ms

    def hold(owner="a/1", *, held_for=HELD_FOR, **about):
        holder = json.dumps({"id": "1", "timeout": TIMEOUT, **about})
        expires, acquired = now + (TIMEOUT - RENEWED) * 1000, now - held_for * 1000
        server.send("HSET", LOCK, owner, f"1 {expires:.0f} 5 {acquired:.0f} x {holder}")
        server.send("PEXPIRE", LOCK, 600_000)

    return hold


def told(refused):
    return refused.held_for, refused.renewed


@pytest.mark.parametrize("place", [0.0, LONG])
@pytest.mark.parametrize(
    "terms", [ALONE, Terms(limit=2), Terms("shared")], ids=["usual", "limit", "shared"]
)
def test_an_acquisition_is_told(broker, hold, terms, place):
    """By the head of the script in the usual case, and by the rest of it in all others."""
    hold()
    if terms.limit == 2:
        hold("b/1")
    refused = broker.store.acquire([LOCK], "me", LONG, "{}", place=place, terms=(terms,))
    assert told(refused) == BOTH


def test_a_unique_task_is_told(broker, hold):
    """Its scripts answer as the others do."""
    hold()
    reservation = Reservation(LOCK, "t", "end", LONG)
    refused = broker.store.acquire([LOCK], "me", LONG, "{}", reservation=reservation)
    assert told(refused) == told(broker.ask("t", reservation=reservation)) == BOTH


def test_a_task_that_may_be_parked_is_told(broker, hold):
    """Where it only asks, where it is parked, and where the line is full."""
    hold()
    assert told(broker.ask("t")) == BOTH
    parked = broker.park("t")
    assert isinstance(parked, Parked)
    full = broker.park("u", bounds=Bounds(most=1))
    assert isinstance(full, Full)
    assert told(parked) == told(full) == BOTH


@pytest.mark.parametrize("beside", [False, True])
def test_a_copy_is_told_for_how_long_its_task_has_held_the_lock(broker, hold, beside):
    """Another delivery of the task is in the way, also if an operator admits two and more."""
    hold(owner_of("t", 1))
    if beside:
        hold("b/1", held_for=0)
        broker.store.override(LOCK, limit=3)
        refused = broker.store.acquire([LOCK], owner_of("t", 2), LONG, "{}")
        assert (refused.owner, *told(refused)) == (owner_of("t", 1), *BOTH)
    for refused in (broker.ask("t", 2), broker.park("t", 2)):
        assert (refused.owner, *told(refused)) == (owner_of("t", 1), *BOTH)


def test_a_lock_that_waits_for_a_parked_task_has_no_holder(broker, hold, server):
    """Nobody knows since when: nothing is said."""
    hold()
    broker.park("t")
    server.send("DEL", LOCK)
    refused = broker.store.acquire([LOCK], "b/1", LONG, "{}")
    assert (refused.holder, *told(refused)) == ({"parked": True}, None, None)


def test_a_lease_without_renewals_says_when_it_was_taken_only(broker, hold):
    """A fixed expiry, or a holder of an older version."""
    hold(timeout=None)
    assert told(broker.store.acquire([LOCK], "me", LONG, "{}")) == (HELD_FOR, None)

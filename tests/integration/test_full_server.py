"""A server over maxmemory that evicts nothing takes no new lock, and keeps and ends the others."""

import pytest

from celery_dislock.config.terms import Terms
from celery_dislock.exceptions import StoreError
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import RUNS, Lines, Ticket
from celery_dislock.scripts import HAS_LEFT
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending, Execution, LateRelease
from celery_dislock.servers.reservations import Reservation
from celery_dislock.servers.store import Store
from celery_dislock.servers.view import read_state

LOCK, OTHER = "dislock:{k}", "dislock:{other}"
LONG = 60.0
WITHIN = 10.0
HOLDER = '{"id":"t"}'
ME = "t@w/1"
LEFT = Ending(at_least=LONG)
PARKED = Ticket("p:0:0", marked=False, message=b"message")


@pytest.fixture
def client(lock_server):
    """A client of the server, which is empty and has memory."""
    with lock_server.client(decode_responses=True) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        yield client


@pytest.fixture
def given():
    """The turns that were given to be published."""
    return []


@pytest.fixture
def store(lock_server, client, given):
    store = Store(lock_server.url, broker="here", hand_over=given.extend)
    yield store
    store.close()


@pytest.fixture
def lines(store, given):
    return Lines(store.lock_server, "dislock", "here", given.extend)


@pytest.fixture
def fill(store, client):
    """Return a function that leaves the server without memory; it takes no lock then."""

    def fill():
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match="maxmemory"):
            store.acquire([OTHER], "late@w/1", LONG, HOLDER)

    return fill


def take(store, owner=ME, ttl=LONG, **terms):
    assert isinstance(store.acquire([LOCK], owner, ttl, HOLDER, **terms), Granted)


def free(store):
    """End the lease as an operator does."""
    return store.free(LOCK, ME, store.holders(LOCK)[0].token)


@pytest.mark.parametrize("longest", [LONG, 10 * LONG], ids=["alone", "beside a longer one"])
def test_a_lock_is_renewed(store, client, fill, longest):
    """By its process or another, and for an owner that asks again, also beside a longer lease."""
    take(store, terms=(Terms(limit=2),))
    take(store, "b@w/1", longest, terms=(Terms(limit=2),))
    fill()
    before = client.hgetall(LOCK)
    assert store.renew([([LOCK], ME, 2 * LONG)], within=WITHIN) == [True]
    assert store.renew([([LOCK], ME, 3 * LONG)]) == [True]
    assert client.hget(LOCK, ME) != before[ME]
    assert client.hget(LOCK, "b@w/1") == before["b@w/1"]
    assert client.pttl(LOCK) > max(2 * LONG, longest - LONG) * 1000
    overdue = Execution([LOCK], "t@w/", LONG, overdue=0.0, longest=0.0)
    (found,) = store.renew_stalled([overdue], within=WITHIN)
    assert not isinstance(found, StoreError)
    take(store, terms=(Terms(limit=2),))


# What ends the lease, and who is there afterwards; the watchdog releases late, for an owner that
# is done.
ENDS = {
    "release": (lambda store: store.release([LOCK], ME), []),
    "release after a minimum": (lambda store: store.release([LOCK], ME, LEFT), ["~" + ME]),
    "release of the dead": (lambda store: store.release_dead([LOCK], "t@w/"), []),
    "and after a minimum": (lambda store: store.release_dead([LOCK], "t@w/", LEFT), ["~" + ME]),
    "late release": (
        lambda store: store.clear([LateRelease([LOCK], ME, LEFT)], within=WITHIN) == [None],
        ["~" + ME],
    ),
    "by hand": (free, []),
    "by a retry": (
        lambda store: (
            store.release([LOCK], ME, LEFT) and store.take_over([LOCK], ME, "t@w/2", HOLDER)
        ),
        ["t@w/2"],
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_lock_is_ended(store, client, fill, how):
    """At once, or left to run out after its minimum; a retry goes on with it."""
    take(store)
    fill()
    end, left = ENDS[how]
    assert end(store)
    assert list(client.hgetall(LOCK)) == left


@pytest.mark.parametrize("how", ["release", "release of the dead", "by hand"])
def test_a_lock_is_handed_to_a_waiter(store, fill, how):
    """It goes from one to the other."""
    take(store)
    store.acquire([LOCK], "w@w/1", LONG, HOLDER, place=LONG)
    fill()
    ENDS[how][0](store)
    assert store.wait(LOCK, "w@w/1", WITHIN)
    assert store.renew([([LOCK], "w@w/1", LONG)], within=WITHIN) == [True]


def test_a_parked_task_has_its_turn_and_ends(store, lines, given, client, fill):
    """It is in memory already, and leaves less there than it takes away."""
    take(store)
    assert isinstance(lines.park([LOCK], "p@w/1", LONG, HOLDER, PARKED), Parked)
    fill()
    store.release([LOCK], ME)
    assert [turn.ticket for turn in given] == ["p:0:0"]
    marked = PARKED._replace(marked=True, message=b"")
    assert isinstance(lines.park([LOCK], "p@w/2", LONG, HOLDER, marked), Granted)
    assert store.release([LOCK], "p@w/2", Ending(ticket="p:0:0", settles=LONG))
    store.release([LOCK], "p@w/2", Ending(ticket="p:0:0", settles=LONG))  # resent
    store.release([LOCK], "p@w/2", Ending(ticket="p:0:0"))
    assert not client.exists(LOCK, f"{LOCK}:running")


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("drop", (LOCK, "p:0:0", "note")),
        ("leave", (LOCK, "p:0:0")),
        ("take_out", ((LOCK, "p:0:0"), "no")),
    ],
)
def test_a_parked_task_can_be_taken_out(store, lines, client, fill, how, call):
    """An operator's drop, a revoked message, a task that must not run."""
    take(store)
    lines.park([LOCK], "p@w/1", LONG, HOLDER, PARKED)
    fill()
    getattr(lines, how)(*call)
    assert not client.exists(f"{LOCK}:tickets")


def test_a_task_that_runs_without_its_lock_is_remembered(lines, client, fill):
    """Nothing is known of it, and a copy must not run."""
    fill()
    assert lines.leave(LOCK, "p:0:0", RUNS) == HAS_LEFT
    assert client.exists(f"{LOCK}:done:p:0:0")


@pytest.mark.parametrize("until", ["end", "expiry"])
def test_a_reservation_is_kept_and_ends(store, fill, until):
    """It is there already; a new one is refused, and the message sent without."""
    reservations = store.reservations
    wanted = Reservation(LOCK, "t", until=until, ttl=LONG)
    reserved = reservations.reserve(wanted, "nonce", replaces=until == "end")
    mine = wanted._replace(mark=reserved.mark, number=reserved.number)
    fill()
    with pytest.raises(StoreError, match="maxmemory"):
        reservations.reserve(wanted._replace(lock=OTHER), "nonce")
    assert reservations.confirm(mine)
    reservations.keep([mine], runs=False, within=WITHIN)
    reservations.begin(mine)
    reservations.keep([mine], runs=True, within=WITHIN)
    assert reservations.end(mine)
    record = read_state(store.lock_server, LOCK).reservation
    assert (record.state if record else None) == ("ended" if until == "expiry" else None)


def test_the_line_of_a_task_that_others_end_for_is_swept(store, lines, fill):
    """The holder was told before, or is now; a copy of the message finds its task in line."""
    older, newer = (PARKED._replace(name=f"{name}:0:0", sent=n) for n, name in enumerate("op", 1))
    assert isinstance(lines.park([LOCK], "o@w/1", LONG, HOLDER, older), Granted)
    assert isinstance(lines.park([LOCK], "p@w/1", LONG, HOLDER, newer), Parked)
    fill()
    assert lines.sweep([LOCK])[LOCK].parked == 1
    assert isinstance(lines.park([LOCK], "p@w/2", LONG, HOLDER, newer), Parked)
    assert store.renew([([LOCK], "o@w/1", LONG)], within=WITHIN) == ["p"]

"""What is judged of locks, from what was seen of them."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks
from celery_dislock.operating.checks.locks import Seen
from celery_dislock.operating.checks.workers import Fleet
from celery_dislock.operating.overview import Holder, LockState, Place, Reserved


def holder(worker="w9@gone", **given):
    known = dict.fromkeys(Holder._fields)
    about = {"owner": "o", "token": 1, "held": 5.0, "remaining": 20.0, "expiring": False}
    return Holder(**{**known, **about, "worker": worker, "turn": False, "who": "t[1]", **given})


def place(**given):
    known = dict.fromkeys(Place._fields)
    about = {"parked": True, "turns": 0, "exchange": "", "routing_key": "celery"}
    return Place(**{**known, **about, **given})


def lock(**given):
    known = dict.fromkeys(LockState._fields)
    empty = {"holders": [], "line": [], "turns": [], "waiting": 0, "aside": 0, "limit_note": ""}
    return LockState(**{**known, **empty, "key": "k", "name": "dislock:{k}", **given})


class Overview:
    """Tells the locks of the test."""

    def __init__(self, *states):
        self.states = states

    def locks(self, failed):
        failed.append(StoreError("redis://b", "no answer in time"))
        yield from self.states

    def lock(self, name, most):
        return next(one for one in self.states if one.name == name)


QUEUE = {"name": "celery", "exchange": {"name": "celery", "type": "direct"}}
FLEET = Fleet({"w1@here": {}}, {"w1@here": [{**QUEUE, "routing_key": "celery"}]})


def test_only_what_may_be_wrong_is_remembered():
    """Ten thousand healthy locks cost no memory."""
    old = Reserved("id-1", "waiting", 100.0, 10.0)
    overview = Overview(
        lock(holders=[holder("w1@here")]),
        lock(holders=[holder("laptop")]),  # plain Python on that host
        lock(holders=[holder()]),
        lock(reservation=old),
        lock(reservation=old._replace(state="running")),
        lock(reservation=old._replace(since=1.0)),
        StoreError("redis://a", "x"),
    )
    seen = locks.look(overview, FLEET, 50.0)
    assert (seen.locks, seen.leases) == (6, 3)
    assert [one.worker for _, one in seen.dead] == ["w9@gone"]
    assert len(seen.reserved) == 1
    assert (len(seen.damaged), len(seen.failed)) == (1, 1)


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({"renewed": 2.0, "remaining": 28.0}, "note"),  # in time: somebody renews it
        ({"renewed": 25.0, "remaining": 5.0}, "warning"),
        ({"renewed": None}, "warning"),  # an older version, or a fixed expiry
        ({"renewed": 2.0, "remaining": 28.0, "expiring": True}, "warning"),
    ],
)
def test_leases_of_workers_that_do_not_answer(given, level):
    """One that is renewed belongs to a worker that lives."""
    seen = Seen(dead=[("k", holder(**given))])
    assert [one.level for one in locks.leases(seen, FLEET)] == [level]


@pytest.mark.parametrize(
    ("given", "consumed"),
    [
        ({"exchange": "", "routing_key": "celery"}, True),
        ({"exchange": "", "routing_key": "other"}, False),
        ({"exchange": "celery", "routing_key": "celery"}, True),
        ({"exchange": "celery", "routing_key": "other"}, False),
        ({"exchange": "elsewhere", "routing_key": "celery"}, False),
        ({"exchange": None, "routing_key": None}, True),  # not known
        ({"parked": False}, True),
    ],
)
def test_queues_that_nobody_consumes(given, consumed):
    """The message goes to the exchange and routing key that it came from."""
    seen = Seen(lines=[lock(line=[place(**given)])])
    assert [one.level for one in locks.lines(seen, FLEET)] == ([] if consumed else ["serious"])


def test_a_topic_exchange_is_the_brokers_business():
    """Its patterns are not judged here."""
    topic = {"name": "q", "exchange": {"name": "events", "type": "topic"}, "routing_key": "a.*"}
    seen = Seen(lines=[lock(line=[place(exchange="events", routing_key="a.b")])])
    assert list(locks.lines(seen, Fleet({}, {"w1": [topic]}))) == []


def test_bindings_of_a_queue_count():
    """It may have several routing keys."""
    bound = {**QUEUE, "routing_key": "", "bindings": [{"routing_key": "a"}, {"routing_key": "b"}]}
    seen = Seen(lines=[lock(line=[place(exchange="celery", routing_key="b")])])
    assert list(locks.lines(seen, Fleet({}, {"w1": [bound]}))) == []


def test_turns_that_nobody_claims():
    """Its message was published again and again."""
    seen = Seen(lines=[lock(turns=[place(turns=locks.TURNS_MANY)])])
    [one] = locks.lines(seen, FLEET)
    assert (one.level, "did not claim" in one.what) == ("warning", True)


class TestReservations:
    seen = Seen(reserved=[("k", Reserved("id-1", "waiting", 4000.0, 10.0))])

    def levels(self, fleet=FLEET, known=(), empty=True, seen=None):
        found = locks.reservations(seen or self.seen, fleet, lambda _ids: set(known), empty=empty)
        return [one.level for one in found]

    def test_none_is_old(self):
        """Nothing is asked."""
        assert self.levels(seen=Seen()) == []

    def test_it_can_be_told_that_a_message_is_gone(self):
        """All queues are empty, and all workers have said that they do not have it."""
        assert self.levels() == ["warning"]
        assert self.levels(known=["id-1"]) == []

    @pytest.mark.parametrize(
        "given",
        [
            {"empty": None},
            {"empty": False},
            {"fleet": Fleet({}, {}, "Connection refused")},
            {"fleet": Fleet({"w1@here": {}, "w2@here": None}, {})},
        ],
    )
    def test_otherwise_it_is_old(self, given):
        """Its message may be somewhere."""
        assert self.levels(**given) == ["note"]


def test_locks_that_could_not_be_read():
    """A server is away, or answered nothing of use."""
    error = StoreError("redis://b", "no answer in time")
    found = list(locks.counted(Seen(failed=[error], damaged=[error], locks=3)))
    assert [one.level for one in found] == ["note", "note", "ok"]

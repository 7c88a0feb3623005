"""What is judged of locks, from what was seen of them."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks
from celery_dislock.operating.checks.locks import Seen
from celery_dislock.operating.checks.workers import Fleet
from celery_dislock.operating.overview import Holder, LockState, Place
from celery_dislock.servers.reservations import Record


def holder(worker="w9@gone", **given):
    known = dict.fromkeys(Holder._fields)
    about = {"owner": "o", "token": 1, "held": 5.0, "remaining": 20.0, "expiring": False}
    return Holder(**{**known, **about, "worker": worker, "turn": False, "who": "t[1]", **given})


def place(**given):
    known = dict.fromkeys(Place._fields)
    about = {"parked": True, "ticket": "t:0:0", "turns": 0, "exchange": "", "routing_key": "celery"}
    return Place(**{**known, **about, **given})


def lock(**given):
    known = dict.fromkeys(LockState._fields)
    empty = {
        "holders": [],
        "line": [],
        "turns": [],
        "waiting": 0,
        "aside": 0,
        "limit_note": "",
        "limit_differs": 0,
    }
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
    old = Record("id-1", "waiting", 100.0, 10.0, "m", 0)
    overview = Overview(
        lock(holders=[holder("w1@here")]),
        lock(holders=[holder("laptop")]),  # plain Python on that host
        lock(holders=[holder()]),
        lock(reservation=old),
        lock(reservation=old._replace(state="running")),
        lock(reservation=old._replace(state="ended")),  # as "expiry" says
        lock(reservation=old._replace(since=1.0)),
        lock(),  # of which only numbers are kept
        StoreError("redis://a", "x"),
    )
    seen = locks.look(overview, FLEET, 50.0)
    assert (seen.locks, seen.leases) == (7, 3)
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


def test_a_lock_that_is_held_long_while_others_wait_is_told():
    """An endless loop renews its lease for ever; one that nobody waits for bothers nobody."""
    long = {"renewed": 3.0, "remaining": 27.0, "worker": "w1@here"}
    told = locks.look(
        Overview(
            lock(key="a", name="a", holders=[holder(held=601.0, **long)], waiting=7),
            lock(key="b", name="b", holders=[holder(held=599.0, **long)], waiting=7),
            lock(key="c", name="c", holders=[holder(held=601.0, **long)]),
        ),
        FLEET,
        50.0,
    )
    (found,) = locks.held_long(told)
    assert found.level == "warning"
    assert found.about == ["a"]
    assert "a, held for 10 min by t[1], with 7 waiting" in found.what
    assert list(locks.held_long(Seen())) == []


@pytest.mark.parametrize(("waiting", "told"), [(9.0, ["warning"]), (1.0, [])])
def test_a_line_of_a_lock_that_nobody_holds_is_told(waiting, told):
    """Unless its first has only just come."""
    seen = locks.look(Overview(lock(waiting=2, line=[place(waiting=waiting)])), FLEET, 50.0)
    assert [one.level for one in locks.stuck(seen)] == told


def test_the_remedy_names_the_tickets():
    """They are what `drop` takes."""
    parked = place(exchange="", routing_key="other", turns=3, ticket="t1:0:0")
    found = list(locks.lines(Seen(lines=[lock(line=[parked])]), FLEET))
    assert len(found) == 2
    assert all("celery dislock drop TICKET. Tickets: t1:0:0." in one.remedy for one in found)


def test_a_limit_is_told_with_its_age_its_author_and_its_line():
    """So that one that was forgotten is seen."""
    note = {"limit_note": "by ana: reindex", "limit_age": 7200.0}
    seen = Seen(limits=[lock(limit=0, waiting=4, **note), lock(key="b", limit=3, **note)])
    paused, limited = locks.limits(seen, FLEET)
    assert paused.what == (
        "Paused by somebody: k (by ana: reindex; for 2 h 00 min so far; 4 waiting)."
    )
    assert limited.what == "Limited by somebody: b (to 3; by ana: reindex; for 2 h 00 min so far)."


class TestReservations:
    seen = Seen(reserved=[("k", Record("id-1", "waiting", 4000.0, 10.0, "m", 0))])

    def levels(self, fleet=FLEET, known=(), empty=True, seen=None):
        found = list(
            locks.reservations(seen or self.seen, fleet, lambda _ids: set(known), empty=empty)
        )
        assert all("celery dislock free KEY" in one.remedy for one in found)
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


def test_servers_that_disagree_about_a_pause_are_a_warning():
    """With the remedy; when one more is away, those that have it decide."""
    paused = lock(limit_differs=1)
    seen = locks.look(Overview(paused), FLEET, old=60.0)
    [finding] = locks.limits(seen, FLEET)
    assert finding.level == locks.WARNING
    assert "k (most servers have no limit, 1 server has another state)" in finding.what
    assert finding.remedy.endswith("celery dislock resume KEY")

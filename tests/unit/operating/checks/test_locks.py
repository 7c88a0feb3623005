"""What is judged of locks, from what was seen of them; the rest is tested on a real server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks
from celery_dislock.operating.checks.facts import Fleet, Locks
from celery_dislock.servers.view import ReservationState
from tests.unit.operating.checks.examples import (
    FLEET,
    QUEUE,
    facts,
    found,
    holder,
    levels,
    lock,
    place,
)


def lines(*line, **given):
    """One line, and nothing else."""
    return Locks(lines=[lock(waiting=len(line), line=line, **given)])


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
    seen = Locks(suspects=[lock(holders=[holder(**given)])])
    assert levels(locks.of_mute_workers, locks=seen) == [level]


@pytest.mark.parametrize(
    ("given", "consumed"),
    [
        ({"exchange": "", "routing_key": "celery"}, True),
        ({"exchange": "", "routing_key": "other"}, False),
        ({"exchange": "celery", "routing_key": "celery"}, True),
        ({"exchange": "celery", "routing_key": "other"}, False),
        ({"exchange": "bound", "routing_key": "b"}, True),  # one of several bindings
        ({"exchange": "events", "routing_key": "a.b"}, True),  # a topic's patterns are the broker's
        ({"exchange": "elsewhere", "routing_key": "celery"}, False),
        ({"exchange": None, "routing_key": None}, True),  # not known
        ({"parked": False}, True),
    ],
)
def test_queues_that_nobody_consumes(given, consumed):
    """The message goes to the exchange and routing key that it came from."""
    bindings = [{"routing_key": "a"}, {"routing_key": "b"}]
    direct, topic = {"name": "bound", "type": "direct"}, {"name": "events", "type": "topic"}
    queues = [
        QUEUE,
        {"name": "q", "exchange": direct, "routing_key": "", "bindings": bindings},
        {"name": "r", "exchange": topic, "routing_key": "a.*"},
    ]
    about = {"locks": lines(place(**given)), "fleet": Fleet({}, {"w1": queues})}
    assert levels(locks.unserved, **about) == ([] if consumed else ["serious"])


def test_a_parked_task_that_stays_is_named_by_its_ticket():
    """That is what `drop` takes: nobody consumes its queue, or it does not claim its turns."""
    parked = place(routing_key="other", turns=locks.TURNS_MANY, ticket="t1:0:0")
    for check in (locks.unserved, locks.unclaimed):
        [one] = check(facts(locks=lines(parked)))
        assert "celery dislock drop TICKET. Tickets: t1:0:0." in one.remedy


@pytest.mark.parametrize(("held", "level"), [(601.0, ["warning"]), (599.0, [])])
def test_a_lock_that_is_held_long_while_others_wait(held, level):
    """An endless loop renews its lease for ever; one that nobody waits for bothers nobody."""
    one = holder("w1@here", renewed=3.0, remaining=27.0, held=held)
    findings = found(locks.held_long, locks=lines(place(), holders=[one]))
    assert [is_ for is_, _ in findings] == level
    assert all("k, held for 10 min by t[1], with 1 waiting" in what for _, what in findings)


@pytest.mark.parametrize(("waiting", "level"), [(9.0, ["warning"]), (1.0, [])])
def test_a_line_of_a_lock_that_nobody_holds(waiting, level):
    """Unless its first has only just come."""
    assert levels(locks.stuck, locks=lines(place(waiting=waiting))) == level


def test_a_limit_is_shown_with_its_age_its_author_and_its_line():
    """So that one that was forgotten is seen."""
    note = {"limit_note": "by ana: reindex", "limit_age": 7200.0}
    seen = Locks(suspects=[lock(limit=0, waiting=4, **note), lock(key="l", limit=3, **note)])
    [(level, what)] = found(locks.limits, locks=seen)
    assert level == "note"
    assert "k (paused; by ana: reindex; for 2 h 00 min so far; 4 waiting)" in what
    assert "l (to 3 at a time; by ana: reindex; for 2 h 00 min so far)" in what


def test_servers_that_disagree_about_a_pause_are_a_warning():
    """With the remedy; when one more is away, those that have it decide."""
    seen = Locks(suspects=[lock(limit_differs=1)])
    [finding] = locks.limits(facts(locks=seen))
    assert finding.level == "warning"
    assert "k (most servers have no limit, 1 server has another state)" in finding.what
    assert finding.remedy.endswith("celery dislock resume KEY")


@pytest.mark.parametrize(
    ("known", "empty", "fleet", "level"),
    [
        ([], True, FLEET, ["warning"]),
        (["id-1"], True, FLEET, []),
        ([], None, FLEET, ["note"]),
        ([], False, FLEET, ["note"]),
        ([], True, Fleet({}, {}, "Connection refused"), ["note"]),
        ([], True, Fleet({"w1@here": {"tasks": {}}, "w2@here": None}, {}), ["note"]),
    ],
)
def test_old_reservations(known, empty, fleet, level):
    """A message is gone if all queues are empty, and all workers say that they do not have it."""
    seen = Locks(
        suspects=[lock(reservation=ReservationState("id-1", "waiting", 4000.0, 10.0, "m", 0))]
    )
    asks = SimpleNamespace(known=lambda _ids: set(known), empty=lambda: empty)
    found = list(locks.reservations(facts(locks=seen, fleet=fleet, workers=asks)))
    assert [one.level for one in found] == level
    assert all("celery dislock free KEY" in one.remedy for one in found)


def test_nobody_is_asked_if_no_reservation_is_old():
    """The workers would have to be waited for."""
    assert list(locks.reservations(facts())) == []


def test_locks_that_could_not_be_read():
    """A server is away, or answered nothing of use."""
    error = StoreError("redis://b", "no answer in time")
    assert levels(locks.counted, locks=Locks(away=[error], unread=[error])) == ["note", "note"]


@pytest.mark.parametrize(
    ("answer", "many"), [([b"", 0], 0), ([b"f" * 16, 12_000], 1), ([b"f" * 16, 601_000], 0)]
)
def test_only_a_stranger_that_came_lately_is_a_finding(answer, many):
    """One that still has its turn elsewhere comes again within seconds."""
    site = SimpleNamespace(keeps_lines=True, run=lambda *_: [b"", 0, *answer])
    findings = list(locks.strangers(facts(server=site)))
    assert len(findings) == many
    assert all("came 12 s ago" in one.what and "drain" in one.remedy for one in findings)

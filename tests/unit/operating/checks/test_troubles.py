"""What is wrong with a lock, for lists and for doctor, from what was seen of it."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.checks import locks
from celery_dislock.operating.checks.facts import Locks
from celery_dislock.operating.checks.troubles import TROUBLES, judged, troubles_of
from celery_dislock.operating.locks import ListedLock
from celery_dislock.operating.site import Site, UniqueTask
from celery_dislock.servers.view import ReservationState
from tests.pages import FakeOverview
from tests.unit.operating.checks.examples import facts, holder, lock, place

RENEWED = {"renewed": 3.0, "remaining": 27.0}
OLD = ReservationState("id-1", "waiting", 4000.0, 10.0, "m", 0)
NOTE = {"limit_note": "by ana: reindex", "limit_age": 7200.0}


@pytest.mark.parametrize(
    ("given", "finding"),
    [
        ({"holders": [holder(renewed=25.0, remaining=5.0)]}, ("leases", "warning", "k.")),
        ({"holders": [holder(**RENEWED)]}, None),
        ({"holders": [holder(renewed=None)]}, None),  # an older version, or a fixed expiry
        (
            {"holders": [holder(**RENEWED, held=601.0)], "waiting": 1, "line": [place()]},
            ("leases", "warning", "k (for 10 min by t[1], with 1 waiting)"),
        ),
        ({"holders": [holder(**RENEWED, held=599.0)], "waiting": 1}, None),
        ({"holders": [holder(**RENEWED, held=601.0)]}, None),  # it bothers nobody
        # Of several beats one leads for months.
        ({"holders": [holder(**RENEWED, held=601.0, thread="beat")], "waiting": 1}, None),
        ({"ticked": 240.0}, ("beats", "warning", "k (last tick 4 min ago)")),
        ({"ticked": 240.0, "holders": [holder(**RENEWED)]}, None),
        (
            {"ticked": 240.0, "limit": 0, **NOTE},  # on purpose
            ("limits", "note", "k (paused; by ana: reindex; for 2 h 00 min so far)"),
        ),
        (
            {"holders": [holder()], "line": [place(turns=3, routing_key="pay")], "waiting": 1},
            ("lines", "warning", "k (ticket t:0:0, queue pay)"),
        ),
        ({"holders": [holder()], "turns": [place(turns=2)]}, None),
        (
            {"waiting": 1, "line": [place(waiting=9.0)]},
            ("lines", "warning", "k (the first waits for 9.0 s)"),
        ),
        ({"waiting": 1, "line": [place(waiting=1.0)]}, None),  # it has only just come
        ({"aside": 2}, ("set aside", "warning", "k (2 tasks)")),
        ({"reservation": OLD}, ("reservations", "warning", "k (for 1 h 06 min)")),
        ({"reservation": OLD._replace(since=9.0)}, None),
        ({"reservation": OLD._replace(state="running")}, None),
        (
            {"limit": 0, **NOTE, "waiting": 4},
            ("limits", "warning", "k (paused; by ana: reindex; for 2 h 00 min so far; 4 waiting)"),
        ),
        (
            {"limit": 3, **NOTE, "waiting": 4, "holders": [holder(**RENEWED)]},
            ("limits", "warning", "k (to 3 at a time; by ana: reindex; for 2 h 00 min so far; 4"),
        ),
        ({"limit": 3, **NOTE}, None),
        (
            {"waiting": 1, "holders": [holder()], "line": [place(broker="b")]},
            ("sweep", "warning", ""),
        ),
        (
            {"limit_differs": 1},
            ("limits", "warning", "k (most servers have no limit, 1 server has another state)"),
        ),
    ],
    ids=str,
)
def test_what_may_be_wrong_with_a_lock(given, finding):
    """Each trouble has its words; what lists call trouble is what doctor finds."""
    one = lock(**{"waiting": 0, **given})
    known = facts(locks=Locks(suspects=[one]))
    found = [(f.check, f.level, f.what.partition(": ")[2]) for f in locks.suspects(known)]
    troubles = list(troubles_of(one, known.site))
    assert len(troubles) == (finding is not None)
    assert [trouble.row.check for trouble in troubles] == [
        check for check, *_ in found if not (one.limit and not one.waiting)
    ]
    if finding:
        check, level, words = finding
        assert found[0][:2] == (check, level)
        assert found[0][2].startswith(words)


HOUR, MINUTES = 3600.0, 400.0


class KnownSite(Site):
    """Knows these unique tasks, and how many messages wait."""

    def __init__(self, *tasks, messages=0):
        super().__init__(FakeOverview(), "dislock")
        self.tasks, self.messages = tasks, messages

    def tasks_of(self, key):
        return [UniqueTask("k", *task, "mail") for task in self.tasks]

    def messages_in(self, queues):
        assert list(queues) == ["mail"]
        return self.messages


@pytest.mark.parametrize(
    ("since", "remaining", "site", "unmet"),
    [
        (MINUTES, HOUR - MINUTES, KnownSite(("end", HOUR)), MINUTES),
        (MINUTES, HOUR - MINUTES, KnownSite(("end", HOUR), messages=5000), None),  # a backlog
        (MINUTES, HOUR - MINUTES, KnownSite(("end", HOUR), messages=None), None),
        (MINUTES, HOUR - MINUTES, KnownSite(("expiry", HOUR)), None),  # no worker renews it
        (MINUTES, HOUR - MINUTES, KnownSite(), None),
        (200.0, HOUR - 200.0, KnownSite(("end", HOUR)), None),
        (9 * HOUR, HOUR - 5.0, KnownSite(("end", HOUR)), None),  # a worker has it, for its ETA
        (9 * HOUR, 2 * HOUR, KnownSite(("start", HOUR)), None),  # its ETA is an hour ahead
        (MINUTES, 60.0, KnownSite(("end", HOUR)), MINUTES),  # its message has expired, or will
        (MINUTES, 500.0, KnownSite(("end", HOUR), ("end", 600.0)), None),  # perhaps 100 s of 600
        (61.0, 59.0, KnownSite(("end", 120.0)), 61.0),  # half of it
        (0.6 * HOUR, 0.4 * HOUR, KnownSite(("end", HOUR), messages=1), 0.6 * HOUR),
        (0.6 * HOUR, 0.4 * HOUR, KnownSite(), 0.6 * HOUR),
    ],
)
def test_a_reservation_whose_message_nobody_has_is_told_within_minutes(
    since, remaining, site, unmet
):
    """What is over of its time is known; a message that waits in a long queue is not lost."""
    kept = ReservationState("id-1", "waiting", since, remaining, "m", 0)
    one = lock(reservation=kept)
    told = [(trouble.name, trouble.since(one, site)) for trouble in troubles_of(one, site)]
    assert told == ([] if unmet is None else [("unmet", pytest.approx(unmet))])
    if site.messages == 0 and unmet == MINUTES and remaining > 60.0:
        [finding] = locks.suspects(facts(locks=Locks(suspects=[one]), site=site))
        assert (finding.level, "k (for 6 min, nothing waits in mail)" in finding.what) == (
            "warning",
            True,
        )


def test_a_list_has_what_is_wrong_and_since_when():
    """The worst comes first; a lock that cannot be read is worse than all others."""
    damaged = DamagedLockError("redis://h", "wrong type", "d")
    states = [
        lock(holders=[holder()]),
        lock(limit=0, limit_age=60.0, aside=2),
        lock(holders=[holder(renewed=25.0, remaining=5.0)]),
    ]
    rows = [ListedLock("k", "k", state) for state in states]
    rows += [ListedLock("d", "d", None, why) for why in (damaged, StoreError("redis://h", "away"))]
    found = list(judged(rows, Site(FakeOverview(), "dislock")))
    assert [row.troubles for row in found] == [
        {},
        {"set aside": None, "paused": 60.0},
        {"overdue": 25.0},
        {"damaged": None},
        {"not read": None},
    ]
    assert sorted(found, key=lambda row: row.rank) == [*found[3:], found[2], found[1], found[0]]


def test_what_is_wrong_with_one_lock_is_told_with_what_to_do():
    """The remedy names the lock."""
    one = lock(holders=[holder(renewed=25.0, remaining=5.0)])
    [trouble] = troubles_of(one, Site(FakeOverview(), "dislock"))
    told = trouble.told(one, Site(FakeOverview(), "dislock"))
    assert told.startswith("Leases that missed two renewals")
    assert told.endswith("To end one now: celery dislock free k")
    assert len(TROUBLES) > 1

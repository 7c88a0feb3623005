"""What is judged of locks, from what was seen of them; the rest is tested on a real server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks
from celery_dislock.operating.checks.facts import Locks
from celery_dislock.servers.view import ReservationState
from tests.unit.operating.checks.examples import facts, found, holder, levels, lock, place

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
        ({"reservation": OLD}, ("reservations", "note", "k (for 1 h 06 min)")),
        ({"reservation": OLD._replace(since=9.0)}, None),
        ({"reservation": OLD._replace(state="running")}, None),
        (
            {"limit": 0, **NOTE, "waiting": 4},
            ("limits", "note", "k (paused; by ana: reindex; for 2 h 00 min so far; 4 waiting)"),
        ),
        (
            {"limit": 3, **NOTE},
            ("limits", "note", "k (to 3 at a time; by ana: reindex; for 2 h 00 min so far)"),
        ),
        (
            {"limit_differs": 1},
            ("limits", "warning", "k (most servers have no limit, 1 server has another state)"),
        ),
    ],
    ids=str,
)
def test_what_may_be_wrong_with_a_lock(given, finding):
    """Each trouble has a row with its words; a healthy lock is not remembered."""
    one = lock(**{"waiting": 0, **given})
    known = facts(locks=Locks(suspects=[one]))
    found = [(f.check, f.level, f.what.partition(": ")[2]) for f in locks.suspects(known)]
    assert len(found) == (finding is not None)
    assert locks.is_suspect(one, known) is (finding is not None or bool(one.waiting))
    if finding:
        check, level, words = finding
        assert found[0][:2] == (check, level)
        assert found[0][2].startswith(words)


def test_locks_that_could_not_be_read():
    """A server is away, or answered nothing of use."""
    error = StoreError("redis://b", "no answer in time")
    assert levels(locks.counted, locks=Locks(away=[error], unread=[error])) == ["note", "note"]


@pytest.mark.parametrize(
    ("holders", "broker", "many"), [([], "here", 1), ([holder()], "here", 0), ([], "other", 0)]
)
def test_a_line_that_nobody_sweeps(monkeypatch, holders, broker, many):
    """The lines of another broker are its workers' business."""
    seen = Locks(suspects=[lock(waiting=1, line=[place(broker=broker)])])
    known = facts(locks=seen)
    overview = SimpleNamespace(lock=lambda _name: lock(holders=holders))
    monkeypatch.setattr(type(known), "overview", overview)
    assert len(list(locks.unswept(known))) == many


@pytest.mark.parametrize(
    ("answer", "many"), [([b"", 0], 0), ([b"f" * 16, 12_000], 1), ([b"f" * 16, 601_000], 0)]
)
def test_only_a_stranger_that_came_lately_is_a_finding(answer, many):
    """One that still has its turn elsewhere comes again within seconds."""
    site = SimpleNamespace(keeps_lines=True, run=lambda *_: [b"", 0, *answer])
    findings = list(locks.strangers(facts(server=site)))
    assert len(findings) == many
    assert all("came 12 s ago" in one.what and "drain" in one.remedy for one in findings)
    assert found(locks.strangers, kind="quorum") == []

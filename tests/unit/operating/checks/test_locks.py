"""What is judged of all locks together; what is wrong with one is judged by test_troubles.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks
from celery_dislock.operating.checks.facts import Locks
from tests.unit.operating.checks.examples import facts, found, levels, lock


def test_locks_that_could_not_be_read():
    """A server is away, or answered nothing of use."""
    error = StoreError("redis://b", "no answer in time")
    assert levels(locks.counted, locks=Locks(away=[error], unread=[error])) == ["note", "note"]


def test_a_limit_is_told_also_if_nobody_waits():
    """It was set by somebody, who may have forgotten it; lists do not call it trouble."""
    limited = lock(limit=3, limit_note="by ana", limit_age=7200.0)
    [(level, what)] = found(locks.suspects, locks=Locks(suspects=[limited]))
    assert (level, "k (to 3 at a time; by ana; for 2 h 00 min so far)" in what) == ("note", True)


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

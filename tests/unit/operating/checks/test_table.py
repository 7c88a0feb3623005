"""The table of checks: names, and a lock server that goes away while a check asks it."""

from __future__ import annotations

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.facts import Member
from celery_dislock.operating.checks.table import Table
from celery_dislock.operating.findings import warning
from tests.unit.operating.checks.examples import facts


def test_a_check_that_gets_no_answer_says_so_and_ends_no_other():
    """Its findings have its name."""
    table = Table()

    @table.check("lines")
    def lines(_):
        yield warning("A line.")
        raise StoreError("redis://h", "no answer in time")

    [check] = table
    first, last = check.findings(facts())
    assert (first.check, first.level, first.what) == ("lines", "warning", "A line.")
    assert (last.check, last.level) == ("lines", "note")
    assert "could not be looked at" in last.what


def test_a_check_of_each_process_is_about_that_process():
    """Those that do not answer are another check's business."""
    table = Table()

    @table.check_each("memory")
    def memory(one, known):
        assert known.prefix == "dislock"
        yield warning(f"{one.name} is full.")

    members = [Member("a"), Member("b", away="refused"), Member("c")]
    findings = [one for check in table for one in check.findings(facts(members=members))]
    assert [one.about for one in findings] == [["a"], ["c"]]

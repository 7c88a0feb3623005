"""How the checks come together."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks, server, workers
from celery_dislock.operating.checks.facts import Fleet
from celery_dislock.operating.checks.table import Finding
from celery_dislock.operating.doctor import Report, examine
from tests.unit.operating.checks.examples import described, facts


def test_without_the_lock_server_the_workers_are_judged():
    """No lock is looked at, and no right is tried."""

    def send(*_command):
        raise StoreError("redis://h", "no answer in time")

    away = SimpleNamespace(
        name="redis://h",
        kind="single",
        keeps_lines=True,
        members=lambda: [("redis://h", send)],
    )
    fleet, ours = Fleet({}, "Connection refused"), described(tasks={})
    report = examine(facts(server=away, ours=ours, fleet=fleet))
    assert report.away
    assert [one.check for one in report.findings] == ["server", "workers", "tasks"]


def test_a_report_is_serious_if_one_finding_is():
    """What somebody reads at 3 a.m. is on top."""
    found = [Finding("a", "ok", ""), Finding("b", "serious", "")]
    assert not Report(found[:1], away=False).serious
    assert Report(found, away=False).serious


def test_the_page_has_a_row_for_each_check():
    """And no row for a check that is gone."""
    page = (Path(__file__).parents[3] / "docs/reference/doctor.md").read_text("utf-8")
    section = page.partition("### What it looks at")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    tables = [module.ROWS + module.CHECKS for module in (workers, locks, server)]
    assert named == {row[0] for table in tables for row in table} | {*server.AS_AT_START}

"""The table of metrics, which users and the documentation name."""

from __future__ import annotations

from pathlib import Path

from celery_dislock.operating.metrics import BUCKETS, METRICS, PARTS


def test_limits_are_the_buckets():
    """A field's word stands for a bucket's limit, to the last digit."""
    assert tuple(map(float, PARTS[:-2])) == BUCKETS


def test_the_page_tells_every_metric():
    """The table in the documentation is made of the declarations, to the letter."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md").read_text("utf-8")
    told = [line for line in page.splitlines() if line.startswith("| `celery_dislock_")]
    assert told == [
        f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)}"
        f" | {metric.meaning} |"
        for metric in METRICS
    ]


def test_the_names_stay():
    """Dashboards and alerts of users name them, and their labels."""
    by = {
        "task worker outcome": "messages_total acquisitions_total conflicts_total lost_total "
        "unavailable_total",
        "task worker": "capped_total renewals_total wait_seconds held_seconds leases "
        "leases_overdue",
        "task": "parked parked_oldest_seconds",
        "state": "reservations reservations_oldest_seconds limits limits_oldest_seconds "
        "limits_waiting",
        "": "locks_cut server_up",
    }
    assert {metric.name: " ".join(metric.labels) for metric in METRICS} == {
        f"celery_dislock_{name}": labels for labels, names in by.items() for name in names.split()
    }

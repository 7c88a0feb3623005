"""Metrics made from what the lock server says: counters that never go down, and names of labels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from celery_dislock.config.settings import AppSettings
from celery_dislock.exceptions import StoreError
from celery_dislock.operating import metrics
from celery_dislock.operating.counting import BUCKETS, LIMITS
from celery_dislock.operating.metrics import METRICS, Metrics, _Names, _task_of
from celery_dislock.scripts import COUNTS, LOOK, TALLY

INDEX = "dislock:metrics:{counts}"
NOW_MS = 1_000_000  # the leases were taken at 0


class FakeServer:
    """Counts by worker, and locks as look.lua tells them; answers as the scripts do."""

    kind = "single"
    name = "redis://fake"

    def __init__(self):
        self.away = False
        self.counts = {}
        self.looks = {}
        self.lines = {}

    def _check(self):
        if self.away:
            raise StoreError("redis://fake", "away")

    def run(self, script, keys, *names):
        self._check()
        assert (script, keys, names) == (COUNTS, [INDEX], ())
        return [f"{INDEX}:of:{worker}".encode() for worker in self.counts]

    def _counted(self, *names):
        return [
            [
                part
                for field, number in self.counts[name.rpartition(":of:")[2]].items()
                for part in (field.encode(), str(number).encode())
            ]
            for name in names
        ]

    def senders(self):
        return [lambda *_command: (self._check(), (b"0", [k.encode() for k in self.looks]))[1]]

    def run_many(self, script, calls, *, within):
        self._check()
        assert within > 0
        if script is COUNTS:
            return [self._counted(*names) for _, *names in calls]
        if script is LOOK:
            return [self.looks[name] for name, *_ in calls]
        assert script is TALLY
        return [self._tally(self.lines[name], first, most) for name, first, most in calls]

    @staticmethod
    def _tally(line, first, most):
        some = line[first : first + most]
        told = [b"5000000", len(some), b"1000000" if some else b""]
        for task in dict.fromkeys(some):
            told += [task, some.count(task)]
        return told


def look(*leases, waiting=0, unique=b"", limit=b""):
    """Return the reply of look.lua for leases (worker, task, ms until it expires, timeout)."""
    told = []
    for worker, task, expires, timeout in leases:
        holder = f'{{"task": "{task}", "worker": "{worker}", "timeout": {timeout}}}'
        told += [b"o", NOW_MS + expires, b"1", b"x", holder.encode(), 0]
    return [NOW_MS, told, waiting, [], [], 0, unique, limit, -2]


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def read(server):
    """Read the metrics of that server."""
    store = SimpleNamespace(lock_server=server, close=lambda: None)
    process = SimpleNamespace(store_within=lambda _most: store, close=lambda: None)
    settings = AppSettings()
    runtime = SimpleNamespace(new_process=lambda: process, settings=settings)
    return Metrics(runtime).read


def value(reading, name, *labels):
    return reading.values[f"celery_dislock_{name}"][labels]


def test_counters_have_the_labels_of_what_was_counted(server, read):
    """The worker comes from the name of the hash, the rest from the field."""
    server.counts["celery@w1"] = {
        "since": 1,
        "acquired at_once shop.export": 3,
        "capped - shop export": 1,
        "conflict skip ": 2,
        "message duplicate shop.export": 4,
    }
    reading = read()
    assert value(reading, "acquisitions_total", "shop.export", "celery@w1", "at_once") == 3
    assert value(reading, "capped_total", "shop export", "celery@w1") == 1
    assert value(reading, "conflicts_total", "", "celery@w1", "skip") == 2
    assert value(reading, "messages_total", "shop.export", "celery@w1", "duplicate") == 4
    assert value(reading, "server_up") == 1


def test_a_histogram_is_read_back(server, read):
    """Buckets stand alone; what is counted beyond the last one counts, too."""
    server.counts["w"] = {"since": 1, "held 0.01 t": 2, "held inf t": 1, "held sum t": 5_000_000}
    distribution = read().distributions["celery_dislock_held_seconds"]["t", "w"]
    assert distribution.buckets == [2, *[0] * (len(BUCKETS) - 1), 1]
    assert distribution.sum == 5


def test_what_a_newer_version_counts_is_left_out(server, read):
    """An exporter that is older than the workers serves what it knows."""
    server.counts["w"] = {"since": 1, "dropped x t": 1, "held 0.3 t": 1, "acquired at_once t": 1}
    reading = read()
    assert set(reading.values) >= {"celery_dislock_acquisitions_total"}
    assert sum(reading.distributions["celery_dislock_held_seconds"]["t", "w"].buckets) == 0


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"since": 1, "acquired at_once t": 99}, 100),  # a failover lost the last one
        ({"since": 2, "acquired at_once t": 99}, 100),  # of several servers, another one is asked
        ({"since": 1, "acquired at_once t": 101}, 101),
        ({"since": 2, "acquired at_once t": 3}, 3),  # the server was emptied
        ({"since": 1, "acquired waited t": 5}, 100),  # a field that is missing
    ],
)
def test_a_counter_does_not_go_down_unless_it_begins_anew(server, read, now, told):
    """Prometheus would take the whole of a counter that went down a little for new."""
    server.counts["w"] = {"since": 1, "acquired at_once t": 100}
    read()
    server.counts["w"] = now
    assert value(read(), "acquisitions_total", "t", "w", "at_once") == told


def test_a_worker_that_went_away_is_forgotten(server, read):
    """Its series end; they are not added to another's, where they would look like new events."""
    server.counts["w"] = {"since": 1, "acquired at_once t": 100}
    read()
    del server.counts["w"]
    assert "celery_dislock_acquisitions_total" not in read().values
    server.counts["w"] = {"since": 2, "acquired at_once t": 60}
    assert value(read(), "acquisitions_total", "t", "w", "at_once") == 60


def test_a_server_that_is_away_is_told_and_nothing_else(server, read):
    """No gauge says zero about locks that nobody could look at."""
    server.counts["w"] = {"since": 1, "acquired at_once t": 100}
    server.away = True
    reading = read()
    assert reading.values == {"celery_dislock_server_up": {(): 0.0}}
    server.away = False
    assert value(read(), "server_up") == 1


def test_leases_are_counted_by_task_and_worker(server, read):
    """Those of which two renewals were missed count as overdue, too."""
    server.looks = {
        "dislock:{a}": look(("w1", "t", 30_000, 30)),
        "dislock:{b}": look(("w1", "t", 9_000, 30)),
    }
    reading = read()
    assert value(reading, "leases", "t", "w1") == 2
    assert value(reading, "leases_overdue", "t", "w1") == 1


def test_parked_tasks_are_counted_by_task(server, read, monkeypatch):
    """Of a line beyond what is looked at, the rest is taken to be of its most frequent task."""
    monkeypatch.setattr(metrics, "PLACES", 2)
    monkeypatch.setattr(metrics, "PLACES_MOST", 4)
    server.looks = {"dislock:{a}": look(waiting=3), "dislock:{b}": look(waiting=9)}
    server.lines = {
        "dislock:{a}": [b"one", b"two", b"one"],
        "dislock:{b}": [b"two"] * 9,
    }
    reading = read()
    assert value(reading, "parked", "one") == 2
    assert value(reading, "parked", "two") == 1 + 9
    assert value(reading, "parked_oldest_seconds", "one") == 4
    assert value(reading, "parked_oldest_seconds", "two") == 4


def test_reservations_are_counted_by_state(server, read):
    """With the age of the oldest; a record of which only the numbers are kept counts nowhere."""
    told = [("w", 40_000), ("w", 10_000), ("d", 5_000), ("-", 90_000)]
    server.looks = {
        f"dislock:{{{nth}}}": look(
            unique=f"2 {state} {NOW_MS - age} 1 i {NOW_MS + 9} n 0 1 m 0 0 0 0 -".encode()
        )
        for nth, (state, age) in enumerate(told)
    }
    found = read().values
    assert found["celery_dislock_reservations"] == {("waiting",): 2, ("ended",): 1}
    oldest = found["celery_dislock_reservations_oldest_seconds"]
    assert oldest == {("waiting",): 40.0, ("ended",): 5.0}


def test_paused_and_limited_keys_are_counted(server, read):
    """With the age of the oldest, and how many wait behind them; a pause is no limit."""
    told = [(0, 40_000, 3), (0, 10_000, 1), (2, 5_000, 0)]
    server.looks = {
        f"dislock:{{{nth}}}": look(waiting=waiting, limit=f"1 {limit} {NOW_MS - age} n".encode())
        for nth, (limit, age, waiting) in enumerate(told)
    }
    server.lines = {name: [] for name in server.looks}
    found = read().values
    assert found["celery_dislock_limits"] == {("paused",): 2, ("limited",): 1}
    assert found["celery_dislock_limits_oldest_seconds"] == {("paused",): 40.0, ("limited",): 5.0}
    assert found["celery_dislock_limits_waiting"] == {("paused",): 4, ("limited",): 0}


def test_the_locks_that_are_looked_at_are_bounded(server, read, monkeypatch):
    """Beyond that the gauges are too low, and one says so."""
    server.looks = {"dislock:{a}": look(("w", "t", 9_000, 10)), "dislock:{b}": look()}
    assert read().values["celery_dislock_locks_cut"] == {}
    monkeypatch.setattr(metrics, "PAGES_MOST", 1)
    found = read().values
    assert found["celery_dislock_locks_cut"] == {(): 1.0}
    assert found["celery_dislock_leases"] == {("t", "w"): 1}
    assert found["celery_dislock_server_up"] == {(): 1.0}


def test_a_line_of_waiters_has_no_parked_tasks(server, read):
    """Threads and worker slots that wait are not parked."""
    server.looks = {"dislock:{a}": look(waiting=2)}
    server.lines = {"dislock:{a}": []}
    assert read().values["celery_dislock_parked"] == {}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (b"shop.export", "shop.export"),
        (rb"caf\u00e9", "café"),
        (rb"cut off\ ".strip(), "cut off\\"),
        (b"\xff", "\ufffd"),
    ],
)
def test_names_of_tasks_are_read_from_headers(written, name):
    """They are text of JSON, if nobody has forged them."""
    assert _task_of(written) == name


def test_labels_are_bounded():
    """Records in Redis may say anything."""
    names = _Names()
    told = {names.of(f"t{number}") for number in range(metrics.TASKS_MOST + 10)}
    assert len(told) == metrics.TASKS_MOST + 1
    assert metrics.OTHER in told
    assert names.of(None) == metrics.OTHER


def test_limits_are_the_buckets():
    """A field's word stands for a bucket's limit, to the last digit."""
    assert tuple(map(float, LIMITS)) == BUCKETS


def test_the_page_tells_every_metric():
    """The table in the documentation is made of the declarations, to the letter."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md").read_text("utf-8")
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |\n" in page


def test_the_names_stay():
    """Dashboards and alerts of users name them."""
    assert {(metric.name, metric.kind, metric.labels) for metric in METRICS} == {
        ("celery_dislock_messages_total", "counter", ("task", "worker", "outcome")),
        ("celery_dislock_acquisitions_total", "counter", ("task", "worker", "outcome")),
        ("celery_dislock_conflicts_total", "counter", ("task", "worker", "outcome")),
        ("celery_dislock_lost_total", "counter", ("task", "worker", "outcome")),
        ("celery_dislock_capped_total", "counter", ("task", "worker")),
        ("celery_dislock_renewals_total", "counter", ("task", "worker")),
        ("celery_dislock_unavailable_total", "counter", ("task", "worker", "outcome")),
        ("celery_dislock_wait_seconds", "histogram", ("task", "worker")),
        ("celery_dislock_held_seconds", "histogram", ("task", "worker")),
        ("celery_dislock_leases", "gauge", ("task", "worker")),
        ("celery_dislock_leases_overdue", "gauge", ("task", "worker")),
        ("celery_dislock_parked", "gauge", ("task",)),
        ("celery_dislock_parked_oldest_seconds", "gauge", ("task",)),
        ("celery_dislock_reservations", "gauge", ("state",)),
        ("celery_dislock_reservations_oldest_seconds", "gauge", ("state",)),
        ("celery_dislock_limits", "gauge", ("state",)),
        ("celery_dislock_limits_oldest_seconds", "gauge", ("state",)),
        ("celery_dislock_limits_waiting", "gauge", ("state",)),
        ("celery_dislock_locks_cut", "gauge", ()),
        ("celery_dislock_server_up", "gauge", ()),
    }

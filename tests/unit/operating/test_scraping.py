"""Metrics made from what the lock server says: counters that never go down, and names of labels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.config.settings import AppSettings
from celery_dislock.exceptions import StoreError
from celery_dislock.operating import scraping
from celery_dislock.operating.counting import OTHER, TASKS_MOST
from celery_dislock.operating.scraping import Metrics
from celery_dislock.scripts import COUNTS, LOOK

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
        assert script is LOOK
        return [self._looked(*call) for call in calls]

    def _looked(self, name, _first, most):
        reply = list(self.looks[name])
        reply[3] = self.lines.get(name, [])[: 3 * most]
        return reply


def parked(*tasks):
    """Return what look.lua has of parked tasks in line, each for four seconds."""
    joined = (NOW_MS - 4000) * 1000
    message = '{"headers": {"task": "%s", "id": "1"}}'
    return [
        part
        for task in tasks
        for part in (
            b"t#",
            str(joined).encode(),
            f"1 {joined} 0 1 x 1 here 1 {message % task}".encode(),
        )
    ]


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
        "acquisitions at_once shop.export": 3,
        "capped - shop export": 1,
        "conflicts skip ": 2,
    }
    reading = read()
    assert value(reading, "acquisitions_total", "shop.export", "celery@w1", "at_once") == 3
    assert value(reading, "capped_total", "shop export", "celery@w1") == 1
    assert value(reading, "conflicts_total", "", "celery@w1", "skip") == 2
    assert value(reading, "server_up") == 1


def test_what_another_version_counts_is_left_out(server, read):
    """An exporter that is older than the workers serves what it knows."""
    server.counts["w"] = {"dropped x t": 1, "held 0.3 t": 1, "held inf t": 2, "lost gone t": 1}
    reading = read()
    assert value(reading, "lost_total", "t", "w", "gone") == 1
    assert sum(value(reading, "held_seconds", "t", "w")) == 2


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"lost gone t": 99}, 100),  # a failover lost the last one, or another server is asked
        ({"lost gone t": 101}, 101),
        ({"lost gone t": 3}, 3),  # the server was emptied
        ({"lost expired t": 60}, 100),  # a field that is missing
    ],
)
def test_a_counter_does_not_go_down_unless_it_begins_anew(server, read, now, told):
    """Prometheus would take the whole of a counter that went down a little for new."""
    server.counts["w"] = {"lost gone t": 100}
    read()
    server.counts["w"] = now
    assert value(read(), "lost_total", "t", "w", "gone") == told


def test_a_worker_that_went_away_is_forgotten(server, read):
    """Its series end; they are not added to another's, where they would look like new events."""
    server.counts["w"] = {"lost gone t": 100}
    read()
    del server.counts["w"]
    assert "celery_dislock_lost_total" not in read().values
    server.counts["w"] = {"lost gone t": 60}
    assert value(read(), "lost_total", "t", "w", "gone") == 60


def test_a_server_that_is_away_is_told_and_nothing_else(server, read):
    """No gauge says zero about locks that nobody could look at."""
    server.counts["w"] = {"lost gone t": 100}
    server.away = True
    reading = read()
    assert reading.values == {"celery_dislock_server_up": {(): 0.0}}
    server.away = False
    assert value(read(), "server_up") == 1


@pytest.mark.parametrize(("kind", "up"), [("cluster", False), ("quorum", True)])
def test_a_member_that_is_away_is_told_unless_the_others_have_its_locks(server, read, kind, up):
    """Of a cluster some locks are missing; several servers have the same."""

    def away(*_command):
        raise StoreError("redis://fake", "away")

    server.kind = kind
    senders = [*server.senders() * 2, away]
    server.senders = lambda: senders
    assert read().up is up


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
    monkeypatch.setattr(scraping, "PLACES", 4)
    server.looks = {"dislock:{a}": look(waiting=3), "dislock:{b}": look(waiting=9)}
    server.lines = {
        "dislock:{a}": parked("one", "two", "two"),
        "dislock:{b}": parked("two", "one", "two", "two", "two"),
    }
    reading = read()
    assert value(reading, "parked", "one") == 1 + 1
    assert value(reading, "parked", "two") == 2 + 8
    assert reading.values["celery_dislock_parked_oldest_seconds"] == {("one",): 4, ("two",): 4}


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
    found = read().values
    assert found["celery_dislock_limits"] == {("paused",): 2, ("limited",): 1}
    assert found["celery_dislock_limits_oldest_seconds"] == {("paused",): 40.0, ("limited",): 5.0}
    assert found["celery_dislock_limits_waiting"] == {("paused",): 4, ("limited",): 0}


def test_the_locks_that_are_looked_at_are_bounded(server, read, monkeypatch):
    """Beyond that the gauges are too low, and one says so."""
    server.looks = {"dislock:{a}": look(("w", "t", 9_000, 10)), "dislock:{b}": look()}
    assert "celery_dislock_locks_cut" not in read().values
    monkeypatch.setattr(scraping, "PAGES_MOST", 1)
    found = read().values
    assert found["celery_dislock_locks_cut"] == {(): 1.0}
    assert found["celery_dislock_leases"] == {("t", "w"): 1}
    assert found["celery_dislock_server_up"] == {(): 1.0}


def test_a_line_of_waiters_has_no_parked_tasks(server, read):
    """Threads and worker slots that wait are not parked."""
    server.looks = {"dislock:{a}": look(waiting=2)}
    server.lines = {"dislock:{a}": [b"a/1", b"1", b"", b"b/1", b"2", b""]}
    assert read().values["celery_dislock_parked"] == {}


def test_labels_are_bounded(server, read):
    """Records in Redis may say anything, in any number; what stands in a label can be printed."""
    many = [("w", f"t{number}", 9_000, 10) for number in range(TASKS_MOST - 1)]
    long, red = ("w", "x" * 10_000, 9_000, 10), ("w", r"\u001b", 9_000, 10)
    unique = f"2 w {NOW_MS} 1 i {NOW_MS + 9} n 0 1 m 0 0 0 0 -".encode()
    server.looks = {"dislock:{a}": look(red, *many, long, unique=unique)}
    reading = read()
    assert len(reading.values["celery_dislock_leases"]) == TASKS_MOST
    assert value(reading, "leases", r"\x1b", "w") == 1
    assert value(reading, "leases", OTHER, "w") == 2
    assert value(reading, "reservations", "waiting") == 1

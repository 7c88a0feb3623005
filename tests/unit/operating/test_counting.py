"""What a process counts, and how it is sent: in batches, and again until they are confirmed."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from celery_dislock.clock import FOREVER
from celery_dislock.exceptions import StoreError
from celery_dislock.operating import counting
from celery_dislock.operating.counting import OTHER, TASKS_MOST, Counters, instruments
from celery_dislock.operating.metrics import COUNTED

HOLDER = {"task": "shop.export", "worker": "celery@w1", "id": "1", "pid": 7}
AWAY = StoreError("redis://fake", "away")


class FakeServer:
    """Adds up as count.lua does; notes how many fields it was sent.

    Attributes:
        away: Whether it does not answer.
        loses_replies: Whether it does what it is asked, and does not answer.
    """

    def __init__(self):
        self.away = False
        self.loses_replies = False
        self.sent = []
        self.counts = {}

    def send(self, calls):
        if self.away:
            raise AWAY
        replies = [self.add(*call) for call in calls]
        if self.loses_replies:
            raise AWAY
        return replies

    def add(self, _index, counts, _kept, _most, _fields, *added):
        self.sent.append(len(added) // 2)
        fields = self.counts.setdefault(counts, {})
        for field, amount in zip(*[iter(added)] * 2, strict=True):
            fields[field] = fields.get(field, 0) + amount
        return 1

    def of(self, worker="celery@w1"):
        return self.counts.get(f"dislock:metrics:{{counts}}:of:{worker}", {})


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def counters(server):
    counters = Counters("dislock", server.send)
    yield counters
    counters._events.clear()
    counters._sums.clear()  # nothing is left to be sent when this process ends


def test_counts_are_added_up_by_what_outcome_and_task(counters, server):
    """A batch has one field for each kind of event, however often it happened."""
    counters.flush(server.send)
    assert (counters.due_at, server.sent) == (FOREVER, [])  # an idle process costs nothing
    for _ in range(3):
        counters.add("acquisitions", HOLDER, "at_once")
    counters.add("renewals", HOLDER)
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert server.of() == {"acquisitions at_once shop.export": 3, "renewals - shop.export": 1}
    assert server.sent == [2]


def test_seconds_go_into_their_bucket_and_into_the_sum(counters, server):
    """A bucket has what is at most its limit, and no other bucket has it too."""
    for seconds in (0.01, 0.011, 0.5, 4000.0, -1.0):
        counters.add("held", HOLDER, value=seconds)
    counters.flush(server.send)
    assert server.of() == {
        "held 0.01 shop.export": 2,  # a clock that goes back counts as no time
        "held 0.05 shop.export": 1,
        "held 0.5 shop.export": 1,
        "held inf shop.export": 1,
        "held sum shop.export": 4_000_521_000,
    }


def test_a_batch_whose_reply_was_lost_counts_twice_at_most(counters, server):
    """A server that hangs finds it once in its sockets; until it answers it gets no other."""
    server.loses_replies = True
    for _ in range(5):
        counters.add("acquisitions", HOLDER, "at_once")
        counters.flush(server.send)
        assert counters.due_at < FOREVER
    assert server.sent == [1, 0, 0, 0, 0]
    server.loses_replies = False
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert server.of() == {"acquisitions at_once shop.export": 1 + 5}


def test_an_error_of_one_worker_leaves_the_others_alone(counters, server):
    """Only what was refused is sent again."""
    for worker in ("a", "b"):
        counters.add("acquisitions", {"task": "t", "worker": worker}, "at_once")
    counters.flush(lambda calls: [server.add(*calls[0]), AWAY])
    assert counters.due_at < FOREVER
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert server.of("a") == server.of("b") == {"acquisitions at_once t": 1}


def test_a_flush_is_asked_for_once(counters, server):
    """The first event after a flush wakes the watchdog; those after it cost an append."""
    woken = []
    counters.wake = lambda: woken.append(1)
    for _ in range(2):
        for _ in range(1000):
            counters.add("acquisitions", HOLDER, "at_once")
        counters.flush(server.send)
    assert woken == [1, 1]


def test_names_of_tasks_are_bounded(counters, server):
    """An app that makes up names of tasks does not fill the lock server."""
    for number in range(TASKS_MOST + 10):
        counters.add("acquisitions", {"task": f"t{number}", "worker": "w"}, "at_once")
    counters.add("acquisitions", {"task": "x" * 10_000, "worker": "w" * 10_000}, "at_once")
    counters.flush(server.send)
    assert len(server.of("w")) == TASKS_MOST + 1
    assert server.of("w")[f"acquisitions at_once {OTHER}"] == 10
    assert all(len(name) < 300 for name in server.counts)


def test_what_is_left_is_sent_at_the_end_of_the_process(counters, server):
    """So a child that ends in order takes nothing along; a server that is away holds up no end."""
    server.away = True
    counters.add("acquisitions", HOLDER, "at_once")
    counting.finish_all(sender=None)
    assert server.of() == {}
    server.away = False
    counting.finish_all()
    counting.finish_all()
    assert (server.of(), server.sent) == ({"acquisitions at_once shop.export": 1}, [0, 1])


def test_a_forked_process_does_not_send_its_parents_counts(counters, server):
    """They are the parent's to send."""
    counters.add("acquisitions", HOLDER, "at_once")
    counters._pid = os.getpid() + 1
    counting.finish_all()
    assert server.sent == []


def test_an_end_during_a_flush_waits_for_it(counters, server, monkeypatch):
    """Two of them at once would add the queue up twice; the one that comes second goes without."""
    monkeypatch.setattr(counting, "FINISH_WITHIN", 0.001)
    counters.add("acquisitions", HOLDER, "at_once")

    def send(calls):
        counters.flush(server.send)
        assert counters.due_at < FOREVER
        counters.add("acquisitions", HOLDER, "at_once")
        counters.finish()
        return server.send(calls)

    counters.flush(send)
    assert server.sent == [1]


def provided(monkeypatch, provider):
    """Have a process use OpenTelemetry's metrics with this provider."""
    module = SimpleNamespace(get_meter_provider=lambda: provider)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", module if provider else None)
    monkeypatch.setattr(counting, "_made", [])


@pytest.mark.parametrize("name", ["_ProxyMeterProvider", "NoOpMeterProvider", None])
def test_the_api_alone_records_nothing(monkeypatch, name):
    """redis-py imports it wherever it is installed; what counts is that the app has set it up."""
    provided(monkeypatch, name and type(name, (), {})())
    assert instruments() is None


def test_every_metric_has_an_instrument(monkeypatch):
    """What is counted for Prometheus is recorded for OpenTelemetry, too, by the same labels."""
    recorded = []

    def make(name, **_about):
        def record(value, attributes):
            recorded.append((name.removeprefix("celery_dislock."), value, dict(attributes)))

        return SimpleNamespace(add=record, record=record)

    kinds = ("create_counter", "create_histogram", "create_up_down_counter")
    meter = SimpleNamespace(**dict.fromkeys(kinds, make))
    provided(monkeypatch, SimpleNamespace(get_meter=lambda _name: meter))
    for word in COUNTED:
        instruments().record(word, "skip", "t", "w", 1)
    assert sorted(name for name, *_ in recorded) == sorted([*COUNTED, "leases", "leases"])
    assert ("conflicts", 1, {"task": "t", "worker": "w", "outcome": "skip"}) in recorded

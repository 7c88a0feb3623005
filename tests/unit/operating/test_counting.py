"""What a process counts, and how it is sent: once, whatever becomes of the messages."""

from __future__ import annotations

import os

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.locks.observer import FOREVER
from celery_dislock.operating import counting
from celery_dislock.operating.counting import (
    ACQUIRED,
    CONFLICT,
    HELD,
    OTHER,
    TASKS_MOST,
    WAIT,
    WAKE_AGAIN,
    Counters,
)

HOLDER = {"task": "shop.export", "worker": "celery@w1", "id": "1", "pid": 7}
AWAY = StoreError("redis://fake", "away")


class FakeServer:
    """Adds up as count.lua does; notes what it was sent.

    Attributes:
        away: Whether it does not answer.
        loses_replies: Whether it does what it is told, and does not answer.
    """

    def __init__(self):
        self.away = False
        self.loses_replies = False
        self.calls = []
        self.seen = {}
        self.counts = {}

    def send(self, calls):
        if self.away:
            raise AWAY
        replies = [self.add(*call) for call in calls]
        if self.loses_replies:
            raise AWAY
        return replies

    def add(self, index, number, seen, counts, *rest):
        self.calls.append((number, seen, counts))
        if self.seen.get(seen, 0) >= number:
            return 0
        self.seen[seen] = number
        fields = self.counts.setdefault(counts, {})
        for field, amount in zip(*[iter(rest[4:])] * 2, strict=True):
            fields[field] = fields.get(field, 0) + amount
        return 1

    def of(self, worker="celery@w1"):
        return self.counts.get(f"dislock:metrics:{{counts}}:of:{worker}", {})

    def run(self, _script, keys, *arguments):
        return self.send([(*keys, *arguments)])[0]


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def counters(server):
    counters = Counters("dislock", "host:7/abcd", lambda: server)
    yield counters
    counters._events.clear()
    counters._sums.clear()  # nothing is left to be sent when this process ends


def test_nothing_is_sent_where_nothing_was_counted(counters, server):
    """An idle process costs the server nothing."""
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert server.calls == []


def test_counts_are_added_up_by_what_outcome_and_task(counters, server):
    """A batch has one field for each kind of event, however often it happened."""
    for _ in range(3):
        counters.add(ACQUIRED, HOLDER, "at_once")
    counters.add(CONFLICT, HOLDER, "skip")
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert server.of() == {"acquired at_once shop.export": 3, "conflict skip shop.export": 1}
    assert len(server.calls) == 1


def test_seconds_go_into_their_bucket_and_into_the_sum(counters, server):
    """A bucket has what is at most its limit, and no other bucket has it too."""
    for seconds in (0.01, 0.011, 0.5, 4000.0, -1.0):
        counters.add(HELD, HOLDER, value=seconds)
    counters.flush(server.send)
    assert server.of() == {
        "held 0.01 shop.export": 2,  # a clock that goes back counts as no time
        "held 0.05 shop.export": 1,
        "held 0.5 shop.export": 1,
        "held inf shop.export": 1,
        "held sum shop.export": 4_000_521_000,
    }


def test_a_name_with_spaces_and_newlines_stays_whole(counters, server):
    """A task's name is the last part of a field."""
    counters.add(WAIT, {"task": 'a b\n"c"', "worker": "w"}, value=1.0)
    counters.flush(server.send)
    assert set(server.of("w")) == {'wait 1 a b\n"c"', 'wait sum a b\n"c"'}


def test_each_worker_has_counts_of_its_own(counters, server):
    """A process may hold locks under the worker's name, and under its host's."""
    for worker in ("celery@w1", "host"):
        counters.add(ACQUIRED, {"task": "t", "worker": worker}, "at_once")
    counters.flush(server.send)
    assert server.of("celery@w1") == server.of("host") == {"acquired at_once t": 1}


def test_a_batch_whose_reply_was_lost_counts_once(counters, server):
    """It is sent again as it was, under its number; what came since goes in the next one."""
    counters.add(ACQUIRED, HOLDER, "at_once")
    server.loses_replies = True
    counters.flush(server.send)
    assert counters.due_at < FOREVER
    counters.add(ACQUIRED, HOLDER, "at_once")
    counters.flush(server.send)
    assert counters.due_at < FOREVER
    server.loses_replies = False
    counters.flush(server.send)
    assert counters.due_at < FOREVER  # the second one is still to come
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert [number for number, *_ in server.calls] == [1, 1, 1, 2]
    assert server.of() == {"acquired at_once shop.export": 2}


def test_counts_wait_for_a_server_that_is_away(counters, server):
    """However long that lasts, nothing is lost, and memory does not grow with the events."""
    server.away = True
    for _ in range(10):
        for _ in range(100):
            counters.add(ACQUIRED, HOLDER, "at_once")
        counters.flush(server.send)
        assert counters.due_at < FOREVER
    assert not counters._events
    server.away = False
    counters.finish()
    assert server.of() == {"acquired at_once shop.export": 1000}


def test_an_error_of_one_worker_leaves_the_others_alone(counters, server):
    """Only the batch that was refused is sent again."""
    for worker in ("a", "b"):
        counters.add(ACQUIRED, {"task": "t", "worker": worker}, "at_once")
    counters.flush(lambda calls: [server.add(*calls[0]), AWAY])
    assert counters.due_at < FOREVER
    counters.flush(server.send)
    assert counters.due_at == FOREVER
    assert server.of("a") == server.of("b") == {"acquired at_once t": 1}
    assert len(server.calls) == 2


def test_a_flush_is_asked_for_once(counters, server):
    """The first event after a flush wakes the watchdog; those after it cost an append."""
    woken = []
    counters.wake = lambda: woken.append(1)
    for _ in range(WAKE_AGAIN - 1):
        counters.add(ACQUIRED, HOLDER, "at_once")
    assert woken == [1]
    counters.flush(server.send)
    counters.add(ACQUIRED, HOLDER, "at_once")
    assert woken == [1, 1]


def test_a_wake_up_that_was_interrupted_is_made_up_for(counters):
    """A signal handler raises in the middle of it; a later event asks again."""

    def interrupted():
        raise SystemExit

    counters.wake = interrupted
    with pytest.raises(SystemExit):
        counters.add(ACQUIRED, HOLDER, "at_once")
    woken = []
    counters.wake = lambda: woken.append(1)
    counters.add(ACQUIRED, HOLDER, "at_once")
    assert woken == [1]


def test_names_of_tasks_are_bounded(counters, server):
    """An app that makes up names of tasks does not fill the lock server."""
    for number in range(TASKS_MOST + 10):
        counters.add(ACQUIRED, {"task": f"t{number}", "worker": "w"}, "at_once")
    counters.add(ACQUIRED, {"task": "x" * 10_000, "worker": "w" * 10_000}, "at_once")
    counters.flush(server.send)
    assert len(server.of("w")) == TASKS_MOST + 1
    assert server.of("w")[f"acquired at_once {OTHER}"] == 10
    assert all(len(name) < 300 for name in server.counts)


def test_what_is_left_is_sent_at_the_end_of_the_process(counters, server):
    """So a child that ends in order takes nothing along."""
    counters.add(ACQUIRED, HOLDER, "at_once")
    counting.finish_all(sender=None)
    assert server.of() == {"acquired at_once shop.export": 1}
    counting.finish_all()
    assert len(server.calls) == 1


def test_a_server_that_is_away_holds_up_no_end(counters, server):
    """It is tried once; the counts are lost, and nothing is raised."""
    tried = []
    counters._server = lambda: tried.append(1) or server
    server.away = True
    counters.add(ACQUIRED, HOLDER, "at_once")
    counting.finish_all()
    assert tried == [1]


def test_what_is_counted_after_the_end_starts_no_watchdog_again(counters, server):
    """A lock that outlives its runtime is released then; its counts go with the process."""
    woken = []
    counters.finish()
    counters.add(HELD, HOLDER, value=1.0)
    assert woken == []
    counting.finish_all()
    assert server.of()["held 1 shop.export"] == 1


def test_a_forked_process_does_not_send_its_parents_counts(counters, server):
    """They are the parent's to send."""
    counters.add(ACQUIRED, HOLDER, "at_once")
    counters._pid = os.getpid() + 1
    counting.finish_all()
    assert server.calls == []


def test_an_end_during_a_flush_waits_for_it(counters, server, monkeypatch):
    """Two of them at once would add the queue up twice; the one that comes second goes without."""
    monkeypatch.setattr(counting, "FINISH_WITHIN", 0.001)
    counters.add(ACQUIRED, HOLDER, "at_once")

    def send(calls):
        counters.flush(server.send)
        assert counters.due_at < FOREVER
        counters.add(ACQUIRED, HOLDER, "at_once")
        counters.finish()
        return server.send(calls)

    counters.flush(send)
    assert len(server.calls) == 1

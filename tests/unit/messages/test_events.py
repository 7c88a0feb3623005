"""Events about running tasks: whether anybody wants them, and who sends them, without a thread."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import redis
from celery.events.state import Task

from celery_dislock.messages import events as module
from celery_dislock.messages.events import WAITING_MOST, Events, events_of, revoked, sends


class Dispatcher:
    """Stands for Celery's."""

    def __init__(self, *, enabled=True, groups=(), buffers=False):
        self.enabled, self.groups = enabled, set(groups)
        self.buffer_group = ["task"] if buffers else frozenset()
        self.sent = []
        self.error = None

    def send(self, type_, **fields):
        if self.error is not None:
            raise self.error
        self.sent.append((type_, fields))


class App:
    """Stands for an app, and for its way to the broker in a pool process."""

    def __init__(self):
        self.dispatcher = Dispatcher()
        self.workers = []
        self.events = SimpleNamespace(default_dispatcher=self._default_dispatcher)

    @contextmanager
    def _default_dispatcher(self, hostname):
        self.workers.append(hostname)
        yield self.dispatcher


@pytest.fixture
def threads(monkeypatch):
    """The threads that were started; each runs when the test says so."""
    started = []

    class Thread:
        def __init__(self, target, name, daemon):
            assert (name, daemon) == ("dislock-events", True)
            self._target, self._alive = target, False

        def start(self):
            self._alive = True
            started.append(self)

        def run(self):
            self._target()
            self._alive = False

        def is_alive(self):
            return self._alive

    monkeypatch.setattr(module.threading, "Thread", Thread)
    return started


@pytest.fixture
def fork(monkeypatch):
    """Become another process, as after a fork."""
    return lambda: monkeypatch.setattr(module.os, "getpid", lambda: -1)


@pytest.fixture
def app():
    return App()


LOST = ("task-lock-lost", {"uuid": "1", "key": "k"})


def lose(events):
    events.send("task-lock-lost", "w1@here", uuid="1", key="k")


@pytest.mark.parametrize(
    ("dispatcher", "expected"),
    [
        (None, False),
        (Dispatcher(), True),
        (Dispatcher(enabled=False), False),
        (Dispatcher(groups=["worker"]), False),  # heartbeats alone
        (Dispatcher(groups=["worker", "task"]), True),  # turned on by a monitor
    ],
)
def test_a_worker_sends_events_about_tasks_or_it_does_not(dispatcher, expected):
    """As its dispatcher decides it for Celery's own."""
    assert sends(dispatcher) is expected


def test_outside_of_a_worker_nothing_is_sent(app, threads):
    """A web server that runs a task eagerly has nobody who asked for events."""
    lose(Events(app))
    assert threads == []


def test_a_worker_with_an_event_loop_keeps_events_for_the_loop(app, threads):
    """No thread may run there while the main process forks."""
    events = Events(app)
    dispatcher = Dispatcher(buffers=True)
    events.follow(dispatcher)
    lose(events)
    assert (dispatcher.sent, threads) == ([LOST], [])


def test_an_event_has_no_number_that_json_does_not_have(app, threads):
    """A monitor that cannot read one event would lose the connection that has them all."""
    events, dispatcher = Events(app), Dispatcher(buffers=True)
    events.follow(dispatcher)
    events.send("task-lock-lost", "w1@here", uuid=float("nan"), held_for=float("inf"), key="k")
    assert dispatcher.sent == [("task-lock-lost", {"uuid": None, "held_for": None, "key": "k"})]


def test_other_workers_send_from_a_thread(app, threads):
    """The watchdog goes on while the broker is away; the order stays, and one thread is enough."""
    events = Events(app)
    dispatcher = Dispatcher()
    events.follow(dispatcher)
    for uuid in ("1", "2"):
        events.send("task-lock-lost", "w1@here", uuid=uuid)
    assert dispatcher.sent == []
    [thread] = threads
    thread.run()
    assert [fields["uuid"] for _, fields in dispatcher.sent] == ["1", "2"]
    lose(events)
    assert len(threads) == 2


def test_a_pool_process_sends_under_its_workers_name(app, threads, fork):
    """By a connection of its own: the worker's belongs to the main process."""
    events = Events(app)
    events.share()
    dispatcher = Dispatcher(buffers=True)
    events.follow(dispatcher)
    fork()
    lose(events)
    threads.pop().run()
    assert (app.dispatcher.sent, app.workers, dispatcher.sent) == ([LOST], ["w1@here"], [])


def test_a_pool_process_learns_what_changes_in_the_main_process(app, threads, fork):
    """A monitor turns events on and off while the worker runs."""
    events = Events(app)
    events.share()
    events.share()  # the consumer is made anew in some workers
    dispatcher = Dispatcher(groups=["worker"])
    events.follow(dispatcher)
    main = dict(vars(events))
    fork()
    assert not events.wanted
    for groups, wanted in (({"worker", "task"}, True), ({"worker"}, False)):
        child = dict(vars(events))
        vars(events).update(main)
        dispatcher.groups = groups
        vars(events)["_followed"] = dispatcher
        events.look()
        vars(events).update(child)
        assert events.wanted is wanted


def test_a_pool_process_that_was_not_prepared_sends_nothing(app, threads, fork):
    """It was spawned, not forked, or its worker has no such step."""
    events = Events(app)
    events.follow(Dispatcher())
    fork()
    lose(events)
    assert threads == []


def test_a_broker_that_is_away_is_harmless(app, threads, caplog):
    """What cannot be sent is dropped with a line for who looks for it, and the next one is sent."""
    caplog.set_level("DEBUG", "celery_dislock")
    events = Events(app)
    dispatcher = Dispatcher()
    events.follow(dispatcher)
    lose(events)
    lose(events)
    errors = [redis.ConnectionError("redis://:secret@broker is away"), None]
    dispatcher.send, send = (
        lambda *a, **f: setattr(dispatcher, "error", errors.pop(0)) or send(*a, **f),
        dispatcher.send,
    )
    threads.pop().run()
    assert dispatcher.sent == [LOST]
    [record] = caplog.records
    assert record.levelname == "DEBUG"
    assert record.getMessage().startswith("Event task-lock-lost was not sent: ")
    assert "secret" not in record.getMessage()


def test_only_so_many_wait_for_the_broker(app, threads):
    """The newest are kept: they say most of what is going on."""
    events = Events(app)
    dispatcher = Dispatcher()
    events.follow(dispatcher)
    for uuid in range(WAITING_MOST + 5):
        events.send("task-lock-lost", "w1@here", uuid=uuid)
    threads.pop().run()
    assert [fields["uuid"] for _, fields in dispatcher.sent] == list(range(5, WAITING_MOST + 5))


def test_a_process_that_ends_sends_nothing_more(app, monkeypatch, caplog):
    """No thread can be started then; the task must not fail for that."""
    caplog.set_level("DEBUG", "celery_dislock")

    def no_thread(**_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.threading, "Thread", no_thread)
    events = Events(app)
    events.follow(Dispatcher())
    lose(events)
    assert "was not sent: can't start new thread" in caplog.text


def test_each_app_has_its_own():
    """Two apps of a process may have two brokers."""
    one, two = App(), App()
    assert events_of(one) is events_of(one) is not events_of(two)


def test_monitors_take_a_parked_task_that_is_revoked_for_revoked():
    """Celery's State would keep PARKED, which it ranks higher."""
    task = Task("1")
    task.event("parked", 1.0, 1.0, {"key": "k"})
    assert task.state == "PARKED"
    task.event("revoked", 2.0, 2.0, revoked("why"))
    assert (task.state, task.reason, task.terminated) == ("REVOKED", "why", False)

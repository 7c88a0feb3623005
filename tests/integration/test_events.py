"""Events, sent by a process that is no worker's main process, to a real broker or to none."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from celery import Celery
from celery.events.state import State

from celery_dislock.messages import events as module
from celery_dislock.messages.events import events_of, tell_revoked
from tests.holding import wait_for


@pytest.fixture
def silent():
    """The port of a broker that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture
def make_app():
    with contextlib.ExitStack() as stack:

        def make(url):
            return stack.enter_context(Celery("shop", broker=url, set_as_current=False))

        yield make


def receive(app, send):
    """Return the events about tasks that come while *send* sends them, and Celery's State."""
    found, state = [], State()
    with app.connection() as connection:
        receiver = app.events.Receiver(
            connection, {"*": lambda e: (found.append(e), state.event(e))}
        )
        with receiver.consumer_context(wakeup=False) as (own, _, _):
            with contextlib.suppress(TimeoutError):
                own.drain_events(timeout=0.1)
            send()

            def captured():
                with contextlib.suppress(TimeoutError):
                    own.drain_events(timeout=0.1)
                return found

            wait_for(captured)
    return found, state


def as_in_a_pool_process(app):
    """Make the events of an app be those of a pool process whose worker sends events."""
    events = events_of(app)
    events.share()
    events._wanted[0] = 1
    return events


def test_a_pool_process_has_its_own_connection(make_app, redis_url):
    """The event comes from its worker, and is about the task."""
    app = make_app(redis_url)
    events = as_in_a_pool_process(app)
    [event], _ = receive(app, lambda: events.send("task-lock-lost", "w1@here", uuid="1", key="k"))
    assert (event["hostname"], event["uuid"], event["key"]) == ("w1@here", "1", "k")


def test_a_broker_that_does_not_answer_delays_nobody(make_app, silent):
    """However many events wait for it; the caller may be the watchdog."""
    events = as_in_a_pool_process(make_app(f"redis://127.0.0.1:{silent}/0"))
    began = time.monotonic()
    for number in range(1000):
        events.send("task-lock-lost", "w1@here", uuid=str(number))
    assert time.monotonic() - began < 5  # it would be seconds for each
    assert len(events._waiting) <= module.WAITING_MOST


def test_a_command_tells_the_end_of_a_parked_task(make_app, redis_url):
    """It is no worker, and knows nothing of what the workers send."""
    app = make_app(redis_url)
    [event], state = receive(app, lambda: tell_revoked(app, {"1": "dropped by an operator"}))
    assert event["hostname"].startswith("dislock@")
    task = state.tasks["1"]
    assert (task.state, task.reason) == ("REVOKED", "dropped by an operator")


def test_a_command_does_not_wait_long_for_the_broker(make_app, caplog):
    """It has done its work by then."""
    caplog.set_level("DEBUG", "celery_dislock")
    with socket.socket() as taken:  # and does not listen
        taken.bind(("127.0.0.1", 0))
        app = make_app(f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0")
        tell_revoked(app, {"1": "why"})
    assert "Event task-revoked was not sent" in caplog.text
    assert "secret" not in caplog.text

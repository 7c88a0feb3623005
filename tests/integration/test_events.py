"""Events, sent by a process that is no worker's main process, to a real broker or to none."""

import contextlib
import socket
import time

import pytest
from celery import Celery
from celery.events.state import State

from celery_dislock.messages.broker import own_producers
from celery_dislock.messages.events import send_events, tell_revoked
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
            app = stack.enter_context(Celery("shop", broker=url, set_as_current=False))
            stack.callback(own_producers(app).close)
            return app

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


def test_a_pool_process_has_its_own_connection(make_app, redis_url):
    """The event comes from its worker, and is about the task; JSON has no such number."""
    app = make_app(redis_url)
    about = {"uuid": "1", "key": "k", "ends_in": float("inf")}
    [event], _ = receive(app, lambda: send_events(app, "w1@here", "task-lock-lost", about))
    assert (event["hostname"], event["uuid"], event["key"]) == ("w1@here", "1", "k")
    assert event["ends_in"] is None


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_broker_that_does_not_answer_is_not_waited_for_long(make_app, silent, caplog, scheme):
    """The caller is the watchdog of a pool process."""
    caplog.set_level("DEBUG", "celery_dislock")
    app = make_app(f"{scheme}://guest:secret@127.0.0.1:{silent}/0")
    began = time.monotonic()
    send_events(app, "w1@here", "task-lock-lost", {"uuid": "1"})
    assert time.monotonic() - began < 10  # without limits it would wait for ever
    [record] = [one for one in caplog.records if one.name == "celery_dislock"]
    assert record.getMessage().startswith("Event task-lock-lost was not sent: ")
    assert "secret" not in caplog.text


def test_a_command_tells_the_end_of_a_parked_task(make_app, redis_url):
    """It is no worker, and knows nothing of what the workers send."""
    app = make_app(redis_url)
    [event], state = receive(app, lambda: tell_revoked(app, {"1": "dropped by an operator"}))
    assert event["hostname"].startswith("dislock@")
    task = state.tasks["1"]
    assert (task.state, task.reason) == ("REVOKED", "dropped by an operator")

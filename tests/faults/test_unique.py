"""Workers of unique tasks die, and the lock server is away: no message is lost."""

import contextlib
import json
import time

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.tasks import sending
from proof.proxy import Proxy
from tests.acceptance.fleet import Worker, reservation_in
from tests.faults.unique_app import UNIQUE_FOR
from tests.holding import wait_for

pytestmark = pytest.mark.faults

LIMIT = 60.0  # seconds until a condition must hold
AT_ONCE = 5.0  # seconds: far beyond the second that the first sender waits
PREFETCHED = 40


@pytest.fixture
def client(lock_server):
    """A client of that server, which is empty."""
    with lock_server.client(decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def start_worker(tmp_path):
    """Start workers of ``tests.faults.unique_app``; none outlives the test."""
    started = []

    def start(locks, broker, *options, pool="prefork", concurrency=1, **env):
        env = {"UNIQUE_LOCKS": locks, "UNIQUE_BROKER": broker, **env}
        name = f"unique-{len(started)}"
        options = ("--pool", pool, "--concurrency", str(concurrency), *options)
        started.append(Worker(tmp_path, name, *options, app="tests.faults.unique_app", env=env))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def reserved(client, lock):
    """The state and the task id of a reservation, and how long it lasts; None: the key is free."""
    record = reservation_in(client, lock)
    return record and (record.state, record.id, record.remaining)


class Senders:
    """An app whose lock server is not its broker, and what it sends."""

    def __init__(self, app, broker):
        self.broker = broker
        self._numbers = iter(range(10**6))

        @app.task(
            name="edit",
            base=SingletonTask,
            lock_key="edit:<doc>",
            lock_unique_until="start",
            shared=False,
        )
        def edit(doc): ...

        self.edit = edit

    def send(self):
        """Send a message of a new key; return the key and whether it was reserved."""
        doc = next(self._numbers)
        sent = self.edit.delay(doc)
        assert sent.duplicate is False
        message = json.loads(self.broker.lindex("celery", 0))
        assert message["headers"]["id"] == sent.id
        return "unique" in message["headers"].get("dislock", {})


@pytest.fixture
def away(own_redis_server, redis_url, redis_client):
    """Senders, and the proxy before a lock server of their own."""
    with Proxy(own_redis_server.port) as proxy:
        app = Celery("away", broker=redis_url, set_as_current=False)
        app.conf.dislock_url = proxy.url
        with contextlib.closing(app), Dislock(app):
            senders = Senders(app, redis_client)
            senders.proxy = proxy
            assert senders.send()
            yield senders
            proxy.heal()


def warnings(caplog):
    return caplog.text.count("are sent without reservations")


class TestAway:
    def test_a_server_that_is_paused(self, own_redis_server, away, caplog):
        """The first sender waits for a second; those after it do not ask.  One warning."""
        own_redis_server.pause()
        try:
            before = time.monotonic()
            assert away.send() is False
            assert time.monotonic() - before < AT_ONCE
            asked = len(away.proxy.commands)
            # The server is asked again after LEAVE_ALONE; a slow machine may get there.
            for _ in range(20):
                assert away.send() is False
            late = (time.monotonic() - before) // sending.LEAVE_ALONE
            assert len(away.proxy.commands) <= asked + 10 * late
            assert warnings(caplog) == 1
        finally:
            own_redis_server.resume()
        wait_for(lambda: time.sleep(0.2) or away.send(), "reservations", LIMIT)
        assert warnings(caplog) == 1


@contextlib.contextmanager
def declared(broker, lock_server):
    """The task of tests.faults.unique_app, in an app of a sender's own."""
    app = Celery("sender", broker=broker, set_as_current=False)
    app.conf.dislock_url = lock_server.url
    with contextlib.closing(app):

        @app.task(
            name="edit",
            base=SingletonTask,
            lock_key="edit:<doc>",
            lock_unique_until="end",
            lock_unique_for=UNIQUE_FOR,
            ignore_result=True,
            shared=False,
        )
        def edit(doc): ...

        yield edit


class TestWorkers:
    def test_a_worker_that_dies_with_many_messages(
        self, client, lock_server, rabbitmq, start_worker
    ):
        """The broker delivers them to another, where all run; their keys are free after that."""
        broker = rabbitmq.url
        with declared(broker, lock_server) as edit:
            doomed = start_worker(lock_server.url, broker)
            sent = [edit.delay(number) for number in range(PREFETCHED)]
            wait_for(lambda: client.llen("ran") == 1, "one that runs", LIMIT)
            wait_for(lambda: doomed.log.count(" received") == PREFETCHED, "the others", LIMIT)
            doomed.kill()
            again = [edit.delay(number) for number in range(1, PREFETCHED)]
            assert [result.id for result in again] == [result.id for result in sent[1:]]
        client.set("gate", 1)
        start_worker(lock_server.url, broker)
        expected = {f"edit:{number}" for number in range(PREFETCHED)}
        wait_for(lambda: set(client.lrange("ran", 0, -1)) == expected, "all runs", LIMIT)
        wait_for(lambda: not client.keys("*:unique"), "all keys are free", UNIQUE_FOR)
        assert client.llen("ran") == PREFETCHED + 1

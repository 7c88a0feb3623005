"""Workers of unique tasks die, and the lock server is away: no message is lost."""

import contextlib
import time

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from tests.acceptance.fleet import Worker
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

    def start(locks, broker):
        env = {"UNIQUE_LOCKS": locks, "UNIQUE_BROKER": broker}
        options = ("--pool", "prefork", "--concurrency", "1")
        app = "tests.faults.unique_app"
        started.append(Worker(tmp_path, f"unique-{len(started)}", *options, app=app, env=env))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


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


def test_a_server_that_is_paused(own_redis_server, redis_url, caplog):
    """The first sender waits for a second; those after it do not ask.  One warning."""
    with declared(redis_url, own_redis_server) as edit:
        assert [edit.delay("first").duplicate for _ in range(2)] == [False, True]
        own_redis_server.pause()
        try:
            before = time.monotonic()
            assert not any(edit.delay("first").duplicate for _ in range(20))
            assert time.monotonic() - before < AT_ONCE
        finally:
            own_redis_server.resume()
        wait_for(lambda: time.sleep(0.2) or edit.delay("again").duplicate, "reservations", LIMIT)
    assert caplog.text.count("are sent without reservations") == 1


def test_a_worker_that_dies_with_many_messages(client, lock_server, rabbitmq, start_worker):
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

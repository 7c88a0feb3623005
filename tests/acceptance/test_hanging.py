"""A broker that stops answering: a worker does all that does not need it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from celery_dislock.parking.process import runtime_of
from tests.acceptance.delayed_app import close
from tests.acceptance.fleet import Worker, value_of, wait_for
from tests.acceptance.hanging_app import URLS, made

MANY = 3
LASTS = 12  # seconds: several turns run out, and sweeps give them again
LIMIT = 60.0  # seconds
LOCK = "dislock:{line}"


@pytest.fixture
def start(server, redis_client, workers, tmp_path):
    """Start a worker with two processes, one of which holds the lock; others are in line."""

    @contextmanager
    def started(kind, broker):
        redis_client.flushdb()
        urls = broker, server.url
        env = {f"HANGING_{name}": url for name, url in zip(URLS, urls, strict=True)}
        options = ["--pool", "prefork", "--concurrency", "2", "--dislock"]
        where = {"app": "tests.acceptance.hanging_app", "env": {**env, "HANGING_QUEUES": kind}}
        worker = Worker(tmp_path, kind, *options, **where)
        workers[worker] = 0
        app = made(kind, *urls)
        store = runtime_of(app).process.store
        try:
            worker.wait_until_ready()
            holder = app.tasks["hold"].delay()
            wait_for("it holds the lock", lambda: store.holders(LOCK))
            line = [app.tasks["queue"].delay(n) for n in range(MANY)]
            wait_for("they are in line", lambda: worker.log.count("] parked: ") == MANY)
            yield SimpleNamespace(app=app, worker=worker, holder=holder, line=line)
            assert sorted(redis_client.lrange("ran", 0, -1)) == sorted(map(str, range(MANY)))
            assert "Traceback" not in worker.log
            worker.terminate()
            worker.wait_until_it_ends()
        finally:
            worker.kill()
            workers.pop(worker)
            app.backend.remove_pending_result = lambda result: result  # it would connect again
            close(app)

    return started


@pytest.fixture
def alarm(rabbitmq):
    """Begins and ends the alarm of a RabbitMQ whose memory is used up."""

    def watermark(share):
        rabbitmq.control("set_vm_memory_high_watermark", share)

    yield watermark
    watermark("0.8")


@pytest.mark.xdist_group("rabbitmq of faults")  # the other group has the more to wait for
@pytest.mark.parametrize("kind", ["topic", "quorum", "direct"])
def test_a_worker_goes_on_while_its_broker_is_in_alarm(kind, alarm, rabbitmq, redis_client, start):
    """It runs what it has, and sweeps; what is sent meanwhile arrives when the alarm has ended."""
    with start(kind, rabbitmq.url) as hanging:
        for n in range(LASTS):
            hanging.app.tasks["plain"].apply_async((n,), countdown=n)
        had = lambda: hanging.worker.log.count("Task plain") >= LASTS  # noqa: E731
        wait_for("the worker has them", had)
        alarm("0.00001")
        redis_client.set("gate", "open")
        wait_for("they have run", lambda: redis_client.llen("probed") == LASTS, LIMIT)
        assert value_of(hanging.holder, LIMIT) == "held"
        assert redis_client.llen("ran") < MANY
        alarm("0.8")
        assert [value_of(one, LIMIT) for one in hanging.line] == list(range(MANY))
        assert hanging.app.control.ping(timeout=LIMIT, limit=1)

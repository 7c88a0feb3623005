"""A server that stops answering: a worker does all that does not need that server."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from celery_dislock.parking.process import runtime_of
from tests.acceptance.delayed_app import close
from tests.acceptance.fleet import Worker, value_of, wait_for
from tests.acceptance.hanging_app import URLS, made
from tests.redis_server import RedisServer

MANY = 3
LASTS = 12  # seconds: several turns run out, and sweeps give them again
LIMIT = 60.0  # seconds
LOCK = "dislock:{line}"


@pytest.fixture
def start(server, redis_client, workers, tmp_path):
    """Start a worker with two processes, one of which holds the lock; others are in line."""

    @contextmanager
    def started(kind, broker, locks, results):
        redis_client.flushdb()
        urls = broker, locks, results, server.url
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
def test_a_worker_goes_on_while_its_broker_is_in_alarm(
    kind, alarm, rabbitmq, server, redis_client, start
):
    """It runs what it has, and sweeps; what is sent meanwhile arrives when the alarm has ended."""
    with start(kind, rabbitmq.url, server.url, server.url) as hanging:
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


@pytest.fixture
def silent(redis_program, tmp_path):
    """A Redis that can be paused."""
    with RedisServer(tmp_path / "redis") as silent:
        yield silent


@pytest.mark.extra
@pytest.mark.parametrize("which", ["locks", "results"])
def test_a_worker_goes_on_while_a_redis_does_not_answer(which, silent, server, redis_client, start):
    """It answers pings and runs other tasks, while its sweep has to ask that server."""
    broker = server.url.removesuffix("0") + "2"
    urls = {"locks": server.url, "results": server.url} | {which: silent.url}
    with start("direct", broker, **urls) as hanging:
        # A command that has died told nobody of the end of this task: a sweep does.
        dropped = hanging.app.tasks["queue"].delay(MANY)
        wait_for("it is in line", lambda: f"queue[{dropped.id}] parked" in hanging.worker.log)
        lines = runtime_of(hanging.app).process.lines
        silent.pause()
        try:
            if which == "results":
                lines.drop(LOCK, f"{dropped.id}:0:0", '"replaced": "by hand"')
            for n in range(LASTS):
                hanging.app.tasks["plain"].delay(n)
                probed = lambda n=n: redis_client.llen("probed") == n + 1  # noqa: E731
                wait_for("it has run", probed, LIMIT)
                assert hanging.app.control.ping(timeout=LIMIT, limit=1)
                redis_client.blpop("nobody", 1)
        finally:
            silent.resume()
        if which == "locks":
            lines.drop(LOCK, f"{dropped.id}:0:0", '"replaced": "by hand"')
        redis_client.set("gate", "open")
        assert [value_of(one, LIMIT) for one in hanging.line] == list(range(MANY))
        wait_for("the dropped one has ended", dropped.ready, LIMIT)
        assert dropped.state == "REVOKED"
        wait_for("a sweep has seen it", lambda: "by hand. It does not" in hanging.worker.log)

"""What workers have counted, as Prometheus is told, while processes come and go."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any
from wsgiref.util import setup_testing_defaults

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from prometheus_client.parser import text_string_to_metric_families

from celery_dislock.operating.counting import EVERY
from celery_dislock.operating.web.metrics import make_wsgi_app
from tests.acceptance.fleet import CONCURRENCY, LIMIT, Worker, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import redis

    from tests.redis_server import RedisServer

pytestmark = pytest.mark.acceptance

APP = "tests.acceptance.metrics_app"
STEP, HOLD, IN_TURN = (f"{APP}.{name}" for name in ("step", "hold", "in_turn"))
TASKS = 60
BETWEEN_BURSTS = 0.1  # seconds: a steady load
COUNTED = ("_total", "_count", "_sum", "_bucket")  # ends of the names of what never goes down
SLACK = 1.0  # seconds from a body's begin to its count, and of a flush


class Site:
    """Workers of one app that count, and a page with their metrics, apart from other tests."""

    def __init__(
        self, server: RedisServer, client: redis.Redis, folder: Path, workers: dict[Worker, int]
    ) -> None:
        self.prefix = f"metrics-{uuid.uuid4().hex[:8]}"
        self.url = server.url
        self.redis = client
        self._folder = folder
        self._all = workers
        self.started: list[Worker] = []
        self.app = Celery("watching", set_as_current=False, broker=server.url, backend=server.url)
        self.app.conf.update(dislock_prefix=self.prefix, task_default_queue=self.prefix)
        self._page = make_wsgi_app(self.app)
        self._seen: dict[Any, float] = {}

    def start(self, *options: str, pool: str = "prefork", many: int = 1) -> list[Worker]:
        if pool in {"gevent", "eventlet"}:
            pytest.importorskip(pool)
        env = {"METRICS_APP_URL": self.url, "METRICS_APP_PREFIX": self.prefix}
        options = ("--pool", pool, "--concurrency", str(CONCURRENCY[pool]), "--dislock", *options)
        new = []
        for _ in range(many):
            name = f"counting{len(self.started) + 1}"
            worker = Worker(self._folder, name, *options, app=APP, env=env)
            new.append(worker)
            self.started.append(worker)
            self._all[worker] = 0
        for worker in new:
            worker.wait_until_ready()
        return new

    def stop(self, workers: Iterable[Worker] = ()) -> None:
        """Stop these or all workers, and let others have their names."""
        stopped = [*(workers or self.started)]
        for worker in stopped:
            worker.terminate()
        for worker in stopped:
            worker.wait_until_it_ends()
            self._all.pop(worker)
            self.started.remove(worker)

    def close(self) -> None:
        for worker in self.started:
            worker.kill()
            self._all.pop(worker, None)
        for key in self.redis.scan_iter(f"{self.prefix}*"):
            self.redis.delete(key)
        self.app.close()

    def send(self, task: str, *args: Any) -> Any:
        return self.app.send_task(task, args)

    def open_gate(self) -> None:
        self.redis.set(f"gate:{self.prefix}", "open")

    @property
    def ran(self) -> list[dict[str, Any]]:
        """What the bodies have noted."""
        return [json.loads(one) for one in self.redis.lrange(f"ran:{self.prefix}", 0, -1)]

    def scrape(self) -> dict[Any, float]:
        """Read the page as Prometheus does; nothing that was counted may go down."""
        environ: dict[str, Any] = {}
        setup_testing_defaults(environ)
        statuses: list[str] = []
        body = b"".join(self._page(environ, lambda status, _headers: statuses.append(status)))
        assert statuses == ["200 OK"]
        found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        for known, before in self._seen.items():
            if known[0].endswith(COUNTED):
                assert found.get(known, -1.0) >= before, known
        self._seen = found
        return found

    def total(self, name: str, **labels: str) -> float:
        """Add up the series of a metric that have these labels."""
        wanted = set(labels.items())
        return sum(
            value
            for (series, of), value in self.scrape().items()
            if series == f"celery_dislock_{name}" and wanted <= of
        )

    def wait_for_total(self, number: float, name: str, **labels: str) -> None:
        """Wait until the series add up to this."""
        what = f"{name}{labels} of {number:g}"
        wait_for(what, lambda: self.total(name, **labels) >= number)
        assert self.total(name, **labels) == number


@pytest.fixture
def site(
    server: RedisServer, redis_client: redis.Redis, workers: dict[Worker, int], tmp_path: Path
) -> Iterator[Site]:
    site = Site(server, redis_client, tmp_path, workers)
    try:
        yield site
    finally:
        site.open_gate()
        site.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_worker_that_stops_hands_in_its_counts(site, pool):
    """Acquisitions, conflicts and turns add up after a warm shutdown, and after the next one."""
    site.start(pool=pool, many=2)
    results = [site.send(STEP, n) for n in range(TASKS)]
    holder = site.send(HOLD, "a")
    for result in results:
        result.get(timeout=LIMIT)
    wait_for("the holder runs", lambda: len(site.ran) == TASKS + 1)
    if pool != "solo":  # else both workers may be busy: one holds, one runs those in between
        assert site.total("leases", task=HOLD) == 1
    for _ in range(3):
        with pytest.raises(TaskRevokedError):
            site.send(HOLD, "a").get(timeout=LIMIT)
    parked = [site.send(IN_TURN, "a") for _ in range(4)]
    wait_for("four in line", lambda: site.total("parked", task=IN_TURN) == 4)
    assert site.total("parked_oldest_seconds", task=IN_TURN) > 0
    site.open_gate()
    for result in (holder, *parked):
        result.get(timeout=LIMIT)
    site.stop()
    for number, name, labels in (
        (TASKS, "acquisitions_total", {"task": STEP, "outcome": "at_once"}),
        (4, "acquisitions_total", {"task": IN_TURN, "outcome": "parked"}),
        (3, "conflicts_total", {"task": HOLD, "outcome": "skip"}),
        (4, "conflicts_total", {"task": IN_TURN, "outcome": "queue"}),
        (TASKS + 5, "held_seconds_count", {}),
        (TASKS + 5, "acquisitions_total", {}),
        (0, "leases", {}),
        (0, "parked", {}),
        (1, "server_up", {}),
    ):
        assert site.total(name, **labels) == number, (name, labels)
    assert site.total("wait_seconds_sum", task=IN_TURN) > 0

    site.start(pool=pool)  # by the name of the first
    for result in [site.send(STEP, n) for n in range(TASKS)]:
        result.get(timeout=LIMIT)
    site.stop()
    assert site.total("acquisitions_total") == len(site.ran) == 2 * TASKS + 5
    assert {one["worker"] for one in site.ran} == {"counting1@here", "counting2@here"}


def test_children_that_come_and_go_take_nothing_along(site):
    """A child counts a few tasks, and hands its counts in when it ends."""
    site.start("--max-tasks-per-child", "2", many=2)
    results = [site.send(STEP, n) for n in range(TASKS)]
    for result in results:
        result.get(timeout=LIMIT)
    assert len({one["pid"] for one in site.ran}) > TASKS / 4
    site.wait_for_total(TASKS, "acquisitions_total")
    site.wait_for_total(TASKS, "held_seconds_count")


def test_half_of_the_workers_are_killed(site):
    """Who is killed loses the counts of its last seconds; those of the others are exact."""
    site.start(many=4)
    dead, alive = site.started[:2], site.started[2:]
    sending = iter(range(10_000))
    died = {}

    def send_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(5):
                site.send(STEP, next(sending))
            site.scrape()
            time.sleep(BETWEEN_BURSTS)

    send_for(EVERY * 1.5)
    for worker in dead:
        worker.kill()
        died[f"{worker.name}@here"] = time.time()
        send_for(EVERY / 2)
    last = site.send(STEP, next(sending))
    last.get(timeout=LIMIT)

    wait_for("the queue is empty", lambda: not site.redis.llen(site.prefix))
    site.stop(alive)

    ran = Counter(one["worker"] for one in site.ran)
    for worker in alive:
        name = f"{worker.name}@here"
        assert site.total("acquisitions_total", worker=name) == ran[name]
        assert site.total("held_seconds_count", worker=name) == ran[name]
    for name, at in died.items():
        sure = sum(one["worker"] == name and one["at"] < at - EVERY - SLACK for one in site.ran)
        counted = site.total("acquisitions_total", worker=name)
        assert 0 < sure <= counted <= ran[name] + CONCURRENCY["prefork"], name


def test_an_outage_loses_no_counts(own_redis_server, redis_client, workers, tmp_path):
    """While it is paused, counts stay in memory; those whose reply is lost count twice."""
    with own_redis_server.client(decode_responses=True) as client:
        site = Site(own_redis_server, client, tmp_path, workers)
        try:
            site.start(many=2)
            for result in [site.send(STEP, n) for n in range(TASKS)]:
                result.get(timeout=LIMIT)
            own_redis_server.pause()
            wait_for(
                "counts cannot be sent",
                lambda: any("Counts for metrics cannot be sent" in one.log for one in site.started),
            )
            own_redis_server.resume()
            for result in [site.send(STEP, n) for n in range(TASKS)]:
                result.get(timeout=LIMIT)
            wait_for("all counts", lambda: site.total("acquisitions_total") >= 2 * TASKS)
            assert site.total("acquisitions_total") <= 3 * TASKS
        finally:
            site.close()

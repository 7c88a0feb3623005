"""What workers have counted, as Prometheus is told, while processes come and go."""

import json
import uuid
from collections import Counter

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_dislock.operating.web.metrics import make_wsgi_app
from tests.acceptance.fleet import CONCURRENCY, LIMIT, Worker, value_of, wait_for
from tests.scraping import scrape

APP = "tests.acceptance.metrics_app"
STEP, HOLD, IN_TURN = (f"{APP}.{name}" for name in ("step", "hold", "in_turn"))
TASKS = 30
COUNTED = ("_total", "_count", "_sum", "_bucket")  # ends of the names of what never goes down


class Site:
    """Workers of one app that count, and a page with their metrics, apart from other tests."""

    def __init__(self, server, client, folder, workers):
        self.prefix = f"metrics-{uuid.uuid4().hex[:8]}"
        self.url = server.url
        self.redis = client
        self._folder = folder
        self._all = workers
        self.started = []
        self.app = Celery("watching", set_as_current=False, broker=server.url, backend=server.url)
        self.app.conf.update(dislock_prefix=self.prefix, task_default_queue=self.prefix)
        self._page = make_wsgi_app(self.app)
        self._seen = {}

    def start(self, *options, pool="prefork", many=1):
        env = {"METRICS_APP_URL": self.url, "METRICS_APP_PREFIX": self.prefix}
        options = ("--pool", pool, "--concurrency", str(CONCURRENCY[pool]), "--dislock", *options)
        for nth in range(1, many + 1):
            worker = Worker(self._folder, f"counting{nth}", *options, app=APP, env=env)
            self.started.append(worker)
            self._all[worker] = 0
        for worker in self.started:
            worker.wait_until_ready()

    def stop(self):
        """Stop all workers, and let others have their names."""
        for worker in self.started:
            worker.terminate()
        while self.started:
            worker = self.started.pop()
            worker.wait_until_it_ends()
            self._all.pop(worker)

    def close(self):
        for worker in self.started:
            worker.kill()
            self._all.pop(worker, None)
        for key in self.redis.scan_iter(f"{self.prefix}*"):
            self.redis.delete(key)
        self.app.close()

    def send(self, task, *args):
        return self.app.send_task(task, args)

    def run_all(self):
        results = [self.send(STEP, n) for n in range(TASKS)]
        try:
            for result in results:
                value_of(result)
        except AssertionError as exc:
            raise AssertionError(self.state) from exc

    def open_gate(self):
        self.redis.set(f"gate:{self.prefix}", "open")

    @property
    def ran(self):
        """What the bodies have noted."""
        return [json.loads(one) for one in self.redis.lrange(f"ran:{self.prefix}", 0, -1)]

    @property
    def state(self):
        """What a failure shows: where messages may be that nobody has run, and who ran what."""
        ran = Counter((one["worker"], one["pid"]) for one in self.ran)
        queue, unacked = self.redis.llen(self.prefix), self.redis.hgetall("unacked")
        return f"in the queue: {queue}; unacked: {unacked}; ran: {dict(ran)}"

    def total(self, name, *labels):
        """Add up the series of a metric with these labels; nothing that was counted goes down."""
        found = scrape(self._page)
        for known, before in self._seen.items():
            if known[0].endswith(COUNTED):
                assert found.get(known, -1.0) >= before, known
        self._seen = found
        return sum(n for (series, *of), n in found.items() if series == name and {*labels} <= {*of})


@pytest.fixture
def site(server, redis_client, workers, tmp_path):
    site = Site(server, redis_client, tmp_path, workers)
    try:
        yield site
    finally:
        site.open_gate()
        site.close()


@pytest.mark.extra
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_stops_hands_in_its_counts(site, pool):
    """Acquisitions, conflicts and turns add up after a warm shutdown, and after the next one."""
    site.start(pool=pool, many=2)
    holder = site.send(HOLD, "a")
    wait_for("the holder runs", lambda: len(site.ran) == 1)
    assert site.total("leases", HOLD) == 1
    site.run_all()
    for _ in range(3):
        with pytest.raises(TaskRevokedError):
            site.send(HOLD, "a").get(timeout=LIMIT)
    parked = [site.send(IN_TURN, "a") for _ in range(4)]
    wait_for("four in line", lambda: site.total("parked", IN_TURN) == 4)
    assert site.total("parked_oldest_seconds", IN_TURN) > 0
    site.open_gate()
    for result in (holder, *parked):
        result.get(timeout=LIMIT)
    site.stop()
    for number, name, *labels in (
        (TASKS, "acquisitions_total", STEP, "at_once"),
        (4, "acquisitions_total", IN_TURN, "parked"),
        (3, "conflicts_total", HOLD, "skip"),
        (4, "conflicts_total", IN_TURN, "queue"),
        (TASKS + 5, "held_seconds_count"),
        (TASKS + 5, "acquisitions_total"),
        (0, "leases"),
        (0, "parked"),
        (1, "server_up"),
    ):
        assert site.total(name, *labels) == number, (name, labels)
    assert site.total("wait_seconds_sum", IN_TURN) > 0

    site.start(pool=pool)  # by the name of the first
    site.run_all()
    site.stop()
    assert site.total("acquisitions_total") == len(site.ran) == 2 * TASKS + 5
    assert {one["worker"] for one in site.ran} == {"counting1@here", "counting2@here"}


@pytest.mark.extra
def test_children_that_come_and_go_take_nothing_along(site):
    """A child counts a few tasks, and hands its counts in when it ends; in the end."""
    site.start("--max-tasks-per-child", "2", many=2)
    site.run_all()
    assert len({one["pid"] for one in site.ran}) > TASKS / 4
    for name in ("acquisitions_total", "held_seconds_count"):
        wait_for(name, lambda name=name: site.total(name) >= TASKS)
        assert site.total(name) == TASKS


@pytest.mark.extra
def test_half_of_the_workers_are_killed(site):
    """Who is killed loses the counts of its last seconds, and no others."""
    site.start(many=2)
    site.run_all()
    for name in ("acquisitions_total", "held_seconds_count"):  # a batch may be of one alone
        wait_for(f"{name} of all", lambda name=name: site.total(name) == TASKS)
    site.started.pop().kill()
    site.run_all()
    site.stop()
    ran = Counter(one["worker"] for one in site.ran)
    assert {name: site.total("held_seconds_count", name) for name in ran} == ran, site.state

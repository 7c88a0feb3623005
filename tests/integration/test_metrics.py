"""Counts that are added up on a real server, and the metrics that are read from it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from wsgiref.util import setup_testing_defaults

import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from celery_dislock import Dislock, SingletonTask
from celery_dislock.operating.counting import Counters
from celery_dislock.operating.web import cache
from celery_dislock.operating.web.metrics import make_wsgi_app
from celery_dislock.parking.process import runtime_of
from celery_dislock.scripts import COUNT, COUNTS
from celery_dislock.servers.kinds import server_for
from tests.holding import wait_for
from tests.integration.servers import MASTER_NAME, Watched
from tests.integration.strange import STRANGE, damage
from tests.leaks import SECRET
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

INDEX = "dislock:metrics:{counts}"
LONG = 60.0  # seconds: no lease of these tests runs out by itself
WITHIN = 10.0  # seconds
HOLDER = {"task": "shop.export", "worker": "celery@w1"}
COUNTED = "acquisitions at_once shop.export"  # a field
MS = 1000


def add(server, *fields, worker="w", kept=LONG, most=1000, room=1000):
    """Send a batch as a process does."""
    counts = f"{INDEX}:of:{worker}"
    assert server.run(COUNT, [INDEX], counts, int(kept * MS), most, room, *fields) == 1


def sender(url: str, within: float = WITHIN) -> Any:
    """Return what sends the counts of a process, on a connection of its own."""
    return partial(server_for(url).run_many, COUNT, within=within)


def app_of(url: str | list[str], **conf: Any) -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(dislock_url=url, dislock_metrics=True, **conf)
    return app


def count(app: Celery, times: int, worker: str = "celery@w1", task: str = "shop.export") -> None:
    """Count as a process of its own does that ends at once."""
    process = runtime_of(app).new_process()
    [telemetry] = process.channel.watchers
    for _ in range(times):
        telemetry.counters.add("acquisitions", {"task": task, "worker": worker}, "at_once")
    process.close()
    assert not telemetry.counters._sums


def scrape(page: Any) -> dict[Any, float]:
    """Return the samples, by name and labels."""
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    statuses: list[str] = []
    body = b"".join(page(environ, lambda status, _headers: statuses.append(status))).decode()
    assert statuses == ["200 OK"]
    assert SECRET not in body
    return {
        (sample.name.removeprefix("celery_dislock_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Keep no reading, however long it took on a busy machine; return what changes that."""
    monkeypatch.setattr(cache, "QUICK", LONG)
    return partial(monkeypatch.setattr, cache, "QUICK")


@pytest.fixture
def server(redis_url):
    server = server_for(redis_url)
    yield server
    server.close()


@pytest.fixture
def app(redis_url) -> Iterator[Celery]:
    app = app_of(redis_url)
    yield app
    runtime_of(app).close()


def test_counts_are_added_and_every_key_expires(server, redis_client):
    """Nothing stays for ever of workers that have gone; a call without counts adds none."""
    add(server)
    assert redis_client.keys() == []
    for _ in range(2):
        add(server, "lost gone t", 3, "renewals - t", 1)
    assert redis_client.hgetall(f"{INDEX}:of:w") == {"lost gone t": "6", "renewals - t": "2"}
    assert len(redis_client.keys()) == 2
    for key in redis_client.scan_iter():
        assert 0 < redis_client.pttl(key) <= LONG * MS, key


def test_workers_that_have_counted_nothing_for_long_are_left_out(server, redis_client):
    """Their hash has expired, and their name in the index goes with the next batch of another."""
    add(server, "a", 1, worker="old", kept=0.05)
    add(server, "a", 1, worker="new")
    wait_for(lambda: not redis_client.exists(f"{INDEX}:of:old"), "an expired worker")
    add(server, "a", 1, worker="new", kept=0.05)
    assert server.run(COUNTS, [INDEX]) == [f"{INDEX}:of:new".encode()]


def test_workers_are_bounded(server, redis_client):
    """A name per pod that changes with each deploy: those that counted last are kept."""
    for number in range(10):
        add(server, "a", 1, worker=f"w{number}", most=3)
        time.sleep(0.002)  # the index counts milliseconds
    names = {name.decode().rpartition(":")[2] for name in server.run(COUNTS, [INDEX])}
    assert names == {"w7", "w8", "w9"}
    assert len(redis_client.keys(f"{INDEX}:of:*")) == 3


def test_fields_are_bounded(server, redis_client):
    """A worker whose tasks have ever new names fills its hash, and goes on with the old ones."""
    add(server, *(part for n in range(20) for part in (f"f{n}", 1)), room=10)
    assert redis_client.hlen(f"{INDEX}:of:w") == 10
    add(server, "f0", 1, "new", 1, room=10)
    assert redis_client.hget(f"{INDEX}:of:w", "f0") == "2"
    assert not redis_client.hexists(f"{INDEX}:of:w", "new")


@pytest.mark.parametrize("damage", ["index", "counts"])
def test_a_key_of_a_wrong_type_stops_no_page(server, app, redis_client, damage):
    """Somebody wrote over our names: the page says that something is wrong, and is served."""
    count(app, 1)
    name = INDEX if damage == "index" else f"{INDEX}:of:celery@w1"
    redis_client.delete(name)
    redis_client.set(name, "?")
    assert scrape(make_wsgi_app(app))["server_up",] == 0


def test_no_record_stops_the_page(server, app, redis_client):
    """Whatever stands in the records of strangers, what is known of the others is told."""
    count(app, 3)
    redis_client.hset(f"{INDEX}:of:celery@w1", "renewals shop.huge", "9" * 400)
    redis_client.hset(f"{INDEX}:of:celery@w1", "renewals shop.huge2", "9" * 5000)
    damage(redis_client)
    scraped = scrape(make_wsgi_app(app))
    assert scraped["server_up",] == 1
    assert sum(number for (name, *_), number in scraped.items() if name == "leases") == len(STRANGE)
    assert all(math.isfinite(number) for number in scraped.values())


def test_tasks_and_plain_locks_are_counted(app):
    """What is refused, got and held, by task of any name, and without a task in plain Python."""
    dislock = Dislock(app)
    name = 'a:of:b "c"\n\x1b[31m <script> ü {x}'

    @app.task(base=SingletonTask, lock_key="<n>", name=name, shared=False)
    def export(n): ...

    page = make_wsgi_app(dislock)
    with dislock.lock("1"):
        worker = dislock.lock("1").lease.holder["worker"]
        export.apply((1,))
        export.apply((2,))
        holder = threading.Thread(target=lambda: dislock.lock("1").acquire(blocking=False))
        holder.start()
        holder.join()
        assert scrape(page)["leases", "", worker] == 1
    runtime_of(app).close()
    found = scrape(page)
    assert found[("acquisitions_total", *sorted(["at_once", name, worker]))] == 1
    assert found["acquisitions_total", "", "at_once", worker] == 1
    assert found[("conflicts_total", *sorted([name, "skip", worker]))] == 1
    assert found["conflicts_total", "", "refused", worker] == 1
    assert found["held_seconds_count", "", worker] == 1
    assert found[("wait_seconds_count", *sorted([name, worker]))] == 1
    assert ("leases", "", worker) not in found


def test_a_scrape_of_many_locks_does_not_hold_up_the_server(app, redis_client, kept):
    """Ten thousand locks are read in pages; no command takes longer than a few milliseconds."""
    lease = '1 {} 1 1 x {{"task":"t","worker":"w","timeout":30}}'
    expires = int(time.time() * MS) + 3_600_000
    pipe = redis_client.pipeline(transaction=False)
    for number in range(10_000):
        pipe.hset(f"dislock:{{k{number}}}", "o", lease.format(expires))
    pipe.execute()
    scrape(make_wsgi_app(app))
    redis_client.config_resetstat()
    page = make_wsgi_app(app)
    kept(0.0)
    assert scrape(page)["leases", "t", "w"] == 10_000
    stats = redis_client.info("commandstats")
    assert "cmdstat_keys" not in stats
    assert stats["cmdstat_scan"]["calls"] >= 10_000 / 1000
    assert stats["cmdstat_evalsha"]["calls"] >= 10_000
    # Averages: on a busy machine the server itself may have to wait in the middle of a command.
    assert all(stats[f"cmdstat_{name}"]["usec_per_call"] < 5000 for name in ("scan", "evalsha"))
    redis_client.config_resetstat()
    assert scrape(page)["leases", "t", "w"] == 10_000  # a reading that took that long is kept
    assert "cmdstat_scan" not in redis_client.info("commandstats")


def test_a_reply_that_was_lost_counts_twice_at_most(own_redis_server):
    """The server is paused while a batch is on its way, and answers when nobody listens."""
    with own_redis_server.client(decode_responses=True) as client:
        counters = Counters("dislock", sender(own_redis_server.url, within=0.2))
        counters.add("acquisitions", HOLDER, "at_once")
        counters.finish()
        own_redis_server.pause()
        for _ in range(5):  # the server has the first of these in its sockets
            counters.add("acquisitions", HOLDER, "at_once")
            counters.finish()
        assert counters._sums
        own_redis_server.resume()
        counters.finish()
        assert not counters._sums
        assert client.hget(f"{INDEX}:of:celery@w1", COUNTED) in {"6", "7"}


def test_several_servers_count_together(redis_program, tmp_path):
    """Of three servers one is away for a while, and no counter goes down for it."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(tmp_path / str(n))) for n in range(3)]
        app = app_of([server.url for server in servers])
        page = make_wsgi_app(app)
        expected = ("acquisitions_total", "at_once", "celery@w1", "shop.export")
        count(app, 3)
        assert scrape(page)[expected] == 3
        servers[0].kill()
        count(app, 4)
        assert scrape(page)[expected] == 7
        servers[0].start()
        servers[1].kill()  # one of the two that are left has missed four
        wait_for(lambda: scrape(page)["server_up",] == 1, "a majority that is asked again")
        assert scrape(page)[expected] == 7
        servers[2].kill()
        assert scrape(page) == {("server_up",): 0}


def test_counters_survive_a_failover(redis_program, tmp_path):
    """Through Sentinels, the counts go on at the new master, and none goes down."""
    with Watched(tmp_path) as watched:
        options = {"master_name": MASTER_NAME}
        app = app_of(watched.url, dislock_transport_options=options)
        page = make_wsgi_app(app)
        expected = ("acquisitions_total", "at_once", "celery@w1", "shop.export")
        count(app, 3)
        assert scrape(page)[expected] == 3
        master = watched.master
        master.kill()
        watched.wait_for_master(other_than=master)
        wait_for(lambda: scrape(page)["server_up",] == 1, "the new master", within=LONG)
        assert scrape(page)[expected] == 3

"""Metrics that are read from a real server, with many locks, and from several."""

import math
import time
from functools import partial

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.operating.web import cache
from celery_dislock.operating.web.metrics import make_wsgi_app
from celery_dislock.parking.process import runtime_of
from tests.holding import wait_for
from tests.integration.servers import MASTER_NAME, Watched, several
from tests.integration.strange import STRANGE, damage
from tests.scraping import scrape

LONG = 60.0  # seconds: no lease of these tests runs out by itself
MS = 1000


def app_of(url, **conf):
    """Make an app with a task that counts."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=url, dislock_metrics=True, **conf)
    app.task(base=SingletonTask, lock_key="<n>", name="shop.export", shared=False)(export)
    return app


def export(n): ...


def run(app, times):
    """Run the task, in a process that counts it and ends."""
    for n in range(times):
        app.tasks["shop.export"].apply((n,))
    runtime_of(app).close()


def counted(page):
    """How many acquisitions of the task the page tells of."""
    found = scrape(page)
    return sum(n for (name, *_), n in found.items() if name == "acquisitions_total")


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Keep no reading, however long it took on a busy machine; return what changes that."""
    monkeypatch.setattr(cache, "QUICK", LONG)
    return partial(monkeypatch.setattr, cache, "QUICK")


@pytest.fixture
def app(redis_url):
    app = app_of(redis_url)
    yield app
    runtime_of(app).close()


def test_no_record_stops_the_page(app, redis_client):
    """Whatever stands in the records of strangers, what is known of the others is told."""
    run(app, 3)
    [counts] = redis_client.keys("dislock:metrics:*:of:*")
    redis_client.hset(counts, "renewals shop.huge", "9" * 400)
    redis_client.hset(counts, "renewals shop.huge2", "9" * 5000)
    damage(redis_client)
    page = make_wsgi_app(Dislock(app))
    assert counted(page) == 3
    scraped = scrape(page)
    assert scraped["server_up",] == 1
    assert sum(number for (name, *_), number in scraped.items() if name == "leases") == len(STRANGE)
    assert all(math.isfinite(number) for number in scraped.values())


@pytest.mark.extra
def test_a_scrape_of_many_locks_does_not_hold_up_the_server(app, redis_client, kept):
    """Ten thousand locks are read in pages; no command takes longer than a few milliseconds."""
    lease = '1 {} 1 1 x {{"task":"t","worker":"w","timeout":30}}'
    expires = int(time.time() * MS) + 3_600_000
    pipe = redis_client.pipeline(transaction=False)
    for number in range(10_000):
        pipe.hset(f"dislock:{{k{number}}}", "o", lease.format(expires))
    pipe.execute()
    before, page = make_wsgi_app(app), make_wsgi_app(app)
    scrape(before)
    redis_client.config_resetstat()
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
    runtime_of(app).close()


def test_several_servers_count_together(redis_program, tmp_path):
    """Of three servers one is away for a while, and no counter goes down for it."""
    with several(3, tmp_path) as servers:
        app = app_of([server.url for server in servers])
        page = make_wsgi_app(app)
        run(app, 3)
        assert counted(page) == 3
        servers[0].kill()
        run(app, 4)
        assert counted(page) == 7
        servers[0].start()
        servers[1].kill()  # one of the two that are left has missed four
        wait_for(lambda: scrape(page)["server_up",] == 1, "a majority that is asked again")
        assert counted(page) == 7
        servers[2].kill()
        assert scrape(page) == {("server_up",): 0}
        runtime_of(app).close()


def test_counters_survive_a_failover(redis_program, tmp_path):
    """Through Sentinels, the counts go on at the new master, and none goes down."""
    with Watched(tmp_path) as watched:
        options = {"master_name": MASTER_NAME}
        app = app_of(watched.url, dislock_transport_options=options)
        page = make_wsgi_app(app)
        run(app, 3)
        assert counted(page) == 3
        master = watched.master
        master.kill()
        watched.wait_for_master(other_than=master)
        wait_for(lambda: scrape(page)["server_up",] == 1, "the new master", within=LONG)
        assert counted(page) == 3
        runtime_of(app).close()

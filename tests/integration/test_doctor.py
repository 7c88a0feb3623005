"""``celery dislock doctor`` on real servers: each finding, made on purpose."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner

from celery_dislock import SingletonTask
from celery_dislock.locks.runtime import Runtime
from celery_dislock.messages.message import Message
from celery_dislock.operating.checks.facts import Facts, Fleet
from celery_dislock.operating.cli import dislock
from celery_dislock.operating.cli.doctor import examine
from celery_dislock.operating.inspection import about
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.servers.store import Store
from tests.holding import name_of, wait_for
from tests.integration.servers import MASTER_NAME, RedisCluster, Watched
from tests.leaks import SECRET
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 1000.0  # seconds: no such lease runs out by itself
WORKER = {
    "version": "1",
    "enabled": True,
    "locks": True,
    "no_server": None,
    "tasks": {},
    "warnings": [],
    "errors": 0,
    "unavailable": None,
    "leases": [],
}


class Site:
    """A lock server, and workers that answer as the test says."""

    def __init__(self, url: Any, options: Any = None, **settings: Any) -> None:
        self.url, self.settings = url, settings
        self.store = Store(url, options, home="here", hand_over=lambda _turns: None)
        self.server = self.store.lock_server
        self.lines = Lines(self.server, "dislock", "here", lambda _turns: None)
        self.told: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self.answering("w1@here")

    def answering(self, name: str, **told: Any) -> None:
        self.told[name] = {**WORKER, "server": self.store.server, "prefix": "dislock", **told}

    def examine(self) -> Any:
        runtime = Runtime(lambda: {"dislock_url": self.url})
        ours = about(runtime, self.tasks) | {"version": "1", "server": self.store.server}
        wanted = self.settings.get("min_replicas", 0)
        try:
            return examine(Facts(self.server, "dislock", "here", wanted, ours, Fleet(self.told)))
        finally:
            runtime.close()

    def found(self, check: str) -> list[tuple[str, str]]:
        """Return level and text of the findings of one check, without those that are ok."""
        return [
            (one.level, one.what)
            for one in self.examine().findings
            if one.check == check and one.level != "ok"
        ]

    def hold(self, key: str, worker: str, ttl: float = LONG, **about: Any) -> None:
        holder = {"task": "t", "id": key, "worker": worker, "pid": 7, **about}
        self.store.acquire([name_of(key)], f"{key}@{worker}/1", ttl, json.dumps(holder))

    def park(self, key: str, task: str, queue: str = "celery", message: bytes = b"") -> None:
        lock = name_of(key)
        headers = {"task": "shop.pay", "id": task}
        message = message or Message("", queue, headers, None, None, {}, True, b"body").to_bytes()
        self.lines.enlist(lock)
        ticket = Ticket(f"{task}:0:0", f"{task}@", False, message)
        self.lines.park(lock, f"{task}@w/1", LONG, "{}", ticket)


@pytest.fixture
def site(own_redis_server) -> Iterator[Site]:
    site = Site(own_redis_server.url)
    yield site
    site.store.close()


@pytest.fixture
def admin(own_redis_server):
    with own_redis_server.client() as client:
        yield client


class TestServer:
    def test_a_healthy_server_has_no_finding_that_asks_for_anything(self, site):
        """Kind, version, round trip, clock and rights are told, and nothing is wrong."""
        examined = site.examine()
        assert {one.level for one in examined.findings} <= {"ok", "note"}
        assert (examined.away, bool(examined.counts["serious"])) == (False, False)
        what = " ".join(one.what for one in examined.findings)
        assert re.search(r"is a single server: (Redis|Valkey) \d", what)
        assert "ms away" in what
        assert "may do all that locks need" in what

    def test_a_full_server(self, site, admin):
        """It is found by a write, not by its figures: they are of another moment."""
        site.hold("a", "w1@here")
        assert site.found("writes") == []
        keys = admin.keys()
        admin.config_set("maxmemory", 1)
        [(level, what)] = site.found("writes")
        assert (level, "maxmemory" in what) == ("serious", True)
        assert site.examine().counts["serious"]
        assert admin.keys() == keys


class TestKinds:
    def test_sentinels(self, redis_program, tmp_path):
        """They are asked one by one, and the master's replicas are looked at."""
        with Watched(tmp_path) as watched:
            site = Site(watched.url, {"master_name": MASTER_NAME})
            assert site.found("sentinels") == []
            [(level, what)] = site.found("replicas")
            assert (level, "cut off from its Sentinels" in what) == ("warning", True)
            with watched.master.client() as client:
                client.config_set("min-replicas-to-write", 1)
            assert site.found("replicas") == []
            watched.sentinels[0].kill()
            [(level, what)] = site.found("sentinels")
            assert (level, "1 of 3 Sentinels" in what) == ("warning", True)
            watched.sentinels[1].kill()
            [(level, what)] = site.found("sentinels")
            assert (level, "nothing takes over" in what) == ("serious", True)
            site.store.close()

    def test_a_cluster(self, redis_program, tmp_path):
        """Each node is looked at; the locks of one that is away are told."""
        with RedisCluster(tmp_path, node_timeout=60_000) as cluster:
            site = Site(cluster.url)
            for key in "abc":
                site.hold(key, "w1@here")
            # A new cluster's replicas begin to follow a moment later.
            wait_for(lambda: "warning" not in dict(site.found("replicas")), "replicas that follow")
            findings = site.examine().findings
            assert [one.level for one in findings if one.check == "server"] == ["ok"] * 3
            assert any(one.what.startswith("3 locks, 3 leases") for one in findings)
            cluster.masters[2].kill()
            assert not site.examine().away
            [(level, what)] = site.found("server")
            assert (level, "slots of these nodes" in what) == ("serious", True)
            site.store.close()

    def test_several_servers(self, redis_program, tmp_path):
        """One of three may be away, and that is a warning; two are the end."""
        with ExitStack() as stack:
            servers = [stack.enter_context(RedisServer(tmp_path / str(nth))) for nth in range(3)]
            site = Site([server.url for server in servers])
            site.hold("a", "w1@here")
            assert [level for level, _ in site.found("server")] == []
            assert [level for level, _ in site.found("persistence")] == ["warning"]
            servers[1].kill()
            [(level, what)] = site.found("server")
            assert (level, "1 of 3" in what, "No other may fail" in what) == ("warning", True, True)
            counted = [one.what for one in site.examine().findings if one.check == "locks"]
            assert any("1 lease" in what for what in counted)  # the others are read
            (shown,) = site.store.holders(name_of("a"))
            assert site.store.free(name_of("a"), shown.owner, shown.token) is True
            assert site.store.holders(name_of("a")) == []
            servers[2].kill()
            assert site.examine().away
            site.store.close()


class TestCommand:
    @pytest.fixture
    def app(self, own_redis_server):
        url = own_redis_server.url.replace("redis://", f"redis://default:{SECRET}@")
        with own_redis_server.client() as client:
            client.config_set("appendonly", "yes")  # shared tasks of other tests may park
            client.config_set("requirepass", SECRET)
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.dislock_url = url

        @app.task(base=SingletonTask, name="shop.export", lock_key="export:<n>", shared=False)
        def export(n): ...

        return app

    def run(self, app, *args):
        # The real command begins without what earlier ones have left open.
        runtime_of(app).close()
        return CliRunner().invoke(dislock, list(args), obj=SimpleNamespace(app=app))

    def test_it_says_what_to_do_for_each_finding(self, app):
        """People read what, how serious, and the remedy; the last line counts."""
        result = self.run(app, "doctor", "--timeout", "0.1")
        assert result.exit_code == 0, result.output
        assert "warning  workers: No worker answers." in result.output
        assert "         -> Start one, or give them more time: --timeout 5." in result.output
        assert re.search(r"^1 warning, \d ok$", result.output, re.MULTILINE)
        assert SECRET not in result.output

    def test_a_serious_finding_is_the_exit_code(self, app, own_redis_server):
        """A script can act on it, and read it as JSON."""
        with redis.Redis.from_url(app.conf.dislock_url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", "100mb")
        result = self.run(app, "doctor", "--json", "--timeout", "0.1")
        assert result.exit_code == 1
        told = json.loads(result.output)
        assert (told["serious"], told["away"], told["counts"]["serious"]) == (True, False, 1)
        assert told["findings"][0]["check"] == "eviction"
        assert SECRET not in result.output

    def test_a_server_that_is_away_has_its_own_exit_code(self, app, own_redis_server):
        """What can be told is told."""
        own_redis_server.stop()
        result = self.run(app, "doctor", "--json", "--timeout", "0.1")
        assert result.exit_code == 3
        told = json.loads(result.output)
        assert told["away"]
        assert {one["check"] for one in told["findings"]} == {"server", "workers"}

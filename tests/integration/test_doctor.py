"""``celery dislock doctor`` on real servers: each finding, made on purpose."""

import json
import re
from contextlib import ExitStack

from celery import Celery

from celery_dislock import Dislock as Locks
from tests.commands import Dislock
from tests.holding import wait_for
from tests.integration.servers import MASTER_NAME, RedisCluster, Watched
from tests.leaks import SECRET


class Report:
    """What the command tells of the locks of an app."""

    def __init__(self, url, **conf):
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(dislock_url=url, **conf)
        with Locks(app):
            result = Dislock(app)("doctor", "--json", "--timeout", "0.1")
        assert SECRET not in result.output
        self.told = json.loads(result.stdout)
        self.away = self.told["away"]
        assert result.exit_code == (3 if self.away else 1 if self.told["serious"] else 0)

    def all(self, check):
        """Return level and text of the findings of one check."""
        found = self.told["findings"]
        return [(one["level"], one["what"]) for one in found if one["check"] == check]

    def found(self, check):
        """Return those that are not ok."""
        return [one for one in self.all(check) if one[0] != "ok"]


def test_a_healthy_server(own_redis_server):
    """Kind, version, round trip and rights are told, and nothing is wrong."""
    with own_redis_server.client() as client:
        client.config_set("appendonly", "yes")  # shared tasks of other tests may park
        client.config_set("requirepass", SECRET)
    report = Report(own_redis_server.url.replace("redis://", f"redis://:{SECRET}@"))
    levels = {one["level"] for one in report.told["findings"] if one["check"] != "workers"}
    assert levels <= {"ok", "note"}
    [(_, server)] = report.all("server")
    assert re.search(r"is a single server: (Redis|Valkey) \d", server)
    assert "ms away" in server
    assert "may do all that locks need" in report.all("rights")[0][1]
    assert report.found("workers")[0][1].startswith("No worker answers")


def test_a_broker_that_refuses(own_redis_server):
    """It is there, so nobody is told to start it; what helps is said."""
    url, broker = own_redis_server.url, {"broker_url": own_redis_server.url}

    def remedies():
        found = Report(url, **broker).told["findings"]
        return [one["remedy"] for one in found if one["check"] == "workers"]

    assert remedies()[0].startswith("Start one")
    with own_redis_server.client() as client:
        client.config_set("maxmemory", 1)
        assert remedies()[0].startswith("Its memory is full")
        client.config_set("maxmemory", 0)
        client.acl_setuser("bob", enabled=True, passwords=["+x"], commands=["+@read"], keys=["*"])
        broker["broker_url"] = url.replace("redis://", "redis://bob:x@")
        assert remedies()[0].startswith("Allow its user")
        broker["broker_url"] = url.replace("redis://", "redis://bob:wrong@")
        assert "password" in remedies()[0]
    broker["broker_url"] = "redis://localhost:1/0"
    assert remedies()[0].startswith("Start it")


def test_sentinels(redis_program, tmp_path):
    """They are asked one by one, and the master's replicas are looked at."""
    with Watched(tmp_path) as watched:

        def found(check):
            options = {"master_name": MASTER_NAME}
            return Report(watched.url, dislock_transport_options=options).found(check)

        assert found("sentinels") == []
        [(level, what)] = found("replicas")
        assert (level, "cut off from its Sentinels" in what) == ("warning", True)
        with watched.master.client() as client:
            client.config_set("min-replicas-to-write", 1)
        assert found("replicas") == []
        watched.sentinels[0].kill()
        [(level, what)] = found("sentinels")
        assert (level, "1 of 3 Sentinels" in what) == ("warning", True)
        watched.sentinels[1].kill()
        [(level, what)] = found("sentinels")
        assert (level, "nothing takes over" in what) == ("serious", True)


def test_a_cluster(redis_program, tmp_path):
    """Each node is looked at; the locks of one that is away are told."""
    with RedisCluster(tmp_path, node_timeout=60_000) as cluster:
        # A new cluster's replicas begin to follow a moment later.
        wait_for(lambda: "warning" not in dict(Report(cluster.url).found("replicas")), "replicas")
        with Locks.from_url(cluster.url) as locks, ExitStack() as held:
            for key in "abc":
                held.enter_context(locks.lock(key))
            report = Report(cluster.url)
        assert [level for level, _ in report.all("server")] == ["ok"] * 3
        assert any(what.startswith("3 locks, 3 leases") for _, what in report.all("locks"))
        cluster.masters[2].kill()
        report = Report(cluster.url)
        assert not report.away
        [(level, what)] = report.found("server")
        assert (level, "slots of these nodes" in what) == ("serious", True)

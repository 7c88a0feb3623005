"""The nodes of a cluster: which one is asked for the slots."""

from types import SimpleNamespace

import redis

from celery_dislock import scripts
from celery_dislock.servers.cluster import Cluster
from celery_dislock.servers.connections import store_error

ALL_SLOTS = 0, 16383
KEYS = ["dislock:{k}"]


class FakeNode:
    """A node that says that it has all slots, until it is away."""

    def __init__(self, host, asked):
        self.host, self.asked, self.is_away = host, asked, False
        self.wire = SimpleNamespace(ask=self.ask)

    def answer(self, reply):
        if self.is_away:
            raise store_error(self.host, redis.TimeoutError())
        return reply

    def ask(self, _command, *, within):
        """Tell the slots."""
        assert within > 0
        self.asked.append(self.host)
        return self.answer([[[*ALL_SLOTS, [self.host.encode(), 1, b"id"]]]])

    def exchange(self, *_call, asking):
        """Run a script."""
        assert not asking
        return self.answer((self.host, False))


def test_a_node_that_has_just_failed_is_asked_last_for_the_slots(monkeypatch):
    """Also of several that have failed: nobody waits for one that is away while another answers."""
    asked = []
    nodes = {(host, 1): FakeNode(host, asked) for host in "abc"}
    monkeypatch.setattr(Cluster, "_node", lambda _cluster, address: nodes[address])
    cluster = Cluster("redis+cluster://a:1,b:1,c:1", {})
    assert cluster.run(scripts.RENEW, KEYS) == "a"
    nodes["a", 1].is_away = nodes["b", 1].is_away = True
    assert cluster.exchange(scripts.RENEW, KEYS) == ("c", True)
    nodes["c", 1].is_away, nodes["a", 1].is_away = True, False
    assert cluster.run(scripts.RENEW, KEYS) == "a"
    assert "".join(asked) == "a" + "bc" + "a"

"""A Redis Cluster: whose node is asked, and who is asked next."""

from __future__ import annotations

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError

from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import ACQUIRE, RENEW
from celery_dislock.servers.cluster import REDIRECTS
from celery_dislock.servers.connections import Driver
from celery_dislock.servers.kinds import server_for
from celery_dislock.servers.node import RESENDS


class Node:
    """Answers as it is told, by the name of the command or script; notes what it was asked."""

    def __init__(self, address, cluster):
        self.address = address
        self.batch = self
        self._cluster = cluster
        self.closed = False

    def ask(self, *command, within):
        self._cluster.asked.append((self.address, *command))
        said = self._cluster.slots[self.address]
        if isinstance(said, Exception):
            raise said
        return said

    def exchange(self, _script, keys, *_arguments, asking=False):
        self._cluster.asked.append((self.address, "exchange", asking))
        said = self._said()
        if isinstance(said, Exception):
            raise said
        return said, False

    def send(self, _script, calls, *, within):
        self._cluster.asked.append((self.address, "batch", len(calls)))

    def read(self, _script, calls, *, within):
        return [self._said() for _ in calls]

    def _said(self):
        said = self._cluster.says[self.address].pop(0)
        if not isinstance(said, Exception):
            return said
        error = StoreError("redis://node", "it failed")
        error.raw = said
        return error

    def retire(self):
        self.closed = True


ONE, TWO = ("10.0.0.1", 6379), ("10.0.0.2", 6379)
LAST = 16383


def owned_by(*owners):
    """Make a reply to CLUSTER SLOTS: first slot, last slot and address of each."""
    return [
        [first, last, [address[0].encode(), address[1], b"id"]] for first, last, address in owners
    ]


class TestSlots:
    """A cluster of two nodes, of which the test says what each answers."""

    @pytest.fixture
    def cluster(self, monkeypatch):
        pauses = []
        made = server_for("redis+cluster://10.0.0.1,10.0.0.2", driver=Driver(pauses.append))
        nodes = {address: Node(address, made) for address in (ONE, TWO)}
        made.asked, made.pauses = [], pauses
        made.slots = dict.fromkeys((ONE, TWO), owned_by((0, LAST, ONE)))
        made.says = {ONE: [], TWO: []}
        made._nodes = dict(nodes)
        monkeypatch.setattr(made, "_node", nodes.__getitem__)
        return made

    def runs(self, cluster):
        return [(address, *rest) for address, what, *rest in cluster.asked if what == "exchange"]

    def test_nodes_that_send_on_in_a_circle_are_left(self, cluster):
        """After a few times the error is the caller's."""
        slot = key_slot(b"dislock:{a}")
        cluster.says[ONE] = [MovedError(f"{slot} 10.0.0.1:6379") for _ in range(REDIRECTS + 1)]
        with pytest.raises(StoreError):
            cluster.run(ACQUIRE, ["dislock:{a}"])
        assert cluster.says[ONE] == []

    @pytest.mark.parametrize("many", [False, True], ids=["one", "batch"])
    @pytest.mark.parametrize("error", [MovedError, AskError])
    def test_the_slots_are_read_again_after_moved_and_not_after_ask(self, cluster, error, many):
        """MOVED holds from now on; ASK for one command, and the next one goes where it went."""

        def run():
            cluster.asked.clear()
            if many:
                assert cluster.run_many(RENEW, [("dislock:{a}", "me", 1)], within=1.0) == [1]
            else:
                assert cluster.run(RENEW, ["dislock:{a}"]) == 1
            return [(address, what) for address, what, *_ in cluster.asked]

        how = "batch" if many else "exchange"
        cluster.says[ONE] = [1]
        assert run() == [(ONE, "CLUSTER"), (ONE, how)]
        cluster.says = {ONE: [error(f"{key_slot(b'dislock:{a}')} 10.0.0.2:6379"), 1], TWO: [1, 1]}
        cluster.slots = dict.fromkeys((ONE, TWO), owned_by((0, LAST, TWO)))
        asked = run()
        assert [one for one in asked if one[1] != "CLUSTER"] == [(ONE, how), (TWO, "exchange")]
        moved = error is MovedError
        assert len(asked) == 2 + moved
        assert (TWO, "exchange", not moved) in cluster.asked
        assert run() == [(TWO if moved else ONE, how)]

    def test_a_node_that_is_away_is_asked_last_for_the_slots(self, cluster):
        """Another one knows whether a replica has taken its place; what was lost is known."""
        cluster.says = {ONE: [redis.ConnectionError()], TWO: [1]}
        cluster.slots[TWO] = owned_by((0, LAST, TWO))
        assert cluster.exchange(ACQUIRE, ["dislock:{a}"]) == (1, True)
        assert [address for address, what, *_ in cluster.asked if what == "CLUSTER"] == [ONE, TWO]

    def test_a_node_that_stays_away_is_given_up(self, cluster):
        """Its locks fail after a few attempts, each after a longer pause."""
        cluster.says[ONE] = [redis.ConnectionError() for _ in range(1 + RESENDS)]
        with pytest.raises(StoreError):
            cluster.run(ACQUIRE, ["dislock:{a}"])
        assert cluster.says[ONE] == []
        assert cluster.pauses == sorted(cluster.pauses)

    def test_another_error_is_the_callers_at_once(self, cluster):
        """What the node has answered it would answer again."""
        cluster.says[ONE] = [redis.ResponseError("OOM")]
        with pytest.raises(StoreError):
            cluster.run(ACQUIRE, ["dislock:{a}"])
        assert len(self.runs(cluster)) == 1

    def test_a_slot_without_a_node_is_an_error_that_names_it(self, cluster):
        """It is asked for again before that is said."""
        slot = key_slot(b"dislock:{a}")
        cluster.slots[ONE] = owned_by((0, slot - 1, ONE), (slot + 1, LAST, ONE))
        with pytest.raises(StoreError, match=f"slot {slot} of the cluster is on no node"):
            cluster.run(ACQUIRE, ["dislock:{a}"])
        assert len(cluster.asked) == 2

    def test_connections_to_a_node_without_slots_are_closed(self, cluster):
        """It may come back with slots, and is then connected to anew."""
        two = cluster._nodes[TWO]
        cluster.says[ONE] = [1]
        cluster.run(ACQUIRE, ["dislock:{a}"])
        assert two.closed

    def test_only_locks_of_one_slot_are_asked_for_together(self, cluster):
        """The order in which everybody takes them stays."""
        locks = ["dislock:{a}", "dislock:{a}", "dislock:{b}", "dislock:{a}"]
        assert cluster.together(locks) == [locks[:2], locks[2:3], locks[3:]]

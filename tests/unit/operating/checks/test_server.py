"""What is judged of a lock server, from what it told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import redis

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import server
from celery_dislock.operating.checks.server import Member, examine

ONE = SimpleNamespace(kind="single", name="redis://h")
QUORUM = SimpleNamespace(kind="quorum", name="redis://a, redis://b, redis://c")


def levels(findings):
    return [one.level for one in findings]


def refused(reason="NOPERM no"):
    error = StoreError("redis://h", reason)
    error.raw = redis.ResponseError(reason)
    return error


class TestExamine:
    def answers(self, **given):
        def send(command, *arguments):
            name = command.decode()
            answer = given.get("_".join([name, *(str(one) for one in arguments[1:])]))
            answer = given.get(name) if answer is None else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return send

    def test_it_asks_for_clock_settings_and_time(self):
        """Eleven round trips are timed, and the clocks compared."""
        send = self.answers(
            TIME=[b"100", b"500000"],
            INFO=b"# Server\r\nredis_version:7.2.1\r\n",
            CONFIG_save=[b"save", b"3600 1"],
            CONFIG_appendfsync={b"appendfsync": b"always"},
        )
        one = examine("redis://h", send)
        assert len(one.round_trips) == server.ROUND_TRIPS
        assert one.clock < -1e9
        assert one.info == {"redis_version": "7.2.1"}
        assert one.config == {"save": "3600 1", "appendfsync": "always"}

    def test_a_server_that_does_not_answer_is_away(self):
        """And is asked nothing more."""
        one = examine("redis://h", self.answers(TIME=StoreError("redis://h", "no answer in time")))
        assert one == Member("redis://h", away="no answer in time")

    def test_what_it_refuses_is_not_known(self):
        """That is no outage."""
        send = self.answers(TIME=refused(), INFO=refused("NOPERM INFO"), CONFIG=refused())
        one = examine("redis://h", send)
        assert (one.away, one.no_info, one.config, one.clock) == ("", "NOPERM INFO", {}, None)
        assert [f.check for f in server.looked(one)] == ["settings"]

    def test_a_cluster_without_a_slot_map_is_away(self):
        """No node told the slots, so there is nobody to ask."""

        def members():
            raise StoreError("redis+cluster://h", "no node tells the slots")

        [one] = server.members(SimpleNamespace(name="redis+cluster://h", members=members))
        assert one.away == "no node tells the slots"


class TestAnswering:
    def test_a_majority_that_is_away_is_the_end(self):
        """Two of three, or three of five."""
        found = [Member("a"), Member("b", away="x"), Member("c", away="x")]
        first = server.answering(QUORUM, found)[0]
        assert (first.level, "is away" in first.what) == ("serious", True)

    def test_a_minority_that_is_away_is_a_warning(self):
        """It says how many more may fail."""
        found = [Member(name) for name in "abcd"] + [Member("e", away="x")]
        first = server.answering(QUORUM, found)[0]
        assert (first.level, "1 more may fail" in first.what) == ("warning", True)

    def test_valkey_is_told_as_such(self):
        """It claims to be a Redis, for old clients."""
        info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}
        [one] = server.answering(ONE, [Member("redis://h", info=info)])
        assert one.what == "redis://h is a single server: Valkey 8.0.1."


@pytest.mark.parametrize(("told", "found"), [("6.0.16", ["warning"]), ("6.2.0", []), ("", [])])
def test_an_old_server_is_told(told, found):
    """The oldest that is tested is 6.2."""
    assert levels(server.version(Member("h", info={"redis_version": told}))) == found


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({}, []),
        ({"maxmemory_policy": "noeviction", "maxmemory": "100"}, []),
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": "0"}, ["note"]),
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": "100"}, ["serious"]),
        ({"maxmemory_policy": "noeviction", "maxmemory": "100", "used_memory": "95"}, ["warning"]),
    ],
)
def test_eviction(info, found):
    """Each lock has an expiry, so every policy but noeviction may evict it."""
    assert levels(server.eviction(info)) == found


def test_a_server_that_loads_its_data_is_told():
    """It takes no locks until it is done."""
    [one] = server.role({"loading": "1", "loading_eta_seconds": "12"})
    assert (one.level, "for 12 s more" in one.what) == ("serious", True)


@pytest.mark.parametrize(
    ("info", "config", "kind", "parks", "found"),
    [
        ({}, {}, "single", True, []),  # not known
        ({"aof_enabled": "1"}, {"appendfsync": "everysec"}, "single", True, []),
        ({"aof_enabled": "1"}, {"appendfsync": "no"}, "single", True, ["note"]),
        ({"aof_enabled": "0"}, {"save": ""}, "single", True, ["serious"]),
        ({"aof_enabled": "0"}, {"save": "60 1"}, "single", True, ["warning"]),
        ({"aof_enabled": "0"}, {}, "single", True, ["warning"]),
        ({"aof_enabled": "0"}, {"save": ""}, "single", False, []),
        ({"aof_enabled": "0"}, {"save": ""}, "quorum", False, ["warning"]),
        ({"aof_last_write_status": "err"}, {}, "single", False, ["serious"]),
        ({"rdb_last_bgsave_status": "err"}, {}, "single", False, ["serious"]),
    ],
)
def test_persistence(info, config, kind, parks, found):
    """Parked tasks exist nowhere else, and independent servers must not forget leases."""
    one = Member("h", info=info, config=config)
    assert levels(server.persistence(one, kind, parks=parks)) == found


ONLINE = "ip=127.0.0.1,port=6380,state=online,offset=14,lag=0"
LATE = "ip=127.0.0.1,port=6381,state=online,offset=14,lag=60"


@pytest.mark.parametrize(
    ("info", "kind", "wanted", "found"),
    [
        ({}, "single", 1, []),  # not known
        ({"connected_slaves": "0"}, "single", 0, []),
        ({"connected_slaves": "0"}, "single", 1, ["serious"]),
        ({"connected_slaves": "1", "slave0": ONLINE}, "single", 1, []),
        ({"connected_slaves": "1", "slave0": LATE}, "single", 1, ["serious"]),
        ({"connected_slaves": "2", "slave0": ONLINE, "slave1": LATE}, "single", 1, ["warning"]),
        ({"connected_slaves": "0"}, "cluster", 0, ["warning"]),
        ({"connected_slaves": "0"}, "sentinel", 0, ["warning"]),
        ({"connected_slaves": "1", "slave0": ONLINE}, "sentinel", 0, ["warning"]),
        (
            {"connected_slaves": "1", "slave0": ONLINE, "min_slaves_good_slaves": "1"},
            "sentinel",
            0,
            [],
        ),
        ({"connected_slaves": "0", "role": "slave"}, "sentinel", 1, []),
    ],
)
def test_replicas(info, kind, wanted, found):
    """What dislock_min_replicas wants has to be there, and what a failover needs should be."""
    assert levels(server.replicas(info, kind, wanted)) == found


class TestClocks:
    def members(self, *ahead):
        return [Member(f"h{nth}", clock=clock) for nth, clock in enumerate(ahead)]

    def test_clocks_that_agree(self):
        """Nothing has to be done."""
        assert levels(server.clocks(self.members(0.001, 0.002, 0.003), "quorum")) == ["ok"]

    def test_independent_servers_must_agree_closely(self):
        """Fencing tokens are taken from their clocks."""
        first, _ = server.clocks(self.members(0.0, 0.3, 0.0), "quorum")
        assert (first.level, "h1 ahead" in first.what) == ("warning", True)

    def test_nodes_of_a_cluster_should_agree(self):
        """A lease may move to another node in a failover."""
        assert "warning" in levels(server.clocks(self.members(0.0, 3.0), "cluster"))
        assert levels(server.clocks(self.members(0.0, 0.3), "cluster")) == ["ok"]

    def test_the_clock_here_does_not_matter_for_locks(self):
        """That the times in logs do not match is good to know."""
        [one] = server.clocks(self.members(-7200.0), "single")
        assert (one.level, "7200.0 s behind the clock here" in one.what) == ("note", True)

    def test_a_clock_that_is_not_known(self):
        """The command was refused."""
        assert levels(server.clocks(self.members(None), "single")) == []


class TestSentinels:
    def of(self, *why):
        told = [(f"s{nth}:26379", one) for nth, one in enumerate(why)]
        return list(server.sentinels(SimpleNamespace(watchers=lambda: told)))

    def test_others_have_none(self):
        """A cluster and independent servers need none."""
        assert list(server.sentinels(SimpleNamespace())) == []
        assert self.of() == []

    def test_all_of_them_answer(self):
        """They name the master."""
        assert levels(self.of("", "", "")) == ["ok"]

    def test_too_few_of_them_are_serious(self):
        """A minority cannot replace the master."""
        assert levels(self.of("", "", "gone")) == ["warning"]
        assert levels(self.of("", "gone", "gone")) == ["serious"]


def test_rights_that_cannot_be_tried_are_no_finding_that_alarms():
    """The list of servers could not be read: that is told elsewhere."""

    def senders():
        raise StoreError("redis+cluster://h", "no node tells the slots")

    lock_server = SimpleNamespace(name="redis+cluster://h", senders=senders)
    assert levels(server.rights(lock_server, "dislock")) == ["note"]

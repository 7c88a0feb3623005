"""What is judged of a lock server, from what it answered."""

from __future__ import annotations

import pytest

from celery_dislock.operating.checks import server
from celery_dislock.operating.checks.facts import Member
from tests.unit.operating.checks.examples import facts, found


def of(info, check="", **about):
    """Levels of what is found of one process, by one check or by all."""
    known = facts(members=[Member("h", info=info)], **about)
    return [one.level for one in server.members(known) if check in {"", one.check}]


@pytest.mark.parametrize(
    ("kind", "away", "level", "text"),
    [
        ("single", 1, "serious", "is away"),
        ("cluster", 1, "serious", "slots of these nodes"),
        ("quorum", 1, "warning", "1 more may fail"),
        ("quorum", 2, "warning", "No other may fail"),
        ("quorum", 3, "serious", "is away"),
    ],
)
def test_processes_that_do_not_answer(kind, away, level, text):
    """A majority of independent servers is enough; of a cluster each node has its locks."""
    many = {"single": 1, "cluster": 3, "quorum": 5}[kind]
    members = [Member(f"h{nth}", away="x" if nth < away else "") for nth in range(many)]
    [(is_, what)] = found(server.answers, kind=kind, members=members)
    assert (is_, text in what) == (level, True)


@pytest.mark.parametrize(
    ("prefix", "level", "text"),
    [
        ("staging:dislock", "ok", "All names begin with 'staging:dislock'"),
        ("dislock", "note", "('staging:'). Names of locks begin with 'dislock' alone"),
    ],
)
def test_the_prefix_of_celerys_names(prefix, level, text):
    """It is named, and that the locks have none if they are on another server."""
    [one] = server.names(facts(prefix=prefix, keyprefix="staging:"))
    assert (one.level, text in one.what) == (level, True)
    assert not list(server.names(facts()))


def test_valkey_is_named_as_such():
    """It claims to be a Redis, for old clients."""
    info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}
    [one] = server.answers(facts(members=[Member("redis://h", info=info, round_trip=0.0011)]))
    assert one.what == "redis://h is a single server: Valkey 8.0.1, 1.1 ms away."


@pytest.mark.parametrize(
    ("info", "check"),
    [
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": "100"}, "eviction"),
        ({"role": "slave"}, "role"),
    ],
)
def test_what_a_worker_warns_of_when_it_starts(info, check):
    """Here it is serious; the words are the same."""
    assert of(info, check) == ["serious"]
    assert of({**info, "maxmemory": "0", "role": "master"}, check) == []


@pytest.mark.parametrize(
    ("member", "level"),
    [
        ({"no_info": "NOPERM"}, "note"),
        ({"round_trip": 0.06}, "warning"),
        ({"round_trip": 0.04}, None),
    ],
)
def test_what_is_slow_or_hidden(member, level):
    """A process that refuses INFO, and one that is far away."""
    findings = list(server.members(facts(members=[Member("h", **member)])))
    assert [one.level for one in findings] == [level] * bool(level)
    assert [one.about for one in findings] == [["h"]] * bool(level)


@pytest.mark.parametrize(
    ("appends", "kind", "parks", "level"),
    [
        (None, "single", True, []),  # not known
        ("1", "single", True, []),
        ("0", "single", True, ["warning"]),
        ("0", "single", False, []),
        ("0", "quorum", False, ["warning"]),
    ],
)
def test_persistence(appends, kind, parks, level):
    """Parked tasks exist nowhere else, and independent servers must not forget leases."""
    info = {} if appends is None else {"aof_enabled": appends}
    ours = {"tasks": {"pay": {"lock_on_conflict": "queue"}} if parks else {}}
    assert of(info, "persistence", kind=kind, ours=ours) == level


ONLINE = "ip=127.0.0.1,port=6380,state=online,offset=14,lag=0"
SYNC = "ip=127.0.0.1,port=6381,state=wait_bgsave,offset=0,lag=0"


@pytest.mark.parametrize(
    ("replicas", "kind", "wanted", "level"),
    [
        ([], "single", 0, []),
        ([], "single", 1, ["serious"]),
        ([SYNC], "single", 1, ["serious"]),
        ([ONLINE], "single", 1, []),
        ([], "cluster", 0, ["warning"]),
        ([], "sentinel", 0, ["warning"]),
        ([ONLINE], "sentinel", 0, ["warning"]),
    ],
)
def test_replicas(replicas, kind, wanted, level):
    """What dislock_min_replicas wants has to be there, and what a failover needs should be."""
    info = {f"slave{nth}": one for nth, one in enumerate(replicas)}
    about = {"check": "replicas", "kind": kind, "min_replicas": wanted}
    assert of({**info, "role": "master"}, **about) == level
    bounded = {**info, "role": "slave", "min_slaves_good_slaves": "1"}
    assert of(bounded, **about) == []
    assert of({}, "replicas", kind=kind) == []  # not known


@pytest.mark.parametrize(
    ("clocks", "kind", "level"),
    [
        ([0.001, 0.002, 0.003], "quorum", []),
        ([0.0, 0.3, 0.0], "quorum", ["warning"]),  # tokens are of their clocks
        ([0.0, 0.3], "cluster", []),
        ([None], "single", []),  # the command was refused
    ],
)
def test_clocks(clocks, kind, level):
    """Independent servers must agree with each other."""
    members = [Member(f"h{nth}", clock=clock) for nth, clock in enumerate(clocks)]
    findings = found(server.clocks, kind=kind, members=members)
    assert [one for one, _ in findings] == level
    assert all("0.30 s apart: h0 is behind, h1 ahead" in what for _, what in findings)

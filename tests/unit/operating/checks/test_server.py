"""What is judged of a lock server, from what it answered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.operating.checks import server
from celery_dislock.operating.checks.facts import Member
from tests.unit.operating.checks.examples import facts, found, levels


def of(check, info, **about):
    """Levels of what a check finds of one process."""
    return levels(check, Member("h", info=info, save=about.pop("save", None)), **about)


class TestAnswers:
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
    def test_processes_that_do_not_answer(self, kind, away, level, text):
        """A majority of independent servers is enough; of a cluster each node has its locks."""
        many = {"single": 1, "cluster": 3, "quorum": 5}[kind]
        members = [Member(f"h{nth}", away="x" if nth < away else "") for nth in range(many)]
        [(is_, what)] = found(server.answers, kind=kind, members=members)
        assert (is_, text in what) == (level, True)

    def test_valkey_is_named_as_such(self):
        """It claims to be a Redis, for old clients."""
        info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}
        [one] = server.answers(facts(members=[Member("redis://h", info=info)]))
        assert one.what == "redis://h is a single server: Valkey 8.0.1."


@pytest.mark.parametrize(("version", "level"), [("6.0.16", ["warning"]), ("6.2.0", []), ("", [])])
def test_an_old_server(version, level):
    """The oldest that is tested is 6.2."""
    assert of(server.version, {"redis_version": version}) == level


@pytest.mark.parametrize(
    ("policy", "maxmemory", "used", "eviction", "memory"),
    [
        ("noeviction", "100", "1", [], []),
        ("noeviction", "100", "95", [], ["warning"]),
        ("volatile-ttl", "0", "1", ["note"], []),
        ("volatile-ttl", "100", "95", ["serious"], []),
    ],
)
def test_eviction_and_memory(policy, maxmemory, used, eviction, memory):
    """Each lock has an expiry, so every policy but noeviction may evict it."""
    info = {"maxmemory_policy": policy, "maxmemory": maxmemory, "used_memory": used}
    assert (of(server.eviction, info), of(server.memory, info)) == (eviction, memory)
    assert of(server.eviction, {}) == []


def test_a_server_that_loads_its_data():
    """It takes no locks until it is done."""
    info = {"loading": "1", "loading_eta_seconds": "12"}
    [(level, what)] = found(server.role, Member("h", info=info))
    assert (level, "for 12 s more" in what) == ("serious", True)


@pytest.mark.parametrize(
    ("appends", "save", "kind", "parks", "level"),
    [
        (None, None, "single", True, []),  # not known
        ("1", None, "single", True, []),
        ("0", "", "single", True, ["serious"]),
        ("0", "60 1", "single", True, ["warning"]),
        ("0", None, "single", True, ["warning"]),
        ("0", "", "single", False, []),
        ("0", "", "quorum", False, ["warning"]),
    ],
)
def test_persistence(appends, save, kind, parks, level):
    """Parked tasks exist nowhere else, and independent servers must not forget leases."""
    info = {} if appends is None else {"aof_enabled": appends}
    ours = {"tasks": {"pay": {"lock_on_conflict": "queue"}} if parks else {}}
    assert of(server.persistence, info, save=save, kind=kind, ours=ours) == level


ONLINE = "ip=127.0.0.1,port=6380,state=online,offset=14,lag=0"
LATE = "ip=127.0.0.1,port=6381,state=online,offset=14,lag=60"


@pytest.mark.parametrize(
    ("replicas", "kind", "wanted", "level"),
    [
        (None, "single", 1, []),  # not known
        ([], "single", 0, []),
        ([], "single", 1, ["serious"]),
        ([ONLINE], "single", 1, []),
        ([LATE], "single", 1, ["serious"]),
        ([ONLINE, LATE], "single", 1, ["warning"]),
        ([], "cluster", 0, ["warning"]),
        ([], "sentinel", 0, ["warning"]),
        ([ONLINE], "sentinel", 0, ["warning"]),
    ],
)
def test_replicas(replicas, kind, wanted, level):
    """What dislock_min_replicas wants has to be there, and what a failover needs should be."""
    info = {f"slave{nth}": one for nth, one in enumerate(replicas or ())}
    if replicas is not None:
        info["connected_slaves"] = str(len(replicas))
    assert of(server.replicas, info, kind=kind, min_replicas=wanted) == level
    assert of(server.replicas, {**info, "role": "slave"}, kind=kind, min_replicas=wanted) == []
    if kind == "sentinel" and replicas:
        assert of(server.replicas, {**info, "min_slaves_good_slaves": "1"}, kind=kind) == []


@pytest.mark.parametrize(
    ("clocks", "kind", "level", "text"),
    [
        ([0.001, 0.002, 0.003], "quorum", [], ""),
        ([0.0, 0.3, 0.0], "quorum", ["warning"], "h1 ahead"),  # tokens are of their clocks
        ([0.0, 0.3], "cluster", [], ""),
        ([0.0, 3.0], "cluster", ["warning", "note"], "3.00 s apart"),  # a lease may move
        ([-7200.0], "single", ["note"], "7200.0 s behind the clock here"),
        ([None], "single", [], ""),  # the command was refused
    ],
)
def test_clocks(clocks, kind, level, text):
    """The servers must agree with each other; that the clock here differs is good to know."""
    members = [Member(f"h{nth}", clock=clock) for nth, clock in enumerate(clocks)]
    findings = found(server.clocks, kind=kind, members=members)
    assert [one for one, _ in findings] == level
    assert text in " ".join(what for _, what in findings)


@pytest.mark.parametrize(
    ("why", "level"),
    [
        ([], []),
        (["", "", ""], ["ok"]),
        (["", "", "gone"], ["warning"]),
        (["", "gone", "gone"], ["serious"]),
    ],
)
def test_sentinels(why, level):
    """A minority of them cannot replace the master."""
    asked = [(f"s{nth}:26379", one) for nth, one in enumerate(why)]
    watched = SimpleNamespace(kind="sentinel", watchers=lambda: asked)
    assert [one.level for one in server.sentinels(facts(server=watched))] == level
    assert list(server.sentinels(facts())) == []  # others have none

"""``doctor``: what it finds wrong with a lock server and with the locks."""

import re
import time
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from celery_dislock.config.settings import task_options
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import reserved_lock
from celery_dislock.operating.checks import facts
from celery_dislock.operating.inspection import differing
from celery_dislock.operating.site import Site
from celery_dislock.parking.epoch import Epoch
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import Lines
from celery_dislock.scripts.names import sweep_lock
from celery_dislock.servers.overrides import RateState
from tests.staged import RESERVED, holder, lock, place
from tests.unit.operating.examining import EXPORT, MASTER, ONLINE, member, told_in

HOUR, MINUTES = 3600.0, 400.0


SYNC = {"slave0": "ip=127.0.0.1,port=6381,state=wait_bgsave,offset=0,lag=0"}
QUEUE = {"lock_on_conflict": "queue"}
CANCEL = {"lock_on_conflict": "cancel"}
FORGETFUL = {**MASTER, "aof_enabled": "0"}
EVICTING = {**MASTER, "maxmemory_policy": "volatile-ttl", "maxmemory": "100"}
KEPT = ONLINE | {"min_slaves_good_slaves": "1"}
ONE, FEW = {"replicas": 1}, "replicas serious: Fewer replicas"
ALONE = "replicas warning: No replica follows"
CUT_OFF = "replicas warning: cut off from its Sentinels"
PARKED = "persistence warning: parked tasks"
LEASES = "persistence warning: forgotten its leases"


def assert_found(doctor, expected):
    """Check what doctor finds: each a check, its level, and words of the finding."""
    found, expected = doctor.found(), [one.split(": ", 1) for one in expected]
    assert [f"{check} {level}" for check, level, _ in found] == [head for head, _ in expected]
    assert all(words in what for (*_, what), (_, words) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "infos"), [("single", [None]), ("quorum", [None, MASTER, MASTER]), ("cluster", [None])]
)
def test_who_starts_a_lock_server_again_is_told_when(doctor, server, kind, infos):
    """One that comes back empty grants again what bodies that run rely on."""
    server.kind, server.keeps_lines = kind, kind != "quorum"
    server.members = lambda: [member(server, f"h{nth}", one) for nth, one in enumerate(infos)]
    [remedy] = [one["remedy"] for one in doctor.told() if "Start it" in one["remedy"]]
    assert "without its data, do so only after the longest timeout is over" in remedy


@pytest.mark.parametrize(
    ("kind", "infos", "options", "expected"),
    [
        ("single", [MASTER], {}, []),
        ("single", [None], {}, ["server serious: is away"]),
        ("quorum", [None, *[MASTER] * 4], {}, ["server warning: 1 more may fail"]),
        ("quorum", [None] * 2 + [MASTER] * 3, {}, ["server warning: No other may fail"]),
        ("quorum", [None] * 3 + [MASTER] * 2, {}, ["server serious: is away"]),
        ("cluster", [None, MASTER], {}, ["server serious: slots of these nodes", ALONE]),
        ("single", [EVICTING], {}, ["eviction serious: evict"]),
        ("single", [{"role": "slave"}], {}, ["role serious: replica"]),
        ("single", ["NOPERM INFO"], {}, ["settings note: INFO is refused"]),
        ("single", [FORGETFUL], {}, []),
        ("single", [{"role": "master"}], QUEUE, []),  # not known
        ("single", [FORGETFUL], QUEUE, [PARKED]),
        ("single", [FORGETFUL], CANCEL, [PARKED]),
        ("quorum", [FORGETFUL] * 3, {}, [LEASES]),
        ("single", [MASTER], ONE, [FEW]),
        ("single", [MASTER | SYNC], ONE, [FEW]),
        ("single", [MASTER | ONLINE], ONE, []),
        ("cluster", [MASTER], {}, [ALONE]),
        ("sentinel", [MASTER], {}, [ALONE]),
        ("sentinel", [MASTER | ONLINE], {}, [CUT_OFF]),
        ("sentinel", [MASTER | KEPT], {}, []),
    ],
    ids=str,
)
def test_a_lock_server(doctor, server, kind, infos, options, expected):
    """What is wrong with its processes, and nothing that is not; a majority is enough."""
    server.kind, server.keeps_lines = kind, kind != "quorum"
    processes = [member(server, f"h{nth}", info) for nth, info in enumerate(infos)]
    server.members = lambda: processes
    server.senders = lambda: [server.send]
    doctor.set(dislock_min_replicas=options.get("replicas", 0))
    task = {**EXPORT, **({} if "replicas" in options else options)}
    doctor.declare(**task)
    known = differing(task_options("export", task, {}))
    doctor.answers = {"w1": doctor.described(tasks={"export": known})}
    assert_found(doctor, expected)


@pytest.mark.parametrize(
    ("kind", "ahead", "found"),
    [
        ("quorum", [0.001, 0.002, 0.003], []),
        ("quorum", [0.0, 0.3, 0.0], ["warning"]),  # tokens are of their clocks
        ("cluster", [0.0, 0.3], []),
    ],
)
def test_clocks(doctor, server, kind, ahead, found):
    """Independent servers must agree with each other."""
    server.kind = kind
    processes = [member(server, f"h{nth}", MASTER, one) for nth, one in enumerate(ahead)]
    server.members, server.senders = lambda: processes, lambda: [server.send]
    told = doctor.found("clock")
    assert [level for _, level, _ in told] == found
    assert all(
        re.search(r"0\.(29|30|31) s apart: h[02] is behind, h1 ahead", one[2]) for one in told
    )


def test_a_round_trip_that_is_slow(doctor, server, monkeypatch):
    """A process that is far away makes each locked task wait twice."""
    for took, found in ((0.06, ["warning"]), (0.04, [])):
        clock = iter(range(10**6))
        ticks = SimpleNamespace(time=time.time, perf_counter=lambda: next(clock) * took)  # noqa: B023
        monkeypatch.setattr(facts, "time", ticks)
        assert [level for _, level, _ in doctor.found("round trip")] == found


def test_valkey_is_named_as_such(doctor, server):
    """It claims to be a Redis, for old clients; so is what kind of server it is."""
    server.info = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}
    [one] = [one for one in doctor.told() if one["check"] == "server"]
    assert one["what"].startswith(f"{server.name} is a single server: Valkey 8.0.1, ")


def test_a_cluster_without_a_slot_map_is_away(doctor, server):
    """No node told the slots, so there is nobody to ask; what the workers say is told."""

    def members():
        raise StoreError("redis+cluster://h", "no node tells the slots")

    server.members = members
    assert ("server", "serious") in [one[:2] for one in doctor.found()]


@pytest.mark.parametrize(
    ("url", "level", "text"),
    [
        (None, "ok", "All names begin with 'staging:dislock'"),
        ("redis://h", "note", "('staging:'). Names of locks begin with 'dislock' alone"),
    ],
)
def test_the_prefix_of_celerys_names(doctor, url, level, text):
    """It is named, and that the locks have none if they are on another server."""
    options = {"global_keyprefix": "staging:"}
    broker = {"broker_url": "redis://localhost:1/0", "broker_transport_options": options}
    doctor.set(**broker, dislock_url=url)
    told = [one for one in doctor.told() if one["check"] == "prefix"]
    assert [(one["level"], text in one["what"]) for one in told] == [(level, True)]


RENEWED = {"renewed": 3.0, "remaining": 27.0}
OLD = RESERVED._replace(since=4000.0, remaining=10.0)
NOTE = {"limit_note": "by ana: reindex", "limit_age": 7200.0}
MINUTE = Rate(100, 60.0)
RATED = RateState(MINUTE, 0.0, is_set=True, note="by ana: 429", age=7200.0)
LATER = {"waiting": 1, "line": [place(waiting=900.0)]}  # for longer than STUCK_LONG
BUSY = {"waiting": 1, "line": [place(parked=False, ticket="")]}
BACK = RateState(None, 0.0, held_back=90.0, age=9.0)
TOLD = told_in("doctor-locks.txt")


WRONG = {
    "overdue": {"holders": [holder(renewed=25.0, remaining=5.0)]},
    "held for long": {"holders": [holder(**RENEWED, held=601.0)], **BUSY},
    "no leader": {"ticked": 240.0},
    "no leader on purpose": {"ticked": 240.0, "limit": 0, **NOTE},
    "unclaimed": {"line": [place(turns=3, routing_key="pay")], "holders": [holder()], "waiting": 1},
    "unclaimed by the last": {
        "line": [place(), place(2, turns=3, routing_key="pay")],
        "holders": [holder()],
        "waiting": 2,
    },
    "stuck": {"waiting": 1, "line": [place(waiting=9.0)]},
    "aside": {"aside": 2},
    "a reservation": {"reservation": OLD},
    "paused": {"limit": 0, **NOTE, "waiting": 4},
    "limited": {"limit": 3, **NOTE, "waiting": 4, "holders": [holder(**RENEWED)]},
    "limited, nobody waits": {"limit": 3, **NOTE},
    "stuck in spite of its rate": {"rate": RateState(MINUTE, 0.0), **LATER},
    "held back": {"rate": BACK._replace(back_note="429"), **LATER},
    "held back, nobody waits": {"rate": BACK},
    "a rate": {"rate": RATED._replace(early=12.0), **LATER},
    "a rate, nobody waits": {"rate": RATED},
    "a rate and a limit": {"rate": RATED, "limit": 3, "limit_age": 9.0},
    "of another broker": {"waiting": 1, "holders": [holder()], "line": [place(broker="b")]},
}
WELL = {
    "renewed": {"holders": [holder(**RENEWED)]},
    "an older version, or a fixed expiry": {"holders": [holder(renewed=None)]},
    "not held for long": {"holders": [holder(**RENEWED, held=599.0)], **BUSY},
    "held for long, nobody waits": {"holders": [holder(**RENEWED, held=601.0)]},
    "a beat leads for months": {"holders": [holder(**RENEWED, held=601.0, thread="beat")], **BUSY},
    "a beat leads": {"ticked": 240.0, "holders": [holder(**RENEWED)]},
    "a second turn": {"holders": [holder()], "turns": [place(turns=2)]},
    "has only just come": {"waiting": 1, "line": [place(waiting=1.0)]},
    "a new reservation": {"reservation": OLD._replace(since=9.0)},
    "a task runs": {"reservation": OLD._replace(state="running")},
    "only the time is in the way": {"rate": RateState(MINUTE, 12.0), **LATER},
    "so it is, and one runs": {"rate": RateState(MINUTE, 12.0), **LATER, "holders": [holder()]},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_may_be_wrong_with_a_lock(doctor, server, dislock, case):
    """Each trouble has its words; what lists call trouble is what doctor finds."""
    found, listed = looked_at(doctor, server, dislock, WRONG[case])
    assert [*found, *listed] == TOLD[case]


@pytest.mark.parametrize("case", WELL)
def test_what_is_well(doctor, server, dislock, case):
    """Neither doctor nor the lists say anything of it."""
    assert looked_at(doctor, server, dislock, WELL[case]) == ([], ["ls:"])


def looked_at(doctor, server, dislock, given):
    """Return what doctor finds, and what `ls` calls trouble."""
    sweep = sweep_lock("dislock", server.broker)
    server.put(lock(**given), lock("swept", name=sweep, holders=[holder()]), lock("healthy"))
    doctor.declare(**EXPORT)
    troubles = ", ".join(dislock.json("ls")[0]["troubles"])
    return [" ".join(one) for one in doctor.found()], [f"ls: {troubles}".rstrip()]


def test_locks_that_cannot_be_read(doctor, server):
    """One that is damaged is serious; of a server that does not answer the others are read."""

    def away(*_command):
        raise StoreError("redis://b", "no answer in time")

    doctor.declare(**EXPORT)
    server.put(lock("k", holders=[holder()]))
    server.damage("d")
    server.kind, server.senders = "cluster", lambda: [server.send, away]
    server.members = lambda: [member(server, "h", MASTER | ONLINE)]
    found = doctor.found("locks")
    assert [(level, what[:36]) for _, level, what in found] == [
        ("serious", "Locks that cannot be used, so that t"),
        ("note", "The locks of one server could not be"),
    ]
    [counted] = [one["what"] for one in doctor.told() if "lease," in one["what"]]
    assert counted == "1 lock, 1 lease, 0 waiting."


@pytest.mark.parametrize(
    ("since", "remaining", "tasks", "messages", "unmet"),
    [
        (MINUTES, HOUR - MINUTES, [("end", HOUR)], 0, MINUTES),
        (MINUTES, HOUR - MINUTES, [("end", HOUR)], 5000, None),  # a backlog
        (MINUTES, HOUR - MINUTES, [("end", HOUR)], None, None),
        (MINUTES, HOUR - MINUTES, [("expiry", HOUR)], 0, None),  # no worker renews it
        (MINUTES, HOUR - MINUTES, [], 0, None),
        (200.0, HOUR - 200.0, [("end", HOUR)], 0, None),
        (9 * HOUR, HOUR - 5.0, [("end", HOUR)], 0, None),  # a worker has it, for its ETA
        (9 * HOUR, 2 * HOUR, [("start", HOUR)], 0, None),  # its ETA is an hour ahead
        (MINUTES, 60.0, [("end", HOUR)], 0, MINUTES),  # its message has expired, or will
        (MINUTES, 500.0, [("end", HOUR), ("end", 600.0)], 0, None),  # perhaps 100 s of 600
        (61.0, 59.0, [("end", 120.0)], 0, 61.0),  # half of it
        (0.6 * HOUR, 0.4 * HOUR, [("end", HOUR)], 1, 0.6 * HOUR),
        (0.6 * HOUR, 0.4 * HOUR, [], 0, 0.6 * HOUR),
    ],
)
def test_a_reservation_whose_message_nobody_has_is_told_within_minutes(
    doctor, monkeypatch, since, remaining, tasks, messages, unmet
):
    """What is over of its time is known; a message that waits in a long queue is not lost."""
    for nth, (until, seconds) in enumerate(tasks):
        unique = {"lock_unique_until": until, "lock_unique_for": seconds}
        doctor.declare(f"t{nth}", lock_key="a:<n>", **unique)
    doctor.set(task_routes={"t*": {"queue": "mail"}})
    monkeypatch.setattr(Site, "messages_in", lambda _self, queues: {"mail": messages}[queues[0]])
    kept = RESERVED._replace(since=since, remaining=remaining)
    doctor.at.put(lock("a:1 and others", reservation=kept))
    is_known = bool(tasks) and tasks[0][1] <= since + remaining
    found = ["nothing waits in mail" in one[2] for one in doctor.found("reservations")]
    assert found == ([] if unmet is None else [is_known and messages == 0])


TOGETHER = {"name": reserved_lock(["dislock:{a:1}", "dislock:{b}"])}
SKIP = {"lock_on_conflict": "skip"}


@pytest.mark.parametrize(
    ("options", "given", "unmet"),
    [
        ({}, {"waiting": 1, "line": [place(id=RESERVED.id)]}, False),
        ({}, {"turns": [place(id=RESERVED.id)]}, False),
        ({}, {"waiting": 1, "line": [place(id="other")]}, True),
        # It stands in the line of one of its locks, which nobody can name.
        ({"lock_key": ["a:<n>", "b"], **QUEUE}, TOGETHER, False),
        ({"lock_key": ["a:<n>", "b"], **SKIP}, TOGETHER, True),
    ],
)
def test_a_reservation_whose_task_is_parked_is_not_unmet(
    doctor, monkeypatch, options, given, unmet
):
    """Its message is on the lock server: the one of the key that runs may run for long."""
    unique = {"lock_unique_until": "start", "lock_unique_for": 3600.0}
    doctor.declare("t", **{"lock_key": "a:<n>", **unique, **options})
    monkeypatch.setattr(Site, "messages_in", lambda *_: 0)
    there = {"reservation": RESERVED._replace(since=1200.0, remaining=2400.0), **given}
    holders = [] if given is TOGETHER else [holder()]
    doctor.at.put(lock("a:1 and others" if given is TOGETHER else "a:1", holders=holders, **there))
    assert bool(doctor.found("reservations")) == unmet


@pytest.mark.parametrize(
    ("prefix", "ours", "many"), [("old", True, 1), ("old", False, 0), ("dislock", True, 0)]
)
def test_lines_of_the_same_broker_under_another_prefix_are_a_finding(
    doctor, server, app, prefix, ours, many
):
    """No worker with the settings of now gives those tasks their turns."""
    doctor.declare(**EXPORT)
    broker = runtime_of(app).process.store.broker if ours else "another"
    Lines(server, prefix, broker, list).enlist(f"{prefix}:{{k}}")
    found = [one for one in doctor.told() if one["check"] == "lines"]
    assert [one["level"] for one in found] == ["warning"] * many
    assert all("other prefixes than dislock: old" in one["what"] for one in found)


def test_the_messages_of_a_queue_are_counted_once():
    """A queue that is not there has none; what is not known is not concluded from."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare(queue="slow")
        site = Site(None, app)
        for _ in range(2):
            connection.SimpleBuffer("slow").put("x")
            assert site.messages_in(["slow", "nowhere"]) == 1
    assert Site(None).messages_in(["slow"]) is None
    away = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    assert Site(None, away).messages_in(["celery"]) is None
    assert away.conf.broker_transport_options == {}
    away.close()
    app.close()


def test_the_tasks_that_may_have_a_key(app):
    """By what their keys begin with; with the queue that each is routed to."""

    def report(corp_id): ...

    unique = {"base": SingletonTask, "lock_unique_until": "end", "shared": False}
    app.task(name="a", lock_key="a:<corp_id>", **unique)(report)
    app.task(name="b", lock_key=["b", "a:b"], lock_unique_for=60, **unique)(report)
    app.task(name="c:c", **unique)(report)
    app.task(name="d", lock_key="a:<corp_id>", base=SingletonTask, shared=False)(report)
    app.conf.task_routes = {"a": {"queue": "slow"}, "b": {"queue": "routed"}}
    for key, found in (
        ("a:7", [(3600.0, "slow")]),
        ("a:b and others", [(3600.0, "slow"), (60.0, "routed")]),
        ("c%3Ac:9f", [(3600.0, "celery")]),
        ("x", []),
    ):
        tasks = Site(None, app).tasks_of(key)
        assert [(one.options.lock_unique_for, one.queue) for one in tasks] == found
        assert Site(None).tasks_of(key) == []


@pytest.mark.parametrize(("parked", "level"), [(2, "serious"), (0, "warning")])
def test_a_server_that_has_lost_its_data(doctor, server, parked, level):
    """It is told for a week; serious is what has lost parked tasks."""
    epoch = Epoch(server, "dislock", server.broker)
    epoch.look(parked)
    assert doctor.found("data") == []
    server.lose()
    epoch.look(0)
    server.advance(86400)
    [(_, found, what)] = doctor.found("data")
    assert found == level
    assert "came back without its data 24 h 00 min ago. " in what
    assert what.endswith(f" before: {parked}; when a worker noticed it: 0.")
    server.advance(6 * 86400)
    assert doctor.found("data") == []


def test_several_independent_servers_have_no_lines_to_lose(doctor, server):
    """Nothing is read of them."""
    Epoch(server, "dislock", server.broker).look(1)
    server.keeps_lines = False
    server.run = None  # a call would be a note
    assert doctor.found("data") == []

"""``doctor``: what it finds wrong with a lock server, with workers and with the locks."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from celery import Celery
from redis import ResponseError

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import facts, locks, workers
from celery_dislock.operating.checks import server as servers
from celery_dislock.operating.checks.table import findings, warning
from celery_dislock.operating.checks.troubles import TROUBLES
from celery_dislock.operating.cli import doctor as command
from celery_dislock.operating.cli.doctor import ask_workers
from celery_dislock.operating.site import ANSWERS_WITHIN, Site
from celery_dislock.parking.process import runtime_of
from celery_dislock.scripts.names import sweep_lock
from celery_dislock.servers.server import Member
from tests.commands import AWAY, FOUND
from tests.staged import RESERVED, holder, lock, place

DOCS = Path(__file__).parents[3] / "docs"
MASTER = {"role": "master", "aof_enabled": "1"}
EXPORT = {"lock_key": "export:<n>"}
HOUR, MINUTES = 3600.0, 400.0


class Doctor:
    """
    Runs the command, and answers for the workers.

    Attributes:
        answers: How each worker describes its locks.
        error: Raised by the broker.
        asked: What the workers were asked.
        at: The lock server.
    """

    def __init__(self, dislock, at):
        self._dislock = dislock
        self.at = at
        self.answers = {"w1": self.described()}
        self.error = None
        self.asked = []

    def described(self, lease=None, **given):
        """How a worker describes its locks."""
        held = {"key": "export:7", "held": True, "overdue": False, **(lease or {})}
        known = {"version": version("celery-dislock"), "enabled": True, "locks": True}
        known |= {"server": self.at.name, "prefix": "dislock", "no_server": None}
        known |= {"tasks": {"export": EXPORT}, "warnings": [], "unavailable": None, "errors": 0}
        return {**known, "leases": [held], **given}

    def broadcast(self, asked, **how):
        self.asked.append((asked, how))
        if self.error is not None:
            raise self.error
        if asked == "ping":
            return [{name: {"ok": "pong"}} for name in self.answers]
        return [{name: answer} for name, answer in self.answers.items()]

    def declare(self, name="export", **options):
        """Have a task here."""

        @self._dislock.app.task(base=SingletonTask, name=name, shared=False, **options)
        def task(n=1): ...

    def told(self):
        """All findings; the exit code says how bad they are."""
        answer = self._dislock("doctor", "--json", "--timeout", "0.01")
        report = json.loads(answer.stdout)
        assert answer.exit_code == (AWAY if report["away"] else FOUND * report["serious"])
        return report["findings"]

    def set(self, **conf):
        """Change settings of the app."""
        self._dislock.app.conf.update(conf)
        vars(runtime_of(self._dislock.app)).pop("settings", None)

    def found(self, *checks):
        """Check, level and text of what is found and is not ok, by these checks."""
        return [
            (one["check"], one["level"], one["what"])
            for one in self.told()
            if one["level"] != "ok" and (not checks or one["check"] in checks)
        ]


@pytest.fixture
def doctor(dislock, server, monkeypatch):
    doctor = Doctor(dislock, server)
    server.info = MASTER
    monkeypatch.setattr(dislock.app.control, "broadcast", doctor.broadcast)
    monkeypatch.setattr(facts, "complaints", lambda *_: [])  # real servers are tried elsewhere
    return doctor


# The lock server.


def member(server, name, info, ahead=0.0):
    """Make a process of the lock server; no info: it is away; text: it refuses INFO."""

    def send(command):
        if info is None:
            raise StoreError(name, "no answer in time")
        if command == b"TIME":
            seconds, micros = map(int, server.send("TIME"))
            return [seconds + int(ahead), micros + round(ahead % 1 * 1e6)]
        if isinstance(info, str):
            error = StoreError(name, info)
            error.raw = ResponseError(info)
            raise error
        return "\n".join(f"{field}:{value}" for field, value in info.items()).encode()

    return Member(name, send, None)


ONLINE = {"slave0": "ip=127.0.0.1,port=6380,state=online,offset=14,lag=0"}
SYNC = {"slave0": "ip=127.0.0.1,port=6381,state=wait_bgsave,offset=0,lag=0"}
QUEUE = {"lock_on_conflict": "queue"}
ALONE = ("replicas", "warning", "No replica follows")


@pytest.mark.parametrize(
    ("kind", "infos", "options", "expected"),
    [
        ("single", [MASTER], {}, []),
        ("single", [None], {}, [("server", "serious", "is away")]),
        ("quorum", [None, *[MASTER] * 4], {}, [("server", "warning", "1 more may fail")]),
        ("quorum", [None] * 2 + [MASTER] * 3, {}, [("server", "warning", "No other may fail")]),
        ("quorum", [None] * 3 + [MASTER] * 2, {}, [("server", "serious", "is away")]),
        ("cluster", [None, MASTER], {}, [("server", "serious", "slots of these nodes"), ALONE]),
        (
            "single",
            [{**MASTER, "maxmemory_policy": "volatile-ttl", "maxmemory": "100"}],
            {},
            [("eviction", "serious", "evict")],
        ),
        ("single", [{"role": "slave"}], {}, [("role", "serious", "replica")]),
        ("single", ["NOPERM INFO"], {}, [("settings", "note", "INFO is refused")]),
        ("single", [{**MASTER, "aof_enabled": "0"}], {}, []),
        ("single", [{"role": "master"}], QUEUE, []),  # not known
        (
            "single",
            [{**MASTER, "aof_enabled": "0"}],
            QUEUE,
            [("persistence", "warning", "parked tasks")],
        ),
        (
            "quorum",
            [{**MASTER, "aof_enabled": "0"}] * 3,
            {},
            [("persistence", "warning", "forgotten its leases")],
        ),
        ("single", [MASTER], {"replicas": 1}, [("replicas", "serious", "Fewer replicas")]),
        ("single", [MASTER | SYNC], {"replicas": 1}, [("replicas", "serious", "Fewer replicas")]),
        ("single", [MASTER | ONLINE], {"replicas": 1}, []),
        ("cluster", [MASTER], {}, [ALONE]),
        ("sentinel", [MASTER], {}, [ALONE]),
        (
            "sentinel",
            [MASTER | ONLINE],
            {},
            [("replicas", "warning", "cut off from its Sentinels")],
        ),
        ("sentinel", [MASTER | ONLINE | {"min_slaves_good_slaves": "1"}], {}, []),
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
    doctor.answers = {"w1": doctor.described(tasks={"export": task})}
    found = doctor.found()
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert all(words in one[2] for one, (*_, words) in zip(found, expected, strict=True))


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


# Workers.


TIMEOUT = {**EXPORT, "lock_watchdog_timeout": 60.0}
LIMITED = {**EXPORT, "lock_limit": 3}
NOWHERE = {"no_server": "no such URL", "server": None, "prefix": None}
OTHER = {"server": "redis://other/0"}


@pytest.mark.parametrize(
    ("answer", "check", "level", "text"),
    [
        (OTHER, "lock server", "serious", "may run twice at a time: export. Locks are at redis://"),
        ({"prefix": "staging"}, "lock server", "serious", "prefix staging (w2)"),
        (NOWHERE, "lock server", "serious", "no lock server: w2 (no such URL)"),
        ({"locks": False}, "tasks", "serious", "(--no-dislock), also if others lock them: w2."),
        (
            {"tasks": {"export": {"lock_key": "export:<corp>"}}},
            *("options", "serious"),
            "lock_key of export differs, so it may run twice at a time: export:<corp> (w2)",
        ),
        (
            {"tasks": {"export": LIMITED}},
            "options",
            "serious",
            "the default (this command, w1)",
        ),
        ({"tasks": {"export": TIMEOUT}}, "options", "warning", "lock_watchdog_timeout of export"),
        ({"warnings": ["It does X: a.b. Raise it."]}, "tasks", "warning", "w2 started: It does X"),
        ({"errors": 1}, "renewals", "warning", "unexpected errors: w2"),
        ({"lease": {"overdue": True}}, "renewals", "warning", "in a row: w2 (export:7)"),
        ({"unavailable": "no route"}, "renewals", "serious", "these workers: w2 (no route)"),
        ({"tasks": 7}, "workers", "warning", "did not answer in time: w2."),
        ({"error": "KeyError", "leases": None}, "workers", "warning", "in time: w2."),
        ({}, None, None, None),
        ({**OTHER, "tasks": {"report": {}}}, None, None, None),  # two projects share a broker
        ({**NOWHERE, "tasks": {}, "enabled": None}, None, None, None),  # it locks nothing
        ({"warnings": ["The lock server may evict locks. Set it."]}, None, None, None),
    ],
    ids=str,
)
def test_a_worker_beside_another(doctor, answer, check, level, text):
    """One that differs is named; a difference is serious if a task may run twice because of it."""
    doctor.declare(**EXPORT)
    doctor.answers["w2"] = doctor.described(**answer)
    found = doctor.found()
    assert {one[:2] for one in found} == ({(check, level)} if check else set())
    assert all(text in what for *_, what in found)


def test_who_answers_the_ping_is_asked_by_name(doctor):
    """So the other question ends with the last answer, and not after the whole time."""
    doctor.answers |= {"w3": {}, "w2": {}}
    doctor.found()
    (_, ping), (_, asked) = doctor.asked[:2]
    assert "destination" not in ping
    about = asked["destination"], asked["limit"], asked["timeout"]
    assert about == (["w1", "w2", "w3"], 3, 0.01)
    doctor.answers, doctor.asked = {}, []
    doctor.found()
    assert [one for one, _ in doctor.asked] == ["ping"]


def test_a_worker_that_locks_elsewhere_than_this_command_looks(doctor):
    """What the command finds of locks is then not about that worker."""
    doctor.answers = {"w1": doctor.described(**OTHER)}
    [(_, level, what)] = doctor.found("lock server")
    assert level == "warning"
    assert f"{doctor.at.name}, prefix dislock" in what
    assert "redis://other/0, prefix dislock" in what


@pytest.mark.parametrize(
    ("there", "declared", "level"),
    [
        ({"holders": [holder()]}, False, "serious"),
        ({"holders": [holder(task=None, id=None, thread="T")]}, True, "serious"),
        ({"waiting": 1, "line": [place(parked=False, task=None, thread="T")]}, True, "serious"),
        ({"holders": [holder(task=None, id=None, thread="T")]}, False, "warning"),  # plain Python
        ({}, True, "warning"),
    ],
)
@pytest.mark.parametrize("error", [None, ConnectionRefusedError(111, "Connection refused")])
def test_no_worker_is_serious_if_tasks_hold_locks_or_wait(
    doctor, server, there, declared, level, error
):
    """They do not run, and nobody goes on with the lines."""
    if declared:
        doctor.declare(**EXPORT)
    doctor.answers, doctor.error = {}, error
    server.put(lock(**there))
    [(_, is_, what)] = doctor.found("workers")
    assert is_ == level
    assert ("Connection refused" if error else "No worker answers") in what


@pytest.mark.parametrize(
    ("error", "does"),
    [
        ("Command # 1 caused error: command not allowed when used memory > 'maxmemory'.", "full"),
        ("connection blocked, see broker logs", "alarms"),
        ("Authentication required.", "password"),
        ("invalid username-password pair or user is disabled.", "password"),
        ("(0, 0): (403) ACCESS_REFUSED - Login was refused using PLAIN", "password"),
        ("this user has no permissions to run the 'ping' command", "ACL SETUSER"),
        ("(0, 0): (403) ACCESS_REFUSED - configure access to queue refused", "set_permissions"),
        ("Connection.open: (530) NOT_ALLOWED - vhost x not found", "virtual host"),
        ("DB index is out of range", "database"),
        ("You can't write against a read only replica.", "master"),
        ("NOREPLICAS Not enough good replicas to write.", "replicas"),
        ("max number of clients reached", "connections"),
        ("Name or service not known", "host"),
        ("no answer to the TLS handshake; the port may be one without TLS", "broker_use_ssl"),
        ("Connection refused", "Start it"),
        ("no answer in time", "Start it"),
        ("something new", "log"),
    ],
)
def test_the_remedy_fits_what_the_broker_says(doctor, error, does):
    """A broker that answers and refuses is not to be started."""
    doctor.error = RuntimeError(error)
    [one] = [one for one in doctor.told() if one["check"] == "workers"]
    assert does in one["remedy"]
    assert ("Start it" in one["remedy"]) is (does == "Start it")


def test_what_comes_from_one_setting_is_one_finding(doctor):
    """However many tasks, apps and workers there are; it names all of them."""
    tasks = {f"task-{number}": EXPORT for number in range(30)}
    for name in tasks:
        doctor.declare(name, **EXPORT)
    doctor.answers = {
        name: doctor.described(server=f"redis://{name}/0", tasks=tasks) for name in ("w1", "w2")
    }
    [(check, level, what)] = doctor.found()
    assert (check, level) == ("lock server", "serious")
    for words in ("task-0", "and 25 others", "redis://w2/0, prefix dislock (w2)", "(this command)"):
        assert words in what
    others = dict.fromkeys(tasks, TIMEOUT)
    doctor.answers = {"w1": doctor.described(tasks=others), "w2": doctor.described(tasks=tasks)}
    [(check, level, what)] = doctor.found()
    assert (check, level) == ("options", "warning")
    assert "and 25 others differs: 60.0 (w1); the default (this command, w2)" in what


def test_what_only_this_command_has_is_a_warning_and_no_task_a_note(doctor):
    """The workers agree, and are what counts; without a task there is nothing to examine."""
    doctor.answers = {"w1": doctor.described(tasks={})}
    assert [one[:2] for one in doctor.found()] == [("tasks", "note")]
    doctor.declare(lock_key="new:<n>")
    doctor.answers = {name: doctor.described() for name in ("w1", "w2")}
    assert [one[:2] for one in doctor.found()] == [("options", "warning")]


def test_warnings_of_the_start_are_repeated_once(doctor):
    """With all workers that logged them, and what to do."""
    doctor.declare(**EXPORT)
    told = ["These do X: a.b. Raise it."]
    doctor.answers = {name: doctor.described(warnings=told) for name in ("w1", "w2")}
    [one] = [one for one in doctor.told() if one["level"] != "ok"]
    assert (one["what"], one["remedy"]) == ("When w1, w2 started: These do X: a.b.", "Raise it.")


def test_a_broker_is_not_waited_for_for_ever(app, monkeypatch):
    """Kombu sets no time limits; those that the app sets stay; RabbitMQ says that it blocks."""
    away = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    away.conf.broker_transport_options = given = {"socket_timeout": 77, "visibility_timeout": 5}
    assert ask_workers(away, 1.0).error
    limits = {**given, "socket_connect_timeout": ANSWERS_WITHIN}
    assert away.conf.broker_transport_options == limits
    away.close()
    monkeypatch.setattr(command, "ANSWERS_WITHIN", 0.0)
    goes_on = Event()

    def wait(says, _app, _timeout, blocked):
        blocked += says
        goes_on.wait(60)

    for says in ([], ["connection blocked, see broker logs"]):
        monkeypatch.setattr(command, "_ask", partial(wait, says))
        assert ask_workers(app, 0.05).error == (says or ["no answer in time"])[0]
    goes_on.set()


# The locks.


RENEWED = {"renewed": 3.0, "remaining": 27.0}
OLD = RESERVED._replace(since=4000.0, remaining=10.0)
NOTE = {"limit_note": "by ana: reindex", "limit_age": 7200.0}
BUSY = {"waiting": 1, "line": [place(parked=False, ticket="")]}


@pytest.mark.parametrize(
    ("given", "finding"),
    [
        ({"holders": [holder(renewed=25.0, remaining=5.0)]}, ("leases", "warning", "k.")),
        ({"holders": [holder(**RENEWED)]}, None),
        ({"holders": [holder(renewed=None)]}, None),  # an older version, or a fixed expiry
        (
            {"holders": [holder(**RENEWED, held=601.0)], **BUSY},
            (
                "leases",
                "warning",
                "k (for 10 min by shop.export[id-1] on celery@w1 (pid 7), with 1 w",
            ),
        ),
        ({"holders": [holder(**RENEWED, held=599.0)], **BUSY}, None),
        ({"holders": [holder(**RENEWED, held=601.0)]}, None),  # it bothers nobody
        # Of several beats one leads for months.
        ({"holders": [holder(**RENEWED, held=601.0, thread="beat")], **BUSY}, None),
        ({"ticked": 240.0}, ("beats", "warning", "k (last tick 4 min ago)")),
        ({"ticked": 240.0, "holders": [holder(**RENEWED)]}, None),
        (
            {"ticked": 240.0, "limit": 0, **NOTE},  # on purpose
            ("limits", "note", "k (paused; by ana: reindex; for 2 h 00 min so far)"),
        ),
        (
            {"holders": [holder()], "line": [place(turns=3, routing_key="pay")], "waiting": 1},
            ("lines", "warning", "k (ticket parked-1:0:0, queue pay)"),
        ),
        ({"holders": [holder()], "turns": [place(turns=2)]}, None),
        (
            {"waiting": 1, "line": [place(waiting=9.0)]},
            ("lines", "warning", "k (the first waits for 9.0 s)"),
        ),
        ({"waiting": 1, "line": [place(waiting=1.0)]}, None),  # it has only just come
        ({"aside": 2}, ("set aside", "warning", "k (2 tasks)")),
        ({"reservation": OLD}, ("reservations", "warning", "k (for 1 h 06 min)")),
        ({"reservation": OLD._replace(since=9.0)}, None),
        ({"reservation": OLD._replace(state="running")}, None),
        (
            {"limit": 0, **NOTE, "waiting": 4},
            ("limits", "warning", "k (paused; by ana: reindex; for 2 h 00 min so far; 4 waiting)"),
        ),
        (
            {"limit": 3, **NOTE, "waiting": 4, "holders": [holder(**RENEWED)]},
            ("limits", "warning", "k (to 3 at a time; by ana: reindex; for 2 h 00 min so far; 4"),
        ),
        ({"limit": 3, **NOTE}, ("limits", "note", "k (to 3 at a time; by ana: reindex; for 2 h 0")),
        (
            {"waiting": 1, "holders": [holder()], "line": [place(broker="b")]},
            ("sweep", "warning", "k."),
        ),
    ],
    ids=str,
)
def test_what_may_be_wrong_with_a_lock(doctor, server, dislock, given, finding):
    """Each trouble has its words; what lists call trouble is what doctor finds."""
    sweep = sweep_lock("dislock", server.home)
    server.put(lock(**given), lock("swept", name=sweep, holders=[holder()]), lock("healthy"))
    doctor.declare(**EXPORT)
    found = doctor.found()
    assert [one[:2] for one in found] == ([finding[:2]] if finding else [])
    assert all(finding[2] in what for *_, what in found)
    [listed, *_] = dislock.json("ls")
    is_limit = given.get("limit") == 3 and not given.get("waiting")
    assert len(listed["troubles"]) == (finding is not None and not is_limit)


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


def test_the_messages_of_a_queue_are_counted_once():
    """A queue that is not there has none; what is not known is not concluded from."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare(queue="slow")
        site = Site(None, "dislock", app)
        for _ in range(2):
            connection.SimpleBuffer("slow").put("x")
            assert site.messages_in(["slow", "nowhere"]) == 1
    assert Site(None, "dislock").messages_in(["slow"]) is None
    away = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    assert Site(None, "dislock", away).messages_in(["celery"]) is None
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
        tasks = Site(None, "dislock", app).tasks_of(key)
        assert [(one.unique_for, one.queue) for one in tasks] == found
        assert Site(None, "dislock").tasks_of(key) == []


@pytest.mark.parametrize(("ago", "many"), [(12, 1), (601, 0)])
def test_only_a_stranger_that_came_lately_is_a_finding(doctor, server, app, ago, many):
    """One that still has its turn elsewhere comes again within seconds."""
    doctor.declare(**EXPORT)
    runtime_of(app).process.identity.whose("f" * 16)
    server.advance(ago)
    found = [one for one in doctor.told() if one["check"] == "lines"]
    assert [one["level"] for one in found] == ["warning"] * many
    assert all("came 12 s ago" in one["what"] and "drain" in one["remedy"] for one in found)


# What it writes.


def test_a_check_that_cannot_go_on_says_so_and_ends_no_other():
    """Its findings have its name; an answer that nobody expects ends no examination either."""
    for error in (StoreError("redis://h", "no answer in time"), KeyError("version")):

        def lines(_, error=error):
            yield warning("A line.")
            raise error

        first, last = findings("lines", lines, None)
        assert (first.check, first.level, first.what) == ("lines", "warning", "A line.")
        assert (last.check, last.level) == ("lines", "note")
        assert "could not be looked at" in last.what


def test_long_findings_are_wrapped(doctor, dislock, server):
    """Each line is readable in a terminal, the worst first, and a key is no command to it."""
    doctor.declare(**EXPORT)
    server.put(lock("\x1b[31mred", aside=1))
    lines = dislock("doctor", "--timeout", "0.01", env={"COLUMNS": "60"}).stdout.splitlines()
    assert lines[:6] == [
        "warning  set aside: Parked tasks that could not be read or",
        "         run were set aside: \\x1b[31mred (1 task).",
        "         -> When a worker can run them: celery dislock",
        "            put-back KEY. See the page Operate it, Tasks",
        "            that were set aside.",
        lines[5],
    ]
    assert re.fullmatch(r"1 warning, \d+ ok", lines[-1])


def test_the_pages_have_each_check_and_each_trouble():
    """And none that is gone; lists name what doctor explains."""
    page = (DOCS / "reference/doctor.md").read_text("utf-8")
    section = page.partition("### What it looks at")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    tables = [workers.ROWS, servers.ROWS, *(one.CHECKS for one in (workers, locks, servers))]
    checks = {row[0] for table in tables for row in table} | {one.row.check for one in TROUBLES}
    assert named == checks | {*servers.AS_AT_START}
    page = (DOCS / "reference/command-line.md").read_text("utf-8")
    rows = page.partition("| `TROUBLE` |")[2].partition("\n\n##")[0]
    assert {one.name for one in TROUBLES} <= set(re.findall(r"^\| `(.*?)` \|", rows, re.MULTILINE))

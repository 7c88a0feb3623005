"""A lock server whose user may do what the documentation says, and nothing more."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from celery_dislock import Dislock, Lease, scripts
from celery_dislock.exceptions import ForbiddenError
from celery_dislock.locks.runtime import Runtime
from celery_dislock.operating.counting import Counters
from celery_dislock.operating.web.metrics import Collector
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.scripts import COUNT, TICK, TICKS, Script
from celery_dislock.scripts.names import beat_of
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.replies import Done, Granted, Parked, Refused, Replaced
from celery_dislock.servers.requests import Ending, Execution, Terms
from celery_dislock.servers.reservations import Reservation
from celery_dislock.servers.store import Store
from celery_dislock.servers.trial import CALLED, check_scripts
from celery_dislock.servers.view import LockState
from celery_dislock.worker.steps import check_lock_server
from tests.holding import Holding, name_of, wait_for
from tests.integration.acl import RULES
from tests.integration.test_doctor import Report
from tests.leaks import SECRET
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis


LOCK = name_of("acl")
LONG = 60.0  # seconds: no lease of these tests runs out by itself
HOLDER = json.dumps({"task": "shop.export", "id": "id-1", "worker": "celery@w1", "pid": 7})
WITHIN = 10.0  # seconds

COMMANDS = re.findall(r"\+([\w|]+)", RULES)
SENT = {"eval", "evalsha", "blpop", "scan", "info"}  # beside what scripts run
TEXTS = {file.name: file.read_text("utf-8") for file in Path(scripts.__file__).parent.glob("*.lua")}
CALLS = {name.lower() for text in TEXTS.values() for name in CALLED.findall(text)}
SCRIPTS = {name: one for name, one in vars(scripts).items() if isinstance(one, Script)}


@pytest.fixture(scope="module")
def server(redis_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with the user of the documentation, and one beside that may do all."""
    folder = tmp_path_factory.mktemp("acl")
    users = folder / "users.acl"
    users.write_text(
        f"user default on nopass ~* &* +@all\nuser dislock {RULES.replace('PASSWORD', SECRET)}\n"
    )
    with RedisServer(folder / "redis", args=["--aclfile", str(users)]) as server:
        yield server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """A client that may do all, of a server that is empty."""
    with server.client() as client:
        client.flushall()
        client.execute_command("SCRIPT", "FLUSH")
        client.config_resetstat()
        yield client


@pytest.fixture
def url(server: RedisServer, admin: redis.Redis) -> str:
    """The server's URL, with the documentation's user."""
    return url_of(server, "dislock")


@pytest.fixture
def limited(server: RedisServer, admin: redis.Redis):
    """Return the URL of a user with other rules than the documentation's."""

    def make(rules: str) -> str:
        given = rules.replace("PASSWORD", SECRET).split()
        admin.execute_command("ACL", "SETUSER", "limited", "reset", *given)
        return url_of(server, "limited")

    yield make
    admin.execute_command("ACL", "DELUSER", "limited")


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:{SECRET}@127.0.0.1:{server.port}/0"


def without(command: str) -> str:
    """Return the documentation's rules but for one command."""
    return " ".join(rule for rule in RULES.split() if rule != f"+{command}")


def start_worker(url: str) -> tuple[str, list[str]]:
    """Do what a worker does under --dislock before it starts."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    Dislock(app)
    app.conf.update(dislock_url=url, dislock_enabled=True)
    return check_lock_server(app)


def test_the_page_allows_what_the_scripts_run_and_no_more():
    """The commands of the documentation are those in the scripts, and those sent beside them."""
    assert sorted(COMMANDS) == sorted(SENT | CALLS)


def test_every_call_of_a_script_is_counted():
    """No script runs a command whose name is not written in it."""
    for name, text in TEXTS.items():
        assert len(re.findall(r"redis\.p?call\b", text)) == len(CALLED.findall(text)), name


class Life:
    """All that locks do in their life, as one user."""

    def __init__(self, url: str, admin: redis.Redis) -> None:
        self.url = url
        self.admin = admin
        self.given: list = []
        self.store = Store(url, home="here", hand_over=self.given.extend)
        self.lines = Lines(self.store.lock_server, "dislock", "here", self.given.extend)

    def acquire(self, owner: str, **terms) -> Granted | Refused:
        return self.store.acquire([LOCK], owner, LONG, HOLDER, **terms)

    def park(self, task: str, *, message: bytes = b"{}", marked: bool = False):
        ticket = Ticket(f"{task}:0:0", f"{task}@", marked, message)
        return self.lines.park(LOCK, f"{task}@w/1", LONG, HOLDER, ticket)

    def leases(self) -> None:
        assert isinstance(self.acquire("a/1"), Granted)
        assert self.store.holders(LOCK)[0].owner == "a/1"
        assert self.store.extend([LOCK], "a/1", LONG)
        assert self.store.renew([([LOCK], "a/1", LONG)], within=WITHIN) == [True]
        execution = Execution([LOCK], "a/", LONG, 0.0, 0.0)
        assert self.store.renew_stalled([execution], within=WITHIN)[0].unrenewed >= 0
        assert self.store.release([LOCK], "a/1", Ending(at_least=LONG))
        assert self.store.take_over([LOCK], "a/1", "b/1", HOLDER) == 1
        assert self.store.release_dead([LOCK], "b/") == 1
        self.store.remember(LOCK, "id-1", "done", LONG)
        assert self.store.recall(LOCK, "id-1") == "done"
        for owner in ("a/1", "b/1"):
            assert isinstance(self.acquire(owner, terms=Terms(mode="shared")), Granted)
        assert isinstance(self.acquire("c/1"), Refused)
        for owner in ("a/1", "b/1"):
            assert self.store.release([LOCK], owner)

    def waiting(self) -> None:
        with Holding(self.url) as holding:
            lease = holding.take("acl")
            got: list[Lease | None] = []
            lock = holding.lock("acl")
            waiter = threading.Thread(
                target=lambda: got.append(lock.lease if lock.acquire(timeout=WITHIN) else None)
            )
            waiter.start()
            holding.wait_renewed(lease)
            wait_for(lambda: self.admin.zcard(f"{LOCK}:line"), "a waiter in line")
            lease.release()
            waiter.join()
            assert isinstance(got[0], Lease)
            holding.wait_renewed(got[0])
            lock.release()

    def parking(self) -> None:
        assert isinstance(self.acquire("a/1"), Granted)
        self.lines.enlist(LOCK)
        assert [self.park(task).place for task in ("p", "q", "r", "t")] == [1, 2, 3, 4]
        assert self.lines.leave(LOCK, "r:0:0")
        assert self.lines.withdraw(LOCK, "t:0:0")
        self.store.release([LOCK], "a/1")
        assert [turn.ticket for turn in self.given] == ["p:0:0"]
        self.lines.give_back(LOCK, "p:0:0")
        assert self.lines.sweep([LOCK])[LOCK].parked == 2
        assert isinstance(self.park("p", marked=True), Granted)
        assert self.store.release([LOCK], "p@w/1", Ending(ticket="p:0:0", settles=LONG))
        self.store.release([LOCK], "p@w/1", Ending(ticket="p:0:0"))
        assert isinstance(self.park("p", marked=True), Done)
        assert isinstance(self.park("s"), Parked)
        assert self.lines.set_aside(LOCK, "q:0:0", b"{}")
        assert isinstance(self.park("s", marked=True), Granted)
        assert self.store.release([LOCK], "s@w/1", Ending(ticket="s:0:0"))
        _, _, found = self.lines.page(b"0", 100)
        self.lines.delist(LOCK, found[LOCK])

    def sending(self) -> None:
        reservations = self.store.reservations
        sent = []
        for task in "mn":
            wanted = Reservation(LOCK, task, "end", LONG)
            found = reservations.reserve(wanted, task, replaces=True)
            sent.append(wanted._replace(mark=found.mark, number=found.number))
            assert reservations.confirm(sent[-1])
        older, reserved = sent
        with pytest.raises(Replaced):
            self.acquire("m@w/1", reservation=older)
        assert isinstance(self.acquire("n@w/1", reservation=reserved), Granted)
        reservations.keep([reserved], runs=True, within=WITHIN)
        assert self.store.release([LOCK], "n@w/1", Ending(reservation=reserved))
        ticket = Ticket("u:0:0", "u@", marked=False, reservation=reserved)
        parked = self.lines.park(LOCK, "u@w/1", LONG, HOLDER, ticket)
        assert isinstance(parked, Granted)
        assert self.store.release([LOCK], "u@w/1")
        reservations.begin(reserved)
        assert reservations.end(reserved)

    def operating(self) -> None:
        assert isinstance(self.acquire("a/1"), Granted)
        self.lines.enlist(LOCK)
        assert self.park("v").place == 1
        overview = Overview(self.store.lock_server, "dislock")
        assert [lock.waiting for lock in overview.locks() if isinstance(lock, LockState)] == [1]
        assert self.lines.drop(LOCK, "v:0:0", '"a":"b"')
        assert self.lines.leave(LOCK, "v:0:0")
        assert self.lines.limit(LOCK, 0) is None
        assert self.lines.limit(LOCK, None) == 0
        self.lines.forget_aside(LOCK, "v:0:0")
        assert not StoreIdentity(self.store.lock_server, "dislock").whose("f" * 16)
        assert self.lines.claims(LOCK) == []
        assert "v:0:0" not in dict(self.lines.aside(LOCK))
        (shown,) = overview.lock(LOCK).holders
        assert self.store.free(LOCK, shown.owner, shown.token)

    def metrics(self) -> None:
        run_many = partial(self.store.lock_server.run_many, COUNT, within=LONG)
        counters = Counters("dislock", run_many)
        counters.add("acquisitions", {"task": "shop.export", "worker": "celery@w1"}, "at_once")
        counters.finish()
        runtime = Runtime(lambda: {"dislock_url": self.url})
        assert isinstance(self.acquire("a/1"), Granted)
        ticket = Ticket("x:0:0", "x@", marked=False, message=b"{}")
        assert isinstance(self.lines.park(LOCK, "x@w/1", LONG, HOLDER, ticket), Parked)
        values = Collector(SimpleNamespace(runtime=runtime)).read()
        assert values["celery_dislock_server_up"][()] == 1
        assert len(values["celery_dislock_acquisitions_total"]) == 1
        assert len(values["celery_dislock_parked"]) == 1
        assert self.lines.leave(LOCK, "x:0:0")
        assert self.store.release([LOCK], "a/1")

    def beating(self) -> None:
        (token,) = self.acquire("a/1").tokens
        now_us, hour = int(time.time() * 1e6), 3_600_000_000
        for script, *more in ((TICKS, "daily", 0), (TICK, "daily", 0), (TICK, "daily", "-")):
            given = [LOCK, beat_of(LOCK)], "a/1", token, now_us, hour, *more
            assert self.store.lock_server.run(script, *given) == [1]
        assert self.store.release([LOCK], "a/1")


def test_the_user_of_the_page_can_do_all(url, admin):
    """Locks, waiters, parked tasks and the sweep live their whole life on the documented rules."""
    server, _ = start_worker(url)
    assert SECRET not in server
    life = Life(url, admin)
    life.leases()
    life.waiting()
    life.parking()
    life.sending()
    life.metrics()
    life.beating()
    life.operating()
    life.store.close()
    assert missing(admin) == ([], [])


def missing(admin: redis.Redis) -> tuple[list[str], list[str]]:
    """Return the commands of the documentation and the scripts that the server has not run."""
    stats = admin.info("commandstats")
    ran = admin.script_exists(*(one.sha for one in SCRIPTS.values()))
    return (
        [name for name in COMMANDS if f"cmdstat_{name}" not in stats],
        [name for name, yes in zip(SCRIPTS, ran, strict=True) if not yes],
    )


def test_a_worker_tries_everything_and_leaves_nothing_behind(url, admin):
    """At its start it runs each script and each command; the second time the server knows them."""
    for _ in range(2):
        admin.config_resetstat()
        start_worker(url)
        assert missing(admin) == ([], [])
        assert admin.keys() == []


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "info"])
def test_a_worker_names_the_command_that_is_missing(limited, admin, command):
    """Without any one of the documented commands a worker does not start, and says which it is."""
    with pytest.raises(ForbiddenError, match=rf"(?i)\b{command}\b"):
        start_worker(limited(without(command)))
    wait_for(lambda: admin.keys() == [], "a server with nothing left behind")


def test_a_worker_starts_without_info(limited):
    """It says what it cannot know."""
    server, warnings = start_worker(limited(without("info")))
    assert server
    assert "INFO" in warnings[0]
    [(level, _)] = Report(limited(without("info"))).found("settings")
    assert level == "note"


def test_doctor_needs_no_more(limited):
    """It asks for nothing that the page does not allow; a missing right is told with its rule."""
    assert {level for level, _ in Report(limited(RULES)).all("rights")} == {"ok"}
    [(level, what)] = Report(limited(without("hset"))).found("rights")
    assert (level, "may not run HSET" in what) == ("serious", True)


@pytest.mark.parametrize("keys", ["~other:*", "~dislock:{*}", "~dislock:{*", ""])
def test_a_worker_names_the_keys_that_are_missing(limited, keys):
    """A pattern that leaves out some of the names is told, with the one that is needed."""
    with pytest.raises(ForbiddenError, match=re.escape("'dislock'; allow it on every server")):
        start_worker(limited(RULES.replace("~dislock:*", keys)))


def test_one_server_of_several_that_forbids_is_enough(redis_program, server, limited, tmp_path):
    """Of independent servers each is checked; one that is away keeps no worker from starting."""
    with RedisServer(tmp_path / "1") as first, RedisServer(tmp_path / "2") as second:
        store = Store([first.url, second.url, limited(without("hkeys"))])
        with pytest.raises(ForbiddenError, match="may not run HKEYS;"):
            check_scripts(store.lock_server, "dislock")
        store.close()
        store = Store([first.url, second.url, limited(RULES)])
        second.kill()
        check_scripts(store.lock_server, "dislock")
        store.close()

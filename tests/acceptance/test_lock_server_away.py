"""The lock server goes away under workers whose broker stays: tasks are put off, none is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from secrets import token_bytes
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import redis

from celery_dislock.exceptions import LockLostError, StoreError
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, wait_for
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.acceptance

TASKS = 3
CHANGED = uuid4().hex  # password
LOADED = 100  # keys
LOADING = 6  # seconds to load them
AWAY = "no task can take a lock"
BACK = "answers again"


class Outage:
    """Something that keeps the lock server from giving locks, and ends."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End what was begun for it."""


class Stopped(Outage):
    def begin(self) -> None:
        self.server.kill()

    def end(self) -> None:
        self.server.start()


class Paused(Outage):
    def begin(self) -> None:
        self.server.pause()

    def end(self) -> None:
        self.server.resume()


class Configured(Outage):
    """A server that answers every script with an error."""

    def command(self, *args: Any) -> None:
        with self.server.client() as client:
            client.execute_command(*args)


class OutOfMemory(Configured):
    def begin(self) -> None:
        self.command("CONFIG", "SET", "maxmemory", "1")

    def end(self) -> None:
        self.command("CONFIG", "SET", "maxmemory", "0")


class Demoted(Configured):
    """A master that was made a replica of one that nobody reaches."""

    def begin(self) -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            self.command("REPLICAOF", "127.0.0.1", nobody.getsockname()[1])

    def end(self) -> None:
        self.command("REPLICAOF", "NO", "ONE")


class Locked(Configured):
    """A server whose password was changed, which ends the connections of those with the old one."""

    def begin(self) -> None:
        self.command("CONFIG", "SET", "requirepass", CHANGED)
        with (
            redis.Redis.from_url(self.server.url, password=CHANGED) as client,
            contextlib.suppress(redis.ResponseError),
        ):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def end(self) -> None:
        with redis.Redis.from_url(self.server.url, password=CHANGED) as client:
            client.config_set("requirepass", "")


class Loading(Outage):
    """A server that has been started again, and reads its data before it serves anybody."""

    def begin(self) -> None:
        with self.server.client() as client:
            client.mset({f"data:{number}": token_bytes(4096) for number in range(LOADED)})
            client.save()
        self.server.stop()
        slowly = ["--key-load-delay", str(LOADING * 1_000_000 // LOADED)]
        slowly += ["--loading-process-events-interval-bytes", "1024"]
        self.slow = RedisServer(self.server.folder, port=self.server.port, args=slowly)
        self.starting = threading.Thread(target=self.slow.start)
        self.starting.start()
        wait_for("it is loading", self.is_loading)

    def is_loading(self) -> bool:
        with self.server.client() as client:
            try:
                return not client.ping()
            except redis.BusyLoadingError:
                return True
            except redis.ConnectionError:
                return False

    def end(self) -> None:
        self.starting.join()

    def close(self) -> None:
        self.starting.join()
        self.slow.stop()


OUTAGES = [Stopped, Paused, OutOfMemory, Demoted, Locked, Loading]


@pytest.fixture
def lock_server(redis_program: Path, tmp_path: Path) -> Iterator[RedisServer]:
    """The Redis of the locks, and of nothing else."""
    with RedisServer(tmp_path / "locks") as server:
        yield server


@pytest.fixture
def fleet(start_fleet, rabbitmq, lock_server):
    """A worker with RabbitMQ as its broker, which is not concerned by what befalls its locks."""
    # One process: each says for itself, and once, that the server is away.
    options = ("--concurrency", "1", "--dislock", "--dislock-url", lock_server.url)
    conf = {"dislock_transport_options": {"socket_timeout": 0.3}}
    return start_fleet("prefork", *options, broker_url=rabbitmq.url, conf=conf)


@pytest.mark.parametrize("kind", OUTAGES, ids=lambda kind: kind.__name__.lower())
def test_tasks_are_put_off_and_come_back(fleet, lock_server, scene, kind, request):
    """None runs unlocked, none is lost, and the log says once what is the matter."""
    fleet.send(scenarios.step, scene.key).get(timeout=LIMIT)
    outage = kind(lock_server)
    request.addfinalizer(outage.close)
    outage.begin()
    results = [fleet.send(scenarios.step, f"{scene.key}-{n}") for n in range(TASKS)]
    wait_for("all were put off", lambda: all(fleet.says(r.id, "put off") for r in results))
    assert not any(begun(scene, n) for n in range(TASKS))
    outage.end()
    for result in results:
        result.get(timeout=2 * LIMIT)
    assert all(len(begun(scene, n)) == 1 for n in range(TASKS))
    # The main process, which sweeps the lines, may have asked in vain as well.
    in_pool = [fleet.times_it_says("/ForkPoolWorker", words) for words in (AWAY, BACK)]
    assert in_pool == [1, 1]


def begun(scene, number):
    """What the executions of one of the keys have reported as begun."""
    events = scene.redis.lrange(scenarios.history_of(f"{scene.key}-{number}"), 0, -1)
    return [event for event in events if '"begin"' in event]


def test_a_running_task_keeps_its_lease_over_a_shorter_outage(fleet, lock_server, scene):
    """The watchdog tries again within the trust that is left, and the body never knows."""
    result = fleet.send(scenarios.hold_steadily, scene.key)
    scene.wait_for_report("begin")
    lock_server.pause()
    wait_for("a renewal has failed", lambda: fleet.says("Cannot renew"))
    lock_server.resume()
    wait_for("it is renewed again", lambda: fleet.says("are renewed again"))
    scene.open_gate()
    result.get(timeout=LIMIT)
    assert not fleet.says("is lost")


def test_a_running_task_is_told_of_a_longer_outage(fleet, lock_server, scene):
    """lock_on_lost="raise" reaches the body before anybody else can have the lock."""
    result = fleet.send(scenarios.stop_at_loss, scene.key)
    scene.wait_for_report("begin")
    lock_server.kill()
    with pytest.raises(LockLostError):
        result.get(timeout=LIMIT)
    lock_server.start()
    scene.open_gate()
    fleet.send(scenarios.step, scene.key).get(timeout=2 * LIMIT)


def test_a_body_that_has_ended_keeps_no_lock(fleet, lock_server, scene):
    """Its release fails and its process hangs: nobody renews the lock, and it is soon free."""
    result = fleet.send(scenarios.hang_after_it, scene.key)
    scene.wait_for_report("begin")
    with lock_server.client() as client:
        assert client.exists(scene.lock)
        lock_server.pause()
        scene.open_gate()
        wait_for("the release has failed", lambda: fleet.says("could not be released", result.id))
        lock_server.resume()
        wait_for("the lock is free", lambda: not client.exists(scene.lock))
    assert not fleet.says("The main process renews")
    scene.open_gate(result.id)
    result.get(timeout=LIMIT)


@pytest.mark.parametrize(("choice", "outcome"), [("raise", StoreError), ("run", None)])
def test_other_ways_may_be_chosen(start_fleet, rabbitmq, lock_server, scene, choice, outcome):
    """dislock_on_unavailable: "raise" fails the task, "run" runs it without a lock, and says so."""
    fleet = start_fleet(
        "prefork",
        *("--dislock", "--dislock-url", lock_server.url),
        broker_url=rabbitmq.url,
        conf={"dislock_on_unavailable": choice},
    )
    lock_server.kill()
    result = fleet.send(scenarios.step, scene.key)
    if outcome is None:
        result.get(timeout=LIMIT)
        assert scene.reported("begin")[0]["token"] is None
        assert fleet.says(result.id, "without its lock")
    else:
        with pytest.raises(outcome):
            result.get(timeout=LIMIT)
    lock_server.start()

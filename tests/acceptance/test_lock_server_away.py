"""The lock server goes away under workers whose broker stays: tasks are put off, none is lost."""

import contextlib
from uuid import uuid4

import pytest
import redis

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, wait_for
from tests.pace import REPLY
from tests.redis_server import RedisServer

pytestmark = pytest.mark.xdist_group("away")

TASKS = 3
CHANGED = uuid4().hex  # password
AWAY = "no task can take a lock"
BACK = "answers again"


class Stopped:
    """What keeps a lock server from giving locks, and ends."""

    def __init__(self, server):
        self.server = server

    def begin(self):
        self.server.kill()

    def end(self):
        self.server.start()


class Paused(Stopped):
    def begin(self):
        self.server.pause()

    def end(self):
        self.server.resume()


class Locked(Stopped):
    """A server whose password was changed, which ends the connections of those with the old one."""

    def begin(self):
        with self.server.client() as client:
            client.config_set("requirepass", CHANGED)
        with (
            redis.Redis.from_url(self.server.url, password=CHANGED) as client,
            contextlib.suppress(redis.ResponseError),
        ):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def end(self):
        with redis.Redis.from_url(self.server.url, password=CHANGED) as client:
            client.config_set("requirepass", "")


@pytest.fixture(scope="module")
def lock_server(redis_program, tmp_path_factory):
    """The Redis of the locks, and of nothing else."""
    with RedisServer(tmp_path_factory.mktemp("away") / "locks") as server:
        yield server


@pytest.fixture(scope="module")
def fleet(start_pair, lock_server):
    """A worker whose broker is not concerned by what befalls its locks."""
    # One process: each says for itself, and once, that the server is away.
    mode = f"--concurrency 1 --dislock --dislock-url {lock_server.url}"
    conf = {"dislock_transport_options": {"socket_timeout": REPLY}}
    with start_pair("prefork", "away", conf=conf, modes=[mode]) as fleet:
        yield fleet


@pytest.mark.parametrize("kind", [Stopped, Paused, Locked], ids=lambda kind: kind.__name__.lower())
def test_tasks_are_put_off_and_come_back(fleet, lock_server, scene, kind):
    """None runs unlocked, none is lost, and the log says once what is the matter."""

    def told():
        # The main process, which sweeps the lines, may have asked in vain as well.
        return [fleet.times_it_says("/ForkPoolWorker", words) for words in (AWAY, BACK)]

    fleet.send(scenarios.step, scene.key).get(timeout=LIMIT)
    before = told()
    outage = kind(lock_server)
    outage.begin()
    try:
        results = [fleet.send(scenarios.step, f"{scene.key}-{n}") for n in range(TASKS)]
        wait_for("all were put off", lambda: all(fleet.says(r.id, "put off") for r in results))
        assert not any(begun(scene, n) for n in range(TASKS))
    finally:
        outage.end()
    for result in results:
        result.get(timeout=2 * LIMIT)
    assert all(len(begun(scene, n)) == 1 for n in range(TASKS))
    assert told() == [number + 1 for number in before]


def begun(scene, number):
    """What the executions of one of the keys have reported as begun."""
    events = scene.redis.lrange(scenarios.history_of(f"{scene.key}-{number}"), 0, -1)
    return [event for event in events if '"begin"' in event]


def test_a_body_that_has_ended_keeps_no_lock(fleet, lock_server, scene):
    """Its release fails and its process hangs: nobody renews the lock, and it is soon free."""
    result = scene.begin(fleet, scenarios.hang_after_it)
    with lock_server.client() as client:
        assert client.exists(scene.lock)
        lock_server.pause()
        scene.open_gate()
        wait_for("the release has failed", lambda: fleet.says("could not be released", result.id))
        lock_server.resume()
        wait_for("the lock is free", lambda: not client.exists(scene.lock))
    assert not fleet.says("The main process renews", scene.key)
    scene.open_gate(result.id)
    result.get(timeout=LIMIT)

"""Tasks that were parked by one version of an app, and have their turn in another.

A turn that nobody claims lasts a minute here: what goes on sooner did not wait for its end.
"""

from __future__ import annotations

import contextlib
import json
import uuid

import pytest
from celery.exceptions import NotRegistered

from tests.acceptance import deployed_app, scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Scene, fleets, wait_for
from tests.redis_server import RedisServer
from tests.unit.deliveries import noted

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue
APP = deployed_app.__name__
BODIES = ['[["k"], {}, {"chain": n', "[1]", "5", "null", "[5, {}, {}]", '[["k"], 5, {}]', ""]


@pytest.fixture
def deploy(fleet, start_fleet, scene):
    """
    Park two tasks behind a holder, and let another version have the first.

    ``deploy(change, ...)`` returns the new fleet, the first and the second; the lock is free then.
    """

    def deploy(change=None, *options):
        queue = f"deployed-{scene.key}"
        holder = scene.hold(fleet)
        with consuming(fleet, queue):
            first = QUEUE.apply_async((), {"key": scene.key}, queue=queue)
            scene.wait_for_line(1)
        second = scene.park(fleet)
        env = {} if change is None else {"DEPLOYED": change}
        new = start_fleet("prefork", *options, queue=queue, app=APP, env=env)
        scene.open_gates(holder)
        return new, first, second

    return deploy


@contextlib.contextmanager
def consuming(fleet, queue):
    """Let the workers of a fleet take messages of one more queue."""
    about = {"destination": [f"{worker.name}@here" for worker in fleet.workers], "reply": True}
    scenarios.app.control.add_consumer(queue, timeout=LIMIT, limit=2, **about)
    yield
    scenarios.app.control.cancel_consumer(queue, timeout=LIMIT, limit=2, **about)


@pytest.fixture
def aside(scene):
    """Give the tickets that were set aside, and forget them at the end."""
    name = f"{scene.lock}:aside"
    yield lambda: scene.redis.hgetall(name)
    scene.redis.delete(name)


def assert_set_aside(scene, aside, new, first, second):
    """Check that the first was set aside and says why, and that the line goes on."""
    assert second.get(timeout=LIMIT)["held"] is True
    ticket = f"{first.id}:0:0"
    wait_for("it is set aside", lambda: ticket in aside())
    assert b'1 {"' in aside()[ticket].encode()  # with all that is needed to put it back
    wait_for("it failed", lambda: first.state == "FAILURE")
    wait_for("it is logged", lambda: new.says("ERROR", first.id, "is set aside", scene.lock))
    assert first.id not in scene.begun
    assert new.send(scenarios.step, scene.key).get(timeout=LIMIT)["held"]


@PREFORK
@pytest.mark.parametrize("change", ["gone", "another argument"])
def test_a_task_that_cannot_be_run_any_more_is_set_aside(scene, aside, deploy, change):
    """It leaves the line at its turn, with a FAILURE that says why; the next has its turn."""
    new, first, second = deploy(change)
    assert_set_aside(scene, aside, new, first, second)
    if change == "gone":
        assert isinstance(first.result, NotRegistered)
    else:
        assert "unexpected keyword argument" in str(first.result)


@fleets("prefork", "threads", "solo")
def test_a_damaged_body_is_set_aside(scene, aside, fleet):
    """Its envelope is intact: no worker ends with it, its task fails, and the next has its turn."""
    holder = scene.hold(fleet)
    damaged = [scene.park(fleet) for _ in BODIES]
    following = scene.park(fleet)
    tickets = f"{scene.lock}:tickets"
    for result, body in zip(damaged, BODIES, strict=True):
        ticket = f"{result.id}:0:0"
        record = scene.redis.hget(tickets, ticket)
        scene.redis.hset(tickets, ticket, record[: record.index("\n") + 1] + body)
    scene.open_gates(holder)
    for result in damaged:
        assert_set_aside(scene, aside, fleet, result, following)
    assert all(worker.running for worker in fleet.workers)


@PREFORK
def test_a_turn_is_honoured_whatever_the_strategy_is_now(scene, aside, deploy):
    """What was parked runs under its lock, though its task does not park any more."""
    _, first, second = deploy("skip")
    for result in (first, second):
        assert result.get(timeout=LIMIT)["held"] is True
    assert scene.begun[1:] == [first.id, second.id]
    scene.assert_exclusive()
    assert aside() == {}


@PREFORK
@pytest.mark.parametrize("change", ["no key", "--no-dislock"])
def test_a_task_that_takes_no_lock_any_more_leaves_its_line_and_runs(scene, aside, deploy, change):
    """It runs once and without a lock, a copy of it does not run, and the next has its turn."""
    new, first, second = deploy(change) if change == "no key" else deploy(None, change)
    assert second.get(timeout=LIMIT)["held"] is True
    wait_for("it has run", lambda: first.state == "SUCCESS")
    assert scene.begun.count(first.id) == 1
    headers = noted(ticket=[scene.lock, f"{first.id}:0:0"])
    new.send(QUEUE, scene.key, task_id=first.id, headers=headers)
    wait_for("the copy is dropped", lambda: new.says(first.id, "acknowledged unrun"))
    assert scene.begun.count(first.id) == 1
    assert aside() == {}


@pytest.fixture
def alone(tmp_path):
    """A server of this test alone, where no worker of others sweeps; give its scene and its env."""
    with (
        RedisServer(tmp_path / "redis") as server,
        server.client(decode_responses=True) as client,
    ):
        yield (
            Scene(uuid.uuid4().hex, client),
            {
                "broker_url": server.url,
                "conf": {"dislock_watchdog_timeout": scenarios.BRIEF},
                "env": {"SCENARIOS_URL": server.url, "SCENARIOS_BROKER_URL": server.url},
            },
        )


def state_of(scene, result):
    """What the result backend of a server alone says of a task."""
    meta = scene.redis.get(f"celery-task-meta-{result.id}")
    return json.loads(meta)["status"] if meta else None


def test_a_line_is_looked_after_by_workers_whose_tasks_do_not_park(start_fleet, alone):
    """All tasks that parked have another strategy now: what is in line runs all the same."""
    scene, options = alone
    old = start_fleet("prefork", **options)
    old.send(scenarios.hold_renewed, scene.key)
    scene.wait_for_report("begin")
    first = old.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    old.workers[0].kill()
    scene.open_gate()
    env = {**options.pop("env"), "DEPLOYED": "only skip"}
    new = start_fleet("prefork", queue=old.queue, app=APP, env=env, **options)
    scene.wait_for_report("end", id=first.id)
    wait_for("it has ended", lambda: state_of(scene, first) == "SUCCESS")
    new.workers[0].kill()  # while there is a broker


def test_what_workers_without_locks_drop_is_set_aside(start_fleet, alone):
    """They know nothing of lines and fail it each time: after some turns the next has its turn."""
    scene, options = alone
    ours = start_fleet("prefork", **options)
    others = start_fleet("prefork", app="tests.acceptance.foreign_app", **options)
    holder = ours.send(scenarios.hold_by_itself, scene.key)
    scene.wait_for_report("begin", id=holder.id)
    first = park_for(others, ours, scene)
    second = ours.send(QUEUE, scene.key)
    scene.wait_for_line(2)
    scene.open_gates(holder)
    scene.wait_for_report("end", id=second.id)
    assert scene.redis.hkeys(f"{scene.lock}:aside") == [f"{first.id}:0:0"]
    assert ours.says("ERROR", first.id, "is set aside", "its result is FAILURE")
    assert state_of(scene, first) == "FAILURE"
    for fleet in (ours, others):
        fleet.workers[0].kill()  # while there is a broker


def park_for(others, ours, scene):
    """Park a task whose turn is sent to the queue of others."""
    result = ours.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    tickets = f"{scene.lock}:tickets"
    record = scene.redis.hget(tickets, f"{result.id}:0:0")
    changed = record.replace(ours.queue, others.queue)
    assert len(changed) == len(record)  # as many bytes are counted
    scene.redis.hset(tickets, f"{result.id}:0:0", changed)
    return result

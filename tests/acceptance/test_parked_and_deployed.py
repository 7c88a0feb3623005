"""Tasks that were parked by one version of an app, and have their turn in another.

A turn that nobody claims lasts a minute here: what goes on sooner did not wait for its end.
"""

from __future__ import annotations

import contextlib

import pytest
from celery.exceptions import NotRegistered

from tests.acceptance import deployed_app, scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, fleets, wait_for

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

    ``deploy(change)`` returns the new fleet, the first and the second; the lock is free then.
    """

    def deploy(change):
        queue = f"deployed-{scene.key}"
        holder = scene.hold(fleet)
        with consuming(fleet, queue):
            first = QUEUE.apply_async((), {"key": scene.key}, queue=queue)
            scene.wait_for_line(1)
        second = scene.park(fleet)
        new = start_fleet("prefork", queue=queue, app=APP, env={"DEPLOYED": change})
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

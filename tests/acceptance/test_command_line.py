"""The command line of the worker: what locks, where, and what must not start."""

from __future__ import annotations

import socket

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, Scene, fleets, wait_for
from tests.leaks import SECRET

pytestmark = pytest.mark.acceptance


@pytest.fixture
def redis_url_of_nobody():
    """A URL at which no server listens: the port is taken, by a socket that does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://:{SECRET}@127.0.0.1:{taken.getsockname()[1]}/0"


def assert_locks(fleet, scene, task):
    """Send two at once: one runs, the other is skipped."""
    results = [fleet.send(task, scene.key) for _ in range(2)]
    wait_for("one is skipped", lambda: any(r.ready() for r in results))
    scene.open_gate()
    (skipped,) = (r for r in results if r.state == "REVOKED")
    with pytest.raises(TaskRevokedError):
        skipped.get(timeout=LIMIT)
    (other,) = (r for r in results if r is not skipped)
    assert other.get(timeout=LIMIT)["held"] is True


def assert_does_not_lock(fleet, scene, task):
    """Send two at once: both run, side by side, with no lock."""
    results = [fleet.send(task, scene.key) for _ in range(2)]
    scene.wait_for_report("begin", times=2)
    assert not scene.reported("end")
    assert scene.is_free
    scene.open_gate()
    for result in results:
        assert result.get(timeout=LIMIT) == {"held": None}


def test_with_no_dislock_nothing_locks(start_fleet, scene, redis_url_of_nobody):
    """--no-dislock runs every task without its lock, says so loudly, and needs no lock server."""
    fleet = start_fleet("prefork", "--no-dislock", "--dislock-url", redis_url_of_nobody)
    assert fleet.says("WARNING", "LOCKS ARE OFF")
    assert_does_not_lock(fleet, scene, scenarios.hold)


def test_without_the_option_a_singleton_task_locks_and_a_plain_one_does_not(start_fleet, scene):
    """A lock_key alone locks nothing in a worker that was not told to; the log has the server."""
    fleet = start_fleet("prefork")
    assert fleet.says("Locks are on", "redis://", "prefix: dislock")
    assert not fleet.says("LOCKS ARE OFF")
    assert_does_not_lock(fleet, scene, scenarios.plain_hold)
    assert_locks(fleet, Scene(f"{scene.key}-too", scene.redis), scenarios.hold)


@fleets("prefork", "threads")
def test_with_dislock_a_plain_task_locks(fleet, scene):
    """--dislock locks every task with a lock_key, whatever its base class, in every pool."""
    assert fleet.says("Locks are on", "redis://")
    assert_locks(fleet, scene, scenarios.plain_hold)


def test_the_lock_server_can_be_named(start_fleet, scene, server, elsewhere):
    """--dislock-url puts the locks into that database."""
    url = server.url.removesuffix("0") + "1"
    fleet = start_fleet("prefork", "--dislock-url", url)
    result = scene.begin(fleet)
    assert scene.is_free
    assert elsewhere.exists(scene.lock)
    scene.open_gate()
    assert result.get(timeout=LIMIT)["held"] is True
    assert not elsewhere.exists(scene.lock)

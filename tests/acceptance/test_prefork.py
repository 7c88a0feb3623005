"""What ends an execution from outside: time limits, revokes and deaths of pool processes.

The lock's expiry is longer than any wait here, so a lock that gets free was released.
"""

from __future__ import annotations

import os
import signal
import uuid

import pytest
from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery import states
from celery.exceptions import TaskRevokedError
from kombu.transport import redis as redis_transport

from example_project import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, wait_for

pytestmark = pytest.mark.acceptance


def assert_the_next_one_runs(fleet, scene, dead=()):
    """Run one more task of this key to its end, after the lock got free."""
    scene.wait_until_free()
    assert fleet.send(scenarios.step, scene.key).get(timeout=LIMIT) == {"held": True}
    scene.assert_exclusive(dead)


@PREFORK
def test_a_soft_time_limit_releases(fleet, scene):
    """SoftTimeLimitExceeded in a body frees its lock."""
    result = fleet.send(scenarios.hold, scene.key, soft_time_limit=1)
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=LIMIT)
    assert scene.wait_for_report("end")["error"] == "SoftTimeLimitExceeded"
    assert_the_next_one_runs(fleet, scene)


@PREFORK
def test_a_hard_time_limit_releases(fleet, scene):
    """The main process frees the lock of a child that it kills for its time limit."""
    result = fleet.send(scenarios.hold, scene.key, time_limit=1)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=LIMIT)
    pid = scene.wait_for_report("begin")["pid"]
    assert not scene.reported("end", error=None)
    assert_the_next_one_runs(fleet, scene, dead=[pid])


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
@PREFORK
def test_a_revoke_that_terminates_releases(fleet, scene, how):
    """revoke(terminate=True) frees the lock of the running task, whatever the signal."""
    result = fleet.send(scenarios.hold, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    result.revoke(terminate=True, signal=how)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=LIMIT)
    assert_the_next_one_runs(fleet, scene, dead=[pid])


@PREFORK
def test_a_revoke_without_terminate_lets_the_body_end(fleet, scene):
    """A plain revoke of a running task changes nothing: it holds its lock to its end."""
    result = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    assert len(scenarios.app.control.revoke(result.id, reply=True, timeout=LIMIT, limit=2)) == 2
    late = fleet.send(scenarios.hold, scene.key)
    with pytest.raises(TaskRevokedError, match=result.id):
        late.get(timeout=LIMIT)
    assert scene.lease.holder["id"] == result.id
    scene.open_gate()
    scene.wait_for_report("end", id=result.id, error=None)  # newer Celery tells the caller REVOKED
    scene.wait_until_free()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
@PREFORK
def test_the_death_of_a_child_releases(fleet, scene, how):
    """A pool process that is killed in a body, by whomever, does not keep the lock."""
    result = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    pid = scene.lease.holder["pid"]
    os.kill(pid, how)
    with pytest.raises((WorkerLostError, SystemExit)):
        result.get(timeout=LIMIT)
    assert_the_next_one_runs(fleet, scene, dead=[pid])


@PREFORK
def test_children_that_die_one_after_another_release_each_time(fleet, scene):
    """The release after a death works again and again, with the children that came later."""
    dead = []
    for _ in range(3):
        result = fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin", times=len(dead) + 1)
        dead.append(scene.lease.holder["pid"])
        os.kill(dead[-1], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            result.get(timeout=LIMIT)
        scene.wait_until_free()
    assert_the_next_one_runs(fleet, scene, dead)


@PREFORK
def test_a_death_frees_no_other_lock(fleet, scene):
    """A child that dies takes down its own lease alone; what holds the lock by then keeps it."""
    first = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    dead = scene.lease.holder["pid"]
    scene.lose_the_lock()
    second = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin", times=2)
    assert scene.lease.holder["id"] == second.id
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        first.get(timeout=LIMIT)
    late = fleet.send(scenarios.hold, scene.key)
    with pytest.raises(TaskRevokedError, match=second.id):
        late.get(timeout=LIMIT)
    scene.open_gate()
    assert second.get(timeout=LIMIT)["held"] is True


@PREFORK
def test_a_task_whose_child_died_runs_again(fleet, scene):
    """With acks_late and reject_on_worker_lost the message comes back, and finds the lock free."""
    result = fleet.send(scenarios.hold_and_survive, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    os.kill(pid, signal.SIGKILL)
    again = scene.wait_for_report("begin", times=2)
    assert again["id"] == result.id
    assert again["pid"] != pid
    scene.open_gate()
    assert result.get(timeout=LIMIT)["held"] is True
    assert_the_next_one_runs(fleet, scene, dead=[pid])


@PREFORK
def test_a_body_that_nothing_stops_is_killed_at_its_cap(fleet, scene):
    """lock_on_cap="terminate" ends the pool process where the body resists every exception."""
    result = fleet.send(scenarios.resist_everything, scene.key)
    with pytest.raises(WorkerLostError):
        result.get(timeout=LIMIT)
    pid = scene.wait_for_report("resisted")["pid"]
    assert_the_next_one_runs(fleet, scene, dead=[pid])


@pytest.mark.skipif(
    not hasattr(redis_transport.Channel, "unacked_restore_interval"),
    reason="this kombu looks for messages to redeliver every 100 s",
)
def test_a_redelivery_while_the_task_runs_is_put_off(start_fleet, scene):
    """A message that the broker delivers twice runs twice at most, and never beside itself."""
    fleet = start_fleet("prefork", env={"SCENARIOS_VISIBILITY_TIMEOUT": "2"})
    result = fleet.send(scenarios.hold_and_survive, scene.key)
    scene.wait_for_report("begin")
    wait_for("the redelivery is put off", lambda: fleet.says("put off", result.id))
    assert len(scene.reported("begin")) == 1
    scene.open_gate()
    assert result.get(timeout=LIMIT)["held"] is True
    scene.wait_for_report("end", times=2, id=result.id)
    scene.wait_until_free()
    scene.assert_exclusive()


@PREFORK
def test_a_revoked_id_of_a_waiting_task_keeps_no_lock(fleet, scene):
    """A task that is revoked while it waits for its time never locks."""
    task_id = str(uuid.uuid4())
    result = fleet.send(scenarios.hold, scene.key, task_id=task_id, countdown=1)
    wait_for("the task has come", lambda: fleet.says(task_id, "received"))
    result.revoke()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=LIMIT)
    assert scene.history == []
    assert result.state == states.REVOKED
    assert_the_next_one_runs(fleet, scene)


@PREFORK
def test_the_locks_of_a_worker_that_was_killed_end_with_their_expiry(fleet, start_fleet, scene):
    """Where nobody is left to release it, a lock lasts one timeout more, and not longer."""
    other = start_fleet("prefork")
    other.send(scenarios.hold_renewed, scene.key)
    dead = scene.wait_for_report("begin")["pid"]
    os.killpg(other.workers[0].process.pid, signal.SIGKILL)
    assert_the_next_one_runs(fleet, scene, dead=[dead])


@pytest.mark.parametrize("how", ["once", "twice"])
def test_a_cold_shutdown_releases(start_fleet, scene, how):
    """A worker that is told to stop at once leaves no lock behind."""
    fleet = start_fleet("prefork")
    (worker,) = fleet.workers
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    worker.process.send_signal(signal.SIGQUIT)
    worker.wait_until_it_says("Cold shutdown")
    if how == "twice":
        worker.process.send_signal(signal.SIGQUIT)
    worker.wait_until_it_ends()
    scene.wait_until_free()

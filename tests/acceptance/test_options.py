"""Options that keep the lock longer than the body, or let it go earlier; the same in every pool."""

from __future__ import annotations

import os
import signal

import pytest
from billiard.exceptions import WorkerLostError
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK

pytestmark = [pytest.mark.acceptance, PREFORK]


@pytest.mark.parametrize("task", [scenarios.fail_and_keep, scenarios.succeed_and_keep])
def test_a_lock_can_be_left_to_expire(fleet, scene, task):
    """release_on_failure=False and release_on_success=False leave the lease as it was."""
    fleet.send(task, scene.key).get(timeout=LIMIT, propagate=False)
    lease = scene.lease
    assert 0 < scene.redis.pttl(scene.lock) <= scenarios.LONG * 1000
    assert lease.extended_by == scenarios.LONG
    scene.assert_others_stay_out(fleet)
    scene.redis.delete(scene.lock)


def test_a_death_is_a_failure(fleet, scene):
    """release_on_failure=False leaves the lock of a child that was killed to expire."""
    result = scene.begin(fleet, scenarios.hold_or_keep)
    lease = scene.lease
    os.kill(lease.holder["pid"], signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        result.get(timeout=LIMIT)
    scene.assert_others_stay_out(fleet, result)
    assert scene.lease == lease
    scene.redis.delete(scene.lock)


def test_a_lock_can_be_held_longer_than_the_body_lasts(fleet, scene):
    """lock_at_least_for keeps others out after the body has ended, and nobody renews that."""
    fleet.send(scenarios.linger, scene.key).get(timeout=LIMIT)
    assert scene.lease.is_left_to_expire
    assert scene.lease.extended_by == scenarios.LONG
    scene.assert_others_stay_out(fleet)
    scene.redis.delete(scene.lock)


def test_a_fixed_expiry_is_never_renewed(fleet, scene):
    """lock_expire ends the lease under a body that lasts longer, which is told."""
    result = scene.begin(fleet, scenarios.hold_without_renewal)
    assert scene.lease.extended_by == scenarios.BRIEF
    scene.wait_until_free()
    assert not scene.reported("end")
    scene.open_gate()
    assert result.get(timeout=LIMIT) == {
        "held": False,
        "renewals": 0,
        "token": scene.reported("begin")[0]["token"],
    }


def test_shared_tasks_run_beside_each_other_and_an_exclusive_one_does_not(fleet, scene):
    """lock_mode="shared" keeps out the task that must be alone, and nobody else."""
    readers = [fleet.send(scenarios.hold_shared, scene.key) for _ in range(2)]
    scene.wait_for_report("begin", 2)
    scene.assert_others_stay_out(fleet)
    assert len(scene.leases) == len(readers)
    scene.open_gate()
    assert all(reader.get(timeout=LIMIT)["held"] for reader in readers)


def test_a_limit_admits_so_many_and_no_more(fleet, scene):
    """lock_limit=2 lets two run at a time, and the third is the one that is skipped."""
    admitted = [fleet.send(scenarios.hold_one_of_two, scene.key) for _ in range(2)]
    scene.wait_for_report("begin", 2)
    with pytest.raises(TaskRevokedError):
        fleet.send(scenarios.hold_one_of_two, scene.key).get(timeout=LIMIT)
    scene.open_gate()
    assert all(task.get(timeout=LIMIT)["held"] for task in admitted)

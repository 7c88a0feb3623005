"""Options that keep the lock longer than the body, or let it go earlier; the same in every pool."""

from __future__ import annotations

import pytest
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


def test_a_lock_can_be_held_longer_than_the_body_lasts(fleet, scene):
    """lock_at_least_for keeps others out after the body has ended, and nobody renews that."""
    fleet.send(scenarios.linger, scene.key).get(timeout=LIMIT)
    assert scene.lease.is_left_to_expire
    assert scene.lease.extended_by == scenarios.LONG
    scene.assert_others_stay_out(fleet)
    scene.redis.delete(scene.lock)


@pytest.mark.parametrize(
    ("name", "other"), [("hold_shared", "step"), ("hold_one_of_two", "hold_one_of_two")]
)
def test_some_run_beside_each_other_and_another_does_not(fleet, scene, name, other):
    """lock_mode="shared" keeps out who must be alone, and lock_limit=2 the third."""
    admitted = [fleet.send(getattr(scenarios, name), scene.key) for _ in range(2)]
    scene.wait_for_report("begin", 2)
    with pytest.raises(TaskRevokedError):
        fleet.send(getattr(scenarios, other), scene.key).get(timeout=LIMIT)
    assert len(scene.leases) == len(admitted)
    scene.open_gate()
    assert all(one.get(timeout=LIMIT)["held"] for one in admitted)

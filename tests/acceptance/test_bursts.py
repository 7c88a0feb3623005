"""How many tasks of a burst run: only those can be spared that meet at the lock."""

from __future__ import annotations

import pytest
from celery import states

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, wait_for

pytestmark = pytest.mark.acceptance

BURST = 5


def send_all(fleet, scene, task):
    """Send tasks while the one slot is taken, so that all are in the queue; then let it go on."""
    other = fleet.send(scenarios.hold_by_itself, f"{scene.key}-other")
    results = [fleet.send(task, scene.key) for _ in range(BURST)]
    scene.open_gate(other.id)
    return results


@pytest.mark.parametrize("name", ["step", "step_or_queue", "hold_newest"])
def test_one_slot_runs_all_of_a_burst(start_fleet, scene, name):
    """None meets another, whatever the strategy: the lock is taken at the start, not by sending."""
    scene.open_gate()
    results = send_all(start_fleet("solo"), scene, getattr(scenarios, name))
    for result in results:
        assert result.get(timeout=LIMIT)["held"] is True
    assert len(scene.reported("begin")) == BURST
    scene.assert_exclusive()


def test_a_lock_that_is_kept_for_a_while_makes_one_run_of_a_burst(start_fleet, scene):
    """With lock_at_least_for and "skip" one slot runs the first, and skips all others."""
    first, *others = send_all(start_fleet("solo"), scene, scenarios.linger)
    first.get(timeout=LIMIT)
    wait_for("all others end", lambda: all(other.ready() for other in others))
    assert {other.state for other in others} == {states.REVOKED}
    assert len(scene.reported("begin")) == 1
    scene.redis.delete(scene.lock)


def test_a_lock_that_is_kept_for_a_while_keeps_the_last_of_a_burst(start_fleet, scene):
    """With "replace" in a place for one, one slot runs the first, and parks the last."""
    fleet = start_fleet("solo", conf={"dislock_watchdog_timeout": 6})  # sweeps every 2 s
    first, *others, last = send_all(fleet, scene, scenarios.linger_newest)
    first.get(timeout=LIMIT)
    wait_for("all others end", lambda: all(other.ready() for other in others))
    assert {other.state for other in others} == {states.REVOKED}
    wait_for("the last is in line", lambda: last.state == "PARKED")
    scene.redis.delete(scene.lock)  # as if the time were over
    last.get(timeout=LIMIT)
    assert [event["id"] for event in scene.reported("begin")] == [first.id, last.id]
    scene.redis.delete(scene.lock)

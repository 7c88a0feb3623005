"""What is particular about pool processes: several deaths, bodies that resist, redelivery.

The lock's expiry is longer than any wait here, so a lock that gets free was released.
"""

from __future__ import annotations

import os
import signal

import pytest
from billiard.exceptions import WorkerLostError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, REDELIVERY_IS_SLOW, wait_for

pytestmark = pytest.mark.acceptance


def assert_the_next_one_runs(fleet, scene, dead):
    """Run one more task of this key to its end, after the lock got free."""
    scene.wait_until_free()
    assert fleet.send(scenarios.step, scene.key).get(timeout=LIMIT) == {"held": True}
    scene.assert_exclusive(dead)


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
def test_a_body_that_nothing_stops_is_killed_at_its_cap(fleet, scene):
    """lock_on_cap="terminate" ends the pool process where the body resists every exception."""
    result = fleet.send(scenarios.resist_everything, scene.key)
    with pytest.raises(WorkerLostError):
        result.get(timeout=LIMIT)
    pid = scene.wait_for_report("resisted")["pid"]
    assert_the_next_one_runs(fleet, scene, dead=[pid])


@pytest.mark.skipif(REDELIVERY_IS_SLOW, reason="this kombu redelivers every 100 s")
def test_a_redelivery_while_the_task_runs_is_put_off(start_fleet, scene):
    """A message that the broker delivers twice runs twice at most, and never beside itself."""
    fleet = start_fleet("prefork", env={"SCENARIOS_VISIBILITY_TIMEOUT": "2"})
    result = scene.begin(fleet, scenarios.hold_and_survive)
    wait_for("the redelivery is put off", lambda: fleet.says("put off", result.id))
    assert len(scene.reported("begin")) == 1
    scene.open_gate()
    assert result.get(timeout=LIMIT)["held"] is True
    scene.wait_for_report("end", times=2, id=result.id)
    scene.wait_until_free()
    scene.assert_exclusive()

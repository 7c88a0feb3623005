"""What is particular about pool processes: several deaths, bodies that resist, redelivery.

The lock's expiry is longer than any wait here, so a lock that gets free was released.
"""

from __future__ import annotations

import os
import signal

import pytest
from billiard.exceptions import WorkerLostError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK

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

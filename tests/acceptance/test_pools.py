"""What holds under every pool, mostly between two workers."""

import pytest
from billiard.exceptions import WorkerLostError
from celery import states

from celery_dislock import LockLostError
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, fleets, wait_for
from tests.acceptance.scenarios import BRIEF

CROWD = 20
TIMEOUTS_OUTLIVED = 2.0


def test_of_many_sends_of_a_key_one_runs(fleet, scene):
    """While one execution holds the lock, all others of its key are skipped, on either worker."""
    results = [fleet.send(scenarios.hold, scene.key) for _ in range(CROWD)]
    wait_for(
        "all but one are skipped",
        lambda: sum(r.state == states.REVOKED for r in results) == CROWD - 1,
    )
    scene.open_gate()
    (winner,) = (r for r in results if r.state != states.REVOKED)
    assert winner.get(timeout=LIMIT)["held"] is True
    assert [event["id"] for event in scene.reported("begin")] == [winner.id]


@pytest.mark.extra
def test_a_body_that_never_yields_keeps_its_lock(fleet, scene, tmp_path):
    """It computes for several timeouts, and in no pool is the lock free meanwhile."""
    gate = tmp_path / "gate"
    result = fleet.send(scenarios.compute, scene.key, str(gate))
    scene.wait_for_report("begin")
    token = scene.lease.token
    wait_for(
        "the lease is older than two timeouts",
        lambda: scene.lease.extended_by > (1 + TIMEOUTS_OUTLIVED) * BRIEF,
    )
    gate.touch()
    end = result.get(timeout=LIMIT)
    assert end["held"] is True
    assert end["renewals"] > TIMEOUTS_OUTLIVED
    assert end["token"] == token
    assert not fleet.says("is lost", scene.key)


@fleets("threads", "gevent")
def test_a_body_that_holds_the_gil_elsewhere_loses_its_lock(fleet, scene):
    """In a worker of one process nobody is left to renew: the body is told as soon as it asks."""
    result = fleet.send(scenarios.hold_the_gil, scene.key, 2 * BRIEF)
    scene.wait_for_report("begin")
    scene.wait_until_free()
    end = result.get(timeout=LIMIT)
    assert end["held"] is False
    wait_for("the log tells", lambda: fleet.says("is lost", scene.key, result.id))


@pytest.mark.parametrize("task", [scenarios.stop_at_cap, scenarios.resist_errors])
def test_at_the_cap_an_error_stops_the_body(fleet, scene, task):
    """With "raise" LockLostError does, and with "terminate" also one that goes on after errors."""
    result = fleet.send(task, scene.key)
    with pytest.raises(LockLostError) as lost:
        result.get(timeout=LIMIT)
    assert lost.value.key == scene.key
    assert scene.wait_for_report("end")["error"]
    assert not scene.reported("resisted")
    scene.wait_until_free()


@PREFORK
def test_a_body_that_nothing_stops_is_killed_at_its_cap(fleet, scene):
    """lock_on_cap="terminate" ends the pool process where the body resists every exception."""
    result = fleet.send(scenarios.resist_everything, scene.key)
    with pytest.raises(WorkerLostError):
        result.get(timeout=LIMIT)
    scene.wait_for_report("resisted")
    scene.wait_until_free()


@PREFORK
def test_a_body_that_holds_the_gil_is_killed_at_its_cap(fleet, scene):
    """Nothing in its process can do so: the main process does."""
    result = scene.begin(fleet, scenarios.hold_it_for_ever)
    with pytest.raises(WorkerLostError):
        result.get(timeout=LIMIT)
    scene.wait_until_free()


def test_a_lost_lease_interrupts_the_body(fleet, scene):
    """lock_on_lost="raise" raises LockLostError in the body, in a blocking call where it can."""
    # A thread is only interrupted between two bytecodes.
    task = scenarios.stop_at_loss if fleet.pool == "threads" else scenarios.sleep_until_loss
    result = fleet.send(task, scene.key)
    scene.wait_for_report("begin")
    scene.lose_the_lock()
    with pytest.raises(LockLostError) as lost:
        result.get(timeout=LIMIT)
    assert lost.value.key == scene.key
    assert scene.wait_for_report("end")["error"] == "LockLostError"
    after = fleet.send(scenarios.step, scene.key)
    assert after.get(timeout=LIMIT) == {"held": True}


@fleets("threads", "gevent", "eventlet", "solo")
def test_however_a_body_ends_its_lock_is_free(fleet, scene):
    """As test_ways_out.py shows of prefork: success, an error, a retry and Ignore."""
    assert fleet.send(scenarios.step_slowly, scene.key).get(timeout=LIMIT) == {"held": True}
    assert scene.is_free
    with pytest.raises(ValueError, match=scene.key):
        fleet.send(scenarios.fail, scene.key).get(timeout=LIMIT)
    assert scene.is_free
    assert fleet.send(scenarios.retry_once, scene.key).get(timeout=LIMIT) == 1
    fleet.send(scenarios.ignore, scene.key)
    scene.wait_for_report("end", error="Ignore")
    scene.wait_until_free()
    assert len(scene.reported("begin")) == 5
    scene.assert_exclusive()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_warm_shutdown_lets_the_body_end_under_its_lock(pool, start_fleet, scene):
    """A worker that is told to stop renews the lease until its last body has ended."""
    fleet = start_fleet(pool)
    result = scene.begin(fleet, scenarios.hold_renewed)
    fleet.worker.terminate()
    fleet.worker.wait_until_it_says("Warm shutdown")
    at_shutdown = scene.lease.extended_by
    wait_for(
        "the lease is renewed for two timeouts more",
        lambda: scene.lease.extended_by > at_shutdown + 2 * BRIEF,
    )
    assert fleet.worker.running
    scene.open_gate()
    assert fleet.worker.wait_until_it_ends() == 0
    assert result.get(timeout=LIMIT)["held"] is True
    assert scene.is_free

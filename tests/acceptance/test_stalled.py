"""Bodies and processes that stop the watchdog keep their locks all the same, up to the cap."""

import os
import signal
from contextlib import contextmanager, suppress

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Scene, wait_for
from tests.acceptance.scenarios import BRIEF

pytestmark = pytest.mark.extra
TIMEOUTS_OUTLIVED = 2.0
STALLED = "The main process renews the lock"


@contextmanager
def stopped(scene):
    """Stop the process that holds the lock, and let it go on at the end."""
    scene.wait_for_report("begin")
    pid = scene.lease.holder["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):  # the test has killed it
            os.kill(pid, signal.SIGCONT)


def wait_until_outlived(scene):
    """Wait until the lease is older than some timeouts."""
    wait_for(
        "the lease is older than two timeouts",
        lambda: scene.lease.extended_by > (1 + TIMEOUTS_OUTLIVED) * BRIEF,
    )


@PREFORK
@pytest.mark.parametrize("how", ["SIGSTOP", "the GIL"])
def test_a_process_that_cannot_renew_keeps_its_lock(fleet, scene, how):
    """No thread of it runs for some timeouts.  The main process renews, and the body goes on."""
    if how == "SIGSTOP":
        result = fleet.send(scenarios.hold_renewed, scene.key)
        with stopped(scene):
            wait_until_outlived(scene)
            scene.assert_others_stay_out(fleet)
        scene.open_gate()
    else:
        result = fleet.send(scenarios.hold_the_gil, scene.key, 4 * BRIEF)
        scene.wait_for_report("begin")
        wait_until_outlived(scene)
        scene.assert_others_stay_out(fleet)
    end = result.get(timeout=LIMIT)
    assert end["held"] is True
    assert end["token"] == scene.reported("begin")[0]["token"]
    assert end["renewals"] > TIMEOUTS_OUTLIVED
    assert fleet.times_it_says(STALLED, result.id) == 1
    assert not fleet.says("is lost", scene.key)
    scene.wait_until_free()
    scene.assert_exclusive()


@PREFORK
def test_a_stopped_process_that_is_killed_releases(fleet, scene):
    """The lease that the main process has renewed ends with the process, long before its expiry."""
    result = fleet.send(scenarios.hold_steadily, scene.key)
    with stopped(scene) as pid:
        os.kill(pid, signal.SIGKILL)
        scene.wait_until_free()
    wait_for("the release is logged", lambda: fleet.says("Released the lock", result.id))


def test_a_worker_that_is_stopped_loses_its_locks(start_fleet, scene):
    """All its processes are stopped, so nobody renews; the child is told when it goes on."""
    fleet = start_fleet("prefork", "--dislock")
    first = scene.begin(fleet, scenarios.hold_renewed)
    os.killpg(fleet.worker.process.pid, signal.SIGSTOP)
    try:
        scene.wait_until_free()
    finally:
        os.killpg(fleet.worker.process.pid, signal.SIGCONT)
    wait_for("the child is told", lambda: fleet.says("is lost", scene.key, first.id))
    scene.open_gate()
    assert first.get(timeout=LIMIT)["held"] is False


def test_a_warm_shutdown_goes_on_renewing(start_fleet, scene):
    """The worker waits for a stopped process, and keeps its lock meanwhile."""
    fleet = start_fleet("prefork", "--dislock")
    result = fleet.send(scenarios.hold_renewed, scene.key)
    with stopped(scene):
        fleet.worker.terminate()
        fleet.worker.wait_until_it_says("Warm shutdown")
        wait_until_outlived(scene)
    scene.open_gate()
    fleet.worker.wait_until_it_ends()
    assert result.get(timeout=LIMIT)["held"] is True
    assert not fleet.says("is lost", scene.key)


@PREFORK
def test_a_body_that_is_terminated_keeps_its_lock_while_it_holds_the_gil(fleet, scene):
    """It hears of the signal when it gives the GIL back; until then nobody else gets the lock."""
    result = fleet.send(scenarios.hold_the_gil, scene.key, 4 * BRIEF)
    pid = scene.wait_for_report("begin")["pid"]
    wait_for("it is known to run", fleet.leases)
    fleet.revoke(result.id, terminate=True, reply=True)
    wait_until_outlived(scene)
    scene.assert_others_stay_out(fleet, result)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=LIMIT)
    scene.wait_until_free()
    scene.assert_exclusive([pid])


@pytest.mark.parametrize("soft", [0.0, 4 * BRIEF], ids=["cold", "soft"])
def test_a_worker_that_ends_its_tasks_goes_on_renewing(start_fleet, scene, redis_client, soft):
    """It keeps the locks of bodies that hold the GIL or stand still, until those have ended."""
    fleet = start_fleet("prefork", "--dislock", conf={"worker_soft_shutdown_timeout": soft})
    beside = Scene(f"{scene.key}-beside", redis_client)
    fleet.send(scenarios.hold_renewed, scene.key)
    with stopped(scene) as stopped_pid:
        fleet.send(scenarios.hold_the_gil, beside.key, 4 * BRIEF)
        busy_pid = beside.wait_for_report("begin")["pid"]
        fleet.worker.process.send_signal(signal.SIGQUIT)
        fleet.worker.wait_until_it_says("Soft Shutdown" if soft else "Hitting Ctrl+C again")
        for one in (beside, scene):
            wait_until_outlived(one)
    fleet.worker.wait_until_it_ends()
    for one, pid in ((scene, stopped_pid), (beside, busy_pid)):
        assert not fleet.says("is lost", one.key)
        one.wait_until_free()
        one.assert_exclusive([pid])

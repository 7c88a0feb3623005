"""What an operator does to locks of real workers: free, terminate, and drop a parked task."""

import json
import os
import signal

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, wait_for
from tests.commands import Dislock
from tests.programs import wait_until_gone

QUEUE = scenarios.hold_or_queue


dislock = Dislock(scenarios.app)


def outcome(answer):
    (told,) = json.loads(answer.stdout)
    return told["outcome"]


def begun(scene, result):
    """Wait until the body of this task runs, and return its process."""
    return scene.wait_for_report("begin", id=result.id)["pid"]


@PREFORK
def test_the_holder_is_terminated_and_the_next_in_line_runs(fleet, scene):
    """The task is told to end, its lock is released by the worker, and no two ran at a time."""
    holder = fleet.send(QUEUE, scene.key)
    dead = begun(scene, holder)
    parked = fleet.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    answer = dislock("free", scene.key, "--terminate", "--yes", "--json")
    assert (answer.exit_code, outcome(answer)) == (0, "terminated")
    with pytest.raises(TaskRevokedError):
        holder.get(timeout=LIMIT)
    begun(scene, parked)
    assert scene.finish(parked)["held"]
    scene.assert_exclusive(dead=[dead])


@PREFORK
def test_a_holder_that_ignores_a_signal_is_sent_another(fleet, scene):
    """The command advises it; Celery has forgotten the task by then."""
    dead = begun(scene, fleet.send(scenarios.hold_and_ignore_sigterm, scene.key))
    asked = ["free", scene.key, "--terminate", "--yes", "--json", "--wait"]
    answer = dislock(*asked, "1")
    assert (answer.exit_code, outcome(answer)) == (1, "still runs")
    answer = dislock(*asked, "20", "--signal", "KILL")
    assert (answer.exit_code, outcome(answer)) == (0, "terminated")
    wait_until_gone(dead)


@pytest.fixture
def paused(scene):
    """A key that is paused; nothing is left of it."""
    assert dislock("pause", scene.key, "--note", "the bucket moves").exit_code == 0
    yield
    dislock("resume", scene.key)


@PREFORK
@pytest.mark.usefixtures("paused")
def test_a_paused_lock_lets_nobody_in_until_it_goes_on(fleet, scene):
    """Each task does what its strategy says; those in line run when the pause ends."""
    scene.open_gate()
    parked = fleet.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    skipped = fleet.send(scenarios.hold, scene.key)
    with pytest.raises(TaskRevokedError, match=r"an operator, who has paused it .*bucket moves"):
        skipped.get(timeout=LIMIT)
    put_off = fleet.send(scenarios.hold_or_retry, scene.key)
    wait_for("it is put off", lambda: fleet.says(put_off.id, "put off"))
    assert scene.reported("begin") == []
    assert dislock("resume", scene.key).exit_code == 0
    for result in (parked, put_off):
        assert result.get(timeout=LIMIT)["held"] is True
    scene.assert_exclusive()


@PREFORK
def test_a_worker_that_dies_hands_a_paused_lock_to_nobody(fleet, scene):
    """Its lease is released by its main process, and the line stays until the pause ends."""
    holder = fleet.send(scenarios.hold_and_survive, scene.key)
    dead = begun(scene, holder)
    parked = fleet.send(QUEUE, scene.key)
    scene.wait_for_line(1)
    dislock("pause", scene.key)
    os.kill(dead, signal.SIGKILL)
    wait_for("its lease has ended", lambda: not scene.leases)
    scene.open_gate()
    wait_for("its message came again", lambda: fleet.says(holder.id, "paused it"))
    assert len(scene.reported("begin")) == 1
    dislock("resume", scene.key)
    assert parked.get(timeout=LIMIT)["held"] is True
    scene.wait_until_free()

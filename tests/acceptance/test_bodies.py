"""Locks that the bodies of tasks take, in real workers: they are the task's."""

import os
import signal

import pytest
from celery.exceptions import WorkerLostError

from celery_dislock.worker.bodies import FOLDER
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, leases_of, wait_for

FORMS = ["one", "several", "shared", "semaphore", "async"]


@pytest.mark.extra
@PREFORK
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", [scenarios.hold_inside, scenarios.hold_both])
def test_it_is_free_soon_after_the_process_of_its_body_has_died(
    fleet, scene, redis_client, task, form
):
    """Under its task's name and id, whether that has a lock of its own or not."""
    result = fleet.send(task, scene.key, form)
    pid = scene.wait_for_report("begin")["pid"]
    told = scene.lease.holder
    assert (told["task"], told["id"], told["pid"]) == (task.name, result.id, pid)
    assert told["worker"] in {f"{worker.name}@here" for worker in fleet.workers}
    os.kill(pid, signal.SIGKILL)
    scene.wait_until_free()
    others = [f"dislock:{{{key}}}" for key in (f"{scene.key}-2", f"own:{scene.key}")]
    wait_for("all are free", lambda: not any(leases_of(redis_client, one) for one in others))
    with pytest.raises(WorkerLostError):
        result.get(timeout=LIMIT)
    words = f"Released lock '{scene.key}", result.id, f"process {pid} died"
    wait_for("the log says so", lambda: fleet.says(*words))


@PREFORK
def test_who_waits_in_a_body_that_dies_leaves_the_line(fleet, scene):
    """And is handed no lock that nobody would release."""
    holder = scene.hold(fleet)
    waiting = fleet.send(scenarios.hold_inside, scene.key)
    (owner,) = scene.wait_for_line(1)
    assert owner.startswith(f"{waiting.id}:~")
    os.kill(int(owner.split(":")[-2]), signal.SIGKILL)
    scene.wait_for_line(0)
    scene.open_gates(holder)
    assert holder.get(timeout=LIMIT)["held"] is True
    scene.wait_until_free()
    assert fleet.send(scenarios.hold, scene.key).get(timeout=LIMIT)["held"] is True


def test_it_is_freed_while_its_worker_shuts_down(start_fleet, scene, tmp_path):
    """A worker looks after its processes until the last body has ended, and leaves no notes."""
    fleet = start_fleet("prefork", env={"TMPDIR": str(tmp_path)})
    beside = fleet.send(scenarios.hold_inside, scene.key, "one", "another gate")
    pid = scene.wait_for_report("begin")["pid"]
    assert [pid] == [int(one.name) for one in tmp_path.glob("dislock-*/*")]
    waiting = fleet.send(scenarios.hold_both, scene.key)
    scene.wait_for_line(1)
    fleet.worker.terminate()
    fleet.worker.wait_until_it_says("Warm shutdown")
    os.kill(pid, signal.SIGKILL)
    scene.wait_for_report("begin", id=waiting.id)
    scene.open_gate()
    assert fleet.worker.wait_until_it_ends() == 0
    assert beside.id != waiting.id
    assert not list(tmp_path.glob("dislock-*"))


def test_the_folder_of_a_killed_worker_is_removed_by_the_next(start_fleet, tmp_path, monkeypatch):
    """In which its pool processes had noted what they held."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folders = []
    for _ in range(2):
        fleet = start_fleet("prefork", "--dislock")
        (folder,) = tmp_path.glob(f"{FOLDER}*")
        folders.append(folder)
        fleet.workers[0].kill()
    assert folders[0] != folders[1]
    assert folders[1].exists()

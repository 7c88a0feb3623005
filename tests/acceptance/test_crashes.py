"""A task that kills its process each time its message comes, in real workers."""

import os
import signal

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import chord, states
from celery.exceptions import ChordError

from celery_dislock import TaskCrashedError
from tests.acceptance import scenarios
from tests.acceptance.fleet import BROKERS, LIMIT, PREFORK, Scene, wait_for

OFTEN = 9  # runs in which a body kills its process: more than any limit


@BROKERS
def test_it_runs_as_often_as_its_limit_says_and_then_fails(fleet, scene, redis_client):
    """Its chord is told, its message is gone, and its lock is free for the next task."""
    beside, told = (Scene(f"{scene.key}-{name}", redis_client) for name in ("beside", "told"))
    header = [
        fleet.signature(scenarios.crash, scene.key, OFTEN),
        fleet.signature(scenarios.step, beside.key),
    ]
    body = scenarios.gather.s().set(queue=fleet.queue)
    result = fleet.start(chord(header, body.on_error(fleet.signature(scenarios.step, told.key))))
    wait_for("the chord has failed", lambda: result.state == states.FAILURE)
    assert isinstance(result.result, ChordError)
    assert "raised TaskCrashedError" in str(result.result)
    told.wait_for_report("end")
    runs = scene.reported("begin")
    (task_id,) = {run["id"] for run in runs}
    assert len({run["pid"] for run in runs}) == len(runs) == scenarios.CRASHES_MOST
    error = scenarios.app.AsyncResult(task_id).result
    assert isinstance(error, TaskCrashedError)
    assert (error.task, error.id, error.times, error.limit) == (
        *(scenarios.crash.name, task_id, scenarios.CRASHES_MOST, scenarios.CRASHES_MOST),
    )
    assert "SIGKILL" in error.reason
    following = fleet.send(scenarios.step, scene.key)
    assert following.get(timeout=LIMIT)["held"] is True
    assert fleet.times_it_says("received", task_id) == scenarios.CRASHES_MOST
    assert fleet.times_it_says("is not delivered again", task_id) == 1


@PREFORK
@pytest.mark.parametrize(
    ("task", "how"),
    [
        (scenarios.hold_or_queue, "killed"),
        (scenarios.hold_or_queue, "time limit"),
        (scenarios.hold_or_queue_late, "time limit"),
    ],
)
def test_no_copy_runs_of_one_that_was_ended_for_good(fleet, scene, redis_client, task, how):
    """It was parked, its process is gone, its result says FAILURE: a copy is acknowledged unrun."""
    holder = scene.hold(fleet)
    limit = {"time_limit": 2} if how == "time limit" else {}
    result = scene.park(fleet, task=task, **limit)
    scene.open_gate(holder.id)
    begun = scene.wait_for_report("begin", id=result.id)
    if how == "killed":
        os.kill(begun["pid"], signal.SIGKILL)
    with pytest.raises((TimeLimitExceeded, WorkerLostError)):
        result.get(timeout=LIMIT)
    mark = f"{scene.lock}:done:{result.id}:0:0"  # it follows the result
    wait_for("it has left a mark", lambda: redis_client.exists(mark))
    assert not redis_client.exists(f"{scene.lock}:running")
    scene.wait_until_free()
    fleet.send(task, scene.key, task_id=result.id)
    wait_for("it is a copy", lambda: fleet.says("acknowledged unrun", result.id))
    assert len(scene.reported("begin", id=result.id)) == 1

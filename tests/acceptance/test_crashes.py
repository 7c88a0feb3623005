"""A task that kills its process each time its message comes, in real workers."""

from celery import chord, states
from celery.exceptions import ChordError

from celery_dislock import TaskCrashedError
from tests.acceptance import scenarios
from tests.acceptance.fleet import BROKERS, LIMIT, Scene, wait_for

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

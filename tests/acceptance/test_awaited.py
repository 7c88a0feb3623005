"""Bodies that are coroutines, in workers of celery-aio-pool, which awaits them."""

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_dislock import LockLostError
from tests.acceptance import awaited_app as tasks
from tests.acceptance.fleet import LIMIT, wait_for
from tests.acceptance.scenarios import BRIEF

APP = "tests.acceptance.awaited_app"


@pytest.fixture(scope="module")
def pair(start_pair):
    """Two workers that await."""
    with start_pair("aio", "aio", app=APP) as pair:
        yield pair


@pytest.mark.extra
@pytest.mark.parametrize("task", [tasks.hold, tasks.hold_plain])
def test_one_at_a_time_runs_until_it_has_ended(pair, scene, task):
    """The lock is held while the coroutine waits; of a plain function beside it, too."""
    holder = scene.begin(pair, task)
    for each in (tasks.hold, tasks.hold_plain):
        with pytest.raises(TaskRevokedError, match=holder.id):
            pair.send(each, scene.key).get(timeout=LIMIT)
    assert scene.finish(holder)["held"]
    assert len(scene.begun) == 1
    assert scene.is_free


def test_the_lease_is_renewed_while_the_coroutine_runs(pair, scene):
    """It lasts for two timeouts, under the lease that it began with."""
    holder = scene.begin(pair, tasks.hold_renewed)
    wait_for("it has outlived two timeouts", lambda: scene.lease.extended_by > 3 * BRIEF)
    scene.open_gate()
    end = holder.get(timeout=LIMIT)
    assert end["held"] is True
    assert end["renewals"] > 2


@pytest.mark.parametrize("task", [tasks.stop_at_loss, tasks.terminate_at_loss, tasks.stop_at_cap])
def test_the_end_of_the_lease_cancels_the_coroutine(pair, scene, task):
    """The task ends with LockLostError, and the worker goes on."""
    result = scene.begin(pair, task)
    if task is not tasks.stop_at_cap:
        scene.lose_the_lock()
    with pytest.raises(LockLostError) as lost:
        result.get(timeout=LIMIT)
    assert lost.value.key == scene.key
    assert scene.wait_for_report("end")["error"] == "CancelledError"
    scene.wait_until_free()
    assert pair.send(tasks.end, scene.key, "well").get(timeout=LIMIT) == 0


@pytest.mark.parametrize("how", ["well", "fail", "retry", "ignore", "reject", "cancel"])
def test_however_a_coroutine_ends_its_lock_is_free(pair, scene, how):
    """And the task ends as it does in other pools; a cancellation is a failure.

    What becomes of a task that is rejected differs between releases of Celery.
    """
    result = pair.send(tasks.end, scene.key, how)
    scene.wait_for_report("end", times=2 if how == "retry" else 1)
    scene.wait_until_free()
    if how in {"well", "retry"}:
        assert result.get(timeout=LIMIT) == (how == "retry")
    elif how in {"fail", "cancel"}:
        wait_for("it has failed", lambda: result.state == states.FAILURE)
    scene.assert_exclusive()


def test_a_warm_shutdown_waits_for_the_coroutine(start_fleet, scene):
    """Its lease is renewed until it has ended."""
    fleet = start_fleet("aio", app=APP, queue=scene.key)
    result = scene.begin(fleet, tasks.hold_renewed)
    fleet.worker.terminate()
    fleet.worker.wait_until_it_says("Warm shutdown")
    wait_for("it has outlived two timeouts", lambda: scene.lease.extended_by > 3 * BRIEF)
    scene.open_gate()
    assert fleet.worker.wait_until_it_ends() == 0
    assert result.get(timeout=LIMIT)["held"] is True
    assert scene.is_free


@pytest.mark.parametrize("task", [tasks.hold_or_wait, tasks.hold_or_retry, tasks.hold_or_queue])
def test_a_task_that_comes_second_runs_later(pair, scene, task):
    """It waits in its slot, comes again, or is parked, as in other pools."""
    first = scene.begin(pair, task)
    second = pair.send(task, scene.key)
    if task is tasks.hold_or_retry:
        wait_for("it is put off", lambda: pair.says(second.id, "put off"))
    else:
        scene.wait_for_line(1)
    scene.open_gate()
    assert [each.get(timeout=LIMIT)["held"] for each in (first, second)] == [True, True]
    assert scene.begun == [first.id, second.id]
    scene.assert_exclusive()


def test_its_lock_is_reentrant_in_the_body_alone(pair, scene):
    """async_lock() of the same key gives the task's lease, and refuses other coroutines."""
    result = pair.send(tasks.again, scene.key)
    assert result.get(timeout=LIMIT) == {"same": True, "refused": result.id, "lost": False}


def test_a_worker_of_another_pool_does_not_start(start_fleet):
    """It says which task it is, and what to do; a process that sends needs no pool."""
    (worker,) = start_fleet("solo", app=APP, ready=False).workers
    assert worker.wait_until_it_ends() != 0
    assert f"{APP}.again: worker_pool='celery.concurrency.solo:TaskPool'" in worker.log
    assert "asyncio.run()" in worker.log

"""What the task does that comes second, and what becomes of the same task twice."""

from __future__ import annotations

import json
import os
import signal
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import states
from celery.canvas import StampingVisitor
from celery.exceptions import Reject, TaskRevokedError
from celery.result import AsyncResult
from kombu import Connection, Queue

from celery_dislock import LockHeldError
from tests.acceptance import scenarios
from tests.acceptance.fleet import (
    BROKERS,
    CONCURRENCY,
    LIMIT,
    PREFORK,
    REDELIVERY_IS_SLOW,
    wait_for,
)
from tests.acceptance.scenarios import BRIEF, LONG

pytestmark = pytest.mark.acceptance

SEVERAL_SLOTS = pytest.mark.parametrize("fleet", ["prefork", "threads", "gevent"], indirect=True)


def wait_in_line(scene, many=1):
    """Wait until so many stand in line; return the first of them."""
    line = f"{scene.lock}:line"
    wait_for(f"{many} in line for {scene.key}", lambda: scene.redis.zcard(line) == many)
    return scene.redis.zrange(line, 0, 0)[0]


def wait_until_nobody_waits(scene):
    wait_for("the line is empty", lambda: not scene.redis.exists(f"{scene.lock}:line"))


class Stamped(StampingVisitor):
    def on_signature(self, sig, **headers):
        return {"tenant": "seven"}


# retry


@SEVERAL_SLOTS
def test_a_retry_comes_until_the_lock_is_free(fleet, scene):
    """The caller sees RETRY with the holder in the result, and then what the body returns."""
    holder = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    second = fleet.send(scenarios.hold_or_retry, scene.key)
    wait_for("the second is put off", lambda: second.state == states.RETRY)
    reason = AsyncResult(second.id, app=second.app).result
    assert isinstance(reason, LockHeldError)
    assert (reason.key, holder.id in reason.holder) == (scene.key, True)
    scene.open_gate()
    assert second.get(timeout=LIMIT)["held"] is True
    assert len(scene.reported("begin", id=second.id)) == 1
    scene.assert_exclusive()


@BROKERS
def test_a_retry_loses_nothing_of_its_message(fleet, scene):
    """Id, arguments, headers, stamps, priority, expiry, links and retries are as they were."""
    link = fleet.signature(scenarios.step, f"{scene.key}-link")
    options = {
        "priority": 3,
        "headers": {"tenant": "7"},
        "expires": datetime.now(timezone.utc) + timedelta(hours=1),
        "shadow": "a shadow",
        "root_id": str(uuid.uuid4()),
        "parent_id": str(uuid.uuid4()),
        "link": link,
        "retries": 1,
    }

    def send():
        signature = scenarios.tell_or_retry.s(scene.key, extra="kept").set(queue=fleet.queue)
        signature.stamp(Stamped())
        with Connection(fleet.broker_url or scenarios.app.conf.broker_url) as connection:
            return signature.apply_async(connection=connection, **options)

    plain = send()
    expected = plain.get(timeout=LIMIT)
    assert (expected["priority"], expected["retries"], expected["extra"]) == (3, 1, "kept")
    assert expected["stamps"]["tenant"] == "seven"
    linked = [child.get(timeout=LIMIT) for child in plain.children]

    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin", times=2)
    second = send()
    wait_for("the second is put off", lambda: second.state == states.RETRY)
    scene.open_gate()
    told = second.get(timeout=LIMIT)
    assert told == {**expected, "id": second.id}
    children = wait_for("the link is called", lambda: second.children)
    assert [child.get(timeout=LIMIT) for child in children] == linked


@PREFORK
def test_a_retry_gives_up_in_the_end(fleet, scene):
    """After lock_retry_for the task fails with LockHeldError."""
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    second = fleet.send(scenarios.hold_or_retry_briefly, scene.key)
    with pytest.raises(LockHeldError):
        second.get(timeout=LIMIT)
    assert second.state == states.FAILURE
    assert fleet.says("put off", second.id)
    scene.open_gate()


# wait


@SEVERAL_SLOTS
def test_those_who_wait_come_in_their_order(fleet, scene):
    """Each waiter is woken when its turn has come: first come, first served."""
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    waiting = []
    for number in (1, 2):  # one worker may get all messages, and has three slots
        waiting.append(fleet.send(scenarios.hold_or_wait, scene.key))
        wait_in_line(scene, number)
    scene.open_gate()
    for result in waiting:
        assert result.get(timeout=LIMIT)["held"] is True
    began = [event["id"] for event in scene.reported("begin")]
    assert began[1:] == [result.id for result in waiting]
    scene.assert_exclusive()


@PREFORK
def test_those_who_wait_leave_a_slot_to_a_parked_task(fleet, scene):
    """They fill all slots while it has its turn, and would wait for it in vain."""
    holder = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    parked = fleet.send(scenarios.hold_or_queue, scene.key)
    wait_in_line(scene)
    slots = len(fleet.workers) * CONCURRENCY["prefork"]
    waiting = [fleet.send(scenarios.hold_or_wait, scene.key) for _ in range(2 * slots)]
    wait_in_line(scene, 1 + slots - 1)  # one slot has the holder
    scene.open_gate()
    for result in (holder, parked, *waiting):
        assert result.get(timeout=LONG / 2)["held"] is True
    began = [event["id"] for event in scene.reported("begin")]
    assert began[:2] == [holder.id, parked.id]
    scene.assert_exclusive()


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_waiting_holds_up_nothing_in_its_process(pool, start_fleet, scene):
    """Beside a waiter, the watchdog renews and other tasks run, in one and the same process."""
    fleet = start_fleet(pool)
    fleet.send(scenarios.hold_renewed, scene.key)
    scene.wait_for_report("begin")
    second = fleet.send(scenarios.hold_or_wait, scene.key)
    wait_in_line(scene)
    wait_for(
        "the lease is renewed for two timeouts more",
        lambda before=scene.lease.extended_by: scene.lease.extended_by > before + 2 * BRIEF,
    )
    other = fleet.send(scenarios.step, f"{scene.key}-other")
    assert other.get(timeout=LIMIT) == {"held": True}
    assert not scene.reported("begin", id=second.id)
    scene.open_gate()
    assert second.get(timeout=LIMIT)["held"] is True
    scene.assert_exclusive()


@PREFORK
def test_who_waits_in_vain_fails(fleet, scene):
    """After lock_wait_timeout the task fails with LockHeldError and stands in line no more."""
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    with pytest.raises(LockHeldError):
        fleet.send(scenarios.hold_or_wait_briefly, scene.key).get(timeout=LIMIT)
    wait_until_nobody_waits(scene)
    scene.open_gate()


@BROKERS
@pytest.mark.parametrize("how", ["soft time limit", "SIGTERM", "SIGKILL", "its child is killed"])
def test_a_waiter_that_is_stopped_leaves_no_ghost(fleet, scene, how):
    """What ends a waiting task takes it out of the line, and the next in line gets the lock."""
    holder = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    limit = {"soft_time_limit": 2} if how == "soft time limit" else {}
    second = fleet.send(scenarios.hold_or_wait, scene.key, **limit)
    owner = wait_in_line(scene)
    if how == "its child is killed":
        os.kill(int(owner.rpartition(":")[2].partition("/")[0]), signal.SIGKILL)
    elif how != "soft time limit":
        fleet.revoke(second.id, terminate=True, signal=how)
    wait_until_nobody_waits(scene)
    wait_for("the caller is told", second.ready)
    if how == "soft time limit":
        assert isinstance(second.result, SoftTimeLimitExceeded)
    third = fleet.send(scenarios.hold_or_wait, scene.key)
    wait_in_line(scene)
    scene.open_gate()
    assert holder.get(timeout=LIMIT)["held"] is True
    assert third.get(timeout=LIMIT)["held"] is True
    assert not scene.reported("begin", id=second.id)
    assert scene.is_free


@BROKERS
def test_a_warm_shutdown_lets_a_waiter_get_its_turn(fleet, start_fleet, scene):
    """A worker that is told to stop ends when those that wait in it have had the lock."""
    waiting = start_fleet("prefork", broker_url=fleet.broker_url)
    (worker,) = waiting.workers
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    second = waiting.send(scenarios.hold_or_wait, scene.key)
    wait_in_line(scene)
    worker.terminate()
    worker.wait_until_it_says("Warm shutdown")
    scene.open_gate()
    assert worker.wait_until_it_ends() == 0
    assert second.get(timeout=LIMIT)["held"] is True


@BROKERS
def test_death_of_the_worker_in_the_middle_of_a_wait(fleet, start_fleet, scene):
    """With acks_late another worker waits in its stead; the dead one's place costs seconds."""
    if fleet.broker_url is None and REDELIVERY_IS_SLOW:
        pytest.skip("this kombu redelivers every 100 s")
    own = {"broker_url": fleet.broker_url, "queue": scene.key}
    own["env"] = {"SCENARIOS_VISIBILITY_TIMEOUT": "2"}
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    dying = start_fleet("prefork", **own)
    second = dying.send(scenarios.hold_or_wait_late, scene.key)
    dead = wait_in_line(scene)
    dying.workers[0].kill()
    start_fleet("prefork", **own)
    assert wait_in_line(scene, 2) == dead
    scene.open_gate()
    assert second.get(timeout=LIMIT)["held"] is True
    assert len(scene.reported("begin", id=second.id)) == 1
    scene.assert_exclusive()


# reject, and what a callable says


@PREFORK
def test_a_rejected_task_fails_for_its_caller(fleet, scene):
    """The message is the broker's to bury; the caller's get() ends with the holder in the error."""
    holder = fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    second = fleet.send(scenarios.hold_or_reject, scene.key)
    with pytest.raises(Reject, match=holder.id):
        second.get(timeout=LIMIT)
    assert second.state == states.FAILURE
    scene.open_gate()


def test_a_rejected_message_is_buried_by_the_broker(rabbitmq, rabbitmq_pair, scene):
    """RabbitMQ moves it to the dead-letter exchange of its queue."""
    fleet = rabbitmq_pair
    policy = {"dead-letter-exchange": "", "dead-letter-routing-key": "buried"}
    words = ("bury", f"^{fleet.queue}$", json.dumps(policy), "--apply-to", "queues")
    rabbitmq._control("set_policy", *words)
    try:
        fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin")
        with Connection(rabbitmq.url) as connection:
            buried = Queue("buried", routing_key="buried")(connection.default_channel)
            buried.queue_declare()
            second = fleet.send(scenarios.hold_or_reject, scene.key)
            message = wait_for("a message is buried", lambda: buried.get(no_ack=True))
        assert message.headers["id"] == second.id
        wait_for("the caller is told", lambda: second.state == states.FAILURE)
    finally:
        rabbitmq._control("clear_policy", "bury")
    scene.open_gate()


@PREFORK
@pytest.mark.parametrize(
    ("answer", "state", "error"),
    [
        ("", states.REVOKED, TaskRevokedError),
        ("skip", states.REVOKED, TaskRevokedError),
        ("Ignore", states.REVOKED, TaskRevokedError),
        ("raise", states.FAILURE, LockHeldError),
        ("Reject", states.FAILURE, Reject),
        ("a bug", states.FAILURE, ZeroDivisionError),
    ],
)
def test_a_callable_can_end_the_task(fleet, scene, answer, state, error):
    """Whatever a callable does, the caller is told; None is a skip, and a bug is a failure."""
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    second = fleet.send(scenarios.hold_or_decide, scene.key, headers={"answer": answer})
    with pytest.raises(error):
        second.get(timeout=LIMIT)
    assert second.state == state
    assert not scene.reported("begin", id=second.id)
    scene.open_gate()


@PREFORK
@pytest.mark.parametrize("answer", ["retry", "Retry", "task.retry", "wait"])
def test_a_callable_can_let_the_task_run_later(fleet, scene, answer):
    """A retry, by name or by Celery's predicate, and a wait end in the body's result."""
    fleet.send(scenarios.hold, scene.key)
    scene.wait_for_report("begin")
    second = fleet.send(scenarios.hold_or_decide, scene.key, headers={"answer": answer})
    if answer == "wait":
        wait_in_line(scene)
    else:
        wait_for("the task is to come again", lambda: second.state == states.RETRY)
    scene.open_gate()
    assert second.get(timeout=LIMIT)["held"] is True
    scene.assert_exclusive()


# The same task twice


@PREFORK
@pytest.mark.parametrize(
    "name",
    [
        "hold",
        "hold_or_raise",
        "hold_or_retry",
        "hold_or_wait",
        "hold_or_reject",
        "hold_or_decide",
        "hold_shared",
        "hold_one_of_two",
    ],
)
def test_a_copy_is_put_off_and_never_runs_beside_the_task(fleet, scene, name):
    """Whatever the strategy and the kind of lock: both run, one after the other."""
    task = getattr(scenarios, name)
    task_id = str(uuid.uuid4())
    result = fleet.send(task, scene.key, task_id=task_id)
    scene.wait_for_report("begin")
    fleet.send(task, scene.key, task_id=task_id)
    wait_for("the copy is put off", lambda: fleet.says("put off", task_id))
    assert result.state == states.PENDING
    scene.open_gate()
    assert result.get(timeout=LIMIT)["held"] is True
    scene.wait_for_report("end", times=2, id=task_id, error=None)
    scene.assert_exclusive()


@PREFORK
def test_a_copy_of_a_task_that_has_succeeded_is_acknowledged_unrun(fleet, scene):
    """With lock_dedupe_redelivered the work is done once, and its result stays."""
    task_id = str(uuid.uuid4())
    for _ in range(2):
        result = fleet.send(scenarios.hold_once, scene.key, task_id=task_id)
    wait_for("the copy is put off", lambda: fleet.says("put off", task_id))
    scene.open_gate()
    assert result.get(timeout=LIMIT)["held"] is True
    wait_for("the copy is seen", lambda: fleet.says("acknowledged unrun", task_id))
    assert len(scene.reported("begin")) == 1
    assert AsyncResult(task_id, app=result.app).state == states.SUCCESS
    another = fleet.send(scenarios.hold_once, scene.key)
    assert another.get(timeout=LIMIT)["held"] is True
    for one in (task_id, another.id):
        mark = f"{scene.lock}:mark:{one}"
        wait_for("the mark says done", lambda mark=mark: scene.redis.get(mark)[:4] == "done")
        assert 0 < scene.redis.pttl(mark) <= LONG * 1000
        scene.redis.delete(mark)


# A task that goes on in another execution


@SEVERAL_SLOTS
def test_a_retry_at_once_does_not_meet_its_own_lock(fleet, scene):
    """The retry is published when the body has ended and its lock is free, not before."""
    result = fleet.send(scenarios.retry_and_linger, scene.key)
    assert result.get(timeout=LIMIT) == 1
    assert [event["what"] for event in scene.history] == ["begin", "end"] * 2
    assert not fleet.says("put off", result.id)
    scene.assert_exclusive()


@SEVERAL_SLOTS
def test_what_replaces_a_task_does_not_meet_its_lock(fleet, scene):
    """A replacement of the same key, alone or as the first of a chain, finds the lock free."""
    raising = scenarios.hold_or_raise
    scene.open_gate()
    for other in (
        fleet.signature(raising, scene.key),
        fleet.signature(raising, scene.key) | fleet.signature(raising, scene.key),
    ):
        result = fleet.send(scenarios.replace_and_linger, scene.key, other)
        assert result.get(timeout=LIMIT)["held"] is True
        assert not fleet.says("put off", result.id)
    scene.assert_exclusive()


@pytest.mark.parametrize("fleet", ["prefork", "rabbitmq", "threads", "gevent"], indirect=True)
def test_a_lock_can_be_held_over_the_countdown(fleet, scene):
    """With lock_hold_on_retry nobody gets in between, and each attempt has a token of its own."""
    result = fleet.send(scenarios.retry_until_open, scene.key)
    scene.wait_for_report("end", times=1)
    waiting = fleet.send(scenarios.hold_or_wait, scene.key)
    wait_in_line(scene)
    assert scene.lease.extended_by > LONG
    scene.wait_for_report("begin", times=3)
    with pytest.raises(TaskRevokedError, match=result.id):
        fleet.send(scenarios.step, scene.key).get(timeout=LIMIT)
    scene.open_gate()
    assert result.get(timeout=LIMIT) >= 2
    assert waiting.get(timeout=LIMIT)["held"] is True
    order = [event["id"] for event in scene.reported("begin")]
    assert order == [result.id] * (len(order) - 1) + [waiting.id]
    assert not fleet.says("put off", result.id)
    assert scene.is_free
    scene.assert_exclusive()

"""What the task does that comes second, and what becomes of the same task twice."""

import json
import os
import signal

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import states
from kombu import Connection, Queue

from tests.acceptance import scenarios
from tests.acceptance.fleet import (
    BROKERS,
    LIMIT,
    PREFORK,
    REDELIVERY_IS_SLOW,
    fleets,
    value_of,
    wait_for,
)
from tests.acceptance.scenarios import LONG

# wait


@PREFORK
@pytest.mark.parametrize("how", ["soft time limit", "SIGTERM", "SIGKILL", "its child is killed"])
def test_a_waiter_that_is_stopped_leaves_no_ghost(fleet, scene, how):
    """What ends a waiting task takes it out of the line, and the next in line gets the lock."""
    holder = scene.begin(fleet)
    limit = {"soft_time_limit": 2} if how == "soft time limit" else {}
    second = fleet.send(scenarios.hold_or_wait, scene.key, **limit)
    (owner,) = scene.wait_for_line(1)
    if how == "its child is killed":
        os.kill(int(owner.rpartition(":")[2].partition("/")[0]), signal.SIGKILL)
    elif how != "soft time limit":
        fleet.revoke(second.id, terminate=True, signal=how)
    scene.wait_for_line(0)
    wait_for("the caller is told", second.ready)
    if how == "soft time limit":
        assert isinstance(second.result, SoftTimeLimitExceeded)
    third = fleet.send(scenarios.hold_or_wait, scene.key)
    scene.wait_for_line(1)
    assert scene.finish(holder)["held"]
    assert third.get(timeout=LIMIT)["held"] is True
    assert not scene.reported("begin", id=second.id)
    assert scene.is_free


@PREFORK
def test_a_warm_shutdown_lets_a_waiter_get_its_turn(fleet, start_fleet, scene):
    """A worker that is told to stop ends when those that wait in it have had the lock."""
    waiting = start_fleet("prefork", broker_url=fleet.broker_url)
    scene.begin(fleet)
    second = waiting.send(scenarios.hold_or_wait, scene.key)
    scene.wait_for_line(1)
    waiting.worker.terminate()
    waiting.worker.wait_until_it_says("Warm shutdown")
    scene.open_gate()
    assert waiting.worker.wait_until_it_ends() == 0
    assert second.get(timeout=LIMIT)["held"] is True


@pytest.mark.extra
@BROKERS
def test_death_of_the_worker_in_the_middle_of_a_wait(fleet, start_fleet, scene):
    """With acks_late another worker waits in its stead; the dead one's place costs seconds."""
    if fleet.broker_url is None and REDELIVERY_IS_SLOW:
        pytest.skip("this kombu redelivers every 100 s")
    own = {"broker_url": fleet.broker_url, "queue": scene.key}
    own["env"] = {"SCENARIOS_VISIBILITY_TIMEOUT": "2"}
    scene.begin(fleet)
    dying = start_fleet("prefork", **own)
    second = dying.send(scenarios.hold_or_wait_late, scene.key)
    (dead,) = scene.wait_for_line(1)
    dying.workers[0].kill()
    start_fleet("prefork", **own)
    assert scene.wait_for_line(2)[0] == dead
    scene.open_gate()
    assert value_of(second)["held"] is True
    scene.assert_exclusive()


# reject, and what a callable says


def test_a_rejected_message_is_buried_by_the_broker(rabbitmq, rabbitmq_pair, scene):
    """RabbitMQ moves it to the dead-letter exchange of its queue."""
    fleet = rabbitmq_pair
    policy = {"dead-letter-exchange": "", "dead-letter-routing-key": "buried"}
    words = ("bury", f"^{fleet.queue}$", json.dumps(policy), "--apply-to", "queues")
    rabbitmq.control("set_policy", *words)
    try:
        scene.begin(fleet)
        with Connection(rabbitmq.url) as connection:
            buried = Queue("buried", routing_key="buried")(connection.default_channel)
            buried.queue_declare()
            second = fleet.send(scenarios.hold_or_reject, scene.key)
            message = wait_for("a message is buried", lambda: buried.get(no_ack=True))
        assert message.headers["id"] == second.id
        wait_for("the caller is told", lambda: second.state == states.FAILURE)
    finally:
        rabbitmq.control("clear_policy", "bury")
    scene.open_gate()


# A task that goes on in another execution


@fleets("prefork", "rabbitmq", "gevent")
def test_a_lock_can_be_held_over_the_countdown(fleet, scene):
    """With lock_hold_on_retry nobody gets in between, and each attempt has a token of its own."""
    result = fleet.send(scenarios.retry_until_open, scene.key)
    scene.wait_for_report("end", times=1)
    waiting = fleet.send(scenarios.hold_or_wait, scene.key)
    scene.wait_for_line(1)
    assert scene.lease.extended_by > LONG
    scene.wait_for_report("begin", times=3)
    scene.assert_others_stay_out(fleet, result)
    scene.open_gate()
    assert result.get(timeout=LIMIT) >= 2
    assert waiting.get(timeout=LIMIT)["held"] is True
    order = scene.begun
    assert order == [result.id] * (len(order) - 1) + [waiting.id]
    assert not fleet.says("put off", result.id)
    assert scene.is_free
    scene.assert_exclusive()

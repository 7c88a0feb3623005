"""Tasks that are parked in line for their lock: in their order, in no slot, and each to its end."""

import signal
import time
import uuid

import pytest
from celery import chain, chord, group, states
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult

from tests.acceptance import scenarios
from tests.acceptance.fleet import BROKERS, LIMIT, PREFORK, Scene, fleets, wait_for
from tests.acceptance.rabbitmq import own_rabbitmq
from tests.acceptance.scenarios import BRIEF
from tests.redis_server import RedisServer

PARKED = "PARKED"
QUEUE = scenarios.hold_or_queue
BODIES = ['[["k"], {}, {"chain": n', "[1]", "5", "null", "[5, {}, {}]", '[["k"], 5, {}]', ""]
BURST = 8  # tasks of one key: more than the slots of both workers of a pair
# In line


@fleets("prefork", "rabbitmq", "threads", "gevent", "solo")
def test_a_burst_takes_no_slot_and_runs_in_order(fleet, scene):
    """Parked tasks leave all slots to others; then each runs once, first come, first served."""
    holder = scene.hold(fleet)
    results = [scene.park(fleet) for _ in range(BURST)]
    wait_for("all say so", lambda: {result.state for result in results} == {PARKED})
    other = fleet.send(scenarios.step, f"{scene.key}-other")
    assert other.get(timeout=LIMIT) == {"held": True}
    assert scene.begun == [holder.id]
    scene.open_gates(holder)
    for result in results:
        assert result.get(timeout=LIMIT)["held"] is True
    assert scene.begun == [holder.id, *(result.id for result in results)]
    scene.assert_exclusive()


# Full lines


@PREFORK
def test_a_chord_is_told_of_a_member_that_made_room(fleet, scene):
    """Its body does not run, its errback is called, and nobody waits for ever."""
    called = Scene(f"{scene.key}-errback", scene.redis)
    called.open_gate()
    holder = scene.hold(fleet)
    members = [fleet.signature(scenarios.hold_newest, scene.key) for _ in range(3)]
    body = scenarios.gather.s().set(queue=fleet.queue)
    result = fleet.start(chord(members, body.on_error(fleet.signature(scenarios.hold, called.key))))
    members = result.parent.results

    def members_that(state):
        return [member.state for member in members].count(state)

    wait_for("two made room", lambda: members_that(states.REVOKED) == 2)
    scene.open_gates(holder)
    with pytest.raises(ChordError):
        AsyncResult(result.id, app=result.app).get(timeout=LIMIT)
    wait_for("the third has run", lambda: members_that(states.SUCCESS) == 1)
    called.wait_for_report("end")
    called.wait_until_free()
    assert len(called.reported("begin")) == 1


# A parked task that is not to run any more


@BROKERS
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_task_that_ends_in_line_gives_its_turn_on(fleet, scene, how):
    """It ends as REVOKED at its turn, never runs, and the next one does."""
    holder = scene.hold(fleet)
    ended = scene.park(fleet, expires=1 if how == "expired" else None)
    expiry = time.time() + 1
    following = scene.park(fleet)
    if how == "expired":
        wait_for("it has expired", lambda: time.time() > expiry)
    else:
        assert len(fleet.revoke(ended.id, reply=True)) == len(fleet.workers)
    scene.open_gates(holder)
    with pytest.raises(TaskRevokedError, match=how):
        ended.get(timeout=LIMIT)
    assert following.get(timeout=LIMIT)["held"] is True
    assert scene.begun == [holder.id, following.id]
    assert fleet.times_it_says("Discarding revoked task", ended.id) == 1


@fleets("prefork", "threads", "solo")
def test_a_damaged_body_is_set_aside(scene, fleet):
    """Its envelope is intact: no worker ends with it, its task fails, and the next has its turn."""
    holder = scene.hold(fleet)
    damaged = [scene.park(fleet) for _ in BODIES]
    following = scene.park(fleet)
    tickets, aside = f"{scene.lock}:tickets", f"{scene.lock}:aside"
    for result, body in zip(damaged, BODIES, strict=True):
        ticket = f"{result.id}:0:0"
        record = scene.redis.hget(tickets, ticket)
        head, message = record[: record.index('1 {"')], record[record.index('1 {"') :]
        message = message[: message.index("\n") + 1] + body
        head = " ".join([*head.split(" ")[:5], str(len(message)), *head.split(" ")[6:]])
        scene.redis.hset(tickets, ticket, head + message)
    scene.open_gates(holder)
    assert following.get(timeout=LIMIT)["held"] is True
    for result in damaged:
        ticket = f"{result.id}:0:0"
        wait_for("it is set aside", lambda ticket=ticket: scene.redis.hexists(aside, ticket))
        assert '1 {"' in scene.redis.hget(aside, ticket)  # with all that is needed to put it back
        wait_for("it failed", lambda result=result: result.state == states.FAILURE)
        wait_for("it is logged", lambda one=result.id: fleet.says("ERROR", one, "is set aside"))
        assert result.id not in scene.begun
    assert all(worker.running for worker in fleet.workers)
    scene.redis.delete(aside)


# The body of a parked task ends in another way


@pytest.mark.extra
@BROKERS
def test_a_parked_task_survives_a_cold_shutdown(fleet, start_fleet, scene):
    """With acks_late its body, stopped in one worker, runs again in another one."""
    first = start_fleet("prefork", broker_url=fleet.broker_url)
    holder = scene.hold(fleet)
    parked = scene.park(first, task=scenarios.hold_or_queue_late)
    following = scene.park(fleet)
    scene.open_gate(holder.id)
    pid = scene.wait_for_report("begin", id=parked.id)["pid"]
    first.workers[0].process.send_signal(signal.SIGQUIT)
    first.workers[0].wait_until_it_ends()
    start_fleet("prefork", broker_url=fleet.broker_url, queue=first.queue)
    assert scene.finish(parked)["held"]
    assert following.get(timeout=LIMIT)["held"] is True
    assert scene.begun.count(parked.id) == 2
    scene.assert_exclusive([pid])


# Canvas


@PREFORK
@pytest.mark.parametrize("kind", ["chain", "group", "chord"])
def test_a_canvas_of_one_key_completes(fleet, scene, kind):
    """Whatever members are parked: each runs once, and who waits for all of them is answered."""
    holder = scene.hold(fleet)
    members = [fleet.signature(QUEUE, scene.key) for _ in range(3)]
    gather = scenarios.gather.s().set(queue=fleet.queue)
    canvases = {"chain": chain(*members), "group": group(members), "chord": chord(members, gather)}
    result = fleet.start(canvases[kind])
    scene.wait_for_line(1 if kind == "chain" else 3)
    scene.open_gates(holder)
    # Celery before 5.7 does not hear of the members of a group whose result was restored.
    wait_for(f"the {kind} is over", result.ready)
    ends = result.get(timeout=LIMIT)
    assert [end["held"] for end in (ends if isinstance(ends, list) else [ends])] == (
        [True] if kind == "chain" else [True] * 3
    )
    assert len(set(scene.begun)) == len(scene.begun) == 4
    scene.assert_exclusive()


# Elsewhere, and otherwise


def test_a_line_survives_a_restart_of_redis_and_its_workers(start_fleet, tmp_path):
    """With an append-only file, tasks that were parked before a crash run after it, in order."""
    with (
        RedisServer(tmp_path / "redis", args=["--appendonly", "yes"]) as server,
        server.client(decode_responses=True) as client,
    ):

        def restart():
            server.stop()
            server.start()

        scene = Scene(uuid.uuid4().hex, client)
        env = {"SCENARIOS_URL": server.url, "SCENARIOS_BROKER_URL": server.url}
        assert_a_line_survives(start_fleet, scene, restart, server.url, env=env)


@pytest.mark.extra
def test_a_line_survives_a_restart_of_rabbitmq_and_its_workers(start_fleet, scene, tmp_path):
    """Tasks that were parked before all workers died and the broker was restarted run in order."""
    with own_rabbitmq(tmp_path / "rabbitmq") as server:

        def restart():
            server.control("stop_app")
            server.control("start_app")

        assert_a_line_survives(start_fleet, scene, restart, server.url)


def assert_a_line_survives(start_fleet, scene, restart, broker_url, **options):
    """Park tasks, kill the worker, restart the broker, and let another worker come."""
    options |= {"broker_url": broker_url, "conf": {"dislock_watchdog_timeout": BRIEF}}
    fleet = start_fleet("prefork", **options)
    holder = scene.begin(fleet, scenarios.hold_renewed)
    results = [scene.park(fleet) for _ in range(3)]
    fleet.workers[0].kill()
    restart()
    scene.open_gate()
    second = start_fleet("prefork", queue=fleet.queue, **options)
    scene.wait_for_report("end", times=3, error=None)
    assert scene.begun == [holder.id, *(result.id for result in results)]
    running = f"{scene.lock}:running"
    wait_for("the last has left its line", lambda: not scene.redis.exists(running))
    second.workers[0].kill()  # while there is a broker

"""``celery dislock why``, of tasks of real workers: what those, results and queues tell."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone

import pytest

from celery_dislock.operating.checks import troubles
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, POLL, PREFORK, Fleet, Scene, wait_for
from tests.commands import FOUND, Dislock

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue
TIME = r"\d+(\.\d)? (s|min)"
dislock = Dislock(scenarios.app)


def ask(result, *args):
    """Return the answer about a task, as JSON has it."""
    return dislock.json("why", result.id, *args)


def told(result, state, sentence, *args):
    """Check the state and the sentence; a "~" in it is any time, and "*" anything."""
    answer = ask(result, *args)
    wanted = re.escape(sentence).replace("\\~", TIME).replace("\\*", ".*")
    assert answer["state"] == state, answer
    assert re.fullmatch(wanted, answer["sentence"]), answer["sentence"]
    return answer


def told_at_last(*asked):
    """Ask until the answer is as in :func:`told`: a task that is put off tries again meanwhile."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return told(*asked)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL)


# It runs.


@PREFORK
def test_it_runs(fleet, scene):
    """Where, under which lock and for how long; the same from Python."""
    holder = scene.hold(fleet)
    pid = scene.wait_for_report("begin")["pid"]
    sentence = (
        f"{scenarios.hold_by_itself.name}[{holder.id}] runs on *@here (pid {pid}): it has held "
        f"lock '{scene.key}' for ~, last renewed ~ ago."
    )
    answer = told(holder, "running", sentence)
    assert answer["remedy"].endswith(f"celery dislock free --terminate {scene.key}")
    for locks in (scenarios.dislock, scenarios.hold_by_itself):
        assert locks.why(holder.id).state == "running"
        assert locks.why(holder.id, key=scene.key).state == "running"
    told(holder, "running", sentence, "--key", "other")  # its worker knows better
    scene.open_gates(holder)


@PREFORK
def test_it_runs_without_its_lock(fleet, scene):
    """Its lease was freed under it: the worker says that it runs."""
    holder = scene.begin(fleet, scenarios.outlive_loss)
    dislock("free", scene.key, "--yes")
    sentence = (
        f"{scenarios.outlive_loss.name}[{holder.id}] runs on *, and does not hold its lock "
        f"'{scene.key}': *capped*"
    )
    told(holder, "running without its lock", sentence)
    scene.open_gate()
    holder.get(timeout=LIMIT)


def test_it_runs_where_locks_are_off(start_fleet, scene):
    """Its worker says so."""
    fleet = start_fleet("prefork", "--no-dislock")
    holder = scene.begin(fleet, scenarios.hold)
    sentence = f"*[{holder.id}] runs on *, for ~ so far, without its lock: locks are off there (*)."
    told(holder, "locks off", sentence)
    scene.open_gate()
    holder.get(timeout=LIMIT)


# It waits.


@PREFORK
def test_it_is_in_line(fleet, scene):
    """Behind whom, and as nth of how many."""
    holder = scene.hold(fleet)
    parked = [scene.park(fleet) for _ in range(3)]
    sentence = (
        f"{QUEUE.name}[{parked[1].id}] is 2nd of 3 in line for lock '{scene.key}', which "
        f"{scenarios.hold_by_itself.name}[{holder.id}] on * has held for ~."
    )
    answer = told(parked[1], "in line", sentence)
    assert f"lock server: {QUEUE.name}[{parked[0].id}] is the first" in str(answer["rests_on"])
    scene.open_gates(holder)
    for one in parked:
        one.get(timeout=LIMIT)


@PREFORK
def test_it_is_put_off(fleet, scene):
    """Until when, and why, as its result says."""
    holder = scene.hold(fleet)
    put_off = fleet.send(scenarios.hold_or_retry, scene.key)
    sentence = f"*[{put_off.id}] is put off until *: lock '{scene.key}' is held by *[{holder.id}]*"
    told_at_last(put_off, "put off", sentence)
    scene.open_gates(holder)
    put_off.get(timeout=LIMIT)


@PREFORK
def test_it_is_not_due(fleet, scene):
    """A worker keeps it until the time that its sender has given; then it is revoked."""
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    scheduled = fleet.send(scenarios.step, scene.key, eta=later)
    sentence = (
        f"{scenarios.step.name}[{scheduled.id}] is with *@here until *, in 59 min: that is when "
        "its sender wants it to start."
    )
    told_at_last(scheduled, "not due", sentence)
    fleet.revoke(scheduled.id, reply=True)
    revoked = ask(scheduled)  # Celery 5.7 stores its end at once
    assert revoked["state"] in {"revoked", "ended"}
    assert "revoked" in revoked["sentence"]


@PREFORK
def test_it_waits_for_a_free_slot(fleet, scene):
    """A worker has it, and its pool is busy."""
    keys = [f"{scene.key}-{number}" for number in range(12)]
    sent = [fleet.send(scenarios.hold_by_itself, key) for key in keys]
    others = [Scene(key, scene.redis) for key in keys]
    running = lambda: [one for one in others if one.reported("begin")]  # noqa: E731
    wait_for("the slots are taken", lambda: len(running()) == 6)
    begun = {one.key for one in running()}
    waiting = next(one for key, one in zip(keys, sent, strict=True) if key not in begun)
    sentence = f"*[{waiting.id}] is with *@here, and waits for a free slot of its pool."
    told_at_last(waiting, "received", sentence)
    for one in sent:
        scene.open_gate(one.id)
    for one in sent:
        one.get(timeout=LIMIT)


# It is over.


@PREFORK
def test_it_has_ended(fleet, scene):
    """How and when: it has succeeded, failed, was skipped, dropped or replaced."""
    scene.open_gate()
    succeeded, failed = fleet.send(scenarios.step, scene.key), fleet.send(scenarios.fail, "f")
    succeeded.get(timeout=LIMIT)
    wait_for("it failed", failed.ready)
    told(succeeded, "ended", f"Task {succeeded.id} has run, and has succeeded, at *, ~ ago.")
    told(failed, "ended", f"Task {failed.id} has failed, at *, ~ ago: f.")
    scene.redis.delete(scenarios.gate_of(scene.key))
    holder = scene.hold(fleet)
    skipped = fleet.send(scenarios.hold, scene.key)
    wait_for("it was skipped", skipped.ready)
    why = f"Task {skipped.id} was revoked, at *, ~ ago: lock '{scene.key}' is held by *"
    told(skipped, "ended", why)
    dropped = scene.park(fleet)
    dislock("drop", dropped.id, "--yes", "--key", scene.key)
    told(dropped, "ended", f"Task {dropped.id} was revoked, *: dropped by an operator *.")
    older = scene.park(fleet, task=scenarios.hold_newest)
    newer = fleet.send(scenarios.hold_newest, scene.key)
    wait_for("it was replaced", older.ready)
    told(older, "ended", f"Task {older.id} was revoked, *: * took its place in line for lock *")
    scene.open_gates(holder)
    newer.get(timeout=LIMIT)


@pytest.mark.usefixtures("server")
def test_nobody_knows_it():
    """What that can mean is told; a hostile id is text, in a pattern and on the screen."""
    for task_id in ("nobody", "\x1b[31m*{?}[a-z]\\", "*", "9" * 10_000):
        answer = dislock("why", task_id, "--timeout", "0.2")
        assert answer.exit_code == FOUND
        assert answer.stdout.startswith("Nothing is known here of task ")
        assert "\x1b" not in answer.stdout
        assert max(map(len, answer.stdout.splitlines()), default=0) <= 80 or len(task_id) > 80


@PREFORK
def test_a_queue_without_a_worker(fleet, scene, monkeypatch):
    """A task has its turn, and nobody takes its message."""
    monkeypatch.setattr(troubles, "TURNS_MANY", 1)
    holder = scene.hold(fleet)
    elsewhere = Fleet("prefork", f"nobody-{scene.key}", fleet.workers)
    fleet.serve(elsewhere.queue)
    parked = scene.park(elsewhere)
    fleet.leave(elsewhere.queue)
    scene.open_gates(holder)
    scene.wait_for_line(0)
    (listed,) = [one for one in dislock.json("ls") if one["key"] == scene.key]
    assert listed["troubles"] == ["unclaimed"]
    sentence = (
        f"{QUEUE.name}[{parked.id}] has its turn for lock '{scene.key}', for ~, and no worker that "
        f"answers consumes its queue '{elsewhere.queue}'."
    )
    answer = told(parked, "has its turn", sentence)
    assert f"1 message in queue '{elsewhere.queue}'" in str(answer["rests_on"])
    assert answer["remedy"].endswith(f"celery worker --dislock -Q {elsewhere.queue}")
    fleet.serve(elsewhere.queue)
    parked.get(timeout=LIMIT)
    fleet.leave(elsewhere.queue)

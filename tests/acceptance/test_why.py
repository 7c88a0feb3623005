"""``celery dislock why``, of tasks of real workers: what they, the broker and the results tell.

The sentences are those of tests/unit/operating/test_why.py; here is what real processes put into
them.
"""

import json
import re
import time
from datetime import datetime, timedelta, timezone

import pytest

from celery_dislock.operating.checks import troubles
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, POLL, PREFORK, Fleet, wait_for
from tests.commands import Dislock

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue
TIME = r"\d+(\.\d)? (s|min)"
dislock = Dislock(scenarios.app)


def told(result, state, sentence, *args):
    """Check the state and the sentence; a "~" in it is any time, and "*" anything."""
    answer = dislock.json("why", result.id, *args)
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
    """Where, under which lock and for how long; the same from Python, and whatever key is given."""
    holder = scene.hold(fleet)
    pid = scene.wait_for_report("begin")["pid"]
    sentence = (
        f"{scenarios.hold_by_itself.name}[{holder.id}] runs on *@here (pid {pid}): it has held "
        f"lock '{scene.key}' for ~, last renewed ~ ago."
    )
    told(holder, "running", sentence)
    for locks in (scenarios.dislock, scenarios.hold_by_itself):
        assert locks.why(holder.id, key=scene.key).state == "running"
    told(holder, "running", sentence, "--key", "other")  # its worker knows better
    fleet.send(scenarios.hold_by_itself, scene.key, task_id=holder.id)
    wait_for("a copy is put off", lambda: fleet.says(holder.id, "put off"))
    told(holder, "running", "*runs on *")
    scene.open_gates(holder)
    wait_for("both have ended", lambda: len(scene.reported("end")) == 2)


@PREFORK
def test_it_runs_without_its_lock(fleet, scene):
    """Its lease was freed under it: the worker says that it runs."""
    holder = scene.begin(fleet, scenarios.outlive_loss)
    dislock("free", scene.key, "--yes")
    told(holder, "running without its lock", "*runs on *, and does not hold its lock *: *capped*")
    scene.finish(holder)


# It waits.


@PREFORK
@pytest.mark.parametrize(
    ("task", "state", "where"),
    [
        (QUEUE, "in line", "is alone in line"),
        (scenarios.hold_or_wait, "waiting in its slot", "waits in its slot on *@here (pid *),"),
        (scenarios.hold_inside, "waiting in its slot", "waits in its body on *@here (pid *),"),
        (scenarios.hold_both, "waiting in its slot", "waits in its body on *@here (pid *),"),
        (scenarios.hold_or_retry, "put off", "is put off until *"),
    ],
    ids=["parked", "in its slot", "in its body", "in its body, under a lock of its own", "put off"],
)
def test_it_waits(fleet, scene, task, state, where):
    """Where it waits, and behind whom."""
    holder = scene.hold(fleet)
    waiting = fleet.send(task, scene.key)
    sentence = f"{task.name}[{waiting.id}] {where}*lock '{scene.key}'*[{holder.id}] on *"
    told_at_last(waiting, state, sentence)
    scene.open_gates(holder)
    waiting.get(timeout=LIMIT)


@PREFORK
def test_it_is_not_due(fleet, scene):
    """A worker keeps it until the time that its sender has given; then it is revoked."""
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    scheduled = fleet.send(scenarios.step, scene.key, eta=later)
    told_at_last(scheduled, "not due", "*is with *@here until *, in 59 min: *")
    fleet.revoke(scheduled.id, reply=True)
    revoked = dislock.json("why", scheduled.id)  # Celery 5.7 stores its end at once
    assert revoked["state"] in {"revoked", "ended"}
    assert "revoked" in revoked["sentence"]


@PREFORK
def test_it_has_ended(fleet, scene):
    """How and why: it has succeeded, failed, was skipped, dropped or replaced."""
    scene.open_gate()
    succeeded, failed = fleet.send(scenarios.step, scene.key), fleet.send(scenarios.fail, "f")
    wait_for("both have ended", lambda: succeeded.ready() and failed.ready())
    scene.redis.delete(scenarios.gate_of(scene.key))
    holder = scene.hold(fleet)
    skipped, dropped = fleet.send(scenarios.hold, scene.key), scene.park(fleet)
    dislock("drop", dropped.id, "--yes", "--key", scene.key)
    older = scene.park(fleet, task=scenarios.hold_newest)
    newer = fleet.send(scenarios.hold_newest, scene.key)
    wait_for("all three have ended", lambda: all(x.ready() for x in (skipped, dropped, older)))
    for ended, how in {
        succeeded: "has run, and has succeeded, at *, ~ ago.",
        failed: "has failed, at *, ~ ago: f.",
        skipped: f"was revoked, at *, ~ ago: lock '{scene.key}' is held by *",
        dropped: "was revoked, *: dropped by an operator *.",
        older: "was revoked, *: * took its place in line for lock *",
    }.items():
        told(ended, "ended", f"Task {ended.id} {how}")
    scene.open_gates(holder)
    newer.get(timeout=LIMIT)


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
    listed = json.loads(dislock("ls", "--json").stdout)
    assert [one["troubles"] for one in listed if one["key"] == scene.key] == [["unclaimed"]]
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

"""What a caller and an operator read: one line for each thing that happens to a task."""

from __future__ import annotations

import re
import uuid

import pytest
from celery import states
from celery.exceptions import Reject, TaskRevokedError
from celery.result import AsyncResult

from celery_dislock import LockHeldError
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, fleets, wait_for

RECORD = re.compile(r"^\[\S+ \S+: (?P<level>[A-Z]+)/\S+\] (?P<text>.*)$")
SKIPPED = r"INFO .* skipped: lock '{key}' is held by {holder}, for \S+ s more unless renewed\. It "
PUT_OFF = r"INFO .* put off for \S+ s: lock '{key}' is held by {holder}, for "
PARKED = r"INFO .* parked: place 1 in line for lock '{key}', held by {holder}\."
REJECTED = r"INFO .* rejected: lock '{key}' is held by {holder}, .* dead-letter exchange"
FAILED = r"ERROR .* raised unexpected: LockHeldError\('{key}', '{holder}'"


def lines_about(fleet, task, task_id):
    """Level and text of what the workers have logged about a task, but for its coming and going."""
    about = f"{task.name}[{task_id}] "
    found = [
        (match["level"], match["text"])
        for worker in fleet.workers
        for match in map(RECORD.match, worker.log.splitlines())
        if match and match["text"].removeprefix("Task ").startswith(about)
    ]
    return [
        f"{level} {text}"
        for level, text in found
        if not text.endswith(" received") and " succeeded in " not in text
    ]


def settled(fleet, task_id):
    """Run a task on each worker after what it does now: its lines are all written then."""
    wait_for(f"{task_id} is seen", lambda: fleet.says(task_id))
    for _ in range(2 * len(fleet.workers)):
        fleet.send(scenarios.step, f"after-{uuid.uuid4().hex}").get(timeout=LIMIT)


@fleets("prefork", "threads")
@pytest.mark.parametrize(
    ("name", "state", "line"),
    [
        ("hold", states.REVOKED, SKIPPED),
        ("hold_or_raise", states.FAILURE, FAILED),
        ("hold_or_retry", states.RETRY, PUT_OFF),
        ("hold_or_reject", states.FAILURE, REJECTED),
        ("hold_or_queue", "PARKED", PARKED),
    ],
    ids=["skip", "raise", "retry", "reject", "queue"],
)
def test_a_conflict_is_told_to_the_caller_and_in_one_line(fleet, scene, name, state, line):
    """Key, holder and what becomes of the task are in the result, and in the log."""
    holding = scene.begin(fleet)
    holder = rf"tests.acceptance.scenarios.hold\[{holding.id}\] on.*"
    task = getattr(scenarios, name)
    second = fleet.send(task, scene.key)
    wait_for(f"it is {state}", lambda: second.state == state)
    reason = AsyncResult(second.id, app=second.app).result
    if state == "PARKED":
        assert (reason["key"], reason["place"]) == (scene.key, 1)
    elif isinstance(reason, LockHeldError):
        assert reason.key == scene.key
        assert 0 < reason.remaining <= scenarios.LONG
    else:
        assert isinstance(reason, Reject if line is REJECTED else TaskRevokedError)
    told = [scene.key, holding.id, scene.lease.holder["worker"], str(scene.lease.holder["pid"])]
    assert [word for word in told if word not in str(reason)] == []
    wait_for("the line", lambda: lines_about(fleet, task, second.id))
    settled(fleet, second.id)
    [said] = lines_about(fleet, task, second.id)[:2]
    scene.open_gate()
    assert re.match(line.format(key=scene.key, holder=holder), said), said
    if state in {states.RETRY, "PARKED"}:
        assert second.get(timeout=LIMIT)["held"] is True

"""Messages of somebody who can publish, and writes into their headers whatever they like."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK
from tests.unit.deliveries import noted

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue


@PREFORK
def test_a_message_that_says_it_was_replaced_ends_alone(fleet, scene):
    """With the id of a parked task it says REVOKED of it; that one runs all the same."""
    holder = scene.hold(fleet)
    parked = scene.park(fleet)
    fleet.send(QUEUE, scene.key, task_id=parked.id, headers=noted(replaced="because"))
    with pytest.raises(TaskRevokedError, match="because"):
        parked.get(timeout=LIMIT)
    assert scene.line == [f"{parked.id}:0:0#"]
    scene.open_gates(holder)
    scene.wait_for_report("end", id=parked.id)


@PREFORK
def test_forged_owners_end_no_lease(fleet, scene):
    """The holder's name, a hundred thousand names and numbers are ignored, with one warning."""
    holder = scene.hold(fleet)
    owner = scene.lease.owner
    for forged in ([owner], [f"{owner}{n}" for n in range(100_000)], [1, 2]):
        before = len(scene.line)
        headers = noted(given_up=forged, held=owner)
        parked = fleet.send(QUEUE, scene.key, headers=headers)
        scene.wait_for_line(before + 1)
        assert fleet.times_it_says(parked.id, "given_up=", "held=", "ignored") == 1
    assert scene.lease.owner == owner
    assert not fleet.says("no task can take a lock")
    scene.open_gates(holder)
    assert holder.get(timeout=LIMIT)
    scene.wait_for_report("end", 4)


@PREFORK
def test_a_name_that_cannot_be_encoded_ends_no_worker(fleet, scene):
    """The main process reads the headers before any child does; the tasks run, locked or not."""
    lock = "dislock:{\ud800}"
    for task, args in [(scenarios.gather, [[]]), (scenarios.step, [scene.key])]:
        task_id = f"{scene.key}-{task.name}"
        headers = noted(ticket=[lock, f"{task_id}:0:0"], unique=[lock, "end"])
        sent = fleet.send(task, *args, task_id=task_id, headers=headers)
        sent.get(timeout=LIMIT)

"""Messages of somebody who can publish, and writes into their headers whatever they like."""

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK
from tests.unit.deliveries import noted

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
def test_a_name_that_cannot_be_encoded_ends_no_worker(fleet, scene):
    """The main process reads the headers before any child does; the tasks run, locked or not."""
    lock = "dislock:{\ud800}"
    for task, args in [(scenarios.gather, [[]]), (scenarios.step, [scene.key])]:
        task_id = f"{scene.key}-{task.name}"
        headers = noted(ticket=[lock, f"{task_id}:0:0"], unique=[lock, "end"])
        sent = fleet.send(task, *args, task_id=task_id, headers=headers)
        sent.get(timeout=LIMIT)

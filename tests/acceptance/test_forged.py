"""Messages of somebody who can publish, and writes into their headers whatever they like."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from celery_dislock.messages.headers import (
    GIVEN_UP_HEADER,
    HELD_HEADER,
    PUT_OFF_HEADER,
    REPLACED_HEADER,
    TICKET_HEADER,
)
from celery_dislock.tasks.acquisition import DAMAGED_TRIES
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, wait_for

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue
EXPIRED = -5  # seconds from now


@PREFORK
def test_a_forged_ticket_takes_no_other_task_out_of_line(fleet, scene):
    """The message that names it is discarded, as Celery does, and the parked task runs."""
    holder = scene.hold(fleet)
    parked = scene.park(fleet)
    forged = {TICKET_HEADER: [scene.lock, f"{parked.id}:0:0"]}
    discarded = fleet.send(QUEUE, scene.key, headers=forged, expires=EXPIRED)
    with pytest.raises(TaskRevokedError):
        discarded.get(timeout=LIMIT)
    assert scene.line == [f"{parked.id}:0:0#"]
    scene.open_gates(holder)
    assert parked.get(timeout=LIMIT)["held"] is True


@PREFORK
def test_a_message_with_the_id_of_a_parked_task_can_revoke_it(fleet, scene):
    """With its id and ticket a message that has expired takes that task out of line, no other."""
    holder = scene.hold(fleet)
    parked, following = scene.park(fleet), scene.park(fleet)
    forged = {TICKET_HEADER: [scene.lock, f"{parked.id}:0:0"]}
    options = {"task_id": parked.id, "headers": forged, "expires": EXPIRED}
    fleet.send(QUEUE, scene.key, **options)
    with pytest.raises(TaskRevokedError):
        parked.get(timeout=LIMIT)
    wait_for("it has left", lambda: scene.line == [f"{following.id}:0:0#"])
    scene.open_gates(holder)
    assert following.get(timeout=LIMIT)["held"] is True


@PREFORK
def test_a_message_that_says_it_was_replaced_ends_alone(fleet, scene):
    """With the id of a parked task it says REVOKED of it; that one runs all the same."""
    holder = scene.hold(fleet)
    parked = scene.park(fleet)
    fleet.send(QUEUE, scene.key, task_id=parked.id, headers={REPLACED_HEADER: "because"})
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
        headers = {GIVEN_UP_HEADER: forged, HELD_HEADER: owner}
        parked = fleet.send(QUEUE, scene.key, headers=headers)
        scene.wait_for_line(before + 1)
        assert fleet.times_it_says(parked.id, GIVEN_UP_HEADER, HELD_HEADER, "ignored") == 1
    assert scene.lease.owner == owner
    assert not fleet.says("no task can take a lock")
    scene.open_gates(holder)
    assert holder.get(timeout=LIMIT)
    scene.wait_for_report("end", 4)


@PREFORK
def test_a_damaged_lock_fails_its_tasks_and_no_others(fleet, scene):
    """A key of another type: put off, in the end FAILURE, which names it; mended, they run."""
    scene.redis.set(scene.lock, "by hand", ex=600)
    damaged = fleet.send(scenarios.step, scene.key)
    other = fleet.send(scenarios.step, f"{scene.key}-other")
    assert other.get(timeout=LIMIT) == {"held": True}
    wait_for("it is put off again", lambda: fleet.times_it_says(damaged.id, "cannot be had") == 2)
    # The tries between take half a minute.
    last = fleet.send(scenarios.step, scene.key, headers={PUT_OFF_HEADER: DAMAGED_TRIES})
    error = wait_for("it fails", lambda: last.state == "FAILURE" and last.result)
    assert f"{scene.lock!r} is a string, not a hash" in str(error)
    assert fleet.says("Tasks of one lock cannot run", scene.lock)
    assert not fleet.says("no task can take a lock")
    scene.redis.delete(scene.lock)
    assert fleet.send(scenarios.step, scene.key).get(timeout=LIMIT) == {"held": True}
    assert damaged.get(timeout=LIMIT) == {"held": True}

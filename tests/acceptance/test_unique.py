"""One message of a key at a time, with real workers: when is the key free for the next?"""

from __future__ import annotations

import os
import signal
import uuid
from itertools import pairwise

import pytest
from billiard.exceptions import WorkerLostError
from celery import states
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, wait_for

pytestmark = pytest.mark.acceptance

POOLS = pytest.mark.parametrize("fleet", ["prefork", "threads", "rabbitmq"], indirect=True)
EDITIONS = 20


def reserved_for(scene):
    """The id of the task that the key is reserved for; None if it is free."""
    record = scene.redis.get(f"{scene.lock}:unique")
    return record.split(" ")[4] if record else None


def wait_until_unreserved(scene):
    wait_for(f"the key {scene.key} is not reserved", lambda: reserved_for(scene) is None)


def assert_nothing_waits(scene):
    """Neither the lock nor its line has anything left."""
    scene.wait_until_free()
    assert not scene.line


def assert_the_next_is_sent(fleet, scene, task):
    """The key is free for one more message, which runs."""
    wait_until_unreserved(scene)
    sent = fleet.send(task, scene.key)
    assert sent.duplicate is False
    scene.open_gate()
    sent.get(timeout=LIMIT)
    wait_until_unreserved(scene)


@POOLS
class TestUntilStart:
    def test_the_key_is_free_when_the_body_begins(self, fleet, scene):
        """One runs, one waits; the third is the one that waits."""
        first = fleet.send(scenarios.unique_in_queue, scene.key)
        scene.wait_for_report("begin")
        assert reserved_for(scene) is None
        later = scenarios.unique_in_queue.s(scene.key).set(queue=fleet.queue, countdown=LIMIT)
        with fleet.connection() as connection:
            second, third = (later.apply_async(connection=connection) for _ in range(2))
        assert (second.duplicate, third.duplicate) == (False, True)
        assert third.id == second.id != first.id
        fleet.revoke(second.id, reply=True)
        scene.open_gate()
        assert first.get(timeout=LIMIT)["held"] is True
        scene.redis.delete(f"{scene.lock}:unique")  # its message is revoked when its time comes

    def test_a_skipped_task_frees_its_key(self, fleet, scene):
        """The lock is held: the task that was sent is skipped, and the next may be sent."""
        holder = fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin")
        for _ in range(2):
            skipped = fleet.send(scenarios.unique_in_queue, scene.key)
            assert skipped.duplicate is False
            with pytest.raises(TaskRevokedError):
                skipped.get(timeout=LIMIT)
            wait_until_unreserved(scene)
        scene.open_gate()
        holder.get(timeout=LIMIT)

    def test_a_revoked_task_frees_its_key(self, fleet, scene):
        """The worker that discards the message says so."""
        waiting = fleet.send(scenarios.unique_in_queue, scene.key, countdown=2)
        assert reserved_for(scene) == waiting.id
        fleet.revoke(waiting.id, reply=True)
        wait_until_unreserved(scene)
        assert_the_next_is_sent(fleet, scene, scenarios.unique_in_queue)

    def test_an_expired_task_frees_its_key(self, fleet, scene):
        """Its time was over before it could start."""
        fleet.send(scenarios.unique_in_queue, scene.key, countdown=2, expires=1)
        assert_the_next_is_sent(fleet, scene, scenarios.unique_in_queue)

    def test_a_parked_task_keeps_its_key(self, fleet, scene):
        """It waits in line as it would in the queue, and frees the key at its turn."""
        holder = fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin")
        parked = fleet.send(scenarios.unique_or_queue, scene.key)
        scene.wait_for_line(1)
        assert fleet.send(scenarios.unique_or_queue, scene.key).id == parked.id
        scene.open_gate()
        holder.get(timeout=LIMIT)
        parked.get(timeout=LIMIT)
        wait_until_unreserved(scene)


@POOLS
class TestUntilEnd:
    def test_the_key_is_reserved_until_the_body_ends(self, fleet, scene):
        """Duplicates get the result of the one that runs; after it the key is free."""
        first = fleet.send(scenarios.unique_to_the_end, scene.key)
        scene.wait_for_report("begin")
        again = fleet.send(scenarios.unique_to_the_end, scene.key)
        assert (again.id, again.duplicate) == (first.id, True)
        scene.open_gate()
        assert again.get(timeout=LIMIT)["held"] is True
        wait_until_unreserved(scene)
        assert len(scene.reported("begin")) == 1

    def test_it_is_renewed_while_the_body_runs(self, fleet, scene):
        """A reservation that nobody renews would be gone after a few timeouts."""
        first = fleet.send(scenarios.unique_to_the_end, scene.key)
        scene.wait_for_report("begin")
        brief = 2 * scenarios.BRIEF
        wait_for("a short expiry", lambda: scene.redis.ttl(f"{scene.lock}:unique") <= brief)
        wait_for("four timeouts", lambda: scene.lease.extended_by > 5 * scenarios.BRIEF)
        assert reserved_for(scene) == first.id
        scene.open_gate()
        first.get(timeout=LIMIT)

    def test_a_failure_frees_it(self, fleet, scene):
        """As a success does."""
        for _ in range(2):
            with pytest.raises(ValueError, match=scene.key):
                fleet.send(scenarios.unique_fail, scene.key).get(timeout=LIMIT)
            wait_until_unreserved(scene)

    def test_a_retry_keeps_it(self, fleet, scene):
        """The same task goes on: it is neither dropped nor joined by a second message."""
        first = fleet.send(scenarios.unique_retry_once, scene.key)
        scene.wait_for_report("end", error="Retry")
        wait_for("the retry is sent", lambda: reserved_for(scene) == first.id)
        assert fleet.send(scenarios.unique_retry_once, scene.key).id == first.id
        assert first.get(timeout=LIMIT) == 1
        wait_until_unreserved(scene)

    def test_without_a_lock(self, fleet, scene):
        """lock_limit=None: no lease, and one message all the same."""
        first = fleet.send(scenarios.unique_without_lock, scene.key)
        scene.wait_for_report("begin")
        assert fleet.send(scenarios.unique_without_lock, scene.key).id == first.id
        assert not scene.leases
        scene.open_gate()
        assert first.get(timeout=LIMIT) == {"held": None}
        wait_until_unreserved(scene)


class TestDeaths:
    @PREFORK
    def test_a_dead_process_frees_its_key(self, fleet, scene):
        """The main process ends the reservation with the lease."""
        first = fleet.send(scenarios.unique_to_the_end, scene.key)
        scene.wait_for_report("begin")
        os.kill(scene.lease.holder["pid"], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            first.get(timeout=LIMIT)
        assert_the_next_is_sent(fleet, scene, scenarios.unique_to_the_end)

    @PREFORK
    def test_a_message_that_comes_back_runs(self, fleet, scene):
        """A redelivery needs no reservation."""
        first = fleet.send(scenarios.unique_and_survive, scene.key)
        scene.wait_for_report("begin")
        os.kill(scene.lease.holder["pid"], signal.SIGKILL)
        scene.wait_for_report("begin", times=2)
        scene.open_gate()
        assert first.get(timeout=LIMIT)["held"] is True
        wait_until_unreserved(scene)

    def test_a_dead_worker_blocks_its_key_for_two_timeouts_at_most(self, start_fleet, scene):
        """Nobody renews the reservation of a task that ran in it."""
        fleet = start_fleet("prefork", "--dislock")
        fleet.send(scenarios.unique_to_the_end, scene.key)
        scene.wait_for_report("begin")
        fleet.workers[0].kill()
        wait_until_unreserved(scene)
        scene.wait_until_free()


@POOLS
class TestReplacing:
    def test_twenty_editions_are_one_run(self, fleet, scene):
        """A debounce: the newest runs when its time has come, and the others end as REVOKED."""
        results = [
            fleet.send(scenarios.newest_only, scene.key, number, countdown=1.5)
            for number in range(EDITIONS)
        ]
        assert results[-1].get(timeout=LIMIT) == EDITIONS - 1
        for older, newer in pairwise(results):
            wait_for("an older one ends", older.ready)
            assert older.state == states.REVOKED
            assert newer.id in str(older.result)
        assert [event["edition"] for event in scene.reported("ran")] == [EDITIONS - 1]
        wait_until_unreserved(scene)
        assert not scene.redis.exists(f"{scene.lock}:older")

    def test_one_that_waits_for_its_lock_is_replaced(self, fleet, scene):
        """It has not begun: when it is handed the lock, it learns of the newer message."""
        holder = fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin")
        first = fleet.send(scenarios.newest_only, scene.key, 1)
        scene.wait_for_line(1)
        second = fleet.send(scenarios.newest_only, scene.key, 2)
        scene.open_gate()
        holder.get(timeout=LIMIT)
        assert second.get(timeout=LIMIT) == 2
        wait_for("the first ends", first.ready)
        assert first.state == states.REVOKED
        assert [event["edition"] for event in scene.reported("ran")] == [2]
        assert_nothing_waits(scene)

    def test_one_that_is_parked_is_replaced(self, fleet, scene):
        """At its turn it learns of the newer message, and gives its turn on."""
        holder = fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin")
        results = [fleet.send(scenarios.newest_or_queue, scene.key, 1)]
        scene.wait_for_line(1)
        results.append(fleet.send(scenarios.newest_or_queue, scene.key, 2))
        scene.wait_for_line(2)
        scene.open_gate()
        holder.get(timeout=LIMIT)
        assert results[1].get(timeout=LIMIT) == 2
        with pytest.raises(TaskRevokedError, match=results[1].id):
            results[0].get(timeout=LIMIT)
        assert [event["edition"] for event in scene.reported("ran")] == [2]
        assert_no_copy_would_run(scene, results[0].id)

    @pytest.mark.parametrize(
        "task", [scenarios.hold_or_queue, scenarios.hold_or_queue_late], ids=["early", "late"]
    )
    def test_one_that_was_parked_under_another_key_is_replaced(self, fleet, scene, task):
        """Its reservation is older than its lock_key.  It has claimed its turn when it learns."""
        old, task_id = f"dislock:{{old-{scene.key}}}", str(uuid.uuid4())
        holder = fleet.send(scenarios.hold, scene.key)
        scene.wait_for_report("begin", id=holder.id)
        scene.redis.hset(f"{old}:older", task_id, "newer")
        headers = {"dislock_unique": [old, "start"]}
        parked = fleet.send(task, scene.key, task_id=task_id, headers=headers)
        scene.wait_for_line(1)
        scene.open_gate()
        holder.get(timeout=LIMIT)
        with pytest.raises(TaskRevokedError, match="newer"):
            parked.get(timeout=LIMIT)
        assert not scene.reported("begin", id=task_id)
        assert_no_copy_would_run(scene, task_id)


def assert_no_copy_would_run(scene, task_id):
    """A task that was parked has left its line as done, and claims nothing."""
    assert_nothing_waits(scene)
    ticket = f"{task_id}:0:0"
    # A string of its own; some ids, one in 16, are in a hash.
    wait_for("its mark", lambda: list(scene.redis.scan_iter(f"{scene.lock}:done:*", count=1000)))
    assert not scene.redis.hexists(f"{scene.lock}:running", ticket)


@POOLS
class TestStrangers:
    def test_a_message_without_a_reservation_runs(self, fleet, scene):
        """From a sender without the option, or after a failover that lost the reservation."""
        first = fleet.send(scenarios.unique_to_the_end, scene.key)
        scene.redis.delete(f"{scene.lock}:unique")
        scene.wait_for_report("begin")
        scene.open_gate()
        assert first.get(timeout=LIMIT)["held"] is True
        wait_until_unreserved(scene)

    def test_a_message_whose_key_another_has_runs(self, fleet, scene):
        """Its own end leaves the other's reservation alone."""
        scene.redis.set(f"{scene.lock}:unique", "1 w 1 1 another ", px=60_000)
        first = fleet.send(scenarios.hold, scene.key, headers=headers_of(scene))
        scene.open_gate()
        first.get(timeout=LIMIT)
        assert reserved_for(scene) == "another"
        scene.redis.delete(f"{scene.lock}:unique")

    def test_a_key_that_was_changed_is_freed(self, fleet, scene):
        """The old code has reserved another key; the task has no lock_unique_until any more."""
        old, task_id = f"dislock:{{old-{scene.key}}}", str(uuid.uuid4())
        scene.redis.set(f"{old}:unique", f"1 w 1 1 {task_id} ", px=60_000)
        headers = {"dislock_unique": [old, "end"]}
        sent = fleet.send(scenarios.hold, scene.key, task_id=task_id, headers=headers)
        scene.wait_for_report("begin")
        assert " r " in scene.redis.get(f"{old}:unique")
        scene.open_gate()
        sent.get(timeout=LIMIT)
        wait_for("the old key is free", lambda: not scene.redis.exists(f"{old}:unique"))

    def test_a_forged_header_reserves_nothing_elsewhere(self, fleet, scene):
        """A message that names the key of others does not keep their messages from being sent."""
        others = f"dislock:{{others-{scene.key}}}"
        headers = {"dislock_unique": [others, "end"]}
        sent = fleet.send(scenarios.hold, scene.key, headers=headers)
        scene.wait_for_report("begin")
        assert not scene.redis.exists(f"{others}:unique")
        scene.open_gate()
        sent.get(timeout=LIMIT)

    @pytest.mark.parametrize(
        "forged",
        [1, "x", ["dislock:{k}", "end", 1], [1, 2], ["elsewhere", "end"], ["dislock:{k}", "never"]],
        ids=str,
    )
    def test_a_forged_header_is_ignored(self, fleet, scene, forged):
        """The task runs as ever."""
        scene.open_gate()
        sent = fleet.send(scenarios.hold, scene.key, headers={"dislock_unique": forged})
        assert sent.get(timeout=LIMIT)["held"] is True


def headers_of(scene):
    """The header of a message that was reserved under this key."""
    return {"dislock_unique": [scene.lock, "end"]}

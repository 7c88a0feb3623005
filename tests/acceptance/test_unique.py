"""One message of a key at a time, with real workers: when is the key free for the next?"""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress

import pytest
from billiard.exceptions import WorkerLostError
from celery import states
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_dislock import NoResultError
from celery_dislock.tasks import duplicates
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Scene, fleets, wait_for
from tests.unit.deliveries import noted

pytestmark = pytest.mark.acceptance

EDITIONS = 20
SOON = 0.3  # seconds of a countdown


def assert_nothing_waits(scene):
    """Neither the lock nor its line has anything left."""
    scene.wait_until_free()
    assert not scene.line


def assert_the_next_is_sent(fleet, scene, task):
    """The key is free for one more message, which runs."""
    scene.wait_until_unreserved()
    sent = fleet.send(task, scene.key)
    assert sent.duplicate is False
    scene.open_gate()
    sent.get(timeout=LIMIT)
    scene.wait_until_unreserved()


def editions_run(scene):
    return [event["edition"] for event in scene.reported("ran")]


@fleets("prefork", "threads")
class TestUntilStart:
    def test_the_key_is_free_when_the_body_begins(self, fleet, scene):
        """One runs, one waits; the third is the one that waits."""
        first = scene.begin(fleet, scenarios.unique_in_queue)
        assert scene.reserved_for is None
        later = scenarios.unique_in_queue.s(scene.key).set(queue=fleet.queue, countdown=LIMIT)
        with fleet.connection() as connection:
            second, third = (later.apply_async(connection=connection) for _ in range(2))
        assert (second.duplicate, third.duplicate) == (False, True)
        assert third.id == second.id != first.id
        fleet.revoke(second.id, reply=True)
        scene.open_gate()
        assert first.get(timeout=LIMIT)["held"] is True
        scene.wait_until_unreserved()

    def test_a_parked_task_keeps_its_key(self, fleet, scene):
        """It waits in line as it would in the queue, and frees the key at its turn."""
        holder = scene.begin(fleet)
        parked = fleet.send(scenarios.unique_in_queue, scene.key)
        scene.wait_for_line(1)
        assert fleet.send(scenarios.unique_in_queue, scene.key).id == parked.id
        scene.open_gate()
        holder.get(timeout=LIMIT)
        parked.get(timeout=LIMIT)
        scene.wait_until_unreserved()


class TestRevoked:
    @pytest.mark.parametrize(
        ("fleet", "by"),
        [(one, "another process") for one in ("prefork", "rabbitmq")]
        + [("prefork", "its sender")],  # a pair on RabbitMQ is told by nobody else
        indirect=["fleet"],
    )
    def test_one_that_is_revoked_and_sent_again_is_sent(self, fleet, scene, by):
        """At once, while a worker still has the first, whose end leaves the second's key alone."""
        first = fleet.send(scenarios.unique_to_the_end, scene.key, countdown=2)
        wait_for("a worker has it", lambda: fleet.says(first.id, "received"))
        if by == "its sender":
            scenarios.app.control.revoke(first.id)
        else:
            fleet.revoke(first.id, reply=True)
        second = fleet.send(scenarios.unique_to_the_end, scene.key)
        assert (second.duplicate, scene.reserved_for) == (False, second.id)
        scene.wait_for_report("begin", id=second.id)
        wait_for("the first is discarded", lambda: fleet.says(first.id, "Discarding"))
        with pytest.raises(TaskRevokedError):
            first.get(timeout=LIMIT)
        assert fleet.send(scenarios.unique_to_the_end, scene.key).id == second.id
        scene.open_gate()
        assert second.get(timeout=LIMIT)["held"] is True
        scene.wait_until_unreserved()
        assert not scene.reported("begin", id=first.id)


@fleets("prefork", "rabbitmq")
class TestUntilEnd:
    def test_the_key_is_reserved_until_the_body_ends(self, fleet, scene):
        """Duplicates get the result of the one that runs; after it the key is free."""
        first = scene.begin(fleet, scenarios.unique_to_the_end)
        again = fleet.send(scenarios.unique_to_the_end, scene.key)
        assert (again.id, again.duplicate) == (first.id, True)
        scene.open_gate()
        assert again.get(timeout=LIMIT)["held"] is True
        scene.wait_until_unreserved()
        assert len(scene.reported("begin")) == 1


class TestRenewals:
    @PREFORK
    def test_what_outlives_its_lease_keeps_its_key(self, fleet, scene):
        """The main process renews it: the child is stopped, or the lock's expiry is fixed."""
        other = Scene(f"{scene.key}-other", scene.redis)
        stopped = fleet.send(scenarios.unique_to_the_end, scene.key)
        fixed = fleet.send(scenarios.unique_beyond_its_lock, other.key)
        scene.wait_for_report("begin")
        other.wait_for_report("begin")
        pid = scene.lease.holder["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            other.wait_until_free()
            for one, sent in ((scene, stopped), (other, fixed)):
                wait_for(
                    "three timeouts",
                    lambda one=one: one.reservation is None or one.reservation.since > 5,
                )
                assert one.reserved_for == sent.id
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            for one in (scene, other):
                one.open_gate()
        assert stopped.get(timeout=LIMIT)["held"] is True
        assert fixed.get(timeout=LIMIT)["held"] is False
        scene.wait_until_unreserved()
        other.wait_until_unreserved()


class TestDeaths:
    @PREFORK
    def test_a_dead_process_frees_its_key(self, fleet, scene):
        """The main process ends the reservation with the lease."""
        first = scene.begin(fleet, scenarios.unique_to_the_end)
        os.kill(scene.lease.holder["pid"], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            first.get(timeout=LIMIT)
        assert_the_next_is_sent(fleet, scene, scenarios.unique_to_the_end)


@PREFORK
def test_a_time_limit_that_ends_a_wait_frees_its_key(fleet, scene):
    """No body has begun that could end the reservation."""
    scene.begin(fleet)
    second = fleet.send(scenarios.unique_in_line, scene.key, soft_time_limit=1)
    wait_for("its limit is over", second.ready)
    assert isinstance(second.result, SoftTimeLimitExceeded)
    assert_the_next_is_sent(fleet, scene, scenarios.unique_in_line)


@PREFORK
class TestReplacing:
    def test_twenty_editions_are_one_run(self, fleet, scene):
        """A debounce: the newest runs when its time has come, and the others end as REVOKED."""
        scene.open_gate()
        results = [
            fleet.send(scenarios.index, scene.key, number, countdown=1.5)
            for number in range(EDITIONS)
        ]
        assert results[-1].get(timeout=LIMIT) == EDITIONS - 1
        for number, older in enumerate(results[:-1], 1):
            wait_for("an older one ends", older.ready)
            assert older.state == states.REVOKED
            assert any(newer.id in str(older.result) for newer in results[number:])
        assert editions_run(scene) == [EDITIONS - 1]
        scene.wait_until_unreserved()
        assert scene.redis.keys(f"{scene.lock}*") == [f"{scene.lock}:unique"]

    def test_an_edition_that_is_due_while_an_older_one_runs_is_not_lost(self, fleet, scene):
        """It is parked.  The newest is the last that runs, also if it is due at once."""
        first = fleet.send(scenarios.index, scene.key, 1)
        scene.wait_for_report("ran", edition=1)
        second = fleet.send(scenarios.index, scene.key, 2, countdown=SOON)
        scene.wait_for_line(1)
        third = fleet.send(scenarios.index, scene.key, 3, countdown=SOON)
        fourth = fleet.send(scenarios.index, scene.key, 4)
        scene.open_gate()
        assert [first.get(timeout=LIMIT), fourth.get(timeout=LIMIT)] == [1, 4]
        for replaced in (second, third):
            with pytest.raises(TaskRevokedError, match="replaces it"):
                replaced.get(timeout=LIMIT)
        assert editions_run(scene) == [1, 4]
        scene.wait_until_unreserved()
        assert_nothing_waits(scene)

    def test_one_that_is_parked_is_replaced(self, fleet, scene):
        """At its turn it learns of the newer message, and gives its turn on."""
        holder = scene.begin(fleet)
        results = [fleet.send(scenarios.index, scene.key, 1)]
        scene.wait_for_line(1)
        results.append(fleet.send(scenarios.index, scene.key, 2))
        scene.wait_for_line(2)
        scene.open_gate()
        holder.get(timeout=LIMIT)
        assert results[1].get(timeout=LIMIT) == 2
        with pytest.raises(TaskRevokedError, match=results[1].id):
            results[0].get(timeout=LIMIT)
        assert editions_run(scene) == [2]
        assert_no_copy_would_run(scene, results[0].id)

    @pytest.mark.parametrize(
        "task", [scenarios.hold_or_queue, scenarios.hold_or_queue_late], ids=["early", "late"]
    )
    def test_one_that_was_parked_under_another_key_is_replaced(self, fleet, scene, task):
        """Its reservation is older than its lock_key.  It has claimed its turn when it learns."""
        old, task_id = f"dislock:{{old-{scene.key}}}", str(uuid.uuid4())
        holder = scene.begin(fleet)
        write_record(scene, old, "-", "-", mark="abc", confirmed=2, by="newer")
        headers = noted(unique=[old, "start", "abc", 1])
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


class TestInLine:
    """A line of one, in which the newest is: those that are displaced have ended."""

    @PREFORK
    @pytest.mark.parametrize("until", ["start", "end"])
    def test_one_that_is_displaced_frees_its_key(self, fleet, scene, until):
        """By a message that was sent without a reservation: it has a callback."""
        task = getattr(scenarios, f"unique_newest_until_{until}")
        holder = scene.begin(fleet)
        first = fleet.send(task, scene.key)
        scene.wait_for_line(1)
        assert scene.reserved_for == first.id
        then = fleet.signature(scenarios.step, f"{scene.key}-then")
        second = fleet.send(task, scene.key, link=then)
        with pytest.raises(TaskRevokedError):
            first.get(timeout=LIMIT)
        scene.wait_until_unreserved()
        third = fleet.send(task, scene.key)
        assert third.duplicate is False
        with pytest.raises(TaskRevokedError):
            second.get(timeout=LIMIT)
        assert scene.reserved_for == third.id
        scene.open_gate()
        for sent in (holder, third):
            assert sent.get(timeout=LIMIT)["held"] is True
        scene.wait_until_unreserved()


@pytest.fixture
def _impatient(monkeypatch):
    """Let duplicates look often, and expect results soon."""
    monkeypatch.setattr(duplicates, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(duplicates, "STORED_WITHIN", 1.0)


@pytest.mark.usefixtures("_impatient")
class TestWaitingForAnother:
    """A duplicate's get() ends."""

    def test_a_dead_worker_blocks_its_key_for_two_timeouts_at_most(self, start_fleet, scene):
        """Nobody renews it.  The worker had acknowledged the messages: no result will come."""
        other = Scene(f"{scene.key}-other", scene.redis)
        sent = [(scene, scenarios.unique_to_the_end), (other, scenarios.unique_in_queue_renewed)]
        fleet = start_fleet("prefork", "--dislock", ready=False)
        duplicates = []
        for one, task in sent:
            first, again = fleet.send(task, one.key), fleet.send(task, one.key)
            assert again.id == first.id
            duplicates.append(again)
        for one, _ in sent:
            one.wait_for_report("begin")
        fleet.workers[0].kill()
        for again in duplicates:
            with pytest.raises(NoResultError, match="its worker was killed"):
                again.get(timeout=LIMIT)
        for one, _ in sent:
            one.wait_until_free()
            one.wait_until_unreserved()


@PREFORK
class TestStrangers:
    def test_a_message_without_a_reservation_runs(self, fleet, scene):
        """From a sender without the option, or after a failover that lost the reservation."""
        first = fleet.send(scenarios.unique_to_the_end, scene.key)
        scene.redis.delete(f"{scene.lock}:unique")
        scene.wait_for_report("begin")
        scene.open_gate()
        assert first.get(timeout=LIMIT)["held"] is True
        scene.wait_until_unreserved()

    def test_a_message_whose_key_another_has_runs(self, fleet, scene):
        """Its own end leaves the other's reservation alone."""
        write_record(scene, scene.lock, "w", "another")
        first = fleet.send(scenarios.hold, scene.key, headers=headers_of(scene))
        scene.open_gate()
        first.get(timeout=LIMIT)
        assert scene.reserved_for == "another"
        scene.redis.delete(f"{scene.lock}:unique")

    def test_a_forged_header_reserves_nothing_elsewhere(self, fleet, scene):
        """A message that names the key of others does not keep their messages from being sent."""
        others = f"dislock:{{others-{scene.key}}}"
        headers = noted(unique=[others, "end"])
        sent = scene.begin(fleet, headers=headers)
        assert not scene.redis.exists(f"{others}:unique")
        scene.open_gate()
        sent.get(timeout=LIMIT)


def headers_of(scene):
    """The header of a message that was reserved under this key."""
    return noted(unique=[scene.lock, "end"])


def write_record(scene, lock, state, task_id, *, mark="-", confirmed=0, by="-"):
    """Write what another sender has reserved; see _unique.lua."""
    until = scene.redis.time()[0] * 1000 + 60_000
    number, newest = 0, confirmed
    record = (2, state, 1, 1, task_id, until, "nonce", number, 1, mark, newest, confirmed, 0)
    kept = until if confirmed else 0
    scene.redis.set(f"{lock}:unique", " ".join(map(str, (*record, kept, by))), px=60_000)

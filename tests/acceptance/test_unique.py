"""One message of a key at a time, with real workers: when is the key free for the next?"""

import signal
import time

import celery
import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_dislock import NoResultError
from celery_dislock.tasks import duplicates
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Scene, wait_for
from tests.acceptance.scenarios import BRIEF


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
        assert scene.finish(second)["held"]
        scene.wait_until_unreserved()
        assert not scene.reported("begin", id=first.id)

    @PREFORK
    def test_one_that_is_revoked_in_its_queue_frees_its_key_when_it_is_discarded(
        self, fleet, scene
    ):
        """No worker knows its key before, also not those that store at once that it has ended."""
        queue = f"{fleet.queue}-{scene.key}"
        first = scenarios.unique_to_the_end.apply_async((scene.key,), queue=queue)
        fleet.revoke(first.id, reply=True)
        ended = states.REVOKED if celery.VERSION >= (5, 6, 2) else states.PENDING
        assert (first.state, scene.reserved_for) == (ended, first.id)
        fleet.serve(queue)
        scene.wait_until_unreserved()
        fleet.leave(queue)
        wait_for("the result says so", lambda: first.state == states.REVOKED)
        assert not scene.reported("begin")

    def test_one_that_is_revoked_while_it_waits_for_its_rate_limit_frees_its_key(
        self, start_fleet, scene
    ):
        """At once: the worker discards it when the limit admits it, which may take an hour."""
        fleet = start_fleet("prefork")
        fleet.send(scenarios.unique_and_limited, f"{scene.key}-other").get(timeout=LIMIT)
        first = fleet.send(scenarios.unique_and_limited, scene.key)
        wait_for("a worker has it", lambda: fleet.says(first.id, "received"))
        fleet.revoke(first.id, reply=True)
        second = fleet.send(scenarios.unique_and_limited, scene.key)
        assert (second.duplicate, scene.reserved_for) == (False, second.id)
        wait_for("a worker has the second", lambda: fleet.says(second.id, "received"))
        fleet.revoke(second.id, reply=True)
        assert scene.reservation is None


@pytest.mark.extra
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "soft"])
def test_what_runs_in_a_worker_that_shuts_down_keeps_its_key(start_fleet, scene, how):
    """Its timer has ended, or stands still; nobody else renews what has no lease to renew."""
    fleet = start_fleet("prefork", conf={"worker_soft_shutdown_timeout": 6 * BRIEF})
    result = scene.begin(fleet, scenarios.unique_to_a_fixed_end)
    fleet.worker.process.send_signal(how)
    fleet.worker.wait_until_it_says("Warm" if how == signal.SIGTERM else "Initiating Soft")
    since = time.monotonic()
    wait_for("it outlives its time", lambda: time.monotonic() > since + 3 * BRIEF)
    its = Scene(f"fixed:{scene.key}", scene.redis)
    assert its.reserved_for == result.id
    scene.open_gate()
    fleet.worker.wait_until_it_ends()
    its.wait_until_unreserved()
    assert result.get(timeout=LIMIT)["held"] is True


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

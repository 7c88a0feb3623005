"""A worker as its users run it, in the containers of pytest-celery."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from tests.smoke.tasks import PATIENCE, WATCHDOG_TIMEOUT, go, hold, started

if TYPE_CHECKING:
    from pytest_celery import CeleryTestSetup

pytestmark = pytest.mark.smoke

POLL_INTERVAL = 0.05  # seconds


class Steps:
    """Sends tasks, and moves each one from step to step."""

    def __init__(self, backend) -> None:
        self._backend = backend

    def send(self, key: str):
        """Send a task; its token tells it from every other one, also over restarts."""
        token = f"{key}-{uuid.uuid4().hex}"
        result = hold.delay(key, token)
        result.token = token
        return result

    def wait_until_started(self, result) -> None:
        """Wait until the body of the task runs."""
        assert self._backend.blpop([started(result.token)], timeout=PATIENCE), result.state

    def finish(self, result) -> None:
        """Let the body go on, and wait until the task has succeeded."""
        self._backend.rpush(go(result.token), "now")
        assert result.get(timeout=PATIENCE) == result.token

    def has_started(self, result) -> bool:
        """Whether the body has ever run, unless `wait_until_started` has seen it."""
        return bool(self._backend.exists(started(result.token)))


@pytest.fixture
def steps(celery_setup: CeleryTestSetup):
    """What the tests do with the tasks of their own setup."""
    with closing(celery_setup.backend.container.client) as backend:
        yield Steps(backend)


@pytest.fixture
def lock_server(celery_setup: CeleryTestSetup):
    """A client of the broker, where the locks are."""
    with closing(celery_setup.broker.container.client) as client:
        yield client


def test_a_task_holds_its_lock_while_it_runs_and_leaves_nothing_behind(steps, lock_server):
    """The lock is there as long as the body runs, and after it no key of ours is left in Redis."""
    task = steps.send("one")
    steps.wait_until_started(task)
    assert lock_server.exists("dislock:{smoke:one}")

    steps.finish(task)
    assert lock_server.keys("dislock:*") == []


def test_of_two_sends_of_one_key_one_runs(steps):
    """The second send of a key ends as REVOKED without having run; the first one succeeds."""
    first = steps.send("same")
    steps.wait_until_started(first)

    second = steps.send("same")
    with pytest.raises(TaskRevokedError, match="smoke:same"):
        second.get(timeout=PATIENCE)
    assert second.state == states.REVOKED
    assert not steps.has_started(second)

    steps.finish(first)


def test_different_keys_run_at_the_same_time(steps):
    """A second key starts while the first is held, and each is free of the other."""
    left = steps.send("left")
    right = steps.send("right")
    steps.wait_until_started(left)
    steps.wait_until_started(right)

    steps.finish(right)
    steps.finish(left)


def test_the_worker_says_that_locks_are_on(celery_setup: CeleryTestSetup):
    """With ``--dislock`` the log of a worker names its lock server, and stock tasks run as ever."""
    assert celery_setup.ready(ping=True)
    celery_setup.worker.assert_log_exists("Locks are on; lock server: redis://")


def test_a_killed_worker_leaves_its_lock_for_one_timeout(
    celery_setup: CeleryTestSetup, steps, lock_server
):
    """After a worker was killed in mid-task its lock expires, and the next task of the key runs."""
    lost = steps.send("crash")
    steps.wait_until_started(lost)

    celery_setup.worker.kill()
    assert lock_server.pttl("dislock:{smoke:crash}") <= WATCHDOG_TIMEOUT * 1000
    celery_setup.worker.restart()
    give_up = time.monotonic() + PATIENCE
    while lock_server.exists("dislock:{smoke:crash}"):
        assert time.monotonic() < give_up, "the lock outlives its holder"
        time.sleep(POLL_INTERVAL)

    following = steps.send("crash")
    steps.wait_until_started(following)
    steps.finish(following)

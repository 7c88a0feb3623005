"""A lock whose keys somebody has damaged: its tasks end, and no others are concerned."""

from __future__ import annotations

import pytest

from celery_dislock import DamagedLockError, SingletonTask
from celery_dislock.tasks.acquisition import DAMAGED_TRIES
from tests.unit.deliveries import deliver

LOCK = "dislock:{k}"
DAMAGED = DamagedLockError("redis://fake", f"{LOCK!r} is a string, not a hash", LOCK)


@pytest.fixture
def damaged(world, monkeypatch):
    acquire = world.store.acquire

    def ask(locks, *args, **terms):
        if LOCK in locks:
            raise DAMAGED
        return acquire(locks, *args, **terms)

    monkeypatch.setattr(world.store, "acquire", ask)


def declare(app, lock_key="k", **options):
    @app.task(base=SingletonTask, name=f"shop.{lock_key}", lock_key=lock_key, bind=True, **options)
    def task(self):
        return self.lease.key

    return task


@pytest.mark.parametrize("strategy", ["skip", "raise", "retry", "wait", "queue", "reject"])
def test_a_task_of_it_fails_after_some_tries(app, damaged, broker, strategy):
    """It is put off as in an outage, in case somebody mends it; then its error names the key."""
    task, headers = declare(app, lock_on_conflict=strategy), {}
    for _ in range(DAMAGED_TRIES):
        assert deliver(task, headers=headers).info.state == "RETRY"
        headers = broker.sent[-1]["headers"]
    deliver(task, headers=headers)
    result = app.AsyncResult("1")
    assert (result.state, len(broker.sent)) == ("FAILURE", DAMAGED_TRIES)
    assert isinstance(result.result, DamagedLockError)
    assert f"{LOCK!r} is a string, not a hash" in str(result.result)


def test_it_is_told_once_and_no_outage_is(app, damaged, broker, caplog):
    """One line names key and remedy; the server has answered, and other tasks run."""
    task = declare(app)
    for task_id in "123":
        deliver(task, task_id)
    assert deliver(declare(app, "other")).retval == "other"
    told = [message for message in caplog.messages if "delete the key" in message]
    assert len(told) == 1
    assert LOCK in told[0]
    assert "no task can take a lock" not in caplog.text
    assert "answers again" not in caplog.text


def test_an_eager_task_fails_at_once(app, damaged):
    """It has nowhere to be put off to."""
    assert isinstance(declare(app).apply().result, DamagedLockError)

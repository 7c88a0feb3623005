"""How a delivery asks for its lock while the lock server is away, or its strategy has changed."""

from __future__ import annotations

import contextlib

import pytest
from celery.app.task import Context

from celery_dislock import SingletonTask, StoreError
from celery_dislock.messages.headers import HEADER
from celery_dislock.tasks.acquisition import Acquisition
from tests.unit.deliveries import deliver


class TestUnavailable:
    """dislock_on_unavailable: the lock server does not answer."""

    @pytest.fixture
    def export(self, app, world):
        @app.task(base=SingletonTask, lock_key="k", bind=True)
        def export(self):
            return self.lease

        world.store.away = True
        return export

    def test_run_runs_without_the_lock_and_says_so(self, app, export, caplog):
        """The body has no lease, and the log names the task and the key."""
        app.conf.dislock_on_unavailable = "run"
        assert not export.apply(task_id="id-1").get()
        assert "id-1] runs without its lock 'k': lock server " in caplog.text

    @pytest.mark.parametrize("choice", ["raise", "retry"])
    def test_what_may_have_been_granted_is_released_by_the_watchdog(
        self, app, export, broker, world, choice
    ):
        """The process may hang next; the main process would keep the lease that nobody knows of."""
        app.conf.dislock_on_unavailable = choice
        with contextlib.suppress(StoreError):
            deliver(export, "id-1")
        (asked,) = world.store.asked("acquire")
        world.store.leases["dislock:{k}"] = (asked[-1], world.clock() + 30, {})
        world.store.away = False
        world.run(2)
        assert world.store.leases == {}


@pytest.mark.parametrize(
    ("strategy", "keys", "noted", "becomes"),
    [
        ("skip", "k", {}, "skip"),
        ("skip", "k", {"ticket": ["dislock:{k}", "1:0:0"]}, "queue"),
        ("retry", "k", {"ticket": ["dislock:{k}", "1:0:0"]}, "queue"),
        ("skip", ["k", "l"], {"ticket": ["dislock:{k}", "1:0:0"]}, "retry"),
        ("wait", ["k", "l"], {"ticket": ["dislock:{k}", "1:0:0"]}, "wait"),
        ("raise", ["k", "l"], {"retry_until": 2e9}, "retry"),
        ("raise", "k", {"retry_until": 2e9}, "raise"),
    ],
)
def test_what_was_parked_is_not_dropped_for_another_strategy(
    app, world, strategy, keys, noted, becomes
):
    """A ticket, or the end of its retries, in its message says that it has waited already."""

    @app.task(base=SingletonTask, lock_key=keys, lock_on_conflict=strategy)
    def task(): ...

    guard = app.tasks[task.name].dislock_guard
    request = Context({"id": "1", "task": task.name, "hostname": "w1", HEADER: {"v": 1, **noted}})
    names = keys if isinstance(keys, list) else [keys]
    delivery = guard._delivery(task, request, names)
    Acquisition(delivery, guard.runtime)
    assert delivery.options.lock_on_conflict == becomes

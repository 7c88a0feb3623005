"""Which pools await the bodies of tasks, and what a worker says if its own does not."""

import pytest
from celery.concurrency.solo import TaskPool

from celery_dislock import SettingsError, SingletonTask
from celery_dislock.parking.process import runtime_of
from celery_dislock.worker.awaiting import check_bodies


class Awaiting(TaskPool):
    awaits_coroutines = True


class NoMore(Awaiting):
    awaits_coroutines = False


KNOWN = type("AsyncIOPool", (TaskPool,), {"__module__": "celery_aio_pool.pool"})


@pytest.fixture
def app(plain_app):
    @plain_app.task(name="shop.t", base=SingletonTask, shared=False)
    async def task(): ...

    plain_app.finalize()
    return plain_app


@pytest.mark.parametrize("pool", [Awaiting, KNOWN, type("Own", (KNOWN,), {})])
def test_a_pool_awaits_that_says_so_or_is_known_to(app, pool):
    """By an attribute of its class; celery-aio-pool has none."""
    check_bodies(app, pool)
    assert runtime_of(app).unawaited_by is None


@pytest.mark.parametrize("pool", [TaskPool, NoMore])
def test_any_other_pool_is_refused(app, pool):
    """The message names the task, the pool, and what to do."""
    with pytest.raises(SettingsError, match=rf"shop\.t: worker_pool='.*:{pool.__name__}': .* Use"):
        check_bodies(app, pool)


def test_a_pool_that_awaits_needs_greenlet(app, monkeypatch):
    """The worker says so when it starts."""
    monkeypatch.setattr("celery_dislock.servers.bridge.greenlet", None)
    with pytest.raises(SettingsError, match=r"pip install 'celery-dislock\[asyncio\]'"):
        check_bodies(app, Awaiting)


@pytest.mark.parametrize("pool", [TaskPool, Awaiting])
def test_without_locks_a_worker_starts_with_any_pool(app, pool):
    """With --no-dislock nothing is different from plain Celery."""
    app.conf.dislock_enabled = False
    check_bodies(app, pool)

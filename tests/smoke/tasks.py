"""The task of the smoke suite, imported by the tests and copied into the worker's volume."""

from __future__ import annotations

from celery import shared_task

from celery_dislock import SingletonTask

WATCHDOG_TIMEOUT = 3.0  # seconds: so long a lock outlives a worker that was killed
PATIENCE = 60  # seconds until a task or a test gives up waiting for the other


def started(token: str) -> str:
    """Name of the list in the result backend in which a task says that its body runs."""
    return f"started:{token}"


def go(token: str) -> str:
    """Name of the list in the result backend in which a test lets the task go on."""
    return f"go:{token}"


@shared_task(
    bind=True,
    base=SingletonTask,
    lock_key="smoke:<key>",
    lock_watchdog_timeout=WATCHDOG_TIMEOUT,
)
def hold(self, key: str, token: str) -> str:
    """Hold the lock until the test says go; the token tells this step from all others."""
    redis = self.app.backend.client
    redis.rpush(started(token), "now")
    if redis.blpop([go(token)], timeout=PATIENCE) is None:
        msg = f"nobody let {token} go on"
        raise TimeoutError(msg)
    self.lease.ensure_held()
    return token

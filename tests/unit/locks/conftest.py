"""Locks for plain Python, on a store that the test drives."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.reentrant import ReentrantLock


@pytest.fixture
def make(world):
    """Make a lock of this thread on the world's store."""
    numbers = count(1)
    process = SimpleNamespace(
        store_here=world.store,
        host="here",
        pid=42,
        owner_name=lambda start: f"{start}{next(numbers)}",
        check_patching=lambda: None,
    )
    runtime = SimpleNamespace(
        process=process,
        lock_names=lambda keys: tuple(f"dislock:{{{key}}}" for key in keys),
        lock=lambda keys, options: world.lock(*keys, **vars(options)),
    )

    def make(key="k", *, timeout=None, **options):
        return ReentrantLock(
            *([key], TaskOptions(**options), runtime), timeout=timeout, fair=True, stated=options
        )

    return make

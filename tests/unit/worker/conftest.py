"""A worker and its timer."""

from types import SimpleNamespace

import pytest
from celery.concurrency.prefork import TaskPool
from celery.worker import state


@pytest.fixture
def worker(app, lock_server, monkeypatch):
    """A prefork worker whose timer goes by the driven clock, and the requests that it has."""
    entries = []

    def call_after(seconds, call, args):
        entry = SimpleNamespace(is_due=True)
        entries.append(entry)

        def run():
            if entry.is_due:
                call(*args)

        entry.cancel = lambda: setattr(entry, "is_due", False)
        lock_server.after(seconds, run)
        return entry

    def clear():
        while entries:
            entries.pop().cancel()

    for name in ("reserved_requests", "active_requests", "revoked"):
        monkeypatch.setattr(state, name, set())
    timer = SimpleNamespace(call_after=call_after, clear=clear)
    about = {"app": app, "timer": timer, "pool_cls": TaskPool, "hostname": "w1", "state": state}
    return SimpleNamespace(**about, consumer=SimpleNamespace(task_buckets={"unlimited": None}))

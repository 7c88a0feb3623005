"""What the tests of a worker's steps share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def timer():
    """A worker's timer that the test looks at: what is due, and after how many seconds."""
    due = []

    def call_after(seconds, call, args):
        entry = SimpleNamespace(after=seconds, run=lambda: call(*args))
        entry.cancel = lambda: due.remove(entry) if entry in due else None
        due.append(entry)
        return entry

    return SimpleNamespace(call_after=call_after, due=due)

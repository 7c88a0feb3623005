"""What doctor says of tasks that were parked elsewhere; the rest is tested on a real server."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import stores


class Server:
    """Answers about the last task that came from elsewhere."""

    def __init__(self, answer):
        self.answer = answer

    def run(self, _script, _keys, name, *_arguments):
        assert name == ""  # doctor names nothing
        if isinstance(self.answer, Exception):
            raise self.answer
        return [b"", 0, *self.answer]

    def senders(self):
        raise self.answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ([b"", 0], 0),
        ([b"f" * 16, 12_000], 1),
        ([b"f" * 16, 601_000], 0),
        (StoreError("redis://", "away"), 0),
    ],
)
def test_only_a_task_that_came_lately_is_told(answer, found):
    """One that still has its turn elsewhere comes again within seconds."""
    findings = list(stores.strangers(Server(answer), "dislock"))
    assert len(findings) == found
    assert all("came 12 s ago" in one.what and "drain" in one.remedy for one in findings)


def test_a_server_that_cannot_be_scanned_has_no_finding():
    """Other checks tell that it is away."""
    server = Server(StoreError("redis://", "away"))
    assert list(stores.other_prefixes(server, None, "dislock", "home")) == []

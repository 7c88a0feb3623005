"""What reservations are asked of the server, and what its answers mean; see tests/integration."""

from __future__ import annotations

import pytest

from celery_dislock.scripts import CONFIRM, RESERVE, UNRESERVE
from celery_dislock.tasks.reservations import Reservations, Reserved, Taken


class Server:
    """Gives one answer, and keeps what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def run(self, script, keys, *arguments):
        self.asked.append((script, list(keys), *arguments))
        return self.answer


@pytest.mark.parametrize(
    ("answer", "meant"),
    [
        ([1, 2500], Reserved(2.5)),
        ([0, b"a%20b", b"w"], Taken("a b", is_sent=True)),
        ([0, b"a", b"r"], Taken("a", is_sent=True)),
        ([0, b"a", b"s"], Taken("a", is_sent=False)),
    ],
)
def test_what_reserving_answers(answer, meant):
    """Ids come back as they were given; a message that is being sent may never come."""
    server = Server(answer)
    assert Reservations(server).reserve("dislock:{k}", "a b", 10.0, replaces=True) == meant
    assert server.asked == [(RESERVE, ["dislock:{k}"], "a%20b", 10_000, 1)]


@pytest.mark.parametrize("answer", [0, 1])
def test_confirming_and_ending(answer):
    """Whether the key was reserved for this task."""
    server = Server(answer)
    reservations = Reservations(server)
    assert reservations.confirm("dislock:{k}", "a", 2.0) is bool(answer)
    assert reservations.end("dislock:{k}", "a") is bool(answer)
    assert server.asked == [
        (CONFIRM, ["dislock:{k}"], "a", 2000, 0),
        (UNRESERVE, ["dislock:{k}"], "a"),
    ]

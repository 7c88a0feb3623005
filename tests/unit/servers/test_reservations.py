"""What reservations are asked of the server, and what its answers mean; see tests/integration."""

from __future__ import annotations

import pytest

from celery_dislock.scripts import BEGIN, CONFIRM, RESERVE, UNRESERVE
from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.reservations import Reservation, Reservations, Reserved, Taken

LOCK = "dislock:{k}"


class Server:
    """Gives one answer, and keeps what it was asked."""

    def __init__(self, answer=None):
        self.answer = answer
        self.asked = []

    def run(self, script, keys, *arguments):
        self.asked.append((script, list(keys), *arguments))
        return self.answer

    def run_many(self, script, calls, *, within):
        self.asked.append((script, calls, within))


@pytest.mark.parametrize(
    ("answer", "meant"),
    [
        ([1, 2500], Reserved(2.5)),
        ([0, b"a%20b", b"w"], Taken("a%20b", is_sent=True)),
        ([0, b"a", b"r"], Taken("a", is_sent=True)),
        ([0, b"a", b"s"], Taken("a", is_sent=False)),
    ],
)
def test_what_reserving_answers(answer, meant):
    """Whose the key is; a message that is being sent may never come."""
    server = Server(answer)
    assert Reservations(server).reserve(LOCK, "a%20b", 10.0, replaces=True) == meant
    assert server.asked == [(RESERVE, [LOCK], "a%20b", 10_000, 1)]


@pytest.mark.parametrize("answer", [0, 1])
def test_confirming_and_ending(answer):
    """Whether the key was reserved for this task."""
    server = Server(answer)
    reservations = Reservations(server)
    assert reservations.confirm(LOCK, "a", 2.0) is bool(answer)
    assert reservations.end(LOCK, "a") is bool(answer)
    assert server.asked == [(CONFIRM, [LOCK], "a", 2000, 0), (UNRESERVE, [LOCK], "a")]


@pytest.mark.parametrize("runs", [False, True])
def test_keeping(runs):
    """Each for the time that it states, and all in one round trip."""
    server = Server()
    kept = [Reservation(LOCK, "a", "end", 2.0), Reservation("dislock:{l}", "b", "start", 3.0)]
    Reservations(server).keep(kept, runs=runs, within=0.5)
    calls = [(LOCK, "a", 2000, int(runs)), ("dislock:{l}", "b", 3000, int(runs))]
    assert server.asked == [(CONFIRM, calls, 0.5)]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_beginning(elsewhere):
    """The script is told what becomes of the reservation while the task runs."""
    server = Server()
    Reservations(server).begin(Reservation(LOCK, "a", "end", 2.0), elsewhere=elsewhere)
    assert server.asked == [(BEGIN, [LOCK], "a", "end", 2000, int(elsewhere))]


def test_a_task_that_was_replaced_does_not_begin():
    """The answer is the id of the task by which it was replaced."""
    with pytest.raises(Replaced, match="newer"):
        Reservations(Server(b"newer")).begin(Reservation(LOCK, "a", "end", 2.0))

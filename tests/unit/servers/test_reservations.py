"""What reservations are asked of the server, and what its answers mean; see tests/integration."""

from __future__ import annotations

import pytest

from celery_dislock.scripts import CONFIRM, RESERVE
from celery_dislock.servers.reservations import Reservation, Reservations, Reserved, Taken
from celery_dislock.servers.view import ReservationState, parse_reservation

LOCK = "dislock:{k}"
KEY = f"{LOCK}:unique"
MINE = Reservation(LOCK, "a%20b", "end", 2.0, "ab", 7)


class Server:
    """Gives one answer, and keeps what it was asked."""

    name = "redis://fake"

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
        ([1, 2500, b"cd", 8], Reserved(2.5, "cd", 8)),
        ([0, b"a%20b", b"w", b"1"], Taken("a%20b", is_sent=True, has_result=True)),
        ([0, b"a", b"r", b"0"], Taken("a", is_sent=True, has_result=False)),
        ([0, b"a", b"d", b"1"], Taken("a", is_sent=True)),
        ([0, b"a", b"s", b"1"], Taken("a", is_sent=False)),
    ],
)
def test_what_reserving_answers(answer, meant):
    """Whose the key is; a message that is being sent may never come."""
    server = Server(answer)
    assert Reservations(server).reserve(MINE, "nonce", replaces=True, has_result=False) == meant
    assert server.asked == [(RESERVE, [KEY], "a%20b", 2000, 1, "nonce", 0)]


@pytest.mark.parametrize("runs", [False, True])
def test_keeping(runs):
    """Each for the time that it states, and all in one round trip."""
    server = Server()
    kept = [MINE, Reservation("dislock:{l}", "b", "start", 3.0)]
    Reservations(server).keep(kept, runs=runs, within=0.5)
    calls = [
        (KEY, "a%20b", "ab", 7, 2000, int(runs)),
        ("dislock:{l}:unique", "b", "-", 0, 3000, int(runs)),
    ]
    assert server.asked == [(CONFIRM, calls, 0.5)]


# What is kept of a key


def written(state=b"w", ends=61_000):
    return b"2 %s 1000 500 a%%20b %d cafe 7 1 ab 9 7 6 90000 x" % (state, ends)


@pytest.mark.parametrize(
    ("state", "word"),
    [(b"s", "being sent"), (b"w", "waiting"), (b"r", "running"), (b"d", "ended")],
)
def test_a_record_of_a_reserved_key(state, word):
    """For whom, since when, and for how much longer; what it says ends this reservation alone."""
    found = parse_reservation(3000, written(state))
    assert found == ReservationState("a b", word, 2.0, 58.0, "ab", 7)
    assert Reservation.of(LOCK, found).identity == MINE.identity


def test_a_clock_that_was_set_back_makes_nothing_younger_than_now():
    """A failover can do that."""
    assert parse_reservation(500, written()).since == 0.0


@pytest.mark.parametrize(
    "record",
    [b"", written(b"-"), written(ends=3000), written(b"x"), b"1 w 1000 500 a ", written() + b"\n"],
)
def test_a_key_that_is_free_has_none(record):
    """Its numbers may be kept, its time may be over, or an earlier version has written it."""
    assert parse_reservation(3000, record) is None

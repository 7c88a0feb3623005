"""What a script's answer about parked tasks means, and whose turns are published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.parking.store import Dropped, Lines, Ticket
from celery_dislock.scripts import DROP, ENLIST, PARK, SWEEP
from celery_dislock.servers.replies import Done, Full, Granted, Parked, Refused, Swept, Turn

LOCK = "dislock:{k}"
TICKET = Ticket("1:0:0", "1@", marked=True, message=b"m", task="a.b")
NAMED = '"task":"a.b"'  # a task, as its message has it
GIVEN = [b"dislock:{k}", b"2:0:0", b"message\n\x00", b"dislock:{j}", b"3:1:0", b""]
TURNS = [Turn(LOCK, "2:0:0", b"message\n\x00"), Turn("dislock:{j}", "3:1:0", b"")]
LEASE = [1500, b"~other", b'{"id": "7"}']  # one whose owner is done with it
HELD = Refused("other", 1.5, {"id": "7"})


class Server:
    """Answers what it is told to, and notes what it was asked."""

    def __init__(self):
        self.reply = None
        self.asked = []

    def run(self, script, keys, *arguments):
        self.asked.append((script, keys, arguments))
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def together(self, keys):
        return [keys]

    def run_many(self, script, calls, *, within):
        assert within > 0
        self.asked.append((script, calls))
        return self.reply


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def published():
    return []


@pytest.fixture
def lines(server, published):
    return Lines(server, "dislock", "home", published.append)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ([0, [], 4, *LEASE], replace(HELD, place=4)),
        ([1, [], b"1700000000000000", 0], Granted((1_700_000_000_000_000,))),
        ([1, [], b"5", 1], Granted((5,), claimed=True)),
        ([2, [], 3, [], *LEASE], Parked(3, HELD, {})),
        ([2, [], 3, [b"2:0:0", b"old"], *LEASE], Parked(3, HELD, {"2:0:0": b"old"})),
        ([3, []], Done()),
        ([4, [], 9, *LEASE], Full(9, HELD)),
    ],
)
def test_an_answer_says_what_became_of_a_task(lines, server, published, reply, answer):
    """Five answers, each with what its receiver needs to know."""
    server.reply = reply
    assert lines.park(LOCK, "owner", 30.0, "{}", TICKET) == answer
    assert published == []


@pytest.mark.parametrize("reply", [[0, GIVEN, 4, *LEASE], [1, GIVEN, b"5", 1], [3, GIVEN]])
def test_turns_that_an_answer_brings_are_published(lines, server, published, reply):
    """Whatever it says: whoever asks first after a crash, hands on."""
    server.reply = reply
    lines.park(LOCK, "owner", 30.0, "{}", TICKET)
    assert published == [TURNS]


def test_a_sweep_publishes_and_tells_what_it_found(lines, server, published):
    """A line that could not be looked at is missing; a ticket of any bytes ends no sweep."""
    away = StoreError("redis://fake", "away")
    server.reply = [[2, GIVEN, [b"2:0:0", b"old"], [b"\xff:0:0"]], away, [0, [], [], []]]
    assert lines.sweep(["a", "b", "c"]) == {
        "a": Swept(2, {"2:0:0": b"old"}, ("\ufffd:0:0",)),
        "c": Swept(0, {}),
    }
    assert published == [TURNS]
    assert server.asked == [(SWEEP, [("a", "home"), ("b", "home"), ("c", "home")])]
    assert lines.sweep([]) == {}
    assert len(server.asked) == 1


@pytest.mark.parametrize(("before", "told"), [(b"9" * 5000, None), (b"", None), (b"3", 3)])
def test_a_limit_that_nobody_has_set_is_none(lines, server, before, told):
    """The number before was written by hand; the new one is set, and that is no error."""
    server.reply = [before, []]
    assert lines.limit(LOCK, 1) == told


@pytest.mark.parametrize(
    ("reply", "resent", "dropped"),
    [
        ([1, GIVEN, b"m", 1], False, Dropped(b"m", ours=True)),
        ([1, GIVEN, b"m", 0], False, Dropped(b"m", ours=False)),
        ([2, GIVEN], False, Dropped(b"", ours=False)),
        ([0, GIVEN], False, None),
        ([0, GIVEN], True, Dropped(b"", ours=False)),  # the sweep tells what the first has dropped
    ],
)
def test_what_was_dropped(server, lines, published, reply, resent, dropped):
    """Who tells its end; and whose turn it is now is published."""
    server.exchange = lambda *asked: (server.asked.append(asked), (reply, resent))[1]
    assert lines.drop(LOCK, "1:0:0", "note") == dropped
    assert server.asked == [(DROP, [LOCK], "home", "1:0:0", "note")]
    assert published == [TURNS]


def test_the_index_is_read_in_pages(server, lines):
    """A lock may come on two of them, and is named once."""
    pages = [[3, b"7", [b"a", b"1", b"b", b"1"]], [3, b"0", [b"b", b"1", b"c", b"1"]]]
    server.run = lambda _script, _keys, cursor, _count: pages[cursor == b"7"]
    assert list(lines.names()) == ["a", "b", "c"]


def test_a_line_on_another_node_than_the_index_is_listed_by_the_client(lines, server):
    """Before a task is put in it, with the lock's own time of that; and after: it may be lost."""
    asked, replies = [], [[6, [], b"7"], None, [2, [], 3, [], *LEASE], None]
    server.together = lambda keys: [[key] for key in keys]
    server.run = lambda script, _keys, *given: asked.append((script, given[-2:])) or replies.pop(0)
    assert lines.park(LOCK, "owner", 30.0, "{}", TICKET) == Parked(3, HELD, {})
    listed = (ENLIST, (LOCK,))
    assert asked == [(PARK, ("", b"0")), listed, (PARK, ("", b"7")), listed]

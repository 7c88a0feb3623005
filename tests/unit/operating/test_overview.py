"""What the lock server tells of a lock, as people are shown it."""

from __future__ import annotations

import json

import pytest

from celery_dislock.operating.overview import Overview, find_parked, seen
from tests.unit.cli.conftest import holder, lock, place

NOW = 1_700_000_000_000  # ms
NAME = "dislock:{export:7}"
HOLDER = {"task": "shop.export", "id": "9b1d", "worker": "w", "pid": 7, "host": "h", "timeout": 30}
NOTHING = [NOW, [], 0, [], [], 0, b"", -2, b"", -2]


def reply(**changed):
    names = (
        "now",
        "leases",
        "waiting",
        "line",
        "turns",
        "aside",
        "unique",
        "unique_ms",
        "limit",
        "limit_ms",
    )
    return [changed.get(name, given) for name, given in zip(names, NOTHING, strict=True)]


def lease(owner=b"me", remaining=27_000, **about):
    written = json.dumps({**HOLDER, **about}).encode()
    return [owner, NOW + remaining, b"5", b"x", written, NOW - 750_000]


def parked(task_id="t", turns=0, **headers):
    about = {"headers": {"task": "shop.export", "id": task_id, **headers}}
    joined = (NOW - 5000) * 1000
    return f"1 {joined} {turns} 30000 x 1 home 1 {json.dumps(about)}".encode()


def test_a_lock_of_which_nothing_is_known():
    """It does not exist, for people."""
    found = seen(NAME, NOTHING)
    assert (found.key, found.name, found.exists) == ("export:7", NAME, False)


def test_a_lease():
    """By the server's clock: held since, renewed since, until when."""
    (found,) = seen(NAME, reply(leases=lease())).holders
    assert (found.held, found.renewed, found.remaining) == (750.0, 3.0, 27.0)
    assert (found.owner, found.token, found.mode, found.expiring) == ("me", 5, "exclusive", False)
    assert (found.task, found.id, found.host) == ("shop.export", "9b1d", "h")


@pytest.mark.parametrize(
    ("given", "renewed", "expiring", "may_live", "can"),
    [
        (lease(), 3.0, False, True, True),
        (lease(remaining=10_000), 20.0, False, False, True),
        (lease(timeout=None), None, False, True, True),
        (lease(owner=b"~me"), None, True, False, False),
        (lease(owner=b"t:0:0#", parked=True), 3.0, False, False, False),
        (lease(id=None), 3.0, False, True, False),
    ],
)
def test_whether_a_holder_lives(given, renewed, expiring, may_live, can):
    """One that was not renewed for half of its timeout has nobody; an unknown one may live."""
    (found,) = seen(NAME, reply(leases=given)).holders
    assert (found.renewed, found.expiring) == (renewed, expiring)
    assert (found.may_live, found.can_be_terminated) == (may_live, can)
    assert found.owner in {"me", "t:0:0#"}


def test_places_are_counted_from_the_head_of_the_line():
    """Also on a later page; a waiter that is not parked has no ticket."""
    joined = str((NOW - 5000) * 1000).encode()
    waits = f"1 {NOW} 30000 x 1 {json.dumps(HOLDER)}".encode()
    line = [b"t:0:0#", joined, parked(argsrepr="(7,)"), b"w@w:1/1", joined, waits]
    first, second = seen(NAME, reply(waiting=9, line=line), first=6).line
    assert (first.place, first.ticket, first.task, first.args) == (
        7,
        "t:0:0",
        "shop.export",
        "(7,)",
    )
    assert (second.place, second.ticket, second.parked, second.id) == (8, "", False, "9b1d")
    assert first.waiting == pytest.approx(5.0)


@pytest.mark.parametrize(
    "record", [b"", b"rubbish", b"1 2 3 4 x 1 home 1 {", b"1 2 3 4 x 1 home 1 []"]
)
def test_a_parked_task_that_nobody_can_read_has_its_ticket(record):
    """It is shown all the same, so that it can be dropped."""
    (turn,) = seen(NAME, reply(turns=[b"t%40:0:0", 0, record])).turns
    assert (turn.ticket, turn.id, turn.place) == ("t%40:0:0", "t@", 0)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"unique": b"1 w 1699999997000 1 id-1 ", "unique_ms": 60_000},
            ("id-1", "waiting", 3.0, 60.0),
        ),
        ({"unique": b"rubbish"}, None),
    ],
)
def test_a_reservation(changed, told):
    """Whose message the key is reserved for; nothing where it cannot be read."""
    assert seen(NAME, reply(**changed)).reservation == told


def test_a_limit():
    """What an operator has set, by whom, and for how long."""
    found = seen(NAME, reply(limit=b"1 0 1699999997000 by me", limit_ms=60_000))
    assert (found.limit, found.limit_remaining, found.limit_note) == (0, 60.0, "by me")
    assert found.exists
    assert seen(NAME, reply(limit=b"1 2 1699999997000 ", limit_ms=-1)).limit_remaining is None


class Server:
    """Answers about each lock with nothing, and has the keys that a test gives it."""

    kind = "single"

    def __init__(self, *pages):
        self.pages = list(pages)
        self.asked = []

    def run(self, _script, keys, *arguments):
        self.asked.append((*keys, *arguments))
        return NOTHING

    def run_many(self, _script, calls, *, within):
        assert within > 0
        self.asked.append(len(calls))
        return [NOTHING for _ in calls]

    def senders(self):
        def send(_scan, cursor, *_how):
            at = int(cursor)
            following = at + 1 if at + 1 < len(self.pages) else 0
            return str(following).encode(), self.pages[at]

        return [send]


def test_each_lock_is_listed_once_however_many_keys_it_has():
    """And a key that belongs to no lock is none."""
    server = Server(
        [b"dislock:{a}", b"dislock:{a}:line", b"dislock:lines:x"],
        [b"dislock:{b}:limit", b"dislock:{a}"],
    )
    assert [one.key for one in Overview(server, "dislock").locks()] == ["a", "b"]


def test_locks_are_looked_at_in_pages():
    """So the server answers others in between."""
    server = Server([f"dislock:{{{number}}}".encode() for number in range(250)])
    assert len(list(Overview(server, "dislock").locks())) == 250
    assert server.asked == [100, 100, 50]


def test_a_parked_task_is_searched_in_pages(monkeypatch):
    """Until the end of the line; it may move up meanwhile, and is found once."""
    monkeypatch.setattr("celery_dislock.operating.overview.SEARCHED", 2)
    pages = {
        0: lock(waiting=5, turns=[place(0)], line=[place(1), place(2)]),
        2: lock(waiting=5, line=[place(3), place(2)]),
        4: lock(waiting=4, line=[]),
    }

    class Pages:
        def lock(self, _name, first, most):
            assert most == 2
            return pages[first]

    assert [one.place for one in find_parked(Pages(), NAME, "t2")] == [2]
    assert [one.place for one in find_parked(Pages(), NAME, "t0:0:0")] == [0]
    assert find_parked(Pages(), NAME, "t9") == []


def test_the_fakes_are_what_they_stand_for():
    """A lease of the other tests has the attributes of a true one."""
    (found,) = seen(NAME, reply(leases=lease())).holders
    assert holder()._fields == found._fields

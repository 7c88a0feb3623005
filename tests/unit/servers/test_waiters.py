"""What the lock server tells of those who wait in line, as people are shown it."""

import json

import pytest

from celery_dislock.servers.waiters import (
    UNREADABLE,
    Place,
    parked_place,
    parse_place,
    parse_standing,
    ticket_of_member,
)

NOW = 1_700_000_000_000  # ms
TENANT, DISK, API = "dislock:{tenant:a}", 'dislock:{the "disk" }', "dislock:{api}"
JOINED = str((NOW - 2000) * 1000).encode()
BESIDE = b"%d/%b" % (len(TENANT), TENANT.encode())


def record(stations):
    """Return what look.lua tells of a task that was parked eight seconds ago."""
    message = {"headers": {"task": "shop.call", "id": "a1"}, "routing_key": "celery"}
    head = f"1 {(NOW - 8000) * 1000} 0 30000 home 99 {stations} \n1 {json.dumps(message)}"
    return head.encode()


STATIONS = json.dumps([[TENANT, "x:1", "1"], [DISK, "s:1", "2"], [API, "x:5:9/1000", "3"]])


@pytest.mark.parametrize(
    ("name", "member", "mode", "keeps"),
    [
        (TENANT, b"a1:0:0#", "exclusive", []),
        (DISK, BESIDE + b"a1:0:0##", "shared", ["tenant:a"]),
        (API, BESIDE + b"a1:0:0##", "exclusive", ["tenant:a", 'the "disk" ']),
    ],
)
def test_a_parked_task_is_shown_as_it_stands_at_this_lock(name, member, mode, keeps):
    """Its mode is that of the lock that was looked at, and it keeps those before it."""
    place = parse_place(name, NOW, 3, member, JOINED, record(STATIONS))
    assert (place.ticket, place.place, place.mode, place.keeps) == ("a1:0:0", 3, mode, keeps)
    assert place.stations == ["tenant:a", 'the "disk" ', "api"]
    assert (place.waiting, place.parked_for) == (2.0, 8.0)
    assert place.beside == ("" if name == TENANT else TENANT)
    assert (place.task, place.id, place.routing_key) == ("shop.call", "a1", "celery")


def test_a_task_that_has_its_turn_keeps_all():
    """It has passed the last of its locks, beside whichever it is shown."""
    turn = parked_place(API, NOW, 0, b"a1:0:0#", record(STATIONS))
    assert (turn.place, turn.keeps) == (0, ["tenant:a", 'the "disk" ', "api"])


@pytest.mark.parametrize(
    ("rank", "ends_ms", "starts_ms", "estimate", "place", "turn_ends"),
    [
        (2, 0, 90_500, 0, Place("api", 3, 7, 90.5, is_estimate=False), None),
        (0, 0, 0, 1, Place("api", 1, 7, 0.0, is_estimate=True), None),
        (0, 0, -1, 0, Place("api", 1, 7, None, is_estimate=False), None),
        (-1, NOW + 4000, 250, 0, Place("api", 0, 7, 0.25, is_estimate=False), 4.0),
        (-1, 0, -1, 0, Place("api", 0, 7, None, is_estimate=False), None),
    ],
    ids=["a rate", "soon", "not known", "its turn", "lost"],
)
def test_a_place_is_told(rank, ends_ms, starts_ms, estimate, place, turn_ends):
    """Which of how many, and the seconds until it starts; of a turn also when that ends."""
    where = NOW, API.encode(), rank, b"a1:0:0#", JOINED, record("x:1"), ends_ms
    found = parse_standing([*where, 7, starts_ms, estimate])
    assert (found.place, found.turn_ends) == (place, turn_ends)
    assert (found.lock, found.waiter.place, found.waiter.task) == (API, place.nth, "shop.call")
    assert found.is_lost == (not place.nth and turn_ends is None)
    assert parse_standing(None) is None


@pytest.mark.parametrize(("terms", "mode"), [("s:4", "shared"), ("x:1", "exclusive"), ("?", None)])
def test_who_waits_in_a_slot_is_shown(terms, mode):
    """How it wants the lock, and who it is."""
    record = f'1 {NOW + 5000} 30000 {terms} {{"task":"shop.call","id":"a1"}}'.encode()
    place = parse_place(API, NOW, 2, b"a1@w1:7/1", JOINED, record)
    assert (place.place, place.mode, place.id) == (2, mode or "exclusive", "a1")
    assert (place.waiting, place.ticket) == (2.0, "")


UNREAD = ["[", "[]", "[1]", "[[]]", '[["a"]]', '[["a", 1, "1"]]', '[[{}, "x:1", "1"]]']
UNREAD += ['[["a", "\\ud800", "1"]]', "[" * 5000, STATIONS[:-30]]


@pytest.mark.parametrize(
    ("stations", "told", "mode"),
    [*((one, [UNREADABLE], "exclusive") for one in UNREAD), ("s:4", [], "shared")],
    ids=[*(one[:20] for one in UNREAD), "one lock, which is the one that was looked at"],
)
def test_stations_that_cannot_be_read_are_told_as_such(stations, told, mode):
    """The task is shown all the same, with what its message tells, so that it can be dropped."""
    place = parse_place(API, NOW, 1, b"a1:0:0#", JOINED, record(stations))
    assert (place.stations, place.keeps, place.mode, place.beside) == (told, [], mode, "")
    assert (place.ticket, place.who) == ("a1:0:0", "shop.call[a1]")


@pytest.mark.parametrize("stations", ['[["\\ud800", "x:0", "1"]]', '[["", "", ""], ["{", "", ""]]'])
def test_names_of_strangers_are_shown_as_text(stations):
    """A key that is none, and terms that are none, hide nothing else."""
    place = parse_place(API, NOW, 1, b"a1:0:0#", JOINED, record(stations))
    assert all(place.stations)
    assert place.keeps == []


@pytest.mark.parametrize(
    ("member", "ticket", "beside"),
    [
        (b"a1:0:0#", "a1:0:0", ""),
        (b"13/dislock:{a#/}a1:0:0##", "a1:0:0", "dislock:{a#/}"),
        ("12/dislock:{ü}x:0:0##".encode(), "x:0:0", "dislock:{ü}"),
        (b"#", "", ""),
        (b"##", "#", ""),
        (b"x##", "x#", ""),
        (b"9/ab##", "", "ab"),
        (b"0/ab##", "ab", ""),
        (b"-1/ab##", "-1/ab#", ""),
        (b"%b/ab##" % (b"9" * 5000), "9" * 5000 + "/ab#", ""),
        (b"2/\xff\xfe\xfd##", "\ufffd", "\ufffd\ufffd"),
    ],
)
def test_no_member_stops_the_others_from_being_shown(member, ticket, beside):
    """One that nobody can read is told as it stands."""
    assert ticket_of_member(member) == (ticket, beside)
    place = parse_place(API, NOW, 1, member, b"nan", b"")
    assert (place.ticket, place.parked, place.waiting) == (ticket, True, 0.0)

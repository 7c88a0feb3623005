"""What the lock server tells of a lock, as people are shown it."""

import json

import pytest

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.servers.view import ReservationState, parse_reservation, state_of
from celery_dislock.servers.waiters import parked_message
from celery_dislock.words import for_people

NOW = 1_700_000_000_000  # ms
NAME = "dislock:{export:7}"
SERVER = "redis://fake"
HOLDER = {"task": "shop.export", "id": "9b1d", "worker": "w", "pid": 7, "host": "h", "timeout": 30}
NOTHING = {
    "now": NOW,
    "leases": [],
    "waiting": 0,
    "line": [],
    "turns": [],
    "aside": 0,
    "unique": b"",
    "ticked": -1,
    "rate": [b"", 0, b""],
    "overrides": [],
}


def reply(**changed):
    return list({**NOTHING, **changed}.values())


def lease(owner=b"me", remaining=27_000, **about):
    written = json.dumps({**HOLDER, **about}).encode()
    return [owner, NOW + remaining, b"5", b"x", written, NOW - 750_000]


def parked(task_id="t", turns=0, **headers):
    about = {"headers": {"task": "shop.export", "id": task_id, **headers}}
    joined = (NOW - 5000) * 1000
    return f"1 {joined} {turns} 30000 home 99 x:1 \n1 {json.dumps(about)}".encode()


def limited(limit):
    return {"overrides": [b"limit", b"%d" % limit, NOW - 3000, NOW + 60_000, b"by me"]}


@pytest.mark.parametrize(
    ("given", "renewed", "expiring", "may_live", "can"),
    [
        (lease(), 3.0, False, True, True),
        (lease(remaining=9_000), 21.0, False, True, True),
        (lease(remaining=11_000), 19.0, False, True, True),
        (lease(timeout=None), None, False, True, True),
        (lease(owner=b"~me"), None, True, False, False),
        (lease(owner=b"t:0:0#", parked=True), 3.0, False, False, False),
        (lease(id=None), 3.0, False, True, False),
    ],
)
def test_whether_a_holder_lives(given, renewed, expiring, may_live, can):
    """One that has missed two renewals may be stopped or cut off; an unknown one may live."""
    state = state_of(SERVER, NAME, reply(leases=[*given, *lease(b"other")]))
    found, _ = state.holders
    assert (found.renewed, found.expiring) == (renewed, expiring)
    assert (found.may_live, found.can_be_terminated) == (may_live, can)
    assert found.owner in {"me", "t:0:0#"}
    assert found.is_overdue is (renewed == 21.0)


def test_places_are_counted_from_the_head_of_the_line():
    """Also on a later page; a waiter that is not parked has no ticket."""
    joined = str((NOW - 5000) * 1000).encode()
    waits = f"1 {NOW} 30000 x:1 {json.dumps(HOLDER)}".encode()
    line = [b"t:0:0#", joined, parked(argsrepr="(7,)"), b"w@w:1/1", joined, waits]
    first, second = state_of(SERVER, NAME, reply(waiting=9, line=line), first=6).line
    told = (first.place, first.ticket, first.task, first.args)
    assert told == (7, "t:0:0", "shop.export", "(7,)")
    assert (second.place, second.ticket, second.parked, second.id) == (8, "", False, "9b1d")
    assert first.waiting == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        (b"", 0),
        (b"rubbish", 0),
        (b"1 2 3 4 home 3 x:1 \n1 {", 3),
        (b"1 2 3 4 home 4 x:1 \n1 []", 3),
    ],
)
def test_a_parked_task_that_nobody_can_read_has_its_ticket(record, turns):
    """It is shown all the same, so that it can be dropped."""
    (turn,) = state_of(SERVER, NAME, reply(turns=[b"t%40:0:0", 0, record])).turns
    assert (turn.ticket, turn.id, turn.place, turn.turns) == ("t%40:0:0", "t@", 0, turns)


@pytest.mark.parametrize("number", [b"9" * 400, b"9" * 5000])
def test_what_a_waiter_says_of_itself_is_bounded(number):
    """Numbers that nobody can count to are left out, and what people see can be printed."""
    since, counted = (
        b"1 %b 30000 home 4 x:1 \n1 {}" % one for one in (number + b" 0", b"0 " + number)
    )
    line = [b"w@w:1/1", b"inf", b"1 %b 30000 x:1 {}" % number, b"t:0:0#", b"nan", since]
    turns = [b"t:0:0", 0, counted, b"u:0:0", 0, parked(task="\ud800\x1b", id={})]
    found = state_of(SERVER, NAME, reply(waiting=2, line=line, turns=turns))
    assert [len(for_people(one.waiting)) < 30 for one in (*found.line, *found.turns)] == [True] * 4
    assert all(one.who.isprintable() for one in (*found.line, *found.turns))


@pytest.mark.parametrize(
    "changed",
    [
        {"leases": [b"me", NOW, b"inf", b"x", b"{}", NOW]},
        {"leases": [b"me", NOW, b"5"]},
        {"overrides": [b"limit", b"x", NOW, 0, b"me"]},
        {"overrides": [b"limit"]},
        {"line": [b"only one"]},
    ],
)
def test_a_lock_that_cannot_be_read_is_damaged(changed):
    """The error names the server and the lock, for whoever lists the others."""
    with pytest.raises(DamagedLockError, match="cannot be read") as damaged:
        state_of(SERVER, NAME, reply(**changed))
    assert (damaged.value.server, damaged.value.lock) == (SERVER, NAME)


@pytest.mark.parametrize(
    ("about", "stuck"),
    [({}, True), ({"leases": lease()}, False), (limited(0), False), (limited(2), True)],
)
def test_a_line_is_stuck_that_nobody_is_before(about, stuck):
    """Whoever releases a lock hands it on, so a free lock has no line."""
    assert state_of(SERVER, NAME, reply(waiting=1, **about)).is_stuck is stuck
    assert not state_of(SERVER, NAME, reply(**about)).is_stuck


@pytest.mark.parametrize(
    ("written", "mode", "cost", "spent"),
    [
        (b"x", "exclusive", 1, None),
        (b"x3", "exclusive", 3, None),
        (b"x90000:12", "exclusive", 90_000, 12),
        (b"s:0", "shared", 1, 0),
        (b"z3", "exclusive", 3, None),
        (b"?", "exclusive", 1, None),
    ],
)
def test_a_mode_says_what_a_lease_costs(written, mode, cost, spent):
    """And what was spent; a mode that only a later release knows is the strictest."""
    leases = [b"me", NOW + 9000, b"5", written, b"{}", NOW]
    (found,) = state_of(SERVER, NAME, reply(leases=leases)).holders
    assert (found.mode, found.cost, found.spent) == (mode, cost, spent)


@pytest.mark.parametrize("remaining", [1, 299_000])
def test_what_is_kept_for_a_task_is_no_holders_fault(remaining):
    """The sweep renews it: nobody is overdue or runs a body, and those behind it are not stuck."""
    kept = lease(b"t:0:0#", remaining, parked=True, waits="dislock:{api}", timeout=None)
    state = state_of(SERVER, NAME, reply(waiting=1, leases=kept))
    (one,) = state.holders
    assert (one.is_kept, one.waits, one.renewed, one.timeout) == (True, "api", None, None)
    wrong = one.is_overdue, one.is_renewed, one.may_live, one.can_be_terminated
    assert not any((*wrong, state.is_stuck))
    turn = lease(b"t:0:0#", parked=True)
    assert not state_of(SERVER, NAME, reply(leases=turn)).holders[0].is_kept


@pytest.mark.parametrize(
    ("kept", "home"),
    [(parked(), "home"), (parked()[parked().index(b'1 {"') :], None), (b"damaged ", None)],
)
def test_a_message_is_taken_out_of_what_was_set_aside(kept, home):
    """With its broker where the record of its ticket was kept as well; rubbish is left as it is."""
    message, found = parked_message(kept)
    assert found == home
    assert message == kept[kept.find(b'1 {"') :] if b"{" in kept else kept


def written(state=b"w", ends=61_000):
    return b"1 %s %d a%%20b 1000 500 cafe 7 1 ab 9 7 6 90000 x" % (state, ends)


@pytest.mark.parametrize(
    ("state", "now", "known"),
    [
        (b"s", 3000, ("being sent", 2.0, 58.0)),
        (b"w", 3000, ("waiting", 2.0, 58.0)),
        (b"r", 3000, ("running", 2.0, 58.0)),
        (b"d", 3000, ("ended", 2.0, 58.0)),
        (b"w", 500, ("waiting", 0.0, 60.5)),  # a clock that was set back, as by a failover
    ],
)
def test_a_record_of_a_reserved_key(state, now, known):
    """For whom, since when, and for how much longer; nothing is younger than now."""
    assert parse_reservation(now, written(state)) == ReservationState("a b", *known, "ab", 7)


@pytest.mark.parametrize(
    "record", [b"", written(b"-"), written(ends=3000), b"1 w 1000", written() + b"\n"]
)
def test_a_key_that_is_free_has_none(record):
    """Its numbers may be kept, its time may be over, or somebody has written it by hand."""
    assert parse_reservation(3000, record) is None

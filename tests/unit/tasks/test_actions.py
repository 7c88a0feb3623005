"""What people do to locks, and what they are told of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from celery_dislock.messages.headers import REPLACED
from celery_dislock.messages.message import Message
from celery_dislock.parking.store import Dropped
from celery_dislock.servers.reservations import Reservation
from celery_dislock.tasks.actions import RUNS, TERMINATED, Actions, BrokerError, one_line
from tests.leaks import SECRET
from tests.staged import RESERVED, holder, lock

LOCK = "dislock:{k}"
TICKET = "t:0:0"


class Process:
    """The store and the lines of a process, which note what they are asked."""

    def __init__(self):
        self.asked = []
        self.dropped = None
        self.leases = []
        self.store = SimpleNamespace(
            lock_server=SimpleNamespace(keeps_lines=True),
            free=lambda *what: self._note("free", *what),
            reservations=SimpleNamespace(end=lambda one: self._note("unreserve", one)),
        )
        self.lines = SimpleNamespace(drop=self._drop)

    def _note(self, *what):
        self.asked.append(what)
        return True

    def _drop(self, *what):
        self._note("drop", *what)
        return self.dropped

    def end_reservation(self, request):
        self._note("end", request.id)

    def tell_replaced(self, *what):
        self._note("tell", *what)


@pytest.fixture
def process():
    return Process()


def message(**headers):
    about = {"task": "t", "id": "t", **headers}
    return Message("", "q", about, None, None, {}, True, b"").to_bytes()


def test_a_dropped_task_is_told_with_its_reason(process):
    """The note that goes into its message names the lock."""
    process.dropped = Dropped(message(), ours=True)
    assert Actions(None, process).drop(LOCK, TICKET) is True
    (_, lock, ticket, note), ended, told = process.asked
    assert (lock, ticket) == (LOCK, TICKET)
    reason = "dropped by an operator from the line for lock 'k'"
    assert json.loads(f"{{{note}}}") == {REPLACED: reason}
    assert ended == ("end", "t")  # its reservation, if it has one
    assert told == ("tell", LOCK, {TICKET: process.dropped.message})


@pytest.mark.parametrize(
    ("dropped", "answer"),
    [(None, False), (Dropped(b"", ours=False), True), (Dropped(message(), ours=False), True)],
)
def test_what_is_not_ours_is_not_told(process, dropped, answer):
    """It was not there, nobody can read it, or another broker's worker tells it."""
    process.dropped = dropped
    assert Actions(None, process).drop(LOCK, TICKET) is answer
    assert "tell" not in [what for what, *_ in process.asked]


@pytest.mark.parametrize(
    ("there", "ends"),
    [
        (RESERVED._replace(since=9.0), True),
        (RESERVED._replace(mark="other"), False),  # under the same id, which somebody uses for all
        (RESERVED._replace(number=8), False),
        (None, False),
    ],
)
def test_a_reservation_is_ended_by_all_that_was_shown_of_it(process, monkeypatch, there, ends):
    """Id, mark and number: a later one stays."""
    actions = Actions(None, process)
    look = SimpleNamespace(lock=lambda _name, **_most: lock(reservation=there))
    monkeypatch.setattr(actions, "_overview", look)
    assert actions.end_reservation(LOCK, RESERVED) is ends
    asked = [("unreserve", Reservation(LOCK, "id-9", mark="5eed", number=7))]
    assert process.asked == (asked if ends else [])


def test_a_message_that_cannot_be_read_is_left_to_who_tells_it(process):
    """It has no reservation that anybody knows of."""
    process.dropped = Dropped(b"rubbish", ours=True)
    assert Actions(None, process).drop(LOCK, TICKET) is True
    assert process.asked[-1] == ("tell", LOCK, {TICKET: b"rubbish"})


def test_servers_without_lines_have_nothing_to_drop(process):
    """Nothing is asked of them."""
    process.store.lock_server.keeps_lines = False
    assert Actions(None, process).drop(LOCK, TICKET) is False
    assert process.asked == []


def test_a_task_is_terminated_by_its_id(process):
    """All workers are told: a copy of it must not run either."""
    told = []
    control = SimpleNamespace(revoke=lambda task_id, **how: told.append((task_id, how)))
    Actions(SimpleNamespace(control=control), process).terminate(holder(), signal="KILL")
    assert told == [("id-1", {"terminate": True, "signal": "KILL"})]


def test_a_broker_that_is_away_is_told_without_its_password(process):
    """What the broker's client raises may have the URL in it."""

    def revoke(*_args, **_kwargs):
        raise ConnectionRefusedError(111, "Connection refused", f"redis://:{SECRET}@h")

    app = SimpleNamespace(control=SimpleNamespace(revoke=revoke))
    with pytest.raises(BrokerError, match="refused") as told:
        Actions(app, process).terminate(holder())
    assert SECRET not in str(told.value)
    assert told.value.__cause__ is None


@pytest.mark.parametrize(("ends_after", "ended"), [(0, True), (3, True), (10_000, False)])
def test_a_lease_is_waited_for(process, monkeypatch, ends_after, ended):
    """Until it has ended, or the time is over; another lease of the lock does not count."""
    mine, other = holder(), holder(token=6)
    looks = []
    clock = iter(range(10_000))
    actions = Actions(None, process, clock=lambda: next(clock), pause=lambda _seconds: None)
    monkeypatch.setattr(actions, "terminate", lambda *_, **__: None)

    def lock(_name, most):
        looks.append(most)
        return SimpleNamespace(holders=[other] if len(looks) > ends_after else [other, mine])

    monkeypatch.setattr(actions, "_overview", SimpleNamespace(lock=lock))
    outcome = actions.terminate_and_free(LOCK, mine, wait=30.0)
    assert outcome == (TERMINATED if ended else RUNS)
    assert len(looks) <= 40


def test_a_note_is_one_short_line():
    """Whatever somebody writes."""
    assert one_line(" a\n b\t c ") == "a b c"
    assert len(one_line("x" * 999)) == 200

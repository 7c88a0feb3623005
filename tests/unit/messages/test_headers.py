"""The notes in a message's headers, and what becomes of those that somebody else has written."""

from __future__ import annotations

import math
import sys

import pytest
from celery.app.task import Context
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_dislock import SingletonTask, StoreError
from celery_dislock.messages.headers import (
    GIVEN_UP,
    HEADER,
    HELD,
    LEFT,
    OWNERS_MOST,
    PUT_OFF,
    READERS,
    REPLACED,
    RETRY_UNTIL,
    SINCE,
    STORE,
    TICKET,
    UNIQUE,
    Notes,
    forget_notes,
    own_turn,
    reservation_of,
    with_notes,
    without_notes,
)
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.reservations import Reservation
from tests.unit.deliveries import arrived, deliver, noted, run
from tests.unit.fakes import FakeLines

LOCK = "dislock:{k}"
LONG_LOCK = f"dislock:{{{'k' * 10_000}}}"
SURROGATE = "\ud800"  # which JSON takes, and UTF-8 does not: nothing can be told the lock server
DEEP: list = []
for _ in range(sys.getrecursionlimit() // 2):
    DEEP = [DEEP]
NO_TIMES = [-1, 0, math.inf, math.nan, 1e300, 10**400, "9", True, {}]

FORGED = [
    *((PUT_OFF, one) for one in [-1, 10**400, "3", 1.5, True, [], math.nan]),
    *((RETRY_UNTIL, one) for one in NO_TIMES),
    *((SINCE, one) for one in NO_TIMES),
    *((HELD, one) for one in ["other@w:1/n.1", "1", "", 7, ["1@w:1/n.1"]]),
    *((HELD, one) for one in ["1@" + "x" * 10_000, f"1@{SURROGATE}:1/n.1"]),
    *((GIVEN_UP, one) for one in ["1@w:1/n.1", [7, 8], ["other@w:1/n.1"], {"a": 1}, 7]),
    (GIVEN_UP, ["1@w:1/n.1", "other@w:1/n.1"]),
    (GIVEN_UP, [f"1@w:1/n.{n}" for n in range(100_000)]),
    *((TICKET, one) for one in ["1:0:0", [], [LOCK], [LOCK, "1:0:0", 1], {"a": 1, "b": 2}]),
    *(
        (TICKET, [LOCK, ticket])
        for ticket in ["other:0:0", "bytes", "1", "1:0", "1:0:0\n", "1:x:0:0", 7]
    ),
    *(
        (TICKET, [lock, "1:0:0"])
        for lock in ["dislock:lines:home", "dislock:{k}:line", "dislock:{k}{l}", LONG_LOCK]
    ),
    (TICKET, [f"dislock:{{{SURROGATE}}}", "1:0:0"]),
    *((LEFT, one) for one in ["", "x" * 10_000, "two\nlines", 7, ["a tag"]]),
    *((STORE, one) for one in ["", "x" * 16, "0123456789ABCDEF", "0" * 17, 7, ["0" * 16]]),
    *((REPLACED, one) for one in ["", "x" * 10_000, "two\nlines", 7, ["why"]]),
    *((header, DEEP) for header in READERS),
]

GENUINE = {
    PUT_OFF: 3,
    RETRY_UNTIL: 2e9,
    HELD: "1@w:1/n.1",
    GIVEN_UP: ["1@w:1/n.2", "1@w:1/n.3"],
    TICKET: [LOCK, "1:0:0"],
    STORE: "0123456789abcdef",
    LEFT: "a tag",
    REPLACED: "a newer task took its place in line for lock 'k'",
    SINCE: 1.5e9,
}


def request_of(header, task_id="1", **about):
    return Context({"id": task_id, "task": "shop.export", HEADER: header, **about})


def read(notes, task_id="1"):
    return Notes.of(request_of({"v": 1, **notes}, task_id), "dislock")


def test_notes_of_this_package_are_read_and_written_again():
    """What a message was sent with is what its task knows, and what its next message says."""
    notes = read(GENUINE)
    assert notes.to_header() == GENUINE
    assert (notes.put_off, notes.held_by, notes.parked) == (3, "1@w:1/n.1", (LOCK, "1:0:0"))


@pytest.mark.parametrize("headers", [None, {}, {"tenant": 7}, "text", [PUT_OFF], GENUINE])
def test_without_notes_there_are_none(headers, caplog):
    """Nothing is said of other headers, whatever they are."""
    nested = {**noted(**GENUINE), "v": 1, **GENUINE}
    for about in ({"headers": headers}, {"headers": nested}, {"x": 1}, {HEADER: {"v": 1}}):
        assert Notes.of(Context({"id": "1", **about}), "dislock") == Notes()
    assert caplog.text == ""


@pytest.mark.parametrize("foreign", [None, {"trace": 1}, "text", {HEADER: {"v": 1, "put_off": 9}}])
def test_a_header_of_the_name_headers_hides_nothing(foreign):
    """Celery puts it in the place of all others; ours is read from the message's own."""
    request = request_of({"v": 1, **GENUINE, UNIQUE: [LOCK, "end"]}, headers=foreign)
    assert Notes.of(request, "dislock").to_header() == GENUINE
    assert own_turn(request, "dislock") == (LOCK, "1:0:0")
    assert reservation_of(request, "dislock").lock == LOCK
    forget_notes(request)
    assert vars(request)[HEADER] == {"v": 1, UNIQUE: [LOCK, "end"]}
    assert Notes.of(request, "dislock") == Notes()


def test_an_eager_task_has_its_notes_among_what_its_caller_gave():
    """It has no message; and a foreign header does not hide them there, either."""
    headers = {**noted(**GENUINE), "headers": {"trace": 1}}
    request = Context({"id": "1", "is_eager": True, "headers": headers})
    assert Notes.of(request, "dislock").to_header() == GENUINE
    forget_notes(request)
    assert request.headers == {"headers": {"trace": 1}}


@pytest.mark.parametrize(
    "forged",
    ["text", 7, 10**400, [], DEEP, {}, {"v": "1"}, {"v": 0}, {"v": True}, {"v": -1}, {1: 2}],
)
def test_a_header_of_our_name_that_we_have_not_written_is_ignored(forged, caplog):
    """Whatever it is: one warning, and no note."""
    request = request_of(forged)
    assert Notes.of(request, "dislock") == Notes()
    assert own_turn(request, "dislock") is reservation_of(request, "dislock") is None
    [told] = caplog.messages
    assert "dislock=" in told
    assert len(told) < 500
    assert without_notes({HEADER: forged, "x": 1}) == {"x": 1}
    assert with_notes({HEADER: forged, "x": 1}, {PUT_OFF: 1}) == {"x": 1, **noted(put_off=1)}


def test_a_header_of_a_later_version_is_ignored_and_left_alone(caplog):
    """What it means is not known here; it was not forged for that."""
    later = {"v": 2, **GENUINE, UNIQUE: [LOCK, "end"]}
    request = request_of(later)
    assert Notes.of(request, "dislock") == Notes()
    assert own_turn(request, "dislock") is reservation_of(request, "dislock") is None
    forget_notes(request)
    assert vars(request)[HEADER] == later
    assert with_notes({HEADER: later}, {PUT_OFF: 1}) == {HEADER: later}
    assert caplog.text == ""


@pytest.mark.parametrize(("header", "note"), FORGED, ids=lambda one: str(one)[:40])
def test_a_note_of_somebody_else_is_ignored_with_one_warning(header, note, caplog):
    """It names task, id and header, is short and of one line, and the other notes count."""
    genuine = {name: value for name, value in GENUINE.items() if name != header}
    assert read({**genuine, header: note}).to_header() == genuine
    [told] = caplog.messages
    assert "shop.export[1]" in told
    assert f"{header}=" in told
    assert len(told) < 500
    assert "\n" not in told


def test_all_that_is_ignored_is_told_at_once(caplog):
    """One message is worth one warning."""
    assert read(dict.fromkeys(READERS, b"\xff")) == Notes()
    assert len(caplog.messages) == 1
    assert all(header in caplog.text for header in READERS)


@pytest.mark.parametrize("task_id", ["order:7", "a@w:1/", "x#", "Ünï", "x" * 100_000, 7])
def test_a_task_knows_its_own_ticket_whatever_its_id(task_id, caplog):
    """Ids come from users: none makes a task's own note look like another's."""
    own = str(task_id).replace("@", "%40")
    notes = read({TICKET: (LOCK, f"{own}:0:0"), HELD: f"{own}@w:1/n.1"}, task_id)
    assert (notes.parked, notes.held_by) == ((LOCK, f"{own}:0:0"), f"{own}@w:1/n.1")
    assert read({TICKET: (LOCK, f"{own}:2:1")}, task_id).parked is None  # of other work
    assert caplog.text == ""


def test_a_turn_under_another_prefix_says_in_which_store_it_was_parked(caplog):
    """Without that it is no turn of a worker that had another prefix: this package says both."""
    other = ["other:{k}", "1:0:0"]
    notes = read({TICKET: other, STORE: "0123456789abcdef"})
    assert notes.parked == tuple(other)
    assert caplog.text == ""
    assert read({TICKET: other}).parked is None
    assert "celery-dislock did not write" in caplog.text
    request = request_of({"v": 1, TICKET: other}, retries=0)
    assert own_turn(request, "dislock") is None
    assert own_turn(request, "other") == tuple(other)


# Beside headers of anybody else

# Celery reads these itself.  Whoever changes them changes what the message is.
OF_CELERY = {*vars(Context), "id", "task", "lang", "argsrepr", "kwargsrepr", "compression"}
OF_CELERY -= {"headers"}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(
    ["headers", "dislock_x", "dislock_ticket", "dislock_delivery", "sentry-trace", "v", "notes"]
)
FOREIGN = st.dictionaries(
    (NAMES | st.text(max_size=10)).filter(lambda name: name not in {*OF_CELERY, HEADER}),
    ANY | st.just({HEADER: {"v": 1, "put_off": 9}}),
    max_size=4,
)


@pytest.fixture
def parking(app, world, monkeypatch):
    """A task that parks, and the lines in which it is parked."""
    process = runtime_of(app).process
    process._publisher, process.lines = object(), FakeLines(world.store)
    return declare(app, lock_on_conflict="queue"), process.lines


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(FOREIGN)
def test_headers_of_anybody_else_hide_nothing_and_are_kept(parking, world, broker, foreign):
    """A message brings its notes and its reservation, and goes on with what its sender gave it."""
    task, lines = parking
    broker.sent.clear()
    notes = {**GENUINE, UNIQUE: [LOCK, "end", "ab", 7]}
    del notes[REPLACED]
    request = arrived(task, "1", **foreign, **{HEADER: {"v": 1, **notes}})
    context = request._context
    assert Notes.of(context, "dislock").to_header().items() <= notes.items()
    assert own_turn(context, "dislock") == (LOCK, "1:0:0")
    assert reservation_of(context, "dislock").number == 7
    lines.answers = [StoreError("redis://", "away")]
    assert run(task, request).info.state == "RETRY"
    [sent] = broker.sent
    assert sent["notes"]["put_off"] == notes[PUT_OFF] + 1
    assert sent["notes"][UNIQUE] == notes[UNIQUE]
    theirs = {name: one for name, one in foreign.items() if name != "eta"}
    assert {name: sent["headers"][name] for name in theirs} == theirs


# The reservation of a message


@pytest.mark.parametrize(
    ("header", "its"),
    [
        ([LOCK, "end", "ab", 7], ("end", "ab", 7)),
        ((LOCK, "start", "-", 0), ("start", "-", 0)),
        ([LOCK, "expiry"], ("expiry", "-", 0)),
        *(
            (one, None)
            for one in [
                *(None, "forged", {}, [LOCK], [LOCK, "end", "ab"], [LOCK, "end", "ab", 7, 7]),
                *([7, "end"], ["other:{k}", "end"], [LOCK, "never"], [LOCK, ["end"]]),
                *([f"dislock:{{{'x' * 1000}}}", "end"], [LOCK, "end", "a b", 7]),
                [f"dislock:{{{SURROGATE}}}", "end"],
                *([LOCK, "end", "x" * 33, 7], [LOCK, "end", "", 7], [LOCK, "end", 7, 7]),
                *([LOCK, "end", "ab", "7"], [LOCK, "end", "ab", True], [LOCK, "end", "ab", 7.0]),
                *([LOCK, "end", "ab", -1], [LOCK, "end", "ab", 10**13]),
            ]
        ),
    ],
    ids=lambda one: str(one)[:40],
)
def test_the_reservation_of_a_message(header, its):
    """One with two parts is of a sender that numbers nothing; no other is taken for ours."""
    found = reservation_of(Context(id="a b", **noted(unique=header)), "dislock", 5.0)
    assert found == (its and Reservation(LOCK, "a%20b", its[0], 5.0, *its[1:]))


def test_an_id_that_is_too_long_to_keep_has_no_reservation():
    """It would be stored with each key, in Redis."""
    headers = noted(unique=[LOCK, "end", "ab", 7])
    assert reservation_of(Context(id="x" * 1000, **headers), "dislock")
    assert reservation_of(Context(id="x" * 1001, **headers), "dislock") is None


# What a forged note does to a task


def declare(app, **options):
    @app.task(base=SingletonTask, name="shop.export", lock_key="k", bind=True, **options)
    def export(self):
        return self.request.headers

    return export


@pytest.mark.parametrize("header", READERS)
def test_a_forged_note_fails_nobody(app, world, header, caplog):
    """The task runs once, under its lock, as if the header were not there; its body sees none."""
    result = deliver(declare(app), notes={header: DEEP})
    assert result.retval in ({}, None)
    assert world.store.asked("take_over") == []
    assert len(world.store.asked("release")) == 1
    assert len([m for m in caplog.messages if "ignored" in m]) == 1


def test_a_retry_cannot_be_had_for_longer_than_the_option_says(app, world, broker):
    """A note that puts the end off for a thousand years is no longer than lock_retry_for."""
    world.lease("k", "other")
    task = declare(app, lock_on_conflict="retry", lock_retry_for=100)
    deliver(task, "2", notes={"retry_until": 9e9})
    assert broker.sent[0]["notes"]["retry_until"] < 9e9


# Owners that asked in vain


def test_who_did_not_get_to_ask_is_not_noted(app, world, broker):
    """In an outage nothing is added: the server cannot have granted what it was not asked for."""
    task = declare(app)
    world.store.away = True
    deliver(task)
    first = broker.sent[-1]["notes"]["given_up"]
    for _ in range(3):
        deliver(task, headers=broker.sent[-1]["headers"])
    assert broker.sent[-1]["notes"]["given_up"] == first


def test_no_more_owners_are_noted_than_are_read(app, world, broker, monkeypatch, caplog):
    """Those before them have been given up with an answer."""

    def acquire(*args, **terms):
        raise StoreError("redis://fake", "away")

    monkeypatch.setattr(world.store, "acquire", acquire)
    task, headers = declare(app), {}
    for _ in range(OWNERS_MOST + 3):
        deliver(task, headers=headers)
        headers = broker.sent[-1]["headers"]
    owners = headers[HEADER]["given_up"]
    assert len(owners) == OWNERS_MOST
    assert [owner.rpartition("/")[2] for owner in owners] == [str(n) for n in range(4, 12)]
    assert "ignored" not in caplog.text

"""The notes in a message's headers, and what becomes of those that somebody else has written."""

from __future__ import annotations

import math
import sys

import pytest
from celery.app.task import Context

from celery_dislock import SingletonTask, StoreError
from celery_dislock.messages.headers import (
    GIVEN_UP_HEADER,
    HELD_HEADER,
    LEFT_HEADER,
    OWNERS_MOST,
    PUT_OFF_HEADER,
    READERS,
    REPLACED_HEADER,
    RETRY_UNTIL_HEADER,
    SINCE_HEADER,
    STORE_HEADER,
    TICKET_HEADER,
    UNIQUE_HEADER,
    Notes,
    own_turn,
    reservation_of,
)
from celery_dislock.servers.reservations import Reservation
from tests.unit.deliveries import deliver

LOCK = "dislock:{k}"
LONG_LOCK = f"dislock:{{{'k' * 10_000}}}"
SURROGATE = "\ud800"  # which JSON takes, and UTF-8 does not: nothing can be told the lock server
DEEP: list = []
for _ in range(sys.getrecursionlimit() // 2):
    DEEP = [DEEP]
NO_TIMES = [-1, 0, math.inf, math.nan, 1e300, 10**400, "9", True, {}]

FORGED = [
    *((PUT_OFF_HEADER, one) for one in [-1, 10**400, "3", 1.5, True, [], math.nan]),
    *((RETRY_UNTIL_HEADER, one) for one in NO_TIMES),
    *((SINCE_HEADER, one) for one in NO_TIMES),
    *((HELD_HEADER, one) for one in ["other@w:1/n.1", "1", "", 7, ["1@w:1/n.1"]]),
    *((HELD_HEADER, one) for one in ["1@" + "x" * 10_000, f"1@{SURROGATE}:1/n.1"]),
    *((GIVEN_UP_HEADER, one) for one in ["1@w:1/n.1", [7, 8], ["other@w:1/n.1"], {"a": 1}, 7]),
    (GIVEN_UP_HEADER, ["1@w:1/n.1", "other@w:1/n.1"]),
    (GIVEN_UP_HEADER, [f"1@w:1/n.{n}" for n in range(100_000)]),
    *((TICKET_HEADER, one) for one in ["1:0:0", [], [LOCK], [LOCK, "1:0:0", 1], {"a": 1, "b": 2}]),
    *(
        (TICKET_HEADER, [LOCK, ticket])
        for ticket in ["other:0:0", "bytes", "1", "1:0", "1:0:0\n", "1:x:0:0", 7]
    ),
    *(
        (TICKET_HEADER, [lock, "1:0:0"])
        for lock in ["dislock:lines:home", "dislock:{k}:line", "dislock:{k}{l}", LONG_LOCK]
    ),
    (TICKET_HEADER, [f"dislock:{{{SURROGATE}}}", "1:0:0"]),
    *((LEFT_HEADER, one) for one in ["", "x" * 10_000, "two\nlines", 7, ["a tag"]]),
    *((STORE_HEADER, one) for one in ["", "x" * 16, "0123456789ABCDEF", "0" * 17, 7, ["0" * 16]]),
    *((REPLACED_HEADER, one) for one in ["", "x" * 10_000, "two\nlines", 7, ["why"]]),
    *((header, DEEP) for header in READERS),
]

GENUINE = {
    PUT_OFF_HEADER: 3,
    RETRY_UNTIL_HEADER: 2e9,
    HELD_HEADER: "1@w:1/n.1",
    GIVEN_UP_HEADER: ["1@w:1/n.2", "1@w:1/n.3"],
    TICKET_HEADER: [LOCK, "1:0:0"],
    STORE_HEADER: "0123456789abcdef",
    LEFT_HEADER: "a tag",
    REPLACED_HEADER: "a newer task took its place in line for lock 'k'",
    SINCE_HEADER: 1.5e9,
}


def read(headers, task_id="1"):
    return Notes.of(Context({"id": task_id, "task": "shop.export", "headers": headers}), "dislock")


def test_notes_of_this_package_are_read_and_written_again():
    """What a message was sent with is what its task knows, and what its next message says."""
    notes = read(GENUINE)
    assert notes.to_headers() == GENUINE
    assert (notes.put_off, notes.held_by, notes.parked) == (3, "1@w:1/n.1", (LOCK, "1:0:0"))


@pytest.mark.parametrize("headers", [None, {}, {"tenant": 7}, "text", [PUT_OFF_HEADER], 7])
def test_without_notes_there_are_none(headers, caplog):
    """Nothing is said of other headers, whatever they are."""
    assert read(headers) == Notes()
    assert caplog.text == ""


@pytest.mark.parametrize(("header", "note"), FORGED, ids=lambda one: str(one)[:40])
def test_a_note_of_somebody_else_is_ignored_with_one_warning(header, note, caplog):
    """It names task, id and header, is short and of one line, and the other notes count."""
    genuine = {name: value for name, value in GENUINE.items() if name != header}
    assert read({**genuine, header: note}).to_headers() == genuine
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
    notes = read({TICKET_HEADER: (LOCK, f"{own}:0:0"), HELD_HEADER: f"{own}@w:1/n.1"}, task_id)
    assert (notes.parked, notes.held_by) == ((LOCK, f"{own}:0:0"), f"{own}@w:1/n.1")
    assert read({TICKET_HEADER: (LOCK, f"{own}:2:1")}, task_id).parked is None  # of other work
    assert caplog.text == ""


def test_a_turn_under_another_prefix_says_in_which_store_it_was_parked(caplog):
    """Without that it is no turn of a worker that had another prefix: this package says both."""
    other = ["other:{k}", "1:0:0"]
    notes = read({TICKET_HEADER: other, STORE_HEADER: "0123456789abcdef"})
    assert notes.parked == tuple(other)
    assert caplog.text == ""
    assert read({TICKET_HEADER: other}).parked is None
    assert "celery-dislock did not write" in caplog.text
    request = Context({"id": "1", "headers": {TICKET_HEADER: other}, "retries": 0})
    assert own_turn(request, "dislock") is None
    assert own_turn(request, "other") == tuple(other)


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
    found = reservation_of(Context(id="a b", headers={UNIQUE_HEADER: header}), "dislock", 5.0)
    assert found == (its and Reservation(LOCK, "a%20b", its[0], 5.0, *its[1:]))


def test_an_id_that_is_too_long_to_keep_has_no_reservation():
    """It would be stored with each key, in Redis."""
    headers = {UNIQUE_HEADER: [LOCK, "end", "ab", 7]}
    assert reservation_of(Context(id="x" * 1000, headers=headers), "dislock")
    assert reservation_of(Context(id="x" * 1001, headers=headers), "dislock") is None


# What a forged note does to a task


def declare(app, **options):
    @app.task(base=SingletonTask, name="shop.export", lock_key="k", bind=True, **options)
    def export(self):
        return self.request.headers

    return export


@pytest.mark.parametrize("header", READERS)
def test_a_forged_note_fails_nobody(app, world, header, caplog):
    """The task runs once, under its lock, as if the header were not there; its body sees none."""
    result = deliver(declare(app), headers={header: DEEP})
    assert result.retval in ({}, None)
    assert world.store.asked("take_over") == []
    assert len(world.store.asked("release")) == 1
    assert len([m for m in caplog.messages if "ignored" in m]) == 1


def test_a_retry_cannot_be_had_for_longer_than_the_option_says(app, world, broker):
    """A note that puts the end off for a thousand years is no longer than lock_retry_for."""
    world.lease("k", "other")
    task = declare(app, lock_on_conflict="retry", lock_retry_for=100)
    deliver(task, "2", headers={RETRY_UNTIL_HEADER: 9e9})
    assert broker.sent[0]["headers"][RETRY_UNTIL_HEADER] < 9e9


# Owners that asked in vain


def test_who_did_not_get_to_ask_is_not_noted(app, world, broker):
    """In an outage nothing is added: the server cannot have granted what it was not asked for."""
    task = declare(app)
    world.store.away = True
    deliver(task)
    first = broker.sent[-1]["headers"][GIVEN_UP_HEADER]
    for _ in range(3):
        deliver(task, headers=broker.sent[-1]["headers"])
    assert broker.sent[-1]["headers"][GIVEN_UP_HEADER] == first


def test_no_more_owners_are_noted_than_are_read(app, world, broker, monkeypatch, caplog):
    """Those before them have been given up with an answer."""

    def acquire(*args, **terms):
        raise StoreError("redis://fake", "away")

    monkeypatch.setattr(world.store, "acquire", acquire)
    task, headers = declare(app), {}
    for _ in range(OWNERS_MOST + 3):
        deliver(task, headers=headers)
        headers = broker.sent[-1]["headers"]
    owners = headers[GIVEN_UP_HEADER]
    assert len(owners) == OWNERS_MOST
    assert [owner.rpartition("/")[2] for owner in owners] == [str(n) for n in range(4, 12)]
    assert "ignored" not in caplog.text

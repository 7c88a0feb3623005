"""The notes in a message's headers, and what becomes of those that somebody else has written."""

import math
import sys

import pytest
from celery.app.task import Context
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.utils.imports import symbol_by_name

from celery_dislock import StoreError
from celery_dislock.messages.headers import HEADER, READERS
from tests.declaring import declare
from tests.driven import reservation
from tests.unit.deliveries import arrived, deliver, noted, run

LOCK = "dislock:{k}"
LONG_LOCK = f"dislock:{{{'k' * 10_000}}}"
SURROGATE = "\ud800"  # which JSON takes, and UTF-8 does not: nothing can be told the lock server
DEEP = []
for _ in range(sys.getrecursionlimit() // 2):
    DEEP = [DEEP]
NO_TIMES = [-1, 0, math.inf, math.nan, 1e300, 10**400, "9", True, {}]

FORGED = {
    "put_off": [-1, 10**400, "3", 1.5, True, [], math.nan],
    "retry_until": NO_TIMES,
    "since": NO_TIMES,
    "held": [
        *("other@w:1/n.1", "1", "", 7, ["1@w:1/n.1"], "1@" + "x" * 10_000),
        *([owner, LOCK] for owner in ("other@w:1/n.1", "1", "", 7, f"1@{SURROGATE}:1/n.1")),
        *(["1@w:1/n.1", *locks] for locks in ([7], [LOCK, LONG_LOCK], [LOCK] * 100_000)),
    ],
    "given_up": [
        *("1@w:1/n.1", [7, 8], ["other@w:1/n.1"], {"a": 1}, 7, ["1@w:1/n.1", "other@w:1/n.1"]),
        [f"1@w:1/n.{n}" for n in range(100_000)],
    ],
    "ticket": [
        *("1:0:0", [], [LOCK], [LOCK, "1:0:0", 1], {"a": 1, "b": 2}),
        *([LOCK, one] for one in ["other:0:0", "bytes", "1", "1:0", "1:0:0\n", "1:x:0:0", 7]),
        *([one, "1:0:0"] for one in ["dislock:lines:home", f"{LOCK}:line", f"{LOCK}{{l}}"]),
        *([LONG_LOCK, "1:0:0"], [f"dislock:{{{SURROGATE}}}", "1:0:0"]),
    ],
    "replaced": ["", "x" * 10_000, "two\nlines", 7, ["why"]],
}
GENUINE = {
    "put_off": 3,
    "retry_until": 2e9,
    "held": ["1@w:1/n.1", LOCK],
    "given_up": ["1@w:1/n.2", "1@w:1/n.3"],
    "ticket": [LOCK, "1:0:0"],
    "since": 1.5e9,
}


@pytest.fixture
def carried(app, lock_server, broker):
    """Put a task off, as in an outage; return the notes that go on with its message."""
    task = declare(app, lock_on_conflict="queue", ignore_result=True)

    def put_off(headers, task_id="1", **about):
        lock_server.away = True
        info = deliver(task, task_id, headers=headers, **about).info
        assert info.state in {"RETRY", "IGNORED"}  # the latter if it may be in line
        assert broker.last.notes.pop("v") == 1
        return broker.last.notes

    return put_off


AGAIN = {**GENUINE, "put_off": 4}


def test_notes_of_this_package_are_read_and_written_again(carried, caplog):
    """What a message was sent with is what its task knows, and what its next message says."""
    assert carried(noted(**GENUINE)) == AGAIN
    assert "celery-dislock did not write" not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [{}, {"tenant": 7}, {"headers": {**noted(**GENUINE), "v": 1}}, {**GENUINE}, {HEADER: {"v": 1}}],
)
def test_without_notes_there_are_none(carried, headers, caplog):
    """Nothing is said of other headers, whatever they are."""
    assert carried(headers).keys() == {"put_off", "since", "given_up"}
    assert "ignored" not in caplog.text


@pytest.mark.parametrize(
    "forged",
    ["text", 7, 10**400, [], DEEP, {}, {"v": "1"}, {"v": 0}, {"v": True}, {"v": -1}, {1: 2}],
    ids=lambda one: str(one)[:20],
)
def test_a_header_of_our_name_that_we_have_not_written_is_ignored(
    app, lock_server, broker, forged, caplog
):
    """Whatever it is: one warning, and no note; it does not go on with the message."""
    task = declare(app)
    assert run(task, arrived(task, **{HEADER: forged})).info is None
    [told] = caplog.messages
    assert "dislock=" in told
    assert len(told) < 500
    lock_server.away = True
    run(task, arrived(task, **{HEADER: forged}))
    assert broker.last.notes.keys() == {"v", "put_off", "since", "given_up"}


def test_what_is_new_in_a_header_of_a_later_version_is_left_alone(app, lock_server, broker, caplog):
    """What it means is not known here; it was not forged for that, and goes on as it is."""
    task = declare(app, lambda self: vars(self.request)[HEADER])
    later = {"v": 2, "unique": [LOCK, "end", "-", 0, "new"], "new": [1]}
    assert run(task, arrived(task, **{HEADER: later})).retval == later
    lock_server.away = True
    run(task, arrived(task, **{HEADER: later}))
    notes = dict(broker.last.headers[HEADER])
    assert (notes.pop("put_off"), notes.keys()) == (1, {*later, "since", "given_up"})
    assert notes.items() >= later.items()
    assert "celery-dislock did not write" not in caplog.text


@pytest.mark.parametrize(
    ("header", "note"),
    [(name, one) for name, ones in FORGED.items() for one in [*ones, DEEP]],
    ids=lambda one: ascii(one)[:30],
)
def test_a_note_of_somebody_else_is_ignored_with_one_warning(carried, header, note, caplog):
    """It names task, id and header, is short and of one line, and the other notes count."""
    notes = carried(noted(**{**GENUINE, header: note}))
    expected = {name: one for name, one in AGAIN.items() if name != header}
    if header == "put_off":
        expected["put_off"] = 1
    if header in {"since", "given_up"}:  # of this delivery
        expected[header] = notes[header]
        assert notes[header] != note
    assert notes == expected
    [told] = [one for one in caplog.messages if "celery-dislock did not write" in one]
    assert "shop.t[1]" in told
    assert f"{header}=" in told
    assert len(told) < 500
    assert "\n" not in told


def test_a_forged_note_fails_nobody(app, lock_server, caplog):
    """The task runs once, under its lock, as if the header were not there; its body sees none."""
    task = declare(app, lambda self: (self.request.headers, lock_server.locks()))
    for header in READERS:
        assert deliver(task, notes={header: DEEP}).retval in (({}, ["k"]), (None, ["k"]))
    assert len(caplog.messages) == len(READERS)
    caplog.clear()
    deliver(task, notes=dict.fromkeys(READERS, "\x00"))  # all that is ignored is told at once
    [told] = caplog.messages
    assert all(header in told for header in READERS)


@pytest.mark.parametrize("task_id", ["order:7", "a@w:1/", "x#", "Ünï", "x" * 1000, 7])
def test_a_task_knows_its_own_ticket_whatever_its_id(carried, task_id, caplog):
    """Ids come from users: none makes a task's own note look like another's."""
    own = str(task_id).replace("@", "%40")
    ours = {"ticket": [LOCK, f"{own}:0:0"], "held": [f"{own}@w:1/n.1", LOCK]}
    assert carried(noted(**ours), task_id).items() >= ours.items()
    of_other_work = noted(ticket=[LOCK, f"{own}:2:1"])
    assert "ticket" not in carried(of_other_work, task_id)
    assert "celery-dislock did not write" not in caplog.text


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
quickly = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quickly
@given(FOREIGN)
def test_headers_of_anybody_else_hide_nothing_and_are_kept(app, lock_server, broker, foreign):
    """A message brings its notes and its reservation, and goes on with what its sender gave it."""
    task = declare(app, lock_on_conflict="queue")
    lock_server.away = True
    notes = {"v": 1, **GENUINE, "unique": [LOCK, "end", "ab", 7]}
    request = arrived(task, "1", **foreign, **{HEADER: notes})
    assert run(task, request).info.state == "IGNORED"  # it may be in line, and have run
    assert broker.last.notes == {**notes, "put_off": 4}
    theirs = {name: one for name, one in foreign.items() if name != "eta"}
    assert {name: broker.last.headers[name] for name in theirs} == theirs


def test_our_header_is_found_in_a_message_of_protocol_1(app, lock_server, broker):
    """Without arguments in its body, Celery puts its headers into one of the name "headers"."""
    task = declare(app)
    headers = noted(**GENUINE)
    message = arrived(task).message
    message.headers = headers
    about = {"id": "1", "task": task.name, "headers": headers}
    known = {"app": app, "task": task, "decoded": True, "body": ([], {}, {}), "hostname": "w1"}
    request = symbol_by_name(task.Request)(message, headers=about, **known)
    lock_server.away = True
    run(task, request)
    assert broker.last.notes["put_off"] == 4


# The reservation of a message


@pytest.mark.parametrize(
    "header",
    [
        *(None, "forged", {}, [LOCK], [LOCK, "end", "ab"], [LOCK, "end", "ab", "7", 7]),
        *([7, "end"], ["other:{k}", "end"], [LOCK, "never"], [LOCK, ["end"]]),
        *([f"dislock:{{{'x' * 1000}}}", "end"], [LOCK, "end", "a b", 7]),
        [f"dislock:{{{SURROGATE}}}", "end"],
        *([LOCK, "end", "x" * 33, 7], [LOCK, "end", "", 7], [LOCK, "end", 7, 7]),
        *([LOCK, "end", "ab", "7"], [LOCK, "end", "ab", True], [LOCK, "end", "ab", 7.0]),
        *([LOCK, "end", "ab", -1], [LOCK, "end", "ab", 10**13]),
    ],
    ids=lambda one: ascii(one)[:40],
)
@pytest.mark.parametrize("locks", [True, False])
def test_no_other_header_is_taken_for_a_reservation(app, lock_server, broker, header, locks):
    """It ends nothing, and the task runs."""
    task = declare(app, lambda: "ran", lock_unique_until="end")
    task.apply_async(task_id="1")
    app.conf.dislock_enabled = locks
    assert deliver(task, notes={"unique": header}).retval == "ran"
    assert reservation(task).state == "waiting"
    assert set(lock_server.contents()) <= {f"{LOCK}:unique", f"{LOCK}:done:1:0:0"}


@pytest.mark.parametrize("task_id", ["a b", "x" * 1000, "x" * 1001])
def test_a_reservation_of_a_sender_that_numbers_nothing_is_one(app, broker, task_id):
    """Unless its id is too long to keep: it would be stored with each key, in Redis."""
    task = declare(app, lock_unique_until="end")
    task.apply_async(task_id=task_id)
    deliver(task, task_id, notes={"unique": [LOCK, "end"]})
    assert (reservation(task) is None) is (len(task_id) <= 1000)


def test_no_more_owners_are_noted_than_are_read(app, lock_server, broker, caplog):
    """Those before them have been given up with an answer."""
    task, headers = declare(app), {}
    for nth in range(11):
        error = StoreError("redis://driven", "no reply")
        lock_server.strike(error, after=True, skip=min(nth, 8))
        deliver(task, headers=headers)
        headers = broker.last.headers
    owners = headers[HEADER]["given_up"]
    assert len(owners) == 8
    assert len(set(owners)) == 8
    assert "celery-dislock did not write" not in caplog.text

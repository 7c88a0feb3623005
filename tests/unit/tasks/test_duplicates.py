"""The result of a message that was not sent: it ends, with a result or with the reason for none."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import NoResultError
from celery_dislock.locks.lease import Attempt, current
from celery_dislock.servers.reservations import Reservation, Taken
from celery_dislock.tasks import duplicates
from celery_dislock.tasks.duplicates import LOOK_EVERY, STORED_WITHIN, First, duplicate_of
from tests.unit.fakes import FakeClock, FakeRecord, FakeReservations

LOCK = "dislock:{k}"


def first_of(
    locks, lock, reservations, *, unique_for=3600.0, until="end", holds=True, has_result=True
):
    """What a sender knows of the message that is there."""
    guard = SimpleNamespace(
        options=TaskOptions(lock_unique_for=unique_for), interval=10.0 if holds else None
    )
    found = Taken("a", is_sent=True, has_result=has_result)
    reserved = Reservation(lock, found.id, until)
    return First(guard, locks, reserved, found.has_result, lambda: reservations)


class Backend:
    """Time, what is stored of the first task, and what the lock server knows of it."""

    def __init__(self):
        self.clock = FakeClock()
        self.reservations = FakeReservations(self.clock)
        self.state = "PENDING"
        self.result = None
        self.later = {}  # called when so many seconds are over
        self.ignored = False
        self.looks = []

    def reserve(self, state, id="a", since=0.0, left=1e6):  # noqa: A002 -- as in Celery
        ends, since = self.clock() + left, self.clock() - since
        self.reservations.records[LOCK] = FakeRecord("ab", state, id, ends=ends, since=since)

    def store(self, state, result):
        self.state, self.result = state, result

    def pass_by(self, seconds):
        end = self.clock() + seconds
        for due in sorted(self.later):
            if due <= end:
                self.clock.now = max(self.clock.now, due)
                self.later.pop(due)()
                if self.state == "SUCCESS":
                    return
        self.clock.now = end

    def duplicate(self, **known):
        backend = self

        class Result:
            """Waits as a result of Celery's does, by that clock."""

            ignored = backend.ignored

            def __init__(self, id):  # noqa: A002 -- as in Celery
                self.id = id

            @property
            def state(self):
                return backend.state

            def ready(self):
                return backend.state in {"SUCCESS", "FAILURE"}

            def get(self, timeout=None, propagate=True):
                if self.ignored:
                    return None
                backend.looks.append(timeout)
                if not self.ready():
                    backend.pass_by(timeout)
                if not self.ready():
                    raise CeleryTimeoutError("The operation timed out.")
                if backend.state == "FAILURE" and propagate:
                    raise backend.result
                return backend.result

            wait = get

        return duplicate_of(Result, first_of([LOCK], LOCK, self.reservations, **known))


@pytest.fixture
def backend(monkeypatch):
    backend = Backend()
    monkeypatch.setattr(duplicates.time, "monotonic", backend.clock)
    return backend


def seconds_until_there_is_none(backend, **known):
    """Return the seconds until get() says that there is no result, and why."""
    began = backend.clock()
    with pytest.raises(NoResultError) as caught:
        backend.duplicate(**known).get()
    assert (caught.value.key, caught.value.id) == ("k", "a")
    return backend.clock() - began, caught.value.reason


def test_a_result_that_is_there_is_returned_at_once(backend):
    """Nobody asks the lock server."""
    backend.store("SUCCESS", 7)
    assert backend.duplicate(has_result=False).get() == 7
    assert backend.reservations.asked == []


@pytest.mark.parametrize("state", ["being sent", "waiting", "running"])
def test_a_result_is_waited_for_while_its_task_is_there(backend, state):
    """For hours, if need be."""
    backend.reserve(state)
    backend.later[1000.0 + 7200] = lambda: backend.store("SUCCESS", 7)
    assert backend.duplicate().get() == 7
    assert backend.clock() == 1000.0 + 7200


def test_a_result_is_waited_for_while_its_task_holds_its_lock(backend):
    """Its reservation has ended with its start, or was lost."""
    backend.reservations.holders = {"a"}
    backend.later[1000.0 + 7200] = lambda: backend.store("SUCCESS", 7)
    assert backend.duplicate(until="start").get() == 7


def test_several_locks_are_reserved_under_another_name(backend):
    """Those that hold them are found under the first of their own."""
    asked = backend.reservations.asked
    first = first_of(["dislock:{a}", "dislock:{b}"], "dislock:{a}:and:0", backend.reservations)
    backend.reservations.holders = {"a"}
    assert first.silent_for() == 0.0
    assert asked == [("look", "dislock:{a}:and:0"), ("look", "dislock:{a}")]


def test_a_lock_server_that_stays_away_is_the_reason(backend):
    """Nobody waits for ever."""
    backend.reservations.away = True
    waited, reason = seconds_until_there_is_none(backend)
    assert waited == pytest.approx(3600.0, abs=2 * LOOK_EVERY)
    assert reason == "lock server redis://fake: away"


@pytest.mark.parametrize("key", ["free", "another's", "over"])
def test_of_a_task_of_which_nothing_is_known_no_result_is_expected(backend, key):
    """It was killed, purged, or its result has expired: after the time in which one is stored."""
    if key == "another's":
        backend.reserve("waiting", "b")
    elif key == "over":
        backend.reserve("waiting", left=3.0)
    waited, reason = seconds_until_there_is_none(backend)
    known_for = 3.0 if key == "over" else 0.0
    assert STORED_WITHIN <= waited - known_for <= STORED_WITHIN + 2 * LOOK_EVERY
    assert reason.startswith("its key is not reserved for it any more, ")


@pytest.mark.parametrize(
    ("state", "known"),
    [
        ("PARKED", {"until": "end"}),
        ("RETRY", {"until": "start"}),
        ("PENDING", {"until": "start", "holds": False}),
    ],
)
def test_a_task_that_waits_unseen_has_more_time(backend, state, known):
    """It is in line, waits for its next try, or holds no lock: as long as a message may wait."""
    backend.state = state
    waited, _ = seconds_until_there_is_none(backend, unique_for=100.0, **known)
    assert 100 <= waited <= 100 + 2 * LOOK_EVERY


@pytest.mark.parametrize(("state", "holds"), [("RETRY", True), ("PENDING", False)])
def test_a_task_whose_reservation_would_be_there_has_no_more(backend, state, holds):
    """With "end" it lasts until the task has ended, between two tries, too."""
    backend.state = state
    waited, _ = seconds_until_there_is_none(backend, unique_for=100.0, until="end", holds=holds)
    assert STORED_WITHIN <= waited <= STORED_WITHIN + 2 * LOOK_EVERY


def test_a_task_that_is_seen_again_is_waited_for(backend):
    """A retry of it was between its two messages."""
    backend.later = {
        1000.0 + 9: lambda: backend.reserve("waiting"),
        1000.0 + 60: lambda: backend.reserve("free", "b"),
        1000.0 + 65: lambda: backend.reserve("running"),
        1000.0 + 500: lambda: backend.store("SUCCESS", 7),
    }
    assert backend.duplicate().get() == 7


def test_a_task_that_has_ended_says_since_when(backend):
    """Its key stays reserved: "expiry"; its result has expired, or was not stored."""
    backend.reserve("ended", since=600.0)
    waited, reason = seconds_until_there_is_none(backend, until="expiry")
    assert waited <= LOOK_EVERY
    assert reason == "its task has ended 602 s ago, and its result is not stored any more"


def test_a_task_that_has_just_ended_may_still_store_its_result(backend):
    """The lock is released before that."""
    backend.reserve("ended")
    backend.later[1000.0 + 5] = lambda: backend.store("SUCCESS", 7)
    assert backend.duplicate(until="expiry").get() == 7


def test_a_task_that_died_under_a_fixed_reservation_is_not_waited_for(backend):
    """Nobody renews "expiry", so the lock that it does not hold any more tells."""
    backend.reserve("running")
    waited, _ = seconds_until_there_is_none(backend, until="expiry")
    assert waited <= STORED_WITHIN + 2 * LOOK_EVERY


def test_a_first_whose_sender_wants_no_result_has_none(backend):
    """The second is told at once, instead of waiting for what never comes."""
    backend.reserve("waiting")
    waited, reason = seconds_until_there_is_none(backend, has_result=False)
    assert (waited, reason) == (0.0, "its sender has asked for none")


def test_a_task_s_own_error_is_raised(backend):
    """Also if it is the one by which waiting ends, and with the arguments of Celery's get()."""
    error = CeleryTimeoutError("of the task")
    backend.reserve("running")
    backend.later[1000.0 + 61] = lambda: backend.store("FAILURE", error)
    with pytest.raises(CeleryTimeoutError, match="of the task"):
        backend.duplicate().get()
    assert backend.duplicate().get(propagate=False) is error


@pytest.mark.parametrize("seconds", [0.5, 5.0, 61.0])
def test_a_timeout_is_kept(backend, seconds):
    """It is no longer than asked for, although the lock server is asked now and then."""
    backend.reserve("running")
    with pytest.raises(CeleryTimeoutError, match="timed out"):
        backend.duplicate().get(timeout=seconds)
    assert 1000.0 + seconds <= backend.clock() <= 1000.0 + seconds + 0.01


def test_a_result_of_celery_s_is_one_still(app):
    """Its class, its methods, and what was stored; it is marked."""
    app.backend.store_result("a", 7, "SUCCESS")
    result = duplicate_of(app.AsyncResult, first_of([LOCK], LOCK, None))
    assert isinstance(result, AsyncResult)
    assert (result.id, result.get(), result.duplicate) == ("a", 7, True)
    assert result == app.AsyncResult("a")
    assert type(result) is type(duplicate_of(app.AsyncResult, first_of([LOCK], LOCK, None)))
    assert app.AsyncResult("a").duplicate is False


@pytest.mark.parametrize("of_the_app", [True, False])
def test_a_duplicate_s_result_can_be_pickled(app, of_the_app):
    """As any result of Celery's, whatever its class."""
    made_by = app.AsyncResult if of_the_app else partial(AsyncResult, app=app)
    again = pickle.loads(pickle.dumps(duplicate_of(made_by, first_of([LOCK], LOCK, None))))
    assert isinstance(again, AsyncResult)
    assert again.id == "a"


def test_a_copy_of_a_duplicate_s_result_is_one_as_well(app):
    """Its ``get()`` ends, too: it knows the message."""
    result = duplicate_of(app.AsyncResult, first_of([LOCK], LOCK, None))
    again = copy.copy(result)
    assert again.duplicate
    assert again.first is result.first


def test_a_task_that_waits_for_its_own_result_is_told_so(backend):
    """As in the body of a unique task that sends itself: the message that is there is its own."""
    backend.reserve("running")
    before = current.set(Attempt("me", {"task": "t", "id": "a", "worker": "w", "pid": 7}))
    try:
        with pytest.raises(NoResultError, match="it is the task that asks"):
            backend.duplicate().get()
    finally:
        current.reset(before)

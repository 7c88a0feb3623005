"""Parking a task, claiming its turn, and what a guard makes of it; traced tasks, as in a worker."""

from __future__ import annotations

import logging

import pytest
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_revoked

from celery_dislock import LockLostError, SingletonTask, StoreError
from celery_dislock.locks.interruption import StopTask
from celery_dislock.messages.headers import HEADER, notes_in
from celery_dislock.messages.message import Message, TaskParked
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import ANYBODY, Ticket
from celery_dislock.servers.replies import Done, Full, Granted, Parked, Refused
from celery_dislock.servers.reservations import Reservation
from tests.unit.deliveries import arrived, noted, run
from tests.unit.fakes import STORE, FakeLines

LOCK = "dislock:{k}"
HOLDER = "t[1] on w (pid 7)"
OTHERS = Refused("other", 30.0, {"task": "t", "id": "1", "worker": "w", "pid": 7}, place=3)


class Postman:
    """Stands for what publishes parked tasks."""

    home = "home"

    def __init__(self):
        self.told = []

    def hand_over(self, lines, turns):
        raise AssertionError  # the scripts' answers are the lines' affair

    def tell_replaced(self, lines, lock, replaced, end_reservation):
        self.told.append((lock, replaced))


@pytest.fixture
def lines(app, world):
    process = runtime_of(app).process
    process._publisher = Postman()
    process.lines = FakeLines(world.store)
    return process.lines


@pytest.fixture
def backend(app, world, monkeypatch):
    """Note in the store's calls what is stored, too."""
    store_result = app.backend.store_result

    def noted(task_id, result, state, **kwargs):
        world.store.calls.append(("store_result", state, result))
        return store_result(task_id, result, state, **kwargs)

    monkeypatch.setattr(app.backend, "store_result", noted)
    return app.backend


def declare(app, body=None, lock_on_conflict="queue", **options):
    """Make a task that may be parked; without a body it must not run."""
    declared = {"base": SingletonTask, "lock_key": "k", **options}

    @app.task(name="shop.export", lock_on_conflict=lock_on_conflict, bind=True, **declared)
    def export(self, *args):
        if body is None:
            raise AssertionError
        return body(self, *args)

    app.finalize()
    return app.tasks["shop.export"]


def come(task, task_id="2", *args, **headers):
    """Let a message of the task come, and run it; returns what became of it."""
    return run(task, arrived(task, task_id, *args, **headers))


def ended(outcome):
    """Return the exception with which a delivery ended."""
    error = outcome.retval
    error = getattr(error, "exception", error)
    return getattr(error, "exc", error)


def stored(app, task_id="2"):
    result = app.AsyncResult(task_id)
    return result.state, result.result


def marked(lock=LOCK, ticket="2:0:0", **notes):
    return noted(ticket=[lock, ticket], **notes)


def asked(world):
    """Return the tickets with which park was asked."""
    return [ticket for _, ticket in world.store.asked("park")]


def again(broker):
    """Return our header of the one message that was sent."""
    [sent] = broker.sent
    return {HEADER: sent["notes"]}


# Parked


def test_a_task_whose_lock_is_held_is_parked_with_its_message(app, world, lines, caplog):
    """It is asked first, then its message is kept; the delivery ends, and its holder is named."""
    caplog.set_level("INFO", "celery_dislock")
    world.lease("k", "other")
    outcome = come(declare(app), "2", 7, tenant="seven")
    parked = ended(outcome)
    assert isinstance(parked, TaskParked)
    assert (parked.key, parked.place, parked.holder) == ("k", 1, HOLDER)
    [(place, written)] = lines.parked.items()
    assert place == (LOCK, "2:0:0")
    message = Message.from_bytes(written)
    assert (message.headers["tenant"], message.body) == ("seven", b"[[7], {}, {}]")
    assert asked(world) == [
        Ticket("2:0:0", "2@", marked=False, task="shop.export"),
        Ticket("2:0:0", "2@", marked=False, message=written, task="shop.export"),
    ]
    assert notes_in(message.headers)["store"] == STORE
    assert f"shop.export[2] parked: place 1 in line for lock 'k', held by {HOLDER}" in caplog.text
    assert [owner for owner, _, _ in world.store.leases.values()] == ["other"]
    assert stored(app) == ("PARKED", {"key": "k", "place": 1, "holder": HOLDER})
    assert runtime_of(app).process._publisher.told == []


def test_the_state_is_stored_before_the_task_is_in_line(app, world, lines, backend):
    """Once in line it may run and end anywhere: its result would be overwritten."""
    world.lease("k", "other")
    come(declare(app))
    calls = [call[0] for call in world.store.calls if call[0] != "acquire"]
    assert calls == ["park", "store_result", "park"]


@pytest.mark.parametrize(("limit", "place"), [(None, 3), (2, 2), (3, 3), (9, 3)])
def test_no_place_is_beyond_the_end_of_the_line(app, world, lines, limit, place):
    """Who comes to a full line takes another's place in it, or none."""
    lines.answers = [OTHERS]
    world.lease("k", "other")
    come(declare(app, lock_queue_limit=limit))
    assert stored(app)[1]["place"] == place


def test_no_state_is_stored_where_results_are_ignored(app, world, lines):
    """It is parked all the same."""
    world.lease("k", "other")
    come(declare(app, ignore_result=True))
    assert stored(app)[0] == "PENDING"
    assert len(lines.parked) == 1


def test_a_result_backend_that_is_away_does_not_keep_a_task_from_being_parked(
    app, world, lines, monkeypatch, caplog
):
    """The work counts, not what is told of it; the log says what is missing."""

    def store_result(*args, **kwargs):
        raise ConnectionError("backend is away")

    world.lease("k", "other")
    monkeypatch.setattr(app.backend, "store_result", store_result)
    assert isinstance(ended(come(declare(app))), TaskParked)
    assert len(lines.parked) == 1
    assert "[2] is parked, and its result does not say so: backend is away" in caplog.text


def test_the_worker_hears_who_had_to_make_room(app, world, lines, monkeypatch):
    """The one that took the place ends it, and its outcome says so, for the events."""
    told = []
    monkeypatch.setattr(Postman, "tell_replaced", lambda *given: told.append(given) or {"9": "why"})
    replaced = {"9:0:0": b"message"}
    lines.answers = [OTHERS, Parked(1, OTHERS, replaced)]
    assert ended(come(declare(app))).replaced == {"9": "why"}
    assert [given[2:4] for given in told] == [(LOCK, replaced)]


def test_a_parked_task_says_who_holds_the_lock_and_for_how_long(app, world, lines, caplog):
    """A lock may be reserved for another task in line."""
    caplog.set_level("INFO", "celery_dislock")
    held = Refused("9:0:0#", 5.0, {"id": "9", "parked": True}, place=1, held_for=720.0)
    lines.answers = [held, Parked(1, held)]
    parked = ended(come(declare(app)))
    assert (parked.holder, parked.held_for) == ("task 9, whose turn it is", 720.0)
    assert stored(app)[1]["holder"] == parked.holder
    assert f"held by {parked.holder}, for 12 min so far." in caplog.text


def test_a_task_that_is_in_line_already_stays_there(app, world, lines, backend):
    """Its worker died before it could acknowledge: the ticket speaks for it, nothing is stored."""
    lines.answers = [Parked(2, OTHERS)]
    parked = ended(come(declare(app)))
    assert (type(parked), parked.place) == (TaskParked, 2)
    assert world.store.asked("store_result") == []


@pytest.mark.parametrize(
    ("marks", "state"),
    [({}, "REVOKED"), (marked(), "RETRY"), (marked("dislock:{old}"), "RETRY")],
)
def test_a_full_line_ends_the_newcomer(app, lines, broker, caplog, marks, state):
    """One that was parked, whose record was lost or whose line was another's, is put off."""
    caplog.set_level(logging.INFO)
    lines.answers = [OTHERS, Full(7, OTHERS)]
    come(declare(app), **marks)
    assert stored(app)[0] == state
    assert "the line for lock 'k' is full: 7 tasks wait in it" in caplog.text
    turns = [{HEADER: {"v": 1, "ticket": sent["notes"]["ticket"]}} for sent in broker.sent]
    assert turns == [one for one in [marks] if one]


# Its turn, and copies


@pytest.mark.parametrize(
    ("came", "ticket"), [({"retries": 1}, "2:1:0"), ({"replaced_task_nesting": 1}, "2:0:1")]
)
def test_the_ticket_of_another_delivery_of_work_is_no_mark(app, world, lines, came, ticket):
    """A retry and a replacement copy headers, and are new work that has not been done."""
    come(declare(app, lambda _: None), **came, **marked())
    assert asked(world) == [Ticket(ticket, "2@", marked=False, task="shop.export")]
    assert world.store.asked("move_out") == []


def test_a_task_parked_under_another_key_leaves_that_line_and_asks_here(app, world, lines):
    """Its key was declared in another way meanwhile: here it is parked anew."""
    lines.parked["dislock:{old}", "2:0:0"] = b"message"
    world.lease("k", "other")
    assert isinstance(ended(come(declare(app), **marked("dislock:{old}"))), TaskParked)
    assert set(world.store.asked("move_out")) == {("dislock:{old}", "2:0:0")}
    assert [ticket.marked for ticket in asked(world)] == [True, True]
    assert list(lines.parked) == [(LOCK, "2:0:0")]


@pytest.mark.parametrize("done", [False, True])
def test_who_has_left_another_keys_line_runs_here_unless_it_is_done(app, world, lines, done):
    """It left with an earlier delivery, whose process died, or it has run under the other key."""
    if done:
        lines.done.add(("dislock:{old}", "2:0:0"))
    ran = []
    come(declare(app, lambda self: ran.append(self.request.id)), **marked("dislock:{old}"))
    assert ran == ([] if done else ["2"])
    assert len(asked(world)) == len(ran)


def test_a_copy_of_work_that_is_done_is_acknowledged_unrun(app, world, lines, backend, caplog):
    """It stores nothing: the result is there."""
    caplog.set_level("INFO", "celery_dislock")
    lines.answers = [Done()]
    error = ended(come(declare(app), **marked()))
    assert type(error) is Ignore
    assert "shop.export[2] acknowledged unrun: it has run under lock 'k' before" in caplog.text
    assert world.store.asked("store_result") == []
    assert world.store.leases == {}


def test_a_copy_of_work_that_is_done_keeps_no_key(app, world, lines):
    """If it was put off, it has reserved its key again; that ends with it."""
    lines.answers = [Done()]
    come(declare(app), **marked(unique=[LOCK, "start", "ab", 2]))
    assert world.store.reservations.asked == [
        ("end", Reservation(LOCK, "2", "start", 60.0, "ab", 2))
    ]


@pytest.mark.parametrize("before", [[], [OTHERS]], ids=["at once", "after all"])
def test_a_copy_of_a_task_that_runs_is_put_off(app, world, lines, broker, before):
    """It may be the only one if that process dies; it keeps its ticket, and is not parked."""
    running = {"task": "shop.export", "id": "2", "worker": "w", "pid": 7}
    lines.answers = [*before, Refused("2@w:7/1", 30.0, running)]
    assert type(ended(come(declare(app), **marked()))) is Ignore
    assert again(broker)[HEADER]["ticket"] == [LOCK, "2:0:0"]
    assert lines.parked == {}


# A lock server that does not answer


def test_a_task_that_may_be_in_line_does_not_run_without_its_lock(
    app, world, lines, broker, caplog
):
    """With dislock_on_unavailable="run" it is put off; one that is parked ends the outage."""
    caplog.set_level("INFO", "celery_dislock")
    app.conf.dislock_on_unavailable = "run"
    lines.answers = [OTHERS, StoreError("redis://fake", "away"), Parked(1, OTHERS)]
    task = declare(app)
    assert come(task).info.state == "RETRY"
    assert len(broker.sent) == 1
    assert "without its lock" not in caplog.text
    assert "answers again" not in caplog.text
    come(task)
    assert caplog.text.count("answers again") == 1


@pytest.mark.parametrize("at", ["ask", "park"])
def test_nothing_is_lost_with_the_lock_server_away(app, world, lines, broker, at):
    """Whenever it goes away, the task is put off with what belongs to it, its ticket too."""
    away = StoreError("redis://fake", "away")
    lines.answers = {"ask": [away], "park": [OTHERS, away]}[at]
    assert (
        come(declare(app), tenant="seven", retries=2, **marked(ticket="2:2:0")).info.state
        == "RETRY"
    )
    [sent] = broker.sent
    assert (sent["task_id"], sent["headers"]["retries"]) == ("2", 2)
    assert sent["headers"]["tenant"] == "seven"
    assert sent["notes"]["ticket"] == [LOCK, "2:2:0"]
    assert lines.parked == {}
    assert stored(app)[0] == "RETRY"


# Where nothing can be parked


def test_other_strategies_ask_as_ever(app, world, lines):
    """A task that cannot be parked shows no ticket, and its release ends none."""
    come(declare(app, lambda _: None, lock_on_conflict="skip"))
    assert asked(world) == []
    assert world.store.done == [""]


# What ends a ticket


CLAIMED = Granted((1,), claimed=True)


@pytest.mark.parametrize(
    "error", [None, ValueError, Retry, Ignore, Reject, StopTask(LockLostError("k", "why"))]
)
def test_a_ticket_ends_with_the_delivery(app, world, lines, error):
    """However its body ends, this delivery's work is not to be done again."""

    def body(_):
        if error is not None:
            raise error

    come(declare(app, body, acks_late=True))
    assert world.store.done == ["2:0:0"]


@pytest.mark.parametrize("error", [Reject("why", requeue=True), SystemExit(), KeyboardInterrupt()])
def test_the_ticket_of_a_delivery_that_comes_again_stays(app, world, lines, error):
    """The message goes back to its queue, or the worker is being stopped: its copy is to run."""

    def body(_):
        raise error

    lines.answers = [CLAIMED]
    try:
        come(declare(app, body, acks_late=True))
    except BaseException as exc:  # noqa: BLE001 -- SystemExit and the like come through
        assert exc is error  # noqa: PT017
    assert world.store.done == [""]


def test_the_ticket_of_a_body_that_has_not_ended_stays(app, world, lines, monkeypatch):
    """A signal handler's exception before the body's end says nothing about its work."""
    monkeypatch.setattr("celery_dislock.messages.delivery.forget_notes", lambda _: 1 / 0)
    come(declare(app))
    assert world.store.done == [""]


def test_a_lease_that_is_left_to_expire_ends_its_ticket_all_the_same(app, world, lines):
    """The lock is kept until its expiry; the work is done."""
    come(declare(app, lambda _: None, release_on_success=False))
    assert world.store.done == ["2:0:0"]
    [(owner, _, _)] = world.store.leases.values()
    assert owner.startswith("~2@")


@pytest.mark.parametrize("error", [None, ValueError, Retry])
@pytest.mark.parametrize(
    ("answers", "late", "settling"),
    [([CLAIMED], True, [7, 0]), ([CLAIMED], False, [0]), ([], True, [7])],
    ids=["acknowledged late", "acknowledged early", "not parked"],
)
def test_the_ticket_of_a_task_settles_with_its_result(
    app, world, lines, error, answers, late, settling
):
    """If its message may come again until then: two steps, as its process may die."""

    def body(_):
        if error is not None:
            raise error

    lines.answers = list(answers)
    come(declare(app, body, acks_late=late, lock_watchdog_timeout=7))
    assert world.store.done == ["2:0:0"] * len(settling)
    assert world.store.settling == settling


def test_a_ticket_that_cannot_be_settled_does_not_fail_its_task(
    app, world, lines, monkeypatch, caplog
):
    """The lock server went away after the release: the log says that a copy may run."""
    lines.answers = [CLAIMED]
    release = world.store.release

    def once(*args, **kwargs):
        monkeypatch.setattr(world.store, "away", True)
        monkeypatch.setattr(world.store, "release", release)

    monkeypatch.setattr(world.store, "release", once)
    come(declare(app, lambda _: None, acks_late=True))
    assert stored(app)[0] == "SUCCESS"
    assert "Task shop.export[2] has ended, but a copy of it may run again: " in caplog.text


# A delivery whose end is only to be told


def test_a_task_that_lost_its_place_ends_as_revoked_unrun(app, world, lines):
    """It asks for nothing: its place is another's."""
    reason = "a newer task took its place in line"
    assert isinstance(ended(come(declare(app), **noted(replaced=reason))), Ignore)
    state, error = stored(app)
    assert (state, str(error)) == ("REVOKED", reason)
    assert world.store.calls == []


def revoke(task, **headers):
    request = arrived(task, "2", **headers)._context
    return task_revoked.send(task, request=request, terminated=False)


@pytest.mark.parametrize("strategy", ["queue", "skip"])
def test_a_revoked_task_leaves_the_line_of_its_header(app, world, lines, strategy):
    """The main process discards it before any guard sees it; it may not park any more."""
    revoke(declare(app, lock_on_conflict=strategy), **marked("dislock:{old}"))
    assert world.store.asked("leave") == [("dislock:{old}", "2:0:0")]


def test_a_lock_server_that_is_away_does_not_disturb_a_revocation(app, world, lines, caplog):
    """Its turn runs out and comes again, and is discarded again; the log says so."""
    world.store.away = True
    assert {answer for _, answer in revoke(declare(app), **marked())} == {None}
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "Task shop.export[2] is revoked and stays in line for lock 'k' until its next turn: "
    )


@pytest.mark.parametrize("ticket", ["1:0:0", "2:1:0", "2:0:1", "bytes", "", None])
def test_a_revoked_task_leaves_the_line_for_itself_alone(app, world, lines, ticket):
    """A header that names another task, or other work of this one, takes nobody out of line."""
    revoke(declare(app), **({} if ticket is None else marked(ticket=ticket)))
    assert world.store.calls == []


def test_a_task_without_a_guard_leaves_no_line(app, world, lines):
    """Every task's revocation is heard; nor is there a line where nothing can be parked."""

    @app.task(name="plain")
    def plain(): ...

    assert {answer for _, answer in revoke(plain, **marked())} == {None}
    runtime_of(app).process._publisher = None
    revoke(declare(app), **marked())
    assert world.store.calls == []


def test_without_locks_nothing_is_parked_and_no_message_kept(app, world, lines):
    """--no-dislock: the body runs, and the worker sends it no message."""
    app.conf.dislock_enabled = False
    task = declare(app, lambda self: list(self.request.delivery_info))
    world.lease("k", "other")
    info = come(task).retval
    assert "dislock_message" not in info
    revoke(task, **marked())
    assert asked(world) == world.store.asked("leave") == []


# Parked when the task was declared in another way


def test_a_turn_is_claimed_whatever_the_strategy_is_now(app, world, lines):
    """It asks with its ticket, and what it is granted is its turn."""
    lines.answers = [Granted((1,), claimed=True)]
    task = declare(app, lambda _self: "ran", lock_on_conflict="skip")
    assert come(task, **marked()).retval == "ran"
    assert asked(world) == [Ticket("2:0:0", "2@", marked=True, task="shop.export")]
    assert world.store.done == ["2:0:0"]


def test_what_was_parked_under_one_key_comes_again_until_it_has_several(app, world, lines, broker):
    """It leaves its line, and is not dropped: not at its turn, nor when it comes again."""
    lines.parked[LOCK, "2:0:0"] = b"message"
    world.lease("b", "other")
    task = declare(app, lock_key=["a", "b"], lock_on_conflict="skip")
    assert isinstance(ended(come(task, **marked())), Retry)
    assert lines.parked == {}
    assert "ticket" not in again(broker)[HEADER]
    assert isinstance(ended(come(task, **again(broker))), Retry)


def test_what_left_its_line_for_several_keys_says_so_to_a_worker_with_one(
    app, world, lines, broker
):
    """It asks as the one that goes on with the work, and it is parked, whatever the strategy is."""
    lines.parked[LOCK, "2:0:0"] = b"message"
    world.lease("k", "other")
    come(declare(app, lock_key=["a", "k"], lock_on_conflict="retry"), **marked())
    app.tasks.pop("shop.export")
    one_key = declare(app, lock_on_conflict="skip")
    assert isinstance(ended(come(one_key, **again(broker))), TaskParked)
    name = lines.ran_without[LOCK, "2:0:0"]
    assert [(one.marked, one.goes_on) for one in asked(world)] == [(False, name)] * 2
    kept = Message.from_bytes(lines.parked[LOCK, "2:0:0"])
    assert "left" not in notes_in(kept.headers)  # its next turn is another one


@pytest.mark.parametrize("lost", ["withdraw", "acquire"])
def test_a_server_that_goes_away_does_not_make_what_left_its_line_a_new_task(
    app, world, lines, broker, monkeypatch, lost
):
    """It may not know that it has left; the strategy "skip" does not drop it later."""
    lines.parked[LOCK, "2:0:0"] = b"message"
    server = lines if lost == "withdraw" else world.store
    call = getattr(server, lost)

    def away(*given, **terms):
        call(*given, **terms)
        raise StoreError("redis://x", "the reply was lost")

    monkeypatch.setattr(server, lost, away)
    task = declare(app, lambda _self: "ran", lock_key=["a", "b"], lock_on_conflict="skip")
    assert isinstance(ended(come(task, **marked())), Retry)
    monkeypatch.setattr(server, lost, call)
    world.store.leases.clear()
    if lost == "acquire":
        world.lease("b", "other")
        assert isinstance(ended(come(task, **again(broker))), Retry)
    else:
        assert come(task, **again(broker)).retval == "ran"


def test_a_turn_that_is_delivered_again_is_not_taken_for_a_copy(app, world, lines):
    """The worker that took it out of line has died: its message is all that is left."""
    task = declare(app, lambda _self: "ran")
    request = arrived(task, "2", **marked())
    request.request_dict["delivery_info"] = {**request.delivery_info, "redelivered": True}
    assert run(task, request).retval == "ran"
    assert [one.goes_on for one in asked(world)] == [ANYBODY]


def test_what_takes_no_lock_any_more_leaves_its_line_and_runs_once(app, world, lines):
    """Its lock_limit is None now: the turn is given on, and a copy of it is dropped."""
    lines.parked[LOCK, "2:0:0"] = b"message"
    ran = []
    about = {"lock_limit": None, "lock_unique_until": "start", "lock_on_conflict": "skip"}
    task = declare(app, lambda self: ran.append(self.request.id), **about)
    come(task, **marked())
    assert (ran, lines.parked) == (["2"], {})
    assert isinstance(ended(come(task, **marked())), Ignore)
    assert ran == ["2"]


def test_what_takes_no_lock_any_more_runs_with_the_server_away(app, world, lines, caplog):
    """As a task without a guard does; the log says that it may run again."""
    world.store.away = True
    about = {"lock_limit": None, "lock_unique_until": "start", "lock_on_conflict": "skip"}
    task = declare(app, lambda _self: "ran", **about)
    assert come(task, **marked()).retval == "ran"
    assert (
        f"runs without a lock, and stays in line for lock {LOCK}: it may run again" in caplog.text
    )


def test_a_copy_of_what_has_left_its_line_for_several_keys_is_dropped(app, world, lines):
    """But not the delivery that has left it, where the broker says that it comes again."""
    lines.ran_without[LOCK, "2:0:0"] = "another delivery"
    task = declare(app, lambda _self: "ran", lock_key=["a", "b"], lock_on_conflict="skip")
    assert isinstance(ended(come(task, **marked())), Ignore)
    request = arrived(task, "2", **marked())
    request.request_dict["delivery_info"] = {**request.delivery_info, "redelivered": True}
    assert run(task, request).retval == "ran"


# What cannot claim its turn


def ends_early(app, error):
    def before_start(*_):
        raise error

    base = type("Base", (SingletonTask,), {"before_start": before_start, "abstract": True})
    return declare(app, base=base)


def test_a_key_that_cannot_be_built_sets_the_task_aside(app, world, lines, caplog):
    """At once, after its FAILURE: an argument was renamed while it was in line."""
    lines.parked[LOCK, "2:0:0"] = b"message"
    task = declare(app, lock_key=lambda: "never called")
    come(task, "2", "an argument too many", **marked())
    assert stored(app)[0] == "FAILURE"
    assert world.store.asked("withdraw") == [(LOCK, "2:0:0", "")]
    expected = "Parked task shop.export[2:0:0] for lock 'k' cannot be run, and is set aside in "
    assert f"{expected}{LOCK}:aside: " in caplog.text


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ValueError("no"), [True]),
        (Ignore(), [False]),
        (Reject("no", requeue=False), [False]),
        (Reject("no", requeue=True), []),
        (Retry("later"), [False]),
    ],
)
def test_what_ends_before_its_guard_leaves_its_line(app, world, lines, error, kept):
    """Unless it has claimed its turn; a message that the broker gets back keeps its turn, too."""
    task = ends_early(app, error)
    for headers in ({}, marked(ticket="1:0:0")):  # it was not parked
        come(task, **headers)
    assert world.store.calls == []
    come(task, **marked())
    assert world.store.asked("leave") == []  # which ends the claim of one that runs
    asked = world.store.asked("withdraw")
    assert [(lock, ticket) for lock, ticket, _ in asked] == [(LOCK, "2:0:0")] * len(kept)
    assert [delivery == "" for *_, delivery in asked] == kept  # set aside


@pytest.mark.parametrize("error", [ValueError("no"), Ignore()])
def test_a_lock_server_that_is_away_keeps_what_cannot_be_run(app, world, lines, caplog, error):
    """It has its turn again, and ends so again; the log says so."""
    world.store.away = True
    come(ends_early(app, error), **marked())
    expected = "Parked task shop.export[2:0:0] for lock 'k' cannot be run, and stays in line until "
    assert [r.levelno for r in caplog.records if expected in r.message] == [logging.ERROR]


# A forged ticket


def test_who_leaves_a_line_says_which_task_it_is(app, world, lines):
    """Another task's id in a message of one's own takes nobody out; a task may have two names."""
    task = declare(app, lock_on_conflict="retry", lock_key=["a", "b"])
    come(task, **marked())
    revoke(task, **marked())
    assert set(lines.tasks) == {"shop.export"}
    app.tasks.pop("shop.export")
    task = declare(app, lambda _self: None)
    request = arrived(task, "2", **marked())
    request._request_dict["task"] = "shop.alias"
    run(task, request)
    assert [ticket.task for ticket in asked(world)] == ["shop.alias"]


# A turn in another store


OTHER_STORE = "f" * 16


@pytest.mark.parametrize("lock", [LOCK, "old:{k}"])
@pytest.mark.parametrize("away", [False, True])
def test_a_turn_in_another_store_is_put_off(app, world, lines, broker, caplog, lock, away):
    """It has not run, and its next message brings the same turn; a forgery is not to blame."""
    if away:  # whether it is another one cannot be known
        runtime_of(app).process.identity.error = StoreError("redis://", "away")
    turn = marked(lock, store=OTHER_STORE)
    assert isinstance(ended(come(declare(app), **turn)), Ignore)
    assert again(broker)[HEADER].items() >= turn[HEADER].items()
    assert world.store.asked("park") == []
    assert (
        "has its turn for lock 'k' on another lock server, or under another prefix" in caplog.text
    )
    assert "celery dislock drain" in caplog.text
    assert "did not write" not in caplog.text


def test_a_turn_in_another_store_comes_less_often_after_some_time(app, lines, broker):
    """It may be forged: no worker will ever take it."""
    task = declare(app)
    for times, most in ((90, 12.5), (100, 75.0)):
        come(task, **marked(store=OTHER_STORE, put_off=times))
        countdown = broker.sent[-1]["countdown"]
        assert 0.6 * most * 0.75 <= countdown <= most


@pytest.mark.parametrize("lock", [LOCK, "old:{k}"])
@pytest.mark.parametrize("drained", [False, True])
def test_a_turn_in_a_store_that_was_taken_over_is_one_here(app, world, lines, lock, drained):
    """It asks for the lock of that key here, marked, and as drained if its lines were."""
    identity = runtime_of(app).process.identity
    (identity.drained if drained else identity.ours).add(OTHER_STORE)
    come(declare(app, lambda _self: None), **marked(lock, store=OTHER_STORE))
    [(name, ticket)] = world.store.asked("park")
    assert (name, ticket.name, ticket.marked, ticket.drained) == (LOCK, "2:0:0", True, drained)


def test_where_nothing_can_be_parked_no_turn_is_put_off(app, world, lines):
    """No worker of such a fleet could ever take it: it runs under the lock that it has here."""
    runtime_of(app).process._publisher = None
    ran = []
    task = declare(app, ran.append, lock_on_conflict="retry")
    come(task, **marked(store=OTHER_STORE))
    assert len(ran) == 1

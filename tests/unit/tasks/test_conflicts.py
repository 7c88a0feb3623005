"""The strategies, in traced tasks on a store and a clock that the test drives."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError

from celery_dislock import LockHeldError, SettingsError, SingletonTask
from celery_dislock.keys.names import shown_id, task_name
from celery_dislock.locks.channel import Watcher
from celery_dislock.locks.lease import Attempt, Conflict
from celery_dislock.messages.message import TaskSkipped
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.records import holder_of
from celery_dislock.servers.replies import Full, Parked, Refused
from celery_dislock.tasks import conflicts
from tests.unit.deliveries import arrived, deliver, run
from tests.unit.fakes import FakeLines, FakeRecord

HELD = "lock 'k' is held by t[1] on w (pid 7)"
NOW = 1_700_000_000.0  # UNIX time


@pytest.fixture
def unix_time(monkeypatch):
    """Set what the machine's clock says: ``unix_time(seconds)``."""

    def say(seconds):
        monkeypatch.setattr("celery_dislock.tasks.conflicts.time.time", lambda: seconds)

    say(NOW)
    return say


def declare(app, strategy, **options):
    """Make a task that must not run."""
    options = {"lock_key": "k", **options}

    @app.task(base=SingletonTask, lock_on_conflict=strategy, **options)
    def task():
        raise AssertionError

    return task


def declare_runnable(app, strategy, **options):
    """Make a task that tells its headers."""

    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict=strategy, bind=True, **options)
    def task(self):
        return dict(self.request.headers or {})

    return task


def stored(app, task_id="2"):
    result = app.AsyncResult(task_id)
    return result.state, result.result


# In a worker: each strategy's outcome is visible


def test_a_skip_tells_its_worker_why(app, world):
    """Which tells those who watch it."""
    world.lease("k", "other")
    task = declare(app, "skip")
    skipped = deliver(task, "2").retval.exception
    skipped = getattr(skipped, "exc", skipped)
    assert isinstance(skipped, TaskSkipped)
    assert skipped.why == str(stored(app)[1])


@pytest.mark.parametrize("older", [False, True])
def test_a_rejected_task_ends_as_failure(app, world, monkeypatch, older):
    """Celery before 5.7 leaves the result of a rejected task open: there it is stored here."""
    monkeypatch.setattr(conflicts, "CELERY_FAILS_REJECTED", not older)
    world.lease("k", "other")
    rejection = deliver(declare(app, "reject", acks_late=True), "2").retval.exception.exc
    assert isinstance(rejection, Reject)
    assert (rejection.requeue, HELD in rejection.reason) == (False, True)
    assert stored(app)[0] == ("FAILURE" if older else "PENDING")  # which the worker turns


@pytest.mark.parametrize("strategy", ["skip", "raise", "reject"])
def test_a_task_that_never_runs_frees_its_key(app, world, strategy):
    """Its message was reserved, and none of it comes again."""
    there = world.store.reservations
    there.records["dislock:{k}"] = FakeRecord("ab", "waiting", "2", ends=9999.0)
    world.lease("k", "other")
    task = declare(app, strategy, lock_unique_until="end")
    deliver(task, "2", notes={"unique": ["dislock:{k}", "end"]})
    assert there.of("dislock:{k}") is None


@pytest.mark.parametrize(("asked", "ignored"), [(None, True), (True, True), (False, False)])
def test_no_result_is_stored_where_it_is_ignored(app, world, asked, ignored):
    """The message says whether its result is wanted; where it does not, the task's option does."""
    world.lease("k", "other")
    request = {} if asked is None else {"ignore_result": asked}
    deliver(declare(app, "skip", ignore_result=True), "2", **request)
    assert stored(app)[0] == ("PENDING" if ignored else "REVOKED")


def test_each_conflict_is_signalled_once(app, world, heard, broker):
    """Waiting in vain after the first answer is still one conflict."""
    world.lease("k", "other")
    task = declare(app, "wait")
    deliver(task, "2")
    [(_, arguments)] = [event for event in heard if event[0] == "lock_conflict"]
    assert (arguments["sender"].name, arguments["task_id"]) == (task.name, "2")


# retry


@pytest.mark.parametrize(
    ("times", "held_for", "least", "most"),
    [(0, 20, 0.75, 1.25), (3, 20, 6, 10), (99, 20, 15, 25), (99, 86_400, 45, 75)],
)
def test_a_retry_backs_off_up_to_the_holders_time(app, world, broker, times, held_for, least, most):
    """Each time twice as long, jittered; never much beyond the holder's lease, or a minute."""
    world.lease("k", "other", lock_expire=held_for)
    deliver(declare(app, "retry"), "2", notes={"put_off": times})
    [sent] = broker.sent
    assert least <= sent["countdown"] <= most
    assert sent["notes"]["put_off"] == times + 1


def test_a_retry_gives_up_after_its_time(app, world, broker, unix_time):
    """lock_retry_for counts from the first conflict, over all deliveries."""
    world.lease("k", "other", lock_expire=86_400)
    task = declare(app, "retry", lock_retry_for=100)
    deliver(task, "2")
    headers = broker.sent[0]["headers"]
    assert broker.sent[0]["notes"]["retry_until"] == NOW + 100
    unix_time(NOW + 98)
    deliver(task, "2", headers=headers, notes={"put_off": 9})
    assert broker.sent[1]["notes"]["retry_until"] == NOW + 100
    assert broker.sent[1]["countdown"] <= 2 * 1.25
    unix_time(NOW + 100)
    deliver(task, "2", headers=broker.sent[1]["headers"])
    assert len(broker.sent) == 2
    assert stored(app)[0] == "FAILURE"
    assert isinstance(stored(app)[1], LockHeldError)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_retry_keeps_whether_its_result_is_wanted(app, world, broker, wanted):
    """What the message says about its result goes along."""
    world.lease("k", "other")
    deliver(declare(app, "retry"), "2", headers={"ignore_result": not wanted})
    assert broker.sent[0]["headers"]["ignore_result"] is (not wanted)


def test_a_task_that_is_put_off_keeps_the_headers_of_its_sender_alone(app, world, broker):
    """RabbitMQ takes a message with its x-death header for one that goes round in circles."""
    world.lease("k", "other")
    headers = {"tenant": "seven", "headers": {"trace": 1}, "x-y": 2}
    brokers = dict.fromkeys(["x-death", "x-first-death-queue", "x-delivery-count"], "added")
    deliver(declare(app, "retry"), "2", headers={**headers, **brokers})
    sent = broker.sent[0]["headers"]
    assert sent.items() >= headers.items()
    assert sent.keys() == {*headers, "id", "task", "retries", "eta", "dislock"}


# wait


def test_a_waiter_runs_when_its_turn_has_come(app, world):
    """The lock of a holder that was not renewed is had within the wait."""
    world.lease("k", "other", lock_expire=5)
    assert deliver(declare_runnable(app, "wait"), "2").retval == {}
    assert world.store.leases == {}


def test_a_waiter_gives_up_its_place_after_its_time(app, world):
    """After lock_wait_timeout the task fails, and it stands in line no more."""
    world.lease("k", "other", lock_expire=86_400)
    start = world.clock.now
    deliver(declare(app, "wait", lock_wait_timeout=7), "2")
    assert world.clock.now - start == pytest.approx(7, abs=0.01)
    assert isinstance(stored(app)[1], LockHeldError)
    assert [owner.partition("@")[0] for _, owner, _ in world.store.asked("release")] == ["2"]


def reserve_for_a_turn(world, key="k"):
    """Let another task, which was parked, have its turn for the lock."""
    turn = Attempt("turn#", {"id": "parked", "parked": True})
    world.lock(key, lock_expire=86_400).try_acquire(turn)


@pytest.mark.parametrize(("keys", "left"), [("k", False), (["a", "k"], True)])
def test_a_waiter_gives_its_slot_to_a_parked_task(app, world, broker, keys, left):
    """It comes again in a second, and has its place in line still; with several keys, none."""
    reserve_for_a_turn(world)
    task = declare(app, "wait", lock_key=keys, lock_wait_timeout=7)
    assert deliver(task, "2").info.state == "RETRY"
    assert bool(world.store.asked("release")) is left
    [sent] = broker.sent
    assert sent["countdown"] < 2
    assert sent["notes"]["retry_until"] == pytest.approx(time.time() + 7, abs=5)
    assert ("held" in sent["notes"]) is not left


def test_a_waiter_that_gave_its_slot_away_gives_up_after_its_time(app, world, broker):
    """Counted from its first conflict; it leaves the line then."""
    reserve_for_a_turn(world)
    task = declare(app, "wait", lock_wait_timeout=7)
    deliver(task, "2", notes={"retry_until": NOW - 1})
    assert isinstance(stored(app)[1], LockHeldError)
    assert broker.sent == []
    assert [owner.partition("@")[0] for _, owner, _ in world.store.asked("release")] == ["2"]


def test_a_waiter_whose_own_copy_got_the_lock_is_put_off(app, world, broker):
    """Of two deliveries that waited, the second has not failed: the first is the same task."""
    world.lease("k", "other", lock_expire=5)
    task = declare(app, "wait")
    wait = world.store.wait

    def overtaken(lock, owner, seconds):
        wait(lock, owner, seconds)
        copy = Attempt("copy", {"task": task.name, "id": "2"})
        world.lock("k", lock_expire=86_400).try_acquire(copy)

    world.store.wait = overtaken
    assert deliver(task, "2").info.state == "IGNORED"
    assert [sent["task_id"] for sent in broker.sent] == ["2"]
    assert stored(app)[0] == "PENDING"


@pytest.mark.parametrize("cut", [ValueError, SystemExit])
def test_a_wait_that_is_cut_short_leaves_the_line(app, world, cut):
    """A soft time limit or a termination in the middle of a wait leaves no ghost in line."""
    world.lease("k", "other", lock_expire=86_400)

    def cut_short(*_):
        raise cut

    world.store.wait = cut_short
    try:
        deliver(declare(app, "wait"), "2")
    except SystemExit:
        assert cut is SystemExit
    assert {owner.partition("@")[0] for _, owner, _ in world.store.asked("release")} == {"2"}


# callable


@pytest.mark.parametrize(
    ("answer", "state", "error"),
    [
        (None, "REVOKED", TaskRevokedError),
        ("skip", "REVOKED", TaskRevokedError),
        (Ignore(), "REVOKED", TaskRevokedError),
        ("raise", "FAILURE", LockHeldError),
        ("retry", "RETRY", LockHeldError),
        (Retry(), "RETRY", LockHeldError),
        ("wait", "FAILURE", LockHeldError),
        (ZeroDivisionError(), "FAILURE", ZeroDivisionError),
        ("queue", "FAILURE", LockHeldError),  # nobody can park it here
        ("quue", "FAILURE", SettingsError),
        (7, "FAILURE", SettingsError),
    ],
)
def test_a_callable_chooses(app, world, broker, answer, state, error):
    """It returns a strategy or None, or raises one of Celery's predicates; a bug is a failure."""
    world.lease("k", "other", lock_expire=86_400)
    asked = []

    def decide(task, conflict):
        asked.append((task.request.id, conflict.key))
        if isinstance(answer, Exception):
            raise answer
        return answer

    deliver(declare(app, decide), "2")
    assert asked == [("2", "k")]
    assert stored(app)[0] == state
    assert isinstance(stored(app)[1], error)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_callable_can_reject(app, world, requeue):
    """For good, as the strategy does; or back to the queue, which is the callable's own affair."""
    world.lease("k", "other")

    def decide(task, conflict):
        raise Reject("why", requeue=requeue)

    rejection = deliver(declare(app, decide, acks_late=True), "2").retval.exception.exc
    assert rejection.requeue is requeue
    assert rejection.reason == "why" if requeue else HELD in rejection.reason


def test_a_callable_can_spend_the_tasks_own_retries(app, world, broker):
    """task.retry() in a callable is Celery's, with its count and its countdown."""
    world.lease("k", "other")

    def decide(task, conflict):
        raise task.retry(countdown=5)

    assert deliver(declare(app, decide), "2").info.state == "RETRY"
    [sent] = broker.sent
    assert (sent["retries"], sent["countdown"]) == (1, 5)


@pytest.mark.parametrize("task_id", [math.nan, "\ud800x", "x" * 5000, "a\x1b b", 7])
@pytest.mark.parametrize("parked", [False, True])
def test_a_copy_is_known_by_any_id(task_id, parked):
    """A message may bring what is no text; what its holder says of itself is compared with that."""
    delivery = SimpleNamespace(id=task_id, is_eager=False)
    told = {"id": task_name(task_id), "parked": True} if parked else {"id": shown_id(task_id)}
    conflict = Conflict("k", holder_of(json.dumps(told).encode()), 1.0)
    assert conflicts.is_a_copy(delivery, conflict)
    assert str(conflict.error()).isprintable()
    assert not conflicts.is_a_copy(SimpleNamespace(id="other", is_eager=False), conflict)


@pytest.fixture
def counted(world, monkeypatch):
    """What those who watch are told: what has happened, its outcome, and the seconds waited."""
    events = []

    class Recorder(Watcher):
        def acquired(self, lease, how, waited):
            events.append(("acquired", how, waited))

        def resolved(self, attempt, conflict, outcome):
            events.append(("conflict", outcome))

        def unavailable(self, attempt, key, outcome, reason):
            events.append(("unavailable", outcome))

        def message(self, task, outcome, worker):
            events.append(("message", outcome))

    channel = world.watchdog.channel
    channel.watchers, channel.watched = [Recorder()], True
    return events


@pytest.mark.parametrize(
    ("strategy", "task_id", "told"),
    [
        *((name, "2", ("conflict", name)) for name in ("skip", "raise", "retry", "reject")),
        (lambda _task, _conflict: None, "2", ("conflict", "skip")),
        ("skip", "1", ("conflict", "copy")),
        ("skip", "away", ("unavailable", "retry")),
    ],
)
def test_what_becomes_of_a_task_is_counted_once(
    app, world, broker, counted, strategy, task_id, told
):
    """Under the strategy's name, and not by that of a callable; a copy counts as one."""
    world.lease()
    world.store.away = task_id == "away"
    counted.clear()
    deliver(declare(app, strategy), task_id)
    assert counted == [told]


@pytest.mark.parametrize("becomes", ["queue", "full", "raise", "copy"])
def test_a_task_that_is_to_be_parked_is_counted_by_what_becomes_of_it(
    app, world, broker, counted, monkeypatch, becomes
):
    """Not all that are to be parked can be: once per delivery, whatever it is."""

    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict="queue")
    def export(): ...

    process = runtime_of(app).process
    process.lines = lines = FakeLines(world.store)
    process._publisher = None if becomes == "raise" else SimpleNamespace()
    other = Refused("other", 30.0, {"task": "t", "id": "7", "worker": "w", "pid": 7})
    copy = Refused("2@w", 30.0, {"task": "t", "id": "2", "worker": "w", "pid": 7})
    answers = {"queue": Parked(1, other), "full": Full(9, other), "copy": copy}
    lines.answers = [other, answers.get(becomes, other)]
    world.lease(owner="other")
    counted.clear()
    run(export, arrived(export, "2"))
    assert [event for event in counted if event[0] == "conflict"] == [("conflict", becomes)]


def test_a_replaced_message_is_counted(app, world, counted):
    """Among the messages, beside those that were sent and those that were duplicates."""

    @app.task(base=SingletonTask, lock_key="k", lock_unique_until="end")
    def export(): ...

    world.store.reservations.records["dislock:{k}"] = FakeRecord(
        "ab", newest=2, confirmed=2, by="2"
    )
    deliver(export, notes={"unique": ["dislock:{k}", "end", "ab", 1]})
    assert counted == [("message", "replaced")]


def test_the_wait_of_a_task_that_was_put_off_counts_from_its_first_conflict(
    app, world, broker, counted, monkeypatch
):
    """Its message says since when it waits; the lock that is got at last ends that."""
    now = [1.6e9]
    monkeypatch.setattr(time, "time", lambda: now[0])

    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict="retry", lock_retry_for=1000)
    def export(): ...

    lease = world.lease()
    for after in (0, 7):
        now[0] += after
        deliver(export, "2", headers=broker.sent[-1]["headers"] if broker.sent else {})
        assert broker.sent[-1]["notes"]["since"] == 1.6e9
    lease.release()
    counted.clear()
    now[0] += 5
    deliver(export, "2", headers=broker.sent[-1]["headers"])
    assert ("acquired", "put_off", 12) in counted


@pytest.mark.parametrize("since", [1.0, 9e9])
def test_a_wait_that_cannot_be_is_not_counted(app, world, counted, since):
    """A forged header, or the clock of another machine."""

    @app.task(base=SingletonTask, lock_key="k")
    def export(): ...

    deliver(export, "2", notes={"since": since})
    assert ("acquired", "at_once", 0.0) in counted


@pytest.mark.parametrize("strategy", ["raise", "wait", "skip"])
@pytest.mark.parametrize("around", [{"parent_id": "1"}, {"parent_id": "3", "root_id": "1"}])
def test_a_task_that_its_holder_may_wait_for_says_so(app, world, strategy, around):
    """It was sent in the body of the holder, or of a task that this one has sent."""
    world.lease("k", "other")  # of task 1
    deliver(declare(app, strategy), "2", **around)
    assert "it waits for itself" in str(stored(app)[1])


def test_a_task_that_others_have_sent_says_nothing_of_itself(app, world):
    world.lease("k", "other")
    deliver(declare(app, "raise"), "2", parent_id="3", root_id="2")
    assert str(stored(app)[1]).endswith("unless renewed")


def test_a_task_that_is_parked_behind_the_one_that_sent_it_is_warned_of_once(app, world, caplog):
    """It gets its turn, unless the holder waits for its result: then neither ends."""
    world.lease("k", "other")
    for task_id in ("2", "3"):
        conflict = Conflict("k", {"task": "t", "id": "1", "worker": "w", "pid": 7}, 5.0)
        request = Context(id=task_id, parent_id="1", root_id="1")
        delivery = SimpleNamespace(request=request, id=task_id)
        conflicts._warn_of_wait("shop.task", "k", conflicts._hint(delivery, conflict))
    (record,) = caplog.records
    assert "Tasks shop.task are parked for lock 'k': that task has sent" in record.getMessage()

"""What becomes of a task whose lock is held, or whose lock's keys are damaged: each strategy."""

import math
from contextlib import ExitStack, suppress

import celery
import pytest
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from kombu.common import Broadcast

from celery_dislock import DamagedLockError, LockHeldError, SettingsError
from celery_dislock.exceptions import UnreachableError
from celery_dislock.signals import lock_conflict
from tests.declaring import declare, never
from tests.driven import held, reservation
from tests.unit.deliveries import deliver

HELD = "lock 'k' is held by shop.holder"
STRATEGIES = ["skip", "raise", "retry", "wait", "queue", "reject"]
ALL_DAY = {"lock_expire": 86_400}  # of a holder that nobody renews


def refused(app, strategy, **options):
    """Declare a task that must not run."""
    return declare(app, never, lock_on_conflict=strategy, **options)


def stored(app, task_id="2"):
    result = app.AsyncResult(task_id)
    return result.state, result.result


def test_a_rejected_task_ends_as_failure(app):
    """Celery before 5.7 leaves the result of a rejected task open: there it is stored here."""
    with held(app):
        rejection = deliver(refused(app, "reject", acks_late=True), "2").retval.exception.exc
    assert isinstance(rejection, Reject)
    assert (rejection.requeue, HELD in rejection.reason) == (False, True)
    by_the_worker = celery.VERSION[:2] >= (5, 7)
    assert stored(app)[0] == ("PENDING" if by_the_worker else "FAILURE")


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
@pytest.mark.parametrize(
    ("lock_key", "strategy", "goes_on"),
    [
        *(("k", name, name in {"retry", "queue"}) for name in [*STRATEGIES, "full"]),
        *((("k", "all"), name, name == "retry") for name in STRATEGIES if name != "queue"),
    ],
)
def test_what_is_refused_by_the_lock(app, broker, until, lock_key, strategy, goes_on):
    """A task that waits or comes again keeps its key; one that ends without running frees it."""
    options = {"full": {"lock_queue_limit": 1}, "wait": {"lock_wait_timeout": 5}}.get(strategy, {})
    options |= {"lock_key": lock_key, "lock_unique_until": until}
    task = refused(app, "queue" if strategy == "full" else strategy, **options)
    task.apply_async(task_id="2")
    headers = broker.last.headers
    with held(app):
        if strategy == "full":
            deliver(task, "in line")
        deliver(task, "2", headers=headers)
        assert (app.AsyncResult("2").state in {"RETRY", "PARKED"}) is goes_on
        left = reservation(task)
        assert (left is not None) is (goes_on or until == "expiry")
        if goes_on:
            assert (left.id, left.state) == ("2", "waiting")
            assert left.remaining > 3500
        assert task.delay().duplicate is (left is not None)


@pytest.mark.parametrize(
    ("request_", "options", "ignored"),
    [
        ({}, {}, True),
        ({"ignore_result": True}, {}, True),
        ({"ignore_result": False}, {}, False),
        ({}, {"store_errors_even_if_ignored": True}, False),  # as Celery does
    ],
)
def test_no_result_is_stored_where_it_is_ignored(app, request_, options, ignored):
    """The message says whether its result is wanted; where it does not, the task's option does."""
    with held(app):
        deliver(refused(app, "skip", ignore_result=True, **options), "2", **request_)
    assert stored(app)[0] == ("PENDING" if ignored else "REVOKED")


def test_each_conflict_is_signalled_once(app, receiving, broker):
    """Waiting in vain after the first answer is still one conflict."""
    seen = []

    def hear(sender, task_id, **_):
        seen.append((sender.name, task_id))

    with held(app, **ALL_DAY), receiving(lock_conflict, hear):
        deliver(refused(app, "wait"), "2")
    assert seen == [("shop.t", "2")]


# retry


@pytest.mark.parametrize(
    ("times", "held_for", "least", "most"),
    [(0, 20, 0.75, 1.25), (3, 20, 6, 10), (99, 20, 15, 25), (99, 86_400, 45, 75)],
)
def test_a_retry_backs_off_up_to_the_holders_time(app, broker, times, held_for, least, most):
    """Each time twice as long, jittered; never much beyond the holder's lease, or a minute."""
    with held(app, lock_expire=held_for):
        deliver(refused(app, "retry", max_retries=0), "2", notes={"put_off": times})
    assert least - 1 <= broker.last.delay <= most
    assert broker.last.notes["put_off"] == times + 1
    assert broker.last.headers["retries"] == 0  # the task's own are not spent


def test_a_retry_gives_up_after_its_time(app, lock_server, broker):
    """lock_retry_for counts from the first conflict, over all deliveries."""
    task, until = refused(app, "retry", lock_retry_for=100), lock_server.clock() + 100
    with held(app, **ALL_DAY):
        deliver(task, "2")
        lock_server.advance(98)
        deliver(task, "2", headers=broker.last.headers, notes={"put_off": 9})
        assert broker.last.delay <= 2 * 1.25
        lock_server.advance(2)
        deliver(task, "2", headers=broker.last.headers)
    assert [one.notes["retry_until"] for one in broker.sent] == [pytest.approx(until, abs=0.01)] * 2
    assert stored(app)[0] == "FAILURE"
    assert isinstance(stored(app)[1], LockHeldError)


def test_an_outage_before_the_first_conflict_is_no_part_of_the_time_of_retries(
    app, lock_server, broker
):
    """The task waits since then, for metrics; its retries begin with the first conflict."""
    task = refused(app, "retry", lock_retry_for=100)
    lock_server.away = True
    deliver(task, "2")
    lock_server.away = False
    lock_server.advance(200)
    with held(app, **ALL_DAY):
        deliver(task, "2", headers=broker.last.headers)
    assert stored(app)[0] == "RETRY"


def test_a_retry_cannot_be_had_for_longer_than_the_option_says(app, lock_server, broker):
    """A note that puts the end off for a thousand years is no longer than lock_retry_for."""
    with held(app):
        deliver(refused(app, "retry", lock_retry_for=100), "2", notes={"retry_until": 9e9})
    assert broker.last.notes["retry_until"] <= lock_server.clock() + 100


def test_a_task_that_is_put_off_keeps_the_headers_of_its_sender_alone(app, broker):
    """RabbitMQ takes a message with its x-death header for one that goes round in circles.

    A note that a newer release has written goes on, too.
    """
    headers = {"tenant": "seven", "headers": {"trace": 1}, "x-y": 2, "ignore_result": True}
    deaths = ["x-death", "x-first-death-queue", "x-last-death-reason", "x-delivery-count"]
    brokers, notes = dict.fromkeys(deaths, "added"), {"sent": 5, "new": {"note": 1}}
    with held(app):
        deliver(refused(app, "retry"), "2", headers={**headers, **brokers}, notes=notes)
    sent = broker.last.headers
    assert sent["dislock"].items() >= notes.items()
    assert sent.items() >= headers.items()
    assert sent.keys() == {*headers, "id", "task", "retries", "eta", "dislock"}


# wait


def test_a_waiter_runs_when_its_turn_has_come(app, lock_server):
    """The lock of a holder that was not renewed is had within the wait."""
    task = declare(app, lambda: "ran", lock_on_conflict="wait")
    with held(app, lock_expire=5):
        assert deliver(task, "2").retval == "ran"
    assert lock_server.locks() == []


@pytest.mark.parametrize("strike", [None, ValueError(), SystemExit()])
def test_a_waiter_leaves_the_line(app, lock_server, strike):
    """After lock_wait_timeout the task fails; a soft time limit or a termination may end it."""
    task = refused(app, "wait", lock_wait_timeout=7)
    with held(app, **ALL_DAY), suppress(SystemExit):
        began = lock_server.clock()
        for request in range(3) if strike else ():  # whichever it comes in
            deliver(task, "1")  # a copy
            lock_server.strike(strike, after=bool(request))
            with suppress(SystemExit):
                deliver(task, "2")
            assert task.lock_for().line() == []
        if strike is None:
            deliver(task, "2")
            assert lock_server.clock() - began == pytest.approx(7, abs=0.01)
            assert isinstance(stored(app)[1], LockHeldError)
        assert task.lock_for().line() == []


def parks(app):
    """Have another task parked for the lock, which has its turn when the block ends."""
    deliver(declare(app, never, name="parks", lock_on_conflict="queue"), "parked")


@pytest.mark.parametrize("keys", ["k", ["a", "k"]])
def test_a_waiter_gives_its_slot_to_a_parked_task(app, lock_server, broker, keys):
    """It comes again in a second, and has its place in line still; with several keys, none."""
    with held(app):
        parks(app)
    task = refused(app, "wait", lock_key=keys, lock_wait_timeout=7)
    until = lock_server.clock() + 7
    assert deliver(task, "2").info.state == "RETRY"
    line = [one.id for lock in task.lock_for() for one in lock.line()]
    assert line == (["2"] if keys == "k" else [])
    assert broker.last.delay < 2
    assert broker.last.notes["retry_until"] == pytest.approx(until, abs=0.1)
    assert ("held" in broker.last.notes) is (keys == "k")
    deliver(task, "3", notes={"retry_until": lock_server.clock() - 1})  # its time is over
    assert isinstance(stored(app, "3")[1], LockHeldError)
    assert broker.ids == ["parked", "2"]
    assert [one.id for lock in task.lock_for() for one in lock.line()] == line


def test_a_waiter_whose_own_copy_got_the_lock_is_put_off(app, lock_server, broker, monkeypatch):
    """Of two deliveries that waited, the second has not failed: the first is the same task."""
    with held(app, **ALL_DAY), ExitStack() as first:

        def overtaken(_key, seconds):
            lock_server.stall(seconds)
            lock_server.lose()
            first.enter_context(held(app, task_id="2", **ALL_DAY))

        monkeypatch.setattr(lock_server, "pop", overtaken)
        task = refused(app, "wait", lock_wait_timeout=5)
        assert deliver(task, "2").info.state == "IGNORED"
    assert broker.ids == ["2"]


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
        ("queue", "PARKED", dict),
        (ZeroDivisionError(), "FAILURE", ZeroDivisionError),
        ("quue", "FAILURE", SettingsError),
        (7, "FAILURE", SettingsError),
    ],
)
def test_a_callable_chooses(app, broker, answer, state, error):
    """It returns a strategy or None, or raises one of Celery's predicates; a bug is a failure."""
    asked = []

    def decide(task, conflict):
        asked.append((task.request.id, conflict.key))
        if isinstance(answer, Exception):
            raise answer
        return answer

    with held(app, **ALL_DAY):
        deliver(refused(app, decide), "2")
    assert asked == [("2", "k")]
    assert stored(app)[0] == state
    assert isinstance(stored(app)[1], error)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_callable_can_reject(app, requeue):
    """For good, as the strategy does; or back to the queue, which is the callable's own affair."""

    def decide(task, conflict):
        raise Reject("why", requeue=requeue)

    with held(app):
        rejection = deliver(refused(app, decide, acks_late=True), "2").retval.exception.exc
    assert rejection.requeue is requeue
    assert rejection.reason == "why" if requeue else HELD in rejection.reason


def test_a_callable_can_spend_the_tasks_own_retries(app, broker):
    """task.retry() in a callable is Celery's, with its count and its countdown."""

    def decide(task, conflict):
        raise task.retry(countdown=5)

    with held(app):
        assert deliver(refused(app, decide), "2").info.state == "RETRY"
    assert broker.last.headers["retries"] == 1
    assert 3 < broker.last.delay <= 5


# Copies, and tasks that wait for themselves


@pytest.mark.parametrize(
    "task_id", [math.nan, "\ud800x", "x" * 5000, "a\x1b b", 7], ids=lambda one: ascii(one)[:9]
)
def test_a_copy_is_known_by_any_id(app, broker, task_id):
    """A message may bring what is no text; what its holder says of itself is compared with that."""
    task = refused(app, "raise", ignore_result=True)
    with held(app, task_id=task_id, ignore_result=True):
        assert deliver(task, task_id).info.state == "IGNORED"
        assert len(broker.sent) == 1
        error = deliver(task, "other").retval.exception
        assert isinstance(error, LockHeldError)
        assert str(error).isprintable()


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_copy_of_the_holder_is_put_off_whatever_the_strategy(
    app, broker, strategy, broadcast, caplog
):
    """It may be the only message of that work; of one that was broadcast each worker has a copy."""
    app.conf.task_queues = [Broadcast("all")] if broadcast else None
    with held(app, task_id="2"):
        info = {"exchange": "all"} if broadcast else {}
        deliver(refused(app, strategy), "2", delivery_info=info)
    assert broker.ids == ([] if broadcast else ["2"])
    assert stored(app)[0] == "SUCCESS"  # of the first delivery, or of the worker that runs it
    told = "shop.t[2] acknowledged unrun: it was broadcast, and cannot be put off"
    assert (told in caplog.text) is broadcast


@pytest.mark.parametrize(
    "came", [{"delivery_info": {"redelivered": True}}, {"notes": {"put_off": 1}}]
)
@pytest.mark.parametrize("strategy", ["skip", "raise", "reject", "wait"])
def test_a_copy_does_not_end_what_has_ended(app, broker, strategy, came):
    """It would be REVOKED, or fail once more, and its chord would count one member twice."""
    app.backend.mark_as_failure("2", ValueError("no"))
    task = refused(app, strategy)
    with held(app, **ALL_DAY):
        info = deliver(task, "2", **came).info
        assert (info.state, str(info.retval)) == ("IGNORED", "it has run under lock 'k' before")
        assert (stored(app)[0], str(stored(app)[1])) == ("FAILURE", "no")


@pytest.mark.parametrize("persistent", [True, False])
def test_a_copy_whose_end_cannot_be_read_is_ended(app, monkeypatch, persistent):
    """The result backend is away, or reading would consume the result: no caller waits for ever."""

    def away(_):
        raise ConnectionError

    monkeypatch.setattr(app.backend, "get_state", away if persistent else pytest.fail)
    monkeypatch.setattr(app.backend, "persistent", persistent)
    with held(app):
        deliver(refused(app, "skip"), "2", delivery_info={"redelivered": True})
    assert stored(app)[0] == "REVOKED"


@pytest.mark.parametrize("away", [False, True])
def test_a_broadcast_task_that_would_come_again_fails(app, lock_server, broker, away):
    """Its lock is held by another task, with "retry", or the lock server is away."""
    app.conf.task_queues = [Broadcast("all")]
    task = refused(app, "retry")
    with held(app):
        lock_server.away = away
        deliver(task, "2", delivery_info={"exchange": "all"})
        lock_server.away = False
    assert broker.ids == []
    state, error = stored(app)
    assert (state, type(error)) == ("FAILURE", UnreachableError if away else LockHeldError)


@pytest.mark.parametrize("strategy", ["raise", "wait", "skip"])
@pytest.mark.parametrize(
    ("around", "says"),
    [
        ({"parent_id": "1"}, True),
        ({"parent_id": "3", "root_id": "1"}, True),
        ({"parent_id": "3", "root_id": "2"}, False),
    ],
)
def test_a_task_that_its_holder_may_wait_for_says_so(app, strategy, around, says):
    """It was sent in the body of the holder, or of a task that this one has sent."""
    with held(app, **ALL_DAY):
        deliver(refused(app, strategy), "2", **around)
    assert ("it waits for itself" in str(stored(app)[1])) is says


def test_a_task_that_is_parked_behind_the_one_that_sent_it_is_warned_of_once(app, broker, caplog):
    """It gets its turn, unless the holder waits for its result: then neither ends."""
    with held(app):
        for task_id in ("2", "3"):
            deliver(refused(app, "queue"), task_id, parent_id="1", root_id="1")
    [told] = [one for one in caplog.messages if "has sent the task that asks for it" in one]
    assert told.startswith("Tasks shop.t are parked for lock 'k': ")


@pytest.mark.parametrize(
    ("strategy", "keys", "notes", "state"),
    [
        ("skip", "k", {}, "REVOKED"),
        ("skip", "k", {"ticket": ["dislock:{k}", "2:0:0"]}, "PARKED"),
        ("retry", "k", {"ticket": ["dislock:{k}", "2:0:0"]}, "PARKED"),
        ("skip", ["k", "l"], {"ticket": ["dislock:{k}", "2:0:0"]}, "PARKED"),
        ("raise", "k", {"retry_until": 2e9}, "FAILURE"),
    ],
)
def test_what_was_parked_is_not_dropped_for_another_strategy(
    app, broker, strategy, keys, notes, state
):
    """A ticket in its message says that it has waited already."""
    with held(app):
        deliver(refused(app, strategy, lock_key=keys), "2", notes=notes)
    assert stored(app)[0] == state


# A lock whose keys somebody has damaged


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_task_of_a_damaged_lock_fails_after_some_tries(app, lock_server, broker, strategy):
    """It is put off as in an outage, in case somebody mends it; then its error names the key."""
    lock_server.send("SET", "dislock:{k}", "x")
    task, headers = refused(app, strategy), {}
    while deliver(task, headers=headers).info.state in {"RETRY", "IGNORED"}:
        headers = broker.last.headers
    state, error = stored(app, "1")
    assert (state, len(broker.sent)) == ("FAILURE", 5)
    assert isinstance(error, DamagedLockError)
    assert "'dislock:{k}' cannot be used: WRONGTYPE" in str(error)
    assert isinstance(task.apply().result, DamagedLockError)  # it has nowhere to be put off to


def test_it_is_told_once_and_no_outage_is(app, lock_server, broker, caplog):
    """One line names key and remedy; the server has answered, and other tasks run."""
    lock_server.send("SET", "dislock:{k}", "x")
    for task_id in "123":
        deliver(refused(app, "skip"), task_id)
    other = declare(app, lambda: "ran", name="other", lock_key="other")
    assert deliver(other).retval == "ran"
    [told] = [message for message in caplog.messages if "rename the key" in message]
    assert "dislock:{k}" in told
    assert "no task can take a lock" not in caplog.text
    assert "answers again" not in caplog.text


# Counts


@pytest.fixture
def counts(app, lock_server):
    """Return what was counted, but for the holder of the lock."""
    app.conf.dislock_metrics = True

    def read():
        lock_server.advance(6)
        found = {}
        for name, value in lock_server.contents().items():
            if ":metrics:" in name and name.endswith("w1"):
                found |= {one.decode(): int(n) for one, n in value.items()}
        return {name: n for name, n in found.items() if name.endswith(" shop.t") and n}

    return read


@pytest.mark.parametrize(
    ("strategy", "task_id", "told"),
    [
        *((name, "2", f"conflicts {name}") for name in STRATEGIES),
        (lambda _task, _conflict: None, "2", "conflicts skip"),
        ("skip", "1", "conflicts copy"),
        ("full", "2", "conflicts full"),
        ("skip", "away", "unavailable retry"),
    ],
)
def test_what_becomes_of_a_task_is_counted_once(
    app, lock_server, broker, counts, strategy, task_id, told
):
    """Under the strategy's name, and not by that of a callable; a copy counts as one."""
    options = {"lock_queue_limit": 1} if strategy == "full" else {}
    task = refused(app, "queue" if options else strategy, **options)
    with held(app, **ALL_DAY):
        if options:
            deliver(declare(app, never, name="parks", lock_on_conflict="queue"), "in line")
        lock_server.away = task_id == "away"
        deliver(task, task_id)
        lock_server.away = False
        assert {name: n for name, n in counts().items() if "wait_seconds" not in name} == {
            f"{told} shop.t": 1
        }


@pytest.mark.parametrize(
    ("since", "waited"), [(None, 12), (1.0, 0), (9e9, 0)], ids=["own", "forged", "to come"]
)
def test_the_wait_of_a_task_that_was_put_off_counts_from_its_first_conflict(
    app, lock_server, broker, counts, since, waited
):
    """Its message says since when it waits, if that can be."""
    task = declare(app, lambda: None, lock_on_conflict="retry", lock_retry_for=1000)
    with held(app, **ALL_DAY):
        deliver(task, "2")
        lock_server.advance(7)
        deliver(task, "2", headers=broker.last.headers)
        lock_server.advance(5)
    first, second = (one.notes["since"] for one in broker.sent)
    assert first == second
    deliver(task, "2", headers=broker.last.headers, notes={"since": since} if since else {})
    found = counts()
    assert found["acquisitions put_off shop.t"] == 1
    assert found["wait sum shop.t"] // 1_000_000 == waited

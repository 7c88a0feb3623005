"""What a body sends under its own id: after the release, and with its lease where that is kept."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock import SingletonTask
from celery_dislock.messages.headers import HELD_HEADER
from celery_dislock.messages.outbox import Outbox
from tests.unit.deliveries import Broker, deliver

LOCK = "dislock:{k}"

HUNDRED = timedelta(seconds=100)


@pytest.fixture
def broker(app, world, monkeypatch):
    """Note who holds the lock whenever something is sent."""

    class Noting(Broker):
        def __call__(self, name, *args, **options):
            super().__call__(name, *args, held_by=world.store.leases.get(LOCK), **options)

    broker = Noting()
    monkeypatch.setattr(app.amqp, "send_task_message", broker.receive)
    return broker


def retrying(app, countdown=0, body=None, **options):
    """Make a task that asks for one retry, and for no more."""

    @app.task(base=SingletonTask, lock_key="k", bind=True, **options)
    def task(self):
        if self.request.retries:
            return self.lease.key
        if body is not None:
            return body(self)
        raise self.retry(countdown=countdown)

    return task


def test_a_retry_is_sent_when_the_lock_is_free(app, world, broker):
    """The message cannot be received before the lock of the body that sent it is released."""
    assert deliver(retrying(app)).info.state == "RETRY"
    [sent] = broker.sent
    assert sent["held_by"] is None
    assert (sent["task_id"], sent["retries"]) == ("1", 1)


def test_the_lock_is_held_until_the_body_has_ended(app, world, broker):
    """What a body does after it has asked for a retry, it does under the lock."""
    seen = []

    def body(task):
        try:
            raise task.retry(countdown=0)
        finally:
            seen.append((task.lease.held, len(broker.sent)))

    deliver(retrying(app, body=body))
    assert seen == [(True, 0)]
    assert len(broker.sent) == 1


@pytest.mark.parametrize("ending", ["throw=False", "swallowed", "another error"])
def test_a_retry_is_sent_however_the_body_ends(app, world, broker, ending):
    """As in Celery the message is on its way once task.retry() was called."""

    def body(task):
        if ending == "throw=False":
            return str(task.retry(countdown=0, throw=False))
        try:
            task.retry(countdown=0)
        except Retry:
            if ending == "another error":
                raise ValueError from None
        return None

    deliver(retrying(app, body=body))
    [sent] = broker.sent
    assert sent["held_by"] is None
    assert app.AsyncResult("1").state == ("FAILURE" if ending == "another error" else "SUCCESS")


def test_autoretry_is_sent_when_the_lock_is_free(app, world, broker):
    """Celery's autoretry_for goes the same way."""

    @app.task(base=SingletonTask, lock_key="k", autoretry_for=(ValueError,), max_retries=3)
    def task():
        raise ValueError

    deliver(task)
    assert [sent["held_by"] for sent in broker.sent] == [None]


def test_no_more_retries_leave_the_body_its_lock(app, world, broker):
    """Where Celery sends nothing, nothing is released before its time."""
    seen = []

    def body(task):
        try:
            raise task.retry(countdown=0, max_retries=-1)
        except task.MaxRetriesExceededError:
            seen.append(task.lease.held)

    deliver(retrying(app, body=body))
    assert seen == [True]
    assert broker.sent == []


def test_a_retry_that_cannot_be_sent_is_rejected_as_celery_does(app, world, broker):
    """The broker is away: the delivery ends as it does without a lock."""
    broker.times_away = 1
    rejection = deliver(retrying(app)).retval.exception.exc
    assert isinstance(rejection, Reject)
    assert rejection.requeue is False
    assert world.store.leases == {}


def test_an_eager_retry_takes_the_lock_again(app, world):
    """apply() runs the retry on the spot, after the release."""
    assert retrying(app).apply().get() == "k"
    assert [call[0] for call in world.store.calls] == ["acquire", "release"] * 2


def test_other_messages_are_sent_at_once(app, world, broker):
    """What has another id is another task: a body may wait for it to be received."""
    seen = []

    def body(task):
        task.apply_async(task_id="2")
        seen.append(len(broker.sent))

    deliver(retrying(app, body=body))
    assert seen == [1]


def test_a_replacement_is_sent_when_the_lock_is_free(app, world, broker):
    """self.replace() publishes after the release, too, whatever the replacement is made of."""

    def body(task):
        return task.replace(task.si() | task.si())

    assert deliver(retrying(app, body=body)).info.state == "IGNORED"
    assert [sent["held_by"] for sent in broker.sent] == [None]


def test_the_lock_is_held_until_a_replaced_body_has_ended(app, world, broker):
    """What a body does after it was replaced, in finally, it does under the lock."""
    seen = []

    def body(task):
        try:
            return task.replace(task.si())
        finally:
            seen.append((task.lease.held, len(broker.sent)))

    deliver(retrying(app, body=body))
    assert seen == [(True, 0)]
    assert len(broker.sent) == 1


def test_a_users_on_replace_is_kept(app, world, broker):
    """A class may do something of its own when it is replaced."""
    seen = []

    class Counting(SingletonTask):
        abstract = True

        def on_replace(self, sig):
            seen.append(sig.task)
            return super().on_replace(sig)

    @app.task(base=Counting, lock_key="k", bind=True)
    def task(self):
        return self.replace(self.si())

    deliver(task)
    assert seen == [task.name]
    assert len(broker.sent) == 1


def test_an_eager_replacement_finds_the_lock_free(app, world):
    """It runs within the body that it takes the place of, which is over."""

    def body(task):
        return task.replace(task.si().set(retries=1))

    assert retrying(app, body=body).apply().get() == "k"


# lock_hold_on_retry


def test_a_held_lease_lasts_over_the_countdown_and_a_timeout(app, world, broker):
    """Nobody renews it meanwhile, and nobody else gets it."""
    deliver(retrying(app, countdown=300, lock_hold_on_retry=True))
    [sent] = broker.sent
    owner, expires, _ = world.store.leases[LOCK]
    assert owner == "~" + sent["headers"][HELD_HEADER]
    assert expires - world.clock() == pytest.approx(330)
    assert sent["held_by"] is not None
    assert len(world.watchdog) == 0


def test_the_retry_takes_over_the_lease_and_releases_it(app, world, broker):
    """The next attempt goes on with it, knows nothing of the header, and frees it at its end."""
    seen = []
    task = retrying(app, countdown=300, lock_hold_on_retry=True)
    deliver(task)
    headers = broker.sent[0]["headers"]

    @task.app.task(base=SingletonTask, lock_key="k", bind=True)
    def second(self):
        seen.append((world.store.leases[LOCK][0], self.request.headers))

    deliver(second, retries=1, **headers)
    [(owner, left)] = seen
    assert owner.startswith("1@w1:42/")
    assert owner != headers[HELD_HEADER]
    assert left == {}
    assert world.store.leases == {}


def test_of_two_copies_of_a_retry_one_takes_over(app, world, broker):
    """The second finds the lease taken by its own task, and is put off."""
    task = retrying(app, lock_hold_on_retry=True)
    deliver(task)
    headers = broker.sent[0]["headers"]
    world.store.take_over([LOCK], headers[HELD_HEADER], "the first", '{"id": "1"}')
    assert deliver(task, retries=1, **headers).info.state == "IGNORED"
    assert len(broker.sent) == 2


def test_a_retry_whose_lease_has_run_out_takes_the_lock_anew(app, world, broker):
    """A queue that is longer than the timeout costs the lease, not the task."""
    task = retrying(app, lock_hold_on_retry=True)
    deliver(task)
    world.clock.advance(31)
    assert deliver(task, retries=1, **broker.sent[0]["headers"]).retval == "k"


def test_of_several_leases_all_are_taken_over_or_none(app, world, broker):
    """Where one of them has ended meanwhile, the others are given back."""

    @app.task(
        base=SingletonTask, lock_key=["k", "l"], lock_hold_on_retry=True, bind=True, max_retries=9
    )
    def task(self):
        raise self.retry(countdown=0)

    deliver(task)
    headers = broker.sent[0]["headers"]
    assert len(world.store.leases) == 2
    del world.store.leases["dislock:{l}"]
    world.store.leases["dislock:{l}"] = ("other", world.clock() + 600, {"id": "7"})
    deliver(task, retries=1, **headers)
    assert list(world.store.leases) == ["dislock:{l}"]


@pytest.mark.parametrize("error", [None, ValueError, Ignore, Reject])
def test_only_a_retry_keeps_the_lease(app, world, broker, error):
    """Every other way out of the body releases, whatever lock_hold_on_retry says."""

    def body(_task):
        if error is not None:
            raise error

    deliver(retrying(app, body=body, lock_hold_on_retry=True))
    assert world.store.leases == {}


def test_a_lost_lease_is_not_kept(app, world, broker):
    """Somebody else may have the lock by now: the retry waits its turn as everybody."""

    def body(task):
        world.clock.advance(100)
        raise task.retry(countdown=0)

    deliver(retrying(app, body=body, lock_hold_on_retry=True))
    assert HELD_HEADER not in (broker.sent[0].get("headers") or {})


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 0),
        ({"countdown": 0}, 0),
        ({"countdown": 2.5}, 2.5),
        ({"eta": lambda now: now + HUNDRED}, 100),
        ({"eta": lambda now: (now + HUNDRED).isoformat()}, 100),
        ({"eta": lambda now: now.replace(tzinfo=None) + HUNDRED}, 100),
        ({"eta": lambda now: now - HUNDRED}, 0),
    ],
)
def test_the_time_of_a_retry_is_known_however_it_is_given(options, seconds):
    """A countdown, or a time of day with or without its zone, in the past, too."""
    if "eta" in options:
        options = {"eta": options["eta"](datetime.now(timezone.utc))}
    outbox = Outbox()
    outbox.add_retry(print, options)
    assert outbox.retry_in == pytest.approx(seconds, abs=30)

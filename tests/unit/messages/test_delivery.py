"""What a body sends under its own id: after the release, and with its lease where that is kept."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from unittest.mock import Mock

import pytest
from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock import SingletonTask
from celery_dislock.hooks import guard_tasks
from celery_dislock.messages.delivery import Outbox
from celery_dislock.messages.headers import HEADER, notes_in
from celery_dislock.messages.message import AS_IT_CAME
from tests.unit.deliveries import Broker, deliver, noted

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
    monkeypatch.setattr("celery_dislock.messages.unrun.publish", broker.republish)
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


@pytest.mark.parametrize("how", ["retry", "autoretry", "replace", "replace by a chain"])
def test_the_lock_is_held_until_the_body_has_ended(app, world, broker, how):
    """What a body does after it has asked for another message, it does under the lock."""
    seen = []

    def body(task):
        ways = {
            "retry": lambda: task.retry(countdown=0),
            "autoretry": lambda: {}[how],
            "replace": lambda: task.replace(task.si()),
            "replace by a chain": lambda: task.replace(task.si() | task.si()),
        }
        try:
            return ways[how]()
        finally:
            seen.append((task.lease.held, len(broker.sent)))

    deliver(retrying(app, body=body, autoretry_for=(KeyError,)))
    assert seen == [(True, 0)]
    assert [sent["held_by"] for sent in broker.sent] == [None]


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


def test_a_retry_that_cannot_be_sent_is_rejected_as_celery_does(app, world, broker):
    """The broker is away: the delivery ends as it does without a lock."""
    broker.times_away = 1
    rejection = deliver(retrying(app)).retval.exception.exc
    assert isinstance(rejection, Reject)
    assert rejection.requeue is False
    assert world.store.leases == {}


@pytest.mark.parametrize("replaced", [False, True])
def test_an_eager_message_takes_the_lock_again(app, world, replaced):
    """A retry and a replacement run on the spot, after the release."""

    def body(task):
        return task.replace(task.si().set(retries=1))

    assert retrying(app, body=body if replaced else None).apply().get() == "k"
    calls = [call[0] for call in world.store.calls]
    assert calls == ["acquire", "release"] * 2


def test_other_messages_are_sent_at_once(app, world, broker):
    """What has another id is another task: a body may wait for it to be received."""
    seen = []

    def body(task):
        task.apply_async(task_id="2")
        seen.append(len(broker.sent))

    deliver(retrying(app, body=body))
    assert seen == [1]


@pytest.mark.parametrize("base", [SingletonTask, Task])
def test_a_users_on_replace_is_kept(app, world, broker, base):
    """A class may do something of its own when it is replaced."""
    seen = []

    def on_replace(self, sig):
        seen.append((sig.task, world.store.leases))
        return super(type(self), self).on_replace(sig)

    @app.task(base=base, lock_key="k", bind=True, on_replace=on_replace)
    def task(self):
        return self.replace(self.si())

    guard_tasks(app)
    deliver(task)
    assert seen == [(task.name, {})]
    assert len(broker.sent) == 1


# What a retry does not take along


@pytest.mark.parametrize("where", ["before_start", "body"])
def test_a_retry_takes_along_what_belongs_to_the_message_alone(app, broker, where):
    """Not the broker's headers, the notes, the message as it came, or the delay that it had."""

    def retry(self, *_):
        raise self.retry(countdown=0, max_retries=9)

    other = {"before_start": lambda *_: None, "body": retry, where: retry}
    app.task(
        name="again",
        base=SingletonTask,
        lock_key="k",
        before_start=other["before_start"],
        bind=True,
    )(other["body"])
    deliver(
        app.tasks["again"],
        headers={"headers": {"trace": 1}, "x-death": [{"queue": "q"}]},
        notes={"ticket": [LOCK, "1:0:0"], "put_off": 3, "sent": 5},
        delivery_info={"exchange": "celery_delayed_0", "routing_key": "0." * 28 + "other"},
    )
    [sent] = broker.sent
    assert sent["headers"] == {"trace": 1, **noted(sent=5)}
    assert (sent["exchange"], sent["routing_key"]) == ("celery_delayed_delivery", "other")
    assert AS_IT_CAME not in sent


# lock_hold_on_retry


def test_a_held_lease_lasts_over_the_countdown_and_a_timeout(app, world, broker):
    """Nobody renews it meanwhile, and nobody else gets it."""
    deliver(retrying(app, countdown=300, lock_hold_on_retry=True))
    [sent] = broker.sent
    owner, expires, _ = world.store.leases[LOCK]
    assert owner == "~" + sent["headers"][HEADER]["held"]
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

    deliver(second, headers={**headers, "retries": 1})
    [(owner, left)] = seen
    assert owner.startswith("1@w1:42/")
    assert owner != notes_in(headers)["held"]
    assert left == {}
    assert world.store.leases == {}


@pytest.mark.parametrize(("taken", "state"), [(True, "IGNORED"), (False, None)])
def test_a_retry_whose_lease_is_gone_asks_anew(app, world, broker, taken, state):
    """A copy of it has taken it over, and this one is put off; or it has run out."""
    task = retrying(app, lock_hold_on_retry=True)
    deliver(task)
    headers = broker.sent[0]["headers"]
    world.clock.advance(0 if taken else 31)
    if taken:
        world.store.take_over([LOCK], notes_in(headers)["held"], "the first", '{"id": "1"}')
    outcome = deliver(task, headers={**headers, "retries": 1})
    assert (outcome.info and outcome.info.state) == state
    assert len(broker.sent) == 1 + taken


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
    deliver(task, headers={**headers, "retries": 1})
    assert list(world.store.leases) == ["dislock:{l}"]


@pytest.mark.parametrize("error", [None, ValueError, Ignore, Reject, "lost"])
def test_only_a_retry_keeps_the_lease(app, world, broker, error):
    """Every other way out of the body releases; nor is a lease kept that was lost."""

    def body(task):
        if error == "lost":
            world.clock.advance(100)
            raise task.retry(countdown=0)
        if error is not None:
            raise error

    deliver(retrying(app, body=body, lock_hold_on_retry=True))
    assert world.store.leases == {}
    assert ["held" in sent["notes"] for sent in broker.sent] == ([False] if error == "lost" else [])


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
        ({"eta": lambda now: Mock(isoformat=(now + HUNDRED).isoformat)}, 100),  # as Arrow's
        ({"eta": lambda now: now.date() - HUNDRED}, 0),
        ({"eta": lambda _now: "tomorrow"}, 0),  # Celery, or the worker, refuses these
        ({"countdown": "5"}, 0),
        ({"countdown": math.nan}, 0),
    ],
)
def test_the_time_of_a_retry_is_known_however_it_is_given(options, seconds):
    """A countdown, or a time with or without its zone, in the past, too: as Celery takes it."""
    if "eta" in options:
        options = {"eta": options["eta"](datetime.now(timezone.utc))}
    outbox = Outbox()
    outbox.add_retry(print, options)
    assert outbox.retry_in == pytest.approx(seconds, abs=30)

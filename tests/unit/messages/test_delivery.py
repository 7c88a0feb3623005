"""What a body sends under its own id: after the release, and with its lease where that is kept."""

import math
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from unittest.mock import Mock

import pytest
from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock.hooks import guard_tasks
from celery_dislock.messages.message import AS_IT_CAME
from tests.declaring import declare
from tests.driven import held, reservation
from tests.unit.deliveries import deliver, noted

HUNDRED = timedelta(seconds=100)


def retrying(app, countdown=0, body=None, **options):
    """Declare a task that asks for one retry, and for no more."""

    def run(self):
        if self.request.retries:
            return self.lease.key, self.lease.token, self.request.headers
        if body is not None:
            return body(self)
        raise self.retry(countdown=countdown)

    def named_self(self):
        return run(self)

    return declare(app, named_self, **options)


@pytest.mark.parametrize("how", ["retry", "autoretry", "replace", "replace by a chain"])
def test_the_lock_is_held_until_the_body_has_ended(app, broker, how):
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
            seen.append((task.lease.held, broker.ids))

    deliver(retrying(app, body=body, autoretry_for=(KeyError,)))
    assert seen == [(True, [])]
    assert broker.last.locks == []
    if "chain" not in how:
        assert broker.ids == ["1"]


@pytest.mark.parametrize("ending", ["throw=False", "swallowed", "another error"])
def test_a_retry_is_sent_however_the_body_ends(app, broker, ending):
    """As in Celery the message is on its way once task.retry() was called."""

    def body(task):
        if ending == "throw=False":
            return str(task.retry(countdown=0, throw=False))
        with suppress(Retry):
            task.retry(countdown=0)
        return {}["another"] if ending == "another error" else None

    deliver(retrying(app, body=body))
    assert (broker.ids, broker.last.locks) == (["1"], [])
    assert app.AsyncResult("1").state == ("FAILURE" if ending == "another error" else "SUCCESS")


def test_a_retry_that_cannot_be_sent_is_rejected_as_celery_does(app, lock_server, broker):
    """The broker is away: the delivery ends as it does without a lock."""
    broker.times_away = 1
    rejection = deliver(retrying(app)).retval.exception.exc
    assert isinstance(rejection, Reject)
    assert rejection.requeue is False
    assert lock_server.locks() == []


@pytest.mark.parametrize("replaced", [False, True])
def test_an_eager_message_takes_the_lock_again(app, lock_server, replaced):
    """A retry and a replacement run on the spot, after the release."""
    body = (lambda task: task.replace(task.si().set(retries=1))) if replaced else None
    assert retrying(app, body=body).apply().get()[0] == "k"
    assert lock_server.requests == 4


def test_other_messages_are_sent_at_once(app, broker):
    """What has another id is another task: a body may wait for it to be received."""
    declared = retrying(app, body=lambda task: task.apply_async(task_id="2") and broker.ids)
    assert deliver(declared).retval == ["2"]


@pytest.mark.parametrize("base", [None, Task])
def test_a_users_on_replace_is_kept(app, lock_server, broker, base):
    """A class may do something of its own when it is replaced."""
    seen = []

    def on_replace(self, sig):
        seen.append((sig.task, lock_server.locks()))
        return super(type(self), self).on_replace(sig)

    options = {} if base is None else {"base": base}
    task = declare(app, lambda self: self.replace(self.si()), on_replace=on_replace, **options)
    guard_tasks(app)
    deliver(task)
    assert seen == [(task.name, [])]
    assert len(broker.sent) == 1


@pytest.mark.parametrize("limit", [1, None])
@pytest.mark.parametrize("how", ["retry", "replace"])
@pytest.mark.parametrize("on_duplicate", ["return", "replace"])
def test_its_next_message_has_the_key(app, broker, how, limit, on_duplicate):
    """Neither the end of the body nor that of its lock ends the reservation.

    A retry is no newer than its task was: it keeps mark and number.
    """

    def body(self):
        if how == "retry":
            raise self.retry(countdown=600)
        self.replace(self.si())

    options = {"lock_unique_until": "end", "lock_on_duplicate": on_duplicate}
    task = declare(app, body, lock_limit=limit, **options)
    sent = task.delay()
    deliver(task, sent.id, headers=broker.last.headers)
    assert broker.ids == [sent.id] * 2
    first, second = (one.notes["unique"] for one in broker.sent)
    assert first == second or how == "replace"
    assert (reservation(task).id, reservation(task).state) == (sent.id, "waiting")
    assert reservation(task).remaining > 3500
    if on_duplicate == "return":
        assert task.delay().id == sent.id


@pytest.mark.parametrize("where", ["before_start", "body"])
def test_a_retry_takes_along_what_belongs_to_the_message_alone(app, broker, where):
    """Not the broker's headers, the notes, the message as it came, or the delay that it had."""

    def retry(self, *_):
        raise self.retry(countdown=0, max_retries=9)

    def body(self):
        if where == "body":
            retry(self)

    before_start = retry if where == "before_start" else lambda *_: None
    deliver(
        declare(app, body, before_start=before_start),
        headers={"headers": {"trace": 1}, "x-death": [{"queue": "q"}]},
        notes={"ticket": ["dislock:{k}", "1:0:0"], "put_off": 3, "sent": 5},
        delivery_info={"exchange": "celery_delayed_0", "routing_key": "0." * 28 + "other"},
    )
    headers = broker.last.headers
    assert (headers["trace"], broker.last.notes) == (1, noted(sent=5)["dislock"])
    assert not {"headers", "x-death"} & headers.keys()
    to = {name: broker.last.options[name] for name in ("exchange", "routing_key")}
    assert to == {"exchange": "celery_delayed_delivery", "routing_key": "other"}
    assert AS_IT_CAME not in broker.last.options


# lock_hold_on_retry


def test_a_held_lease_lasts_over_the_countdown_and_a_timeout(app, lock_server, broker):
    """Nobody renews it meanwhile, and nobody else gets it; the retry has a token of its own."""
    task = retrying(app, countdown=300, lock_hold_on_retry=True)
    deliver(task)
    [left] = task.lock_for().holders()
    assert (left.expiring, left.remaining) == (True, pytest.approx(330, abs=1))
    assert broker.last.locks == ["k"]
    deliver(task, "2")
    assert app.AsyncResult("2").state == "REVOKED"
    trips = lock_server.requests
    lock_server.advance(300)
    assert lock_server.requests == trips
    key, token, headers = deliver(task, headers=broker.last.headers, retries=1).retval
    assert (key, headers) == ("k", {})
    assert token > left.token
    assert lock_server.locks() == []


@pytest.mark.parametrize("taken", [True, False])
def test_a_retry_whose_lease_is_gone_asks_anew(app, lock_server, broker, taken):
    """A copy of it has taken it over, and this one is put off; or it has run out."""
    copies = []

    def body(self):
        if self.request.retries == 1 and taken and not copies:
            copies.append(deliver(task, headers=broker.sent[0].headers, retries=1).info.state)
        elif not self.request.retries:
            raise self.retry(countdown=0)

    task = declare(app, body, lock_hold_on_retry=True)
    deliver(task)
    if not taken:
        lock_server.advance(31)
    assert deliver(task, headers=broker.last.headers, retries=1).info is None
    assert copies == ["IGNORED"] * taken
    assert broker.ids == ["1"] * (1 + taken)
    assert lock_server.locks() == []


def test_of_several_leases_all_are_taken_over_or_none(app, lock_server, broker):
    """Where one of them has ended meanwhile, the others are given back."""
    task = retrying(app, lock_key=["k", "l"], lock_hold_on_retry=True)
    deliver(task)
    assert lock_server.locks() == ["k", "l"]
    lock_server.send("DEL", "dislock:{l}")
    with held(app, "l", "7"):
        deliver(task, headers=broker.last.headers, retries=1)
        assert lock_server.locks() == ["l"]


@pytest.mark.parametrize("error", [None, ValueError, Ignore, Reject, "lost"])
def test_only_a_retry_keeps_the_lease(app, lock_server, broker, error):
    """Every other way out of the body releases; nor is a lease kept that was lost."""

    def body(task):
        if error == "lost":
            lock_server.stall(100)
            raise task.retry(countdown=0)
        if error is not None:
            raise error

    deliver(retrying(app, body=body, lock_hold_on_retry=True))
    assert lock_server.locks() == []
    assert ["held" in sent.notes for sent in broker.sent] == ([False] if error == "lost" else [])


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"countdown": 0}, 0),
        ({"countdown": 2.5}, 2.5),
        ({"eta": lambda now: now + HUNDRED}, 100),
        ({"eta": lambda now: (now + HUNDRED).isoformat()}, 100),
        ({"eta": lambda now: now.replace(tzinfo=None) + HUNDRED}, 100),
        ({"eta": lambda now: now - HUNDRED}, 0),
        ({"eta": lambda now: Mock(isoformat=(now + HUNDRED).isoformat)}, 100),  # as Arrow's
        ({"eta": lambda now: now.date() - HUNDRED}, 0),
        ({"eta": lambda _now: "tomorrow"}, 0),  # Celery, or the worker, refuses these
        ({"countdown": "5"}, 5),
        # Never, as some say it: kept for as long as a script can count.
        ({"eta": lambda _now: datetime.max.replace(tzinfo=timezone.utc)}, 2**63 / 1e9),
        ({"countdown": math.nan}, 0),
    ],
)
def test_the_time_of_a_retry_is_known_however_it_is_given(app, broker, options, seconds):
    """A countdown, or a time with or without its zone, in the past, too: as Celery takes it."""
    if "eta" in options:
        options = {"eta": options["eta"](datetime.now(timezone.utc))}
    task = retrying(app, body=lambda task: task.retry(**options), lock_hold_on_retry=True)
    deliver(task)
    [left] = task.lock_for().holders()
    assert left.remaining == pytest.approx(30 + seconds, abs=20)

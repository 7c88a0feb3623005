"""Sending a unique task, with reservations and a clock that the tests drive."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult
from redis import ResponseError

from celery_dislock.config.options import LONGEST, TaskOptions
from celery_dislock.exceptions import (
    DamagedLockError,
    DuplicateTaskError,
    LockLostError,
    StoreError,
)
from celery_dislock.servers.connections import store_error
from celery_dislock.servers.reservations import Reservation, Reserved, Taken
from celery_dislock.tasks.sending import (
    LEAVE_ALONE,
    PUBLISH_FOR,
    SENT_MOST,
    WAIT_FOR_OTHER,
    Sender,
    belongs_to_more,
    postponed,
    tell,
)
from celery_dislock.tasks.sending import Sending as Call
from tests.unit.deliveries import noted
from tests.unit.fakes import FakeClock, FakeRecord, FakeReservations

LOCK = "dislock:{edit:1}"


class Result:
    """What Celery returns for a message that was sent."""

    duplicate = False  # of every result; see celery_dislock.hooks

    def __init__(self, id):  # noqa: A002 -- as Celery has it
        self.id = id


class Sending:
    """A sender, what it publishes, and its clock."""

    def __init__(self, **options):
        self.clock = FakeClock()
        self.reservations = FakeReservations(self.clock)
        self.sent = []
        self.fails = None
        self.counted = []
        self.settings = SimpleNamespace(dislock_on_unavailable="retry", dislock_prefix="dislock")
        process = SimpleNamespace(channel=SimpleNamespace(watched=True, message=self.count))
        self.guard = SimpleNamespace(
            name="edit",
            interval=10.0,
            options=TaskOptions(**{"lock_unique_until": "start", **options}),
            runtime=SimpleNamespace(settings=self.settings, process=process),
            lock_names=self.names,
        )
        self.sender = Sender(
            SimpleNamespace(AsyncResult=Result),
            lambda: self.reservations,
            clock=self.clock,
            pause=self.clock.advance,
        )

    def names(self, args, _kwargs, serializer):
        assert serializer == "json"
        if not args:
            raise ValueError("no document")
        return (f"dislock:{{edit:{args[0]}}}",)

    def count(self, task, outcome):
        assert task == "edit"
        self.counted.append(outcome)

    def publish(self, **options):
        if self.fails:
            raise self.fails
        self.sent.append(options)
        return Result(options.get("task_id"))

    def sending(self, args, publish, *, eager=False):
        task = SimpleNamespace(ignore_result=False, serializer="json")
        app = SimpleNamespace(conf=SimpleNamespace(task_serializer="json"))
        return Call(app, task, self.guard, args, {}, publish, eager)

    def send(self, *args, publish=None, **options):
        return self.sender.send(self.sending(args or (1,), publish or self.publish), options)

    def run(self, until, publish=None):
        """Run a task eagerly; its guard would begin and end the reservation."""

        def run(task_id, **_):
            self.sent.append(task_id)
            self.state = self.reservations.of(LOCK).state
            self.reservations.end(Reservation(LOCK, task_id, until))
            return EagerResult(task_id, 7, "SUCCESS")

        return self.sender.send(self.sending((1,), publish or run, eager=True), {})

    def asked(self, name):
        return [call[1:] for call in self.reservations.asked if call[0] == name]


@pytest.fixture
def sending():
    return Sending()


def test_a_message_is_reserved_published_and_confirmed(sending):
    """In this order, under one id, which a header of the message has with the key's name."""
    result = sending.send(task_id="a", headers={"mine": 1})
    [reserve, confirm] = sending.reservations.asked
    nonce = reserve[2]
    asked = Reservation(LOCK, "a", "start", PUBLISH_FOR)
    assert reserve == ("reserve", asked, nonce, False, True, False)
    assert confirm == ("confirm", asked._replace(ttl=3600.0, mark=nonce))
    [options] = sending.sent
    assert options["headers"] == {"mine": 1, **noted(unique=[LOCK, "start", nonce, 0])}
    assert (result.id, result.duplicate) == ("a", False)
    assert sending.counted == ["sent"]


def test_the_id_is_encoded(sending):
    """It may be any text, and a reservation's parts are separated by marks."""
    sending.send(task_id="a b")
    assert sending.reservations.of(LOCK).id == "a%20b"
    assert sending.sent[0]["task_id"] == "a b"
    assert sending.send().id == "a b"


def test_the_caller_s_headers_stay_as_they_are(sending):
    """A dict that is used for many calls does not collect ours."""
    headers = {"mine": 1}
    sending.send(headers=headers)
    assert headers == {"mine": 1}


def test_a_duplicate_is_not_published(sending):
    """The caller gets the result of the message that is there."""
    sending.send(task_id="first")
    result = sending.send()
    assert (result.id, result.duplicate, result.ignored) == ("first", True, False)
    assert len(sending.sent) == 1
    assert sending.counted == ["sent", "duplicate"]


def test_a_duplicate_can_be_an_error():
    """With the key and the id of the first."""
    sending = Sending(lock_on_duplicate="raise")
    sending.send(task_id="first")
    with pytest.raises(DuplicateTaskError) as refused:
        sending.send()
    assert (refused.value.key, refused.value.id) == ("edit:1", "first")
    assert sending.counted == ["sent", "duplicate"]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_duplicate_knows_of_results_that_are_not_stored(sending, first, second):
    """That of the first, which its sender has said, and its own, as Celery's results do."""
    sending.send(ignore_result=not first)
    result = sending.send(ignore_result=not second)
    assert (result.first.has_result, result.ignored) == (first, not second)


def test_a_duplicate_has_the_class_that_its_caller_asks_for(sending):
    """As a result of Celery's has: with a constructor of its own, too."""

    class Mine(Result):
        def __init__(self, task_id):
            super().__init__(task_id)
            self.mine = True

    sending.send(task_id="first")
    result = sending.send(result_cls=Mine)
    assert isinstance(result, Mine)
    assert (result.id, result.mine, result.duplicate) == ("first", True, True)


def test_messages_that_replace_each_other_are_numbered():
    """Each is sent, with the mark of its key and the next number."""
    sending = Sending(lock_on_duplicate="replace")
    for _ in range(3):
        assert sending.send().duplicate is False
    headers = [options["headers"]["dislock"]["unique"] for options in sending.sent]
    mark = sending.asked("reserve")[0][1]
    assert headers == [[LOCK, "start", mark, number] for number in (1, 2, 3)]


def test_a_sender_that_is_publishing_is_waited_for(sending):
    """Its message may never come; when it has, it is the first.  All looks are one command."""
    not_yet = Taken("first", is_sent=False)
    sending.reservations.answers = [not_yet, not_yet, Taken("first", is_sent=True)]
    assert sending.send().duplicate is True
    assert sending.clock.now < 1000 + WAIT_FOR_OTHER
    assert len({nonce for _, nonce, *_ in sending.asked("reserve")}) == 1


def test_a_sender_that_died_is_waited_for_a_second(sending):
    """Then the message is sent without a reservation, and carries no header of ours."""
    sending.reservations.answers = [Taken("dead", is_sent=False)] * 1000
    result = sending.send(task_id="a")
    assert (result.id, result.duplicate) == ("a", False)
    assert WAIT_FOR_OTHER <= sending.clock.now - 1000 < 2 * WAIT_FOR_OTHER
    [options] = sending.sent
    assert "headers" not in options
    assert sending.counted == ["unreserved"]


def test_what_cannot_be_published_is_not_reserved(sending):
    """The reservation is given back, and the error is the caller's."""
    sending.fails = ConnectionError("broker")
    with pytest.raises(ConnectionError):
        sending.send(task_id="a")
    assert sending.reservations.of(LOCK) is None
    assert sending.counted == []


def test_a_publisher_that_fails_after_its_task_has_begun_leaves_the_key(sending):
    """The broker had the message: its reservation ends with its task."""

    def publish(**_):
        sending.reservations.of(LOCK).state = "running"
        raise ConnectionError("the reply was lost")

    with pytest.raises(ConnectionError):
        sending.send(publish=publish)
    assert sending.reservations.of(LOCK)


def test_a_lock_server_that_is_away_is_left_alone_for_a_while(sending, caplog):
    """The first sender finds out, those after it do not ask; one line at each end of the outage."""
    caplog.set_level("INFO", "celery_dislock")
    sending.reservations.away = True
    assert [sending.send().duplicate for _ in range(10)] == [False] * 10
    assert len(sending.sent) == 10
    assert len(sending.reservations.asked) == 1
    sending.clock.advance(LEAVE_ALONE)
    sending.send()
    assert len(sending.reservations.asked) == 2
    sending.clock.advance(LEAVE_ALONE)
    sending.reservations.away = False
    sending.send()
    assert [message.split(":")[0] for message in caplog.messages] == [
        "Messages of unique tasks are sent without reservations",
        "Messages of unique tasks are reserved again.",
    ]
    assert sending.counted == ["unreserved"] * 11 + ["sent"]


def test_a_key_that_is_damaged_is_no_outage(sending, caplog):
    """The server answers, and other keys are well: each is asked for, and each failure is told."""
    reserve = sending.reservations.reserve

    def damaged(wanted, *args, **options):
        if wanted.lock == LOCK:
            raise DamagedLockError("redis://x", "it is a list", LOCK)
        return reserve(wanted, *args, **options)

    sending.reservations.reserve = damaged
    results = [sending.send(key) for key in (1, 2, 2)]
    assert [result.duplicate for result in results] == [False, False, True]
    [message] = caplog.messages
    assert message.startswith("A message is sent without a reservation: ")


@pytest.mark.parametrize(("error", "answered"), [(ResponseError("OOM"), 0), (OSError("away"), 1)])
def test_a_server_that_refuses_answers_again_when_it_has_reserved(sending, caplog, error, answered):
    """One without memory still tells whom a key is reserved for: that ends no outage."""
    caplog.set_level("INFO", "celery_dislock")
    sending.send(1, task_id="a")
    reserve = sending.reservations.reserve
    sending.reservations.reserve = Mock(side_effect=store_error("redis://x", error))
    sending.send(2)
    sending.reservations.reserve = reserve
    for key, told in ((1, answered), (3, 1)):
        sending.clock.advance(LEAVE_ALONE)
        sending.send(key)
        assert caplog.text.count("reserved again") == told


def test_an_outage_can_be_an_error(sending):
    """dislock_on_unavailable="raise": nothing is sent."""
    sending.settings.dislock_on_unavailable = "raise"
    sending.reservations.away = True
    for _ in range(2):
        with pytest.raises(StoreError):
            sending.send()
    assert sending.sent == []


def test_a_lock_server_that_goes_away_after_publishing_harms_nothing(sending):
    """The reservation ends sooner than it should."""

    def publish(**options):
        sending.reservations.away = True
        return Result(options["task_id"])

    assert sending.send(task_id="a", publish=publish).id == "a"
    assert len(sending.asked("confirm")) == 1


def test_a_key_that_cannot_be_built_sends_all_the_same(sending, caplog):
    """The worker fails the task, and says why."""
    result = sending.sender.send(sending.sending((), sending.publish), {})
    assert (len(sending.sent), result.duplicate) == (1, False)
    assert "its key is unknown: ValueError('no document')" in caplog.text


@pytest.mark.parametrize("thrown", [SoftTimeLimitExceeded(), LockLostError("k", "gone")])
def test_what_is_thrown_into_a_body_that_sends_is_no_error_of_its_key(sending, thrown):
    """It comes at any instruction, also while the key is built: it ends the body, not the wait."""
    sending.guard.lock_names = Mock(side_effect=thrown)
    with pytest.raises(type(thrown)):
        sending.send()
    assert sending.sent == []


def test_headers_may_be_pairs(sending):
    """Celery takes whatever a dict can be made of."""
    sending.send(headers=[("tenant", 7)])
    assert sending.sent[0]["headers"]["tenant"] == 7


# What is sent again


AGAIN = pytest.mark.parametrize(
    "again", [{"retries": 1}, {"replaced_task_nesting": 1}], ids=["retry", "replace"]
)


@AGAIN
def test_what_is_sent_again_keeps_its_mark_and_number(again):
    """It is no newer than it was: newer messages still replace it."""
    sending = Sending(lock_on_duplicate="replace")
    sending.send(task_id="a")
    headers = sending.sent[0]["headers"]
    mark = headers["dislock"]["unique"][2]
    sending.reservations.of(LOCK).state = ""  # its task began
    assert sending.send(task_id="a", headers=headers, **again).duplicate is False
    wanted, _, _, _, is_again = sending.asked("reserve")[1]
    assert (wanted.mark, wanted.number, is_again) == (mark, 1, True)
    assert sending.sent[1]["headers"] == headers
    assert sending.counted == ["sent"]


@AGAIN
def test_what_is_sent_again_comes_when_it_is_to_come(again):
    """The end of its burst makes no retry, and no task that is put off, come at once."""
    sending = Sending(lock_on_duplicate="replace", lock_replace_for=30)
    sending.reservations.answers = [Reserved(100.0, "ab", 2)]
    headers = noted(unique=[LOCK, "start", "ab", 2])
    sending.send(task_id="a", headers=headers, countdown=60, **again)
    assert sending.sent[0]["countdown"] == 60


@AGAIN
def test_what_is_sent_again_is_never_dropped(again):
    """Nor does it replace what is newer; it goes on under the number that it has."""
    sending = Sending(lock_on_duplicate="replace")
    headers = noted(unique=[LOCK, "start", "ab", 3])
    sending.reservations.answers = [Taken("newer", is_sent=False)]
    assert sending.send(task_id="a", headers=headers, **again).id == "a"
    assert len(sending.reservations.asked) == 1
    assert sending.sent[0]["headers"] == headers
    assert sending.clock.now == 1000


@pytest.mark.parametrize(
    "header",
    [
        None,
        "forged",
        ["dislock:{edit:2}", "start", "ab", 3],
        [LOCK, "start", "ab", "3x"],
    ],
)
def test_what_is_sent_again_without_a_number_of_this_key_has_none(sending, header):
    """It had no reservation, is of another key now, or somebody has made the header up."""
    sending.send(task_id="a", headers=noted(unique=header), retries=1)
    wanted = sending.asked("reserve")[0][0]
    assert (wanted.mark, wanted.number) == ("-", 0)


# For how long


@pytest.mark.parametrize(
    ("declared", "sent", "kept"),
    [
        ({"lock_unique_for": 0.25}, {}, 0.25),  # shorter than the time to publish
        ({"lock_unique_for": 9.0}, {}, 9.0),
        ({}, {"countdown": 100}, 3700.0),
        ({}, {"expires": 60}, 60.0),
        ({"lock_unique_until": "end"}, {"expires": 9000}, 3600.0),
        ({"lock_unique_until": "end"}, {"expires": -5}, 0.001),
        ({"lock_unique_until": "expiry"}, {"expires": 60}, 3600.0),
        (
            {},
            {"eta": datetime.max.replace(tzinfo=timezone.utc)},
            LONGEST,
        ),  # the script can write it
        ({}, {"eta": "tomorrow"}, 3600.0),  # the worker refuses the message
    ],
)
def test_for_how_long_a_message_keeps_its_key(declared, sent, kept):
    """From when its task is due, and no longer than the message; "expiry" as long as it says."""
    sending = Sending(**declared)
    sending.send(**sent)
    assert sending.asked("confirm")[0][0].ttl == kept


@pytest.mark.parametrize(
    ("options", "burst", "countdown"),
    [
        ({"countdown": 20}, 5, 20),
        ({"countdown": 20}, 15, 15),
        ({"countdown": 20}, 40, 0),
        ({}, 40, None),
    ],
)
def test_a_burst_has_an_end(options, burst, countdown):
    """From lock_replace_for after its first message on, the newest is due."""
    assert postponed(options, 30, burst).get("countdown") == countdown
    assert postponed(options, None, burst) == options


@pytest.mark.parametrize("name", ["link", "link_error", "chain", "chord", "group_id"])
def test_what_belongs_to_more_is_seen(name):
    """Empty values do not count, except for the chain: its last step has none behind it."""
    assert belongs_to_more({name: "x"})
    assert not belongs_to_more({name: None})
    assert belongs_to_more({name: []}) is (name == "chain")


# Eager tasks


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_an_eager_task_runs_under_its_reservation(until):
    """It is confirmed before the task runs, for there is nothing that could be lost on the way."""
    sending = Sending(lock_unique_until=until)
    result = sending.run(until)
    assert (result.get(), result.duplicate, sending.state) == (7, False, "waiting")


def test_an_eager_duplicate_has_the_result_of_the_first():
    """It ran here, and is stored nowhere."""
    sending = Sending(lock_unique_until="expiry")
    first = sending.run("expiry")
    second = sending.run("expiry")
    assert (second.id, second.get()) == (first.id, 7)
    assert (first.duplicate, second.duplicate) == (False, True)
    assert len(sending.sent) == 1


def test_an_eager_task_that_raises_frees_its_key():
    """As a worker's does: the error is the caller's."""
    sending = Sending(lock_unique_until="end")

    def fails(**_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sending.run("end", fails)
    assert sending.reservations.of(LOCK) is None


# Revoked by the process that has sent it


def test_a_task_that_runs_keeps_its_key_when_it_is_revoked():
    """A revoke does not stop it, unless it terminates it: its worker sees that."""
    sending = Sending(lock_unique_until="end")
    sending.send(task_id="a")
    sending.reservations.of(LOCK).state = "running"
    sending.sender.revoked(["a"])
    assert sending.send().duplicate is True


def test_what_a_duplicate_names_can_be_revoked(sending):
    """The message was sent by another process; its result was returned here."""
    there = FakeRecord("ab", "waiting", "first", ends=2000.0)
    sending.reservations.records[LOCK] = there
    result = sending.send()
    sending.sender.revoked([result.id])
    assert sending.reservations.of(LOCK) is None


def test_a_revoke_does_not_fail_with_the_lock_server(sending, caplog):
    """Its key stays reserved until that expires; nor does it wait for every message."""
    for number in range(3):
        sending.send(number, task_id=str(number))
    sending.reservations.away = True
    sending.sender.revoked(["0", "1", "2"])
    assert len(sending.asked("end_waiting")) == 1
    [message] = caplog.messages
    assert message.startswith("A key may stay reserved until its reservation expires: ")


def test_a_process_remembers_a_bounded_number_of_messages(sending):
    """The oldest are forgotten."""
    for number in range(SENT_MOST + 5):
        sending.send(number, task_id=str(number))
    sending.sender.revoked(map(str, range(SENT_MOST + 5)))
    assert len(sending.asked("end_waiting")) == SENT_MOST
    assert sending.asked("end_waiting")[0][0].id == "5"


# Messages that end, or begin, where no guard sees them


class Request(SimpleNamespace):
    id, task = "a", "edit"


MINE = Reservation(LOCK, "a", "end", 0.0, "ab", 3)
HEADERS = noted(unique=[LOCK, "end", "ab", 3])


@pytest.fixture
def there(app, world):
    """Reservations on the lock server of an app, with one of them."""
    there = world.store.reservations
    there.records[LOCK] = FakeRecord("ab", "waiting", "a", number=3, newest=3, ends=1e9)
    return there


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ("begin_unlocked", ("begin", MINE._replace(ttl=3600.0), True)),
        ("end", ("end", MINE)),
        ("end_waiting", ("end_waiting", MINE)),
    ],
)
def test_the_lock_server_is_told_of_a_message(app, there, call, asked):
    """What becomes of it, if it brings a reservation that may be ours."""
    tell(app, call, Request(**HEADERS))
    for header in (None, "forged", {}, {"v": 1}, {"v": 1, "unique": "forged"}):
        tell(app, call, Request(dislock=header))
    tell(app, call, Request(headers=HEADERS))  # a header of that name
    assert there.asked == [asked]

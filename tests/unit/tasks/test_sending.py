"""Sending a unique task, with reservations and a clock that the tests drive."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import DuplicateTaskError, StoreError
from celery_dislock.servers.reservations import Reserved, Taken
from celery_dislock.tasks.sending import (
    LEAVE_ALONE,
    PUBLISH_FOR,
    WAIT_FOR_OTHER,
    Sender,
    belongs_to_more,
    delay_of,
    is_sent_again,
    postponed,
)
from tests.unit.fakes import FakeClock

LOCK = "dislock:{edit:1}"


class Reservations:
    """Answers as it is told to, and keeps what it was asked."""

    def __init__(self, clock):
        self.clock = clock
        self.answers = [Reserved(0.0)]
        self.asked = []

    def reserve(self, lock, encoded_id, ttl, *, replaces):
        assert lock == LOCK
        assert ttl == PUBLISH_FOR
        self.asked.append(("reserve", encoded_id, replaces))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def confirm(self, lock, encoded_id, ttl):
        self.asked.append(("confirm", encoded_id, ttl))
        if self.answers == ["gone"]:
            raise StoreError("redis://x", "away")
        return True

    def end(self, lock, encoded_id):
        self.asked.append(("end", encoded_id))
        return True


class World:
    """A sender, what it publishes, and its clock."""

    def __init__(self, **options):
        self.clock = FakeClock()
        self.reservations = Reservations(self.clock)
        self.sent = []
        self.fails = None
        self.settings = SimpleNamespace(dislock_on_unavailable="retry")
        self.guard = SimpleNamespace(
            options=TaskOptions(**{"lock_unique_until": "start", **options}),
            runtime=SimpleNamespace(settings=self.settings),
            lock_names=self.names,
        )
        app = SimpleNamespace(AsyncResult=lambda task_id: SimpleNamespace(id=task_id))
        self.sender = Sender(
            app,
            self.publish,
            lambda: self.reservations,
            clock=self.clock,
            pause=self.clock.advance,
        )

    def names(self, args, kwargs):
        if not args:
            raise ValueError("no document")
        return (f"dislock:{{edit:{args[0]}}}",)

    def publish(self, name, args, kwargs, **options):
        if self.fails:
            raise self.fails
        self.sent.append(options)
        return SimpleNamespace(id=options.get("task_id"))

    def send(self, *args, **options):
        return self.sender.send(self.guard, "edit", args or (1,), {}, **options)


@pytest.fixture
def world():
    return World()


def test_a_message_is_reserved_published_and_confirmed(world):
    """In this order, under one id, which a header of the message has with the key's name."""
    result = world.send(task_id="a", headers={"mine": 1})
    assert world.reservations.asked == [("reserve", "a", False), ("confirm", "a", 3600.0)]
    [options] = world.sent
    assert options["headers"] == {"mine": 1, "dislock_unique": [LOCK, "start"]}
    assert result.duplicate is False


def test_the_id_is_encoded(world):
    """It may be any text, and a reservation's parts are separated by marks."""
    world.send(task_id="a b")
    assert world.reservations.asked == [("reserve", "a%20b", False), ("confirm", "a%20b", 3600.0)]
    assert world.sent[0]["task_id"] == "a b"
    world.reservations.answers = [Taken("a%20b", is_sent=True)]
    assert world.send().id == "a b"


def test_the_caller_s_headers_stay_as_they_are(world):
    """A dict that is used for many calls does not collect ours."""
    headers = {"mine": 1}
    world.send(headers=headers)
    assert headers == {"mine": 1}


def test_a_duplicate_is_not_published(world):
    """The caller gets the result of the message that is there."""
    world.reservations.answers = [Taken("first", is_sent=True)]
    result = world.send()
    assert (result.id, result.duplicate) == ("first", True)
    assert world.sent == []


def test_a_duplicate_can_be_an_error():
    """With the key and the id of the first."""
    world = World(lock_on_duplicate="raise")
    world.reservations.answers = [Taken("first", is_sent=True)]
    with pytest.raises(DuplicateTaskError) as refused:
        world.send()
    assert (refused.value.key, refused.value.id) == ("edit:1", "first")


def test_a_sender_that_is_publishing_is_waited_for(world):
    """Its message may never come; when it has, it is the first."""
    sending = Taken("first", is_sent=False)
    world.reservations.answers = [sending, sending, Taken("first", is_sent=True)]
    assert world.send().duplicate is True
    assert world.clock.now < 1000 + WAIT_FOR_OTHER


def test_a_sender_that_gives_up_leaves_the_key(world):
    """It could not publish: the next has the key."""
    world.reservations.answers = [Taken("first", is_sent=False), Reserved(0.0)]
    assert world.send().duplicate is False


def test_a_sender_that_died_is_waited_for_a_second(world):
    """Then the message is sent without a reservation, and carries no header of ours."""
    world.reservations.answers = [Taken("dead", is_sent=False)]
    result = world.send(task_id="a")
    assert result.id == "a"
    assert WAIT_FOR_OTHER <= world.clock.now - 1000 < 2 * WAIT_FOR_OTHER
    [options] = world.sent
    assert "headers" not in options


def test_what_cannot_be_published_is_not_reserved(world):
    """The reservation is given back, and the error is the caller's."""
    world.fails = ConnectionError("broker")
    with pytest.raises(ConnectionError):
        world.send(task_id="a")
    assert world.reservations.asked[-1] == ("end", "a")


def test_a_lock_server_that_is_away_is_left_alone_for_a_while(world, caplog):
    """The first sender finds out, those after it do not ask; one line at each end of the outage."""
    caplog.set_level("INFO", "celery_dislock")
    world.reservations.answers = [StoreError("redis://x", "away")]
    for _ in range(10):
        world.send()
    assert len(world.sent) == 10
    assert len(world.reservations.asked) == 1
    world.clock.advance(LEAVE_ALONE)
    world.send()
    assert len(world.reservations.asked) == 2
    world.clock.advance(LEAVE_ALONE)
    world.reservations.answers = [Reserved(0.0)]
    world.send()
    assert [message.split(":")[0] for message in caplog.messages] == [
        "Messages of unique tasks are sent without reservations",
        "Messages of unique tasks are reserved again.",
    ]


def test_an_outage_can_be_an_error(world):
    """dislock_on_unavailable="raise": nothing is sent."""
    world.settings.dislock_on_unavailable = "raise"
    world.reservations.answers = [StoreError("redis://x", "away")]
    for _ in range(2):
        with pytest.raises(StoreError):
            world.send()
    assert world.sent == []


def test_a_lock_server_that_goes_away_after_publishing_harms_nothing(world):
    """The reservation ends sooner than it should."""
    world.reservations.confirm = lambda *_: (_ for _ in ()).throw(StoreError("redis://x", "away"))
    assert world.send(task_id="a").id == "a"


def test_a_key_that_cannot_be_built_sends_all_the_same(world, caplog):
    """The worker fails the task, and says why."""
    world.sender.send(world.guard, "edit", (), {})
    assert len(world.sent) == 1
    assert "its key is unknown: ValueError('no document')" in caplog.text


@pytest.mark.parametrize(
    "again", [{"retries": 1}, {"replaced_task_nesting": 1}], ids=["retry", "replace"]
)
def test_what_is_sent_again_is_never_dropped(again):
    """Nor does it replace what is newer."""
    world = World(lock_on_duplicate="replace")
    world.reservations.answers = [Taken("newer", is_sent=True)]
    assert world.send(task_id="a", **again).id == "a"
    assert world.reservations.asked == [("reserve", "a", False)]
    assert "headers" not in world.sent[0]


def test_the_reservation_lasts_from_when_the_task_is_due(world):
    """lock_unique_for is added to the countdown."""
    world.send(task_id="a", countdown=100)
    assert world.reservations.asked[-1] == ("confirm", "a", 3700.0)


def test_several_keys_are_one_reservation():
    """Its name begins with the first lock's."""
    world = World()
    world.guard.lock_names = lambda *_: ("dislock:{a}", "dislock:{b}")
    names = []
    world.reservations.reserve = lambda lock, *_, **__: names.append(lock) or Taken("x", True)
    world.send()
    [name] = names
    assert name.startswith("dislock:{a}:and:")


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


def test_the_delay_of_a_message():
    """An ETA counts as Celery counts it: a datetime with or without a zone, or its text."""
    soon = datetime.now(timezone.utc) + timedelta(seconds=60)
    for eta in (soon, soon.replace(tzinfo=None), soon.isoformat()):
        assert 55 < delay_of({"eta": eta}) <= 60
    assert delay_of({"eta": soon - timedelta(seconds=120)}) == 0
    assert delay_of({"countdown": 7}) == 7
    assert delay_of({"countdown": -7}) == 0
    assert delay_of({}) == 0


@pytest.mark.parametrize("name", ["link", "link_error", "chain", "chord", "group_id"])
def test_what_belongs_to_more_is_seen(name):
    """Empty values do not count, except for the chain: its last step has none behind it."""
    assert belongs_to_more({name: "x"})
    assert not belongs_to_more({name: None})
    assert belongs_to_more({name: []}) is (name == "chain")


def test_a_first_message_is_not_sent_again():
    """Outside a task, without retries."""
    assert not is_sent_again({"task_id": "a"})

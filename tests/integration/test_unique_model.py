"""Uniqueness when sending against a plain Python model; a death between any two steps.

Modelled are one key and its lock, which admits one task or two at a time, or which the tasks do not
take at all; the three values of ``lock_unique_until``; and any number of senders, with and without
"replace".  Only the lock server is real, and the scripts are the package's, under a driven clock.

A sender goes, step by step, as the plugin does::

    reserve -> publish -> confirm
            -> fails: end the reservation
    taken   -> a message that was sent: no more
            -> one that was not: publish without a reservation

A message that was published is delivered, and begins, is refused by the lock, or is told that a
newer one replaces it.  A refused one is skipped, delivered again or put off.  One that runs ends,
is retried or crashes.  A crash is seen or not, and its message comes again or not.  Messages are
revoked, and what waits or runs is kept, or not.

After each step the server must have what the model has, and further:

* a message is told to end only by one that was reserved after it, and that was published;
* nobody's reservation is ended, kept or confirmed for another;
* every key has a TTL.

At the end no sender goes on, all messages are delivered, and time passes.  Then each message that
was published has run, or was revoked, skipped or lost with its process, or was replaced by a newer
one of which the same is true; and no key is left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from celery_dislock.servers import reservations as reservations_module
from celery_dislock.servers import store as store_module
from celery_dislock.servers.replies import Granted, Refused, Replaced
from celery_dislock.servers.reservations import Reservation, Reserved, Taken
from celery_dislock.servers.store import Store
from tests.holding import name_of
from tests.integration import driven_clock
from tests.integration.driven_clock import clocked
from tests.integration.model_runs import run_model

LOCK = name_of("unique")
UNIT = 5  # seconds: whatever lasts long is a multiple of it
PUBLISH = 2  # units in which a message must be published
TTL = 3  # units that a lease lasts
KEPT = 2 * TTL  # units that a running task keeps its reservation
UNIQUE_FOR = 10  # units that a message may wait
OLDER = 1440  # units for which a task that begins tells others that it has replaced them
AT_MOST = 8  # senders and messages at a time


@dataclass
class Record:
    """A reservation."""

    id: str
    state: str
    expires: int
    first: int
    older: list[tuple[str, int]] = field(default_factory=list)  # until when each may wait


@dataclass
class Model:
    """One key, as the guide tells it.  Time is in units."""

    now: int = 0
    record: Record | None = None
    older: dict[str, str] = field(default_factory=dict)
    older_until: int = 0
    leases: dict[str, int] = field(default_factory=dict)

    def pass_time(self, units):
        self.now += units
        self.leases = {owner: end for owner, end in self.leases.items() if end > self.now}
        if self.record and self.record.expires <= self.now:
            self.record = None
        if self.older_until <= self.now:
            self.older.clear()

    def mine(self, task_id):
        return self.record if self.record and self.record.id == task_id else None

    def reserve(self, task_id, replaces):
        there = self.record
        if mine := self.mine(task_id):
            if mine.state == "r":  # a retry: its message is sent
                mine.state = "s"
                mine.expires = max(mine.expires, self.now + PUBLISH)
            return Reserved((self.now - mine.first) * UNIT)
        if there and not replaces:
            return Taken(there.id, is_sent=there.state != "s")
        self.older.pop(task_id, None)
        self.record = Record(task_id, "s", self.now + PUBLISH, self.now)
        if there and there.state != "r":
            self.record.first = there.first
            self.record.older = [*there.older, (there.id, there.expires)]
        return Reserved((self.now - self.record.first) * UNIT)

    def confirm(self, task_id, ttl, *, runs=False):
        mine = self.mine(task_id)
        if not mine or (mine.state == "r") != runs:
            return False
        self.tell_older(ttl)
        if mine.state == "s":
            mine.state = "w"
        mine.expires = max(mine.expires, self.now + ttl)
        return True

    def tell_older(self, ttl):
        told = {older: until for older, until in self.record.older if older != self.record.id}
        self.record.older = []
        if not told:
            return
        if not self.older:
            self.older_until = 0
        self.older |= dict.fromkeys(told, self.record.id)
        self.older_until = max(self.older_until, self.now + ttl, *told.values())

    def end(self, task_id):
        mine = self.mine(task_id)
        if mine:
            self.record = None
        return mine is not None

    def begin(self, task_id, until):
        if until == "expiry":
            return
        if self.record and self.record.id != task_id:
            self.record.older = [one for one in self.record.older if one[0] != task_id]
            return
        if self.record:
            self.tell_older(OLDER)
        if until == "start":
            self.record = None
        else:
            first = self.record.first if self.record else self.now
            self.record = Record(task_id, "r", self.now + KEPT, first)


@dataclass(eq=False)
class Message:
    """What is sent once; the id may be one that was sent before."""

    id: str
    number: int  # in the order of the reservations
    reserved: bool
    replaced_by: str | None = None
    over: str | None = None  # how it has ended
    owner: str = ""  # of its lease
    begins: int = 0
    step: str = "reserved"  # of its sender


until_values = st.sampled_from(["start", "end", "expiry"])
indexes = st.integers(0, AT_MOST - 1)


class UniqueMachine(RuleBasedStateMachine):
    def __init__(self, url):
        super().__init__()
        self.client = redis.Redis.from_url(url, decode_responses=True)
        driven_clock.start(self.client)
        self.store = Store(url)
        self.reservations = self.store.reservations
        self.model = Model()
        self.senders = []  # messages whose senders are at work
        self.queue = []  # messages that wait
        self.running = []
        self.published = []  # all messages
        self.numbers = self.owners = 0

    @initialize(until=until_values, limit=st.sampled_from([None, 1, 1, 2]), replaces=st.booleans())
    def choose(self, until, limit, replaces):
        self.until, self.limit, self.replaces = until, limit, replaces

    # What a sender does.

    @precondition(lambda self: len(self.senders) + len(self.queue) < AT_MOST)
    @rule(other=st.sampled_from([False] * 7 + [True]), again=st.none() | st.integers(0, 20))
    def reserve(self, other, again):
        """Another sender may be deployed with or without "replace"; an id may be used again."""
        self.numbers += 1
        task_id = f"t{self.numbers}"
        over = sorted({m.id for m in self.published} - {m.id for m in self.alive()})
        if again is not None and again < len(over):
            task_id = over[again]
        replaces = self.replaces != other
        message = Message(task_id, self.numbers, reserved=True)
        answer = self.reservations.reserve(LOCK, task_id, PUBLISH * UNIT, replaces=replaces)
        expected = self.model.reserve(task_id, replaces)
        if isinstance(expected, Taken):
            assert answer == expected
            if expected.is_sent:
                return
            message.reserved = False  # its sender waits for a second, and gives up
        else:
            assert isinstance(answer, Reserved)
            assert round(answer.burst / UNIT) == round(expected.burst / UNIT)
        self.senders.append(message)

    @precondition(lambda self: self.senders)
    @rule(index=indexes, steps=st.sampled_from([1, 2, 2, 2]))
    def send(self, index, steps):
        """Publish, and confirm; or one of them."""
        message = self.senders[index % len(self.senders)]
        for _ in range(steps):
            if message.step == "reserved":
                self.queue.append(message)
                self.published.append(message)
                message.step = "published"
                if not message.reserved:
                    self.senders.remove(message)
                    return
            elif message in self.senders:
                answer = self.reservations.confirm(LOCK, message.id, UNIQUE_FOR * UNIT)
                assert answer is self.model.confirm(message.id, UNIQUE_FOR)
                self.senders.remove(message)

    @precondition(lambda self: any(message.step == "reserved" for message in self.senders))
    @rule(index=indexes)
    def fail(self, index):
        """The broker is away."""
        failing = [message for message in self.senders if message.step == "reserved"]
        message = failing[index % len(failing)]
        self.senders.remove(message)
        if message.reserved:
            ended = self.reservations.end(LOCK, message.id)
            assert ended is self.model.end(message.id)

    @precondition(lambda self: self.senders)
    @rule(index=indexes)
    def die(self, index):
        self.senders.pop(index % len(self.senders))

    # What a worker does.

    def reservation(self, message, ttl=KEPT):
        if not message.reserved:
            return None
        return Reservation(LOCK, message.id, self.until, ttl * UNIT)

    @precondition(lambda self: self.queue)
    @rule(index=indexes, refused=st.sampled_from(["skip", "again", "put off"]))
    def deliver(self, index, refused):
        message = self.queue.pop(index % len(self.queue))
        reservation = self.reservation(message)
        by = self.model.older.pop(message.id, None) if reservation else None
        self.owners += 1
        message.owner = f"{message.id}@w:1/{self.owners}"
        granted, told = False, None
        try:
            granted = self.begin(message, reservation)
        except Replaced as replaced:
            told = replaced.by
        assert told == by
        if told:
            newer = self.sent_with(told)
            assert newer, "replaced by what was never sent"
            assert newer[-1].number > message.number, "replaced by an older one"
            message.over, message.replaced_by = "replaced", told
            self.unreserve(message)
            return
        if granted:
            message.begins += 1
            self.running.append(message)
            return
        if refused == "skip":
            message.over = "skipped"
            self.unreserve(message)
        elif refused == "again":
            self.queue.append(message)
        else:
            self.send_again(message)

    def begin(self, message, reservation):
        """Return whether it runs; raises Replaced."""
        if self.limit is None:
            if reservation:
                self.reservations.begin(reservation)
                self.model.begin(message.id, self.until)
            return True
        answer = self.store.acquire(
            *([LOCK], message.owner, TTL * UNIT, json.dumps({"id": message.id})),
            limit=self.limit,
            reservation=reservation,
        )
        if len(self.model.leases) >= self.limit:
            assert isinstance(answer, Refused)
            return False
        assert isinstance(answer, Granted)
        self.model.leases[message.owner] = self.model.now + TTL
        if reservation:
            self.model.begin(message.id, self.until)
        return True

    def sent_with(self, task_id):
        return [message for message in self.published if message.id == task_id]

    def send_again(self, message):
        """Send a message under its own id: a retry, or one that was put off."""
        answer = self.reservations.reserve(LOCK, message.id, PUBLISH * UNIT, replaces=False)
        expected = self.model.reserve(message.id, replaces=False)
        assert isinstance(answer, type(expected))
        self.queue.append(message)
        if isinstance(expected, Reserved):
            message.reserved = True
            confirmed = self.reservations.confirm(LOCK, message.id, UNIQUE_FOR * UNIT)
            assert confirmed is self.model.confirm(message.id, UNIQUE_FOR)
            assert confirmed, "a retry waits, and its key is not reserved for it"

    def unreserve(self, message):
        if message.reserved and self.until != "expiry":
            self.reservations.end(LOCK, message.id)
            self.model.end(message.id)

    @precondition(lambda self: self.running)
    @rule(index=indexes)
    def end(self, index):
        message = self.running.pop(index % len(self.running))
        message.over = "ran"
        ends = message.reserved and self.until == "end"
        if self.limit is None:
            if ends:
                self.unreserve(message)
            return
        self.release(message, self.reservation(message) if ends else None)

    def release(self, message, reservation=None):
        held = self.store.release([LOCK], message.owner, reservation=reservation)
        assert held is (self.model.leases.pop(message.owner, None) is not None)
        if reservation:
            self.model.end(message.id)

    @precondition(lambda self: self.running)
    @rule(index=indexes)
    def retry(self, index):
        """It is sent when its lock is released; its reservation stays."""
        message = self.running.pop(index % len(self.running))
        if self.limit is not None:
            self.release(message)
        self.send_again(message)

    @precondition(lambda self: self.running)
    @rule(index=indexes, seen=st.booleans(), again=st.booleans())
    def crash(self, index, seen, again):
        """The process dies; its message was acknowledged early, or comes again."""
        message = self.running.pop(index % len(self.running))
        if seen:
            ended = self.store.release_dead([LOCK], message.owner)
            assert ended == (self.model.leases.pop(message.owner, None) is not None)
            if self.until == "end":
                self.unreserve(message)
        if again:
            self.queue.append(message)
        else:
            message.over = "lost with its process"

    @precondition(lambda self: self.queue)
    @rule(index=indexes)
    def revoke(self, index):
        message = self.queue.pop(index % len(self.queue))
        message.over = "revoked"
        self.unreserve(message)

    @precondition(lambda self: self.queue or self.running)
    @rule(units=st.sampled_from([1, 1, 2, 3, 6]), keeping=st.booleans())
    def pass_time(self, units, keeping):
        for _ in range(units):
            if keeping:
                self.keep()
            self.model.pass_time(1)
            driven_clock.advance(self.client, UNIT)

    def keep(self):
        for messages, ttl, runs in ((self.queue, UNIQUE_FOR, False), (self.running, KEPT, True)):
            kept = [message for message in messages if message.reserved]
            if self.until == "expiry" or not kept:
                continue
            asked = [self.reservation(message, ttl) for message in kept]
            self.reservations.keep(asked, runs=runs, within=10.0)
            for message in kept:
                self.model.confirm(message.id, ttl, runs=runs)
        for message in self.running:
            if self.limit is not None and message.owner in self.model.leases:
                assert self.store.extend([LOCK], message.owner, TTL * UNIT)
                self.model.leases[message.owner] = self.model.now + TTL

    # What must be so.

    def alive(self):
        return [*self.senders, *self.queue, *self.running]

    @invariant()
    def the_server_has_what_the_model_has(self):
        record = self.client.get(f"{LOCK}:unique")
        model = self.model.record
        if record is None or model is None:
            assert record is model
        else:
            _, state, _, first, task_id, older = record.split(" ")
            assert (state, task_id) == (model.state, model.id)
            assert round(int(first) / 1000 - driven_clock.START) == model.first * UNIT
            assert [one.partition("@")[0] for one in older.split(",")[1:]] == [
                older for older, _ in model.older
            ]
            assert self.units_left(f"{LOCK}:unique") == model.expires - self.model.now
        assert self.client.hgetall(f"{LOCK}:older") == self.model.older
        if self.model.older:
            assert self.units_left(f"{LOCK}:older") == self.model.older_until - self.model.now
        assert {holding.owner for holding in self.store.holders(LOCK)} == set(self.model.leases)

    def units_left(self, name):
        return round(self.client.pttl(name) / driven_clock.STRETCH / 1000 / UNIT)

    @invariant()
    def every_key_ends_by_itself(self):
        names = driven_clock.keys(self.client)
        assert all(self.client.pttl(name) > 0 for name in names), names

    @invariant()
    def nobody_is_replaced_by_what_was_not_sent(self):
        for task_id, by in self.model.older.items():
            newer = self.sent_with(by)
            assert newer, f"{task_id} is replaced by {by}, which was not sent"

    def teardown(self):
        """When all goes well again, nobody's work is lost, and nothing is left."""
        if not hasattr(self, "until"):
            return
        self.senders.clear()
        while self.queue or self.running:
            while self.running:
                self.end(0)
            if self.queue:
                self.deliver(0, "again")
                self.pass_time(1, keeping=False)
        for message in self.published:
            self.check_that_it_is_not_lost(message)
        if self.until != "expiry":
            self.model.pass_time(UNIQUE_FOR)
            driven_clock.advance(self.client, UNIQUE_FOR * UNIT)
            assert not self.client.exists(f"{LOCK}:unique")
        rest = max(2 * OLDER, self.model.older_until - self.model.now)
        self.model.pass_time(rest)
        driven_clock.advance(self.client, rest * UNIT)
        left = driven_clock.keys(self.client)
        self.store.close()
        self.client.close()
        assert not left, left

    def check_that_it_is_not_lost(self, message):
        assert message.over, f"{message} is nowhere"
        seen = []
        while message.over == "replaced":
            seen.append(message)
            message = self.sent_with(message.replaced_by)[-1]
            assert message not in seen, f"each was replaced by the other: {seen}"


@pytest.fixture
def machine(redis_url, monkeypatch):
    scripts = ("ACQUIRE", "ACQUIRE_UNIQUE", "HOLDERS", "RELEASE", "RENEW")
    for name in (*scripts, "RELEASE_DEAD", "RELEASE_UNIQUE"):
        monkeypatch.setattr(store_module, name, clocked(getattr(store_module, name)))
    for name in ("RESERVE", "CONFIRM", "UNRESERVE", "BEGIN"):
        monkeypatch.setattr(reservations_module, name, clocked(getattr(reservations_module, name)))
    return lambda: UniqueMachine(redis_url)


@pytest.mark.timeout(600)  # seconds: a failure is first made small
def test_messages_do_what_the_model_does(machine):
    """Whoever dies on the way, no message is lost, and one at a time is reserved for."""
    run_model(machine, examples=250, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_messages_do_what_the_model_does_for_long(machine):
    """So they do in longer and in many more interleavings."""
    run_model(machine, examples=1500, steps=80)

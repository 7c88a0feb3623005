"""Random histories of one key that is unique when it is sent; checked while they happen.

Each sender and worker is a generator that stops before each command to the lock server,
and wherever its process may be killed.  A history lets one of them go on at a time.  A command may

* arrive once, and be answered;
* arrive, and be sent again at any later time, as its reply was lost: the later reply counts;
* be answered, and arrive once more at any later time;
* not arrive at all, or now, or only later: its process knows of nothing but an error.

Messages are published or not, also without their sender knowing which; delivered again, lost with
their worker, revoked or purged.  Time passes: seconds, or hours, but no more than a copy of a
message may take to come.  The code is the package's own, from the store down.

What must be so, while nothing of the state is lost:

* after a message that replaces others was confirmed, or its task has begun, no other delivery with
  a lower number begins;
* nobody is replaced but by a message that was published, was reserved later, and replaces others;
* nobody ends or changes the reservation of another's message, but by reserving for one that
  replaces it;
* a key that is reserved for one message is not reserved for a second that replaces nothing;
* of two messages of which the sooner counts, a key is reserved for the one that is due first, and
  for none while a task runs, or has ended and keeps it;
* the numbers are kept for as long as a copy of a message may come; every key ends by itself.

All of them but the first hold also if the state is lost.  At the end all messages are delivered:
each has run, or was ended by something that is not a replacement, or by a newer one of which the
same is true.  Then time passes, and no key is left.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_dislock.config.terms import Terms
from celery_dislock.exceptions import StoreError
from celery_dislock.servers.replies import Granted, Replaced
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.reservations import OFF_FOR, Reservation, Reserved, Taken
from tests.holding import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from celery_dislock.servers.reservations import Reservations

    Process = Generator["Command | None", Any, None]

LOCK = name_of("unique")
RECORD = f"{LOCK}:unique"
RECORD_MOST = 250  # bytes: of constant size, however many messages there are
PUBLISH_FOR = 10.0  # seconds in which a message must be published
LEASE = 30.0  # seconds
KEPT = 2 * LEASE  # seconds for which a running task keeps its reservation
COPY = 7200.0  # seconds in which a copy of a message may come after the state was last used
SOONER = 0.3  # of the histories: of two messages the sooner counts
DUE_IN = (0.0, 0.0, 0.5, 5.0, 60.0, 7000.0)  # seconds
JUST_SOONER = 1.0  # seconds: two messages that are due within this time are due at once
NEARLY = 0.1  # seconds: commands take microseconds
ACTORS_MOST, QUEUE_MOST = 6, 12
FIELDS = "version state ends id since first nonce number result mark newest confirmed begun kept by"
OF_THE_RESERVATION = ("state", "since", "first", "id", "ends", "nonce", "number", "result")


@dataclass(eq=False)
class Message:
    """A message, from before its key is reserved."""

    id: str
    replaces: bool
    due_in: float | None = None  # seconds from when its key is reserved; then the sooner counts
    reservation: Reservation | None = None
    reserved_at: int = 0  # which command has reserved its key
    is_published: bool = False
    ends: list[str] = field(default_factory=list)  # how its deliveries have ended

    @property
    def reserved(self) -> Reservation:
        assert self.reservation is not None
        return self.reservation

    @property
    def identity(self) -> tuple[str, str, int]:
        return self.reservation.identity if self.reservation else (self.id, "", -1)


@dataclass(eq=False)
class Command:
    """A command to the lock server, that may arrive more than once."""

    kind: str
    run: Callable[[], Any]
    message: Message
    identity: tuple[str, str, int]  # of the message, when it was sent
    replaces: bool = False
    due_in: float | None = None
    nonce: str = ""
    began: bool = False  # it has told a task to begin, which is so from then on
    reserved_at: int = 0


@dataclass(eq=False)
class Actor:
    """A process that goes on until it is killed."""

    process: Process
    killed: Callable[[], None]
    command: Command | None = None


class History:
    """
    A random history.

    Args:
        world: A LuaServer or a DrivenServer, with record(), which returns the record of the key.
        seed: Of all that happens.
        loses: Whether the state may be lost.
    """

    def __init__(self, world: Any, seed: object, *, loses: bool = False) -> None:
        self.world, self.loses = world, loses
        self.random = rng = random.Random(str(seed))
        self.store = world.store()
        self.reservations: Reservations = self.store.reservations
        self.until = rng.choice(("start", "end", "expiry"))
        self.limit = rng.choice((None, None, 1, 1, 2))
        self.replacing = rng.choice((0.0, 0.5, 0.9, 1.0, 1.0))
        self.unique_for = rng.choice((60.0, 600.0, 3600.0))
        self.sooner = rng.random() < SOONER
        self.keeps = rng.random() < 0.7
        self.is_quiet = False
        self.actors: list[Actor] = []
        self.queue: list[Message] = []
        self.messages: list[Message] = []
        self.running: list[tuple[Message, str]] = []
        self.late: list[Command] = []  # commands that arrive once more
        self.seen: Counter[str] = Counter()
        self.now, self.commands, self.owners = 0.0, 0, 0
        self.newest = 0  # highest number of a message that was confirmed, or has begun
        self.numbers_until = 0.0
        self.has_lost = False
        self.due = 0.0  # of the message that has the key

    # What happens.

    def go(self, steps: int) -> Counter[str]:
        """Take some random steps, and then let all go well; return how often what was seen."""
        self.world.lose()
        choices: list[tuple[int, Callable[[], None]]] = [
            (16, self.send), (60, self.proceed), (16, self.deliver), (4, self.arrive_late),
            (4, self.pass_seconds), (1, self.pass_hours), (4, self.keep), (1, self.revoke),
            (2, self.send_again),
        ]  # fmt: skip
        weights, steps_of = zip(*choices, strict=True)
        for step in self.random.choices(steps_of, weights, k=steps):
            step()
            if self.random.random() < 0.002:
                self.purge()
            if self.loses and self.random.random() < 0.01:
                self.lose()
        self.end_well()
        return self.seen

    def send(self) -> None:
        if len(self.actors) >= ACTORS_MOST or len(self.queue) >= QUEUE_MOST:
            return
        task_id = f"t{len(self.messages)}"
        if self.messages and self.random.random() < 0.15:
            task_id = self.random.choice(self.messages).id
            self.seen["an id again"] += 1
        message = Message(task_id, self.random.random() < self.replacing)
        self.plan(message)
        self.messages.append(message)
        self.start(self.sender(message), lambda: None)

    def plan(self, message: Message) -> None:
        """Say when it is due, if that counts."""
        if self.sooner and message.replaces:
            message.due_in = self.random.choice(DUE_IN)

    def taken(self) -> Message:
        """Take some message out of the queue."""
        return self.queue.pop(self.random.randrange(len(self.queue)))

    def send_again(self) -> None:
        """Put off, by a worker that has refused it before: its own message goes away."""
        if self.queue and len(self.actors) < ACTORS_MOST:
            message = self.taken()
            self.plan(message)
            self.start(self.sender(message, again=True), lambda: self.queue.append(message))

    def deliver(self) -> None:
        if self.queue and (self.is_quiet or len(self.actors) < ACTORS_MOST):
            message = self.taken()
            self.owners += 1
            owner = f"{message.id}@w:1/{self.owners}"
            killed = partial(self.worker_killed, message, owner)
            self.start(self.worker(message, owner), killed)

    def start(self, process: Process, killed: Callable[[], None]) -> None:
        actor = Actor(process, killed)
        self.actors.append(actor)
        self.resume(actor, lambda: next(process))

    def resume(self, actor: Actor, how: Callable[[], Command | None]) -> None:
        try:
            actor.command = how()
        except StopIteration:
            self.actors.remove(actor)

    def proceed(self) -> None:
        """Let one process go on."""
        if not self.actors:
            return
        actor = self.random.choice(self.actors)
        command, chance = actor.command, 0.0 if self.is_quiet else self.random.random()
        if 0.94 < chance <= 0.97:
            self.actors.remove(actor)
            actor.process.close()
            self.seen["killed"] += 1
            if command and self.random.random() < 0.5:
                self.late.append(command)
            actor.killed()
        elif command is None:
            self.resume(actor, lambda: next(actor.process))
        elif chance <= 0.75:
            self.answer(actor, self.arrive(command))
        elif chance <= 0.83:  # it is sent again when this process goes on
            self.arrive(command)
        elif chance <= 0.91:
            self.answer(actor, self.arrive(command))
            self.late.append(command)
        else:
            if chance > 0.98:
                self.arrive(command)
            elif chance > 0.97:
                self.late.append(command)
            self.seen["failed"] += 1
            self.answer(actor, StoreError("lua", "away"))

    def answer(self, actor: Actor, reply: Any) -> None:
        throws = isinstance(reply, Exception)
        process = actor.process
        self.resume(actor, lambda: process.throw(reply) if throws else process.send(reply))

    def arrive_late(self) -> None:
        if self.late:
            self.seen["late"] += 1
            self.arrive(self.late.pop(self.random.randrange(len(self.late))))

    def pass_seconds(self) -> None:
        self.advance(self.random.choice((0.01, 1.0, 5.0, 12.0, 40.0, 70.0)))

    def pass_hours(self) -> None:
        """As long as a copy of a message may take to come; sometimes longer, if that is the end."""
        most = self.numbers_until - self.now
        if most > 1:
            self.seen["hours"] += 1
            self.advance(most - self.random.choice((0.01, most / 2, most / 3)))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.world.advance(seconds)

    def keep(self) -> None:
        """As the main process does, of the messages that it has."""
        if not self.keeps or self.until == "expiry":
            return
        for message in self.queue[:3]:
            if message.reservation:
                self.arrive(self.confirm(message, self.unique_for))
        for message, owner in self.running[:3]:
            if message.reservation and self.until == "end":
                self.arrive(self.confirm(message, KEPT, runs=True))
            self.store.renew([([LOCK], owner, LEASE)])

    def revoke(self) -> None:
        """By this process that has sent it; a worker discards it later."""
        if self.queue:
            message = self.taken()
            message.ends.append("revoked")
            self.seen["revoked"] += 1
            if message.reservation:
                self.arrive(self.end(message, waits=True))
                self.start(self.quietly(self.end(message)), lambda: None)

    def purge(self) -> None:
        for message in self.queue:
            message.ends.append("purged")
        self.queue.clear()

    def lose(self) -> None:
        self.world.lose()
        self.has_lost = True
        self.newest = 0
        self.numbers_until = 0.0

    def end_well(self) -> None:
        """Deliver all that is there, and see what is left."""
        self.late.clear()
        self.is_quiet = True
        for _ in range(10_000):
            if self.actors:
                self.proceed()
            elif self.queue:
                self.deliver()
            else:
                break
        else:
            raise AssertionError("it does not end")
        for message in self.messages:
            assert message.ends or not message.is_published, f"{message} is nowhere"
        self.advance(max(self.world.ttls().values(), default=0) / 1000 + 1)
        assert not self.world.ttls()

    # What the processes do.

    def command(self, kind: str, message: Message, run: Callable[[], Any]) -> Command:
        return Command(kind, run, message, message.identity)

    def end(self, message: Message, *, waits: bool = False) -> Command:
        end = self.reservations.end_waiting if waits else self.reservations.end
        return self.command("end", message, partial(end, message.reserved))

    def give_back(self, message: Message) -> Command:
        given = message.reserved._replace(until="end")
        return self.command("end", message, partial(self.reservations.end_waiting, given))

    def confirm(self, message: Message, ttl: float, *, runs: bool = False) -> Command:
        kept = message.reserved._replace(ttl=ttl)
        if runs:
            keep = partial(self.reservations.keep, [kept], runs=True, within=1.0)
            return self.command("keep", message, keep)
        return self.command("confirm", message, partial(self.reservations.confirm, kept))

    def sender(self, message: Message, *, again: bool = False) -> Process:
        """As in tasks/sending.py."""
        wanted = message.reservation or Reservation(LOCK, message.id, self.until)
        wanted = wanted._replace(ttl=PUBLISH_FOR)
        nonce = f"{self.random.getrandbits(64):016x}"
        how: dict[str, Any] = {"replaces": message.replaces, "due_in": message.due_in}
        how["again"] = again
        reserve = self.command(
            "reserve again" if again else "reserve",
            message,
            partial(self.reservations.reserve, wanted, nonce, **how),
        )
        reserve.replaces, reserve.due_in, reserve.nonce = message.replaces, message.due_in, nonce
        found = None
        try:
            found = yield reserve
            if isinstance(found, Taken) and not found.is_sent and not again:
                yield None
                found = yield reserve
        except StoreError:
            pass
        if isinstance(found, Taken) and found.is_sent and not again:
            self.seen["duplicate"] += 1
            return
        if not isinstance(found, Reserved):
            self.seen["unreserved"] += 1
            self.publish(message)
            return
        message.reserved_at = message.reserved_at or reserve.reserved_at
        if again and found.mark != wanted.mark:
            message.replaces = False  # of another life of the record: it takes no new number
        message.reservation = wanted._replace(mark=found.mark, number=found.number)
        yield None
        chance = 1.0 if self.is_quiet else self.random.random()
        if chance > 0.06:
            self.publish(message)
            yield None
        if chance < 0.12:  # it failed, or was published and its sender does not know
            yield from self.quietly(self.give_back(message))
            if again and chance <= 0.06:
                self.queue.append(message)
            return
        yield from self.quietly(self.confirm(message, self.unique_for))

    def publish(self, message: Message) -> None:
        message.is_published = True
        self.queue.append(message)

    def worker_killed(self, message: Message, owner: str) -> None:
        """Its message comes again, or was acknowledged early.  The main process sees it, or not."""
        self.running = [one for one in self.running if one[1] != owner]
        if self.random.random() < 0.5:
            self.store.release_dead([LOCK], owner)
            if message.reservation and self.until != "start":
                self.arrive(self.end(message))
        if self.random.random() < 0.7:
            self.queue.append(message)
            self.seen["redelivered"] += 1
        else:
            message.ends.append("lost with its process")

    def worker(self, message: Message, owner: str) -> Process:
        """As in tasks/guard.py."""
        reservation = message.reservation and message.reservation._replace(ttl=KEPT)
        if self.random.random() < 0.03:
            yield from self.worker_without_locks(message, reservation)
            return
        try:
            answer = yield from self.begin(message, owner, reservation)
        except Replaced as replaced:
            self.seen["replaced"] += 1
            self.check_the_newer(message, replaced.by)
            yield None
            yield from self.quietly(self.end(message))
            message.ends.append("replaced")
            return
        except StoreError:
            self.queue.append(message)
            return
        if isinstance(answer, Granted):
            yield from self.body(message, owner, reservation)
        elif self.is_quiet or self.random.random() < 0.5:
            self.queue.append(message)  # put off, or delivered again
            if self.is_quiet:
                self.advance(LEASE)
        else:
            message.ends.append("skipped")
            if reservation:
                yield from self.quietly(self.end(message))

    def begin(
        self, message: Message, owner: str, reservation: Reservation | None
    ) -> Generator[Command, Any, Any]:
        if self.limit is None:
            if reservation:
                yield self.command("begin", message, partial(self.reservations.begin, reservation))
            return Granted(())
        acquire = partial(
            self.store.acquire, [LOCK], owner, LEASE, "{}", terms=(Terms(limit=self.limit),)
        )
        answer = yield self.command("acquire", message, partial(acquire, reservation=reservation))
        return answer

    def body(self, message: Message, owner: str, reservation: Reservation | None) -> Process:
        self.seen["ran"] += 1
        self.running.append((message, owner))
        for _ in range(self.random.randrange(6)):
            yield None
        self.running.remove((message, owner))
        message.ends.append("ran")
        retries = not self.is_quiet and self.random.random() < 0.15
        ends = reservation if self.until != "start" and not retries else None
        if self.limit is not None:
            release = partial(self.store.release, [LOCK], owner, Ending(reservation=ends))
            yield from self.quietly(self.command("release", message, release))
        elif ends:
            yield from self.quietly(self.end(message))
        if retries:
            self.seen["retried"] += 1
            yield from self.sender(message, again=True)

    def worker_without_locks(self, message: Message, reservation: Reservation | None) -> Process:
        """It runs whatever the lock server says."""
        if reservation:
            # As begin_unlocked() does, which does not say that it was replaced.
            kept = reservation._replace(ttl=OFF_FOR)
            begin = partial(self.reservations.begin, kept, elsewhere=True)
            with contextlib.suppress(StoreError, Replaced):
                yield self.command("begin", message, begin)
        self.seen["ran without locks"] += 1
        yield None
        message.ends.append("ran")
        if reservation:
            yield from self.quietly(self.end(message))

    def quietly(self, command: Command) -> Process:
        with contextlib.suppress(StoreError):
            yield command

    # What must be so.

    def record(self) -> dict[str, Any] | None:
        written = self.world.record()
        if written is None:
            return None
        assert len(written) < RECORD_MOST, written
        parts = dict(zip(FIELDS.split(), written.decode().split(" "), strict=True))
        for name in ("ends", "number", "newest", "confirmed", "begun", "kept"):
            parts[name] = int(parts[name])
        return parts

    def is_reserved(self, record: dict[str, Any] | None) -> bool:
        if record is None or record["state"] == "-":
            return False
        return self.left_of(record) > 0

    def left_of(self, record: dict[str, Any]) -> float:
        """Milliseconds until the reservation ends; the record may stay for its numbers."""
        beyond: float = max(0, record["kept"] - record["ends"])
        return float(self.world.ttls()[RECORD]) - beyond

    def arrive(self, command: Command) -> Any:
        """Let a command arrive; return the reply, or Replaced."""
        self.commands += 1
        before = self.record()
        reserved = self.is_reserved(before)
        reply: Any
        try:
            reply = command.run()
        except Replaced as replaced:
            reply = replaced
        after = self.record()
        self.check_the_reservation(command, reply, before if reserved else None, after)
        if command.kind in {"begin", "acquire"}:
            self.check_the_order(command, reply, before)
        elif command.kind == "confirm" and command.message.replaces and not self.has_lost:
            _, mark, number = command.identity
            if before is not None and before["mark"] == mark and number % 2 == 0:
                self.newest = max(self.newest, number)
        if isinstance(reply, Reserved):
            command.reserved_at = self.commands
            if not (reserved and before and before["nonce"] == command.nonce):
                self.due = self.due_of(command, was_reserved=reserved)
        self.check_the_numbers(command, reply, before, after)
        return reply

    def check_the_reservation(
        self,
        command: Command,
        reply: Any,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
    ) -> None:
        if before is None:
            return
        message, kind = command.message, command.kind
        task_id, mark, number = command.identity
        if command.nonce and before["nonce"] == command.nonce:
            assert isinstance(reply, Reserved), f"{message} is not told again of {before}"
            assert reply.number == before["number"], f"{message} got another number: {before}"
        elif kind == "reserve":
            if not command.replaces:
                assert isinstance(reply, Taken), f"{message} was reserved beside {before}"
            elif command.due_in is None:
                assert isinstance(reply, Reserved), f"{message} does not replace {before}"
            else:
                self.check_the_sooner(command, reply, before)
        elif before["id"] == task_id and (before["mark"] != mark or before["number"] == number):
            return
        elif kind == "reserve again":
            assert isinstance(reply, Taken), f"{message} was reserved beside {before}"
        if isinstance(reply, Reserved):
            return
        assert after is not None, f"{command} has ended {before}"
        for name in OF_THE_RESERVATION:
            assert after[name] == before[name], f"{command} has changed {before} to {after}"

    def due_of(self, command: Command, *, was_reserved: bool) -> float:
        """Return when the message is due for which the key is reserved now."""
        if command.due_in is not None:
            return self.now + command.due_in
        return min(self.due, self.now) if was_reserved else self.now

    def check_the_sooner(self, command: Command, reply: Any, before: dict[str, Any]) -> None:
        """Of two that wait, the one that is due first has the key."""
        asks = self.now + (command.due_in or 0.0)
        left = self.due - asks - JUST_SOONER
        is_sooner = before["state"] in {"s", "w"} and left > 0
        self.seen["sooner" if is_sooner else "later"] += 1
        if abs(left) > NEARLY:
            told = f"{command.message} is due {left} s before {before}"
            assert isinstance(reply, Reserved) == is_sooner, told

    def is_granted(self, command: Command, reply: Any) -> bool:
        return isinstance(reply, Granted) or (command.kind == "begin" and reply is None)

    def check_the_order(self, command: Command, reply: Any, before: dict[str, Any] | None) -> None:
        message = command.message
        if isinstance(reply, Replaced):
            self.check_the_newer(message, reply.by)
            return
        if not self.is_granted(command, reply) or command.began or message.reservation is None:
            return
        command.began = True
        _, mark, number = command.identity
        if before is None or before["mark"] != mark or self.has_lost:
            return  # of another life of the record
        assert number >= self.newest, f"{message} has begun after {self.newest}"
        if number % 2 == 0:  # a retry of another life has an odd one, and replaces none
            self.newest = number

    def check_the_newer(self, message: Message, by: str) -> None:
        newer = [
            one
            for one in self.messages
            if one.id == by
            and one.reservation
            and one.reserved_at > message.reserved_at
            and one.reservation.mark == message.reserved.mark
            and one.reservation.number > message.reserved.number
        ]
        is_newer = any(one.is_published for one in newer) and any(one.replaces for one in newer)
        assert is_newer, f"{message} is replaced by {by}, none of which was newer and published"

    def check_the_numbers(
        self,
        command: Command,
        reply: Any,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
    ) -> None:
        assert all(ttl >= 0 for ttl in self.world.ttls().values()), "a key does not end by itself"
        if self.now >= self.numbers_until:
            self.newest = 0
        elif before is not None:
            assert after is not None, f"{command} has ended the numbers of {before}"
            assert after["mark"] == before["mark"], f"{command} began anew: {before}, {after}"
            for name in ("newest", "confirmed", "begun", "kept"):
                assert after[name] >= before[name], f"{command}: {before}, {after}"
        if after is None or after["newest"] == 0:
            return
        mine = command.identity[1] == after["mark"]
        keeps = 0.0
        is_new = command.kind == "reserve" and (not before or before["nonce"] != command.nonce)
        if is_new and isinstance(reply, Reserved) and command.replaces:
            keeps = COPY
        elif command.kind == "confirm" and reply and mine:
            keeps = COPY + self.unique_for
        elif isinstance(reply, Replaced) or (mine and self.is_granted(command, reply)):
            keeps = COPY
        self.numbers_until = max(self.numbers_until, self.now + keeps if keeps else 0.0)
        left = self.world.ttls()[RECORD] / 1000
        assert left > self.numbers_until - self.now - 0.01, "the numbers are not kept long enough"

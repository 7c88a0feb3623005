"""A store and a clock that the tests drive; the store keeps leases as the scripts do."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery
from celery.backends import cache
from kombu.exceptions import OperationalError

from celery_dislock.config.options import TaskOptions
from celery_dislock.config.settings import AppSettings
from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import task_id_of_reserved
from celery_dislock.locks.lease import Attempt
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.messages.headers import notes_in
from celery_dislock.parking.identity import DRAINED, ELSEWHERE, OURS
from celery_dislock.parking.process import ParkingProcess, runtime_of
from celery_dislock.servers.replies import Granted, Handed, Parked, Refused, Replaced, Swept
from celery_dislock.servers.requests import RELEASED, Ending, LateRelease
from celery_dislock.servers.reservations import Reservations, Reserved, Taken
from celery_dislock.servers.view import Holder, ReservationState, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery_dislock.parking.store import Ticket
    from celery_dislock.servers.replies import Turn
    from celery_dislock.servers.reservations import Reservation


class FakeClock:
    """Monotonic seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeRecord:
    """What is kept of a key: its reservation, and the numbers of its messages."""

    mark: str
    state: str = ""  # empty: the key is free
    id: str = ""
    nonce: str = ""
    number: int = 0
    has_result: bool = True
    since: float = 0.0
    ends: float = 0.0
    newest: int = 0
    confirmed: int = 0
    begun: int = 0
    by: str = ""


class FakeReservations:
    """
    Reservations in a dict, as the scripts keep them.

    Attributes:
        away: Raise StoreError instead of answering.
        answers: What reserve is to answer first, instead of the truth.
        records: What is kept, by lock.
        asked: What was asked, in order.
        holders: Ids of the tasks that hold a lock.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.away = False
        self.answers: list[Reserved | Taken] = []
        self.records: dict[str, FakeRecord] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.holders: set[str] = set()

    def _round_trip(self, *call: Any) -> None:
        self.asked.append(call)
        if self.away:
            raise StoreError("redis://fake", "away")

    def of(self, lock: str) -> FakeRecord | None:
        """Return the reservation of a lock; None if it is free."""
        found = self.records.get(lock)
        return found if found and found.state and found.ends > self.clock() else None

    def reserve(
        self,
        wanted: Reservation,
        nonce: str,
        *,
        replaces: bool = False,
        has_result: bool = True,
        again: bool = False,
    ) -> Reserved | Taken:
        self._round_trip("reserve", wanted, nonce, replaces, has_result, again)
        if self.answers:
            return self.answers.pop(0)
        there = self.of(wanted.lock)
        if there and there.nonce != nonce:
            if again and there.id == wanted.id:
                return Reserved(0.0, there.mark, there.number)
            if again or not replaces:
                return Taken(there.id, there.state != "being sent", there.has_result)
        it = self.records.setdefault(wanted.lock, FakeRecord(nonce))
        if it.nonce != nonce or not there:
            it.newest += replaces and not again
            it.number = wanted.number if again and wanted.mark == it.mark else it.newest
            it.state, it.id, it.nonce, it.has_result = "being sent", wanted.id, nonce, has_result
            it.since, it.ends = self.clock(), self.clock() + wanted.ttl
        return Reserved(0.0, it.mark, it.number)

    def _is_for(self, reservation: Reservation) -> FakeRecord | None:
        it = self.of(reservation.lock)
        return it if it and it.id == reservation.id else None

    def _note(self, what: str, one: Reservation) -> None:
        it = self.records.get(one.lock)
        if it and it.mark == one.mark and it.newest >= one.number > getattr(it, what):
            it.by = one.id
            setattr(it, what, one.number)

    def confirm(self, reservation: Reservation) -> bool:
        self._round_trip("confirm", reservation)
        self._note("confirmed", reservation)
        it = self._is_for(reservation)
        if it:
            it.state, it.ends = "waiting", self.clock() + reservation.ttl
        return it is not None

    def begin(self, reservation: Reservation, *, elsewhere: bool = False) -> None:
        self._round_trip("begin", reservation, elsewhere)
        it = self.records.get(reservation.lock)
        if it and it.mark == reservation.mark and reservation.number < max(it.confirmed, it.begun):
            raise Replaced(it.by)
        self._note("begun", reservation)
        mine = self._is_for(reservation)
        if mine:
            mine.state = "" if reservation.until == "start" else "running"

    def begin_unlocked(self, reservation: Reservation) -> None:
        Reservations.begin_unlocked(self, reservation)

    def end(self, reservation: Reservation) -> bool:
        return self._end(reservation, "end")

    def end_waiting(self, reservation: Reservation) -> bool:
        return self._end(reservation, "end_waiting")

    def _end(self, reservation: Reservation, name: str) -> bool:
        self._round_trip(name, reservation)
        it = self._is_for(reservation)
        if it is None or (name == "end_waiting" and it.state not in {"being sent", "waiting"}):
            return False
        it.state = "ended" if reservation.until == "expiry" else ""
        return True

    def keep(self, reservations: Sequence[Reservation], *, runs: bool, within: float) -> None:
        self._round_trip("keep", list(reservations), runs)

    def look(self, lock: str) -> Any:
        self._round_trip("look", lock)
        it, found = self.of(lock), None
        if it is not None:
            since, left = self.clock() - it.since, it.ends - self.clock()
            known = task_id_of_reserved(it.id), it.state, since, left, it.mark, it.number
            found = ReservationState(*known)
        holders = [SimpleNamespace(id=one) for one in self.holders]
        return SimpleNamespace(reservation=found, holders=holders)


class FakeStore:
    """Leases in a dict: lock -> (owner, expires, holder).

    Attributes:
        away: Raise StoreError instead of answering.
        wait_error: Raised by who waits in line.
        latency: Seconds that each round trip takes.
        answers: Answers of renew to give instead of the true ones, by owner.
        calls: What was asked, in order.
        others: Leases that share the lock, for who asks for its holders.
        marks: What is remembered of tasks, by lock and task id.
        done: Tickets that releases have ended, in order; empty for a release without one.
        settling: For how long their results are on their way, in the same order.
        reservations: The reservations of its keys.
    """

    server = "redis://fake"

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.leases: dict[str, tuple[str, float, dict[str, Any]]] = {}
        self.away = False
        self.wait_error: StoreError | None = None
        self.latency = 0.0
        self.answers: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.others: list[tuple[str, float, dict[str, Any]]] = []
        self.marks: dict[tuple[str, str], str] = {}
        self.done: list[str] = []
        self.settling: list[float] = []
        self.tokens = 0
        self.reservations = FakeReservations(clock)

    def _round_trip(self, *call: Any) -> None:
        self.calls.append(call)
        if self.away:
            raise StoreError("redis://fake", "away")
        self.clock.advance(self.latency)

    def acquire(
        self, locks: Sequence[str], owner: str, ttl: float, holder: str, **terms: Any
    ) -> Granted | Refused:
        self._round_trip("acquire", *locks, owner)
        for nth, lock in enumerate(locks):
            other = self.leases.get(lock)
            if other and other[1] > self.clock() and other[0] != owner:
                return Refused(other[0], other[1] - self.clock(), other[2], nth)
        if terms.get("reservation"):
            self.reservations.begin(terms["reservation"])
        self.tokens += 1
        for lock in locks:
            self.leases[lock] = (owner, self.clock() + ttl, json.loads(holder))
        return Granted((self.tokens,) * len(locks))

    def release(self, locks: Sequence[str], owner: str, ending: Ending = RELEASED) -> bool:
        self._round_trip("release", *locks, owner, ending.at_least)
        return self._end(LateRelease(locks, owner, ending))

    def _end(self, release: LateRelease) -> bool:
        locks, owner, ending = release
        if ending.reservation is not None:
            self.reservations.end(ending.reservation)
        self.done.append(ending.ticket)
        self.settling.append(ending.settles)
        held = [self._release(lock, owner, ending.at_least) for lock in locks]
        return all(held)

    def _release(self, lock: str, owner: str, at_least: float) -> bool:
        if self.leases.get(lock, ("",))[0] != owner:
            return False
        _, expires, holder = self.leases.pop(lock)
        if at_least:
            self.leases[lock] = ("~" + owner, self.clock() + at_least, holder)
        return expires > self.clock()

    def release_dead(
        self, locks: Sequence[str], owner_start: str, at_least: float | None = 0.0
    ) -> int:
        self._round_trip("release_dead", *locks, owner_start, at_least)
        if at_least is None:
            return 0
        dead = [lock for lock in locks if self.leases.get(lock, ("",))[0].startswith(owner_start)]
        for lock in dead:
            del self.leases[lock]
        return len(dead)

    def renew(
        self, leases: Sequence[tuple[Sequence[str], str, float]], *, within: float
    ) -> list[bool | StoreError]:
        assert within > 0
        self._round_trip("renew", [owner for _, owner, _ in leases])
        return [
            self.answers.get(owner, self._renew(lock, owner, ttl)) for (lock,), owner, ttl in leases
        ]

    def extend(self, locks: Sequence[str], owner: str, ttl: float) -> bool:
        self._round_trip("extend", *locks, owner)
        return all(self._renew(lock, owner, ttl) for lock in locks)

    def clear(self, releases: Sequence[LateRelease], *, within: float) -> list[StoreError | None]:
        assert within > 0
        self._round_trip("clear", [one.owner for one in releases])
        for one in releases:
            self._end(one)
        return [self.answers.get(one.owner) for one in releases]

    def wait(self, lock: str, owner: str, seconds: float) -> Handed | None:
        """Let the time pass: nobody is woken here, who waits asks again."""
        self._round_trip("wait", lock, owner)
        if self.wait_error:
            raise self.wait_error
        self.clock.advance(seconds)
        return None

    def holders(self, lock: str) -> Sequence[Holder]:
        self._round_trip("holders", lock)
        return self._holders(lock, self.leases[lock], *self.others)

    def _holders(self, lock: str, *leases: tuple[str, float, Any]) -> Sequence[Holder]:
        """Read the leases from the reply of look.lua that a server would give."""
        now = round(self.clock() * 1000)
        found: list[Any] = []
        for owner, expires, about in leases:
            written = json.dumps(about).encode()
            found += [owner.encode(), round(expires * 1000), b"1", b"x", written, now]
        return state_of("fake", lock, [now, found, 0, [], [], 0, b"", -1, b"", -2]).holders

    def take_over(self, locks: Sequence[str], left_by: str, owner: str, holder: str) -> int:
        self._round_trip("take_over", *locks, left_by, owner)
        taken = 0
        for lock in locks:
            left, expires, _ = self.leases.get(lock, ("", 0.0, {}))
            if left == "~" + left_by:
                self.leases[lock] = (owner, expires, json.loads(holder))
                taken += 1
        return taken

    def remember(self, lock: str, task_id: str, mark: str, seconds: float) -> None:
        self._round_trip("remember", lock, task_id, mark, seconds)
        self.marks[lock, task_id] = mark

    def recall(self, lock: str, task_id: str) -> str | None:
        self._round_trip("recall", lock, task_id)
        return self.marks.get((lock, task_id))

    def _renew(self, lock: str, owner: str, ttl: float) -> bool:
        held = self.leases.get(lock)
        if not held or held[0] != owner or held[1] <= self.clock():
            return False
        self.leases[lock] = (owner, self.clock() + ttl, held[2])
        return True

    def close(self) -> None:
        self.calls.append(("close",))

    def asked(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


STORE = "0123456789abcdef"  # name of the store of the fakes


class FakeIdentity:
    """The identity of a store.

    Attributes:
        ours: Names of stores whose tasks belong here.
        drained: Of these, those that were drained to this one.
        error: Raised instead of an answer.
        asked: How often the server was asked for the name.
    """

    def __init__(self) -> None:
        self.ours = {STORE}
        self.drained: set[str] = set()
        self.error: Exception | None = None
        self.asked = 0

    def name(self) -> str:
        return STORE

    def confirm(self) -> str:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return STORE

    def whose(self, name: str) -> int:
        if self.error is not None:
            raise self.error
        return DRAINED if name in self.drained else OURS if name in self.ours else ELSEWHERE


class FakeLines:
    """Lines of parked tasks, beside the leases of a store, which notes what was asked.

    Attributes:
        parked: Messages, by lock and ticket.
        done: Lock and ticket of work that is done.
        answers: What park is to answer first, instead of the truth; errors are raised.
        pages: What page is to answer, in order.
        swept: What sweep finds, by lock; nothing is known of the others.
        next_turns: Whose turn it is after each that was set aside.
        ran_without: The deliveries that ran without a lock, by lock and ticket; empty: set aside.
        tasks: Whose tickets they were, as those who took them out of line said.
    """

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.parked: dict[tuple[str, str], bytes] = {}
        self.done: set[tuple[str, str]] = set()
        self.answers: list[Any] = []
        self.pages: list[tuple[int, bytes, dict[str, bytes]]] = []
        self.swept: dict[str, Swept] = {}
        self.next_turns: list[list[Turn]] = []
        self.ran_without: dict[tuple[str, str], str] = {}
        self.tasks: list[str] = []

    def park(self, lock: str, owner: str, ttl: float, holder: str, ticket: Ticket) -> Any:
        self.store._round_trip("park", lock, ticket)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        answer = self.store.acquire([lock], owner, ttl, holder)
        if isinstance(answer, Granted):
            return answer
        place = len(self.parked) + 1
        if not ticket.message:
            return replace(answer, place=place)
        self.parked[lock, ticket.name] = ticket.message
        return Parked(place, answer)

    def leave(self, lock: str, ticket: str, task: str = "") -> bool:
        self.tasks.append(task)
        self.store._round_trip("leave", lock, ticket)
        return self.parked.pop((lock, ticket), None) is not None

    def move_out(self, lock: str, ticket: str, goes_on: str = "", task: str = "") -> bool:
        self.tasks.append(task)
        self.store._round_trip("move_out", lock, ticket, *([goes_on] if goes_on else []))
        self.parked.pop((lock, ticket), None)
        return (lock, ticket) in self.done

    def withdraw(self, lock: str, ticket: str, delivery: str = "", task: str = "") -> bool:
        self.tasks.append(task)
        self.store._round_trip("withdraw", lock, ticket, delivery)
        if self.parked.pop((lock, ticket), None) is None:
            # One of which nothing is known runs.
            return (
                delivery != "" and self.ran_without.setdefault((lock, ticket), delivery) == delivery
            )
        self.ran_without[lock, ticket] = delivery
        return True

    def give_back(self, lock: str, ticket: str) -> None:
        self.store._round_trip("give_back", lock, ticket)

    def set_aside(self, lock: str, ticket: str, message: bytes) -> list[Turn]:
        self.store._round_trip("set_aside", lock, ticket, message)
        return self.next_turns.pop(0) if self.next_turns else []

    def delist(self, lock: str, number: bytes) -> None:
        self.store._round_trip("delist", lock, number)

    def page(self, cursor: bytes, count: int) -> tuple[int, bytes, dict[str, bytes]]:
        self.store._round_trip("page", cursor, count)
        return self.pages.pop(0)

    def sweep(self, locks: Sequence[str]) -> dict[str, Swept]:
        self.store._round_trip("sweep", *locks)
        return {lock: self.swept[lock] for lock in locks if lock in self.swept}


@dataclass
class World:
    """A clock, a store on it, and a watchdog that only ticks when told to."""

    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.store = FakeStore(self.clock)
        self.watchdog = Watchdog(self.store, clock=self.clock, threaded=False)

    def lock(self, key: str = "k", **options: Any) -> Lock:
        name = f"dislock:{{{key}}}"
        pause = self.clock.advance
        return Lock([key], [name], TaskOptions(**options), self.store, self.watchdog, pause)

    def lease(self, key: str = "k", owner: str = "me", **options: Any) -> Any:
        holder = {"task": "t", "id": "1", "worker": "w", "pid": 7}
        return self.lock(key, **options).try_acquire(Attempt(owner, holder))

    def run(self, seconds: float) -> None:
        """Let time pass, ticking whenever the watchdog wants it."""
        end = self.clock.now + seconds
        while True:
            idle = self.watchdog.tick()
            if idle is None or self.clock.now + idle > end:
                break
            self.clock.advance(idle or 0.001)
        self.clock.now = max(end, self.clock.now)


def without_strangers(app: Celery) -> Celery:
    """Take out of a new app the tasks that other modules of this process share with every app."""
    app.finalize()
    for name in list(app.tasks):
        if not name.startswith("celery."):
            del app.tasks[name]
    return app


class Broker:
    """
    Stands for send_task, or for what that sends its messages with.

    Attributes:
        times_away: How many calls fail yet.
        sent: Options of what was sent, in order, and its notes.
    """

    def __init__(self, times_away: int = 0) -> None:
        self.times_away = times_away
        self.sent: list[dict[str, Any]] = []

    def __call__(self, name: str, *_: Any, **options: Any) -> None:
        if self.times_away:
            self.times_away -= 1
            raise OperationalError
        self.sent.append({"name": name, "notes": notes_in(options.get("headers")), **options})

    @contextmanager
    def acquired(self) -> Iterator[Any]:
        """Stand for producer_or_acquire."""
        connection = SimpleNamespace(transport=SimpleNamespace(driver_type="redis"))
        yield SimpleNamespace(connection=connection, publish=self.publish)

    def republish(self, _app: Any, message: Any, notes: Any, *, delay: float) -> float:
        """Stand for a message that is published again, where Celery's own producers are used."""
        message.publish(self, notes)
        return delay

    def publish(self, _body: bytes, **options: Any) -> None:
        """Stand for a producer's."""
        headers = options["headers"]
        eta = headers.get("eta")
        if eta is not None:
            options["countdown"] = (
                datetime.fromisoformat(eta) - datetime.now(timezone.utc)
            ).total_seconds()
        self(headers["task"], task_id=headers["id"], **options)

    def receive(self, _producer: Any, name: str, message: Any, **options: Any) -> None:
        """Stand for ``app.amqp.send_task_message``."""
        about = {"task_id": message.headers["id"], "retries": message.headers["retries"]}
        self(name, **about, eta=message.headers["eta"], **options)


@pytest.fixture
def world():
    return World()


@pytest.fixture
def app(world, monkeypatch):
    """An app whose locks are kept in the world's store, by the world's clock."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    cache._DUMMY_CLIENT_CACHE.clear()  # else results outlive their app
    app.task = partial(app.task, shared=False)  # other apps of this run have tasks of these names

    process = ParkingProcess({"dislock_url": "redis://"}, AppSettings(), None)
    process.store, process.watchdog, process.pid = world.store, world.watchdog, 42
    process.quick_store, process.identity = world.store, FakeIdentity()
    numbers = count(1)
    process.owner_name = lambda start: f"{start}{next(numbers)}"
    monkeypatch.setattr(type(runtime_of(app)), "process", property(lambda _: process))
    return app


@pytest.fixture
def broker(app, monkeypatch):
    """What the app sends."""
    broker = Broker()
    monkeypatch.setattr(app, "send_task", broker)
    monkeypatch.setattr(app, "producer_or_acquire", broker.acquired)
    return broker

"""What a simulation is made of: a lock server and processes, driven step by step.

The clients are the package's own, down to the store and the watchdog.  Each thread of a process is
a greenlet, which stops where a thread would wait: for a reply, to be woken, or for time to pass.
The scripts run in this process, on Lua; see :mod:`tests.integration.lua_server`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import greenlet

from celery_dislock.config.options import TaskOptions
from celery_dislock.config.plain import Plain
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.channel import Channel, Watcher
from celery_dislock.locks.runtime import Runtime
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.parking.store import Lines
from celery_dislock.servers.reservations import Reservations
from celery_dislock.servers.store import Store
from proof import simulated_sending
from tests.integration.lua_server import START, LuaServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.locks.lease import Lease
    from celery_dislock.scripts import Script
    from celery_dislock.servers.replies import Turn
    from proof.leases import Durations
    from proof.order import Order
    from proof.rates import Rates
    from proof.records import Records
    from proof.takeovers import TakeOvers

IDLE = 5.0  # seconds that a watchdog sleeps at most
QUANTA = 4  # times in the log of a rate
FOREVER = float("inf")


@dataclass(eq=False)
class Wait:
    """A thread waits until *until*, for an element of the list *pops*, or for a reply to *run*."""

    until: float = 0.0
    pops: str = ""
    run: Callable[[], Any] | None = None
    what: tuple[Any, ...] = ()  # is run, for people
    resends: bool = False
    resent: bool = False


class Net(LuaServer):
    """A lock server whose clients wait for replies until the simulation gives them."""

    name = "simulated"
    min_replicas = 0

    def __init__(self, changed: Callable[[str], str] = str) -> None:
        self.time = 0.0  # seconds of everybody's monotonic clock
        self.judges: Sequence[
            Order | Durations | Rates | Records | TakeOvers
        ] = ()  # of what arrives
        self.linked: list[str] = []  # locks of tasks of several keys: a script may touch all
        super().__init__(lambda text: changed(with_few_quanta(text)))

    def record(self) -> Any:
        """Return the record of the key of :mod:`proof.simulated_sending`."""
        return self.send("GET", simulated_sending.RECORD)

    def touched(self, keys: Sequence[str]) -> list[str]:
        """Return the locks that a script of these keys may have changed."""
        return [*keys, *(name for name in self.linked if name not in keys)]

    def leases(self, lock: str) -> dict[str, int]:
        """Return the leases of a lock, each with the time in ms at which it ends."""
        found = [one.decode() for one in self.send("HGETALL", lock)]
        return {
            owner: int(record.split(" ", 2)[1])
            for owner, record in zip(found[::2], found[1::2], strict=True)
        }

    def arrive(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Run a script, and show it to the judges."""
        reply = super().run(script, keys, *arguments)
        for judge in self.judges:
            judge.arrived(script, keys, arguments, reply)
        return reply

    def tried(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, dict[str, Any]]:
        """Return what a script would reply at this time, and what would be there then."""
        was = self._lua[b"copy"]()
        self._lua[b"pass"](-1)
        try:
            return super().run(script, keys, *arguments), self.contents()
        finally:
            self._lua[b"become"](was)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.time += seconds
        super().advance(seconds)

    def begin(self) -> None:
        """Lose all; its times have the number of digits that they have today."""
        self.lose()
        self.replicate()
        self.time = START
        self.set_back(self.now_us / 1_000_000 - START)

    def set_back(self, seconds: float) -> None:
        """Set the server's clock back, and nobody else's."""
        super().advance(-seconds)

    def clock(self) -> float:
        """Return the monotonic time of all clients."""
        return self.time

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """Run a script; its reply may be lost, and then it is sent again."""
        wait = Wait(
            run=lambda: self.arrive(script, keys, *arguments),
            what=(script, *keys, *arguments),
            resends=True,
        )
        return self._reply(wait), wait.resent

    def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Run a script, as :meth:`exchange` does."""
        return self.exchange(script, keys, *arguments)[0]

    def run_many(
        self,
        script: Script,
        calls: Sequence[tuple[str | bytes | int, ...]],
        *,
        within: float,  # noqa: ARG002 -- as every server has it
    ) -> list[Any]:
        """Run a script many times; nothing is sent again."""
        return self._reply(  # type: ignore[no-any-return]
            Wait(
                run=lambda: [self.arrive(script, [str(k)], *rest) for k, *rest in calls],
                what=(script, *calls),
            )
        )

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Wait for an element of a list."""
        popped: bytes | None = self._reply(Wait(self.time + seconds, pops=key))
        return popped

    def _reply(self, wait: Wait) -> Any:
        return stop(wait) if greenlet.getcurrent().parent else wait.run and wait.run()


def with_few_quanta(text: str) -> str:
    """Let a script log each start up to a rate of QUANTA, so that few starts fill quanta."""
    return text.replace("local QUANTA = 1000", f"local QUANTA = {QUANTA}")


def stop(wait: Wait) -> Any:
    """Let the others go on, and return what this thread waits for."""
    here = greenlet.getcurrent()
    if getattr(here, "killed", False):
        raise greenlet.GreenletExit
    here.waits, here.thrown = wait, None
    reply = here.parent.switch(wait)
    if here.thrown is not None:
        raise here.thrown
    return reply


class Interrupted:
    """A body that is interrupted where it waits; see :mod:`celery_dislock.locks.interruption`."""

    def __init__(self, _block: object = None) -> None:
        self._thread = greenlet.getcurrent()
        self._armed = True

    def throw(self, exc: BaseException) -> None:
        """Raise this where the body waits."""
        if self._armed:
            self._thread.thrown = exc
            self._thread.waits.until = 0.0

    def disarm(self) -> None:
        """Raise nothing any more: the body has ended."""
        self._armed = False


@dataclass(eq=False)
class Actor:
    """A thread of a process, and the message that it works on."""

    name: str
    process: Process
    thread: Any
    copy: Any = None
    made: Any = None  # the worker's request of it
    has_failed: bool = False  # a request was not answered
    waits: Wait = field(default_factory=Wait)


class Watched(Watcher):
    """
    Keeps the leases that a process has, for the model.

    Args:
        told: Called with each lease that is granted or renewed.
        durations: Judges for how long they last.
    """

    def __init__(self, told: Callable[[Lease, float], None], durations: Durations) -> None:
        self.told, self.durations = told, durations
        self.leases: set[Lease] = set()

    def acquired(self, lease: Lease, how: str, waited: float) -> None:  # noqa: ARG002 -- a watcher
        """Check what this lease is held beside, and its token."""
        self.leases.add(lease)
        self.durations.acquired(lease)
        self.told(lease, waited)

    def renewed(self, lease: Lease) -> None:
        """Check it again: it is trusted for longer."""
        if lease.end is None:
            self.durations.renewed(lease)
            self.told(lease, FOREVER)

    def capped(self, lease: Lease) -> None:
        """Check that it was renewed for as long as it may."""
        self.durations.capped(lease)

    def ended(self, lease: Lease) -> None:
        """Forget it; its lock may be held on."""
        self.leases.discard(lease)
        self.durations.ended(lease)


class SimulatedWatchdog(Watchdog):
    """A watchdog whose thread the simulation drives."""

    actor: Actor | None = None

    def wake(self, when: float) -> None:
        """Let it look at *when* at the latest."""
        super().wake(when)
        if self.actor is not None and self.actor.waits.run is None:
            self.actor.waits.until = min(self.actor.waits.until, when)


class Process(Runtime[Any]):
    """A process with a watchdog; of a worker or not."""

    host, pid = "host", 1
    parking: Any = None  # if it is a worker's; see proof/working.py
    journal: Any = None  # a pool process has one

    def __init__(
        self,
        net: Net,
        number: int,
        told: Callable[[Lease, float], None],
        durations: Durations,
        broker: str,
    ) -> None:
        super().__init__(dict)
        self.broker = broker
        self.net, self.number, self.name = net, number, f"p{number}"
        self.frozen = self.dead = False
        self.watched, self.channel = Watched(told, durations), Channel()
        self.channel.watchers, self.channel.watched = [self.watched], True
        self.store = self.store_here = Store(
            "redis://nowhere", broker=broker, hand_over=self.publish
        )
        server: Any = net
        self.store.lock_server = server
        self.store.reservations = Reservations(server)
        self.lines = Lines(server, "dislock", broker, self.publish)
        self.watchdog = SimulatedWatchdog(
            self.store, clock=net.clock, threaded=False, channel=self.channel
        )
        self.watchdog.pause = sleep_in(net)
        self._owners = count(1)

    @property
    def process(self) -> Any:
        """This one."""
        return self

    def plain(self, key: object, given: Mapping[str, Any], on_lost: str) -> Plain:  # noqa: ARG002
        """Return the options of a lock, which may be any of a task's, and "fair"."""
        options = dict(given)
        fair = options.pop("fair", True)
        return Plain(TaskOptions(**options), timeout=None, fair=fair, stated=options)

    def owner_name(self, start: str) -> str:
        """Make a unique name for a new owner."""
        return f"{start}{self.name}.{next(self._owners)}"

    def check_patching(self) -> None:
        """Greenlets stand for threads here."""

    def running(self, *, on_loop: bool) -> None:
        """No task's body runs around a lock of plain Python."""

    def publish(self, turns: Sequence[Turn]) -> None:
        """Publish parked tasks."""
        if self.parking is not None:
            self.parking.hand_over(turns)

    def watch(self) -> None:
        """Run the watchdog's loop."""
        while True:
            idle = self.watchdog.tick()
            now = self.net.time
            stop(Wait(now + min(IDLE if idle is None else idle, IDLE)))


def stop_if_actor(wait: Wait) -> None:
    """Let the others go on, unless the simulation itself calls."""
    if greenlet.getcurrent().parent:
        stop(wait)


def sleep_in(net: Net) -> Callable[[float], None]:
    """Return what sleeps for some seconds of the driven clock."""
    return lambda seconds: stop(Wait(net.time + seconds))


def failed() -> StoreError:
    """Make the error of a lock server that did not answer."""
    return StoreError("simulated", "no reply arrived")

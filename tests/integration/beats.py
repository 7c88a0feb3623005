"""Beats in one process, whose clocks stand still until a test moves them, on a server in Lua."""

from __future__ import annotations

import random
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery, current_app
from kombu.exceptions import OperationalError

from celery_dislock import Dislock, beat
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import Watchdog
from tests.integration.lua_server import LuaServer
from tests.integration.schedulers import Memory
from tests.pace import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TIMEOUT = 1.2 * LEASE  # dislock_beat_timeout
STEP = 0.25  # seconds between two rounds of the beats' loops


class Killed(BaseException):
    """SIGKILL."""


class Sent(NamedTuple):
    """A message: when it went out, of which entry, its id, the tick's time, and who sent it."""

    at: float
    entry: str
    id: str
    tick: float
    by: Beat


class Recording:
    """Mixin over a scheduler: its messages are noted in place of being sent."""

    producer = None
    connection = None

    def send_task(self, name: str, *_args: Any, task_id: str = "", **_options: Any) -> None:
        self.app.beat.sends(name, task_id)

    def sync(self) -> None:
        if self.app.beat.alive:
            super().sync()  # type: ignore[misc]


@cache
def recording(scheduler: type) -> type:
    """Return the class of a scheduler with ``--dislock``, whose messages are noted."""
    return beat.with_lock(type("Recording" + scheduler.__name__, (Recording, scheduler), {}))


class Beat:
    """
    One ``celery beat --dislock``.

    Args:
        world: Where it runs.
        clock_ahead: Seconds by which its wall clock is wrong.
        made: Arguments of its scheduler, those of a beat that has ended.
        conf: Settings.

    Attributes:
        scheduler: Its scheduler.
        alive: Whether it was not killed.
        halted: Whether it was halted for a while; then it sends late what it had begun to send.
        around: Called with "before" and "after" each command, and around each message.
    """

    def __init__(
        self, world: World, clock_ahead: float = 0.0, made: Any = None, **conf: Any
    ) -> None:
        self.world, self.clock_ahead, self.alive, self.halted = world, clock_ahead, True, False
        self.around: Callable[[str], None] = lambda _when: None
        self.app = app = Celery("beats", set_as_current=False)
        Dislock(app)
        app.conf.update(
            beat_schedule=world.schedule,
            dislock_url="redis://nowhere",
            dislock_beat_timeout=TIMEOUT,
            result_expires=None,
            **conf,
        )
        app.now = self.now
        app.beat = self
        self.made = made or world.kept.prepare(app)
        self.scheduler = recording(world.kept.scheduler)(app, **self.made)
        store = world.server.store()
        store.lock_server = Wire(self)
        self.watchdog = Watchdog(store, clock=lambda: world.now, threaded=False)
        made = self.scheduler._lock
        self.scheduler.__dict__["_lock"] = Lock(
            made.keys, made.names, made.options, store, self.watchdog
        )

    def now(self) -> datetime:
        """Return the time by its wall clock."""
        ahead = timedelta(seconds=self.world.now + self.clock_ahead)
        return datetime(1970, 1, 1, tzinfo=timezone.utc) + ahead

    def command(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Send a command to a server, which this beat may not survive."""
        if not self.alive:
            raise Killed
        self.around("before")
        reply = call(*args, **kwargs)
        self.around("after")
        return reply

    def sends(self, name: str, task_id: str) -> None:
        self.around("before")
        tick = self.scheduler._claimed_us / 1e6
        self.world.sent.append(Sent(self.world.now, name, task_id, tick, self))
        self.around("after")

    @property
    def leads(self) -> bool:
        return self.alive and self.scheduler.leads

    def go_round(self) -> None:
        """Let the watchdog and the loop go on, until there is nothing more to do now."""
        interrupted = current_app._get_current_object()
        self.app.set_current()  # what comes from a file or a table asks for it
        try:
            self.watchdog.tick()
            while self.alive and self.scheduler.tick() == 0 and self.leads:
                pass
        except Killed:
            self.kill()
        finally:
            interrupted.set_current()

    def kill(self) -> None:
        """Stop it with SIGKILL: what it has not written is gone."""
        self.alive = False
        store = vars(self.scheduler).pop("_store", None)
        if store is not None:
            store.cache = {}
            store.dict.close()

    def stop(self) -> None:
        """Stop it with SIGTERM."""
        self.scheduler.close()
        self.alive = False


class Wire:
    """The lock server, as one beat reaches it."""

    def __init__(self, of: Beat) -> None:
        self._of, self._server = of, of.world.server

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._server, name)
        if name not in {"run", "exchange", "run_many", "pop"}:
            return found

        return partial(self._of.command, found)


class World:
    """
    Some beats and their lock server.

    Args:
        schedule: What they send.
        seed: Of what is random.
        kept: Where they keep the schedule.
        conf: Settings of the beats.

    Attributes:
        sent: All messages.
        beats: Those that run.
    """

    def __init__(
        self,
        schedule: Mapping[str, Any],
        beats: int = 2,
        seed: int = 0,
        kept: Memory | None = None,
        **conf: Any,
    ) -> None:
        self.server, self.rng = LuaServer(), random.Random(seed)
        self.kept = kept or Memory()
        self.schedule = {name: {"task": name, "schedule": one} for name, one in schedule.items()}
        self.sent: list[Sent] = []
        self._conf = conf
        self.beats = [self.start() for _ in range(beats)]

    @property
    def now(self) -> float:
        """UNIX time by the lock server's clock."""
        return int(self.server._lua[b"now"]()) / 1e6

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.server.advance(seconds)
        self.kept.moved(self.now)

    def start(self, clock_ahead: float = 0.0, made: Any = None, **conf: Any) -> Beat:
        """Make one more beat; *made*: from the file of one that has ended."""
        return Beat(self, clock_ahead, made, **{**self._conf, **conf})

    def run(self, seconds: float, but: Beat | None = None) -> None:
        """Let the beats run; *but*: one that is stopped meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.advance(STEP)
            for one in self.beats:
                if one is not but:
                    one.go_round()

    @property
    def leader(self) -> Beat:
        """The beat that leads."""
        (leader,) = [one for one in self.beats if one.leads]
        return leader

    def ticks(self, entry: str) -> list[Sent]:
        """Return the messages of an entry in the order of their ticks, of each id the first."""
        first: dict[str, Sent] = {}
        for one in self.sent:
            if one.entry == entry:
                first.setdefault(one.id, one)
        return sorted(first.values(), key=lambda one: one.tick)


@contextmanager
def broker_away(
    *beats: Beat, error: Exception | type[Exception] = OperationalError
) -> Iterator[None]:
    """Let the broker take no message of these beats."""
    sends = {one: one.sends for one in beats}

    def refuse(*_message: str) -> None:
        raise error

    for one in beats:
        one.sends = refuse
    try:
        yield
    finally:
        for one in beats:
            one.sends = sends[one]


def records(world: World) -> dict[str, str]:
    """Return what the lock server has of the entries."""
    found = world.server.contents().get("dislock:{beat}:beat", {})
    return {name.decode(): record.decode() for name, record in found.items()}

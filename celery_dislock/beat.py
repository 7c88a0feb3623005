"""Let any number of beats run, of which one sends: ``celery beat --dislock``.

The beat that has the lock of ``dislock_beat_key`` leads.  The watchdog renews its lease, whatever
the schedule does meanwhile.  The others wait in line for the lock, so one of them takes over at
once when the leader stops, and after ``dislock_beat_timeout`` at most when it is killed.

When each entry was last sent is kept beside the lock.  The leader claims a tick there before it
sends the message, in one script.  That refuses a beat whose lease has ended, a tick that another
beat has claimed, and a beat whose clock is wrong.  After sending, the leader notes that the message
has gone out.  If it is killed in between, nobody knows whether the message went out, and the next
leader sends it again under the same task id.  The id of a tick is made from the entry and the time
when that was sent before, so all messages of one tick have one id.

The watchdog renews the lease of a beat whose loop goes round, or sleeps.  If a send or the database
of the schedule hangs, the renewals end after ``HANGS`` timeouts, and another beat leads.

A beat that cannot trust its lease, or gets no answer to a claim, sends nothing and stands by.  It
says so once, and never exits.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

from celery.beat import ScheduleEntry, Scheduler
from celery.utils.time import maybe_make_aware

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT, TaskOptions
from celery_dislock.config.urls import MEMORY, shown
from celery_dislock.exceptions import LockKeyError, SettingsError, StoreError
from celery_dislock.keys.templates import check_written
from celery_dislock.locks.attempt import Attempt, Conflict
from celery_dislock.parking.process import runtime_of
from celery_dislock.scripts import TICK, TICKS
from celery_dislock.scripts.names import beat_of
from celery_dislock.servers.records import LEADER, in_words, text

if TYPE_CHECKING:
    from celery import Celery

    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.scripts import Script

WAIT_MOST = 5.0  # seconds in line until beat's own loop goes round
HANGS = 4  # timeouts for which the loop may stand still, as in a send
PAUSE = 1.0  # seconds until a beat that was refused asks again
NOT_LEADING, DONE, WRONG_CLOCK, SENT_SINCE, PAUSED = range(5)  # as in _beat.lua
HAS_GONE_OUT = "-"

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)

# Why a beat stands by.
HELD = "Beat stands by, lock %r: it is held by %s."
AWAY = "Beat stands by, lock %r: it sends nothing until the lock server answers: %s"
NO_SCHEDULE = "Beat stands by, lock %r: it cannot take over the schedule: %s: %s"
LOST = "Beat stands by, lock %r: its lease has ended, and another beat may lead."
CLOCK = (
    "Beat stands by, lock %r: its clock differs by %.0f s from the lock server's, which is more "
    "than dislock_beat_timeout. Set the clock right."
)

HUNG = (
    "Beat hangs, lock %r: its loop has stood still for more than %g s, so its lease is renewed no "
    "more, and another beat may lead. Look at its connections to the broker and to its schedule."
)

logger = logging.getLogger("celery_dislock")


class StandBy(BaseException):
    """
    This beat must not send now.

    ``except Exception`` does not catch it: schedulers put that around each entry, and go on.

    Args:
        why: What is logged, unless it was the last thing that was logged; empty: nothing.
        about: Arguments of that.
        level: Level of that.
        pause: Seconds until the beat tries again.
    """

    def __init__(
        self, why: str = "", *about: object, level: int = logging.WARNING, pause: float = PAUSE
    ) -> None:
        super().__init__(why)
        self.why, self.about, self.level, self.pause = why, about, level, pause


class BeatLock:
    """Mixin over the class of a scheduler: its schedule runs only in the beat that leads."""

    if TYPE_CHECKING:
        app: Celery
        Entry: Any
        schedule: Any
        max_interval: float
        producer: Any
        apply_entry: Any

    _attempt: Attempt | None = None  # a schedule is saved while it is set up, too

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        self._made_us = to_us(app.now())
        super().__init__(app, *args, **kwargs)  # type: ignore[call-arg]
        self.lock_key = None  # turns RedBeat's own lock off
        self._claimed_us = self._began_us = 0
        self._said = ""
        self._ticks = False

    @cached_property
    def _lock(self) -> Lock:
        settings = runtime_of(self.app).settings
        options = TaskOptions(lock_watchdog_timeout=settings.dislock_beat_timeout)
        return runtime_of(self.app).lock([settings.dislock_beat_key], options)

    @property
    def _lease(self) -> Lease | None:
        return None if self._attempt is None else self._attempt.lease

    @property
    def leads(self) -> bool:
        """Whether this beat may send; asks nobody."""
        return self._lease is not None and self._lease.held

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """
        Send what is due if this beat leads; else wait in line, ``WAIT_MOST`` at most.

        Returns:
            Seconds until the next call.
        """
        self._ticks = True
        try:
            if not self.leads or self._clock_was_set():
                self._take_over()
            pause: float = super().tick(*args, **kwargs)  # type: ignore[misc]
        except StandBy as exc:
            self._heap = None  # the entry that was not sent is not in it any more
            if exc.why and exc.why != self._said:
                self._said = exc.why
                logger.log(exc.level, exc.why, self._lock.key, *exc.about)
            pause = exc.pause
        finally:
            self._ticks = False
        self._goes_on(pause)
        return pause

    def reserve(self, entry: Any) -> Any:
        """Claim a tick of the entry, before the scheduler takes note that it was sent."""
        self._claimed_us = now_us = to_us(entry.default_now())
        told = self._ask(TICK, now_us, name_of(entry), to_us(entry.last_run_at))
        if told:
            self._put(entry, int(told[0]))
            raise StandBy(pause=0.0)
        return super().reserve(entry)  # type: ignore[misc]

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """Send the message of a tick, under the task id of this tick."""
        if not self.leads:  # stopped, or waiting for the broker, since the claim
            raise StandBy(LOST)
        before_us = to_us(entry.last_run_at)
        if before_us:  # else it was never sent, and may have the name of an entry before it
            tick = f"{self._lock.names[0]} {before_us} {name_of(entry)}"
            options = {"task_id": str(uuid5(NAMESPACE_OID, tick)), **(entry.options or {})}
            entry = copy_of(entry, options=options)
        sent = super().apply_async(entry, *args, **kwargs)  # type: ignore[misc]
        with suppress(StandBy):  # a later claim says so
            self._ask(TICK, self._claimed_us, name_of(entry), HAS_GONE_OUT)
        return sent

    def close(self) -> None:
        """Stop, and let another beat lead."""
        try:
            super().close()  # type: ignore[misc]
        finally:
            # A handler of SIGTERM calls this, too: the lock may be in use then.
            if not self._ticks:
                self._give_up()

    def _take_over(self) -> None:
        """Wait for the lock, and go on where the beat before has ended."""
        self._give_up()
        process = runtime_of(self.app).process
        holder = {
            "thread": LEADER,
            "worker": process.host,
            "pid": process.pid,
            "timeout": self._lock.timeout,
        }
        name = process.owner_name(f"{process.host}:{process.pid}/")
        attempt = self._attempt = Attempt(name, holder, self)
        try:
            answer = self._lock.acquire(attempt, timeout=min(self.max_interval, WAIT_MOST))
        except StoreError as exc:
            raise StandBy(AWAY, exc) from exc
        if isinstance(answer, Conflict):
            raise StandBy(HELD, in_words(answer.holder), level=logging.INFO, pause=0.0)
        answer.on_end = self._says_if_it_hangs
        try:
            self._go_on()
        except BaseException as exc:
            self._give_up()
            if not isinstance(exc, Exception):
                raise
            raise StandBy(NO_SCHEDULE, type(exc).__name__, exc, level=logging.ERROR) from exc
        self._said = ""
        logger.info("Beat leads, lock %r.", self._lock.key)

    def _goes_on(self, pause: float = 0.0) -> None:
        """Let the lease be renewed for the pause, and for as long as the loop may stand still."""
        if self._lease is not None:
            more = math.ceil(pause / self._lock.timeout + HANGS) * RENEWALS_PER_TIMEOUT
            most = self._lease.renewals + more
            self._lock.options = replace(self._lock.options, max_renew_times=most)

    def _says_if_it_hangs(self, lease: Lease, _action: str) -> None:
        if lease.capped:
            logger.error(HUNG, lease.key, HANGS * self._lock.timeout)

    def _clock_was_set(self) -> bool:
        """Return whether it was since this beat leads; if it was set back, no entry is due."""
        return abs(self._asked_us() - self._began_us) > self._lock.timeout * 1e6

    def _asked_us(self) -> int:
        """Return when the lease was asked for, as the wall clock has that now."""
        lease = self._lease
        return to_us(self.app.now()) - int(lease.held_for * 1e6) if lease else 0

    def _go_on(self) -> None:
        """Take over when each entry was last sent."""
        entries = {name_of(entry): entry for entry in self.schedule.values()}
        now_us = to_us(self.app.now())
        self._began_us = self._asked_us()
        mine = [part for name in entries for part in (name, to_us(entries[name].last_run_at))]
        told = iter(self._ask(TICKS, now_us, *mine))
        catches_up = runtime_of(self.app).settings.dislock_beat_catch_up
        again = []
        for name, last, before in zip(told, told, told, strict=True):
            claimed = before != HAS_GONE_OUT.encode()
            entry = entries.get(text(name)) or (claimed and self._load(text(name)))
            if not entry:
                continue
            last_us, known_us = int(last), to_us(entry.last_run_at)
            if not self._is_newer(known_us, last_us, claimed=claimed):
                self._put(entry, last_us, runs=int(claimed))
            if not catches_up and entry.is_due()[0]:
                self._put(entry, now_us)
            elif catches_up and claimed:
                again.append((copy_of(entry, last_run_at=to_time(int(before), entry)), int(last)))
        self._heap = None
        # Sending may save the schedule, and read it anew from a file: what is put must be in it.
        for entry, self._claimed_us in again:
            self.apply_entry(entry, producer=self.producer)

    def _is_newer(self, known_us: int, last_us: int, *, claimed: bool) -> bool:
        """
        Return whether what a scheduler knows of an entry is newer than the record.

        The entries of django-celery-beat and RedBeat are kept where all beats see them, and are
        saved before it is noted that a message has gone out.  Those of Celery are kept in a file,
        and one that is in none has the time when it was made.
        """
        if self.Entry is not ScheduleEntry:
            return not claimed or known_us >= last_us
        return last_us <= known_us < self._made_us

    def _load(self, name: str) -> Any:
        """Return an entry that the schedule does not show, as RedBeat's does; None: not there."""
        with suppress(AttributeError, KeyError):
            return self.Entry.from_key(self.Entry.generate_key(self.app, name), app=self.app)
        return None

    def _put(self, entry: Any, last_us: int, runs: int = 0) -> None:
        """Set when an entry was last sent, also where RedBeat keeps it, and count more runs."""
        entry.last_run_at = to_time(last_us, entry)
        entry.total_run_count += runs
        if hasattr(entry, "reschedule"):
            entry.reschedule(entry.last_run_at)

    def _ask(self, script: Script, now_us: int, *more: str | int) -> list[bytes]:
        """
        Run a script under the lease.

        Raises:
            StandBy: This beat does not lead, or cannot know that.
        """
        lease = self._lease
        if lease is None:
            raise StandBy(LOST)
        self._goes_on()
        name, timeout = self._lock.names[0], self._lock.timeout
        keys, apart_us = [name, beat_of(name)], math.ceil(timeout * 1e6)
        try:
            told: list[Any] = self._lock.store.lock_server.run(
                script, keys, lease.owner, lease.token, now_us, apart_us, *more
            )
        except StoreError as exc:
            raise StandBy(AWAY, exc) from exc
        if told[0] in {NOT_LEADING, PAUSED}:
            self._give_up()
            raise StandBy(LOST) if told[0] == NOT_LEADING else StandBy(pause=0.0)
        if told[0] == WRONG_CLOCK:
            self._give_up()
            raise StandBy(CLOCK, (now_us - int(told[1])) / 1e6, level=logging.ERROR)
        return told[1:]

    def _give_up(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()


class TableLock(BeatLock):
    """
    Mixin over django-celery-beat's scheduler, whose entries are rows of a table.

    A row is read again when it was edited, and what is in the table is then taken for true.  So
    what was sent is saved at once, and only by the beat that leads.
    """

    if TYPE_CHECKING:
        _schedule: dict[str, Any]

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        super().__init__(app, *args, **kwargs)
        self.sync_every_tasks = 1

    def reserve(self, entry: Any) -> Any:
        """Claim a tick, and let the schedule have the entry that was sent."""
        reserved = self._schedule[entry.name] = super().reserve(entry)
        return reserved

    def sync(self) -> None:
        """Save what was sent, unless another beat may have saved something newer."""
        if self.leads:
            super().sync()  # type: ignore[misc]

    def _go_on(self) -> None:
        self._dirty: set[str] = set()  # others have sent since, and saved that:
        self._initial_read = True
        super()._go_on()

    def _put(self, entry: Any, last_us: int, runs: int = 0) -> None:
        super()._put(entry, last_us, runs)
        row = entry.model
        row.last_run_at, row.total_run_count = entry.last_run_at, entry.total_run_count
        self._dirty.add(entry.name)


@cache
def with_lock(scheduler: Any) -> type:
    """
    Extend the class of a scheduler, so that only the beat that leads runs it.

    Raises:
        SettingsError: It is no class of Celery's schedulers.
    """
    if not (isinstance(scheduler, type) and issubclass(scheduler, Scheduler)):
        remedy = "with --dislock, give a class that extends celery.beat.Scheduler"
        raise SettingsError("app.conf", "beat_scheduler", scheduler, remedy)
    if issubclass(scheduler, BeatLock):
        return scheduler
    mixin = TableLock if hasattr(scheduler, "Changes") else BeatLock
    return type("Dislock" + scheduler.__name__, (mixin, scheduler), {})


def check_beat(app: Celery) -> None:
    """
    Check that the beats of an app can have a lock; connects to nothing.

    Raises:
        SettingsError: A setting cannot be used.
    """
    runtime = runtime_of(app)
    key = runtime.settings.dislock_beat_key
    try:
        check_written(key)
    except LockKeyError as exc:
        raise SettingsError("app.conf", "dislock_beat_key", key, exc.reason) from exc
    url = runtime.conf.get("dislock_url")
    if url == MEMORY or not runtime.process.store.lock_server.keeps_lines:
        remedy = "beats need one lock server, which all of them reach"
        raise SettingsError("app.conf", "dislock_url", url if url == MEMORY else shown(url), remedy)


def name_of(entry: Any) -> str:
    """Return an entry's name as text that can be sent: any key of a dict may be one."""
    return str(entry.name).encode(errors="backslashreplace").decode()


def to_us(when: datetime | None) -> int:
    """Return a time of an entry in microseconds since 1970; 0 if it was never sent."""
    return 0 if when is None else (maybe_make_aware(when) - EPOCH) // MICROSECOND


def to_time(us: int, entry: Any) -> datetime:
    """Return what :func:`to_us` was given, in the time zone in which an entry has its times."""
    when, known = EPOCH + us * MICROSECOND, entry.last_run_at
    if known is None:
        return when
    # Celery takes a time without a zone for UTC.
    return when.astimezone(known.tzinfo) if known.tzinfo else when.replace(tzinfo=None)


def copy_of(entry: Any, **changed: Any) -> Any:
    """
    Return a copy of an entry: one that is in the schedule is saved, with all that was changed.

    The module ``copy`` would call its class as Celery's own is called, and without the app.
    """
    made = object.__new__(type(entry))
    made.__dict__ = {**vars(entry), **changed}
    return made

"""Let any number of beats run, of which one sends: ``celery beat --dislock``.

The beat that has the lock of ``dislock_beat_key`` leads.  The watchdog renews its lease, whatever
the schedule does meanwhile.  The others wait in line for the lock, so one of them takes over at
once when the leader stops, and after ``dislock_beat_timeout`` at most when it is killed.  A place
in line decides nothing else: when the lease has ended, the first beat that asks leads.  So a beat
that was killed as it stood by holds nobody up.

When each entry was last sent is kept beside the lock.  The leader claims a tick there before it
sends the message, in one script.  That refuses a beat whose lease has ended, a tick that another
beat has claimed, and a beat whose clock is wrong.  After sending, the leader notes that the message
has gone out.  If it is killed in between, nobody knows whether the message went out; if the broker
does not take it, nobody has it.  Such a tick is sent under the same task id, by this leader as soon
as the broker takes it or by the next one, but only as long as its entry is not due again: the later
tick takes its place.  The id of a tick is made from the entry and the time when that was sent
before, so all messages of one tick have one id.

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
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

from celery.beat import ScheduleEntry, Scheduler
from celery.utils.imports import load_extension_class_names
from kombu.exceptions import OperationalError
from kombu.utils.imports import symbol_by_name

from celery_dislock.beat import reasons
from celery_dislock.beat.entries import copy_of, entry_name, is_over, to_time, to_us
from celery_dislock.beat.reasons import PAUSE, StandBy
from celery_dislock.config.options import RENEWALS_PER_TIMEOUT, TaskOptions
from celery_dislock.config.urls import MEMORY, shown
from celery_dislock.exceptions import DislockError, LockKeyError, SettingsError, StoreError
from celery_dislock.keys.templates import check_written
from celery_dislock.locks.lease import WAITED, Attempt
from celery_dislock.parking.process import runtime_of
from celery_dislock.scripts import TICK, TICKS
from celery_dislock.scripts.names import beat_of
from celery_dislock.servers.records import LEADER, Conflict, decode, describe, in_words

if TYPE_CHECKING:
    from celery import Celery

    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.scripts import Script

WAIT_MOST = 2.0  # seconds in line until beat's own loop goes round
PLACE_MORE = 1.0  # seconds beyond that until its place in line counts as that of a dead beat
HANGS = 4  # timeouts for which the loop may stand still, as in a send
NOT_LEADING, DONE, WRONG_CLOCK, SENT_SINCE, PAUSED = range(5)  # as in _beat.lua
HAS_GONE_OUT = "-"

logger = logging.getLogger("celery_dislock")


class BeatLock:
    """Mixin over the class of a scheduler: its schedule runs only in the beat that leads."""

    if TYPE_CHECKING:
        app: Celery
        Entry: Any
        schedule: Any
        max_interval: float
        producer: Any

    _attempt: Attempt | None = None  # a schedule is saved while it is set up, too

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        self._made_us = to_us(app.now())
        super().__init__(app, *args, **kwargs)  # type: ignore[call-arg]
        self.lock_key = None  # turns RedBeat's own lock off
        self._claimed_us = self._began_us = 0
        # Ticks that may not have gone out: when the entry was sent before, and they were claimed.
        self._unsent: dict[str, tuple[int, int]] = {}
        self._unnoted: dict[str, int] = {}  # ticks that have gone out: when they were claimed
        self._followed = False  # whether another beat may have sent what this one does not know
        self._said, self._ticks = "", False

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
            self._note()
            pause: float = super().tick(*args, **kwargs)  # type: ignore[misc]
            if self._unsent and pause > 0:  # what is due goes first, and takes the place of older
                self._send_again()
            if self._unsent or self._unnoted:
                pause = min(pause, PAUSE)
        except StandBy as exc:
            self._heap = None  # the entry that was not sent is not in it any more
            if exc.why and exc.why != self._said:
                self._said = exc.why
                logger.log(exc.level, exc.why, self._lock.key, *exc.about)
            pause = exc.pause
        finally:
            self._ticks = False
        self._allow_renewals(pause)
        return pause

    def reserve(self, entry: Any) -> Any:
        """Claim a tick of the entry, before the scheduler takes note that it was sent."""
        self._claim(entry)
        self._unsent.pop(entry_name(entry), None)  # this tick takes its place
        return super().reserve(entry)  # type: ignore[misc]

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """Send the message of a tick, under the task id of this tick."""
        if not self.leads:  # stopped, or waiting for the broker, since the claim
            raise StandBy(reasons.LOST)
        before_us = to_us(entry.last_run_at)
        if before_us:  # else it is new, and an older entry may have had its name
            tick = f"{self._lock.names[0]} {before_us} {entry_name(entry)}"
            options = {"task_id": str(uuid5(NAMESPACE_OID, tick)), **(entry.options or {})}
            entry = copy_of(entry, options=options)
        name = entry_name(entry)
        try:
            sent = super().apply_async(entry, *args, **kwargs)  # type: ignore[misc]
        except Exception as exc:
            self._not_sent(name, (before_us, self._claimed_us), exc)
            raise
        self._unsent.pop(name, None)
        self._unnoted[name] = self._claimed_us
        with suppress(StandBy):  # the next pass notes it
            self._note()
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
        holder = describe({"thread": LEADER}, process.host, process.pid, self._lock.timeout)
        name = process.owner_name(f"{process.host}:{process.pid}/")
        attempt = self._attempt = Attempt(name, holder, self)
        lock, within = self._lock, min(self.max_interval, WAIT_MOST)
        lock.fair = False  # those in line are passed, once the lock is free: one may be dead
        try:
            answer = lock.acquire(attempt, timeout=within, place=within + PLACE_MORE)
        except StoreError as exc:
            raise StandBy(reasons.AWAY, exc) from exc
        finally:
            self._followed = self._followed or attempt.how == WAITED
        if isinstance(answer, Conflict):
            raise StandBy(reasons.HELD, in_words(answer.holder), level=logging.INFO, pause=0.0)
        answer.on_end = self._says_if_it_hangs
        try:
            self._load_record()
        except BaseException as exc:
            self._give_up()
            if not isinstance(exc, Exception):
                raise
            raise StandBy(
                reasons.NO_SCHEDULE, type(exc).__name__, exc, level=logging.ERROR
            ) from exc
        self._said = ""
        #: INFO: This beat sends from now on.
        logger.info("Beat leads, lock %r.", self._lock.key)

    def _allow_renewals(self, pause: float = 0.0) -> None:
        """Let the lease be renewed for the pause, and for as long as the loop may stand still."""
        if self._lease is not None:
            more = math.ceil(pause / self._lock.timeout + HANGS) * RENEWALS_PER_TIMEOUT
            most = self._lease.renewals + more
            self._lock.options = replace(self._lock.options, max_renew_times=most)

    def _says_if_it_hangs(self, lease: Lease, _action: str) -> None:
        if lease.capped:
            logger.error(reasons.HUNG, lease.key, HANGS * self._lock.timeout)

    def _clock_was_set(self) -> bool:
        """Tell whether the clock was set since this beat leads: set back, it makes no entry due."""
        return abs(self._asked_us() - self._began_us) > self._lock.timeout * 1e6

    def _asked_us(self) -> int:
        """Return when the lease was asked for, by the wall clock as it is set now."""
        lease = self._lease
        return to_us(self.app.now()) - int(lease.held_for * 1e6) if lease else 0

    def _load_record(self) -> None:
        """Learn from the record when each entry was last sent."""
        entries = self._entries()
        now_us = to_us(self.app.now())
        self._began_us = self._asked_us()
        mine = [part for name in entries for part in (name, to_us(entries[name].last_run_at))]
        told = iter(self._ask(TICKS, now_us, int(self._followed), *mine))
        catches_up = runtime_of(self.app).settings.dislock_beat_catch_up
        self._unsent.clear()
        unnoted, self._unnoted = self._unnoted, {}
        for name, last, before in zip(told, told, told, strict=True):
            claimed = before != HAS_GONE_OUT.encode()
            if claimed and unnoted.get(decode(name)) == int(last):
                claimed, self._unnoted[decode(name)] = False, int(last)
            entry = entries.get(decode(name)) or (claimed and self._load(decode(name)))
            if not entry:
                continue
            last_us, known_us = int(last), to_us(entry.last_run_at)
            if not self._is_newer(known_us, last_us, claimed=claimed):
                self._put(entry, last_us, runs=int(claimed))
            if not catches_up and entry.is_due()[0]:
                self._put(entry, now_us)
            elif catches_up and claimed:
                self._unsent[decode(name)] = int(before), last_us
        self._followed = False
        self._heap = None

    def _entries(self) -> dict[str, Any]:
        return {entry_name(entry): entry for entry in self.schedule.values()}

    def _send_again(self) -> None:
        """Send the ticks that were claimed and have not gone out, until the broker takes none."""
        entries, producer = self._entries(), self.producer
        for name, (before_us, claimed_us) in list(self._unsent.items()):
            entry = entries.get(name) or self._load(name)
            if not entry or is_over(entry, self.app):
                logger.warning(reasons.DROPPED, self._lock.key, name)
                del self._unsent[name]
                continue
            entry = copy_of(entry, last_run_at=to_time(before_us, entry))
            self._claim(entry)  # another one may lead, too, or nobody may send now
            self._claimed_us = claimed_us
            try:
                self.apply_async(entry, producer=producer, advance=False)
            except Exception:
                if name in self._unsent:  # the broker takes nothing yet
                    return
                logger.exception(reasons.UNSENDABLE, self._lock.key, name)
            else:
                logger.info(reasons.GONE_OUT, self._lock.key, name)

    def _note(self) -> None:
        """Note on the lock server which ticks have gone out, so that nobody sends them again."""
        for name, claimed_us in list(self._unnoted.items()):
            self._ask(TICK, claimed_us, name, HAS_GONE_OUT)
            del self._unnoted[name]

    def _not_sent(self, name: str, tick: tuple[int, int], error: Exception) -> None:
        """Keep a tick that the broker did not take; one that cannot be sent at all is lost."""
        # A scheduler raises its own error while it handles that of the broker's client.
        errors = (error, error.__context__)
        if not any(isinstance(error, (OperationalError, OSError)) for error in errors):
            self._unsent.pop(name, None)
        elif self._unsent.get(name) != tick:
            self._unsent[name] = tick
            logger.warning(reasons.KEPT, self._lock.key, name, error)

    def _claim(self, entry: Any) -> None:
        name, self._claimed_us = entry_name(entry), to_us(entry.default_now())
        told = self._ask(TICK, self._claimed_us, name, to_us(entry.last_run_at))
        self._unnoted.pop(name, None)
        if told:
            self._unsent.pop(name, None)
            self._put(entry, int(told[0]))
            raise StandBy(pause=0.0)

    def _is_newer(self, known_us: int, last_us: int, *, claimed: bool) -> bool:
        """
        Return whether what a scheduler knows of an entry is newer than the record.

        The entries of django-celery-beat and RedBeat are kept where all beats see them, and are
        saved before it is noted that a message has gone out.  Those of Celery are kept in a
        file; an entry that is not in the file counts as sent when it was made.
        """
        if self.Entry is not ScheduleEntry:
            return not claimed or known_us >= last_us
        return last_us <= known_us < self._made_us

    def _load(self, name: str) -> Any:
        """Return an entry that the schedule does not show; None: it is not there any more."""
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
            raise StandBy(reasons.LOST)
        self._allow_renewals()
        name, timeout = self._lock.names[0], self._lock.timeout
        keys, apart_us = [name, beat_of(name)], math.ceil(timeout * 1e6)
        try:
            told: list[Any] = self._lock.store.lock_server.run(
                script, keys, lease.owner, lease.token, now_us, apart_us, *more
            )
        except StoreError as exc:
            raise StandBy(reasons.AWAY, exc) from exc
        if told[0] in {NOT_LEADING, PAUSED}:
            self._give_up()
            raise StandBy(reasons.LOST) if told[0] == NOT_LEADING else StandBy(pause=0.0)
        if told[0] == WRONG_CLOCK:
            self._give_up()
            raise StandBy(reasons.CLOCK, (now_us - int(told[1])) / 1e6, level=logging.ERROR)
        return told[1:]

    def _give_up(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()


class TableLock(BeatLock):
    """
    Mixin over django-celery-beat's scheduler, whose entries are rows of a table.

    A row that was edited is read again, and then the table decides when its entry was sent last.
    So each sending is saved at once, and only by the beat that leads.
    """

    if TYPE_CHECKING:
        Model: Any
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

    def _load_record(self) -> None:
        self._dirty: set[str] = set()  # not to be saved: others have sent since, and saved that
        self._initial_read = True
        super()._load_record()

    def _load(self, name: str) -> Any:
        """Return a one-off entry, which is disabled as soon as it was claimed."""
        row = self.Model.objects.filter(name=name, one_off=True).first()
        return row and self.Entry(row, app=self.app)

    def _put(self, entry: Any, last_us: int, runs: int = 0) -> None:
        super()._put(entry, last_us, runs)
        if entry.name not in self._schedule:
            return
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


def scheduler_of(app: Celery, given: Any) -> type:
    """
    Extend the class of the scheduler of an app's beats, which is given as Celery takes it.

    Raises:
        SystemExit: The beats of this app cannot have a lock.
    """
    scheduler = symbol_by_name(given, dict(load_extension_class_names("celery.beat_schedulers")))
    try:
        check_beat(app)
        return with_lock(scheduler)
    except DislockError as exc:
        raise SystemExit(f"Cannot start with locks: {exc}") from exc


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

"""The facts that the checks judge, gathered once.

Nothing here needs more rights than locks need, except to read two settings about saving to disk.
All locks are read once, in pages, and only those that something may be wrong with are remembered.
A lock changes while it is looked at, so a fact was true a moment ago.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import StoreError
from celery_dislock.servers.connections import is_answer
from celery_dislock.servers.overview import Overview

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.servers.server import Server
    from celery_dislock.servers.view import Holder, LockState, ReservationState

    # What a process tells of an app's locks: see celery_dislock.operating.about.
    Description = Mapping[str, Any]

ROUND_TRIPS = 11  # that are timed
LINES_MOST = 200  # lines that are read place by place
PLACES_MOST = 50  # places of each that are read
RESERVED_LONG = 1 / 2  # of lock_unique_for: countdowns and time limits are not known here


class Member(NamedTuple):
    """
    One Redis process of the lock server.

    Attributes:
        name: Its URL without password.
        send: Sends it a command.
        away: Why it does not answer; empty: it does.
        info: The fields of ``INFO``; empty: not known.
        no_info: Why they are not known.
        save: How often it saves its data, as ``CONFIG GET`` returns it; None: not known.
        round_trips: Seconds of each round trip that was timed.
        clock: Seconds by which its clock is ahead of the clock here; None: not known.
    """

    name: str
    send: Callable[..., Any] | None = None
    away: str = ""
    info: Mapping[str, str] = {}
    no_info: str = ""
    save: str | None = None
    round_trips: Sequence[float] = ()
    clock: float | None = None


def members_of(server: Server) -> list[Member]:
    """Ask each process of a lock server about itself; about fifteen round trips to each."""
    try:
        return [_member(name, send) for name, send in server.members()]
    except StoreError as exc:
        return [Member(server.name, away=exc.reason)]


def _member(name: str, send: Callable[..., Any]) -> Member:
    times, ahead = [], []
    try:
        for _ in range(ROUND_TRIPS):
            began, at = time.perf_counter(), time.time()
            seconds, micros = send(b"TIME")
            took = time.perf_counter() - began
            times.append(took)
            ahead.append(int(seconds) + int(micros) / 1e6 - (at + took / 2))
    except StoreError as exc:
        if not is_answer(exc):
            return Member(name, away=exc.reason)
    lines, no_info = [], ""
    try:
        lines = send(b"INFO").decode(errors="replace").splitlines()
    except StoreError as exc:
        no_info = exc.reason
    return Member(
        name,
        send,
        info=dict(line.split(":", 1) for line in lines if ":" in line),
        no_info=no_info,
        save=_save(send),
        round_trips=times,
        clock=median(ahead) if ahead else None,
    )


def _save(send: Callable[..., Any]) -> str | None:
    try:
        reply = send(b"CONFIG", b"GET", b"save")
    except StoreError:
        return None
    parts = [*chain(*reply.items())] if isinstance(reply, dict) else reply
    return parts[1].decode(errors="replace") if parts else None


class Fleet(NamedTuple):
    """
    What the workers have answered.

    Attributes:
        answers: How each worker that answers describes its locks, by its name; None: it knows no
            ``inspect dislock``.
        queues: The queues that each worker consumes, as ``inspect active_queues`` lists them.
        error: Why the workers could not be asked; empty: they were.
        twice: Names that several workers share.
    """

    answers: Mapping[str, Description | None]
    queues: Mapping[str, Sequence[Mapping[str, Any]]]
    error: str = ""
    twice: Sequence[str] = ()

    @property
    def described(self) -> dict[str, Description]:
        """The answers of the workers that know the question."""
        return {name: answer for name, answer in self.answers.items() if answer is not None}


def understood(answer: object) -> Description | None:
    """
    Return a worker's answer in the form that the checks expect; None if it is something else.

    Any version may answer, and any program that the broker lets in.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("leases"), list):
        return None
    tasks, warnings = answer.get("tasks"), answer.get("warnings")
    return {
        **{
            name: None if answer.get(name) is None else str(answer[name])
            for name in ("version", "server", "prefix", "no_server", "unavailable")
        },
        "enabled": answer.get("enabled"),
        "locks": answer.get("locks") is not False,
        "tasks": {
            str(name): options
            for name, options in (tasks.items() if isinstance(tasks, dict) else ())
            if isinstance(options, dict)
        },
        "warnings": [str(one) for one in (warnings if isinstance(warnings, list) else ())],
        "errors": answer.get("errors"),
        "leases": [one for one in answer["leases"] if isinstance(one, dict)],
    }


class Workers(Protocol):
    """Asks the workers and the broker what depends on the locks that were seen."""

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of the task ids that a worker has."""

    def empty(self) -> bool | None:
        """Return whether the queues are empty; None if that is not known."""


@dataclass
class Locks:
    """
    What was seen of all locks.

    Attributes:
        locks, leases, waiting: How many there are.
        suspects: The locks that something may be wrong with.
        lines: The longest lines, with their first places.
        unread: Why a lock could not be read.
        away: Why the locks of one server of several could not be read.
    """

    locks: int = 0
    leases: int = 0
    waiting: int = 0
    suspects: list[LockState] = field(default_factory=list)
    lines: list[LockState] = field(default_factory=list)
    unread: list[StoreError] = field(default_factory=list)
    away: list[StoreError] = field(default_factory=list)


@dataclass
class Facts:
    """
    All that the checks judge.

    Attributes:
        server: The lock server.
        prefix: ``dislock_prefix``.
        home: Name of the app's broker in Redis; empty if the server keeps no lines.
        min_replicas: ``dislock_min_replicas``.
        ours: How the app here describes its locks.
        fleet: What the workers have answered.
        workers: Asks them for more.
        members: The processes of the lock server.
        locks: What was seen of all locks.
    """

    server: Server
    prefix: str
    home: str
    min_replicas: int
    ours: Description
    fleet: Fleet
    workers: Workers
    members: Sequence[Member] = ()
    locks: Locks = field(default_factory=Locks)

    @property
    def answering(self) -> list[Member]:
        """The processes of the lock server that answer."""
        return [one for one in self.members if not one.away]

    @property
    def away(self) -> bool:
        """Whether no lock can be taken, because the lock server does not answer."""
        enough = len(self.members) // 2 + 1 if self.server.kind == "quorum" else 1
        return len(self.answering) < enough

    @property
    def overview(self) -> Overview:
        """Reads the locks."""
        return Overview(self.server, self.prefix)

    @property
    def sides(self) -> dict[str, Description]:
        """The descriptions of all sides: the workers, and the app here."""
        return {**self.fleet.described, "this command": self.ours}

    @property
    def parks(self) -> bool:
        """Whether tasks are parked, or may be."""
        return self.server.keeps_lines and (
            any(one.parked for lock in self.locks.lines for one in lock.line)
            or any(
                options.get("lock_on_conflict") == "queue"
                for side in self.sides.values()
                for options in side["tasks"].values()
            )
        )

    def is_mute(self, holder: Holder) -> bool:
        """Tell whether a lease is of a worker that does not answer."""
        name = holder.worker
        return bool(name and "@" in name and name not in self.fleet.answers)

    @cached_property
    def _old(self) -> float:
        """Seconds from which a reservation is old, by the tasks that are known."""
        kept = [
            float(options.get("lock_unique_for", TaskOptions.lock_unique_for))
            for side in self.sides.values()
            for options in side["tasks"].values()
            if "lock_unique_until" in options
        ]
        return RESERVED_LONG * min(kept, default=TaskOptions.lock_unique_for)

    def is_old(self, reservation: ReservationState) -> bool:
        """Tell whether a reservation has waited for its message for suspiciously long."""
        return reservation.state == "waiting" and reservation.since > self._old

    def look(self) -> None:
        """
        Look at all locks.  Blocks for a round trip per hundred locks, and one per line.

        Raises:
            StoreError: No server answered.
        """
        seen = Locks()
        for lock in self.overview.locks(failed=seen.away):
            if isinstance(lock, StoreError):
                seen.unread.append(lock)
                continue
            seen.locks += lock.exists
            seen.leases += len(lock.holders)
            seen.waiting += lock.waiting
            limited = lock.limit is not None or lock.limit_differs
            old = lock.reservation and self.is_old(lock.reservation)
            if lock.waiting or lock.aside or limited or old or any(map(self.is_mute, lock.holders)):
                seen.suspects.append(lock)
        lines = [lock for lock in seen.suspects if lock.waiting]
        for lock in sorted(lines, key=lambda lock: -lock.waiting)[:LINES_MOST]:
            with suppress(StoreError):  # of one node of several
                seen.lines.append(self.overview.lock(lock.name, most=PLACES_MOST))
        self.locks = seen

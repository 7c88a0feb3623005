"""The facts that the checks judge, gathered once.

Nothing here needs more rights than locks need.  All locks are read once, in pages; of the sound
ones nothing is remembered but their number.  A lock changes while it is looked at, so a fact was
true a moment ago.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.config.options import IN_LINE
from celery_dislock.config.urls import any_keyprefix
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.troubles import MENTIONED, TROUBLES, troubles_of
from celery_dislock.operating.inspection import about
from celery_dislock.operating.locks import rows
from celery_dislock.servers.connections import is_answer
from celery_dislock.servers.trial import complaints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.operating.checks.table import Row
    from celery_dislock.operating.locks import AppLocks
    from celery_dislock.servers.server import Server
    from celery_dislock.servers.trial import Complaint
    from celery_dislock.servers.view import Holder, LockState
    from celery_dislock.servers.waiters import Waiter

    # What a process tells of an app's locks: see celery_dislock.operating.inspection.
    Description = Mapping[str, Any]

ROUND_TRIPS = 11  # that are timed
PLACES_MOST = 50  # places of each line that are read


class RedisProcess(NamedTuple):
    """
    One Redis process of the lock server.

    Attributes:
        name: Its URL without password.
        away: Why it does not answer; empty: it does.
        info: The fields of ``INFO``; empty: not known.
        no_info: Why they are not known.
        round_trip: Seconds of a round trip, the median; None: not known.
        clock: Seconds by which its clock is ahead of the clock here; None: not known.
    """

    name: str
    away: str = ""
    info: Mapping[str, str] = {}
    no_info: str = ""
    round_trip: float | None = None
    clock: float | None = None


def members_of(server: Server) -> list[RedisProcess]:
    """Ask each process of a lock server about itself."""
    try:
        return [_member(member.name, member.send) for member in server.members()]
    except StoreError as exc:
        return [RedisProcess(server.name, away=exc.reason)]


def _member(name: str, send: Callable[..., Any]) -> RedisProcess:
    member = RedisProcess(name)
    times, ahead = [], []
    try:
        for _ in range(ROUND_TRIPS):
            began, at = time.perf_counter(), time.time()
            seconds, micros = send(b"TIME")
            times.append(time.perf_counter() - began)
            ahead.append(int(seconds) + int(micros) / 1e6 - (at + times[-1] / 2))
        member = member._replace(round_trip=median(times), clock=median(ahead))
    except StoreError as exc:
        if not is_answer(exc):
            return RedisProcess(name, away=exc.reason)
    try:
        lines = send(b"INFO").decode(errors="replace").splitlines()
    except StoreError as exc:
        return member._replace(no_info=exc.reason)
    return member._replace(info=dict(line.split(":", 1) for line in lines if ":" in line))


class Fleet(NamedTuple):
    """
    What the workers have answered.

    Attributes:
        answers: How each worker that answers describes its locks, by its name; None: it knows no
            ``inspect dislock``.
        error: Why the workers could not be asked; empty: they were.
    """

    answers: Mapping[str, Description | None]
    error: str = ""

    @property
    def described(self) -> dict[str, Description]:
        """The answers of the workers that know the question."""
        return {name: answer for name, answer in self.answers.items() if answer is not None}


ANSWER = {"leases": list, "tasks": dict, "warnings": list, "version": str, "locks": bool}


def understood(answer: object) -> Description | None:
    """Return a worker's answer; None if this version cannot read it."""
    if isinstance(answer, dict) and all(
        isinstance(answer.get(field), ANSWER[field]) for field in ANSWER
    ):
        return answer
    return None


@dataclass
class Locks:
    """
    What was seen of all locks.

    Attributes:
        locks, leases, waiting: How many there are.
        of_tasks: Whether tasks hold a lock, or wait for one.
        parked: Whether tasks are parked.
        troubles: What is wrong with locks, and what was set: more of each, by key.
        away: The error of each server whose locks could not be read; another one answered.
    """

    locks: int = 0
    leases: int = 0
    waiting: int = 0
    of_tasks: bool = False
    parked: bool = False
    troubles: dict[Row, dict[str, str]] = field(default_factory=dict)
    away: list[StoreError] = field(default_factory=list)


class Facts:
    """
    All that the checks judge.  Blocks for about twelve round trips to each process.

    Args:
        locks: The app's locks.
        fleet: What the workers have answered.

    Attributes:
        server: The lock server.
        prefix: How all names begin: ``dislock_prefix``, with that of Celery's if it has one there.
        broker: The broker of the app, in the names of its lines.
        min_replicas: ``dislock_min_replicas``.
        site: Reads the locks, and knows what is beside them.
        ours: How the app here describes its locks.
        fleet: The argument of this name.
        keyprefix: The ``global_keyprefix`` of the app's broker or result backend; empty: none.
        members: The processes of the lock server.
        locks: What was seen of all locks.
    """

    def __init__(self, locks: AppLocks, fleet: Fleet) -> None:
        store, settings = locks.process.store, locks.runtime.settings
        self.server, self.broker = store.lock_server, store.broker
        self.prefix, self.min_replicas = settings.dislock_prefix, settings.dislock_min_replicas
        self.site, self.fleet = locks.site, fleet
        self.ours: Description = about(locks.app)
        self.keyprefix = any_keyprefix(locks.runtime.conf)
        self.members = members_of(self.server)
        self.locks = Locks()

    @property
    def answering(self) -> list[RedisProcess]:
        """The processes of the lock server that answer."""
        return [member for member in self.members if not member.away]

    @property
    def away(self) -> bool:
        """Whether no lock can be taken, because the lock server does not answer."""
        enough = len(self.members) // 2 + 1 if self.server.kind == "quorum" else 1
        return len(self.answering) < enough

    @cached_property
    def complaints(self) -> Sequence[Complaint]:
        """What locks need and the lock server refuses; it is tried once."""
        return [] if self.away else complaints(self.server, self.prefix)

    @property
    def needs_workers(self) -> bool:
        """Whether workers are missed if there are none: tasks hold locks, or wait for them."""
        seen = self.locks
        return bool(seen.of_tasks or (self.ours["tasks"] and (seen.leases or seen.waiting)))

    @property
    def sides(self) -> dict[str, Description]:
        """The descriptions of all sides: the workers, and the app here."""
        return {**self.fleet.described, "this command": self.ours}

    @property
    def parks(self) -> bool:
        """Whether tasks are parked, or may be."""
        options = [task for side in self.sides.values() for task in side["tasks"].values()]
        return self.server.keeps_lines and (
            any(task.get("lock_on_conflict") in IN_LINE for task in options) or self.locks.parked
        )

    def look(self) -> None:
        """
        Look at all locks.  Blocks for a round trip per hundred locks.

        Raises:
            StoreError: No server answered.
        """
        seen = Locks()
        for row in rows(self.site.overview, failed=seen.away, most=PLACES_MOST):
            for trouble in troubles_of(row.found, self.site, (*TROUBLES, *MENTIONED)):
                seen.troubles.setdefault(trouble.row, {})[row.key] = trouble.more
            if (lock := row.state) is not None:
                seen.locks += 1
                seen.leases += len(lock.holders)
                seen.waiting += lock.waiting
                seen.of_tasks = seen.of_tasks or _is_of_task(lock)
                seen.parked = seen.parked or any(waiter.parked for waiter in lock.line)
        self.locks = seen


def _is_of_task(lock: LockState) -> bool:
    there: list[Holder | Waiter] = [*lock.holders, *lock.line, *lock.turns]
    return any(client.task for client in there)

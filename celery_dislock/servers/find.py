"""Find a task on a lock server by its id alone.

A lock's records name the tasks that they are about: owners, tickets and reservations have a task's
id.  So there is no index of tasks, which would cost time at each send, start and end.  The most
likely locks are searched first: those that the caller names, then those with parked tasks, and then
all.  The names of all keys are read in pages, and the server answers other clients in between.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import body_owners_start, owners_start, reserved_name, task_name
from celery_dislock.scripts import FIND, LOOK, WHERE
from celery_dislock.scripts.names import (
    ASIDE,
    DONE,
    PLACES,
    REPLACED,
    RUNNING,
    TICKETS,
    UNIQUE,
    UNSENT,
    lock_in,
    mark_in,
)
from celery_dislock.servers.connections import SOCKET_TIMEOUT
from celery_dislock.servers.records import decode
from celery_dislock.servers.server import SCANNED, escaped, keys_pattern, scan_all
from celery_dislock.servers.view import LEASES_ALONE
from celery_dislock.servers.waiters import parse_standing, ticket_of_member

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from celery_dislock.servers.server import Server
    from celery_dislock.servers.waiters import Place, Standing

KEYS_MOST = 5_000_000  # keys of a server, also of other programs, that are read for one task
LOOKS_MOST = 300_000  # keys of locks that are looked into for one task
TOGETHER = 100  # keys of locks that are looked into in one round trip
PAGE = 500  # fields of a hash that are looked at in one step
LEASES = ""  # ending of the hash of a lock's leases, whose name is that of the lock
HASHES = (TICKETS, LEASES, PLACES, RUNNING, REPLACED, ASIDE)  # with owners or tickets
OF_TASKS = (*HASHES, UNIQUE)
CERTAIN = (TICKETS, LEASES, PLACES, REPLACED, ASIDE)  # see Found.is_certain
FIRST = b"0"  # cursor of the first page, and after the last one
RETRIES = 10  # deliveries of a task, each a retry of the last, that are looked for by name


class TaskRecord(NamedTuple):
    """
    A record that names a task.

    Attributes:
        lock: Name in Redis of its lock.
        end: Ending of the record's key; see ``_names.lua``.
        name: The owner, the ticket or the task's id in it.
        head: The first bytes of the record; empty: only its name was seen.
    """

    lock: str
    end: str
    name: str
    head: bytes = b""

    @property
    def is_certain(self) -> bool:
        """Whether the record tells what the task does now, even if other records name it, too."""
        return self.end in CERTAIN and not self.name.startswith("~")


class Search:
    """
    Looks for one task.  Its methods block for their round trips.

    Args:
        server: The lock server.
        prefix: Prefix of the locks' names in Redis.
        task_id: The task's id.

    Attributes:
        is_cut: Whether there were more keys than are looked at.
        failed: Why a server of several was not looked at.
    """

    def __init__(self, server: Server, prefix: str, task_id: str) -> None:
        self.is_cut = False
        self._names_read = self._looks = 0
        self.failed: list[StoreError] = []
        self._server = server
        self._prefix = prefix
        self._id = task_id
        self._name = task_name(task_id)
        self._owners = owners_start(task_id), body_owners_start(task_id)
        self._reserved = f" {reserved_name(task_id)} ".encode()
        self._ticket = re.compile(rf"{re.escape(self._name)}(:\d+){{2}}")
        self._pattern = f"*{escaped(self._name)}[:@]*"

    def among(self, locks: Iterable[str], ends: Sequence[str] = OF_TASKS) -> Iterator[TaskRecord]:
        """
        Look into some locks.

        Args:
            locks: Their names in Redis.
            ends: Which of their keys.

        Raises:
            StoreError: The server did not answer.
        """
        return self._into((lock, end) for lock in locks for end in ends)

    def marks(self, locks: Iterable[str]) -> Iterator[TaskRecord]:
        """Look beside these locks for marks: the task was not sent, or its work is done."""
        names = [f"{DONE}{self._name}:{nth}:0" for nth in range(RETRIES)]
        names.append(UNSENT + reserved_name(self._id))
        return self._into((lock, name) for lock in locks for name in names)

    def anywhere(self, end: str = "") -> Iterator[TaskRecord]:
        """
        Look into all locks.

        Args:
            end: Which of their keys; empty: those with owners, tickets or ids of tasks.

        Raises:
            StoreError: No server answered.
        """
        self.failed = []
        for page in scan_all(self._server, keys_pattern(self._prefix, "*") + end, self.failed):
            yield from self._in_page(page)
            self._names_read += SCANNED
            if self._names_read >= KEYS_MOST or self._looks >= LOOKS_MOST:
                self.is_cut = True
                return

    def where(self, lock: str, member: str) -> Standing | None:
        """
        Tell where a waiter or a parked task stands; None: it does not wait any more.

        Args:
            lock: Name in Redis of the lock that has its record.
            member: The owner of a waiter, or the ticket of a parked task and ``#``.

        Raises:
            DamagedLockError, StoreError: The lock cannot be read.
        """
        return parse_standing(self._server.run(WHERE, [lock], member))

    def _in_page(self, page: Iterable[str]) -> Iterator[TaskRecord]:
        """Look into the keys of a page of names."""
        into = []
        for redis_key in page:
            if mark := mark_in(redis_key):
                at, end, name = mark
                is_its = self._is_named(name) if end == DONE else name == reserved_name(self._id)
                into += [(at, end + name)] if is_its else []
            elif lock := lock_in(redis_key):
                end = redis_key[len(lock) :]
                into += [(lock, end)] if end in OF_TASKS else []
        yield from self._into(into)

    def _into(self, keys: Iterable[tuple[str, str]]) -> Iterator[TaskRecord]:
        """Look into keys, each given as its lock and its ending."""
        if not self._server.keeps_lines:
            yield from self._holding(lock for lock, end in keys if end == LEASES)
            return
        rest = iter(keys)
        while some := list(islice(rest, TOGETHER)):
            pages = [(lock, end, FIRST) for lock, end in some]
            while pages:
                self._looks += len(pages)
                replies = self._ask(pages)
                for (lock, end, _), reply in zip(pages, replies, strict=True):
                    yield from self._named(lock, end, reply[1:])
                pages = [
                    (lock, end, reply[0])
                    for (lock, end, _), reply in zip(pages, replies, strict=True)
                    if reply[0] != FIRST
                ]

    def _holding(self, locks: Iterable[str]) -> Iterator[TaskRecord]:
        """Look at the leases on a majority of independent servers, which keep nothing else."""
        rest = iter(locks)
        while some := list(islice(rest, TOGETHER)):
            calls = [(lock, 0, LEASES_ALONE) for lock in some]
            replies = self._server.run_many(LOOK, calls, within=SOCKET_TIMEOUT)
            for lock, reply in zip(some, replies, strict=True):
                if not isinstance(reply, StoreError):
                    owners = (decode(owner) for owner in reply[1][::6])
                    yield from (
                        TaskRecord(lock, LEASES, owner) for owner in owners if self._is_named(owner)
                    )

    def _ask(self, pages: Sequence[tuple[str, str, bytes]]) -> list[Any]:
        """Read a page of each key; empty for a key that cannot be read."""
        calls = [
            (lock + end, self._pattern if end in HASHES else "", cursor, PAGE)
            for lock, end, cursor in pages
        ]
        replies = self._server.run_many(FIND, calls, within=SOCKET_TIMEOUT)
        return [[FIRST] if isinstance(page, StoreError) else page for page in replies]

    def _named(self, lock: str, end: str, page: Sequence[bytes]) -> Iterator[TaskRecord]:
        for field, head in zip(page[::2], page[1::2], strict=True):
            if end in HASHES:
                if self._is_named(decode(field)):
                    yield TaskRecord(lock, end, decode(field), head)
            elif head and (end != UNIQUE or self._reserved in head):
                mark = mark_in(lock + end)
                yield TaskRecord(lock, *(mark[1:] if mark else (end, self._id)), head)

    def _is_named(self, name: str) -> bool:
        """Tell whether an owner or a ticket is of the task."""
        owner = name.removeprefix("~")  # its lease is left to expire
        is_ticket = self._ticket.fullmatch(ticket_of_member(name.encode())[0])
        return owner.startswith(self._owners) or bool(is_ticket)


def find_place(server: Server, locks: Sequence[str], task_id: str) -> Place | None:
    """
    Tell where a parked task stands; blocks for one round trip, whatever else is on the server.

    Args:
        server: The lock server.
        locks: Names in Redis of the locks of which one has the task's record.
        task_id: The task's id.

    Raises:
        DamagedLockError, StoreError: A lock cannot be read.
    """
    if not server.keeps_lines:
        return None
    members = [f"{task_name(task_id)}:{nth}:0#" for nth in range(RETRIES)]
    calls = [(lock, *members) for lock in locks]
    for reply in server.run_many(WHERE, calls, within=SOCKET_TIMEOUT):
        if isinstance(reply, StoreError):
            raise reply
        found = parse_standing(reply)
        if found is not None and not found.is_lost:
            return found.place
    return None

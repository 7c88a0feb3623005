"""All that is known of one task; each server is asked when its answer is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import shown_id
from celery_dislock.messages.message import Message
from celery_dislock.operating.site import Site
from celery_dislock.operating.why.asked import (
    StoredResult,
    WorkersWord,
    ask_backend,
    ask_workers,
    lacking,
)
from celery_dislock.scripts.names import PLACES, TICKETS
from celery_dislock.servers.find import LEASES, Search
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.waiters import parked_message
from celery_dislock.tasks.answer import Answer
from celery_dislock.words import plain, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.find import TaskRecord

LINES_FIRST = 10_000  # locks with parked tasks that are looked at before all others
SHOWN = 100  # characters of an id in a sentence


@dataclass
class Case:
    """
    All that is known of one task.

    Args:
        id: The task's id.
        app: The app; None: the locks have none.
        runtime: What the app's locks share.
        keys: Keys of the only locks to look at; empty: all.
        timeout: Seconds to wait for the workers.
        errors: Whether the answer may quote errors of bodies.

    Attributes:
        found: The records of the task on the lock server that were found so far.
        away: Why the lock server could not be asked; empty: it was.
    """

    id: str
    app: Celery | None
    runtime: Runtime[ParkingProcess]
    keys: Sequence[str] = ()
    timeout: float = 1.0
    errors: bool = True
    found: list[TaskRecord] = field(default_factory=list)
    away: str = ""

    def __post_init__(self) -> None:
        server = self.runtime.process.store.lock_server
        self.overview = Overview(server, self.runtime.settings.dislock_prefix)
        self.site = Site(self.overview, self.app)
        self.search = Search(server, self.overview.prefix, self.id)
        has_lines = self.app is not None and server.keeps_lines
        self._lines = self.runtime.process.lines if has_lines else None

    @cached_property
    def stored(self) -> StoredResult:
        """The answer of the result backend, which is asked once."""
        return ask_backend(self.app, self.id, errors=self.errors)

    def ask_backend_again(self) -> StoredResult:
        """Ask the result backend again about a task that has moved on; return its answer."""
        self.stored = ask_backend(self.app, self.id, errors=self.errors)
        return self.stored

    @cached_property
    def told(self) -> WorkersWord:
        """The answers of the workers, which are asked once."""
        return ask_workers(self.app, self.id, self.timeout)

    def told_by(
        self, tell: Callable[..., Answer | None], *evidence: TaskRecord
    ) -> Iterator[Answer]:
        """Yield the answer of *tell*; nothing if the lock server is away, which is noted."""
        try:
            answer = tell(self, *evidence)
        except StoreError as exc:
            self.away = str(exc)
            return
        if answer is not None:
            yield answer

    def first(self, end: str) -> TaskRecord | None:
        """Return the first record that was found in a key with this ending; None: there is none."""
        return next((record for record in self.found if record.end == end), None)

    def look(self, *locks: str) -> Iterator[TaskRecord]:
        """Yield the task's records in these locks, or in all if none are given; keep them."""
        try:
            for record in self.search.among(locks) if locks else self._look():
                self.found.append(record)
                yield record
        except StoreError as exc:
            self.away = str(exc)

    def _look(self) -> Iterator[TaskRecord]:
        if self.keys:
            locks = self.runtime.lock_names(self.keys)
            yield from self.search.among(locks)
            yield from self.search.marks(locks)
            return
        if self.stored.first is not None:
            yield from self.search.among(self.runtime.lock_names([self.stored.first]))
        if self._lines is not None:
            lines = islice(self._lines.names(), LINES_FIRST)
            yield from self.search.among(lines, (TICKETS, LEASES))
        yield from self.search.anywhere()

    def lacking(self, found: TaskRecord) -> list[str]:
        """
        Return the workers of the queue of a task that was set aside that have no task of its name.

        Empty if the locks have no app: then neither its message nor the workers are asked.

        Raises:
            ValueError: Its message cannot be read.
            StoreError: The lock server did not answer.
        """
        if self.app is None:
            return []
        pages = self._lines.aside(found.lock, found.name) if self._lines is not None else ()
        kept = next((record for _, record in pages), b"")
        message = Message.from_bytes(parked_message(kept)[0])
        workers = self.told.workers if message.exchange else self.told.serving(message.routing_key)
        task = message.headers.get("task")
        if not workers or not isinstance(task, str):
            return []
        return lacking(self.app, task, list(workers), self.timeout)

    def place(self) -> TaskRecord | None:
        """
        Return the task's place in line of a lock for which its body waits; None: it waits for none.

        All keys of the lock server are read, in pages, as the lock may be any.
        """
        at = self.runtime.lock_names(self.keys)
        found = self.search.among(at, (PLACES,)) if at else self.search.anywhere(PLACES)
        return next(found, None)

    @property
    def has_gaps(self) -> bool:
        """Whether there are locks that were not looked at."""
        return bool(self.away or self.keys or self.search.is_cut or self.search.failed)

    def who(self, task: str | None = None) -> str:
        """Name the task."""
        shown = shown_id(self.id)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
        return f"{task}[{shown}]" if task else f"Task {shown}"

    def answer(
        self,
        state: str,
        sentence: str,
        rests_on: Iterable[str] = (),
        remedy: str = "",
        **more: Any,
    ) -> Answer:
        """Make the answer; *more* are its other attributes."""
        facts = (*rests_on, *self._sources())
        told = tuple(plain(fact) for fact in facts if fact)
        more = {"away": self.away, **more}
        return Answer(self.id, state, plain(sentence), told, plain(remedy), **more)

    def _sources(self) -> Iterator[str]:
        """Yield lines that say what the result is, and what could not be asked."""
        stored = self.stored
        if stored.state:
            yield f"result: {stored.state}{stored.reason and ': '}{stored.reason}"
        if stored.unknown:
            yield f"result: not asked: {stored.unknown}"
        if self.away:
            yield f"lock server: has not told: {self.away}"
        if self.runtime.off:
            yield "locks are off here (dislock_enabled)"
        for error in self.search.failed if not self.away else ():
            yield f"lock server: one did not answer: {error}"
        if self.search.is_cut:
            yield "lock server: not all of its keys were looked at; name the lock with --key"
        if "told" in vars(self):
            yield from self._about_workers(self.told)

    def _about_workers(self, told: WorkersWord) -> Iterator[str]:
        if told.unknown:
            yield f"workers: not asked: {told.unknown}"
        elif told.nobody:
            yield "workers: none has answered"
        elif not told.having:
            names = [*sorted(told.workers), *told.strangers]
            yield f"workers: {some(names)} answered, and none has it"

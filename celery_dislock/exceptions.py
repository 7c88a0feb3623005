"""All errors of celery-dislock, in one tree.

Each error carries its data as attributes and as ``args``.  Celery rebuilds an exception from its
``args`` when it crosses a process boundary or a result backend.  The classes are dataclasses, so
that each datum is named once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar

import click

from celery_dislock.words import plain, so_far

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


LEFT_OUT = {"hint", "about"}  # attributes that are no arguments if they are empty


class DislockError(Exception):
    """Base of every error of this package."""

    def __post_init__(self) -> None:
        given = list(vars(self).items())
        while given[-1][0] in LEFT_OUT and not given[-1][1]:
            given.pop()
        self.args = tuple(value for _, value in given)


class SettingsError(DislockError, ValueError, click.ClickException):
    """An option or setting cannot be used.

    Raised when a task is bound, when a lock is made in plain Python, when a worker starts, or when
    a call is given an option of a task.  Also raised by a task if its ``lock_on_conflict`` is a
    callable that returns no valid strategy.

    The class derives from ClickException, so a Celery command ends with one message and no
    traceback.

    Attributes:
        owner: Where the option was set: a task's name, or ``app.conf``.
        option: Name of the option or setting.
        value: The value that was refused.
        remedy: What to set instead.
    """

    def __init__(self, owner: str, option: str, value: object, remedy: str) -> None:
        click.ClickException.__init__(self, f"{owner}: {option}={value!r}: {remedy}")
        self.args = (owner, option, value, remedy)
        self.owner = owner
        self.option = option
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message

    def format_message(self) -> str:
        """Return the message with which a command ends; called by click."""
        return f"Cannot start with locks: {self}"

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message; called by click."""
        click.echo(self.format_message(), file=file, err=True)


@dataclass(eq=False, repr=False)
class LockKeyError(DislockError, ValueError):
    """The key of a lock cannot be built from these arguments; nothing was locked or run.

    Attributes:
        template: The key template, or the name of the callable, as declared.
        argument: The argument at fault; None if it is not a single argument.
        reason: What is wrong with it, and what is allowed.
        option: ``lock_key``; or ``lock_limit``, ``lock_rate`` or ``lock_cost``, if one of these
            cannot be told.
    """

    template: str
    argument: str | None
    reason: str
    option: str = "lock_key"

    def __str__(self) -> str:
        argument = f", argument <{self.argument}>" if self.argument else ""
        return f"{self.option} {self.template!r}{argument}: {self.reason}"


PAUSED = "an operator, who has paused it"  # how a pause is named in place of a holder
TOO_EARLY = "too early"  # the text in place of a holder if the next start may not be yet


@dataclass(eq=False, repr=False)
class LockHeldError(DislockError):
    """The lock is held, or it is too early for its rate; the body was not run.

    It can also mean that the caller would wait for itself: it holds one of the keys, but on other
    terms or together with other keys, or asks outside of the block that holds it.

    Attributes:
        key: The key of the lock.
        holder: Text that names the holder: task, task id, worker and process.
        remaining: Seconds until the holder's lease ends, unless it is renewed.
        held_for: Seconds since the holder took the lock; None if that is not known.
        renewed: Seconds since the holder's lease was renewed, or taken if it was not renewed since;
            None if that is not known, or the lease has a fixed expiry.
        hint: Text that says why the caller may be waiting for itself; empty: it does not.
    """

    key: str
    holder: str
    remaining: float
    held_for: float | None = None
    renewed: float | None = None
    hint: str = ""
    # What the conflict has beside: as plain data, which any serializer of results takes.
    about: Mapping[str, Any] | None = None
    conflict_type: ClassVar[Callable[..., Any]]  # the class Conflict, of a floor above this one

    @property
    def conflict(self) -> Any:
        """
        The same as data; None for a LockTermsError.

        ``exc.conflict.holder["id"]`` is the id of the task that holds the lock.
        """
        if self.about is None:
            return None
        times = {"held_for": self.held_for, "renewed": self.renewed}
        return self.conflict_type(key=self.key, remaining=self.remaining, **times, **self.about)

    def __repr__(self) -> str:
        shown = self.args if self.about is None else self.args[:-1]
        return f"{type(self).__name__}{shown!r}"

    def __str__(self) -> str:
        if self.holder.startswith(PAUSED):  # its seconds are those until one may ask again
            return f"lock {self.key!r} is kept free by {self.holder}"
        if self.holder.startswith(TOO_EARLY):
            return f"lock {self.key!r} cannot be taken yet, {self.holder}"
        return (
            f"lock {self.key!r} is held by {self.holder}{so_far(self.held_for, self.renewed)}, "
            f"for {self.remaining:.1f} s more unless renewed{self.hint and '; '}{self.hint}"
        )


@dataclass(eq=False, repr=False)
class DuplicateTaskError(DislockError):
    """A message of the same key is there already; the new one was not sent.

    Attributes:
        key: The key of the lock.
        id: Id of the task that the key is reserved for.
    """

    key: str
    id: str

    def __str__(self) -> str:
        return f"a message of key {self.key!r} is there already: task {plain(self.id)}"


@dataclass(eq=False, repr=False)
class NoResultError(DislockError):
    """``get()`` of a duplicate's result: no result of the first task can come any more.

    Attributes:
        key: The key of the lock.
        id: Id of that task.
        reason: Why no result is expected.
    """

    key: str
    id: str
    reason: str

    def __str__(self) -> str:
        return f"no result of task {plain(self.id)}, whose key is {self.key!r}: {self.reason}"


@dataclass(eq=False, repr=False)
class TaskCrashedError(DislockError):
    """The process of this task has died as often as ``lock_crash_limit`` admits.

    The task is not delivered again.

    Attributes:
        task: Name of the task.
        id: Id of the task.
        times: How often the task's process has died.
        limit: The task's ``lock_crash_limit``.
        reason: What the process died of the last time.
    """

    task: str
    id: str
    times: int
    limit: int
    reason: str

    def __str__(self) -> str:
        return (
            f"task {plain(self.task)}[{plain(self.id)}] is not run again: its process has died as "
            f"often as lock_crash_limit={self.limit} admits, the last time: {plain(self.reason)}"
        )


@dataclass(eq=False, repr=False)
class LaterReleaseError(DislockError):
    """A task's turn or lease was written by a later release, of which no worker took it for a day.

    Attributes:
        key: The key of the lock.
    """

    key: str

    def __str__(self) -> str:
        return (
            f"what this task has of lock {self.key!r} was written by a later release of "
            "celery-dislock: update this worker"
        )


class LockTermsError(LockHeldError):
    """The caller already holds the lock, and tried to take it again on other terms.

    Nothing was changed.  Waiting would never end: the caller would wait for itself.

    Attributes:
        held: The differing terms of the lease that the caller has.
        asked: The same terms, as requested.
    """

    def __init__(self, key: str, holder: str, remaining: float, held: str, asked: str) -> None:
        super().__init__(key, holder, remaining)
        self.args = (key, holder, remaining, held, asked)
        self.held = held
        self.asked = asked

    def __str__(self) -> str:
        if self.holder.startswith(PAUSED):
            return super().__str__()
        return (
            f"lock {self.key!r} is held by {self.holder} with {self.held}, and cannot be taken "
            f"with {self.asked} as well: release it first, or ask for the same terms"
        )


@dataclass(eq=False, repr=False)
class EventLoopError(DislockError, RuntimeError):
    """A blocking lock was used inside a running event loop; no command was sent.

    A thread owns its locks, so all coroutines of the thread would own the lock together.

    Attributes:
        key: The key of the lock.
    """

    key: str

    def __str__(self) -> str:
        return (
            f"lock {self.key!r}: an event loop runs in this thread, and all its coroutines would "
            "own the lock together. With asyncio, use `async with dislock.async_lock(...)`; with "
            "trio, put the whole `with` block into a function, and run that in a thread: "
            "await trio.to_thread.run_sync(function)"
        )


@dataclass(eq=False, repr=False)
class NotOwnerError(DislockError):
    """A lock was released or extended by a caller that does not hold it; nothing was changed.

    Attributes:
        key: The key of the lock.
        holder: Text that names the holder; empty if nobody holds the lock.
        hint: Text that says that the caller has entered the lock elsewhere; empty: it has not.
    """

    key: str
    holder: str
    hint: str = ""

    def __str__(self) -> str:
        if not self.holder:
            return f"lock {self.key!r} is not held"
        text = f"lock {self.key!r} is not held here, but by {self.holder}"
        return f"{text}; {self.hint}" if self.hint else text


@dataclass(eq=False, repr=False)
class LockLostError(DislockError):
    """This process can no longer trust its lease; another execution may hold the lock by now.

    Attributes:
        key: The key of the lock.
        reason: Why the lease was lost: expired, taken over, not renewed in time, or capped.
    """

    key: str
    reason: str

    def __str__(self) -> str:
        return f"lock {self.key!r} is lost: {self.reason}"


@dataclass(eq=False, repr=False)
class SupersededError(DislockError):
    """A newer task of the key waits for this one to end, and starts then.

    Raised in a body that is cancelled.  The newer task does not hold the lock yet.

    Attributes:
        key: The key of the lock.
        by: Id of the newer task.
    """

    key: str
    by: str

    def __str__(self) -> str:
        return f"task {plain(self.by)}, which was sent later, waits for lock {self.key!r}"


@dataclass(eq=False, repr=False)
class StoreError(DislockError):
    """The lock server did not answer, or returned an error.

    The lock may have been taken if only the reply was lost.  Such a lease ends with its expiry at
    the latest.

    Attributes:
        server: The server's URL, without its password.
        reason: What went wrong: the server's message or ours.
        raw: The exception that the Redis client raised; private to this package.  Its text may
            contain a password.  It is therefore not set as the cause, which a traceback would
            show, and not pickled.
    """

    __slots__ = ("raw",)

    server: str
    reason: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.raw: BaseException | None = None

    def __str__(self) -> str:
        return f"lock server {self.server}: {self.reason}"


@dataclass(eq=False, repr=False)
class DamagedLockError(StoreError):
    """A lock's data in Redis was not written by this package, or is damaged.

    A Redis key has another type, or a record cannot be read.  The server and all other locks work.
    This lock cannot be used until somebody has repaired or renamed the key.

    Attributes:
        server: The server's URL, without its password.
        reason: What is wrong, and with which Redis key.
        lock: The lock's name in Redis.  All other Redis keys of the lock begin with it.
    """

    lock: str

    def __str__(self) -> str:
        return (
            f"lock server {self.server}: {self.lock!r} cannot be used: {self.reason}. When its "
            "tasks have ended, rename the key that is wrong"
        )


class ForbiddenError(StoreError):
    """The lock server refuses a command, a script or a key: for everybody, or by its ACL."""


class UnreachableError(StoreError):
    """No connection to the lock server could be made; no command was sent."""


def add_note(exc: BaseException, text: str) -> None:
    """Add a note, like ``BaseException.add_note`` of Python 3.11."""
    notes: list[str] = getattr(exc, "__notes__", [])
    exc.__notes__ = [*notes, text]  # type: ignore[attr-defined]

"""What was done to a lock, in words: for the log, whether a command or the page has done it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.keys.templates import key_of
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from celery_dislock.config.terms import Rate
    from celery_dislock.servers.view import Holder


def freed(name: str, holder: Holder) -> str:
    """Say that a lease was ended."""
    #: WARNING `Command: … on … freed lock … of … (owner …, token …).`: An operator has ended this
    #: lease.
    return f"freed lock {key_of(name)!r} of {_of(holder)}"


def terminated(name: str, holder: Holder) -> str:
    """Say that the workers were told to end a task."""
    #: WARNING `Command: … on … told the workers to end … (owner …, token …), which holds lock ….`:
    #: This task is revoked, and its process gets the signal.
    return f"told the workers to end {_of(holder)}, which holds lock {key_of(name)!r}"


def unreserved(name: str, task_id: str) -> str:
    """Say that a reservation was ended."""
    #: WARNING `Command: … on … ended the reservation of lock … for task ….`: The next message of
    #: the key is sent.
    return f"ended the reservation of lock {key_of(name)!r} for task {task_id!r}"


def dropped(name: str, ticket: str) -> str:
    """Say that a parked task was taken out of its line."""
    #: WARNING `Command: … on … dropped the parked task of ticket … from the line of lock ….`: This
    #: task does not run.
    return f"dropped the parked task of ticket {ticket!r} from the line of lock {key_of(name)!r}"


def log_limit(name: str, limit: int | None, note: str, seconds: float | None = None) -> str:
    """Say that a limit or a pause was set, or taken back."""
    key = repr(key_of(name))
    if limit is None:
        #: WARNING `Command: … on … took back the limit of lock ….`: The limit of the code holds
        #: again.
        return f"took back the limit of lock {key}"
    #: WARNING `Command: … on … limited lock … to … at a time, with the note ….`: Another limit
    #: than the code's holds. -> `celery dislock resume KEY` takes it back.
    #: WARNING `Command: … on … paused lock …, with the note ….`: Nobody takes this lock. -> `celery
    #: dislock resume KEY` takes it back.
    does = f"limited lock {key} to {limit} at a time" if limit else f"paused lock {key}"
    return f"{does}{_noted(seconds, note)}"


def rated(name: str, rate: Rate | None, note: str, seconds: float | None = None) -> str:
    """Say that a rate was set, or that it and a hold-back were taken back."""
    key = repr(key_of(name))
    if rate is None:
        #: WARNING `Command: … on … let lock … be taken as often as the code says.`: The rate of the
        #: code holds again, and the lock is not held back.
        return f"let lock {key} be taken as often as the code says"
    #: WARNING `Command: … on … limited lock … to …, with the note ….`: Another rate than the
    #: code's holds. -> `celery dislock resume KEY` takes it back.
    return f"limited lock {key} to {rate}{_noted(seconds, note)}"


def _noted(seconds: float | None, note: str) -> str:
    lasts = f" for {for_people(seconds)}" if seconds else ""
    return f"{lasts}, with the note {note!r}"


def signed(user: str, why: str) -> str:
    """Return the note of a limit: who set it, and why."""
    return f"by {user}: {why}" if why else f"by {user}"


def _of(holder: Holder) -> str:
    return f"{holder.who!r} (owner {holder.owner!r}, token {holder.token})"

"""What was done to a lock, in words: for the log, whether a command or the page has done it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.servers.view import shown_key
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from celery_dislock.config.terms import Rate
    from celery_dislock.servers.view import Holder


def freed(name: str, holder: Holder) -> str:
    """Say that a lease was ended."""
    return f"freed lock {shown_key(name)!r} of {_of(holder)}"


def terminated(name: str, holder: Holder) -> str:
    """Say that the workers were told to end a task."""
    return f"told the workers to end {_of(holder)}, which holds lock {shown_key(name)!r}"


def unreserved(name: str, task_id: str) -> str:
    """Say that a reservation was ended."""
    return f"ended the reservation of lock {shown_key(name)!r} for task {task_id!r}"


def dropped(name: str, ticket: str) -> str:
    """Say that a parked task was taken out of its line."""
    return f"dropped the parked task of ticket {ticket!r} from the line of lock {shown_key(name)!r}"


def limited(name: str, limit: int | None, note: str, seconds: float | None = None) -> str:
    """Say that a limit or a pause was set, or taken back."""
    key = repr(shown_key(name))
    if limit is None:
        return f"took back the limit of lock {key}"
    does = f"limited lock {key} to {limit} leases" if limit else f"paused lock {key}"
    return f"{does}{_noted(seconds, note)}"


def rated(name: str, rate: Rate | None, note: str, seconds: float | None = None) -> str:
    """Say that a rate was set, or that it and a hold-back were taken back."""
    key = repr(shown_key(name))
    if rate is None:
        return f"let lock {key} be taken as often as the code says"
    return f"limited lock {key} to {rate}{_noted(seconds, note)}"


def _noted(seconds: float | None, note: str) -> str:
    lasts = f" for {for_people(seconds)}" if seconds else ""
    return f"{lasts}, with the note {note!r}"


def signed(user: str, why: str) -> str:
    """Return the note of a limit: who set it, and why."""
    return f"by {user}: {why}" if why else f"by {user}"


def _of(holder: Holder) -> str:
    return f"{holder.who!r} (owner {holder.owner!r}, token {holder.token})"

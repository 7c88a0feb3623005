"""Messages that a body sends under its own task id, held back until its lock is released."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject
from celery.utils.time import maybe_iso8601

from celery_dislock.messages.headers import HELD_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Outbox:
    """
    The retries and replacements that a body sends.

    A retry or replacement that is published at once can start before the body has ended.  It would
    then find the lock held by the task that it continues.

    Attributes:
        held_by: Owner whose lease the retries take over; None if the lease is released.
    """

    def __init__(self) -> None:
        self.held_by: str | None = None
        self._retries: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        self._replacements: list[Callable[[], Any]] = []

    def add_retry(self, apply_async: Callable[..., Any], options: dict[str, Any]) -> None:
        """Hold back a retry of this task."""
        self._retries.append((apply_async, options))

    def add_replacement(self, send: Callable[[], Any]) -> None:
        """Hold back the message that replaces this task."""
        self._replacements.append(send)

    @property
    def retry_in(self) -> float | None:
        """Seconds until the last of the retries is due; None if there are no retries."""
        return max((delay_of(options) for _, options in self._retries), default=None)

    def send(self) -> None:
        """
        Publish all messages.

        Raises:
            Reject: Not all messages could be published; ``Task.retry()`` raises the same.
        """
        try:
            for apply_async, options in self._retries:
                if self.held_by is not None:
                    headers = {**(options.get("headers") or {}), HELD_HEADER: self.held_by}
                    options = {**options, "headers": headers}  # noqa: PLW2901 -- a changed copy
                apply_async(**options)
            for replace in self._replacements:
                replace()
        except Ignore:  # raised by Celery's on_replace()
            pass
        except Exception as exc:
            raise Reject(exc, requeue=False) from exc


def delay_of(options: Mapping[str, Any]) -> float:
    """Return the seconds from now until a message's ETA or countdown; 0 if it has none."""
    return seconds_until(options.get("eta") or options.get("countdown"))


def seconds_until(when: Any) -> float:
    """Return the seconds until a time, which is given as Celery takes it; 0 if it is over."""
    if isinstance(when, str):
        when = maybe_iso8601(when)
    if isinstance(when, datetime):
        now = datetime.now(when.tzinfo or timezone.utc)
        return max(0.0, (when.replace(tzinfo=now.tzinfo) - now).total_seconds())
    return max(0.0, float(when or 0.0))

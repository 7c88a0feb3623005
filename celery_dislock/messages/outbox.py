"""What a body sends under its own task id, kept until its lock is free."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject

from celery_dislock.messages.headers import HELD_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Outbox:
    """
    A body's retries and replacements.

    A retry or a replacement that is published at once can start before the body has ended, and
    meet the lock of the very task that it continues.

    Attributes:
        held_by: Owner whose lease the retries take over; None: the lease is released.
    """

    def __init__(self) -> None:
        self.held_by: str | None = None
        self._retries: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        self._replacements: list[Callable[[], Any]] = []

    def add_retry(self, apply_async: Callable[..., Any], options: dict[str, Any]) -> None:
        """Keep a message of this task for later."""
        self._retries.append((apply_async, options))

    def add_replacement(self, send: Callable[[], Any]) -> None:
        """Keep what takes this task's place for later."""
        self._replacements.append(send)

    @property
    def retry_in(self) -> float | None:
        """Seconds until the last of the retries is due; None where there is none."""
        return max((_delay(options) for _, options in self._retries), default=None)

    def send(self) -> None:
        """
        Publish everything.

        Raises:
            Reject: Not all of it could be; what Celery's own retry makes of that.
        """
        try:
            for apply_async, options in self._retries:
                if self.held_by is not None:
                    headers = {**(options.get("headers") or {}), HELD_HEADER: self.held_by}
                    options = {**options, "headers": headers}  # noqa: PLW2901 -- the body's own stay
                apply_async(**options)
            for replace in self._replacements:
                replace()
        except Ignore:  # what a replacement ends with
            pass
        except Exception as exc:
            raise Reject(exc, requeue=False) from exc


def _delay(options: Mapping[str, Any]) -> float:
    eta = options.get("eta")
    if isinstance(eta, str):
        eta = datetime.fromisoformat(eta)
    if isinstance(eta, datetime):
        now = datetime.now(eta.tzinfo or timezone.utc)
        return max(0.0, (eta.replace(tzinfo=now.tzinfo) - now).total_seconds())
    return max(0.0, float(options.get("countdown") or 0.0))

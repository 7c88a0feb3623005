"""What a task sends under its own id: again for later, or once its lock is free.

A message that is sent again carries notes in its headers; see
:mod:`celery_dislock.messages.headers`.
"""

from __future__ import annotations

import logging
import random
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

from celery_dislock.messages.headers import HELD_HEADER, PUT_OFF_MOST_TIMES, READERS, notes_of
from celery_dislock.redaction import reason_of
from celery_dislock.reporting import told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery import Task
    from celery.app.task import Context

PUT_OFF_FIRST = 1.0  # seconds; doubled each time
PUT_OFF_MOST = 60.0  # seconds
logger = logging.getLogger("celery_dislock")


def put_off(
    task: Task,
    request: Context,
    reason: str,
    *,
    at_most: float = PUT_OFF_MOST,
) -> float:
    """
    Send the task again for later, with all that belongs to it and its own retries unspent.

    The caller ends this delivery, and logs that.
    With the broker away too, a task that was acknowledged early exists nowhere but here: it waits
    in its slot until it can be sent.

    Args:
        task: The task.
        request: Its delivery.
        reason: Why, for the log of a broker that is away.
        at_most: Seconds after which the reason is gone at the latest.

    Returns:
        Seconds from now until its new time.

    Raises:
        Reject: The broker is away, and has the message still: it is to be delivered again.
    """
    notes = notes_of(request)
    backoff = PUT_OFF_FIRST * 2.0 ** min(notes.put_off, 10)
    jitter = random.uniform(0.75, 1.25)  # noqa: S311 -- no secret
    countdown = max(min(backoff, at_most, PUT_OFF_MOST), PUT_OFF_FIRST) * jitter
    notes.put_off = min(notes.put_off + 1, PUT_OFF_MOST_TIMES)
    given = request.as_execution_options()["headers"] or {}
    headers = {name: value for name, value in given.items() if name not in READERS}
    headers.update(notes.to_headers())
    # Celery before 5.7 forgets this one.
    kept = {name: value for name, value in vars(request).items() if name == "ignore_result"}
    signature = task.signature_from_request(
        request, headers=headers, countdown=countdown, retries=request.retries, **kept
    )
    pause = PUT_OFF_FIRST
    while True:
        try:
            signature.apply_async()
            break
        except OperationalError as exc:
            if task.acks_late:  # the broker has the message still
                rejected = Reject(reason_of(exc), requeue=True)
                why = f"its broker, which is away: {reason_of(exc)}; {reason}"
                what = f"is to be delivered again by {why}"
                told(rejected, task.name, request.id, what, level=logging.WARNING)
                raise rejected from None
            logger.error(  # noqa: TRY400 -- the reason says it all, many times over
                "Task %s[%s] cannot be put off, and waits in its slot: the broker is away: %s; %s",
                *(task.name, request.id, reason_of(exc), reason),
            )
        time.sleep(pause)
        pause = min(pause * 2, PUT_OFF_MOST)
    return countdown


def result_is_ignored(task: Task, request: Context) -> bool:
    """Tell whether nobody wants to know what becomes of the delivery."""
    ignores: Any = vars(request).get("ignore_result")  # the class's own False says nothing
    return bool(task.ignore_result if ignores is None else ignores)


class Outbox:
    """
    What a body sends under its own task id, kept until its lock is free.

    A retry or a replacement that is published at once can start before the body has ended, and
    meet the lock of the very task that it continues.

    Attributes:
        held_by: Owner whose lease the retries are to take over; None: it is released.
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

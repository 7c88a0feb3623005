"""Send a task's message only if no other message of its key waits: uniqueness when sending.

Mutual exclusion when running is the guarantee; this saves messages, and gives the caller the result
of the message that is there.  A reservation that is missing never keeps a task from running: if the
lock server is away, the message is sent without one.

The key is reserved for some seconds before the message is published.  When it is published, the
reservation is confirmed for as long as the message may wait.  A sender that dies in between
therefore blocks the key for seconds.  Until a reservation is confirmed, other senders of the key
wait for that, because the message may never come.

All messages of an app are sent by its ``send_task``: ``delay``, ``apply_async``, signatures, beat,
and tasks sent by their name.  So that method is wrapped, by :func:`sending_uniquely`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from functools import wraps
from typing import TYPE_CHECKING, Any

from celery._state import get_current_task
from celery.utils import uuid

from celery_dislock.exceptions import DuplicateTaskError, StoreError
from celery_dislock.keys.names import reserved_lock, reserved_name, task_id_of_reserved
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.headers import SENT_HEADER, UNIQUE_HEADER
from celery_dislock.messages.outbox import delay_of, seconds_until
from celery_dislock.servers.reservations import Reserved, Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery import Celery

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.reservations import Reservations
    from celery_dislock.tasks.guard import Guard

PUBLISH_FOR = 10.0  # seconds in which a message must be published after its key was reserved
WAIT_FOR_OTHER = 1.0  # seconds to wait for a sender that has reserved the key and not published
LOOK_EVERY = 0.01  # seconds between two looks meanwhile
LEAVE_ALONE = 5.0  # seconds for which a lock server that did not answer is not asked again

# A message with one of these is part of a larger work, which a dropped message would lose.
BELONGS_TO_MORE = ("link", "link_error", "chain", "chord", "group_id")

logger = logging.getLogger("celery_dislock")


class Sender:
    """
    Sends the messages of one app's unique tasks.

    Args:
        app: The app.
        send: The app's ``send_task``.
        reservations: Returns the reservations of this process.
        clock: Monotonic clock in seconds.
        pause: Sleeps for the given seconds.
    """

    def __init__(
        self,
        app: Celery,
        send: Callable[..., Any],
        reservations: Callable[[], Reservations],
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._app = app
        self._send = send
        self._reservations = reservations
        self._clock = clock
        self._pause = pause
        self._away_until = 0.0
        self._is_away = False

    def send(self, guard: Guard, name: str, args: Any, kwargs: Any, **options: Any) -> Any:
        """
        Send a message of a unique task, or return the result of the one that is there.

        Raises:
            DuplicateTaskError: A message of the key is there, and ``lock_on_duplicate`` is "raise".
            StoreError: The lock server is away, and ``dislock_on_unavailable`` is "raise".
            Exception: What publishing raises.
        """
        locks = _locks_of(guard, args, kwargs)
        if not locks or self._clock() < self._away_until:
            return marked(self._send(name, args, kwargs, **options))
        task_id = options["task_id"] = options.get("task_id") or uuid()
        lock, encoded_id = reserved_lock(locks), reserved_name(task_id)
        again = is_sent_again(options)
        try:
            found = self._reserve(guard, lock, encoded_id, again=again)
        except StoreError as exc:
            self._unavailable(guard, exc)
            return marked(self._send(name, args, kwargs, **options))
        self._answered()
        if found is None or (again and isinstance(found, Taken)):
            return marked(self._send(name, args, kwargs, **options))
        if isinstance(found, Taken):
            first = task_id_of_reserved(found.id)
            if guard.options.lock_on_duplicate == "raise":
                raise DuplicateTaskError(" + ".join(map(key_of, locks)), first)
            return self._result_of(first, options)
        headers = {**(options.pop("headers", None) or {})}
        headers[UNIQUE_HEADER] = [lock, guard.options.lock_unique_until]
        options = postponed(options, guard.options.lock_replace_for, found.burst)
        try:
            sent = self._send(name, args, kwargs, headers=headers, **options)
        except BaseException:
            with contextlib.suppress(StoreError):  # else it ends after PUBLISH_FOR
                self._reservations().end(lock, encoded_id)
            raise
        with contextlib.suppress(StoreError):
            self._reservations().confirm(lock, encoded_id, _kept_for(guard.options, options))
        return marked(sent)

    def _reserve(
        self, guard: Guard, lock: str, encoded_id: str, *, again: bool
    ) -> Reserved | Taken | None:
        """Reserve the key; None if another sender has reserved it and does not publish."""
        replaces = guard.options.lock_on_duplicate == "replace" and not again
        until = self._clock() + WAIT_FOR_OTHER
        while True:
            found = self._reservations().reserve(lock, encoded_id, PUBLISH_FOR, replaces=replaces)
            if isinstance(found, Reserved) or found.is_sent:
                return found
            if self._clock() >= until:
                return None
            self._pause(LOOK_EVERY)

    def _result_of(self, task_id: str, options: Mapping[str, Any]) -> Any:
        result = (options.get("result_cls") or self._app.AsyncResult)(task_id)
        result.ignored = options.get("ignore_result")  # as Celery does: get() does not wait then
        return marked(result, duplicate=True)

    def _unavailable(self, guard: Guard, error: StoreError) -> None:
        if guard.runtime.settings.dislock_on_unavailable == "raise":
            raise error
        self._away_until = self._clock() + LEAVE_ALONE
        if not self._is_away:
            self._is_away = True
            logger.warning("Messages of unique tasks are sent without reservations: %s", error)

    def _answered(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("Messages of unique tasks are reserved again.")


def sending_uniquely(app: Celery, runtime: Runtime[ParkingProcess]) -> Callable[..., Any]:
    """Wrap an app's ``send_task``, through which all its messages go."""
    send = app.send_task
    positional = list(inspect.signature(send).parameters)[3:]
    sender = Sender(app, send, lambda: runtime.process.quick_store.reservations)

    @wraps(send)
    def send_task(
        name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        options.update(zip(positional, more, strict=False))
        guard = _guard_of(app, name, options.get("task_type"))
        if guard is None:
            return send(name, args, kwargs, **options)
        if guard.options.lock_queue_overflow == "replace":  # in line, the message sent last counts
            headers = options.get("headers") or {}
            options["headers"] = {SENT_HEADER: int(time.time() * 1e6), **headers}
        if guard.options.lock_unique_until is None:
            return send(name, args, kwargs, **options)
        if runtime.off or belongs_to_more(options):
            return marked(send(name, args, kwargs, **options))
        return sender.send(guard, name, args, kwargs, **options)

    return send_task


def _guard_of(app: Celery, name: str, task: Any) -> Guard | None:
    """Return the guard of a task that this app knows, by its name if need be."""
    if task is None and (app.finalized or app.autofinalize):
        task = app.tasks.get(name)
    return getattr(task, "dislock_guard", None)


def marked(result: Any, *, duplicate: bool = False) -> Any:
    """Mark the result of a unique task, so that a caller can always ask whether it is another's."""
    result.duplicate = duplicate
    return result


def is_sent_again(options: Mapping[str, Any]) -> bool:
    """Tell whether a message is sent under the id of a task that exists: a retry, for example."""
    current = get_current_task()
    return bool(
        options.get("retries")
        or options.get("replaced_task_nesting")
        or (current is not None and current.request.id == options.get("task_id"))
    )


def belongs_to_more(options: Mapping[str, Any]) -> bool:
    """Tell whether a message has callbacks, or is a part of a chain, a group or a chord."""
    # The last step of a chain comes with an empty one.  The chain's result is that step's.
    is_a_step = options.get("chain") is not None
    return is_a_step or any(options.get(name) for name in BELONGS_TO_MORE)


def _kept_for(declared: TaskOptions, options: Mapping[str, Any]) -> float:
    """Return the seconds for which a message that was sent keeps its key."""
    kept = declared.lock_unique_for + delay_of(options)
    expires = options.get("expires")
    if expires is None or declared.lock_unique_until == "expiry":
        return kept
    return min(kept, max(seconds_until(expires), PUBLISH_FOR))


def postponed(options: dict[str, Any], replace_for: float | None, burst: float) -> dict[str, Any]:
    """Return the options with an ETA that is no later than *replace_for* allows."""
    delay = delay_of(options)
    if replace_for is None or not delay or burst + delay <= replace_for:
        return options
    return {**options, "eta": None, "countdown": max(0.0, replace_for - burst)}


def _locks_of(guard: Guard, args: Any, kwargs: Any) -> Sequence[str]:
    """Return the names of the task's locks; none if its key cannot be built."""
    try:
        return guard.lock_names(tuple(args or ()), dict(kwargs or {}))
    except Exception as exc:  # noqa: BLE001 -- any error of a user's callable
        logger.warning("A message is sent without a reservation, its key is unknown: %r", exc)
        return ()

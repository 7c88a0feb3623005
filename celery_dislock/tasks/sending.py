"""Send a task's message only if no other message of its key waits: uniqueness when sending.

The guarantee is the lock, which excludes when tasks run.  Uniqueness saves messages, and gives the
caller the result of the message that is there.  A reservation that is missing never keeps a task
from running: if the lock server is away, the message is sent without one.

The key is reserved for some seconds before the message is published.  When it is published, the
reservation is confirmed for as long as the message may wait.  A sender that dies in between
therefore blocks the key for seconds.  Until a reservation is confirmed, its message may never
come, so other senders of the key wait a moment for the confirmation.

All messages of an app are sent by its ``send_task``: ``delay``, ``apply_async``, signatures, beat,
and tasks sent by their name.  An eager task is run by its ``apply``.  Both come here; see
:mod:`celery_dislock.hooks`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections import OrderedDict
from functools import lru_cache, partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app.task import Context
from celery.result import EagerResult
from celery.utils import uuid

from celery_dislock.clock import monotonic
from celery_dislock.config.values import LONGEST
from celery_dislock.exceptions import (
    DamagedLockError,
    DislockError,
    DuplicateTaskError,
    SettingsError,
    StoreError,
)
from celery_dislock.keys.names import reserved_lock, reserved_name
from celery_dislock.locks.interruption import THROWN
from celery_dislock.messages.delivery import (
    Delivery,
    delay_of,
    outbox_of,
    running_as,
    running_request,
    seconds_until,
)
from celery_dislock.messages.headers import (
    SENT,
    UNIQUE,
    notes_in,
    notes_of,
    reservation_of,
    with_notes,
    with_reservation,
)
from celery_dislock.messages.message import AS_IT_CAME
from celery_dislock.messages.resending import (
    REPLACEMENTS,
    in_time,
    numbered,
    postponed,
    retry_options,
)
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.reservations import (
    NO_RESERVATION,
    OwnReservation,
    Reservation,
    Reserved,
    Taken,
)
from celery_dislock.servers.server import Outage
from celery_dislock.signals import task_deduplicated
from celery_dislock.tasks.duplicates import FirstMessage, duplicate_of
from celery_dislock.tasks.received import UNCHANGED
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from celery import Celery, Task

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.tasks.guard import Guard

PUBLISH_FOR = 10.0  # seconds in which a message must be published after its key was reserved
WAIT_FOR_OTHER = 1.0  # seconds to wait for a sender that has reserved the key and not published
LOOK_EVERY = 0.01  # seconds between two looks at the key during this wait
LEAVE_ALONE = 5.0  # seconds for which a lock server that did not answer is not asked again
SENT_MOST = 1000  # messages that a process remembers, to free their keys when it revokes them
WARNED_MOST = 1000  # locks that are remembered as warned of

# A message with one of these is part of a larger work, which a dropped message would lose.
BELONGS_TO_MORE = ("link", "link_error", "chain", "chord", "group_id")

#: WARNING: The lock server did not answer when a message was revoked, dropped, or ran where locks
#: are off. -> If messages of the key are missed: `celery dislock free --reservation KEY`.
STAYS = "A key may stay reserved until its reservation expires: %s"

logger = logging.getLogger("celery_dislock")


class Sending(NamedTuple):
    """
    A guarded task that is about to be sent, or run eagerly.

    Attributes:
        app: The app that sends it.
        task: The task.
        guard: Its guard.
        args: Its arguments.
        kwargs: Its keyword arguments.
        publish: Publishes the message, or runs the task, and returns its result.
        eager: Whether *publish* runs the task.
    """

    app: Celery
    task: Task
    guard: Guard
    args: Any
    kwargs: Any
    publish: Callable[..., Any]
    eager: bool = False

    def send(self, options: dict[str, Any]) -> Any:
        """Send the message, or run the task; *options* are those of *publish*, and are changed."""
        options.pop(AS_IT_CAME, None)  # Celery copies delivery_info into a retry
        task_id = options.get("task_id")
        request = None if task_id is None or self.eager else running_request(self.task)
        if request is None or request.id != task_id:
            return self._send(**options)
        # Task.retry(), for example.
        if options.get("replaced_task_nesting", 0) == request.replaced_task_nesting:
            options = retry_options(self.app, options, request)
        outbox = outbox_of(self.task)
        if outbox is None:
            return self._send(**options)
        # Held back until the lock is released.
        outbox.retries.append((self._send, options, partial(self.locks, options)))
        return self.app.AsyncResult(task_id)

    def _send(self, **options: Any) -> Any:
        declared = self.guard.options
        # With this option, the message that was sent last counts, so each says when it was sent.
        if declared.lock_queue_overflow == "replace":
            given = dict(options.get("headers") or {})  # Celery takes pairs, too
            running = Delivery.of(running_request(self.task))
            again = running is not None and running.id == options.get("task_id")
            first = running.notes.sent if running is not None and again else 0
            begins = time.time() + delay_of(options)  # a message counts as sent at its ETA
            sent = {SENT: first or int(begins * 1e6), **notes_in(given)}
            options["headers"] = with_notes(given, sent)
        if declared.lock_unique_until is None:
            return self.send_now(options)
        task_id = options.get("task_id")
        request = None if task_id is None else running_as(task_id)
        is_numbered = bool(options.get("retries") or options.get(REPLACEMENTS))
        again = request is not None or is_numbered
        # The last step of a chain has an empty "chain".  Its result is the result of the chain.
        is_a_step = options.get("chain") is not None
        belongs_to_more = is_a_step or any(map(options.get, BELONGS_TO_MORE))
        if belongs_to_more or self.guard.runtime.off or (self.eager and again):
            return self.send_now(options, "" if again else "unreserved")
        sender = sender_of(self.app)
        if not again:
            return sender.send(self, options)
        return sender.send_again(self, options, request or Context(options.get("headers") or {}))

    def send_now(self, options: dict[str, Any], outcome: str = "") -> Any:
        """Publish the message, or run the task; report *outcome* to those who watch, if given."""
        if outcome:
            self.count_as(outcome)
        if not self.eager and any(map(options.get, ("eta", "countdown", REPLACEMENTS))):
            options = numbered(in_time(self.app, options))
        return self.publish(**options)

    def has_result(self, options: Mapping[str, Any]) -> bool:
        """Tell whether the result of the task is stored."""
        ignored = options.get("ignore_result")
        return not (self.task.ignore_result if ignored is None else ignored)

    def locks(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the task's locks; none if its key cannot be built."""
        try:
            args, kwargs = tuple(self.args or ()), dict(self.kwargs or {})
            sent_with = ""  # no serializer changes plain arguments
            if not UNCHANGED.issuperset(map(type, (*args, *kwargs.values()))):
                usual = self.task.serializer if self.eager else self.app.conf.task_serializer
                sent_with = options.get("serializer") or usual
            return self.guard.runtime.lock_names(self.guard.keys(args, kwargs, sent_with))
        except THROWN:
            raise
        except Exception as exc:  # noqa: BLE001 -- any error of a user's callable
            #: WARNING: The `lock_key` cannot be built from these arguments; the task will fail with
            #: a LockKeyError. -> Correct the call.
            logger.warning(
                "A message is sent without a reservation, its key is unknown: %s", plain(repr(exc))
            )
            return ()

    def count_as(self, outcome: str) -> None:
        """Tell those who watch what became of the message."""
        with contextlib.suppress(SettingsError):  # it has no lock server
            channel = self.guard.runtime.process.channel
            if channel.watched:
                channel.message(self.guard.name, outcome)


class Sender:
    """
    Sends the messages of one app's unique tasks.

    Args:
        app: The app.
        runtime: What the locks of the app share.
        clock: Monotonic clock in seconds.
        pause: Sleeps for the given seconds.
    """

    def __init__(
        self,
        app: Celery,
        runtime: Runtime[ParkingProcess],
        *,
        clock: Callable[[], float] = monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._app = app
        self._runtime = runtime
        self._clock = clock
        self._pause = pause
        self._away_until = 0.0
        self._outage = Outage()
        # By task id: what is reserved for a message, and the result if its task was eager.
        self._sent: OrderedDict[str, tuple[Reservation, Any]] = OrderedDict()

    def send(self, sending: Sending, options: dict[str, Any]) -> Any:
        """
        Send a message of a unique task, or return the result of the one that is there.

        Args:
            sending: The message.
            options: The options that publishing it takes.

        Raises:
            DuplicateTaskError: A message of the key is there, and ``lock_on_duplicate`` is "raise".
            StoreError: The lock server is away, and ``dislock_on_unavailable`` is "raise".
            Exception: What publishing raises.
        """
        declared, locks = sending.guard.options, sending.locks(options)
        if not locks or self._clock() < self._away_until:
            return sending.send_now(options, "unreserved")
        is_known = bool(options.get("task_id"))
        task_id = options["task_id"] = options.get("task_id") or uuid()
        until, lock = str(declared.lock_unique_until), reserved_lock(locks)
        wanted = Reservation(lock, reserved_name(task_id), until, PUBLISH_FOR)
        found = self._reserve(sending, wanted, options, is_known=is_known)
        if isinstance(found, Taken) and found.is_sent:
            sending.count_as("duplicate")
            first = FirstMessage(
                sending.guard, locks, wanted._replace(id=found.id), found.has_result
            )
            return self._duplicate(sending, first, options)
        if not isinstance(found, Reserved):
            return sending.send_now(options, "unreserved")
        if declared.lock_replace_for is not None:
            options = postponed(options, declared.lock_replace_for - found.burst)
        result = self._publish(sending, options, wanted, found)
        sending.count_as("sent")
        return result

    def send_again(self, sending: Sending, options: dict[str, Any], request: Context) -> Any:
        """
        Send a message under the id of a task that exists, as a retry.  It is never a duplicate.

        A task has one reservation at a time.  That of the message takes the place of that which
        the task has, also if it is of another key: the new one is reserved first, and then the old
        one ends.  If the new key is another task's, the message keeps the old one.

        Args:
            sending: The message.
            options: The options that publishing it takes.
            request: The request of the task; if it does not run here, the message's headers.

        Raises:
            StoreError, Exception: As for :meth:`send`.
        """
        own = own_reservation(self._app, request)
        stated, before = own.stated, own.live
        if stated is not None:
            options["headers"] = with_reservation(options.get("headers"), stated)
        task_id = reserved_name(options["task_id"])
        until = str(sending.guard.options.lock_unique_until)
        locks = sending.locks(options)
        wanted_locks = [reserved_lock(locks)] if locks else []
        if wanted_locks and before is not None:
            wanted_locks.append(before.lock)
        for lock in dict.fromkeys(wanted_locks):
            known = (stated.mark, stated.number) if stated and stated.lock == lock else ()
            wanted = Reservation(lock, task_id, until, PUBLISH_FOR, *known)
            is_away = self._clock() < self._away_until
            found = None if is_away else self._reserve(sending, wanted, options, again=True)
            if isinstance(found, Reserved):
                result = self._publish(sending, options, wanted, found)
                break
        else:
            lock, result = before.lock if before else "", sending.send_now(options)
        own.hand_on(lock)
        return result

    def _publish(
        self, sending: Sending, options: dict[str, Any], wanted: Reservation, found: Reserved
    ) -> Any:
        """Publish the message, or run the task; confirm its reservation, or end it on failure."""
        reserved = wanted._replace(
            ttl=_kept_for(sending.guard.options, options), mark=found.mark, number=found.number
        )
        options["headers"] = with_reservation(options.get("headers"), reserved)
        self._remember(options["task_id"], reserved)
        # If the lock server does not answer, the reservation ends after PUBLISH_FOR.
        reservations = self._runtime.process.quick_store.reservations
        if sending.eager:
            with contextlib.suppress(StoreError):
                reservations.confirm(reserved)
        try:
            result = sending.send_now(options)
        except BaseException:
            with contextlib.suppress(StoreError):
                reservations.end_waiting(reserved._replace(until="end"))
            raise
        with contextlib.suppress(StoreError):
            if not sending.eager:
                reservations.confirm(reserved)
            else:  # only if the task has not begun: a test may have patched apply()
                reservations.end_waiting(reserved._replace(until="end"))
        is_its = isinstance(result, EagerResult) and result.id == options["task_id"]
        if is_its and reserved.until == "expiry":
            self._remember(result.id, reserved, result)
        return result

    def _reserve(
        self,
        sending: Sending,
        wanted: Reservation,
        options: Mapping[str, Any],
        *,
        is_known: bool = True,
        again: bool = False,
    ) -> Reserved | Taken | None:
        """Reserve the key; None: the server is away, or a later release has reserved the key."""
        on_duplicate, due_in = sending.guard.options.lock_on_duplicate, None
        if on_duplicate == "sooner":
            due_in = 0.0 if sending.eager else max(0.0, min(delay_of(options), LONGEST))
        try:
            reserve = partial(
                self._runtime.process.quick_store.reservations.reserve,
                *(wanted, token_hex(8)),
                replaces=on_duplicate in {"replace", "sooner"},
                due_in=due_in,
                has_result=sending.has_result(options),
                is_known=is_known,
                again=again,
            )
            found, until = reserve(), self._clock() + WAIT_FOR_OTHER
            while isinstance(found, Taken) and not (again or found.is_sent):
                if self._clock() >= until:
                    break
                self._pause(LOOK_EVERY)
                found = reserve()
        except (SettingsError, StoreError) as exc:  # the former: this process has no lock server
            self._unavailable(sending.guard, exc)
            return None
        if found is None:
            _warn_of_later(wanted.lock)
        if self._away_until and self._outage.ends(took=isinstance(found, Reserved)):
            #: INFO: The lock server answers again.
            logger.info("Messages of unique tasks are reserved again.")
        return found

    def _duplicate(self, sending: Sending, first: FirstMessage, options: Mapping[str, Any]) -> Any:
        task_deduplicated.send(sender=sending.task, key=first.key, task_id=first.id)
        if sending.guard.options.lock_on_duplicate == "raise":
            raise DuplicateTaskError(first.key, first.id)
        known, result = self._sent.get(first.id, (None, None))
        if result is not None:  # the first was eager, and ran in this process
            again = copy.copy(result)
            again.duplicate = True
            return again
        if known is None:
            self._remember(first.id, first.reserved)
        result = duplicate_of(options.get("result_cls") or self._app.AsyncResult, first)
        result.ignored = not sending.has_result(options)  # get() does not wait then, as in Celery
        return result

    def _remember(self, task_id: str, reserved: Reservation, result: Any = None) -> None:
        if len(self._sent) >= SENT_MOST:
            with contextlib.suppress(KeyError):  # other threads take from it, too
                self._sent.popitem(last=False)
        self._sent[task_id] = (reserved, result)

    def revoked(self, task_ids: Iterable[str]) -> None:
        """Free the keys of messages that this process has sent and revokes now."""
        for task_id in task_ids:
            reserved, _ = self._sent.pop(task_id, (None, None))
            if reserved is not None:
                self.tell("end_waiting", reserved)

    def tell(self, what: str, reservation: Reservation) -> None:
        """Call this method of Reservations, unless the server is away; logs a DislockError."""
        if self._clock() < self._away_until:
            return
        try:
            getattr(self._runtime.process.quick_store.reservations, what)(reservation)
        except DislockError as exc:
            if not isinstance(exc, DamagedLockError):
                self._away_until = self._clock() + LEAVE_ALONE
            logger.warning(STAYS, exc)

    def _unavailable(self, guard: Guard, error: DislockError) -> None:
        if guard.runtime.settings.dislock_on_unavailable == "raise":
            raise error
        if isinstance(error, DamagedLockError):  # the server answers, and other keys are well
            #: WARNING: Another program has written under the lock's name. -> When its tasks
            #: have ended, rename the key that the line names.
            logger.warning("A message is sent without a reservation: %s", error)
            return
        self._away_until = self._clock() + LEAVE_ALONE
        if self._outage.begins(error):
            #: WARNING: The lock server is away; a key may have several messages meanwhile. -> Check
            #: the lock server.
            logger.warning("Messages of unique tasks are sent without reservations: %s", error)


@lru_cache(WARNED_MOST)
def _warn_of_later(lock: str) -> None:
    #: WARNING: A key may have several messages meanwhile; once per process and lock. -> Update this
    #: process.
    logger.warning(
        "Messages of lock %s are sent without a reservation: that which is there was written by a "
        "later release of celery-dislock: update this process.",
        lock,
    )


def sender_of(app: Celery) -> Sender:
    """Return the sender of an app; each app has its own."""
    sender: Sender | None = app.__dict__.get("_dislock_sender")
    if sender is None:
        sender = app.__dict__.setdefault("_dislock_sender", Sender(app, runtime_of(app)))
    return sender


def own_reservation(app: Celery, request: Context) -> OwnReservation:
    """
    Return the reservation of a request's message; one that no guard has made logs a DislockError.

    Args:
        app: The app of this process.
        request: The request of a delivery, or one that was made of a message's headers.
    """
    delivery = Delivery.of(request)
    if delivery is not None:
        return delivery.reservation or NO_RESERVATION
    own = vars(request).get("dislock_reservation")
    if isinstance(own, OwnReservation):  # not a header of that name
        return own
    if UNIQUE not in notes_of(request):
        return NO_RESERVATION
    try:
        stated = reservation_of(request, runtime_of(app).process.settings.dislock_prefix)
    except DislockError as exc:  # this process has no lock server
        logger.warning(STAYS, exc)
        return NO_RESERVATION
    own = request.dislock_reservation = OwnReservation(stated, sender_of(app).tell)
    return own


def _kept_for(declared: TaskOptions, options: Mapping[str, Any]) -> float:
    """Return the seconds for which the key stays reserved for a message that was sent."""
    kept = declared.lock_unique_for
    if options.get("eta") or options.get("countdown"):
        kept = min(kept + delay_of(options), LONGEST)
    expires = options.get("expires")
    if expires is None or declared.lock_unique_until == "expiry":
        return kept
    return min(kept, max(seconds_until(expires), 0.001))

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

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from celery._state import get_current_task
from celery.app.task import Context

from celery_dislock.messages.delivery import Delivery, delay_of, running_request, traced
from celery_dislock.messages.headers import SENT, notes_in, with_notes
from celery_dislock.messages.message import AS_IT_CAME
from celery_dislock.messages.resending import REPLACEMENTS, retried
from celery_dislock.tasks.reserving import sender_of

if TYPE_CHECKING:
    from celery import Task

    from celery_dislock.tasks.reserving import Sending

# A message with one of these is part of a larger work, which a dropped message would lose.
BELONGS_TO_MORE = ("link", "link_error", "chain", "chord", "group_id")


def send(sending: Sending, options: dict[str, Any]) -> Any:
    """Send the message, or run the task; *options* are those of ``publish``, and are changed."""
    options.pop(AS_IT_CAME, None)  # Celery copies delivery_info into a retry
    task_id = options.get("task_id")
    request = None if task_id is None or sending.eager else running_request(sending.task)
    if request is None or request.id != task_id:
        return _send(sending, **options)
    # Task.retry(), for example.
    if options.get("replaced_task_nesting", 0) == request.replaced_task_nesting:
        options = retried(sending.app, options, request)
    outbox = outbox_of(sending.task)
    if outbox is None:
        return _send(sending, **options)
    # Held back until the lock is released.
    outbox.retries.append((partial(_send, sending), options, partial(sending.locks, options)))
    return sending.app.AsyncResult(task_id)


def _send(sending: Sending, **options: Any) -> Any:
    declared = sending.guard.options
    # With these options, the message that was sent last counts, so each says when it was sent.
    if declared.lock_queue_overflow == "replace" or declared.cancels:
        given = dict(options.get("headers") or {})  # Celery takes pairs, too
        running = Delivery.of(running_request(sending.task))
        again = running is not None and running.id == options.get("task_id")
        first = running.notes.sent if running is not None and again else 0
        begins = time.time() + delay_of(options)  # a message counts as sent at its ETA
        sent = {SENT: first or int(begins * 1e6), **notes_in(given)}
        options["headers"] = with_notes(given, sent)
    if declared.lock_unique_until is None:
        return sending.send_now(options)
    task_id = options.get("task_id")
    request = None if task_id is None else _running(task_id)
    is_numbered = bool(options.get("retries") or options.get(REPLACEMENTS))
    again = request is not None or is_numbered
    # The last step of a chain has an empty "chain".  Its result is the result of the chain.
    is_a_step = options.get("chain") is not None
    belongs_to_more = is_a_step or any(map(options.get, BELONGS_TO_MORE))
    if belongs_to_more or sending.guard.runtime.off or (sending.eager and again):
        return sending.send_now(options, "" if again else "unreserved")
    sender = sender_of(sending.app)
    if not again:
        return sender.send(sending, options)
    return sender.send_again(sending, options, request or Context(options.get("headers") or {}))


def outbox_of(task: Task) -> Any:
    """Return the outbox of the running body; None if no body runs, or if the task is eager."""
    delivery = Delivery.of(running_request(task))
    return delivery.outbox if delivery is not None and not delivery.is_eager else None


def _running(task_id: Any) -> Context | None:
    """Return the request of the task that runs here, if it has this id."""
    running = get_current_task() or traced.get()
    return running.request if running and running.request.id == task_id else None

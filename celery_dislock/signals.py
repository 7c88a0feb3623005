"""Signals that a lock sends.

Connect a receiver as for any Celery signal::

    from celery_dislock.signals import lock_lost

    @lock_lost.connect
    def page_someone(sender, lease, reason, **kwargs): ...

The sender is the task, or the :class:`~celery_dislock.ReentrantLock` in plain Python.
Receivers of ``lock_renewed``, ``lock_lost``, ``lock_capped`` and ``lock_superseded`` mostly run in
the watchdog's thread or greenlet, so keep them short.  No signal is sent when a dead process's
lease is released by another process.  An exception of a receiver is logged by Celery's dispatcher,
and changes nothing else.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = [
    "lock_acquired",
    "lock_conflict",
    "lock_renewed",
    "lock_lost",
    "lock_capped",
    "lock_superseded",
    "lock_released",
    "task_deduplicated",
]

#: The lock was taken; before the body.
lock_acquired = Signal(name="lock_acquired", providing_args={"lease"})
#: A task found its lock held, whatever its strategy; once per delivery.
lock_conflict = Signal(name="lock_conflict", providing_args={"conflict", "task_id"})
#: The lease was renewed.
lock_renewed = Signal(name="lock_renewed", providing_args={"lease"})
#: The lease can no longer be trusted, which ``reason`` explains; once per lease.
lock_lost = Signal(name="lock_lost", providing_args={"lease", "reason"})
#: ``max_renew_times`` renewals are done; once per lease.
lock_capped = Signal(name="lock_capped", providing_args={"lease"})
#: A newer task waits (``lease.superseded``), and the body was told of it; once per lease.
lock_superseded = Signal(name="lock_superseded", providing_args={"lease"})
#: The lease is over; after the body. If ``expiring``, it is left to expire.
lock_released = Signal(name="lock_released", providing_args={"lease", "expiring"})
#: A message of the task was not sent, as that of task ``task_id`` reserves its ``key``.
task_deduplicated = Signal(name="task_deduplicated", providing_args={"key", "task_id"})

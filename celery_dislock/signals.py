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

===================  =================================================================
signal               arguments
===================  =================================================================
``lock_acquired``    ``lease``
``lock_conflict``    ``conflict``: key, holder and remaining seconds; ``task_id``; for tasks only
``lock_renewed``     ``lease``, sent after each renewal
``lock_lost``        ``lease``, ``reason``; once per lease
``lock_capped``      ``lease``; once per lease, when ``max_renew_times`` renewals are done
``lock_superseded``  ``lease``; once per lease, when a newer task waits for it to end
``lock_released``    ``lease``, ``expiring``: True if the lease is left to expire
===================  =================================================================
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
]

lock_acquired = Signal(name="lock_acquired", providing_args={"lease"})
lock_conflict = Signal(name="lock_conflict", providing_args={"conflict", "task_id"})
lock_renewed = Signal(name="lock_renewed", providing_args={"lease"})
lock_lost = Signal(name="lock_lost", providing_args={"lease", "reason"})
lock_capped = Signal(name="lock_capped", providing_args={"lease"})
lock_superseded = Signal(name="lock_superseded", providing_args={"lease"})
lock_released = Signal(name="lock_released", providing_args={"lease", "expiring"})

"""Stop a running body when its lease ends, if the task's options ask for that."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

from billiard import current_process

from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.interruption import TaskTarget, running_here
from celery_dislock.servers.bridge import wait_again
from celery_dislock.servers.records import in_words

if TYPE_CHECKING:
    from types import FrameType

    from celery_dislock.locks.lease import Lease

STOPPING = {"raise", "terminate"}  # actions that stop a body
KILL_AFTER = 1.0  # seconds for the body to stop before its pool process is killed

logger = logging.getLogger("celery_dislock")


def is_pool_process() -> bool:
    """Return whether this is a process of a prefork pool."""
    return bool(current_process().name != "MainProcess")


class StopTask(BaseException):
    """Thrown into a body to terminate it; ``except Exception`` does not catch it."""

    def __init__(self, error: LockLostError) -> None:
        super().__init__(error)
        self.error = error


class Running:
    """
    A running body, which is stopped when its lease ends if the options ask for that.

    Args:
        lease: The lease.
        block: See :func:`running_here`.

    Attributes:
        target: What is interrupted.
    """

    def __init__(self, lease: Lease, block: FrameType | None = None) -> None:
        self._lease = lease
        self.target = running_here(block)
        self._mutex = threading.Lock()
        self._ended = False
        lease.on_end = self._stop

    def begin(self) -> None:
        """
        Check just before the body starts that its lease has not ended already.

        Raises:
            LockLostError: The lease has ended, and the options ask to stop the body then.  The
                body must not run.
        """
        lease = self._lease
        options = lease.driver.options
        action = options.lock_on_lost if lease.lost else options.lock_on_cap
        if (lease.lost or lease.capped) and action in STOPPING:
            raise LockLostError(lease.key, lease.why_ended)

    def took_back(self, exc: BaseException) -> bool:
        """
        Take back the cancellation by which the end of the lease has stopped a coroutine.

        Returns:
            Whether *exc* was that cancellation, and the coroutine was not cancelled otherwise.
        """
        if isinstance(self.target, TaskTarget) and self.target.settle(exc):
            wait_again()
            return True
        return False

    def end(self) -> None:
        """End the interruptions, because the body has ended; nothing is thrown after this call."""
        with self._mutex:
            self._ended = True
        self.target.disarm()

    def _stop(self, lease: Lease, action: str) -> None:
        if action not in STOPPING:
            return
        error = LockLostError(lease.key, lease.why_ended)
        if action == "raise":
            self.target.throw(error)
            return
        self.target.throw(StopTask(error))
        if is_pool_process():
            killer = threading.Timer(KILL_AFTER, self._kill, (lease,))
            killer.daemon = True
            killer.start()

    def _kill(self, lease: Lease) -> None:
        with self._mutex:
            if not self._ended:
                logger.error(
                    "Killing process %d: %s does not stop, and its lease of lock %r has ended: %s.",
                    *(os.getpid(), in_words(lease.holder), lease.key, lease.why_ended),
                )
                os.kill(os.getpid(), signal.SIGKILL)

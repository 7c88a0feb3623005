"""The locks of tasks, for plain Python: web views, scripts, and the inside of a task's body.

The owner is a thread, or a greenlet, of one process.  It may take a lock that it has once more, as
with :class:`threading.RLock`, and releases it as often as it took it; how often is counted here,
without a round trip.  All objects for one key count together.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from celery_dislock.claims import Claim, Conflict, in_words
from celery_dislock.exceptions import LockHeldError, LockLostError, NotOwnerError
from celery_dislock.leases import Lease
from celery_dislock.runtime import Held

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from celery_dislock.answers import Holding
    from celery_dislock.options import TaskOptions
    from celery_dislock.runtime import Runtime


class ReentrantLock:
    """
    A lock that the thread which takes it owns.  Made by :meth:`celery_dislock.Dislock.lock`.

    Use it in a ``with`` block, which waits for the lock and gives its lease::

        with dislock.lock("export:7") as lease:
            ...
            lease.ensure_held()

    Attributes:
        keys: What the lock is about; several are taken all together.
    """

    def __init__(
        self, keys: Sequence[str], options: TaskOptions, runtime: Runtime, *, fair: bool
    ) -> None:
        self.keys = tuple(keys)
        self._options = options
        self._runtime = runtime
        self._fair = fair

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:  # noqa: FBT001, FBT002 -- as threading's
        """
        Take the lock; blocks until it is free, for *timeout* seconds at most.

        Args:
            blocking: False: do not wait.
            timeout: Seconds to wait, >= 0; None: for as long as it takes.

        Returns:
            Whether the lock is held now; once more, where this thread held it before.

        Raises:
            ValueError: A timeout that is negative, or given though nothing waits.
            LockLostError: This thread held the lock before, and has lost it.
            LockHeldError: This thread holds one of several keys by another lock, and would wait
                for itself.
            StoreError: The lock server did not answer.  The lock may have been taken; if so it
                frees itself after its timeout.
        """
        if timeout is not None and (not blocking or timeout < 0):
            raise ValueError("give a timeout of 0 or more, and only where the call blocks")
        return isinstance(self._take(blocking=blocking, timeout=timeout), Lease)

    def try_acquire(self) -> Lease | Conflict:
        """
        Take the lock if it is free.  Never waits; one round trip, none where it is held already.

        Returns:
            The lease, or the conflict: who holds the lock, and for how much longer.

        Raises:
            LockLostError: This thread held the lock before, and has lost it.
            StoreError: As for :meth:`acquire`.
        """
        return self._take(blocking=False, timeout=None)

    def release(self) -> None:
        """
        Undo one acquisition of this thread; with the last one the lock is free.

        Raises:
            NotOwnerError: This thread does not hold the lock.
            StoreError: It does not, and the lock server did not say who does.
        """
        held = self._held
        if held is None:
            raise self._not_owner()
        held.depth -= 1
        if held.depth == 0:
            try:
                held.claim.settle()
            finally:
                del self._held_here[self.keys]

    def extend(self) -> None:
        """
        Renew the lease now; one round trip.  The watchdog does so by itself.

        Raises:
            NotOwnerError: This thread does not hold the lock.
            LockLostError: Nor does it any more on the lock server.
            StoreError: The lock server did not answer; the lease is what it was before.
        """
        lease = self.lease
        if lease is None:
            raise self._not_owner()
        lease.ensure_held()
        if not lease.renew():
            raise LockLostError(self.key, lease.why_ended)

    @property
    def lease(self) -> Lease | None:
        """The lease of this thread; None where it does not hold the lock."""
        held = self._held
        return held.claim.lease if held is not None else None

    def locked(self) -> bool:
        """
        Tell whether anybody holds the lock, or one of its keys; a round trip for each.

        Raises:
            StoreError: The lock server did not answer.
        """
        return bool(self.holders())

    def holders(self) -> list[Holding]:
        """
        Tell who holds the lock: owner, remaining seconds, token, mode and holder of each lease.

        Of several keys, those of the first come first.

        Raises:
            StoreError: The lock server did not answer.
        """
        store = self._runtime.process.store
        return [
            held for name in self._runtime.lock_names(self.keys) for held in store.holders(name)
        ]

    def __enter__(self) -> Lease:
        answer = self._take(blocking=True, timeout=None)
        if isinstance(answer, Conflict):  # without a timeout there is none
            raise answer.error()
        return answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<ReentrantLock {self.key!r}: {self.lease or 'not held by this thread'}>"

    @property
    def key(self) -> str:
        """The key, or all of them, as a message names them."""
        return " + ".join(self.keys)

    @property
    def _held_here(self) -> dict[tuple[str, ...], Held]:
        return self._runtime.process.held_here

    @property
    def _held(self) -> Held | None:
        return self._held_here.get(self.keys)

    def _take(self, *, blocking: bool, timeout: float | None) -> Lease | Conflict:
        held = self._held
        if held is not None and held.claim.lease is not None:
            held.claim.lease.ensure_held()
            held.depth += 1
            return held.claim.lease
        if blocking:
            self._refuse_to_wait_for_itself()
        process = self._runtime.process
        thread = threading.current_thread()
        host = socket.gethostname()
        claim = Claim(
            process.owner_name(f"{host}:{process.pid}:{threading.get_ident()}/"),
            {"thread": thread.name, "worker": host, "pid": process.pid},
            sender=self,
        )
        lock = self._runtime.lock(self.keys, self._options)
        try:
            if blocking:
                answer = lock.acquire(claim, timeout=timeout, fair=self._fair)
            else:
                answer = lock.try_acquire(claim, fair=self._fair)
            if isinstance(answer, Lease):
                self._held_here[self.keys] = Held(claim)
        except BaseException:
            claim.settle()
            raise
        return answer

    def _refuse_to_wait_for_itself(self) -> None:
        for keys, held in self._held_here.items():
            common = set(keys).intersection(self.keys)
            if common and held.claim.lease is not None:
                raise LockHeldError(min(common), "this very thread", held.claim.lease.remaining)

    def _not_owner(self) -> NotOwnerError:
        holders = self.holders()
        return NotOwnerError(self.key, ", ".join(in_words(h.holder) for h in holders))

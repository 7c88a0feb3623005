"""Notice when an outage of a lock server begins and ends, so that each is logged once."""

from __future__ import annotations

from celery_dislock.exceptions import StoreError
from celery_dislock.servers.connections import is_answer


class Outage:
    """The outage of a server, if there is one."""

    def __init__(self) -> None:
        self._lasts = False
        self._refuses = False  # while it lasts: the server answers, with an error

    def begins(self, error: Exception | None = None) -> bool:
        """Take note of a failure, and of its error; return whether it is the first in a row."""
        self._refuses = isinstance(error, StoreError) and is_answer(error)
        first, self._lasts = not self._lasts, True
        return first

    def ends(self, *, took: bool = True) -> bool:
        """
        Take note of an answer; return whether that ends an outage.

        Args:
            took: Whether something free was taken.  If not, a server that refused it may still do
                so: one without memory answers what it reads, and goes on with what it has.
        """
        ends = self._lasts and (took or not self._refuses)
        self._lasts = self._lasts and not ends
        return ends

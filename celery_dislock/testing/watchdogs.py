"""The watchdogs of the processes of a test, whose time the test drives."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.config.urls import without_password
from celery_dislock.locks.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.servers.store import Store
    from celery_dislock.testing import DislockServer

OPEN: list[DislockServer] = []  # the newest last


class DrivenWatchdog(Watchdog):
    """A watchdog that a test finds, and whose time it drives."""

    def __init__(self, store: Store, **options: Any) -> None:
        server = [server for server in OPEN if without_password(server.url) == store.server] or OPEN
        clock = server[-1]._server.clock  # noqa: SLF001 -- of this module
        super().__init__(store, clock=clock or monotonic, **options)
        server[-1]._watchdogs.add(self)  # noqa: SLF001
        self._is_driven = False

    def start(self) -> None:
        """Start the thread, unless a test does its work."""
        if not self._is_driven:
            super().start()

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Let the test do the work of the thread: both at once would renew a lease twice."""
        ran = self.wakes_at < FOREVER
        self._is_driven = True
        self.stop()
        try:
            yield
        finally:
            self._is_driven = False
            if ran or len(self):
                self.start()

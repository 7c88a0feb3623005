"""A store of event loops, for tests that are written for one that blocks."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

from celery_dislock.servers.bridge import run_on_loop
from celery_dislock.servers.loop_connection import ON_LOOP
from celery_dislock.servers.store import Store


class LoopStore:
    """A store with the driver of event loops, whose loop runs in a thread; its methods block."""

    def __init__(self, url: str) -> None:
        self._store = Store(url, driver=ON_LOOP)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        waits = run_on_loop(method, *args, **kwargs)
        return asyncio.run_coroutine_threadsafe(waits, self._loop).result()

    def close(self) -> None:
        """Close the connections, and the loop."""
        self._call(self._store.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


STORES = {"blocking": Store, "on_loop": LoopStore}

"""What all locks of one app share in one process: its settings, its store, its watchdog.

Made lazily, at the first lock, and anew in a process that was forked meanwhile: a connection or a
thread is never used on the other side of a fork.  What the parent had is kept there untouched.
"""

from __future__ import annotations

import os
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import SettingsError
from celery_dislock.locks import Lock
from celery_dislock.settings import app_settings
from celery_dislock.store import Store
from celery_dislock.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_dislock.leases import Claim
    from celery_dislock.settings import AppSettings, TaskOptions

REDIS_SCHEMES = ("redis://", "rediss://", "redis+socket://", "unix://")
_REMEDY = (
    "neither the broker nor the result backend is a Redis; give the lock server's URL: "
    "redis://host:6379/0, rediss://... or unix:///path"
)


def lock_server(conf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """
    Find the lock server: ``dislock_url``, else the broker, else the result backend.

    Returns:
        Its URL, and options for its connections that belong to that URL.

    Raises:
        SettingsError: None of them is a Redis.
    """
    url = conf.get("dislock_url")
    if url:
        if not url.startswith(REDIS_SCHEMES):
            raise SettingsError(
                "app.conf", "dislock_url", url.partition(":")[0] + "://...", _REMEDY
            )
        return url, {}
    for name, tls in (
        ("broker_write_url", "broker_use_ssl"),
        ("broker_url", "broker_use_ssl"),
        ("result_backend", "redis_backend_use_ssl"),
    ):
        # Celery's configuration has properties for these, which ask the environment first.
        candidate = getattr(conf, name, None) or conf.get(name)
        if isinstance(candidate, (list, tuple)):
            candidate = candidate[0] if candidate else None
        candidate = (candidate or "").split(";")[0]
        if candidate.startswith(REDIS_SCHEMES):
            options = conf.get(tls) if candidate.startswith("rediss://") else None
            return candidate, dict(options) if isinstance(options, dict) else {}
    raise SettingsError("app.conf", "dislock_url", None, _REMEDY)


class Runtime:
    """The locks of one app.

    Args:
        conf: Gives the app's configuration; asked when the first lock is needed, not before.
    """

    def __init__(self, conf: Callable[[], Mapping[str, Any]]) -> None:
        self._conf = conf
        self._by_pid: dict[int, Process] = {}

    @property
    def conf(self) -> Mapping[str, Any]:
        """The app's configuration as it is now."""
        return self._conf()

    @property
    def enabled(self) -> bool | None:
        """``dislock_enabled`` as it is now: a worker's command line may have set it."""
        return self._conf().get("dislock_enabled")

    @cached_property
    def settings(self) -> AppSettings:
        """The app's settings, checked."""
        return app_settings(self._conf())

    @property
    def process(self) -> Process:
        """This process's part."""
        pid = os.getpid()
        try:
            return self._by_pid[pid]
        except KeyError:
            # No mutex, which a fork could find taken: what loses this race is not started yet.
            return self._by_pid.setdefault(pid, Process(self._conf(), self.settings))

    def lock(self, key: str, options: TaskOptions) -> Lock:
        """Make the lock of this key; asks nobody."""
        process = self.process
        return Lock(key, self.lock_name(key), options, process.store, process.watchdog)

    def lock_name(self, key: str) -> str:
        """Name of the lock in Redis; the braces keep all its names in one slot of a cluster."""
        return f"{self.settings.dislock_prefix}:{{{key}}}"


class Held:
    """What one thread holds of one lock, in plain Python, and how often it has taken it."""

    __slots__ = ("claim", "depth")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.depth = 1


class Process:
    """The store and the watchdog of one process; neither connects or starts before its use."""

    def __init__(self, conf: Mapping[str, Any], settings: AppSettings) -> None:
        url, options = lock_server(conf)
        self.pid = os.getpid()
        self.store = Store(url, {**options, **settings.dislock_transport_options})
        self.watchdog = Watchdog(self.store)
        self.threads: dict[tuple[int, str], Held] = {}  # thread and name of the lock
        self._counter = count(1)

    def owner_name(self, start: str) -> str:
        """Make the name of a new owner: what it is, and this process's counter."""
        return f"{start}{next(self._counter)}"

"""What all locks of one app share in one process: its settings, its store, its watchdog.

Made lazily, at the first lock, and anew in a process that was forked meanwhile: a connection or a
thread is never used on the other side of a fork.  What the parent had is kept there untouched.
"""

from __future__ import annotations

import logging
import os
import socket
from functools import cached_property
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

from celery_dislock.exceptions import DamagedLockError, SettingsError
from celery_dislock.interrupt import patched_by
from celery_dislock.lines import Lines
from celery_dislock.locks import Lock
from celery_dislock.reporting import Order
from celery_dislock.settings import app_settings
from celery_dislock.store import Store
from celery_dislock.urls import SCHEMES, SENTINEL, URL_WANTED, WITHOUT_TLS, shown
from celery_dislock.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.answers import Turn
    from celery_dislock.exceptions import StoreError
    from celery_dislock.options import TaskOptions
    from celery_dislock.settings import AppSettings

_CELERYS = (  # Celery's servers, first choice first: URL, TLS options, transport options
    ("broker_write_url", "broker_use_ssl", "broker_transport_options"),
    ("broker_url", "broker_use_ssl", "broker_transport_options"),
    ("result_backend", "redis_backend_use_ssl", "result_backend_transport_options"),
)
# How the server is found, but not for how long it is waited for: locks have times of their own.
_TAKEN_OVER = ("master_name", "sentinel_kwargs", "min_other_sentinels")
_CREDENTIALS = "credential_provider"
DAMAGED_MOST = 1000  # locks that a process remembers to have reported


logger = logging.getLogger("celery_dislock")


def lock_server(conf: Mapping[str, Any]) -> tuple[str | Sequence[str], Mapping[str, Any]]:
    """
    Find the lock server: ``dislock_url``, else the broker, else the result backend.

    Returns:
        Its URL, or those of several, and options for its connections that belong to that URL.

    Raises:
        SettingsError: None of them is a Redis.
    """
    url = conf.get("dislock_url")
    if isinstance(url, (list, tuple)):
        return url, {}
    if url and not url.startswith(SCHEMES):
        raise SettingsError("app.conf", "dislock_url", shown(url), URL_WANTED)
    for name, tls, transport in _CELERYS:
        # Celery's configuration has properties for these, which ask the environment first.
        candidate = _one_url(getattr(conf, name, None) or conf.get(name))
        if candidate.startswith(SCHEMES) and (not url or url == candidate):
            options = _options_of(candidate, conf.get(tls), conf.get(transport) or {})
            if name == "result_backend" and conf.get(f"redis_backend_{_CREDENTIALS}"):
                options.setdefault(_CREDENTIALS, conf[f"redis_backend_{_CREDENTIALS}"])
            return candidate, options
    if url:
        return url, {}
    remedy = f"neither the broker nor the result backend is a Redis; {URL_WANTED}"
    raise SettingsError("app.conf", "dislock_url", None, remedy)


def _one_url(given: Any) -> str:
    """Return the first of several servers; Sentinels are asked together, so all of them."""
    urls = given if isinstance(given, (list, tuple)) else [given or ""]
    joined = ";".join(urls)
    return joined if joined.startswith(SENTINEL) else joined.split(";")[0]


def _options_of(url: str, tls: Any, transport: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: transport[name] for name in (_CREDENTIALS,) if name in transport}
    if url.startswith(SENTINEL):
        options.update((name, transport[name]) for name in _TAKEN_OVER if name in transport)
    if tls and not url.startswith(WITHOUT_TLS):
        if not url.startswith("rediss"):
            options["ssl"] = True  # kombu uses TLS then, whatever the URL says
        options.update(tls if isinstance(tls, dict) else {})
    return options


class Publisher(Protocol):
    """
    What publishes parked tasks.

    Attributes:
        home: Names the broker.
    """

    @property
    def home(self) -> str:
        """See above."""

    def hand_over(self, lines: Lines, turns: Sequence[Turn]) -> None:
        """Publish the messages of parked tasks whose turn it is; never raises a broker's error."""

    def tell_replaced(
        self, lines: Lines, lock: str, replaced: Mapping[str, bytes], order: Order
    ) -> None:
        """End tasks that had to make room in their line; as above."""

    def end_unclaimed(self, lines: Lines, lock: str, tickets: Sequence[str]) -> None:
        """Set tasks aside that have ended and do not claim their turns; as above."""


class Runtime:
    """The locks of one app.

    Args:
        conf: Gives the app's configuration; asked when the first lock is needed, not before.
        publisher: Publishes parked tasks; None: plain Python, without an app.
    """

    def __init__(
        self, conf: Callable[[], Mapping[str, Any]], publisher: Publisher | None = None
    ) -> None:
        self._conf = conf
        self._publisher = publisher
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
    def off(self) -> bool:
        """Whether tasks take no locks at all; asked for each task, and settled with the first."""
        return self.enabled is False

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
            return self._by_pid.setdefault(pid, self.new_process())

    def new_process(self) -> Process:
        """Make a store, a watchdog and connections that share nothing with those there are."""
        return Process(self._conf(), self.settings, self._publisher)

    @property
    def sweep_name(self) -> str:
        """Name in Redis of the lease under which one worker at a time looks through the lines."""
        home = self._publisher.home if self._publisher else ""
        return f"{self.settings.dislock_prefix}:sweep:{{{home}}}"

    def close(self) -> None:
        """End what this process has of it; made anew when it is needed again."""
        process = self._by_pid.pop(os.getpid(), None)
        if process is not None:
            process.close()

    def lock(self, keys: Sequence[str], options: TaskOptions) -> Lock:
        """Make the lock of these keys; asks nobody."""
        process = self.process
        return Lock(keys, self.lock_names(keys), options, process.store, process.watchdog)

    def lock_names(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Names in Redis; the braces keep all that belongs to one lock in one slot of a cluster."""
        prefix = self.settings.dislock_prefix
        return tuple([f"{prefix}:{{{key}}}" for key in keys])


class Process:
    """The store and the watchdog of one process; neither connects or starts before its use."""

    def __init__(
        self, conf: Mapping[str, Any], settings: AppSettings, publisher: Publisher | None = None
    ) -> None:
        url, options = lock_server(conf)
        self._publisher = publisher if isinstance(url, str) else None
        home = self._publisher.home if self._publisher else ""
        self.pid = os.getpid()
        self.host = socket.gethostname()
        self.store = Store(
            url,
            {
                **options,
                **settings.dislock_transport_options,
                "min_replicas": settings.dislock_min_replicas,
            },
            home=home,
            hand_over=self._hand_over,
        )
        self.lines = Lines(self.store.lock_server, settings.dislock_prefix, home, self._hand_over)
        self.watchdog = Watchdog(self.store)
        self.log_order = Order()
        self._patched = patched_by()
        self._warned = False
        self._away = False
        self._damaged: set[str] = set()
        self._nonce = token_hex(4)  # process ids, and threads' numbers, come again
        self._counter = count(1)

    @property
    def can_park(self) -> bool:
        """Whether tasks can be parked: there is an app, and one lock server."""
        return self._publisher is not None

    def _hand_over(self, turns: Sequence[Turn]) -> None:
        if self._publisher is not None:
            self._publisher.hand_over(self.lines, turns)

    def tell_replaced(self, lock: str, replaced: Mapping[str, bytes]) -> None:
        """End tasks that had to make room in the line of this lock."""
        if replaced and self._publisher is not None:
            self._publisher.tell_replaced(self.lines, lock, replaced, self.log_order)

    def end_unclaimed(self, lock: str, tickets: Sequence[str]) -> None:
        """Set tasks of this lock aside that have ended and do not claim their turns."""
        if tickets and self._publisher is not None:
            self._publisher.end_unclaimed(self.lines, lock, tickets)

    def close(self) -> None:
        """End the watchdog, and close the connections that are not in use."""
        watched = len(self.watchdog)
        self.watchdog.stop()
        self.store.close()
        if watched:
            logger.warning(
                "Closed while %d lock(s) of this process were held: they are renewed no more, and "
                "end with their expiry unless they are released before.",
                watched,
            )

    def check_patching(self) -> None:
        """Warn, once, where gevent or eventlet patched this process after its first lock."""
        if not self._warned and patched_by() != self._patched:
            self._warned = True
            logger.warning(
                "%s patched this process after its first lock was used: the watchdog and the "
                "connections made before are not patched, and block all greenlets. Patch first, "
                "before anything else is imported.",
                patched_by() or "Something",
            )

    def lock_server_failed(self, error: StoreError) -> None:
        """Say that the lock server is away, once until it answers; or that a lock is damaged."""
        if isinstance(error, DamagedLockError):
            self._report_damage(error)
        elif not self._away:
            self._away = True
            logger.warning("While this lasts no task can take a lock: %s", error)

    def _report_damage(self, error: DamagedLockError) -> None:
        if error.lock in self._damaged:
            return
        if len(self._damaged) >= DAMAGED_MOST:
            self._damaged.clear()
        self._damaged.add(error.lock)
        logger.error("Tasks of one lock cannot run, and all others go on: %s.", error)

    def lock_server_answered(self) -> None:
        """Say that it is back, where it was away."""
        if self._away:
            self._away = False
            logger.info("The lock server %s answers again.", self.store.server)

    def is_own(self, owner: str) -> bool:
        """Tell whether an owner is of this very process, and not of one that had its id before."""
        return owner.rpartition("/")[2].startswith(f"{self._nonce}.")

    def owner_name(self, start: str) -> str:
        """Make the name of a new owner, like no other's on any machine: what it is, and a count."""
        return f"{start}{self._nonce}.{next(self._counter)}"

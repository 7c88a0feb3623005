"""What all locks of one app share in one process: settings, store and watchdog.

They are created at the first lock.  A forked process creates its own, so a connection or a thread
is never used on both sides of a fork.  The child leaves the objects of its parent untouched.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import time
from contextlib import suppress
from functools import cached_property, partial
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar, cast
from weakref import WeakSet

from celery_dislock.config.censoring import alone
from celery_dislock.config.plain import plain_options
from celery_dislock.config.settings import app_settings
from celery_dislock.config.urls import lock_server
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.locks.channel import Channel, Watcher, nothing
from celery_dislock.locks.interruption import is_pool_process, patched_by
from celery_dislock.locks.journal import Journal
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import FLUSH_WITHIN, Watchdog
from celery_dislock.servers.bridge import current_call, in_thread, run_on_loop, wait_for
from celery_dislock.servers.server import Outage
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.config.plain import Plain
    from celery_dislock.config.settings import AppSettings
    from celery_dislock.exceptions import StoreError
    from celery_dislock.servers.replies import Turn
    from celery_dislock.servers.server import Server

TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
QUICK = 0.25  # seconds to wait for each reply; a command is sent three times at most
PLAIN_MOST = 1000  # sets of options that are kept: an app may compute another timeout each time
DAMAGED_MOST = 1000  # damaged locks that a process remembers as reported


logger = logging.getLogger("celery_dislock")


P = TypeVar("P", bound="Process")
A = ParamSpec("A")
T = TypeVar("T")


class Runtime(Generic[P]):
    """The locks of one app.

    Args:
        conf: Returns the app's configuration; not called before the first lock is needed.
        make_process: Makes the part of one process from the configuration and the settings; None:
            a plain :class:`Process`.

    Attributes:
        orders: The keys of each task with several keys, in the order in which it takes their locks.
        unawaited_by: What runs tasks here and does not await their bodies, such as a worker's pool;
            None: bodies are awaited.
        journals_in: The folder of the journals for a worker's main process; None: nobody reads any.
    """

    def __init__(
        self,
        conf: Callable[[], Mapping[str, Any]],
        make_process: Callable[[Mapping[str, Any], AppSettings], P] | None = None,
    ) -> None:
        self._conf = conf
        self._make_process = make_process or cast("Callable[..., P]", Process)
        self._by_pid: dict[int, P] = {}
        # The settings for which options of locks in plain Python are kept, and these options by the
        # arguments that were given.  One tuple, so that no thread finds options of other settings.
        self._plain: tuple[object, int, dict[str, Any], dict[Any, Plain]] = (None, 0, {}, {})
        self.unawaited_by: str | None = "no worker"
        self.journals_in: str | None = None
        self.orders: dict[str, Sequence[str]] = {}

    @property
    def conf(self) -> Mapping[str, Any]:
        """The app's current configuration."""
        return self._conf()

    @property
    def enabled(self) -> bool | None:
        """The current ``dislock_enabled``, which a worker's command line may have changed."""
        return self._conf().get("dislock_enabled")

    @property
    def off(self) -> bool:
        """Whether tasks take no locks at all; the test kit sets it."""
        return self._conf().get("dislock_enabled") is False

    @cached_property
    def settings(self) -> AppSettings:
        """The checked settings of the app."""
        return app_settings(self._conf())

    def plain(self, key: object, given: Mapping[str, Any], on_lost: str) -> Plain:
        """
        Return the checked options of a lock in plain Python; see :func:`plain_options`.

        They are kept while the settings stay the same: reading every setting takes longer than a
        round trip to the lock server.
        """
        conf: Any = self._conf()
        # Celery's configuration: what was set since it was loaded, and the layers below, to which
        # apps add.
        changes, layers = getattr(conf, "changes", conf), len(getattr(conf, "maps", ()))
        of, over, after, kept = self._plain
        if of is not conf or over != layers or after != changes:
            kept = {}
            self._plain = (conf, layers, dict(changes), kept)
        asked: Any = on_lost
        if given:  # True is no number, though it equals one
            asked = (on_lost, *[(name, value.__class__, value) for name, value in given.items()])
        try:
            return kept[asked]
        except (KeyError, TypeError):  # TypeError: an option that cannot be used, such as a list
            del conf, changes, of, after  # tracebacks show them
        plain = plain_options(f"lock {key!r}", given, self._conf(), on_lost)
        if len(kept) < PLAIN_MOST:
            kept[asked] = plain
        return plain

    @property
    def process(self) -> P:
        """The store and the watchdog of this process."""
        pid = os.getpid()
        try:
            return self._by_pid[pid]
        except KeyError:
            # No mutex: a fork could inherit it locked.  The object that loses this race has opened
            # no connection and started no thread yet.
            new = self.new_process()
            if self.journals_in is not None and is_pool_process():
                new.journal = Journal(self.journals_in)
            return self._by_pid.setdefault(pid, new)

    @alone
    def new_process(self) -> P:
        """Make a new store and watchdog, which share nothing with existing ones."""
        return self._make_process(self._conf(), self.settings)

    def close(self) -> None:
        """Close the part of this process; the next use makes a new one."""
        process = self._by_pid.pop(os.getpid(), None)
        if process is not None:
            process.close()

    def close_here(self) -> None:
        """Close the connections of the event loop for which this runs, then as :meth:`close`."""
        self.process.close_here()
        in_thread(self.close)

    async def on_loop(self, function: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """
        Call code that uses these locks on the event loop that runs here; see :func:`run_on_loop`.

        If the code is cancelled, the watchdog sends the releases that it has left at once.
        """
        try:
            return await run_on_loop(function, *args, **kwargs)
        except BaseException as exc:
            if not isinstance(exc, Exception):  # cancelled
                self.process.watchdog.hurry()
            raise

    def lock(self, keys: Sequence[str], options: TaskOptions) -> Lock:
        """Make the lock of these keys for the caller; no round trip."""
        process = self.process
        return Lock(
            keys, self.lock_names(keys), options, process.store_here, watchdog=process.watchdog
        )

    def lock_names(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the locks' names in Redis; the braces keep a lock in one slot of a cluster."""
        return tuple(map(self._name, keys))

    @cached_property
    def _name(self) -> Callable[[str], str]:
        return f"{self.settings.dislock_prefix}:{{{{{{}}}}}}".format


class Process:
    """
    The store and the watchdog of one process.  Neither connects or starts before the first use.

    Args:
        conf: The app's configuration.
        settings: The checked settings of the app.
        broker: See :class:`celery_dislock.servers.store.Store`.
        hand_over: See :class:`celery_dislock.servers.store.Store`.

    Attributes:
        settings: The argument of that name.
        loop_store: The watchdog's store: one of its own beside greenlets, otherwise *store*.
        channel: Is told what happens to the locks of this process.
        journal: Of what this process locks in plain Python, for the main process; None: none.
        watchers: Make the watchers of a process; the plugin sets them.
        watchdog_type: The class of the watchdog; the test kit sets it.
    """

    watchers: ClassVar[tuple[Callable[[Any], Watcher], ...]] = ()
    watchdog_type: ClassVar[type[Watchdog]] = Watchdog
    journal: Journal | None = None

    def __init__(
        self,
        conf: Mapping[str, Any],
        settings: AppSettings,
        *,
        broker: str = "",
        hand_over: Callable[[Sequence[Turn]], None] | None = None,
    ) -> None:
        url, options = lock_server(conf)
        options = {
            **options,
            **settings.dislock_transport_options,
            "min_replicas": settings.dislock_min_replicas,
        }
        self.pid = os.getpid()
        self.host = socket.gethostname()
        self._patched = patched_by()
        self._url = url
        self._options = options
        self.store = Store(url, options, broker=broker, hand_over=hand_over)
        self._hand_over = hand_over
        self._loop_stores: dict[AbstractEventLoop, tuple[Store, AsyncGenerator[None, None]]] = {}
        self._nonce = token_hex(4)  # process ids and thread ids are reused
        self.settings = settings
        self._servers: WeakSet[Server] = WeakSet()  # of the stores that were made beside it
        self.loop_store = self.new_store() if self._patched else self.store
        self._warned = False
        self._outage = Outage()
        self._damaged: set[str] = set()
        self._counter = count(1)
        self.channel = Channel()
        self.channel.watchers = [make(self) for make in self.watchers]
        self.watchdog = self.watchdog_type(
            self.loop_store,
            beside_greenlets=bool(self._patched),
            asks=settings.dislock_renew_for_stalled and is_pool_process(),
            channel=self.channel,
        )
        _living.add(self)

    @cached_property
    def quick_store(self) -> Store:
        """A store that gives up within a second, for callers that can go on without it."""
        return self.new_store(QUICK)

    def new_store(self, most: float | None = None) -> Store:
        """
        Make another store, with connections of its own, which :meth:`close` closes, too.

        Args:
            most: Seconds to wait for each reply, unless the settings say less; None: as they say.
        """
        short = {name: min(most, self._options.get(name) or most) for name in TIMEOUTS if most}
        store = Store(self._url, {**self._options, **short})
        self._servers.add(store.lock_server)
        return store

    @property
    def store_here(self) -> Store:
        """The store for the caller: *store*, or that of the event loop for which it runs."""
        call = current_call()
        if call is None:
            return self.store
        try:
            return self._loop_stores[call.loop][0]
        except KeyError:
            for loop in list(self._loop_stores):
                if loop.is_closed():
                    self._loop_stores.pop(loop, None)
            from celery_dislock.servers.loop_connection import ON_LOOP  # noqa: PLC0415 -- an extra

            made = Store(
                *(self._url, self._options),
                driver=ON_LOOP,
                broker=self.store.broker,
                hand_over=partial(in_thread, self._hand_over) if self._hand_over else None,
            )
            closing = _closing(made, self.watchdog)
            with suppress(StopIteration):  # at its yield
                closing.__anext__().send(None)
            self._loop_stores[call.loop] = made, closing
            return made

    def close_here(self) -> None:
        """Close the connections of the event loop for which this runs."""
        call = current_call()
        if call is not None and call.loop in self._loop_stores:
            _, closing = self._loop_stores.pop(call.loop)
            wait_for(closing.aclose())

    def close(self) -> None:
        """Stop the watchdog, and close the connections that are not in use."""
        watched = len(self.watchdog)
        self.watchdog.stop()
        self.channel.wake = nothing  # a lock that is released later must not start it again
        self.channel.finish()
        self.store.close()
        for server in list(self._servers):
            server.close()
        if watched:
            #: WARNING: `dislock.close()` was called before the release. -> Release first.
            logger.warning(
                "Closed while this process held %d lock(s): they are no longer renewed, and end "
                "with their expiry unless they are released before.",
                watched,
            )

    def check_patching(self) -> None:
        """Warn once if gevent or eventlet patched this process after its first lock."""
        if not self._warned and patched_by() != self._patched:
            self._warned = True
            #: WARNING `gevent patched this process after its first lock was used: …`: The
            #: connections made before block all greenlets. -> Patch before anything else is
            #: imported.
            logger.warning(
                "%s patched this process after its first lock was used: the watchdog and the "
                "connections made before are not patched, and block all greenlets. Patch first, "
                "before anything else is imported.",
                patched_by() or "Something",
            )

    def lock_server_failed(self, error: StoreError) -> None:
        """Log once per outage that the lock server fails, or once per lock that it is damaged."""
        if isinstance(error, DamagedLockError):
            self._report_damage(error)
        elif self._outage.begins(error):
            #: WARNING: The lock server is away, or refuses; once per process and outage. -> Check
            #: the lock server: the reason follows.
            logger.warning("While this lasts no task can take a lock: %s", error)

    def _report_damage(self, error: DamagedLockError) -> None:
        if error.lock in self._damaged:
            return
        if len(self._damaged) >= DAMAGED_MOST:
            self._damaged.clear()
        self._damaged.add(error.lock)
        #: ERROR: Another program has written under one of the lock's names; once per process and
        #: lock. -> When its tasks have ended, rename the key that the line names.
        logger.error("Tasks of one lock cannot run, other locks are not affected: %s.", error)

    def lock_server_answered(self, *, took: bool = True) -> None:
        """Log the end of an outage, if there was one; *took*: whether a free lock was taken."""
        if self._outage.lasts and self._outage.ends(took=took):
            #: INFO: The outage is over for tasks.
            logger.info("The lock server %s answers again.", self.store.server)

    def running(self, *, on_loop: bool) -> tuple[str, object, str | None] | None:  # noqa: ARG002
        """
        Return name, id and worker of the task whose body runs here; None: none runs.

        Args:
            on_loop: Whether this code runs for an event loop.
        """
        return None

    def owner_name(self, start: str) -> str:
        """Make a unique name for a new owner: *start*, this process's nonce, and a counter."""
        return f"{start}{self._nonce}.{next(self._counter)}"


async def _closing(store: Store, watchdog: Watchdog) -> AsyncGenerator[None, None]:
    """Close the store of an event loop when the loop shuts down, as ``asyncio.run`` does it."""
    try:
        yield
    finally:
        await run_on_loop(store.close)
        if watchdog.uncleared:  # tasks were cancelled, and the process may end by a signal now
            await asyncio.to_thread(watchdog.flush)


_living: WeakSet[Process] = WeakSet()


def flush_all(**_kwargs: Any) -> None:
    """Send, at the end of this process, what its watchdogs and watchers have not sent yet."""
    until = time.monotonic() + FLUSH_WITHIN
    for process in list(_living):
        if process.pid == os.getpid():
            process.watchdog.flush(until - time.monotonic())
            process.channel.finish()


atexit.register(flush_all)

"""Locks of this process under a clock that the test moves, on a server that does what it is told.

The server is that of ``celery_dislock.testing``, behind a proxy, which counts the commands that
arrive and has some of them fail.  Nothing but public names is used to take, keep and release locks.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import redis

from celery_dislock import Dislock, scripts, signals
from celery_dislock.scripts import Script
from celery_dislock.servers import memory
from celery_dislock.servers.memory import memory_server
from celery_dislock.servers.store import Store
from celery_dislock.testing import DislockServer
from proof.proxy import Proxy, runs
from tests.holding import PATIENCE, name_of, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from celery_dislock import Lease
    from proof.proxy import Command

ALWAYS = 10_000  # times; more often than any test asks


class Behind:
    """The lock server of this process, as it is reached through a proxy; its time stands still."""

    is_for_tests = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.outage = memory_server().outage
        self._now = memory_server().clock()

    def clock(self) -> float:
        """Return UNIX time, which passes when the test says so, and by a microsecond each time."""
        self._now += 0.000001
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; who waits on the server looks at the clock again."""
        self._now += seconds
        memory_server().advance(0)


class Driven(DislockServer):
    """
    A lock server of a test whose time and commands are the test's.

    Attributes:
        dislock: What takes locks on it.
        proxy: What the commands go through.
        client: Reaches the same database beside the proxy.
    """

    def __init__(self, proxy: Proxy, stack: ExitStack, test: str) -> None:
        self._behind = Behind(proxy.url)
        super().__init__(self._behind, test)
        self.proxy = proxy
        self._stack = stack
        load_scripts()

    def __enter__(self) -> Self:
        self._stack.enter_context(mock.patch.object(memory.CLOCK, "time", self._behind.clock))
        for name in ("renew", "clear"):  # a watchdog's limits are too short for a busy machine
            self._stack.enter_context(mock.patch.object(Store, name, patient(name)))
        super().__enter__()
        self.dislock = self._open(self.url)
        self._beside = memory_server().url.rpartition("/")[0] + "/" + self.url.rpartition("/")[2]
        self.client = self._stack.enter_context(
            redis.Redis.from_url(self._beside, decode_responses=True)
        )
        return self

    def _open(self, url: str) -> Dislock:
        return self._stack.enter_context(Dislock.from_url(url, watchdog_timeout=30.0))  # seconds

    @property
    def now(self) -> float:
        """UNIX time of the server, which the test moves."""
        return self._behind.clock()

    def lock(self, key: str = "k", **options: Any) -> Any:
        """Make a lock."""
        return self.dislock.lock(key, **options)

    def take(self, key: str = "k", **options: Any) -> Lease:
        """Take a free lock; it is left held."""
        lease = self.lock(key, **options).try_acquire()
        assert lease, lease
        return lease

    def stall(self, seconds: float) -> None:
        """Let time pass in which this process does not run."""
        self._behind.advance(seconds)

    def renew_elsewhere(self, lease: Lease, timeout: float = 30.0) -> None:
        """Let another process renew a lease."""
        record = self.client.hget(name_of(lease.key), lease.owner).split(" ")
        record[1] = str(round((self.now + timeout) * 1000))
        self.client.hset(name_of(lease.key), lease.owner, " ".join(record))
        self.client.pexpire(name_of(lease.key), round(timeout * 1000))

    def beside(self) -> Dislock:
        """Open what reaches the same locks beside the proxy."""
        return self._open(self._beside)

    def fault(self, script: Script, happens: str | Callable[[], object], **which: Any) -> None:
        """Let it happen to calls of a script; by *times* and *about*, see :func:`calls`."""
        about = which.pop("about", "")
        self.proxy.fault(calls(script, about), happens, **{"times": ALWAYS, **which})

    def asked(self, script: Script, about: str = "") -> int:
        """Return how many calls of a script came."""
        return self.proxy.count(calls(script, about))

    def in_line(self, key: str = "k") -> int:
        """Return how many wait for a lock."""
        return sum(one.waiting for one in self.dislock.lock_of(key).state())

    def wait_for_waits(self, number: int, results: Sequence[Any] = ()) -> None:
        """Wait until so many waits in line have begun, or there are results."""
        wait_for(lambda: results or self.proxy.count(waits) >= number, "a wait in line")
        databases = memory_server().fake_server.dbs.values()  # the command has come to the server
        wait_for(lambda: results or any(one.condition._waiters for one in databases), "the wait")

    @contextmanager
    def waiting(self, call: Callable[[], Any], key: str = "k") -> Iterator[list[Any]]:
        """
        Call in a thread of its own, which begins to wait in line; the block's end waits for it.

        Yields:
            A list, in which the result is after the block, or the error.
        """
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(call())
            except Exception as exc:  # noqa: BLE001 -- what the test looks at
                results.append(exc)

        before = self.proxy.count(waits)
        thread = threading.Thread(target=run, name="waiter")
        thread.start()
        self.wait_for_waits(before + 1, results)
        yield results
        thread.join(2 * PATIENCE)
        assert results, "it waits for ever"


def patient(name: str) -> Callable[..., Any]:
    """Make a method of a store wait for its replies for long; no time of the test passes."""
    method = getattr(Store, name)
    return lambda *args, **options: method(*args, **dict.fromkeys(options, PATIENCE))  # *within*


@cache
def load_scripts() -> None:
    """Let the server know all scripts, so that each call is one command."""
    with redis.Redis.from_url(memory_server().url) as client:
        for script in vars(scripts).values():
            if isinstance(script, Script):
                client.script_load(script.text)


def waits(command: Command) -> bool:
    """Tell whether a command waits in line."""
    return command[0] == b"BLPOP"


def calls(script: Script, about: str = "") -> Callable[[Command], bool]:
    """Make a predicate: the command runs this script, and a text is in one of its words."""
    is_call, text = runs(script), about.encode()
    return lambda command: is_call(command) and any(text in word for word in command[2:])


@contextmanager
def driving(test: str = "this test") -> Iterator[Driven]:
    """Open such a server."""
    port = int(memory_server().url.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as proxy, ExitStack() as stack, Driven(proxy, stack, test) as driven:
        yield driven


@contextmanager
def listening() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collect the names and arguments of the lock signals that are sent, in order."""
    events: list[tuple[str, dict[str, Any]]] = []
    receivers = []
    for name in signals.__all__:

        def receive(sender: object, signal: object, _name: str = name, **told: Any) -> None:
            events.append((_name, told))

        signal = getattr(signals, name)
        signal.connect(receive, weak=False)
        receivers.append((signal, receive))
    yield events
    for signal, receive in receivers:
        signal.disconnect(receive)

"""What goes wrong during a run, on a schedule that a seed decides."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Protocol

import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from example_project.redis_server import RedisServer
    from proof.history import History

CALM = (0.2, 1.5)  # seconds between two faults
LONG_CALM = 0.2  # of the pauses are longer


class Victims(Protocol):
    """The processes of a run that are of one kind."""

    def kill_one(self, chance: random.Random) -> None:
        """Kill one, and start another in its place."""

    def signal_one(self, chance: random.Random, number: signal.Signals) -> Callable[[], None]:
        """Send a signal to one; returns what sends SIGCONT to the same."""


class Nemesis:
    """
    Makes faults.

    Args:
        seed: Decides which, when, and whom they hit.
        victims: The processes, by their kind.
        server: The lock server.
        history: Where each fault is noted.
        timeout: Seconds of a lease.
    """

    def __init__(
        self,
        seed: int,
        victims: Sequence[Victims],
        server: RedisServer,
        history: History,
        timeout: float,
    ) -> None:
        self._random = random.Random(seed)
        self._victims = victims
        self._server = server
        self._history = history
        self._timeout = timeout
        self.faults: dict[str, Callable[[], None]] = {
            "kill a process": self._kill,
            "stop a process for less than its lease": lambda: self._stop(0.5),
            "stop a process for longer than its lease": lambda: self._stop(2.0),
            "stop the server": self._stop_server,
            "cut all connections": lambda: self._command("CLIENT", "KILL", "TYPE", "normal"),
            "forget the scripts": lambda: self._command("SCRIPT", "FLUSH"),
            "pause all clients": lambda: self._command("CLIENT", "PAUSE", "300"),
        }

    def run(self, until: float) -> None:
        """Make one fault after the other until this monotonic time; blocks."""
        names = list(self.faults)
        while (left := until - time.monotonic()) > 0:
            calm = self._random.uniform(*CALM)
            if self._random.random() < LONG_CALM:
                calm = 4 * self._timeout  # in which nothing may be lost
            time.sleep(min(left, calm))
            name = self._random.choice(names)
            self._history.add("fault", name, "begin")
            self.faults[name]()
            self._history.add("fault", name, "end")

    def _kill(self) -> None:
        self._random.choice(self._victims).kill_one(self._random)

    def _stop(self, timeouts: float) -> None:
        resume = self._random.choice(self._victims).signal_one(self._random, signal.SIGSTOP)
        try:
            time.sleep(timeouts * self._timeout)
        finally:
            resume()

    def _stop_server(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)
        try:
            time.sleep(self._random.choice((0.3, 2.0)) * self._timeout)
        finally:
            os.kill(self._server.pid, signal.SIGCONT)

    def _command(self, *words: str) -> None:
        cuts_itself = contextlib.suppress(redis.ConnectionError)
        with self._server.client() as client, cuts_itself:
            client.execute_command(*words)

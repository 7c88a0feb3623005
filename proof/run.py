"""One run: a server, processes that work, faults, and what is left at the end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from example_project.redis_server import RedisServer
from proof.checker import Verdict, check
from proof.files import SharedFile
from proof.history import History, read
from proof.locking import Site
from proof.nemesis import Nemesis

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

PROCESSES = 4
TIMEOUT = 1.0  # seconds of a lease
ENDS_WITHIN = 60.0  # seconds


class Processes:
    """The processes that work, as a context manager; leaving it lets them end what they do."""

    def __init__(self, site: Site, history: History, number: int = PROCESSES) -> None:
        self._site = site
        self._history = history
        self._number = number
        self._started = 0
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for _ in range(self._number):
            self._running.append(self._start())
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()
        for process in self._running:
            try:
                process.wait(ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                self._history.add("process", str(process.pid), "stuck")
                process.kill()
                process.wait()

    def kill_one(self, chance: random.Random) -> None:
        """Kill one, and start another in its place."""
        at = chance.randrange(len(self._running))
        process = self._running[at]
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin and process.stdin.close()
        self._history.add("process", str(process.pid), "killed")
        self._running[at] = self._start()

    def signal_one(self, chance: random.Random, number: signal.Signals) -> Callable[[], None]:
        """Send a signal to one; returns what sends SIGCONT to the same."""
        process = chance.choice(self._running)
        process.send_signal(number)
        return partial(process.send_signal, signal.SIGCONT)

    def _start(self) -> subprocess.Popen[str]:
        self._started += 1
        site = Site(**{**vars(self._site), "seed": self._site.seed * 1000 + self._started})
        process = subprocess.Popen(
            [sys.executable, "-m", "proof.locking"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(site.to_json() + "\n")
        process.stdin.flush()
        return process


def run(folder: Path, *, seconds: float, seed: int, control: str = "") -> Verdict:
    """Run the workload under faults, and return what its history shows."""
    folder.mkdir(parents=True)
    history = History(folder / "history", "run")
    with RedisServer(folder / "server") as server:
        site = Site(server.url, str(folder), seed, TIMEOUT, control)
        with Processes(site, history) as processes:
            nemesis = Nemesis(seed, processes, server, history, TIMEOUT)
            nemesis.run(time.monotonic() + seconds)
        for path in sorted(folder.glob("elements-*")):
            if path.suffix:
                continue
            elements = SharedFile(path, fenced=False).read()
            history.add("file", path.name, "end", elements=elements)
        for key in left_behind(server):
            history.add("key", key, "left")
    history.close()
    return check(read(folder / "history"))


def left_behind(server: RedisServer) -> list[str]:
    """Return the keys that do not go by themselves; waits for those that expire."""
    with server.client(decode_responses=True) as client:
        until = time.monotonic() + ENDS_WITHIN * 2
        while True:
            ttls = {key: client.pttl(key) for key in client.scan_iter(count=1000)}
            for_ever = [key for key, ttl in ttls.items() if ttl == -1]
            if for_ever or not ttls or time.monotonic() > until:
                return for_ever or list(ttls)
            time.sleep(min(1.0, max(ttls.values()) / 1000 + 0.01))

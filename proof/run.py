"""One run: servers, processes that work, faults, and what is left at the end."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
from celery.states import READY_STATES

from example_project.redis_server import RedisServer
from proof.checker import Verdict, check
from proof.files import SharedFile
from proof.history import History, read
from proof.nemesis import Nemesis
from proof.site import Site

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from typing_extensions import Self

TIMEOUT = 1.0  # seconds of a lease
ENDS_WITHIN = 120.0  # seconds until what was begun has ended, once nothing is wrong any more


PYTHON = (sys.executable, "-m")
LOCKING = (*PYTHON, "proof.locking")
SENDING = (*PYTHON, "proof.sending")
WORKER = (*PYTHON, "celery", "-A", "proof.tasking", "worker", "--dislock", "-c", "3", "-l", "INFO")


class Processes:
    """
    The processes of one kind, as a context manager; leaving it lets them end what they do.

    Args:
        command: What each runs.
        number: How many there are at a time.
        site: Where they work.
        history: Where it is noted which of them was killed.
    """

    def __init__(self, command: Sequence[str], number: int, site: Site, history: History) -> None:
        self._command = command
        self._number = number
        self._site = site
        self._history = history
        self._started = 0
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for _ in range(self._number):
            self._running.append(self._start())
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()  # ends those that read it
            if self._command is WORKER:
                process.terminate()
        for process in self._running:
            try:
                process.wait(ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                self._history.add("process", str(process.pid), "stuck")
                process.kill()
                process.wait()

    def kill_one(self, chance: random.Random) -> None:
        """
        Kill one and start another, or kill a child, which its parent replaces.

        A worker's main process is spared: of a Redis broker it takes messages with BRPOP, and one
        that is on its way to a process that dies is lost, whatever the locks do.
        """
        at = chance.randrange(len(self._running))
        process = self._running[at]
        if children := psutil.Process(process.pid).children():
            self._kill(chance.choice(children))
            return
        self._kill(psutil.Process(process.pid))
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        self._running[at] = self._start()

    def signal_one(self, chance: random.Random, number: signal.Signals) -> Callable[[], None]:
        """Send a signal to one process or child; returns what sends SIGCONT to the same."""
        process = chance.choice(self._running)
        of_it = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        one = chance.choice(of_it)
        one.send_signal(number)
        return partial(_send, one, signal.SIGCONT)

    def _kill(self, process: psutil.Process) -> None:
        _send(process, signal.SIGKILL)
        self._history.add("process", str(process.pid), "killed")

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        site = replace(self._site, seed=self._site.seed * 1000 + self._started)
        name = f"{self._command[2]}-{self._started}"
        command = list(self._command)
        if self._command is WORKER:
            command += ["-n", f"{name}@proof"]
        with open(f"{self._site.folder}/{name}.log", "wb") as log:  # noqa: PTH123
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=site.environment(),
            )


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def run(folder: Path, *, seconds: float, seed: int, control: str = "") -> Verdict:
    """Run the workloads under faults, and return what their history shows."""
    folder.mkdir(parents=True)
    history = History(folder / "history", "run")
    with RedisServer(folder / "server") as server, RedisServer(folder / "broker") as broker:
        site = Site(server.url, broker.url, str(folder), seed, TIMEOUT, control)
        with Processes(WORKER, 2, site, history) as workers:
            with (
                Processes(LOCKING, 3, site, history) as locking,
                Processes(SENDING, 1, site, history) as sending,
            ):
                nemesis = Nemesis(seed, (workers, locking, sending), server, history, TIMEOUT)
                nemesis.run(time.monotonic() + seconds)
            note_outcomes(history, folder, broker)
        for path in sorted(folder.glob("elements-*")):
            if path.suffix:
                continue
            elements = SharedFile(path, fenced=False).read()
            history.add("file", path.name, "end", elements=elements)
        for key in left_behind(server):
            history.add("key", key, "left")
    history.close()
    return check(read(folder / "history"))


def note_outcomes(history: History, folder: Path, broker: RedisServer) -> None:
    """Wait until all tasks have ended, and note the outcome of each that has one."""
    tasks = {
        event.about
        for event in read(folder / "history")
        if event.what == "task" and event.kind == "sent"
    }
    until = time.monotonic() + ENDS_WITHIN
    with broker.client(decode_responses=True) as client:
        while tasks and time.monotonic() < until:
            for task in sorted(tasks):
                result = json.loads(client.get(f"celery-task-meta-{task}") or "{}")
                if result.get("status") in READY_STATES:
                    history.add("task", task, "outcome", state=result["status"])
                    tasks.discard(task)
            time.sleep(1.0)


def left_behind(server: RedisServer) -> list[str]:
    """
    Return the keys that are left; waits for those that expire soon.

    What is kept for a copy of a message that may still come expires later, and is no rest.
    """
    until = time.monotonic() + ENDS_WITHIN
    with server.client(decode_responses=True) as client:
        while True:
            ttls = {key: client.pttl(key) for key in client.scan_iter(count=1000)}
            left = [key for key, ttl in ttls.items() if ttl <= ENDS_WITHIN * 1000]
            if not left or time.monotonic() > until:
                return left
            time.sleep(1.0)

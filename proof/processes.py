"""The processes of a run, of which some are killed and stopped."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from proof.history import History
    from proof.site import Site

ENDS_WITHIN = 60.0  # seconds until a process has ended, once nothing is wrong any more

PYTHON = (sys.executable, "-m")
LOCKING = (*PYTHON, "proof.locking")
SENDING = (*PYTHON, "proof.sending")
WORKER = (*PYTHON, "celery", "-A", "proof.tasking", "worker", "--dislock", "-c", "2", "-l", "INFO")


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
        self._running = [self._start() for _ in range(self._number)]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()  # ends those that read it
            if self._command is WORKER:
                process.terminate()
        until = time.monotonic() + ENDS_WITHIN
        for process in self._running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._history.add("process", str(process.pid), "stuck", command=self._command[2])
                self._kill(psutil.Process(process.pid))
                process.wait()

    def revive(self) -> None:
        """Start another in place of each that has ended, as a supervisor does."""
        for at, process in enumerate(self._running):
            if process.poll() is not None:
                assert process.stdin is not None
                process.stdin.close()
                self._running[at] = self._start()

    def kill_one(self, chance: random.Random) -> None:
        """Kill one with its children, or a child alone; each is replaced."""
        process = psutil.Process(chance.choice(self._running).pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._kill(chance.choice([process, *process.children()]))
        time.sleep(0.1)
        self.revive()

    def signal_one(self, chance: random.Random, number: signal.Signals) -> Callable[[], None]:
        """Signal a process, a child, or it and its children; returns what lets those go on."""
        one = psutil.Process(chance.choice(self._running).pid)
        those = [one]
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [one, *one.children()]
            those = chance.choice([family, [chance.choice(family)]])
        _send(those, number)
        return partial(_send, those, signal.SIGCONT)

    def _kill(self, process: psutil.Process) -> None:
        at, children = time.monotonic(), process.children()
        for one in (process, *children):
            _send([one], signal.SIGKILL)
            self._history.add("process", str(one.pid), "killed", at=at)

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        site = replace(self._site, seed=self._site.seed * 1000 + self._started)
        name = f"{self._command[2]}-{self._started}"
        command = list(self._command)
        if self._command is WORKER:
            command += ["-n", f"{name}@proof"]
        with open(f"{self._site.folder}/{name}.log", "ab") as log:  # noqa: PTH123
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=site.environment(),
            )


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)

"""The processes of a run, of which some are killed and stopped."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from proof.clocks import Clocks
    from proof.history import History
    from proof.site import Site

DEAD_WITHIN = 0.1  # seconds after which a killed process writes nothing any more
DEPLOYED_WITHIN = 20.0  # seconds that a worker has for its warm shutdown in a deploy
REFUSAL = b"Cannot start with locks"  # of a worker or a beat, while the lock server is away
UNSTARTED = b"Could not start worker processes"  # Celery's, if a child has died before it was up
LOG_SHOWN = 3_000  # bytes at the end of the log of a process that has ended by itself
ENDS_WITHIN = 60.0  # seconds until a process has ended, once nothing is wrong any more

PYTHON = (sys.executable, "-m")
LOCKING = (*PYTHON, "proof.locking")
COROUTINES = (*PYTHON, "proof.coroutines")
SENDING = (*PYTHON, "proof.sending")
WORKER = (*PYTHON, "celery", "-A", "proof.tasking", "worker", "--dislock", "-c", "2", "-l", "INFO")
BEAT = (*PYTHON, "celery", "-A", "proof.beating", "beat", "--dislock", "-l", "INFO")


class Processes:
    """
    The processes of one kind, as a context manager; leaving it lets them end what they do.

    Args:
        command: What each runs.
        number: How many there are at a time.
        site: Where they work.
        history: Where it is noted which of them was killed.
        clocks: Their wall clocks; None: that of the machine.

    Attributes:
        number: The argument of that name; 0: there are none.
    """

    def __init__(
        self,
        command: Sequence[str],
        number: int,
        site: Site,
        history: History,
        clocks: Clocks | None = None,
    ) -> None:
        self._command = command
        self._module = next(part for part in command if part.startswith("proof."))
        self.number = number
        self._site = site
        self._history = history
        self._clocks = clocks
        self.has_clocks = clocks is not None
        self._started = 0
        self._folders = [Path.cwd()] * number  # with the package that each has
        self._logs, self._since = [Path()] * number, [0.0] * number
        self._mutex = threading.Lock()  # several kinds of faults start others in place of some
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._running = [self._start(at) for at in range(self.number)]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()  # ends those that read it
            if self._command in (WORKER, BEAT):
                process.terminate()
        until = time.monotonic() + ENDS_WITHIN
        for process in self._running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._history.add("process", str(process.pid), "stuck", command=self._module)
                self._kill(psutil.Process(process.pid))
                process.wait()

    def revive(self) -> None:
        """Start another in place of each that has ended, as a supervisor does."""
        with self._mutex:
            for at, process in enumerate(self._running):
                if process.poll() is not None:
                    if process.returncode not in (0, -signal.SIGTERM, -signal.SIGKILL):
                        self._note_end(process, at)
                    assert process.stdin is not None
                    process.stdin.close()
                    self._running[at] = self._start(at)

    def _note_end(self, process: subprocess.Popen[bytes], at: int) -> None:
        log = self._logs[at].read_bytes()
        kind = "refused" if REFUSAL in log else "unstarted" if UNSTARTED in log else "failed"
        more = {"code": process.returncode, "since": self._since[at]}
        end = log[-LOG_SHOWN:].decode("utf-8", "replace")
        self._history.add("process", str(process.pid), kind, **more, log=end)

    def kill_one(self, chance: random.Random) -> None:
        """Kill one with its children, or a child alone; each is replaced."""
        process = psutil.Process(chance.choice(self._running).pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._kill(chance.choice([process, *process.children()]))
        time.sleep(DEAD_WITHIN)
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

    def clock_of_one(self, chance: random.Random) -> Callable[[int], None]:
        """Return what sets the clock of one, and of its children, by some seconds."""
        clocks, name = self._clocks, self._name(chance.randrange(self.number))
        assert clocks is not None

        def set_by(seconds: int) -> None:
            if seconds:
                self._history.add("clock", name, "wrong")
            clocks.set(name, seconds)
            if not seconds:
                self._history.add("clock", name, "right")

        return set_by

    def set_clocks(self, seconds: int) -> None:
        """Set the clocks of all by some seconds."""
        assert self._clocks is not None
        for at in range(self.number):
            self._clocks.set(self._name(at), seconds)

    def deploy(self, folder: Path) -> None:
        """
        Replace each worker, one after the other, by one that has the package of this folder.

        One that does not end in time is killed, as a supervisor does.
        """
        for at in range(self.number):
            self._folders[at], old = folder, self._running[at]
            self._history.add("process", str(old.pid), "terminated")
            old.terminate()
            until = time.monotonic() + DEPLOYED_WITHIN
            while old.poll() is None and time.monotonic() < until:
                time.sleep(DEAD_WITHIN)
            with contextlib.suppress(psutil.NoSuchProcess):
                if old.poll() is None:
                    self._kill(psutil.Process(old.pid))
                    old.wait()
            self.revive()

    def _name(self, at: int) -> str:
        return f"{self._module}-clock-{at}"

    def _kill(self, process: psutil.Process) -> None:
        at, parent, children = time.monotonic(), process.ppid(), process.children()
        for one, of in ((process, parent), *((child, process.pid) for child in children)):
            _send([one], signal.SIGKILL)
            self._history.add("process", str(one.pid), "killed", at=at, of=str(of))

    def _start(self, at: int) -> subprocess.Popen[bytes]:
        self._started += 1
        clock = self._clocks.of(self._name(at)) if self._clocks else {}
        site = replace(self._site, seed=self._site.seed * 1000 + self._started)
        name = f"{self._module}-{self._started}"
        command = list(self._command)
        if self._command is WORKER:
            command += ["-n", f"{name}@proof"]
        self._logs[at], self._since[at] = Path(self._site.folder, f"{name}.log"), time.monotonic()
        with self._logs[at].open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**site.environment(), **clock},
                cwd=self._folders[at],
                start_new_session=True,  # a Ctrl-C is for the run, which ends them in its order
            )


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)

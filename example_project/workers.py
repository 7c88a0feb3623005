"""
Run the shop's workers as processes of one's own, and end them again.

Each worker leads a process group: Ctrl-C in the terminal does not reach it, so that the program
that started it decides, and what is left of it at the end, a pool process that does not stop
included, is ended with the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from example_project import timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

PROJECT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 60.0  # seconds until a new worker must be ready
STOP_TIMEOUT = 8.0  # seconds that a worker is given to stop until it is killed
POLL_INTERVAL = 0.05  # seconds


class WorkerFailed(RuntimeError):  # noqa: N818  # reads as what is the case
    """A worker did not start; the message says where its log is."""


def wait_until(condition: Callable[[], bool], what: str, timeout: float) -> None:
    """
    Return as soon as the condition is true.

    Args:
        condition: Asked again and again.
        what: What is waited for, for the error.
        timeout: Seconds.

    Raises:
        TimeoutError: It was not true in time.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(POLL_INTERVAL)


class Workers:
    """
    Worker processes of the shop, as a context manager.

    Entering starts them and waits until all are ready; leaving ends them, whatever happened inside.

    Args:
        names: One for each worker: ``w1``.
        folder: Where their logs go.
        settings: Environment variables of the shop; ``SHOP_TIMELINE`` has to be among them.
        options: Of ``celery worker``.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        settings: Mapping[str, str],
        options: Sequence[str] = ("--dislock",),
    ) -> None:
        self.pids: dict[str, int] = {}
        self._names = names
        self._folder = folder
        self._settings = settings
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        since = time.time()
        try:
            for name in self._names:
                self._processes[name] = self._start(name)
                self.pids[name] = self._processes[name].pid
            wait_until(lambda: self._are_ready(since), "workers are ready", START_TIMEOUT)
        except BaseException:
            self.stop(warm=False)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(warm=exc is None)

    def log(self, name: str) -> Path:
        """Return the file that a worker logs to."""
        return self._folder / f"{name}.log"

    def stop(self, *, warm: bool = True) -> None:
        """
        End the workers and wait until they are gone.

        Args:
            warm: Whether running tasks may end first.  What is left after `STOP_TIMEOUT` is killed
                either way.
        """
        try:
            for process in self._processes.values():
                process.send_signal(signal.SIGTERM if warm else signal.SIGQUIT)
            deadline = time.monotonic() + STOP_TIMEOUT
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C included
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._processes.clear()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", "example_project.shop", "worker"]
        command += ["-n", f"{name}@%h", "--loglevel", "INFO", *self._options]
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**os.environ, **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _are_ready(self, since: float) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise WorkerFailed(
                    f"worker {name} ended with {process.returncode}: {self.log(name)}"
                )
        events = timeline.read(Path(self._settings["SHOP_TIMELINE"]), since)
        ready = {event["pid"] for event in events if event["what"] == "ready"}
        return ready >= {process.pid for process in self._processes.values()}

"""A worker of `recorded_tasks` beside the benchmark, and what its file says."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from benchmarks.processes import processor_time, started
from benchmarks.recorded_tasks import Delivery, make_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STARTING = 30.0  # seconds that the worker is given to start
LOOK_EVERY = 0.02  # seconds


class Recorded:
    """
    A running worker.

    Args:
        process: Of the worker.
        file: Where it notes its deliveries.
        url: Of its broker and its results.
        lock_url: Of its lock server.
    """

    def __init__(self, process: psutil.Process, file: Path, url: str, lock_url: str) -> None:
        self.app = make_app(url, lock_url)
        self.lock_url = lock_url
        self._process = process
        self._file = file
        self._read = 0

    def cpu(self) -> float:
        """Return the seconds of CPU that the worker's processes have used, all of them."""
        return processor_time(self._process)

    def news(self) -> list[Delivery]:
        """Return what has been noted since it was last asked."""
        with self._file.open("rb") as file:
            file.seek(self._read)
            noted = file.read()
        noted = noted[: noted.rfind(b"\n") + 1]
        self._read += len(noted)
        return [Delivery(*json.loads(line)) for line in noted.splitlines()]

    def until(self, enough: Callable[[list[Delivery]], bool], within: float) -> list[Delivery]:
        """Wait until the deliveries that are noted from now on are enough; return them."""
        deadline = time.monotonic() + within
        noted: list[Delivery] = []
        while not enough(noted):
            if time.monotonic() > deadline or not self._process.is_running():
                raise RuntimeError(f"a run does not end: {len(noted)} deliveries in {within:g} s")
            time.sleep(LOOK_EVERY)
            noted += self.news()
        return noted


def ran(noted: list[Delivery]) -> list[Delivery]:
    """Return the deliveries whose body ran."""
    return [delivery for delivery in noted if delivery.body_began is not None]


@contextmanager
def worker(folder: Path, url: str, lock_url: str, concurrency: int) -> Iterator[Recorded]:
    """Run a prefork worker, and wait until it takes tasks; it is stopped in the end."""
    file, log = folder / "deliveries", folder / "worker.log"
    file.touch()
    command = [sys.executable, "-m", "benchmarks.recorded_tasks", url, lock_url, str(file)]
    command += ["--pool", "prefork", "--concurrency", str(concurrency)]
    with started(command, log) as process:
        recorded = Recorded(psutil.Process(process.pid), file, url, lock_url)
        # One for each process at least: what a process does once only is not to be measured.
        for n in range(20 * concurrency):
            for name in ("plain", "queue"):
                recorded.app.tasks[name].apply_async((f"warm:{name}:{n}", LOOK_EVERY))
        try:
            recorded.until(lambda noted: len(noted) == 2 * 20 * concurrency, STARTING)
        except RuntimeError as exc:
            raise RuntimeError(f"the worker does not start:\n{log.read_text()}") from exc
        yield recorded

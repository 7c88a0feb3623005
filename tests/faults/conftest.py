from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.proxy import Proxy
from tests.holding import Holding, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def proxy(redis_url, redis_server) -> Iterator[Proxy]:
    """A proxy before the session's server, which is empty."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def others(redis_url) -> Iterator[Holding]:
    """Another process's locks, straight at the session's server."""
    with Holding(redis_url) as others:
        yield others


class HolderProcess:
    """A process of ``tests.faults.holder``, and the lines that it has printed."""

    def __init__(self, *args: object) -> None:
        self.lines: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.holder", *map(str, args)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def all(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line["event"] == event]

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for the first line of that event."""
        line: dict[str, Any] = wait_for(
            lambda: self.all(event) or (not self.running and not self._reader.is_alive()),
            f"{event!r} from process {self.pid}",
        )[0]
        return line

    def stop(self) -> None:
        """Freeze it, and wait until the kernel has."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def finish(self) -> int:
        """Let it end by itself, and return its exit status."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self.go_on()
        status = self._process.wait(30)
        self._close()
        return status

    def _close(self) -> None:
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def dispose(self) -> None:
        if self.running:
            self.kill()
        self._close()


@pytest.fixture
def start_holder() -> Iterator[Any]:
    """Start holder processes; whatever happens, none outlives the test."""
    started = []

    def start(*args: object) -> HolderProcess:
        started.append(HolderProcess(*args))
        return started[-1]

    yield start
    for process in started:
        process.dispose()

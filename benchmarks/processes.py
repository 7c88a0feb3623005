"""The processes that a benchmark starts."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.environments import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import psutil

STOPPING = 15.0  # seconds that a worker is given to stop


@contextmanager
def started(
    command: Sequence[str],
    log: Path,
    *,
    patience: float = STOPPING,
    asked: bool = False,
    **env: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """
    Start a process, and end it in the end: by its own means, or else by SIGKILL.

    Args:
        command: The command, run in the root of the project.
        log: The file that gets its output.
        patience: Seconds that it is given to end by its own means.
        asked: Standard output is not logged, but for the caller to read.
        env: Variables beside those of this process.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if asked else output,
            stderr=output,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(patience)
            finally:
                process.kill()


def processor_time(process: psutil.Process) -> float:
    """Return the seconds that the processors have worked for a process and its children."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))

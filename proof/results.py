"""What came of the runs that the page tells of, kept as lines of a file.

A line is one run, one control, one simulation or one peer, with its date, and with the machine and
the versions on which it was.  Nothing is on the page that is not here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from tests.redis_server import find_server

FILE = Path(__file__).with_name("results.jsonl")
GIB = 1024**3
PACKAGES = ("celery", "kombu", "redis")

Result = dict[str, Any]


def add(what: str, **more: Any) -> None:
    """Keep what came of a run, a control, a simulation or a peer."""
    today = datetime.now(timezone.utc).date().isoformat()
    with FILE.open("a", encoding="utf-8") as file:
        result = {"what": what, "date": today, **more, "machine": machine(), "with": versions()}
        file.write(json.dumps(result) + "\n")


def forget(what: str, **more: Any) -> None:
    """Keep nothing, of a run that the page does not tell of."""


def read(file: Path = FILE) -> list[Result]:
    """Return what was kept, in its order."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def machine() -> str:
    """Describe this machine, without its name."""
    memory = round(psutil.virtual_memory().total / GIB)
    system = platform.system()
    if system == "Linux":
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    return f"{os.cpu_count()} cores, {memory} GB, {system}"


def versions() -> str:
    """Name what has run: this project by its commit, and all others by their versions."""
    redis_version = _says(str(find_server()), "--version").partition("v=")[2].split(" ")[0]
    changed = " with changes" * bool(_says("git", "diff", "HEAD", "--", "../celery_dislock"))
    return ", ".join(
        [
            f"celery-dislock {_says('git', 'describe', '--always', '--tags')}{changed}",
            f"Python {platform.python_version()}",
            *(f"{name} {version(name)}" for name in PACKAGES),
            f"Redis {redis_version}",
        ]
    )


def _says(*command: str) -> str:
    folder = FILE.parent
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    return done.stdout.strip()

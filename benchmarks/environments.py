"""An environment for each peer, made by pip at the first run and kept in .venvs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = {
    "celery-once": ("celery[redis]", "celery-once>=3.0.1", "six"),  # six is not declared there
    "celery-singleton": ("celery[redis]", "celery-singleton>=0.3.1"),
    "python-redis-lock": ("redis[hiredis]>=5", "python-redis-lock>=4"),
    "redis-py Lock": ("redis[hiredis]>=5",),
}
INSTALLING = 300.0  # seconds
ROOT = Path(__file__).parents[1]


class NotInstalled(RuntimeError):  # noqa: N818  # reads as what is the case
    """The environment of a peer cannot be made; the message says why, in one line."""


def environment(name: str) -> str:
    """
    Return the Python of a peer's own environment; made where it is not there yet.

    Raises:
        NotInstalled: There is no such package, or no network.
    """
    major, minor = sys.version_info[:2]
    folder = ROOT / ".venvs" / f"bench-{name.replace(' ', '-')}-{major}.{minor}"
    python, complete = folder / "bin" / "python", folder / ".installed"
    if not complete.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, *REQUIREMENTS[name]],
        ):
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=INSTALLING)
            except subprocess.CalledProcessError as exc:
                said = exc.stderr.decode(errors="replace").strip().splitlines()
                raise NotInstalled(said[-1] if said else str(exc)) from exc
            except (OSError, subprocess.TimeoutExpired) as exc:
                raise NotInstalled(str(exc)) from exc
        complete.touch()
    return str(python)

"""The version before this one, to which workers are deployed, and back."""

from __future__ import annotations

import io
import subprocess
import tarfile
from typing import TYPE_CHECKING

from proof.site import ROOT

if TYPE_CHECKING:
    from pathlib import Path

BACK = 10  # commits, as long as nothing was released; it must know the options of all tasks
MISSING = "The history of this repository is not here: no earlier version is deployed."


def unpack(folder: Path, revision: str = "") -> Path | None:
    """
    Unpack the package of an earlier version.

    Args:
        folder: Made for it.
        revision: Which; empty: the last release, or else some commits ago.

    Returns:
        A folder with the package; None: the revision is not here, as in a shallow clone.
    """
    revision = revision or _git("describe", "--tags", "--abbrev=0").decode().strip()
    packed = _git("archive", revision or f"HEAD~{BACK}", "celery_dislock")
    if not packed:
        return None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _git(*command: str) -> bytes:
    """Return what git prints; nothing if it fails, or is not here."""
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, check=False, capture_output=True)  # noqa: S607
    except FileNotFoundError:
        return b""
    return b"" if done.returncode else done.stdout

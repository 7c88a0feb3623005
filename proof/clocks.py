"""Wall clocks that can be set, each for some processes of a run.

A library that is preloaded tells them a time that is wrong by the number in a file; ``clock.c`` has
its source.  Their monotonic clock stays right, which the history and its judge go by.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE = Path(__file__).with_name("clock.c")
CANNOT = "No C compiler (cc) is here: no clock is set."


def can_be_set() -> bool:
    """Return whether there is a compiler, which clocks need that can be set."""
    return shutil.which("cc") is not None


class Clocks:
    """
    The clocks of a run.  Each has a name, and is right at first.

    Args:
        folder: For the library and the files; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._library = self._folder / "clock.so"
        self._folder.mkdir(parents=True, exist_ok=True)
        build = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE)]
        subprocess.run(build, check=True)

    def of(self, name: str) -> Mapping[str, str]:
        """Return what a process that has this clock needs in its environment."""
        if not (self._folder / name).exists():
            self.set(name, 0)
        clock = str(self._folder / name)
        return {"LD_PRELOAD": str(self._library), "DISLOCK_PROOF_CLOCK": clock}

    def set(self, name: str, seconds: int) -> None:
        """Let a clock be wrong by so many seconds from now on."""
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(file, struct.pack("q", seconds))  # at once, as the processes have it in memory
        os.close(file)

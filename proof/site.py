"""What the processes of one run share, handed to each in its environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "DISLOCK_PROOF"
TICKS = "ticks"  # the queue of what beats send
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Site:
    """
    Where a run takes place.

    Attributes:
        url: The lock server.
        options: Its transport options.
        has_lines: Whether it can have lines, and locks of several holders.
        broker: The broker.
        results: Keeps the results.
        folder: The history and the files.
        seed: Of this process.
        timeout: Seconds of a lease.
        control: What is broken on purpose; empty: nothing is.
    """

    url: str | list[str]
    options: dict[str, Any]
    has_lines: bool
    broker: str
    results: str
    folder: str
    seed: int
    timeout: float
    control: str = ""

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that works here, in whatever folder."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": path}

    @classmethod
    def of_this_process(cls) -> Site:
        """Return the site that this process works on, and break what it wants broken."""
        site = cls(**json.loads(os.environ[VARIABLE]))
        if site.control:
            from proof.controls import CONTROLS  # noqa: PLC0415 -- it knows this package only

            CONTROLS[site.control].breaks()
        return site

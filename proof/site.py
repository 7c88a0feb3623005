"""What the processes of one run share, handed to each in its environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from proof.controls import CONTROLS

VARIABLE = "DISLOCK_PROOF"


@dataclass(frozen=True)
class Site:
    """
    Where a run takes place.

    Attributes:
        url: The lock server.
        options: Its transport options.
        has_lines: Whether it can have lines, and locks of several holders.
        has_pairs: Whether a task can have locks that are anywhere on it.
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
    has_pairs: bool
    broker: str
    results: str
    folder: str
    seed: int
    timeout: float
    control: str = ""

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that works here."""
        return {**os.environ, VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_this_process(cls) -> Site:
        """Return the site that this process works on, and break what it wants broken."""
        site = cls(**json.loads(os.environ[VARIABLE]))
        if site.control:
            CONTROLS[site.control].breaks()
        return site

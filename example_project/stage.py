"""What a scene of the demo is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from example_project import timeline
from example_project.timeline import bodies, holds
from tests.redis_server import Client

if TYPE_CHECKING:
    from pathlib import Path

    from example_project.timeline import Span


@dataclass
class Stage:
    """What the scenes play on."""

    url: str  # of the lock server
    events_file: Path
    watchdog_timeout: float  # seconds
    slots: int  # of all workers together

    def events(self, since: float) -> list[dict[str, Any]]:
        """Return what was recorded from then on."""
        return timeline.read(self.events_file, since)

    def is_locked(self, key: str) -> bool:
        """Ask Redis whether it has anything under the lock's name."""
        with Client.from_url(self.url) as client:
            return bool(client.exists(f"dislock:{{{key}}}"))


@dataclass
class Timeline:
    """What is drawn of a scene.

    Attributes:
        title: What the bars stand for.
        spans: Who held which lock; which bodies ran, where nobody held any.
        refused: Key and Unix time of each click that did not get its lock at once.
        others: What became of these: "refused" or "parked".
        held: Whether the bars stand for locks, not for bodies that ran without any.
        headline: What happened, in a line above the picture; empty for the title.
    """

    title: str
    spans: list[Span]
    refused: list[tuple[str, float]]
    others: str = "refused"
    held: bool = True
    headline: str = ""

    @classmethod
    def of(
        cls, how: str, events: list[dict[str, Any]], *, headline: str, others: str = "refused"
    ) -> Timeline:
        """Choose what to draw; *how* the scene was played begins the title."""
        refused = [(event["key"], event["at"]) for event in events if event["what"] == "conflict"]
        held = holds(events)
        bars = "who held the lock" if held else "who ran; nobody held a lock"
        title = f"{how}: {bars}" if how else bars
        return cls(title, held or bodies(events), refused, others, bool(held), headline)


@dataclass
class Outcome:
    """What a scene has to show.

    Attributes:
        verdict: What happened, in numbers.
        problems: Why the scene failed; empty where it passed.
        notes: More that is worth reading.
        timelines: What is drawn.
    """

    verdict: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    def expect(self, condition: bool, problem: str) -> None:  # noqa: FBT001  # the thing itself
        """Count it as a problem where the condition is not true."""
        if not condition:
            self.problems.append(problem)

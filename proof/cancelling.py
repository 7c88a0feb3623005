"""Judge the tasks of a run that cancel each other: the newest takes over.

Of two tasks one was sent later if its sender asked for that when the other had been sent.  The lock
server goes by what their messages say, which is the sender's wall clock, and neither later than the
clock of the worker that has the message nor than its own.  A clock that is wrong excuses.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from proof.events import Violation, all_tasks, faults

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from proof.events import Task
    from proof.history import Event

RIGHT = 0.5  # seconds by which a clock is off at most; one that is set is wrong by more
NAMED = re.compile(r"replaces it: task (\w+)")
PASSED = "a newer task took its place"


@dataclass
class Sent:
    """A task that cancels others, or may: from when to when it was sent, and what came of it."""

    task: Task
    name: str
    key: str
    asked: float
    sent: float  # by then, if it was
    ahead: float  # of its message's clock, in seconds
    is_known: bool  # to be sent: else its sender was told of an error
    seen: list[float] = field(default_factory=list)  # when an execution of it was over

    def is_newer(self, other: Sent) -> bool:
        """Return whether this one was sent after the other."""
        return self.key == other.key and self.asked > other.sent


def all_sent(events: Sequence[Event]) -> dict[str, Sent]:
    """Return the tasks of a history that cancel others, by id."""
    tasks, found = all_tasks(events), {}
    for event in events:
        if event.what == "task" and event.more.get("cancels"):
            more, is_known = event.more, event.kind == "sent"
            ahead = math.inf if more["ahead"] is None else more["ahead"]
            about = event.about, more["key"], more["asked"], event.at
            found[event.about] = Sent(tasks[event.about], *about, ahead, is_known)
    for event in events:
        if event.what == "task" and event.kind == "over" and event.about in found:
            found[event.about].seen.append(event.at)
    return found


def wrong_clocks(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return from when to when the clock of a worker or of the lock server was wrong."""
    found, since = faults(events, "sets_clock"), dict[str, float]()
    for event in events:
        if event.what == "clock" and event.about in since:
            found.append((since.pop(event.about), event.at + RIGHT))
        if event.what == "clock" and event.kind == "wrong":
            since[event.about] = event.at
    return found + [(at, math.inf) for at in since.values()]


def takes_over(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """
    None begins after one that was sent later has begun; the newest succeeds.

    Who is revoked names one that was sent later, or has lost its place in line to one.
    """
    found, forgot, wrong = all_sent(events), faults(events, "loses_data"), wrong_clocks(events)
    usual = median([one.ahead for one in found.values()] or [0.0])
    by_key: dict[str, list[Sent]] = defaultdict(list)
    for one in found.values():
        by_key[one.key].append(one)
    counts["tasks that cancel others"] += len(found)
    counts["tasks that were told to end"] += sum(
        event.what == "task" and event.kind == "told" for event in events
    )

    def is_excused(one: Sent, other: Sent, until: float) -> bool:
        """Return whether one of them is misdated, or the server may have forgotten the other."""
        since = min(one.asked, other.asked)
        return (
            max(abs(one.ahead - usual), abs(other.ahead - usual)) > RIGHT
            or any(begin <= until and since <= end for begin, end in wrong)
            or any(begin <= until and other.asked <= end for begin, end in forgot)
        )

    for of_key in by_key.values():
        for one in of_key:
            yield from _begins_late(one, of_key, is_excused)
            outcome = one.task.outcome
            if outcome is None or not one.is_known:
                continue
            state, until = outcome.more["state"], max(one.seen, default=math.inf)
            counts[f"tasks that cancel others, {state}"] += 1
            text = f"task {one.name} of {one.key}"
            if state != "REVOKED":
                continue
            reason = outcome.more.get("reason", "")
            named = NAMED.search(reason)
            if named and named[1] not in found:
                continue  # its sender was killed
            others = [found[named[1]]] if named else of_key if PASSED in reason else []
            others = [other for other in others if other is not one]
            if all(one.is_newer(x) and not is_excused(one, x, until) for x in others):
                why = f"{text} is revoked, and not for one that was sent later: {reason}"
                yield Violation("takes over", why, one.sent)


def _begins_late(
    one: Sent, of_key: Sequence[Sent], is_excused: Callable[[Sent, Sent, float], bool]
) -> Iterator[Violation]:
    for since, begin in zip(one.task.asked, one.task.begins, strict=True):
        for other in of_key:
            began = min(other.task.begins, default=math.inf)
            if other.is_newer(one) and began < since and not is_excused(one, other, begin):
                text = f"task {one.name} of {one.key} began after {other.name}, sent later"
                yield Violation("takes over", text, begin)
                return

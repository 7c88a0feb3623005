"""What the events of a history say: who held what, who asked for what, and what went wrong."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proof.history import Event

RENEWALS_PER_TIMEOUT = 3  # as is promised
MOMENTS = 2.0  # seconds in which a cancellation takes effect, and what was cancelled is gone
SILENCE = 0.25  # seconds without an answer, after which the lock server is away


class Violation(NamedTuple):
    """
    A broken promise.

    Attributes:
        promise: Which one: "exclusion", "token", "kept", "free", "order", "end", "cancelled",
            "once", "nothing lost", "newest", "takes over", "clean", "written", "tick", "again",
            "missed", "silent", "at least", "cap", "crash", "all or none", "rate".
        text: What happened, for people.
        at: When it happened, in seconds of the history's clock.
    """

    promise: str
    text: str
    at: float


@dataclass
class Hold:
    """
    One owner's hold on a lock, as its process saw it.

    Attributes:
        asked: When it was asked for.
        since: Since when its timeout has run, as its process knows: before the request was sent.
        begin: When it was granted.
        until: The last instant at which it was trusted.
        lost: When its loss was declared; None: it was not.
        left: When its body ended; None: it never did, because its process was killed.
        timeout: Seconds after which its lease expires unless it is renewed; 0: it never does.
        at_least: Seconds for which its lock is held, however soon its body ends.
        cap: How often it is renewed; 0: without a limit.
        rate: How many begin in a window of how many seconds at most; None: any number.
        cost: For how many it counts, of the limit and of the rate.
    """

    key: str
    process: str
    token: int | None
    shared: bool
    limit: int
    timeout: float
    asked: float
    since: float
    begin: float
    until: float
    lost: float | None = None
    left: float | None = None
    at_least: float = 0.0
    cap: int = 0
    rate: tuple[int, float] | None = None
    cost: int = 1

    @property
    def is_capped(self) -> bool:
        """Whether it was lost after as many renewals as it may have."""
        lasts = self.cap * self.timeout / RENEWALS_PER_TIMEOUT
        return self.lost is not None and self.cap > 0 and self.lost - self.since >= lasts

    def excludes(self, others: Sequence[Hold]) -> bool:
        """Return whether the lock must not admit this hold beside those others."""
        if self.shared:
            return any(not other.shared for other in others)
        taken = sum(other.cost for other in others) + min(self.cost, max(self.limit, 1))
        return any(other.shared for other in others) or taken > self.limit

    def was_told(self, at: float) -> bool:
        """Return whether its loss had been declared by then."""
        return self.lost is not None and self.lost < at

    def __str__(self) -> str:
        return f"{self.process} (token {self.token})"


def holds(events: Iterable[Event]) -> list[Hold]:
    """Return the holds of a history, in the order of their grants."""
    found: dict[str, Hold] = {}
    for event in events:
        if event.what != "hold":
            continue
        if event.kind == "begin":
            more = event.more
            found[event.about] = Hold(
                more["key"],
                event.process,
                more.get("token"),
                more.get("mode") == "shared",
                more.get("limit", 1),
                more.get("timeout", 0.0),
                more.get("asked", event.at),
                more.get("since", event.at),
                event.at,
                event.at,
                at_least=more.get("at_least", 0.0),
                cap=more.get("cap", 0),
                rate=more.get("rate"),
                cost=more.get("cost", 1),
            )
            continue
        hold = found[event.about]
        if event.kind == "lost":
            hold.lost = event.at
        elif event.kind == "end":
            hold.left = event.at
        if event.kind != "lost" and hold.lost is None:
            hold.until = event.at
    return sorted(found.values(), key=lambda hold: hold.begin)


def faults(
    events: Iterable[Event], which: str = "", *, spares: str = "", kills: bool = True
) -> list[tuple[float, float]]:
    """
    Return from when to when each fault lasted that does this, and does not spare that.

    Those that only kill processes are among them, unless *kills* is false.

    A lock server that nobody has heard for a while is away, as on a machine that stands still: then
    leases suffer, and nothing else does.
    """
    begun: dict[str, float] = {}
    found = []
    for event in events:
        if (which and not event.more.get(which)) or event.more.get(spares):
            continue
        if not kills and event.more.get("kills"):
            continue
        if event.what == "fault" and event.kind == "begin":
            begun[event.about] = event.at
        elif event.what == "fault":
            found.append((begun.pop(event.about, event.at), event.at))
    if spares == "spares_leases":
        heard = [event.at for event in events if event.what == "server"]
        found += [one for one in pairwise(heard) if one[1] - one[0] > SILENCE]
    return found + [(at, math.inf) for at in begun.values()]


def pause(heard: Iterable[float], since: float, until: float) -> float:
    """Return for how long at most nothing was heard of a process in that time."""
    between = [at for at in heard if since < at < until]
    return max(later - at for at, later in pairwise([since, *between, until]))


@dataclass
class Operation:
    """Something that a process asked for: when, on which terms, and what came of it."""

    process: str
    begin: float
    more: dict[str, Any]
    in_line: float | None = None
    end: float | None = None
    outcome: str = "open"
    freed: float | None = None
    answered: bool = True
    cancelled: float | None = None

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the locks that it asked for."""
        keys: Sequence[str] = self.more.get("keys") or [self.more["key"]]
        return keys

    @property
    def is_refused(self) -> bool:
        """Whether it was refused."""
        return self.outcome == "refused"

    @property
    def lasts(self) -> float:
        """Seconds after which its lease ends if nobody renews it."""
        return float(self.more.get("lasts", 0.0))

    def over(
        self,
        wrong: Iterable[tuple[float, float]],
        forgot: Iterable[tuple[float, float]],
        jumps: Iterable[tuple[float, float]],
    ) -> float:
        """
        Return when nothing of it can be in anybody's way any more.

        Args:
            wrong: All faults.
            forgot: Those in which the server loses data, or one of several misses what it is told:
                also that a lease was released.
            jumps: Those in which its clock is set: what expires by itself may do so much later.
        """
        if self.cancelled is not None:
            since, until = self.end or self.begin, self.cancelled + MOMENTS
            calm = all(end < since or until < begin for begin, end in wrong)
            return until if calm else math.inf
        if self.outcome == "ok" and self.freed is not None:
            again = [end + self.lasts for begin, end in forgot if begin <= self.freed <= end]
            if not self.answered and any(self.begin <= end for _, end in jumps):
                return math.inf
            return max([self.freed if self.answered else self.freed + self.lasts, *again])
        if not self.is_refused or not self.end:
            return math.inf
        # Of several locks it gives back those that it had: that may be lost.
        loses = any(begin <= self.end and self.begin <= end for begin, end in wrong)
        return self.end + self.lasts if loses and len(self.keys) > 1 else self.end


def operations(events: Iterable[Event], what: str = "operation") -> dict[str, Operation]:
    """Return the operations of a history, by id; or its probes."""
    found: dict[str, Operation] = {}
    for event in events:
        if event.what != what:
            continue
        if event.kind == "invoke":
            found[event.about] = Operation(event.process, event.at, event.more)
        elif event.kind == "in line":
            found[event.about].in_line = event.at
        elif event.kind == "freed":
            found[event.about].freed = event.at
            found[event.about].answered = event.more.get("answered", True)
        elif event.kind == "cancelled":  # the acquisition, or the release
            found[event.about].cancelled = event.at
        else:
            found[event.about].end, found[event.about].outcome = event.at, event.kind
    return found


@dataclass
class Body:
    """A body: where it ran, when it had asked for its lock, its begin, and its end, if known."""

    process: str
    asked: float
    begin: float
    over: float = math.inf


@dataclass
class Task:
    """
    A task: when it was sent, when its bodies had asked for their locks and began, its end.

    Attributes:
        over: The ends of its executions, of those without a body too: then a message is
            acknowledged.  That it asks for a retry is one, as its process may die soon after.
    """

    more: Mapping[str, Any]
    sent: float = math.inf
    over: list[Event] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    outcome: Event | None = None

    @property
    def ended(self) -> Event | None:
        """The first end of a body that asked for no retry."""
        return next((one for one in self.over if one.kind == "end"), None)

    @property
    def retried(self) -> list[float]:
        """When its bodies asked for a retry."""
        return [one.at for one in self.over if one.kind == "retries"]

    @property
    def begins(self) -> list[float]:
        """When its bodies began."""
        return [body.begin for body in self.bodies]

    @property
    def asked(self) -> list[float]:
        """When its bodies had asked for their locks; 0: not known."""
        return [body.asked for body in self.bodies]

    @property
    def claimed(self) -> float:
        """When its first body had asked for its lock, or began if that is not known."""
        return min((body.asked or body.begin for body in self.bodies), default=math.inf)


def all_tasks(events: Iterable[Event]) -> dict[str, Task]:
    """Return the tasks of a history, by id; those that were not known to be sent, too."""
    found: dict[str, Task] = defaultdict(lambda: Task({}))
    for event in events:
        if event.what != "task":
            continue
        task = found[event.about]
        if event.kind == "sent":
            task.sent, task.more = event.at, event.more
        elif event.kind == "begin":
            task.bodies.append(Body(event.process, event.more.get("since", 0.0), event.at))
        elif event.kind in {"end", "over", "retries"}:
            task.over.append(event)
            for body in task.bodies:
                if body.process == event.process:
                    body.over = min(body.over, event.at)
        elif event.kind == "outcome":
            task.outcome = event
    return found

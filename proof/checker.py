"""Judge a history; knows what was promised, and nothing of how it is done.

The history says when each process *trusted* a hold: from the instant at which it was granted to
the last at which it looked and the lock said that it is held.  Two holds that a lock must not admit
at a time, and that were trusted at a time, are a broken lock.  What a body does after it was told
of the loss is not: that overlap is *declared*, and counted beside.

Where the lock server itself forgets, as a replica does that was behind its master, a lock can be
given twice: no lock without a fencing token prevents that.  Who has lost a lease in this way must
stop trusting it within its timeout.

Unknown outcomes stay open.  An operation whose process was killed may have happened or not, and
neither is a violation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from proof.cancelling import takes_over
from proof.durations import caps, crashes, held_on, rates
from proof.events import (
    MOMENTS,
    Hold,
    Operation,
    Task,
    Violation,
    all_tasks,
    faults,
    holds,
    operations,
    pause,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from proof.history import Event

SLACK = 30.0  # seconds beyond its limit after which a wait has no end
CALM = 1.5  # timeouts without a fault, in which a lease must have been renewed
TOLD = 0.6  # timeouts in which a lease has been renewed, and its reply has come
UNACKNOWLEDGED = 5.0  # seconds after its body in which a message may not be acknowledged yet
TRIED = 3.0  # seconds in which a message is published, or its sender gives up
MARKED = 3.0  # seconds from the return of the lock server until it is told what has ended
LATE = 0.2  # seconds by which a limit is noted after it was set, as clocks may differ
STALL = 0.25  # of the timeout: a process from which nothing was heard for so long did not run
MICROSECONDS = 1e6  # of a second: tokens are times of the server's clock
AHEAD = 0.5  # seconds; a clock that is set is wrong by more
ENDS_IN_WORDS = {
    "refused": "does not start",
    "unstarted": "does not start",
    "stuck": "does not end",
    "failed": "ends by itself",
}
EXCUSES = {
    "refused": "starts that were refused, as the server was away",
    "unstarted": "workers that Celery ended, as a child was killed before it was up",
}
SHOWN_FOR = 5.0  # seconds before a violation of which the faults are shown
SHOWN_MOST = 30  # events of each
PROMPT = 1.0  # seconds in which a beat sends what is due, and goes round twice


@dataclass
class Verdict:
    """
    What the checker says of a history.

    Attributes:
        events: The history.
        violations: What was promised and did not hold.
        counts: How many holds, tasks, elements and operations there were, and how many overlaps
            that had been declared, writes that the lock alone did not save, and so on.
    """

    events: Sequence[Event] = ()
    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def evidence(self, violation: Violation) -> list[Event]:
        """Return what the history says of what a violation names, and the faults before it."""
        since = violation.at - SHOWN_FOR

        def is_of_it(event: Event) -> bool:
            if event.what in {"fault", "process"}:
                return since < event.at <= violation.at and event.kind != "runs"
            return event.what in {"task", "tick"} and event.about in violation.text

        return list(filter(is_of_it, self.events))[-SHOWN_MOST:]


def check(events: Sequence[Event]) -> Verdict:
    """Return what a history shows."""
    verdict = Verdict(events)
    for event in events:
        if event.what == "fault" and event.kind == "begin":
            verdict.counts[f"faults: {event.about.partition(' (')[0]}"] += 1
    for judge in JUDGES:
        for found in judge(events, verdict.counts):
            verdict.violations.append(found)
    verdict.violations.sort(key=lambda violation: violation.at)
    return verdict


def exclusion(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """No lock has more holds that are trusted at a time than it admits, and its tokens grow."""
    by_key: dict[str, list[Hold]] = defaultdict(list)
    granted = holds(events)
    for hold in granted:
        by_key[hold.key].append(hold)
        counts["holds"] += 1
        counts["losses declared"] += hold.lost is not None
    wrong, lost = faults(events, spares="spares_leases"), faults(events, "loses_data")
    forgot = lost + faults(events, "ends_leases")
    limits, jumps = limited(events), faults(events, "sets_clock")
    right, first = clock_of(granted), min((begin for begin, _ in jumps), default=math.inf)

    def token_of(one: Hold) -> int:
        """Return the token of a hold; 0 if the clock may have been ahead: smaller ones follow."""
        is_right = one.begin < first or ahead(one) < right + AHEAD
        return one.token or 0 if is_right else 0

    for key, of_key in by_key.items():
        trusted: list[Hold] = []
        believed: list[Hold] = []  # also by bodies that were told of a loss, and went on
        by_end = sorted(of_key, key=lambda one: one.until)
        ended = [one.until for one in by_end]
        largest = list(accumulate(map(token_of, by_end), max, initial=0))
        for hold in of_key:
            newest = largest[bisect_left(ended, hold.asked)]
            trusted = [one for one in trusted if one.until >= hold.begin]
            believed = [one for one in believed if (one.left or one.until) >= hold.begin]
            at = hold.begin
            remembered = [one for one in trusted if not was_forgotten(one, at, forgot, wrong)]
            known = [n for n, begin, end in limits[key] if begin < hold.asked and hold.begin < end]
            hold.limit = min([hold.limit, *known])
            if hold.excludes(remembered) and not was_forgotten(hold, at, forgot, wrong):
                beside = ", ".join(map(str, remembered)) or "a pause"
                yield Violation("exclusion", f"{key}: {hold} beside {beside}", hold.begin)
            elif hold.excludes([one for one in trusted if not was_forgotten(one, at, lost, wrong)]):
                counts["overlaps after a clock was set"] += 1
            elif hold.excludes(trusted):
                counts["overlaps after the server forgot"] += 1
            elif hold.excludes([one for one in believed if one.was_told(hold.begin)]):
                counts["overlaps declared"] += 1
            if (
                hold.token is not None
                and hold.token <= newest
                and not any(begin <= hold.begin <= end + MOMENTS for begin, end in jumps)
            ):
                yield Violation("token", f"{key}: {hold} after token {newest}", hold.begin)
            trusted.append(hold)
            believed.append(hold)


def was_forgotten(
    hold: Hold,
    at: float,
    forgot: Iterable[tuple[float, float]],
    wrong: Sequence[tuple[float, float]],
) -> bool:
    """
    Return whether the server forgot this hold before that time, and the hold ended soon.

    Its process is told at the next renewal.  If something is wrong then, or there is a cap after
    which none comes, its timeout is the limit.
    """

    def is_told_by(end: float) -> float:
        if hold.cap or any(since < hold.until and end < until for since, until in wrong):
            return end + hold.timeout
        return end + TOLD * hold.timeout

    return any(  # it was granted after it was asked for, and before that was known
        hold.asked <= end and begin <= at and hold.until <= is_told_by(end) for begin, end in forgot
    )


def clock_of(granted: Sequence[Hold]) -> float:
    """Return by how much the clock that tokens go by is ahead of the history's, if it is right."""
    return sorted(map(ahead, granted))[len(granted) // 2] if granted else 0.0  # it is seldom wrong


def ahead(hold: Hold) -> float:
    """Return by how many seconds a token is ahead of the history's clock."""
    return (hold.token or 0) / MICROSECONDS - hold.since


def limited(events: Iterable[Event]) -> dict[str, list[tuple[int, float, float]]]:
    """Return by key each limit that operators have set, and from when to when it was known."""
    forgot = faults(events, "loses_data") + faults(events, "ends_leases")
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for event in events:
        if event.what == "limit":
            limit, until, at = event.more["limit"], event.more["until"], event.at
            ends = [max(begin, at) for begin, end in forgot if end + LATE >= at]
            found[event.about].append((limit, at, min([until, *ends])))
    return found


def kept(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """A lease is not lost while its process runs and its server answers."""
    wrong = faults(events, spares="spares_leases")
    ran: dict[str, list[float]] = defaultdict(list)
    for event in events:
        ran[event.process].append(event.at)
        if event.what == "server":
            ran["server"].append(event.at)
    for hold in holds(events):
        if hold.lost is None or not hold.timeout or hold.is_capped:
            continue
        since = hold.lost - CALM * hold.timeout
        if any(begin < hold.lost and since < end for begin, end in wrong):
            continue
        since = max(since, hold.begin)
        those = {hold.process, *({"server"} & ran.keys())}
        if any(pause(ran[who], since, hold.lost) > STALL * hold.timeout for who in those):
            counts["losses while the process or the server did not run"] += 1
            continue
        # Trust counts from before the request: of one that took long, little was left to renew it.
        if hold.begin - hold.since > STALL * hold.timeout > hold.lost - hold.since - hold.timeout:
            counts["losses of leases that were granted late"] += 1
            continue
        yield Violation("kept", f"{hold.key}: {hold} is lost, and nothing was wrong", hold.lost)


def refused_by_nobody(events: Sequence[Event]) -> Iterator[tuple[Operation, Sequence[str]]]:
    """Return the operations that were refused though nobody could have one of their locks."""
    wrong, forgot = faults(events, spares="spares_leases"), faults(events, "loses_data")
    jumps, missed = faults(events, "ends_leases"), forgot + faults(events, "misses_releases")
    by_key: dict[str, list[Operation]] = defaultdict(list)
    found = list(operations(events).values())
    for one in found:
        for key in one.keys:
            by_key[key].append(one)
    limits = {event.about for event in events if event.what == "limit"}
    barred = set()
    for key, asked in by_key.items():
        asked.sort(key=lambda one: one.begin)
        in_the_way = math.inf if key in limits else 0.0  # until when anybody before
        for one, after in zip_longest(asked, asked[1:]):
            met = after is not None and after.begin <= (one.end or math.inf)
            if in_the_way >= one.begin or met:
                barred.add(id(one))
            in_the_way = max(in_the_way, one.over(wrong, missed, jumps))
    yield from ((one, one.keys) for one in found if one.is_refused and id(one) not in barred)


def free(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Nobody is refused a lock that nobody can have, nor a message that nobody waits for."""
    forgot = faults(events, "loses_data")
    several = [one for one in operations(events).values() if len(one.keys) > 1 and one.is_refused]
    counts["refusals of several locks"] += len(several)
    for one, keys in refused_by_nobody(events):
        counts["refused by nobody"] += 1
        took_some = any(
            other.end and other.end <= one.begin <= other.end + other.lasts
            for other in several
            if {*other.keys} & {*keys}
        )
        text = f"{' + '.join(keys)}: {one.process} is refused by nobody"
        yield Violation("all or none" if took_some else "free", text, one.begin)
    begun = {name: min(one.begins) for name, one in all_tasks(events).items() if one.begins}
    for event in events:
        if event.what == "task" and event.kind == "duplicate":
            counts["duplicates"] += 1
            first = event.more["of"]
            began = begun.get(first, math.inf)
            if began < event.more["asked"]:
                if any(begin <= began <= end for begin, end in forgot):
                    counts["duplicates of a task that had begun, and the server forgot"] += 1
                    continue
                text = f"{event.more['key']}: {event.about} for {first}, which had begun"
                yield Violation("free", text, event.at)


def order(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Who was known to stand in line before another asked is granted the lock before it."""
    wrong = faults(events, spares="spares_places")
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for one in operations(events).values():
        if one.more.get("fair"):
            by_key[one.more["key"]].append(one)
    for key, asked in by_key.items():
        for late in asked:
            if late.outcome != "ok" or late.end is None:
                continue
            for early in asked:
                if early.in_line is None or early.in_line >= late.begin:
                    continue
                counts["pairs in line"] += 1
                passed = early.end is not None and early.outcome == "ok" and early.end > late.end
                excused = any(early.begin < end and begin < late.end for begin, end in wrong)
                if passed and not excused:
                    text = f"{key}: {late.process} before {early.process}, which stood in line"
                    yield Violation("order", text, late.end)


def process_ends(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """
    Every process starts, works until it is told to end, and ends then.

    A worker may not start while the lock server is away; nor, as Celery has it, if one of its
    children was killed before all were up.
    """
    wrong = faults(events, spares="spares_leases")
    of_processes = [event for event in events if event.what == "process"]
    kills = [(one.more.get("of"), one.at) for one in of_processes if one.kind == "killed"]
    for event in of_processes:
        if event.kind not in ENDS_IN_WORDS:
            continue
        since = event.more.get("since", 0.0)
        excused = {
            "refused": any(begin < event.at and since < end for begin, end in wrong),
            "unstarted": any(of == event.about and since <= at <= event.at for of, at in kills),
        }
        if excused.get(event.kind):
            counts[EXCUSES[event.kind]] += 1
            continue
        more = {name: one for name, one in event.more.items() if name != "log"}
        text = f"{event.about} of {event.process} {ENDS_IN_WORDS[event.kind]}: {more}"
        yield Violation("end", f"{text}\n{event.more.get('log', '')}".rstrip(), event.at)


def ends(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Every wait with a limit ends, unless its process was killed."""
    killed = {event.about for event in events if event.what == "process" and event.kind == "killed"}
    last = max((event.at for event in events), default=0.0)
    yield from process_ends(events, counts)
    for one in operations(events).values():
        if one.end is None and one.cancelled is not None:
            one.end, one.outcome = one.cancelled, "cancelled"
        counts["operations"] += 1
        counts[f"outcome: {one.outcome}"] += 1
        due = one.begin + one.more.get("timeout", 0.0) + SLACK
        until = last if one.end is None else one.end
        if one.process not in killed and due < until:
            text = f"{one.process}: {one.more} has not ended after {until - one.begin:.1f} s"
            yield Violation("end", text, due)


def cancellations(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """A cancellation is raised soon where it was asked for, counted once, and nowhere else."""
    ran: dict[str, list[float]] = defaultdict(list)
    for event in events:
        ran[event.process].append(event.at)
    for event in events:
        if event.what != "cancellation":
            continue
        where = event.more["where"]
        if event.kind != "met":
            text = f"{event.process}: a cancellation is {event.kind} in {where}"
            yield Violation("cancelled", text, event.at)
            continue
        counts[f"cancellations in {where}"] += 1
        took = event.at - event.more["asked"]  # also while the server stands still
        if took > MOMENTS + pause(ran[event.process], event.more["asked"], event.at):
            text = f"{event.process}: cancelled in {where} after {took:.1f} s"
            yield Violation("cancelled", text, event.at)


def tasks(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Every task that was sent ends, and runs once; who is replaced, is so by one that runs."""
    killed = {e.about: e.at for e in events if e.what == "process" and e.kind == "killed"}
    forgot, redelivers = faults(events, "loses_data"), faults(events, "redelivers")
    away = faults(events, spares="spares_leases", kills=False)
    found = {name: one for name, one in all_tasks(events).items() if one.sent < math.inf}
    began: dict[str, float] = defaultdict(float)  # the last of each key
    for one in found.values():
        began[one.more.get("key", "")] = max([began[one.more.get("key", "")], *one.begins])
    for name, one in found.items():
        counts["tasks"] += 1
        counts[f"tasks, {one.outcome.more.get('state') if one.outcome else 'open'}"] += 1
        text = f"task {name} of {one.more}"
        if one.ended is None and one.outcome is None:
            if one.more.get("parks") and any(one.sent <= end for _, end in forgot):
                counts["parked tasks lost, and the server forgot"] += 1
            else:
                yield Violation("nothing lost", f"{text} never ended", one.sent)
        if one.outcome and one.outcome.more.get("state") == "FAILURE" and not one.more["may_fail"]:
            # Celery rejects a task whose retry the broker does not take.
            if _overlap(one.retried, redelivers):
                counts["tasks that failed, as the broker took no retry"] += 1
            else:
                yield Violation(
                    "nothing lost", f"{text} failed: {one.outcome.more}", one.outcome.at
                )
        replaced = one.outcome and one.outcome.more.get("state") == "REVOKED" and not one.begins
        if replaced and one.more["parks"] and began[one.more["key"]] < one.more["asked"]:
            if any(one.sent <= end for _, end in forgot):
                counts["tasks replaced by one that was lost, and the server forgot"] += 1
            else:
                yield Violation("nothing lost", f"{text} was replaced by none that ran", one.sent)
        yield from _beginning_again(one, text, killed, forgot, redelivers, away, counts)


def _overlap(times: Iterable[float], when: Iterable[tuple[float, float]]) -> bool:
    return any(begin < at + TRIED and at < end for at in times for begin, end in when)


def _beginning_again(
    one: Task,
    text: str,
    killed: Mapping[str, float],
    forgot: Sequence[tuple[float, float]],
    redelivers: Sequence[tuple[float, float]],
    away: Sequence[tuple[float, float]],
    counts: Counter[str],
) -> Iterator[Violation]:
    for again in one.begins if one.ended else ():
        if one.ended is None or again <= one.ended.at:
            continue
        # Before a message was acknowledged: the broker delivers it again, and says so.  It may be
        # that of an execution which had put the task off, or whose body had asked for a retry.
        acknowledged = one.ended.at + UNACKNOWLEDGED
        died = any(
            killed.get(over.process, math.inf) < min(again, over.at + UNACKNOWLEDGED)
            for over in one.over
        )
        if died or any(
            one.sent <= end and begin <= acknowledged and one.ended.at < again
            for begin, end in redelivers
        ):
            counts["runs again, as the message came again"] += 1
        elif one.more.get("parks") and any(
            one.claimed < end and begin < again for begin, end in forgot
        ):  # a claim or a mark of it went, and a copy that had been put off was on its way
            counts["parked tasks run again, and the server forgot"] += 1
        elif one.more.get("parks") and again < _is_told_by(one.ended.at, away):
            counts["parked tasks run again, and their end could not be told"] += 1
        elif _has_run_beside_itself(one, killed, again):
            counts["runs again, as two of its bodies asked for a retry"] += 1
        else:
            yield Violation("once", f"{text} began again after its end", again)


def _is_told_by(ended: float, away: Sequence[tuple[float, float]]) -> float:
    """Return by when the lock server is told that a task is done; a copy may run before that."""
    by = ended
    for begin, end in sorted(away):
        if begin < by + MOMENTS and ended < end:
            by = max(by, end + MARKED)
    return by


def _has_run_beside_itself(one: Task, killed: Mapping[str, float], until: float) -> bool:
    """
    Tell whether a task's lease ended early, and a copy began: each may ask for a retry.

    Whether that lease may have ended is judged as exclusion.
    """
    bodies = [body for body in one.bodies if body.begin < until]
    return any(
        first.begin < second.begin < min(first.over, killed.get(first.process, math.inf))
        for first in bodies
        for second in bodies
        if first.process != second.process
    )


def newest(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """After a task was sent or has begun that replaces others, none begins that was sent before."""
    forgot, wrong = faults(events, "loses_data"), faults(events, spares="spares_leases")
    by_key: dict[str, list[tuple[str, Task]]] = defaultdict(list)
    for name, one in all_tasks(events).items():
        if one.more.get("replaces"):
            by_key[one.more["key"]].append((name, one))
    for of_key in by_key.values():
        counts["tasks that replace others"] += len(of_key)
        of_key.sort(key=lambda sent: sent[1].more["asked"])
        asked = [one.more["asked"] for _, one in of_key]
        begun = [min(one.begins, default=math.inf) for _, one in of_key]
        first = [*accumulate(reversed(begun), min, initial=math.inf)][::-1]  # from there on
        known = [  # to the lock server, which else may not have heard that it was sent
            math.inf
            if any(begin <= one.sent and one.more["asked"] <= end for begin, end in wrong)
            else one.sent
            for _, one in of_key
        ]
        sent = [*accumulate(reversed(known), min, initial=math.inf)][::-1]
        for name, one in of_key:
            nth = bisect_left(asked, one.sent)
            counts["tasks that were replaced"] += not one.begins and sent[nth] < math.inf
            for since, begin in zip(one.asked, one.begins, strict=True):
                if (first[nth] < begin or sent[nth] < since) and not any(
                    one.more["asked"] < end and lost < begin for lost, end in forgot
                ):
                    text = f"task {name} of {one.more} began after one that was sent later"
                    yield Violation("newest", text, begin)


def written(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Every element that was written under the lock, and acknowledged, is in the file."""
    files = {event.about: set(event.more["elements"]) for event in events if event.what == "file"}
    for event in events:
        if event.what != "element" or event.kind != "ok":
            continue
        guard = event.more["guard"]
        counts[f"elements, {guard}"] += 1
        if event.about in files.get(event.more["file"], {event.about}):  # until it is read
            continue
        counts[f"elements lost, {guard}"] += 1
        if guard == "fenced":
            text = f"element {event.about} of {event.more['file']} is lost"
            yield Violation("written", text, event.at)


class Tick(NamedTuple):
    """
    A message of a beat.

    Attributes:
        at: When it was sent.
        id: The task's.
        by: The process that sent it.
        entry: Of the schedule.
        tick: When it was claimed, by that process's wall clock.
        every: Seconds between two ticks of the entry.
        by_wall: Whether it is due at multiples of them, and not so long after the last tick.
        timeout: Of the beats' lock.
    """

    at: float
    id: str
    by: str
    entry: str
    tick: float
    every: float
    by_wall: bool
    timeout: float

    @property
    def next_due(self) -> float:
        """When the next tick is due, by the wall clock."""
        since = self.tick // self.every * self.every if self.by_wall else self.tick
        return since + self.every

    def __str__(self) -> str:
        return f"{self.entry} of {self.by} at {self.tick:.3f}, {self.id}"


def beats(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Each tick has one id, and is not passed over; no message goes out again without a reason."""
    forgot, wrong = faults(events, "loses_data"), faults(events, spares="spares_leases")
    ended = [(e.about, e.at) for e in events if e.kind in ("killed", "terminated")]
    first: dict[str, Tick] = {}
    for again in (Tick(at=e.at, id=e.about, **e.more) for e in events if e.what == "tick"):
        one = first.setdefault(again.id, again)
        if one is again:
            continue
        noted = one.at + LATE
        if (
            any(one.by == who and one.at <= at <= noted for who, at in ended)
            or any(begin <= noted and one.at <= end for begin, end in wrong)
            or any(begin <= again.at and one.at <= end for begin, end in forgot)
        ):
            counts["ticks sent again, under one id"] += 1
        else:
            yield Violation("again", f"{one}; sent again by {again.by}", again.at)
    ticks = sorted(first.values(), key=lambda one: one.tick)
    counts["ticks"] += len(ticks)
    counts["takeovers"] += sum(one.by != after.by for one, after in pairwise(ticks))
    for entry in sorted({one.entry for one in ticks}):
        for one, after in pairwise(one for one in ticks if one.entry == entry):
            if any(one.at <= end + LATE and begin <= after.at for begin, end in forgot):
                counts["ticks between which the server forgot"] += 1
                continue
            if after.tick < one.next_due:
                yield Violation("tick", f"{one}; and {after}", after.at)
            by_it = [x for x in ticks if x.by == after.by and one.next_due < x.tick <= after.tick]
            since = by_it[0].at if by_it else after.at
            calm = all(end < since or after.at < begin for begin, end in wrong)
            if calm and after.at - since > PROMPT:
                yield Violation("missed", f"{after}, and others before", after.at)


def silences(events: Sequence[Event], _counts: Counter[str]) -> Iterator[Violation]:
    """A timeout after a fault something is sent again, if two beats go round."""
    wrong = sorted(faults(events, spares="spares_leases"))
    ran: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.what == "beat":
            ran[event.process].append(event.at)
    sent = [e for e in events if e.what == "tick"]
    every = min((e.more["every"] for e in sent), default=0.0)
    last = max((at for seen in ran.values() for at in seen), default=0.0)
    for one, next_at in zip(sent, [*(e.at for e in sent[1:]), last], strict=False):
        since = one.at + every
        for begin, end in [*wrong, (next_at, next_at)]:
            until = min(begin, next_at)
            if until - since > PROMPT:
                well = [who for who in ran if pause(ran[who], since, until) < PROMPT]
                if len(well) > 1:  # the clock of one may be wrong
                    text = f"nothing is sent for {until - since:.1f} s, nor by {well}"
                    yield Violation("silent", text, until)
            since = max(since, end + one.more["timeout"])


def clean(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """Nothing is left behind on the lock server."""
    forgot = faults(events, "loses_data")
    for event in events:
        if event.what == "key" and event.kind == "left":
            if event.about.endswith(":aside") and forgot:
                # The mark that it is done was lost, a copy stood in line, and its result says so.
                counts["tasks set aside, and the server forgot"] += 1
                continue
            counts["keys left"] += 1
            yield Violation("clean", f"the key {event.about!r} is left behind", event.at)


JUDGES: tuple[Callable[[Sequence[Event], Counter[str]], Iterator[Violation]], ...] = (
    exclusion,
    kept,
    held_on,
    caps,
    crashes,
    rates,
    free,
    order,
    ends,
    cancellations,
    tasks,
    newest,
    takes_over,
    written,
    beats,
    silences,
    clean,
)

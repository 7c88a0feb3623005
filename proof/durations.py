"""Judge how long locks are held in a run, at least, at most, and after a death; and how often.

Nothing here is exact, as it is in a simulation; see :mod:`proof.leases`.  The machine is busy, and
each process knows only when it has asked and when it was told.  So each bound is one that a lock
which keeps what it promises cannot miss, and one which does not keep it surely misses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from proof.events import Hold, Violation, faults, holds, operations

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from proof.history import Event

TOLD_WITHIN = 1.5  # seconds in which a main process, which looks four times each, tells of a death
BEYOND = 2  # timeouts beyond those of its renewals: of its grant, and of a hand-off


def held_on(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """No lock is given to another before it was held for as long as it must be at least."""
    forgot = faults(events, "loses_data") + faults(events, "ends_leases")
    by_key: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds(events):
        by_key[hold.key].append(hold)
    for key, of_key in by_key.items():
        for nth, hold in enumerate(of_key):
            until = hold.since + hold.at_least
            if hold.until >= until:
                continue
            counts["held on after the body"] += 1
            for after in of_key[nth + 1 :]:
                if after.begin >= until:
                    break
                is_known = not any(b <= after.begin and hold.since <= end for b, end in forgot)
                if after.begin > hold.until and after.excludes([hold]) and is_known:
                    text = f"{key}: {after} {after.begin - hold.since:.3f} s after {hold}"
                    yield Violation("at least", text, after.begin)


def caps(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """No lease is trusted for longer than its renewals last, each a timeout after the last."""
    for hold in holds(events):
        counts["holds that reach their cap"] += hold.is_capped
        most = (hold.cap + BEYOND) * hold.timeout
        if hold.cap and hold.until > hold.since + most:
            text = f"{hold.key}: {hold} is renewed for {hold.until - hold.since:.1f} s"
            yield Violation("cap", text, hold.until)


def crashes(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """
    Nobody is refused a lock by a pool process that has died, once its main process has told of it.

    These processes kill themselves in their bodies.  Nobody else may have the lock by then: from
    the grant on nothing else is killed, and nothing keeps a request from being answered.
    """
    died = {e.about: e.at for e in events if e.kind == "killed" and e.more.get("by") == "itself"}
    elsewhere = {e.process for e in events if e.what in {"operation", "beat", "probe"}}
    killed = [e for e in events if e.kind == "killed" and e.about not in died.keys() | elsewhere]
    wrong = faults(events, spares="spares_leases", kills=False) + [(e.at, e.at) for e in killed]
    by_key: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds(events):
        by_key[hold.key].append(hold)
    free_since: dict[str, float] = defaultdict(float)  # when an earlier question was not refused
    for probe in sorted(operations(events, "probe").values(), key=lambda one: one.begin):
        key, told = probe.keys[0], probe.end or probe.begin
        last = next((one for one in reversed(by_key[key]) if one.since <= told), None)
        if last is None or last.left is not None or free_since[key] >= last.since:
            continue
        took = probe.begin - died.get(last.process, math.inf)
        calm = not any(begin <= told and last.since <= end for begin, end in wrong)
        if probe.is_refused and calm and took > TOLD_WITHIN:
            yield Violation("crash", f"{key}: refused, and {last} is dead", probe.begin)
        elif not probe.is_refused:
            free_since[key] = told
            counts["locks of the dead that were free at once"] += calm and took > 0


def rates(events: Sequence[Event], counts: Counter[str]) -> Iterator[Violation]:
    """
    In no window of a rate more bodies begin than it admits, each counted by its cost.

    The lock server counts each start by its clock: after the body's process has asked for the lock,
    and before its body begins.  A reply may take any time in between.  So there are surely too many
    if the first of them had not asked yet less than a window before the last had begun.
    """
    excused = faults(events, "loses_data") + faults(events, "ends_leases")
    by_key: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds(events):
        if hold.rate:
            by_key[hold.key].append(hold)
    for key, of_key in by_key.items():
        for nth, last in enumerate(of_key):
            most, window = last.rate or (0, 0.0)
            counts["starts under a rate"] += 1
            first, cost = nth, last.cost
            while cost <= most and first > 0:
                first -= 1
                cost += of_key[first].cost
            if cost <= most:
                continue
            since = min(one.since for one in of_key[first : nth + 1])
            took = last.begin - since
            if took < window and not any(b <= last.begin and since <= e for b, e in excused):
                text = f"{key}: {cost} of {most} begin within {took:.3f} s, {last} the last"
                yield Violation("rate", text, last.begin)

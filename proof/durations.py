"""Judge how long locks are held in a run: at least, at most, and after a death.

Nothing here is exact, as it is in a simulation; see :mod:`proof.leases`.  The machine is busy, and
each process knows only when it has asked and when it was told.  So each bound is one that a lock
which keeps what it promises cannot miss, and one which does not keep it surely misses.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from proof.events import MOMENTS, Hold, Violation, faults, holds, operations

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from proof.history import Event

TOLD_WITHIN = 3.0  # seconds in which the main process sees a death, and has told the lock server
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
    Nobody is refused a lock by a pool process that has died, once its main process has told.

    These processes kill themselves in their bodies.  Others that were killed together with their
    main process, perhaps before they had noted what they hold, keep it for a timeout.
    """
    elsewhere = {e.process for e in events if e.what in {"operation", "beat", "probe"}}
    died = {e.about: e.at for e in events if e.kind == "killed" and e.more.get("by") == "itself"}
    killed = [e.at for e in events if e.kind == "killed" and e.about not in died.keys() | elsewhere]
    wrong = faults(events, spares="spares_leases", kills=False)
    by_key: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds(events):
        by_key[hold.key].append(hold)

    def calm(since: float) -> bool:
        return not any(b <= since + TOLD_WITHIN and since <= end for b, end in wrong)

    def over(hold: Hold) -> float:
        """Return when a hold can be in nobody's way any more."""
        if hold.left is None and hold.process not in died:
            return hold.until + hold.timeout + TOLD_WITHIN
        ended, within = (
            (died[hold.process], TOLD_WITHIN) if hold.left is None else (hold.left, MOMENTS)
        )
        return ended + (within if calm(ended) else hold.timeout + TOLD_WITHIN)

    freed: dict[str, float] = defaultdict(float)  # by the probes themselves
    for probe in sorted(operations(events, "probe").values(), key=lambda one: one.begin):
        key, told = probe.keys[0], probe.end or probe.begin
        since = probe.begin - probe.lasts - TOLD_WITHIN
        of_key = [one for one in by_key[key] if one.since <= told]
        dead = [one for one in of_key if since < died.get(one.process, 0.0) and one.left is None]
        in_the_way = any(over(one) >= probe.begin for one in of_key) or freed[key] >= probe.begin
        is_known = not any(since <= at <= told for at in killed)
        if dead and not in_the_way and is_known:
            counts["questions after a death"] += 1
            if probe.is_refused:
                text = f"{key}: refused, and {dead[-1]} is dead"
                yield Violation("crash", text, probe.begin)
        if not probe.is_refused:  # its own lease may stay
            is_calm = probe.freed is not None and probe.answered and calm(probe.freed)
            freed[key] = max(freed[key], told if is_calm else told + 2 * probe.lasts)

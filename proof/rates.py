"""
Judge the rates of a simulation: what is let in within a window, and none while held back.

The judge sees who has a lease after each request that reaches the lock server.  Whoever has one
that had none before, and is no parked task whose turn it is, begins: at most so many, each by its
cost, in any window of its rate, by the server's clock, and none for the time for which a lock is
held back.  What the server has lost does not count.  Of a lock with several rates the server keeps
as many starts, for so long, as was asked for since it was idle: those from before do not count for
a slower rate.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.config.terms import parse_terms
from proof.order import ACQUIRES, PARKS, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.config.terms import Rate
    from celery_dislock.scripts import Script
    from proof.simulated import Net


class Rates:
    """
    The starts of all locks of a lock server, which have one rate or several.

    Args:
        net: The server.
        rates: The rates.
        fail: Called with what is broken.

    Attributes:
        starts: How many there were.
    """

    def __init__(self, net: Net, rates: Sequence[Rate], fail: Callable[[str], None]) -> None:
        self.net, self.rates, self.fail = net, rates, fail
        self.starts = 0
        self._of: dict[str, tuple[Rate, int]] = {}  # rate and cost, by owner
        self._owners: dict[str, set[str]] = defaultdict(set)
        self._held_back: dict[str, int] = {}  # until when, in ms
        # Of the starts: ms, and cost.
        self._times: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._kept: dict[str, dict[Rate, int]] = defaultdict(
            dict
        )  # since when, what each rate needs

    def lost(self) -> None:
        """Know nothing of the starts before the server has lost data."""
        self._times.clear()
        self._kept.clear()
        self._held_back.clear()

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], _reply: Any
    ) -> None:
        """Judge a request that has reached the server."""
        if script is scripts.OVERRIDE and "back" in arguments:
            self._held_back[keys[0]] = self.net.now_ms + named(script, arguments)["ttl_ms"]
        if script in ACQUIRES or script in PARKS:
            terms = parse_terms(arguments[3].partition(",")[0].encode())
            if terms.rate is not None:
                self._of[arguments[0]] = terms.rate, terms.cost or 1
        for name in [key for key in self.net.touched(keys) if key.endswith("}")]:
            owners = {one for one in self.net.leases(name) if one[-1] != "#" and one[0] != "~"}
            new = owners - self._owners[name]
            self._owners[name] |= owners
            if script is scripts.TAKE_OVER or name.startswith("dislock:sweep:"):
                continue
            for rate, cost in sorted(self._of[one] for one in new & self._of.keys()):
                self.starts += 1
                self._judge(name, rate, cost)

    def _judge(self, name: str, rate: Rate, cost: int) -> None:
        now = self.net.now_ms
        until = self._held_back.get(name, 0)
        if now < until:
            self.fail(f"{name} was taken, and is held back for {until - now} ms more")
        times, kept = self._times[name], self._kept[name]
        if times and now - times[-1][0] >= 1000 * max(one.window for one in kept):
            kept.clear()
        for one in self.rates:
            if one.most <= rate.most and one.window <= rate.window:
                kept.setdefault(one, now)
        times.append((now, cost))
        since = max(kept[rate], now - round(rate.window * 1000) + 2)
        within = [start for start in times if start[0] >= since]
        if (taken := sum(cost for _, cost in within)) > rate.most:
            self.fail(f"{name} was taken at {taken} within {rate.window:g} s: {within}")

"""
Judge the rates of a simulation: what is let in within a window, and none while held back.

The judge sees who has a lease after each request that reaches the lock server.  Whoever has one
that had none before, and is no parked task whose turn it is, begins: at most so many, each by its
cost, in any window of its rate, by the server's clock, and none for the time for which a lock is
held back.  Of an owner that says what it has spent, less takes the place of its cost, and more
counts as a start then, which may be beyond the rate.  What the server has lost does not count.  Of
a lock with several rates the server keeps as many starts, for so long, as was asked for since it
was idle: those from before do not count for a slower rate.

Where that is known exactly, nobody is told that it is too early who could start.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.config.terms import parse_terms
from celery_dislock.scripts import REFUSED
from proof.order import ACQUIRES, PARKS, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.config.terms import Rate
    from celery_dislock.scripts import Script
    from proof.simulated import Net


RUNS_IN = 2  # ms: a script runs some microseconds after the time that the judge knows


@dataclass
class Start:
    """A start, or what an owner has spent later beyond its cost."""

    at: int  # ms
    cost: int


@dataclass
class Begun:
    """What a lease has cost by the rate of its lock: *said* in all, and what counts of that."""

    said: int
    starts: list[Start]


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
        self._tokens: dict[str, set[str]] = defaultdict(set)  # of all leases that began, by lock
        self._begun: dict[tuple[str, str], Begun] = {}  # by lock and owner
        self._held_back: dict[str, int] = {}  # until when, in ms
        self._times: dict[str, list[Start]] = defaultdict(list)
        self._over: dict[str, int] = defaultdict(int)  # when more was spent than was said, in ms
        self._lost_at = 0  # ms
        # From which of the starts on the server keeps what each rate needs.
        self._kept: dict[str, dict[Rate, int]] = defaultdict(dict)

    def lost(self) -> None:
        """Know nothing of the starts before the server has lost data."""
        self._times.clear()
        self._kept.clear()
        self._held_back.clear()
        self._begun.clear()
        self._lost_at = self.net.now_ms

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge a request that has reached the server."""
        if script is scripts.OVERRIDE and "back" in arguments:
            self._held_back[keys[0]] = self.net.now_ms + named(script, arguments)["ttl_ms"]
        if script in ACQUIRES or script in PARKS:
            terms = parse_terms(arguments[3].partition(",")[0].encode())
            if terms.rate is not None:
                self._of[arguments[0]] = terms.rate, terms.cost or 1
        for name in [key for key in self.net.touched(keys) if key.endswith("}")]:
            self._at(name, script, arguments)
        if len(self.rates) == len(keys) == 1 and not self.net.linked:
            self._refused(script, keys[0], arguments, reply)

    def _at(self, name: str, script: Script, arguments: Sequence[Any]) -> None:
        """Judge one lock."""
        leases, known = self._leases(name), self._tokens[name]
        if script is scripts.SPENT and arguments[0] in leases:
            self._spends(name, *arguments)
        new = {token: one for one, token in leases.items() if token not in known}
        known.update(new)
        if script is scripts.TAKE_OVER or name.startswith("dislock:sweep:"):
            left = self._begun.pop((name, arguments[0]), None)
            if left and arguments[1] in leases:
                self._begun[name, arguments[1]] = left
            return
        for owner in [new[token] for token in sorted(new, key=int)]:  # as they were granted
            if owner in self._of:
                self.starts += 1
                rate, cost = self._of[owner]
                self._begun[name, owner] = Begun(cost, [Start(self.net.now_ms, cost)])
                self._judge(name, rate, *self._begun[name, owner].starts)

    def _leases(self, name: str) -> dict[str, str]:
        """Return the tokens of those who have begun, by owner."""
        found = [one.decode() for one in self.net.send("HGETALL", name)]
        return {
            owner: record.split(" ", 3)[2]
            for owner, record in zip(found[::2], found[1::2], strict=True)
            if owner[-1] != "#" and owner[0] != "~"
        }

    def _spends(self, name: str, owner: str, spent: int, word: str) -> None:
        """Count what an owner says that its start has cost."""
        begun = self._begun.get((name, owner))
        rate = parse_terms(word.partition(",")[0].encode()).rate
        if begun is None or spent > begun.said:  # of a lease from before a loss little is known
            self._over[name] = self.net.now_ms
        if begun is None or rate is None:
            return
        if spent > begun.said:
            begun.starts.append(Start(self.net.now_ms, min(spent - begun.said, rate.most)))
            self._times[name].append(begun.starts[-1])
        less = begun.said - spent
        for start in reversed(begun.starts):
            if less > 0:
                start.cost, less = max(0, start.cost - less), less - start.cost
        begun.said = spent

    def _judge(self, name: str, rate: Rate, start: Start) -> None:
        now = self.net.now_ms
        until = self._held_back.get(name, 0)
        if now < until:
            self.fail(f"{name} was taken, and is held back for {until - now} ms more")
        times, kept = self._times[name], self._kept[name]
        if times and now - times[-1].at >= 1000 * max(one.window for one in kept):
            kept.clear()
        for one in self.rates:
            if one.most <= rate.most and one.window <= rate.window:
                kept.setdefault(one, len(times))
        times.append(start)
        since = now - round(rate.window * 1000) + RUNS_IN
        within = [one for one in times[kept[rate] :] if one.at >= since]
        if (taken := sum(one.cost for one in within)) > rate.most:
            self.fail(f"{name} was taken at {taken} within {rate.window:g} s: {within}")

    def _refused(
        self, script: Script, name: str, arguments: Sequence[Any], reply: Sequence[Any]
    ) -> None:
        """Judge that it is too early for who is told that, if nobody waits or has a turn."""
        if not (script in ACQUIRES or script in PARKS) or reply[0] != REFUSED:
            return
        (rate,), now = self.rates, self.net.now_ms
        window = round(rate.window * 1000)
        told = json.loads(reply[4 if script in ACQUIRES else 6])
        if not told.get("early") or told.get("held_back"):
            return
        waits = self.net.send("ZCARD", f"{name}:line") or any(
            one[-1] == "#" for one in self.net.leases(name)
        )
        # What a log has no room for comes back late.
        if waits or max(self._lost_at, self._over[name]) + window >= now:
            return
        since = now - window - RUNS_IN
        taken = sum(one.cost for one in self._times[name] if one.at >= since)
        if taken + self._of[arguments[0]][1] <= rate.most:
            self.fail(f"{arguments[0]} is told that it is too early for {name}, taken at {taken}")

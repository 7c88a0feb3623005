"""
Judge the rates of a simulation: what is let in within a window, and none while held back.

The judge sees who has a lease after each request that reaches the lock server.  Whoever has one
that had none before, and is no parked task whose turn it is, begins: at most so many, each by its
cost, in any window of its rate, by the server's clock, and none for the time for which a lock is
held back.  Of a task that two releases know, the rate is that of one of them, and soon after a
deploy that of the newest.  An operator's rate takes the place of both while it is set.  Of an owner
that says what it has spent, less takes the place of its cost, and more counts as a start then,
which may be beyond the rate.  What the server has lost does not count.  The server keeps as many
starts of a lock, for so long, as was asked for since it was idle: those from before do not count
for a slower rate.  If its clock is set back, a start counts from then on, or from the next look.

Who is told that it is too early, though nobody waits, is told when it is not: exactly, or if a rate
has more starts than the log has times, as if it cost some of these times more.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.config.terms import Rate, parse_terms
from celery_dislock.scripts import REFUSED
from proof.order import ACQUIRES, FOREVER, PARKS, named
from proof.simulated import QUANTA
from proof.working import options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from proof.simulated import Net


RUNS_IN = 2  # ms: a script runs some microseconds after the time that the judge knows
FREE = 2  # quanta that may stay free; one more if starts have spent less than they cost
SETTLED = 400_000  # ms after a deploy, in which turns by the old rate may be out
SET = re.compile(rb"2 rate (\d+/\d+) \d+ (\d+) ")  # a rate in the record of what is set


def rates_of(options: Mapping[str, Any]) -> list[Rate]:
    """Return the rates of a task, that of the newest release first."""
    names = ("lock_rate", "other_lock_rate")
    return [Rate.of(options[name]) for name in names if name in options]


def rate_in(word: str) -> Rate:
    """Return a rate as the scripts write it."""
    most, window = word.split("/")
    return Rate(int(most), int(window) / 1000)


def ms(rate: Rate) -> int:
    """Return the length of a rate's window in milliseconds."""
    return round(rate.window * 1000)


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
    The starts of all locks of a lock server.

    Args:
        net: The server.
        rates: The rates of those who ask for them, as people write them; it is none or more.
        fail: Called with what is broken.
    """

    def __init__(self, net: Net, rates: Sequence[str], fail: Callable[[str], None]) -> None:
        self.net, self.fail = net, fail
        self._known = {*map(Rate.of, rates)}
        self._of: dict[str, tuple[list[Rate], int]] = {}  # rates and cost, by owner
        self._tokens: dict[str, set[tuple[str, str]]] = defaultdict(set)  # of owners, by lock
        self._begun: dict[tuple[str, str], Begun] = {}  # by lock and owner
        self._held_back: dict[str, int] = {}  # until when, in ms
        self._set: dict[str, tuple[Rate, float]] = {}  # by an operator, and until when, in ms
        self._times: dict[str, list[Start]] = defaultdict(list)
        self._over: dict[str, int] = defaultdict(int)  # when more was spent than was said, in ms
        self._unseen: set[str] = set()  # locks whose clock was set back, and nobody was told since
        self._lost_at: dict[str, int] = defaultdict(int)  # when starts were lost or moved, in ms
        self._deployed_at = FOREVER  # ms
        # From which of the starts on the server keeps what each rate needs.
        self._kept: dict[str, dict[Rate, int]] = defaultdict(dict)

    def lost(self) -> None:
        """Know nothing of the starts before the server has lost data."""
        for name in self._tokens:
            self._lost_at[name] = self.net.now_ms
        self._read_set()
        self._times.clear()
        self._kept.clear()
        self._begun.clear()

    def set_back(self, seconds: float) -> None:
        """Know that the server's clock was set back."""
        now = self.net.now_ms
        self._read_set()
        for name in list(self._times):
            if self._end_log(name, now + round(seconds * 1000)):
                self._times[name].clear()
        for at in (self._over, self._lost_at):
            at.update({name: min(one, now) for name, one in at.items()})
        for start in [one for times in self._times.values() for one in times]:
            start.at = min(start.at, now)
        self._unseen.update(self._tokens)  # also of starts from before a loss

    def _read_set(self) -> None:
        """Take what is set for what the server knows of it: it may be lost, or be there again."""
        self._held_back.clear()
        self._set.clear()
        for name in self._tokens:
            if found := SET.search(self.net.send("GET", f"{name}:limit") or b""):
                self._set[name] = rate_in(found[1].decode()), int(found[2]) or FOREVER

    def deployed(self) -> None:
        """Know that from now on only the newest release runs."""
        self._deployed_at = self.net.now_ms

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge a request that has reached the server."""
        if script is scripts.OVERRIDE:
            self._override(keys[0], named(script, arguments)["ttl_ms"], arguments)
        if script in ACQUIRES or script in PARKS:
            terms = parse_terms(arguments[3].partition(",")[0].encode())
            if terms.rate is not None:
                task = named(script, arguments)["task"] if script in PARKS else ""
                options = options_of(json.loads(f"{{{task}}}")["task"]) if task else {}
                self._of[arguments[0]] = rates_of(options) or [terms.rate], terms.cost or 1
                self._known.update(self._of[arguments[0]][0])
        for name in [key for key in self.net.touched(keys) if key.endswith("}")]:
            self._at(name, script, arguments)
        if len(keys) == 1 and not self.net.linked:
            self._refused(script, keys[0], arguments, reply)

    def _override(self, name: str, ttl_ms: int, arguments: Sequence[Any]) -> None:
        until = self.net.now_ms + ttl_ms
        if "back" in arguments:
            self._held_back[name] = until
        if "rate" in arguments:
            self._set.pop(name, None)
            if word := arguments[arguments.index("rate") + 1]:
                self._set[name] = rate_in(word), until if ttl_ms else FOREVER

    def _at(self, name: str, script: Script, arguments: Sequence[Any]) -> None:
        """Judge one lock."""
        leases, known = self._leases(name), self._tokens[name]
        if script is scripts.SPENT and arguments[0] in leases:
            self._spends(name, *arguments)
        new = {token: one for one, token in leases.items() if (one, token) not in known}
        known.update(leases.items())  # after a clock was set back, a token may come again
        if script is scripts.TAKE_OVER or name.startswith("dislock:sweep:"):
            left = self._begun.pop((name, arguments[0]), None)
            if left and arguments[1] in leases:
                self._begun[name, arguments[1]] = left
            return
        for owner in [new[token] for token in sorted(new, key=int)]:  # as they were granted
            if owner in self._of:
                words, cost = self._of[owner]
                if self.net.now_ms > self._deployed_at + SETTLED:
                    words = words[:1]
                self._begun[name, owner] = Begun(cost, [Start(self.net.now_ms, cost)])
                self._judge(name, words, *self._begun[name, owner].starts)

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
        # Little is known of a lease from before a loss, and of a log that was full by the rate of
        # fewer starts before the first one with a cost.
        if begun is None or spent > begun.said or len({one.most for one in self._known}) > 1:
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

    def _set_now(self, name: str) -> tuple[Rate | None, float]:
        """Return the rate that an operator has set, and until when."""
        rate, until = self._set.get(name, (None, 0.0))
        return (rate, until) if self.net.now_ms < until else (None, 0.0)

    def _judge(self, name: str, words: list[Rate], start: Start) -> None:
        now, (by_operator, _) = self.net.now_ms, self._set_now(name)
        until = self._held_back.get(name, 0)
        if now < until:
            self.fail(f"{name} was taken, and is held back for {until - now} ms more")
        times, kept = self._times[name], self._kept[name]
        self._end_log(name, now)
        for one in self._known | ({by_operator} if by_operator else set()):
            if one == by_operator or all(
                one.most <= word.most and one.window <= word.window for word in words
            ):
                kept.setdefault(one, len(times))
        counts = words if by_operator is None else [by_operator]
        if all(self._due(name, one, start.cost, kept.get(one, len(times))) for one in counts):
            within = [one for one in times if one.at > now - max(map(ms, counts))]
            self.fail(f"{name} was taken too early for {counts}: {start}, after {within}")
        times.append(start)
        if self.net.send("LLEN", f"{name}:starts") > QUANTA + 2:
            self.fail(f"the log of {name} has more than {QUANTA} times")

    def _end_log(self, name: str, now: int) -> bool:
        """Return whether the server has forgotten the starts of a lock: the last one is over."""
        times, kept = self._times[name], self._kept[name]
        if times and now - times[-1].at >= max(map(ms, kept), default=0):
            kept.clear()
            return True
        return False

    def _due(self, name: str, rate: Rate, cost: int, first: int = 0) -> int:
        """Return the ms until the starts of a lock, from the *first* one on, admit this cost."""
        now, window = self.net.now_ms, ms(rate)
        ends = [(one.at + window - RUNS_IN, one.cost) for one in self._times[name][first:]]
        for at in sorted({now, *(end for end, _ in ends if end > now)}):
            if sum(one for end, one in ends if end > at) + min(cost, rate.most) <= rate.most:
                return at - now
        return 0

    def _refused(
        self, script: Script, name: str, arguments: Sequence[Any], reply: Sequence[Any]
    ) -> None:
        """Judge when somebody may start who is told, if nobody waits or has a turn."""
        if not (script in ACQUIRES or script in PARKS) or reply[0] != REFUSED:
            return
        now, told, holder = self.net.now_ms, *reply[2::2][:2]
        if script in PARKS:
            told, holder = reply[4::2][:2]
        about = json.loads(holder)
        if not about.get("early") or about.get("held_back"):
            return
        if name in self._unseen:
            self._unseen.discard(name)
            self._lost_at[name] = now
        waits = self.net.send("ZCARD", f"{name}:line") or any(
            one[-1] == "#" for one in self.net.leases(name)
        )
        (words, cost), (by_operator, until) = self._of[arguments[0]], self._set_now(name)
        counts = [*words, by_operator] if by_operator else words
        quantum = -(-max(one.most for one in self._known) // QUANTA)
        # What a log has no room for comes back late.
        if waits or self._lost_at[name] + max(map(ms, counts)) >= now:
            return
        if self._over[name] + max(map(ms, self._known | set(counts))) >= now:
            return
        if quantum > 1 and len(self._known | set(counts)) > 1:
            return
        late = cost + (FREE + 1) * quantum if quantum > 1 else cost
        most: float = max(self._due(name, one, late) for one in words)
        least: float = min(
            self._due(name, one, cost, self._kept[name].get(one, 0)) for one in words
        )
        if by_operator:
            most = min(self._due(name, by_operator, late), max(until - now, most))
            first = self._kept[name].get(by_operator, len(self._times[name]))
            least = min(self._due(name, by_operator, cost, first), max(until - now, least))
        if not least - RUNS_IN <= told <= most + 2 * RUNS_IN:
            self.fail(
                f"{arguments[0]} is told {told} ms for {name}, and not {least} to {most}, "
                f"by {counts}: {self._times[name][-9:]}"
            )

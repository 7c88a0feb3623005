"""
Judge the rates of a simulation: how many are let in within a window, and none while held back.

The judge sees who has a lease after each request that reaches the lock server.  Whoever has one
that had none before, and is no parked task whose turn it is, begins: at most so many in any window
of the rate, by the server's clock, and none for the time for which a lock is held back.  What the
server has lost does not count.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from proof.order import named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.config.terms import Rate
    from celery_dislock.scripts import Script
    from proof.simulated import Net


class Rates:
    """
    The starts of all locks of a lock server, which have one rate.

    Args:
        net: The server.
        rate: The rate.
        fail: Called with what is broken.

    Attributes:
        starts: How many there were.
    """

    def __init__(self, net: Net, rate: Rate, fail: Callable[[str], None]) -> None:
        self.net, self.rate, self.fail = net, rate, fail
        self.starts = 0
        self._owners: dict[str, set[str]] = defaultdict(set)
        self._held_back: dict[str, int] = {}  # until when, in ms
        self._times: dict[str, list[int]] = defaultdict(list)  # ms, of the last starts

    def lost(self) -> None:
        """Know nothing of the starts before the server has lost data."""
        self._times.clear()
        self._held_back.clear()

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], _reply: Any
    ) -> None:
        """Judge a request that has reached the server."""
        if script is scripts.OVERRIDE and "back" in arguments:
            self._held_back[keys[0]] = self.net.now_ms + named(script, arguments)["ttl_ms"]
        for name in [key for key in self.net.touched(keys) if key.endswith("}")]:
            owners = {one for one in self.net.leases(name) if one[-1] != "#" and one[0] != "~"}
            new = owners - self._owners[name]
            self._owners[name] |= owners
            if script is scripts.TAKE_OVER or name.startswith("dislock:sweep:"):
                continue
            for _ in new:
                self.starts += 1
                self._judge(name)

    def _judge(self, name: str) -> None:
        now, most, window = self.net.now_ms, *self.rate
        until = self._held_back.get(name, 0)
        if now < until:
            self.fail(f"{name} was taken, and is held back for {until - now} ms more")
        times = self._times[name]
        times.append(now)
        if len(times) > most and now - times[-1 - most] < window * 1000 - 1:
            self.fail(
                f"{name} was taken {most + 1} times within {window:g} s: {times[-1 - most :]}"
            )

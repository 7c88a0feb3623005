"""
Judge the lines of a simulation: who comes in before whom, and how many may wait.

The judge sees each request that reaches the lock server, with its reply, whether or not anybody
hears it, and who has a lease then.  From these alone it knows who waits, and since when:

* nobody is let in, or has a turn, while somebody waits who came before; unless the asker wants to
  pass the line, or goes on with what was its own: a place, or a task whose process died;
* a place is kept for as long as the waiter asks again in time, and over a turn that nobody claims;
* the line takes in no more parked tasks than it may: it is full only if it is, and then the
  newcomer is told so, or those make room that came first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.scripts import FULL, GRANTED, PARKED, REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.scripts import Script
    from proof.simulated import Net

# No sets: a script that a control has broken has another hash.
ACQUIRES = (scripts.ACQUIRE, scripts.ACQUIRE_UNIQUE)
PARKS = (scripts.PARK, scripts.PARK_UNIQUE)
RELEASES = (scripts.RELEASE, scripts.RELEASE_UNIQUE)
LEAVES = (scripts.LEAVE, scripts.DROP)
FOREVER = float("inf")


def named(script: Script, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments by the names that the script gives them."""
    return dict(zip(script.names, arguments, strict=False))  # a script around it has more


@dataclass
class Line:
    """The line of one lock.  A parked task is in it under its ticket and "#", as its turn is."""

    leases: dict[str, int] = field(default_factory=dict)  # until when, in ms
    waits: dict[str, float] = field(default_factory=dict)  # until when its place is kept
    came: dict[str, int] = field(default_factory=dict)  # when; also of those that wait no more
    claimed: set[str] = field(default_factory=set)  # tasks that have begun
    unknown: set[str] = field(default_factory=set)  # of which the server may have lost something

    def live(self, now: int) -> set[str]:
        """Return who has a lease."""
        return {owner for owner, until in self.leases.items() if until > now}


class Order:
    """
    The lines of a lock server.

    Args:
        net: The server.
        fail: Called with what is broken.
    """

    def __init__(self, net: Net, fail: Callable[[str], None]) -> None:
        self.net, self.fail = net, fail
        self.lines: dict[str, Line] = defaultdict(Line)
        self.requests = 0

    def lost(self) -> None:
        """Know nothing more of those who came before the server has lost data."""
        for name, line in self.lines.items():
            line.unknown |= line.came.keys()
            line.waits.clear()
            line.leases = self.net.leases(name)

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge a request that has reached the server."""
        self.requests += 1
        if not arguments or not keys[0].endswith("}"):  # of something else than a lock
            return
        for nth, name in enumerate(keys):
            line = self.lines[name]
            self.ends(line, script, arguments)
            live = self.judge(name, line, script, arguments)
            for one in [one for one in live if one[-1] != "#"]:
                line.waits.pop(one, None)
            if script in ACQUIRES and reply[:2] == [REFUSED, nth] and arguments[4]:
                self.waits(line, arguments[0], self.net.now_ms + arguments[4])
            elif script in PARKS:
                asked = named(script, arguments)
                self.parks(line, f"{asked['ticket']}#", asked["most"], reply)

    def judge(self, name: str, line: Line, script: Script, arguments: Sequence[Any]) -> set[str]:
        """Judge whether somebody was let in before his time; returns who has a lease."""
        now, before = self.net.now_ms, line.live(self.net.now_ms)
        line.leases = self.net.leases(name)
        live = line.live(now)
        new = {one for one in live - before if one[0] != "~"}
        asker = member = arguments[script is scripts.TAKE_OVER]
        if script in PARKS:
            member = f"{named(script, arguments)['ticket']}#"
        if asker in new:
            new.discard(asker)
            passes = script in ACQUIRES and not arguments[5]
            its_own = member in before or member in line.claimed or script is scripts.TAKE_OVER
            if not (passes or its_own):
                new.add(member)
        waiting = {
            one: line.came[one]
            for one, until in line.waits.items()
            if until > now and one not in live | before | new | line.unknown
        }
        for one in new - line.unknown:
            since = line.came.get(one, self.requests)
            if passed := [other for other, came in waiting.items() if came < since]:
                self.fail(f"{one} has passed {passed} in the line of {name}")
        return live

    def waits(self, line: Line, asker: str, until: float) -> None:
        """Note that somebody is in line."""
        if asker not in line.waits:
            line.came[asker] = self.requests
        elif line.waits[asker] <= self.net.now_ms:  # too late: it may have been passed over
            line.unknown.add(asker)
        line.waits[asker] = until

    def parks(self, line: Line, member: str, most: int, reply: Sequence[Any]) -> None:
        """Note that a task is in line, or in its body; judge how many there are."""
        live = line.live(self.net.now_ms)
        parked = {one: line.came[one] for one in line.waits if one[-1] == "#" and one not in live}
        if reply[0] == GRANTED:
            line.waits.pop(member, None)
            if reply[3]:
                line.came.setdefault(member, self.requests)
                line.claimed.add(member)
        elif reply[0] == FULL and not line.unknown and not (most and len(parked) >= most):
            self.fail(f"the line of {member} is not full, as it was told: {parked}")
        elif reply[0] == PARKED:
            is_new = member not in line.came
            line.waits[member] = FOREVER
            line.came.setdefault(member, self.requests)
            replaced = {f"{one.decode()}#" for one in reply[3][::2]}
            for one in replaced:
                line.waits.pop(one, None)
            if not (is_new and most) or line.unknown:
                return
            stay = {one: came for one, came in parked.items() if one not in replaced}
            is_in = member not in replaced
            if is_in and len(stay) >= most:
                self.fail(f"{member} is taken into a full line: {stay}")
            gone = [line.came[one] for one in replaced & parked.keys()]
            if max(gone, default=0) > min(stay.values(), default=FOREVER):
                self.fail(f"{replaced} made room, and not those who came first: {parked}")
            if gone and len(stay) + is_in < most:
                self.fail(f"{replaced} made room, and there was room: {parked}")

    def ends(self, line: Line, script: Script, arguments: Sequence[Any]) -> None:
        """Note that somebody waits no more, or that another has the place."""
        owner = arguments[0]
        if script in RELEASES:
            line.waits.pop(owner, None)
            line.waits.pop(f"{arguments[3]}#", None)
        elif script is scripts.RELEASE_DEAD:
            for one in [one for one in line.waits if one.startswith(owner)]:
                del line.waits[one]
        elif script in LEAVES:
            line.waits.pop(f"{named(script, arguments)['ticket']}#", None)
        elif script is scripts.TAKE_OVER and owner in line.waits:
            line.waits[arguments[1]] = line.waits.pop(owner)
            line.came[arguments[1]] = line.came[owner]
        elif script is scripts.FREE and owner in line.waits:  # its turn
            line.came[owner] = self.requests

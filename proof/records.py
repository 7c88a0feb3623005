"""
Judge what a simulation leaves on the lock server, after each request that reaches it.

Who knows one lock and its line judges here what no client is told:

* a request that is sent twice at once changes nothing the second time, and is granted the same;
* what belongs to a lock ends by itself, and holds nothing of somebody who has left it;
* a parked task is in one place: in line, has its turn, has claimed it, or makes room; what is kept
  is kept for one that is parked;
* the bytes of all records of a line are counted right;
* a turn lasts as long as it may, twice as long each time, and never gets shorter; no message is out
  long before its task may start;
* who is refused is told of the lease that ends first; who waits asks again later, not at once;
* whoever ends something hands on all that it can: a sweep at once after it finds nothing to do.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.scripts import GRANTED, HAS_LEFT, PARKED, REFUSED
from proof.order import ACQUIRES, LEAVES, PARKS, RELEASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.scripts import Script
    from proof.simulated import Net

OFTEN = 4  # one of so many requests is judged as to what is sent twice
LONGEST = 300_000  # ms that a turn lasts at most, unless leases are longer
SOON = 15_001  # ms for which a message is out before its task may start, at most
ENDS = ("}", ":line", ":places", ":tickets", ":handed", ":running", ":replaced", ":starts")
HAND_ON = (*RELEASES, *LEAVES, scripts.RELEASE_DEAD, scripts.FREE, scripts.OVERRIDE)
TWICE = (*HAND_ON, *ACQUIRES, *PARKS, scripts.RENEW, scripts.SPENT, scripts.TAKE_OVER)


class Records:
    """
    All records of a lock server.

    Args:
        net: The server.
        fail: Called with what is broken.
    """

    def __init__(self, net: Net, fail: Callable[[str], None]) -> None:
        self.net, self._fail = net, fail
        self._requests = count(1)
        # By first lock and ticket: how many it has had, and until when the last one is.
        self._turns: dict[tuple[str, bytes], tuple[int, float]] = {}
        self._unseen = 0  # how many a ticket has had that is new; after a loss that is not known

    def fail(self, text: str) -> None:
        """Say what is broken."""
        self._fail(f"records: {text}")

    def lost(self) -> None:
        """Forget the turns before the server has lost data."""
        self._turns.clear()
        self._unseen = LONGEST

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge what a request has left."""
        if not arguments or not keys or not keys[0].endswith("}"):
            return
        names = self.net.touched(keys)
        for name in names:
            self._places(name)
            self._tickets(name)
        self._refused(script, keys, arguments, reply)
        if script in RELEASES or script is scripts.RELEASE_DEAD:
            self._gone(script, keys, arguments[0])
        # Who left before has ended nothing; one whose task is over may find its record lost.
        ends = script not in LEAVES or reply[0] == HAS_LEFT or "over" in arguments
        if script in HAND_ON and ends and not self.net.linked:
            nth = 0 if script in LEAVES or script is scripts.OVERRIDE else 2
            self._handed_on(keys[0], script, arguments[nth] if nth < len(arguments) else "")
        if next(self._requests) % OFTEN == 0:
            self._ends()
            if script in TWICE and not (self.net.linked or self._unseen):
                self._twice(script, keys, arguments, reply)

    def _ends(self) -> None:
        """Judge that all keys of locks end by themselves, and none before what is in it."""
        for name, ttl in self.net.ttls().items():
            if ttl < 0 and (name.endswith(ENDS) or ":wake:" in name):
                self.fail(f"{name} does not end by itself")
            lasts = max(self.net.leases(name).values()) if name.endswith("}") else 0
            if ttl < lasts - self.net.now_ms:
                self.fail(f"{name} ends {lasts - self.net.now_ms - ttl} ms before its last lease")

    def _line(self, name: str) -> set[str]:
        return {one.decode() for one in self.net.send("ZRANGE", f"{name}:line", 0, -1)}

    def _places(self, name: str) -> None:
        """Judge that nobody has a place who is in no line."""
        places = {one.decode() for one in self.net.send("HKEYS", f"{name}:places")}
        if places and not self._unseen and (left := places - self._line(name)):
            self.fail(f"{left} are not in the line of {name}, and have places there")

    def _gone(self, script: Script, keys: Sequence[str], owner: str) -> None:
        """Judge that nobody is in line who has left it, or has died."""
        for name in keys:
            for one in self._line(name):
                if one == owner or (script is scripts.RELEASE_DEAD and one.startswith(owner)):
                    self.fail(f"{one} has left the line of {name}, and is there")

    def _tickets(self, name: str) -> None:
        """Judge the parked tasks whose first lock this is, and what is kept here."""
        found = self.net.send("HGETALL", f"{name}:tickets")
        tickets = dict(zip(found[::2], found[1::2], strict=True))
        counted = int(tickets.pop(b"bytes", 0))
        if counted != sum(map(len, tickets.values())):
            self.fail(f"{name} has {counted} bytes of {tickets}")
        self._kept(name, tickets.keys())
        for known in [one for one in self._turns if one[0] == name and one[1] not in tickets]:
            del self._turns[known]
        if not tickets:
            return
        handed = self.net.send("ZRANGE", f"{name}:handed", 0, -1, "WITHSCORES")
        until = dict(zip(handed[::2], map(float, handed[1::2]), strict=True))
        claimed = set(self.net.send("HKEYS", f"{name}:running"))
        replaced = set(self.net.send("HKEYS", f"{name}:replaced"))
        waits = {one[:-1].encode() for one in self._line(name) if one[-1] == "#"}
        if twice := tickets.keys() & (claimed | replaced) | until.keys() & waits:
            self.fail(f"{twice} are in two places of {name}")
        for ticket, record in tickets.items():
            _, _, times, ttl, _ = record.split(b" ", 4)
            before, ended = self._turns.get((name, ticket), (self._unseen, 0.0))
            ends = until.get(ticket, 0.0)
            self._turns[name, ticket] = int(times), ends
            if int(times) == before and 0 < ends < ended:
                self.fail(f"turn {before} of {ticket!r} is made {ended - ends} ms shorter")
            if int(times) <= before or ticket not in until:
                continue
            lasts, least = ends - self.net.now_ms, int(ttl) * 2 ** (int(times) - 1)
            least = min(least, max(int(ttl), LONGEST))
            if not least <= lasts <= least + SOON:
                self.fail(f"turn {int(times)} of {ticket!r} lasts {lasts} ms, and not {least}")

    def _kept(self, name: str, tickets: Any) -> None:
        """Judge that what is kept for a parked task is kept for one that is parked."""
        for owner in self.net.leases(name):
            if owner[-1] != "#":
                continue
            ticket, there = owner[:-1].encode(), tickets
            if owner[-2:] == "##":
                length, _, rest = owner.partition("/")
                first, ticket = rest[: int(length)], rest[int(length) : -2].encode()
                there = self.net.send("HKEYS", f"{first}:tickets")
            if ticket not in there:
                self.fail(f"{name} is kept for {ticket!r}, which is not parked")

    def _refused(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge of which lease somebody is told who is refused, or put in line."""
        if script in ACQUIRES and reply[0] == REFUSED:
            name, (lasts, owner) = keys[reply[1]], reply[2:4]
            if arguments[4] and lasts <= 0:
                self.fail(f"{arguments[0]} waits for {name}, and is told to ask again at once")
        elif script in PARKS and reply[0] in {REFUSED, PARKED}:
            name, (lasts, owner) = reply[2].decode(), reply[4:6]
        else:
            return
        owner, mine = owner.decode(), str(arguments[0]).partition("@")[0]
        if not owner or owner.startswith(f"{mine}@"):  # another delivery of its own
            return
        now = self.net.now_ms
        first = min([until for until in self.net.leases(name).values() if until > now], default=0)
        if lasts != first - now:
            self.fail(f"{mine} is told that {owner} has {name} for {lasts} ms: {first - now}")

    def _handed_on(self, name: str, script: Script, broker: str) -> None:
        """Judge that a sweep of the same broker would find nothing to hand on."""
        if self._line(name):
            _, after = self.net.tried(scripts.SWEEP, [name], broker, "[]")
            if new := {one.decode() for one in after.get(name, ())} - set(self.net.leases(name)):
                self.fail(f"{script.text.split()[1]} does not hand {name} on to {new}")

    def _twice(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge a request that is sent twice, and arrives twice at once."""
        if script in PARKS and reply[0] != GRANTED:
            return  # whoever asks anew hands on what came free by the first request
        before = self.net.contents()
        again, after = self.net.tried(script, keys, *arguments)
        changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        if more := {name for name in changed if ":wake:" not in name}:
            self.fail(f"{script.text.split()[1]} of {arguments[0]}, sent twice, changes {more}")
        if script in {*ACQUIRES, *PARKS} and reply[0] == GRANTED:
            at = 3 if script in PARKS else 1
            if [reply[0], *reply[at:]] != [again[0], *again[at:]]:
                self.fail(f"{arguments[0]}, sent twice, was granted {reply}, and then {again}")

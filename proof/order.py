"""
Judge the lines of a simulation: who comes in before whom, and how many may wait.

The judge sees each request that reaches the lock server, with its reply, whether or not anybody
hears it, and who has a lease then.  From these alone it knows who waits, and since when:

* nobody is let in, or has a turn, while somebody waits who came before; unless the asker wants to
  pass the line, whose head costs no more than 1, or goes on with what was its own: a place, or a
  task whose process died;
* a place is kept for as long as the waiter asks again in time, and over a turn that nobody claims;
  nobody is handed a lock whose place is over;
* the line takes in no more parked tasks than it may: it is full only if it is, and then the
  newcomer is told so, or those make room that came first;
* a parked task of several locks passes each in its turn, from when it has passed the one before,
  and is granted all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock import scripts
from celery_dislock.scripts import FULL, GRANTED, PARKED, REFUSED, REPLACED_BY

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


def member(locks: Sequence[str], ticket: str, name: str) -> str:
    """Return how a ticket, whose locks these are in their order, is called at one of them."""
    first = locks[0]
    return f"{ticket}#" if name == first else f"{len(first)}/{first}{ticket}##"


def named(script: Script, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments by the names that the script gives them."""
    return dict(zip(script.names, arguments, strict=False))  # a script around it has more


@dataclass
class Line:
    """
    The line of one lock.

    A parked task is in it under a name that ends in "#", as is what it keeps, and its turn.
    """

    leases: dict[str, int] = field(default_factory=dict)  # until when, in ms
    waits: dict[str, float] = field(default_factory=dict)  # until when its place is kept
    came: dict[str, int] = field(default_factory=dict)  # when; also of those that wait no more
    large: set[str] = field(default_factory=set)  # who has asked for it at a cost of more than 1
    claimed: set[str] = field(default_factory=set)  # tasks that have begun
    unknown: set[str] = field(default_factory=set)  # of which the server may have lost something

    def live(self, now: int) -> set[str]:
        """Return who has a lease."""
        return {owner for owner, until in self.leases.items() if until > now}


class Room(NamedTuple):
    """Of a line: how many may wait, who did, and who has made room."""

    most: int  # 0: any number
    waiting: dict[str, int]
    replaced: set[str]


def stands_at(nth: int, reply: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Return whether a waiter stands in line at its nth lock: not if its own task has that."""
    task, at, _ = arguments[0].partition("@")
    of_task = at and reply[0] == REFUSED and reply[3].startswith(f"{task}@".encode())
    return bool(reply[:2] == [REFUSED, nth] and arguments[4] and not of_task)


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
        self.tickets: dict[tuple[str, str], list[str]] = {}  # by first lock and name: the locks
        self.refused: set[str] = set()  # owners that were told that the line is full
        self.requests = 0

    def lost(self) -> None:
        """Know nothing more of those who came before the server has lost data."""
        for (_, ticket), locks in self.tickets.items():
            for name in locks:
                self.lines[name].unknown.add(member(locks, ticket, name))
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
        names, now = self.net.touched(keys), self.net.now_ms
        before = {name: self.lines[name].live(now) for name in names}
        for name in names:
            self.ends(name, script, arguments)
            self.lines[name].leases = self.net.leases(name)
        self.begin_anew(script, keys[0], arguments, reply)
        asks = named(script, arguments) if script in PARKS else {}
        waiting = self.waiting(keys[0]) if asks else {}
        made_room = reply[-2][::2] if asks and reply[0] == PARKED else ()
        replaced = {f"{one.decode()}#" for one in made_room}
        is_replaced = asks and reply[0] == REPLACED_BY
        for one in replaced | ({f"{asks['ticket']}#"} if is_replaced else set()):
            self.lines[keys[0]].waits.pop(one, None)
        stood = {name: set(self.lines[name].waits) for name in names}
        self.move()
        takes_over = script is scripts.TAKE_OVER
        asker = str(arguments[takes_over])
        is_unfair = script in ACQUIRES and not arguments[5]
        words = arguments[3].split(",") * len(keys) if asks or script in ACQUIRES else []
        for nth, name in enumerate(names):
            line = self.lines[name]
            mine = asker
            if asks:
                locks = self.tickets.get((keys[0], asks["ticket"]), keys)
                mine = member(locks, asks["ticket"], name)
            if words and name in keys and words[nth].partition("*")[2] not in {"", "1"}:
                line.large.add(mine)
            others = stood[name] - line.live(now) - before[name] - {asker}
            passes = takes_over or (is_unfair and not self.has_large_head(line, others))
            self.judge(name, before[name], stood[name], asker, mine, passes=passes)
            for one in [one for one in line.live(now) if one[-1] != "#"]:
                line.waits.pop(one, None)
            if script in ACQUIRES and stands_at(nth, reply, arguments):
                self.waits(line, arguments[0], now + arguments[4])
        if asks and not self.is_told_again(asker, reply):
            room = Room(asks["most"], waiting, replaced)
            self.parks(keys, asks["ticket"], room, reply)
            self.move()

    def is_told_again(self, asker: str, reply: Sequence[Any]) -> bool:
        """Return whether a late request is told, as the first one was, that the line was full."""
        before = asker in self.refused
        if reply[0] == FULL:
            self.refused.add(asker)
        return before and reply[0] == FULL

    def judge(
        self, name: str, before: set[str], stood: set[str], asker: str, mine: str, *, passes: bool
    ) -> None:
        """
        Judge whether somebody was let in before his time; *mine*: the asker, as in line.

        Before the request some had the lock, and some stood in line: who came back to an old place
        by this request could not be let in by it.
        """
        line, now = self.lines[name], self.net.now_ms
        live = line.live(now)
        new = {one for one in live - before if one[0] != "~"}
        if asker in new:
            new.discard(asker)
            if not (passes or mine in before or mine in line.claimed):
                new.add(mine)
        waiting = {
            one: line.came[one]
            for one, until in line.waits.items()
            if until > now and one in stood - live - before - new - line.unknown
        }
        for one in sorted(new - line.unknown):
            if one not in {asker, mine} and line.waits.get(one, FOREVER) <= now:
                self.fail(f"{one} was handed {name}, and its place is over")
            since = line.came.get(one, self.requests)
            if passed := [other for other, came in waiting.items() if came < since]:
                self.fail(f"{one} has passed {passed} in the line of {name}")

    def has_large_head(self, line: Line, others: set[str]) -> bool:
        """Return whether the first of those in line, whom nobody may pass, costs more than 1."""
        stand = others & line.waits.keys()
        gone = {one for one in stand if line.waits[one] <= self.net.now_ms}
        if not stand or gone or line.unknown:
            return False  # who is first is not known
        return min(stand, key=line.came.__getitem__) in line.large

    def move(self) -> None:
        """Note which tickets stand in the line of a later lock, as they keep those before it."""
        now = self.net.now_ms
        for (first, ticket), locks in self.tickets.items():
            keeps = f"{ticket}#" in self.lines[first].waits
            for name, later in pairwise(locks):
                keeps = keeps and member(locks, ticket, name) in self.lines[name].live(now)
                line, mine = self.lines[later], member(locks, ticket, later)
                if keeps and mine not in line.live(now):
                    line.waits[mine] = FOREVER
                    line.came.setdefault(mine, self.requests)
                else:
                    line.waits.pop(mine, None)

    def begin_anew(
        self, script: Script, lock: str, arguments: Sequence[Any], reply: Sequence[Any]
    ) -> None:
        """Note who comes again at the end: has given back what he kept, or was set aside."""
        if script is scripts.PUT_BACK:
            self.put_back(lock, arguments[1])
        if script is not scripts.SWEEP:
            return
        anew = {circle[0].decode() for circle in reply[4]}
        found = [key for key in self.tickets if key[1] in anew]
        for first, ticket in found:
            locks = self.tickets[first, ticket]
            if len(locks) == 1:
                self.fail(f"{ticket}, of {first} alone, is in no circle")
            self.comes_again(first, ticket)
            # Two versions of the code may have parked it beside two locks; one of these came again.
            if [known for _, known in found].count(ticket) > 1:
                for name in locks:
                    self.lines[name].unknown.add(member(locks, ticket, name))

    def put_back(self, first: str, ticket: str) -> None:
        """Note that a ticket of one lock that was set aside comes to its line anew."""
        line, mine = self.lines[first], f"{ticket}#"
        if mine not in line.waits:
            self.comes_again(first, ticket)
            line.claimed.discard(mine)
            line.waits[mine] = FOREVER

    def comes_again(self, first: str, ticket: str) -> None:
        """Have a ticket come to its lines anew."""
        locks = self.tickets.get((first, ticket), [first])
        for name in locks:
            self.lines[name].came.pop(member(locks, ticket, name), None)
        self.lines[first].came[f"{ticket}#"] = self.requests

    def waits(self, line: Line, asker: str, until: float) -> None:
        """Note that somebody is in line."""
        if asker not in line.waits:
            line.came[asker] = self.requests
        elif line.waits[asker] <= self.net.now_ms:  # too late: it may have been passed over
            line.unknown.add(asker)
        line.waits[asker] = until

    def parks(self, keys: Sequence[str], ticket: str, room: Room, reply: Sequence[Any]) -> None:
        """Note that a task is in line, or in its body; judge how many there are."""
        first, mine = keys[0], f"{ticket}#"
        line = self.lines[first]
        if reply[0] in {GRANTED, PARKED}:
            locks = self.tickets.get((first, ticket), list(keys))
            if reply[0] == PARKED or reply[2]:
                self.tickets[first, ticket] = locks
        if reply[0] == GRANTED:
            self.granted(locks, ticket, [one.decode() for one in reply[3::2]], claims=reply[2])
        elif reply[0] == FULL and not line.unknown and not 0 < room.most <= len(room.waiting):
            self.fail(f"the line of {mine} is not full, as it was told: {room.waiting}")
        elif reply[0] == PARKED:
            is_new = mine not in line.came
            if mine not in room.replaced:
                line.waits[mine] = FOREVER
            line.came.setdefault(mine, self.requests)
            if is_new and room.most and not line.unknown:
                self.judge_room(line, mine, room)

    def granted(
        self, locks: Sequence[str], ticket: str, granted: Sequence[str], *, claims: bool
    ) -> None:
        """Note that a task has its locks; judge whether these are all."""
        first, mine = self.lines[locks[0]], f"{ticket}#"
        if granted != locks and mine not in first.unknown:
            self.fail(f"{ticket} was granted {granted}, in place of {locks}")
        for name in granted:
            self.lines[name].waits.pop(member(locks, ticket, name), None)
            if claims:
                self.lines[name].claimed.add(member(locks, ticket, name))
        if claims:
            first.came.setdefault(mine, self.requests)  # its place, if its process dies

    def waiting(self, first: str) -> dict[str, int]:
        """Return the tickets that wait for their turn, whose first lock this is, and since when."""
        came = self.lines[first].came
        return {one: since for one, since in came.items() if self.is_waiting(first, one)}

    def is_waiting(self, first: str, one: str) -> bool:
        """Return whether a ticket, whose first lock this is, waits for its turn."""
        if one[-1] != "#" or one.endswith("##") or one not in self.lines[first].waits:
            return False
        locks = self.tickets.get((first, one[:-1]), [first])
        return not all(
            member(locks, one[:-1], name) in self.lines[name].live(self.net.now_ms)
            for name in locks
        )

    def judge_room(self, line: Line, mine: str, room: Room) -> None:
        """Judge who has made room for a task that has come to a line."""
        most, waiting, replaced = room
        stay = {one: came for one, came in waiting.items() if one not in replaced}
        is_in = mine not in replaced
        if is_in and len(stay) >= most:
            self.fail(f"{mine} is taken into a full line: {stay}")
        gone = [line.came[one] for one in replaced & waiting.keys()]
        if max(gone, default=0) > min(stay.values(), default=FOREVER):
            self.fail(f"{replaced} made room, and not those who came first: {waiting}")
        if gone and len(stay) + is_in < most:
            self.fail(f"{replaced} made room, and there was room: {waiting}")

    def ends(self, name: str, script: Script, arguments: Sequence[Any]) -> None:
        """Note that somebody waits no more, or that another has the place."""
        line, owner = self.lines[name], arguments[0]
        if script in RELEASES:
            line.waits.pop(owner, None)
            line.waits.pop(f"{arguments[3]}#", None)
        elif script is scripts.RELEASE_DEAD:
            for one in [one for one in line.waits if one.startswith(owner)]:
                del line.waits[one]
        elif script in LEAVES:
            line.waits.pop(f"{named(script, arguments)['ticket']}#", None)
        elif script is scripts.TAKE_OVER and owner in line.unknown:
            line.unknown.add(arguments[1])
        elif script is scripts.TAKE_OVER and owner in line.waits:
            line.waits[arguments[1]] = line.waits.pop(owner)
            line.came[arguments[1]] = line.came[owner]
        elif script is scripts.FREE and owner[-1] == "#":  # its turn, or what it keeps
            for (first, ticket), locks in self.tickets.items():
                if name in locks and owner == member(locks, ticket, name):
                    self.comes_again(first, ticket)

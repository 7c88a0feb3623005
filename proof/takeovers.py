"""
Judge the tasks of a simulation that cancel each other.

* Where a lock admits one at a time, no task begins after one that was sent later has begun, unless
  the server has lost data in between.
* Of those that were sent the newest ends as SUCCESS, unless one that may have been newer was
  dropped or set aside: it may have been told to end for that one.  Nor need it if a task of another
  strategy took its place.
* While the newest waits for a lock that one at a time has, a lease is marked, from when it has come
  or from the next sweep on; that of a turn, which has no holder, is not.  Its holder is told in
  each renewal.  None needs a mark while an operator or a body has set something for the lock.  A
  task that is dropped leaves no mark.
* Who ends as REVOKED was dropped, or names one that was sent later; who has lost its place in line
  says so, and there is one.

A task is as old as its message says: sent when its sender asked for that, or due at its ETA.  Of
two that were sent at one time either may be the newer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock import scripts
from celery_dislock.scripts import GRANTED, PARKED
from proof.order import named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.scripts import Script
    from proof.simulated import Net

PARKS = (scripts.PARK, scripts.PARK_UNIQUE)
NAMED = re.compile(r"replaces it: task (\S+)$")
MARKED = re.compile(r' {"superseded":"([^"]*)"')
GATE = '{"gate"'  # the holder of one who waits for another lock
DROPPED, PASSED = "dropped by an operator", "a newer task took its place"


class Begun(NamedTuple):
    """A body that has begun: of which task, and which request of all had its lock granted."""

    task: str
    granted: int


class TakeOvers:
    """
    The tasks of all locks that cancel each other.

    Args:
        net: The lock server.
        fail: Called with what is broken.
        alone: Whether the code of each task wants the lock for itself.
        admits_one: Whether the locks admit one at a time, whatever an operator does.
    """

    def __init__(
        self, net: Net, fail: Callable[[str], None], *, alone: bool, admits_one: bool
    ) -> None:
        self.net, self._fail, self.alone, self.admits_one = net, fail, alone, admits_one
        self.asked: dict[str, tuple[str, float]] = {}  # each task's lock, and when it was sent
        self.sent: set[str] = set()  # tasks whose message has arrived
        self.cancel: set[str] = set()  # those of them that cancel others; the others do not count
        self.begun: dict[str, list[Begun]] = defaultdict(list)  # by lock
        self.ended: dict[str, str] = {}  # state
        self.excused: set[str] = set()  # dropped, or gone with its process: need not succeed
        self.has_lost = False
        self._granted: dict[str, int] = {}  # by owner
        self._dropped: set[str] = set()  # tasks
        self._requests = 0

    def fail(self, text: str) -> None:
        """Say that the promise is broken, and how."""
        self._fail(f"takes over: {text}")

    def lost(self) -> None:
        """Know nothing more of who began before the server has lost data."""
        self.has_lost = True
        self.begun.clear()
        self._dropped.clear()

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Note a lock that was granted to a task, whether or not that hears of it."""
        self._requests += 1
        if script in PARKS and reply[0] == GRANTED:
            self._granted.setdefault(arguments[0], self._requests)
        if self.cancel and keys and keys[0].endswith("}"):
            self._judge_marks(script, keys[0], arguments, reply)

    def _judge_marks(self, script: Script, lock: str, arguments: Sequence[Any], reply: Any) -> None:
        """Judge which leases of a lock are marked, so that their holders end for the newest."""
        asked, marks = named(script, arguments), self._marks(lock)
        if turns := [owner for owner, by in marks.items() if by and owner.endswith("#")]:
            self.fail(f"{turns} of {lock} are turns, and are marked: {marks}")
        if script in PARKS and reply[0] == PARKED and reply[-1]:
            self._judge_told(lock, asked["terms"], reply[-1])
        ticket = asked.get("ticket", "")
        task = ticket.partition(":")[0]
        if script is scripts.DROP and reply[0] == 1:
            self._dropped.add(task)
        if self._dropped & set(marks.values()):
            self.fail(f"{lock} is marked for a task that was dropped: {marks}")
        if script is scripts.RENEW and reply != 0:
            owner = arguments[0]
            if reply != (marks[owner].encode() or 1):
                self.fail(f"{owner} is told of {reply!r}, and not as it is marked: {marks}")
        comes = script in PARKS and reply[0] == PARKED and asked["sent"]
        run = {owner for owner in marks if not owner.endswith("#")}
        if not (comes or script is scripts.SWEEP) or not run or not self.alone:
            return
        if self.net.send("EXISTS", f"{lock}:limit"):
            return  # the newest could not begin either, or beside those that run
        members = self.net.send("ZRANGE", f"{lock}:line", 0, -1)
        line = {member.decode().partition(":")[0] for member in members}
        # One that was set aside and comes back supersedes nobody.
        waits = line & ({task} if comes else self.cancel - self.excused)
        if waits and not any(marks[owner] in waits for owner in run):
            self.fail(f"{waits} waits for {lock}, and nobody is told: {marks}")

    def _judge_told(self, lock: str, terms: str, told: Sequence[bytes]) -> None:
        """Judge which holders are told to end for a task of these terms."""
        leases = self._leases(lock).items()
        records = [record.split(" ", 5) for owner, record in leases if owner[-1] != "#"]
        run = sorted((int(one[2]), one[4][0], one[5]) for one in records if GATE not in one[5])
        ends = [holder for _, mode, holder in run if mode != terms[0]] or [run[0][-1]]
        if sorted(ends) != sorted(one.decode() for one in told):
            self.fail(f"{told} are told to end of {run} that have {lock}, and not {ends}")

    def _leases(self, lock: str) -> dict[str, str]:
        """Return the records of those who have a lock, unless they are done with it."""
        found = [one.decode() for one in self.net.send("HGETALL", lock)]
        leases = zip(found[::2], found[1::2], strict=True)
        now = self.net.now_ms
        return {
            owner: record
            for owner, record in leases
            if owner[0] != "~" and int(record.split(" ", 2)[1]) > now
        }

    def _marks(self, lock: str) -> dict[str, str]:
        """Return for which task each lease is marked; empty: for none."""
        return {
            owner: mark[1] if (mark := MARKED.search(record)) else ""
            for owner, record in self._leases(lock).items()
        }

    def is_newer(self, one: str, other: str) -> bool:
        """Return whether the one was sent after the other."""
        return self.asked[one][1] > self.asked[other][1]

    def may_replace(self, one: str, other: str) -> bool:
        """Return whether the one has the lock of the other, and was not sent before it."""
        return self.asked[one][0] == self.asked[other][0] and not self.is_newer(other, one)

    def begins(self, task: str, owner: str) -> None:
        """Judge a body that begins."""
        if task not in self.cancel:
            return
        of_lock = self.begun[self.asked[task][0]]
        this = Begun(task, self._granted.get(owner, self._requests))
        for other in of_lock:
            late = self.is_newer(other.task, task) and other.granted < this.granted
            if late and self.admits_one:
                self.fail(f"task {task} begins after {other.task}, which was sent later")
        of_lock.append(this)

    def ends(self, task: str, state: str, result: Any) -> None:
        """Judge a state that is stored of a task."""
        if task not in self.cancel:
            return
        self.ended[task] = state
        reason = str(result)
        if state == "FAILURE":
            self.fail(f"task {task} has failed: {result!r}")
        elif state == "REVOKED" and DROPPED in reason:
            self.excused.add(task)
        elif state == "REVOKED":
            named = NAMED.search(reason)
            others = {named[1]} & self.cancel if named else self.sent if PASSED in reason else set()
            newer = {one for one in others - {task} if self.may_replace(one, task)}
            if not newer and not self.has_lost:
                self.fail(f"task {task} is revoked, and not for one that was sent later: {reason}")
            if (
                newer - self.cancel
            ):  # one that does not cancel may have taken its place in a full line
                self.excused.add(task)

    def end(self) -> None:
        """Judge what has become of the newest of each lock, now that all have ended."""
        of_lock: dict[str, list[str]] = defaultdict(list)
        for one in (self.cancel & self.sent) - self.excused:
            of_lock[self.asked[one][0]].append(one)
        for tasks in of_lock.values():
            last = max(self.asked[one][1] for one in tasks)
            newest = [one for one in tasks if self.asked[one][1] == last]
            gone = self.excused & self.cancel & self.sent
            if self.has_lost or any(self.may_replace(one, newest[0]) for one in gone):
                continue
            if not any(self.ended.get(one) == "SUCCESS" for one in newest):
                states = [f"{one}: {self.ended.get(one)}" for one in newest]
                self.fail(f"the newest task of a lock has not succeeded: {', '.join(states)}")

"""
Judge the leases of a simulation: how long each lasts, and that several locks are taken together.

As :mod:`proof.order` does, the judge sees each request that reaches the lock server, and what is
there then.  Clients tell it of the leases that they have, with their options.  The clock is driven,
so that all times are exact:

* "take-up": a hand-off to a waiter grants some seconds, or its timeout if that is shorter, so that
  the next one has the lock when they are over and nobody has taken it up;
* "at least": a lock is held for ``lock_at_least_for`` after its acquisition, though its owner is
  done, and no longer than that;
* "crash": when the main process has told of a death, nothing that the dead process held is there;
* "cap": a lease is renewed ``max_renew_times``, neither more often nor for longer by the main
  process, and no more seldom;
* "all or none": of several locks an owner has all, or has taken none;
* a lease that has ended is not renewed;
* "limit": a lock has no more leases at a time than anybody may have asked for, with those that are
  kept for parked tasks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.locks.lease import EARLY_BY, ENDED_BY_OWNER
from celery_dislock.scripts import GRANTED, REFUSED
from proof.order import ACQUIRES, FOREVER, PARKS, RELEASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.lease import Lease
    from celery_dislock.scripts import Script
    from proof.simulated import Net

PROMISES = ("take-up", "at least", "crash", "cap", "all or none", "limit")
TAKE_UP = 5_000  # ms for which a hand-off grants a lock


def least_of(options: TaskOptions) -> int:
    """Return for how many milliseconds a lock is held at least."""
    return round(options.lock_at_least_for * 1000)


def cap_of(options: TaskOptions) -> float:
    """Return for how many seconds a lease is renewed."""
    interval = options.renewal_interval
    if interval is None or options.max_renew_times <= 0:
        return FOREVER
    return options.max_renew_times * interval


@dataclass
class Leases:
    """What is known of the leases of one lock; times are in ms of the server's clock."""

    until: dict[str, int] = field(default_factory=dict)  # when each ends
    granted: dict[str, int] = field(default_factory=dict)  # when it began, if that was seen
    wanted: dict[str, int] = field(default_factory=dict)  # the timeout that a waiter asks for
    least: dict[str, int] = field(default_factory=dict)  # until when it is held beyond its end
    most: int = 0  # the highest limit that was asked for, or set
    is_shared: bool = False  # somebody has asked for a shared lease


class Durations:
    """
    The leases of a lock server.

    Args:
        net: The server.
        fail: Called with the promise that is broken, and how.
    """

    def __init__(self, net: Net, fail: Callable[[str], None]) -> None:
        self.net, self._fail = net, fail
        self.locks: dict[str, Leases] = defaultdict(Leases)
        self.options: dict[str, TaskOptions] = {}  # by owner: those that its client was granted
        self.renewals: Counter[str] = Counter()  # by owner, as its client was told
        self._counted_at: dict[str, float] = {}  # by owner: the last of them
        self.has_capped = False  # whether any lease has reached its cap
        self.done: dict[str, list[Lease]] = defaultdict(list)  # by lock: ended by their owners

    def fail(self, promise: str, text: str) -> None:
        """Say that a promise is broken."""
        self._fail(f"{promise}: {text}")

    def lost(self) -> None:
        """Know nothing more of what was there before the server has lost data."""
        for name, lock in self.locks.items():
            self.locks[name] = Leases(
                until=self.net.leases(name), most=lock.most, is_shared=lock.is_shared
            )
        self.done.clear()

    # What clients tell.

    def acquired(self, lease: Lease) -> None:
        """Note that a client has a lease."""
        self.options[lease.owner] = lease.lock.options
        interval = lease.lock.interval
        if interval is not None and lease.due is not None and lease.due - lease.since < interval:
            self.renewals[lease.owner] = -1  # of a hand-off: the first one sets the full timeout

    def renewed(self, lease: Lease) -> None:
        """Judge how often a lease was renewed; a look for a newer task does not count."""
        before = self._counted_at.get(lease.owner, lease.since)
        is_look = lease.renewed_at < before + (lease.lock.interval or 0.0) * (1 - EARLY_BY)
        if is_look and self.renewals[lease.owner] >= 0:
            return
        self._counted_at[lease.owner] = lease.renewed_at
        self.renewals[lease.owner] += 1
        most = lease.lock.options.max_renew_times
        if 0 < most < self.renewals[lease.owner]:
            self.fail("cap", f"{lease!r} is renewed after {most} renewals")

    def capped(self, lease: Lease) -> None:
        """Judge whether a lease is renewed no more before its cap."""
        self.has_capped = True
        since = self.net.time - lease.since
        if since < cap_of(lease.lock.options) * (1 - EARLY_BY):
            self.fail("cap", f"{lease!r} is renewed no more after {since} s")

    def ended(self, lease: Lease) -> None:
        """Note that a lease was ended by its owner; it may be held on."""
        if lease.end in ENDED_BY_OWNER and lease.lock.options.lock_at_least_for:
            for name in lease.lock.names:
                self.done[name].append(lease)

    def held_on(self, name: str) -> list[Lease]:
        """Return the leases that are held though their owners are done, and have said so."""
        least = self.locks[name].least
        self.done[name] = [
            one for one in self.done[name] if least.get(f"~{one.owner}", 0) > self.net.now_ms
        ]
        return self.done[name]

    def died(self, start: str) -> None:
        """Judge what a dead process has left, when the main process has told of its death."""
        for name, lock in self.locks.items():
            left = [one for one in self._live(name) if one.startswith(start)]
            if left:
                self.fail("crash", f"{left} have {name}, of {lock}, and their process is dead")

    # What reaches the server.

    def arrived(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], reply: Any
    ) -> None:
        """Judge a request that has reached the server."""
        if not arguments or not keys[0].endswith("}"):  # of something else than a lock
            return
        self._terms(script, keys, arguments)
        at = {name: self._at(name, script, keys, arguments) for name in self.net.touched(keys)}
        if script in ACQUIRES and len(keys) > 1:
            taken, there = zip(*(at[name] for name in keys), strict=True)
            self._several(keys, arguments, reply, taken, there)
        if script in PARKS and reply[0] == GRANTED:
            granted = [name.decode() for name in reply[3::2]]
            if not all(arguments[0] in self._live(name) for name in granted):
                self.fail("all or none", f"{arguments[0]} was granted {granted}, and has {at}")

    def _terms(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> None:
        """Note the limits that are asked for, or set by an operator."""
        if script is scripts.OVERRIDE and "limit" in arguments:
            lock = self.locks[keys[0]]
            lock.most = max(lock.most, arguments[-1] or 0)
        elif script in ACQUIRES or script in PARKS:
            words = arguments[3].split(",")  # their terms
            for name, word in zip(keys, words * len(keys), strict=False):
                mode, limit, *_ = word.split(":")
                lock = self.locks[name]
                lock.most = max(lock.most, int(limit))
                lock.is_shared = lock.is_shared or mode == "s"

    def _at(
        self, name: str, script: Script, keys: Sequence[str], arguments: Sequence[Any]
    ) -> tuple[bool, bool]:
        """Judge one lock; returns whether the asker was given it, and has it."""
        lock = self.locks[name]
        before, was = self._live(name), lock.until
        lock.until = self.net.leases(name)
        live = self._live(name)
        if 0 < lock.most < len(live) and not lock.is_shared:
            self.fail("limit", f"{name} has {live}, and {lock.most} are admitted")
        asker = self._asker(lock, script, arguments)
        goes_on = script is scripts.TAKE_OVER  # with what began when another was granted it
        for one in live - before - ({asker} & lock.granted.keys() if goes_on else set()):
            self._new(name, lock, one, asker, script)
        if script in RELEASES and name in keys:
            if left := self._left(lock, before & {asker}) & live:
                self.fail("at least", f"{left} are done, and have {name} until {lock.until}")
        elif script is scripts.RELEASE_DEAD:  # what is left of them is judged at the end
            self._left(lock, {one for one in before if one.startswith(asker)})
        elif script is scripts.RENEW_STALLED:
            for one in live:
                if lock.until[one] != was.get(one):
                    self._renewed_by_others(name, lock, one)
        elif script is scripts.FREE:
            lock.least.pop(f"~{asker}", None)
        self._held_on(name, lock, live)
        return asker in live - before, asker in live

    def _live(self, name: str) -> set[str]:
        now = self.net.now_ms
        return {owner for owner, until in self.locks[name].until.items() if until > now}

    def _asker(self, lock: Leases, script: Script, arguments: Sequence[Any]) -> str:
        """Return who asks; one that takes over goes on with what another has left."""
        asker: str = arguments[0]
        if script in ACQUIRES and arguments[4]:
            lock.wanted[asker] = arguments[1]
        elif script is scripts.TAKE_OVER:
            old, asker = arguments[:2]
            lock.least.pop(f"~{old}", None)
            for known in (lock.granted, lock.wanted):
                if old in known:
                    known[asker] = known[old]
        return asker

    def _new(self, name: str, lock: Leases, one: str, asker: str, script: Script) -> None:
        """Judge a lease that was not there before."""
        if script is scripts.RENEW:
            self._fail(f"{one} has {name} again, as it renewed a lease that had ended")
        now = self.net.now_ms
        if one == asker or one[0] != "~":
            lock.granted[one] = now
        wanted = lock.wanted.get(one)
        if one == asker or one[-1] == "#" or wanted is None:
            return
        lasts = lock.until[one] - now
        if lasts != min(wanted, TAKE_UP):
            self.fail("take-up", f"{one} was handed {name} for {lasts} ms")

    def _left(self, lock: Leases, those: set[str]) -> set[str]:
        """Note until when leases are held on; returns those that must be gone."""
        gone = set()
        for one in those & self.options.keys() & lock.granted.keys():
            least = lock.granted[one] + least_of(self.options[one])
            if least > self.net.now_ms:
                lock.least[f"~{one}"] = least
            else:
                gone |= {one, f"~{one}"}
        return gone

    def _held_on(self, name: str, lock: Leases, live: set[str]) -> None:
        """Judge for how long the leases are held whose owners are done."""
        for one, least in list(lock.least.items()):
            if least <= self.net.now_ms:
                del lock.least[one]
            elif one not in live or lock.until[one] != least:
                self.fail("at least", f"{one} has {name} not until {least}: {lock.until}")

    def _renewed_by_others(self, name: str, lock: Leases, one: str) -> None:
        """Judge a renewal by the main process."""
        if one not in self.options or one not in lock.granted:
            return
        since = (self.net.now_ms - lock.granted[one]) / 1000
        if since >= cap_of(self.options[one]):
            self.fail("cap", f"{one} is renewed at {name} by its main process after {since} s")

    def _several(
        self,
        keys: Sequence[str],
        arguments: Sequence[Any],
        reply: Sequence[Any],
        taken: Sequence[bool],
        there: Sequence[bool],
    ) -> None:
        """Judge who has taken some of several locks."""
        if reply[0] == GRANTED and not all(there):
            self.fail("all or none", f"{arguments[0]} was granted {keys}, and has {there}")
        if reply[0] == REFUSED and not arguments[4] and any(taken):
            self.fail("all or none", f"{arguments[0]} was refused {keys}, and has {there}")

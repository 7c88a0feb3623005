"""What a lock server knows of a lock: who holds it, who waits, and what is reserved and limited.

One script reads this, ``look.lua``, and the Python API, the commands, the page, doctor and the
metrics all use the types of this module for it.  Nothing here changes a lock.  Times are those of
the lock server: a lock is "held" since its acquisition, by the clock that decides when its lease
ends.
"""

from __future__ import annotations

import re
import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.config.options import RENEWALS_MISSED, RENEWALS_PER_TIMEOUT
from celery_dislock.config.terms import parse_mode
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.names import is_of_one, task_id_of_reserved
from celery_dislock.keys.templates import key_of
from celery_dislock.scripts import LOOK
from celery_dislock.servers.overrides import overrides_of, rate_state
from celery_dislock.servers.records import (
    LEADER,
    bounded_text,
    decode,
    holder_of,
    in_words,
    renewed_ago,
)
from celery_dislock.servers.waiters import COUNT, MS, Waiter, parked_place, parse_place
from celery_dislock.words import as_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.servers.overrides import RateState
    from celery_dislock.servers.server import Server

LEASES_ALONE = -1  # an argument of look.lua
OVERDUE_FROM = RENEWALS_MISSED / RENEWALS_PER_TIMEOUT  # of the timeout without a renewal

# Later versions of a record begin with the same fields; what comes after them is not known here.
_RESERVED = re.compile(
    rb"\d{1,9} (\S) %b (\S+)(?: %b \d+ \S+ %b [01] (\S{1,100}))? .*" % (MS, MS, COUNT)
)
_FREE = b"-"
_STATES = {"s": "being sent", "w": "waiting", "r": "running", "d": "ended"}


class Holder(NamedTuple):
    """
    A live lease, for people.

    Attributes:
        owner: The string that identifies the acquisition.
        token: Its fencing token.
        mode: "exclusive" or "shared".
        held: Seconds since the acquisition.
        acquired_at: UNIX time of the acquisition.
        remaining: Seconds until the lease ends, unless it is renewed again.
        renewed: Seconds since the last renewal, or since the acquisition; None if the holder's
            version does not say, and for a fixed expiry.
        expiring: Whether the owner is done with the lease, which is left to expire.
        turn: Whether the lock is reserved for a parked task, whose message is on its way, or which
            waits for another lock.
        waits: Key of the lock that the parked task waits for meanwhile; None: for none.
        superseded: Id of the newest task of the key, if it waits for this lease to end; else None.
        cost: Units of the limit that the lease takes, and starts of the rate that it counted for.
        spent: What the holder has said that it has spent; None: it has not said that.
        who: The holder in words.
        task, id, worker, pid, host, thread: The holder; None where it has none.
    """

    owner: str
    token: int
    mode: str
    held: float
    acquired_at: float
    remaining: float
    renewed: float | None
    expiring: bool
    turn: bool
    who: str
    task: str | None
    id: str | None
    worker: str | None
    pid: int | None
    host: str | None
    thread: str | None
    waits: str | None = None
    superseded: str | None = None
    cost: int = 1
    spent: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether it is a unit that a parked task keeps while it waits; the sweep renews it."""
        return self.turn and self.waits is not None

    @property
    def can_be_terminated(self) -> bool:
        """Whether the holder is a task that a worker runs, and can be told to end."""
        return bool(self.id and self.worker) and not (self.turn or self.expiring)

    @property
    def timeout(self) -> float | None:
        """Seconds from a renewal to the end of the lease; None: nobody has to renew it."""
        if self.renewed is None or self.expiring or self.turn:
            return None
        return self.renewed + self.remaining

    @property
    def is_overdue(self) -> bool:
        """Whether it has missed two renewals, because its process is dead, stopped or cut off."""
        return self.timeout is not None and (self.renewed or 0.0) > OVERDUE_FROM * self.timeout

    @property
    def is_renewed(self) -> bool:
        """Whether somebody renews it."""
        return self.timeout is not None and not self.is_overdue

    @property
    def may_live(self) -> bool:
        """Whether its body may still run; one that is overdue may be stopped or cut off."""
        return not (self.expiring or self.turn)


class ReservationState(NamedTuple):
    """
    A reservation as the lock server has it.

    Attributes:
        id: Id of its task.
        state: "being sent", "waiting" or "running"; "ended" if the key stays reserved after that.
        since: Seconds since the key was reserved, or since the task has ended.
        remaining: Seconds until the reservation ends, unless it is renewed.
        mark: Text that the lock server has given with the number; "-": none.
        number: Number among the messages of the key that replace each other.
    """

    id: str
    state: str
    since: float
    remaining: float
    mark: str
    number: int


class LockState(NamedTuple):
    """
    All that the lock server knows of a lock.

    Attributes:
        key: The key.
        name: The lock's name in Redis.
        holders: Its live leases.
        waiting: How many stand in line.
        line: The first of them.
        turns: Parked tasks that have their turn, and have not claimed it.
        aside: How many parked tasks were set aside because nobody could read or run them.
        reservation: The reservation of the key; None if there is none.
        ticked: Seconds since a beat that leads has claimed or noted a tick; None: no beat has.
        limit: Units that an operator admits at a time, in place of the code's limit, one for each
            lease that has no cost; 0: the lock is paused.  None: the code's limit holds.
        limit_remaining: Seconds until the operator's limit ends; None: it lasts until it is taken
            back.
        limit_since: UNIX time at which it was set; None: no limit is set.
        limit_note: Why, and by whom; empty: not said.
        limit_differs: Of several independent servers, how many have another limit: they were away
            when it was set or taken back.
        limit_age: Seconds since it was set; None: no limit is set.
        rate: How often the lock is taken at most, and when next; None: it has no rate.
    """

    key: str
    name: str
    holders: Sequence[Holder]
    waiting: int
    line: Sequence[Waiter]
    turns: Sequence[Waiter]
    aside: int
    reservation: ReservationState | None
    ticked: float | None
    limit: int | None
    limit_remaining: float | None
    limit_since: float | None
    limit_note: str
    limit_differs: int = 0
    limit_age: float | None = None
    rate: RateState | None = None

    @property
    def are_several(self) -> bool:
        """Whether these are several keys, reserved together; each has a lock of its own."""
        return not is_of_one(self.name)

    @property
    def argument(self) -> str:
        """What follows a command in a shell, in place of KEY; keys reserved together have none."""
        return "--task NAME --args ARGUMENTS" if self.are_several else as_argument(self.key)

    def beyond(self, kept: Holder) -> str:
        """Return the name of the lock that a task waits for, while it keeps a unit of this one."""
        return f"{self.name.partition('{')[0]}{{{kept.waits}}}"

    @property
    def units(self) -> int:
        """Units of the limit that the leases take: the sum of their costs."""
        return sum(holder.cost for holder in self.holders)

    @property
    def words(self) -> str:
        """
        The terms by which the first in line goes, and whose word they are.

        Empty: none waits, or one at a time, as by default, or an operator has set others.
        """
        first, terms = self.line[0] if self.line else None, []
        if first is None or first.place != 1:
            return ""
        if self.limit is None and first.mode == "exclusive" and first.limit != 1:
            terms.append(f"{first.limit:,} at a time" if first.limit else "any number at a time")
        if self.rate is not None and self.rate.rate is not None and not self.rate.is_set:
            terms.append(str(self.rate.rate))
        whose = "its ticket" if first.parked else "its code"
        return f"the first in line goes by {' and '.join(terms)}, as {whose} says" if terms else ""

    @property
    def lack(self) -> str:
        """What the first in line lacks, in words; empty: nothing, or it costs 1, or is unknown."""
        first = self.line[0] if self.line else None
        if first is None or first.place != 1 or first.cost == 1:
            return ""
        limit = first.limit if self.limit is None else self.limit
        is_shared = "shared" in {first.mode, *(holder.mode for holder in self.holders)}
        if is_shared or not limit or self.units + min(first.cost, limit) <= limit:
            return ""
        free = max(0, limit - self.units)
        needs = f"the first in line needs {min(first.cost, limit):,} of {limit:,} units"
        return f"{needs}, and {free:,} {'is' if free == 1 else 'are'} free: nobody passes it"

    @property
    def is_paused(self) -> bool:
        """Whether an operator admits nobody."""
        return self.limit == 0

    @property
    def is_too_early(self) -> bool:
        """Whether nobody may start now, whoever holds it: those in line wait for the time."""
        return self.rate is not None and self.rate.early > 0

    @property
    def is_limited(self) -> bool:
        """Whether people have set a limit or a rate, or it is held back."""
        return self.limit is not None or (self.rate is not None and self.rate.since is not None)

    @property
    def is_leaderless(self) -> bool:
        """Whether beats had the lock, and nobody holds it or has paused it."""
        is_held_back = self.rate is not None and self.rate.held_back > 0
        return self.ticked is not None and not (self.holders or self.is_paused or is_held_back)

    @property
    def is_stuck(self) -> bool:
        """Whether others wait for a lock that nobody holds and nobody has paused."""
        return bool(self.waiting) and not (self.holders or self.is_paused or self.is_too_early)

    @property
    def has_leases_alone(self) -> bool:
        """Whether the lock server knows nothing of the lock but its leases."""
        return not (
            self.waiting or self.turns or self.aside or self.reservation or self.limit_differs
        ) and (self.ticked is None and self.limit is None and self.rate is None)

    @property
    def exists(self) -> bool:
        """Whether the lock server knows anything of it."""
        return bool(self.holders) or not self.has_leases_alone


def read_state(server: Server, name: str, first: int = 0, most: int = 0) -> LockState:
    """
    Look at one lock.

    Args:
        server: The lock server.
        name: Its name in Redis.
        first: Place in line to begin with, from 0.
        most: Maximum number of places; LEASES_ALONE: nothing but the leases.

    Raises:
        DamagedLockError: A record of the lock cannot be read.
        StoreError: The server did not answer.
    """
    return state_of(server.name, name, server.run(LOOK, [name], first, most), first)


def state_of(server: str, name: str, reply: Sequence[Any], first: int = 0) -> LockState:
    """
    Parse the reply of look.lua.

    Args:
        server: Name of the lock server, for messages.
        name: Name of the lock in Redis.
        reply: The reply.
        first: The first place in line that was asked for, from 0.

    Raises:
        DamagedLockError: A record that the lock cannot do without cannot be read.
    """
    try:
        return _state(name, reply, first)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as exc:
        reason = f"a record of it cannot be read: {reprlib.repr(str(exc))}"
        raise DamagedLockError(server, reason, name) from exc


def _state(name: str, reply: Sequence[Any], first: int) -> LockState:
    now_ms, leases, waiting, line, turns, aside, unique, ticked, rate, shown, *differs = reply
    overrides = overrides_of(shown)
    limit = overrides.get("limit")
    return LockState(
        key=key_of(name),
        name=name,
        holders=[_holder(now_ms, *lease) for lease in zip(*[iter(leases)] * 6, strict=True)],
        waiting=waiting,
        line=[
            parse_place(name, now_ms, nth, *fields)
            for nth, fields in enumerate(zip(*[iter(line)] * 3, strict=True), first + 1)
        ],
        turns=[
            parked_place(name, now_ms, 0, ticket + b"#", record)
            for ticket, _, record in zip(*[iter(turns)] * 3, strict=True)
        ],
        aside=aside,
        reservation=parse_reservation(now_ms, unique),
        ticked=ticked / 1000 if ticked >= 0 else None,
        limit=int(limit.value) if limit else None,
        limit_remaining=(limit.until - now_ms) / 1000 if limit and limit.until else None,
        limit_since=limit.since / 1000 if limit else None,
        limit_note=limit.note if limit else "",
        limit_differs=differs[0] if differs else 0,
        limit_age=(now_ms - limit.since) / 1000 if limit else None,
        rate=rate_state(now_ms, overrides, *rate),
    )


def is_beat(client: Holder | Waiter) -> bool:
    """Tell whether this is one of several beats, which holds a lock to lead, or waits for it."""
    return client.thread == LEADER


_TEXTS = ("task", "id", "worker", "host", "thread")  # of a holder that are text


def _holder(
    now_ms: int, owner: bytes, expires: int, token: bytes, mode: bytes, holder: bytes, acquired: int
) -> Holder:
    about = holder_of(holder)
    waits, by = (bounded_text(about.get(name)) for name in ("waits", "superseded"))
    remaining, held = (expires - now_ms) / 1000, (now_ms - acquired) / 1000
    side, cost, spent = parse_mode(mode)
    return Holder(
        owner=decode(owner).removeprefix("~"),
        token=int(token),
        mode=side,
        held=held,
        acquired_at=acquired / 1000,
        remaining=remaining,
        renewed=None if owner.startswith(b"~") else renewed_ago(about, remaining, held),
        expiring=owner.startswith(b"~"),
        turn="parked" in about,
        waits=key_of(waits) if waits else None,
        superseded=task_id_of_reserved(by) if by else None,
        cost=cost,
        spent=spent,
        who=in_words(about),
        pid=pid if type(pid := about.get("pid")) is int else None,
        **{name: bounded_text(about.get(name)) for name in _TEXTS},
    )


def parse_reservation(now_ms: int, written: bytes) -> ReservationState | None:
    """Parse a record of ``_unique.lua``; None if the key is not reserved."""
    found = _RESERVED.fullmatch(written)
    if found is None or int(found[2]) <= now_ms or found[1] == _FREE:
        return None
    state, ends, task_id, since, number, mark = (decode(part or b"") for part in found.groups())
    return ReservationState(
        task_id_of_reserved(task_id),
        _STATES.get(state, "waiting"),
        max(0, now_ms - int(since or now_ms)) / 1000,  # a failover can set the clock back
        (int(ends) - now_ms) / 1000,
        mark or "-",
        int(number or 0),
    )

"""Use several independent servers as one lock server: a majority of them decides.

A lease is held if a majority has granted it.  Its time counts from before the first server was
asked.  Two owners cannot have a majority at the same time while the servers keep their data, and a
minority that is away changes nothing.  An acquisition without a majority is released on all servers
before the caller is answered.

The servers keep no line of waiters, since none of them knows who is next.  A waiter asks again
after a short random pause.

Source: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/ (Redlock).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.clock import monotonic
from celery_dislock.config.terms import ALONE, terms_text
from celery_dislock.config.urls import ONLY_EXCLUSIVE, address, shown
from celery_dislock.exceptions import DamagedLockError, SettingsError, StoreError
from celery_dislock.servers.connections import (
    by_digest,
    by_text,
    commands_of,
    is_answer,
    only_reply,
)
from celery_dislock.servers.overrides import overrides_of
from celery_dislock.servers.peers import GRACE, LEAST, Names, Peer, ask_all
from celery_dislock.servers.server import Member, Server, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.connections import Call, Command

PATIENCE = 0.5  # seconds for the replies of all servers, unless `socket_timeout` is set
PATIENCE_RATIO = 1 / 4  # of a lease's expiry: the limit for an acquisition if that is shorter
WAITER_PAUSE = (0.05, 0.2)  # seconds between two attempts of a waiter, at least and at most
USUAL = (terms_text((ALONE,)), 0, 1)  # terms, place_ms and fair of acquire.lua: always these here
ATTEMPTS = 4  # to acquire, if no owner gets a majority because several ask at once
ATTEMPT_PAUSE = 0.02  # maximum seconds before the second attempt; doubled each time
RENEWS = {scripts.RENEW, scripts.RENEW_STALLED}


def drift(ttl_ms: int) -> int:
    """Return the allowed clock drift during a lease, in milliseconds: 1 % of its expiry + 2."""
    return ttl_ms // 100 + 2


class Quorum(Server):
    """
    Three or more independent servers.

    Safe to use from many threads or greenlets.

    Args:
        urls: URLs of single servers.  All clients ask the servers in the same order, by address.
            So if several clients ask at once, the first one is first on most servers.
        options: Keyword arguments of redis-py's Connection, in addition to those of the URLs.
        driver: How it waits.

    Raises:
        SettingsError: A URL or an option cannot be used.

    Attributes:
        name: The URLs without their passwords, for messages.
    """

    keeps_lines = False
    kind = "quorum"

    def __init__(self, urls: Sequence[str], options: Mapping[str, Any], driver: Driver) -> None:
        self._patience = options.get("socket_timeout") or PATIENCE
        limits = {"socket_timeout": PATIENCE, "socket_connect_timeout": self._patience}
        limits |= options
        self._peers = [Peer(url, limits, driver) for url in sorted(urls, key=address)]
        self.name = ", ".join(shown(urls))
        self._majority = len(urls) // 2 + 1
        self._pause = driver.pause
        self._names = Names()

    def known_as(self, owner: str) -> str:
        """Return the name under which these servers know an owner of this process."""
        return self._names.of(owner)

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """
        Run a script on all servers; see :meth:`Server.exchange`.

        Reports no lost reply, since the decision allows for those.

        Returns:
            What a majority says, in the form of a single server's reply, and False.

        Raises:
            StoreError: Too few servers answered.  The script may have run on some of them.  An
                acquisition is released again on every server that can be reached.
        """
        if script is scripts.ACQUIRE:
            return self._acquire(keys, *arguments), False
        command = by_digest(script, keys, *self._as_sent(script, arguments))
        return only_reply(self._run(script, (command,), self._patience, again=True)), False

    def run_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """Run a script many times on all servers; see :meth:`Server.run_many`."""
        sent = [(key, *self._as_sent(script, arguments)) for key, *arguments in calls]
        return self._run(script, commands_of(script, sent), within, again=False)

    def _run(
        self, script: Script, commands: Sequence[Command], within: float, *, again: bool
    ) -> list[Any]:
        """Run a script on all servers; return what a majority says of each command, or an error."""
        replies = self._ask(commands, script, within=within, again=again)
        self._require_majority(replies)
        decided: list[Any] = []
        for number in range(len(commands)):
            try:
                decided.append(self._decide(script, _column(replies, number)))
            except StoreError as exc:
                decided.append(exc)
        return decided

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command that concerns no lock to all servers; return the reply of one.

        Raises:
            StoreError: No majority of the servers answered; a refusal if a majority is there.
        """
        replies = _column(self._ask((command,), within=self._patience))
        refusals = [
            reply for reply in replies if isinstance(reply, StoreError) and is_answer(reply)
        ]
        there = [reply for reply in replies if not isinstance(reply, StoreError)] + refusals
        if len(there) < self._majority:
            raise self._too_few(replies)
        return only_reply(there[:1])

    def members(self) -> list[Member]:
        """Return all servers; see :meth:`Server.members`."""
        return [member for peer in self._peers for member in peer.members()]

    def pop(self, key: str, seconds: float) -> None:  # noqa: ARG002 -- nobody is woken here
        """Sleep for a short random time, at most *seconds*."""
        self._pause(min(random.uniform(*WAITER_PAUSE), seconds))  # noqa: S311 -- no secret

    def close(self) -> None:
        """Close the connections that are not in use."""
        for peer in self._peers:
            peer.close()

    def _ask(
        self,
        commands: Sequence[Command],
        script: Script | None = None,
        *,
        within: float,
        again: bool = True,
        undo: Callable[[], Command] | None = None,
    ) -> list[Any]:
        """
        Send commands to all servers, in one round trip to each.

        Args:
            commands: The commands.
            script: The script that they run by its digest; None: no script.
            within: Seconds for all replies together.
            again: Whether they are sent again, once, if a connection has broken.
            undo: Returns a command to send to a server that does not answer in time.  It undoes
                the script there, whenever the server runs both.

        Returns:
            The replies of each server or a StoreError, in the order of the servers.
        """

        def run(peers: Sequence[Peer], within: float) -> dict[Peer, Any]:
            asked = {peer: (peer.wire, commands) for peer in peers}
            return ask_all(asked, script, within=within, again=again, undo=undo)

        until = monotonic() + within
        replies = run([peer for peer in self._peers if not peer.failures], within)
        others = [peer for peer in self._peers if peer not in replies]
        answered = [reply for reply in replies.values() if not isinstance(_one(reply), StoreError)]
        if len(answered) >= self._majority and self._decides(script, answered):
            others = [peer for peer in others if peer.due()]
            left = min(within, max((GRACE * 2**peer.failures for peer in others), default=0.0))
        else:
            left = max(until - monotonic(), LEAST)
        replies.update(run(others, left))
        for peer, reply in replies.items():
            peer.note(_one(reply))
        return [replies.get(p, p.error) for p in self._peers]

    def _acquire(self, keys: Sequence[str], owner: Any, ttl_ms: Any, *how: Any) -> list[Any]:
        holder, terms, place_ms, _fair = how
        if terms != USUAL[0]:
            raise SettingsError("lock", "dislock_url", terms, ONLY_EXCLUSIVE)
        for attempt in range(1 if place_ms else ATTEMPTS):  # a waiter asks again anyway
            if attempt:
                self._pause(random.uniform(0, ATTEMPT_PAUSE * 2 ** (attempt - 1)))  # noqa: S311 -- no secret
            answer, settled = self._attempt(keys, owner, ttl_ms, holder)
            if settled:
                break
        return answer

    def _attempt(
        self, keys: Sequence[str], owner: str, ttl_ms: int, holder: str
    ) -> tuple[list[Any], bool]:
        """
        Ask for the locks once; return the answer, and whether it is final.

        It is not final if no owner is known to have a majority: another attempt may succeed.
        """
        name, majority = self._names.of(owner, attempts=True), self._majority
        ttl = ttl_ms / 1000
        asked_at = monotonic()
        ask = (name, ttl_ms + drift(ttl_ms), holder, *USUAL)
        asked = self._ask(
            (by_digest(scripts.ACQUIRE, keys, *ask),),
            scripts.ACQUIRE,
            within=min(self._patience, ttl * PATIENCE_RATIO),
            undo=lambda: by_text(scripts.RELEASE, keys, name, 0),
        )
        replies = _column(asked)
        answered = [reply for reply in replies if not isinstance(reply, StoreError)]
        granted = [tokens for state, *tokens in answered if state == scripts.GRANTED]
        refused = [reply for reply in answered if reply[0] != scripts.GRANTED]
        if len(granted) >= majority and monotonic() - asked_at < ttl:
            newest = (max(map(int, tokens)) for tokens in zip(*granted, strict=True))
            return [scripts.GRANTED, *newest], True

        released = []
        if granted or any(map(is_lost, replies)):
            release = by_digest(scripts.RELEASE, keys, name, 0)
            released = _column(self._ask((release,), scripts.RELEASE, within=self._patience))
        if any(map(is_lost, replies + released)):
            self._names.change(owner)
        if len(granted) >= majority:
            raise StoreError(self.name, "granted, but too late")
        self._require_majority(replies)
        return choose_refusal(refused, majority - len(granted), majority)

    def _decides(self, script: Script | None, answered: Sequence[Sequence[Any]]) -> bool:
        """Return whether these replies of a majority decide, whatever the other servers say."""
        agreed = (
            max(Counter(agreed_part(script, reply) for reply in column).values())
            for column in zip(*answered, strict=True)
        )
        return min(agreed) >= self._majority

    def _as_sent(self, script: Script, arguments: Sequence[Any]) -> tuple[Any, ...]:
        if not arguments:
            return ()
        owner, *rest = arguments
        if script in RENEWS:
            rest[0] += drift(rest[0])
        if script is scripts.FREE:  # each server has a token of its own, and the newest was shown
            rest.append(1)
        return (self._names.of(owner), *rest)

    def _decide(self, script: Script, replies: Sequence[Any]) -> Any:
        answered, majority = self._require_majority(replies), self._majority
        if script is scripts.OVERRIDE:  # what was set before on any server has been replaced there
            return next((reply for reply in answered if reply[0]), answered[0])
        if script is scripts.LOOK:
            return merge_looks(answered, majority)
        if script is scripts.COUNTS:
            return merge_counts(answered)
        if not all(isinstance(reply, int) for reply in answered):
            found = Counter(reply for reply in answered if reply is not None)
            return found.most_common(1)[0][0] if found else None
        best = sorted(answered, reverse=True)
        if script is scripts.RELEASE_DEAD:
            return best[0]
        missing = len(replies) - len(answered)
        at_most = best[majority - 1 - missing]  # if all missing replies were the highest
        at_least = best[majority - 1]
        if script is scripts.RENEW and at_least != at_most:
            raise self._too_few(replies)
        return at_most if script is scripts.RELEASE else at_least

    def _require_majority(self, replies: Sequence[Any]) -> list[Any]:
        answered = [reply for reply in replies if not isinstance(reply, StoreError)]
        if len(answered) < self._majority:
            raise self._too_few(replies)
        return answered

    def _too_few(self, replies: Sequence[Any]) -> StoreError:
        errors = [reply for reply in replies if isinstance(reply, StoreError)]
        damaged = [error for error in errors if isinstance(error, DamagedLockError)]
        if damaged and len(replies) - len(errors) + len(damaged) >= self._majority:
            first = damaged[0]
            return DamagedLockError(self.name, f"{first.server}: {first.reason}", first.lock)
        told = f"only {len(replies) - len(errors)} of {len(replies)} servers answered"
        error = StoreError(self.name, f"{told}; {errors[0]}")
        error.__cause__ = errors[0]
        if len(errors) == len(replies) and all(map(is_answer, errors)):
            error.raw = errors[0].raw
        return error


def _column(replies: Sequence[Any], number: int = 0) -> list[Any]:
    """Return the reply of each server to one command, or its error."""
    return [reply if isinstance(reply, StoreError) else reply[number] for reply in replies]


def _one(reply: Any) -> Any:
    """Return a server's reply to its only command, or the replies to several, or its error."""
    return reply[0] if isinstance(reply, list) and len(reply) == 1 else reply


def agreed_part(script: Script | None, reply: Any) -> Any:
    """Return the part of a reply that a majority must agree on for it to decide; None: nothing."""
    if script is scripts.ACQUIRE:  # the lock is granted, or the same owner holds it
        return reply[0] if reply[0] == scripts.GRANTED else reply[3]
    return reply if script in RENEWS else None


def choose_refusal(
    refused: Sequence[list[Any]], wanted: int, majority: int
) -> tuple[list[Any], bool]:
    """
    Choose the refusal that describes the lease in the way.

    Args:
        refused: What acquire.lua answered on each server that refused.
        wanted: How many of these servers would have to grant the lock for a majority.
        majority: Number of servers that make a majority.

    Returns:
        The refusal whose remaining time is the time until a majority is possible, and whether its
        owner is known to hold the lock.  False: possibly no owner holds it.
    """
    owner, times = Counter(reply[3] for reply in refused).most_common(1)[0]
    held = times >= majority
    in_the_way = [reply for reply in refused if reply[3] == owner or not held]
    in_the_way.sort(key=lambda reply: reply[2])
    return in_the_way[min(wanted, len(in_the_way)) - 1], held


def merge_looks(answers: Sequence[list[Any]], majority: int) -> list[Any]:
    """
    Return what a majority reports of a lock; these servers keep no line and no reservations.

    The result has one item more than look.lua's: how many of these servers have another limit.
    """
    now = max(answer[0] for answer in answers)
    leases: dict[bytes, list[tuple[Any, ...]]] = {}
    for now_there, found, *_ in answers:
        for owner, expires, *rest in zip(*[iter(found)] * 6, strict=True):
            leases.setdefault(owner, []).append((expires - now_there, *rest))
    merged: list[Any] = []
    for owner, found in leases.items():
        if len(found) >= majority:
            remaining = sorted((lease[0] for lease in found), reverse=True)[majority - 1]
            token = max(int(lease[1]) for lease in found)
            merged += [owner, now + remaining, token, *found[0][2:]]
    limits: dict[bytes | None, list[list[Any]]] = {}
    for *_, overrides in answers:
        limit = overrides_of(overrides).get("limit")
        limits.setdefault(limit and limit.value, []).append(overrides)
    agreed = next((found for found in limits.values() if len(found) >= majority), [])
    return [now, merged, *answers[0][2:-1], (agreed or [[]])[0], len(answers) - len(agreed)]


def merge_counts(answers: Sequence[list[Any]]) -> list[Any]:
    """
    Return the counts that counts.lua has found; of each field the highest.

    A server that was away has missed some additions, and has no more than were made.
    """
    if not any(isinstance(part, list) for answer in answers for part in answer):
        return list(dict.fromkeys(name for answer in answers for name in answer))
    merged: list[Any] = []
    for found in zip(*answers, strict=True):
        counts: dict[bytes, int] = {}
        for flat in found:
            for field, number in zip(*[iter(flat)] * 2, strict=True):
                counts[field] = max(counts.get(field, 0), int(number))
        merged.append([part for field, n in counts.items() for part in (field, str(n).encode())])
    return merged

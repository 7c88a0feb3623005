"""A Redis Cluster as the lock server: each lock on the node that has its slot.

All keys of a lock share a hash tag, so a script has all its keys on one node.  Which node has
which slot is asked when the first lock is needed, and again whenever a node answers that a slot has
moved or does not answer at all; what was sent to it is sent again to where it belongs, since
everything is safe to send twice.

A node that is away is away for the locks in its slots alone, until the cluster has given them to a
replica.  Renewals are sent to all nodes before the first reply is read: the leases on the others
are renewed in time, whatever becomes of one.
"""

from __future__ import annotations

import contextlib
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redis.cluster import parse_cluster_slots
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from celery_dislock.config.urls import group, without_password
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.servers.connections import AWAY, SOCKET_TIMEOUT, connection_maker
from celery_dislock.servers.node import RESEND_PAUSE, RESENDS, Node
from celery_dislock.servers.pipeline import LEAST, ask_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command
    from celery_dislock.servers.pipeline import Call

    Address = tuple[str, int]

REDIRECTS = 5  # times a command follows a slot that moves, as Redis's own clients do
WHOLE_PAUSE = 0.05  # seconds between two looks whether a slot that moves has arrived
WHOLE_LOOKS = 40  # for two seconds, as long as for a reply; then its locks are away
ASKED = 4  # nodes there is time to ask for the slots, where none answers

UNSETTLED = (*AWAY, ClusterDownError, TryAgainError)


class Cluster:
    """
    The nodes of a Redis Cluster.

    Safe to use from many threads or greenlets, but for :meth:`run_many`.

    Args:
        url: ``redis+cluster://[user:password@]host:port,host:port``, or ``rediss+cluster://``; the
            other nodes are found from any of these.
        options: Keyword arguments of redis-py's Connection, on top of the URL's.
        pause: Called with seconds to wait between two attempts.
        min_replicas: See :class:`celery_dislock.servers.node.Node`.

    Raises:
        SettingsError: The URL or an option cannot be used.

    Attributes:
        name: The URL as a message may show it.
    """

    keeps_lines = True

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        pause: Callable[[float], None] = time.sleep,
        min_replicas: int = 0,
    ) -> None:
        try:
            self.name, servers, seeds = group(url)
        except ValueError as exc:
            remedy = str(exc)
            raise SettingsError("app.conf", "dislock_url", without_password(url), remedy) from None
        if urlsplit(servers).path.strip("/") not in {"", "0"}:
            other = "a cluster has database 0 only"
            raise SettingsError("app.conf", "dislock_url", self.name, other)
        self._make = connection_maker(self.name, servers, options)
        self._patience = options.get("socket_timeout") or SOCKET_TIMEOUT
        self._pause = pause
        self._min_replicas = min_replicas
        self._seeds = seeds
        self._known: list[Address] = list(seeds)  # whom to ask, the most promising first
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Address | None] = []  # by slot; empty until asked
        self._failing: set[Address] = set()  # those that did not answer the last batch

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group keys, in their order, by what one script can be given: those of one slot."""
        return [list(group) for _, group in groupby(keys, lambda key: key_slot(key.encode()))]

    def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Run a script on the node of its locks; see :meth:`Node.run`."""
        return self.exchange(script, keys, *arguments)[0]

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """See :meth:`celery_dislock.servers.node.Node.exchange`."""
        slot = key_slot(keys[0].encode())
        address, asking = self._owner(slot), False
        redirects = failures = looks = 0
        while True:
            try:
                reply = self._node(address).run(script, keys, *arguments, asking=asking)
            except StoreError as exc:
                error, cause = exc, exc.raw
            else:
                return reply, failures + looks > 0  # a script that missed a key has begun
            if isinstance(cause, AskError) and redirects < REDIRECTS:
                redirects += 1
                address, asking = self._redirect(cause)
                continue
            if isinstance(cause, TryAgainError) and looks < WHOLE_LOOKS:
                self._pause(WHOLE_PAUSE)
                looks += 1
                redirects = 0
            elif isinstance(cause, UNSETTLED) and failures < RESENDS:
                self._pause(failures * RESEND_PAUSE)
                failures += 1
                self._find_slots(last=address)
            else:
                raise error
            address, asking = self._owner(slot), False

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command that is about no lock to one of the nodes that have slots.

        Raises:
            StoreError: None of them answered, or there are slots without a node.
        """
        error = StoreError(self.name, "it has no nodes")
        for send in self.senders():
            try:
                return send(*command)
            except StoreError as exc:
                error = exc
        raise error

    def senders(self) -> list[Callable[..., Any]]:
        """Return what sends a command to each node that has slots; raises as :meth:`send`."""
        if not self._slots or None in self._slots:
            self._find_slots()
            if None in self._slots:
                raise self._uncovered(self._slots.index(None))
        return [self._node(one).send for one in dict.fromkeys(self._slots) if one is not None]

    def asks(self, key: str) -> list[Command]:
        """See :meth:`celery_dislock.servers.node.Node.asks`."""
        waits: list[Command] = [(b"WAIT", 0, 0)] if self._min_replicas else []
        return [(b"BLPOP", key, b"no time"), (b"ASKING",), (b"CLUSTER", b"SLOTS"), *waits]

    def pop(self, key: str, seconds: float) -> bytes | None:
        """See :meth:`celery_dislock.servers.node.Node.pop`; only what a node sent on is resent."""
        address, asking = self._owner(key_slot(key.encode())), False
        for _ in range(REDIRECTS):
            try:
                return self._node(address).pop(key, seconds, asking=asking)
            except StoreError as exc:
                error, cause = exc, exc.raw
            if not isinstance(cause, AskError):
                break
            address, asking = self._redirect(cause)
        if isinstance(cause, UNSETTLED):
            with contextlib.suppress(StoreError):
                self._find_slots(last=address)
        raise error

    def run_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Run a script many times, in one pipelined round trip to each node concerned.

        For one thread only.  Nothing is resent but what a node sent on to another; *within* is for
        the first reply of each node.  See :meth:`celery_dislock.servers.node.Node.run_many`.

        Raises:
            StoreError: No node says which has which slot.
        """
        until = time.monotonic() + within
        if not self._slots:
            self._find_slots(within=within)
        replies: dict[int, Any] = {}
        batches: dict[Address, list[int]] = {}
        for number, call in enumerate(calls):
            slot = key_slot(str(call[0]).encode())
            address = self._slots[slot]
            if address is None:
                replies[number] = self._uncovered(slot)
            else:
                batches.setdefault(address, []).append(number)
        # Those last that failed last: to connect to one that is away may take all of its time.
        order = sorted(batches, key=self._failing.__contains__)
        asked = {a: (self._node(a).batch, [calls[n] for n in batches[a]]) for a in order}
        answers, self._failing = ask_all(script, asked, within=max(until - time.monotonic(), LEAST))
        for address, answer in answers.items():
            replies.update(zip(batches[address], answer, strict=True))
        self._follow(script, calls, replies, until)
        return [replies[number] for number in range(len(calls))]

    def _follow(
        self, script: Script, calls: Sequence[Call], replies: dict[int, Any], until: float
    ) -> None:
        """Send on what nodes have sent on, and ask for the slots again where they seem to move."""
        unsettled = moved = False
        for number, reply in replies.items():
            cause = reply.raw if isinstance(reply, StoreError) else None
            unsettled = unsettled or isinstance(cause, UNSETTLED)
            if isinstance(cause, AskError) and time.monotonic() < until:
                asking = not isinstance(cause, MovedError)
                moved = moved or not asking
                key, *arguments = calls[number]
                try:
                    node = self._node(cause.node_addr)
                    replies[number] = node.run(script, [str(key)], *arguments, asking=asking)
                except StoreError as exc:
                    replies[number] = exc
        if unsettled or moved:
            with contextlib.suppress(StoreError):
                self._find_slots(within=max(until - time.monotonic(), LEAST))

    def close(self) -> None:
        """Close the connections that are not in use."""
        for node in list(self._nodes.values()):
            node.close()

    def _node(self, address: Address) -> Node:
        try:
            return self._nodes[address]
        except KeyError:
            host, port = address
            node = Node(
                f"{self.name} at {host}:{port}",
                lambda _within: self._make(host=host, port=port),
                pause=self._pause,
                resends=0,  # here it is decided where to send it again
                min_replicas=self._min_replicas,
            )
            return self._nodes.setdefault(address, node)

    def _redirect(self, told: AskError) -> tuple[Address, bool]:
        """Return the node to send it to, and whether to ask that one for a slot on its way."""
        # MOVED, which is a kind of ASK to redis-py, holds for all that comes; ASK for this once.
        if not isinstance(told, MovedError):
            return told.node_addr, True
        self._find_slots(first=told.node_addr)
        return told.node_addr, False

    def _owner(self, slot: int) -> Address:
        if not self._slots:
            self._find_slots()
        address = self._slots[slot]
        if address is None:
            self._find_slots()
            address = self._slots[slot]
            if address is None:
                raise self._uncovered(slot)
        return address

    def _uncovered(self, slot: int) -> StoreError:
        return StoreError(self.name, f"slot {slot} of the cluster is on no node")

    def _find_slots(
        self,
        *,
        first: Address | None = None,
        last: Address | None = None,
        within: float | None = None,
    ) -> None:
        """
        Ask one node after another which has which slot, until one answers.

        Args:
            first: The node that is most likely to know.
            last: One that has just failed.
            within: Seconds for all of them; None: as many as for a reply.

        Raises:
            StoreError: None answered; what was known before still counts.
        """
        known = [*([first] if first else []), *self._known]
        order = sorted(dict.fromkeys(known), key=lambda a: a == last or a in self._failing)
        within = self._patience if within is None else within
        each = within / min(len(order), ASKED)
        until = time.monotonic() + within
        error: StoreError | None = None
        for address in order:
            try:
                reply = self._node(address).ask("CLUSTER", "SLOTS", within=each)
            except StoreError as exc:
                error = exc
                # Another is asked first the next time.
                self._known = sorted(self._known, key=address.__eq__)
                if time.monotonic() < until:
                    continue
                break
            if reply:
                self._learn(parse_cluster_slots(reply, current_host=address[0]))
                return
        reason = error.reason if error else "no slot is on a node"
        raise StoreError(self.name, f"no node tells the slots: {reason}") from error

    def _learn(self, found: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        masters: dict[Address, None] = {}
        replicas: dict[Address, None] = {}
        for (start, end), nodes in found.items():
            host, port = nodes["primary"]
            slots[start : end + 1] = [(host, port)] * (end + 1 - start)
            masters[host, port] = None
            replicas.update(((host, port), None) for host, port in nodes["replicas"])
        self._slots = slots
        self._known = list(dict.fromkeys([*masters, *replicas, *self._seeds]))
        for address in list(self._nodes):
            if address not in masters and (gone := self._nodes.pop(address, None)):
                gone.close_idle()

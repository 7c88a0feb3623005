"""Use a Redis Cluster as the lock server: each lock is on the node that has its slot.

All keys of a lock share a hash tag, so a script finds all its keys on one node.  The slot map is
read when the first lock is needed.  It is read again when a node answers that a slot has moved, or
does not answer.  The script is then sent again, to the node that has the slot now: all scripts are
safe to send twice.

If a node is away, only the locks in its slots are away, until the cluster has promoted a replica.
Renewals are sent to all nodes before the first reply is read, so a node that does not answer does
not delay the renewals on the others.
"""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from redis.cluster import parse_cluster_slots
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from celery_dislock.clock import monotonic
from celery_dislock.config.urls import group
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.servers.connecting import BLOCKING, connection_maker
from celery_dislock.servers.connections import (
    CONNECTION_ERRORS,
    SOCKET_TIMEOUT,
    commands_of,
    only_reply,
)
from celery_dislock.servers.node import RESEND_PAUSE, RESENDS, Node
from celery_dislock.servers.peers import LEAST, ask_all
from celery_dislock.servers.server import Member, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.connections import Call, Command

    Address = tuple[str, int]

REDIRECTS = 5  # redirections that one command follows; Redis's own clients have a limit, too
WHOLE_PAUSE = 0.05  # seconds between two attempts while the keys of a slot are on two nodes
WHOLE_LOOKS = 40  # attempts, two seconds in all; after that TRYAGAIN counts as a failure
ASKED = 4  # nodes that can be asked for the slot map in the given time if none answers

SLOTS = ((b"CLUSTER", b"SLOTS"),)

UNSETTLED = (*CONNECTION_ERRORS, ClusterDownError, TryAgainError)

Reply = TypeVar("Reply")


class Cluster(Server):
    """
    The nodes of a Redis Cluster.

    Safe to use from many threads or greenlets.

    Args:
        url: ``redis+cluster://[user:password@]host:port,host:port``, or ``rediss+cluster://``.  Any
            of these nodes can name the others.
        options: Keyword arguments of redis-py's Connection, in addition to those of the URL.
        driver: The way in which it waits.
        min_replicas: See :class:`celery_dislock.servers.node.Node`.

    Raises:
        SettingsError: The URL or an option cannot be used.

    Attributes:
        name: The URL without its password, for messages.
    """

    kind = "cluster"

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        driver: Driver = BLOCKING,
        min_replicas: int = 0,
    ) -> None:
        self.name, servers, seeds = group(url)
        if urlsplit(servers).path.strip("/") not in {"", "0"}:
            other = "a cluster has database 0 only"
            raise SettingsError("app.conf", "dislock_url", self.name, other)
        self._make = connection_maker(self.name, servers, options, driver)
        self._patience = options.get("socket_timeout") or SOCKET_TIMEOUT
        self._pause = driver.pause
        self.min_replicas = min_replicas
        self._seeds = seeds
        self._known: list[Address] = list(seeds)  # asked for the slot map, in this order
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Address | None] = []  # master of each slot; empty until asked
        self._closed = False
        self._failed_at: dict[Address, float] = {}  # when a node failed the last time

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group consecutive keys of one slot.  One script can take the keys of one group."""
        return [list(group) for _, group in groupby(keys, lambda key: key_slot(key.encode()))]

    def exchange(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        resends: bool = True,
    ) -> tuple[Any, bool]:
        """Run a script on the node that has its locks; see :meth:`Server.exchange`."""
        return self._routed(
            keys[0],
            lambda node, asking: node.exchange(script, keys, *arguments, asking=asking)[0],
            resends=resends,
        )

    def _routed(
        self, key: str, send: Callable[[Node, bool], Reply], *, resends: bool = True
    ) -> tuple[Reply, bool]:
        """
        Call *send* with the node that has a key, and whether to send ASKING first.

        Args:
            key: The key.
            send: Sends the command.
            resends: Whether the command is sent again if that failed, and not only redirected.

        Returns:
            What *send* has returned, and whether the command was sent again.
        """
        slot = key_slot(key.encode())
        address, asking = self._owner(slot), False
        redirects = failures = looks = 0
        while True:
            try:
                # After TRYAGAIN, the script may have begun.
                return send(self._node(address), asking), failures + looks > 0
            except StoreError as exc:
                error, cause = exc, exc.raw
            if isinstance(cause, AskError) and redirects < REDIRECTS:
                redirects += 1
                # MOVED holds from now on, ASK for this command only.  MovedError is an AskError.
                address, asking = cause.node_addr, not isinstance(cause, MovedError)
                if not asking:
                    self._find_slots(first=address)
                continue
            if not resends:
                raise error
            if isinstance(cause, TryAgainError) and looks < WHOLE_LOOKS:
                self._pause(WHOLE_PAUSE)
                looks += 1
                redirects = 0
            elif isinstance(cause, UNSETTLED) and failures < RESENDS:
                self._pause(failures * RESEND_PAUSE)
                failures += 1
                self._failed_at[address] = monotonic()
                self._find_slots()
            else:
                raise error
            address, asking = self._owner(slot), False

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command that concerns no lock to one of the nodes that have slots.

        Raises:
            StoreError: No node answered, or a slot is on no node.
        """
        error = StoreError(self.name, "the cluster has no nodes")
        for send in self.senders():
            try:
                return send(*command)
            except StoreError as exc:
                error = exc
        raise error

    def members(self) -> list[Member]:
        """Return the nodes that have slots; see :meth:`Server.members`."""
        if not self._slots or None in self._slots:
            self._find_slots()
            if None in self._slots:
                raise self._uncovered(self._slots.index(None))
        return [
            self._node(address).members()[0]._replace(has=partial(self._has, address))
            for address in dict.fromkeys(self._slots)
            if address is not None
        ]

    def _has(self, address: Address, key: str) -> bool:
        return self._slots[key_slot(key.encode())] == address

    def asks(self, key: str) -> list[Command]:
        """Return what the nodes are asked for, too; see :meth:`Server.asks`."""
        return [*super().asks(key), (b"ASKING",), *SLOTS]

    def pop(self, key: str, seconds: float) -> bytes | None:
        """
        See :meth:`celery_dislock.servers.node.Node.pop`.

        The command is sent again only after a redirection.
        """
        return self._routed(
            key, lambda node, asking: node.pop(key, seconds, asking=asking), resends=False
        )[0]

    def run_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Run a script many times; see :meth:`Server.run_many`.

        A call is sent again only after a redirection.  *within* limits the time until the first
        reply of each node.
        """
        until = monotonic() + within
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
        # Connecting to a node that is away may take all of the time.
        asked = {
            at: (self._node(at).wire, commands_of(script, [calls[n] for n in batches[at]]))
            for at in self._failed_last(batches)
        }
        answers = ask_all(asked, script, within=max(until - monotonic(), LEAST))
        for at, answer in answers.items():
            each = answer
            if isinstance(answer, StoreError):
                self._failed_at[at], each = monotonic(), repeat(answer)
            replies.update(zip(batches[at], each, strict=False))
        self._follow(script, calls, replies, until)
        return [replies[number] for number in range(len(calls))]

    def _follow(
        self, script: Script, calls: Sequence[Call], replies: dict[int, Any], until: float
    ) -> None:
        """Follow redirections; read the slot map again if a node failed."""
        for number, reply in replies.items():
            if isinstance(_cause(reply), AskError) and monotonic() < until:
                key, *arguments = calls[number]
                try:
                    replies[number], _ = self.exchange(
                        script, [str(key)], *arguments, resends=False
                    )
                except StoreError as exc:
                    replies[number] = exc
        if any(isinstance(_cause(reply), UNSETTLED) for reply in replies.values()):
            with contextlib.suppress(StoreError):
                self._find_slots(within=max(until - monotonic(), LEAST))

    def close(self) -> None:
        """Close the connections, those in use after their use, and each one that is made later."""
        self._closed = True
        for node in list(self._nodes.values()):
            node.close()

    def _node(self, address: Address) -> Node:
        try:
            return self._nodes[address]
        except KeyError:
            host, port = address
            node = Node(
                f"{self.name} at {host}:{port}",
                partial(self._make, host=host, port=port),
                self._pause,
                resends=0,  # exchange() sends again, perhaps to another node
                min_replicas=self.min_replicas,
            )
            if self._closed:
                node.close()
            return self._nodes.setdefault(address, node)

    def _owner(self, slot: int) -> Address:
        if not self._slots or self._slots[slot] is None:
            self._find_slots()
        address = self._slots[slot]
        if address is None:
            raise self._uncovered(slot)
        return address

    def _uncovered(self, slot: int) -> StoreError:
        error = StoreError(self.name, f"slot {slot} of the cluster is on no node")
        error.raw = ClusterDownError(error.reason)  # what any node would have answered
        return error

    def _find_slots(self, *, first: Address | None = None, within: float | None = None) -> None:
        """
        Read the slot map from one node after another, until one answers.

        Args:
            first: The node that is most likely to have the current slot map.
            within: Seconds for all nodes together; None: the timeout of one reply.

        Raises:
            StoreError: No node answered with a slot map.  The previous one is kept.
        """
        known = [*([first] if first else []), *self._failed_last(self._known)]
        order = list(dict.fromkeys(known))
        within = self._patience if within is None else within
        each = within / min(len(order), ASKED)
        until = monotonic() + within
        error = StoreError(self.name, "no slot is on a node")
        for address in order:
            try:
                reply = only_reply(self._node(address).wire.ask(SLOTS, within=each))
            except StoreError as exc:
                error = exc
                self._failed_at[address] = monotonic()
                if monotonic() >= until:
                    break
            else:
                if reply:
                    self._learn(parse_cluster_slots(reply, current_host=address[0]))
                    return
        raise StoreError(self.name, f"no node tells the slots: {error.reason}") from error

    def _failed_last(self, addresses: Iterable[Address]) -> list[Address]:
        """Sort nodes: those that have failed lately come last."""
        return sorted(addresses, key=lambda at: self._failed_at.get(at, 0.0))

    def _learn(self, found: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for (start, end), nodes in found.items():
            slots[start : end + 1] = [nodes["primary"]] * (end + 1 - start)
        masters = dict.fromkeys(nodes["primary"] for nodes in found.values())
        replicas = (replica for nodes in found.values() for replica in nodes["replicas"])
        self._slots = slots
        self._known = list(dict.fromkeys([*masters, *replicas, *self._seeds]))
        for address in self._nodes.keys() - masters:
            if gone := self._nodes.pop(address, None):  # another thread may have closed it
                gone.close()


def _cause(reply: Any) -> BaseException | None:
    return reply.raw if isinstance(reply, StoreError) else None

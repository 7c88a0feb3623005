"""Ask several servers at once, and know which of them fail.

Commands are sent to all servers before the first reply is read, so five servers take little longer
than one.

Of several independent servers, one that fails counts as away for a while.  It is then asked only at
intervals, after the others have answered, and gets little time to answer.  Both the interval and
the time to answer double with each failure.  So a server that is only slow comes back, and a dead
one costs callers about the same share of their time however long it is away.  If too few of the
others answer, or their answers do not decide, all servers are asked.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from celery_dislock.clock import monotonic
from celery_dislock.config.urls import without_password
from celery_dislock.exceptions import DamagedLockError, StoreError, UnreachableError
from celery_dislock.servers.connecting import connection_maker
from celery_dislock.servers.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.connections import Command, Connection, Wire

RETRY_AFTER = 0.5  # seconds until a server that failed is asked again; doubled each time
GRACE = 0.05  # seconds that it then gets, after the others have answered; doubled each time
DOUBLED = 4  # maximum number of times that both are doubled

FORGET_AFTER = 3600.0  # seconds without use until an owner's changed name is forgotten
LEAST = 0.05  # seconds for a request that is sent although the time is used up

Key = TypeVar("Key")

logger = logging.getLogger("celery_dislock")


def ask_all(
    asked: Mapping[Key, tuple[Wire, Sequence[Command]]],
    script: Script | None = None,
    *,
    within: float,
    again: bool = False,
    undo: Callable[[], Command] | None = None,
) -> dict[Key, Any]:
    """
    Ask several servers at once.

    The commands are sent to all servers, in this order, before the first reply is read.  So a
    server that is away does not delay the others.  But connecting to it may take half of the time
    that is left: such servers should come last.

    Args:
        asked: The connections and the commands of each server, by a key of the caller's.
        script: See :meth:`celery_dislock.servers.connections.Wire.finish`, as for the others.
        within: Seconds for all servers together.
        again: See there.
        undo: See there.

    Returns:
        The replies of each server, or a StoreError if it did not answer.
    """
    until = monotonic() + within
    sent: dict[Key, Connection] = {}
    replies: dict[Key, Any] = {}

    def read(server: Key, left: float) -> list[Any]:
        wire, commands = asked[server]
        return wire.finish(sent.pop(server), commands, script, within=left, again=again, undo=undo)

    try:
        for server, (wire, commands) in asked.items():
            try:
                # Half of the time left, so that a server that is away leaves some for the others.
                left = max((until - monotonic()) / 2, LEAST)
                sent[server] = wire.start(commands, within=left, again=again)
            except StoreError as exc:
                replies[server] = exc
        for server in list(sent):
            try:
                replies[server] = read(server, until - monotonic())
            except StoreError as exc:
                replies[server] = exc
    except BaseException:  # an interruption; nobody else would read what the others reply
        for server in list(sent):
            with contextlib.suppress(BaseException):
                read(server, 0.0)
        raise
    return replies


class Peer(Node):
    """
    One of several independent servers.

    Args:
        url: See :func:`celery_dislock.servers.connecting.connection_maker`.
        options: Options of its connections; see there.
        driver: Makes its connections.

    Attributes:
        failures: How often it has failed in a row, DOUBLED at most; 0: it answers.
        error: What takes the place of a reply if the server is not asked.
    """

    def __init__(self, url: str, options: Mapping[str, Any], driver: Driver) -> None:
        name = without_password(url)
        connect = connection_maker(name, url, options, driver)
        super().__init__(name, connect, driver.pause, resends=1)
        self.failures = 0
        self._retry_at = 0.0
        self.error = UnreachableError(self.name, "it has not been asked")

    def due(self) -> bool:
        """Tell whether it is time to ask the server again; if so, set the next time."""
        now = monotonic()
        if now < self._retry_at:
            return False
        self.failures = min(self.failures + 1, DOUBLED)
        self._retry_at = now + RETRY_AFTER * 2**self.failures
        return True

    def note(self, reply: Any) -> None:
        """Record whether the server answered, and log a change."""
        if isinstance(reply, StoreError) and not isinstance(reply, DamagedLockError):
            self.error = UnreachableError(self.name, reply.reason)
            if not self.failures:
                self.failures = 1
                self._retry_at = monotonic() + RETRY_AFTER
                #: WARNING: One of several servers has failed; that alone loses no lock. -> Repair
                #: it before a majority fails.
                logger.warning(
                    "Lock server %s failed, the others go on without it: %s",
                    self.name,
                    reply.reason,
                )
        elif self.failures:
            self.failures = 0
            #: INFO: That one of several servers is back.
            logger.info("Lock server %s answers again.", self.name)


class Names:
    """
    The names under which the servers know an owner.

    A server that did not answer may run its commands late, also the release that undoes an attempt.
    This release would end the lease of the same owner's next attempt, so that uses another name.
    Until then the owner has its last name: it may still have leases under that.  The first name is
    the owner itself, and the others begin with it.

    All objects of this class share the names: an event loop takes a lock over its own connections,
    and the watchdog renews it over others.
    """

    # How many names an owner has had before, whether its next attempt needs another, and the time
    # of its last use.
    _changed: ClassVar[dict[str, tuple[int, bool, float]]] = {}

    def of(self, owner: str, *, attempts: bool = False) -> str:
        """Return the owner's current name; *attempts*: the name for an attempt that begins."""
        if owner not in self._changed:
            return owner
        times, spent, _ = self._changed[owner]
        if attempts and spent:
            times, spent = times + 1, False
        self._changed[owner] = times, spent, monotonic()
        return f"{owner}#{times}" if times else owner

    def change(self, owner: str) -> None:
        """Give the owner's next attempt another name; forget names unused for FORGET_AFTER."""
        now = monotonic()
        for other, (_, _, used) in list(self._changed.items()):
            if used < now - FORGET_AFTER:
                self._changed.pop(other, None)
        times, _, _ = self._changed.get(owner, (0, True, now))
        self._changed[owner] = times, True, now

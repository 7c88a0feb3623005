"""Send commands to several servers at once, so that all take no longer than one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dislock.clock import monotonic
from celery_dislock.exceptions import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import redis

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command, Wire

LEAST = 0.05  # seconds for a request that is sent although the time is used up

Key = TypeVar("Key")


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

    All are sent to, in this order, before the first reply is read.  So one that is away does not
    delay the others.  But connecting to a server that is away may use up half of the time that is
    left: such servers should come last.

    Args:
        asked: The connections and the commands of each server, under what identifies it.
        script: See :meth:`celery_dislock.servers.connections.Wire.finish`, as for the others.
        within: Seconds for all servers together.
        again: See there.
        undo: See there.

    Returns:
        The replies of each server, or a StoreError if it did not answer.
    """
    until = monotonic() + within
    sent: dict[Key, redis.Connection] = {}
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

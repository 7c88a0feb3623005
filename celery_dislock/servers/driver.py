"""How code that talks to servers waits: by blocking, or for an event loop.

All rules are written once, for any driver.  A store has one driver for all that it does.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import hiredis
from redis.connection import HiredisRespSerializer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import redis

BY_DIGEST = b"EVALSHA"
NUMBERS = (int, float)  # types of what is packed as text


def blocking_connection(
    kind: type[redis.Connection], arguments: Mapping[str, Any]
) -> redis.Connection:
    """Make one of redis-py's connections, which blocks."""
    connection = kind(**arguments)
    connection._command_packer = _TextPacker(connection._command_packer)  # noqa: SLF001
    return connection


class Mutex(Protocol):
    """A mutex, as :mod:`threading` has them."""

    def acquire(self, *, timeout: float = ...) -> bool:
        """Take it; return False if it was not free within these seconds."""

    def release(self) -> None:
        """Give it back."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, exc: Any, trace: Any, /) -> Any: ...  # noqa: PYI036 -- its types differ


class Driver(NamedTuple):
    """
    A way to wait.

    Attributes:
        pause: Called with the seconds to wait between two attempts.
        connection: Makes a connection, which need not be connected yet, given a class of redis-py's
            and its keyword arguments.  It has the methods of that class that are used here.
        mutex: Makes a mutex; who has it may wait.
    """

    pause: Callable[[float], None] = time.sleep
    connection: Callable[[type[redis.Connection], Mapping[str, Any]], redis.Connection] = (
        blocking_connection
    )
    mutex: Callable[[], Mutex] = threading.RLock


BLOCKING = Driver()


def as_text(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a command with its numbers as text."""
    return tuple([str(part) if isinstance(part, NUMBERS) else part for part in command])


class _TextPacker:
    """
    Pack commands with numbers as text.

    hiredis 3.5 can crash the process if a signal handler raises while hiredis packs an int.
    """

    def __init__(self, packer: Any) -> None:
        self._pack = packer.pack
        self._packs_in_c = isinstance(packer, HiredisRespSerializer)

    def pack(self, *command: Any) -> Any:
        command = as_text(command)
        if self._packs_in_c and command[0] == BY_DIGEST:
            # As redis-py does it, without what it does for commands of several words.
            return [hiredis.pack_command(command)]
        return self._pack(*command)

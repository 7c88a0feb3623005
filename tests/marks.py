"""The marks of parked tasks that are done, as the scripts leave them in Redis."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis

HASH = re.compile(rb":done:@:(\d+):(\d+)$")
PACKED = 16  # bytes of an id
COUNTS = {b"n", b"s"}


def id_of(number: int) -> str:
    """Return a task's id as Celery makes them, the same for the same number."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{number}"))


def is_hash(name: bytes) -> bool:
    """Return whether the key is one that has many marks."""
    return HASH.search(name) is not None


def done_tickets(client: redis.Redis, lock: str) -> list[str]:
    """Return the tickets of a lock that are marked as done; the client speaks bytes."""
    begin = f"{lock}:done:".encode()
    tickets = []
    for name in client.keys("*"):
        if not name.startswith(begin):
            continue
        if not is_hash(name):
            tickets.append(name.removeprefix(begin).decode())
            continue
        for field in set(client.hkeys(name)) - COUNTS:
            ending = field[PACKED:].decode() or "0:0"
            tickets.append(f"{uuid.UUID(bytes=field[:PACKED])}:{ending}")
    return tickets

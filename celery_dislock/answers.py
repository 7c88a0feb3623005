"""What a lock server answers, as Python has it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
NAMES = {letter: mode for mode, letter in MODES.items()}


class Granted(NamedTuple):
    """The locks were taken, or their owner had them already."""

    tokens: tuple[int, ...]  # of each lock


class Refused(NamedTuple):
    """A lock does not admit another lease; of those in the way, the one that ends first."""

    owner: str
    remaining: float  # seconds
    holder: Mapping[str, Any]
    nth: int = 0  # of the locks asked for, the one that refused


class Handed(NamedTuple):
    """The lock was handed over by whoever released it."""

    token: int
    ttl: float  # seconds from then on until the lease ends, unless renewed
    place_left: float  # seconds that the place in line would still have been kept then


class Holding(NamedTuple):
    """A live lease."""

    owner: str
    remaining: float  # seconds
    token: int
    mode: str
    holder: Mapping[str, Any]
    expiring: bool = False  # its owner is done with it


def milliseconds(seconds: float) -> int:
    """Convert a duration, rounded up: a lease never ends before its time."""
    return -int(-seconds * 1000 // 1)


def holdings(reply: Sequence[Any]) -> list[Holding]:
    """Read the reply of holders.lua."""
    return [
        Holding(
            owner.decode().removeprefix("~"),
            remaining / 1000,
            int(token),
            NAMES[mode.decode()],
            json.loads(holder),
            owner.startswith(b"~"),
        )
        for owner, remaining, token, mode, holder in zip(*[iter(reply)] * 5, strict=True)
    ]


def renewed(replies: Sequence[Any]) -> bool | StoreError:
    """Tell what the replies for the locks of one lease mean together."""
    if 0 in replies:
        return False
    return next((reply for reply in replies if isinstance(reply, StoreError)), True)

"""How often a lock is taken, as the lock server tells it; see ``_rate.lua``."""

from __future__ import annotations

import re
from typing import NamedTuple

from celery_dislock.config.terms import Rate
from celery_dislock.servers.records import bounded_text, text

RATE_RECORD = re.compile(rb"\d{1,9} (\d{1,14}) (\d{1,15}) (\d{1,15}) (\d{1,15}) (.*)", re.DOTALL)
NO_RATE = "0/0"  # in place of a rate: none is set
_RATE = re.compile(rb"(\d{1,15})/(\d{1,15})")


class RateState(NamedTuple):
    """
    How often a lock is taken at most, and when it may be taken next.

    Attributes:
        rate: The rate that holds for the first in line, or else held for the last starts; None: the
            lock has no rate, and is only held back.
        early: Seconds until the next start; 0: it may be now.
        is_set: Whether an operator has set the rate, in place of the code's.
        held_back: Seconds for which nobody starts, as an operator or a body has asked for; 0: it is
            not held back.
        remaining: Seconds until the operator's setting ends; None: it lasts until it is taken back,
            or there is none.
        since: UNIX time of that setting; None: there is none.
        note: Why, and by whom; empty: not said.
        age: Seconds since that setting was made; None: there is none.
    """

    rate: Rate | None
    early: float
    is_set: bool = False
    held_back: float = 0.0
    remaining: float | None = None
    since: float | None = None
    note: str = ""
    age: float | None = None


def rate_of(word: bytes) -> Rate | None:
    """Parse a rate as the scripts write it; None: it is none."""
    found = _RATE.fullmatch(word)
    return Rate(int(found[1]), int(found[2]) / 1000) if found and int(found[1]) else None


def rate_state(
    now_ms: int, record: bytes, lasts_ms: int, word: bytes, early_ms: int
) -> RateState | None:
    """
    Parse what look.lua tells of a lock's rate; None: it has none, and is not held back.

    Raises:
        ValueError: What people have set cannot be read.
    """
    set_ = RATE_RECORD.fullmatch(record)
    if record and not set_:
        raise ValueError("its rate")
    rate, early = rate_of(word), early_ms / 1000
    if set_ is None:
        return None if rate is None else RateState(rate, early)
    return RateState(
        rate,
        early,
        is_set=int(set_[2]) > 0,
        held_back=max(0.0, (int(set_[1]) - now_ms) / 1000),
        remaining=lasts_ms / 1000 if lasts_ms >= 0 else None,
        since=int(set_[4]) / 1000,
        note=bounded_text(text(set_[5])) or "",
        age=(now_ms - int(set_[4])) / 1000,
    )

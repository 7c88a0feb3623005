"""What people, or a body, have set for a lock in place of what its code says.

``_override.lua`` describes the record.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.config.terms import Rate
from celery_dislock.servers.records import bounded_text, decode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BARRED = "-"  # the value of a pause and of a hold-back
_RATE = re.compile(rb"(\d{1,15})/(\d{1,15})")


class Override(NamedTuple):
    """
    One thing that is set.

    Attributes:
        value: The limit, or the rate as :attr:`Rate.word`.
        since: UNIX time in milliseconds at which it was set.
        until: UNIX time in milliseconds at which it ends; 0: it lasts until it is taken back.
        note: Why, and by whom; empty: not said.
    """

    value: bytes
    since: int
    until: int
    note: str


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
        back_note: Why it is held back, and by whom; empty: not said.
    """

    rate: Rate | None
    early: float
    is_set: bool = False
    held_back: float = 0.0
    remaining: float | None = None
    since: float | None = None
    note: str = ""
    age: float | None = None
    back_note: str = ""


def overrides_of(shown: Sequence[Any]) -> dict[str, Override]:
    """Parse what a script shows of all that is set for a lock, by name."""
    return {
        decode(name): Override(value, int(since), int(until), bounded_text(decode(note)) or "")
        for name, value, since, until, note in zip(*[iter(shown)] * 5, strict=True)
    }


def rate_of(word: bytes) -> Rate | None:
    """Parse a rate as the scripts write it; None: it is none."""
    found = _RATE.fullmatch(word)
    return Rate(int(found[1]), int(found[2]) / 1000) if found and int(found[1]) else None


def rate_state(
    now_ms: int, overrides: Mapping[str, Override], word: bytes, early_ms: int, held_back: bytes
) -> RateState | None:
    """Describe a lock's rate as look.lua tells it; None: it has none, and is not held back."""
    rate, early = rate_of(word), early_ms / 1000
    set_, back = overrides.get("rate"), overrides.get(decode(held_back))
    about = set_ or back
    if about is None:
        return None if rate is None else RateState(rate, early)
    return RateState(
        rate,
        early,
        is_set=set_ is not None,
        held_back=(back.until - now_ms) / 1000 if back else 0.0,
        remaining=(about.until - now_ms) / 1000 if about.until else None,
        since=about.since / 1000,
        note=about.note if set_ else "",
        age=(now_ms - about.since) / 1000,
        back_note=back.note if back else "",
    )

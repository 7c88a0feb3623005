"""Terms: which other leases a lock admits beside this one, and how often; see ``_terms.lua``.

They are made of a task's options, and travel as one value to the scripts and into the records,
where they are one word.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
KEPT_MOST = 1000  # terms whose text is remembered
LIMIT_MOST = 10**9  # leases; Lua writes a number of fifteen digits in a way that nobody can read
STARTS_MOST = 10**9  # in a window; as LIMIT_MOST
WINDOW_MOST = 30 * 86400  # seconds
RATE_WANTED = "give a rate as '100/m' or '5/10s': starts in a window, of s, m, h or d"
NAMES = {letter: mode for mode, letter in MODES.items()}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
_IN_WORDS = {1: "a second", 60: "a minute", 3600: "an hour", 86400: "a day"}
_RATE = re.compile(r"(\d{1,10})/(\d{0,7})([smhd])")
_PARTS = re.compile(r"(\d{1,7}\.\d{1,7})(?:/(\d{0,7})([smhd]))?")  # of a rate with a fraction
_BETWEEN = re.compile(r"[,;&+|]")  # several rates
_MODE = re.compile(rb"([a-zA-Z]+)(\d{0,15})(?::(\d{1,15}))?")  # of a lease; see `_record.lua`
_WORD = re.compile(rb"([xs]):(\d{1,15})(?::(\d{1,15})/(\d{1,15}))?(?:\*(\d{1,15}))?")


class Rate(NamedTuple):
    """
    How often a lock is taken at most.

    Attributes:
        most: Starts in any window, > 0.
        window: Length of the window in seconds, > 0.
    """

    most: int
    window: float

    def __str__(self) -> str:
        window = _IN_WORDS.get(int(self.window), f"in {self.window:g} s")
        return f"{self.most:,} {window}"

    @property
    def word(self) -> str:
        """The rate as the scripts read it."""
        return f"{self.most}/{round(self.window * 1000)}"

    @classmethod
    def of(cls, given: object) -> Rate:
        """
        Read a rate as people write it: ``"100/m"``, ``"5/10s"``, or a number of starts a second.

        Raises:
            ValueError: This is no rate.
        """
        if isinstance(given, Rate):
            return given
        if isinstance(given, int) and not isinstance(given, bool):
            given = f"{given}/s"
        found = _RATE.fullmatch(given.replace(" ", "")) if isinstance(given, str) else None
        if found is None:
            raise ValueError(_instead_of(str(given).replace(" ", "")))
        most, window = int(found[1]), int(found[2] or 1) * _UNITS[found[3]]
        if not 0 < most <= STARTS_MOST:
            raise ValueError(f"give 1 to {STARTS_MOST:,} starts in a window")
        if not 0 < window <= WINDOW_MOST:
            raise ValueError("give a window of 1 second to 30 days")
        return cls(most, float(window))


class Terms(NamedTuple):
    """
    The terms on which one lock is taken.

    Attributes:
        mode: "exclusive" or "shared".
        limit: Maximum number of leases of an exclusive lock at a time, > 0.
        rate: How often the lock is taken at most; None: there is no rate.
        cost: Units of the limit that a lease takes, and starts of the rate that it counts for, > 0;
            None: no cost is said, which is 1.
    """

    mode: str = "exclusive"
    limit: int = 1
    rate: Rate | None = None
    cost: int | None = None

    def stricter(self, other: Terms) -> Terms:
        """
        Return what admits no more than either, for a key that is declared twice.

        Of two rates, it is the one that admits fewer starts on average; of two costs, the larger.
        """
        costs = [terms.cost for terms in (self, other) if terms.cost is not None]
        rates = [terms.rate for terms in (self, other) if terms.rate is not None]
        slowest = min(rates, key=lambda rate: rate.most / rate.window, default=None)
        limit = min(self.limit, other.limit)
        return self._replace(limit=limit, rate=slowest, cost=max(costs, default=None))

    @property
    def too_much(self) -> str:
        """What the cost is more than, for an error; empty: it is within the limit and the rate."""
        if self.cost is None:
            return ""
        if self.cost > self.limit:
            return f"the limit, {self.limit}"
        return f"the rate, {self.rate}" if self.rate and self.cost > self.rate.most else ""

    @property
    def breadth(self) -> tuple[int, float]:
        """Sort key among the locks that a task passes: terms that let few tasks pass come first."""
        apart = self.rate.window / self.rate.most if self.rate else 0.0
        if apart >= 1:  # seconds between two starts
            return 0, -apart
        return (2, -apart) if self.rate and self.limit == LIMIT_MOST else (1, self.limit)


def _instead_of(given: str) -> str:
    """Say what to write in place of what is no rate."""
    several = _BETWEEN.split(given)
    if len(several) > 1 and all(map(_RATE.fullmatch, several)):
        keys = [f"Key('api{nth}', rate={word!r})" for nth, word in enumerate(several, 1)]
        return f"a key has one rate: give a key for each, as lock_key=[{', '.join(keys)}]"
    found = _PARTS.fullmatch(given)
    if found is not None and int(found[2] or 1):
        exact = Fraction(found[1]) / int(found[2] or 1)
        window = "" if exact.denominator == 1 else exact.denominator
        whole = f"{exact.numerator}/{window}{found[3] or 's'}"
        with suppress(ValueError):
            Rate.of(whole)
            return f"write {whole!r}: both numbers are whole"
    return RATE_WANTED


ALONE = Terms()


@lru_cache(KEPT_MOST)
def terms_text(terms: tuple[Terms, ...]) -> str:
    """Write the terms of each of several locks, or one for all, as the scripts read them."""
    return ",".join(
        f"{MODES[lock_terms.mode]}:{lock_terms.limit}"
        + ("" if lock_terms.rate is None else f":{lock_terms.rate.word}")
        + ("" if lock_terms.cost is None else f"*{lock_terms.cost}")
        for lock_terms in terms
    )


def parse_terms(word: bytes) -> Terms:
    """Parse the terms in a record; the strictest if only a later release knows them."""
    found = _WORD.fullmatch(word)
    if not found:
        return ALONE
    rate = Rate(int(found[3]), int(found[4]) / 1000) if found[3] else None
    cost = int(found[5]) if found[5] else None
    return Terms(NAMES[found[1].decode()], int(found[2]), rate, cost)


def parse_mode(word: bytes) -> tuple[str, int, int | None]:
    """
    Parse the mode in the record of a lease.

    Returns:
        The mode, the strictest if only a later release knows it; the cost; and what the holder has
        said that it has spent, None if it has not said that.
    """
    found = _MODE.fullmatch(word)
    if not found:
        return ALONE.mode, 1, None
    letter, cost, spent = found.groups()
    return NAMES.get(letter.decode(), ALONE.mode), int(cost or 1), int(spent) if spent else None

"""Checks of the values of options.

A check returns the value as the code uses it, or raises ValueError, whose text says what to give
instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from celery_dislock.config.urls import MEMORY, SCHEMES, URL_WANTED, check_several

NEAR_MISS = 0.75  # minimum difflib ratio at which a name counts as misspelt, not unrelated
LONGEST = threading.TIMEOUT_MAX  # seconds: the maximum wait of a thread, mostly 292 years

Check = Callable[[Any], Any]


def seconds(*, above: float | None = None, at_least: float | None = None) -> Check:
    """Make a check of a duration: an int or float in seconds, or a timedelta; returns seconds."""
    wanted = f"above {above:g}" if above is not None else f"of {at_least:g} or more"

    def check(value: object) -> float:
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"give a number of seconds {wanted}, or a timedelta")
        if (
            not -LONGEST <= value <= LONGEST  # also refuses NaN
            or (above is not None and value <= above)
            or (at_least is not None and value < at_least)
        ):
            raise ValueError(f"give finite seconds {wanted}, and {LONGEST:.0f} at most")
        return float(value)

    return check


def whole_number(value: object) -> int:
    """Check an integer; a boolean is refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("give a whole number")
    return value


def number_from(least: int, most: int | None = None) -> Check:
    """Make a check of an integer that is not below *least*, and not above *most*."""

    def check(value: object) -> int:
        if whole_number(value) < least:
            raise ValueError(f"give {least} or more")
        if most is not None and whole_number(value) > most:
            raise ValueError(f"give {most} or less")
        return whole_number(value)

    return check


def yes_or_no(value: object) -> bool:
    """Check a boolean; other truthy or falsy values are refused."""
    if not isinstance(value, bool):
        raise ValueError("give True or False")
    return value


def text(value: object) -> str:
    """Check a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("give a string that is not empty")
    return value


def start_of_names(value: object) -> str:
    """Check the prefix of names in Redis, which is followed by the key in braces."""
    found = text(value)
    if "{" in found or "}" in found:
        raise ValueError("give a string without { and }: they mark the key in a lock's name")
    return found


def one_or_several_urls(value: object) -> str | tuple[str, ...]:
    """Check the lock server's URL, or a list of URLs of independent servers."""
    if isinstance(value, str) and value:
        if value != MEMORY and not value.startswith(SCHEMES):
            raise ValueError(URL_WANTED)
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError(URL_WANTED)
    if not all(isinstance(item, str) for item in value):
        raise ValueError("give a URL, or a list of them")
    check_several(value)
    return tuple(value)


def mapping(value: object) -> dict[str, Any]:
    """Check a mapping; return a dict."""
    if not isinstance(value, Mapping):
        raise ValueError("give a dict")
    return dict(value)


def optional(check: Check) -> Check:
    """Make a check that accepts None and passes any other value to *check*."""
    return lambda value: None if value is None else check(value)


def one_of(*allowed: str) -> Check:
    """Make a check that accepts only these strings."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(
                f"use one of {', '.join(map(repr, allowed))}{did_you_mean(str(value), allowed)}"
            )
        return value

    return check


@lru_cache(maxsize=1000)  # the same names stand in all tasks of an app
def did_you_mean(given: str, known: tuple[str, ...]) -> str:
    """Return the end of a message that suggests the closest known name; empty if none is close."""
    near = get_close_matches(given, known, 1, NEAR_MISS)
    return f"; did you mean {near[0]!r}?" if near else ""

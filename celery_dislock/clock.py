"""The clock that all waits go by.

The clock is read by its number.  Libraries that freeze time in tests replace the functions of
:mod:`time`, and a wait that compares their times would never end.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Returns monotonic seconds.
monotonic: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    if hasattr(time, "clock_gettime")
    else time.monotonic
)

FOREVER = float("inf")  # a time that is never due

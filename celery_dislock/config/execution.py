"""Execution options, those of one call: options of a task have no effect there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from celery_dislock.config.censoring import refused
from celery_dislock.config.settings import OPTIONS
from celery_dislock.config.values import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

CALLS_MOST = 1000  # sets of names that are remembered: callers give few different ones
CELERYS = {"max_retries"}  # names that resemble one of ours


@lru_cache(CALLS_MOST)
def meant_for_tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the names of a call's options that are, or may be, options of a task."""
    return tuple(
        name
        for name in names
        if name.startswith("lock_") or (did_you_mean(name, OPTIONS) and name not in CELERYS)
    )


def refuse_in_call(owner: str, options: Mapping[str, Any]) -> None:
    """
    Refuse an option of a task in a call; a stamp may have any name.

    Args:
        owner: The task's name.
        options: The execution options of the call.

    Raises:
        SettingsError: Names the option, and says what to do.
    """
    for name in meant_for_tasks(tuple(options)):
        if name not in (options.get("stamped_headers") or ()):
            known = name if name in OPTIONS else "lock_key"
            hint = "" if name in OPTIONS else did_you_mean(name, OPTIONS)
            remedy = f"without effect in a call: declare it with the task, as @app.task({known}=…)"
            raise refused(owner, name, options[name], remedy + hint)

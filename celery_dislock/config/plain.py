"""The options of a lock in plain Python, each declared once.

They are those of ``dislock.lock()``, ``dislock.async_lock()`` and ``celery dislock run``.  Most are
options of a task under a shorter name; if one is not given, the app's setting for tasks applies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from celery_dislock.config.censoring import alone, checked
from celery_dislock.config.settings import OPTIONS, refuse_unknown, task_options
from celery_dislock.config.values import seconds, yes_or_no
from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import timedelta

    from celery_dislock.config.options import TaskOptions


class PlainOptions(TypedDict, total=False):
    """The options by their names; :meth:`celery_dislock.Dislock.lock` describes them."""

    mode: Literal["exclusive", "shared"] | None
    limit: int | None
    rate: str | int | None
    cost: int | None
    watchdog_timeout: float | timedelta | None
    max_renew_times: int | None
    expire: float | timedelta | None
    on_lost: Literal["warn", "raise"] | None
    on_cancel: Literal["warn", "raise"] | None
    timeout: float | timedelta | None
    fair: bool


class Plain(NamedTuple):
    """
    The checked options of one lock.

    Attributes:
        options: The options that a task has, too.
        timeout: Maximum seconds that a block waits; None: no limit.
        fair: False: pass those in line.
        stated: Names of the task options that were given.
        stops: Names of the options that interrupt a block: ``on_lost``, ``on_cancel``.
    """

    options: TaskOptions
    timeout: float | None
    fair: bool
    stated: Collection[str]
    stops: Sequence[str] = ()


CHECKS = {"timeout": seconds(at_least=0), "fair": yes_or_no}  # of options that no task has

# Names that other libraries have for an option, and what to give instead.
MEANT = {
    "wait_timeout": "give timeout",
    "blocking_timeout": "give timeout",
    "blocking": "give timeout=0, or call try_acquire()",
    "ttl": "leave it out, as locks end by themselves, or give expire for a fixed expiry",
    "lease_time": "leave it out, as leases are renewed, or give expire for a fixed expiry",
    "auto_renewal": "leave it out, as leases are renewed, or give expire for a fixed expiry",
    "sleep": "leave it out: a release wakes the next in line, and nobody polls",
}


def of_task(name: str) -> str:
    """Return the name that an option of a lock in plain Python has as an option of a task."""
    return name if name in OPTIONS else f"lock_{name}"


@alone
def plain_options(
    owner: str, given: Mapping[str, Any], conf: Mapping[str, Any], on_lost: str = "warn"
) -> Plain:
    """
    Check the options of a lock in plain Python, and resolve them against the app's settings.

    Args:
        owner: The lock, for messages.
        given: The options by their names; None: not given.
        conf: The app's configuration.
        on_lost: The value of ``on_lost`` if it is not given: the app's setting is for tasks only.

    Raises:
        SettingsError: An option is unknown, or cannot be used.
    """
    refuse_unknown(owner, given, tuple(PlainOptions.__annotations__), MEANT)
    stated = {name: value for name, value in given.items() if value is not None}
    own: dict[str, Any] = {"timeout": None, "fair": True}
    for name, check in CHECKS.items():
        if name in stated:
            own[name] = checked(owner, name, check, stated.pop(name))
    if "cost" in stated and not isinstance(stated["cost"], int):
        raise SettingsError(owner, "cost", stated["cost"], "give a whole number from 1 on")
    declared = {of_task(name): value for name, value in stated.items()}
    try:  # the app's setting is for tasks only
        options = task_options(owner, {**declared, "lock_on_conflict": "skip"}, conf)
    except SettingsError as exc:
        option = exc.option if exc.owner != owner else exc.option.removeprefix("lock_")
        raise SettingsError(exc.owner, option, exc.value, exc.remedy) from exc
    for name in ("limit", "rate"):
        if callable(value := getattr(options, of_task(name))):
            remedy = f"only a task has arguments for a callable: give a {name}"
            raise SettingsError(owner, name, value, remedy)
    stops = {"on_lost": stated.get("on_lost", on_lost), "on_cancel": stated.get("on_cancel")}
    for name, value in stops.items():
        if value == "terminate":
            remedy = "use 'warn' or 'raise'; 'terminate' is for tasks"
            raise SettingsError(owner, name, value, remedy)
    options = replace(options, **{of_task(name): value for name, value in stops.items()})
    raising = [name for name, value in stops.items() if value == "raise"]
    return Plain(options, stated=declared.keys(), stops=raising, **own)

"""Make locks for plain Python: check their options once, and resolve them against the settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_dislock.config.options import seconds, yes_or_no
from celery_dislock.config.settings import task_options
from celery_dislock.exceptions import SettingsError
from celery_dislock.keys.templates import check_written, in_order
from celery_dislock.locks.reentrant import ReentrantLock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.runtime import Runtime


def make_lock(
    runtime: Runtime[Any],
    key: str | Sequence[str],
    given: Mapping[str, Any],
    *,
    timeout: float | timedelta | None = None,
    fair: bool = True,
    on_lost: str = "warn",
) -> ReentrantLock:
    """
    Make the lock of a key, or of several; takes nothing, and sends no command.

    Args:
        runtime: What the app's locks share.
        key: See :meth:`celery_dislock.Dislock.lock`.
        given: Task options; None: not given.
        timeout: See :meth:`celery_dislock.Dislock.lock`.
        fair: See :meth:`celery_dislock.Dislock.lock`.
        on_lost: What it is if it is not given.

    Raises:
        SettingsError: An option cannot be used.
        LockKeyError: A key cannot be used, or the list is empty.
    """
    stated = {name: value for name, value in given.items() if value is not None}
    owner = f"lock {key!r}"
    asked = stated if on_lost == "warn" else {"lock_on_lost": on_lost, **stated}
    resolved = runtime.resolved.get(asked, runtime.conf, lambda: _resolve(runtime, owner, asked))
    wait_for = None
    try:
        if timeout is not None:
            wait_for = seconds(at_least=0)(timeout)
    except ValueError as exc:
        raise SettingsError(owner, "timeout", timeout, str(exc)) from exc
    try:
        yes_or_no(fair)
    except ValueError as exc:
        raise SettingsError(owner, "fair", fair, str(exc)) from exc
    keys = keys_of(key)
    return ReentrantLock(keys, resolved, runtime, timeout=wait_for, fair=fair, stated=stated)


def keys_of(key: str | Sequence[str]) -> Sequence[str]:
    """
    Return the keys of a lock, in the order in which they are taken.

    Raises:
        LockKeyError: A key cannot be used, or the list is empty.
    """
    given: Any = key
    several = not isinstance(given, (str, bytes)) and isinstance(given, Iterable)
    return in_order([check_written(one) for one in (given if several else [given])])


def _resolve(runtime: Runtime[Any], owner: str, stated: dict[str, Any]) -> TaskOptions:
    try:
        resolved = task_options(owner, stated, runtime.conf)
    except SettingsError as exc:
        option = exc.option if exc.owner != owner else exc.option.removeprefix("lock_")
        raise SettingsError(exc.owner, option, exc.value, exc.remedy) from exc
    on_lost = stated.get("lock_on_lost")
    if on_lost is None:  # the app's setting applies to tasks only
        return replace(resolved, lock_on_lost="warn")
    if on_lost == "terminate":
        remedy = "use 'warn' or 'raise'; 'terminate' is for tasks"
        raise SettingsError(owner, "on_lost", on_lost, remedy)
    return resolved

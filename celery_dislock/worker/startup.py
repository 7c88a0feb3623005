"""Warnings at a worker's start: settings that are valid, but can make tasks lose or miss locks.

Each warning says what is set, what follows from it, and what to set instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.config.options import OF_OTHERS
from celery_dislock.tasks.task import declared_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from celery import Celery, Task

    from celery_dislock.config.options import TaskOptions

VISIBILITY_TIMEOUT = 3600  # seconds; kombu's default for Redis
NAMED = 5  # maximum number of tasks that a warning names


def about_tasks(app: Celery, *, enabled: bool | None) -> Iterator[str]:
    """
    Warn of tasks that get no lock here, and of options that do not work as intended.

    Args:
        app: The app, whose tasks have their guards already.
        enabled: The value of ``dislock_enabled``.
    """
    tasks = [task for name, task in sorted(app.tasks.items()) if not name.startswith("celery.")]
    guarded = [task for task in tasks if hasattr(task, "dislock_guard")]
    asking = [task.name for task in tasks if _asks_for_a_lock(task)]
    if enabled is False:
        if asking or guarded:
            names = _names({*asking, *(task.name for task in guarded)})
            yield (
                f"These tasks ask for a lock and get none in this worker: {names}. "
                "Start it without --no-dislock to lock them."
            )
        return
    unlocked = set(asking).difference(task.name for task in guarded)
    if unlocked:
        yield (
            "These tasks have a lock_key but are no SingletonTask, and get no lock in this "
            f"worker: {_names(unlocked)}. Start it with --dislock, or make "
            "SingletonTask their base."
        )
    rejecting = {
        task.name
        for task in guarded
        if task.dislock_guard.options.lock_on_conflict == "reject" and not task.acks_late
    }
    if rejecting:
        yield (
            "These tasks have lock_on_conflict='reject' without acks_late, so their messages are "
            f"acknowledged before they can be rejected, and never dead-lettered: "
            f"{_names(rejecting)}. Give them acks_late=True."
        )
    losing = {
        task.name
        for task in guarded
        if (options := task.dislock_guard.options).newest_counts
        and options.lock_on_conflict == "skip"
        and options.lock_limit is not None
    }
    if losing:
        yield (
            "These tasks have lock_on_conflict='skip', and are sent once until they start, or "
            "replace each other: a message that comes while an older one runs is dropped, and "
            f"what it was sent for is missed: {_names(losing)}. Leave lock_on_conflict out."
        )
    yield from _about_visibility(app, guarded)


def _asks_for_a_lock(task: Task) -> bool:
    declared = declared_options(type(task))
    return declared.get("lock_key") is not False and any(
        name not in OF_OTHERS
        and (name.startswith(("lock_", "release_on_")) or name == "max_renew_times")
        for name in declared
    )


def _about_visibility(app: Celery, guarded: Sequence[Task]) -> Iterator[str]:
    """Warn of tasks that the broker may redeliver while they still run."""
    if not guarded:
        return
    if app.connection_for_read().transport_cls not in {"redis", "rediss", "sentinel"}:
        return
    visible_after = (app.conf.broker_transport_options or {}).get(
        "visibility_timeout", VISIBILITY_TIMEOUT
    )
    late: dict[str, set[str]] = {}
    for task in guarded:
        if not task.acks_late:
            continue
        hard_limit = task.time_limit or app.conf.task_time_limit
        lasts, why = (hard_limit, "time_limit") if hard_limit else _cap(task.dislock_guard.options)
        if lasts is None or lasts > visible_after:
            what = f"{why} of {lasts:g} s" if lasts is not None else why
            late.setdefault(what, set()).add(task.name)
    for what, names in sorted(late.items()):
        yield (
            f"These acks_late tasks may run longer than the broker's visibility_timeout of "
            f"{visible_after:g} s ({what}), are delivered again then, and put off while the first "
            f"delivery runs: {_names(names)}. Raise broker_transport_options="
            "{'visibility_timeout': ...} above that, or set a lower time_limit."
        )


def _cap(options: TaskOptions) -> tuple[float | None, str]:
    interval = options.renewal_interval
    if interval is None:
        return options.lock_expire, "lock_expire"
    if options.max_renew_times <= 0:
        return None, "no time_limit and no max_renew_times"
    return options.max_renew_times * interval, "max_renew_times: a cap"


def about_server(info: Mapping[str, str]) -> Iterator[str]:
    """
    Warn of a lock server that may evict locks, or that is a replica and accepts none.

    Args:
        info: The fields of the server's ``INFO`` reply.
    """
    for found in (evicts(info), is_replica(info)):
        if found:
            yield " ".join(found)


def evicts(info: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong, and what to do, if a server evicts keys when its memory is full."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or not int(info.get("maxmemory", 0)):
        return None
    when = f"when its memory is full (maxmemory-policy {policy})"
    return (
        f"The lock server may evict locks that are held {when}.",
        "Set it to noeviction, or keep the locks on a server of their own (dislock_url).",
    )


def is_replica(info: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong, and what to do, if a server is a replica."""
    if info.get("role") != "slave":
        return None
    return (
        "The lock server is a replica, which takes no locks: every task is put off.",
        "Give the master's URL, or sentinel:// to follow it (dislock_url).",
    )


def _names(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - NAMED} others" if len(known) > NAMED else ""
    return ", ".join(known[:NAMED]) + more

"""Warnings at a worker's start: settings that are valid, but can make tasks lose or miss locks.

Each warning says what is set, what follows from it, and what to set instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from celery_dislock.config.options import OF_OTHERS
from celery_dislock.tasks.task import declared_options, guards_of
from celery_dislock.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery import Celery, Task

    from celery_dislock.config.options import TaskOptions

VISIBILITY_TIMEOUT = 3600  # seconds; kombu's default for Redis

#: WARNING: They run without a lock. -> Start the worker with `--dislock`, or use
#: `base=SingletonTask`.
UNLOCKED = (
    "These tasks have a lock_key but are no SingletonTask, and get no lock in this worker: "
    "{tasks}. Start it with --dislock, or make SingletonTask their base."
)
#: WARNING: On a conflict they are dropped, never dead-lettered. -> Set `acks_late=True`, or use
#: another strategy.
ACKNOWLEDGED = (
    "These tasks have lock_on_conflict='reject' without acks_late, so their messages are "
    "acknowledged before they can be rejected, and never dead-lettered: {tasks}. Give them "
    "acks_late=True."
)
#: WARNING: The newest message may be lost. -> Leave `lock_on_conflict` out.
MISSED = (
    "These tasks have lock_on_conflict='skip', and are sent once until they start, or replace each "
    "other: a message that comes while an older one runs is dropped, and what it was sent for is "
    "missed: {tasks}. Leave lock_on_conflict out."
)
#: WARNING: The broker delivers them again, and they run twice. -> Raise the `visibility_timeout`,
#: or set a `time_limit`.
OUTLIVING = (
    "These acks_late tasks may run longer than the broker's visibility_timeout of "
    "{visible_for:g} s, and are then delivered again, and run twice, one after the other: {tasks}. "
    "Raise broker_transport_options={{'visibility_timeout': ...}}, or set a lower time_limit."
)
#: WARNING: They fail the first time that their process dies. -> Set both, or leave the limit out.
LOST = (
    "These tasks have a lock_crash_limit without acks_late and reject_on_worker_lost, so they do "
    "not come back when their process has died, and fail the first time: {tasks}. Give them both, "
    "or leave the limit out."
)
#: WARNING: Its role, too, is not known. -> Allow `+info`, if the server has it.
UNKNOWN = (
    "The lock server refuses INFO, so nobody knows whether it may evict locks that are held. Allow "
    "it if the server has it: ACL SETUSER ... +info."
)


def about_tasks(app: Celery) -> Iterator[str]:
    """
    Warn of tasks that get no lock here, and of options that do not work as intended.

    Args:
        app: The app, whose tasks have their guards already.
    """
    tasks = app.tasks
    guarded = {name: guard.options for name, guard in guards_of(app).items()}
    visible_for = _visibility_timeout(app)
    checks: dict[str, Callable[[Task, TaskOptions], object]] = {
        ACKNOWLEDGED: lambda task, options: (
            options.lock_on_conflict == "reject" and not task.acks_late
        ),
        MISSED: lambda _task, options: (
            options.newest_counts and options.lock_on_conflict == "skip" and options.lock_limit
        ),
        OUTLIVING: lambda task, options: task.acks_late and _longest(task, options) > visible_for,
        LOST: lambda task, _its: (
            declared_options(type(task)).get("lock_crash_limit")
            and not (task.acks_late and task.reject_on_worker_lost)
        ),
    }
    unlocked = [name for name in tasks if name not in guarded and _asks_for_a_lock(tasks[name])]
    found = {UNLOCKED: unlocked}
    for warning, is_so in checks.items():
        found[warning] = [name for name, options in guarded.items() if is_so(tasks[name], options)]
    for warning, names in found.items():
        if names:
            yield warning.format(tasks=some(names), visible_for=visible_for)


def _asks_for_a_lock(task: Task) -> bool:
    declared = declared_options(type(task))
    return declared.get("lock_key") is not False and any(
        name not in OF_OTHERS
        and (name.startswith(("lock_", "release_on_")) or name == "max_renew_times")
        for name in declared
    )


def _visibility_timeout(app: Celery) -> float:
    """Return the seconds after which the broker delivers an unacknowledged message again."""
    if app.connection_for_read().transport_cls not in {"redis", "rediss", "sentinel"}:
        return math.inf
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", VISIBILITY_TIMEOUT))


def _longest(task: Task, options: TaskOptions) -> float:
    """Return the seconds for which a body may run under its lock, as far as the options say."""
    if limit := task.time_limit or task.app.conf.task_time_limit:
        return float(limit)
    if options.lock_expire is not None:
        return options.lock_expire
    interval = options.renewal_interval
    if interval is None or options.max_renew_times <= 0:
        return math.inf
    return options.max_renew_times * interval


def about_server(info: Mapping[str, str]) -> list[str]:
    """
    Warn of a lock server that may evict locks, or that is a replica and accepts none.

    Args:
        info: The fields of the server's ``INFO`` reply; empty: it refuses that.
    """
    if not info:
        return [UNKNOWN]
    return [" ".join(found) for found in (evicts(info), is_replica(info)) if found]


def evicts(info: Mapping[str, str]) -> tuple[str, str] | None:
    """Find a policy that may evict locks.  Returns what is wrong, and what to do."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or not int(info.get("maxmemory", 0)):
        return None
    when = f"when its memory is full (maxmemory-policy {policy})"
    #: WARNING: Its `maxmemory-policy` may delete a lock that is held. -> Set `noeviction`, or use a
    #: separate server.
    return (
        f"The lock server may evict locks that are held {when}.",
        "Set it to noeviction, or keep the locks on a server of their own (dislock_url).",
    )


def is_replica(info: Mapping[str, str]) -> tuple[str, str] | None:
    """Find a replica, which takes no locks.  Returns what is wrong, and what to do."""
    if info.get("role") != "slave":
        return None
    #: WARNING: No lock can be taken. -> Set the URL of the master, or of the Sentinels.
    return (
        "The lock server is a replica, which takes no locks: every task is put off.",
        "Give the master's URL, or sentinel:// to follow it (dislock_url).",
    )

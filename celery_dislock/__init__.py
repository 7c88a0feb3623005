"""Distributed locks for Celery tasks, held for exactly as long as the task runs."""

from celery_dislock.config.options import Key
from celery_dislock.exceptions import (
    DamagedLockError,
    DislockError,
    DuplicateTaskError,
    EventLoopError,
    LockHeldError,
    LockKeyError,
    LockLostError,
    NoResultError,
    NotOwnerError,
    SettingsError,
    StoreError,
    SupersededError,
    TaskCrashedError,
)
from celery_dislock.locks.asynchronous import AsyncLock
from celery_dislock.locks.lease import Lease, current_lease
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.plugin import Dislock
from celery_dislock.servers.records import Conflict
from celery_dislock.tasks.task import SingletonTask, ensure_held

__all__ = [
    "Dislock",
    "SingletonTask",
    "Key",
    "current_lease",
    "ensure_held",
    "Lease",
    "ReentrantLock",
    "AsyncLock",
    "Conflict",
    "DislockError",
    "SettingsError",
    "LockKeyError",
    "LockHeldError",
    "DuplicateTaskError",
    "NoResultError",
    "LockLostError",
    "SupersededError",
    "TaskCrashedError",
    "NotOwnerError",
    "EventLoopError",
    "StoreError",
    "DamagedLockError",
]

"""Distributed locks for Celery tasks, held for exactly as long as the task runs."""

from celery_dislock.config.options import Key as Key
from celery_dislock.exceptions import (
    DamagedLockError,
    DislockError,
    LockHeldError,
    LockKeyError,
    LockLostError,
    NotOwnerError,
    SettingsError,
    StoreError,
)
from celery_dislock.exceptions import DuplicateTaskError as DuplicateTaskError
from celery_dislock.exceptions import EventLoopError as EventLoopError
from celery_dislock.exceptions import NoResultError as NoResultError
from celery_dislock.exceptions import SupersededError as SupersededError
from celery_dislock.exceptions import TaskCrashedError as TaskCrashedError
from celery_dislock.locks.asynchronous import AsyncLock
from celery_dislock.locks.lease import Lease, current_lease
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.plugin import Dislock
from celery_dislock.servers.records import Conflict as Conflict
from celery_dislock.tasks.task import SingletonTask
from celery_dislock.tasks.task import ensure_held as ensure_held

__all__ = [
    "Dislock",
    "SingletonTask",
    "current_lease",
    "Lease",
    "ReentrantLock",
    "AsyncLock",
    "DislockError",
    "SettingsError",
    "LockKeyError",
    "LockHeldError",
    "LockLostError",
    "NotOwnerError",
    "StoreError",
    "DamagedLockError",
]

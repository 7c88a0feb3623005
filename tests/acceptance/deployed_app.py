"""The scenarios as they are deployed next: one task is another one now, or gone.

DEPLOYED says what has become of ``hold_or_queue``.
"""

from __future__ import annotations

import os

from celery import Task
from celery.exceptions import Ignore

from celery_dislock import SingletonTask
from tests.acceptance.scenarios import app, hold_or_queue, stay

__all__ = ["app"]

NAME = hold_or_queue.name
QUEUE = {"lock_on_conflict": "queue", "shared": False}


class Fails(SingletonTask):
    abstract = True

    def before_start(self, task_id, args, kwargs):
        raise ValueError("not today")


class Ignores(SingletonTask):
    abstract = True

    def before_start(self, task_id, args, kwargs):
        raise Ignore("not today")


def declare(base, **options):
    @app.task(name=NAME, base=base, **options)
    def deployed(key):
        return stay(key)


def rename_its_argument():
    @app.task(name=NAME, base=SingletonTask, lock_key="<account>", **QUEUE)
    def deployed(account):
        return stay(account)


CHANGES = {
    "gone": lambda: None,
    "another argument": rename_its_argument,
    "before_start fails": lambda: declare(Fails, lock_key="<key>", **QUEUE),
    "before_start ignores": lambda: declare(Ignores, lock_key="<key>", **QUEUE),
    "skip": lambda: declare(SingletonTask, lock_key="<key>", shared=False),
    "two keys": lambda: declare(SingletonTask, lock_key=["<key>", "<key>-too"], shared=False),
    "no key": lambda: declare(SingletonTask, lock_key=False, shared=False),
    "no SingletonTask": lambda: declare(Task, shared=False),
}

app.finalize()
change = os.environ.get("DEPLOYED")
if change == "only skip":  # there is no other task that parks, either
    for name in [name for name, task in app.tasks.items() if getattr(task, "lock_key", None)]:
        del app.tasks[name]
    CHANGES["skip"]()
elif change:
    del app.tasks[NAME]
    CHANGES[change]()

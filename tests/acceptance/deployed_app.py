"""The scenarios as they are deployed next: one task is another one now, or gone.

DEPLOYED says what has become of ``hold_or_queue``.
"""

from __future__ import annotations

import os

from celery_dislock import SingletonTask
from tests.acceptance.scenarios import app, hold_or_queue, stay

__all__ = ["app"]

NAME = hold_or_queue.name


def rename_its_argument():
    @app.task(
        name=NAME, base=SingletonTask, lock_key="<account>", lock_on_conflict="queue", shared=False
    )
    def deployed(account):
        return stay(account)


CHANGES = {
    "gone": lambda: None,
    "another argument": rename_its_argument,
}

app.finalize()
change = os.environ.get("DEPLOYED")
if change:
    del app.tasks[NAME]
    CHANGES[change]()

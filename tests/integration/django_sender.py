"""Sends a unique task in transactions of Django.

It is a program of its own, because Django's settings are those of a process.  Its argument is a
JSON list: the URL of the broker, how a second message of a key is treated, and what to do.  The
steps are "begin", "commit" and "rollback" of a block that ``transaction.atomic()`` guards, and a
method of the task with its document, such as "delay_on_commit 1".

Prints a JSON list, with an entry for each step: what the method has returned, or the error of the
step; how many messages wait; and for which documents a key is reserved.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import django
import redis
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.conf import settings
from django.db import transaction

from celery_dislock import Dislock, SingletonTask


class RollBackError(Exception):
    """Ends a block, so that Django rolls it back."""


class LockedTask(SingletonTask, DjangoTask):
    """Locks, and has delay_on_commit()."""


def main(url: str, on_duplicate: str, steps: list[str]) -> list[dict[str, Any]]:
    databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    settings.configure(DATABASES=databases, USE_TZ=True)
    django.setup()
    app = Celery("site", broker=url, set_as_current=False)

    @app.task(
        name="edit",
        base=LockedTask,
        lock_key="edit:<doc>",
        lock_unique_until="end",
        lock_on_duplicate=on_duplicate,
        shared=False,
    )
    def edit(doc): ...

    with app, Dislock(app), redis.Redis.from_url(url, decode_responses=True) as client:
        blocks = []
        told = []
        for step in steps:
            told.append({"step": step})
            try:
                told[-1]["returned"] = take(step, edit, blocks)
            except Exception as exc:  # noqa: BLE001 -- it is what the step has told
                told[-1]["error"] = type(exc).__name__
            told[-1]["messages"] = client.llen("celery")
            told[-1]["reserved"] = sorted(
                key.removeprefix("dislock:{edit:").removesuffix("}:unique")
                for key in client.keys("*:unique")
            )
    return told


def take(step: str, task: Any, blocks: list[Any]) -> Any:
    """Take one step, and return what it has returned, as JSON can tell it."""
    what, _, doc = step.partition(" ")
    if what == "begin":
        blocks.append(transaction.atomic())
        blocks[-1].__enter__()
    elif what == "commit":
        blocks.pop().__exit__(None, None, None)
    elif what == "rollback":
        blocks.pop().__exit__(RollBackError, RollBackError(), None)
    else:
        sent = getattr(task, what)(doc)
        return sent and {"id": sent.id, "duplicate": sent.duplicate}
    return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*json.loads(sys.argv[1]))))

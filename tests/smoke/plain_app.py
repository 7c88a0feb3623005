"""An app as the README has it, and what a client asks of it: both run in a fresh environment."""

from __future__ import annotations

import os
import pickle

from celery import Celery

from celery_dislock import Dislock, LockHeldError, SettingsError, SingletonTask

LIMIT = 60  # seconds until a task must have ended

app = Celery("plain_app", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
dislock = Dislock(app)


@app.task(base=SingletonTask, bind=True, lock_key="export:<corp_id>", lock_on_conflict="raise")
def export(self, corp_id: int) -> str:
    """Say which lock it holds."""
    self.lease.ensure_held()
    return self.lease.key


def main() -> None:
    """Meet the lock, run under it, and misspell an option."""
    with dislock.lock("export:7"):
        try:
            export.delay(7).get(timeout=LIMIT)
        except LockHeldError as exc:
            print("refused:", exc)  # noqa: T201
    print("ran under:", export.delay(7).get(timeout=LIMIT))  # noqa: T201

    misspelt = app.task(export.run, name="misspelt", base=SingletonTask, lock_kye="a")
    try:
        misspelt.delay(7)
    except SettingsError as exc:
        again = pickle.loads(pickle.dumps(exc))
        print("pickled:", type(again).__name__, again)  # noqa: T201


if __name__ == "__main__":
    main()

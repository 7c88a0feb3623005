"""The app of several beats; the environment has its settings, its wrong clock, and when it dies."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.beat import Scheduler

app = Celery("beats")
app.conf.update(json.loads(os.environ["BEAT_CONF"]))

ahead = timedelta(seconds=float(os.environ.get("BEAT_AHEAD", "0")))
if ahead:
    right_now = app.now
    app.now = lambda: right_now() + ahead


@app.task(name="often", ignore_result=True)
def often() -> None:
    """Stay in the queue."""


def dies_as_it_sends() -> None:
    """End this beat with a signal, at its third message or another: before it is sent, or after."""
    when, name, nth = f"{os.environ['BEAT_DIES']} 3".split()[:3]
    send, sent = Scheduler.apply_async, 0

    def apply_async(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        if when == "before" and sent == int(nth):
            os.kill(os.getpid(), getattr(signal, name))
        result = send(self, *args, **kwargs)
        if when == "after" and sent == int(nth):
            os.kill(os.getpid(), getattr(signal, name))
        return result

    Scheduler.apply_async = apply_async


if "BEAT_DIES" in os.environ:
    dies_as_it_sends()

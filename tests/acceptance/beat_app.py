"""The app of several beats; the environment has its settings, and how wrong its clock is."""

from __future__ import annotations

import json
import os
from datetime import timedelta

from celery import Celery

app = Celery("beats")
app.conf.update(json.loads(os.environ["BEAT_CONF"]))

ahead = timedelta(seconds=float(os.environ.get("BEAT_AHEAD", "0")))
if ahead:
    right_now = app.now
    app.now = lambda: right_now() + ahead


@app.task(name="often", ignore_result=True)
def often() -> None:
    """Stay in the queue."""

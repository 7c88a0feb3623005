"""The app of several beats; the environment has its settings."""

import json
import os

from celery import Celery

app = Celery("beats")
app.conf.update(json.loads(os.environ["BEAT_CONF"]))


@app.task(name="often", ignore_result=True)
def often():
    """Stay in the queue."""

"""The rules of the documentation for the lock server's user."""

from __future__ import annotations

import re
from pathlib import Path

from celery import Celery

from celery_dislock import Dislock
from celery_dislock.worker.steps import check_lock_server

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "set-up-the-lock-server.md"
(RULES,) = re.findall(r"^user dislock (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)


def start_worker(url: str, **conf: object) -> tuple[str, list[str]]:
    """Do what a worker does under --dislock before it starts."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(dislock_url=url, dislock_enabled=True, **conf)
    with Dislock(app):
        return check_lock_server(app)

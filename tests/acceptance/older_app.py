"""The scenarios in a worker that knows no ``celery inspect dislock``, as older ones do not."""

from __future__ import annotations

from celery.worker.control import Panel

from tests.acceptance.scenarios import app

__all__ = ["app"]

Panel.data.pop("dislock")

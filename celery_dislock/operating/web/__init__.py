"""The page: locks in a browser.  ``Page(app, user=...)`` is a WSGI application; extra ``web``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_dislock.operating.web.page import Page as Page


def __getattr__(name: str) -> object:
    """Import the page when it is asked for: the metrics beside it need no Werkzeug."""
    if name != "Page":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from celery_dislock.operating.web.page import Page  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as exc:
        raise ImportError('The page needs Werkzeug: pip install "celery-dislock[web]"') from exc
    return Page

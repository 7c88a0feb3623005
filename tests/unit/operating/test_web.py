"""The package of the page, whose metrics can be used without it."""

from __future__ import annotations

import sys

import pytest

from celery_dislock.operating import web


def test_without_werkzeug_the_error_names_the_extra(monkeypatch):
    """It is raised when the page is asked for: the metrics beside it do not need Werkzeug."""
    monkeypatch.setitem(sys.modules, "celery_dislock.operating.web.page", None)
    with pytest.raises(ImportError, match=r"celery-dislock\[web\]"):
        _ = web.Page
    with pytest.raises(AttributeError, match="Pages"):
        _ = web.Pages

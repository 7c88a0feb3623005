"""A page whose lock server and whose actions are the test's."""

from __future__ import annotations

from functools import partial

import pytest

from celery_dislock.operating.metrics import Metrics
from celery_dislock.operating.web import Page
from celery_dislock.operating.web.backend import Backend
from tests.pages import FakeActions, FakeOverview, is_ann
from tests.unit.operating.web.visitor import Visitor


@pytest.fixture
def overview(monkeypatch):
    fake = FakeOverview()
    monkeypatch.setattr(Metrics, "counters", lambda _self: {})
    monkeypatch.setattr(Backend, "overview", property(lambda _self: fake))
    return fake


@pytest.fixture
def actions(monkeypatch):
    fake = FakeActions()
    monkeypatch.setattr(Backend, "actions", property(lambda _self: fake))
    return fake


@pytest.fixture
def make(app, overview, actions):
    """Make a visitor of a page with these options."""

    def visitor(**options):
        return Visitor(Page(app, **options))

    return visitor


@pytest.fixture
def check():
    """A login: ann has a password."""
    return is_ann


@pytest.fixture
def ann(make, check):
    """Somebody who is logged in, and may act."""
    visitor = make(login=check, allow_actions=True)
    assert visitor.log_in().status == 200
    return visitor


@pytest.fixture
def stranger(make, check):
    """Make a visitor from another machine, of a page with a login."""
    return partial(_stranger, make, check)


def _stranger(make, check, **options):
    visitor = make(login=check, allow_actions=True, **options)
    visitor.environ["REMOTE_ADDR"] = "192.0.2.7"
    return visitor

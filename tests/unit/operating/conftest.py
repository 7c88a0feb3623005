"""An app whose locks are on a server of bare Lua, which has what a test puts there."""

import pytest

from celery_dislock.operating.checks import facts
from celery_dislock.operating.cli import session
from celery_dislock.parking.process import runtime_of
from tests.commands import Dislock
from tests.staged import Staged, make_app, reach
from tests.unit.operating.examining import MASTER, Doctor


@pytest.fixture(autouse=True)
def _me(monkeypatch):
    """Who types the commands."""
    monkeypatch.setattr(session.getpass, "getuser", lambda: "me")
    monkeypatch.setattr(session, "gethostname", lambda: "here")


@pytest.fixture
def server(monkeypatch):
    server = Staged()
    reach(monkeypatch, server)
    return server


@pytest.fixture
def app(server):
    app = make_app(server)
    yield app
    runtime_of(app).close()
    app.close()


@pytest.fixture
def dislock(app):
    return Dislock(app)


@pytest.fixture
def enlist(app):
    """Let commands find the lines of these keys."""

    def enlist(*keys):
        for key in keys:
            runtime_of(app).process.lines.enlist(f"dislock:{{{key}}}")

    return enlist


@pytest.fixture
def doctor(dislock, server, monkeypatch):
    doctor = Doctor(dislock, server)
    server.info = MASTER
    monkeypatch.setattr(dislock.app.control, "broadcast", doctor.broadcast)
    monkeypatch.setattr(facts, "complaints", lambda *_: [])  # real servers are tried elsewhere
    return doctor

"""Commands without a lock server: what they ask of it is answered here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dislock.operating.cli import dislock as command
from celery_dislock.operating.locks import AppLocks
from celery_dislock.servers.view import ReservationState
from tests import pages
from tests.pages import FakeActions, FakeOverview

HELD = 750.0  # seconds
TASK_ID = "9b1d"
lock = pages.lock


def holder(**changed):
    """Make a lease as the lock server tells it."""
    told = {
        "owner": f"{TASK_ID}@celery@w1:7/1",
        "token": 5,
        "held": HELD,
        "acquired_at": 1_700_000_000.0,
        "remaining": 27.0,
        "renewed": 3.0,
        "who": f"shop.export[{TASK_ID}] on celery@w1 (pid 7)",
        "id": TASK_ID,
        "host": "h",
    }
    return pages.holder(**{**told, **changed})


def place(number=1, **changed):
    """Make a parked task in line."""
    name = f"t{number}"
    told = {"ticket": f"{name}:0:0", "who": f"shop.export[{name}]", "id": name, "args": "(7,) {}"}
    return pages.place(number, **{**told, "task": "shop.export", **changed})


def reserved(state="waiting", **changed):
    """Make a reservation of a key."""
    return ReservationState("id-1", state, 3.0, 60.0, "5eed", 7)._replace(**changed)


@pytest.fixture
def overview(monkeypatch):
    """What the lock server knows."""
    fake = FakeOverview()
    monkeypatch.setattr(AppLocks, "overview", fake)
    return fake


@pytest.fixture
def actions(monkeypatch):
    """What a person can do."""
    fake = FakeActions()
    monkeypatch.setattr(AppLocks, "actions", fake)
    return fake


@pytest.fixture
def dislock(overview, actions):
    """Run a command."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dislock_url = "redis://nobody/0"

    def run(*args, **how):
        answer = CliRunner().invoke(command, args, obj=SimpleNamespace(app=app), **how)
        if answer.exception is not None and not isinstance(answer.exception, SystemExit):
            raise answer.exception
        return answer

    run.app = app
    return run

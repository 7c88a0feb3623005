"""Tasks whose code has changed since they were parked: their ticket says which lock they have."""

from __future__ import annotations

import pytest

from celery_dislock.parking.store import ENDED
from tests.driven import KEY, Shop
from tests.integration.lua_server import LuaServer
from tests.integration.parked import Line

CHANGED = {
    "key": {"lock_key": "new"},
    "several keys": {"lock_key": ["a", "b"]},
    "mode": {"lock_mode": "shared"},
    "argument": {"lock_key": lambda *_: {}["renamed"]},
}


def test_what_has_ended_itself_leaves_no_mark():
    """Its before_start may have sent it again, or somebody a dead-letter queue."""
    broker = Line(LuaServer())
    broker.ask("first")
    for task in "ab":
        broker.park(task)
    broker.end("first")
    assert broker.leave("a", ENDED) is True
    assert broker.given() == ["a", "b"]
    assert broker.leave("a", ENDED) is False
    broker.run("b")
    assert broker.claim("a") == "granted"


@pytest.fixture
def shop(caplog):
    caplog.set_level("INFO", "celery_dislock")
    with Shop() as shop:
        yield shop


@pytest.fixture
def turn(shop):
    """A task that has its turn, in the queue; return its notes."""
    task = shop.declare()
    with shop.held():
        shop.run(task)
    return shop.sent[0]


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("strategy", ["queue", "skip"])
class TestOtherOptions:
    """Its turn comes to a worker where the task has another key, mode or strategy."""

    @pytest.fixture
    def task(self, shop, turn, changed, strategy):
        if changed == "several keys" and strategy == "queue":
            strategy = "retry"  # they have no line
        return shop.declare(self.look, lock_on_conflict=strategy, **CHANGED[changed])

    @pytest.fixture(autouse=True)
    def shop_of(self, shop):
        self.shop, self.held = shop, []

    def look(self, _task):
        """Be the body: note who has the lock."""
        (state,) = self.shop.dislock.lock_of(KEY).state(0)
        self.held += [(one.id, one.mode) for one in state.holders]

    def test_it_has_the_lock_that_it_waited_for(self, shop, task, turn):
        """On the terms of its ticket; a copy of its turn does not run."""
        with shop.held("new"):
            shop.work()
        assert self.held == [("2", "exclusive")]
        shop.run(task, notes=turn)
        assert (shop.ran, shop.line) == (["2"], [])

    def test_it_waits_there_again_if_its_record_was_lost(self, shop, task, turn):
        """It is not dropped, whatever the strategy is now: it had been promised a turn."""
        shop.server.lose()
        with shop.held():
            shop.work()
            assert (shop.ran, shop.line) == ([], ["2"])
        shop.work()
        assert shop.ran == ["2"]


def test_a_turn_under_another_prefix_is_put_off(shop, caplog):
    """It has not run, and its next message brings the same turn; a forgery is not to blame."""
    task, notes = shop.declare(), {"ticket": [f"old:{{{KEY}}}", "2:0:0"]}
    shop.run(task, notes=notes)
    assert shop.ran == []
    assert f"has its turn for old:{{{KEY}}}" in caplog.text
    assert "did not write" not in caplog.text
    (again,) = shop.put_off
    assert again.message.headers["dislock"].items() >= notes.items()

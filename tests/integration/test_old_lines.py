"""Tasks whose code has changed since they were parked: their ticket says which lock they have."""

import pytest

from celery_dislock import Key
from celery_dislock.parking.store import ENDED
from celery_dislock.scripts import KNOWS
from tests.driven import KEY
from tests.integration.lua_server import LuaServer
from tests.integration.parked import Line

CHANGED = {
    "key": {"lock_key": "new"},
    "several keys": {"lock_key": ["a", "b"]},
    "keys of several limits": {"lock_key": ["a", Key("b", limit=2)]},
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
def turn(shop):
    """A task that has its turn, in the queue; return its notes."""
    task = shop.declare()
    shop.park(task)
    return shop.sent[0]


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("strategy", ["queue", "skip"])
class TestOtherOptions:
    """Its turn comes to a worker where the task has another key, mode or strategy."""

    @pytest.fixture
    def task(self, shop, turn, changed, strategy):
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

    def test_it_is_not_dropped_while_another_has_that_lock(self, shop, task, turn):
        """Whatever the strategy is now: its turn has run out, and it stands in line again."""
        shop.server.advance(1000)
        shop.queue.clear()
        with shop.held(fair=False):
            shop.run(task, notes=turn)
            assert (shop.ran, shop.line) == ([], ["2"])
        shop.work()
        assert shop.ran == ["2"]


@pytest.mark.parametrize("strategy", ["queue", "skip", "retry"])
@pytest.mark.parametrize("done", [None, False, True], ids=["answered", "away", "reply lost"])
def test_a_turn_that_nobody_has_given_is_no_way_to_another_lock(shop, strategy, done):
    """Anybody can write one into a message; until the lock server was asked, no lock is taken."""
    task = shop.declare(lock_on_conflict=strategy)
    with shop.held():
        if done is not None:
            shop.server.fail_once(KNOWS, done=done)
        shop.run(task, notes={"ticket": ["dislock:{free}", "2:0:0"]})
        assert (shop.ran, shop.line) == ([], ["2"] if done is None else [])
        assert shop.dislock.lock_of("free").holders() == []
    shop.work(later=5)
    assert shop.ran == ["2"]


@pytest.mark.parametrize("code", [CHANGED["argument"], CHANGED["several keys"]])
def test_a_turn_that_was_lost_is_one_for_the_lock_of_now(shop, turn, code):
    """By its code, which may fail."""
    task = shop.declare(lock_on_conflict="skip", **code)
    shop.server.lose()
    with shop.held("b"):
        shop.run(task, notes=turn)
    state = "FAILURE" if code is CHANGED["argument"] else "PARKED"
    assert shop.app.AsyncResult("2").state == state


def test_a_turn_is_not_run_under_another_lock_in_an_outage(shop, turn):
    """Whether it is known cannot be asked, and so it is put off."""
    shop.declare(lock_key="new")
    shop.server.away = True
    shop.work()
    assert shop.ran == []
    shop.server.away = False
    shop.work(later=60)
    assert (shop.ran, shop.line) == (["2"], [])


def test_a_turn_under_another_prefix_is_put_off(shop, caplog):
    """It has not run, and its next message brings the same turn; a forgery is not to blame."""
    task, notes = shop.declare(), {"ticket": [f"old:{{{KEY}}}", "2:0:0"]}
    shop.run(task, notes=notes)
    assert shop.ran == []
    assert f"has its turn for old:{{{KEY}}}" in caplog.text
    assert "did not write" not in caplog.text
    (again,) = shop.put_off
    assert again.message.headers["dislock"].items() >= notes.items()


def test_a_turn_that_may_not_be_known_is_no_way_to_another_lock(shop):
    """That question got no answer, and the next one does: nobody knows which lock it may take."""
    task = shop.declare()
    shop.server.fail_once(KNOWS)
    with shop.held("free"):
        shop.run(task, notes={"ticket": ["dislock:{free}", "2:0:0"]})
        assert (shop.ran, len(shop.put_off)) == ([], 1)
        shop.work(later=60)
    assert shop.ran == ["2"]

"""Tasks that leave the line in which they were parked: their locks are others now, or elsewhere.

Their turn is for the lock that they waited for; they ask for those of now.
"""

from __future__ import annotations

import time

import pytest

from celery_dislock import scripts
from celery_dislock.parking.process import runtime_of
from tests.driven import KEY, Shop
from tests.integration.lua_server import START, LuaServer
from tests.integration.parked import ANYBODY, ENDED, LOCK, Line

OTHER_STORE = "f" * 16
OLD = f"dislock:{{{KEY}}}"  # the lock that a task has waited for
SEVERAL = {"lock_key": ["a", "b"], "lock_on_conflict": "skip"}
NO_LOCK = {"lock_limit": None, "lock_unique_until": "start", "lock_on_conflict": "skip"}


class TestScripts:
    """A delivery has taken a task out of its line, where the task has other locks or none."""

    @pytest.fixture
    def server(self):
        return LuaServer()

    @pytest.fixture
    def broker(self, server):
        broker = Line(server)
        broker.ask("first")
        broker.park("a")
        return broker

    @pytest.fixture
    def left(self, broker):
        """The task "a" had its turn, and was put off by a worker that takes other locks for it."""
        broker.end("first")
        assert broker.withdraw("a", "that one") is True

    def test_who_moves_out_runs_elsewhere(self, broker):
        """Its turn is given on, and it is not done here; sent again, it is not either."""
        broker.park("b")
        broker.end("first")
        assert broker.given() == ["a"]
        for _ in range(2):
            assert broker.move_out("a") is False
        assert broker.given() == ["b"]
        assert broker.claim("a") == "refused"

    def test_what_goes_on_with_it_is_parked_again_and_runs_once(self, broker, left):
        """It has its turn as any other, and only then a copy finds the mark of what has ended."""
        broker.ask("b")
        assert broker.park("a", goes_on="that one") == "parked"
        broker.park("c")
        broker.end("b")
        assert broker.given() == ["a", "a"]
        broker.run("a")
        for goes_on in ("", "that one", ANYBODY):
            assert broker.claim("a", 3, goes_on=goes_on) == "done"

    def test_it_moves_on_to_a_third_lock(self, broker, left):
        """Its key was changed twice: only a copy is held to be done."""
        assert broker.move_out("a") is True
        for goes_on in ("that one", ANYBODY):
            assert broker.move_out("a", goes_on) is False

    def test_a_message_that_nobody_can_read_is_set_aside_all_the_same(self, broker, left):
        """It was parked again: the mark of its former life does not keep it at the head."""
        broker.ask("b")
        broker.park("a", goes_on="that one")
        broker.park("c")
        broker.end("b")
        assert broker.given() == ["a", "a"]
        assert [turn.ticket for turn in broker.lines.set_aside(LOCK, "a:0:0", b"?")] == ["c:0:0"]

    def test_what_has_ended_itself_leaves_no_mark(self, broker):
        """Its before_start may have sent it again, or somebody a dead-letter queue."""
        broker.park("b")
        broker.end("first")
        assert broker.withdraw("a", ENDED) is True
        assert broker.given() == ["a", "b"]
        assert broker.withdraw("a", ENDED) is False
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


class TestOtherLocks:
    """Its turn comes to a worker where the task has another key, several, or none."""

    def test_with_another_key_it_waits_there(self, shop, turn):
        """It leaves the old line, is parked anew, and runs once."""
        task = shop.declare(lock_key="new")
        with shop.held("new"):
            shop.work()
            assert (shop.ran, shop.line) == ([], [])
            assert [one.id for one in shop.dislock.lock_of("new").line(9)] == ["2"]
        shop.work()
        shop.run(task, notes=turn)
        assert shop.ran == ["2"]

    @pytest.mark.parametrize("ran", [False, True])
    def test_it_runs_under_the_new_key_unless_it_is_done(self, shop, turn, ran):
        """It left with an earlier delivery, whose process died, or it has run under the old key."""
        if ran:
            shop.work()
        else:
            shop.other.move_out("2")
        shop.run(shop.declare(lock_key="new"), notes=turn)
        assert shop.ran == ["2"]

    def test_a_full_line_there_puts_it_off(self, shop, turn):
        """It is never skipped: it was in line before."""
        task = shop.declare(lock_key="new", lock_queue_limit=1)
        with shop.held("new"):
            shop.queue.clear()
            shop.run(task, "3")
            shop.run(task, notes=turn)
            assert shop.app.AsyncResult("2").state == "RETRY"
        shop.work(later=60)
        assert shop.ran == ["3", "2"]

    @pytest.mark.parametrize("then", ["several", "one"])
    def test_with_several_keys_it_comes_again_until_it_has_them(self, shop, turn, then):
        """It is not dropped, also by a worker that has the old key; a copy of its turn is."""
        task = shop.declare(**SEVERAL)
        with shop.held("b"):
            shop.work()
            shop.work(later=60)
            shop.run(task, notes=turn)
            assert (shop.ran, shop.app.AsyncResult("2").state) == ([], "RETRY")
        if then == "one":
            shop.declare(lock_on_conflict="skip")
            with shop.held():
                shop.work(later=60)
                assert (shop.ran, shop.line) == ([], ["2"])
        shop.work(later=60)
        assert shop.ran == ["2"]
        assert shop.other.records().done == {"2"}

    @pytest.mark.parametrize("script", [scripts.WITHDRAW, scripts.ACQUIRE])
    def test_a_lost_reply_does_not_make_it_a_new_task(self, shop, turn, script):
        """It may not know that it has left its line; the strategy "skip" does not drop it later."""
        shop.declare(**SEVERAL)
        shop.server.fail_once(script, done=True)
        shop.work()
        assert shop.ran == []
        with shop.held("b") if script is scripts.WITHDRAW else shop.held():
            shop.work(later=60)
        shop.work(later=60)
        assert shop.ran == ["2"]

    @pytest.mark.parametrize("options", [{}, SEVERAL])
    def test_a_turn_that_is_delivered_again_is_not_taken_for_a_copy(self, shop, turn, options):
        """The worker that took it out of line has died: its message is all that is left."""
        assert shop.other.withdraw("2", "another delivery")
        shop.queue.clear()
        task = shop.declare(**options)
        shop.run(task, notes=turn)
        assert shop.ran == []
        shop.send(task, "2", notes=turn)
        shop.queue[-1]["properties"]["delivery_info"]["redelivered"] = True
        shop.work()
        assert shop.ran == ["2"]

    @pytest.mark.parametrize("away", [False, True])
    def test_with_no_lock_it_leaves_its_line_and_runs(self, shop, turn, caplog, away):
        """Once; with the lock server away it may run again, and the log says so."""
        task = shop.declare(**NO_LOCK)
        shop.server.away = away
        shop.work()
        assert shop.ran == ["2"]
        told = f"runs without a lock, and stays in line for lock {OLD}: it may run again"
        assert (told in caplog.text) is away
        if not away:
            shop.run(task, notes=turn)
            assert shop.ran == ["2"]


class TestOtherStores:
    """Its turn is on another lock server, or under another prefix, or was."""

    @pytest.mark.parametrize("lock", [OLD, f"old:{{{KEY}}}"])
    @pytest.mark.parametrize("away", [False, True])
    def test_a_turn_there_is_put_off(self, shop, caplog, lock, away):
        """It has not run, and its next message brings the same turn; a forgery is not to blame."""
        task = shop.declare()
        if away:  # whether it is another one cannot be known
            shop.server.fail_once(scripts.STORE)
        notes = {"ticket": [lock, "2:0:0"], "store": OTHER_STORE}
        shop.run(task, notes=notes)
        assert shop.ran == []
        assert f"has its turn for lock {KEY!r} on another lock server" in caplog.text
        assert "celery dislock drain" in caplog.text
        assert "did not write" not in caplog.text
        (again,) = shop.put_off
        assert again.message.headers["dislock"].items() >= notes.items()

    def test_it_comes_less_often_after_some_time(self, shop):
        """It may be forged: no worker will ever take it."""
        task = shop.declare()
        for times, most in ((90, 12.5), (100, 75.0)):
            notes = {"ticket": [OLD, "2:0:0"], "store": OTHER_STORE, "put_off": times}
            shop.run(task, notes=notes)
            now = time.time() + shop.clock() - START
            assert 0.6 * most * 0.7 <= shop.put_off[-1].due - now <= most

    @pytest.mark.parametrize("lock", [OLD, f"old:{{{KEY}}}"])
    @pytest.mark.parametrize("drained", [False, True])
    def test_a_turn_in_a_store_that_was_taken_over_is_one_here(self, shop, lock, drained):
        """Of what nothing is known it runs, unless all was sent here that had not run."""
        task = shop.declare()
        shop.identity.take_over(OTHER_STORE, drained=drained)
        shop.run(task, notes={"ticket": [lock, "2:0:0"], "store": OTHER_STORE})
        assert shop.ran == ([] if drained else ["2"])

    @pytest.mark.parametrize("asks", ["confirm", "whose"])
    def test_a_store_that_has_lost_its_data_is_still_the_same(self, shop, turn, caplog, asks):
        """Another process has named it anew: tasks on their way under the old name run."""
        before = shop.identity.name()
        shop.server.lose()
        assert runtime_of(shop.app).new_process().identity.name() != before
        shop.identity.confirm() if asks == "confirm" else shop.identity.whose("e" * 16)
        assert "has lost its data" in caplog.text
        shop.work()
        assert shop.ran == ["2"]

    def test_a_store_of_which_nobody_has_asked_gets_its_name_back(self, shop):
        """It was emptied, and this process comes first."""
        before = shop.identity.name()
        shop.server.lose()
        assert shop.identity.confirm() == before

    def test_a_turn_of_its_own_store_costs_no_question(self, shop, turn):
        """The name is asked for once."""
        shop.server.fail_once(scripts.STORE)
        shop.work()
        assert shop.ran == ["2"]

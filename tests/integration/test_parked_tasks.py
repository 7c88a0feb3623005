"""A task that is parked, its turn, its copies, and its end, as its workers tell them."""

import logging
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone

import pytest
from celery import chain
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from kombu import Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from celery_dislock import SingletonTask, scripts
from celery_dislock.messages.unrun import put_off
from celery_dislock.parking.process import runtime_of
from celery_dislock.tasks.actions import Actions
from tests.driven import KEY, Shop
from tests.integration.parked import LOCK
from tests.unit.deliveries import deliver

TURN = {"ticket": [LOCK, "2:0:0"]}  # of the task "2"
NAMED = f"for lock {KEY!r}"


def assert_done(shop, task, caplog, ran=("2",), **how):
    """Check that copies of the task, marked and not, are acknowledged without running."""
    for notes in (TURN, None):
        caplog.clear()
        shop.run(task, notes=notes, **how)
        assert f"{task.name}[2] acknowledged unrun: it has run under lock {KEY!r}" in caplog.text
    assert shop.ran == list(ran)


TOLD = ["expires", "reply_to", "timelimit", "shadow", "retries", "root_id", "parent_id", "stamps"]


def told_of(request):
    """Return what a task can know of the message that it came with."""
    places = {name: request.delivery_info[name] for name in ("exchange", "routing_key", "priority")}
    return {name: request.get(name) for name in TOLD} | places


def park_unanswered(shop, *, done=True):
    """Let a task be parked, or its request be lost, and let no reply come."""
    shop.server.fail_once(scripts.PARK, done=done, skip=1)  # it asks before
    result = shop.run(shop.declare())
    assert (shop.line, result.state) == (["2"] if done else [], "PARKED")
    return result


class TestParking:
    def test_it_is_parked_as_it_came(self, shop, caplog):
        """It stays out of its queue, says what it waits for, and runs as if it had just come."""
        task = shop.declare(lambda self, number: [number, self.request.tenant])
        with shop.held():
            shop.server.advance(720)
            result = shop.run(task, "2", 7, headers={"tenant": "seven"})
            assert shop.line == ["2"]
            told = result.result
            holder = told.pop("holder")
            assert (result.state, told) == ("PARKED", {"key": KEY, "place": 1})
            assert holder.startswith("thread MainThread on ")
            parked = f"shop.export[2] parked: place 1 in line {NAMED}, held by {holder}, for 12 min"
            assert parked in caplog.text
            assert (shop.ran, list(shop.queue)) == ([], [])
        assert [notes["ticket"] for notes in shop.sent] == [TURN["ticket"]]
        shop.work()
        assert result.get() == [7, "seven"]
        assert_done(shop, task, caplog)
        assert result.get() == [7, "seven"]

    @pytest.mark.parametrize("strategy", ["queue", "retry"])
    def test_it_comes_again_as_it_was_sent(self, strategy):
        """From its exchange, with its options, stamps and callbacks, parked or put off."""
        options = {
            "exchange": "by-topic",
            "routing_key": "parked.some.words",
            "priority": 3,
            "expires": datetime.now(timezone.utc) + timedelta(hours=1),
            "reply_to": "somewhere",
            "time_limit": 50,
            "soft_time_limit": 40,
            "shadow": "a shadow",
            "retries": 1,
            "root_id": "root",
            "parent_id": "parent",
        }
        queue = Queue("own", Exchange("by-topic", "topic"), routing_key="parked.#")
        with Shop(task_queues=[queue]) as shop:
            task = shop.declare(lambda self: told_of(self.request), lock_on_conflict=strategy)
            note = shop.declare(name="note", lock_key=False)
            results = []
            for task_id in ("1", "2"):
                signature = task.s().set(link=note.si().set(task_id=f"{task_id}-linked", **options))
                signature.stamp(tenant="seven")
                with shop.held() if task_id == "2" else nullcontext():
                    result = signature.apply_async(task_id=task_id, declare=[queue], **options)
                    results.append(result)
                    shop.work()
                shop.work(later=60)
            first, second = (result.result for result in results)
            assert first["stamps"] == {"tenant": "seven"}
            assert (first["retries"], first["timelimit"], first["priority"]) == (1, [50, 40], 3)
            assert second == first
            assert shop.ran == ["1", "1-linked", "2", "2-linked"]

    def test_the_state_is_stored_before_it_is_in_line(self, shop, monkeypatch):
        """Once in line it may run and end anywhere; a copy of it stores nothing."""
        stored, store = [], shop.app.backend.store_result

        def store_result(task_id, result, state, **options):
            stored.append((state, shop.line))
            return store(task_id, result, state, **options)

        monkeypatch.setattr(shop.app.backend, "store_result", store_result)
        task = shop.declare()
        with shop.held():
            shop.run(task)
            shop.run(task)
            assert stored == [("PARKED", [])]

    @pytest.mark.parametrize(("limit", "place"), [(None, 3), (2, 2), (3, 3)])
    def test_no_place_is_beyond_the_end_of_the_line(self, shop, limit, place):
        """Who comes to a full line takes another's place in it."""
        task = shop.declare(lock_queue_limit=limit, lock_queue_overflow="replace")
        with shop.held():
            *_, last = (shop.run(task, name) for name in ("a", "b", "c"))
            assert last.result["place"] == place

    def test_who_has_the_turn_is_named(self, shop):
        """The lock may be reserved for another task in line."""
        task = shop.declare()
        shop.park(task, "9")
        shop.queue.clear()
        assert shop.run(task).result["holder"] == "task 9, whose turn it is"

    @pytest.mark.parametrize("why", ["ignored", "away"])
    def test_it_is_parked_though_no_state_is_stored(self, shop, backend_away, caplog, why):
        """The work counts, not what is told of it; the log says what is missing."""
        task = shop.declare(ignore_result=why == "ignored")
        with shop.held():
            with backend_away("store_result"):
                result = shop.run(task)
            assert (shop.line, result.state) == (["2"], "PENDING")
            told = "[2] is parked, and its result does not say so: backend is away"
            assert (told in caplog.text) == (why == "away")

    @pytest.mark.parametrize(("notes", "state"), [(None, "REVOKED"), (TURN, "RETRY")])
    def test_a_full_line_ends_the_newcomer(self, shop, caplog, notes, state):
        """One that was parked, and whose record was lost, comes again until there is room."""
        task = shop.declare(lock_queue_limit=1)
        with shop.held():
            shop.run(task, "a")
            result = shop.run(task, notes=notes)
            assert result.state == state
            assert f"the line {NAMED} is full: 1 task" in caplog.text
        shop.work()
        shop.work(later=60)
        assert shop.ran == ["a", *(["2"] if notes else [])]

    @pytest.mark.parametrize("parks", [False, True], ids=["it asks", "it is parked"])
    @pytest.mark.parametrize("done", [False, True], ids=["request", "reply"])
    def test_nothing_is_lost_with_the_lock_server_away(self, shop, caplog, parks, done):
        """It comes again as it came, and does not run without its lock; it may be in line."""
        shop.app.conf.dislock_on_unavailable = "run" if parks else "retry"
        task = shop.declare(lambda self: (self.request.retries, self.request.tenant))
        with shop.held():
            shop.server.fail_once(scripts.PARK, done=done, skip=int(parks))
            result = shop.run(task, headers={"tenant": "seven"}, retries=2)
            assert (result.state, shop.ran) == ("PARKED" if parks else "RETRY", [])
            assert "without its lock" not in caplog.text
        shop.work(later=60)
        shop.work(later=60)
        assert shop.ran == ["2"]
        assert result.get() == [2, "seven"]

    @pytest.mark.parametrize(
        "options",
        [
            {"lock_key": "other"},
            {"lock_key": ["other", KEY]},
            {"lock_on_conflict": "skip"},
            {"lock_key": "other", "lock_queue_limit": 1},
        ],
        ids=["another key", "another order", "another strategy", "another line, which is full"],
    )
    def test_one_that_may_be_in_line_is_looked_for_there(self, shop, options):
        """Its parking got no reply, and its code names another lock when it comes again."""
        with shop.held(), shop.held("other"):
            result = park_unanswered(shop)
            task = shop.declare(**options)
            if "lock_queue_limit" in options:
                shop.run(task, "3")
            shop.work(later=60)
            assert (shop.ran, shop.line, result.state) == ([], ["2"], "PARKED")
        shop.work(later=60)
        assert (shop.ran.count("2"), result.state) == (1, "SUCCESS")

    @pytest.mark.parametrize("came", ["new", "with its turn"])
    def test_one_that_may_have_run_meanwhile_keeps_its_result(self, shop, monkeypatch, came):
        """Its worker gets no reply; before it gives up, another has run the task, which failed."""
        task, other = shop.declare(), shop.other

        def put_off_late(*args, **how):
            if came == "new":
                other.end("first")
            assert other.claim("2") == "granted"
            other.end("2", copy=2)
            shop.app.backend.mark_as_failure("2", ValueError("no"))
            put_off(*args, **how)

        if came == "new":
            other.ask("first")
            shop.server.fail_once(scripts.PARK, done=True, skip=1)
        else:
            shop.park(task)
            shop.server.fail_once(scripts.PARK)
        monkeypatch.setattr("celery_dislock.tasks.acquisition.put_off", put_off_late)
        result = shop.run(task) if came == "new" else shop.app.AsyncResult("2")
        shop.work()
        assert len(shop.put_off) == 1
        shop.work(later=60)
        assert (shop.ran, list(shop.queue), list(shop.put_off)) == ([], [], [])
        assert (result.state, str(result.result)) == ("FAILURE", "no")

    def test_a_copy_that_comes_in_an_outage_leaves_its_end(self, shop):
        """The broker has got no acknowledgement of its parking; the task has failed meanwhile."""
        task = shop.declare(raising(ValueError("no")))
        result = shop.park(task)
        shop.work()
        for redelivered in True, False:  # then it was put off, and the outage lasts
            shop.server.fail_once(scripts.PARK)
            notes, info = {"put_off": int(not redelivered)}, {"redelivered": redelivered}
            deliver(task, "2", notes=notes, delivery_info=info)
            assert (result.state, str(result.result)) == ("FAILURE", "no")

    def test_a_copy_does_not_start_what_has_ended(self, shop):
        """With ``task_track_started``, Celery stores STARTED before it calls a task."""
        shop.app.conf.task_track_started = True
        states = []

        def body(self):
            states.append(shop.app.AsyncResult("2").state)
            raise ValueError("no")

        task = shop.declare(body)
        with shop.held():
            result = shop.run(task)
            assert result.state == "PARKED"
        shop.work()
        shop.run(task, notes=TURN)
        assert (states, result.state, str(result.result)) == (["STARTED"], "FAILURE", "no")

    def test_one_that_may_be_in_line_is_not_skipped(self, shop):
        """The line has no room when it comes again, and a request may still be on its way there."""
        with shop.held():
            result = park_unanswered(shop, done=False)
            shop.run(shop.declare(lock_queue_limit=1), "3")
            shop.work(later=60)
            assert (shop.line, result.state) == (["3"], "RETRY")
        shop.work()
        shop.work(later=60)
        assert (shop.ran, result.state) == (["3", "2"], "SUCCESS")


class TestCopies:
    @pytest.mark.parametrize("how", ["retry", "replace"])
    def test_what_continues_it_is_new_work(self, shop, caplog, how):
        """It has the id and the headers, a ticket of its own, and goes to the end of the line."""
        begins = ["2"]

        def body(self):
            if self.request.id in begins:
                begins.clear()
                raise self.retry(countdown=0) if how == "retry" else self.replace(self.si())

        task = shop.declare(body)
        shop.park(task, "2", "3")
        shop.work()
        assert shop.ran == ["2", "3", "2"]
        assert_done(shop, task, caplog, ran=["2", "3", "2"])

    def test_one_of_what_runs_is_put_off(self, shop, caplog):
        """It may be the only one if that process dies; it keeps its ticket, and is not parked."""
        task = shop.declare()
        shop.park(task)
        shop.queue.clear()
        assert shop.other.claim("2") == "granted"
        shop.run(task, notes=TURN)
        assert (shop.ran, shop.line) == ([], [])
        shop.other.end("2", copy=2)
        assert shop.work(later=120) == 1
        assert shop.ran == []
        assert "shop.export[2] acknowledged unrun" in caplog.text

    def test_one_of_what_is_done_keeps_no_key(self, shop):
        """Somebody has sent it anew under that id, and reserved its key; that ends with it."""
        task = shop.declare(lock_unique_until="end")
        shop.park(task)
        shop.work()
        shop.send(task, "2")
        assert shop.dislock.lock_of(KEY).state()[0].reservation is not None
        shop.work()
        assert shop.dislock.lock_of(KEY).state()[0].reservation is None
        assert shop.ran == ["2"]

    @pytest.mark.parametrize("came", ["put off", "with its turn", "redelivered"])
    def test_one_of_what_is_done_leaves_the_key_to_its_retry(self, shop, came):
        """Both have the id and the reservation of the first message; the retry waits."""

        def body(self):
            if not self.request.retries:
                raise self.retry(countdown=600)

        task = shop.declare(body, lock_unique_until="end")
        shop.park(task)
        (turn,) = shop.sent
        shop.work()
        notes = {key: turn[key] for key in ("unique", "v")}
        notes |= {"put off": {"put_off": 1}, "with its turn": turn, "redelivered": {}}[came]
        info = {"redelivered": came == "redelivered"}
        ended = deliver(task, "2", headers={"dislock": notes}, delivery_info=info)
        assert (ended.info.state, shop.ran) == ("IGNORED", ["2"])
        assert task.apply_async().duplicate


def raising(error):
    def body(_):
        if error is not None:
            raise error

    return body


class TestItsEnd:
    @pytest.mark.parametrize("late", [True, False])
    @pytest.mark.parametrize("error", [None, ValueError("no"), Retry("later"), Ignore()])
    def test_its_work_is_not_done_again(self, shop, caplog, receive, error, late):
        """However its body ends; until its result is stored, a copy waits if one may come."""
        task, at_release = shop.declare(raising(error), acks_late=late), []
        shop.park(task)

        def released(**_):
            kept = shop.other.records()
            at_release.append((kept.running, kept.done))

        receive("lock_released", released)
        shop.work()
        assert at_release == [(["2"], set()) if late else ([], {"2"})]
        assert shop.other.records().done == {"2"}
        assert_done(shop, task, caplog)

    @pytest.mark.parametrize(
        "error", [Reject("no", requeue=True), SystemExit(), KeyboardInterrupt()]
    )
    def test_a_delivery_that_comes_again_runs(self, shop, error):
        """The message goes back to its queue, or the worker is being stopped."""
        errors = [error]
        task = shop.declare(lambda _: raising(errors.pop() if errors else None)(0), acks_late=True)
        shop.park(task)
        try:
            shop.work()
        except BaseException as exc:  # noqa: BLE001 -- SystemExit and the like come through
            assert exc is error  # noqa: PT017
            shop.run(task, notes=TURN)
        assert shop.ran == ["2", "2"]

    @pytest.mark.parametrize(
        ("error", "options"),
        [
            (Reject("no"), {}),
            (ValueError("no"), {"acks_on_failure_or_timeout": False}),
        ],
    )
    def test_a_message_that_was_dead_lettered_runs(self, shop, caplog, error, options):
        """RabbitMQ brings it back after a while, or an operator does; then its work is done."""
        errors = [error]
        task = shop.declare(
            lambda _: raising(errors.pop() if errors else None)(0), acks_late=True, **options
        )
        shop.park(task)
        shop.work()
        assert (shop.other.records().running, shop.other.records().done) == ([], set())
        assert shop.run(task, notes=TURN).state == "SUCCESS"
        assert_done(shop, task, caplog, ran=["2", "2"])

    def test_a_message_that_was_acknowledged_early_is_not_dead_lettered(self, shop, caplog):
        """What the body rejects then is gone; what comes is a copy."""
        task = shop.declare(raising(Reject("no")), acks_late=False)
        shop.park(task)
        shop.work()
        assert_done(shop, task, caplog)

    @pytest.mark.parametrize("how", ["retry", "replace"])
    def test_one_whose_broker_does_not_take_what_continues_it_comes_again(
        self, shop, monkeypatch, how
    ):
        """The broker is away, has its message still, and delivers it again when it is back."""
        away = [True]
        publish = Producer.publish

        def refusing(producer, body, **options):
            if away:
                raise OperationalError(away.pop())
            return publish(producer, body, **options)

        def body(self):
            if away:
                monkeypatch.setattr(Producer, "publish", refusing)
                raise self.retry() if how == "retry" else self.replace(self.si())

        task = shop.declare(body, acks_late=True)
        shop.park(task)
        shop.work()
        assert (shop.ran, away) == (["2"], [])
        result = shop.run(task, notes=TURN)
        shop.work(later=60)
        assert (shop.ran, result.state) == (["2", "2"], "SUCCESS")
        assert shop.other.records().done == {"2"}

    def test_a_lease_that_is_left_to_expire_ends_its_ticket_all_the_same(self, shop, caplog):
        """The lock is kept until its expiry; the work is done."""
        task = shop.declare(release_on_success=False)
        shop.park(task)
        shop.work()
        assert_done(shop, task, caplog)
        assert len(shop.other.owners()) == 1

    def test_its_end_is_told_when_the_lock_server_answers_again(self, shop, caplog, receive):
        """The lock server goes away after the release: until it is back, a copy may run."""
        task = shop.declare(acks_late=True)
        result = shop.park(task)

        receive("lock_released", lambda **_: setattr(shop.server, "away", True))
        shop.work()
        assert result.state == "SUCCESS"
        assert "Task shop.export[2] has ended, and a copy of it may run again until" in caplog.text
        shop.server.away = False
        runtime_of(shop.app).process.watchdog.ended()  # sends what waits
        shop.server.advance(60)
        assert_done(shop, task, caplog)

    def test_other_strategies_leave_no_mark(self, shop):
        """A task that cannot be parked needs none."""
        shop.run(shop.declare(lock_on_conflict="skip"))
        assert shop.other.records().done == set()

    def test_a_turn_is_claimed_whatever_the_strategy_is_now(self, shop, caplog):
        """And its work is done once."""
        shop.park(shop.declare())
        task = shop.declare(lock_on_conflict="skip")
        shop.work()
        assert shop.ran == ["2"]
        shop.run(task, notes=TURN)
        assert shop.ran == ["2"]


class TestRevoked:
    """The main process discards it before any guard sees it."""

    @pytest.fixture
    def parked(self, shop):
        """Two tasks that have been in line, the first of which is revoked."""
        task = shop.declare()
        with shop.held():
            shop.run(task)
            shop.run(task, "3")
            shop.app.control.revoke("2")

    @pytest.mark.parametrize("strategy", ["queue", "skip"])
    def test_a_revoked_task_leaves_the_line_of_its_header(self, shop, parked, strategy):
        """Its task may not park any more; the next has its turn."""
        shop.declare(lock_on_conflict=strategy)
        shop.work()
        assert (shop.ran, shop.other.records().done) == (["3"], {"2", "3"})

    @pytest.mark.parametrize("ticket", ["9:0:0", "2:1:0", "2:0:1", "bytes", ""])
    def test_a_revoked_task_leaves_the_line_for_itself_alone(self, shop, ticket):
        """A header that names another task, or other work of this one, takes nobody out."""
        task = shop.declare()
        with shop.held():
            shop.run(task, "9")
            shop.run(task)
            before = shop.server.contents()
            shop.send(task, "2", notes={"ticket": [LOCK, ticket]})
            shop.app.control.revoke("2")
            shop.work()
            assert shop.server.contents() == before


class TestWhatCannotClaimItsTurn:
    def park(self, shop):
        """Park the task and one behind it, and let it have its turn."""
        task = shop.declare()
        with shop.held():
            return shop.run(task, "2", 1), shop.run(task, "3")

    def aside(self, shop):
        return list(shop.other.records().aside)

    def fail_early(self, shop, error, **options):
        """Declare it anew: it fails before its guard sees it, the first time."""

        def before_start(_, task_id, *__):
            if task_id == "2":
                raise error

        base = type("Base", (SingletonTask,), {"before_start": before_start, "abstract": True})
        return shop.declare(base=base, **options)

    def actions(self, shop):
        return Actions(shop.app, runtime_of(shop.app).process)

    def state(self, shop):
        return shop.app.AsyncResult("2").state

    def set_aside(self, shop):
        """Let the task be set aside, as no worker can run it, and the one behind it run."""
        result, _ = self.park(shop)
        self.fail_early(shop, ValueError("no"))
        shop.work()
        assert (result.state, self.aside(shop), shop.ran) == ("FAILURE", ["2"], ["3"])

    def test_what_is_put_back_is_kept_until_it_runs(self, shop):
        """No worker can run it yet: it is set aside again, as often as it comes."""
        self.set_aside(shop)
        for _ in range(2):
            with shop.held():
                assert [*self.actions(shop).put_back(LOCK, "2:0:0")] == [("2:0:0", "")]
                assert (shop.line, self.aside(shop), self.state(shop)) == (["2"], [], "PARKED")
            shop.work()
            assert (self.aside(shop), self.state(shop)) == (["2"], "FAILURE")
        task = shop.declare()
        with shop.held():
            shop.run(task, "4")
            assert [*self.actions(shop).put_back(LOCK)] == [("2:0:0", "")]
            assert shop.line == ["4", "2"]  # at the end of its line
        shop.work()
        assert (shop.ran, self.aside(shop), shop.line) == (["3", "4", "2"], [], [])
        assert self.state(shop) == "SUCCESS"
        assert [*self.actions(shop).put_back(LOCK)] == []

    def test_what_is_put_back_while_its_broker_is_away_waits_in_line(self, shop, monkeypatch):
        """A sweep gives it its turn."""

        def away(*_, **__):
            raise OperationalError

        self.set_aside(shop)
        shop.declare()
        with monkeypatch.context() as patch:
            patch.setattr(Producer, "publish", away)
            assert [*self.actions(shop).put_back(LOCK, "2:0:0")] == [("2:0:0", "")]
        assert (shop.work(), shop.line) == (0, ["2"])
        shop.sweep()
        shop.work()
        assert shop.ran == ["3", "2"]

    def test_what_runs_is_not_put_back_beside_it(self, shop):
        """Somebody has sent it again, under the same id."""
        self.set_aside(shop)
        with shop.held():
            shop.run(shop.declare(), "2", 1)
            [(_, problem)] = self.actions(shop).put_back(LOCK, "2:0:0")
            assert problem == "it is in line or runs, by another message"
        shop.work()
        assert shop.ran == ["3", "2"]

    def test_a_key_that_cannot_be_built_now_keeps_nobody_from_its_turn(self, shop):
        """An argument was renamed while they were in line."""
        self.park(shop)
        shop.declare(lock_key=lambda: KEY)
        shop.work()
        assert (shop.ran, self.aside(shop), shop.line) == (["2", "3"], [], [])

    def test_a_time_limit_while_its_key_is_built_ends_a_task(self, shop):
        """What a signal raises there is no error of the key."""
        result, following = self.park(shop)

        def struck(*_):
            raise SoftTimeLimitExceeded

        shop.declare(lock_key=struck)
        shop.work()
        assert (result.state, following.state, shop.ran) == ("FAILURE", "FAILURE", [])
        assert (set(self.aside(shop)), shop.line) == ({"2", "3"}, [])

    @pytest.mark.parametrize(
        ("error", "aside"),
        [
            (ValueError("no"), ["2"]),
            (Ignore(), []),
            (Reject("no", requeue=False), []),
            (Retry("later"), []),
        ],
    )
    def test_what_ends_before_its_guard_leaves_its_line(self, shop, error, aside):
        """The next has its turn."""
        self.park(shop)
        self.fail_early(shop, error)
        shop.work()
        assert (shop.ran, self.aside(shop), shop.line) == (["3"], aside, [])

    def test_what_the_broker_gets_back_before_its_guard_keeps_its_turn(self, shop):
        """It comes again, and runs."""
        self.park(shop)
        errors = [Reject("no", requeue=True)]

        def before_start(*_):
            if errors:
                raise errors.pop()

        members = {"before_start": before_start, "abstract": True}
        shop.declare(base=type("Base", (SingletonTask,), members), acks_late=True)
        shop.work()
        assert shop.ran == ["2", "3"]

    @pytest.mark.parametrize("why", [ValueError("no"), Ignore(), "revoked"])
    def test_a_lock_server_that_is_away_keeps_what_cannot_be_run(self, shop, caplog, why):
        """It has its turn again, and ends so again; the log says so."""
        self.park(shop)
        if why == "revoked":
            shop.app.control.revoke("2")
        else:
            self.fail_early(shop, why)
        shop.server.away = True
        shop.work()
        told = f"Parked task shop.export[2:0:0] {NAMED} cannot be run, and stays in line until "
        assert [r.levelno for r in caplog.records if told in r.message] == [logging.ERROR]
        shop.server.away = False
        shop.server.advance(60)
        shop.sweep()
        shop.work()
        assert shop.ran == ["3"]

    def test_another_task_of_the_same_id_takes_nobody_out(self, shop):
        """Who may write to one queue sends a task of his own, with the id and the ticket."""
        with shop.held():
            shop.run(shop.declare())
            shop.run(shop.declare(name="shop.spy", lock_key="mine"), notes=TURN)
            shop.run(self.fail_early(shop, ValueError(), name="shop.spy"), notes=TURN)
            assert shop.line == ["2"]


# How a record cannot be read, or who meets one that cannot, and what the log says of the task.
UNREADABLE = {
    "its turn": f"2:0:0 {NAMED} cannot be run, and is set aside in {LOCK}:aside: ",
    "gone": "Parked task 2:0:0 cannot be run: its message is gone",
    "message": f"2:0:0 {NAMED} cannot be run, and is set aside in {LOCK}:aside: it begins",
    "newer": "2:0:0",
    "replaced": "2:0:0",
    "dropped": "2:0:0",
}
REPLACING = {"lock_queue_limit": 1, "lock_queue_overflow": "replace"}


def spoil_message(shop):
    """Write something else in the place of the message of the task "2"."""
    record = shop.other.record_of("2")
    shop.other.spoil("2", (record[: record.index(b"{")] + b"rubbish").ljust(len(record)))


class TestGivingTurns:
    """Whoever has released the lock has done its own task, and is not disturbed."""

    @pytest.fixture
    def broken(self, shop, monkeypatch):
        """Let the broker refuse messages: all after so many, or those of some tasks."""
        publish, sent = Producer.publish, []

        def broken(error, most=0, only=None):
            def refusing(producer, body, **options):
                task_id = options["headers"]["id"]
                if only == task_id or (only is None and len(sent) >= most):
                    raise error
                sent.append(task_id)
                return publish(producer, body, **options)

            monkeypatch.setattr(Producer, "publish", refusing)

        broken.mend = lambda: monkeypatch.setattr(Producer, "publish", publish)
        return broken

    @pytest.mark.parametrize("error", [OperationalError("refused"), OSError("refused")])
    def test_what_a_broker_does_not_take_is_the_next_sweeps_to_send(
        self, shop, broken, caplog, error
    ):
        """At once: else a long outage made each turn a long one."""
        task = shop.declare(lock_mode="shared")
        with shop.held():
            for name in "123":
                shop.run(task, name)
            broken(error, most=1)
        assert [notes["ticket"][1] for notes in shop.sent] == ["1:0:0"]
        [record] = [one for one in caplog.records if one.levelno == logging.WARNING]
        named = f"shop.export[2] {NAMED}, shop.export[3] {NAMED}"
        assert f"will be sent again by the next sweep: {named}: refused" in record.message
        broken.mend()
        shop.sweep()
        shop.work()
        assert shop.ran == ["1", "2", "3"]

    def test_a_message_that_the_broker_refuses_holds_up_nobody(self, shop, broken, caplog):
        """What its client cannot send is reported by itself, and the others are published."""
        task = shop.declare(lock_mode="shared")
        with shop.held():
            for name in "12":
                shop.run(task, name)
            broken(TypeError("no such header"), only="1")
        shop.work()
        assert shop.ran == ["2"]
        told = f"their turn has run out: shop.export[1] {NAMED}: no such header"
        assert told in caplog.text

    def test_with_both_servers_away_they_come_when_their_turns_have_run_out(
        self, shop, broken, caplog
    ):
        """What can be done is done."""
        task = shop.declare()
        with shop.held():
            shop.run(task)
            broken(OperationalError("refused"))
            shop.server.fail_once(scripts.GIVE_BACK)
        assert "when their turns have run out, as the lock server is away, too" in caplog.text
        broken.mend()
        shop.sweep()
        assert shop.work() == 0
        shop.server.advance(60)
        shop.sweep()
        shop.work()
        assert shop.ran == ["2"]

    @pytest.mark.parametrize(("way", "said"), UNREADABLE.items())
    def test_its_caller_is_told_that_it_cannot_be_read(self, shop, caplog, way, said):
        """Whoever meets the damage, its result, the log and people know; the next has its turn."""
        task = shop.declare()
        with shop.held():
            if way == "newer":  # the first in line is another
                shop.run(task, "1")
            result = shop.run(task)
            if way != "newer":
                shop.run(task, "3")
            assert result.state == "PARKED"
            if way == "gone":
                shop.other.lose("2", place=False)
            elif way == "message":
                spoil_message(shop)
            elif way == "replaced":
                shop.other.lose("2")
                shop.other.client.hset(f"{LOCK}:replaced", "2:0:0", "rubbish")
                shop.sweep()
            else:
                shop.other.spoil("2")
            if way == "newer":
                shop.run(shop.declare(**REPLACING), "3")
            elif way == "dropped":
                actions = Actions(shop.app, runtime_of(shop.app).process)
                assert actions.drop(LOCK, "2:0:0") is True
        shop.work()
        assert result.state == "FAILURE"
        assert str(result.result).startswith(f"it was parked {NAMED}, and cannot be run: ")
        assert shop.ran == ["3"]
        assert list(shop.other.records().aside) == ([] if way == "gone" else ["2"])
        assert said in caplog.text

    def test_a_message_that_cannot_be_read_stays_in_line_in_an_outage(self, shop, caplog):
        """It could not be set aside, and nobody passes it."""
        task = shop.declare()
        with shop.held():
            shop.run(task)
            shop.run(task, "3")
            spoil_message(shop)
            shop.server.fail_once(scripts.LEAVE)
        shop.work()
        assert f"2:0:0 {NAMED} cannot be run, and stays in line until the" in caplog.text
        assert (shop.other.records().aside, shop.ran) == ({}, [])

    @pytest.mark.parametrize("stored", ["SUCCESS", "STARTED", None])
    def test_a_result_that_says_otherwise_is_left(self, shop, stored):
        """It may have run, or its result is ignored."""
        task = shop.declare()
        with shop.held():
            shop.run(task)
            shop.app.backend.forget("2")
            if stored:
                shop.app.backend.store_result("2", 7, stored)
            shop.other.spoil("2")
        shop.work()
        assert shop.app.AsyncResult("2").state == (stored or "PENDING")

    def test_a_backend_that_is_away_keeps_the_next_from_nothing(self, shop, backend_away, caplog):
        """The result stays as it is, and the log says so."""
        task = shop.declare()
        with backend_away("mark_as_failure"):
            with shop.held():
                result = shop.run(task)
                shop.run(task, "3")
                shop.other.spoil("2")
            shop.work()
        assert (shop.ran, result.state) == (["3"], "PARKED")
        assert "Task None[2] cannot be run, and its result does not say so: backend" in caplog.text


NEWER = f"a newer task took its place in line for lock {KEY!r}: task 3"


class TestWhoLostItsPlace:
    def test_one_that_is_alone_ends_as_revoked(self, shop, caplog):
        """Its result says why, and its key is free; who takes it off the list logs it."""
        task = shop.declare(lock_unique_until="end", **REPLACING)
        with shop.held():
            first = shop.run(task)
            [state] = shop.dislock.lock_of(KEY).state()
            assert state.reservation.id == "2"
            shop.app.conf.dislock_enabled = None
            task = shop.declare(**REPLACING)
            shop.run(task, "3")
            assert (first.state, str(first.result)) == ("REVOKED", NEWER)
            assert shop.dislock.lock_of(KEY).state()[0].reservation is None
            shop.sweep()
        shop.work()
        assert shop.ran == ["3"]
        assert caplog.text.count(f"Task shop.export[2] skipped: {NEWER}. It does not run.") == 1

    def test_a_caller_who_waits_for_a_message_gets_it(self):
        """With ``rpc://`` a result is sent to the queue that the task's message names."""
        with Shop(result_backend="rpc://") as shop:
            task = shop.declare(**REPLACING)
            with shop.held():
                first = shop.run(task)
                shop.run(task, "3")
                assert (first.state, str(first.result)) == ("REVOKED", NEWER)

    @pytest.mark.parametrize("how", ["chain", "unknown"])
    def test_one_that_others_wait_for_is_ended_by_a_worker(self, shop, caplog, how):
        """Only who knows the task can tell the chain that stands behind it, and its errbacks."""
        task = shop.declare(**REPLACING)
        note = shop.declare(name="shop.note", lock_key=False)
        with shop.held():
            if how == "chain":
                chain(task.si().set(task_id="2"), note.si()).apply_async()
                shop.work()
            else:
                shop.run(shop.declare(name="shop.mine", **REPLACING))
                del shop.app.tasks["shop.mine"]
            shop.send(task, "3")
            [message] = shop.messages._due()
            shop.messages._run(message)
            assert shop.app.AsyncResult("2").state == "PARKED"
            assert [(one["id"], one["notes"]) for one in self.sent(shop)] == [("2", NEWER)]
            if how == "chain":
                shop.work()
                assert shop.app.AsyncResult("2").state == "REVOKED"
                assert shop.ran == []

    def sent(self, shop):
        return [
            {"id": one["headers"]["id"], "notes": one["headers"]["dislock"].get("replaced")}
            for one in shop.queue
        ]

    def test_one_that_could_not_be_told_is_told_by_a_sweep(self, shop, backend_away, caplog):
        """It leaves only after it was told, and keeps no other from it, nor does a damaged one."""
        task = shop.declare(**REPLACING)
        with shop.held():
            first = shop.run(task)
            with backend_away("store_result"):
                shop.run(task, "3")
            assert first.state == "PARKED"
            told = f"[2] lost its place in line {NAMED}; its result will say so when the sweep"
            assert told in caplog.text
            shop.other.client.hset(f"{LOCK}:replaced", "9:0:0", "rubbish")
            shop.sweep()
            assert first.state == "REVOKED"
            assert list(shop.other.records().aside) == ["9"]


class TestWhichBroker:
    """A task goes back to where it came from; each broker has lines of its own."""

    def broker(self, url="redis://h:6379/0", write_url=None, **transport):
        conf = {"broker_url": url, "broker_write_url": write_url or url}
        with Shop(broker_transport_options=transport, **conf) as shop:
            return shop.broker

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("redis://h:6379/0", "redis://me:secret@h:6379/0"),
            ("redis://:a@h:6379/0", "redis://:b@h:6379/0"),
            ("amqp://h/shop", "amqp://guest:guest@h/shop"),
            ("amqp://H/shop", "amqp://h/shop"),
            ("redis://h:6379/0", "redis://h:6379/0?ssl_cert_reqs=none"),
            ("sentinel://:a@h:1;sentinel://:a@g:1", ["sentinel://h:1", "sentinel://g:1"]),
        ],
    )
    def test_two_logins_of_one_broker_are_one_home(self, one, other):
        """Who logs in, and how, says nothing about where the messages are."""
        assert self.broker(one) == self.broker(other, visibility_timeout=60)
        assert set(self.broker(one)) <= set("0123456789abcdef")

    def test_two_places_are_two_homes(self):
        """Host, database, virtual host, prefix, folder."""
        options = ["queue_name_prefix", "global_keyprefix", "data_folder_out", "control_folder"]
        urls = [f"redis://{at}" for at in ("h:6379/0", "h:6379/1", "h:6380/0", "g:6379/0")]
        urls += ["amqp://h:6379/0", f"{urls[0]};redis://g:6379/0", "amqp://h/a", "amqp://h/b"]
        urls += [f"redis+socket:///r.sock?virtual_host={number}" for number in (1, 2)]
        digests = [self.broker(url) for url in urls]
        digests.append(self.broker(write_url="redis://writer:6379/0"))
        for option in (*options, "master_name", "region"):
            digests += [self.broker(**{option: value}) for value in "ab"]
        assert len(set(digests)) == len(digests)

    @pytest.mark.parametrize("strategy", ["skip", "retry"])
    def test_where_nothing_can_be_parked_no_turn_is_put_off(self, shop, strategy):
        """Several servers keep no lines: it runs under the lock that it has there."""
        shop.server.keeps_lines = False
        task = shop.declare(lock_on_conflict=strategy)
        shop.run(task, notes={**TURN, "store": "f" * 16})
        assert (shop.ran, shop.broker) == (["2"], "")

"""The fixture dislock_server, as a user's test has it: nothing sleeps, and there is no Redis.

What people test first is in docs/how-to/test-your-tasks.md, whose examples are run.
"""

import gc
import sys
import threading
import time
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone

import freezegun
import pytest
import redis
import time_machine
from celery import Celery
from celery.exceptions import Reject
from celery.result import AsyncResult
from celery.worker import state

from celery_dislock import Dislock, LockLostError, SettingsError, SingletonTask, StoreError
from celery_dislock.servers.memory import MemoryServer
from celery_dislock.signals import lock_renewed
from celery_dislock.testing import DislockServer
from tests.holding import wait_for
from tests.programs import run_code
from tests.unclosed import unsubscribe


@pytest.fixture
def app():
    """An app whose broker, result backend and lock server are away."""
    nowhere = "redis://localhost:1/0"
    app = Celery("tested", broker=nowhere, backend=nowhere, set_as_current=False)
    app.conf.dislock_prefix = "ours"
    Dislock(app)
    return app


@pytest.fixture
def dislock(app):
    return Dislock(app)


@pytest.fixture
def server(dislock_server, app):
    dislock_server.use(app)
    return dislock_server


@pytest.fixture
def ran():
    return []


@pytest.fixture
def declare(app, ran):
    """Declare a task that notes that it ran, and returns its argument."""

    def declare(strategy="skip", **options):
        @app.task(
            base=SingletonTask,
            lock_key="k:<n>",
            lock_on_conflict=strategy,
            name=f"{strategy}{options}",
            shared=False,
            **options,
        )
        def export(n):
            ran.append(n)
            return n

        return export

    return declare


class TestOfSomebodyElse:
    def test_a_signature_stands_for_the_lock_of_its_task(self, server, declare):
        """A test need not know how the key is written."""
        task = declare()
        with server.hold(task.s(7)):
            server.assert_locked("k:7")
            server.assert_free(task.s(n=8))

    def test_it_is_held_as_a_lock_is(self, server):
        """All options of a lock, by their names; an unknown one is refused by the name it has."""
        with server.hold("k", expire=60, on_lost="warn"):
            server.advance(59)
            server.assert_locked("k")
            server.advance(2)
            server.assert_free("k")
        with server.hold("k", max_renew_times=1):
            server.advance(60)
            server.assert_free("k")
        with pytest.raises(SettingsError, match=r" mod='shared': .* did you mean 'mode'"):
            server.hold("k", mod="shared").__enter__()

    def test_it_is_no_lock_of_this_thread(self, server, dislock):
        """A thread may take its own lock again, and somebody else's not."""
        with server.hold("k"):
            assert not dislock.lock("k").try_acquire()


class TestOfTime:
    def test_nobody_else_renews_while_time_is_moved(self, server, dislock):
        """A lock that is taken meanwhile would start the watchdog's thread beside the test."""
        started = []

        def take_another(**_signal):
            with dislock.lock("another"):
                started.append(set(threading.enumerate()) - before)

        lock_renewed.connect(take_another)
        with dislock.lock("k"):
            before = set(threading.enumerate())
            server.advance(60)
        assert started
        assert "dislock-watchdog" not in {one.name for threads in started for one in threads}

    @pytest.mark.parametrize("how", ["crash", "loss", "outage"])
    def test_a_holder_of_this_process_is_told_that_it_has_lost_its_lock(self, server, dislock, how):
        """When its lease has ended, though the server is away; after a failover at once."""
        with pytest.raises(LockLostError), dislock.lock("k") as lease, ExitStack() as stack:
            if how == "loss":
                server.lose("k")
            else:
                server.crash_holder("k") if how == "crash" else stack.enter_context(server.outage())
                server.advance(31)
            assert not lease.held

    def test_who_waits_is_let_in(self, server, dislock):
        """A thread that waits on the server looks at the clock again."""
        server.crash_holder("k")
        got = threading.Event()

        def wait():
            with dislock.lock("k"):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not any(state.waiting for state in dislock.lock_of("k").state()):
            pass
        # On a busy machine its wait may begin after the first time.
        wait_for(lambda: server.advance(31) or waiting.join(0.5) or got.is_set(), within=20)
        waiting.join()

    @pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), None])
    def test_time_goes_on_for_finite_seconds(self, server, seconds):
        """Never back, and never for ever."""
        with pytest.raises(ValueError, match="seconds of 0 or more"):
            server.advance(seconds)

    def test_fakeredis_reads_no_other_clock(self, server):
        """Nor does a module of it that a newer release imports late, or by another name."""
        server.advance(1)
        modules = {n: vars(m) for n, m in sys.modules.items() if n.startswith("fakeredis")}
        clocks = [n for n in modules if {id(time), id(time.time)} & {*map(id, modules[n].values())}]
        assert clocks == []


FROZEN = {
    "freezegun": lambda: freezegun.freeze_time("2020-02-02"),
    "time-machine": lambda: time_machine.travel(1_580_000_000, tick=False),
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
class TestOfFrozenTime:
    """As with a Redis, whose clock is its own."""

    def test_a_wait_for_a_lock_ends(self, server, dislock, frozen):
        """At its timeout, and when a dead holder's lease has ended."""
        with frozen():
            with server.hold("k"):
                assert not dislock.lock("k").acquire(timeout=0.05)
            server.crash_holder("k", timeout=0.2)
            assert dislock.lock("k", timeout=60).acquire()
            dislock.lock("k").release()

    def test_time_that_stands_still_ends_no_lease(self, server, dislock, frozen):
        """Nor does time that jumps: its holder renews it."""
        with server.hold("k"), dislock.lock("mine") as lease:
            with frozen():
                server.advance(300)
                server.assert_locked(["k", "mine"])
            server.assert_locked(["k", "mine"])
            assert lease.held

    def test_an_eta_is_reached_as_time_is_moved(self, server, declare, ran, frozen):
        """By advance(), also while Python's time stands still."""
        with frozen():
            declare().apply_async((7,), countdown=60)
            server.advance(59)
            assert server.run_parked() == 0
            server.advance(2)
            assert server.run_parked() == 1
        assert ran == [7]


def test_a_module_that_is_imported_in_frozen_time_has_a_clock():
    """What a plugin imports late is often imported there."""
    code = (
        "import freezegun, time\n"
        "with freezegun.freeze_time('2020-02-02'):\n"
        "    from celery_dislock.testing import DislockServer\n"
        "    with DislockServer() as server, server.hold('k'):\n"
        "        assert not server._dislock.lock('k').acquire(timeout=0.05)\n"
    )
    run_code(code)


def test_frozen_time_can_be_moved_to_an_eta(server, declare, ran):
    """A worker judges an ETA by Python's clock."""
    with freezegun.freeze_time("2020-02-02") as frozen:
        declare().apply_async((7,), countdown=60)
        assert server.run_parked() == 0
        frozen.tick(61)
        assert server.run_parked() == 1


class TestOfOutages:
    def test_while_the_server_is_away_nothing_is_locked(self, server, dislock, declare):
        """Locks that were held are kept, and what could not be released is released after it."""
        task = declare(lock_unique_until="end")
        held = dislock.lock("k")
        held.acquire()
        with server.outage():
            with pytest.raises(StoreError):
                dislock.lock("other").try_acquire()
            assert isinstance(task.apply((7,)).result, StoreError)
            held.release()
        server.assert_free("k")
        assert task.apply((7,)).get() == 7

    def test_senders_ask_again_after_an_outage(self, dislock_server):
        """They leave a server that is away alone for some seconds, but not in a test."""
        urls = {"broker": "memory://", "backend": "cache+memory://"}
        app = Celery("elsewhere", **urls, set_as_current=False)
        app.conf.task_default_queue = "elsewhere"  # other tests have this broker, too
        dislock_server.use(app)

        @app.task(base=SingletonTask, lock_unique_until="end", shared=False)
        def export(n): ...

        with dislock_server.outage():
            assert not export.delay(7).duplicate
        first = export.delay(7)
        second = export.delay(7)
        dislock_server.assert_duplicate(second)
        assert second.id == first.id


class TestOfParkedTasks:
    def test_a_parked_task_runs_when_the_lock_is_free(self, server, declare, ran):
        """Its message is taken, parked, handed on at the release and taken again."""
        task = declare("queue")
        with server.hold("k:7"):
            first, second = task.delay(7), task.delay(7)
            server.run_parked()
            assert server.parked("k:7") == [first.id, second.id]
            server.assert_waiting("k:7", 2)
            assert ran == []
        assert server.run_parked() == 2
        assert ran == [7, 7]
        assert first.get() == 7

    def test_messages_of_protocol_1(self, server, app, declare, ran):
        """They have their headers in the body: a task is parked, has a countdown, and expires."""
        app.conf.task_protocol = 1
        task = declare("queue")
        with server.hold("k:7"):
            first = task.delay(7)
            server.run_parked()
            assert server.parked("k:7") == [first.id]
        assert (server.run_parked(), first.get()) == (1, 7)
        server.advance(1000)
        gone = task.apply_async((8,), expires=60)
        later = task.apply_async((9,), countdown=90)
        server.advance(61)
        assert (server.run_parked(), gone.state) == (1, "REVOKED")
        server.advance(30)
        assert (server.run_parked(), later.get()) == (1, 9)
        assert ran == [7, 9]

    def test_a_message_in_another_queue(self, server, app, declare, ran):
        """It is run, and what waits there is purged as in the first."""
        task = declare("queue")
        task.apply_async((1,), queue="exports")
        with DislockServer() as later:
            later.use(app)
            with later.hold("k:7"):
                task.apply_async((7,), queue="exports")
                later.run_parked()
            assert later.run_parked() == 1
        assert ran == [7]

    def test_a_parked_task_runs_after_a_dead_holder(self, server, declare, ran):
        """A worker would look after the line, and so does run_parked()."""
        server.crash_holder("k:7")
        declare("queue").delay(7)
        server.run_parked()
        server.advance(31)
        server.run_parked()
        assert ran == [7]

    def test_a_task_that_is_put_off_runs_after_its_time(self, server, declare, ran):
        """With "retry" the message comes again; advance() moves its time."""
        task = declare("retry")
        with freezegun.freeze_time():  # its pause may be short
            with server.hold("k:7"):
                task.delay(7)
                assert server.run_parked() == 1
            assert server.run_parked() == 0
            server.advance(60)
            assert server.run_parked() == 1
        assert ran == [7]

    @pytest.mark.parametrize("option", ["countdown", "eta"])
    def test_a_countdown_is_over_when_time_has_passed(self, server, declare, ran, option):
        """Whether its message was looked at before or not, and whatever has passed before it."""
        server.advance(1000)
        given = 60 if option == "countdown" else datetime.now(timezone.utc) + timedelta(seconds=60)
        declare().apply_async((7,), **{option: given})
        server.advance(30)
        declare("raise").apply_async((8,), countdown=60)
        server.advance(31)
        assert server.run_parked() == 1
        assert ran == [7]
        server.advance(30)
        assert server.run_parked() == 1
        assert ran == [7, 8]

    def test_a_message_expires_as_time_passes(self, server, declare, ran):
        """Also while its task is parked."""
        task = declare("queue")
        gone = task.apply_async((7,), expires=60)
        server.advance(61)
        assert server.run_parked() == 1
        assert gone.state == "REVOKED"
        with server.hold("k:7"):
            parked, kept = (task.apply_async((7,), expires=after) for after in (60, 600))
            server.run_parked()
            server.advance(61)
        server.run_parked()
        assert (parked.state, kept.state, ran) == ("REVOKED", "SUCCESS", [7])
        server.assert_waiting("k:7", 0)

    @pytest.mark.parametrize("how", ["result", "ids"])
    def test_a_task_that_is_revoked_does_not_run(self, server, app, declare, ran, how):
        """It was sent, or is parked; its key is free again."""
        task = declare("queue", lock_unique_until="end")

        def revoke(sent):
            if how == "result":
                sent.revoke()
            else:
                app.control.revoke([sent.id, "another"])

        revoke(first := task.delay(7))
        assert server.run_parked() == 1
        with server.hold("k:7"):
            app.control.revoke("another")
            parked = task.delay(7)
            assert not parked.duplicate
            server.run_parked()
            assert server.parked("k:7") == [parked.id]
            parked.revoke()
        server.run_parked()
        assert (first.state, parked.state, ran) == ("REVOKED", "REVOKED", [])
        server.assert_waiting("k:7", 0)

    def test_a_revoke_ends_with_its_test(self, app, declare, ran):
        """Tests give their tasks the same ids."""
        task = declare()
        for _ in range(2):
            with DislockServer() as server:
                server.use(app)
                sent = task.apply_async((7,), task_id="same")
                server.run_parked()
                app.control.revoke("same")
        assert ran == [7, 7]
        assert sent.id not in state.revoked

    def test_a_task_that_puts_itself_back_for_ever(self, server, app, monkeypatch):
        """It is named, instead of a test that hangs."""
        monkeypatch.setattr("celery_dislock.testing.messages.ROUNDS_MOST", 50)

        @app.task(bind=True, shared=False, name="boomerang", acks_late=True, max_retries=None)
        def boomerang(self, how):
            raise self.retry(countdown=0) if how == "retry" else Reject("later", requeue=True)

        for how in ("reject", "retry"):
            sent = boomerang.delay(how)
            with pytest.raises(AssertionError, match=rf"50 messages.* boomerang\[{sent.id}\]"):
                server.run_parked()
            app.control.purge()


class TestOfSwitchingOff:
    def test_locks_are_off_for_one_app(self, server, app, declare):
        """From the next task, whatever has run before."""
        task = declare()
        with server.hold("k:7"):
            server.assert_skipped(task.apply((7,)))
            server.off(app)
            assert task.apply((7,)).get() == 7

    def test_the_setting_is_read_at_each_task(self, server, app, declare, monkeypatch):
        """By monkeypatch, by hand, in any order."""
        task = declare()
        with server.hold("k:7"):
            for off in (False, True, False):
                monkeypatch.setitem(app.conf, "dislock_enabled", False if off else None)
                assert task.apply((7,)).successful() is off


# What holds an app's connections, by the names that the kit makes it forget.
HELD = {
    "_pool": lambda app: app.pool.connection,
    "amqp._producer_pool": lambda app: app.producer_pool.connections.connection,
    "control": lambda app: app.control.mailbox.producer_pool.connections.connection,
    "_local": lambda app: app.backend,
    "_backend_cache": lambda app: app.backend,
}


class TestOfAnApp:
    @pytest.mark.parametrize("name", HELD)
    def test_an_app_forgets_its_connections(self, app, name):
        """Celery has no public way; if a release has other names, this says which."""
        app.conf.result_backend_thread_safe = name == "_backend_cache"
        before = HELD[name](app).as_uri()
        with DislockServer() as server:
            server.use(app)
            assert "127.0.0.1" in HELD[name](app).as_uri()
        assert HELD[name](app).as_uri() == before

    def test_an_app_has_its_settings_back(self, app):
        """The server, the prefix, the broker, and what the test has set."""
        before = dict(app.conf)
        with DislockServer() as server:
            server.use(app)
            assert app.conf.broker_url != before["broker_url"]
            app.conf.task_always_eager = True
        assert dict(app.conf) == before

    def test_the_environment_does_not_win(self, app, declare, monkeypatch, ran):
        """Celery prefers its variables to an app's settings."""
        monkeypatch.setenv("CELERY_BROKER_URL", "redis://localhost:1/0")
        with DislockServer() as server:
            server.use(app)
            declare().delay(7)
            server.run_parked()
        assert ran == [7]

    def test_a_result_that_outlives_its_test_connects_to_nothing(self, app, declare, monkeypatch):
        """Celery unsubscribes a result that is garbage, by a new connection that nobody closes."""
        with DislockServer() as server:
            server.use(app)
            result = declare().delay(7)
            server.run_parked()
            assert result.get() == 7
            unread = declare("raise").delay(7)
            unread.then(print)
        connected = []
        monkeypatch.setattr(redis.Connection, "connect", connected.append)
        monkeypatch.setattr(AsyncResult, "__del__", unsubscribe, raising=False)
        del result, unread
        gc.collect()
        assert connected == []

    def test_another_broker_stays(self):
        """Only what is a Redis is replaced; messages and results go on there."""
        app = Celery("tested", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.task_default_queue = "tested"  # other tests have this broker, too

        @app.task(base=SingletonTask, shared=False)
        def seven():
            return 7

        with DislockServer() as server:
            server.use(app)
            assert app.conf.broker_url == "memory://"
            assert app.conf.result_backend == "cache+memory://"
            sent = seven.delay()
            assert server.run_parked() == 1
            assert sent.get() == 7

    def test_two_apps(self, server, declare, ran):
        """The queue is one, and each message is run by the app that has its task."""
        other = Celery("other", broker="redis://localhost:1/5", set_as_current=False)
        server.use(other)
        mine = declare(lock_unique_until="end")

        @other.task(base=SingletonTask, lock_key="k:<n>", shared=False)
        def theirs(n):
            ran.append(-n)

        mine.delay(1)
        theirs.delay(2)
        with server.hold("k:3"):
            server.assert_skipped(mine.apply((3,)))
            server.assert_skipped(theirs.apply((3,)))
        assert server.run_parked() == 2
        assert ran == [1, -2]

    def test_a_thread_forgets_what_it_held_in_an_earlier_test(self, app, dislock):
        """It may wait for a lock whose lease it has lost with the test."""
        with DislockServer() as earlier:
            earlier.use(app)
            dislock.lock("k").acquire()
            earlier.crash_holder("k")
        with DislockServer() as server:
            server.use(app)
            with server.hold("k"):
                assert not dislock.lock("k").acquire(timeout=0.01)


class TestOfSeveral:
    """One for a module, and one for a test in it."""

    def test_one_inside_another_leaves_it_alone(self, app, dislock):
        """Its locks, its holders and its messages; time passes for both."""
        ran = []

        @app.task(base=SingletonTask, lock_key="k", shared=False)
        def export():
            ran.append(1)

        with DislockServer(test="a module") as module:
            module.use(app)
            with module.hold("k"), dislock.lock("mine") as lease:
                export.delay()
                for _ in range(2):
                    with DislockServer() as server:
                        assert server.url != module.url
                        server.assert_free("k")
                        with server.hold("k"):
                            server.advance(100)
                        server.crash_holder("mine")
                module.assert_locked(["k", "mine"])
                assert lease.held
            assert module.run_parked() == 1
        assert ran == [1]


def test_a_client_that_has_gone_takes_nothing():
    """What comes while its BRPOP still waits stays for others, as on a Redis."""
    server = MemoryServer()

    def waits():
        return any(one.condition._waiters for one in server.fake_server.dbs.values())

    with redis.Redis.from_url(server.url) as client:
        gone = redis.Redis.from_url(server.url, single_connection_client=True).connection
        gone.send_command("BRPOP", "k", 60)
        wait_for(waits)
        gone.disconnect()
        client.lpush("k", "message")
        wait_for(lambda: not waits())
        assert client.rpop("k") == b"message"


class TheirServer(MemoryServer):
    """A server of a user's: it may have data."""

    is_for_tests = False


class TestOfAUsersServer:
    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_it_is_refused_if_it_has_data(self, number):
        """They stay."""
        theirs = TheirServer()
        with redis.Redis.from_url(f"{theirs.url[:-1]}{number}") as client:
            client.set("theirs", "1")
            with pytest.raises(SettingsError) as refused:
                DislockServer(theirs).__enter__()
            assert client.get("theirs") == b"1"
        assert str(refused.value) == (
            f"DislockServer: server='{theirs.url[:-1]}{number}': it has 1 keys, and tests empty "
            "its databases 0 to 2 at their end: give a server that is empty"
        )


def test_a_task_is_no_key(server, declare):
    """It has a lock for each call."""
    task = declare()
    with pytest.raises(SettingsError) as refused:
        server.hold(task).__enter__()
    assert str(refused.value) == (
        f"DislockServer: key={task.name!r}: a task has a lock for each call: give a signature, as "
        "in export.s(7)"
    )


FAILING = {
    "is held by nobody:\nlock k\n  held by nobody": lambda server, _: server.assert_locked("k"),
    "is held:\nlock held\n  held by thread somebody else": (
        lambda server, _: server.assert_free("held")
    ),
    "has 0 in line, not 2:\nlock held": lambda server, _: server.assert_waiting("held", 2),
    "somebody else": lambda server, _: server.hold("held").__enter__(),
    "is SUCCESS, 7: it was not skipped": (
        lambda server, declare: server.assert_skipped(declare().apply((7,)))
    ),
    "is no duplicate": lambda server, declare: server.assert_duplicate(declare().delay(7)),
}


@pytest.mark.parametrize("told", FAILING)
def test_an_assertion_that_fails_shows_the_lock_or_the_result(server, declare, told):
    """As `celery dislock show` does; or what became of a task."""
    with server.hold("held"), pytest.raises(AssertionError) as failed:
        FAILING[told](server, declare)
    assert told in str(failed.value)


def test_the_keys_of_signatures_are_compared(server, declare):
    """Positional and keyword calls have one key; different keys are shown."""
    task = declare()
    server.assert_same_key(task.s(1), task.s(n=1))
    with pytest.raises(AssertionError, match=r"k:1: .*\n.*k:2: "):
        server.assert_same_key(task.s(1), task.s(2))


def test_a_task_that_was_revoked_was_not_skipped(server, app, declare, ran):
    """Its result has the state of one whose lock was held, and another reason."""
    sent = declare().delay(7)
    app.backend.mark_as_revoked(sent.id, "by its user")
    with pytest.raises(AssertionError, match=r"is REVOKED, .*by its user.*: it was not skipped"):
        server.assert_skipped(sent)
    assert ran == []

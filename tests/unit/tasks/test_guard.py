"""The guard around a task's body, in eager tasks on a store that the test drives."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from unittest.mock import Mock

import pytest
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_dislock import (
    DislockError,
    Key,
    Lease,
    LockHeldError,
    LockLostError,
    SettingsError,
    SingletonTask,
    StoreError,
    current_lease,
    ensure_held,
    signals,
)
from celery_dislock.keys.names import reserved_lock
from celery_dislock.messages.headers import HEADER
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.replies import Replaced
from celery_dislock.tasks.guard import Guard
from tests.unit.deliveries import Broker, deliver, noted
from tests.unit.fakes import FakeLines, FakeRecord


def holder(world):
    return [owner for owner, _, _ in world.store.leases.values()]


def test_the_body_runs_under_the_lock_and_the_lock_is_gone_after(app, world):
    """The lock is held exactly as long as the body runs."""

    @app.task(base=SingletonTask, lock_key="export:<corp_id>", bind=True)
    def export(self, corp_id):
        assert self.lease.held
        assert self.lease is current_lease()
        return self.lease.key, list(world.store.leases)

    assert export.apply((7,)).get() == ("export:7", ["dislock:{export:7}"])
    assert world.store.leases == {}
    assert current_lease() is None
    assert len(world.watchdog) == 0


def test_an_execution_leaves_nothing_to_the_garbage_collector(app, world):
    """Its request and its delivery know each other, and are gone when Celery is done with them."""
    ended = []

    @app.task(base=SingletonTask, lock_key="export", bind=True)
    def export(self):
        ended.append(weakref.ref(self.request_stack.top))

    gc.disable()
    try:
        deliver(export)
        assert ended[0]() is None
    finally:
        gc.enable()
    assert world.store.leases == {}


def test_a_task_may_take_several_keys_all_or_none(app, world):
    """The keys of a list are taken in order, each once; the conflict names the one held."""

    @app.task(
        base=SingletonTask,
        lock_key=["account:<to>", "account:<source>", lambda *_: "transfers"],
        lock_on_conflict="raise",
        bind=True,
    )
    def transfer(self, source, to):
        return self.lease.key, sorted(world.store.leases)

    locks = ["dislock:{account:1}", "dislock:{account:2}", "dislock:{transfers}"]
    result = transfer.apply((2, 1)).get()
    assert result == ("account:1 + account:2 + transfers", locks)
    assert transfer.apply((3, 3)).get()[0] == "account:3 + transfers"
    assert world.store.leases == {}

    world.lease("account:2", owner="other")
    with pytest.raises(LockHeldError, match="account:2") as raised:
        transfer.apply((2, 1)).get()
    assert raised.value.key == "account:2"
    assert list(world.store.leases) == ["dislock:{account:2}"]


def test_each_key_is_taken_with_its_own_limit(app, world, monkeypatch):
    """In the order of the keys; the smaller one, if two templates give the same key."""
    asked, take = [], world.store.acquire

    def acquire(*args, terms, **more):
        asked.append(terms.limit)
        return take(*args, **more)

    monkeypatch.setattr(world.store, "acquire", acquire)

    @app.task(base=SingletonTask, lock_key=[Key("tenant:<t>", limit=3), "api", Key("all:<t>", 5)])
    def sync(t): ...

    @app.task(base=SingletonTask, lock_key=[Key("<a>", limit=3), Key("<b>", limit=2), "z"])
    def move(a, b): ...

    @app.task(base=SingletonTask, lock_key=[Key("a", limit=2), Key("b", limit=2)])
    def same(): ...

    sync.apply((1,)).get()
    move.apply(("y", "y")).get()
    same.apply().get()
    assert asked == [[5, 1, 3], [2, 1], 2]


def test_a_task_called_as_a_function_takes_no_lock(app, world):
    """A direct call is plain Python."""

    @app.task(base=SingletonTask, lock_key="k", bind=True)
    def task(self):
        self.lease.ensure_held()
        ensure_held()
        return self.lease

    lease = task()
    assert isinstance(lease, Lease)
    assert (bool(lease), lease.held, lease.remaining, lease.token) == (False, False, 0.0, 0)
    assert (lease.key, lease.owner, lease.tokens, lease.renewals) == ("", "", {}, 0)
    assert lease.why_ended == "not locked"
    assert current_lease() is None
    assert world.store.calls == []


def test_a_body_ensures_that_it_holds_its_lock_without_being_bound(app, world):
    """celery_dislock.ensure_held() is the lease's own: it raises once the lease is lost."""

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        ensure_held()
        current_lease().lose("stolen")
        ensure_held()

    with pytest.raises(LockLostError, match="'k' is lost: stolen"):
        task.apply(throw=True)


def test_what_no_task_runs_cannot_ensure_that_a_lock_is_held(app, world):
    """A thread that a body starts does not know the body's lease: that must not look like held."""
    raised = []

    def elsewhere():
        try:
            ensure_held()
        except DislockError as exc:
            raised.append(str(exc))

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    task.apply().get()
    elsewhere()
    assert len(raised) == 2
    assert "no task runs" in raised[0]


def test_a_task_that_calls_itself_as_a_function_takes_its_lock_once(app, world):
    """Recursion inside the body does not meet its own lock."""

    @app.task(base=SingletonTask, lock_key="k", bind=True)
    def countdown(self, n):
        return n if n == 0 else self(n - 1)

    assert countdown.apply((3,)).get() == 0
    assert len(world.store.asked("acquire")) == 1


@pytest.mark.parametrize(
    ("option", "error", "kept"),
    [
        *(("failure", None, False), ("failure", ValueError, True), ("failure", SystemExit, True)),
        *(("failure", Retry, False), ("failure", Ignore, False), ("failure", Reject, False)),
        *(("success", None, True), ("success", ValueError, False)),
        *(("success", SystemExit, False), ("success", KeyboardInterrupt, False)),
    ],
)
def test_a_lock_may_be_left_to_expire_after_a_failure_or_a_success(app, world, option, error, kept):
    """Retry, Ignore and Reject are no failures."""

    @app.task(base=SingletonTask, lock_key="k", **{f"release_on_{option}": False})
    def task():
        if error:
            raise error

    with suppress(SystemExit, KeyboardInterrupt):
        task.apply()
    assert bool(world.store.leases) is kept
    assert len(world.watchdog) == 0


@pytest.mark.parametrize("at", ["unwatch", "release"])
def test_a_release_that_is_cut_short_is_done_all_the_same(app, world, monkeypatch, at):
    """A signal handler's exception in the middle of the release leaves no lock behind."""

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        return 1

    part = world.watchdog if at == "unwatch" else world.store
    whole, cut = getattr(part, at), []

    def cut_short(*args):
        if not cut:
            cut.append(args)
            raise SoftTimeLimitExceeded
        return whole(*args)

    monkeypatch.setattr(part, at, cut_short)
    assert task.apply().state == "FAILURE"
    assert cut
    assert world.store.leases == {}
    assert current_lease() is None


def test_a_subclass_that_forgets_super_is_guarded_all_the_same(app, world):
    """Neither on_bound nor __call__ nor before_start of a user's class can skip the lock."""

    class Forgetful(SingletonTask):
        @classmethod
        def on_bound(cls, app):
            pass

        def before_start(self, *args):
            pass

        def __call__(self, *args, **kwargs):
            return len(world.store.leases), self.run(*args, **kwargs)

    @app.task(base=Forgetful, lock_key="k", autoretry_for=(ValueError,))
    def task():
        return len(world.store.leases)

    assert task.apply().get() == (1, 1)


@pytest.mark.parametrize(
    ("own", "locks"),
    [
        ({}, ["dislock:{k}"]),
        ({"lock_key": "l"}, ["dislock:{l}"]),
        ({"lock_key": False}, []),
    ],
)
def test_a_class_that_extends_a_registered_task_has_one_guard_of_its_own(app, world, own, locks):
    """Two guards around one body would meet each other's lock."""

    class First(SingletonTask):
        name = "first"
        lock_key = "k"
        lock_unique_until = "end"

        def run(self):
            return list(world.store.leases), list(world.store.reservations.records)

    app.register_task(First())
    second = app.register_task(type("Second", (First,), {"name": "second", **own})())
    assert second.apply().get() == (locks, locks)
    assert len(world.store.asked("acquire")) == len(locks)


def test_a_class_without_a_name_is_guarded_under_the_one_that_celery_gives_it(app, world):
    """A class-based task keeps its name in the instance; a class that extends it has another."""

    class First(SingletonTask):
        def run(self):
            return list(world.store.leases), current_lease().key

    class Second(First):
        pass

    tasks = [app.register_task(task()) for task in (First, Second)]
    for task in tasks:
        (lock,), key = task.apply().get()
        assert key.startswith(f"{task.name}:")
        assert lock == f"dislock:{{{key}}}"
    assert tasks[0].name != tasks[1].name
    assert First.name is None


@pytest.mark.parametrize("by", ["hasattr", "bind"])
def test_a_base_class_that_is_looked_at_stays_unbound(app, by):
    """What it got from one app, the tasks of every other app would inherit."""

    class Base(SingletonTask):
        abstract = True

    for base in (SingletonTask, Base):
        if by == "bind":
            assert base.bind(app) is app
        else:
            assert hasattr(base, "app")
        assert base.acks_late is None
        assert base.request_stack is None
        assert "__bound__" not in vars(base)


def test_a_task_with_a_bad_option_never_runs(app, world):
    """Every use of it fails, not only the first: Celery has registered it before it is bound."""

    @app.task(base=SingletonTask, name="shop.export", lock_key="k", lock_on_conflict="skipp")
    def export():
        raise AssertionError

    for _ in range(3):
        with pytest.raises(SettingsError, match="did you mean 'skip'"):
            export.apply()
    assert "shop.export" not in app._tasks


def test_a_misspelt_option_may_be_a_callable(app):
    """What a decorator is given is an option; only a class body has methods."""

    @app.task(base=SingletonTask, lock_keys=lambda corp_id: f"export:{corp_id}")
    def export(corp_id): ...

    with pytest.raises(SettingsError, match="did you mean 'lock_key'"):
        app.finalize()


def test_what_an_outage_may_have_granted_is_given_back_by_the_next_delivery(
    app, world, broker, monkeypatch
):
    """Each owner that asked in vain travels with the task, and is released before it asks anew."""

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        return holder(world)

    with monkeypatch.context() as patched:

        def acquire(*args, **terms):
            raise StoreError("redis://fake", "no reply")

        patched.setattr(world.store, "acquire", acquire)
        deliver(task)
        deliver(task, headers=broker.sent[-1]["headers"])
    owners = broker.sent[-1]["notes"]["given_up"]
    assert len(set(owners)) == 2

    # It has carried out late what it was sent.
    world.store.leases["dislock:{k}"] = (owners[0], world.clock() + 30, {"id": "1"})
    (owner,) = deliver(task, headers=broker.sent[-1]["headers"]).retval
    assert owner not in owners
    assert world.store.leases == {}


def test_with_the_broker_away_too_an_early_acked_task_waits_in_its_slot(
    app, world, broker, monkeypatch
):
    """It exists nowhere but here: it is sent as soon as the broker is back."""

    @app.task(base=SingletonTask, lock_key="k", acks_late=False)
    def task():
        raise AssertionError

    pauses, broker.times_away = [], 3
    monkeypatch.setattr("celery_dislock.messages.unrun.time.sleep", pauses.append)
    world.store.away = True
    assert deliver(task).info.state == "RETRY"
    assert len(broker.sent) == 1
    assert pauses == sorted(pauses)
    assert len(pauses) == 3


def test_an_acquisition_cut_short_is_given_back(app, world):
    """An exception between the server's grant and its answer leaves no lock behind."""

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        raise AssertionError

    acquire = world.store.acquire

    def cut(*args, **terms):
        acquire(*args, **terms)
        assert world.store.leases
        raise ValueError

    world.store.acquire = cut
    assert isinstance(task.apply().result, ValueError)
    assert world.store.leases == {}


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"lock_on_lost": "raise"}, 60),
        ({"lock_on_lost": "terminate"}, 60),
        ({"lock_on_cap": "raise", "max_renew_times": 1}, 25),
    ],
)
def test_a_lease_that_ends_before_the_body_begins_stops_it(app, world, receiving, options, seconds):
    """A receiver runs between grant and body: what happens meanwhile is acted on."""
    ran = []

    @app.task(base=SingletonTask, lock_key="k", **options)
    def task():
        ran.append(1)

    def slow_receiver(**_):
        if seconds == 60:
            world.clock.advance(seconds)
            world.watchdog.tick()
        else:
            world.run(seconds)

    with receiving(signals.lock_acquired, slow_receiver):
        result = task.apply()
    assert isinstance(result.result, LockLostError)
    assert ran == []


def test_a_task_that_would_wait_for_its_own_thread_fails(app, world):
    """An eager task in the body of another that holds its lock is told at once."""

    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict="wait", lock_wait_timeout=3600)
    def inner():
        """Never run."""

    @app.task(base=SingletonTask, lock_key="k")
    def outer():
        return inner.apply().result

    error = outer.apply().get()
    assert isinstance(error, LockHeldError)
    assert "outer[" in error.holder
    assert world.store.asked("wait") == []


@pytest.mark.parametrize(
    ("options", "ttl"),
    [
        ({"lock_watchdog_timeout": 10}, 20.0),
        ({"lock_limit": None}, 100.0),
        ({"lock_key": ("<doc>", "all")}, 100.0),
        ({"lock_expire": 5}, 100.0),
    ],
    ids=["a lock", "no lock", "several locks", "a fixed expiry"],
)
def test_a_running_task_keeps_its_reservation_until_it_is_renewed(app, options, ttl):
    """For two timeouts if the watchdog renews it with the lease, else for lock_unique_for."""
    options = {"lock_key": "<doc>", "lock_unique_until": "end", "lock_unique_for": 100, **options}

    @app.task(base=SingletonTask, shared=False, **options)
    def edit(doc): ...

    guard = edit.dislock_guard
    request = Context(id="a", **noted(unique=["dislock:{1}", "end"]))
    assert guard.reservation_of(request).ttl == ttl


# A task whose message was reserved


def reserved(world, task_id="1", mark="ab", number=1, newest=1, **known):
    """Reserve the key for a message of the task; return the headers that the message has."""
    world.store.reservations.records["dislock:{k}"] = FakeRecord(
        *("ab", "waiting", task_id), number=number, newest=newest, ends=9999.0, **known
    )
    return noted(unique=["dislock:{k}", "end", mark, number])


def told(world):
    """Return what the lock server was told of reservations."""
    return [call[0] for call in world.store.reservations.asked]


def declare(app, body=lambda _task: 7, **options):
    options = {"lock_key": "k", "lock_unique_until": "end", **options}

    @app.task(name="t", base=SingletonTask, bind=True, **options)
    def task(self):
        return body(self)

    return task


@pytest.mark.parametrize("options", [{}, {"lock_limit": None}, {"lock_key": ["k", "l"]}])
def test_a_reserved_task_runs_and_frees_its_key(app, world, options):
    """Whether it takes one lock, several or none."""
    states = []
    there = world.store.reservations
    headers = reserved(world)
    if len(options.get("lock_key", "k")) == 2:
        name = reserved_lock(["dislock:{k}", "dislock:{l}"])
        there.records = {name: there.records["dislock:{k}"]}
        headers[HEADER]["unique"][0] = name
    [lock] = there.records
    task = declare(app, lambda _task: states.append(there.of(lock).state), **options)
    assert deliver(task, headers=headers).info is None
    assert states == ["running"]
    assert there.of(lock) is None
    assert told(world) == ["begin", "end"]


@pytest.mark.parametrize("error", [ValueError, Ignore, Reject, SystemExit])
@pytest.mark.parametrize("options", [{}, {"lock_limit": None}])
def test_a_reserved_task_frees_its_key_however_it_ends(app, world, error, options):
    """One that is stopped with its worker comes again, under its reservation."""

    def body(_task):
        raise error

    with suppress(SystemExit):
        deliver(declare(app, body, **options), headers=reserved(world))
    assert (world.store.reservations.of("dislock:{k}") is None) == (error is not SystemExit)


@pytest.mark.parametrize("granted", [False, True])
def test_a_time_limit_before_its_body_frees_its_key(app, world, monkeypatch, granted):
    """While it asks, or waits in line, for instance: its message does not come again."""
    acquire = world.store.acquire

    def cut_short(*args, **kwargs):
        if granted:
            acquire(*args, **kwargs)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(world.store, "acquire", cut_short)
    result = deliver(declare(app), headers=reserved(world))
    assert result.info.state == "FAILURE"
    assert world.store.leases == {}
    assert world.store.reservations.of("dislock:{k}") is None


def test_a_time_limit_after_its_body_frees_its_key(app, world, monkeypatch):
    """Before it is known how the lease has to end."""
    cut = Mock(side_effect=SoftTimeLimitExceeded)
    monkeypatch.setattr(Guard, "_kept_for_retry", cut)
    assert deliver(declare(app), headers=reserved(world)).info.state == "FAILURE"
    assert world.store.leases == {}
    assert world.store.reservations.of("dislock:{k}") is None


@pytest.mark.parametrize("options", [{}, {"lock_limit": None}])
def test_a_retry_keeps_the_key_of_its_task(app, world, monkeypatch, options):
    """It is the same work, and its message comes under the same reservation."""
    broker = Broker()
    monkeypatch.setattr(app.amqp, "send_task_message", broker.receive)
    task = declare(app, lambda task: task.retry(countdown=5), **options)
    assert deliver(task, headers=reserved(world)).info.state == "RETRY"
    assert len(broker.sent) == 1
    assert "end" not in told(world)


@pytest.mark.parametrize("options", [{}, {"lock_limit": None}, {"lock_key": ["k", "l"]}])
def test_a_replaced_task_ends_as_revoked(app, world, options):
    """Its result names the task by which it was replaced; the body does not run."""
    ran = []
    headers = reserved(world, "2", number=1, newest=2, confirmed=2, by="2")
    headers[HEADER]["unique"][3] = 1
    assert deliver(declare(app, ran.append, **options), headers=headers).info.state == "IGNORED"
    result = app.AsyncResult("1")
    assert result.state == "REVOKED"
    assert str(result.result).endswith("replaces it: task 2")
    assert ran == []
    assert world.store.reservations.of("dislock:{k}").id == "2"
    assert world.store.leases == {}


def test_an_older_message_under_the_same_id_is_only_acknowledged(app, world):
    """The result of this id is that of the newer message."""
    headers = reserved(world, "1", number=1, newest=2, confirmed=2, by="1")
    world.store.reservations.records["dislock:{k}"].number = 2
    assert deliver(declare(app, pytest.fail), headers=headers).info.state == "IGNORED"
    assert app.AsyncResult("1").state == "PENDING"


@pytest.mark.parametrize("stores", [True, False])
def test_a_replaced_task_gives_up_its_place_in_line_when_its_result_is_stored(
    app, world, monkeypatch, stores
):
    """Else a worker that dies in between would leave a caller waiting for ever."""
    process = runtime_of(app).process
    process._publisher, process.lines = object(), FakeLines(world.store)
    process.lines.answers = [Replaced("2")]
    turn = {"ticket": ["dislock:{k}", "1:0:0"]}
    task = declare(app, pytest.fail, lock_on_conflict="queue")
    left = []

    def leave(*turn):
        left.append((turn, app.AsyncResult("1").state))

    mark_as_failure = task.backend.mark_as_failure

    def mark(*args, **kwargs):
        if kwargs.get("state") == "REVOKED" and not stores:
            raise ConnectionError("backend")
        mark_as_failure(*args, **kwargs)

    monkeypatch.setattr(process.lines, "leave", leave)
    monkeypatch.setattr(task.backend, "mark_as_failure", mark)
    deliver(task, headers=reserved(world), notes=turn)
    assert left == [(("dislock:{k}", "1:0:0", task.name), "REVOKED")] * stores


def test_a_task_that_is_replaced_when_it_has_its_lock_ends_its_ticket_with_it(app, world):
    """Its key was another when it was sent.  No copy of it may run."""
    process = runtime_of(app).process
    process._publisher, process.lines = object(), FakeLines(world.store)
    headers = reserved(world, "2", newest=2, confirmed=2, by="2")
    deliver(declare(app, pytest.fail, lock_key="new", lock_on_conflict="queue"), headers=headers)
    assert (world.store.done, world.store.leases) == (["1:0:0"], {})


# Where locks are off


@pytest.fixture
def off(app):
    app.conf.dislock_enabled = False


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_a_reservation_begins_and_ends_where_locks_are_off(app, world, off, until):
    """Else its key would stay taken: messages would be lost for an hour."""
    there = world.store.reservations
    headers = reserved(world)
    headers[HEADER]["unique"][1] = until
    states = []

    def body(_task):
        states.append(there.records["dislock:{k}"].state)

    assert deliver(declare(app, body), headers=headers).info is None
    assert told(world) == ["begin", "end"]
    assert states == ["" if until == "start" else "running"]
    assert there.records["dislock:{k}"].state == ("ended" if until == "expiry" else "")
    assert world.store.leases == {}


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        *((ValueError, True), (Ignore, True), (Reject, True)),
        *((Retry, False), (Reject(requeue=True), False)),
    ],
)
def test_a_task_that_fails_frees_its_key_where_locks_are_off(app, world, off, error, ends):
    """A retry comes under the same reservation, as does a message that goes back to its queue."""

    def body(_task):
        raise error

    deliver(declare(app, body), headers=reserved(world))
    assert told(world) == ["begin", "end"][: 1 + ends]


@pytest.mark.parametrize("lock_server", ["replaced", "away", "not configured"])
def test_nothing_stops_a_body_where_locks_are_off(
    app, world, off, monkeypatch, caplog, lock_server
):
    """It runs, and the log says what may stay."""
    headers = reserved(world, newest=2)
    if lock_server == "replaced":
        world.store.reservations.records["dislock:{k}"].confirmed = 2
    elif lock_server == "away":
        world.store.reservations.away = True
    else:

        def process(_runtime):
            raise SettingsError("app.conf", "dislock_url", None, "name a lock server")

        monkeypatch.setattr(type(runtime_of(app)), "process", property(process))
    assert deliver(declare(app), headers=headers).retval == 7
    lines = [message.partition(":")[0] for message in caplog.messages]
    warning = "A key may stay reserved until its reservation expires"
    assert lines == [warning] * {"replaced": 0, "away": 1, "not configured": 2}[lock_server]


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_task_that_takes_no_lock_any_more_frees_its_key(app, world, is_guarded):
    """Its key was reserved by a sender that has another version of the code."""

    @app.task(name="t", **({"lock_key": "other", "base": SingletonTask} if is_guarded else {}))
    def task(): ...

    deliver(task, headers=reserved(world))
    assert told(world) == ["begin", "end"]
    assert world.store.reservations.of("dislock:{k}") is None

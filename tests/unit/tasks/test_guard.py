"""What the guard does around a task's body, seen from the body, the broker and the lock server."""

import gc
import os
import sys
import threading
import weakref
from contextlib import suppress
from socket import gethostname

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_dislock import (
    Dislock,
    DislockError,
    Key,
    Lease,
    LockHeldError,
    LockLostError,
    ReentrantLock,
    SettingsError,
    SingletonTask,
    StoreError,
    current_lease,
    ensure_held,
    signals,
)
from celery_dislock.hooks import guard_tasks
from celery_dislock.locks import interruption
from celery_dislock.messages.headers import HEADER
from celery_dislock.tasks import task as task_module
from tests.declaring import declare, never
from tests.driven import held, new_app, reservation
from tests.unit.deliveries import deliver


def test_the_body_runs_under_the_lock_and_the_lock_is_gone_after(app, lock_server):
    """The lock is held exactly as long as the body runs, and costs two round trips."""

    def export(self, corp_id):
        assert self.lease.held
        assert self.lease is current_lease()
        return self.lease.key, lock_server.locks()

    task = declare(app, export, lock_key="export:<corp_id>")
    assert task.apply((7,)).get() == ("export:7", ["export:7"])
    assert lock_server.requests == 2
    assert lock_server.contents() == {}
    assert current_lease() is None


@pytest.mark.parametrize("locks", ["on", "off", "no key"])
@pytest.mark.parametrize(("declared", "ignored", "state"), [
    (True, False, "STARTED"), (False, False, "PENDING"), (True, True, "PENDING"),
])  # fmt: skip
def test_its_start_is_stored_when_its_body_begins(app, locks, declared, ignored, state):
    """With ``track_started``, as Celery stores it: with the process and the worker."""
    app.conf.dislock_enabled = False if locks == "off" else None

    class Export(SingletonTask):
        name, lock_key = "export", "k"
        track_started, ignore_result = declared, ignored

        def run(self):
            result = app.AsyncResult("2")
            return result.state, result.info

    class Unlocked(Export):
        name, lock_key = "unlocked", False

    task = app.register_task(Export())
    if locks == "no key":
        task = app.register_task(Unlocked())
    found, info = deliver(task, "2").retval
    assert found == state
    if state == "STARTED":
        assert info["pid"] == os.getpid()
        assert info["hostname"] == ("w1" if locks != "no key" else gethostname())  # of the tracer


@pytest.mark.parametrize("strategy", ["retry", "skip"])
def test_the_start_of_what_does_not_run_is_not_stored(app, monkeypatch, strategy):
    """Its result is what it was, and then how it ended, or that it comes again."""
    stored = []
    monkeypatch.setattr(app.backend, "store_result", lambda *about, **_: stored.append(about[2]))
    with held(app):
        deliver(declare(app, never, track_started=True, lock_on_conflict=strategy), "2")
    assert "STARTED" not in stored


def test_a_body_that_lasts_keeps_its_lock_until_it_has_ended_and_no_longer(app, lock_server):
    """It is renewed after each third of its timeout; nothing renews it when the body is over."""

    def body():
        lock_server.advance(1000)
        ensure_held()

    task = declare(app, body)
    assert deliver(task).info is None
    trips = lock_server.requests
    assert 100 <= trips <= 110
    lock_server.advance(1000)
    assert lock_server.requests == trips


def test_an_execution_leaves_nothing_to_the_garbage_collector(app):
    """Its request and its delivery know each other, and are gone when Celery is done with them."""
    ended = []
    task = declare(app, lambda self: ended.append(weakref.ref(self.request_stack.top)))
    gc.disable()
    try:
        deliver(task)
        assert ended[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("strikes", ["end", "disarm"])
def test_a_body_that_has_ended_is_stopped_no_more_whatever_strikes_its_end(app, strikes):
    """Else a loss that comes later would be thrown into what its process does by then."""
    leases, codes = [], []
    task = declare(app, lambda self: leases.append(self.lease), lock_on_lost="raise")

    def trace(frame, _event, _arg):
        code = frame.f_code
        if code.co_filename == interruption.__file__ and code.co_name == strikes and not codes:
            codes.append(code)
            raise SoftTimeLimitExceeded  # a signal's handler runs as a function begins

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        deliver(task)
    finally:
        sys.settrace(before)
    assert codes != []
    leases[0].on_end(leases[0], "raise")


@pytest.mark.parametrize("by_one", [True, False], ids=["a callable", "a list"])
def test_a_task_may_take_several_keys_all_or_none(app, lock_server, by_one):
    """They are taken in order, each once; the conflict names the one held."""

    def transfer(self, source, to):
        return self.lease.key, lock_server.locks()

    keys = ["account:<to>", "account:<source>", lambda *_: "transfers"]
    if by_one:
        keys = lambda source, to: [f"account:{source}", f"account:{to}", "transfers"]  # noqa: E731
    task = declare(app, transfer, lock_key=keys, lock_on_conflict="raise")
    locks = ["account:1", "account:2", "transfers"]
    assert task.apply((2, 1)).get() == ("account:1 + account:2 + transfers", locks)
    assert task.apply((3, 3)).get()[0] == "account:3 + transfers"
    assert lock_server.locks() == []
    with held(app, "account:2"):
        with pytest.raises(LockHeldError) as raised:
            task.apply((2, 1)).get()
        assert raised.value.key == "account:2"
        assert lock_server.locks() == ["account:2"]


def test_tasks_take_the_very_same_lock(app):
    """A task conflicts with a lock taken in Python, and Python with one that a task holds."""
    dislock = Dislock(app)
    export = declare(
        app,
        lambda n: dislock.lock(f"export:{n}").holders()[0].task,
        name="export",
        lock_key="export:<n>",
        lock_on_conflict="raise",
    )
    with dislock.lock("export:7"):
        with pytest.raises(LockHeldError) as refused:
            export.apply((7,)).get()
        assert threading.current_thread().name in refused.value.holder
        assert export.apply((8,)).get() == "export"
    assert export.apply((7,)).get() == "export"


@pytest.mark.parametrize(
    "keys",
    [
        [Key("b", limit=5), Key("a", limit=2)],  # the lock of "a" is taken first
        [Key("a", limit=3), Key("a", limit=2), Key("z", limit=9)],  # the smaller one
        [Key("a", limit=2), Key("b", limit=2)],
    ],
)
def test_each_key_is_taken_with_its_own_limit(app, lock_server, keys):
    """Two are let in, and the third is told which key is full."""
    task = declare(app, lambda: "ran", lock_key=keys, lock_on_conflict="raise")
    with held(app, keys):
        assert task.apply().get() == "ran"
        with held(app, keys, "2"), pytest.raises(LockHeldError, match="'a'"):
            task.apply().get()
    assert lock_server.locks() == []


def test_a_task_called_as_a_function_takes_no_lock(app, lock_server):
    """A direct call is plain Python."""

    def body(self):
        self.lease.ensure_held()
        ensure_held()
        return self.lease

    lease = declare(app, body)()
    assert isinstance(lease, Lease)
    assert (bool(lease), lease.held, lease.remaining, lease.token) == (False, False, 0.0, 0)
    assert (lease.key, lease.owner, lease.tokens, lease.renewals) == ("", "", {}, 0)
    assert lease.why_ended == "not locked"
    assert lock_server.requests == 0


def test_a_body_ensures_that_it_holds_its_lock_without_being_bound(app, lock_server):
    """celery_dislock.ensure_held() is the lease's own: it raises once the lease is lost."""

    def body():
        ensure_held()
        lock_server.lose()
        lock_server.advance(15)
        ensure_held()

    with pytest.raises(LockLostError, match="'k' is lost: "):
        declare(app, body).apply(throw=True)


def test_what_no_task_runs_cannot_ensure_that_a_lock_is_held(app):
    """A thread that a body starts does not know the body's lease: that must not look like held."""
    raised = []

    def elsewhere():
        with pytest.raises(DislockError, match="no task runs"):
            ensure_held()
        raised.append(1)

    def body():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    declare(app, body).apply().get()
    elsewhere()
    assert raised == [1, 1]


def test_a_task_that_calls_itself_as_a_function_takes_its_lock_once(app, lock_server):
    """Recursion inside the body does not meet its own lock."""
    task = declare(app, lambda self, n: n if n == 0 else self(n - 1))
    assert task.apply((3,)).get() == 0
    assert lock_server.requests == 2


@pytest.mark.parametrize(
    ("option", "error", "kept"),
    [
        *(("failure", None, False), ("failure", ValueError, True), ("failure", SystemExit, True)),
        *(("failure", Retry, False), ("failure", Ignore, False), ("failure", Reject, False)),
        *(("success", None, True), ("success", ValueError, False)),
        *(("success", SystemExit, False), ("success", KeyboardInterrupt, False)),
    ],
)
def test_a_lock_may_be_left_to_expire_after_a_failure_or_a_success(
    app, lock_server, option, error, kept
):
    """Retry, Ignore and Reject are no failures.  Nobody renews what is left."""

    def body():
        if error:
            raise error

    with suppress(SystemExit, KeyboardInterrupt):
        declare(app, body, **{f"release_on_{option}": False}).apply()
    assert bool(lock_server.locks()) is kept
    lock_server.advance(31)
    assert lock_server.locks() == []


def test_a_subclass_that_forgets_super_is_guarded_all_the_same(app, lock_server):
    """Neither on_bound nor __call__ nor before_start of a user's class can skip the lock."""

    class Forgetful(SingletonTask):
        @classmethod
        def on_bound(cls, app):
            pass

        def before_start(self, *args):
            pass

        def __call__(self, *args, **kwargs):
            return lock_server.locks(), self.run(*args, **kwargs)

    task = declare(app, lock_server.locks, base=Forgetful, autoretry_for=(ValueError,))
    assert task.apply().get() == (["k"], ["k"])


@pytest.mark.parametrize(
    ("own", "locks"), [({}, ["k"]), ({"lock_key": "l"}, ["l"]), ({"lock_key": False}, [])]
)
def test_a_class_that_extends_a_registered_task_has_one_guard_of_its_own(
    app, lock_server, own, locks
):
    """Two guards around one body would meet each other's lock."""

    class First(SingletonTask):
        name = "first"
        lock_key = "k"
        lock_unique_until = "end"

        def run(self):
            return sorted(lock_server.contents())

    app.register_task(First())
    second = app.register_task(type("Second", (First,), {"name": "second", **own})())
    assert second.apply().get() == [
        f"dislock:{{{one}}}{end}" for one in locks for end in ("", ":unique")
    ]


def test_a_class_without_a_name_is_guarded_under_the_one_that_celery_gives_it(app, lock_server):
    """A class-based task keeps its name in the instance; a class that extends it has another."""

    class First(SingletonTask):
        def run(self):
            return lock_server.locks(), current_lease().key

    class Second(First):
        pass

    tasks = [app.register_task(task()) for task in (First, Second)]
    for task in tasks:
        locks, key = task.apply().get()
        assert key.startswith(f"{task.name}:")
        assert locks == [key]
    assert tasks[0].name != tasks[1].name
    assert First.name is None


def test_two_objects_of_a_class_are_two_tasks(app, lock_server):
    """Each with its own name, in the key as well, and with the options that it was made with.

    In a second app, as by a factory that each test calls, they take the locks of that.
    """

    class Sync(SingletonTask):
        lock_unique_until = "end"

        def __init__(self, name, **options):
            self.name = name
            vars(self).update(options)

        def run(self, n):
            return self.lease.key, sorted(lock_server.contents()), self.lease.remaining

    kinds = {"plain": {}, "keyed": {"lock_key": "sync:<n>"}, "brief": {"lock_expire": 5}}
    for prefix in ("first", "second"):
        other = new_app()
        other.conf.dislock_prefix = prefix
        tasks = {name: other.register_task(Sync(name, **own)) for name, own in kinds.items()}
        for name, task in tasks.items():
            assert other.register_task(task) is task
            key, names, remaining = task.apply((7,)).get()
            assert key == task.lock_for(7).key == ("sync:7" if name == "keyed" else key)
            assert key.startswith("sync:" if name == "keyed" else f"{name}:")
            assert names == [f"{prefix}:{{{key}}}", f"{prefix}:{{{key}}}:unique"]
            assert (remaining < 10) == (name == "brief")
    with pytest.raises(SettingsError, match="wrong: lock_limit='many': give a whole number"):
        other.register_task(Sync("wrong", lock_limit="many"))
    assert {*kinds, "wrong"} - {*other.tasks} == {"wrong"}


def test_a_worker_with_many_tasks_starts_soon(app, monkeypatch):
    """Nobody looks through all tasks for each of them: it would take seconds for thousands."""
    looked = []

    class Registered(dict):
        def values(self):
            looked.append(self)
            return super().values()

    monkeypatch.setattr(task_module, "_registered", lambda app: Registered(app._tasks))
    for nth in range(3):
        declare(app, name=f"t{nth}")
    app.finalize()
    guard_tasks(app)
    assert all(app.tasks[f"t{nth}"].dislock_guard.name == f"t{nth}" for nth in range(3))
    assert looked == []


@pytest.mark.parametrize("by", ["hasattr", "bind"])
def test_a_base_class_that_is_looked_at_stays_unbound(app, by):
    """What it got from one app, the tasks of every other app would inherit."""

    class Base(SingletonTask):
        abstract = True

    for base in (SingletonTask, Base):
        assert base.bind(app) is app if by == "bind" else hasattr(base, "app")
        assert base.acks_late is None
        assert base.request_stack is None
        assert "__bound__" not in vars(base)


def test_a_task_with_a_bad_option_never_runs(app):
    """Every use of it fails, not only the first: Celery has registered it before it is bound."""
    export = declare(app, never, name="shop.export", lock_on_conflict="skipp")
    for _ in range(3):
        with pytest.raises(SettingsError, match="did you mean 'skip'"):
            export.apply()
    with pytest.raises(SettingsError, match="did you mean 'skip'"):
        app.tasks.get("shop.export")


@pytest.mark.parametrize(
    ("options", "stalls"),
    [
        ({"lock_on_lost": "raise"}, True),
        ({"lock_on_lost": "terminate"}, True),
        ({"lock_on_cap": "raise", "max_renew_times": 1}, False),
    ],
)
def test_a_lease_that_ends_before_the_body_begins_stops_it(
    app, lock_server, receiving, options, stalls
):
    """A receiver runs between grant and body: what happens meanwhile is acted on."""
    task = declare(app, never, **options)

    def slow_receiver(**_):
        if stalls:
            lock_server.stall(60)
        lock_server.advance(25)

    with receiving(signals.lock_acquired, slow_receiver):
        result = task.apply()
    assert isinstance(result.result, LockLostError)


def test_a_task_that_would_wait_for_its_own_thread_fails(app, lock_server):
    """An eager task in the body of another that holds its lock is told at once."""
    inner = declare(app, never, name="inner", lock_on_conflict="wait", lock_wait_timeout=3600)
    outer = declare(app, lambda: inner.apply().result, name="outer")
    began = lock_server.clock()
    error = outer.apply().get()
    assert isinstance(error, LockHeldError)
    assert "outer[" in error.holder
    assert lock_server.clock() - began < 1


# Interruptions: a soft time limit, for example, is an exception at any instruction


@pytest.mark.parametrize(
    ("until", "strikes"),
    [(None, "release"), ("end", "release"), ("end", "grant"), ("end", "answer")],
)
def test_a_time_limit_around_the_body_leaves_nothing(app, lock_server, broker, until, strikes):
    """Between the server's grant and its answer, too; a release that is cut short is done."""

    def strike():
        lock_server.strike(SoftTimeLimitExceeded(), after=strikes == "answer")

    task = declare(app, strike if strikes == "release" else never, lock_unique_until=until)
    task.apply_async(task_id="1")
    if strikes != "release":
        strike()
    assert deliver(task, headers=broker.last.headers).info.state == "FAILURE"
    assert lock_server.locks() == []
    assert reservation(task) is None
    assert current_lease() is None
    requests = lock_server.requests
    lock_server.advance(2)
    assert lock_server.requests == requests


@pytest.mark.parametrize("options", [{}, {"lock_limit": None, "lock_unique_until": "end"}])
def test_a_block_whose_end_is_struck_ends_with_the_body(app, lock_server, options):
    """Before the first instruction of its end, where nothing in the block can help itself."""
    dislock = Dislock(app)

    def strike(frame, event, _argument):
        if event == "call" and frame.f_code is ReentrantLock.__exit__.__code__:
            raise SoftTimeLimitExceeded

    def body():
        with dislock.lock("inner"):
            sys.setprofile(strike)

    before = sys.getprofile()
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            declare(app, body, **options).apply().get()
    finally:
        sys.setprofile(before)
    assert lock_server.locks() == []
    assert dislock.lock("inner").lease is None


# The lock server does not answer: dislock_on_unavailable


def test_run_runs_without_the_lock_and_says_so(app, lock_server, caplog):
    """The body has no lease, and the log names the task and the key."""
    app.conf.dislock_on_unavailable = "run"
    export = declare(app, lambda self: bool(self.lease))
    lock_server.away = True
    assert export.apply(task_id="id-1").get() is False
    assert "id-1] runs without its lock 'k': lock server " in caplog.text


@pytest.mark.parametrize("choice", ["raise", "retry"])
def test_what_may_have_been_granted_is_released_by_the_watchdog(app, lock_server, broker, choice):
    """The process may hang next; the main process would keep the lease that nobody knows of."""
    app.conf.dislock_on_unavailable = choice
    lock_server.mute = True
    deliver(declare(app, never))
    lock_server.mute = False
    assert lock_server.locks() == ["k"]
    lock_server.advance(2)
    assert lock_server.locks() == []
    assert app.AsyncResult("1").state == ("RETRY" if choice == "retry" else "FAILURE")
    assert isinstance(app.AsyncResult("1").result, StoreError)


def test_what_an_outage_may_have_granted_is_given_back_by_the_next_delivery(
    app, lock_server, broker
):
    """Each owner that asked in vain travels with the task, and is released before it asks anew."""
    task = declare(app, lambda: [one.owner for one in task.lock_for().holders()])
    lock_server.mute = True
    deliver(task)
    [owner] = broker.last.notes["given_up"]
    lock_server.mute = False
    lock_server.away = True
    deliver(task, headers=broker.last.headers)  # its request did not get there
    assert broker.last.notes["given_up"] == [owner]
    lock_server.away = False
    assert lock_server.locks() == ["k"]
    assert owner not in deliver(task, headers=broker.last.headers).retval
    assert lock_server.locks() == []


def test_with_the_broker_away_too_an_early_acked_task_waits_in_its_slot(app, lock_server, broker):
    """It exists nowhere but here: it is sent as soon as the broker is back."""
    task = declare(app, never, acks_late=False)
    began, broker.times_away, lock_server.away = lock_server.clock(), 3, True
    assert deliver(task).info.state == "RETRY"
    assert broker.ids == ["1"]
    assert lock_server.clock() - began == pytest.approx(1 + 2 + 4, abs=0.1)


def test_with_the_broker_away_a_late_acknowledged_one_is_given_back(app, lock_server, broker):
    """The broker has the message still, and delivers it again."""
    broker.times_away, lock_server.away = 1, True
    rejected = deliver(declare(app, never, acks_late=True)).retval.exception.exc
    assert isinstance(rejected, Reject)
    assert rejected.requeue is True


# A task whose message was reserved


def unique(app, body=lambda: 7, **options):
    return declare(app, body, **{"lock_unique_until": "end", **options})


def test_a_running_task_keeps_its_reservation_until_it_is_renewed(app, broker):
    """For two timeouts if the watchdog renews it with the lease, else for lock_unique_for."""
    for nth, (options, ttl) in enumerate(
        [
            ({"lock_watchdog_timeout": 10}, 20.0),
            ({"lock_limit": None}, 100.0),
            ({"lock_key": ("k", "all")}, 100.0),
            ({"lock_key": lambda: ["k", "all"]}, 100.0),
            ({"lock_expire": 5}, 100.0),
        ]
    ):
        task = unique(
            app,
            lambda self: reservation(self).remaining,
            name=f"t{nth}",
            lock_unique_for=100,
            **options,
        )
        task.apply_async(task_id="1")
        assert deliver(task, headers=broker.last.headers).retval == pytest.approx(ttl, abs=0.1)


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
@pytest.mark.parametrize("lock_key", ["k", ["k", "l"]])
def test_a_task_that_ran_without_its_lock_frees_its_key(app, lock_server, broker, lock_key, until):
    """Else the next messages of the key would be dropped for lock_unique_for."""
    app.conf.dislock_on_unavailable = "run"
    task = unique(
        app, lambda: setattr(lock_server, "away", False), lock_key=lock_key, lock_unique_until=until
    )
    task.apply_async(task_id="1")
    lock_server.away = True
    assert deliver(task, headers=broker.last.headers).info is None
    assert task.delay().duplicate is (until == "expiry")


@pytest.mark.parametrize("options", [{}, {"lock_limit": None}, {"lock_key": ["k", "l"]}])
def test_a_replaced_task_ends_as_revoked(app, lock_server, broker, options):
    """Whether it takes one lock, several or none; its result names the task that replaced it."""
    task = unique(app, never, lock_on_duplicate="replace", **options)
    task.apply_async(task_id="1")
    task.apply_async(task_id="2")
    deliver(task, headers=broker.sent[0].headers)
    result = app.AsyncResult("1")
    assert result.state == "REVOKED"
    assert str(result.result).endswith("replaces it: task 2")
    assert reservation(task).id == "2"
    assert lock_server.locks() == []


def test_an_older_message_under_the_same_id_is_only_acknowledged(app, broker):
    """The result of this id is that of the newer message."""
    task = unique(app, never, lock_on_duplicate="replace")
    for _ in range(2):
        task.apply_async(task_id="1")
    assert deliver(task, headers=broker.sent[0].headers).info.state == "IGNORED"
    assert app.AsyncResult("1").state == "PENDING"


def test_one_that_was_parked_under_another_key_is_replaced(app, lock_server, broker):
    """Its reservation is older than its lock_key.  It learns at its turn; no copy of it runs."""
    sender = unique(app, name="sent", lock_on_duplicate="replace")
    for task_id in "12":
        sender.apply_async(task_id=task_id)
    header = {HEADER: broker.sent[0].headers[HEADER]}
    task = declare(app, never, lock_key="new", lock_on_conflict="queue")
    with held(app, "new", "holder"):
        deliver(task, headers=header)
    turn = broker.last.headers
    for _ in range(2):
        deliver(task, headers=turn)
    assert str(app.AsyncResult("1").result).endswith("replaces it: task 2")
    assert lock_server.locks() == []
    assert task.lock_for().line() == []


@pytest.mark.parametrize("whose", ["another's", "a forged one", "nobody's"])
def test_a_message_leaves_the_reservations_of_others_alone(app, broker, whose):
    """It runs: a sender may have no such option, or a failover has lost the reservation."""
    task = unique(app, lambda: "ran")
    task.apply_async(task_id="other")
    note = {"another's": ["dislock:{k}", "end"], "a forged one": ["dislock:{x}", "end"]}.get(whose)
    assert deliver(task, notes={"unique": note} if note else {}).retval == "ran"
    assert reservation(task).id == "other"
    assert reservation(declare(app, name="x", lock_key="x")) is None


@pytest.mark.parametrize("stores", [True, False])
def test_a_replaced_task_gives_up_its_place_in_line_when_its_result_is_stored(
    app, lock_server, broker, monkeypatch, stores
):
    """Else a worker that dies in between would leave a caller waiting for ever."""
    task = unique(app, never, lock_on_duplicate="replace", lock_on_conflict="queue")
    task.apply_async(task_id="1")
    with held(app, task_id="holder"):
        deliver(task, headers=broker.last.headers)
        task.apply_async(task_id="2")
    assert broker.last.notes["ticket"] == ["dislock:{k}", "1:0:0"]
    mark_as_failure = app.backend.mark_as_failure

    def mark(*args, **kwargs):
        assert [one.id for one in task.lock_for().holders()] == ["1"]  # of its turn
        if kwargs.get("state") == "REVOKED" and not stores:
            raise ConnectionError("backend")
        mark_as_failure(*args, **kwargs)

    monkeypatch.setattr(app.backend, "mark_as_failure", mark)
    deliver(task, headers=broker.last.headers)
    assert (lock_server.locks() == []) is stores
    assert app.AsyncResult("1").state == ("REVOKED" if stores else "FAILURE")


@pytest.mark.parametrize("lock_server_is", ["replaced", "away", "not configured"])
def test_nothing_stops_a_body_where_locks_are_off(app, lock_server, broker, caplog, lock_server_is):
    """It runs, and the log says what may stay."""
    task = unique(app, lock_on_duplicate="replace")
    for task_id in "12":
        task.apply_async(task_id=task_id)
    app.conf.dislock_enabled = False
    if lock_server_is == "away":
        lock_server.away = True
    elif lock_server_is == "not configured":
        app = type(app)("other", broker="amqp://", backend="cache+memory://", set_as_current=False)
        app.conf.dislock_enabled = False
        task = unique(app)
    assert deliver(task, headers=broker.sent[0].headers).retval == 7
    lines = [message.partition(":")[0] for message in caplog.messages]
    warning = "A key may stay reserved until its reservation expires"
    assert lines == [warning] * {"replaced": 0, "away": 1, "not configured": 2}[lock_server_is]

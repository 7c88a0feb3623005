"""A lock whose keys somebody has damaged: its tasks end, and no others are concerned."""

from __future__ import annotations

import pytest
import redis

from celery_dislock import DamagedLockError, LockHeldError, SingletonTask, StoreError
from celery_dislock.locks.claim import in_words
from celery_dislock.messages.headers import PUT_OFF_HEADER
from celery_dislock.scripts import ACQUIRE
from celery_dislock.servers.connections import locks_of, store_error
from celery_dislock.servers.quorum.server import Quorum
from celery_dislock.tasks.conflicts import DAMAGED_TRIES
from celery_dislock.tasks.task import runtime_of
from tests.unit.deliveries import Broker, deliver

LOCK = "dislock:{k}"
DAMAGED = DamagedLockError("redis://fake", f"{LOCK!r} is a string, not a hash", LOCK)
EVALSHA = (b"EVALSHA", "f" * 40, 2, LOCK, "dislock:{l}", "owner", 7)
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NIL = "user_script:5: attempt to compare nil with number"
RECORD = "a lease in it cannot be read: 2 7"
BEHIND = f" script: {'f' * 40}, on @user_script:5."
BEFORE = f"Error running script (call to f_{'f' * 40}): @user_script:5: "


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WRONG_TYPE, WRONG_TYPE),
        (f"{WRONG_TYPE}{BEHIND}", WRONG_TYPE),
        (f"{BEFORE}{WRONG_TYPE}", WRONG_TYPE),
        (f"{NIL}{BEHIND}", NIL),
        (f"{BEFORE}{NIL}", "attempt to compare nil with number"),
        (f"dislock: {RECORD}{BEHIND}", RECORD),
        (f"{BEFORE}dislock: {RECORD}", RECORD),
        (f"hash value is not an integer{BEHIND}", "hash value is not an integer"),
    ],
)
def test_an_error_about_a_lock_names_it(answer, reason):
    """Redis says it in other words before 7.0 and from then on; what it puts around is left out."""
    error = store_error("redis://x", redis.ResponseError(answer), locks_of(EVALSHA))
    assert isinstance(error, DamagedLockError)
    assert (error.reason, error.lock) == (reason, "dislock:{k}, dislock:{l}")


@pytest.mark.parametrize(
    "answer",
    [
        redis.ResponseError(f"OOM command not allowed when used memory > 'maxmemory'{BEHIND}"),
        redis.ResponseError(f"{BEFORE}OOM command not allowed when used memory > 'maxmemory'"),
        redis.ResponseError("NOPERM this user has no permissions to run the 'evalsha' command"),
        redis.ResponseError(f"Unknown Redis command called from script{BEHIND}"),
        redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.ReadOnlyError("You can't write against a read only replica."),
        redis.ConnectionError("WRONGTYPE"),
        TimeoutError("user_script:5: x"),
    ],
)
def test_an_error_of_the_server_is_about_all_locks(answer):
    """Memory, permissions, replicas and connections are the server's affair."""
    assert type(store_error("redis://x", answer, locks_of(EVALSHA))) is StoreError


def test_a_command_that_is_no_script_is_about_no_lock():
    """An error of INFO or BLPOP names no lock."""
    assert locks_of((b"INFO",)) == []
    assert type(store_error("redis://x", redis.ResponseError(WRONG_TYPE), [])) is StoreError


@pytest.fixture
def broker(app, monkeypatch):
    broker = Broker()
    monkeypatch.setattr(app, "send_task", broker)
    return broker


@pytest.fixture
def damaged(world, monkeypatch):
    acquire = world.store.acquire

    def ask(locks, *args, **terms):
        if LOCK in locks:
            raise DAMAGED
        return acquire(locks, *args, **terms)

    monkeypatch.setattr(world.store, "acquire", ask)


def declare(app, lock_key="k", **options):
    @app.task(base=SingletonTask, name=f"shop.{lock_key}", lock_key=lock_key, bind=True, **options)
    def task(self):
        return self.lease.key

    return task


@pytest.mark.parametrize("strategy", ["skip", "raise", "retry", "wait", "queue", "reject"])
def test_a_task_of_it_fails_after_some_tries(app, damaged, broker, strategy):
    """It is put off as in an outage, in case somebody mends it; then its error names the key."""
    task, headers = declare(app, lock_on_conflict=strategy), {}
    for _ in range(DAMAGED_TRIES):
        assert deliver(task, headers=headers).info.state == "RETRY"
        headers = broker.sent[-1]["headers"]
    deliver(task, headers=headers)
    result = app.AsyncResult("1")
    assert (result.state, len(broker.sent)) == ("FAILURE", DAMAGED_TRIES)
    assert isinstance(result.result, DamagedLockError)
    assert f"{LOCK!r} is a string, not a hash" in str(result.result)


def test_it_is_told_once_and_no_outage_is(app, damaged, broker, caplog):
    """One line names key and remedy; the server has answered, and other tasks run."""
    task = declare(app)
    for task_id in "123":
        deliver(task, task_id)
    assert deliver(declare(app, "other")).retval == "other"
    told = [message for message in caplog.messages if "delete the key" in message]
    assert len(told) == 1
    assert LOCK in told[0]
    assert "no task can take a lock" not in caplog.text
    assert "answers again" not in caplog.text


def test_a_process_forgets_what_it_has_told_in_the_end(app, caplog, monkeypatch):
    """However many locks are damaged, what is remembered of them is bounded."""
    monkeypatch.setattr("celery_dislock.locks.runtime.DAMAGED_MOST", 2)
    process = runtime_of(app).process
    for number in (1, 2, 3, 1, 1):
        process.lock_server_failed(DamagedLockError("redis://x", "why", f"dislock:{{{number}}}"))
    assert len(caplog.messages) == 4
    assert len(process._damaged) <= 2


@pytest.mark.parametrize(("choice", "state"), [("raise", "FAILURE"), ("run", None)])
def test_what_is_to_be_done_without_the_server_is_done_at_once(
    app, world, damaged, broker, choice, state
):
    """An app that fails its tasks, or runs them unlocked, has chosen so for this, too."""
    app.conf.dislock_on_unavailable = choice

    @app.task(base=SingletonTask, lock_key="k", name="shop.k")
    def task():
        return "unlocked"

    outcome = deliver(task)
    assert broker.sent == []
    assert (outcome.info.state if outcome.info else None) == state


def test_an_eager_task_fails_at_once(app, damaged):
    """It has nowhere to be put off to."""
    assert isinstance(declare(app).apply().result, DamagedLockError)


def test_tries_are_those_in_a_row(app, damaged, broker):
    """A task that has waited out an outage does not wait again for a damaged lock."""
    deliver(declare(app), headers={PUT_OFF_HEADER: DAMAGED_TRIES})
    assert broker.sent == []


@pytest.mark.parametrize("strategy", ["raise", "retry", "wait"])
def test_a_holder_that_cannot_be_read_fails_nobody(app, world, broker, strategy):
    """The lock is held: what comes second does as its strategy says, and says so."""
    world.lease("k", "somebody")
    owner, expires, _ = world.store.leases[LOCK]
    world.store.leases[LOCK] = (owner, expires, {"unreadable": "'by hand'"})
    task = declare(app, lock_on_conflict=strategy, **WAITS.get(strategy, {}))
    deliver(task)
    error = app.AsyncResult("1").result
    if strategy == "wait":
        assert error == "k"  # the lease has ended meanwhile
        return
    assert isinstance(error, LockHeldError)
    assert "whose record cannot be read: 'by hand'" in str(error)


WAITS = {"wait": {"lock_wait_timeout": 1000}}


def test_words_for_a_holder_of_any_shape():
    """Whatever stands where a task's name should be is shown, and nothing is called."""
    assert "[{}]" in in_words({"task": ["x"], "id": {}})


def quorum_of(*replies):
    made = Quorum([f"redis://host-{n}" for n in range(3)], {}, pause=lambda _: None)
    made._peers = type("Peers", (), {"majority": 2, "ask": lambda *_, **__: list(replies)})()
    return made


ACQUIRING = (ACQUIRE, [LOCK], "a/1", 5000, "{}", "x", 1, 0, 1)
AWAY = StoreError("redis://host", "it is away")


def test_a_majority_that_is_damaged_is_no_outage():
    """Several servers: the error names the lock where it is damaged on most that answer."""
    with pytest.raises(DamagedLockError, match="is a string"):
        quorum_of(DAMAGED, DAMAGED, [1, b"7"]).run(*ACQUIRING)
    with pytest.raises(StoreError) as caught:
        quorum_of(DAMAGED, AWAY, AWAY).run(*ACQUIRING)
    assert type(caught.value) is StoreError


def test_a_majority_goes_on_without_the_server_on_which_a_lock_is_damaged():
    """As without one that is away."""
    assert quorum_of(DAMAGED, [1, b"7"], [1, b"8"]).run(*ACQUIRING) == [1, 8]

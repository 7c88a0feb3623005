"""Bodies that are told to end for a newer task: when, how, and what becomes of them.

The newcomer is parked on the lock server; time is the test's.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager, suppress

import pytest
from celery import Celery

from celery_dislock import SettingsError, SingletonTask
from celery_dislock.exceptions import LockLostError, LockTermsError, SupersededError
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import Bounds, Lines, Ticket
from tests.holding import name_of

LIMIT = 30.0  # seconds
INTERVAL = 10.0  # seconds between two renewals
HOSTILE = 'new","parked":true,"x":"{}: \x00\\ü'


@pytest.fixture
def comes(driven):
    """Park a newer task; return the holders that it tells."""

    def park(task="new", key="k", sent=None):
        lines = Lines(driven.beside().runtime.process.store.lock_server, "dislock", "h", print)
        ticket = Ticket(
            *(f"{task}:0:0", False, b"message"),
            bounds=Bounds(1, overflow="replace"),
            sent=sent or int(driven.now * 1e6),
        )
        answer = lines.park([name_of(key)], f"{task}@w:1/1", 30.0, "{}", ticket)
        assert isinstance(answer, Parked)
        return answer.told

    def drop(task):
        lines = Lines(driven.beside().runtime.process.store.lock_server, "dislock", "h", print)
        return lines.drop(name_of("k"), f"{task}:0:0", '"replaced":"x"')

    park.drop = drop
    yield park
    driven.client.flushdb()


@pytest.fixture
def task(driven):
    """Declare a task whose eager body runs *during*, and then waits for what interrupts it."""
    app = Celery(set_as_current=False)
    driven.use(app)

    def declare(during, **options):
        @app.task(base=SingletonTask, lock_key="k", lock_on_conflict="cancel", bind=True, **options)
        def body(self):
            return during(self)

        return body

    return declare


def beside(call, *args):
    """Call it in another thread, as a watchdog is one."""
    threading.Timer(0, call, args).start()


def wait():
    """Wait until the body is interrupted; else end after the limit."""
    signal.sigtimedwait([], LIMIT)


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_block_is_told_at_its_next_renewal(driven, comes, thread):
    """With on_cancel="raise" it ends with SupersededError, which says who came."""
    caught = []

    def body():
        try:
            with driven.lock(on_cancel="raise"):
                comes("n1")
                beside(driven.advance, INTERVAL)
                while True:
                    pass
        except SupersededError as exc:
            caught.append((exc.key, exc.by))

    if thread == "main":
        body()
    else:
        other = threading.Thread(target=body)
        other.start()
        other.join(LIMIT)
    assert caught == [("k", "n1")]


def test_a_block_that_asks(driven, comes, heard):
    """With "warn" the lease knows, its signal is sent once, and ensure_held() raises."""
    with driven.lock(on_cancel="warn") as lease:
        assert comes() == (
            {
                "superseded": "new",
                "thread": lease.holder["thread"],
                **{name: lease.holder[name] for name in ("worker", "pid", "timeout")},
            },
        )
        assert (lease.superseded, lease.held) == ("", True)
        driven.advance(2 * INTERVAL)
        assert (lease.superseded, lease.held) == ("new", True)
        with pytest.raises(SupersededError):
            lease.ensure_held()
    assert [name for name, _ in heard].count("lock_superseded") == 1


def test_a_block_that_was_not_asked_goes_on(driven, comes, heard):
    """Without on_cancel it only can know."""
    with driven.lock() as lease:
        comes()
        driven.advance(INTERVAL)
        assert lease.superseded == "new"
        lease.ensure_held()
        assert comes.drop("new")
        driven.advance(INTERVAL)
        assert lease.superseded == ""
    assert "lock_superseded" not in [name for name, _ in heard]


def test_a_block_that_was_told_before_it_began_does_not_begin(driven, comes, receive):
    """As one whose lock was lost before."""

    def be_quick(**_):
        comes()
        driven.advance(INTERVAL)

    receive("lock_acquired", be_quick)
    with pytest.raises(SupersededError), driven.lock(on_cancel="raise"):
        pytest.fail("it has begun")


def test_a_block_within_a_block_cannot_ask_for_more(driven):
    """The outer one has the lease, and does not listen."""
    with (
        driven.lock(),
        pytest.raises(LockTermsError, match="on_cancel"),
        driven.lock(on_cancel="raise"),
    ):
        pytest.fail("it has begun")


def test_a_block_of_a_coroutine_is_told(driven, comes):
    """Its task is cancelled, and the block ends with SupersededError; the task goes on."""

    async def main():
        with pytest.raises(SupersededError, match="task new"):
            async with driven.dislock.async_lock("k", on_cancel="raise"):
                comes()
                await asyncio.to_thread(driven.advance, INTERVAL)
                await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        return "went on"

    assert asyncio.run(main()) == "went on"


@pytest.mark.parametrize("options", [{"on_cancel": "terminate"}, {"on_cancel": "no"}])
def test_what_a_block_cannot_do_is_refused(driven, options):
    with pytest.raises(SettingsError, match="on_cancel"):
        driven.lock(**options)


def test_the_apps_strategy_is_that_of_its_tasks(driven):
    """A block is not cancelled because tasks are, and may have a fixed expiry."""
    driven.dislock.runtime.conf["dislock_on_conflict"] = "cancel"
    with driven.lock(expire=5):
        pass


def test_an_error_of_its_own_is_a_failure(driven, comes, task):
    """One that was raised before it was told, at the same moment."""

    def body(_self):
        comes()
        driven.advance(INTERVAL - 1)
        raise OSError

    assert task(body).apply().state == "FAILURE"


def fails(interrupted):
    with interrupted:
        try:
            wait()
        finally:
            raise OSError


def returns(interrupted):
    with suppress(SupersededError), interrupted:
        wait()
    return "done"


def ends(interrupted):
    with interrupted:
        wait()


@pytest.mark.parametrize(
    ("body", "state"), [(ends, "REVOKED"), (fails, "REVOKED"), (returns, "SUCCESS")]
)
def test_a_body_is_told_and_its_task_ends_as_revoked(driven, comes, task, body, state):
    """Eager, too, whatever cleaning up led to; one that made the best of it has succeeded."""

    @contextmanager
    def interrupted():
        comes()
        beside(driven.advance, INTERVAL)
        yield

    assert task(lambda _self: body(interrupted())).apply().state == state
    driven.assert_waiting("k", 1)


def test_not_before(driven, comes, task):
    """It runs undisturbed for so long, counted from its acquisition, and is told then."""
    told = []

    def body(self):
        comes()
        driven.advance(INTERVAL)
        told.append(self.lease.superseded)
        driven.advance(4.9)
        told.append(self.lease.superseded)
        beside(driven.advance, 0.2)
        wait()

    assert task(body, lock_cancel_not_before=15).apply().state == "REVOKED"
    assert told == ["", ""]


def test_after_some_time_it_is_stopped(driven, comes, task, heard):
    """What `except Exception` does not catch is raised so long after it was told, once."""
    caught = []

    def body(_self):
        comes()
        try:
            beside(driven.advance, INTERVAL)
            wait()
        except Exception as exc:  # noqa: BLE001 -- as bodies do
            caught.append(type(exc))
        driven.advance(4)
        try:
            beside(driven.advance, 1)
            wait()
        except Exception:  # noqa: BLE001 -- as bodies do
            caught.append("never")

    assert task(body, lock_cancel_after=5).apply().state == "REVOKED"
    assert caught == [SupersededError]
    assert [name for name, _ in heard].count("lock_superseded") == 1


@pytest.mark.parametrize("every", [3, 4, 6, 9])
def test_a_look_for_a_newer_task_is_not_counted(driven, comes, every):
    """Whoever can send commands to workers neither brings a lease to its cap nor keeps it there."""
    with driven.lock(on_cancel="warn", max_renew_times=2) as lease:
        for number in range(1, 1 + int(2.9 * INTERVAL / every)):
            lease.lock.look_at(lease)
            driven.advance(every)
            assert lease.renewals == int(number * every / INTERVAL)
        driven.advance(INTERVAL)
        assert (lease.renewals, lease.capped) == (2, True)


def test_a_lease_that_is_lost_is_lost(driven, comes):
    """If both happen, the loss is what counts: somebody else may hold the lock."""
    with pytest.raises(LockLostError), driven.lock(on_cancel="warn") as lease:
        comes()
        driven.advance(INTERVAL)
        driven.lose("k")
        assert lease.lost


def test_an_id_can_say_nothing_but_itself(driven, comes):
    """It is data in the holder's record, whatever is in it."""
    with driven.lock(on_cancel="warn") as lease:
        [holder] = comes("new%22%2C%22parked%22%3Atrue")
        assert "parked" not in holder
        comes(HOSTILE.replace("\x00", "%00"))
        driven.advance(INTERVAL)
        assert lease.superseded == HOSTILE
        assert driven.lock().holders()[0].superseded == HOSTILE

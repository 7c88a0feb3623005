"""Blocks of locks in plain Python: who has them, how they end, and what is refused."""

import asyncio
import signal
import threading
from contextlib import ExitStack, suppress
from functools import partial

import pytest
import trio
from celery import Celery

from celery_dislock import (
    EventLoopError,
    LockHeldError,
    LockKeyError,
    LockLostError,
    NotOwnerError,
    SettingsError,
    SingletonTask,
    StoreError,
    scripts,
)
from celery_dislock.exceptions import LockTermsError
from proof.proxy import lose_reply
from tests.programs import run_code

LIMIT = 30.0  # seconds


@pytest.fixture
def lock(driven):
    return driven.lock()


@pytest.fixture
def somebody(driven):
    """Somebody else holds the lock."""
    with driven.hold("k"):
        driven.proxy.commands.clear()
        yield


class TestHolders:
    def test_a_thread_is_named_as_it_is_called_now(self, driven, lock):
        """Also if the thread held a lock under another name."""
        thread = threading.current_thread()
        before = thread.name
        try:
            for name in (before, "renamed", before):
                thread.name = name
                with lock as lease:
                    [holder] = lock.holders()
                    assert lease.holder["thread"] == name
                    assert holder.who.startswith(f"thread {name} on ")
        finally:
            thread.name = before

    def test_two_objects_of_one_key_count_together_without_a_round_trip(self, driven):
        """What one took the other may take again, and the lock is free after the last release."""
        first, second = driven.lock(), driven.lock()
        assert first.acquire()
        assert second.acquire()
        assert driven.asked(scripts.ACQUIRE) == 1
        first.release()
        assert second.lease.held
        second.release()
        driven.assert_free("k")

    def test_a_lock_of_one_of_several_keys_is_not_the_same_lock(self, driven):
        """Who has several keys would wait for itself."""
        with driven.lock(["k", "other"]), pytest.raises(LockHeldError, match="this very thread"):
            driven.lock("k").acquire()

    def test_a_lease_that_was_released_directly_is_not_found_again(self, driven, lock):
        """The next acquisition is one of its own."""
        with lock as lease:
            lease.release()
            assert lock.lease is None
            with lock as other:
                assert other.token > lease.token

    def test_a_lease_that_was_lost_is_not_taken_again_from_memory(self, driven, lock):
        """Taking it once more asks the lease, not the count."""
        lock.acquire()
        driven.lose("k")
        with pytest.raises(LockLostError):
            lock.acquire()
        with pytest.raises(LockLostError):
            lock.release()

    def test_what_is_not_held_is_not_released(self, driven, lock, somebody):
        """The error says who holds the lock, and that one keeps it."""
        for method in (lock.release, lock.extend):
            with pytest.raises(NotOwnerError, match="somebody else"):
                method()
        driven.assert_locked("k")

    def test_extend_renews_or_tells(self, driven, lock):
        """A lease that the server no longer knows is lost, whatever was believed of it."""
        lock.acquire()
        driven.fault(scripts.RENEW, lose_reply, times=1)  # it is asked again
        lock.extend()
        assert driven.asked(scripts.RENEW) == 2
        driven.stall(10)
        lock.extend()
        assert lock.lease.remaining > 29
        driven.client.delete("dislock:{k}")
        with pytest.raises(LockLostError):
            lock.extend()

    @pytest.mark.parametrize(
        ("has", "asked", "differs"),
        [
            ({}, {}, None),
            ({}, {"mode": "shared"}, None),
            ({"mode": "shared"}, {}, "mode='shared'"),
            ({"limit": 2}, {"mode": "shared"}, "mode='exclusive'"),
            ({"limit": 2}, {"limit": 3}, "limit=2"),
            ({"watchdog_timeout": 9.0}, {"watchdog_timeout": 8.0}, "watchdog_timeout=9.0"),
            ({"expire": 9.0}, {"watchdog_timeout": 9.0}, "expire=9.0"),
            ({}, {"on_lost": "raise"}, "on_lost='warn'"),
            ({"on_lost": "raise"}, {}, None),
        ],
    )
    def test_a_lock_is_taken_once_more_on_no_stronger_terms(self, driven, has, asked, differs):
        """Shared under exclusive is no more than one has; all else would change the lease."""
        with driven.lock(**has) as lease:
            if differs is None:
                with driven.lock(**asked) as again:
                    assert again is lease
                return
            with pytest.raises(LockTermsError) as caught:
                driven.lock(**asked).__enter__()
            assert differs in str(caught.value)
            assert lease.held


def block(lock):
    """Stay in a block until the generator is closed."""
    with lock:
        yield


def stack(lock):
    """Stay in a stack."""
    with ExitStack() as stack:
        stack.enter_context(lock)
        yield


@pytest.mark.parametrize("stay", [block, stack])
class TestEnds:
    def test_blocks_of_one_lock_end_in_any_order(self, driven, lock, stay):
        """The lock is free after the last of them."""
        generators = [stay(lock) for _ in range(3)]
        for generator in generators:
            next(generator)
        for generator in generators:
            driven.assert_locked("k")
            generator.close()
        driven.assert_free("k")

    def test_an_exception_of_the_body_goes_on_with_a_note(self, driven, lock, stay):
        """A loss does not hide what the body itself ended with."""
        generator = stay(lock)
        next(generator)
        driven.lose("k")
        with pytest.raises(KeyError) as caught:
            generator.throw(KeyError())
        assert "no longer has it" in caught.value.__notes__[0]

    def test_a_lock_that_was_not_taken_leaves_nothing(self, driven, lock, stay):
        """The next block takes it."""
        with driven.outage(), suppress(StoreError):
            next(stay(lock))
        for _ in stay(lock):
            driven.assert_locked("k")
        driven.assert_free("k")


@pytest.mark.parametrize("way", ["block", "release"])
def test_an_inner_end_tells_of_a_loss_that_is_known(driven, lock, way):
    """What follows in the outer block does not run without the lock."""
    with pytest.raises(LockLostError), lock, ExitStack() as stack:
        if way == "block":
            stack.enter_context(lock)
        else:
            lock.acquire()
            stack.callback(lock.release)
        driven.lose("k")
        stack.close()
        pytest.fail("it goes on")
    assert lock.lease is None


def test_a_lock_released_and_taken_anew_in_its_block_ends_with_it(driven, lock):
    """As threading's locks do: the block's end undoes the acquisition that there is."""
    with lock:
        lock.release()
        driven.assert_free("k")
        lock.acquire()
    driven.assert_free("k")


def test_a_writer_that_stops_writing_stays_a_writer(driven, lock):
    """Until it has stopped to read, too."""
    lock.acquire()
    reader = driven.lock(mode="shared")
    reader.acquire()
    lock.release()
    assert not driven.beside().lock("k", mode="shared").try_acquire()
    reader.release()
    driven.assert_free("k")


class TestRefusals:
    @pytest.mark.parametrize(
        ("blocking", "timeout"),
        [(True, -1), (True, float("inf")), (True, float("nan")), (False, 1)],
    )
    def test_a_timeout_that_means_nothing_is_refused(self, driven, lock, blocking, timeout):
        """It is an error of the caller's, and asks nobody."""
        with pytest.raises(SettingsError, match="timeout"):
            lock.acquire(blocking, timeout)
        assert driven.asked(scripts.ACQUIRE) == 0

    @pytest.mark.parametrize("method", ["acquire", "try_acquire"])
    def test_only_a_block_can_be_interrupted(self, driven, method):
        """on_lost="raise" needs to know where what it stops has its end."""
        with pytest.raises(SettingsError, match="use one"):
            getattr(driven.lock(on_lost="raise"), method)()

    @pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)])
    def test_a_blocking_lock_in_a_loop_is_refused(self, driven, lock, run):
        """All coroutines of the loop would stand still, and count as one owner."""

        async def take():
            with pytest.raises(EventLoopError, match=r"dislock\.async_lock.*to_thread"):
                lock.try_acquire()
            with pytest.raises(EventLoopError, match=r"dislock\.async_lock.*to_thread"):
                async with lock:
                    pass

        run(take())
        assert driven.asked(scripts.ACQUIRE) == 0
        with lock:  # after it
            pass

    @pytest.mark.parametrize(
        "key", ["", "a{b", "a:<b>", "a:%(b)s", [], ["a", ""], ["a", "<b.c>"], b"k", None, 7]
    )
    def test_a_key_that_cannot_be_used(self, driven, key):
        """The error is the same as for a task."""
        with pytest.raises(LockKeyError):
            driven.lock(key)

    @pytest.mark.parametrize(
        ("option", "value"), [("mode", "both"), ("timeout", -1), ("fair", "no")]
    )
    def test_an_error_names_the_option_as_it_was_given(self, driven, option, value):
        """Without the prefix of the task's option."""
        with pytest.raises(SettingsError, match=f" {option}={value!r}"):
            driven.lock(**{option: value})


def test_options_that_are_none_are_not_given(driven):
    """The setting holds for those."""
    with driven.lock(watchdog_timeout=None, mode="shared") as lease:
        assert lease.holder["timeout"] == 30.0
        assert driven.lock().holders()[0].mode == "shared"


def test_an_exception_between_grant_and_return_gives_the_lock_back(driven, lock):
    """A signal handler may raise before the caller is known to hold it: nobody could release it."""

    def strike(_number, _frame):
        raise ZeroDivisionError

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        for _ in range(3):  # in the middle of the wait for the reply
            driven.fault(scripts.ACQUIRE, lambda: signal.raise_signal(signal.SIGUSR1), times=1)
            with pytest.raises(ZeroDivisionError):
                lock.acquire()
            driven.advance(1.1)
            driven.assert_free("k")
    finally:
        signal.signal(signal.SIGUSR1, before)


class TestInterruption:
    """A block with on_lost="raise" is stopped where it is."""

    @pytest.fixture
    def lock(self, driven):
        return driven.lock(on_lost="raise")

    def test_another_thread_is_interrupted_between_bytecodes(self, driven, lock):
        """It spins, and gets the error."""
        caught = []
        ready = threading.Event()

        def body():
            try:
                with lock:
                    ready.set()
                    while True:
                        pass
            except LockLostError as exc:
                caught.append(exc)

        thread = threading.Thread(target=body)
        thread.start()
        assert ready.wait(LIMIT)
        driven.lose("k")
        thread.join(LIMIT)
        assert [exc.key for exc in caught] == ["k"]

    @pytest.mark.parametrize("thread", ["main", "other"])
    def test_nothing_reaches_a_thread_once_the_block_has_ended(self, driven, lock, thread):
        """A lock that was taken before the block is lost after it."""
        plain, went_on = driven.lock(), []

        def body():
            plain.acquire()
            with driven.lock():
                pass
            with suppress(LockTermsError), lock:
                pass
            driven.lose("k")
            signal.sigtimedwait([], 0)
            went_on.append(True)
            with pytest.raises(LockLostError):
                plain.release()

        if thread == "main":
            body()
        else:
            other = threading.Thread(target=body)
            other.start()
            other.join(LIMIT)
        assert went_on

    def test_an_inner_block_leaves_the_outer_one_armed(self, driven, lock):
        """A signal ends the wait of the main thread, and its handler raises what and why."""
        losing = threading.Timer(0, driven.lose, ("k",))
        with pytest.raises(LockLostError) as caught, lock:
            with driven.lock("inner", on_lost="raise"):
                pass
            losing.start()
            signal.sigtimedwait([], 60)
        losing.join()
        assert caught.value.key == "k"
        assert "no longer has it" in caught.value.reason

    def test_blocks_that_end_out_of_order_leave_nothing_armed(self, driven, lock):
        """Of two generators the outer may end first: its end is not forgotten by the inner's."""
        outer, inner = block(lock), block(driven.lock("inner", on_lost="raise"))
        next(outer)
        next(inner)
        outer.close()
        driven.lose("k")
        inner.close()
        signal.raise_signal(signal.SIGURG)

    def test_a_body_whose_lock_is_lost_before_it_begins_does_not_begin(self, driven, lock, receive):
        """What was lost before stops it where a loss in the body would have."""
        receive("lock_acquired", lambda **_: driven.lose("k"))
        ran = []
        for lock_, runs in ((lock, False), (driven.lock(), True)):
            with pytest.raises(LockLostError), lock_:
                ran.append(True)
            assert bool(ran) is runs


CAUGHT = "caught LockLostError"


@pytest.mark.parametrize(
    ("options", "is_capped", "ends"),
    [
        ({"lock_on_lost": "raise"}, False, CAUGHT),
        ({"lock_on_lost": "terminate"}, False, LockLostError),
        ({"lock_on_cap": "raise"}, True, CAUGHT),
        ({"lock_on_cap": "terminate"}, True, LockLostError),
        ({"lock_on_lost": "terminate", "lock_on_cap": "raise"}, True, CAUGHT),
        ({"lock_on_lost": "raise", "lock_on_cap": "terminate"}, False, CAUGHT),
    ],
)
def test_a_task_is_stopped_as_its_options_say(driven, options, is_capped, ends):
    """A body that goes on after errors catches what "raise" raises, and not "terminate"."""
    app = Celery(set_as_current=False)
    driven.use(app)
    ending = partial(driven.advance, 25) if is_capped else partial(driven.lose, "k")
    over = threading.Timer(0, ending)

    @app.task(base=SingletonTask, lock_key="k", max_renew_times=1, **options)
    def resist():
        try:
            over.start()
            signal.sigtimedwait([], LIMIT)
        except Exception as exc:  # noqa: BLE001 -- as bodies do
            return f"caught {type(exc).__name__}"

    ended = resist.apply().result
    over.join()
    assert (ended if isinstance(ended, str) else type(ended)) == ends


TRACED = """
import logging, sys, threading
logging.disable()
from celery_dislock import LockLostError
from tests.integration.driven import driving

def body():
    try:
        with driven.lock(on_lost="raise"):
            driven.lose("k")
            while True: pass
    except LockLostError:
        pass

with driving() as driven:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
sys.settrace(lambda *_: None)
(lambda: None)()
print("traced")
"""


def test_a_process_can_be_traced_after_a_thread_was_interrupted():
    """Python 3.11 traced one instruction for ever: it was told of an exception that was gone."""
    done = run_code(TRACED)
    assert (done.stdout, done.stderr) == ("traced\n", "")

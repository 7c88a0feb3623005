"""Interrupting a body that runs in this thread or another one."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading

import pytest

from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.interruption import _MainThreadTarget, running_here

LOST = LockLostError("k", "stolen")


def test_the_main_thread_is_interrupted_inside_a_blocking_call():
    """A signal ends the wait, and its handler raises the very exception."""
    target = running_here()
    thrower = threading.Timer(0, target.throw, (LOST,))
    with pytest.raises(LockLostError) as caught:
        thrower.start()
        signal.sigtimedwait([], 60)
        thrower.join()
    target.disarm()
    assert caught.value is LOST


def test_another_thread_is_interrupted_between_bytecodes():
    """The exception carries its data, pickles as what it stands for, and ends the loop."""
    caught = []
    targets = []
    ready = threading.Event()

    def body():
        target = running_here()
        targets.append(target)
        try:
            ready.set()
            while True:
                pass
        except LockLostError as exc:
            caught.append(exc)
        finally:
            target.disarm()

    thread = threading.Thread(target=body)
    thread.start()
    assert ready.wait(30)
    targets[0].throw(LOST)
    thread.join(30)
    [exc] = caught
    assert (exc.key, exc.reason, str(exc)) == ("k", "stolen", str(LOST))
    assert type(pickle.loads(pickle.dumps(exc))) is LockLostError


def test_nothing_reaches_the_main_thread_once_the_body_has_ended():
    """A late interruption does not hit the next task."""
    target = running_here()
    target.disarm()
    target.throw(LOST)
    signal.raise_signal(signal.SIGURG)


def test_nothing_reaches_another_thread_once_the_body_has_ended():
    """A late interruption does not hit what the thread does next."""
    ended = threading.Event()
    thrown = threading.Event()
    targets = []
    after = []

    def body():
        target = running_here()
        targets.append(target)
        target.disarm()
        ended.set()
        thrown.wait(30)
        after.append("alive")

    thread = threading.Thread(target=body)
    thread.start()
    assert ended.wait(30)
    targets[0].throw(LOST)
    thrown.set()
    thread.join(30)
    assert after == ["alive"]


def test_an_inner_body_leaves_the_outer_one_armed():
    """An eager task inside a task's body does not switch off the outer one's interruption."""
    outer = running_here()
    running_here().disarm()
    with pytest.raises(LockLostError):
        outer.throw(LOST)
    outer.disarm()


def test_blocks_that_end_out_of_order_leave_nothing_armed():
    """Of two generators the outer may end first: its end is not forgotten by the inner's."""
    outer, inner = running_here(), running_here()
    outer.disarm()
    inner.disarm()
    assert _MainThreadTarget.armed == ()


TRACED = """
import sys, threading
from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.interruption import running_here

def body():
    target = running_here()
    try:
        target.throw(LockLostError("k", "stolen"))
        while True: pass
    except LockLostError:
        pass
    finally:
        target.disarm()

thread = threading.Thread(target=body)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
(lambda: None)()
print("traced")
"""


def test_a_process_can_be_traced_after_a_thread_was_interrupted():
    """Python 3.11 traced one instruction for ever: it was told of an exception that was gone."""
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("traced\n", "")

"""
Blame a connection to Redis that is left to the garbage collector on the test that made it.

redis-py closes such a connection without a word if it is a blocking one, and warns if it is an
asyncio one: in whichever thread and test the collector runs then, perhaps in a loop that has ended.
Here both are noted instead, and the test that made the connection fails after its fixtures have
ended.  A connection that can still be reached then may be collected in a later test; that one
fails, and its error names the one that made the connection.

Only the tests of :data:`HELD_TO` fail: those of other tiers still leave some.
"""

import contextlib
import gc
import os
from asyncio import StreamWriter
from socket import socket
from weakref import ref

import pytest
from celery.result import AsyncResult
from redis import connection as blocking
from redis.asyncio import connection as asynchronous

HELD_TO = ("tests/unit/", "tests/integration/", "test_run.py::")  # the last tests this module
ON_PURPOSE = "::test_a_loop_that_was_closed_by_hand_is_forgotten"
TEST = "PYTEST_CURRENT_TEST"  # in the environment: the test and its phase, set by pytest

unsubscribe = AsyncResult.__del__

_makers = {}  # by process and the id of the connection there
_made = []  # by the test that runs; where each keeps its socket
_left = []  # appended to in any thread, at any time


def note_connections():
    """Note which test makes each connection, and those that are collected while they are open."""
    _note(blocking.AbstractConnection, "_sock")
    _note(asynchronous.AbstractConnection, "_writer")


def keep_subscriptions():
    """Let a result stay subscribed when it is collected: by then its server may have ended."""
    del AsyncResult.__del__


def _note(kind, place):
    connect = kind.connect

    def note_maker(self):
        _makers[os.getpid(), id(self)] = os.environ.get(TEST, "no test ()").rpartition(" ")[0]
        _made.append((ref(self), place))
        return connect(self)

    def note_left(self):
        end = getattr(self, place, None)
        if isinstance(end, (socket, StreamWriter)):  # fakeredis has other things there
            if maker := _makers.get((os.getpid(), id(self))):  # a fork has those of its parent
                _left.append(f"{maker} made {self!r}")
            with contextlib.suppress(Exception):  # its loop has ended
                end.close()

    kind.connect = note_maker
    kind.__del__ = note_left


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Fail if a connection was left."""
    yield
    if _is_held_to(item.nodeid) and any(getattr(made(), place, None) for made, place in _made):
        gc.collect()
    _made.clear()
    left = [said for said in (_left.pop() for _ in range(len(_left))) if _is_held_to(said)]
    if left:
        pytest.fail(f"left open for the garbage collector: {'; '.join(left)}", pytrace=False)


def _is_held_to(name):
    return name.startswith(HELD_TO) and ON_PURPOSE not in name

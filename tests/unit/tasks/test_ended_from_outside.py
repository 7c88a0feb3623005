"""Every way in which a body is ended from outside, and what each kind of task leaves then.

The rows say what becomes of the message and of the result, as Celery decides that.  All else
follows from it: the lock is free; a parked task's claim stays for a message that comes again, and
else its done-mark keeps copies from running; a key stays reserved until the result is stored.
"""

import inspect
import os
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import celery
import pytest
from billiard.exceptions import (
    SoftTimeLimitExceeded,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery import states
from celery.worker.request import Request

from celery_dislock.parking.park import Parking
from celery_dislock.tasks import request as recovery
from tests.declaring import declare
from tests.driven import Child, held, reservation
from tests.unit.deliveries import deliver, noted

# Whether a process that a body has left is known as lost, and whether Celery stores RETRY for every
# task that it stops.
KNOWS_EXITS = celery.VERSION >= (5, 7)
TELLS_ALL = "emit_retry" not in inspect.signature(Request.cancel).parameters
POOL = SimpleNamespace(terminate_job=lambda *_: None)

# When its message is acknowledged.
EARLY, LATE, COMES_BACK, DEAD_LETTERS = ACKS = (
    {},
    {"acks_late": True},
    {"acks_late": True, "reject_on_worker_lost": True},
    {"acks_late": True, "acks_on_failure_or_timeout": False},
)

# What becomes of its message.
OVER, AGAIN, DEAD = "is over", "comes again", "is dead-lettered"

KINDS = {  # options of the task, the lock of its turn
    "plain": ({"lock_on_conflict": "skip"}, ""),
    "parked": ({"lock_on_conflict": "queue"}, "k"),
    "granted as it was parked": ({"lock_on_conflict": "queue"}, ""),
    "unique": ({"lock_unique_until": "end"}, ""),
    "several keys": ({"lock_on_conflict": "queue", "lock_key": ["k", "z"]}, "k"),
    "rate": ({"lock_on_conflict": "queue", "lock_rate": "100/m"}, "k"),
}
HAVE_A_CLAIM = KINDS.keys() - {"plain", "unique"}


@pytest.fixture(autouse=True)
def alive(monkeypatch):
    """Ids of processes that are said to live; and what is done later."""
    state = SimpleNamespace(pids={Child.pid}, later=[])
    monkeypatch.setattr(recovery, "is_alive", lambda pid: pid in state.pids)
    monkeypatch.setattr(recovery, "_soon", state.later.append)
    return state


@contextmanager
def granted_as_it_was_parked(app, lock_server):
    """Let the lock be held when a task asks for it, and free when it asks for a place in line."""
    end_it = partial(lock_server.send, "DEL", "dislock:{k}")
    with held(app, task_id="9"), patch.object(Parking, "_store_state", lambda *_: end_it()):
        yield


class Ended:
    """A task that is ended, and its request in the main process."""

    def __init__(self, child, alive):
        self.request, self._child, self._alive = child.request, child, alive

    def throw(self, exc, pid=Child.pid):
        """Raise an exception in the body; return what its tracer answers."""
        with patch.object(os, "getpid", lambda: pid):
            try:
                return self._child._worker.throw(exc)
            except BaseException as error:  # noqa: BLE001 -- what the process dies of
                return error

    def die(self, *, obeys=False):
        """End the process; with *obeys* by a signal, on which its body ends."""
        if obeys:
            self.throw(SystemExit(15))
        self._alive.pids.clear()

    def fail(self, exc):
        """Tell the request of an end, as the pool does."""
        self.request.on_failure(SimpleNamespace(exception=exc, exc_info=None, traceback=""))

    def late(self):
        """Do what was put off."""
        while self._alive.later:
            self._alive.later.pop()()


def soft_limit(ended):
    failed = ended.throw(SoftTimeLimitExceeded()).retval
    ended.request.on_failure(failed, return_ok=True)


def hard_limit(ended, *, obeys=False):
    ended.fail(TimeLimitExceeded(5))
    ended.request.on_timeout(False, 5)
    ended.die(obeys=obeys)


def hard_limit_of_a_greenlet(ended):
    ended.request.worker_pid = os.getpid()
    ended.throw(BaseException("gevent.Timeout"))
    ended.request.on_timeout(False, 5)


def killed(ended):
    ended.die()
    ended.fail(WorkerLostError("signal 9 (SIGKILL)"))


def left(ended):
    ended.die(obeys=True)
    ended.fail(SystemExit(1))


def terminated(ended, *, obeys=False):
    ended.request.terminate(POOL, "TERM")
    ended.die(obeys=obeys)
    ended.fail(Terminated(15))


def stopped(ended):
    told = {} if TELLS_ALL else {"emit_retry": not ended.request.task.acks_late}
    ended.request.cancel(POOL, "TERM", **told)
    ended.die(obeys=True)
    ended.fail(Terminated(15))


def obeying(end):
    return lambda ended: end(ended, obeys=True)


FAILURE, REVOKED, RETRY = states.FAILURE, states.REVOKED, states.RETRY
# What ends it, what becomes of its message for each of ACKS, and its result: of the message that
# comes again, if it is another.
WAYS = {
    "soft time limit": (soft_limit, (OVER, OVER, OVER, DEAD), FAILURE, FAILURE),
    "hard time limit": (*(hard_limit, (OVER, OVER, OVER, AGAIN), FAILURE, FAILURE),),
    "hard time limit, obeyed": (
        *(obeying(hard_limit), (OVER, OVER, OVER, AGAIN), FAILURE, FAILURE),
    ),
    "hard time limit of a greenlet": (
        *(hard_limit_of_a_greenlet, (OVER, OVER, OVER, AGAIN), FAILURE, FAILURE),
    ),
    "killed": (killed, (OVER, OVER, AGAIN, DEAD), FAILURE, states.PENDING),
    "left its process": (left, (OVER, OVER, AGAIN, DEAD), FAILURE, states.PENDING),
    "terminated": (terminated, (OVER, OVER, OVER, OVER), REVOKED, REVOKED),
    "terminated, obeyed": (obeying(terminated), (OVER, OVER, OVER, OVER), REVOKED, REVOKED),
    "stopped with its worker": (
        *(stopped, (AGAIN, AGAIN, AGAIN, AGAIN), None, RETRY if TELLS_ALL else states.PENDING),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acks", range(len(ACKS)), ids=["early", "late", "comes back", "dead"])
@pytest.mark.parametrize("way", WAYS)
def test_what_it_leaves(app, lock_server, broker, alive, way, acks, kind):
    """The lock is free, and whether a copy runs is what becomes of the message."""
    if way == "left its process" and not KNOWS_EXITS:
        pytest.skip("older Celery gives up its worker")
    end, fates, result, result_again = WAYS[way]
    fate, (options, turn) = fates[acks], KINDS[kind]
    options = {**options, **ACKS[acks]}
    headers = noted(ticket=[f"dislock:{{{turn}}}", "1:0:0"]) if turn else {}
    if kind == "unique":
        declare(app, **options).apply_async(task_id="1")
        headers = {"dislock": broker.last.headers["dislock"]}
        app.tasks.pop("shop.t")
    was_held = kind == "granted as it was parked"
    with granted_as_it_was_parked(app, lock_server) if was_held else nullcontext():
        ended, told = Ended(Child(app, headers=headers, **options), alive), []
    request = ended.request
    request._on_ack = lambda *_: told.append(OVER)
    request._on_reject = lambda *args: told.append(AGAIN if args[-1] else DEAD)
    request.on_accepted(Child.pid, time.monotonic())
    end(ended)
    ended.late()

    known = told[-1] if told else AGAIN
    stopped_early = way == "stopped with its worker" and not options.get("acks_late")
    assert known == (OVER if stopped_early else fate)  # Celery loses it then, but not its copies
    state = RETRY if stopped_early else result_again if fate == AGAIN else result
    assert app.AsyncResult("1").state == state
    assert lock_server.locks() == []
    left = lock_server.contents()
    has_claim = kind in HAVE_A_CLAIM
    assert "dislock:{k}:tickets" not in left
    assert ("dislock:{k}:running" in left) is (has_claim and fate == AGAIN)
    assert ("dislock:{k}:done:1:0:0" in left) is (has_claim and fate == OVER)
    if kind == "unique":
        assert bool(reservation(request.task)) is (state not in states.READY_STATES)

    app.tasks.pop("shop.t")
    ran = []
    copy = declare(app, lambda: ran.append("copy"), **options)
    deliver(copy, headers=headers, delivery_info={"redelivered": True})
    assert bool(ran) is not (has_claim and fate == OVER)


def test_a_copy_that_dies_leaves_the_claim_of_another(app, lock_server, alive):
    """It was about to be put off; that which runs keeps its claim, and its end is marked."""
    headers = noted(ticket=["dislock:{k}", "1:0:0"])
    first = Child(app, headers=headers, lock_on_conflict="queue", lock_limit=2)
    with patch.object(Child, "pid", Child.pid + 1):
        request = first.request
        request.worker_pid = Child.pid
        request._on_ack = lambda *_: None
        request.acknowledge()
        Ended(first, alive).fail(WorkerLostError("x"))
    assert "dislock:{k}:running" in lock_server.contents()
    first.go_on()
    assert lock_server.contents().keys() == {"dislock:{k}:done:1:0:0"}


def test_a_turn_that_cannot_be_ended_is_told(app, lock_server, alive, caplog):
    """The worker goes on, and says that a copy may run."""
    child = Child(app, headers=noted(ticket=["dislock:{k}", "1:0:0"]), lock_on_conflict="queue")
    request = child.request
    request._on_ack = lambda *_: None
    request.on_accepted(Child.pid, time.monotonic())
    lock_server.away = True
    Ended(child, alive).fail(WorkerLostError("x"))
    assert "Task shop.t[1] has ended, but a copy of it may run again: lock server" in caplog.text
    assert app.AsyncResult("1").state == FAILURE
    lock_server.away = False

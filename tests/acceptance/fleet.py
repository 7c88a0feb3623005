"""Real ``celery worker`` processes, and what a test sees of one lock that they fight for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import result_from_tuple
from kombu.transport import redis as redis_transport

from celery_dislock.servers.view import parse_reservation
from tests.acceptance import scenarios
from tests.forked import start_celery
from tests.groups import kill_group
from tests.pace import PACE

ROOT = Path(__file__).parents[2]
LIMIT = 30.0  # seconds until a condition must hold; half the expiry of the scenarios' locks
POLL = 0.02  # seconds between two looks
CONCURRENCY = {"prefork": 3, "threads": 6, "gevent": 10, "eventlet": 10, "solo": 1}
# Where kombu has no such option, it looks for messages to redeliver every 100 s, on Redis.
REDELIVERY_IS_SLOW = not hasattr(redis_transport.Channel, "unacked_restore_interval")


def fleets(*names):
    """Run a test on the pair of each of these pools or brokers."""
    return pytest.mark.parametrize("fleet", names, indirect=True)


PREFORK = fleets("prefork")
BROKERS = fleets("prefork", "rabbitmq")
T = TypeVar("T")


def wait_for(what, condition, limit=LIMIT):
    """Look until the condition gives something true, and return that; fail after the limit."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit:g} s in vain: {what}")
        time.sleep(POLL)
    return found


def value_of(result, limit=LIMIT):
    """Look until a task has ended, and return its value: Celery 5.5 may not hear of the end."""
    wait_for(f"task {result.id} has ended", result.ready, limit)
    return result.get()


class Worker:
    """One ``celery worker`` process in a session of its own, with its log in a file."""

    def __init__(
        self, folder, name, *options, app="tests.acceptance.scenarios", env=None, heartbeat=False
    ):
        self.name = name
        self.log_file = folder / f"{name}.log"
        arguments = ["-A", app, "worker", "-n", f"{name}@here"]
        arguments += ["--loglevel", "INFO", "--without-gossip", "--without-mingle"]
        arguments += [*(() if heartbeat else ("--without-heartbeat",)), *options]
        paths = os.pathsep.join([str(ROOT), str(folder)])
        env = {**os.environ, "PYTHONPATH": paths, **(env or {})}
        self.process = start_celery(arguments, folder, env, self.log_file)

    @property
    def log(self):
        """All that the worker and its pool have said."""
        return self.log_file.read_text("utf-8", "replace")

    @property
    def running(self):
        return self.process.poll() is None

    def wait_until_ready(self):
        wait_for(f"{self.name} is ready", lambda: " ready." in self.log or not self.running)
        assert self.running, f"{self.name} ended with {self.process.returncode}:\n{self.log}"

    def wait_until_it_says(self, words):
        wait_for(f"{self.name} says {words!r}", lambda: words in self.log)

    def wait_until_it_ends(self):
        """Return the exit status."""
        wait_for(f"{self.name} ends", lambda: not self.running)
        return self.process.returncode

    def terminate(self):
        """Ask for a warm shutdown; does not wait for it."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self):
        """End the worker and its pool with SIGKILL, as a power cut does."""
        kill_group(self.process)


class Fleet:
    """Workers of one pool that share a queue.

    Where their broker is not the Redis of the locks, *broker_url* says which it is.
    """

    def __init__(self, pool, queue, workers, broker_url=None):
        self.pool = pool
        self.queue = queue
        self.workers = workers
        self.broker_url = broker_url

    @property
    def worker(self):
        """The only worker."""
        (worker,) = self.workers
        return worker

    def send(self, task, *args, **options):
        with self.connection() as connection:
            return task.apply_async(args, queue=self.queue, connection=connection, **options)

    def revoke(self, task_id, **options):
        """Tell these workers; with ``reply=True``, wait until all of them have answered."""
        return self._tell("revoke", task_id, **options)

    def leases(self):
        """Return what these workers tell of the tasks that they run, if they do within moments."""
        within = {"limit": len(self.workers), "timeout": 2.0 * PACE}
        answers = self._tell("broadcast", "dislock", reply=True, **within) or ()
        if len(answers) < len(self.workers):
            return [{"held": None}]
        return [lease for each in answers for one in each.values() for lease in one["leases"]]

    def serve(self, queue):
        """Have these workers serve another queue, too; wait until they do."""
        self._tell("add_consumer", queue, reply=True)

    def leave(self, queue):
        """Have these workers serve a queue no more; wait until they do not."""
        self._tell("cancel_consumer", queue, reply=True)

    def _tell(self, command, *args, **options):
        url = self.broker_url or scenarios.app.conf.broker_url
        # A control command goes to its app's own broker, whatever connection it is given.
        with Celery(broker=url, set_as_current=False) as client:
            names = [f"{worker.name}@here" for worker in self.workers]
            tell = getattr(client.control, command)
            return tell(*args, destination=names, **{"timeout": LIMIT, **options})

    @contextlib.contextmanager
    def connection(self):
        """A connection to the broker; None, for one of the app's own, where that will do."""
        if self.broker_url is None:
            yield None
        else:
            with scenarios.app.connection_for_write(self.broker_url) as connection:
                yield connection

    def start(self, canvas):
        """Let a worker send a canvas, all of it to its own broker; return the canvas's result."""
        written = self.send(scenarios.start, canvas).get(timeout=LIMIT)
        return result_from_tuple(written, app=scenarios.app)

    def signature(self, task, *args):
        """Make a signature that goes to this fleet and ignores the result before it."""
        return task.si(*args).set(queue=self.queue)

    def says(self, *words):
        """Whether one of the workers has logged a line with all these words."""
        return self.times_it_says(*words) > 0

    def times_it_says(self, *words):
        """Count the lines with all these words that the workers have logged."""
        logs = [worker.log for worker in self.workers]
        told = (log for log in logs if all(word in log for word in words))  # spares most looks
        lines = (line for log in told for line in log.splitlines())
        return sum(all(word in line for word in words) for line in lines)


class LeaseInRedis(NamedTuple):
    """A lease as the lock server has it."""

    owner: str
    expires_ms: int
    token: int
    acquired_ms: int
    holder: dict

    @property
    def extended_by(self):
        """Seconds from the acquisition to the expiry."""
        return (self.expires_ms - self.acquired_ms) / 1000


class Scene:
    """The lock of one test: its key, what the tasks of that key report, and what is in Redis."""

    def __init__(self, key, client):
        self.key = key
        self.redis = client
        self.lock = f"dislock:{{{key}}}"

    def open_gate(self, task_id=None):
        """Let the bodies of this key end, those to come included; or one that stays by itself."""
        self.redis.set(scenarios.gate_of(task_id or self.key), "open")

    def open_gates(self, holder):
        """Let the bodies of this key end, and the one that :meth:`hold` began."""
        self.open_gate()
        self.open_gate(holder.id)

    def begin(self, fleet, task=scenarios.hold, **options):
        """Send a task; return when its body has begun."""
        result = fleet.send(task, self.key, **options)
        self.wait_for_report("begin", id=result.id)
        return result

    def hold(self, fleet):
        """Let a task hold the lock until a gate is open that is its own."""
        return self.begin(fleet, scenarios.hold_by_itself)

    def finish(self, result):
        """Open the gate of the key; return what the task returns."""
        self.open_gate()
        return result.get(timeout=LIMIT)

    def park(self, fleet, *args, task=scenarios.hold_or_queue, **options):
        """Send a task that is parked; return when it is."""
        before = len(self.line)
        result = fleet.send(task, self.key, *args, **options)
        self.wait_for_line(before + 1)
        return result

    def assert_others_stay_out(self, fleet, holder=None):
        """Send another task of this key: it is skipped, and is told who holds the lock."""
        with pytest.raises(TaskRevokedError, match=holder and holder.id):
            fleet.send(scenarios.step, self.key).get(timeout=LIMIT)

    @property
    def inside(self):
        """The report of the body that has begun last, unless it has ended."""
        return [event for event in self.history[-1:] if event["what"] == "begin"]

    @property
    def begun(self):
        """The tasks of this key in the order in which their bodies began."""
        return [event["id"] for event in self.reported("begin")]

    @property
    def history(self):
        """What the executions of this key have reported, in the order in which it happened."""
        events = self.redis.lrange(scenarios.history_of(self.key), 0, -1)
        return [json.loads(event) for event in events]

    def reported(self, what, **more):
        """Those reports that say this."""
        wanted = {"what": what, **more}
        return [event for event in self.history if wanted.items() <= event.items()]

    @property
    def releases(self):
        """The signals ``lock_released`` about this key, in the order in which they came."""
        events = self.redis.lrange(scenarios.releases_of(self.key), 0, -1)
        return [json.loads(event) for event in events]

    def wait_for_report(self, what, times=1, **more):
        """Wait until so many executions have reported this; return the last of them."""
        said = " ".join([what, *(f"{name}={value}" for name, value in more.items())])
        wait_for(
            f"{times} x {said!r} in the history of {self.key}",
            lambda: len(self.reported(what, **more)) >= times,
        )
        return self.reported(what, **more)[times - 1]

    @property
    def line(self):
        """Those who wait, as the lock server has them, in their order."""
        return self.redis.zrange(f"{self.lock}:line", 0, -1)

    def wait_for_line(self, many):
        """Wait until so many stand in line, or nobody any more; return them."""
        wait_for(f"{many} in line for {self.key}", lambda: len(self.line) == many)
        return self.line

    @property
    def leases(self):
        return leases_of(self.redis, self.lock)

    @property
    def lease(self):
        """The one lease of the lock; waits until there is one."""
        leases = wait_for(f"a lease of {self.key}", lambda: self.leases)
        assert len(leases) == 1, leases
        return leases[0]

    @property
    def reservation(self):
        """The reservation of the key; None if it is free."""
        return reservation_in(self.redis, self.lock)

    @property
    def reserved_for(self):
        """The id of the task that the key is reserved for; None if it is free."""
        return self.reservation.id if self.reservation else None

    def wait_until_unreserved(self):
        wait_for(f"the key {self.key} is not reserved", lambda: self.reservation is None)

    @property
    def is_free(self):
        return not self.redis.exists(self.lock)

    def wait_until_free(self):
        wait_for(f"the lock of {self.key} is free", lambda: self.is_free)

    def lose_the_lock(self):
        """Delete the lock under its holder."""
        assert self.redis.delete(self.lock) == 1

    @property
    def starts(self):
        """When the bodies began, in microseconds: the token of a lease is that of its grant."""
        return sorted(event["token"] for event in self.reported("begin"))

    def assert_within_rate(self, most=10, window=1_000_000):
        """Check that no window, in microseconds, has more starts than the rate of the scenarios."""
        starts = self.starts
        pairs = zip(starts, starts[most:], strict=False)
        assert all(later - sooner >= window for sooner, later in pairs)

    def assert_exclusive(self, dead=()):
        """Check that no execution began before the one before it had ended, or was dead."""
        inside = None
        tokens = []
        for event in self.history:
            if event["what"] == "begin":
                assert inside is None or inside["pid"] in dead, (
                    f"two at a time for {self.key}: {inside} and {event}"
                )
                inside = event
                tokens.append(event["token"])
            elif event["what"] == "end":
                inside = None
        assert tokens == sorted(set(tokens)), f"fencing tokens of {self.key} do not grow: {tokens}"


def leases_of(client, lock):
    """Read the leases of a lock."""
    return [_parse(owner, text) for owner, text in client.hgetall(lock).items()]


def reservation_in(client, lock):
    """Read the reservation of a lock; None if its key is free."""
    seconds, microseconds = client.time()
    written = client.get(f"{lock}:unique") or ""
    return parse_reservation(seconds * 1000 + microseconds // 1000, written.encode())


def _parse(owner, text):
    version, expires, token, acquired, mode, holder = text.split(" ", 5)
    assert version == "1"
    assert mode in "xs"
    return LeaseInRedis(owner, int(expires), int(token), int(acquired), json.loads(holder))

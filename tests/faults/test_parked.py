"""Tasks in line for their lock, while processes die, replies are lost and messages come twice."""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import closing
from typing import NamedTuple

import pytest
from celery import chain

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from tests.faults.parked_site import LIMIT, TIMEOUT, Site
from tests.holding import name_of, wait_for

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def shared(rabbitmq, lock_server, tmp_path_factory):
    """A site on RabbitMQ whose workers last from test to test, but for those that are killed."""
    with closing(Site(tmp_path_factory.mktemp("shared"), lock_server, rabbitmq=rabbitmq)) as site:
        yield site


@pytest.fixture(scope="module")
def on_redis(lock_server, tmp_path_factory):
    """A site whose broker is the lock server; no message comes again by itself."""
    with closing(Site(tmp_path_factory.mktemp("on-redis"), lock_server)) as site:
        site.start_pair()
        yield site


@pytest.fixture
def key():
    return f"k-{uuid.uuid4().hex[:8]}"


def line_up(site, key, task, *names, **kwargs):
    """Let tasks join the line one after the other."""
    for name in names:
        site.send(task, key, f"{key}-{name}", **kwargs)
        site.wait_until_in_line(key, f"{key}-{name}")


class Crash(NamedTuple):
    """A process dies."""

    place: str  # where
    task: str  # acknowledged when it has ended, or before it begins
    begins: int  # so often does the body of the doomed task begin
    ends: int  # and end

    def __str__(self):
        return f"{self.place}-{self.task}"


CRASHES = [
    Crash("turn", "late", 2, 2),  # the next has its turn, and nobody knows; its result is lost
    Crash("parked", "late", 1, 1),  # and not acknowledged: delivered again
    Crash("parked", "early", 1, 1),
    Crash("claimed", "late", 1, 1),
    Crash("claimed", "early", 0, 0),  # lost, as any task of Celery's that was acknowledged early
    Crash("body", "late", 2, 1),
    Crash("body", "early", 1, 0),  # lost
    Crash("ended", "late", 2, 2),  # a body that ended, and whose lock was not released
    Crash("ended", "early", 1, 1),
]


class TestCrashes:
    """A pool process, or its whole worker, is killed at an exact place."""

    @pytest.mark.parametrize(
        ("crash", "victim"),
        [(one, "child") for one in CRASHES]
        + [(one, "worker") for one in CRASHES if one.task == "late"],
        ids=str,
    )
    def test_the_line_goes_on(self, shared, key, crash, victim):
        """Wherever the doomed task's process dies, it runs to its end once, as does the next."""
        shared.start_pair()
        doomed, following = f"{key}-doomed", f"{key}-next"
        holder = shared.hold(key, f"{key}-holder")
        with_whom = following if crash.place == "turn" else doomed
        shared.arm(crash.place, with_whom, victim)
        line_up(shared, key, crash.task, "doomed", "next")
        shared.open_gate(holder)
        shared.wait_until_it_dies(with_whom, victim)
        shared.wait_for_event("released", following)
        wait_for(lambda: len(shared.events("end", doomed)) >= crash.ends, "its last run", LIMIT)
        shared.wait_until_free(key)
        assert len(shared.events("begin", doomed)) == crash.begins
        assert len(shared.events("end", doomed)) == crash.ends
        assert len(shared.events("begin", following)) == 1

    @pytest.mark.parametrize("victim", ["child", "worker"])
    def test_what_was_not_in_line_yet_comes_back_if_it_is_acknowledged_late(
        self, shared, key, victim
    ):
        """Its process dies with the message in hand: the broker still has it, and it runs once."""
        shared.start_pair()
        holder, doomed = shared.hold(key, f"{key}-holder"), f"{key}-doomed"
        shared.arm("parking", doomed, victim)
        shared.send("late", key, doomed)
        shared.wait_until_it_dies(doomed, victim)
        shared.start_pair()
        shared.wait_until_in_line(key, doomed)
        shared.open_gate(holder)
        wait_for(lambda: shared.state(doomed) == "SUCCESS", "its result", LIMIT)
        assert len(shared.events("begin", doomed)) == 1

    @pytest.mark.parametrize(("victim", "state"), [("child", "FAILURE"), ("worker", "PARKED")])
    def test_what_was_not_in_line_yet_is_lost_if_it_was_acknowledged_early(
        self, shared, key, victim, state
    ):
        """As any task of Celery's whose process dies; the line goes on without it."""
        shared.start_pair()
        holder, doomed = shared.hold(key, f"{key}-holder"), f"{key}-doomed"
        shared.arm("parking", doomed, victim)
        shared.send("early", key, doomed)
        shared.wait_until_it_dies(doomed, victim)
        shared.start_pair()
        line_up(shared, key, "early", "next")
        shared.open_gate(holder)
        shared.wait_for_event("released", f"{key}-next")
        shared.wait_until_free(key)
        wait_for(lambda: shared.state(doomed) == state, f"the result is {state}", LIMIT)
        assert shared.events("begin", doomed) == []

    def test_what_is_in_line_fails_with_its_child_until_it_runs(self, shared, key):
        """The main process cannot tell that it was parked: it says FAILURE, and the run SUCCESS."""
        shared.start_pair()
        holder, doomed = shared.hold(key, f"{key}-holder"), f"{key}-doomed"
        shared.arm("parked", doomed, "child")
        shared.send("early", key, doomed)
        shared.wait_for_event("dies", doomed)
        wait_for(lambda: shared.state(doomed) == "FAILURE", "the result is FAILURE", LIMIT)
        shared.open_gate(holder)
        wait_for(lambda: shared.state(doomed) == "SUCCESS", "the result is SUCCESS", LIMIT)
        assert len(shared.events("begin", doomed)) == 1

    def test_nothing_comes_later(self, shared):
        """After all of that no message is left, and no task has run more often than it was to."""
        before = shared.runs()
        shared.start_pair()
        shared.wait_until_no_message_is_left()
        assert shared.runs() == before

    def test_what_stands_behind_a_task_is_not_lost_with_its_process(self, shared, key):
        """A process that dies right after the release leaves the task's result to a copy of it."""
        shared.start_pair()
        holder = shared.hold(key, f"{key}-holder")
        doomed = f"{key}-doomed"
        shared.arm("turn", f"{key}-next", "child")
        chain(
            shared.signature("late", key, task_id=doomed),
            shared.signature("note", "went on", task_id=f"{key}-note"),
        ).apply_async()
        shared.wait_until_in_line(key, doomed)
        line_up(shared, key, "late", "next")
        shared.open_gate(holder)
        shared.wait_for_event("dies", f"{key}-next")
        wait_for(
            lambda: shared.state(doomed) == "SUCCESS" or shared.says(doomed, "acknowledged unrun"),
            "the copy",
            LIMIT,
        )
        assert shared.state(doomed) == "SUCCESS"
        shared.wait_for_event("note", "went on")


MOMENTS = ["in line", "running", "done"]  # at which the copy comes; marked: as published again


class TestTwice:
    """A message arrives twice."""

    @pytest.mark.parametrize(
        ("task", "moment", "marked"),
        [
            ("late", "at once", False),
            ("early", "at once", False),
            *(("late", moment, marked) for moment in MOMENTS for marked in (False, True)),
            ("early", "done", True),
        ],
    )
    def test_a_parked_task_runs_once(self, on_redis, key, task, moment, marked):
        """Whenever the copy comes, the task has one run, one result, and the copy is said to go."""
        site = on_redis
        holder = site.hold(key, f"{key}-holder")
        task_id = f"{key}-doubled"
        raw = site.raw(task, key, task_id, gated=True)
        ticket = [name_of(key), f"{task_id}:0:0"] if marked else None
        if moment == "at once":
            site.publish(raw, raw)
        else:
            site.publish(raw)
        site.wait_until_in_line(key, task_id)
        if moment == "in line":
            site.publish(raw, ticket=ticket)
        if moment in {"at once", "in line"}:
            wait_for(lambda: site.says(task_id, "parked: place 1 in line") == 2, "two parked")
        site.open_gate(holder)
        site.wait_for_event("begin", task_id)
        if moment == "running":
            site.publish(raw, ticket=ticket)
            wait_for(lambda: site.says(task_id, "another delivery of this task"), "it is put off")
        site.open_gate(task_id)
        wait_for(lambda: site.state(task_id) == "SUCCESS", "its result", LIMIT)
        if moment == "done":
            site.publish(raw, ticket=ticket)
        if moment in {"running", "done"}:
            wait_for(lambda: site.says(task_id, "acknowledged unrun"), "the copy's end", LIMIT)
        site.wait_until_no_message_is_left()
        site.wait_until_free(key)
        assert [(run.ended, run.released) for run in site.runs(task_id)] == [(True, True)]
        assert site.state(task_id) == "SUCCESS"


class TestSweep:
    @pytest.fixture
    def site(self, redis_server, redis_url, tmp_path):
        with closing(Site(tmp_path, redis_server)) as site:
            site.start_pair()
            yield site

    def sweeper(self, site):
        """The worker that has the lease of the sweep; None where nobody has."""
        (name,) = site.redis.keys("dislock:sweep:*") or [None]
        owners = site.redis.hkeys(name) if name else []
        assert len(owners) <= 1
        found = [
            worker for worker in site.workers if owners and f":{worker.process.pid}/" in owners[0]
        ]
        return found[0] if found else None

    def sweeps(self, site):
        """The process ids of those that have looked at lines, in that order."""
        return [event["pid"] for event in site.events("sweep")]

    def wait_for_sweeps(self, site, worker, number=3):
        """Wait until this worker has looked so often; return who has looked meanwhile."""
        before = len(self.sweeps(site))
        pid = worker.process.pid
        wait_for(
            lambda: self.sweeps(site)[before:].count(pid) >= number, f"{worker.name} sweeps", LIMIT
        )
        return self.sweeps(site)[before:]

    def test_another_takes_over(self, site):
        """From a worker that is frozen, which then leaves it alone; and from one that is killed."""
        first = wait_for(lambda: self.sweeper(site), "a sweeping worker")
        (second,) = set(site.workers) - {first}
        os.kill(first.process.pid, signal.SIGSTOP)
        self.wait_for_sweeps(site, second)
        os.kill(first.process.pid, signal.SIGCONT)
        looked = self.wait_for_sweeps(site, second, 5)
        assert set(looked) == {second.process.pid}
        second.kill()
        assert self.wait_for_sweeps(site, first)[-3:] == [first.process.pid] * 3

    @pytest.mark.parametrize("sweeps", [True, False], ids=["that swept", "that did not"])
    def test_a_line_whose_holder_died_goes_on(self, site, key, sweeps):
        """The holder's whole worker is killed: the next has the lock once its lease has ended."""
        first = wait_for(lambda: self.sweeper(site), "a sweeping worker")
        while True:
            holder = site.send("early", key, f"{key}-{uuid.uuid4().hex[:4]}", gated=True)
            pid = site.wait_for_event("begin", holder)["pid"]
            its_worker = next(w for w in site.workers if pid in site.children(w))
            if (its_worker == first) == sweeps:
                break
            site.open_gate(holder)
            site.wait_for_event("released", holder)
        line_up(site, key, "late", "next")
        its_worker.kill()
        killed_at = time.monotonic()
        began_at = site.wait_for_event("begin", f"{key}-next")["at"]
        assert began_at - killed_at < TIMEOUT + TIMEOUT / RENEWALS_PER_TIMEOUT + SLACK


SLACK = 4.0  # seconds, for a machine that has more to do

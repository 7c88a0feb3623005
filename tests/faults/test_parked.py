"""Tasks in line for their lock, while processes die, replies are lost and messages come twice."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import time
import uuid
from contextlib import closing
from typing import NamedTuple

import pytest
from celery import chain

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.scripts import ENLIST, LEAVE, PARK, RELEASE, RELEASE_DEAD, SWEEP
from tests.acceptance.fleet import REDELIVERY_IS_SLOW
from tests.acceptance.rabbitmq import own_rabbitmq
from tests.faults.history import read, violations
from tests.faults.parked_site import LIMIT, TIMEOUT, Site, Storm
from tests.faults.proxy import cut, lose_reply, runs, swallow_reply
from tests.holding import name_of, wait_for
from tests.redis_server import RedisServer

pytestmark = pytest.mark.faults

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory):
    """A RabbitMQ for this file: it delivers again at once what a dead worker has left."""
    with own_rabbitmq(tmp_path_factory.mktemp("parked") / "rabbitmq") as rabbitmq:
        yield rabbitmq


@pytest.fixture(scope="module")
def lock_server(redis_program, tmp_path_factory):
    """A server that nobody flushes."""
    with RedisServer(tmp_path_factory.mktemp("parked") / "redis") as server:
        yield server


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


def hold(site, key):
    """Let a task hold the lock until its gate is open."""
    holder = site.send("early", key, f"{key}-holder", gated=True)
    site.wait_for_event("begin", holder)
    return holder


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
        holder = hold(shared, key)
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
        holder, doomed = hold(shared, key), f"{key}-doomed"
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
        holder, doomed = hold(shared, key), f"{key}-doomed"
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
        holder, doomed = hold(shared, key), f"{key}-doomed"
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
        assert violations(read(shared.folder / "journal")) == []

    def test_what_stands_behind_a_task_is_not_lost_with_its_process(self, shared, key):
        """A process that dies right after the release leaves the task's result to a copy of it."""
        shared.start_pair()
        holder = hold(shared, key)
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
        holder = hold(site, key)
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


def burst(site, number, keys, task="late", **kwargs):
    """Send so many tasks, to each of the keys in turn."""
    return [
        site.send(task, keys[n % len(keys)], f"{keys[n % len(keys)]}-{n}", **kwargs)
        for n in range(number)
    ]


def wait_until_ended(site, ids, limit=LIMIT, times=1):
    """Wait until the bodies of all these tasks have ended."""
    left = set(ids)

    def all_ended():
        return not left - {run.id for run in site.runs() if run.ended}

    wait_for(all_ended, f"the end of {len(left)} tasks", limit)


class TestLostReplies:
    @pytest.mark.slow
    def test_nothing_is_lost_or_doubled(self, rabbitmq, redis_server, proxy, tmp_path):
        """Commands and replies about the line are lost at random: each task runs once, in order."""
        conf = {"dislock_transport_options": {"socket_timeout": 0.3}}
        for script in (PARK, RELEASE, LEAVE, SWEEP):
            proxy.fault(runs(script), lose_reply)
        for way in (lose_reply, cut, swallow_reply):
            proxy.fault(one_of(20, ABOUT_LINES), way, times=10_000)
        site = Site(tmp_path, redis_server, rabbitmq=rabbitmq, locks_url=proxy.url, conf=conf)
        with closing(site):
            site.start_pair(children=4)  # more than there are holders: one is free to park
            keys = [f"k{n}" for n in range(3)]
            holders = [hold(site, key) for key in keys]
            ids = burst(site, 30, keys, seconds=0.01)
            wait_for(lambda: sum(site.is_in_line(id_[:2], id_) for id_ in ids) == len(ids), "line")
            revoked = ids[5:30:8]
            site.revoke(revoked)
            for holder in holders:
                site.open_gate(holder)
            wait_until_ended(site, [*holders, *set(ids).difference(revoked)], limit=120)
            for key in keys:
                site.wait_until_free(key)
            site.wait_until_no_message_is_left()
            for task_id in [*holders, *ids]:
                state = "REVOKED" if task_id in revoked else "SUCCESS"
                assert len(site.runs(task_id)) == (state == "SUCCESS"), task_id
                assert site.state(task_id) == state
            for way in (lose_reply, cut, swallow_reply):
                assert proxy.count(ABOUT_LINES, way) >= 3


def one_of(number, matches):
    """Match one command, at random, of each *number* that match."""
    ahead = []

    def chosen(command):
        if not matches(command):
            return False
        if not ahead:
            ahead.extend(random.sample([True] + [False] * (number - 1), number))
        return ahead.pop()

    return chosen


ABOUT_LINES = runs(ENLIST, PARK, RELEASE, RELEASE_DEAD, LEAVE, SWEEP)


class TestStorm:
    """Two workers of two children are frozen and killed at random while tasks go through."""

    @pytest.fixture
    def site(self, rabbitmq, redis_server, redis_url, tmp_path):
        with closing(Site(tmp_path, redis_server, rabbitmq=rabbitmq)) as site:
            yield site

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_it_is_survived(self, site):
        """All of 500 tasks end, never two of a key at once, and again only where one was killed."""
        site.start_pair()
        keys = [f"k{n}" for n in range(5)]
        ids = [f"{random.choice(keys)}-{n}" for n in range(500)]
        for task_id in ids:
            site.send("late", task_id.partition("-")[0], task_id, seconds=0.2)
        storm = Storm(site)
        for _ in range(120):
            storm.blow()
        # What Celery has mislaid in a worker that lives, comes back with its end.
        storm.kill_all()
        site.start_pair()
        wait_until_ended(site, ids, limit=240)
        site.wait_until_no_message_is_left()
        for key in keys:
            site.wait_until_free(key)
        logger.info("%s; %s", storm.done, self.check(site, ids, storm.killed))

    def check(self, site, ids, killed):
        """Look at each run; return what there was, in words."""
        assert violations(read(site.folder / "journal")) == []
        parked_at: dict[str, float] = {}
        for event in site.events():
            if event["what"] in {"parked", "turn"}:
                parked_at.setdefault(event["id"], event["at"])
        ended_twice, never_parked = [], []
        for task_id in ids:
            done = site.runs(task_id)
            assert any(run.ended for run in done), done
            for before in done[:-1]:  # another came after it
                assert before.pid in killed, done
                assert not before.settled, done
                # A task that found its lock free has no ticket, by which to know its copy.
                if before.ended and parked_at.get(task_id, math.inf) > before.at:
                    never_parked.append(task_id)
            ended_twice += [task_id] * (sum(run.ended for run in done) > 1)
        assert {site.state(task_id) for task_id in ids} == {"SUCCESS"}
        assert len(parked_at) > len(ids) / 2, "hardly any line: this proved nothing"
        return (
            f"{len(parked_at)} parked, {len(site.runs())} runs, {len(ended_twice)} ended twice, "
            f"{len(never_parked)} of them had not waited for their lock"
        )


class TestServerCrashes:
    """A Redis that keeps its data, by ``appendfsync always``, is killed and started again."""

    @pytest.fixture
    def server(self, redis_program, tmp_path):
        kept = ["--appendonly", "yes", "--appendfsync", "always"]
        with RedisServer(tmp_path / "redis", args=kept) as server:
            yield server

    def test_the_lock_server(self, rabbitmq, server, redis_server, redis_url, tmp_path):
        """Killed while tasks are parked, and again while they run, it costs no task a run."""
        with closing(Site(tmp_path, server, rabbitmq=rabbitmq, results=redis_server)) as site:
            site.start_pair(children=4)  # more than there are holders: one is free to park
            keys = [f"k{n}" for n in range(3)]
            holders = [hold(site, key) for key in keys]
            ids = burst(site, 60, keys)
            wait_for(lambda: len(site.events("parked")) >= 5, "some are parked")
            self.crash(server)
            wait_for(lambda: len(site.events("parked")) >= 25, "others are parked")
            self.crash(server)
            for holder in holders:
                site.open_gate(holder)
            for number in (10, 30):
                wait_for(lambda n=number: len(site.events("end")) >= n, f"{number} ran", LIMIT)
                self.crash(server)
            self.check(site, keys, [*holders, *ids])

    @pytest.mark.slow
    @pytest.mark.skipif(REDELIVERY_IS_SLOW, reason="this kombu redelivers every 100 s")
    def test_broker_and_lock_server(self, server, redis_server, redis_url, tmp_path):
        """Killed while tasks have their turns it costs none; twice runs what could not be told."""
        redelivery = {
            "visibility_timeout": 5,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
        conf = {"broker_transport_options": redelivery}
        with closing(Site(tmp_path, server, results=redis_server, conf=conf)) as site:
            site.start_pair(children=4)
            keys = [f"k{n}" for n in range(3)]
            holders = [hold(site, key) for key in keys]
            ids = burst(site, 60, keys)
            # A message that kombu has fetched, and not yet noted, is lost with the connection; from
            # here on each is about a task in line, which has its turn again.
            wait_for(lambda: all(site.is_in_line(id_[:2], id_) for id_ in ids), "all are in line")
            for holder in holders:
                site.open_gate(holder)
            for number in (10, 30):
                self.wait_for_ends(site, number)
                self.crash(server)
            self.wait_for_ends(site, len(ids))
            # The release of these was not heard, and perhaps the acknowledgement neither.
            unheard = {event["id"] for event in site.events("release lost")}
            self.check(site, keys, [*holders, *ids], unheard)

    def wait_for_ends(self, site, number):
        """Wait, while workers end that lose their broker with a message in hand: kombu 5.7."""

        def so_many():
            site.supervise(children=4)
            return len({event["id"] for event in site.events("end")}) >= number

        wait_for(so_many, f"{number} ran", 120)

    def crash(self, server):
        server.kill()
        server.start()

    def check(self, site, keys, ids, unheard=()):
        wait_until_ended(site, ids, limit=120)
        for key in keys:
            site.wait_until_free(key)
        site.wait_until_no_message_is_left()
        for task_id in ids:
            done = site.runs(task_id)
            assert done[-1].ended, done
            assert all(task_id in unheard or not run.settled for run in done[:-1]), done
            wait_for(lambda id_=task_id: site.state(id_) == "SUCCESS", f"result of {task_id}")
        assert violations(read(site.folder / "journal")) == []


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

    def test_a_line_whose_holder_froze_goes_on(self, site, key):
        """The next has the lock once it is lost, and the frozen task still ends once.

        The whole worker is frozen: its main process would renew for the child.
        """
        frozen = hold(site, key)
        line_up(site, key, "late", "next")
        pid = site.wait_for_event("begin", frozen)["pid"]
        (worker,) = (w for w in site.workers if pid in site.children(w))
        os.killpg(worker.process.pid, signal.SIGSTOP)
        site.wait_for_event("released", f"{key}-next")
        os.killpg(worker.process.pid, signal.SIGCONT)
        site.open_gate(frozen)
        site.wait_for_event("end", frozen)
        site.wait_until_free(key)
        wait_for(lambda: site.says(f"late[{key}-next] succeeded"), "its result")
        site.wait_until_no_message_is_left()
        assert [run.ended for run in site.runs()] == [True, True]
        assert violations(read(site.folder / "journal")) == []

    def test_a_line_without_workers_waits_for_one(self, site, key):
        """All workers are killed: the line goes on with the first that starts."""
        holder = hold(site, key)
        line_up(site, key, "late", "first", "second")
        for worker in site.workers:
            worker.kill()
        site.start()
        site.wait_for_event("released", f"{key}-second")
        began = [run.id for run in site.runs()]
        assert began == [holder, f"{key}-first", f"{key}-second"]


SLACK = 4.0  # seconds, for a machine that has more to do

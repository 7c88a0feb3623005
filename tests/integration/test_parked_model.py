"""Parked tasks against a plain Python model, with a crash possible between any two steps.

Modelled are one lock, exclusive, counted (two at a time) or with shared and exclusive tasks mixed;
a line that is unbounded, or bounded and skips the newcomer or replaces the oldest; one or two
brokers with a sweeper each; and any number of tasks.  The scripts are the package's: they run in
this process, see ``lua_server``, and for a while on a real server.

A broker holds copies of messages: a task, and whether the message is marked with its ticket.  What
is given to be published comes to be a marked copy; what is not acknowledged comes again; any copy
may be delivered twice while the first is at work.

An execution takes a copy and goes, step by step, as the plugin does::

    ask -> granted -> body -> release -> publish turns (-> settle, every other) -> acknowledge
        -> refused by another -> enlist -> park -> the same again
        -> refused by its own task, which runs or settles -> the copy comes again
        -> parked, full, done -> publish turns -> acknowledge

Between any two steps it may crash: seen, so that its lease is ended, or unseen; its copy comes
again, and turns that it was given are lost.  The record of a parked task may be lost in a failover,
while a marked copy of it is on its way.  Each command may be sent twice because its reply was
lost, and with it the turns in it.  Renewals may fail, so that a body goes on without its lease and
releases too late, or is stopped and comes again.  Tasks are revoked: their copies are discarded
wherever they turn up.  A marked copy may come to a worker that cannot run it, and sets it aside, or
that runs it without a lock.  Who lost its place is told so by a sweep or by who parks.

After each step the server must have what the model has, byte counts included, and further:

* the lock admits no more leases than it should, and no ticket is in two states;
* a ticket completes once, and runs to its end under its lease once;
* nobody has its turn while somebody waits who was parked before it, and nobody who was not parked
  gets in while anybody waits.  (Who ran in a process that died is before all of these.)

At the end of a run nothing crashes any more, time passes, and all copies are delivered: then each
task that was parked has completed, or was revoked, replaced, set aside or run without a lock, and
each other has run or was refused for want of room; and nothing is left but marks of what is done,
and what was set aside.

Not modelled: those who wait in their slot, bounds in bytes, damage, several locks, marks that end.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_dislock.parking.store import ASIDE, RUNS
from tests.integration.lua_server import LuaServer
from tests.integration.model_runs import run_model
from tests.integration.parked import LOCK, Bounds, Line

UNIT = 5  # seconds: whatever lasts long is a multiple of it
LONGEST = 60  # units that a turn lasts at most
TTL = 3  # units that a lease lasts, and the first turn
SETTLES = 2  # units in which a result is to be stored
AT_WORK = 6  # executions at a time
KINDS = {  # mode and limit of tasks of even and of odd numbers
    "exclusive": [("exclusive", 1), ("exclusive", 1)],
    "counted": [("exclusive", 2), ("exclusive", 2)],
    "mixed": [("shared", 1), ("exclusive", 1)],
}
BOUNDS = [Bounds(), Bounds(1, overflow="replace"), Bounds(2, overflow="replace"), Bounds(2)]
NUMBERS = {}  # of tasks, whose ids are as Celery makes them, or like "t4"


@dataclass(order=True)
class Place:
    joined: int
    task: str = field(compare=False)
    home: int = field(compare=False)
    times: int = field(compare=False, default=0)


@dataclass
class Model:
    """One lock and its line, as the guide tells it.  Time is in units."""

    terms: list[tuple[str, int]]
    now: int = 0
    parked_so_far: int = 0
    leases: dict[str, int] = field(default_factory=dict)  # live ones: when they end
    line: list[Place] = field(default_factory=list)
    handed: dict[str, tuple[int, Place]] = field(default_factory=dict)  # until when
    running: dict[str, int] = field(default_factory=dict)  # when they had joined
    settling: dict[str, int] = field(default_factory=dict)  # running ones that ended: until when
    done: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)  # owners that must not be parked, or claim a turn
    replaced: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    completed: list[str] = field(default_factory=list)  # of those that were parked

    def terms_of(self, task):
        return self.terms[number_of(task) % 2]

    def pass_time(self, units):
        self.now += units
        self.leases = {owner: end for owner, end in self.leases.items() if end > self.now}

    def admits(self, task):
        mode, limit = self.terms_of(task)
        exclusive = sum(self.terms_of(owner)[0] == "exclusive" for owner in self.leases)
        if mode == "shared":
            return exclusive == 0
        return exclusive == len(self.leases) and exclusive < limit

    def waits(self, task):
        return any(place.task == task for place in self.line)

    def forget(self, task):
        """Take the ticket out wherever it is; return whether it was anywhere."""
        was = self.waits(task) or task in self.handed or task in self.running
        self.leases.pop(f"{task}#", None)
        self.line = [place for place in self.line if place.task != task]
        self.handed.pop(task, None)
        self.running.pop(task, None)
        self.settling.pop(task, None)
        return was

    def pass_on(self, home, asker=None):
        """Give turns to those first in line; return who is to be published."""
        for task, (until, place) in list(self.handed.items()):
            if until <= self.now:
                del self.handed[task]
                insort(self.line, place)
        given = []
        while self.line:
            place = self.line[0]
            if place.task != asker and place.home != home:
                break
            if not self.admits(place.task):
                break
            del self.line[0]
            until = self.now + min(TTL * 2**place.times, LONGEST)
            place.times += 1
            self.handed[place.task] = (until, place)
            self.leases[f"{place.task}#"] = until
            if place.task != asker:
                given.append(place.task)
        return given

    def pass_on_if_any(self, home, asker=None):
        return self.pass_on(home, asker) if self.line or self.handed else []

    def join(self, place):
        insort(self.line, place)
        return "parked"

    def park(self, owner, task, home, bounds, *, marked, ask):
        """Return what the asker is told, and who is to be published."""
        told = self.answer(owner, task, home, bounds, marked=marked, ask=ask)
        if told[0] == ("parked" if marked else "full"):
            self.over.add(owner)
        return told

    def answer(self, owner, task, home, bounds, *, marked, ask):
        parked = self.waits(task) or task in self.handed
        ran = task in self.running
        if owner in self.leases:
            answer = self.grant(owner)
        elif not ask and task in self.replaced:  # its end is not told yet
            answer = "parked"
        elif not parked and not ran and (task in self.done or (marked and task in self.aside)):
            answer = "done"
        elif any(other.startswith(f"{task}@") for other in self.leases):
            answer = "refused"
        elif parked:
            return self.claim_turn(owner, task, home, marked=marked)
        elif not ran:
            given = self.pass_on_if_any(home)
            told = self.come_in(owner, task, home, bounds, marked=marked, ask=ask)
            alone = told == "parked" and self.line[0].task == task  # others have made room
            return told, given + (self.pass_on(home) if alone else [])
        elif self.settling.get(task, 0) > self.now:
            answer = "refused"
        elif self.admits(task):  # it ran in a process that died
            self.settling.pop(task, None)
            return self.grant(owner), self.pass_on_if_any(home)
        elif ask:
            answer = "refused"
        else:
            self.settling.pop(task, None)
            answer = self.join(Place(self.running.pop(task), task, home))
        return answer, []

    def come_in(self, owner, task, home, bounds, *, marked, ask):
        """Answer a task that nobody knows, or not any more."""
        if self.admits(task) and not self.line:
            if marked or not ask:  # a late copy of the message finds that it is known
                self.parked_so_far += 1
                self.running[task] = self.parked_so_far
            return self.grant(owner)
        if ask:
            return "refused"
        while bounds.most and len(self.line) >= bounds.most:
            if bounds.overflow == "skip":
                return "full"
            oldest = self.line[0].task
            self.forget(oldest)
            self.replaced.add(oldest)
            self.done.add(oldest)
        self.parked_so_far += 1
        return self.join(Place(self.parked_so_far, task, home))

    def claim_turn(self, owner, task, home, *, marked):
        may_claim = marked and owner not in self.over
        given = self.pass_on(home, task if may_claim else None)
        if not may_claim or f"{task}#" not in self.leases:
            return "parked", given
        _, place = self.handed[task]
        self.forget(task)
        self.running[task] = place.joined
        self.grant(owner)
        return "granted", given + self.pass_on_if_any(home)

    def grant(self, owner):
        self.leases[owner] = self.now + TTL
        return "granted"

    def release(self, owner, task, home, settles):
        """Return who is to be published."""
        hand_on = bool(self.line)
        self.leases.pop(owner, None)
        if settles and task in self.running:
            self.settling[task] = self.now + settles
        elif task and self.forget(task):
            self.complete(task)
        return self.pass_on(home) if hand_on else []

    def complete(self, task):
        assert task not in self.done, f"{task} completes again"
        self.done.add(task)
        self.completed.append(task)

    def release_dead(self, start, home):
        for owner in [owner for owner in self.leases if owner.startswith(start)]:
            del self.leases[owner]
        return self.pass_on(home)

    def leave(self, task, home):
        if self.forget(task) or task in self.replaced:
            self.done.add(task)
        self.replaced.discard(task)
        return self.pass_on_if_any(home)

    def is_at_work(self, task):
        """Tell whether a task that has claimed its turn runs, or its result is on its way."""
        has_lease = any(owner.startswith(f"{task}@") for owner in self.leases)
        return has_lease or self.settling.get(task, 0) > self.now

    def withdraw(self, task, home, *, runs):
        """Return whether it was there, and who is to be published."""
        if not (self.waits(task) or task in self.handed):
            left = runs and task in self.running and not self.is_at_work(task)
            known = (task in self.running and not left) or task in self.done or task in self.aside
            if not runs or known:
                return False, []
        self.forget(task)
        if runs:
            self.done.add(task)
        else:
            self.aside.add(task)
        return True, self.pass_on_if_any(home)


def number_of(name):
    """Return the number of the task that a ticket or an owner is of."""
    task = name.partition("@")[0].rstrip("#")
    return NUMBERS[task] if task in NUMBERS else int(task[1:])


@dataclass
class Execution:
    task: str
    marked: bool
    owner: str
    at: str = "ask"  # the next step
    turns: list[str] = field(default_factory=list)  # to be published
    was_parked: bool = False  # it has a ticket that it claimed
    settles: int = 0  # units; 0: it is done when its body is


indexes = st.integers(0, 11)
often = st.sampled_from([False, False, False, True])


class ParkedMachine(RuleBasedStateMachine):
    def __init__(self, server):
        super().__init__()
        self.server = server
        server.begin()
        self.workers = [Line(server, home) for home in "ab"]
        self.tasks = []
        self.copies = []  # in the brokers: a task, and whether it is marked
        self.executions = []
        self.owners = 0
        self.parked_order = {}
        self.revoked, self.skipped, self.ran = set(), set(), set()
        self.ended = set()  # owners whose body has
        self.told = set()  # that they were replaced
        self.withdrawn = set()  # set aside, or run without a lock
        self.ended_in_time = Counter()  # of those that were parked

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        bounds=st.sampled_from(BOUNDS),
        homes=st.sampled_from([1, 1, 2]),
    )
    def choose(self, kind, bounds, homes):
        self.model = Model(KINDS[kind])
        self.bounds = bounds
        self.homes = homes

    def home_of(self, task):
        return number_of(task) // 2 % self.homes

    def worker_of(self, task):
        return self.workers[self.home_of(task)]

    # What happens to messages.

    @rule(times=st.sampled_from([1, 1, 1, 2]))
    def send(self, times):
        """A new task, whose message may be there twice."""
        number = len(self.tasks)
        task = f"t{number}"
        NUMBERS[task] = number
        self.tasks.append(task)
        self.copies += [(task, False)] * times

    @precondition(lambda self: len(self.executions) < AT_WORK)
    @rule(steps=st.sampled_from([1, 2, 3, 4, 5, 5, 5]))
    def a_task_comes(self, steps):
        """A new task asks, and most often it is parked or runs at once."""
        self.send(1)
        self.take_the_last_some_steps(steps)

    @precondition(lambda self: self.copies and len(self.executions) < AT_WORK)
    @rule(index=indexes)
    def take(self, index):
        """A worker takes a copy; what is revoked is discarded by its main process."""
        if len(self.executions) >= AT_WORK:
            return
        task, marked = self.copies.pop(index % len(self.copies))
        if task in self.revoked:
            self.leave(task)
        else:
            self.owners += 1
            owner = f"{task}@w:1/{self.owners}"
            self.executions.append(
                Execution(task, marked, owner, settles=self.owners % 2 * SETTLES)
            )

    @precondition(lambda self: self.executions)
    @rule(index=indexes)
    def deliver_again(self, index):
        """A connection was lost, or a broker's patience: the copy comes, and is still at work."""
        at_work = self.executions[index % len(self.executions)]
        self.copies.append((at_work.task, at_work.marked))

    @precondition(lambda self: self.tasks)
    @rule(index=indexes, really=often)
    def revoke(self, index, really):
        if really:
            self.revoked.add(self.tasks[index % len(self.tasks)])

    # What executions do.

    @precondition(lambda self: self.executions)
    @rule(index=indexes, twice=often)
    def step(self, index, twice):
        self.step_on(self.executions[index % len(self.executions)], twice)

    @precondition(lambda self: self.copies and len(self.executions) < AT_WORK)
    @rule(steps=st.integers(1, 5))
    def take_the_last_some_steps(self, steps):
        """What was published last is often what had its turn."""
        self.take(len(self.copies) - 1)
        if self.executions:
            self.some_steps(len(self.executions) - 1, steps)

    @precondition(lambda self: self.executions)
    @rule(index=indexes, steps=st.integers(2, 6))
    def some_steps(self, index, steps):
        execution = self.executions[index % len(self.executions)]
        for _ in range(steps):
            if execution in self.executions:
                self.step_on(execution, twice=False)

    def step_on(self, execution, twice):
        getattr(self, f"step_{execution.at}")(execution, twice)
        self.look()

    def step_ask(self, execution, twice):
        self.knock(execution, twice, ask=True)

    def step_enlist(self, execution, twice):
        for _ in range(1 + twice):
            self.worker_of(execution.task).lines.enlist(LOCK)
        execution.at = "park"

    def step_park(self, execution, twice):
        self.knock(execution, twice, ask=False)

    def knock(self, execution, twice, *, ask):
        tokens = set()
        for _ in range(1 + twice):
            held = execution.owner in self.model.leases
            answer, turns = self.knock_once(execution, ask=ask)
            if answer == "granted":
                tokens = tokens | {answer.token} if held else {answer.token}
                assert len(tokens) == 1, "sent twice, it has two tokens"
        execution.turns += turns  # those of the first answer were lost with it
        if answer == "refused":
            copy = answer.holder.get("id") == execution.task
            execution.at = "put_off" if copy else "enlist"
            assert copy or ask
            assert (answer.place == 0) is copy
        elif answer == "granted":
            execution.at = "body"
        else:
            if answer == "full" and execution.marked:  # its record was lost: it comes again
                self.copies.append((execution.task, True))
            elif answer == "full":
                self.skipped.add(execution.task)
            if answer == "parked" and not ask:
                assert set(answer.replaced) == self.model.replaced
            execution.at = "publish"

    def knock_once(self, execution, *, ask):
        task, owner = execution.task, execution.owner
        home = self.home_of(task)
        mode, limit = self.model.terms_of(task)
        message = b"" if ask else message_of(task)
        terms = {"mode": mode, "limit": limit, "bounds": self.bounds, "marked": execution.marked}
        ran = task in self.model.running
        has_ticket = ran or task in self.tickets()
        held = owner in self.model.leases
        had_turn = f"{task}#" in self.model.leases
        before = self.waiting()
        copy = owner.rpartition("/")[2]
        answer = self.workers[home].ask(task, copy, message=message, ttl=TTL * UNIT, **terms)
        told, given = self.model.park(
            owner, task, home, self.bounds, marked=execution.marked, ask=ask
        )
        assert answer == told
        if answer == "parked" and not has_ticket:
            self.parked_order[task] = self.model.parked_so_far
        turns = self.check_given(given)
        if answer == "granted" and not held:
            execution.was_parked = has_ticket or execution.marked
            if task in self.model.running and not has_ticket:
                self.parked_order[task] = self.model.parked_so_far
            if not ran and not had_turn:
                self.check_order(task, before, has_ticket)
        return answer, turns

    def step_put_off(self, execution, twice):
        """A copy of what runs comes again; twice: it was sent, and not acknowledged."""
        self.copies.append((execution.task, execution.marked))
        execution.at = "publish"

    def step_body(self, execution, twice):
        """The body ends, and its lease."""
        if execution.owner in self.model.leases:
            self.ended_in_time[execution.task] += execution.was_parked and not execution.settles
            if execution.task not in self.revoked:
                assert self.ended_in_time[execution.task] <= 1, "it ran to its end twice"
        self.ran.add(execution.task)
        self.ended.add(execution.owner)
        self.release(execution, execution.task, twice, execution.settles)
        execution.at = "publish"

    def step_settle(self, execution, twice):
        """Its result is stored: no copy of it is to run any more."""
        self.release(execution, execution.task, twice)
        execution.settles = 0
        execution.at = "publish"

    def release(self, execution, task, twice, settles=0):
        home = self.home_of(execution.task)
        for _ in range(1 + twice):
            live = execution.owner in self.model.leases
            how = {"settles": settles * UNIT} | ({} if task else {"ticket": ""})
            copy = execution.owner.rpartition("/")[2]
            assert self.workers[home].end(execution.task, copy, **how) is live
            given = self.model.release(execution.owner, task, home, settles)
            execution.turns = self.check_given(given)

    def step_publish(self, execution, twice):
        self.publish(execution.turns)
        execution.turns = []
        ended = execution.owner in self.ended
        execution.at = "settle" if ended and execution.settles else "acknowledge"

    def step_acknowledge(self, execution, twice):
        self.executions.remove(execution)

    def publish(self, turns):
        self.copies += [(task, True) for task in turns]

    # What goes wrong.

    @precondition(lambda self: self.executions)
    @rule(index=indexes, seen=st.booleans(), lost=st.booleans())
    def crash(self, index, seen, lost):
        """Its process dies; the main process may see that, and publish what that gives, or not."""
        execution = self.executions.pop(index % len(self.executions))
        self.copies.append((execution.task, execution.marked))
        if seen:
            home = self.home_of(execution.task)
            self.workers[home].store.release_dead([LOCK], execution.owner)
            given = self.check_given(self.model.release_dead(execution.owner, home))
            if not lost:
                self.publish(given)
        self.look()

    @precondition(lambda self: any(e.was_parked and e.at == "body" for e in self.executions))
    @rule(seen=st.booleans())
    def crash_at_work_and_come_again(self, seen):
        """What was parked, and ran, comes again, after those that had their turn meanwhile."""
        (index, *_) = (n for n, e in enumerate(self.executions) if e.was_parked and e.at == "body")
        execution = self.executions[index]
        copy = (execution.task, execution.marked)
        self.crash(index, seen, lost=False)
        if not seen:
            self.pass_time(TTL, renewing=False)
            self.sweep(0, lost=False, twice=False, told=False)
        self.take(self.copies.index(copy))
        if self.executions:
            self.some_steps(len(self.executions) - 1, 3)

    @precondition(lambda self: any(e.at == "body" for e in self.executions))
    @rule(index=indexes)
    def stop(self, index):
        """The worker is stopped in the middle of the body: its message comes again."""
        bodies = [execution for execution in self.executions if execution.at == "body"]
        execution = bodies[index % len(bodies)]
        self.release(execution, "", twice=False)
        self.publish(execution.turns)
        self.executions.remove(execution)
        self.copies.append((execution.task, execution.marked))
        self.look()

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(units=st.sampled_from([1, 1, 2, 3]), renewing=st.booleans())
    def pass_time(self, units, renewing):
        for _ in range(units):
            if renewing:
                self.renew()
            self.model.pass_time(1)
            self.server.advance(UNIT)
            self.server.end_keys()
        self.look()

    def renew(self):
        for execution in self.executions:
            if execution.at == "body":
                [renewed] = self.workers[0].store.renew([([LOCK], execution.owner, TTL * UNIT)])
                assert renewed is (execution.owner in self.model.leases)
                if renewed:
                    self.model.grant(execution.owner)

    @precondition(lambda self: self.copies_of_tickets() and len(self.executions) < AT_WORK)
    @rule(steps=st.integers(0, 5))
    def lose(self, steps):
        """A failover loses the record of a parked task of which a marked copy is on its way."""
        copy = self.copies_of_tickets()[0]
        self.workers[0].lose(copy[0])
        self.model.forget(copy[0])
        self.look()
        self.take(self.copies.index(copy))
        if steps and self.executions:
            self.some_steps(len(self.executions) - 1, steps)

    def copies_of_tickets(self):
        return [(task, marked) for task, marked in self.copies if marked and task in self.tickets()]

    @rule(home=st.integers(0, 1), lost=often, twice=often, told=st.booleans())
    def sweep(self, home, lost, twice, told):
        home %= self.homes
        for _ in range(1 + twice):
            swept = self.workers[home].sweep()
            given = self.check_given(self.model.pass_on_if_any(home))
            assert swept.parked == len(self.tickets())
            assert swept.replaced == {
                f"{task}:0:0": message_of(task) for task in self.model.replaced
            }
        if not lost:
            self.publish(given)
        for task in sorted(self.model.replaced) if told else ():
            self.told.add(task)
            self.leave(task)
        self.look()

    @precondition(lambda self: any(marked for _, marked in self.copies))
    @rule(index=indexes, runs=st.booleans(), twice=often, lost=often)
    def withdraw(self, index, runs, twice, lost):
        """A marked copy comes to a worker where no guard sees it; it may come again to another."""
        marked = [copy for copy in self.copies if copy[1]]
        copy = marked[index % len(marked)]
        its_process_may_be_dead = copy[0] in self.model.running  # and this may be the only copy
        if not (lost or its_process_may_be_dead):
            self.copies.remove(copy)
        self.withdraw_task(copy[0], runs=runs, twice=twice)

    @precondition(lambda self: any(e.was_parked and e.at == "body" for e in self.executions))
    @rule(runs=st.booleans(), twice=often)
    def withdraw_what_runs(self, runs, twice):
        """A copy of what has claimed its turn comes to such a worker: it runs if that was left."""
        (task, *_) = (e.task for e in self.executions if e.was_parked and e.at == "body")
        self.withdraw_task(task, runs=runs, twice=twice)

    def withdraw_task(self, task, *, runs, twice):
        self.owners += 1
        if not runs and task not in self.tickets() and task not in self.model.running:
            self.withdrawn.add(task)  # it ends as FAILURE: what was lost is not set aside
        home = self.home_of(task)
        first = None
        for _ in range(1 + twice):
            there = self.workers[home].leave(task, RUNS if runs else ASIDE)
            was, given = self.model.withdraw(task, home, runs=runs)
            first = was if first is None else first
            assert there is was
            self.publish(self.check_given(given))
        if first:
            self.withdrawn.add(task)
        self.look()

    def leave(self, task):
        home = self.home_of(task)
        was = self.model.waits(task) or task in self.model.handed or task in self.model.running
        was = was or task in self.model.replaced
        assert self.workers[home].leave(task) is was
        self.publish(self.check_given(self.model.leave(task, home)))

    # What must be so.

    def tickets(self):
        return {place.task for place in self.model.line} | set(self.model.handed)

    def waiting(self):
        return self.workers[0].line()

    def check_given(self, expected):
        """Return who was given to be published: as the model says, and in order."""
        published = [turn for worker in self.workers for turn in worker.published]
        given = [task for worker in self.workers for task in worker.given()]
        assert [turn.message for turn in published] == [message_of(task) for task in given]
        assert given == expected
        waiting = self.waiting()
        for number, task in enumerate(given):
            self.check_order(task, given[number + 1 :] + waiting, has_ticket=True)
        return given

    def check_order(self, task, others, has_ticket):
        """Nobody waits who was parked before; nobody at all where the task was not parked."""
        before = [other for other in others if other != task]
        if has_ticket:
            mine = self.parked_order[task]
            before = [other for other in before if self.parked_order[other] < mine]
        assert not [t for t in before if t in self.waiting()], f"{task} passed {before}"

    def look(self):
        """Compare what the server has with the model."""
        model = self.model
        leases = {
            holding.owner.replace(":0:0#", "#"): (round(holding.remaining / UNIT), holding.mode)
            for holding in self.workers[0].store.holders(LOCK)
        }
        assert leases == {
            owner: (end - model.now, model.terms_of(owner)[0])
            for owner, end in model.leases.items()
        }
        exclusive = [owner for owner, (_, mode) in leases.items() if mode == "exclusive"]
        assert not exclusive or len(exclusive) == len(leases)
        assert len(exclusive) <= max(limit for _, limit in model.terms)

        kept = self.workers[0].records()
        assert kept.line == [place.task for place in model.line]
        until = {task: until for task, (until, _) in model.handed.items()}
        assert {
            task: round((at - self.server.now_ms) / UNIT / 1000) for task, at in kept.until.items()
        } == {task: at - model.now for task, at in until.items()}
        times = {place.task: place.times for place in model.line}
        times |= {task: place.times for task, (_, place) in model.handed.items()}
        assert kept.turns == times
        assert kept.running == sorted(model.running)
        assert kept.replaced == sorted(model.replaced)
        assert (set(kept.aside), kept.done, kept.over) == (model.aside, model.done, model.over)
        states = Counter([*kept.line, *until, *kept.running, *(kept.done | model.replaced)])
        assert not states or max(states.values()) == 1, f"in two states: {states}"

    @invariant()
    def every_key_ends_by_itself(self):
        ttls = self.server.ttls()
        assert all(ttl > 0 for ttl in ttls.values()), ttls

    def teardown(self):
        """With no more crashes all comes to its end."""
        if not hasattr(self, "model"):
            return
        replaced = self.told | self.model.replaced
        for _ in range(40 + 4 * len(self.tasks)):
            self.let_all_work()
            replaced |= self.model.replaced
            for home in range(self.homes):
                self.sweep(home, lost=False, twice=False, told=True)
            if not self.copies and not self.tickets():
                break
            self.pass_time(TTL if self.copies else LONGEST, renewing=False)
        assert not self.copies
        assert not self.tickets()
        for task in set(self.tasks) - self.revoked:
            if task in self.withdrawn:
                assert self.model.completed.count(task) <= 1
            elif task in self.parked_order:
                assert (task in self.model.completed) != (task in replaced), f"{task} is lost"
            else:
                assert task in self.ran | self.skipped, f"{task} is lost"
        kept = self.workers[0].records()
        for worker in self.workers:
            worker.store.close()
            worker.client.close()
        assert not any((kept.line, kept.turns, kept.until, kept.running, kept.replaced)), kept

    def let_all_work(self):
        """Let those at work end, and each copy that is there be delivered once."""
        self.finish_all()
        for _ in range(len(self.copies)):
            self.take(0)
            self.finish_all()

    def finish_all(self):
        while self.executions:
            self.step_on(self.executions[0], twice=False)


def message_of(task):
    return f"\0 message\n of {task} \xff".encode("latin-1") * (number_of(task) + 1)


@pytest.fixture
def machine():
    server = LuaServer()
    return lambda: ParkedMachine(server)


@pytest.mark.extra
@pytest.mark.timeout(600)  # seconds: a failure is first made small
def test_parked_tasks_do_what_the_model_does(machine):
    """Whatever crashes and is lost on the way, each parked task completes once, in its turn."""
    run_model(machine, examples=100, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_parked_tasks_do_what_the_model_does_for_long(machine):
    """So they do in longer and in many more interleavings."""
    run_model(machine, examples=800, steps=80)

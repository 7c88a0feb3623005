"""
Simulate: the real client and the real scripts, in one process, under a clock that is driven.

A history is a list of steps.  A step starts a thread, lets one go on up to where it waits, lets
time pass, or lets something go wrong; the seed chooses the steps, and what each thread is up to.
Steps that do not apply are skipped, so any part of the list is a history, too.  What must be so is
what ``docs/inside/guarantees.md`` says, in terms of what clients were told:

* no two clients trust leases at the same time that the lock does not admit together;
* a fencing token is larger than all before it, and a lease keeps its own;
* while an operator has paused a lock, nobody is let in;
* once nothing goes wrong any more all come to their end, each task has run, and no key is left;
* a key is not reserved any more when its messages have ended, or for an hour if requests are lost
  or late;
* a task keeps its lease, also in a process that stands still, while the main process lives;
* a lease lasts as long as it may, and no longer, also when its owner is done, has died, or has not
  taken it up; of several locks all are taken, or none; for this see :mod:`proof.leases`;
* where a lock has a rate, no window has more starts; for this see :mod:`proof.rates`;
* a lock has no more leases than its limit, with what it keeps for tasks that wait for another one;
* who waits is let in before those who came later, and a line takes in no more than it may; for this
  see :mod:`proof.order`;
* the newest of tasks that cancel each other runs last; for this see :mod:`proof.takeovers`;
* a task that was revoked never begins, unless its process died, or the server has lost data;
* a task runs to its end twice only if a process died or stood still, or the server has lost data.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import greenlet

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms
from celery_dislock.exceptions import DislockError, StoreError, SupersededError
from celery_dislock.keys.names import execution_start
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.messages.headers import GIVEN_UP, REPLACED, TICKET, notes_in
from celery_dislock.parking.store import ASIDE, RUNS
from celery_dislock.parking.sweep import Sweep
from celery_dislock.scripts import HAS_LEFT, NOT_THERE
from celery_dislock.servers.overrides import BARRED
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.waiters import parked_message
from celery_dislock.tasks.request import release_after_death
from celery_dislock.tasks.task import terms_said
from celery_dislock.worker import stalled
from proof import simulated_sending
from proof.controls import CONTROLS
from proof.leases import Durations, cap_of
from proof.order import Order
from proof.rates import Rates, rates_of
from proof.records import Records
from proof.servers import STAYS
from proof.simulated import FOREVER, Actor, Net, Process, Wait, failed, stop
from proof.takeovers import DROPPED, TakeOvers
from proof.working import WIDE, Copy, Worker, driven, named_by, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.view import Holder

    Step = list[Any]

PUT_OFF = 5.0  # seconds
STEPS = 300  # of a history
MESSAGE_STEPS = 150  # of one of messages of a unique key
SHRINK_STEPS = 300_000  # to be taken while a history is made small
TIMEOUT = 30.0  # seconds of a lease
LOOK_EVERY = TIMEOUT / RENEWALS_PER_TIMEOUT / stalled.LOOKS  # seconds
DAY = 86400.0  # seconds
PROCESSES = 3
ACTORS_MOST = 9  # at work at a time
RATED_MOST = 0.5  # of the histories
CANCELS_MOST = 0.4  # of the same without those: these have tasks that cancel each other
DROPS_MOST = 0.4  # in these an operator drops tasks that wait
DAMAGE_MOST = 0.1  # in these the server loses single keys
DAMAGED = (":line", ":handed", ":starts", ":places", "}")  # names of those that it may lose
WITHDRAWS_MOST = 0.3  # in these some workers know no lock of a task, or not the task
TWO_HOMES_MOST = 0.3  # these have two brokers, each with workers of its own
BROKERS = ("here", "there")
SEVERAL_MOST = 0.5  # of the histories with tasks that park: these have tasks of two keys
ONE = {"lock_limit": 1}  # which a rate alone does not have
SPENT = (0, 0, 1, 2, 3)  # what a start with a cost has really cost
RATES = ("3/20s", "1/8s", "2/45s", "10/30s")  # one or two, in some histories, of all locks
NEVER = "1/20m"  # of a release that another one has to take the place of
SET_RATES = ("1/26s", "3/5s")  # by an operator
COSTS = (None, 1, 2, 4)
RATED = ("take",) * 7 + ("hold_back", "set_rate", "set_rate", "set_back")  # steps
SET_BACK_MOST = 0.3  # of the histories with a rate: in these the server's clock is set back
BACK = 70.0  # seconds by which it is
UNIQUE_EVERY = 8  # histories with one of a key that is unique when it is sent
IDLE_MOST = 900.0  # seconds in which something must have ended: no wait and no lease is as long
KEPT_UNIT = 700.0  # seconds after which nothing is left that was kept for a task: 300 beyond a turn
STILL_MOST = 2_000  # rounds in which time must have passed
ROUNDS_MOST = 50_000  # after which a history is given up, though things end
KEYS = ("a", "b")
FAULTS = ("replies", "late", "kill", "freeze", "failover", "limit", "free", "slow")
HARMLESS = {"late", "freeze", "slow", "limit"}  # no lease suffers
UNIQUE_FOR = 3600.0  # seconds for which a key is reserved at most, if its end is lost
HOW = {"replies": ("lost", "fails", "unsent"), "late": ("late", "late")}  # requests go wrong
GROUPS: dict[str, list[dict[str, Any]]] = {  # of options that may be used for one lock
    "exclusive": [{}],
    "shared": [{"lock_mode": "shared"}, {"lock_mode": "shared"}, {}],
    "counted": [{"lock_limit": 2}],
    "mixed": [{"lock_limit": 2}, {}, {"lock_mode": "shared"}],
}
CONFLICTS: list[dict[str, Any]] = [  # of tasks
    {"lock_on_conflict": "queue"},
    {"lock_on_conflict": "queue"},
    {"lock_on_conflict": "queue"},
    {"lock_on_conflict": "queue", "lock_queue_limit": 2},
    {"lock_on_conflict": "queue", "lock_queue_limit": 1, "lock_queue_overflow": "replace"},
    {"lock_on_conflict": "retry", "lock_retry_for": 1e6},
    {"lock_on_conflict": "wait", "lock_wait_timeout": 1e5},
    {"lock_on_conflict": "skip"},
    {"lock_on_conflict": "retry", "lock_retry_for": 1e6, "lock_key": ["<key>", "c"]},
    {"lock_on_conflict": "wait", "lock_wait_timeout": 1e5, "lock_key": ["<key>", "c"]},
]
CANCELS: list[dict[str, Any]] = [
    {"lock_on_conflict": "cancel"},
    {"lock_on_conflict": "cancel"},
    {"lock_on_conflict": "cancel", "lock_cancel_after": 6.0},
    {"lock_on_conflict": "cancel", "lock_cancel_not_before": 8.0},
    {"lock_on_conflict": "cancel", "lock_on_cancel": "warn", "lock_cancel_after": 20.0},
]
ENDS = ("at once", "at once", "later", "never", "tries again")  # a body that is told to end
RETRIES = 0.1  # of the bodies
QUEUES = [one for one in CONFLICTS if one["lock_on_conflict"] == "queue"]
OF_ONE_KEY = {"lock_limit", "lock_mode", *(name for one in CONFLICTS for name in one)}
CANCEL_WITH = {  # what such a task may have beside
    *(name for one in CANCELS for name in one), "acks_late", "lock_at_least_for", "lock_key",
    "lock_limit", "lock_mode", "max_renew_times",
}  # fmt: skip
OTHERS = 0.5  # of the tasks of two keys: have another order in a worker of the other version
NARROW, WIDER = (1, 1, 2), (2, 2, 3)  # limits of the two keys of a task
UNIQUE: list[dict[str, Any]] = [  # when they are sent
    {},
    {},
    {},
    {"lock_unique_until": "start"},
    {"lock_unique_until": "end"},
    {"lock_unique_until": "start", "lock_on_duplicate": "replace"},
    {"lock_unique_until": "end", "lock_on_duplicate": "replace", "lock_replace_for": 20.0},
    {"lock_unique_until": "end", "lock_on_duplicate": "sooner"},
]


LASTING: list[dict[str, Any]] = [  # longer than the body, or shorter
    {},
    {},
    {},
    {"lock_at_least_for": 12.0},
    {"max_renew_times": 2},
]


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


class OutOfRoundsError(Exception):
    """A history takes longer than it is followed, which says nothing of the promises."""


class History:
    """
    One history.

    Args:
        net: The lock server.
        seed: Decides the kind of history, and what each thread is up to.
    """

    def __init__(self, net: Net, seed: str, tells: Callable[[str], None] | None = None) -> None:
        self.net, self.seed, self.tells = net, seed, tells
        self.plan(seed)
        self.chosen: Counter[str] = Counter()  # how often something was chosen for each task
        self.revoked: set[str] = set()
        self.workers: dict[Process, Worker] = {}
        self.actors: dict[str, Actor] = {}
        self.processes: list[Process] = []
        self.queue: list[Copy] = []
        self.results: dict[Any, Any] = {}  # of tasks
        self.late: list[Wait] = []
        self.sent: list[str] = []
        self.ended: Counter[str] = Counter()  # how often a task's body ran to its end
        self.ran: set[str] = set()  # tasks whose body has ended, with or without its lease
        self.excused: set[str] = set()  # tasks that need not have run
        self.tokens: dict[str, list[tuple[float, int, str]]] = {}  # when clients learned of them
        self.limits: dict[str, list[int]] = {}
        self.paused: dict[str, set[int]] = {}  # tokens of those who held a lock then
        self.skew = 0.0  # seconds by which the server's clock was set back
        self.lost_at = -1.0  # the last time at which the server lost data
        self.freed: set[str] = set()
        self.violation = ""
        self.steps = self.generation = self.failed = 0
        self.locked = 0  # threads that have taken a lock in plain Python, or tried to
        net.begin()
        self.judge()
        self.keeper = None  # the main process of the workers, if it renews for those that do not
        if self.has_keeper:
            self.keeper = stalled.StalledKeeper(self.process(0).store, net.clock)
        for nth in range(PROCESSES):
            self.new_process(nth, self.worker(nth) if self.parks else None)

    def plan(self, seed: str) -> None:
        """Choose what kind of history this is."""
        rng = random.Random(f"{seed} plan")
        self.faults = {fault for fault in FAULTS if rng.random() < 0.35}
        self.group = rng.choice(sorted(GROUPS))
        self.parks = rng.random() < 0.5
        rated = random.Random(f"{seed} rate")
        self.rates = (
            rated.sample(RATES, rated.choice((1, 2))) if rated.random() < RATED_MOST else []
        )
        self.one = ONE if rated.random() < 1 / 2 else {}
        sets_back = rated.random()
        deploys = rated.random()
        self.late_acks = rng.random() < 0.7
        several = random.Random(f"{seed} several")
        self.several = self.parks and several.random() < SEVERAL_MOST
        self.deploys = bool(self.rates and self.parks) and not self.several and deploys < 1 / 2
        if self.deploys:
            self.faults.add("kill")
        self.narrow, self.wide = several.choice(NARROW), several.choice(WIDER)
        cancels = random.Random(f"{seed} cancels").random()
        self.cancels = self.parks and not self.several and cancels < CANCELS_MOST
        plain = self.rates and not (self.several or self.cancels)
        self.sets_back = bool(plain) and sets_back < SET_BACK_MOST
        self.drops = random.Random(f"{seed} drops").random() < DROPS_MOST
        if random.Random(f"{seed} damage").random() < DAMAGE_MOST:
            self.faults.add("damage")
        withdraws = random.Random(f"{seed} withdraws").random()
        self.withdraws = not self.several and withdraws < WITHDRAWS_MOST
        two = random.Random(f"{seed} homes").random() < TWO_HOMES_MOST
        self.brokers = BROKERS if two else BROKERS[:1]
        self.net.linked = [lock_name(key) for key in (*KEYS, WIDE)] if self.several else []
        self.kinds = [
            self.kind_of_task(rng, several=self.several and (not nth or rng.random() < 0.5))
            for nth in range(rng.choice((1, 1, 2, 3)))
        ]
        self.has_keeper = self.parks and rng.random() < 0.5
        self.kind = (
            f"{self.group} locks{' with a rate' if self.rates else ''}"
            f"{', and tasks that park' if self.parks else ''}"
            f"{', some of two keys' if self.several else ''}"
            f"{', or cancel each other' if self.cancels else ''}; "
            f"faults: {', '.join(sorted(self.faults)) or 'none'}"
        )

    def judge(self) -> None:
        """Have what arrives judged from now on."""
        net = self.net
        self.durations = Durations(net, self.fail)
        alone = self.group == "exclusive" and not (self.rates and not self.one)
        admits_one = alone and "limit" not in self.faults
        self.take_overs = TakeOvers(net, self.fail, alone=alone, admits_one=admits_one)
        self.rated = Rates(net, self.rates, self.fail)
        records = Records(net, self.fail)
        net.judges = [Order(net, self.fail), self.durations, self.take_overs, records, self.rated]

    def chance(self, what: str, task: str) -> random.Random:
        """Return what decides this of a task, whatever steps there are of others."""
        self.chosen[f"{what} {task}"] += 1
        return random.Random(f"{self.seed} {what} {task} {self.chosen[f'{what} {task}']}")

    def kind_of_task(self, rng: random.Random, *, several: bool = False) -> str:
        """Choose the options of a task, which are its name."""
        options = {
            **rng.choice(GROUPS[self.group]), **rng.choice(CONFLICTS), **rng.choice(UNIQUE),
            **rng.choice(LASTING), "acks_late": self.late_acks,
        }  # fmt: skip
        if self.cancels and rng.random() < 3 / 4:
            options = {**options, "lock_key": "<key>", **rng.choice(CANCELS)}
            options = {name: one for name, one in options.items() if name in CANCEL_WITH}
        if self.rates:  # several keys with a rate cannot be waited for
            options = {
                **self.one, **options, "lock_rate": rng.choice(self.rates), "lock_key": "<key>",
            }  # fmt: skip
            if "lock_mode" in options:  # shared
                options.pop("lock_limit", None)
            if self.deploys:
                options["other_lock_rate"] = rng.choice((*self.rates, NEVER))
            cost = self.cost(rng, options)
            if not several and options["lock_on_conflict"] != "cancel":
                options.update(cost)
        if several:
            options = {
                **{name: one for name, one in options.items() if name not in OF_ONE_KEY},
                **rng.choice(QUEUES), **self.two_keys(rng),
            }  # fmt: skip
        return named_by(options)

    def cost(self, rng: random.Random, options: dict[str, Any]) -> dict[str, int]:
        """Choose what a start costs, if it costs anything: no more than is admitted."""
        cost = rng.choice(COSTS)
        admitted = [options.get("lock_limit", LIMIT_MOST)]
        admitted += [rate.most for rate in rates_of(options)]
        return {"lock_cost": cost} if cost and cost <= min(admitted) else {}

    def two_keys(self, rng: random.Random) -> dict[str, Any]:
        """Choose the keys of a task that has two; a second version may take them in turn."""
        keys = [{"key": "<key>", "limit": self.narrow}, {"key": WIDE, "limit": self.wide}]
        other = [{"key": "<wide>", "limit": self.wide}, {"key": KEYS[0], "limit": self.narrow}]
        return {"lock_key": keys, **({"other_lock_key": other} if rng.random() < OTHERS else {})}

    # The steps.

    def choose(self, rng: random.Random) -> Step:
        """Choose a step."""
        chance = rng.random()
        if chance < (0.16 if self.cancels else 0.08):
            return ["start", self.steps]
        if chance < 0.22:
            return ["pass", rng.choice((0.0, 0.0, 0.0, 0.001, 0.1, 1.0, 5.0, 12.0, 31.0))]
        if chance < 0.24 and self.late:
            return ["late", rng.randrange(len(self.late))]
        if chance < 0.26:
            return ["replicate"]
        if chance < 0.29:
            what = rng.choice(
                ("kill", "kill", "freeze", "thaw", "thaw", "limit", "free", "failover")
            )
            if what in self.faults or (what == "thaw" and "freeze" in self.faults):
                lock = rng.choice((*KEYS, WIDE) if self.several else KEYS)
                args: dict[str, list[Any]] = {
                    "limit": [lock, rng.choice((None, None, 0, 2, 3))],
                    "free": [lock],
                    "failover": [],
                }
                return [what, *args.get(what, [rng.randrange(PROCESSES)])]
        if chance < 0.31 and self.drops:
            return ["drop", rng.choice(KEYS), rng.randrange(ACTORS_MOST)]
        if chance < 0.295 and "damage" in self.faults:
            return ["damage", rng.randrange(ACTORS_MOST)]
        if chance < 0.32 and self.withdraws:
            return ["withdraw", rng.randrange(ACTORS_MOST), rng.choice((RUNS, ASIDE))]
        if chance < 0.36 and self.rates:
            return self.choose_rated(rng)
        ready = [name for name, actor in self.actors.items() if self.is_ready(actor)]
        if not ready:
            return ["pass", 0.0]
        how = "answer"
        if self.faults & {"replies", "late"} and rng.random() < 0.2:
            how = rng.choice([how for fault in sorted(self.faults) for how in HOW.get(fault, ())])
        return ["go", rng.choice(ready), how]

    def choose_rated(self, rng: random.Random) -> Step:
        """Choose a step that only histories with a rate have."""
        what, key = rng.choice(RATED), rng.choice(KEYS)
        if what == "set_back" and self.sets_back:
            return [what]
        if what == "hold_back":
            return [what, key, rng.choice((5.0, 40.0))]
        if what == "set_rate":
            return [what, key, rng.choice((None, *SET_RATES)), rng.choice((0.0, 5.0, 40.0))]
        return ["take", key, rng.choice(self.rates), rng.choice(COSTS)]

    def take(self, step: Step) -> None:
        """Take a step, if it applies."""
        what, *args = step
        self.steps += 1
        getattr(self, f"step_{what}")(*args)
        if self.paused:
            self.check_paused()
        if self.violation:
            raise BrokenPromiseError(self.violation)

    def step_start(self, number: int) -> None:
        """A thread begins to work."""
        if len(self.actors) - PROCESSES >= ACTORS_MOST:
            return
        rng = random.Random(f"{self.seed} {number}")
        process = self.processes[rng.randrange(PROCESSES)]
        if not self.parks or rng.random() < 0.2:
            self.begin(f"{number}", process, lambda: self.locking(process, rng))
        elif rng.random() < 0.5:
            worker = self.workers[process]
            self.begin(f"{number}", process, lambda: self.sending(worker, f"t{number}", rng))
        else:
            self.deliver(number, process, rng)

    def deliver(self, number: int, process: Process, rng: random.Random) -> None:
        """A worker gets a message."""
        due = [
            one for one in self.queue if one.due <= self.net.time and one.broker == process.broker
        ]
        if not due:
            return
        copy = rng.choice(due)
        self.queue.remove(copy)
        worker = self.workers[process]
        made = worker.received(copy)
        self.begin(f"{number}", process, lambda: self.delivery(worker, made), made).copy = copy

    def step_pass(self, seconds: float) -> None:
        """Time passes; 0: until somebody wakes up."""
        if not seconds:
            wakes = [a.waits.until for a in self.actors.values() if a.waits.run is None]
            wakes = [at for at in (*wakes, *(c.due for c in self.queue)) if at > self.net.time]
            seconds = min(wakes, default=0.0) - self.net.time
        if not 0 < seconds < FOREVER:
            return
        while self.keeper is not None and seconds > LOOK_EVERY:
            self.net.advance(LOOK_EVERY)
            seconds -= LOOK_EVERY
            self.keeper.look([one.made for one in self.actors.values() if one.made is not None])
        self.net.advance(seconds)

    def step_go(self, name: str, how: str) -> None:
        """A thread goes on."""
        actor = self.actors.get(name)
        if actor is None or not self.is_ready(actor):
            return
        waits, reply, error = actor.waits, None, False
        if waits.pops:
            reply = self.net.send("LPOP", waits.pops)
            error = how in {"lost", "fails"}
        elif waits.run is not None:
            if how == "late":
                self.late.append(waits)
            elif how != "unsent":
                reply = waits.run()
            if how in {"lost", "late", "unsent"} and waits.resends:
                waits.resent = True
                return
            error = how != "answer"
        self.resume(actor, failed() if error else None, reply)

    def step_late(self, number: int) -> None:
        """A request arrives after it was sent again."""
        if number < len(self.late):
            waits = self.late.pop(number)
            assert waits.run is not None
            reply = waits.run()
            self.tell(f"{self.net.time:10.3f}         late", waits, reply)

    def step_replicate(self) -> None:
        """The replica catches up."""
        self.net.replicate()

    def step_failover(self) -> None:
        """The replica becomes the master."""
        self.net.advance(1.0)
        self.net.fail_over()
        self.forget()
        self.paused.clear()

    def step_damage(self, nth: int) -> None:
        """The server loses a key of a lock, and nobody is told."""
        names = sorted(name for name in self.keys() if name.endswith(DAMAGED))
        if names:
            self.net.send("DEL", names[nth % len(names)])
            self.forget()

    def forget(self) -> None:
        """Know that the server has lost data."""
        for judge in self.net.judges:
            judge.lost()
        self.lost_at = self.net.time

    def step_kill(self, nth: int, worker: Worker | None = None) -> None:
        """A process dies; its messages come again if they were not acknowledged."""
        process, died = self.processes[nth], []
        process.dead = True
        for actor in [one for one in self.actors.values() if one.process is process]:
            del self.actors[actor.name]
            actor.thread.killed = True
            actor.thread.throw(greenlet.GreenletExit)
            if actor.copy and self.late_acks:
                actor.copy.redelivered = True
                self.queue.append(actor.copy)
            elif actor.copy:
                self.excused.add(actor.copy.task)
                self.take_overs.excused.add(actor.copy.task)
            if actor.made is not None:
                died.append(actor.made)
        self.processes.pop(nth)
        worker = worker or self.workers.get(process)
        self.workers.pop(process, None)
        self.new_process(nth, worker)
        if worker is not None and self.generation % 4:  # its main process has seen it
            for made in died:
                name = f"{self.steps} {made.id}"
                self.begin(name, self.processes[nth], partial(self.death, name, made))

    def step_deploy(self) -> None:
        """The process of the other release dies, and one of this release comes in its place."""
        self.step_kill(0, self.worker(PROCESSES))
        self.rated.deployed()

    def step_freeze(self, nth: int) -> None:
        """A process stands still."""
        self.processes[nth].frozen = True

    def step_thaw(self, nth: int) -> None:
        """It goes on."""
        self.processes[nth].frozen = False

    def step_limit(self, key: str, limit: int | None) -> None:
        """An operator sets a limit, or takes it back."""
        name = lock_name(key)
        self.processes[0].store.override(name, limit=limit)
        self.limits.setdefault(name, []).append(limit or 0)
        if limit == 0:
            self.paused.setdefault(name, {one.token for one in self.holders(name)})
        else:
            self.paused.pop(name, None)

    def step_hold_back(self, key: str, seconds: float) -> None:
        """A body has been told to wait, and nobody starts for some seconds."""
        self.processes[0].store.override(lock_name(key), seconds, back=BARRED)

    def step_set_rate(self, key: str, rate: str | None, seconds: float) -> None:
        """An operator sets a rate, for some seconds or, with 0, until it is taken back."""
        word = rate and Rate.of(rate).word
        self.processes[0].store.override(lock_name(key), seconds, rate=word)

    def step_set_back(self) -> None:
        """The server's clock is set back: what is there lasts for longer."""
        self.net.set_back(BACK)
        self.skew += BACK
        for judge in self.net.judges:
            judge.set_back(BACK) if judge is self.rated else judge.lost()
        self.paused.clear()

    def step_take(self, key: str, rate: str, cost: int | None) -> None:
        """Somebody takes a lock for a moment, or is refused."""
        store, owner, names = self.processes[0].store, f"taker:{self.steps}", [lock_name(key)]
        terms = Terms(limit=self.one.get("lock_limit", LIMIT_MOST), rate=Rate.of(rate), cost=cost)
        if isinstance(store.acquire(names, owner, TIMEOUT, "{}", terms=(terms,)), Granted):
            store.release(names, owner)

    def step_free(self, key: str) -> None:
        """An operator frees a lock."""
        store = self.processes[0].store
        for holder in store.holders(lock_name(key)):
            store.free(lock_name(key), holder.owner, holder.token)
            self.freed.add(holder.owner)

    def step_drop(self, key: str, nth: int) -> None:
        """An operator drops a task that waits."""
        lock, parking = lock_name(key), self.processes[0].parking
        tickets = sorted(one.decode() for one in self.net.send("HKEYS", f"{lock}:tickets"))
        tickets = [one for one in tickets if one.endswith(":0")]
        if tickets:
            ticket = tickets[nth % len(tickets)]
            dropped = parking.lines.drop(lock, ticket, json.dumps({REPLACED: DROPPED})[1:-1])
            if dropped is not None:
                self.take_overs.excused.add(ticket.partition(":")[0])
                if dropped.ours:
                    parking.publisher.tell_replaced(lock, {ticket: dropped.message})

    def step_withdraw(self, nth: int, how: str) -> None:
        """A worker has the message of a turn, and knows no lock of its task, or not the task."""
        turns = [
            copy for copy in self.queue if copy.marked and "unique" not in copy.headers["task"]
        ]
        if turns:
            copy = turns[nth % len(turns)]
            self.queue.remove(copy)
            process = next(one for one in self.processes if one.broker == copy.broker)
            name = f"{self.steps} {how}"
            self.begin(name, process, partial(self.withdrawing, process, copy, how)).copy = copy

    def withdrawing(self, process: Process, copy: Copy, how: str) -> None:
        """Run it without a lock, or set it aside, unless another copy runs or has run."""
        notes = notes_in(copy.headers)
        lock, ticket = notes[TICKET]
        try:
            for owner in notes.get(GIVEN_UP, ()) if how == RUNS else ():
                process.store.release([lock], owner)
            state = process.lines.leave(lock, ticket, how, copy.headers["task"])
        except StoreError:
            return self.arrived(copy)
        self.take_overs.excused.add(copy.task)
        if how == RUNS and (state == HAS_LEFT or copy.redelivered):
            self.runs(copy.task)
            self.ran.add(copy.task)
            self.ended[copy.task] += 1
        elif state == NOT_THERE or self.is_only(copy, lock, ticket):
            self.excused.add(copy.task)  # its caller is told FAILURE
        return None

    def is_only(self, copy: Copy, lock: str, ticket: str) -> bool:
        """Return whether a task has claimed its turn, and its message is nowhere but here."""
        copies = [*self.queue, *(actor.copy for actor in self.actors.values())]
        same = [one for one in copies if one and one is not copy and one.task == copy.task]
        others = [one for one in same if sendings(one) >= sendings(copy)]  # not what has sent it
        return bool(self.net.send("HEXISTS", f"{lock}:running", ticket)) and not others

    def step_put_back(self) -> None:
        """An operator of each broker puts its tasks that were set aside back in line."""
        for process in {one.broker: one for one in self.processes}.values():
            for lock in map(lock_name, KEYS):
                for ticket, kept in list(process.lines.aside(lock)):
                    if parked_message(kept)[1] in {None, process.broker}:
                        process.lines.put_back(lock, ticket)

    # Threads.

    def process(self, number: int, nth: int = 0) -> Process:
        broker = self.brokers[nth % len(self.brokers)]
        return Process(self.net, number, self.check, self.durations, broker)

    def worker(self, nth: int) -> Worker:
        worker = worker_of(nth)
        worker.results.kept = self.results
        for kind in self.kinds:
            worker.task(kind)
        return worker

    def new_process(self, nth: int, worker: Worker | None) -> None:
        self.generation += 1
        process = self.process(self.generation, nth)
        process.watchdog.asks = self.keeper is not None
        self.processes.insert(nth, process)
        if worker is not None:
            worker.begin(process, self.arrived, self.states, self.command, self.body)
            self.workers[process] = worker
        process.watchdog.actor = self.begin(f"{process.name} watchdog", process, process.watch)
        if self.parks:
            self.begin(f"{process.name} sweep", process, lambda: self.sweeping(process))

    def begin(
        self, name: str, process: Process, run: Callable[[], None], made: Any = None
    ) -> Actor:
        actor = Actor(name, process, greenlet.greenlet(run), made=made)
        self.actors[name] = actor
        return actor

    def is_ready(self, actor: Actor) -> bool:
        waits = actor.waits
        if actor.process.frozen:
            return False
        if waits.pops and self.net.send("LLEN", waits.pops):
            return True
        return waits.run is not None or waits.until <= self.net.time

    def resume(self, actor: Actor, error: StoreError | None, reply: object) -> None:
        self.tell(f"{self.net.time:10.3f} {actor.name:>12}", actor.waits, error or reply)
        if error is not None:
            actor.has_failed = True
            waits = actor.thread.throw(error)
        elif actor.thread:
            waits = actor.thread.switch(reply)
        else:
            waits = actor.thread.switch()
        if actor.thread.dead:
            self.actors.pop(actor.name, None)
        else:
            actor.waits = waits

    def tell(self, who: str, waits: Wait, reply: object) -> None:
        """Print what a thread has waited for, if the history is replayed."""
        if self.tells is not None:
            script, *arguments = waits.what or ("",)
            name = getattr(script, "text", "-- goes on").split()[1]
            self.tells(f"{who} {name} {arguments} -> {reply!r}")

    def work(self, rng: random.Random) -> None:
        for _ in range(rng.choice((0, 1, 3))):
            stop(Wait(self.net.time + rng.choice((0.0, 0.5, 5.0, 15.0, 50.0))))

    def locking(self, process: Process, rng: random.Random) -> None:
        """Take a lock in plain Python, perhaps several times, and release it."""
        keys = rng.choice((["a"], ["a"], ["a"], ["b"], ["a", "b"], ["b", "c"]))
        options = {
            **rng.choice(GROUPS[self.group]),
            "lock_at_least_for": rng.choice((0.0, 0.0, 0.0, 7.0)),
            "max_renew_times": rng.choice((360, 360, 2)),
        }
        if self.rates:
            rate = rng.choice(self.rates)
            keys, options = keys[:1], {**self.one, **options, "lock_rate": rate}
            options.update(self.cost(rng, options))
        lock = ReentrantLock(process, keys, {**options, "fair": rng.random() < 0.9})
        waits = rng.choice((0.0, 3.0, 40.0, 300.0))
        depth = 0
        try:
            if not (lock.acquire(timeout=waits) if waits else lock.acquire(blocking=False)):
                self.locked += 1
                return
            depth = 1
            if "lock_cost" in options and lock.lease is not None:
                self.spends(lock.lease, rng)
            self.work(rng)
            if rng.random() < 0.3 and lock.acquire():
                depth = 2
                self.work(rng)
        except DislockError:  # lost, or the server did not answer
            self.failed += 1
        for _ in range(depth):
            with contextlib.suppress(DislockError):
                lock.release()
        self.locked += 1

    def sending(self, worker: Worker, task: str, rng: random.Random) -> None:
        """Send a task's message; one that is unique perhaps not."""
        kind, countdown = rng.choice(self.kinds), rng.choice((None, None, None, 8.0))
        key = rng.choice(KEYS)
        self.take_overs.asked[task] = key, self.net.time + (countdown or 0.0)
        if options_of(kind)["lock_on_conflict"] == "cancel":
            self.take_overs.cancel.add(task)
        worker.task(kind).apply_async((key,), task_id=task, countdown=countdown)

    def command(self, worker: str, task: str) -> None:
        """Have a worker told to look at a task, unless the message is lost."""
        chance = self.chance("command", task)
        for process in self.processes:
            if process.name == worker and chance.random() < 3 / 4:
                name = f"look at {task} {self.chosen[f'command {task}']}"
                self.begin(name, process, partial(process.watchdog.look_at, task))

    def delivery(self, worker: Worker, made: Any) -> None:
        """Run a task, as a worker does."""
        worker.run(made)
        stop(Wait())  # before it is acknowledged

    def body(self, task: Any) -> None:
        """Run the body of a task."""
        request = task.request
        name = request.id
        self.runs(name)
        self.take_overs.begins(name, task.lease.owner)
        if "lock_cost" in options_of(task.name):
            self.spends(task.lease, self.chance("spent", name))
        self.work_until_told(task)
        self.ran.add(name)
        if task.lease.held:
            self.ended[name] += 1
        elif (
            self.keeper is not None
            and self.faults <= HARMLESS
            and self.net.time - task.lease.since < cap_of(task.lease.lock.options)
            and task.dislock_guard.options.lock_on_conflict
            != "wait"  # it may be handed for seconds
            # Of a lock that the code does not name any more, the main process knows nothing.
            and set(task.dislock_guard.keys(request.args, request.kwargs)).issuperset(
                task.lease.lock.keys
            )
        ):
            self.fail(f"task {name} has lost its lease, and its main process lives")

    def spends(self, lease: Lease, rng: random.Random) -> None:
        """Say what a start has really cost, perhaps twice, and later something else."""
        for spent in rng.choices(SPENT, k=rng.choice((0, 1, 2))):
            for _ in range(rng.choice((1, 1, 2))):
                with contextlib.suppress(StoreError):
                    lease.spent(spent)
            self.work(rng)

    def runs(self, name: str) -> None:
        """Judge that a task may run."""
        if name in self.revoked and not self.faults & {"kill", "failover", "damage"}:
            self.fail(f"task {name} runs, and its caller was told that it was revoked")

    def work_until_told(self, task: Any) -> None:
        """Work, and end as this body does when it is told to: at once, later, or not at all."""
        name, retries = task.request.id, self.chance("retries", task.request.id)
        how = self.chance("told", name).choice(ENDS)
        try:
            self.work(self.chance("body", name))
        except SupersededError as exc:
            if how == "tries again":
                raise task.retry(exc=exc, countdown=5.0) from exc
            if how != "at once":
                self.work(self.chance("after it was told", name))
            if how != "never":
                raise
        if self.cancels and not task.request.retries and retries.random() < RETRIES:
            raise task.retry(countdown=5.0)

    def states(self, task: str, state: str, result: Any) -> None:
        """Hear of a task's state."""
        self.take_overs.ends(task, state, result)
        if state in {"REVOKED", "FAILURE"}:
            self.excused.add(task)
        if state == "REVOKED":
            self.revoked.add(task)

    def arrived(self, copy: Copy) -> None:
        """Have a message in the broker."""
        self.queue.append(copy)
        if not copy.marked and copy.task not in self.sent:
            self.sent.append(copy.task)
        if copy.task in self.take_overs.asked:
            self.take_overs.sent.add(copy.task)
        if "slow" in self.faults:
            slowness = self.chance("slow", copy.task).choice((0.0, 20.0, 45.0, 70.0))
            copy.due = max(copy.due, self.net.time + slowness)

    def sweeping(self, process: Process) -> None:
        """Sweep the lines, as the worker does."""
        sweep = Sweep(process.parking, process.name, TIMEOUT / 3, clock=self.net.clock)
        if not self.several:  # the other release's template of the wide key fits any key
            sweep.says = terms_said(self.workers[process].app)
        while True:
            stop(Wait(self.net.time + TIMEOUT / 3))
            sweep.step()

    def death(self, name: str, made: Any) -> None:
        """Be the main process, when a process has died that had a task."""
        lost_at = self.lost_at
        release_after_death(made)
        if not self.actors[name].has_failed and lost_at == self.lost_at:
            self.durations.died(execution_start(made.id, made.hostname, made.worker_pid))

    # What must be so.

    def check(self, lease: Lease, waited: float) -> None:
        """Check a lease that was granted, *waited* seconds after it was asked for, or renewed."""
        for name, token in zip(lease.lock.names, lease.tokens.values(), strict=True):
            known = self.tokens.setdefault(name, [])
            for learned, other, owner in known:
                is_older = owner != lease.owner and learned < self.net.time - waited
                if is_older and other >= token and not self.skew:
                    self.fail(f"a token of {name} did not grow: {lease!r}, after {owner}: {other}")
            if not any(owner == lease.owner for _, _, owner in known):
                known.append((self.net.time, token, lease.owner))
            beside = [
                other
                for process in self.processes
                for other in process.watched.leases
                if name in other.lock.names
                and other.end is None
                and other.trusted_until > self.net.time
                and other.since > self.lost_at
                and other.owner not in self.freed
            ]
            if self.excludes(name, beside):
                self.fail(f"they trust leases of {name} at a time: {beside}")
            held_on = [
                one
                for one in self.durations.held_on(name)
                if one.since > self.lost_at and one is not lease
            ]
            if held_on and self.excludes(name, [*beside, *held_on]):
                self.durations.fail("at least", f"{name} is given to {beside} before {held_on}")

    def excludes(self, name: str, leases: Sequence[Lease]) -> bool:
        """Return whether a lock does not admit these leases together."""
        modes = {one.lock.options.lock_mode for one in leases}
        limits = [self.limit_of(one, name) for one in leases]
        most = max(limits + self.limits.get(name, []), default=1)
        return len(modes) > 1 or ("exclusive" in modes and len(leases) > most)

    def limit_of(self, lease: Lease, name: str) -> int:
        """Return how many leases the code admits at a lock, which asked for this one."""
        options = lease.lock.options
        if options.limits_keys:
            return self.wide if name == lock_name(WIDE) else self.narrow
        return options.terms[0].limit

    def check_paused(self) -> None:
        """Check that a lock that is paused has let nobody in."""
        for name, before in self.paused.items():
            for holder in self.holders(name):
                if holder.token not in before:
                    self.fail(f"{holder} was let in while {name} was paused")

    def holders(self, name: str) -> Sequence[Holder]:
        return self.processes[0].store.holders(name)

    def fail(self, text: str) -> None:
        self.violation = self.violation or text

    def end(self) -> None:
        """Let all go well from now on, and look at what has become of it."""
        for _ in range(len(self.late)):
            self.take(["late", 0])
        for nth in range(PROCESSES):
            self.take(["thaw", nth])
        for key in (*KEYS, WIDE):
            self.take(["limit", key, None])
            self.take(["set_rate", key, None, 0.0])
        if self.deploys:
            self.take(["deploy"])
        self.let_all_end()
        for task in self.sent:
            if task not in self.ran and task not in self.excused and self.is_kept:
                raise BrokenPromiseError(f"task {task} is lost")
            most = FOREVER if self.faults & {"kill", "freeze", "failover", "free", "damage"} else 1
            if self.ended[task] > most and f"{task} again" not in self.excused:
                raise BrokenPromiseError(f"task {task} ran {self.ended[task]} times")
        self.take_overs.end()
        if self.violation:
            raise BrokenPromiseError(self.violation)
        kept = KEPT_UNIT if self.several else 100.0  # places of those that died
        self.net.advance(self.skew + kept + (Rate.of(NEVER).window if self.deploys else 0.0))
        left = [name for name in self.keys() if not any(one in name for one in STAYS)]
        if left:
            raise BrokenPromiseError(f"these keys are left: {left}, of {self.net.contents()}")
        # A late request may reserve the key of a task that has ended; so may a copy that is put
        # off, and put in line again, while its body goes on beyond its cap.
        may_stay = self.faults - HARMLESS | self.faults & {"late"} or self.durations.has_capped
        taken = [] if may_stay else self.reserved()
        if not taken:
            self.net.advance(self.skew + UNIQUE_FOR)
            taken = self.reserved()
        if taken:
            raise BrokenPromiseError(f"these keys stay reserved: {taken}, {self.net.contents()}")
        self.net.advance(31 * DAY)
        if self.keys():
            raise BrokenPromiseError(f"these keys do not end: {self.keys()}")

    def let_all_end(self) -> None:
        """
        Go on until all has ended.

        Many tasks that retry take thousands of rounds.  So what breaks a promise is not how long it
        takes, but that time passes and nothing ends, or that no time passes.
        """
        progress, since, now, still = 0, self.net.time, self.net.time, 0
        for number in range(ROUNDS_MOST):
            workers = [n for n in self.actors if "p" not in n]
            ready = [n for n, actor in self.actors.items() if self.is_ready(actor)]
            if len(workers) < ACTORS_MOST and any(c.due <= self.net.time for c in self.queue):
                self.deliver(-number - 1, self.processes[number % PROCESSES], random.Random(number))
            elif ready:
                for name in ready:
                    self.take(["go", name, "answer"])
            elif any(name.endswith(":aside") for name in self.keys()):
                self.take(["put_back"])
            elif workers or self.queue or (self.parks and self.parked()):
                self.take(["pass", 0.0])
            else:
                return
            if progress < self.progress:
                progress, since = self.progress, self.net.time
            still = still + 1 if now == self.net.time else 0
            now = self.net.time
            if now - since > IDLE_MOST or still > STILL_MOST:
                raise BrokenPromiseError(
                    f"it does not end: {sorted(self.actors)}, {self.net.contents()}"
                )
        raise OutOfRoundsError

    @property
    def progress(self) -> int:
        """How much has ended, of what must end once."""
        return len(self.ran) + len(self.excused) + self.locked

    @property
    def is_kept(self) -> bool:
        """Whether the server has kept its data."""
        return self.lost_at < 0

    def parked(self) -> bool:
        return any(name.endswith((":tickets", ":replaced")) for name in self.keys())

    def reserved(self) -> list[str]:
        """Return the records of keys that are reserved for a message."""
        records = {
            name: self.net.send("GET", name).split() for name in self.keys() if ":uni" in name
        }
        return [
            name
            for name, (_, state, _, _, _, ends, *_) in records.items()
            if state != b"-" and int(ends) > self.net.now_ms
        ]

    def keys(self) -> set[str]:
        return set(self.net.ttls())


def sendings(copy: Copy) -> tuple[int, int]:
    """Return how often a message was sent again: as a retry, and put off."""
    return copy.headers["retries"], notes_in(copy.headers).get("put_off", 0)


@cache
def worker_of(nth: int) -> Worker:
    """Return a worker's app, which one history uses after the other."""
    return Worker(is_other=nth == 0)


def lock_name(key: str) -> str:
    """Name a lock in Redis."""
    return f"dislock:{{{key}}}"


@dataclass
class Outcome:
    """What came of a history."""

    steps: list[Step]
    taken: int  # steps, with those to its end
    kind: str
    broken: str  # empty: nothing
    stopped: bool  # it was given up before its end, though things ended


def run(
    net: Net,
    seed: str,
    steps: Sequence[Step] | None = None,
    tells: Callable[[str], None] | None = None,
) -> Outcome:
    """Take these steps of a history, or such as its seed chooses, and bring it to its end."""
    history, rng, taken = History(net, seed, tells), random.Random(seed), []
    broken, stopped = "", False
    try:
        with driven(net, seed):
            for nth in range(STEPS if steps is None else len(steps)):
                taken.append(history.choose(rng) if steps is None else steps[nth])
                history.take(taken[-1])
            if tells is not None:
                tells("and now nothing goes wrong any more")
            history.end()
    except BrokenPromiseError as exc:
        broken = str(exc)
    except OutOfRoundsError:
        stopped = True
    except Exception as exc:  # noqa: BLE001 -- whatever the client or a script raises
        broken = repr(exc)
    for actor in history.actors.values():
        actor.thread.killed = True
    return Outcome(taken, history.steps, history.kind, broken, stopped)


def shrink(net: Net, seed: str, steps: Sequence[Step], broken: str) -> list[Step]:
    """Drop steps, in ever smaller pieces, as long as what is broken stays alike."""
    kept, size = list(steps), len(steps) // 2
    taken = 0
    while size and taken < SHRINK_STEPS:
        start, before = 0, len(kept)
        while start < len(kept) and taken < SHRINK_STEPS:
            fewer = kept[:start] + kept[start + size :]
            outcome = run(net, seed, fewer)
            taken += outcome.taken
            if kind_of(outcome.broken) == kind_of(broken):
                kept = fewer
            else:
                start += size
        if size > 1 or len(kept) == before:
            size //= 2
    return kept


def kind_of(broken: str) -> str:
    """Return what violations that are alike have in common: no names and no numbers."""
    return re.sub(r"[^ ]*[^a-z ][^ ]*", "", broken)[:40]


def simulate(
    seed: int,
    *,
    seconds: float,
    say: Callable[[str], None],
    changed: Callable[[str], str] = str,
    counts: Counter[str] | None = None,
) -> Script | None:
    """
    Simulate histories for some time.

    Args:
        seed: Of the first history.
        seconds: How long.
        say: Called with what is found.
        changed: Changes the text of each script, to break one on purpose.
        counts: Counts the steps and the histories.

    Returns:
        The shortest history that was found to break the first promise that was broken; None: none
        was broken.
    """
    counts = Counter() if counts is None else counts
    net, began = Net(changed), time.monotonic()
    for name, outcome in outcomes(net, seed, began + seconds, say, counts):
        if outcome.broken:
            say(f"BROKEN in history {name} ({outcome.kind}): {outcome.broken}")
            return Script(name, shrink(net, name, outcome.steps, outcome.broken))
    took, steps = time.monotonic() - began, counts["steps"]
    say(f"{steps:,} steps in {counts['histories']:,} histories, {steps / took:,.0f} a second")
    return None


def outcomes(
    net: Net, seed: int, until: float, say: Callable[[str], None], counts: Counter[str]
) -> Iterator[tuple[str, Outcome]]:
    """Run one history after the other until that monotonic time; yields their names, too."""
    for nth in count():
        if time.monotonic() > until:
            return
        counts["histories"] += 1
        name = f"{seed}.{nth}"
        outcome = run(net, name)
        if nth % UNIQUE_EVERY == 0 and not outcome.broken:  # these have a judge of their own
            outcome = run_messages(net, name, loses=nth // UNIQUE_EVERY % 2 == 0, counts=counts)
        counts["steps"] += outcome.taken
        if outcome.stopped:
            counts["stopped"] += 1
            say(
                f"history {name} ({outcome.kind}) ran out of rounds: {ROUNDS_MOST:,} are not "
                "enough for its end. That breaks no promise: things still ended"
            )
        yield name, outcome


def run_messages(net: Net, name: str, *, loses: bool, counts: Counter[str]) -> Outcome:
    """Run a history of messages of a unique key; it has no steps to be replayed."""
    net.judges = ()
    history, broken = simulated_sending.History(net, name, loses=loses), ""
    try:
        counts += history.go(MESSAGE_STEPS)
    except Exception as exc:  # noqa: BLE001 -- whatever the client or a script raises
        broken = repr(exc)
    kind = f"messages of a unique key{', whose state is lost' if loses else ''}"
    return Outcome([], MESSAGE_STEPS + history.commands, kind, broken, stopped=False)


def catch(control: str, seed: int, seconds: float) -> tuple[bool, float]:
    """
    Break the lock in this process for ever, and simulate until its promise is seen to be broken.

    Returns:
        Whether it was seen, and after how many seconds.
    """
    breaks, promise, *_ = CONTROLS[control]
    breaks()
    began = time.monotonic()
    for _, outcome in outcomes(Net(), seed, began + seconds, print, Counter()):
        if outcome.broken.startswith(f"{promise}: "):
            return True, time.monotonic() - began
    return False, time.monotonic() - began


@dataclass
class Script:
    """A history to be replayed."""

    seed: str
    steps: list[Step]

    @classmethod
    def read(cls, file: Path) -> Script:
        """Read what :meth:`write` has written."""
        return cls(**json.loads(file.read_text("utf-8")))

    def __str__(self) -> str:
        steps = ",\n  ".join(map(json.dumps, self.steps))
        return f'{{"seed": {json.dumps(self.seed)}, "steps": [\n  {steps}\n]}}\n'

    def replay(self, tells: Callable[[str], None] | None = None) -> str:
        """Go through it again; returns what is broken, or nothing."""
        return run(Net(), self.seed, self.steps, tells).broken

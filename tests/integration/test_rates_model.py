"""Histories of tasks with rates, checked against a log of all starts.

Random tasks of one key on a driven clock: with and without a limit, of one or two rates of that
key, parked, sent again when they may start, or refused; an operator who pauses and sets rates; a
body that holds the lock back; a deploy of other rates, with two releases beside each other for
a while.  Messages are late, come twice or never; requests are sent twice;
processes die with their lease; a queue has no worker for a while; the clock is set back.  The
scripts are the package's, see ``lua_server``; what is checked is written from the promise alone:

* in no window of a rate more bodies begin than it admits, by the server's clock; while two releases
  run, and until a sweep after that, the rate is that of one of them;
* while a lock is paused or held back nobody begins;
* no message is out for longer than fifteen seconds before its task may start;
* at the end each task has run, or was refused, and nothing waits.

Each rule of the scripts is broken once, and some history shows it.
"""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest

from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms, terms_text
from celery_dislock.servers.overrides import BARRED
from celery_dislock.servers.records import Conflict
from tests.integration.lua_server import LuaServer
from tests.integration.model_runs import break_rule
from tests.integration.parked import LOCK, Line

TURN = 5.0  # seconds of a lease, and of a first turn
SWEEP = 10.0  # seconds between two sweeps
SOON = 15.0  # seconds for which a message is out before its task may start, at most
END = 4000.0  # seconds after which each history is over
SEEDS = 5  # in the usual tests
RATES = ["3/2s", "1/4s", "20/s", "5/10s", "2/25s"]
NEVER = "1/2h"  # of a release that another one has to take the place of
SETTLED = (
    SWEEP + SOON + 2 * TURN
)  # seconds after a deploy in which turns by its old rate may be out


class History:
    """
    One history; its faults come from the seed.

    Args:
        seed: Of all that is random.
        changed: Changes the text of the scripts.

    Attributes:
        steps: How many requests there were.
    """

    def __init__(self, seed, changed=str):
        self.rng = random.Random(seed)
        self.server = LuaServer(changed)
        self.line = Line(self.server)
        self.began = self._now()
        self.events, self.number = [], count()
        self.steps, self.skew = 0, 0.0
        self.starts, self.running, self.ended, self.refused = [], {}, set(), set()
        self.closed = []  # (from, until) in which nobody begins
        self.faults = self.rng.random() < 0.7
        self.dead_until = self.rng.choice([0.0, 0.0, 60.0])  # of a queue without a worker
        rates = self.rng.sample(RATES, self.rng.choice([1, 1, 2]))
        self.terms = [
            Terms(limit=self.rng.choice([LIMIT_MOST, LIMIT_MOST, 1, 3]), rate=Rate.of(rate))
            for rate in rates
        ]
        # By name of a task, the terms that its code has said, the newest last.
        self.words = {f"name{n}": [terms] for n, terms in enumerate(self.terms)}
        names = list(self.words)
        self.tasks = {f"t{n}": self.rng.choice(names) for n in range(self.rng.randint(8, 40))}
        self.deployed = END  # when only the newest release runs
        if self.rng.random() < 0.4:
            self._will_deploy()
        self.kinds = {
            task: self.rng.choice(["queue", "queue", "retry", "skip"]) for task in self.tasks
        }
        self.copies = {task: count(1) for task in self.tasks}

    def _will_deploy(self):
        since = self.rng.random() * 30
        self.deployed = since + self.rng.choice([0.0, 10.0, 30.0])
        for name, words in self.words.items():
            if self.rng.random() < 0.5:
                words[0] = words[0]._replace(rate=Rate.of(NEVER))
            newest = words[0]._replace(rate=Rate.of(self.rng.choice(RATES)))
            self.at(since, self.words[name].append, newest)
            self.terms.append(newest)
        self.terms += [words[0] for words in self.words.values()]

    def word(self, task):
        """The terms of a worker of either release; the newest, if the other has gone."""
        words = self.words[self.tasks[task]]
        return words[-1] if self.clock >= self.deployed else self.rng.choice(words)

    def _now(self):
        return self.server.now_us / 1e6

    def at(self, when, what, *about):
        heapq.heappush(self.events, (max(when, self.clock), next(self.number), what, about))

    @property
    def clock(self):
        """Seconds since the history began, whatever the server's clock says."""
        return self._now() - self.began + self.skew

    def run(self):
        rng = self.rng
        for task in self.tasks:
            self.at(rng.random() * 20, self.send, task, False)
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.at(rng.random() * 30, rng.choice([self.pause, self.hold_back, self.set_rate]))
        if rng.random() < 0.2:
            self.at(rng.random() * 20, self.set_back)
        self.at(SWEEP, self.sweep)
        while self.events and self.clock < END:
            when, _, what, about = heapq.heappop(self.events)
            self.server.advance(max(0.0, when - self.clock))
            what(*about)
            self.steps += 1
            if len(self.ended | self.refused) == len(self.tasks):
                break
        missing = set(self.tasks) - self.ended - self.refused
        assert not missing, f"never ran: {sorted(missing)}"
        self._check_windows()
        return self.steps

    def send(self, task, marked):
        """A worker has the message of a task, and asks for its lock."""
        if task in self.ended and not marked:
            return None
        if self.clock < self.dead_until and task == "t1" and marked:
            return self.at(self.dead_until, self.send, task, marked)
        copy = next(self.copies[task])
        queue, word, name = self.kinds[task] == "queue", self.word(task), self.tasks[task]
        how = {**word._asdict(), "task": name}
        message = b'1 {"headers":{"task":"%s"}} %s' % (name.encode(), task.encode())
        for _ in range(2 if self.rng.random() < 0.1 else 1):  # the first reply was lost
            self.steps += 1
            if queue:
                answer = self.line.ask(task, copy, marked=marked, ttl=TURN, message=b"", **how)
                if answer == "refused" and not marked:
                    answer = self.line.park(task, copy, message=message, **how)
                conflict = None
            else:
                conflict = self.line.store.acquire(
                    [LOCK], f"{task}@w:1/{copy}", TURN, "{}", terms=(word,)
                )
                answer = "refused" if isinstance(conflict, Conflict) else "granted"
        self.publish()
        if answer == "granted":
            self.body(task, copy)
        elif answer == "refused" and queue:  # its turn, before it may start
            self.at(self.clock + 0.05 + self.rng.random() / 10, self.send, task, marked)
        elif answer == "refused" and self.kinds[task] == "retry":
            self.at(
                self.clock + min(conflict.remaining, 60) + self.rng.random() / 10,
                *(self.send, task, False),
            )
        elif answer == "refused":
            self.refused.add(task)
        return None

    def publish(self):
        """Messages of parked tasks go to the broker, which may lose them, or deliver them twice."""
        for turn in self.line.published:
            task = turn.ticket.partition(":")[0]
            assert turn.delay <= SOON + 0.01, f"{task} is out for {turn.delay} s"
            if self.faults and self.rng.random() < 0.05:
                continue
            late = self.rng.random() * (2 if self.rng.random() < 0.1 else 0.05) - 0.02
            self.at(self.clock + turn.delay + late, self.send, task, True)
            if self.faults and self.rng.random() < 0.05:
                self.at(self.clock + turn.delay + self.rng.random() * 30, self.send, task, True)
        self.line.published.clear()

    def body(self, task, copy):
        now = self.clock
        assert not any(since <= now < until for since, until in self.closed), "it is closed"
        words = self.words[self.tasks[task]]
        exact = not self.faults and not self.dead_until and self.skew == 0
        settled = exact and now > self.deployed + SETTLED
        self.starts.append((now, words[-1:] if settled else list(words)))
        if (
            self.faults and self.rng.random() < 0.04
        ):  # its process dies, and its message comes again
            self.at(now + TURN + 1, self.send, task, self.kinds[task] == "queue")
        else:
            self.at(now + self.rng.random() * 2, self.end, task, copy)

    def end(self, task, copy):
        ticket = f"{task}:0:0" if self.kinds[task] == "queue" else ""
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            self.line.end(task, copy, ticket=ticket)
        self.publish()
        self.ended.add(task)

    def sweep(self):
        newer = []
        for lock, task, terms in self.line.sweep().first:
            words = self.words[task.split('"')[3]]
            word = terms_text(
                (words[-1] if self.clock >= self.deployed else self.rng.choice(words),)
            )
            newer += [[lock, task, terms, word]] if word != terms else []
        if newer:
            self.line.lines.sweep([LOCK], {LOCK: newer})
        self.publish()
        self.at(self.clock + SWEEP, self.sweep)

    def pause(self):
        lasts = 1 + self.rng.random() * 20
        self.line.store.override(LOCK, limit=0)
        self.closed.append((self.clock, self.clock + lasts))
        self.publish()
        self.at(self.clock + lasts, self.resume)

    def resume(self):
        self.line.store.override(LOCK, limit=None)
        self.closed = [(since, min(until, self.clock)) for since, until in self.closed]
        self.publish()

    def hold_back(self):
        lasts = 1 + self.rng.random() * 20
        self.closed = [(since, min(until, self.clock)) for since, until in self.closed]
        self.line.store.override(LOCK, lasts, back=BARRED)
        self.closed.append((self.clock, self.clock + lasts - 0.01))
        self.publish()

    def set_rate(self):
        """An operator wants fewer starts than any code says."""
        self.line.store.override(LOCK, 20, rate="1/26000")
        self.publish()

    def set_back(self):
        """The server's clock is set back, and what was counted counts from now."""
        self.server.advance(-100.0)
        self.skew += 100.0
        self.closed = []

    def _check_windows(self):
        """
        Check each start with all that came before it.

        The lock server keeps as many starts, and for so long, as was asked for since it was idle:
        those of a faster rate from before are not counted for a slower one.
        """
        kept, known = {}, []  # since when what each rate needs is kept; the starts
        for now, words in self.starts:
            if known and now - known[-1] > max((rate.window for rate in kept), default=0):
                kept.clear()
            rates = [one.rate for one in words]
            for mine in {one.rate for one in self.terms}:
                if all(mine.most <= one.most and mine.window <= one.window for one in rates):
                    kept.setdefault(mine, now)
            known.append(now)
            within = []
            for most, window in rates:
                since = kept.get(Rate(most, window), now)
                inside = [at for at in known if at > now - window and at >= since]
                within.append(len(inside) <= most)
            assert any(within), f"too many starts at {now}: {rates}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_history_keeps_the_promise(seed):
    """Whatever is lost, late or sent twice, no window has too many starts, and all tasks run."""
    for nth in range(4):
        History(1000 * seed + nth).run()


BROKEN = {
    "one start too many": ("log.quantum == 1 and most or", "log.quantum == 1 and most + 1 or"),
    "the starts of a slower rate are forgotten": ("math.max(most, log.most)", "most"),
    "a claim is not counted": ("    count_start(at, station.terms)\n", ""),
    "a claim may come early": (
        "local early, its = starts_when(stations)",
        "local early, its = 0, nil",
    ),
    "turns are given hours ahead": ("lock.early <= SOON_US and", "true and"),
    "nobody in line follows": ("local word = lock.words and lock.words[task]", "local word = nil"),
    "held back for nothing": ("(back.until_ms - now) * 1000", "0"),
}


@pytest.mark.extra
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule):
    """Without this rule some history fails."""
    break_rule(BROKEN[rule], lambda seed, changed: History(seed, changed).run())

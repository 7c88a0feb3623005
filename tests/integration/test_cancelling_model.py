"""Histories of tasks of one key that cancel each other, checked against what the promise says.

Random tasks on a driven clock; messages that come late, in another order or twice; requests that
are sent twice; bodies that end when they are told, later, or at the same moment; retries; processes
that die; newcomers that a person drops, and a key that is paused.  The scripts are the package's,
see ``lua_server``; what is checked is written from the promise:

* never more bodies than the limit;
* no task begins after one that was sent later has begun, unless the lock admits both; the newest
  that is not dropped runs;
* whom the newest waits for is told in each renewal, unless the newest was dropped;
* at the end nobody holds or waits for anything.

Each rule of the scripts is broken once, and some history shows it.
"""

from __future__ import annotations

import heapq
import json
import random
from itertools import count

import pytest

from celery_dislock.config.terms import Terms
from celery_dislock.parking.answers import Done, Parked
from celery_dislock.parking.store import Bounds, Lines, Ticket
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted, Replaced
from celery_dislock.servers.requests import Ending
from tests.holding import name_of
from tests.integration.lua_server import LuaServer
from tests.integration.model_runs import break_rule

LOCK = name_of("deploy")
TTL, RENEWED, SWEEP = 12.0, 4.0, 10.0  # seconds
END = 2000.0
SEEDS = 40
NEWEST = Bounds(most=1, overflow="replace")


class History:
    """One history; its faults come from the seed.  *changed* changes the text of the scripts."""

    def __init__(self, seed, changed=str):
        rng = self.rng = random.Random(seed)
        self.server = LuaServer(changed)
        self.out = []
        self.store = self.server.store(home="here", hand_over=self.out.extend)
        self.lines = Lines(self.store.lock_server, "dislock", "here", self.out.extend)
        self.began = self.server.now_us
        self.events, self.number, self.copies = [], count(), count(1)
        self.limit = rng.choice([1, 1, 1, 2, 3])
        self.terms = (Terms(limit=self.limit),)
        self.faults = rng.random() < 0.5
        # Some are sent at one time.
        times = [self.began + rng.randint(1, 20) * 10**6 for _ in range(rng.randint(2, 20))]
        self.sent = {f"t{n}": at for n, at in enumerate(times)}
        # Of older ones in a queue that nobody serves: their turns do not come.
        older = sorted(self.sent, key=self.order)[:-1] if self.limit == 1 else []
        self.dead = {name for name in older if self.faults and rng.random() < 0.1}
        self.running, self.newest_begun = {}, None
        self.ended, self.dropped, self.parked, self.retried = set(), set(), set(), set()
        self.cancelled, self.swept = set(), True  # since the key was resumed

    @property
    def clock(self):
        return (self.server.now_us - self.began) / 1e6

    def at(self, when, what, *about):
        heapq.heappush(self.events, (max(when, self.clock), next(self.number), what, about))

    def order(self, name):
        return self.sent[name], name

    def run(self):
        rng = self.rng
        for name, sent in self.sent.items():
            at = (sent - self.began) / 1e6
            late = rng.random() * (20 if rng.random() < 0.2 else 0.2)
            self.at(at + late, self.ask, name, False)
            if self.faults and rng.random() < 0.1:
                self.at(at + late + rng.random() * 10, self.ask, name, False)
            if rng.random() < 0.1:
                self.at(at + rng.random() * 5, self.drop, name)
        if rng.random() < 0.2:
            since = rng.random() * 20
            self.at(since, self.pause)
            self.at(since + rng.random() * 30, self.resume)
        self.at(SWEEP, self.sweep)
        steps = 0
        while self.events and self.clock < END:
            when, _, what, about = heapq.heappop(self.events)
            self.server.advance(max(0.0, when - self.clock))
            what(*about)
            steps += 1
            if len(self.events) == 1 and not self.running and not self.waits():  # but for the sweep
                break
        over = self.ended | self.dropped | self.cancelled
        assert over | self.dead == set(self.sent), f"never ended: {sorted(set(self.sent) - over)}"
        newest = max(set(self.sent) - self.dropped, key=self.order, default=None)
        # Else it was told to end for one that was dropped after that.
        made_room = any(self.order(one) > self.order(newest) for one in self.dropped if newest)
        assert newest in {None, *self.ended} or made_room, f"the newest, {newest}, did not run"
        self.server.advance(TTL + 1)
        ends = (":line", ":tickets", ":handed", ":replaced")
        left = [name for name in self.server.names() if name.endswith(ends)]
        assert not left or self.dead - over, left
        return steps

    def waits(self):
        return any(name.endswith((":line", ":tickets")) for name in self.server.names())

    def _twice(self):
        return 2 if self.rng.random() < 0.1 else 1  # the first reply was lost

    def ask(self, name, marked, copy=None):
        """A worker has the message of a task."""
        if name in self.dropped and not marked:
            return
        copy = copy or next(self.copies)
        answer = self._park(name, copy, marked, b"")
        if type(answer) is Conflict and not marked:
            answer = self._park(name, copy, marked, self._message(name))
        if isinstance(answer, Granted):
            self.body(name, copy)
        elif isinstance(answer, Parked):
            self.parked.add(name)
            if answer.told:
                self._check_told(name, answer.told)
        elif answer is None:
            self.cancelled.add(name)
        elif type(answer) is Conflict:
            self.at(self.clock + min(answer.remaining, 5) + 0.05, self.ask, name, marked)
        else:
            assert isinstance(answer, Done)

    def _message(self, name):
        return b'1 {"sent":%d,"until":"","exchange":""}\n' % self.sent[name]

    def _park(self, name, copy, marked, message):
        retries = int(name in self.retried)
        ticket = Ticket(
            *(f"{name}:{retries}:0", marked, message),
            terms=self.terms,
            bounds=NEWEST,
            sent=self.sent[name],
        )
        owner, holder = f"{name}@w:1/{copy}", json.dumps({"id": name})
        try:
            for _ in range(self._twice()):
                answer = self.lines.park([LOCK], owner, TTL, holder, ticket)
        except Replaced as exc:
            answer = None
            self._check_order(name, exc.by)
        self.publish()
        if isinstance(answer, Parked):
            for ticket in answer.replaced:
                self.lines.leave(LOCK, ticket)
                self.cancelled.add(ticket.partition(":")[0])
        return answer

    def _check_order(self, older, newer):
        assert self.order(older) < self.order(newer), f"{newer} supersedes {older}"

    def _check_told(self, name, told):
        oldest = min(self.running, key=lambda one: self.running[one][0], default=None)
        assert [holder["id"] for holder in told] == [oldest], "who is told is not the oldest"
        self._check_order(oldest, name)

    def publish(self):
        given, self.out[:] = list(self.out), []
        for turn in given:
            name = turn.ticket.partition(":")[0]
            if name in self.dead or (self.faults and self.rng.random() < 0.05):
                continue
            for _ in range(2 if self.faults and self.rng.random() < 0.05 else 1):
                self.at(self.clock + self.rng.random() * 2, self.ask, name, True)

    def body(self, name, copy):
        assert name not in self.running
        assert len(self.running) < self.limit, f"{name} beside {sorted(self.running)}"
        newest = max(filter(None, (self.newest_begun, name)), key=self.order)
        assert newest == name or self.limit > 1, f"{name} begins after {newest}"
        self.newest_begun = newest
        self.running[name] = (self.clock, copy)
        if self.faults and self.rng.random() < 0.05:  # its process dies; its message comes again
            self.at(self.clock + 1, self.die, name, copy)
        else:
            self.at(self.clock + self.rng.random() * 15, self.end, name, copy)
            self.at(self.clock + self.rng.random() * RENEWED, self.renew, name, copy)

    def renew(self, name, copy):
        """Its worker renews the lease, at the time or as it was told to look."""
        if self.running.get(name, (0, 0))[1] != copy:
            return
        ((answer,),) = [self.store.renew([([LOCK], f"{name}@w:1/{copy}", TTL)], within=1)]
        if isinstance(answer, str):
            assert answer not in self.dropped, "it is told of a task that was dropped"
            assert self.order(answer) > self.order(name)
            if self.rng.random() < 0.8:
                self.at(self.clock + self.rng.random(), self.end, name, copy, True)
        else:
            assert answer is True
            waiting = self.parked - self.cancelled - self.dropped - self.ended - set(self.running)
            waits = [one for one in waiting if self.order(one) > self.order(name)]
            assert not (waits and self.limit == 1 and self.swept), f"{waits} not told"
        self.at(self.clock + RENEWED, self.renew, name, copy)

    def end(self, name, copy, cancelled=False):
        if self.running.get(name, (0, 0))[1] != copy:
            return
        del self.running[name]
        retries = int(name in self.retried)
        for _ in range(self._twice()):
            self.store.release([LOCK], f"{name}@w:1/{copy}", Ending(ticket=f"{name}:{retries}:0"))
        self.publish()
        if cancelled:
            self.cancelled.add(name)
        elif name not in self.retried and self.rng.random() < 0.2:
            self.retried.add(name)  # its retry is in its countdown
            self.parked.discard(name)
            self.at(self.clock + self.rng.random() * 10, self.ask, name, False)
        else:
            self.ended.add(name)

    def die(self, name, copy):
        del self.running[name]
        self.store.release_dead([LOCK], f"{name}@w:1/{copy}")
        self.publish()
        self.at(self.clock + 1, self.ask, name, True)

    def drop(self, name):
        if name in self.parked and name not in self.running and name not in self.ended:
            ticket = f"{name}:{int(name in self.retried)}:0"
            if self.lines.drop(LOCK, ticket, '"replaced":"x"') is not None:
                self.dropped.add(name)
                self.lines.leave(LOCK, ticket)
            self.publish()

    def pause(self):
        self.store.override(LOCK, limit=0)
        self.swept = False

    def resume(self):
        self.store.override(LOCK, limit=None)
        self.publish()

    def sweep(self):
        for lock, swept in self.lines.sweep([LOCK]).items():
            for ticket in swept.replaced:
                self.lines.leave(lock, ticket)
        self.swept = f"{LOCK}:limit" not in self.server.names()
        self.publish()
        self.at(self.clock + SWEEP, self.sweep)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_newest_runs_last(seed):
    """Whatever comes late or twice, no older task begins after a newer one, and that one runs."""
    assert History(seed).run()


BROKEN = {
    "an older one may run after the newest": (
        "canceller and newer_than(lock, canceller)",
        "nil",
    ),
    "nobody is told": ("lease.holder = with_mark(lease.holder, canceller.task)", ""),
    "the youngest is told": (
        "lease.token - oldest.token < 0",
        "lease.token - oldest.token > 0",
    ),
    "who has its turn keeps it": (
        "return count_tickets(lock) - (canceller and 0 or redis.call('ZCARD', lock.handed))",
        "return count_tickets(lock) - redis.call('ZCARD', lock.handed)",
    ),
    "who was dropped still cancels": (
        "if superseded_by(lease.holder) == one.task then",
        "if false then",
    ),
    "what was dropped is the newest for ever": (
        "redis.call('HDEL', lock.name .. NEWEST, 'waits')\n    for",
        "for",
    ),
    "only who waits counts": ("ipairs({'waits', 'began'})", "ipairs({'waits'})"),
    "of two that were sent at one time both are newer": (
        "one.sent == other.sent and mine > its",
        "one.sent == other.sent",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule):
    """Each rule has a history that shows what happens without it."""
    break_rule(BROKEN[rule], lambda seed, changed: History(seed, changed).run(), seeds=400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_histories():
    """A hundred thousand steps of other histories."""
    steps = seed = 0
    while steps < 100_000:
        steps += History(1000 + seed).run()
        seed += 1

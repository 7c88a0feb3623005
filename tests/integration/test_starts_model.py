"""Random histories of starts with costs, compared with an exact count of all of them.

A lock is asked for again and again, by one rate or two, on a driven clock.  In some histories each
start costs 1, in others they differ, and in some of these the owners say what they have really
spent.  The scripts are the package's, see ``lua_server``; the count is written from the promise:

* up to a rate of ``QUANTA`` in a window the lock is granted exactly when the count says so;
* above that never too early, and at most as late as if it cost two quanta more;
* with two rates of different quanta, or when more was spent than was said, never too early;
* the log is never longer than ``QUANTA`` and two;
* a log of an older release, which has each start, loses none.
"""

from __future__ import annotations

import random

import pytest

from celery_dislock import scripts
from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms, terms_text
from tests.integration.lua_server import LuaServer
from tests.integration.model_runs import break_rule

LOCK = "dislock:{k}"
LOG = f"{LOCK}:starts"
QUANTA = 1000
FEW = (1, 2, 5, 20, 100, 1000)  # starts in a window
MANY = (1001, 1500, 7777, 10**5, 10**6)
WINDOWS = (1, 2, 10, 60)  # seconds
OF_THE_RATE = (0.0005, 0.01, 0.1, 1, 1.3)  # what a start costs at most
LATEST = 1000  # starts of which an owner may say what it has spent
SEEDS = 12  # in the usual tests
LONG = {1, 5, 6, 8}  # seeds whose histories take seconds


class History:
    """One history, all of whose choices come from the seed."""

    def __init__(self, seed, changed=str, costs=None):
        self.rng = random.Random(seed)
        self.server = LuaServer(changed)
        self.starts = []  # [microseconds, cost]
        self.running = []  # [owner, rate, cost, the start in self.starts]
        self.asked = 0
        self.costs = self.rng.choice(["none", "some", "less", "more"]) if costs is None else costs
        first = self.rate(FEW + MANY)
        self.rates = [first]
        if self.rng.random() < 0.5:
            self.rates.append(self.rate(FEW if self.rng.random() < 0.5 else FEW + MANY))
        self.quantum = max(-(-rate.most // QUANTA) for rate in self.rates)
        self.is_exact = self.quantum == 1 and self.costs != "more"
        if self.quantum > 1 and self.rng.random() < 0.5:
            self.begin_as_before(first)

    def begin_as_before(self, rate):
        """Write a log as the releases did that kept each start."""
        now, window = self.server.now_us, round(rate.window * 1_000_000)
        since = now - window + 1
        times = sorted(self.rng.randrange(since, now) for _ in range(min(rate.most, 5000)))
        self.starts = [[at, 1] for at in times]
        kept = f"1 {rate.most} {rate.window * 1000:.0f}"
        self.server.send("RPUSH", LOG, *reversed(times), kept)

    def rate(self, of):
        return Rate(self.rng.choice(of), float(self.rng.choice(WINDOWS)))

    def exact_due(self, cost, rate):
        """Return the microseconds until the count admits a start of this cost."""
        now, window = self.server.now_us + 1, round(rate.window * 1_000_000)  # when a script runs
        cost = min(cost, rate.most)
        for at in [now, *sorted(t + window for t, _ in self.starts if t + window > now)]:
            if sum(one for t, one in self.starts if t > at - window) + cost <= rate.most:
                return at - now
        return 0

    def ask(self, cost, rate):
        """Ask for the lock; return the milliseconds until it can be had: 0, it was taken."""
        owner, word = f"o{self.asked}", self.word(cost, rate)
        self.asked += 1
        reply = self.server.run(scripts.ACQUIRE, [LOCK], owner, 10**8, "{}", word, 0, 1)
        if reply[0] == scripts.GRANTED:
            start = [self.server.now_us, min(cost, max(one.most for one in self.rates))]
            self.starts.append(start)
            if self.costs in {"less", "more"} and len(self.running) < 20:
                self.running.append([owner, rate, cost, start])
            else:
                self.server.run(scripts.RELEASE, [LOCK], owner, 0)
            return 0
        assert reply[0] == scripts.REFUSED
        return reply[2]

    def word(self, cost, rate):
        said = None if self.costs == "none" else cost
        return terms_text((Terms(limit=LIMIT_MOST, rate=rate, cost=said),))

    def spend(self):
        """An owner says what it has spent; sometimes its command comes twice."""
        rng = self.rng
        owner, rate, cost, start = self.running.pop(rng.randrange(len(self.running)))
        if cost <= rate.most:
            most = cost if self.costs == "less" or rng.random() < 0.5 else min(2 * cost, rate.most)
            spent = rng.randint(0, most)
            for _ in range(rng.choice((1, 1, 2))):
                arguments = owner, spent, self.word(cost, rate)
                assert self.server.run(scripts.SPENT, [LOCK], *arguments) == 1
            if spent > cost:
                self.starts.append([self.server.now_us, spent - cost])
            else:
                start[1] = spent
        self.server.run(scripts.RELEASE, [LOCK], owner, 0)

    def run(self):
        rng = self.rng
        for _ in range(rng.choice((60, 200, 600))):
            rate = self.rates[0] if rng.random() < 0.6 else self.rates[-1]
            pause = rng.expovariate(1) * self.rates[0].window / min(self.rates[0].most, 300)
            self.server.advance(pause * rng.choice((0.01, 0.3, 1, 3)))
            if not self.server.send("LLEN", LOG):
                for one in self.rates:  # from its first start on, the log is kept for a rate
                    self.ask(1, one)
            if self.running and rng.random() < 0.5:
                self.spend()
            cost = 1
            if self.costs != "none" and rng.random() < 0.6:
                cost = rng.randint(1, max(1, int(rate.most * rng.choice(OF_THE_RATE))))
            exact = self.exact_due(cost, rate)
            late = self.exact_due(min(rate.most, min(cost, rate.most) + 2 * self.quantum), rate)
            due = self.ask(cost, rate)
            self.judge(due, exact, late, rate)
            if due and rng.random() < 0.5:
                self.server.advance(due / 1000)
                assert self.exact_due(cost, rate) == 0, "not at the time that it said"
        return self.asked

    def judge(self, due, exact, late, rate):
        if due == 0:
            assert exact == 0, f"a start by {rate} is {exact} us too early"
        if self.is_exact:
            assert due == -(-exact // 1000), f"by {rate} due in {due} ms, not in {exact} us"
        elif len(self.rates) == 1 and self.costs in {"none", "some"}:
            assert due <= -(-late // 1000), f"by {rate} due in {due} ms, not in {late} us"
        log = self.server.send("LLEN", LOG)
        if due == 0:  # else it may be an older one as it was
            assert log <= QUANTA + 2, f"{log} elements"


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.extra if seed in LONG else ()) for seed in range(SEEDS)],
)
def test_a_start_is_granted_when_the_count_admits_it(seed):
    """No start is too early; with a rate of few starts none is too late either."""
    for nth in range(5):
        History(seed * 5 + nth).run()


BROKEN = {
    "a quantum stays free": (
        "math.floor((most + 1) / log.quantum) - 1",
        "math.floor((most + 1) / log.quantum)",
    ),
    "what fills no quantum is carried": ("log.carry = log.carry + ", "log.carry = "),
    "an older log is read": ("then rebase(starts, log, quantum)", "then log.quantum = quantum"),
    "it is written with the newer times": ("sum >= quantum", "sum > 0"),
    "it is kept for the larger rate": ("math.max(most, log.most)", "most"),
    "it is no longer than it must be": ("starts, 0, kept - 1)", "starts, 0, -2)"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_of_the_log_is_found(rule):
    """Without this rule some history fails."""
    break_rule(BROKEN[rule], lambda seed, changed: History(seed, changed).run())


def test_a_log_is_exact_again_when_no_large_rate_was_asked_for_in_a_window():
    """After a deploy of a small rate its starts are counted one by one, without a time of rest."""
    history = History(0, costs="none")
    large, small = Rate(10**6, 10.0), Rate(5, 1.0)
    history.server.lose()
    assert history.ask(1, large) == 0
    granted = 0
    for _ in range(200):
        history.server.advance(0.1)
        granted += history.ask(1, small) == 0
    assert granted > 45  # of fifty in the ten seconds after the window


@pytest.mark.parametrize("most", [3, 5000])
def test_starts_in_the_future_become_as_old_as_now(most):
    """A clock that is set back lets nobody wait for longer than a window, and forgets no start."""
    history, rate = History(0, costs="none"), Rate(most, 60.0)
    history.server.lose()
    while history.ask(1, rate) == 0:
        pass
    history.server.advance(-3600)
    assert 59_000 < history.ask(1, rate) <= 60_000
    history.server.advance(60.1)
    history.starts.clear()
    assert history.ask(1, rate) == 0

"""How often a lock is taken: real scripts in this process, and a driven clock."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, count
from threading import Event, Thread

import pytest
from celery import states
from freezegun import freeze_time
from greenlet import greenlet
from redis import Redis

from celery_dislock import Dislock, Key
from celery_dislock.config.terms import Rate, Terms
from celery_dislock.exceptions import LockHeldError, SettingsError
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.tasks.actions import Actions
from tests.driven import KEY, LockServer, Shop, new_app
from tests.forked import ROOT
from tests.holding import name_of
from tests.integration.parked import LONG, Line
from tests.integration.starters import costs_of

NAME = f"dislock:{{{KEY}}}"
STEP = 0.05  # seconds between two looks at the messages
SWEPT = 10.0  # seconds between two sweeps


@pytest.fixture
def shop():
    with freeze_time(), Shop() as shop:  # only the driven clock moves
        yield shop


def take(shop, key=KEY, **options):
    """Take a lock for a moment; return the lease, or the conflict."""
    lock = shop.dislock.lock(key, **options)
    answer = lock.try_acquire()
    if answer:
        lock.release()
    return answer


def ask(shop, owner, rate="2/m", **how):
    """Ask the lock server as somebody else; return the answer."""
    store = shop.dislock.runtime.process.store
    terms = (Terms(limit=9, rate=Rate.of(rate)),)
    return store.acquire([NAME], owner, 30.0, "{}", terms=terms, **how)


class Starts:
    """Tasks that tell when their bodies began, in seconds since the test did."""

    def __init__(self, shop, **options):
        self.shop, self.began = shop, shop.clock()
        self.times: list[float] = []
        self.task = shop.declare(self._body, **options)

    def _body(self, *_args):
        self.times.append(self.shop.clock() - self.began)

    def send(self, many, first=0):
        for nth in range(first, first + many):
            self.shop.send(self.task, f"t{nth}")

    def run(self, seconds, step=STEP):
        """Let time pass, with a sweep now and then."""
        swept = 0.0
        for _ in range(round(seconds / step)):
            self.shop.work(later=step)
            swept += step
            if swept >= SWEPT:
                self.shop.sweep()
                swept = 0.0


def most_in_a_window(times, window):
    """The most starts in any window: before its end, and not at its beginning."""
    times = sorted(times)
    return max(sum(end - window < one <= end for one in times) for end in times)


def lateness(times, most, window):
    """For how long each start could have been before it was, given those before it."""
    times = sorted(times)
    earliest = [0.0] * most + [one + window for one in times]
    return [at - could for at, could in zip(times, earliest, strict=False)]


@pytest.mark.parametrize("strategy", ["queue", "retry"])
@pytest.mark.parametrize(("rate", "most", "window"), [("3/2s", 3, 2.0), ("8/s", 8, 1.0)])
def test_no_window_has_more_starts_than_its_rate(shop, strategy, rate, most, window):
    """All tasks of a burst run, no window has more of them than the rate, and none comes late."""
    starts = Starts(shop, lock_rate=rate, lock_on_conflict=strategy)
    starts.send(3 * most)
    starts.run(3.5 * window)
    assert len(starts.times) == 3 * most
    assert most_in_a_window(starts.times, window) == most
    if strategy == "queue":
        assert max(lateness(starts.times, most, window)) < 0.3


def test_no_more_turns_are_out_than_may_start(shop):
    """However many wait, so many messages are on their way as can start in a window, no more."""
    starts = Starts(shop, lock_rate="3/2s")
    starts.send(20)
    for _ in range(80):
        shop.work(later=STEP)
        (state,) = shop.dislock.lock_of(KEY).state()
        assert len(state.turns) <= 3
    assert len(starts.times) >= 6


def test_a_rate_alone_limits_nobody_who_runs(shop):
    """Of a rate without a limit any number run at a time."""
    holders = [greenlet(shop.dislock.lock(KEY, rate="5/m").try_acquire) for _ in range(6)]
    assert [bool(one.switch()) for one in holders] == [True] * 5 + [False]


def test_a_limit_beside_a_rate_holds(shop):
    """Of a limit and a rate of one key both hold."""
    lock = shop.dislock.lock(KEY, rate="2/m", limit=1)
    assert lock.try_acquire()
    refused = greenlet(shop.dislock.lock(KEY, rate="2/m", limit=1).try_acquire).switch()
    assert not refused.early
    lock.release()
    assert take(shop, rate="2/m", limit=1)
    refused = take(shop, rate="2/m", limit=1)
    assert refused.early
    assert refused.remaining == pytest.approx(60, abs=1)
    assert str(refused.error()).startswith(
        f"lock '{KEY}' cannot be taken yet, too early: 2 a minute, the next may start at "
    )


@pytest.mark.parametrize("place", [0.0, 60.0])
def test_a_command_that_is_sent_twice_counts_once(shop, place):
    """An acquisition whose reply was lost, and which is sent again, is one start."""
    assert isinstance(ask(shop, "a", place=place), Granted)
    assert isinstance(ask(shop, "a", place=place), Granted)
    assert isinstance(ask(shop, "b", place=place), Granted)
    assert not isinstance(ask(shop, "c", place=place), Granted)


def test_a_lock_that_is_taken_again_by_its_holder_counts_once(shop):
    """What a holder takes again within its block is no start."""
    lock = shop.dislock.lock(KEY, rate="2/m")
    with lock, lock:
        pass
    assert take(shop, rate="2/m")
    assert not take(shop, rate="2/m")


def test_a_retry_is_a_start_of_its_own(shop):
    """Each execution of a task that retries is counted."""
    starts = Starts(shop, lock_rate="2/10s")

    def body(self, *_):
        starts.times.append(shop.clock() - starts.began)
        raise self.retry(countdown=0.1, max_retries=5)

    starts.task = shop.declare(body, lock_rate="2/10s")
    starts.send(1)
    starts.run(25)
    assert most_in_a_window(starts.times, 10.0) == 2
    assert len(starts.times) == 6


@pytest.mark.parametrize("timeout", [3, 10])
def test_who_waits_in_a_slot_comes_in_time(monkeypatch, timeout):
    """A waiter takes the lock when the rate admits it, although nobody releases it."""
    server = LockServer()
    server.drive(monkeypatch)
    lock = Dislock(new_app()).lock(KEY, rate="1/4s", timeout=timeout)
    assert lock.acquire()
    lock.release()
    began, refused = server.clock(), timeout < 4
    told = pytest.raises(LockHeldError, match="early: 1 in 4 s") if refused else nullcontext()
    with told, lock:
        pass
    assert server.clock() - began == pytest.approx(min(4, timeout), abs=0.01)


def test_who_waits_behind_a_slower_rate_asks_again_when_that_one_may_start(shop):
    """Its own rate would let it start now: without that it would ask over and over."""
    assert isinstance(ask(shop, "a", "1/m"), Granted)
    for owner, rate in (("b", "1/m"), ("c", "9/m")):
        assert ask(shop, owner, rate, place=60.0).remaining == pytest.approx(60)


def test_a_slower_rate_is_not_passed_by_a_faster_one_for_ever(shop):
    """Whose turn it is keeps room for a start by its own rate, while others come by another one."""
    slow = Starts(shop, name="shop.slow", lock_rate="2/45s")
    fast = Starts(shop, name="shop.fast", lock_rate="3/20s")
    fast.send(3)
    slow.send(3, first=100)
    for nth in range(30):
        fast.send(1, first=3 + nth)
        fast.run(8, step=0.5)
    assert len(slow.times) == 3
    assert len(fast.times) > 10


def test_several_keys_count_together_or_not_at_all(shop):
    """If one of several keys refuses, none of them has counted a start."""
    keys = Key("narrow", rate="1/m"), Key("wide", rate="1/m")
    starts = Starts(shop, lock_key=list(keys), lock_on_conflict="skip")
    assert take(shop, "wide", rate="1/m")
    starts.send(1)
    starts.run(1)
    assert starts.times == []
    assert take(shop, "narrow", rate="1/m")  # nobody has counted it


@pytest.fixture
def line(server):
    """A worker, and a lock that one more may take each two seconds, and was just taken."""
    line = Line(server)
    line.server = server
    line.terms = {"limit": 9, "rate": Rate(1, 2.0)}
    assert line.ask("first", **line.terms) == "granted"
    for task in ("t0", "t1", "t2"):
        assert line.park(task, ttl=60, **line.terms) == "parked"
    assert line.given() == ["t0"]  # ahead of its time
    return line


def go_on(line, seconds, *tasks):
    """Let time pass, and look whose turn it is then."""
    line.server.advance(seconds)
    line.sweep()
    assert line.given() == [*tasks]


def test_a_queue_without_a_worker_keeps_no_rate_from_others(line):
    """A turn that nobody claims bars others of the rate for that turn only."""
    go_on(line, 63, "t0", "t1")  # the first one again
    assert line.claim("t1", **line.terms) == "granted"
    until = line.records().until["t0"]
    assert line.claim("t0", ttl=60, **line.terms) == "refused"  # and its turn gets no shorter
    assert line.records().until["t0"] == until
    go_on(line, 2, "t2")


def test_a_turn_that_a_worker_keeps_keeps_no_rate_from_others(line):
    """Its message waits for Celery's rate_limit, and who can start meanwhile does."""
    assert line.keep("t0")
    for task in ("t1", "t2"):
        go_on(line, 2, task)
        assert line.claim(task, **line.terms) == "granted"
    line.server.advance(2)
    assert line.claim("t0", **line.terms) == "granted"


def test_a_lock_is_held_back(shop):
    """While a lock is held back nobody starts, with a rate or without; then all go on."""
    starts = Starts(shop)
    shop.dislock.hold_back(KEY, 30, note="429")
    starts.send(2)
    starts.run(29)
    assert starts.times == []
    (state,) = shop.dislock.lock_of(KEY).state()
    assert (state.rate.back_note, state.is_stuck, state.waiting + len(state.turns)) == (
        "429",
        False,
        2,
    )
    starts.run(25)
    assert len(starts.times) == 2
    shop.dislock.hold_back(KEY, 30)
    assert "held back" in str(take(shop).error())
    shop.dislock.hold_back(KEY, 0)
    assert take(shop)


def test_one_turn_is_out_while_a_lock_is_held_back(shop):
    """So it is if it has no limit and no rate, and a hundred stand in line."""
    starts = Starts(shop, lock_limit=1000)
    shop.dislock.hold_back(KEY, 12)
    starts.send(100)
    starts.run(5)
    (state,) = shop.dislock.lock_of(KEY).state()
    assert (len(state.turns), state.waiting) == (1, 99)
    starts.run(8)
    assert len(starts.times) == 100


def test_the_end_of_a_rate_that_people_set_for_a_time_is_known(shop):
    """Those in line start at that time by the rate of the code, and not with the next sweep."""
    starts = Starts(shop, lock_rate="9/s")
    Actions(shop.app, shop.dislock.runtime.process).rate(NAME, Rate(1, 3600.0), seconds=4)
    starts.send(3)
    starts.run(3.9)
    assert len(starts.times) == 1
    starts.run(0.5)
    assert len(starts.times) == 3


def test_a_rate_that_people_set_counts_in_place_of_the_codes(shop):
    """What an operator sets holds at once, and until it is taken back."""
    store = shop.dislock.runtime.process.store
    assert store.override(NAME, rate="1/60000") == {}
    assert [bool(take(shop, rate="9/s")) for _ in range(2)] == [True, False]
    assert store.override(NAME, rate=None)["rate"].value == b"1/60000"
    assert take(shop, rate="9/s")


def test_a_rate_that_people_set_forgets_no_starts_of_the_codes(shop):
    """After it was taken back, the rate of the code counts what began meanwhile."""
    store = shop.dislock.runtime.process.store
    store.override(NAME, rate="1/30000")
    assert take(shop, rate="2/25s")
    store.override(NAME, rate=None)
    shop.server.stall(5)
    assert take(shop, rate="1/4s")
    assert not take(shop, rate="2/25s")


def test_tasks_that_come_too_early_end_as_their_strategy_says(shop):
    """Of a task that comes too early the result says which rate it is, and when it may start."""
    shop.declare(lock_rate="1/m", lock_on_conflict="skip")
    task = shop.app.tasks["shop.export"]
    assert shop.run(task, "1").state == states.SUCCESS
    skipped = shop.run(task, "2")
    assert skipped.state == states.REVOKED
    assert "too early: 1 a minute, the next may start at" in str(skipped.result)
    task = shop.declare(lock_rate="1/m", lock_on_conflict="raise")
    with pytest.raises(LockHeldError, match="too early"):
        shop.run(task, "3").get()
    told = []
    task = shop.declare(
        lock_rate="1/m",
        lock_on_conflict=lambda _, conflict: told.append(conflict.early) or "skip",
    )
    shop.run(task, "4")
    assert told == [True]


def test_a_unique_task_has_a_rate(shop):
    """A task that is sent once has a rate, too, and its key is free when it has begun."""
    starts = Starts(shop, lock_rate="1/5s", lock_unique_until="start")
    starts.send(1)
    starts.run(1)
    starts.send(1, first=1)
    starts.send(1, first=2)  # a duplicate
    starts.run(8)
    assert len(starts.times) == 2


def test_several_keys_of_a_program_have_no_rate_in_a_cluster(shop):
    """Each of its nodes would count for itself."""
    shop.app.conf.dislock_url = "redis+cluster://localhost"
    with pytest.raises(SettingsError, match="give one key, or no rate"):
        shop.dislock.lock(["a", "b"], rate="1/m")


def test_a_program_waits_for_several_keys_and_counts_one_start_of_each(shop):
    """While it waits for the second it keeps room for one start of the first, and counts none."""

    def take(key):
        owner, terms = f"x{next(numbers)}@h:1/1", (Terms(limit=9, rate=Rate.of("2/m")),)
        lease = shop.other.store.acquire([name_of(key)], owner, 1.0, "{}", terms=terms)
        return isinstance(lease, Granted)

    numbers = count(1)
    both = shop.dislock.lock(["a", "b"], rate="2/m", limit=1)
    held = shop.other.store.acquire([name_of("b")], "h", LONG, "{}")  # each look takes a second
    assert isinstance(held, Granted)
    assert not both.acquire(timeout=1)
    assert [take("a"), take("a"), take("a")] == [True, True, False]
    shop.server.advance(61)
    owner, locks = "p@h:1/1", [name_of("a"), name_of("b")]
    terms = (Terms(rate=Rate.of("2/m")),)
    ask = partial(shop.other.store.acquire, locks, owner, 90.0, "{}", place=90.0, terms=terms)
    assert isinstance(ask(), Conflict)  # of b
    assert [take("a"), take("a")] == [True, False]  # it keeps room
    shop.server.advance(50)
    shop.other.store.release([name_of("b")], "h")
    assert isinstance(ask(), Granted)
    assert isinstance(ask(), Granted)  # sent twice
    assert not take("a")  # two within a minute
    shop.server.advance(11)
    assert [take("a"), take("a")] == [True, False]  # its start is 11 s old


@pytest.mark.parametrize("ending", [":starts", ":limit"])
def test_a_damaged_rate_stops_nobody_in_the_middle(shop, ending):
    """Of a key of another type an acquisition is told before anything is changed."""
    name = f"{NAME}{ending}"
    shop.server.send("HSET", name, "a", "b")
    before = shop.server.contents()
    with pytest.raises(Exception, match="WRONGTYPE"):
        ask(shop, "a", place=9.0)
    assert shop.server.contents() == before


@pytest.mark.parametrize(
    "record", [f"1 {'9' * 400} 60000", f"1 5 {'9' * 400}", f"1 5 {'9' * 20}", "1 0 0", "?", ""]
)
@pytest.mark.parametrize("is_free", [True, False])
def test_a_record_of_starts_that_cannot_be_read_stops_nobody(shop, record, is_free):
    """What stands behind the starts, for how long they are kept, counts for nothing then."""
    assert isinstance(ask(shop, "a"), Granted)
    if is_free:
        shop.dislock.runtime.process.store.release([NAME], "a")
    shop.server.send("LTRIM", f"{NAME}:starts", 0, 0)
    shop.server.send("RPUSH", f"{NAME}:starts", record)
    shop.dislock.lock_of(KEY).state()
    assert isinstance(ask(shop, "b"), Granted)
    assert isinstance(ask(shop, "c"), Conflict)


def test_a_program_without_an_app_holds_back(monkeypatch):
    """A lock of a program that has no Celery app can be held back as well."""
    server = LockServer()
    server.drive(monkeypatch)
    dislock = Dislock.from_url(LockServer.name)
    dislock.hold_back(KEY, 30, note="429")
    refused = dislock.lock(KEY).try_acquire()
    assert refused.early
    assert "held back (429)" in str(refused.error())


@pytest.mark.parametrize("strategy", ["queue", "retry"])
def test_a_message_comes_when_its_task_may_start(shop, strategy):
    """It is sent once, for the time of the next start, and not after pauses that grow."""
    starts = Starts(shop, lock_rate="1/8s", lock_on_conflict=strategy)
    starts.send(2)
    shop.work()
    (message,) = shop.put_off
    assert message.due - time.time() - shop.messages._moved() == pytest.approx(8, abs=0.06)
    assert message.message.headers["dislock"].get("put_off", 0) == (strategy == "retry")


def test_who_waits_behind_others_asks_when_those_have_started(shop):
    """A waiter is told the time of its own start, so that not all ask at the time of the first."""
    assert isinstance(ask(shop, "a", "1/10s"), Granted)
    behind = [ask(shop, owner, "1/10s", place=60.0).remaining for owner in "bcd"]
    assert behind == pytest.approx([10, 20, 30], abs=0.01)


def test_a_parked_task_is_told_when_its_turn_comes(shop, caplog):
    """It is not told of itself as the one in its way."""
    caplog.set_level("INFO", "celery_dislock")
    starts = Starts(shop, lock_rate="1/2s", lock_on_conflict="queue")
    starts.send(3)
    starts.run(STEP)
    second, third = [text for text in caplog.messages if "parked" in text]
    lock = f"lock {KEY!r}"
    assert f"parked: its turn for {lock} comes in 2.0 s, too early: 1 in 2 s" in second
    assert f"parked: place 1 in line for {lock}, too early: 1 in 2 s" in third


PROCESSES, EACH = 20, 5  # how many ask, and how often each starts


@contextmanager
def monitored(url, key):
    """Keep when each lease of a lock was granted while a block runs, and its cost, by its token."""
    lease = re.compile(rf"HSET {re.escape(name_of(key))} \S+ 1 \d+ (\d+) \d+ x(\d*)[ :]")
    granted, begun = {}, Event()

    def listen():
        with client.monitor() as monitor:  # says nothing for as long as the processes take to begin
            begun.set()
            for told in monitor.listen():
                if told["command"] == "ECHO over":
                    break
                if found := lease.match(told["command"]):
                    granted[int(found[1])] = int(found[2] or 1)

    with Redis.from_url(url, decode_responses=True, socket_timeout=None) as client:
        listens = Thread(target=listen)
        listens.start()
        begun.wait()
        try:
            yield granted
        finally:
            client.echo("over")
            listens.join()


@pytest.mark.extra
@pytest.mark.parametrize(
    ("rate", "cost", "least"),
    [("40/2s", 0, 40), ("600/2s", 30, 571), ("12000/2s", 600, 11_300)],
    ids=["without costs", "costs", "costs in quanta"],
)
def test_many_processes_at_the_edge_of_a_window(redis_url, rate, cost, least):
    """By the server's log, no window has more than the rate; those that ask fill it."""
    most, window = Rate.of(rate)
    command = [sys.executable, "-m", "tests.integration.starters", redis_url, "api", rate]
    with monitored(redis_url, "api") as granted:
        subprocess.run(
            [*command, str(cost), str(PROCESSES), str(EACH)], check=True, cwd=ROOT, timeout=60
        )
    costs = [costs_of(nth, cost, EACH) for nth in range(PROCESSES)]
    assert sorted(granted.values()) == sorted(start or 1 for start in chain(*costs))
    windows = [
        sum(start for at, start in granted.items() if end - 1_000_000 * window < at <= end)
        for end in granted
    ]
    assert least <= max(windows) <= most

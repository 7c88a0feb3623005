"""Looking through the lines, a page at a time, by one worker at a time."""

from __future__ import annotations

import logging
import random
from itertools import chain, count

import pytest

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.parking.store import FIRST
from celery_dislock.parking.sweep import PAGE, Sweep, interval
from celery_dislock.servers.replies import Swept
from tests.unit.fakes import FakeIdentity, FakeLines

NAME = "dislock:sweep:{home}"
EVERY = 10.0


class Process:
    """Stands for what the locks of a process share.

    Attributes:
        told: What tell_replaced was given; it raises what is an error.
        answered: Whether the lock server answered, each time.
        took: Whether it granted the sweep's lease anew, each time that it answered.
    """

    pid = 42

    def __init__(self, store):
        self.store = store
        self.lines = FakeLines(store)
        self.identity = FakeIdentity()
        self.told = []
        self.error = None
        self.answered = []
        self.took = []
        self._numbers = count(1)

    def owner_name(self, start):
        return f"{start}{next(self._numbers)}"

    def end_unclaimed(self, lock, tickets):
        if tickets:
            self.told.append((lock, tickets))

    def tell_replaced(self, lock, replaced):
        self.told.append((lock, replaced))
        if self.error is not None:
            raise self.error
        return {ticket.partition(":")[0]: "why" for ticket in replaced}

    def lock_server_failed(self, error):
        self.answered.append(False)

    def lock_server_answered(self, *, took=True):
        self.answered.append(True)
        self.took.append(took)


@pytest.fixture
def process(world):
    return Process(world.store)


@pytest.fixture
def sweep(process, world):
    return Sweep(process, NAME, "w1@here", EVERY, clock=world.clock)


def empty(*locks):
    return dict.fromkeys(locks, b"1")


def cursors(process):
    return [cursor for cursor, _ in process.store.asked("page")]


@pytest.mark.parametrize(
    ("tasks", "seconds"),
    [
        ([], None),
        ([{}, {"lock_on_conflict": "wait"}], 10.0),
        ([{}, {"lock_watchdog_timeout": 3.0}], 1.0),
        ([{"lock_on_conflict": "queue"}, {"lock_watchdog_timeout": 3.0}], 10.0),
        (
            [
                {"lock_on_conflict": "queue", "lock_watchdog_timeout": 60.0},
                {"lock_on_conflict": "queue", "lock_expire": 6.0, "lock_watchdog_timeout": 1.0},
                {"lock_on_conflict": lambda *_: "queue"},
            ],
            2.0,
        ),
        ([{"lock_on_conflict": lambda *_: "queue", "lock_key": ("a", "b")}], 10.0),
    ],
)
def test_lines_are_looked_at_within_a_third_of_the_shortest_timeout(tasks, seconds):
    """Of the tasks that may be parked, or else of all; where there is none, nobody looks."""
    assert interval(TaskOptions(**options) for options in tasks) == seconds


def test_it_sweeps_under_a_lease_of_its_own(process, sweep):
    """Taken, or kept, at each step; it ends before a dead worker's own leases do."""
    process.lines.pages = [(0, FIRST, {}), (0, FIRST, {})]
    assert sweep.step() == EVERY
    owner, expires, holder = process.store.leases[NAME]
    assert owner == "w1@here:42/1"
    assert expires - process.store.clock() == pytest.approx(2 * EVERY)
    assert holder == {"task": "sweep", "worker": "w1@here", "pid": 42}
    process.store.clock.advance(EVERY)
    sweep.step()
    assert process.store.leases[NAME][1] - process.store.clock() == pytest.approx(2 * EVERY)
    assert process.store.leases[NAME][0] == owner


def test_where_another_worker_sweeps_it_waits_for_a_whole_interval(world, process, sweep):
    """It asks for the lease and for nothing else, and begins at the beginning when it has it."""
    process.lines.pages = [(PAGE * 3, b"17", {})]
    sweep.step()
    process.store.leases[NAME] = ("other", world.clock() + 5, {})
    assert sweep.step() == EVERY
    assert len(process.store.asked("page")) == 1
    world.clock.advance(5)
    process.lines.pages = [(0, FIRST, {})]
    sweep.step()
    assert cursors(process) == [FIRST, FIRST]
    assert process.answered == [True] * 3


def whole(names):
    """Answer as a server does whose hash is small: all in one page, whatever is asked for."""
    return lambda _cursor, _count: (len(names), FIRST, names)


def uneven(names):
    """Answer as for a large hash that is being resized: pages of any size, some names twice."""
    chance, pages, there = random.Random(7), {FIRST: {}}, list(names)
    cursor, done = FIRST, 0
    while done < len(there):
        size = chance.randrange(2 * PAGE)
        pages[cursor] = dict.fromkeys(there[max(0, done - 5) : done + size], b"1")
        cursor, done = b"%d" % (len(pages) + 1), done + size
        pages[cursor] = {}
    following = dict(zip(pages, [*list(pages)[1:], FIRST], strict=True))
    return lambda cursor, _count: (len(names), following[cursor], pages[cursor])


@pytest.mark.parametrize("pages", [whole, uneven])
@pytest.mark.parametrize("total", [0, 1, PAGE, PAGE + 1, 2 * PAGE, 512, 3012])
def test_each_line_is_visited_once_within_the_interval(process, sweep, world, total, pages):
    """However many there are, and whatever a page has: some in each step, spread evenly."""
    process.lines.page = pages(empty(*map(str, range(total))))
    ends = world.clock() + EVERY
    for _ in range(3):
        visited, pauses = [], []
        while world.clock() < ends - 1e-6:
            pauses.append(sweep.step())
            visited.append([one for call in process.store.asked("sweep") for one in call])
            process.store.calls.clear()
            world.clock.advance(pauses[-1])
        assert world.clock() == pytest.approx(ends)
        assert sorted(chain.from_iterable(visited)) == sorted(map(str, range(total)))
        assert max(map(len, visited)) <= PAGE
        assert len(visited) <= 2 + 3 * total / PAGE
        if pages is whole:
            assert max(pauses) == pytest.approx(min(pauses))
        ends += EVERY


def test_the_name_of_the_store_is_kept_once_a_round(process, sweep):
    """While there are lines; where nothing was ever parked, it needs none."""
    process.lines.pages = [(0, FIRST, {}), (PAGE * 2, b"17", {}), (PAGE * 2, FIRST, {})]
    asked = []
    for _ in range(3):
        sweep.step()
        asked.append(process.identity.asked)
    assert asked == [0, 1, 1]
    assert cursors(process) == [FIRST, FIRST, b"17"]


def test_what_a_step_takes_is_part_of_its_time(process, sweep, world):
    """A server that is slow does not put the round off."""
    process.lines.pages = [(PAGE * 4, b"17", {})] * 2
    world.store.latency = 0.1
    began = world.clock()
    left = sweep.step()
    assert left == pytest.approx(EVERY / 5 - (world.clock() - began))
    world.store.latency = EVERY
    assert sweep.step() == 0.0


def test_an_empty_line_is_struck_off_with_the_number_that_was_seen(process, sweep):
    """Another worker may have enlisted it again meanwhile; one that was not seen stays listed."""
    process.lines.pages = [(4, FIRST, {"a": b"1", "b": b"7", "c": b"3", "d": b"4"})]
    process.lines.swept = {
        "a": Swept(2, {}),
        "b": Swept(0, {}),
        "c": Swept(0, {"1:0:0": b"message"}),
    }
    sweep.step()
    assert process.store.asked("delist") == [("b", b"7")]


def test_the_worker_hears_whom_the_sweep_has_ended(process, sweep):
    """Who was to end it has died, or could not; of nobody where there is none."""
    ended = []
    sweep.tell = ended.append
    process.lines.pages = [(2, FIRST, empty("a", "b"))]
    process.lines.swept = {"a": Swept(1, {"1:0:0": b"message"}), "b": Swept(1, {})}
    sweep.step()
    assert process.store.asked("sweep") == [("a", "b")]
    assert process.told[0] == ("a", {"1:0:0": b"message"})
    assert ended == [{"1": "why"}]


def test_a_lock_server_that_is_away_is_asked_again_from_the_first_page(process, sweep, caplog):
    """The outage is reported where all are, and a whole interval passes."""
    process.lines.pages = [(PAGE * 2, b"17", {}), (0, FIRST, {})]
    sweep.step()
    process.store.away = True
    assert sweep.step() == EVERY
    assert sweep.step() == EVERY
    process.store.away = False
    sweep.step()
    assert cursors(process) == [FIRST, FIRST]
    assert process.answered == [True, False, False, True]
    assert caplog.text == ""


def test_the_first_step_after_an_error_of_the_lock_server_takes_the_sweep_over(process, sweep):
    """A server that keeps a lease may refuse new ones still: the outage ends with one it grants."""
    process.lines.pages = [(0, FIRST, {})] * 4
    for away in (False, False, True, False, False):
        process.store.away = away
        sweep.step()
    assert process.answered == [True, True, False, True, True]
    assert process.took == [True, False, True, False]


def test_an_unexpected_error_does_not_end_it(process, sweep, caplog):
    """It is logged with its traceback; the next step begins at the first page."""
    process.lines.pages = [(PAGE * 2, b"17", empty("a")), (0, FIRST, {})]
    process.lines.swept = {"a": Swept(1, {"1:0:0": b"message"})}
    process.error = ZeroDivisionError("unexpected")
    assert sweep.step() == EVERY
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "unexpected" in caplog.text
    sweep.step()
    assert cursors(process) == [FIRST, FIRST]
    assert process.answered == [True]


@pytest.mark.parametrize("away", [False, True])
def test_at_its_end_another_worker_can_sweep(process, sweep, away):
    """The lease is given back, where the server answers; the connections are closed."""
    process.lines.pages = [(0, FIRST, {})]
    sweep.step()
    process.store.away = away
    sweep.end()
    assert (NAME in process.store.leases) is away
    assert process.store.calls[-1] == ("close",)


def test_who_does_not_claim_its_turns_is_looked_into(process, sweep):
    """Beside those that were replaced; a name of the store that is damaged keeps none waiting."""
    process.identity.error = DamagedLockError("redis://fake", "damaged", "the name")
    process.lines.pages = [(2, FIRST, empty("a", "b"))]
    process.lines.swept = {"a": Swept(1, {}, ("1:0:0",)), "b": Swept(1, {})}
    sweep.step()
    assert ("a", ("1:0:0",)) in process.told
    assert ("b", ()) not in process.told
    assert process.answered == [False, True]


def test_a_damaged_lock_is_reported_and_the_others_are_swept(sweep, process):
    """The line of a lock that cannot be used is left as it is, and stays listed."""
    damaged = DamagedLockError("redis://fake", "why", "dislock:{a}")
    process.lines.pages = [(2, FIRST, {"dislock:{a}": b"1", "dislock:{b}": b"1"})]
    process.lines.swept = {"dislock:{a}": damaged, "dislock:{b}": Swept(0, {})}
    sweep.step()
    assert process.answered == [False, True]
    assert process.store.asked("delist") == [("dislock:{b}", b"1")]


def test_a_worker_that_parks_nothing_writes_nothing_where_there_are_no_lines(process, world):
    """One question for each interval, and no lease that stays on the server."""
    process.lines.pages = [(0, FIRST, {})]
    sweep = Sweep(process, NAME, "w1@here", EVERY, looks_first=True, clock=world.clock)
    assert sweep.step() > 0
    assert [call[0] for call in process.store.calls] == ["page"]

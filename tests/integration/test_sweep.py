"""The sweep of a worker: it looks through all lines, a page at a time, one worker at a time."""

import logging
import random
from itertools import chain
from threading import Event
from types import SimpleNamespace

import pytest
from celery.backends.base import DisabledBackend
from redis.sentinel import MasterNotFoundError

from celery_dislock import Dislock
from celery_dislock.exceptions import StoreError
from celery_dislock.messages import broker
from celery_dislock.parking import publisher
from celery_dislock.parking import sweep as module
from celery_dislock.parking.store import FIRST, Lines
from celery_dislock.parking.sweep import PAGE
from celery_dislock.worker.steps import SweepStep
from tests.driven import KEY, Shop
from tests.holding import name_of, wait_for
from tests.integration.parked import LOCK

EVERY = 10.0  # seconds
FEW = 10  # lines of a step, where they are many


@pytest.fixture
def swept(monkeypatch):
    """The locks that were looked at, of each step."""
    found, sweep = [], Lines.sweep

    def visit(lines, locks, newer=None):
        found.append(list(locks))
        return sweep(lines, locks, newer)

    monkeypatch.setattr(Lines, "sweep", visit)
    return found


def park(shop, *ids, **options):
    """Park tasks, and leave the lock to nobody: its holder has died."""
    task = shop.declare(**options)
    shop.other.ask("dead", ttl=5)
    for task_id in ids:
        shop.run(task, task_id)
    shop.server.advance(5)


def lease(shop):
    """Return the lease of who sweeps."""
    (name,) = [name for name in shop.server.names() if ":sweep:" in name]
    (one,) = shop.other.store.holders(name)
    return one


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
                {"lock_on_conflict": "queue", "lock_expire": 6.0},
                {"lock_on_conflict": lambda *_: "queue"},
            ],
            2.0,
        ),
    ],
)
def test_lines_are_looked_at_within_a_third_of_the_shortest_timeout(shop, tasks, seconds):
    """Of the tasks that may be parked, or else of all; where there is none, nobody looks."""
    for number, options in enumerate(tasks):
        shop.declare(name=f"t{number}", **{"lock_on_conflict": "skip", **options})
    consumer = SimpleNamespace(event_dispatcher=None)
    worker = SimpleNamespace(app=shop.app, hostname="w1@here", consumer=consumer, timer=None)
    step = SweepStep(worker)
    assert step.include_if(worker) is (seconds is not None)
    if seconds is not None:
        shop.other.lines.enlist(LOCK)  # or a worker whose tasks do not park writes nothing
        step.begin(worker)
        step.work()
        assert step.every == pytest.approx(seconds, abs=0.5)
        assert lease(shop).remaining == pytest.approx(2 * seconds, abs=0.01)
        step.end()


def test_it_sweeps_under_a_lease_of_its_own(shop):
    """Taken, or kept, at each step; another worker waits, and takes over when it is given back."""
    first, second = (shop.sweeper(name, clock=shop.clock) for name in ("w1@here", "w2@here"))
    assert first.step() == EVERY
    assert (lease(shop).worker, lease(shop).task) == ("w1@here", "sweep")
    shop.server.advance(EVERY)
    first.step()
    assert lease(shop).remaining == pytest.approx(2 * EVERY, abs=0.01)
    assert second.step() == EVERY
    assert lease(shop).worker == "w1@here"
    first.end()
    second.step()
    assert lease(shop).worker == "w2@here"
    shop.server.away = True
    second.end()  # the lease ends by itself


def uneven(names):
    """Answer as for a large hash that is being resized: pages of any size, some names twice."""
    chance, pages, there = random.Random(7), {FIRST: {}}, list(names)
    cursor, done = FIRST, 0
    while done < len(there):
        size = chance.randrange(2 * FEW)
        pages[cursor] = dict.fromkeys(there[max(0, done - 5) : done + size], b"1")
        cursor, done = b"%d" % (len(pages) + 1), done + size
        pages[cursor] = {}
    following = dict(zip(pages, [*list(pages)[1:], FIRST], strict=True))
    return lambda _lines, cursor, _count: (len(names), following[cursor], pages[cursor])


@pytest.mark.parametrize("pages", ["whole", "uneven"])
@pytest.mark.parametrize("total", [0, 1, FEW, FEW + 1, 51, 312])
def test_each_line_is_visited_once_within_the_interval(shop, swept, monkeypatch, total, pages):
    """However many there are, and whatever a page has: some in each step, spread evenly."""
    monkeypatch.setattr(module, "PAGE", FEW)
    locks = [name_of(str(number)) for number in range(total)]
    for lock in locks:
        shop.other.lines.enlist(lock)
    if pages == "uneven":
        monkeypatch.setattr(Lines, "page", uneven(locks))
    sweep = shop.sweeper(clock=shop.clock)
    ends = shop.clock() + EVERY
    for _ in range(3):
        swept.clear()
        pauses = []
        while shop.clock() < ends - 1e-3:
            pauses.append(sweep.step())
            shop.server.advance(pauses[-1])
        assert sorted(chain.from_iterable(swept)) == sorted(locks)
        assert max(map(len, swept)) <= FEW
        assert len(swept) <= 2 + 3 * total / FEW
        if pages == "whole":
            assert max(pauses) == pytest.approx(min(pauses), abs=0.01)
        ends += EVERY


@pytest.mark.parametrize("lines", [513, 1500])
def test_a_round_visits_each_line_once(redis_url, swept, lines):
    """A small hash comes whole from a real server, however many names are asked for."""
    with Shop(url=redis_url) as shop:
        process = shop.sweeper()._process
        locks = {name_of(f"key{number}") for number in range(lines)}
        for lock in locks:
            process.lines.enlist(lock)
        sweep = shop.sweeper(clock=shop.clock)
        until = shop.clock() + EVERY
        while shop.clock() < until - 0.01:
            shop.server.advance(sweep.step())
        assert sorted(chain.from_iterable(swept)) == sorted(locks)
        assert max(map(len, swept)) == PAGE
        assert len(swept) <= 2 + 3 * lines / PAGE
        sweep.end()
        process.close()


def test_what_a_step_takes_is_part_of_its_time(shop, monkeypatch):
    """A server that is slow does not put the round off."""
    monkeypatch.setattr(module, "PAGE", FEW)
    for number in range(4 * FEW):
        shop.other.lines.enlist(name_of(str(number)))
    sweep, page = shop.sweeper(clock=shop.clock), Lines.page
    took = 0.5

    def slow(*given):
        shop.server.advance(took)
        return page(*given)

    monkeypatch.setattr(Lines, "page", slow)
    assert sweep.step() == pytest.approx(EVERY / 4 - took, abs=0.01)
    sweep, took = shop.sweeper("w1@here", clock=shop.clock), EVERY
    shop.server.lose()
    assert sweep.step() == 0.0


def test_a_free_lock_is_handed_on_and_an_empty_line_struck_off(shop):
    """Of who has died: a line without a task is kept for a minute, in which somebody may park."""
    park(shop, "2")
    shop.sweep()
    shop.work()
    assert (shop.ran, list(shop.other.listed())) == (["2"], [LOCK])
    shop.server.advance(60)
    shop.sweep()
    assert shop.other.listed() == {}


def test_a_line_stays_listed_until_all_its_ends_are_told(shop, backend_away):
    """Nobody is in it any more, and the result of who has left it cannot be stored yet."""
    park(shop, "2")
    shop.other.lines.drop(LOCK, "2:0:0", '"replaced": "by hand"')
    shop.server.advance(60)
    with backend_away("mark_as_failure"):
        shop.sweep()
    assert list(shop.other.listed()) == [LOCK]
    shop.sweep()
    assert shop.app.AsyncResult("2").state == "REVOKED"
    shop.sweep()
    assert shop.other.listed() == {}


def test_a_backend_that_hangs_is_left_alone_for_a_while(shop, monkeypatch):
    """Each error takes minutes, in which the worker's event loop stands still."""
    hung, hangs = [], 120

    def hang(task_id, *_args, **_options):
        hung.append(task_id)
        shop.server.advance(hangs)
        raise TimeoutError

    park(shop, "2", "3", "4")
    for task_id in "234":
        shop.other.lines.drop(LOCK, f"{task_id}:0:0", '"replaced": "by hand"')
    for part in (broker, publisher):
        monkeypatch.setattr(part, "monotonic", shop.clock)
    sweep = shop.sweeper(clock=shop.clock)
    with monkeypatch.context() as outage:
        outage.setattr(shop.app.backend, "mark_as_failure", hang)
        sweep.step()
        sweep.step()
        assert len(hung) == 1
        shop.server.advance(broker.RESTS * hangs)
        sweep.step()
        assert len(hung) == 2
    shop.server.advance(broker.RESTS * hangs)
    sweep.step()
    assert {shop.app.AsyncResult(task_id).state for task_id in "234"} == {"REVOKED"}


def test_a_backend_that_never_answers_does_not_stop_the_sweep(shop, monkeypatch):
    """The end of a dropped task is stored when the backend answers, without the event loop."""
    park(shop, "2")
    shop.other.lines.drop(LOCK, "2:0:0", '"replaced": "by hand"')
    answers, mark = Event(), shop.app.backend.mark_as_failure

    def hang(*args, **options):
        answers.wait()
        mark(*args, **options)

    with monkeypatch.context() as outage:
        outage.setattr(module, "BACKEND_WITHIN", 0.01)
        outage.setattr(shop.app.backend, "mark_as_failure", hang)
        shop.sweep()
    assert shop.app.AsyncResult("2").state == "PARKED"
    answers.set()
    wait_for(lambda: shop.app.AsyncResult("2").state == "REVOKED", "it is stored")


def test_a_sweep_that_waited_in_vain_comes_later(shop, monkeypatch):
    """A lock server that hangs stops the event loop for a fifth of the time at most."""
    sweep = shop.sweeper(clock=shop.clock)
    for waits, later in ((0, sweep._every), (sweep._every, 4 * sweep._every)):

        def hang(*_args, waits=waits):
            shop.server.advance(waits)
            raise StoreError("redis://here", "no answer in time")

        monkeypatch.setattr(sweep._process.store, "acquire", hang)
        assert sweep.step() == pytest.approx(later)


def test_a_worker_sweeps_in_its_timer_and_tells_monitors_whom_it_has_ended(shop, monkeypatch):
    """Who was to end it has died, or could not.  It works until it is stopped, once in each time.

    A step that was not started ends nothing: a worker that fails stops all its steps.
    """
    told, due, clock = [], [], shop.clock
    park(shop, "2", "3")
    shop.other.lines.drop(LOCK, "2:0:0", '"replaced": "by hand"')

    def call_after(seconds, call, args):
        due.append((clock() + seconds, lambda: call(*args)))
        return SimpleNamespace(cancel=due.clear)

    send = SimpleNamespace(send=lambda event, **about: told.append((event, about["uuid"])))
    worker = SimpleNamespace(app=shop.app, hostname="w1@here", timer=None)
    worker.consumer = SimpleNamespace(event_dispatcher=send)
    worker.timer = SimpleNamespace(call_after=call_after)
    step = SweepStep(worker)
    step.stop(worker)
    assert step.include_if(worker)
    step.start(worker)
    for after in (0, EVERY, EVERY):
        [(when, run)] = due
        assert when - clock() == pytest.approx(after, abs=0.5)
        shop.server.advance(when - clock())
        due.clear()
        run()
    assert told == [("task-revoked", "2")]
    assert lease(shop)
    monkeypatch.setattr(step, "work", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # Celery's timer logs it
        due.pop()[1]()
    monkeypatch.setattr(step, "work", lambda: step.stop(worker))
    due.pop()[1]()
    assert due == []
    step.start(worker)
    step.stop(worker)
    assert due == []
    assert not [name for name in shop.server.names() if ":sweep:" in name]


def test_a_lock_server_that_is_away_is_asked_again_from_the_first_page(shop, swept, caplog):
    """The outage is logged once, and its end when the sweep is taken over; an interval passes."""
    for number in range(2 * PAGE):
        shop.other.lines.enlist(name_of(str(number)))
    sweep = shop.sweeper(clock=shop.clock)
    sweep.step()
    shop.server.away = True
    assert [sweep.step(), sweep.step()] == [EVERY, EVERY]
    shop.server.away = False
    sweep.step()
    assert swept[0] == swept[1]
    assert caplog.text.count("no task can take a lock") == 1
    assert caplog.text.count("answers again") == 1


@pytest.mark.parametrize("fails", ["tells", "line"])
def test_an_error_does_not_end_it(shop, caplog, fails):
    """It is logged; the other lines, and the next step, do what there is to do."""
    park(shop, "2")
    sweep = shop.sweeper(clock=shop.clock)
    other = name_of("other")
    shop.other.lines.enlist(other)
    if fails == "tells":
        shop.other.lines.drop(LOCK, "2:0:0", '"replaced": "by hand"')
        sweep.tell = lambda _: 1 / 0
        assert sweep.step() == EVERY
        assert "ZeroDivisionError" in caplog.text
    else:
        shop.server.send("SET", other, "damaged", "PX", "100000")
        sweep.step()
        assert f"{other!r} cannot be used" in caplog.text
        assert other in shop.other.listed()
    shop.server.advance(60)
    sweep.step()
    shop.work()
    assert shop.ran == ([] if fails == "tells" else ["2"])


def test_a_worker_that_parks_nothing_writes_nothing_where_there_are_no_lines(shop):
    """One question for each interval, and no lease that stays on the server."""
    before = shop.server.requests
    shop.sweeper(looks_first=True).step()
    assert shop.server.requests == before + 1
    assert shop.server.names() == set()
    park(shop, "2")
    shop.sweeper(looks_first=True).step()
    assert lease(shop)


class TestWhoClaimsNoTurns:
    """A worker that knows nothing of lines may serve its queue."""

    @pytest.fixture
    def unclaimed(self, shop):
        """A task that has had many turns."""
        park(shop, "2")
        for _ in range(6):
            shop.sweep()
            shop.server.advance(400)
        shop.queue.clear()

    @pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "REVOKED"])
    def test_one_that_has_ended_is_set_aside(self, shop, unclaimed, caplog, state):
        """Its worker has run or dropped it: the next has its turn."""
        shop.app.backend.store_result("2", None, state)
        shop.sweep()
        assert list(shop.other.records().aside) == ["2"]
        [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
        told = f"2:0:0 for lock {KEY!r} cannot be run, and is set aside in {LOCK}:aside: "
        assert f"{told}its result is {state}" in record.message

    @pytest.mark.parametrize("state", ["PENDING", "PARKED", "STARTED", "RETRY"])
    def test_one_that_has_not_ended_is_left_in_line(self, shop, unclaimed, state):
        """Its queue may be slow, or be without a worker: it is not to be lost for that."""
        shop.app.backend.store_result("2", None, state)
        shop.sweep()
        assert shop.other.records().aside == {}

    @pytest.mark.parametrize("how", ["none", "away", "by messages"])
    def test_a_backend_that_tells_nothing_leaves_all_in_line(
        self, shop, unclaimed, caplog, monkeypatch, how
    ):
        """One that is away is told, without its password; results by messages are callers' own."""
        shop.app.backend.store_result("2", None, "FAILURE")

        def away(*_):  # redis-py writes connection arguments into some of its messages
            raise MasterNotFoundError("No master found for 'm' : <Redis(password=s3cret)>")

        if how == "by messages":
            monkeypatch.setattr(shop.app.backend, "persistent", False)
        else:
            state = DisabledBackend(shop.app).get_state if how == "none" else away
            monkeypatch.setattr(shop.app.backend, "get_state", state)
        caplog.clear()
        shop.sweep()
        assert shop.other.records().aside == {}
        told = "Could not ask for the result of parked task 2:0:0: "
        assert (told in caplog.text, "s3cret" in caplog.text) == (how == "away", False)

    def test_a_backend_that_hangs_is_not_asked_again_at_once(self, shop, unclaimed, monkeypatch):
        """The worker's event loop stands still as it waits for an answer."""
        asked = []

        def hang(task_id):
            asked.append(task_id)
            shop.server.advance(120)
            raise TimeoutError

        for part in (broker, publisher):
            monkeypatch.setattr(part, "monotonic", shop.clock)
        monkeypatch.setattr(shop.app.backend, "get_state", hang)
        sweep = shop.sweeper(clock=shop.clock)
        for _ in range(3):
            sweep.step()
        assert asked == ["2"]
        shop.server.advance(broker.RESTS * 120)
        sweep.step()
        assert asked == ["2", "2"]

    def test_an_id_that_a_backend_refuses_keeps_no_other_in_line(self, shop, caplog, monkeypatch):
        """Memcached takes no long key, for one; each sweep stops at an error, wherever it comes."""
        task = shop.declare(lock_limit=2)
        for dead in "xy":
            shop.other.ask(dead, ttl=5, limit=2)
        for task_id in "23":
            shop.run(task, task_id)
        for _ in range(6):
            shop.sweep()
            shop.server.advance(400)
        shop.queue.clear()
        backend = shop.app.backend
        backend.store_result("3", None, "FAILURE")
        known = backend.get_state

        def get_state(task_id):
            if task_id == "2":
                raise ValueError("key too long")
            return known(task_id)

        monkeypatch.setattr(backend, "get_state", get_state)
        for _ in range(50):
            shop.sweep()
        assert list(shop.other.records().aside) == ["3"]


def test_what_a_callable_returns_is_passed_one_after_the_other(shop):
    """Of several repositories, both are needed, and what is had is kept in line."""
    task = shop.declare(lock_key=lambda *_: ["repo:b", "repo:a"], lock_on_conflict="queue")
    shop.other.store.acquire([name_of("repo:b")], "dead", EVERY, "{}")
    shop.run(task, "1")
    [lock] = Dislock(shop.app).lock_of("repo:b").state()
    [waiter] = lock.line
    assert (list(waiter.stations), list(waiter.keeps)) == (["repo:a", "repo:b"], ["repo:a"])
    shop.server.advance(EVERY)
    shop.sweep()
    shop.work()
    assert shop.ran == ["1"]


def test_a_circle_is_opened_and_logged_with_both_orders(shop, caplog):
    """Two tasks that make the same keys in different ways wait for each other."""
    one = shop.declare(name="shop.one", lock_key=[lambda *_: "a", "b"])
    two = shop.declare(name="shop.two", lock_key=[lambda *_: "b", "a"])
    for key in ("a", "b"):
        shop.other.store.acquire([name_of(key)], "dead", EVERY, "{}")
    shop.run(one, "1")
    shop.run(two, "2")
    shop.server.advance(EVERY)
    shop.sweep()
    [told] = [one for one in caplog.messages if "different orders" in one]
    assert "shop.one[1] (a, b)" in told
    assert "shop.two[2] (b, a)" in told
    assert "shop.two[2] gives back what it has" in told
    shop.work()
    assert shop.ran == ["1", "2"]

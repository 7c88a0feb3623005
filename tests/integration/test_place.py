"""Where a parked task stands in line, and when it starts: for an application's own pages.

The real scripts, in this process, on a clock that the tests drive; and on a cluster.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from heapq import heappop, heappush
from itertools import count
from types import SimpleNamespace

import pytest

from celery_dislock import Dislock, DislockError, Key, LockKeyError, StoreError
from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms
from celery_dislock.servers.find import RETRIES, find_place
from celery_dislock.servers.store import Store
from celery_dislock.servers.waiters import Place
from tests.driven import KEY
from tests.holding import name_of
from tests.integration.parked import LOCK, LONG, Line
from tests.integration.servers import several
from tests.integration.test_stations import API, Fleet, of, tenant

LASTED = f"{LOCK}:lasted"


@pytest.fixture
def line(server):
    """A worker of one lock, and its server."""
    line = Line(server)
    line.server = server
    line.place = lambda task: find_place(server, [LOCK], task)
    return line


def behind(line, *tasks, **terms):
    """Let the first one have the lock, and park tasks."""
    assert line.ask("first", **terms) == "granted"
    for task in tasks:
        line.park(task, **terms)


def run(line, task, seconds, **terms):
    """Claim a turn, and end the body after some time."""
    assert line.claim(task, **terms) == "granted"
    line.server.advance(seconds)
    line.end(task, 2)


def test_in_a_line_of_a_rate_each_start_is_known_exactly(line):
    """Each may claim at the millisecond that was told long before, and at none before."""
    terms = {"rate": Rate(2, 10.0), "limit": LIMIT_MOST}
    assert [line.ask(task, **terms) for task in ("a", "b")] == ["granted"] * 2
    line.server.advance(3.0)
    tasks = [f"t{number}" for number in range(7)]
    for task in tasks:
        line.park(task, ttl=LONG, **terms)
    told = [line.place(task) for task in tasks]
    assert [place.nth for place in told] == [0, 1, 2, 3, 4, 5, 6]  # the first comes ahead of time
    assert {(place.key, place.of, place.is_estimate) for place in told} == {("line", 6, False)}
    now = 0.0
    for task, place in zip(tasks, told, strict=True):
        line.server.advance(max(0.0, place.starts_in - now - 0.002))
        line.sweep()
        if place.starts_in - now > 0.002:
            assert line.claim(task, **terms) == "refused", task
            line.server.advance(0.002)
        now = place.starts_in
        line.sweep()
        assert line.claim(task, copy=3, **terms) == "granted", task
    assert [round(place.starts_in) for place in told] == [7, 7, 17, 17, 27, 27, 37]


def test_with_costs_a_time_is_an_estimate_behind_others(line):
    """What those before it cost is not read: they are taken to cost as much as it does."""
    terms = {"rate": Rate(4, 10.0), "limit": LIMIT_MOST, "cost": 2}
    for task in ("a", "b"):
        assert line.ask(task, **terms) == "granted"
    for task in ("c", "d", "e"):
        line.park(task, ttl=LONG, **terms)
    told = [line.place(task) for task in ("c", "d", "e")]
    assert [place.is_estimate for place in told] == [False, False, True]
    assert [round(place.starts_in) for place in told] == [10, 10, 20]


def test_with_costs_nothing_is_known_of_the_end_of_a_limit(line):
    """How many units those who run give back is not told."""
    terms = {"limit": 3, "cost": 2}
    assert line.ask("a", **terms) == "granted"
    line.park("b", **terms)
    line.server.advance(5.0)
    line.end("a")
    assert line.claim("b", **terms) == "granted"
    line.park("c", **terms)
    assert line.place("c").starts_in is None


def test_of_a_limit_nothing_is_known_before_a_body_has_ended(line):
    """Its place is; when it starts is reckoned from the bodies that ended while others waited."""
    behind(line, "a", "b", "c")
    assert line.place("b") == Place("line", 2, 3, None, is_estimate=False)
    line.server.advance(40.0)
    line.end("first")
    assert line.place("a") == Place("line", 0, 2, 0.0, is_estimate=True)
    assert line.claim("a") == "granted"
    line.server.advance(10.0)
    place = line.place("c")
    assert (place.nth, place.of, place.is_estimate) == (2, 2, True)
    assert place.starts_in == pytest.approx(30 + 40, abs=0.01)
    line.server.advance(100.0)  # it lasts longer than that
    assert line.place("b").starts_in == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_a_start_is_reckoned_right_if_all_bodies_last_as_long(line, seed):
    """With any limit, any ages of those that run, and any number in line."""
    chance = random.Random(seed)
    limit, lasts, waiting = chance.randint(1, 5), chance.uniform(5, 50), chance.randint(1, 12)
    terms = {"limit": limit}
    running, names = [], (f"t{number}" for number in count())

    def clock():
        return line.server.now_us / 1e6

    def start(task):
        heappush(running, (clock() + lasts, task))

    for _ in range(limit):
        task = next(names)
        assert line.ask(task, copy=2, **terms) == "granted"
        start(task)
        line.server.advance(chance.uniform(0, lasts / limit / 2))
    in_line = [next(names) for _ in range(waiting)]
    for task in in_line:
        line.park(task, **terms)
    line.given()
    told, started = {}, {}
    while running:
        ends, task = heappop(running)
        line.server.advance(max(0.0, ends - clock()))
        line.end(task, 2)
        for claimer in line.given():
            assert line.claim(claimer, **terms) == "granted"
            started[claimer] = clock()
            start(claimer)
        if len(started) == 1:
            line.server.advance(chance.uniform(0, 0.9) * (running[0][0] - clock()))
            for task in in_line[1:]:
                told[task] = clock() + line.place(task).starts_in
    assert list(started) == in_line
    for task, when in told.items():
        assert when == pytest.approx(started[task], abs=0.1), task


def test_more_hold_it_than_an_operator_admits_now(line):
    """Those above the limit have to end, too; and then one starts after the other."""
    for task in ("a", "b", "c"):
        assert line.ask(task, copy=2, limit=3) == "granted"
    for task in ("d", "e", "f"):
        line.park(task, limit=3)
    line.server.advance(30.0)
    line.end("a", 2)
    assert line.given() == ["d"]
    run(line, "d", 0.0, limit=3)
    assert line.claim("e", limit=3) == "granted"
    assert line.place("f").starts_in == 0.0
    line.store.override(LOCK, limit=1)
    mean = int(line.client.get(LASTED).split()[1]) / 1000
    assert line.place("f").starts_in == pytest.approx(mean, abs=0.01)


def test_a_lock_that_is_left_to_expire_is_reckoned_with(line):
    """The end of such a lease is known, and counts as the end of its body."""
    behind(line, "a", "b")
    line.server.advance(10.0)
    line.end("first", at_least=60.0)
    assert line.place("a") == Place("line", 1, 2, pytest.approx(50.0, abs=0.01), is_estimate=True)
    assert line.place("b").starts_in == pytest.approx(50.0 + 60.0, abs=0.01)


def test_a_pause_has_no_end_and_a_hold_back_has_one(line):
    """Of a pause it is not known when it ends; of a hold-back it is, to the millisecond."""
    behind(line, "a", "b")
    line.server.advance(20.0)
    line.store.override(LOCK, limit=0)
    line.end("first")
    assert line.place("b") == Place("line", 2, 2, None, is_estimate=False)
    line.store.override(LOCK, limit=None, ttl=0)
    assert line.place("a").nth == 0
    line.store.override(LOCK, ttl=90.0, back="-")
    assert line.place("a") == Place("line", 0, 1, pytest.approx(90, abs=0.01), is_estimate=False)
    assert line.place("b").starts_in == pytest.approx(90 + 20, abs=0.02)
    line.store.override(LOCK, limit=0)
    assert line.place("a").starts_in is None


def test_an_operators_rate_is_the_one_that_counts(line):
    """It stands above that of the code."""
    terms = {"rate": Rate(1, 10.0), "limit": LIMIT_MOST}
    behind(line, "a", "b", "c", **terms)
    line.store.override(LOCK, rate="1/60000")
    place = line.place("c")
    assert (place.starts_in, place.is_estimate) == (pytest.approx(180, abs=0.1), False)


def test_a_rate_and_a_limit_are_both_in_the_way(line):
    """Of both the later time is told, as an estimate; a rate alone in the way is exact."""
    terms = {"rate": Rate(1, 10.0), "limit": 2}
    assert line.ask("a", copy=2, **terms) == "granted"
    for task in ("b", "c", "d"):
        line.park(task, ttl=LONG, **terms)
    assert (line.place("b").nth, line.place("b").is_estimate) == (0, False)
    assert line.place("c").starts_in is None  # when a ends is not known
    line.server.advance(60.0)
    line.end("a", 2)
    line.sweep()
    place = line.place("d")
    assert (place.starts_in, place.is_estimate) == (pytest.approx(60, abs=1), True)


def test_shared_leases_and_exclusive_ones_tell_nothing_of_each_other(line):
    """How long those of the other mode last is not known."""
    assert line.ask("first", mode="shared") == "granted"
    line.park("a")
    line.park("b", mode="shared")
    line.server.advance(5.0)
    assert [line.place(task).starts_in for task in ("a", "b")] == [None, 0.0]
    line.end("first")
    assert line.claim("a") == "granted"
    assert line.place("b").starts_in is None


def test_the_mean_is_of_the_last_bodies_and_ends(line):
    """A quarter of it is the newest; it goes when nobody has waited for two hours."""
    line.park("a")
    line.end("a")
    assert not line.client.exists(LASTED)  # nobody waited
    behind(line, "b", "c", "d")
    line.server.advance(40.0)
    for _ in range(2):  # sent twice, it counts once
        line.end("first")
    assert line.client.get(LASTED) == b"1 40000"
    run(line, "b", 20.0)
    assert line.client.get(LASTED) == b"1 35000"
    run(line, "c", 20.0)
    run(line, "d", 9000.0)
    assert not line.client.exists(LASTED)


def test_who_waits_in_a_slot_leaves_no_mean(line):
    """Nobody asks for its place, and its hand-off costs what it did."""
    assert line.ask("first") == "granted"
    assert not line.wait("b@w:1/1", mode="shared")
    line.park("c")
    line.server.advance(10.0)
    line.end("first")
    assert not line.client.exists(LASTED)
    line.store.release([LOCK], "b@w:1/1")
    assert line.client.get(LASTED).startswith(b"1 ")


@pytest.mark.parametrize(
    ("written", "starts_in", "then"),
    [
        *[(text, None, "1 ") for text in ("", "garbage", "1 x", f"1 {'9' * 20}")],
        ("2 7000 more", pytest.approx(7.0, abs=0.01), "2 7000 more"),
        (("written", "by hand"), None, None),
    ],
    ids=["empty", "garbage", "short", "long", "a later version", "another type"],
)
def test_a_mean_that_cannot_be_read_is_not_known(line, written, starts_in, then):
    """The next body that ends writes it anew; one of a later version is used, and stays."""
    behind(line, "a", "b")
    line.client.set(LASTED, written) if then else line.client.hset(LASTED, *written)
    assert line.place("a") == Place("line", 1, 2, starts_in, is_estimate=starts_in is not None)
    line.end("first")
    assert line.given() == ["a"]
    assert not then or line.client.get(LASTED).decode().startswith(then)


def test_a_ticket_of_a_later_release_has_a_place_and_no_time(line):
    """Its terms are not known here."""
    behind(line, "a")
    line.client.set(LASTED, "1 7000")
    record = line.record_of("a")
    line.client.hset(f"{LOCK}:tickets", "a:0:0", b"2" + record[1:])
    assert line.place("a") == Place("line", 1, 1, None, is_estimate=False)


def test_who_is_not_in_line_has_no_place(line):
    """An id that nobody knows, one that runs, has ended, has lost its place, or waits in a slot."""
    behind(line, "a")
    line.wait("b@w:1/1")
    assert [line.place(task) for task in ("first", "b", "c", "a:0", "*")] == [None] * 5
    line.client.zrem(f"{LOCK}:line", "a:0:0#")
    assert line.place("a") is None


def test_a_task_that_was_retried_is_found_by_its_id(line):
    """Each retry has a ticket of its own."""
    behind(line, "a")
    for number in (RETRIES - 1, RETRIES):
        line.client.hset(f"{LOCK}:tickets", f"t{number}:{number}:0", line.record_of("a"))
        line.client.zadd(f"{LOCK}:line", {f"t{number}:{number}:0#": number})
    assert line.place(f"t{RETRIES - 1}").nth == 1
    assert line.place(f"t{RETRIES}") is None


def test_a_place_costs_one_request_and_changes_nothing(line):
    """However long the line is; also if the clock was set back."""
    terms = {"rate": Rate(1, 1000.0), "limit": LIMIT_MOST}
    behind(line, *(f"t{number}" for number in range(300)), **terms)
    line.server.advance(-100.0)
    before = line.server.contents()
    assert line.place("t299").nth == 300
    assert line.server.contents() == before


TENANT = tenant("a")


@pytest.fixture
def fleet(server):
    fleet = Fleet(server)
    fleet.place = lambda task, *locks: find_place(server, locks or of(task), task)
    return fleet


def test_of_several_locks_the_one_is_told_where_it_waits(fleet):
    """Its start is known at the last of them, or if nobody waits at a later one."""
    for task, locks in (("h1", [API]), ("h2", [TENANT])):
        fleet.send(task, locks)
    for task in ("a1", "a2"):
        fleet.send(task, of(task))
    fleet.server.advance(10.0)
    fleet.end("h2")  # a1 has passed its tenant, and waits for the API
    assert fleet.place("a1") == Place("api", 1, 1, None, is_estimate=False)
    assert fleet.place("a1", API, TENANT) == fleet.place("a1")
    assert fleet.place("a1", API) is None  # its record is beside the first
    assert fleet.place("a2") == Place("tenant:a", 1, 1, None, is_estimate=False)
    fleet.server.advance(10.0)
    fleet.end("h1")
    assert fleet.given() == ["a1"]
    assert fleet.place("a1") == Place("tenant:a", 0, 1, 0.0, is_estimate=True)
    fleet.claim("a1")
    place = fleet.place("a2")
    assert (place.key, place.nth, place.starts_in) == ("tenant:a", 1, None)  # API is full


def test_a_later_lock_that_is_free_leaves_the_estimate_as_it_is(fleet):
    """A tenant's line is as long as the bodies before it, if the API has room."""
    two = Terms(), Terms(limit=2)
    fleet.send("a1", of("a1"), *two)
    for task in ("a2", "a3"):
        fleet.send(task, of(task), *two)
    fleet.server.advance(20.0)
    fleet.end("a1")
    fleet.claim("a2", None, *two)
    place = fleet.place("a3")
    assert (place.starts_in, place.is_estimate) == (pytest.approx(20, abs=0.01), True)
    fleet.store.override(API, limit=0)
    assert fleet.place("a3").starts_in is None


def test_a_later_lock_that_has_room_and_a_line_tells_nothing(fleet):
    """Those in that line are before it, whatever they wait for."""
    two = Terms(), Terms(limit=2)
    fleet.send("a1", of("a1"), *two)
    fleet.send("a2", of("a2"), *two)
    fleet.server.send("SET", f"{TENANT}:lasted", "1 20000")
    assert fleet.place("a2").is_estimate
    fleet.send("b1", [API], Terms(limit=1))
    assert fleet.place("a2").starts_in is None


def test_what_it_has_passed_may_hold_it_up_again(fleet):
    """A hold-back of a lock that it keeps counts, and a pause of it has no end."""
    rates = Terms(), Terms(limit=LIMIT_MOST, rate=Rate(1, 30.0))
    fleet.send("b1", of("b1"), *rates)
    for task in ("c1", "a1"):
        fleet.send(task, of(task), *rates)
    place = fleet.place("a1")
    assert (place.key, place.nth, place.is_estimate) == ("api", 2, False)
    assert place.starts_in == pytest.approx(60, abs=0.1)
    fleet.store.override(TENANT, ttl=300.0, back="-")
    assert fleet.place("a1").starts_in == pytest.approx(300, abs=0.1)
    fleet.store.override(TENANT, limit=0)
    assert fleet.place("a1").starts_in is None


def test_a_damaged_lock_is_an_error_that_names_it(line):
    """Nothing is guessed."""
    line.client.hset(LOCK, "owner", "garbage")
    with pytest.raises(Exception, match="cannot be read"):
        line.place("a")


def test_a_page_asks_by_the_id_alone(shop):
    """The result backend names the lock, which is asked once; also by a coroutine."""
    task = shop.declare()
    with shop.held():
        for task_id in ("2", "3"):
            shop.run(task, task_id)
        before = shop.server.requests
        place = shop.dislock.place("3")
        assert place == Place(KEY, 2, 2, None, is_estimate=False)
        assert shop.server.requests == before + 1
        assert asyncio.run(shop.dislock.async_place("3")) == place
        assert shop.dislock.place("3", key=KEY) == shop.dislock.place("3", key=["a", KEY]) == place
        assert shop.dislock.place("3", key="a") is None
        assert shop.dislock.place("nobody") is None
    assert shop.dislock.place("2").nth == 0
    shop.work()
    assert shop.dislock.place("2") is shop.dislock.place("3") is None


def test_of_several_keys_the_result_names_the_first(shop):
    """Where the record is, whichever of them is in the way."""
    task = shop.declare(lock_key=[Key("wide", limit=5), "narrow"])
    with shop.held("wide", limit=1):
        shop.server.send("SET", "dislock:{wide}:limit", "1 1 1700000000000 by hand")
        result = shop.run(task, "2")
        assert (result.info["key"], result.info["first"]) == ("wide", "narrow")
        assert (shop.dislock.place("2").key, shop.dislock.place("2").nth) == ("wide", 1)
        assert shop.dislock.why("2").about["place"] == 1


def test_a_task_whose_result_is_ignored_is_found_by_its_key(shop):
    """Its result says nothing, so it has no place by its id alone."""
    task = shop.declare(ignore_result=True)
    with shop.held():
        shop.run(task, "2")
        assert shop.dislock.place("2") is None
        assert shop.dislock.place("2", key=KEY).nth == 1


@pytest.mark.usefixtures("backend_away")
def test_if_the_result_cannot_be_asked_for_that_is_an_error(shop, backend_away):
    """A page must not say that a task is not in line if that is not known."""
    with backend_away("get_task_meta"), pytest.raises(DislockError) as told:
        shop.dislock.place("2")
    assert str(told.value).startswith("the result of task 2 cannot be asked for: backend is away. ")
    assert str(told.value).endswith("give the key of its lock")


@pytest.mark.parametrize("conf", [{"result_backend": None}, {"result_backend": "rpc://"}])
def test_without_a_backend_that_tells_it_a_key_is_needed(shop, conf):
    """The same of locks without an app."""
    shop.app.conf.update(conf)
    shop.app._local = type(shop.app._local)()  # its backend of before
    shop.app._backend_cache = None
    with Dislock.from_url(shop.server.name) as alone:
        for dislock in (shop.dislock, alone):
            with pytest.raises(DislockError, match="give the key of its lock"):
                dislock.place("2")
            assert dislock.place("2", key=KEY) is None


def test_what_goes_wrong_is_told(shop):
    """The lock server is away, or the key cannot be used."""
    shop.server.away = True
    with pytest.raises(StoreError):
        shop.dislock.place("2", key=KEY)
    with pytest.raises(LockKeyError):
        shop.dislock.place("2", key=[7])


def test_in_a_cluster_the_node_of_the_lock_is_asked(cluster):
    """Whichever of them has it; the keys of a list are asked together."""
    fleet = Fleet(SimpleNamespace(store=partial(Store, cluster.url)))
    keys = [f"k{number}" for number in range(9)]
    for number, key in enumerate(keys):
        fleet.send(f"h{number}", [name_of(key)])
        fleet.send(f"t{number}", [name_of(key)])
    with Dislock.from_url(cluster.url) as locks:
        for number in range(9):
            assert locks.place(f"t{number}", key=f"k{number}").nth == 1
            assert locks.place(f"t{number}", key=keys).key == f"k{number}"
    fleet.store.close()


def test_several_independent_servers_keep_no_line(redis_program, tmp_path):
    """Nobody has a place there."""
    with (
        several(3, tmp_path) as servers,
        Dislock.from_url([one.url for one in servers]) as locks,
    ):
        assert locks.place("a", key="k") is None

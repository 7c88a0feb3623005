"""A line goes by the terms that the code says now: real scripts in this process, a driven clock.

A deploy is a second declaration of a task's name.  Those in line were parked by the first.
"""

from json import dumps

import pytest
from freezegun import freeze_time

from celery_dislock import Key
from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms
from celery_dislock.tasks.task import terms_said
from tests.declaring import declare
from tests.driven import KEY, Shop
from tests.integration.lua_server import LuaServer
from tests.integration.parked import LOCK, Line
from tests.integration.test_rates import Starts, most_in_a_window

SLOW, FAST = (
    Terms(limit=LIMIT_MOST, rate=Rate.of("1/h")),
    Terms(limit=LIMIT_MOST, rate=Rate.of("9/s")),
)


@pytest.fixture
def shop():
    with freeze_time(), Shop() as shop:  # only the driven clock moves
        yield shop


def message_of(task, name="shop.a"):
    return b'1 {"headers":{"task":%s}} %s' % (dumps(name).encode(), task.encode())


def ask(line, task, name="shop.a", **how):
    """Ask as a task of this name; put it in line if it must wait."""
    return line.park(task, message=message_of(task, name), task=name, **how)


def test_a_turn_by_a_slower_word_is_not_passed_by_all_others(shop):
    """Its claim starts by the faster word of the code, as those behind it do."""
    starts = Starts(shop, lock_rate="1/5s")
    starts.send(100)
    starts.run(1)  # the next turn is out, for a start in four seconds
    starts.task = shop.declare(starts._body, lock_rate="5/s")
    shop.sweep()
    starts.run(6)
    assert "t1" in shop.ran
    assert most_in_a_window(starts.times, 1.0) == 5


@pytest.mark.parametrize(
    ("was", "becomes", "begin"),
    [
        ({"lock_limit": 1}, {"lock_limit": 3}, 3),
        ({"lock_limit": 3}, {"lock_limit": 1}, 1),
        ({"lock_rate": "1/h", "lock_limit": 2}, {"lock_limit": 2}, 2),
        ({"lock_limit": 2}, {"lock_limit": 2, "lock_rate": "1/h"}, 1),
        ({}, {"lock_mode": "shared"}, 5),
        ({"lock_mode": "shared"}, {}, 1),
    ],
    ids=["more", "fewer", "no rate", "a rate", "shared", "exclusive"],
)
def test_whatever_changes_holds_for_those_in_line(shop, was, becomes, begin):
    """A limit, a rate that comes or goes and the mode: as many begin as the new code admits."""
    task = shop.declare(**was)
    shop.other.store.override(LOCK, limit=0)
    for nth in range(5):
        shop.run(task, f"t{nth}")
    shop.declare(**becomes)
    shop.sweep()
    shop.other.store.override(LOCK, limit=None)
    shop.sweep()
    (state,) = shop.dislock.lock_of(KEY).state()
    assert (len(state.turns), state.waiting) == (begin, 5 - begin)


@pytest.mark.parametrize(("a", "b"), [("shop.a", "shop.b"), ('"a', '"b')])
def test_a_line_of_two_tasks_goes_by_the_words_of_each(a, b):
    """What one task's code says is no word for another task of the key, which keeps its terms."""
    line = Line(LuaServer())
    slow, fast = SLOW._asdict(), FAST._asdict()
    assert line.ask("first", **slow) == "granted"
    for task, name in (("a1", a), ("b1", b), ("a2", a)):
        assert ask(line, task, name, **slow) == "parked"
    assert ask(line, "a3", a, **fast) == "parked"
    assert line.given() == ["a1"]
    assert ask(line, "b2", b, **fast) == "parked"
    assert line.given() == ["b1"]  # and a2 stands behind by the word with which it was parked
    line.sweep()
    assert ask(line, "a4", a, **fast) == "granted"
    assert line.given() == ["a2", "a3", "b2"]


def test_the_sweeper_compares_before_it_writes():
    """Terms that were written since it looked are newer than what it has compared with."""
    line = Line(LuaServer())
    line.ask("first", **SLOW._asdict())
    ask(line, "a1", **SLOW._asdict())
    [first] = line.sweep().first
    assert first == (LOCK, '"task":"shop.a"', "x:1000000000:1/3600000")
    for was, given in (("x:1", []), (first.terms, ["a1"])):
        newer = {LOCK: [[LOCK, first.task, was, "x:1000000000:9/1000"]]}
        line.lines.sweep([LOCK], newer)
        assert line.given() == given


def test_a_ticket_of_a_later_release_keeps_its_terms():
    """Only a worker of that release knows what they are."""
    line = Line(LuaServer())
    line.ask("first")
    ask(line, "a1", limit=1)
    record = line.record_of("a1").replace(b"1 ", b"2 ", 1)
    line.client.hset(f"{LOCK}:tickets", "a1:0:0", record)
    ask(line, "a2", limit=5)
    assert line.sweep().first == ()
    assert line.record_of("a1") == record


def test_the_line_of_a_wide_lock_follows_and_the_order_stays(shop):
    """Tasks that wait at a later key go by its new terms, and keep the order as parked."""
    ran = []

    def deploy(limit, rate):
        def call(tenant):
            ran.append(tenant)

        keys = [Key("tenant:<tenant>", limit=limit), Key("api", rate=rate)]
        shop.app.tasks.pop("shop.call", None)
        declare(shop.app, call, name="shop.call", lock_key=keys, lock_on_conflict="queue")
        return shop.app.tasks["shop.call"]

    task = deploy(9, "1/h")
    for nth in range(6):
        shop.run(task, f"t{nth}", f"{nth % 2}")
    assert len(ran) == 1
    api = shop.dislock.lock_of("api")
    before = {one.id: tuple(one.stations) for one in api.line()}
    assert set(before.values()) == {("tenant:0", "api"), ("tenant:1", "api")}
    deploy(1, "9/s")
    shop.sweep()
    tenants = [shop.dislock.lock_of(f"tenant:{nth}").state()[0] for nth in range(2)]
    assert {one.id: tuple(one.stations) for at in tenants for one in at.turns} == before
    shop.work(later=1)
    assert len(ran) == 6


@pytest.mark.parametrize("a", ["a", lambda: "a"], ids=["named", "made"])
def test_a_turn_for_a_lock_that_the_code_does_not_name_says_nothing(shop, a):
    """Several keys with terms of their own say nothing of a lock that was another key."""
    task = shop.declare(lock_limit=2)
    for other in ("x", "y"):
        shop.other.ask(other, limit=2, ttl=5)
    for nth in range(4):
        shop.run(task, f"t{nth}")
    shop.server.advance(5)
    shop.sweep()
    out = []

    def body(_task):
        out.append(len(shop.dislock.lock_of(KEY).state()[0].turns))

    shop.declare(body, lock_key=[Key(a, limit=9), Key("b", limit=8)])
    shop.work()
    assert shop.ran == ["t0", "t1", "t2", "t3"]
    assert max(out) == 1
    if a == "a":
        assert terms_said(shop.app)("shop.export", KEY) is None


def test_what_the_code_says_of_a_key(shop):
    """A key is found by its template; if two fit, or a callable tells, only the arguments do."""

    def call(a, b): ...

    def made(*_): ...

    keys = [
        Key("api", limit=5),
        Key("t:<a>", limit=2),
        Key("u:<a>", limit=3, cost=2),
        Key("u:<a>:<b>", limit=3),
    ]
    declare(shop.app, call, name="shop.call", lock_key=[*keys, Key("t:x:<b>", limit=4)])
    declare(shop.app, call, name="shop.made", lock_key=[Key("api", limit=5), made])
    declare(shop.app, call, name="shop.same", lock_key=made, lock_limit=7)
    declare(shop.app, call, name="shop.none", lock_limit=None, lock_unique_until="start")
    plans = [Key("a", limit=lambda *_: 2), Key("b", limit=3), Key("c", rate=lambda *_: "1/s")]
    declare(shop.app, lambda: None, name="shop.plans", lock_key=plans)
    declare(shop.app, lambda: None, name="shop.plan", lock_key="a", lock_limit=lambda *_: 2)
    said = terms_said(shop.app)
    assert [said("shop.call", key).limit for key in ("api", "t:1", "u:1:2")] == [5, 2, 3]
    assert [said("shop.call", key) for key in ("t:x:1", "other", "an api")] == [None] * 3
    assert said("shop.made", "api") is None
    assert said("shop.same", "x").limit == 7
    assert [said(name, "k") for name in ("shop.none", "shop.unknown")] == [None, None]
    assert [said("shop.plans", key) for key in ("a", "c")] == [None, None]
    assert said("shop.plans", "b").limit == 3
    assert said("shop.plan", "a") is None

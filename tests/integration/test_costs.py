"""What a start costs: of a limit, of a rate, and what it has really spent."""

from __future__ import annotations

import pytest
from freezegun import freeze_time

from celery_dislock import Key
from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms
from celery_dislock.exceptions import LockKeyError, SettingsError
from celery_dislock.servers.replies import Granted
from tests.declaring import declare
from tests.driven import KEY, Shop
from tests.integration.lua_server import START

NAME = f"dislock:{{{KEY}}}"


@pytest.fixture
def shop():
    with freeze_time(), Shop() as shop:  # only the driven clock moves
        yield shop


def ask(shop, owner, cost=None, limit=5, rate=None, mode="exclusive", **how):
    """Ask the lock server as somebody else; return whether the lock was granted."""
    terms = (Terms(mode, limit, Rate.of(rate) if rate else None, cost),)
    store = shop.dislock.runtime.process.store
    return isinstance(store.acquire([NAME], owner, 3600.0, "{}", terms=terms, **how), Granted)


def declared(shop, body=lambda tokens: tokens, **options):
    """Declare a task of these arguments."""
    task = declare(shop.app, body, **{"lock_key": KEY, "name": "shop.call", **options})
    shop.app.finalize()
    return task


def end(shop, *owners):
    for owner in owners:
        shop.dislock.runtime.process.store.release([NAME], owner)


def set_for(shop, **what):
    shop.dislock.runtime.process.store.override(NAME, 0.0, "", **what)


def start(shop, cost, rate="100/m"):
    """Take the lock for a moment; return whether it was granted."""
    granted = ask(shop, "p", cost, LIMIT_MOST, rate)
    end(shop, "p")
    return granted


def test_a_lease_takes_as_many_units_of_the_limit_as_it_costs(shop):
    """Of a limit of five, leases of three and two fit together, and nothing beside them."""
    assert ask(shop, "a", 3)
    assert not ask(shop, "b", 3)
    assert ask(shop, "c", 2)
    assert not ask(shop, "d")
    end(shop, "a")
    assert ask(shop, "b", 3)


@pytest.mark.parametrize("limit", [2, 1])
def test_a_cost_above_an_operators_limit_runs_alone(shop, limit):
    """It takes all that there is, so no line stands still."""
    set_for(shop, limit=limit)
    assert ask(shop, "a")
    assert not ask(shop, "b", 4)
    end(shop, "a")
    assert ask(shop, "b", 4)
    assert not ask(shop, "a")


def test_a_cost_above_an_operators_rate_takes_all_of_it(shop):
    """It starts when nothing else has started for a whole window, and nothing starts beside it."""
    set_for(shop, rate="10/60000")
    assert start(shop, 50)
    assert not start(shop, 1)
    shop.server.stall(60.001)
    assert start(shop, 1)
    assert not start(shop, 50)


@pytest.mark.parametrize("parked", [True, False])
def test_nobody_passes_a_large_one_at_the_head_of_the_line(shop, parked):
    """Though there is room for a small one, it comes after a task or a waiter that costs more."""
    ran = []
    large = shop.declare(lambda *_: ran.append(1), lock_limit=5, lock_cost=3)
    assert ask(shop, "a", 3)
    if parked:
        shop.run(large)
    else:
        assert not ask(shop, "waits", 3, place=90.0)
    assert not ask(shop, "b", fair=False)
    end(shop, "a")
    shop.work()
    assert ran == [1] * parked


def test_a_small_one_at_the_head_is_passed_as_ever(shop):
    """Who is unfair passes those that cost 1."""
    assert ask(shop, "a", limit=1)
    assert not ask(shop, "waits", limit=1, place=90.0)
    assert ask(shop, "b", limit=2, fair=False)


@pytest.mark.parametrize("strategy", ["skip", "raise", "retry", "wait", "queue"])
def test_each_strategy_has_costs(shop, strategy):
    """A task is refused as the strategy says, and runs when its units are free."""
    ran = []
    task = shop.declare(lambda *_: ran.append(1), strategy, lock_limit=5, lock_cost=3)
    assert ask(shop, "a", 3)
    result = shop.run(task)
    if strategy == "wait":  # the time in which it waits passes by itself, until that lease ends
        assert (ran, result.state, shop.server.clock() >= START + 3600) == ([1], "SUCCESS", True)
        return
    assert ran == []
    end(shop, "a")
    shop.work(later=60)
    assert ran == [1] * (strategy in {"retry", "queue"})
    assert result.state == ("SUCCESS" if ran else {"skip": "REVOKED", "raise": "FAILURE"}[strategy])
    assert ask(shop, "all", 5)  # its units came back


REPLACED = {"lock_unique_until": "start", "lock_on_duplicate": "replace"}
TWICE = {
    "returned": ({**REPLACED, "lock_on_duplicate": "return"}, [("first", 2)]),
    "replaced": (REPLACED, [("second", 4)]),
    "no sooner": ({**REPLACED, "lock_on_duplicate": "sooner"}, [("first", 2)]),
    "replaced in line": (
        {"lock_queue_limit": 1, "lock_queue_overflow": "replace"},
        [("second", 4)],
    ),
    "done before": ({"lock_dedupe_redelivered": True}, [("first", 2), ("second", 4)]),
    "kept for a time": ({"lock_at_least_for": 5}, [("first", 2), ("second", 4)]),
}


@pytest.mark.parametrize("how", TWICE)
def test_whichever_of_two_runs_takes_its_own_cost(shop, how):
    """A duplicate, one that is replaced, and one that comes later, each with its own arguments."""
    options, expected = TWICE[how]
    ran = []

    def body(self, n):
        holders = shop.dislock.lock_of(KEY).holders()
        ran.append((self.request.id, sum(lease.cost for lease in holders if not lease.expiring)))

    call = declared(shop, body, lock_limit=5, lock_cost="<n>", lock_on_conflict="queue", **options)
    assert ask(shop, "a", 5)
    for name, n in (("first", 2), ("second", 4)):
        shop.run(call, name, n)
    end(shop, "a")
    for _ in range(3):
        shop.work(later=6)
        shop.sweep()
    assert ran == expected


def test_a_shared_lock_with_a_rate_counts_costs(shop):
    """Any number read at a time, as often as the rate says, each by its cost."""
    lock = {"mode": "shared", "rate": "100/m", "cost": 60}
    with shop.dislock.lock(KEY, **lock):
        (holder,) = shop.dislock.lock_of(KEY).holders()
        assert (holder.mode, holder.cost) == ("shared", 60)
        assert not ask(shop, "writes")
        assert not ask(shop, "reads", 41, rate="100/m", mode="shared")
        assert ask(shop, "reads", 40, rate="100/m", mode="shared")


@pytest.mark.parametrize(("options", "is_same"), [({}, True), ({"cost": 2}, False)])
def test_a_lock_is_taken_again_without_its_cost(shop, options, is_same):
    """An argument told it, which the body's own block cannot repeat; another cost is refused."""

    def body(n):
        with shop.dislock.lock(KEY, limit=5, **options):
            (holder,) = shop.dislock.lock_of(KEY).holders()
        return holder.cost

    result = shop.run(declared(shop, body, lock_limit=5, lock_cost="<n>"), "1", 3)
    if is_same:
        assert result.get() == 3
    else:
        assert "cannot be taken with cost=2" in str(result.result)


def test_a_lease_and_a_place_say_what_they_cost(shop):
    """In line, with a turn, and running; in plain Python, too."""
    handle = shop.dislock.lock_of(KEY)
    costs = []
    shop.declare(
        lambda *_: costs.extend(lease.cost for lease in handle.holders()), lock_limit=5, lock_cost=3
    )
    assert ask(shop, "a", 3)
    shop.run(shop.app.tasks["shop.export"], "first")
    assert not ask(shop, "waits", 2, place=90.0)
    assert [(place.cost, place.limit) for place in handle.line()] == [(3, 5), (2, 5)]
    assert handle.state()[0].lack.startswith("the first in line needs 3 of 5 units, and 2 are free")
    end(shop, "a")
    (turn,) = [lease for lease in handle.holders() if lease.turn]
    assert turn.cost == 3
    shop.work()
    assert sorted(costs) == [2, 3]


def test_several_keys_have_costs_of_their_own(shop):
    """A task in line keeps its units of the first key, and takes those of the second."""
    keys = [Key("narrow", limit=2, cost=2), Key(KEY, limit=5)]
    task = shop.declare(lock_key=keys, lock_cost=3)
    assert ask(shop, "a", 3)
    shop.run(task)
    store = shop.dislock.runtime.process.store
    narrow = ["dislock:{narrow}"], "n", 90.0, "{}"
    assert not store.acquire(*narrow, terms=(Terms(limit=2),))
    end(shop, "a")
    shop.work()
    assert shop.ran == ["2"]
    assert store.acquire(*narrow, terms=(Terms(limit=2, cost=2),))


COSTS = {
    "field": "<tokens>",
    "callable": lambda tokens: tokens,
    "number": 60,
}


@pytest.mark.parametrize("how", COSTS)
def test_a_cost_comes_from_the_arguments(shop, how):
    """It is a number, an argument's, or what a callable makes of the arguments."""
    call = declared(shop, lock_rate="100/m", lock_cost=COSTS[how])
    assert shop.run(call, "1", 60).get() == 60
    assert start(shop, 40)
    assert not start(shop, 1)


@pytest.mark.parametrize("cost", [0, -1, "9", 101, True, None])
def test_what_is_no_cost_takes_nothing(shop, cost):
    """The task fails with an error of its key, and nothing is counted."""
    call = declared(shop, lock_rate="100/m", lock_cost="<tokens>")
    with pytest.raises(LockKeyError, match=r"^lock_cost "):
        shop.run(call, "1", cost).get()
    assert start(shop, 100)


async def awaited(tokens):
    return 1


def of_more(tokens, plan):
    return tokens, plan


LARGE = {"lock_cost": 3, "lock_limit": 5}
NO_LOCK = {"lock_limit": None, "lock_unique_until": "end"}
COUNTED_TWICE = {"lock_on_conflict": "skip", "lock_hold_on_retry": True}
REFUSED = {
    "a cost above the limit": ({"lock_limit": 5, "lock_cost": 6}, "more than the limit, 5"),
    "a cost above the rate": ({"lock_rate": "5/m", "lock_cost": 6}, "the rate, 5 a minute"),
    "the cost of a key": ({"lock_key": [Key("k", limit=2, cost=3)]}, "more than the limit, 2"),
    "a cost that nothing counts": ({"lock_cost": 3}, "needs a limit or a rate"),
    "a cost, shared": ({"lock_cost": 3, "lock_mode": "shared"}, "nothing counts the cost: give"),
    "a cost, no lock": (
        {"lock_cost": 3, **NO_LOCK},
        "no effect with lock_limit=None: leave one of the two out",
    ),
    "a cost, cancel": ({**LARGE, "lock_on_conflict": "cancel"}, "leave the cost out"),
    "a cost of no argument": ({"lock_cost": "<n>", "lock_limit": 5}, "no argument of the task"),
    "a cost of zero": ({"lock_cost": 0, "lock_limit": 5}, "give 1 or more"),
    "a cost in a text": ({"lock_cost": "3", "lock_limit": 5}, "'<name>' of an argument"),
    "a cost of others": ({"lock_cost": pow, "lock_limit": 5}, "takes the arguments"),
    "a rate of nothing": ({"lock_rate": "0/m"}, "give 1 to"),
    "a rate of months": ({"lock_rate": "1/99d"}, "30 days"),
    "a rate, no lock": ({"lock_rate": "1/m", **NO_LOCK}, "no effect"),
    "a rate, kept for a retry": ({"lock_rate": "1/m", **COUNTED_TWICE}, "not counted"),
    "the rate of a key": ({"lock_key": [Key("a", rate="x"), "b"]}, "the rate of"),
    "a callable of more": ({"lock_limit": of_more}, "takes the arguments"),
    "a callable of more, of a key": ({"lock_key": [Key("k", rate=of_more)]}, "takes the arguments"),
    "the second of two": (
        {"lock_limit": lambda _: 2, "lock_rate": of_more},
        "lock_rate=.*takes the arguments",
    ),
    "a callable, shared": ({"lock_limit": lambda: 2, "lock_mode": "shared"}, "no effect"),
    "a callable, no lock": (
        {"lock_key": [Key("k", limit=lambda: 2)], "lock_limit": None},
        "no effect",
    ),
    "a callable, kept for a retry": (
        {"lock_rate": lambda: "1/s", "lock_hold_on_retry": True},
        "not counted",
    ),
    "async": ({"lock_limit": awaited}, "not awaited"),
    "async of a key": ({"lock_key": [Key("k", rate=awaited)]}, "not awaited"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_term_that_cannot_be_is_told_when_the_task_is_bound(shop, why):
    """Of a limit, a rate and a cost the error says what to change."""
    options, remedy = REFUSED[why]
    with pytest.raises(SettingsError, match=remedy):
        declared(shop, **options)


def test_what_was_spent_counts_in_place_of_what_was_said(shop):
    """Less lowers the count of that start; more counts at once; said twice it counts once."""
    with shop.dislock.lock(KEY, rate="100/m", cost=60) as lease:
        assert not start(shop, 41)
        for _ in range(2):
            assert lease.spent(20)
        assert start(shop, 41)
        assert lease.spent(59)
        assert not start(shop, 1)
    assert not lease.spent(1)
    shop.server.stall(60.001)
    assert start(shop, 100)


def test_a_task_says_what_it_has_spent(shop):
    """self.lease.spent() counts, with a large rate, too."""
    rate = "100000/m"

    def body(self, estimate, really):
        return self.lease.spent(really)

    call = declared(shop, body, lock_rate=rate, lock_cost="<estimate>")
    assert shop.run(call, "1", 90_000, 10_000).get()
    assert start(shop, 80_000, rate)
    assert not start(shop, 10_000, rate)


def test_spent_without_a_cost_is_an_error(shop):
    """Nothing would count it."""
    with (
        shop.dislock.lock(KEY, rate="100/m") as lease,
        pytest.raises(SettingsError, match="lock_cost"),
    ):
        lease.spent(3)


def test_those_in_line_keep_their_own_costs(shop):
    """A deploy of another cost holds for later tasks; the limit is followed, the cost is not."""
    shop.declare(lock_limit=5, lock_cost=4)
    assert ask(shop, "a", 5)
    shop.run(shop.app.tasks["shop.export"], "first")
    task = shop.declare(lock_limit=6, lock_cost=2)
    shop.run(task, "second")
    end(shop, "a")
    shop.work()
    assert shop.ran == ["first", "second"]


def test_units_come_back_when_their_holder_dies(shop):
    """A lease that ends by itself frees all its units."""
    assert ask(shop, "dead", 5)
    shop.server.stall(3601)
    assert ask(shop, "a", 5)

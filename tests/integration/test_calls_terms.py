"""Limits and rates that a callable makes of a call's arguments: of a plan that changes."""

from __future__ import annotations

import pytest
from freezegun import freeze_time

from celery_dislock import Key
from celery_dislock.config.terms import Terms
from celery_dislock.exceptions import LockKeyError, LockTermsError, SettingsError
from celery_dislock.parking.store import Lines
from tests.driven import KEY, Shop
from tests.integration.test_costs import declared
from tests.integration.test_rates import Starts, most_in_a_window


@pytest.fixture
def shop():
    with freeze_time(), Shop() as shop:  # only the driven clock moves
        yield shop


class Plan:
    """What a tenant has booked; an application changes it while tasks wait."""

    def __init__(self, now):
        self.now = now

    def of(self, *_args):
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


PLACES = {
    "the option": lambda of: {"lock_limit": of},
    "a key": lambda of: {"lock_key": [Key(KEY, limit=of)]},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("was", "becomes"), [(1, 3), (3, 1)])
def test_a_line_follows_a_plan_that_changes(shop, place, was, becomes):
    """Those in line go by what the next call is told, up and down, and nobody above it."""
    plan, together = Plan(was), []

    def body(_task):
        together.append(len(shop.dislock.lock_of(KEY).state()[0].turns))

    task = shop.declare(body, **PLACES[place](plan.of))
    shop.dislock.hold_back(KEY, 3600)
    for nth in range(6):
        shop.run(task, f"t{nth}")
    plan.now = becomes
    shop.run(task, "t6")
    shop.dislock.hold_back(KEY, 0)
    shop.sweep()
    (state,) = shop.dislock.lock_of(KEY).state()
    assert (len(state.turns), state.waiting) == (becomes, 7 - becomes)
    shop.work()
    assert shop.ran == [f"t{nth}" for nth in range(7)]
    assert max(together) < becomes  # beside the one that runs


@pytest.mark.parametrize(("was", "becomes"), [("2/10s", "8/10s"), ("8/10s", "2/10s")])
def test_a_rate_from_a_plan_is_kept_to(shop, was, becomes):
    """Each claim brings the newest word for those behind it: no window has more than the plan."""
    plan = Plan(was)
    starts = Starts(shop, lock_rate=plan.of)
    starts.send(40)
    starts.run(20)
    before = len(starts.times)
    plan.now = becomes
    starts.run(10)  # turns that are out are judged by their tickets
    then = len(starts.times)
    starts.run(60)
    after = starts.times[then:]
    most = {
        was: most_in_a_window(starts.times[:before], 10.0),
        becomes: most_in_a_window(after, 10.0),
    }
    assert most == {"2/10s": 2, "8/10s": 8}


def test_a_plan_without_a_rate_lets_all_start(shop):
    """None is no rate, and without a limit any number runs."""
    task = shop.declare(lock_rate=Plan(None).of)
    with shop.held(limit=9):
        assert shop.run(task).state == "SUCCESS"


def test_each_tenant_has_the_limit_of_its_own_plan(shop):
    """A callable takes the task's arguments, and is asked once in a delivery."""
    asked = []

    def limit_of(tenant):
        asked.append(tenant)
        return {"small": 1, "large": 2}[tenant]

    task = declared(shop, lambda tenant: tenant, lock_key=[Key("t:<tenant>", limit=limit_of)])
    results = []
    for tenant in ("small", "large"):
        with shop.held(f"t:{tenant}", limit=2):
            results.append(shop.run(task, tenant, tenant))
    states = [result.state for result in results]
    assert (asked, states) == (["small", "large"], ["REVOKED", "SUCCESS"])


NONSENSE = [
    *[("limit", told) for told in (0, -1, "3", True, None, 2.5, 10**10)],
    *[("rate", told) for told in (0, -1, "3/x", True, 2.5, 10**10)],
]


@pytest.mark.parametrize(("term", "told"), NONSENSE)
def test_what_is_no_limit_and_no_rate_takes_nothing(shop, term, told):
    """The task fails with an error of its key, which names the callable."""
    task = shop.declare(**{f"lock_{term}": Plan(told).of})
    result = shop.run(task)
    what = rf"^lock_{term} .Plan\.of.*{told!r} is no {term}: (give|write)"
    with pytest.raises(LockKeyError, match=what):
        result.get()
    assert shop.server.locks() == []
    assert shop.ran == []


def test_a_callable_that_raises_takes_nothing(shop):
    """Its own error is the task's; those in line, and their turns, are left alone."""
    plan = Plan(1)
    task = shop.declare(lock_limit=plan.of)
    parked = shop.park(task, "2", "3")
    plan.now = ConnectionError("no database")
    result = shop.send(task, "4")
    shop.work()
    with pytest.raises(ConnectionError, match="no database"):
        result.get()
    assert (shop.ran, parked.state) == (["2", "3"], "SUCCESS")  # by the terms of their tickets
    assert shop.server.locks() == []


def test_an_argument_is_renamed_while_tasks_wait(shop):
    """Those of before fail, as without a lock, and hold nothing up; those of after go on."""

    def deploy(body):
        shop.app.tasks.pop("shop.call", None)
        return declared(shop, body, lock_limit=body, lock_on_conflict="queue")

    task = deploy(lambda tenant: tenant)
    with shop.held():
        old = shop.run(task, "2", kwargs={"tenant": 1})
        new = shop.run(deploy(lambda customer: customer), "3", kwargs={"customer": 2})
    shop.work()
    assert (old.state, new.get()) == ("FAILURE", 2)
    with pytest.raises(TypeError, match="tenant"):
        old.get()


def test_a_turn_whose_terms_are_not_told_asks_for_the_lock_alone(shop, monkeypatch):
    """If the server has forgotten its ticket, nobody knows the limit; and it is no newest word."""
    plan = Plan(5)
    task = shop.declare(lock_limit=plan.of)
    shop.dislock.hold_back(KEY, 3600)
    shop.run(task)
    shop.dislock.hold_back(KEY, 0)
    plan.now = ConnectionError("no database")
    asked, park = [], Lines.park
    monkeypatch.setattr(Lines, "park", lambda *args: (asked.append(args[-1]), park(*args))[1])
    shop.sweep()
    shop.work()
    assert [(ticket.terms, ticket.heeded) for ticket in asked] == [((Terms(),), False)]


def test_a_cost_above_the_plan_never_starts_and_says_so(shop):
    """It is an error where both are known: in the call."""
    call = declared(shop, lock_rate=Plan("50/m").of, lock_cost="<tokens>")
    assert shop.run(call, "1", 50).get() == 50
    what = r"^lock_cost .*a cost of 51 is more than the rate, 50 a minute"
    with pytest.raises(LockKeyError, match=what):
        shop.run(call, "2", 51).get()


def test_the_order_of_keys_does_not_look_at_what_calls_are_told(shop):
    """A plan that changes would make two orders, in which tasks wait for each other."""
    plan = Plan(9)
    keys = [Key("a:<n>", limit=plan.of), Key("b:<n>", limit=plan.of), "c"]
    task = declared(shop, lambda n: n, lock_key=keys, lock_on_conflict="queue")
    orders = []
    for told in (9, 1):
        plan.now = told
        built = task.dislock_guard._keys.of((1,), {})
        each = task.dislock_guard._keys.terms_of((1,), {})
        orders.append(task.dislock_guard._keys.in_order(built, each)[0])
    assert orders == [["a:1", "b:1", "c"]] * 2


def test_a_body_takes_its_own_lock_again_without_naming_what_its_call_was_told(shop):
    """It cannot know: so a limit from a callable is compared only if it is stated."""
    held = []

    def body(_task):
        with shop.dislock.lock(KEY) as lease:
            held.append(lease.held)
        with pytest.raises(LockTermsError, match="limit"):
            shop.dislock.lock(KEY, limit=3).acquire()

    assert shop.run(shop.declare(body, lock_limit=Plan(2).of)).state == "SUCCESS"
    assert held == [True]


@pytest.mark.parametrize("option", ["limit", "rate"])
@pytest.mark.parametrize("where", ["given", "the app's"])
def test_a_lock_in_python_has_no_arguments_for_a_callable(shop, option, where):
    """It would have no limit at all."""
    given = {option: Plan(2).of} if where == "given" else {}
    shop.app.conf.update({} if given else {f"dislock_{option}": Plan(2).of})
    with pytest.raises(SettingsError, match="only a task has arguments"):
        shop.dislock.lock(KEY, **given)

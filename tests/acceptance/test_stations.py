"""Tasks of several keys in real workers: in line in no slot, narrow before wide, and to their end.

Each task calls an API for a tenant, until the tenant's gate is open.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import chord
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Scene, fleets, wait_for
from tests.acceptance.scenarios import BRIEF, call
from tests.commands import Dislock

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

MOST, WINDOW = 10, 1_000_000  # starts of the tasks with a rate, and microseconds
FAIR = 0.95  # Jain's index: 1.0 if all have the same share, 1/n if one of n has all
dislock = Dislock(scenarios.app)


class Calls(Scene):
    """The calls of one test: those of its tenants, and where they stand."""

    def tenants(self, names):
        """Return names of tenants that are this test's alone."""
        return [f"{self.key}-{name}" for name in names]

    def open(self, *tenants):
        """Let the calls for these tenants end."""
        for tenant in tenants:
            self.open_gate(tenant)

    def send(self, fleet, task, tenant, many=1, gate=None, **options):
        return [fleet.send(task, self.key, tenant, gate, **options) for _ in range(many)]

    def at(self, key):
        """The lock of a key, and its line."""
        return Scene(key, self.redis)

    def kept_by(self, key):
        """The owners of the leases of a lock; what is kept for a parked task has its ticket's."""
        return [lease.owner.partition(":")[0].partition("@")[0] for lease in self.at(key).leases]

    def of(self, tenant):
        """The tasks of a tenant in the order in which their bodies began."""
        return [event["id"] for event in self.reported("begin", tenant=tenant)]

    def wait_until_begun(self, tenant, many=1):
        self.wait_for_report("begin", times=many, tenant=tenant)

    def hold_the_api(self, fleet):
        """Let two tenants have the API, which admits no more; return both, and their calls."""
        tenants = self.tenants(["held", "held-too"])
        results = [fleet.send(call, self.key, tenant) for tenant in tenants]
        wait_for("both run", lambda: len(self.begun) == 2)
        return tenants, results

    def most(self):
        """Return how many were inside each lock at a time, at most."""
        inside, most = Counter(), Counter()
        for event in self.history:
            inside.update(dict.fromkeys(event["locks"], 1 if event["what"] == "begin" else -1))
            most |= inside
        return most


@pytest.fixture
def calls(scene, _set):
    """The calls of one test; at its end, all gates that it has used are opened."""
    calls = Calls(scene.key, scene.redis)
    yield calls
    calls.open(*{event["tenant"] for event in calls.reported("begin")})


@pytest.fixture
def set_terms(redis_client):
    """What an operator does to a key; what is left of that in the end is taken back.

    So are starts: those of an hour are kept for an hour.
    """
    keys = set()

    def do(command, key, *args):
        keys.add(key)
        assert dislock(command, key, *args).exit_code == 0

    yield do
    for key in keys:
        dislock("resume", key)
        redis_client.delete(f"dislock:{{{key}}}:starts")


@pytest.fixture
def _set(set_terms):
    """Have terms taken back after the gates were opened, or before."""


@pytest.fixture
def brief(server):
    """Options of workers with short leases, and with a broker and so a sweep of their own."""
    return {
        "broker_url": f"{server.url.removesuffix('/0')}/1",
        "conf": {"dislock_watchdog_timeout": BRIEF},
    }


def get_all(results):
    for result in results:
        assert result.get(timeout=LIMIT) == {"held": True}


def fairness(shares):
    """Jain's index.  Source: Jain, Chiu, Hawe, A Quantitative Measure of Fairness, 1984."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


# One line for each tenant


@fleets("prefork", "rabbitmq", "threads", "gevent", "solo")
def test_a_busy_tenant_holds_nobody_up_and_takes_no_slot(fleet, calls):
    """While one of A's twenty runs, all of B and C do, and so does another task; then A's."""
    a, b, c = calls.tenants("abc")
    calls.open(b, c)
    busy = calls.send(fleet, call, a, 20)
    calls.wait_until_begun(a)
    calls.at(f"tenant:{a}").wait_for_line(19)
    others = calls.send(fleet, call, b, 3) + calls.send(fleet, call, c, 3)
    other = fleet.send(scenarios.step, f"{calls.key}-other")
    get_all([other, *others])
    assert len(calls.of(a)) == 1
    calls.open(a)
    get_all(busy)
    assert calls.most() == {"api": 2, f"tenant:{a}": 1, f"tenant:{b}": 1, f"tenant:{c}": 1}


@PREFORK
def test_a_quota_holds_up_its_own_customer(fleet, calls, set_terms):
    """Of twenty at ten an hour ten run, and those of another customer are not behind the rest."""
    a, b = calls.tenants("ab")
    calls.open(a, b)
    busy = calls.send(fleet, scenarios.call_by_quota, a, 20)
    calls.wait_until_begun(a, 10)
    calls.at(f"quota:{a}").wait_for_line(10)
    get_all(calls.send(fleet, scenarios.call_by_quota, b, 3))
    assert len(calls.of(a)) == 10
    assert calls.kept_by("api") == []
    for key in (f"quota:{a}", f"quota:{b}"):
        set_terms("limit", key, "--rate", "1000/s")
    get_all(busy)
    assert calls.most()["api"] <= 5


@PREFORK
def test_a_rate_of_one_key_holds_up_those_that_need_it(fleet, calls, set_terms):
    """Tasks that need only the fast one of two rates pass those that wait for the slow one."""
    slow, fast = calls.tenants(["slow", "fast"])
    calls.open(slow, fast)
    seldom = calls.send(fleet, scenarios.call_seldom, slow, 3)
    calls.wait_until_begun(slow)
    calls.at("seldom").wait_for_line(2)
    get_all(calls.send(fleet, scenarios.call_often, fast, 20))
    assert len(calls.of(slow)) == 1
    set_terms("limit", "seldom", "--rate", "1000/s")
    get_all(seldom)


@PREFORK
def test_tenants_that_are_busy_have_the_same_share(fleet, calls, set_terms):
    """However early the first of them had parked all its tasks."""
    tenants = calls.tenants(map(str, range(10)))
    calls.open(*tenants)
    set_terms("pause", "api")
    results = []
    for tenant in tenants:
        results += calls.send(fleet, call, tenant, 6)
        calls.at(f"tenant:{tenant}").wait_for_line(5)
    set_terms("resume", "api")
    get_all(results)
    begun = [event["tenant"] for event in calls.reported("begin")]
    shares = Counter(begun[: len(begun) // 2])
    assert fairness([shares[tenant] for tenant in tenants]) > FAIR, shares


@PREFORK
def test_light_tenants_are_not_behind_a_busy_one(fleet, calls, set_terms):
    """Nine of them come after thirty tasks of one, and begin before most of those."""
    busy, *light = calls.tenants(map(str, range(10)))
    calls.open(busy, *light)
    set_terms("pause", "api")
    results = calls.send(fleet, call, busy, 30)
    calls.at(f"tenant:{busy}").wait_for_line(29)
    for tenant in light:
        results += calls.send(fleet, call, tenant)
    calls.at("api").wait_for_line(10)
    set_terms("resume", "api")
    get_all(results)
    begun = [event["tenant"] for event in calls.reported("begin")]
    assert not set(light) & set(begun[15:]), begun


@PREFORK
def test_readers_and_writers_that_also_need_another_key(fleet, calls):
    """Readers share both keys, and a writer is alone in both."""
    other, one, two = calls.tenants(["other", "one", "two"])
    first = calls.send(fleet, scenarios.write, other)
    calls.wait_until_begun(other)
    readers = calls.send(fleet, scenarios.read, one, 3) + calls.send(fleet, scenarios.read, two)
    calls.at("index").wait_for_line(4)
    writer = calls.send(fleet, scenarios.write, one)
    calls.at(f"document:{one}").wait_for_line(1)
    late = calls.send(fleet, scenarios.read, one)
    calls.at(f"document:{one}").wait_for_line(2)
    calls.open(other)
    calls.wait_until_begun(one, 3)
    calls.wait_until_begun(two)
    assert calls.most()["index"] == 4
    calls.open(one, two)
    get_all([*first, *readers, *writer, *late])
    assert calls.of(one)[3:] == [writer[0].id, late[0].id]
    writers = {first[0].id, writer[0].id}
    inside = []
    for event in calls.history:
        if event["what"] == "end":
            inside.remove(event["id"])
        else:
            assert not inside or not writers & {event["id"], *inside}
            inside.append(event["id"])


# An operator


@PREFORK
def test_a_tenant_that_is_paused_keeps_nothing_of_the_api(fleet, calls, set_terms):
    """Neither those that wait for it nor those that had passed it bar others; after it they run."""
    held, paused, other = calls.tenants(["held", "paused", "other"])
    calls.open(paused, other)
    holders = calls.send(fleet, scenarios.call_widely, held, 2)
    calls.wait_until_begun(held, 2)
    stopped = calls.send(fleet, scenarios.call_widely, paused, 3)
    calls.at("api").wait_for_line(3)
    set_terms("pause", f"tenant:{paused}")
    stopped += calls.send(fleet, scenarios.call_widely, paused, 2)
    wait_for("all are parked", lambda: {one.state for one in stopped} == {"PARKED"})
    calls.open(held)
    get_all([*holders, *calls.send(fleet, scenarios.call_widely, other, 6)])
    assert calls.of(paused) == []
    set_terms("resume", f"tenant:{paused}")
    get_all(stopped)
    assert calls.most()["api"] == 2


@PREFORK
def test_a_limit_that_is_raised_lets_in_who_waits_for_it(fleet, calls, set_terms):
    """Those in line for the API run at once, one of each tenant."""
    a, b, c, d = tenants = calls.tenants("abcd")
    set_terms("limit", "api", "1")
    results = calls.send(fleet, call, a, 6)
    calls.wait_until_begun(a)
    calls.at(f"tenant:{a}").wait_for_line(5)
    for tenant in (b, c, d):
        results += calls.send(fleet, call, tenant)
    calls.at("api").wait_for_line(3)
    assert len(calls.begun) == 1
    set_terms("limit", "api", "50")
    for tenant in tenants:
        calls.wait_until_begun(tenant)
    calls.open(*tenants)
    get_all(results)
    assert set(calls.most().values()) == {1, 4}


# A task that does not run, or not to its end


@PREFORK
@pytest.mark.parametrize("how", ["revoked", "expired", "dropped", "dropped at its place"])
def test_what_a_task_keeps_is_handed_on_when_it_ends_in_line(fleet, calls, how):
    """It has passed its tenant and waits for the API; the tenant's next one goes on."""
    (a,) = calls.tenants("a")
    calls.open(a)
    (held, other), holders = calls.hold_the_api(fleet)
    (ended,) = calls.send(fleet, call, a, expires=1 if how == "expired" else None)
    expiry = time.time() + 1
    calls.at("api").wait_for_line(1)
    assert calls.kept_by(f"tenant:{a}") == [ended.id]
    following = calls.send(fleet, call, a)
    calls.at(f"tenant:{a}").wait_for_line(1)
    if how == "expired":
        wait_for("it has expired", lambda: time.time() > expiry)
    elif how == "revoked":
        assert len(fleet.revoke(ended.id, reply=True)) == len(fleet.workers)
    else:
        where = ["--key", "api"] if how == "dropped at its place" else []
        assert dislock("drop", ended.id, "--yes", *where).exit_code == 0
        wait_for(
            "the next one keeps the tenant",
            lambda: calls.kept_by(f"tenant:{a}") == [following[0].id],
        )
    calls.open(held)
    with pytest.raises(TaskRevokedError):
        ended.get(timeout=LIMIT)
    get_all(following)
    calls.open(other)
    get_all(holders)
    assert ended.id not in calls.begun


@PREFORK
def test_a_process_that_is_killed_frees_all_its_keys(fleet, calls):
    """The next of its tenant and the next of the API run, and it comes again, as it asks for."""
    held, a, b, first = calls.tenants(["held", "a", "b", "first"])
    calls.open(b)
    holder = calls.send(fleet, call, held)
    before = calls.send(fleet, call, a, gate=first)
    calls.wait_until_begun(held)
    calls.wait_until_begun(a)
    victim = calls.send(fleet, scenarios.call_and_survive, a)
    calls.at(f"tenant:{a}").wait_for_line(1)
    calls.open(first)
    get_all(before)
    dead = calls.wait_for_report("begin", id=victim[0].id)["pid"]
    others = calls.send(fleet, call, b)
    calls.at("api").wait_for_line(1)
    following = calls.send(fleet, call, a, gate=b)
    calls.at(f"tenant:{a}").wait_for_line(1)
    os.kill(dead, signal.SIGKILL)
    get_all([*others, *following])
    calls.open(held, a)
    get_all([*holder, *victim])
    assert calls.of(a).count(victim[0].id) == 2


def test_a_worker_that_dies_with_turns_out_bars_nobody(start_fleet, calls, brief, set_terms):
    """Others of its rate go on, and its tasks run when somebody serves their queue again."""
    task = scenarios.call_rated
    dead = start_fleet("prefork", ready=False, **brief)
    alive = start_fleet("prefork", **brief)
    dead.workers[0].wait_until_ready()
    tenants, others = calls.tenants(f"dead{n}" for n in range(12)), calls.tenants("abcde")
    calls.open(*tenants, *others)
    set_terms("pause", "rated")
    left = [calls.send(dead, task, tenant)[0] for tenant in tenants]
    calls.at("rated").wait_for_line(12)
    dead.workers[0].process.send_signal(signal.SIGSTOP)
    set_terms("resume", "rated")
    with redis.Redis.from_url(brief["broker_url"]) as broker:
        wait_for("ten turns are out", lambda: broker.llen(dead.queue) >= 10)
        dead.workers[0].kill()
        broker.delete(dead.queue)  # as if it had them
    get_all([one for tenant in others for one in calls.send(alive, task, tenant, 2)])
    assert not {event["tenant"] for event in calls.reported("begin")} & {*tenants}
    alive.serve(dead.queue)
    get_all(left)
    starts = sorted(event["token"] for event in calls.reported("begin"))
    assert all(
        later - sooner >= WINDOW for sooner, later in zip(starts, starts[MOST:], strict=False)
    )


# Others who take these locks


@PREFORK
def test_a_python_lock_of_the_same_keys_hangs_nobody(fleet, calls, set_terms):
    """It comes to the API before a task that keeps the tenant: both go on."""
    held, a = calls.tenants(["held", "a"])
    set_terms("limit", "api", "1")
    holders = calls.send(fleet, call, held)
    calls.wait_until_begun(held)
    lock = scenarios.dislock.lock([f"tenant:{a}", "api"], timeout=LIMIT)

    def take():
        with lock:
            pass

    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(take)
        calls.at("api").wait_for_line(1)
        calls.open(a)
        parked = calls.send(fleet, call, a)
        wait_for("it is parked", lambda: parked[0].state == "PARKED")
        calls.open(held)
        took.result()
    get_all([*holders, *parked])


@PREFORK
def test_tasks_that_wait_in_their_slots_leave_one_to_a_parked_task(fleet, calls):
    """They wait for the tenant that it keeps, in all slots but two; it runs, and so do they."""
    (a,) = calls.tenants("a")
    held, holders = calls.hold_the_api(fleet)
    parked = calls.send(fleet, call, a)
    calls.at("api").wait_for_line(1)
    waiting = calls.send(fleet, scenarios.call_or_wait, a, 8)
    name = scenarios.call_or_wait.name
    wait_for("four have slots", lambda: fleet.times_it_says(name, "received") >= 4)
    calls.open(a, *held)
    get_all([*holders, *parked, *waiting])
    assert calls.most()[f"tenant:{a}"] == 1


# Canvas, and releases


@PREFORK
def test_a_chord_of_tasks_with_several_keys_ends(fleet, calls):
    """Its members are parked at two keys, and its body has all their results."""
    a, b = calls.tenants("ab")
    held, holders = calls.hold_the_api(fleet)
    calls.open(a, b)
    members = [fleet.signature(call, calls.key, tenant) for tenant in (a, a, a, b, b)]
    result = fleet.start(chord(members, scenarios.gather.s().set(queue=fleet.queue)))
    calls.at(f"tenant:{a}").wait_for_line(2)
    calls.at("api").wait_for_line(2)
    calls.open(*held)
    wait_for("the chord is over", result.ready)
    assert result.get(timeout=LIMIT) == [{"held": True}] * 5
    get_all(holders)


def test_tasks_of_a_release_with_other_keys_run(start_fleet, calls, brief):
    """With a key more, one less or in another order, parked before a deploy or a rollback."""
    old = start_fleet("prefork", ready=False, env={"SCENARIOS_RELEASE": "old"}, **brief)
    new = start_fleet("prefork", **brief)
    old.workers[0].wait_until_ready()
    a, b, c = tenants = calls.tenants("abc")
    each = {a: scenarios.grown, b: scenarios.shrunk, c: scenarios.turned}
    results = [
        calls.send(new if tenant == c else old, task, tenant)[0] for tenant, task in each.items()
    ]
    wait_for("three run", lambda: len(calls.begun) == 3)
    for fleet in (old, new):
        for tenant, task in each.items():
            results += calls.send(fleet, task, tenant, 4)
    calls.at(f"tenant:{a}").wait_for_line(8)
    calls.at(f"tenant:{b}").wait_for_line(8)
    left, right = calls.at(f"left:{c}"), calls.at(f"right:{c}")
    # A sweep tells the first in line of the new release's limit, by which it may pass.
    wait_for("eight in both lines", lambda: len(left.line) + len(right.line) == 8)
    for fleet, other in ((old, new), (new, old)):
        fleet.serve(other.queue)
        fleet.leave(fleet.queue)
    calls.open(*tenants)
    get_all(results)
    assert set(calls.most().values()) == {1}

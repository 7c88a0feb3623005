"""Tasks of several keys in line: they pass one lock after the other, and keep what they passed.

The real scripts, in this process, on a clock that the tests drive.
"""

import json
from functools import partial

import pytest

from celery_dislock.config.terms import LIMIT_MOST, Rate, Terms
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.store import Bounds, Lines, Ticket
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending
from tests.holding import name_of

API = name_of("api")
TTL = 30.0


def tenant(name):
    return name_of(f"tenant:{name}")


class Fleet:
    """Workers of one broker: what they ask for, and what they were given to publish."""

    def __init__(self, server):
        self.server = server
        self.out = []
        self.store = server.store(broker="here", hand_over=self._publish)
        self.lines = Lines(self.store.lock_server, "dislock", "here", self._publish)
        self.locks, self.homes = {}, {}
        self.times = 0

    def _publish(self, turns):
        for turn in turns:
            task = turn.ticket.partition(":")[0]
            self.homes[task] = [turn.lock]
            self.out.append(task)

    def ask(self, task, locks, *terms, marked=False, message=b"", bounds=None):
        self.times += 1
        how = {"terms": terms or (Terms(),), "bounds": bounds or Bounds()}
        ticket = Ticket(f"{task}:0:0", marked, message, **how)
        owner, holder = f"{task}@w:1/{self.times}", json.dumps({"id": task})
        answer = self.lines.park(locks, owner, TTL, holder, ticket)
        if isinstance(answer, Granted):
            self.locks[task] = answer.locks, owner
        return answer

    def send_all(self, tasks, *terms):
        """Send tasks whose locks are those of :func:`of`."""
        for task in tasks:
            self.send(task, of(task), *terms)

    def send(self, task, locks, *terms, **how):
        """A worker gets the task's message, and runs or parks it; return the answer."""
        answer = self.ask(task, locks, *terms, **how)
        if type(answer) is Conflict:
            message = b'1 {"headers":{"dislock":{"v":1}}}'
            answer = self.ask(task, locks, *terms, message=message, **how)
        return answer

    def claim(self, task, locks=None, *terms):
        """A worker gets the message of a turn."""
        return self.ask(task, locks or self.homes[task], *terms, marked=True)

    def end(self, task):
        locks, owner = self.locks.pop(task)
        return self.store.release(locks, owner, Ending(ticket=f"{task}:0:0"))

    def given(self):
        """Tell, once, who was published."""
        out, self.out = self.out, []
        return out

    def run_all(self):
        """Claim and end what is out, until nothing is; return the order."""
        ran = []
        while given := self.given():
            for task in given:
                assert isinstance(self.claim(task), Granted), task
                ran.append(task)
            for task in given:
                self.end(task)
        return ran

    def owners(self, lock):
        return [one.owner for one in self.store.holders(lock)]


@pytest.fixture
def fleet(server):
    return Fleet(server)


TWO = Terms(), Terms(limit=2)


def of(task):
    """Return the locks of a task: its tenant's, and the API's."""
    return [tenant(task[0]), API]


def give_a_turn(fleet):
    """Let the task a1 wait for its tenant, and have its turn."""
    fleet.send("h1", [tenant("a")])
    fleet.send("a1", of("a1"))
    fleet.end("h1")
    assert fleet.given() == ["a1"]


def test_a_task_passes_its_locks_and_runs(fleet):
    """It waits for its tenant, then for the API, and keeps the first meanwhile."""
    assert isinstance(fleet.send("a1", of("a1"), *TWO), Granted)
    assert isinstance(fleet.send("b1", of("b1"), *TWO), Granted)
    parked = fleet.send("a2", of("a2"), *TWO)
    assert (type(parked), parked.key, parked.place) == (Parked, "tenant:a", 1)
    parked = fleet.send("c1", of("c1"), *TWO)
    assert (type(parked), parked.key, parked.place) == (Parked, "api", 1)
    assert fleet.owners(tenant("c")) == ["c1:0:0#"]

    fleet.end("a1")  # a2 comes behind c1, which has its turn
    assert fleet.given() == ["c1"]
    assert fleet.owners(tenant("a")) == ["a2:0:0#"]
    granted = fleet.claim("c1")
    assert (granted.locks, len(granted.tokens)) == ((tenant("c"), API), 2)
    fleet.end("b1")
    assert fleet.run_all() == ["a2"]
    fleet.end("c1")
    fleet.server.advance(1)
    stays = (":done:", ":lasted", "lines")
    assert not [name for name in fleet.server.names() if not any(end in name for end in stays)]


def test_a_newcomer_does_not_pass_who_waits(fleet):
    """A reader of a file comes behind its writer, also if it has passed its own lock first."""
    file, read, write = name_of("file"), Terms("shared"), Terms()
    fleet.send("r1", [file], read)
    assert isinstance(fleet.send("w1", [file], write), Parked)
    parked = fleet.send("a1", [tenant("a"), file], Terms(), read)
    assert (parked.key, parked.place) == ("file", 2)
    fleet.end("r1")
    assert fleet.given() == ["w1"]
    fleet.claim("w1", [file])
    fleet.end("w1")
    assert fleet.given() == ["a1"]


def test_what_comes_later_is_given_back_with_what_was_lost(fleet):
    """Without a sweep for long, a task loses what it has passed first; others have the rest."""
    locks = [tenant("a"), name_of("disk"), API]
    fleet.send("h1", [API])
    fleet.send("a1", locks)
    assert isinstance(fleet.send("d1", [name_of("disk")]), Parked)
    fleet.server.advance(400)  # the holder of the API has died
    assert isinstance(fleet.send("a2", [tenant("a")]), Granted)
    fleet.lines.sweep([API])
    assert fleet.given() == ["d1"]
    assert fleet.owners(name_of("disk")) == ["d1:0:0#"]
    fleet.claim("d1", [name_of("disk")])
    fleet.end("a2")
    fleet.end("d1")
    assert fleet.run_all() == ["a1"]


def test_a_turn_of_which_a_lock_was_lost_is_handed_on_before_it_is_answered(fleet):
    """Its task is told for how long the one is in its way that has its turn now."""
    give_a_turn(fleet)
    fleet.server.send("DEL", tenant("a"))
    assert isinstance(fleet.send("a2", of("a2")), Parked)
    answer = fleet.claim("a1", of("a1"))
    assert fleet.given() == ["a2"]
    assert isinstance(answer, Parked)
    assert answer.remaining == TTL
    assert fleet.run_all() == []
    assert isinstance(fleet.claim("a2"), Granted)
    fleet.end("a2")
    assert fleet.run_all() == ["a1"]


def test_a_newcomer_is_not_let_in_beside_one_that_passes_a_later_lock_before_it(fleet):
    """Of two orders of two locks: who waits for the second takes the first, too, and is alone."""
    wide = Terms(limit=2)
    for task in ("h1", "h2"):
        assert isinstance(fleet.send(task, [API], wide), Granted)
    assert isinstance(fleet.send("o1", [API, tenant("a")], wide, Terms()), Parked)
    fleet.server.advance(TTL + 1)  # the holders have died, and nobody has swept yet
    assert isinstance(fleet.send("a1", of("a1"), *TWO), Parked)
    assert len(fleet.owners(tenant("a"))) == 1
    assert fleet.run_all() == ["o1", "a1"]


def test_what_is_dropped_hands_all_on(fleet):
    """A task that is taken out of a later line gives its tenant to the next, at once."""
    fleet.send("h1", [API])
    fleet.send_all(["a1", "a2"])
    assert fleet.owners(tenant("a")) == ["a1:0:0#"]
    assert fleet.lines.drop(tenant("a"), "a1:0:0", '"why":"x"').ours
    assert fleet.owners(tenant("a")) == ["a2:0:0#"]
    fleet.end("h1")
    assert fleet.run_all() == ["a2"]


def test_tenants_take_turns_at_what_they_share(fleet):
    """Ten of ten tenants, parked one tenant after the other: all get the same of the API."""
    tenants = "abcdefghij"
    api = Terms(limit=2)
    fleet.send("x0", [API], api)
    fleet.send("x1", [API], api)
    for name in tenants:
        for nth in range(10):
            fleet.send(f"{name}{nth}", [tenant(name), API], Terms(limit=5), api)
    fleet.end("x0")
    fleet.end("x1")
    ran = fleet.run_all()
    assert len(ran) == 100
    half = [task[0] for task in ran[50:]]  # the first five of each have come to the API at once
    shares = [half.count(name) for name in tenants]
    assert sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) > 0.95


def test_a_queue_without_workers_keeps_nothing_of_a_rate_from_others(fleet):
    """A turn that nobody claims keeps room for one start only until it has run out."""
    rate = Terms(limit=LIMIT_MOST, rate=Rate.of("1/20s"))
    for task in ("x1", "d1", "e1"):  # nobody claims the turns of d1
        fleet.send(task, [API], rate)
    for _ in range(30):
        fleet.server.advance(10)
        fleet.lines.sweep([API])
        if "e1" in fleet.given():
            return
    pytest.fail("it has no turn")


@pytest.mark.parametrize("keys", ["ab", "abc"])
def test_two_orders_of_the_same_keys_do_not_wait_for_ever(fleet, keys):
    """The sweep finds all of a circle, and the youngest gives back; each is told with its keys."""
    orders = [[one, keys[nth + 1 - len(keys)]] for nth, one in enumerate(keys)]
    circle_of(fleet, *[list(map(name_of, order)) for order in orders])
    first = name_of(keys[-2])
    [circle] = fleet.lines.sweep([first])[first].circles
    assert circle.began_anew == f"?[t{len(keys)}]"
    assert set(circle.tasks) == {
        f"?[t{nth}] ({', '.join(order)})" for nth, order in enumerate(orders, 1)
    }
    assert sorted(fleet.run_all()) == [f"t{nth + 1}" for nth in range(len(keys))]


def test_two_orders_of_wide_locks_do_not_wait_for_ever(fleet):
    """As many tasks of each order as the locks admit keep what those of the other wait for."""
    a, b, most = name_of("a"), name_of("b"), 60
    wide = Terms(limit=most)
    for nth in range(most):
        fleet.send(f"h{nth}", [a], wide)
        fleet.send(f"i{nth}", [b], wide)
    for nth in range(most):
        fleet.send(f"t{nth}", [a, b], wide)
        fleet.send(f"u{nth}", [b, a], wide)
    for task in list(fleet.locks):
        fleet.end(task)
    assert fleet.given() == []
    ran = []
    while len(fleet.lines.sweep([a])[a].circles) == 1:
        ran += fleet.run_all()
    assert len(ran) == 2 * most


def circle_of(fleet, *orders):
    """Park a task with each of these orders, so that each keeps its first lock."""
    for nth, (first, *_) in enumerate(orders, 1):
        fleet.send(f"h{nth}", [first])
        fleet.send(f"t{nth}", orders[nth - 1])
        fleet.server.advance(0.01)
    for nth in range(1, len(orders) + 1):
        fleet.end(f"h{nth}")
    assert fleet.given() == []


def test_who_stands_behind_a_circle_keeps_its_place(fleet):
    """The youngest of all who are stuck is not in the circle: it gives nothing back."""
    a, b, c = map(name_of, "abc")
    circle_of(fleet, [a, b], [b, a])
    fleet.send("t3", [c, a])
    [circle] = fleet.lines.sweep([c])[c].circles
    assert (circle.began_anew, len(circle.tasks)) == ("?[t2]", 2)
    assert fleet.owners(c) == ["t3:0:0#"]
    assert fleet.run_all() == ["t1", "t3", "t2"]


def test_a_waiter_that_has_what_a_task_waits_for_gets_the_rest(fleet):
    """The task gives its tenant back to the program, which has come first to the API."""
    program = partial(fleet.store.acquire, owner="p@host:1/1", ttl=TTL, holder="{}", place=90.0)
    assert isinstance(program([API]), Granted)
    fleet.send("a1", of("a1"))
    assert isinstance(program([API, tenant("a")]), Conflict)
    [circle] = fleet.lines.sweep([tenant("a")])[tenant("a")].circles
    assert circle.began_anew == "?[a1]"
    assert isinstance(program([API, tenant("a")]), Granted)
    fleet.store.release([API, tenant("a")], "p@host:1/1")
    assert fleet.run_all() == ["a1"]


def test_the_oldest_makes_room_wherever_it_stands(fleet):
    """Of the tasks of a tenant only the newest waits, also if the older one waits for the API."""
    fleet.send("h1", [API])
    newest = Bounds(1, overflow="replace")
    fleet.send("a1", of("a1"), bounds=newest)
    parked = fleet.send("a2", of("a2"), bounds=newest)
    assert isinstance(parked, Parked)
    assert [*parked.replaced] == ["a1:0:0"]
    fleet.end("h1")
    assert fleet.run_all() == ["a2"]


def test_a_task_that_was_parked_has_the_locks_of_its_ticket(fleet):
    """A deploy adds or takes away a key: what was in line runs under what it waited for."""
    fleet.send("h1", [tenant("a")])
    fleet.send("a1", of("a1"))
    fleet.send("a2", [tenant("a")])
    fleet.end("h1")
    assert fleet.given() == ["a1"]
    assert fleet.claim("a1", [tenant("a")]).locks == tuple(of("a1"))
    fleet.end("a1")
    assert fleet.given() == ["a2"]
    assert fleet.claim("a2", of("a2")).locks == (tenant("a"),)
    assert fleet.owners(API) == []


A1_DIED = Ending(ticket="a1:0:0", settles=None)


def test_a_dead_process_gives_back_the_locks_of_its_ticket(fleet):
    """Also those that the code does not name any more."""
    give_a_turn(fleet)
    fleet.claim("a1")
    fleet.send("b1", of("b1"))
    assert fleet.store.release_dead([tenant("a")], "a1@w:1/", A1_DIED) == 2
    assert (fleet.owners(tenant("a")), fleet.given()) == ([], ["b1"])


def test_a_copy_of_a_dead_task_waits_at_the_lock_that_is_taken(fleet):
    """It runs again under both, and comes before those who came later."""
    give_a_turn(fleet)
    fleet.claim("a1")
    fleet.store.release_dead(of("a1"), "a1@w:1/", A1_DIED)
    fleet.send("b1", of("b1"))
    answer = fleet.ask("a1", of("a1"), marked=True, message=b"m")
    assert (type(answer), answer.key) == (Parked, "api")
    fleet.end("b1")
    assert fleet.run_all() == ["a1"]


def test_a_paused_tenant_leaves_the_api_to_others(fleet):
    """Its tasks stand in its own line, also those that had passed it."""
    two = Terms(limit=10), Terms(limit=2)
    fleet.send_all(["x1", "y1", "a1", "a2", "a3", "b1"], *two)
    fleet.store.override(tenant("a"), limit=0)
    fleet.end("x1")
    fleet.end("y1")
    assert fleet.run_all() == ["b1"]
    fleet.store.override(tenant("a"), limit=None)
    assert fleet.run_all() == ["a1", "a2", "a3"]


def test_a_slow_rate_keeps_nothing_of_a_fast_one(fleet):
    """A task with one an hour and a hundred a second stands at its own rate."""
    hour = Terms(limit=LIMIT_MOST, rate=Rate.of("1/h"))
    fast = Terms(limit=LIMIT_MOST, rate=Rate.of("100/s"))
    fleet.send("a1", of("a"), hour, fast)
    assert fleet.send("a2", of("a"), hour, fast).key == "tenant:a"
    for nth in range(50):
        assert isinstance(fleet.send(f"f{nth}", [API], fast), Granted)
    fleet.end("a1")
    fleet.server.advance(3590)
    fleet.lines.sweep([tenant("a")])
    fleet.server.advance(10)
    assert fleet.run_all() == ["a2"]


def test_a_turn_is_claimed_beside_whom_a_larger_limit_let_in_meanwhile(fleet):
    """Its lease has been kept for it since its turn was given, as that of somebody who holds it."""
    fleet.send("x1", [API])
    fleet.send("a1", [API])
    fleet.end("x1")
    assert isinstance(fleet.send("b1", [API], Terms(limit=2)), Granted)
    assert fleet.given() == ["a1"]
    assert isinstance(fleet.claim("a1"), Granted)


def test_a_turn_that_a_lower_limit_has_no_room_for_goes_back_in_line(fleet):
    """An operator has lowered it since, and another task holds the lock."""
    for task in ("x1", "x2", "a1"):
        fleet.send(task, [API], Terms(limit=2))
    fleet.end("x1")
    fleet.store.override(API, limit=1)
    assert isinstance(fleet.claim("a1", [API], Terms(limit=2)), Parked)
    fleet.given()
    fleet.end("x2")
    assert fleet.run_all() == ["a1"]


def test_whose_turn_has_run_out_is_not_passed_when_a_waiter_gives_up(fleet):
    """A waiter that has lost its first lock gives back the second one, and hands that on."""
    locks, two = [tenant("s"), API], (Terms(), Terms(limit=2))

    def wait(owner, *asked):
        terms = two[-len(asked) :]
        return fleet.store.acquire(list(asked), owner, 9 * TTL, "{}", place=9 * TTL, terms=terms)

    assert isinstance(wait("s1@s:1/1", *locks), Granted)
    fleet.send("x1", [API], Terms(limit=2))
    fleet.send("b1", [API], Terms(limit=2))
    assert type(wait("w1@s:1/2", API)) is Conflict
    fleet.end("x1")
    assert fleet.given() == ["b1"]
    fleet.server.advance(TTL + 1)
    fleet.server.send("DEL", tenant("s"))
    fleet.store.acquire([tenant("s")], "y1", 9 * TTL, "{}")
    assert type(wait("s1@s:1/1", *locks)) is Conflict
    assert not any(owner.startswith("w1") for owner in fleet.owners(API))
    fleet.lines.sweep([API])
    assert fleet.given() == ["b1"]


@pytest.mark.parametrize("member", ["x##", "##", "9/ab##", "3/abcd##", "99999999999999999999/x##"])
def test_a_member_that_nobody_has_written_holds_up_nobody(fleet, member):
    """It is passed over, as one whose record is gone."""
    fleet.send("h1", [API])
    fleet.server.send("ZADD", f"{API}:line", "1", member)
    fleet.send("a1", of("a1"))
    fleet.end("h1")
    assert fleet.run_all() == ["a1"]


def test_a_turn_waits_while_another_lock_of_its_ticket_cannot_be_read(fleet):
    """Its message comes with the keys of newer code, so nobody looks at that lock first."""
    give_a_turn(fleet)
    fleet.server.send("HSET", API, "x", "?")
    assert isinstance(fleet.claim("a1"), Parked)
    fleet.server.send("HDEL", API, "x")
    fleet.server.advance(TTL)
    fleet.lines.sweep([tenant("a")])
    assert fleet.run_all() == ["a1"]


def test_what_a_ticket_keeps_is_freed_also_if_its_first_lock_cannot_be_read(fleet):
    """The operator is told of no other lock, and the one that is freed is handed on."""
    fleet.send("h1", [tenant("a")])
    fleet.send("a1", of("a1"))
    fleet.end("h1")
    fleet.send("b1", of("b1"))
    assert fleet.given() == ["a1"]
    fleet.server.send("HSET", tenant("a"), "x", "?")
    (unit,) = fleet.store.holders(API)
    assert fleet.store.free(API, unit.owner, unit.token)
    assert fleet.given() == ["b1"]

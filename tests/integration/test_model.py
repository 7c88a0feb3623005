"""The scripts against a plain Python model, in random interleavings of all that owners can do.

The scripts run in this process, see ``lua_server``, and for a while on servers, see
``test_conformance``.  Their clock stands still until a step moves it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_dislock.config.terms import Terms
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending
from tests.holding import name_of
from tests.integration.lua_server import LuaServer
from tests.integration.model_runs import run_model

LOCK = name_of("model")
UNIT = 5  # seconds that a reservation lasts: whatever lasts long is a multiple of it
SLOTS = 6  # owners at a time


@dataclass
class Held:
    expires: int
    acquired: int
    mode: str
    limit: int  # as asked for by whoever was granted it
    token: int = 0


@dataclass
class Place:
    deadline: int
    ttl: int
    mode: str
    limit: int


@dataclass
class Model:
    """One lock, as the guide tells it.  Time is in units."""

    now: int = 0
    leases: dict[str, Held] = field(default_factory=dict)  # live ones; "~..." only run out
    line: dict[str, Place] = field(default_factory=dict)  # in the order of joining
    line_until: int = 0  # when all of it is forgotten
    woken: dict[str, int] = field(default_factory=dict)  # owner: until when the news waits for it
    told_to_look: set[str] = field(default_factory=set)
    granted: list[str] = field(default_factory=list)  # by the last step, in order

    def pass_time(self, units):
        self.now += units
        self.leases = {o: held for o, held in self.leases.items() if held.expires > self.now}
        self.woken = {o: until for o, until in self.woken.items() if until > self.now}
        if self.line_until <= self.now:
            self.line.clear()

    def admits(self, mode, limit):
        exclusive = sum(held.mode == "exclusive" for held in self.leases.values())
        if mode == "shared":
            return exclusive == 0
        return exclusive == len(self.leases) and exclusive < limit

    def grant(self, owner, ttl, mode, limit):
        self.leases[owner] = Held(self.now + ttl, self.now, mode, limit)
        self.granted.append(owner)

    def acquire(self, owner, ttl, mode, limit, place, fair):
        """Return whether the owner holds the lock now."""
        if owner in self.leases:
            self.leases[owner].expires = self.now + ttl
            self.woken.pop(owner, None)
            return True
        if self.admits(mode, limit) and not (fair and self.line):
            self.line.pop(owner, None)
            self.grant(owner, ttl, mode, limit)
            return True
        if place:
            self.line_until = max(self.line_until if self.line else 0, self.now + place)
            self.line[owner] = Place(self.now + place, ttl, mode, limit)  # keeps its position
        if self.line:
            self.hand_on(owner)
            if owner not in self.leases and not self.line and self.admits(mode, limit):
                self.grant(owner, ttl, mode, limit)  # all who stood in its way were dead
        return owner in self.leases

    def hand_on(self, asker=None):
        handed = False
        while self.line:
            head, place = next(iter(self.line.items()))
            if place.deadline > self.now and not self.admits(place.mode, place.limit):
                if handed:
                    self.told_to_look.add(head)
                return
            del self.line[head]
            if place.deadline <= self.now:
                continue
            if head == asker:
                self.grant(head, place.ttl, place.mode, place.limit)
            else:
                self.grant(head, 1, place.mode, place.limit)  # reserved, until it asks
                self.woken[head] = self.now + 1
                handed = True

    def end(self, owner, at_least):
        held = self.leases.pop(owner, None)
        if held and held.acquired + at_least > self.now:
            held.expires = held.acquired + at_least
            self.leases["~" + owner] = held
        return held is not None

    def release(self, owner, at_least):
        """Return whether there was a lease."""
        waited = self.line.pop(owner, None) is not None
        ended = self.end(owner, at_least)
        if waited or ended:
            self.hand_on()
        return ended

    def release_dead(self, start, at_least):
        """Return how many leases were ended; at_least None: those in line leave it, no more."""
        for owner in [o for o in self.line if o.startswith(start)]:
            del self.line[owner]
        owners = [o for o in self.leases if o.startswith(start) and at_least is not None]
        for owner in owners:
            self.end(owner, at_least)
        self.hand_on()
        return len(owners)

    def renew(self, owner, ttl):
        if owner in self.leases:
            self.leases[owner].expires = self.now + ttl
        return owner in self.leases


slots = st.integers(0, SLOTS - 1)
durations = st.integers(1, 4)
at_leasts = st.sampled_from([0, 0, 0, 1, 2, 3])
KINDS = {
    "exclusive": ([1], ["exclusive"]),
    "counted": ([1, 2, 3], ["exclusive"]),
    "shared": ([1], ["exclusive", "shared"]),
    "all": ([1, 2, 3], ["exclusive", "shared"]),
}


class LockMachine(RuleBasedStateMachine):
    """Owners in slots; one that is done, or died, makes room for a new one of another name."""

    def __init__(self, server):
        super().__init__()
        self.server = server
        server.begin()
        self.client = server.client(decode_responses=True)
        self.store = server.store()
        self.model = Model()
        self.names = [self.name(slot, 0) for slot in range(SLOTS)]
        self.generation = 0
        self.ended = set()  # owners that will not ask again
        self.last_token = 0
        self.ran_out = set()  # owners whose lease ended by itself

    @initialize(kind=st.sampled_from(sorted(KINDS)), all_fair=st.booleans())
    def choose(self, kind, all_fair):
        self.limits, self.modes = KINDS[kind]
        self.all_fair = all_fair

    def name(self, slot, generation):
        return f"p{slot % 2}:{slot}/{generation}"

    def owner(self, slot):
        """Return the slot's owner; a new one where the last one is done."""
        if self.names[slot] in self.ended:
            self.generation += 1
            self.names[slot] = self.name(slot, self.generation)
        return self.names[slot]

    # What an owner does.

    @rule(
        slot=slots,
        ttl=durations,
        mode=st.integers(0, 1),
        limit=st.integers(0, 2),
        place=st.sampled_from([0, 1, 2, 3, 4]),
        fair=st.sampled_from([True, True, False]),
        twice=st.booleans(),
    )
    def ask(self, slot, ttl, mode, limit, place, fair, twice):
        owner = self.owner(slot)
        mode, limit = self.modes[mode % len(self.modes)], self.limits[limit % len(self.limits)]
        fair = fair or self.all_fair
        if not place and (known := self.model.line.get(owner)):
            ttl, mode, limit = known.ttl, known.mode, known.limit  # it asks once more, not anew
        ahead = self.live_waiters_before(owner)
        answer = self.send(
            twice,
            self.store.acquire,
            *([LOCK], owner, ttl * UNIT, json.dumps({"id": owner})),
            terms=(Terms(mode, limit),),
            fair=fair,
            place=place * UNIT,
        )
        held = self.model.acquire(owner, ttl, mode, limit, place, fair)
        self.look()
        if held:
            assert answer == Granted((self.model.leases[owner].token,))
        else:
            self.check_refusal(answer)
        if fair and owner in self.model.granted:
            assert not ahead & set(self.model.line), "it passed somebody who waits"

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(slot=slots, ttl=durations, twice=st.booleans())
    def renew(self, slot, ttl, twice):
        owner = self.names[slot]
        if owner in self.model.woken:  # it does not know yet that it has something to renew
            return
        answer = self.send(twice, self.store.extend, [LOCK], owner, ttl * UNIT)
        assert answer == self.model.renew(owner, ttl)
        self.look()

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(ttl=durations, twice=st.booleans())
    def renew_all(self, ttl, twice):
        owners = [owner for owner in self.names if owner not in self.model.woken]
        asked = [([LOCK], owner, ttl * UNIT) for owner in owners]
        answer = self.send(twice, self.store.renew, asked, within=10.0)
        assert answer == [self.model.renew(owner, ttl) for owner in owners]
        self.look()

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(slot=slots, at_least=at_leasts, twice=st.booleans())
    def release_or_give_up(self, slot, at_least, twice):
        self.end(slot, at_least, twice=twice)

    @precondition(lambda self: self.model.leases.keys() & set(self.names))
    @rule(number=slots, at_least=at_leasts, twice=st.booleans())
    def release_one_that_is_held(self, number, at_least, twice):
        held = [slot for slot, owner in enumerate(self.names) if owner in self.model.leases]
        self.end(held[number % len(held)], at_least, twice=twice)

    @precondition(lambda self: self.ran_out & set(self.names) - self.ended)
    @rule(number=slots, at_least=at_leasts, twice=st.booleans())
    def release_too_late(self, number, at_least, twice):
        late = [slot for slot, owner in enumerate(self.names) if owner in self.ran_out - self.ended]
        self.end(late[number % len(late)], at_least, twice=twice)

    @precondition(lambda self: set(self.model.woken) & self.model.leases.keys() - self.ended)
    @rule(number=slots, ttl=durations)
    def wake_up(self, number, ttl):
        woken = [o for o in self.model.woken if o in self.model.leases and o not in self.ended]
        owner = woken[number % len(woken)]
        handed = self.store.wait(LOCK, owner, 1.0)
        assert handed is not None
        assert (handed.token, handed.ttl) == (self.model.leases[owner].token, UNIT)
        del self.model.woken[owner]
        answer = self.store.acquire([LOCK], owner, ttl * UNIT, json.dumps({"id": owner}))
        assert self.model.acquire(owner, ttl, "exclusive", 1, 0, fair=True)
        self.look()
        assert answer == Granted((self.model.leases[owner].token,))

    # What happens to them.

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(units=st.sampled_from([1, 1, 1, 1, 2, 3]))
    def pass_time(self, units):
        before = set(self.model.leases)
        self.model.pass_time(units)
        self.ran_out |= before - self.model.leases.keys()
        self.server.advance(units * UNIT)
        self.server.end_keys()
        self.look()

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(slot=slots)
    def vanish(self, slot):
        """It asks for nothing any more, and nobody knows."""
        self.ended.add(self.names[slot])

    @precondition(lambda self: self.model.leases or self.model.line)
    @rule(process=st.integers(0, 1), at_least=st.none() | at_leasts, twice=st.booleans())
    def die_observed(self, process, at_least, twice):
        start = f"p{process}:"
        ending = Ending(expires=at_least is None, at_least=(at_least or 0) * UNIT)
        answer = self.send(twice, self.store.release_dead, [LOCK], start, ending, second_answer=0)
        assert answer == self.model.release_dead(start, at_least)
        self.ended |= {owner for owner in self.names if owner.startswith(start)}
        self.look()

    # What must be so after each step.

    @invariant()
    def every_key_ends_by_itself(self):
        """Every key has a TTL, and none belongs to something that is over."""
        keys = self.server.names()
        assert all(self.client.pttl(key) > 0 for key in keys), keys
        if not self.model.line:
            assert not keys & {f"{LOCK}:line", f"{LOCK}:places"}
        woken = {f"{LOCK}:wake:{owner}" for owner in self.model.woken}
        to_look = {
            f"{LOCK}:wake:{owner}" for owner in self.model.told_to_look & set(self.model.line)
        }
        assert {key for key in keys if ":wake:" in key} <= woken | to_look
        for owner in self.model.woken:
            news = self.client.llen(f"{LOCK}:wake:{owner}")
            assert news == 1 or (news == 0 and owner not in self.model.leases), owner

    def teardown(self):
        """When all have released or run out, no key is left."""
        for slot in range(SLOTS):
            self.end(slot, 0, twice=False)
        for owner in list(self.model.line):  # those that vanished
            self.store.release([LOCK], owner)
            self.model.release(owner, 0)
        for owner in [owner for owner in self.model.leases if owner[0] != "~"]:
            self.store.release([LOCK], owner)
            self.model.release(owner, 0)
        self.look()
        assert not self.client.exists(f"{LOCK}:line", f"{LOCK}:places")
        if not self.model.leases and not self.ran_out:
            assert not self.client.exists(LOCK)
        self.pass_time(5)
        left = self.server.names()
        self.store.close()
        self.client.close()
        assert not left, left

    # How it is done.

    def end(self, slot, at_least, *, twice):
        owner = self.names[slot]
        ending = Ending(at_least=at_least * UNIT)
        answer = self.send(twice, self.store.release, [LOCK], owner, ending, second_answer=False)
        known = owner in self.model.leases or owner in self.model.line
        assert answer == self.model.release(owner, at_least)
        if not known and self.waiting() != list(self.model.line):
            self.model.hand_on()  # a late release may be what makes others notice that it is late
        self.ended.add(owner)
        self.look()

    def send(self, twice, call, *args, second_answer=None, **kwargs):
        """Send a command, once or twice: the second changes nothing, and is answered the same."""
        self.model.granted.clear()
        answer = call(*args, **kwargs)
        if twice:
            before = self.snapshot()
            again = call(*args, **kwargs)
            assert again == (answer if second_answer is None else second_answer)
            assert self.snapshot() == before
        return answer

    def snapshot(self):
        found = {}
        for key in self.server.names():
            kind = self.client.type(key)
            if kind == "hash":
                found[key] = self.client.hgetall(key)
            elif kind == "zset":
                found[key] = self.client.zrange(key, 0, -1, withscores=True)
            else:
                found[key] = self.client.lrange(key, 0, -1)
        return found

    def waiting(self):
        return self.client.zrange(f"{LOCK}:line", 0, -1)

    def look(self):
        """Compare what the server has with the model; learn the tokens of new leases."""
        holders = {h.owner: h for h in self.store.holders(LOCK)}
        model = {owner.removeprefix("~"): held for owner, held in self.model.leases.items()}
        assert {o: (h.remaining, h.mode, h.id) for o, h in holders.items()} == {
            o: ((held.expires - self.model.now) * UNIT, held.mode, o) for o, held in model.items()
        }
        assert self.waiting() == list(self.model.line)
        assert set(self.client.hkeys(f"{LOCK}:places")) == set(self.model.line)
        for owner in self.model.granted:
            if owner in model:
                token = holders[owner].token
                assert token > self.last_token, "a fencing token did not grow"
                self.last_token = self.model.leases[owner].token = token
        assert {o: h.token for o, h in holders.items()} == {o: h.token for o, h in model.items()}
        self.check_capacity(holders.values())
        self.model.granted = []

    def check_capacity(self, holders):
        """No lease was granted beyond what its owner asked for, whoever else is there."""
        exclusive = [h for h in holders if h.mode == "exclusive"]
        assert not exclusive or len(exclusive) == len(holders)
        for number, lease in enumerate(sorted(exclusive, key=lambda h: h.token), 1):
            granted = self.model.leases.get(lease.owner) or self.model.leases["~" + lease.owner]
            assert number <= granted.limit

    def check_refusal(self, answer):
        """The refusal tells the lease that ends first."""
        assert isinstance(answer, Conflict)
        first = min(held.expires for held in self.model.leases.values())
        assert answer.remaining == (first - self.model.now) * UNIT
        owners = {
            o.removeprefix("~") for o, held in self.model.leases.items() if held.expires == first
        }
        assert answer.owner in owners
        assert answer.holder == {"id": answer.owner}

    def live_waiters_before(self, owner):
        """Return those who wait and came before *owner*."""
        before = set()
        for waiter, place in self.model.line.items():
            if waiter == owner:
                break
            if place.deadline > self.model.now:
                before.add(waiter)
        return before


@pytest.fixture
def machine():
    server = LuaServer()
    return lambda: LockMachine(server)


@pytest.mark.timeout(600)  # seconds: a failure is first made small
def test_the_scripts_do_what_the_model_does(machine):
    """Whatever owners do, in whichever order, locks of all kinds do what the model does."""
    run_model(machine, examples=120, steps=50)


def test_a_renewal_that_comes_too_late_revives_nothing(machine):
    """A lease that ran out beside a live one stays ended, whatever its owner renews."""
    owners = machine()
    owners.choose("counted", all_fair=True)
    for slot, ttl in (0, 1), (1, 4):
        owners.ask(slot, ttl=ttl, mode=0, limit=1, place=0, fair=True, twice=False)
    owners.pass_time(1)
    owners.renew(0, ttl=3, twice=True)
    owners.teardown()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_scripts_do_what_the_model_does_for_long(machine):
    """So they do in longer and in many more interleavings."""
    run_model(machine, examples=1500, steps=80)

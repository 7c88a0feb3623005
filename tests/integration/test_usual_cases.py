"""The heads of acquire.lua and release.lua about waiters: they do what the rest of the script does.

Each case runs the whole script, and the script without its head, on the same state at the same
time.  A usual case must be answered by the head alone.
"""

from __future__ import annotations

import hashlib
import re

import pytest
import redis

from celery_dislock.scripts import ACQUIRE, RELEASE, Script
from celery_dislock.scripts.files import read_lua
from tests.integration import driven_clock
from tests.integration.driven_clock import START, STRETCH, clocked

LOCK = "dislock:{k}"
LINE, PLACES, HANDED = f"{LOCK}:line", f"{LOCK}:places", f"{LOCK}:handed"
NOW = START * 1000  # milliseconds
US = START * 1_000_000
TOKEN = US - 9_000_000
LIMIT = f"{LOCK}:limit"
PAUSED, FOR_TWO = {LIMIT: f"1 0 {NOW} by hand"}, {LIMIT: f"1 2 {NOW} "}
BEGINS = re.compile(r"^if #KEYS == 1\b|^local refusal = refuse.*", re.MULTILINE)


def wake(owner):
    return f"{LOCK}:wake:{owner}"


def lease(ends=30_000, *, token=TOKEN, mode="x", holder='{"id":"me"}'):
    return f"1 {NOW + ends} {token} {NOW - 9000} {mode} {holder}"


def place(ends=90_000, *, ttl=30_000, mode="x", limit=1, holder='{"id":"you"}'):
    return f"1 {NOW + ends} {ttl} {mode} {limit} {holder}"


def state(*, lock=None, places=(), **more):
    """Return keys and their content; *places* are in the order of the line, *more* replaces any."""
    found = {
        LOCK: {"me": lease()} if lock is None else lock,
        LINE: {owner: US - 1000 + number for number, (owner, _) in enumerate(places)},
        PLACES: {owner: wanted for owner, wanted in places if wanted},
    }
    return {key: value for key, value in (found | more.pop("keys", {})).items() if value}


ONE = [("a", place())]
TWO = [*ONE, ("b", place(holder="{}"))]
ENDED = "me", 0, "redis://here", "", 0

HAND_OFFS = {
    "one waits": state(places=ONE),
    "two wait": state(places=TWO),
    "three wait, the last a parked task": state(places=[*TWO, ("t:0:0#", None)]),
    "was handed over itself": state(
        lock={"me": lease(4000)}, places=TWO, keys={wake("me"): ["1 5000 90000"]}
    ),
    "lasts as long as a reservation": state(
        lock={"me": lease(5000)}, places=TWO, keys={wake("me"): ["1 5000 90000"]}
    ),
    "lasts longer than that": state(lock={"me": lease(5001)}, places=ONE),
    "ends now": state(lock={"me": lease(1)}, places=ONE),
    "was handed over, and nobody waits": state(
        lock={"me": lease(4000)}, keys={wake("me"): ["1 5000 90000"]}
    ),
    "old news": state(places=TWO, keys={wake("a"): [""], wake("b"): [""]}),
    "shared until now": state(lock={"me": lease(mode="s")}, places=TWO),
    "a short lease": state(places=[("a", place(ttl=2000))]),
    "a clock that was set back": state(lock={"me": lease(token=US + 9_000_000)}, places=TWO),
    "a token of this moment": state(lock={"me": lease(token=US + 1)}, places=TWO),
    "a name that is a pattern": state(places=[("%d+", place(holder="{%s}"))]),
}

OTHER_RELEASES = {
    "two leases": state(lock={"me": lease(), "you": lease()}, places=TWO),
    "another's lease": state(lock={"you": lease()}, places=TWO),
    "a lease that has ended": state(lock={"me": lease(0)}, places=TWO),
    "nobody's lock": state(lock={}, places=TWO),
    "in line itself": state(lock={"you": lease()}, places=[("me", place()), *TWO]),
    "its own lease, and in line": state(places=[("me", place()), *ONE]),
    "a record of another format": state(lock={"me": "2 0 0"}, places=TWO),
    "a record cut short": state(lock={"me": lease().partition("x")[0]}, places=TWO),
    "the first is dead": state(places=[("a", place(0)), ("b", place())]),
    "the second is dead": state(places=[("a", place()), ("b", place(0)), ("c", place())]),
    "the first has no place": state(places=[("a", None), ("b", place())]),
    "the second has no place": state(places=[("a", place()), ("b", None)]),
    "the first shares": state(places=[("a", place(mode="s"))]),
    "two share": state(places=[("a", place(mode="s")), ("b", place(mode="s"))]),
    "the second shares": state(places=[("a", place()), ("b", place(mode="s"))]),
    "two may have it": state(places=[("a", place(limit=2)), ("b", place(limit=2))]),
    "the second would share with one": state(places=[("a", place()), ("b", place(limit=2))]),
    "the first is a parked task": state(places=[("t:0:0#", None), *TWO]),
    "the second is a parked task": state(places=[*ONE, ("t:0:0#", None)]),
    "a turn that has run out": state(places=TWO, keys={HANDED: {"t:0:0": NOW - 1}}),
    "a turn that goes on": state(places=TWO, keys={HANDED: {"t:0:0": NOW + 9000}}),
    "turns and no line": state(keys={HANDED: {"t:0:0": NOW - 1}}),
    "paused, and one waits": state(places=ONE, keys=PAUSED),
    "paused, and two wait": state(places=TWO, keys=PAUSED),
    "paused": state(keys=PAUSED),
    "for two now": state(places=TWO, keys=FOR_TWO),
    "a limit of another format": state(places=TWO, keys={LIMIT: "2 0"}),
    "a limit of another type": state(places=TWO, keys={LIMIT: ["a"]}),
    "no line": state(),
    "no line, and a lease that has ended": state(lock={"me": lease(0)}),
    "a line of another type": state(keys={LINE: ["a"]}),
    "places of another type": state(keys={LINE: {"a": 1}, PLACES: ["a"]}),
    "news of another type": state(places=TWO, keys={wake("a"): {"x": "y"}}),
}

RELEASES = {
    "for a ticket": ("me", 0, "redis://here", "t:0:0", 0),
    "not yet": ("me", 20_000, "redis://here", "", 0),
    "of old workers": ("me", 0),
}


class Server:
    """A server whose clock stands, and what a script makes of a state there."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def run(self, script, keys, arguments, before):
        """Return the reply, and every key with its content and the seconds that it lives."""
        driven_clock.start(self._client)
        for key, content in before.items():
            if isinstance(content, str):
                self._client.set(key, content)
            elif isinstance(content, list):
                self._client.rpush(key, *content)
            elif isinstance(next(iter(content.values())), int):
                self._client.zadd(key, content)
            else:
                self._client.hset(key, mapping=content)
            self._client.pexpire(key, 30_000 * STRETCH)
        script = clocked(script)
        try:
            reply = self._client.eval(script.text, len(keys), *keys, *arguments)
        except redis.ResponseError as exc:
            reply = re.sub(r"script: \w+|user_script:\d+|f_\w+", "", str(exc))
        return reply, {key: self._content(key) for key in driven_clock.keys(self._client)}

    def _content(self, key):
        read = {
            "hash": lambda: self._client.hgetall(key),
            "zset": lambda: self._client.zrange(key, 0, -1, withscores=True),
            "list": lambda: self._client.lrange(key, 0, -1),
            "string": lambda: self._client.get(key),
        }
        lives = round(self._client.pttl(key) / STRETCH / 10)
        return read[self._client.type(key)](), lives


@pytest.fixture
def server(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield Server(client)


def made(text):
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def without_head(script):
    off = {"if #KEYS == 1": "if false"}
    text, heads = BEGINS.subn(lambda found: off.get(found[0], "local refusal"), script.text)
    assert heads
    return made(text)


def head_of(script):
    """Return the script up to where all is included."""
    text = script.text[: script.text.index(read_lua("_lease"))]
    return made(text + "return redis.error_reply('not the usual case')")


def check(server, script, arguments, before, *, keys=(LOCK,), usual=None):
    expected = server.run(without_head(script), keys, arguments, before)
    assert server.run(script, keys, arguments, before) == expected
    if usual is not None:
        answered = server.run(head_of(script), keys, arguments, before)
        assert (answered == expected) is usual


@pytest.mark.parametrize("case", HAND_OFFS)
def test_the_usual_hand_off_is_that_of_the_rest(server, case):
    """The first waiter has the lease and is told so, and the next one learns that it leads."""
    check(server, RELEASE, ENDED, HAND_OFFS[case], usual=True)


@pytest.mark.parametrize("case", OTHER_RELEASES)
def test_another_release_is_left_to_the_rest(server, case):
    """Where somebody else might have the lock too, or nobody, the head changes nothing."""
    check(server, RELEASE, ENDED, OTHER_RELEASES[case])


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize("case", ["one waits", "two wait"])
def test_a_release_on_other_terms_is_that_of_the_rest(server, case, how):
    """A ticket is ended, and a lease that runs out goes on, while others wait."""
    running = {f"{LOCK}:running": {"t:0:0": f"1 {US} {NOW} 0"}}
    check(server, RELEASE, RELEASES[how], HAND_OFFS[case] | running)


def test_several_locks_are_released_by_the_rest(server):
    """Each is handed on."""
    other = LOCK.replace("k", "k2")
    before = state(places=TWO) | {other: {"me": lease()}}
    check(server, RELEASE, ENDED, before, keys=[LOCK, other])


REFUSALS = {
    "nobody waits": state(lock={"you": lease()}),
    "one waits": state(lock={"you": lease()}, places=ONE),
    "two wait": state(lock={"you": lease()}, places=TWO),
    "it waits": state(lock={"you": lease()}, places=[("me", place(50_000)), *TWO]),
    "it waits behind one": state(lock={"you": lease()}, places=[*ONE, ("me", place(50_000))]),
    "the last joined in the future": state(
        lock={"you": lease()}, places=ONE, keys={LINE: {"a": US + 10**9}}
    ),
    "shared by one": state(lock={"you": lease(mode="s")}, places=ONE),
    "a lease that runs out": state(lock={"~you": lease(900)}, places=ONE),
}

OTHER_ACQUISITIONS = {
    "two leases": state(lock={"you": lease(9000, mode="s"), "her": lease(mode="s")}),
    "one that is shared": state(lock={"you": lease(mode="s")}),
    "its own": state(lock={"me": lease()}, places=ONE),
    "one that has ended": state(lock={"you": lease(0)}, places=ONE),
    "a record of another format": state(lock={"you": "2 0 0"}),
    "a record cut short": state(lock={"you": lease().partition("x")[0]}),
    "nobody has it": state(lock={}, places=TWO),
    "paused": state(lock={"you": lease()}, keys=PAUSED),
    "paused, and two wait": state(lock={"you": lease()}, places=TWO, keys=PAUSED),
    "paused, and nobody has it": state(lock={}, keys=PAUSED),
    "for two now": state(lock={"you": lease()}, keys=FOR_TWO),
    "for two now, and one waits": state(lock={"you": lease()}, places=ONE, keys=FOR_TWO),
    "a limit of another format": state(lock={"you": lease()}, keys={LIMIT: "2 0"}),
    "a limit of another type": state(lock={"you": lease()}, keys={LIMIT: ["a"]}),
    "its place is over": state(lock={"you": lease()}, places=[("me", place(0)), *TWO]),
    "the first is dead": state(lock={"you": lease()}, places=[("a", place(0)), ("b", place())]),
    "the first has no place": state(lock={"you": lease()}, places=[("a", None), ("b", place())]),
    "the first shares": state(lock={"you": lease(mode="s")}, places=[("a", place(mode="s"))]),
    "the first takes one of two": state(lock={"you": lease()}, places=[("a", place(limit=2))]),
    "the first is a parked task": state(lock={"you": lease()}, places=[("t:0:0#", None)]),
    "a line of another type": state(lock={"you": lease()}, keys={LINE: ["a"]}),
    "a lock of another type": state(keys={LOCK: ["a"]}),
}

WAITS = "me", 30_000, '{"id":"me"}', "x", 1, 90_000, 1
ASKS = "me", 30_000, '{"id":"me"}', "x", 1, 0, 1
TERMS = {
    "waits": WAITS,
    "asks": ASKS,
    "waits for short": (*WAITS[:5], 9000, 1),
    "passes the line": (*WAITS[:6], 0),
}
OTHER_TERMS = {
    "shares": (*WAITS[:3], "s", *WAITS[4:]),
    "one of two": (*WAITS[:4], 2, *WAITS[5:]),
}


@pytest.mark.parametrize("how", TERMS)
@pytest.mark.parametrize("case", REFUSALS)
def test_the_usual_refusal_is_that_of_the_rest(server, case, how):
    """The lease in the way is described, and who waits joins the line or keeps its place there."""
    check(server, ACQUIRE, TERMS[how], REFUSALS[case], usual=True)


@pytest.mark.parametrize("how", {**TERMS, **OTHER_TERMS})
@pytest.mark.parametrize("case", {**REFUSALS, **OTHER_ACQUISITIONS})
def test_another_acquisition_is_left_to_the_rest(server, case, how):
    """Where the lock admits the asker or the first in line, the head changes nothing."""
    terms, before = {**TERMS, **OTHER_TERMS}[how], {**REFUSALS, **OTHER_ACQUISITIONS}[case]
    check(server, ACQUIRE, terms, before)


def test_several_locks_are_refused_by_the_rest(server):
    """The first is free, and kept in case the asker waits for the second."""
    other = LOCK.replace("k", "k2")
    before = state(places=ONE, lock={"you": lease()})
    for keys in ([LOCK, other], [other, LOCK]):
        check(server, ACQUIRE, ASKS, before, keys=keys)
        check(server, ACQUIRE, WAITS, before, keys=keys)

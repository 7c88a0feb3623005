"""The heads of acquire.lua, park.lua and release.lua do what the rest of each script does.

Each case runs the whole script, and the script without its head, on the same state at the same
time.  A usual case must be answered by the head alone.
"""

import hashlib

import pytest
from lupa.lua51 import LuaError

from celery_dislock.scripts import ACQUIRE, PARK, RELEASE, Script
from tests.integration.lua_server import START, LuaServer

LOCK = "dislock:{k}"
LINE, PLACES, HANDED = f"{LOCK}:line", f"{LOCK}:places", f"{LOCK}:handed"
NOW = START * 1000  # milliseconds
US = START * 1_000_000
TOKEN = US - 9_000_000
LIMIT, STARTS = f"{LOCK}:limit", f"{LOCK}:starts"
HELD_BACK = {LIMIT: f"2 back - {NOW} {NOW + 9000} by hand"}
PAUSED, FOR_TWO = {LIMIT: f"1 0 {NOW} by hand"}, {LIMIT: f"1 2 {NOW} "}
HEAD = "#KEYS == 1 and "


def wake(owner):
    return f"{LOCK}:wake:{owner}"


def lease(ends=30_000, *, token=TOKEN, mode="x", holder='{"id":"me"}'):
    return f"1 {NOW + ends} {token} {NOW - 9000} {mode} {holder}"


def place(ends=90_000, *, ttl=30_000, mode="x", limit=1, holder='{"id":"you"}'):
    return f"1 {NOW + ends} {ttl} {mode}:{limit} {holder}"


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
    "paused, and nobody's lock": state(lock={}, keys=PAUSED),
    "for two now": state(places=TWO, keys=FOR_TWO),
    "a limit of another format": state(places=TWO, keys={LIMIT: "2 0"}),
    "a limit of another type": state(places=TWO, keys={LIMIT: ["a"]}),
    "held back, and one waits": state(places=ONE, keys=HELD_BACK),
    "held back, and two wait": state(places=TWO, keys=HELD_BACK),
    "held back, and nobody waits": state(keys=HELD_BACK),
    "the first has a rate": state(places=[("a", place(limit="1:1/60000"))]),
    "the first comes too early": state(
        places=[("a", place(limit="1:1/60000")), *TWO], keys={STARTS: [f"{US - 9}", "1 1 60000"]}
    ),
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


def run(script, keys, arguments, before):
    """Return the reply, and every key with its content and the seconds that it lives."""
    server = LuaServer()
    for key, content in before.items():
        if isinstance(content, str):
            server.send("SET", key, content)
        elif isinstance(content, list):
            server.send("RPUSH", key, *content)
        else:
            for name, value in content.items():
                given = (value, name) if isinstance(value, int) else (name, value)
                server.send("ZADD" if isinstance(value, int) else "HSET", key, *given)
        server.send("PEXPIRE", key, 30_000)
    try:
        reply = server.run(script, keys, *arguments)
    except LuaError as exc:
        reply = str(exc).partition("\n")[0].rpartition("]:")[2].partition(": ")[2]
    lives = {key: round(ttl / 10) for key, ttl in server.ttls().items()}
    return reply, server.contents(), lives


def made(text):
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def without_head(script):
    assert script.text.count(HEAD) == 1
    return made(script.text.replace(HEAD, "false and "))


def head(script):
    """Return the script up to where the rest is included."""
    text = script.text[: script.text.index("-- _lease.lua: ")]
    return made(text + "return redis.error_reply('not the usual case')")


def check(arguments, before, *, keys=(LOCK,), usual=None, script=RELEASE):
    expected = run(without_head(script), keys, arguments, before)
    assert run(script, keys, arguments, before) == expected
    if usual is not None:
        answered = run(head(script), keys, arguments, before)
        assert (answered == expected) is usual


@pytest.mark.parametrize("case", HAND_OFFS)
def test_the_usual_hand_off_is_that_of_the_rest(case):
    """The first waiter has the lease and is told so, and the next one learns that it leads."""
    check(ENDED, HAND_OFFS[case], usual=True)


@pytest.mark.parametrize("case", OTHER_RELEASES)
def test_another_release_is_left_to_the_rest(case):
    """Where somebody else might have the lock too, or nobody, the head changes nothing."""
    check(ENDED, OTHER_RELEASES[case])


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize("case", ["one waits", "two wait"])
def test_a_release_on_other_terms_is_that_of_the_rest(case, how):
    """A ticket is ended, and a lease that runs out goes on, while others wait."""
    running = {f"{LOCK}:running": {"t:0:0": f"1 {US} {NOW} 0 x:1"}}
    check(RELEASES[how], HAND_OFFS[case] | running)


def test_several_locks_are_released_by_the_rest():
    """Each is handed on."""
    other = LOCK.replace("k", "k2")
    before = state(places=TWO) | {other: {"me": lease()}}
    check(ENDED, before, keys=[LOCK, other])


def test_a_hand_off_costs_the_same_however_many_wait():
    """A release runs as many commands with twenty waiters as with two."""

    def cost(waiters):
        server = LuaServer()
        store = server.store()
        for number in range(waiters + 1):
            store.acquire([LOCK], f"w{number}", 30.0, "{}", place=90.0)
        assert store.release([LOCK], "w0")
        return len(server.called())

    assert cost(2) == cost(20)


TERMS = ["x:1", "x:5", "s:1", "x:1:2/60000", "s:3:1/1000"]
FREE = {
    "new": {},
    "started a while ago": {STARTS: [f"{US - 61_000_000}", "1 2 60000"]},
    "its wake list is left": {wake("me"): ["1 5000 90000"]},
    "places are left": {PLACES: {"you": place()}},
}
NOT_FREE = {
    "held": state(lock={"you": lease()}),
    "shared": state(lock={"you": lease(mode="s")}),
    "its own": state(),
    "its lease has ended": state(lock={"me": lease(0)}),
    "another's lease has ended": state(lock={"you": lease(0)}),
    "a later token": state(lock={"you": lease(0, token=US + 9_000_000)}),
    "a lease of another format": state(lock={"you": "2 0 0"}),
    "a line": state(lock={}, places=ONE),
    "a line of the dead": state(lock={}, places=[("a", place(0))]),
    "a line of another type": {LINE: ["a"]},
    "turns": {HANDED: {"t:0:0": NOW + 9000}},
    "turns that have run out": {HANDED: {"t:0:0": NOW - 1}},
    "paused": PAUSED,
    "for two": FOR_TWO,
    "held back": HELD_BACK,
    "a rate by hand": {LIMIT: f"2 rate 3/60000 {NOW} 0 "},
    "a limit of another type": {LIMIT: ["a"]},
}
TOO_EARLY = {
    "twice in the window": {STARTS: [f"{US - 9}", f"{US - 99}", "1 2 60000"]},
    "starts in the future": {STARTS: [f"{US + 9}", "1 2 60000"]},
    "starts that cannot be read": {STARTS: ["a", "b"]},
}


def acquiring(terms):
    return "me", 30_000, '{"id":"me"}', terms, 0, 1


def parking(terms, *, marked="0", message="", sent=""):
    who = ("me", 30_000, '{"id":"me"}', terms, "redis://here", "t:0:0")
    return (*who, marked, message, 0, 0, "skip", '"task":"t"', 1, sent, "dislock:lines:here", "0")


ASKED = {ACQUIRE: acquiring, PARK: parking}
ACQUISITIONS = pytest.mark.parametrize("script", ASKED, ids=["acquire", "park"])


@ACQUISITIONS
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("case", FREE)
def test_a_free_lock_is_granted_as_by_the_rest(script, case, terms):
    """Whatever is left of those who had it."""
    check(ASKED[script](terms), FREE[case], script=script, usual=True)


@ACQUISITIONS
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("case", NOT_FREE | TOO_EARLY)
def test_another_acquisition_is_left_to_the_rest(script, case, terms):
    """Where the lock may be refused, or its state must be read, the head changes nothing."""
    check(ASKED[script](terms), (NOT_FREE | TOO_EARLY)[case], script=script)


@pytest.mark.parametrize(
    "before",
    [
        {f"{LOCK}:done:t:0:0": "1"},
        {f"{LOCK}:done:me": "1"},
        {f"{LOCK}:running": {"t:0:0": f"1 {US} {NOW} 0 x:1"}},
        {f"{LOCK}:running": {"u:0:0": f"1 {US} {NOW} 0 x:1"}},
        {f"{LOCK}:tickets": {"t:0:0": "a"}},
    ],
    ids=["done", "refused before", "ran", "another runs", "damaged"],
)
@pytest.mark.parametrize("how", [{}, {"marked": "1"}, {"message": "{}"}, {"sent": f"{US}"}])
def test_a_task_that_is_known_is_left_to_the_rest(before, how):
    """And so is one that was parked, brings its message, or supersedes others."""
    check(parking("x:1", **how), before, script=PARK)
    check(parking("x:1", **how), {}, script=PARK)

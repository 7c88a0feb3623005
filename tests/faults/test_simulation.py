"""The simulation of scripts and clients: it finds nothing, but for what is broken on purpose."""

import math
from collections import Counter
from itertools import islice

import pytest

from celery_dislock import scripts
from celery_dislock.locks import lease
from celery_dislock.messages import unrun
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.publisher import Publisher
from celery_dislock.scripts import Script as Lua
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.reservations import Reservation
from celery_dislock.tasks import conflicts, guard
from celery_dislock.worker.stalled import StalledKeeper
from proof import simulation
from proof.__main__ import is_caught_simulated
from proof.controls import CONTROLS, SIMULATION
from proof.simulated import Net
from proof.simulation import STEPS, Script, outcomes, run, run_messages, simulate
from tests.faults.breaks import BROKEN
from tests.integration.lua_server import LuaServer
from tests.integration.parked import LOCK, TURN, Broker

HISTORIES = 60
RARE = {  # each takes many histories to be found
    "a renewal revives",
    "no done-mark of a release",
    "bytes are counted wrong",
    "turns do not get longer",
    "a copy runs beside",
    "who ran comes last",
    "a replaced one is not told",
    "a message of another",
    "an older one may run after the newest",
    "only who waits counts",
    "the youngest is told to end",
    "who has its turn keeps it beside the newest",
    "what was dropped is the newest for ever",
    "a sweep tells nobody to end",
    "a line is longer than it may be",
    "a task may run again when it is done",
    "a turn that ran out goes to the end",
    "a turn that ran out is forgotten",
    "an older task begins after the newest",
    "no holder ends for a newer task",
    "nobody renews for a process that stands still",
    "the line of a later lock is passed",
    "a rate that is set forgets the code's window",
    "starts in the future stay there",
    "starts in the future are forgotten",
    "what was not spent is taken back twice",
    "a_death_that_ends_no_lease",
    "an_older_task_that_begins_after_the_newest",
}
SHRINK_STEPS = 25_000  # to be taken: enough for half of a history
FOUND_WITHIN = 400  # histories
SECONDS = 300.0  # until a script that is broken must have been found; each takes a few


def test_histories():
    """Whatever goes wrong, the clients' locks do what the guarantees say."""
    net = Net()
    for seed in range(HISTORIES):
        outcome = run(net, f"test {seed}")
        assert not outcome.broken, (outcome.kind, Script(f"test {seed}", outcome.steps))


@pytest.mark.parametrize("loses", [False, True], ids=["state is kept", "state is lost"])
def test_histories_of_messages(loses):
    """What is sent twice, late or lost, and who is killed, for one key that is unique."""
    net, seen = Net(), Counter()
    for seed in range(HISTORIES):
        outcome = run_messages(net, f"{seed}", loses=loses, counts=seen)
        assert not outcome.broken, (seed, outcome)
    often = "replaced,sooner,duplicate,late,killed,hours,an id again,retried,redelivered,revoked"
    for what in (*often.split(","), "later", "ran without locks"):
        assert seen[what] > 10, f"{what} has hardly been seen: {seen}"


def test_a_history_can_be_replayed():
    """The same steps of the same seed do the same, word by word."""
    told = [], []
    steps = run(Net(), "again", tells=told[0].append).steps
    run(Net(), "again", steps, tells=told[1].append)
    assert told[0] == told[1]
    assert len(told[0]) > 100


CLIENTS = {  # what replaces which method of the client
    "a task that is put off is not sent again": (unrun, "_send_again", lambda _, delay, __: delay),
    "a lease is trusted for ever": (lease, "trust_in", lambda _: 1e6),
    "nobody renews for a process that stands still": (StalledKeeper, "look", lambda *_: None),
    "a task that is cancelled fails": (guard, "was_cancelled", lambda *_: False),
    "a message that is replaced runs": (conflicts, "end_replaced", lambda *_: None),
}


def named(what, *how):
    """A parameter, in the usual tests if it is soon found."""
    return pytest.param(*how, id=what, marks=pytest.mark.slow if what in RARE else ())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("where", "name", "broken"), [named(one, *how) for one, how in CLIENTS.items()]
)
def test_a_client_that_is_broken_is_caught(where, name, broken, monkeypatch):
    """The client is the package's own, so what breaks a promise in it is found, too."""
    monkeypatch.setattr(where, name, broken)
    monkeypatch.setattr(simulation, "SHRINK_STEPS", 0)
    assert simulate(1, seconds=SECONDS, say=print) is not None


def test_what_is_to_be_broken_is_there():
    """A break of a text that no script has any more would break nothing."""
    texts = [one.text for one in vars(scripts).values() if isinstance(one, Lua)]
    assert [one for one, (text, _) in BROKEN.items() if not any(text in its for its in texts)] == []


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("text", "broken"), [named(one, *how) for one, how in BROKEN.items()])
def test_what_is_broken_is_caught(text, broken):
    """A script that breaks a promise is found within some histories, by the same seed each time."""
    net = Net(lambda script: script.replace(text, broken))
    found = outcomes(net, 1, math.inf, print, Counter())
    assert any(outcome.broken for _, outcome in islice(found, FOUND_WITHIN))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["one more is let in", "a turn that ran out is forgotten"])
def test_what_is_found_can_be_read_and_replayed(what, tmp_path, monkeypatch):
    """The history that shows a break is made short, and breaks the promise again."""
    monkeypatch.setattr(simulation, "SHRINK_STEPS", SHRINK_STEPS)

    def change(script):
        return script.replace(*BROKEN[what])

    found = simulate(2, seconds=SECONDS, say=print, changed=change)
    assert found is not None
    assert len(found.steps) < STEPS / 2
    file = tmp_path / "history.json"
    file.write_text(str(found))
    again = Script.read(file)
    assert again == found
    assert run(Net(change), again.seed, again.steps).broken
    assert not again.replay()


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [named(name, name) for name, one in CONTROLS.items() if SIMULATION in one.shown_in]
)
def test_a_duration_that_is_broken_is_caught(name):
    """How long a lease lasts is judged, and so is who has some of several locks."""
    assert is_caught_simulated(name, minutes=SECONDS / 60, seed=4)  # by which each is soon


def test_a_history_that_takes_long_breaks_no_promise(monkeypatch):
    """One that is given up while things still end is told apart from one that does not end."""
    monkeypatch.setattr(simulation, "ROUNDS_MOST", 3)
    counts, said = Counter(), []
    assert simulate(1, seconds=1.0, say=said.append, counts=counts) is None
    assert counts["stopped"] > 0
    assert sum("ran out of rounds" in line for line in said) == counts["stopped"]


@pytest.mark.extra
def test_a_history_that_does_not_end_breaks_a_promise(monkeypatch):
    """What waits for ever is found, however many rounds a history may take."""
    monkeypatch.setattr(Publisher, "hand_over", lambda *_: None)
    monkeypatch.setattr(simulation, "SHRINK_STEPS", 0)
    found = simulate(1, seconds=SECONDS, say=(said := []).append)
    assert found is not None
    assert "it does not end" in said[-1]


def test_a_request_that_comes_late_claims_no_turn():
    """A task is not lost if its first request arrives after its second, when it is parked."""
    server = LuaServer()
    broker = Broker(server)
    broker.ask("before", ttl=TURN)
    broker.park("task")
    server.advance(TURN + 1)  # that lease is over, and nobody has swept yet
    assert not isinstance(broker.park("task"), Granted), "granted to a delivery that is over"
    given = broker.given()
    server.advance(TURN + 1)
    broker.sweep()
    assert "task" in given + broker.given()


def test_a_delivery_that_is_over_claims_no_turn_late():
    """A task is not lost if a request of a turn's message arrives after that was acknowledged."""
    server = LuaServer()
    broker = Broker(server)
    broker.ask("before")
    broker.park("task")
    broker.end("before")
    assert broker.given() == ["task"]
    broker.store.override(LOCK, ttl=2 * TURN, limit=0)
    server.advance(TURN + 1)  # its turn is over, and the lock is paused
    assert isinstance(broker.park("task", copy=2, marked=True), Parked)
    server.advance(2 * TURN)  # it is paused no more, and nobody has swept yet
    assert not isinstance(broker.park("task", copy=2, marked=True), Granted)
    given = broker.given()
    server.advance(2 * TURN)
    broker.sweep()
    assert "task" in given + broker.given()


def test_a_request_that_comes_late_reserves_a_key_for_a_while():
    """A task has ended, and a request for its reservation arrives: that ends by itself."""
    server = LuaServer()
    reservations = server.store().reservations
    asked = Reservation(LOCK, "task", "end", ttl=10.0)
    found = reservations.reserve(asked, "nonce")
    mine = asked._replace(ttl=60.0, mark=found.mark, number=found.number)
    for request in (reservations.confirm, reservations.begin, reservations.end):
        request(mine)
    assert not server.ttls()
    reservations.begin(mine)
    assert list(server.ttls().values()) == [60_000]

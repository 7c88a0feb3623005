"""A lock server that has lost data: who notices it, what is told, and what is taken for no loss."""

import logging

import pytest

from celery_dislock.parking import sweep as module
from celery_dislock.parking.epoch import Epoch
from celery_dislock.parking.process import runtime_of
from celery_dislock.scripts import EPOCH
from celery_dislock.scripts.names import epoch_of
from tests.driven import Shop
from tests.holding import name_of

EVERY = 10.0  # seconds
PARKED_FOR = 3600.0


class Fleet:
    """
    Two workers that sweep in turns, and a third one whose tasks do not park.

    Attributes:
        first: The one that has the lease; then the one that stands by, and the third.
    """

    def __init__(self, shop, caplog):
        self._shop, self._caplog = shop, caplog
        self.first, self.second = (self.start(name) for name in ("w1@here", "w2@here"))
        self.third = self.start("w3@here", looks_first=True)
        self._task = shop.declare()

    def start(self, name, **options):
        """Start another worker."""
        return self._shop.sweeper(name, clock=self._shop.clock, **options)

    def park(self, *ids):
        """Park tasks behind a holder that stays."""
        self._shop.other.ask("holder", ttl=PARKED_FOR)
        for task_id in ids:
            self._shop.run(self._task, task_id)

    def step(self, *workers):
        """Let these look, or all; return what they log about a loss."""
        self._caplog.clear()
        for one in workers or (self.first, self.second, self.third):
            one.step()
            assert "failed" not in self._caplog.text
        self._shop.server.advance(EVERY)
        return [one.getMessage() for one in self._caplog.records if one.levelno == logging.ERROR]

    @property
    def loss(self):
        """What doctor reads."""
        return epoch(self._shop).last_loss()


def epoch(shop):
    """Return what a worker that starts now knows of the server."""
    return Epoch(shop.server, "dislock", shop.broker)


@pytest.fixture
def fleet(shop, caplog):
    return Fleet(shop, caplog)


@pytest.mark.parametrize("notices", ["first", "second", "third"])
def test_a_server_that_was_emptied_is_told_of_by_one_worker(shop, fleet, notices):
    """By who looks first: the sweeper, one that stands by, or one whose tasks do not park."""
    fleet.park("1", "2")
    assert fleet.step() == fleet.step() == []
    shop.server.lose()
    [told] = fleet.step(getattr(fleet, notices))
    assert "came back without its data. Tasks that were parked at the last sweep before: 2" in told
    assert "before: 2; now: 0. Tasks whose result says PARKED" in told
    assert fleet.loss[:3] == ("without its data", 2, 0)
    fleet.park("3")
    assert fleet.step() == fleet.step() == []
    assert fleet.loss[:3] == ("without its data", 2, 0)
    assert fleet.loss.ago == pytest.approx(3 * EVERY, abs=0.1)
    shop.server.lose()  # another loss has its own numbers
    [told] = fleet.step()
    assert "without its data. " in told
    assert "before: 1; now: 0. " in told
    assert fleet.loss[:3] == ("without its data", 1, 0)


@pytest.mark.parametrize("notices", ["first", "second", "third", "all"])
def test_a_replica_that_was_behind_is_told_of(shop, fleet, notices):
    """Its record is older than what the workers remember, also if its clock was set back."""
    fleet.park("1")
    fleet.step()
    if notices == "all":  # what the record says of the time of its sweep only grows
        shop.server.stall(-600)
        fleet.step()
    shop.server.replicate()
    fleet.park("2", "3")
    fleet.step()
    shop.server.fail_over()
    [told] = fleet.step(*(() if notices == "all" else [getattr(fleet, notices)]))
    assert "came back with older data. " in told
    assert "before: 3; now: 1. " in told
    assert fleet.step() == []
    assert fleet.loss[:3] == ("with older data", 3, 1)


@pytest.mark.parametrize("kind", ["up to date", "restarted", "away", "set back", "moved"])
def test_what_is_no_loss(shop, fleet, kind):
    """A failover without a lag, an outage, a clock set back, workers at another server."""
    fleet.park("1", "2")
    assert fleet.step() == []
    if kind == "up to date":
        shop.server.replicate()
        shop.server.fail_over()
    elif kind == "restarted":
        fleet.first.end()
        fleet.first = fleet.start("w1@here")
    elif kind == "away":
        shop.server.away = True
        fleet.first.step()
        shop.server.advance(10 * EVERY)
        shop.server.away = False
    elif kind == "set back":
        shop.server.stall(-600)
    else:
        shop.server.lose()
        fleet.first, fleet.second = fleet.start("w1@here"), fleet.start("w2@here")
        fleet.third = fleet.start("w3@here", looks_first=True)
    for _ in range(3):
        assert fleet.step() == []
    assert fleet.loss is None


@pytest.mark.parametrize("data", ["other", "older"])
def test_who_knows_of_nothing_hides_no_loss(shop, fleet, data):
    """A worker that starts after the loss, and sweeps first, looks before it writes."""
    fleet.park("1")
    fleet.step()
    shop.server.replicate()
    fleet.park("2")
    fleet.step()
    if data == "other":
        shop.server.lose()
    else:
        shop.server.fail_over()
        shop.server.advance(3 * EVERY)  # no lease of a sweeper is left
    assert fleet.step(fleet.start("w4@here")) == []
    [told] = fleet.step(fleet.second)
    assert f"came back with {data} data. " in told
    assert f"before: 2; now: {int(data == 'older')}. " in told


def test_a_worker_whose_reply_was_lost_tells_it(shop, fleet):
    """The call is sent again, and finds what the first one wrote."""
    fleet.park("1")
    fleet.step()
    shop.server.lose()
    run = shop.server.run

    def twice(script, keys, *arguments):
        if script is EPOCH:
            run(script, keys, *arguments)
        return run(script, keys, *arguments)

    shop.server.run = twice
    assert len(fleet.step()) == 1


@pytest.mark.parametrize("record", ["", "1 x", "list"])
def test_a_damaged_record_is_no_loss_and_stops_no_sweep(shop, fleet, record):
    """It is written anew, whatever its type."""
    fleet.park("1")
    fleet.step()
    name = epoch_of("dislock", shop.broker)
    shop.server.send("DEL", name)
    shop.server.send(*(("RPUSH", name, "x") if record == "list" else ("SET", name, record)))
    assert fleet.step() == fleet.step() == []
    shop.server.lose()
    assert "before: 1; now: 0. " in fleet.step()[0]


def test_a_round_of_several_steps_is_counted_whole(shop, fleet, monkeypatch):
    """A loss in the middle of a round is told with the number of the round before."""
    monkeypatch.setattr(module, "PAGE", 1)
    for key in "abc":
        task = shop.declare(lock_key=key, name=f"shop.{key}")
        shop.other.store.acquire([name_of(key)], "holder", PARKED_FOR, "{}")
        shop.run(task, key)
    sweep = fleet.start("w1@here")
    until = shop.clock() + EVERY
    while shop.clock() < until - 1e-3:
        shop.server.advance(sweep.step())
    fleet.step(sweep)
    shop.server.lose()
    told = [line for _ in range(5) for line in fleet.step(sweep)]
    assert len(told) == 1
    assert "before: 3; now: " in told[0]


def test_the_record_lives_as_long_as_lines_do(shop, fleet):
    """Each look keeps it, so that it does not end while a worker remembers it."""
    fleet.park("1")
    fleet.step()
    name = epoch_of("dislock", shop.broker)
    shop.server.advance(20 * 86400)
    epoch(shop).look()
    assert shop.server.ttls()[name] == 30 * 86400 * 1000


def test_a_server_without_memory_keeps_the_record(own_redis_server):
    """The sweep goes on there, so its record is written, too."""
    with Shop(url=own_redis_server.url) as shop, own_redis_server.client() as client:
        server = runtime_of(shop.app).process.store.lock_server
        known = Epoch(server, "dislock", shop.broker)
        assert known.look(1) is None
        client.config_set("maxmemory", 1)
        assert known.look(2) is None
        assert client.get(epoch_of("dislock", shop.broker)).split()[3] == b"2"

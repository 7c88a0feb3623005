"""Which task came last to a lock with "cancel", as the scripts keep it; the clock is driven."""

import pytest

from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.requests import Ending
from tests.integration.lua_server import LuaServer
from tests.integration.parked import LOCK, LONG, REPLACES, Line

HOUR = 3600  # seconds


@pytest.fixture
def line():
    return Line(LuaServer())


def sent_at(line, ago=0):
    return line.store.lock_server.now_us - ago * 1_000_000


def marked(line):
    """Return the leases, by whether a newer task waits for them to end."""
    holders = {one.owner: one.superseded for one in line.store.holders(LOCK)}
    return {owner for owner, by in holders.items() if by}


def test_what_only_runs_out_is_not_told_of_a_newer_task(line):
    """A lease whose owner is done with it, and a turn, are left alone: nobody runs under them."""
    line.ask("done", limit=3)
    line.ask("runs", limit=3)
    line.ask("other", limit=3)
    line.store.release([LOCK], "done@w:1/1", Ending(at_least=LONG))
    before = line.client.hgetall(LOCK)
    [over] = [owner for owner in before if owner.startswith(b"~")]
    line.park("new", sent=sent_at(line), bounds=REPLACES, limit=3)
    assert marked(line) == {"runs@w:1/1"}
    assert line.client.hget(LOCK, over) == before[over]


def test_an_older_task_that_comes_a_day_later_does_not_run(line):
    """Which task came last is known for a day: an older one may have been delayed by hours."""
    assert line.ask("new", sent=sent_at(line)) == "granted"
    line.end("new", ticket="")
    line.store.lock_server.advance(23 * HOUR)
    with pytest.raises(Replaced, match="new"):
        line.ask("old", sent=sent_at(line, ago=24 * HOUR))


def test_of_two_that_were_sent_at_one_time_the_id_decides(line):
    """Whichever comes first, neither cancels the other for ever: each worker says the same."""
    now = sent_at(line)
    for task in ("a", "b"):
        assert line.ask(task, sent=now) == "granted"
        line.end(task, ticket="")
    with pytest.raises(Replaced, match="b"):
        line.ask("a", 2, sent=now)

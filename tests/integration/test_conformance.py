"""The models of the scripts, on a Redis and on fakeredis, whose clock stands still here.

What Lua does in our own process, both do.  Where fakeredis differs stands in
docs/reference/test-server.md; the tests of single promises that run on both are marked BOTH.
"""

from __future__ import annotations

import pytest
import redis

from celery_dislock import Dislock, DislockError
from tests.conftest import BOTH
from tests.integration import driven_clock
from tests.integration.model_runs import run_model
from tests.integration.test_model import LockMachine
from tests.integration.test_parked_model import ParkedMachine
from tests.integration.test_unique_model import RedisWorld, run

pytestmark = BOTH


@pytest.fixture
def server(redis_url, monkeypatch):
    """A server whose clock a model drives."""
    driven_clock.drive(monkeypatch)
    server = driven_clock.DrivenServer(redis_url)
    yield server
    server.close()


def test_locks_do_what_the_model_does(server):
    """They are granted, handed on and ended as it says."""
    run_model(lambda: LockMachine(server), examples=8, steps=50)


def test_parked_tasks_do_what_the_model_does(server):
    """Each completes once, in its turn."""
    run_model(lambda: ParkedMachine(server), examples=5, steps=40)


def test_histories_of_unique_messages(redis_url, monkeypatch):
    """What is sent twice, late or lost, and who is killed."""
    driven_clock.drive(monkeypatch)
    world = RedisWorld(redis_url)
    world.raw = world.client()
    seen = run(world, range(6))
    world.close()
    assert seen["replaced"] > 5


class TestOfKnownDifferences:
    """What would have to be worked round no longer, if it fails with a newer fakeredis."""

    @pytest.fixture
    def client(self, redis_url):
        with redis.Redis.from_url(redis_url, decode_responses=True) as client:
            yield client

    def test_an_error_leaves_the_connection_open(self, client):
        """The scripts' first use is an error."""
        before = client.client_id()
        with pytest.raises(redis.exceptions.NoScriptError):
            client.evalsha("0" * 40, 0)
        assert client.client_id() == before

    def test_an_error_of_a_script_is_a_reply(self, client):
        """And not a breach of the protocol."""
        with pytest.raises(redis.ResponseError):
            client.eval("return nil + 1", 0)
        assert client.ping()

    def test_an_error_of_a_script_has_no_traceback(self, client):
        """What an error message shows is what the script says."""
        with pytest.raises(redis.ResponseError) as told:
            client.eval("local function f() error('wrong') end f()", 0)
        assert "traceback" not in str(told.value)

    def test_a_key_of_another_type_is_no_lock(self, client, redis_url):
        """It is refused, though fakeredis has another error for it."""
        client.set("dislock:{k}", "by hand", ex=60)
        with Dislock.from_url(redis_url) as dislock, pytest.raises(DislockError):
            dislock.lock("k").try_acquire()

    def test_a_server_says_what_it_is(self, client):
        """Before a worker starts with --dislock."""
        assert client.info()["role"] == "master"

"""The simulation's requests, on a Redis and on fakeredis, whose clock stands still here.

What Lua does in our own process, both do: they give the same replies.  Where
fakeredis differs stands in docs/reference/test-server.md; the tests of single promises that run on
both are marked BOTH.
"""

from json import dumps, loads

import pytest
import redis

from celery_dislock import Dislock, DislockError
from proof import simulation
from proof.simulated import Net
from tests.conftest import BOTH
from tests.integration import driven_clock
from tests.integration.test_unique_model import RedisWorld, run

pytestmark = BOTH


HISTORIES = 3


class Recorded(Net):
    """A lock server that notes its time before each request, and what it has replied."""

    def __init__(self):
        self.requests = []
        super().__init__()

    def arrive(self, script, keys, *arguments):
        """Run a script."""
        at, reply = self.now_us, super().arrive(script, keys, *arguments)
        self.requests.append((at, (script, keys, arguments), reply))
        return reply

    def send(self, *command):
        """Run a command."""
        at, reply = self.now_us, super().send(*command)
        if command[0] in {"LPOP", "DEL"}:
            self.requests.append((at, command, reply))
        return reply

    def fail_over(self):
        """Lose nothing: no other server could follow."""


def in_order(reply):
    """Return a reply whose parts are sorted: neither a hash nor an object of JSON has an order."""
    if isinstance(reply, bytes) and reply.startswith(b'{"'):
        return dumps(loads(reply), sort_keys=True)
    return sorted(map(repr, map(in_order, reply))) if isinstance(reply, list) else reply


@pytest.mark.extra
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_server_replies_as_the_simulated_one(redis_url, seed):
    """Each request of a history has the same reply."""
    recorded = Recorded()
    assert not simulation.run(recorded, f"conformance {seed}").broken
    assert len(recorded.requests) > 50
    server = driven_clock.DrivenServer(redis_url)
    client = server.client()
    for at, (script, *rest), reply in recorded.requests:
        server.advance((at - server.now_us) / 1_000_000)
        if isinstance(script, str):
            answer = client.execute_command(script, *rest)
        else:
            keys, arguments = rest
            text = driven_clock.clocked(script).text
            answer = client.eval(text, len(keys), *keys, *arguments)
        assert in_order(answer) == in_order(reply), (script, rest)
    server.close()


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
        """It is no breach of the protocol, and shows what the script says and no traceback."""
        with pytest.raises(redis.ResponseError) as told:
            client.eval("local function f() error('wrong') end f()", 0)
        assert "traceback" not in str(told.value)
        with pytest.raises(redis.ResponseError):
            client.eval("return nil + 1", 0)
        assert client.ping()

    def test_a_key_of_another_type_is_no_lock(self, client, redis_url):
        """It is refused, though fakeredis has another error for it."""
        client.set("dislock:{k}", "by hand", ex=60)
        with Dislock.from_url(redis_url) as dislock, pytest.raises(DislockError):
            dislock.lock("k").try_acquire()

    def test_a_server_says_what_it_is(self, client):
        """Before a worker starts with --dislock."""
        assert client.info()["role"] == "master"

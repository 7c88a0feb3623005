"""Many runs of a script in one round trip, on connections that the test makes."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import ResponseError

from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import RENEW
from celery_dislock.servers.pipeline import Batch, ask_all, ask_each

CALLS = [("dislock:{a}", "a/1", 9000), ("dislock:{b}", "b/1", 9000)]


class Connection:
    """Answers with what it is given, one by one; an exception is raised."""

    def __init__(self, *replies, silent=False):
        self.closed = False
        self._replies = list(replies)
        self._silent = silent

    def send_packed_command(self, packed, *, check_health):
        assert packed
        assert not check_health

    def can_read(self, *, timeout):
        assert timeout >= 0
        return not self._silent

    def read_response(self, **_):
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def disconnect(self):
        self.closed = True


def batch(*connections, confirm=None):
    made = list(connections)
    return Batch("redis://a", lambda _within: made.pop(0), confirm)


def ask(one, calls=CALLS):
    one.send(RENEW, calls, within=1.0)
    return one.read(RENEW, calls, within=1.0)


@pytest.mark.parametrize(
    "connection",
    [
        Connection(silent=True),
        Connection(redis.ConnectionError("it ended")),
        Connection(1, OSError("it ended")),
        Connection(1, ResponseError("READONLY You can't write against a read only replica.")),
    ],
    ids=["silent", "ended", "ended halfway", "a replica"],
)
def test_a_connection_on_which_anything_went_wrong_is_closed(connection):
    """The next reply on it might belong to this batch, so the next batch has a new one."""
    one = batch(connection, Connection(1, 1))
    with pytest.raises(StoreError):
        ask(one)
    assert connection.closed
    assert ask(one) == [1, 1]


def test_a_signal_handler_may_raise_in_the_middle():
    """Its exception goes on as it is, and the connection is closed."""
    connection = Connection()
    connection.read_response = lambda **_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(batch(connection))
    assert connection.closed


def test_replies_count_once_the_server_is_confirmed():
    """A server that is no longer the master has answered for nothing."""

    def confirm(_connection, _within):
        raise redis.ConnectionError("no longer the master")

    with pytest.raises(StoreError):
        ask(batch(Connection(1, 1), confirm=confirm))


def test_what_was_not_sent_is_not_read():
    """Where the connection has gone since, the error does not wait for a reply."""
    with pytest.raises(StoreError, match="nothing was sent"):
        batch().read(RENEW, CALLS, within=1.0)


def test_a_server_that_is_slow_to_connect_leaves_time_for_the_next():
    """It gets half of what is left."""
    given = []

    def connect(within):
        given.append(within)
        return Connection(1)

    ask_all(RENEW, {n: (Batch(str(n), connect), CALLS[:1]) for n in range(3)}, within=8.0)
    assert all(within <= 4.0 for within in given)
    assert given == pytest.approx([4.0] * 3, abs=0.5)


def test_all_servers_are_sent_to_before_the_first_is_read():
    """One that is away costs the others no time, and an error stands for its replies."""
    order = []

    class Noted(Batch):
        def send(self, script, calls, *, within):
            order.append(("send", self._name))
            super().send(script, calls, within=within)

        def read(self, script, calls, *, within):
            order.append(("read", self._name))
            return super().read(script, calls, within=within)

    def refuse(_within):
        raise redis.ConnectionError

    servers = {
        1: (Noted("one", lambda _: Connection(1)), CALLS[:1]),
        2: (Noted("two", refuse), CALLS),
        3: (Noted("three", lambda _: Connection(0)), CALLS[1:]),
    }
    replies = ask_all(RENEW, servers, within=1.0)
    assert order == [("send", n) for n in ("one", "two", "three")] + [
        ("read", n) for n in ("one", "three")
    ]
    assert (replies[1], replies[3]) == ([1], [0])
    assert type(replies[2]) is StoreError


def test_an_interruption_of_one_read_reaches_every_server_that_was_asked():
    """Each has a reply on its way, and nobody else would end its connection."""
    told = []

    def read(server, _sent, left):
        told.append((server, left))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_each(["a", "b", "c"], lambda _server, _left: None, read, within=5.0, clock=lambda: 0.0)
    assert told == [("a", 5.0), ("b", 0.0), ("c", 0.0)]


def test_an_interruption_while_it_sends_reaches_the_servers_that_were_asked():
    told = []

    def send(server, _left):
        if server == "c":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_each("abcd", send, lambda server, *_: told.append(server), within=5.0)
    assert told == ["a", "b"]

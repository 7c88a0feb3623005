"""One server: what is sent again, and what is not, with connections that the test makes."""

from __future__ import annotations

import pytest
import redis

from celery_dislock.exceptions import StoreError, UnreachableError
from celery_dislock.servers.node import RESENDS, Node


class Connection:
    """Fails where it is told to.

    Args:
        connecting: Raised by connecting.
        reading: Raised instead of a reply.
    """

    def __init__(self, connecting=None, reading=None):
        self._connecting = connecting
        self._reading = reading

    def connect(self):
        if self._connecting:
            raise self._connecting

    def send_packed_command(self, packed, *, check_health):
        pass

    def read_response(self, **_):
        if self._reading:
            raise self._reading
        return b"OK"

    def disconnect(self):
        pass


def asked(*connections):
    """Send a command to a node that is given these connections in turn; return their number."""
    made = []

    def connect(_within):
        made.append(connections[min(len(made), len(connections) - 1)])
        return made[-1]

    try:
        Node("redis://a", connect, pause=lambda _: None).send(b"PING")
    except StoreError as exc:
        return len(made), type(exc)
    return len(made), None


def test_a_connection_that_takes_all_of_its_time_is_not_tried_again():
    """A server that answers no handshake is away after one timeout, and nothing was asked of it."""
    assert asked(Connection(connecting=redis.TimeoutError())) == (1, UnreachableError)


def test_a_connection_that_is_refused_is_tried_again():
    """A server that restarts is there for the next attempt, or it is away after a few."""
    refused = Connection(connecting=redis.ConnectionError())
    assert asked(refused, Connection()) == (2, None)
    assert asked(refused) == (1 + RESENDS, UnreachableError)


@pytest.mark.parametrize("lost", [redis.TimeoutError(), redis.ConnectionError(), OSError()])
def test_a_reply_that_is_lost_is_asked_for_again(lost):
    """What was sent may have been done, so it is sent again, and never called unsent."""
    silent = Connection(reading=lost)
    assert asked(silent, Connection()) == (2, None)
    assert asked(silent) == (1 + RESENDS, StoreError)
    assert asked(silent, Connection(connecting=redis.TimeoutError())) == (2, StoreError)

"""What a lock server answers, as Python has it."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.servers import replies
from celery_dislock.servers.replies import Refused, Turn

FAILED = StoreError("redis://a", "away")


def test_a_refusal_names_the_owner_without_the_mark_of_its_end():
    """A lease that is left to expire has its owner's name, and its time in seconds."""
    told = replies.refused(1500, b"~a/1", b"{}", nth=1, place=4)
    assert told == Refused("a/1", 1.5, {}, 1, 4)


@pytest.mark.parametrize(
    ("owner", "holder", "held_ms", "told"),
    [
        (b"a/1", b"{}", -1, (None, None)),
        (b"a/1", b'{"timeout":30}', -500, (None, None)),  # the server's clock was set back
        (b"a/1", b"{}", 720_000, (720.0, None)),
        (b"a/1", b'{"timeout":30}', 720_000, (720.0, 1.0)),
        (b"a/1", b'{"timeout":30.5}', 720_000, (720.0, 1.5)),
        (b"a/1", b'{"timeout":20}', 720_000, (720.0, 0.0)),  # of a majority, which adds a margin
        (b"a/1", b'{"timeout":900}', 4_000, (4.0, 4.0)),  # handed over, and not renewed yet
        (b"a/1", b'{"timeout":"30"}', 4_000, (4.0, None)),
        (b"a/1", b'{"timeout":true}', 4_000, (4.0, None)),
        (b"a/1", b"no JSON", 4_000, (4.0, None)),
        (b"~a/1", b'{"timeout":30}', 720_000, (720.0, None)),  # left to run out
    ],
)
def test_a_refusal_says_for_how_long_the_lock_has_been_held(owner, holder, held_ms, told):
    """And when its lease was renewed, if the holder says for how long a renewal lasts."""
    refused = replies.refused(29_000, owner, holder, held_ms)
    assert (refused.held_for, refused.renewed) == told
    assert refused == replies.refused(29_000, owner, holder)  # but for what is for people


def test_a_turn_may_come_without_its_message():
    """Nothing is there to be published, or it is damaged; the name is read whatever it holds."""
    reply = [b"l", b"t:0", b"m", b"l", b"\xff", b"", b"l", b"u:0", None]
    assert replies.turns(reply) == [
        Turn("l", "t:0", b"m"),
        Turn("l", "\ufffd", b""),
        Turn("l", "u:0", None),
    ]

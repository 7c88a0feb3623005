"""Several servers that are asked the same at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import redis

from celery_dislock.exceptions import StoreError
from celery_dislock.servers.peers import DOUBLED, GRACE, RETRY_AFTER, Peer, Peers

URLS = [f"redis://u:s3cret@host-{number}/0" for number in range(5)]


AWAY = StoreError("redis://host", "it is away")


@pytest.mark.parametrize("broken", [1, 2])
def test_an_idle_connection_that_is_of_no_use_is_replaced(broken):
    """What cannot be sent on a connection of before is sent on a new one, once."""

    def start(command, *, within):
        sent.append(command)
        if len(sent) <= broken:
            raise redis.ConnectionError("it ended")
        return "connection"

    sent: list[tuple] = []
    peer = Peer(URLS[0], {})
    peer._wire = SimpleNamespace(start=start, close_idle=lambda: None)
    if broken == 1:
        assert peer.start(("first",), ("again",), 1.0) == "connection"
    else:
        with pytest.raises(StoreError, match="the connection broke"):
            peer.start(("first",), ("again",), 1.0)
    assert sent == [("first",), ("again",)]


class TestPeers:
    """Whom of five servers is asked when some of them fail; the clock stands still."""

    @pytest.fixture
    def now(self):
        return [100.0]

    @pytest.fixture
    def five(self, now):
        return [Peer(url, {}, lambda: now[0]) for url in URLS]

    @pytest.fixture
    def ask(self, five, now):
        """Ask, where those that are given are down; return who was asked, round by round."""
        peers = Peers(five, lambda: now[0])

        def ask(*down):
            def run(some, within):
                if some:
                    rounds.append(([five.index(peer) for peer in some], within))
                return {peer: AWAY if five.index(peer) in down else 1 for peer in some}

            rounds: list = []
            said = peers._ask(run, 0.5)
            assert [isinstance(reply, StoreError) for reply in said] == [
                number in down or (number in ever and not any(number in r for r, _ in rounds))
                for number in range(5)
            ]
            ever.update(down)
            return rounds

        ever: set[int] = set()
        return ask

    def test_all_are_asked_at_once(self, ask):
        """While nothing fails there is one round."""
        assert ask() == [([0, 1, 2, 3, 4], 0.5)]

    def test_one_that_fails_is_left_alone_for_a_while(self, ask, now):
        """It is asked again after the others, seldom, and given little time; more each time."""
        ask(1, 3)
        assert ask(1, 3) == [([0, 2, 4], 0.5)]
        now[0] += RETRY_AFTER
        assert ask(1, 3) == [([0, 2, 4], 0.5), ([1, 3], GRACE * 4)]
        now[0] += RETRY_AFTER * 3
        assert ask(1, 3) == [([0, 2, 4], 0.5)]
        now[0] += RETRY_AFTER
        assert ask(1, 3) == [([0, 2, 4], 0.5), ([1, 3], GRACE * 8)]
        for _ in range(9):
            now[0] += RETRY_AFTER * 2**DOUBLED
            assert ask(1, 3)[1] == ([1, 3], 0.5) or GRACE * 2**DOUBLED < 0.5

    def test_one_that_answers_again_is_asked_with_the_others(self, ask, now, caplog):
        """The log says when it went and when it came back, once each."""
        caplog.set_level("INFO", "celery_dislock")
        ask(1)
        ask(1)
        now[0] += RETRY_AFTER
        ask()
        assert ask() == [([0, 1, 2, 3, 4], 0.5)]
        gone, back = caplog.messages
        assert (
            gone
            == "Lock server redis://u:***@host-1/0 failed, the others go on without it: "
            + (AWAY.reason)
        )
        assert back == "Lock server redis://u:***@host-1/0 answers again."

    def test_where_the_others_are_too_few_all_are_asked(self, ask):
        """Without a majority those that failed are asked every time, with all the time there is."""
        ask(0, 1, 2)
        assert ask(0, 1, 2) == [([3, 4], 0.5), ([0, 1, 2], 0.5)]
        assert ask(0, 1) == [([3, 4], 0.5), ([0, 1, 2], 0.5)]
        assert ask(0, 1) == [([2, 3, 4], 0.5)]

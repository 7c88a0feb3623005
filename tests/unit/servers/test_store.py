"""What the scripts are told and what their answers mean, with a server that only notes it."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import ACQUIRE, FREE, MARK, RELEASE, RELEASE_DEAD, RENEW
from celery_dislock.servers.replies import FirstInLine, Granted, Handed, Refused
from celery_dislock.servers.requests import Terms
from celery_dislock.servers.store import Store

A, B = "dislock:{a}", "dislock:{b}"
AWAY = StoreError("redis://a", "away")
TAKEN = [0, 0, 1500, b"other/1", b'{"task":"t"}', -1]


class Server:
    """Answers in turn with what it is given, and notes what it was asked.

    Args:
        answers: Replies; an error is raised, and True after a reply says that one was lost.
        apart: Whether each lock needs a question of its own, as in a cluster.
    """

    name = "redis://fake"

    def __init__(self, *answers, apart=False):
        self.asked = []
        self._answers = list(answers)
        self._apart = apart

    def together(self, locks):
        return [[lock] for lock in locks] if self._apart else [list(locks)]

    def exchange(self, script, locks, *arguments):
        self.asked.append((script, *locks, *arguments))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, tuple) else (answer, False)

    def run(self, script, locks, *arguments):
        return self.exchange(script, locks, *arguments)[0]

    def run_many(self, script, calls, *, within):
        self.asked += [(script, *call) for call in calls]
        return self._answers.pop(0)

    def pop(self, key, seconds):
        self.asked.append((key, seconds))
        return self._answers.pop(0)

    def send(self, *command):
        self.asked.append(command)
        return self._answers.pop(0)


def store(server, **more):
    made = Store("redis://a", **more)
    made.lock_server = server
    return made


def asked(server):
    return [(script, lock) for script, lock, *_ in server.asked]


def test_what_is_granted_comes_with_the_token_of_each_lock():
    """One question for all of them; durations are sent in milliseconds, rounded up."""
    server = Server([1, b"7", b"9"])
    answer = store(server).acquire([A, B], "me/1", 1.0001, "{}", terms=Terms(limit=3, fair=False))
    assert answer == Granted((7, 9))
    assert server.asked == [(ACQUIRE, A, B, "me/1", 1001, "{}", "x", 3, 0, 0)]


def test_a_refusal_says_which_of_several_locks_refused():
    """In a cluster those before it, which were granted, are given back and counted."""
    server = Server([1, b"7"], TAKEN, 1, apart=True)
    answer = store(server).acquire([A, B], "me/1", 1.0, "{}")
    assert answer == Refused("other/1", 1.5, {"task": "t"}, 1)
    assert asked(server) == [(ACQUIRE, A), (ACQUIRE, B), (RELEASE, A)]


def test_what_a_waiter_was_granted_it_keeps_until_it_asks_again():
    """Who stands in line at the second lock does not lose its place at the first."""
    server = Server([1, b"7"], TAKEN, apart=True)
    store(server).acquire([A, B], "me/1", 1.0, "{}", place=90.0)
    assert asked(server) == [(ACQUIRE, A), (ACQUIRE, B)]


def test_an_acquisition_that_fails_halfway_is_given_back():
    """The error is the caller's, and no lock is left taken for nobody."""
    server = Server([1, b"7"], AWAY, 1, apart=True)
    with pytest.raises(StoreError):
        store(server).acquire([A, B], "me/1", 1.0, "{}")
    assert asked(server)[-1] == (RELEASE, A)


def test_a_failure_to_give_back_does_not_hide_the_first():
    """The leases end with their expiry; who asked is told why it got no lock."""
    server = Server([1, b"7"], AWAY, StoreError("redis://a", "still away"), apart=True)
    with pytest.raises(StoreError) as caught:
        store(server).acquire([A, B], "me/1", 1.0, "{}")
    assert caught.value is AWAY


@pytest.mark.parametrize(
    ("reply", "held"), [(2, True), (1, False), (0, False), ((0, True), True), ((1, True), True)]
)
def test_a_release_says_whether_all_were_held_until_now(reply, held):
    """A reply that was lost may have been that of the release itself, which counts as done."""
    assert store(Server(reply)).release([A, B], "me/1") is held


def test_one_node_that_is_away_does_not_keep_the_other_locks():
    """All nodes are asked before the error is raised."""
    server = Server(AWAY, 1, apart=True)
    with pytest.raises(StoreError):
        store(server).release([A, B], "me/1")
    assert asked(server) == [(RELEASE, A), (RELEASE, B)]


def test_turns_are_published_even_where_a_node_is_away():
    """What a release has handed on is nobody else's to publish until its reservation ends."""
    given = []
    server = Server([1, [A, b"t:0", b"m"]], AWAY, apart=True)
    server._answers[0] = [1, [A.encode(), b"t:0", b"m"]]
    with pytest.raises(StoreError):
        store(server, home="broker", hand_over=given.extend).release([A, B], "me/1")
    assert [(turn.lock, turn.ticket, turn.message) for turn in given] == [(A, "t:0", b"m")]


def test_of_many_leases_each_is_told_its_own_end():
    """A lease of two locks is renewed where both are."""
    server = Server([1, 1, 0, AWAY])
    leases = [([A, B], "a/1", 9.0), (["c"], "c/1", 9.0), (["d"], "d/1", 9.0)]
    assert store(server).renew(leases, within=1.0) == [True, False, AWAY]
    assert asked(server) == [(RENEW, A), (RENEW, B), (RENEW, "c"), (RENEW, "d")]


def test_what_is_handed_over_is_read_in_seconds():
    """No word in time, or replicas that must confirm: the waiter asks again."""
    server = Server(b"7 5000 90000", None, b"7 5000 90000")
    made = store(server)
    assert made.wait(A, "me/1", 2.0) == Handed(7, 5.0, 90.0)
    assert server.asked == [(f"{A}:wake:me/1", 2.0)]
    assert made.wait(A, "me/1", 2.0) is None
    assert store(server, options={"min_replicas": 1}).wait(A, "me/1", 2.0) is None


@pytest.mark.parametrize("options", [None, {"min_replicas": 1}])
def test_news_without_a_lease_is_that_the_waiter_leads_the_line(options):
    """Another waiter was handed the lock; whether replicas must confirm makes no difference."""
    told = store(Server(b""), options=options).wait(A, "me/1", 2.0)
    assert isinstance(told, FirstInLine)
    assert not told  # unlike a hand-off


@pytest.mark.parametrize(
    ("answer", "freed"),
    [(1, True), (0, False), ((0, True), True), ([1, [A.encode(), b"t:0", b"m"]], True)],
)
def test_a_lease_is_freed_by_its_owner_and_token(answer, freed):
    """A lost reply may have been that of our own work; whose turn it is now is published."""
    given = []
    server = Server(answer)
    made = store(server, home="broker", hand_over=given.extend)
    assert made.free(A, "me/1", 5) is freed
    assert server.asked == [(FREE, A, "me/1", 5, "broker")]
    assert [turn.ticket for turn in given] == (["t:0"] if isinstance(answer, list) else [])


def test_the_dead_are_released_whether_or_not_they_hold_on():
    """None leaves their leases to expire, and is another argument than no time at all."""
    server = Server(1, 0)
    made = store(server)
    assert made.release_dead([A], "w1/", 2.0) == 1
    assert made.release_dead([A], "w1/", None) == 0
    assert [call[2:] for call in server.asked] == [("w1/", 2000, ""), ("w1/", -1, "")]
    assert {script for script, *_ in server.asked} == {RELEASE_DEAD}


def test_a_mark_is_text_or_nothing():
    """It stands beside its lock, under the task's id."""
    server = Server(b"done", None)
    made = store(server)
    assert (made.recall(A, "id"), made.recall(A, "id")) == ("done", None)
    assert server.asked[0] == (MARK, f"{A}:mark:id")

"""What a majority of several servers says."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import DamagedLockError, SettingsError, StoreError
from celery_dislock.scripts import ACQUIRE, LOOK, MARK, RELEASE, RELEASE_DEAD, RENEW, TAKE_OVER
from celery_dislock.scripts import FREE as FREE_SCRIPT
from celery_dislock.servers.connections import Driver
from celery_dislock.servers.peers import NoReplyError, by_majority
from celery_dislock.servers.quorum import FORGET_AFTER, PAUSE, Names, Quorum, drift
from celery_dislock.servers.replies import Granted, Refused
from celery_dislock.servers.requests import Terms
from celery_dislock.servers.store import Store

LOCK = "dislock:{export:7}"
URLS = [f"redis://u:s3cret@host-{number}/0" for number in range(5)]
AWAY = StoreError("redis://host", "it is away")
DAMAGED = DamagedLockError("redis://host", f"{LOCK!r} is a string, not a hash", LOCK)
SILENT = NoReplyError("redis://host", "no reply")
FREE = [1, b"100"]


@pytest.fixture(autouse=True)
def names_are_the_tests_own(monkeypatch):
    """These tests use the same owners again and again, which no process does."""
    monkeypatch.setattr(Names, "_changed", {})


def taken(owner: bytes = b"b/1", remaining_ms: int = 5000) -> list:
    return [0, 0, remaining_ms, owner, b'{"task":"shop.export"}', -1]


class Answers:
    """In place of the servers: what each of them says, question by question."""

    majority = 3

    def __init__(self, *answers: list) -> None:
        self._answers = list(answers)
        self.asked: list[tuple] = []

    def ask(self, script, keys, *arguments, within, undo=None, decides=by_majority):
        acquiring = any(asked[0] is ACQUIRE for asked in self.asked)
        self.asked.append((script, *arguments))
        return [1] * 5 if script is RELEASE and acquiring else list(self._answers.pop(0))

    def ask_many(self, script, calls, *, within, decides):
        self.asked.append((script, *calls))
        return list(self._answers.pop(0))

    send = ask


def quorum(*answers: list, clock=lambda: 0.0) -> tuple[Quorum, Answers]:
    made = Quorum(URLS, {}, driver=Driver(lambda _: None), clock=clock)
    made._peers = peers = Answers(*answers)
    return made, peers


def acquire(made: Quorum, owner: str = "a/1", place: float = 0.0) -> Granted | Refused:
    store = Store(URLS)
    store.lock_server = made
    return store.acquire([LOCK], owner, 30.0, "{}", place=place)


class TestAcquire:
    @pytest.mark.parametrize("rest", [FREE, taken(), AWAY, SILENT], ids=str)
    def test_three_of_five_are_enough(self, rest):
        """A majority grants the lock, whatever the others say; the token is the largest of them."""
        made, peers = quorum([[1, b"7"], rest, [1, b"9"], [1, b"8"], rest])
        assert acquire(made) == Granted((100 if rest is FREE else 9,))
        assert [asked[0] for asked in peers.asked] == [ACQUIRE]

    @pytest.mark.parametrize("rest", [taken(), AWAY, SILENT], ids=str)
    def test_two_of_five_are_too_few_and_given_back(self, rest):
        """Less than a majority is no lock: all servers are told to release it."""
        made, peers = quorum([FREE, FREE, rest, rest, rest])
        if rest == taken():
            assert acquire(made).owner == "b/1"
        else:
            with pytest.raises(StoreError, match="only 2 of 5 servers answered"):
                acquire(made)
        assert [asked[:2] for asked in peers.asked] == [(ACQUIRE, "a/1"), (RELEASE, "a/1")]

    def test_a_lock_that_all_refuse_needs_no_release(self):
        """Where nothing was granted, and all have answered, nothing is left to be given back."""
        made, peers = quorum([taken()] * 5)
        assert acquire(made).owner == "b/1"
        assert [asked[0] for asked in peers.asked] == [ACQUIRE]

    def test_it_remains_until_a_majority_can_be_had(self):
        """The time that is told is the one after which enough servers are free."""
        made, _ = quorum([FREE, AWAY, *(taken(remaining_ms=ms) for ms in (9000, 3000, 6000))])
        assert acquire(made).remaining == 6.0

    def test_a_split_vote_is_tried_again(self):
        """Two that ask at once, and block each other, are not both told that the lock is held."""
        split = [FREE, taken(b"b/1"), taken(b"b/1"), taken(b"c/1"), FREE]
        made, peers = quorum(split, split, [FREE] * 5)
        assert acquire(made) == Granted((100,))
        assert [asked[0] for asked in peers.asked] == [ACQUIRE, RELEASE, ACQUIRE, RELEASE, ACQUIRE]

    def test_a_split_vote_that_stays_is_a_refusal(self):
        """It is tried a few times; a waiter, who asks again by itself, is told at once."""
        split = [taken(b"b/1"), taken(b"b/1"), taken(b"c/1"), taken(b"c/1"), AWAY]
        made, peers = quorum(split, split, split, split, split)
        assert isinstance(acquire(made), Refused)
        assert len(peers.asked) == 4
        made, peers = quorum(split, split)
        assert isinstance(acquire(made, place=90.0), Refused)
        assert len(peers.asked) == 1

    def test_no_place_in_a_line_is_kept(self):
        """Servers are never asked for a place: there is no hand-off between them."""
        made, peers = quorum([FREE] * 5)
        acquire(made, place=90.0)
        _script, _owner, ttl, _holder, _mode, _limit, place, _fair = peers.asked[0]
        assert (place, ttl) == (0, 30_000 + drift(30_000))

    def test_granted_too_late_is_not_granted(self):
        """What a majority granted after the lease's whole length is given back."""
        now = iter([0.0, 31.0])
        made, peers = quorum([FREE] * 5, clock=lambda: next(now, 31.0))
        with pytest.raises(StoreError, match="too late"):
            acquire(made)
        assert peers.asked[-1][0] is RELEASE

    def test_an_attempt_that_may_be_undone_late_does_not_hurt_the_next(self):
        """After a silent server the owner asks under another name, and releases under that."""
        made, peers = quorum([SILENT, FREE, taken(), taken(), taken()], [FREE] * 5)
        assert isinstance(acquire(made), Refused)
        assert isinstance(acquire(made), Granted)
        made.run(RELEASE, [LOCK], "a/1", 0)
        assert [asked[:2] for asked in peers.asked] == [
            (ACQUIRE, "a/1"),
            (RELEASE, "a/1"),
            (ACQUIRE, "a/1#1"),
            (RELEASE, "a/1#1"),
        ]

    @pytest.mark.parametrize("terms", [Terms("shared"), Terms(limit=2)])
    def test_what_is_not_exclusive_is_refused(self, terms):
        """Should a declaration have slipped through, no lock is taken that is less than asked."""
        store = Store(URLS)
        store.lock_server, peers = quorum([FREE] * 5)
        with pytest.raises(SettingsError, match="exclusive locks only"):
            store.acquire([LOCK], "a/1", 30.0, "{}", terms=terms)
        assert peers.asked == []


class TestDecide:
    @pytest.mark.parametrize(
        ("script", "replies", "said"),
        [
            (RENEW, [1, 1, 1, 0, 0], 1),
            (RENEW, [1, 1, 0, 0, 0], 0),
            (RENEW, [1, 1, 1, AWAY, AWAY], 1),
            (RENEW, [0, 0, 0, AWAY, AWAY], 0),
            (RENEW, [1, 1, 0, AWAY, AWAY], None),
            (RENEW, [1, 0, 0, 0, AWAY], 0),
            (RENEW, [1, 1, AWAY, AWAY, AWAY], None),
            (RELEASE, [1, 1, 1, 0, 0], 1),
            (RELEASE, [1, 1, 0, 0, 0], 0),
            (RELEASE, [1, 1, 0, AWAY, AWAY], 1),
            (RELEASE, [0, 0, 0, AWAY, AWAY], 0),
            (RELEASE, [2, 2, 1, 1, 1], 1),
            (RELEASE, [1, 1, AWAY, AWAY, AWAY], None),
            (RELEASE_DEAD, [0, 0, 0, 0, 1], 1),
            (FREE_SCRIPT, [1, 1, 1, 0, 0], 1),
            (FREE_SCRIPT, [1, 1, 0, 0, 0], 0),
            (TAKE_OVER, [1, 1, 1, 0, 0], 1),
            (TAKE_OVER, [1, 1, 0, AWAY, AWAY], 0),
            (MARK, [None, b"done 0", None, AWAY, AWAY], b"done 0"),
            (MARK, [None, None, None, AWAY, AWAY], None),
        ],
    )
    def test_what_a_majority_says(self, script, replies, said):
        """A majority decides; where it cannot be known what one says, that is a StoreError."""
        if said is None and script is not MARK:
            with pytest.raises(StoreError, match=r"only \d of 5 servers answered"):
                quorum(replies)[0].run(script, [LOCK], "a/1", 30_000)
        else:
            assert quorum(replies)[0].run(script, [LOCK], "a/1", 30_000) == said

    def test_each_lease_of_a_batch_is_decided_by_itself(self):
        """Of many renewals in one round trip, each is renewed, gone or undecided on its own."""
        made, peers = quorum([[1, 0, 1], [1, 0, 1], [1, 0, 0], AWAY, AWAY])
        calls = [(f"dislock:{{{n}}}", f"a/{n}", 9000) for n in range(3)]
        renewed, gone, undecided = made.run_many(RENEW, calls, within=1.0)
        assert (renewed, gone) == (1, 0)
        assert isinstance(undecided, StoreError)
        assert peers.asked[0][1] == ("dislock:{0}", "a/0", 9000 + drift(9000))

    def test_holders_are_those_that_a_majority_names(self):
        """An owner that a minority has left is no holder; the time is a majority's."""
        a = [[b"a/1", ms, b"7", b"x", b"{}", 0] for ms in (3000, 9000, 1000)]
        b = [b"b/1", 9000, b"8", b"x", b"{}", 0]
        nothing = [0, [], [], 0, b"", -1, b"", -2]
        seen = [[0, leases, *nothing] for leases in ([*a[0], *b], a[1], a[2], b)]
        made, _ = quorum([*seen, AWAY])
        assert made.run(LOOK, [LOCK])[1] == [b"a/1", 1000, 7, b"x", b"{}", 0]


@pytest.mark.parametrize("seconds", [0.01, 60.0])
def test_a_waiter_asks_again_soon(seconds):
    """Nobody is woken, so a wait is a short pause, and never longer than was asked for."""
    pauses: list[float] = []
    made = Quorum(URLS, {}, driver=Driver(pauses.append))
    assert made.pop(f"{LOCK}:wake:a/1", seconds) is None
    assert min(PAUSE[0], seconds) <= pauses[0] <= min(PAUSE[1], seconds)


def test_names_that_nobody_has_used_for_long_are_forgotten():
    """An owner's other name lasts as long as it is used, and an hour more."""
    now = [0.0]
    names = Names(lambda: now[0])
    names.change("a/1")
    names.change("b/1")
    names.change("b/1")
    assert [names.of(owner) for owner in ("a/1", "b/1", "c/1")] == ["a/1#1", "b/1#2", "c/1"]
    now[0] = FORGET_AFTER
    names.of("b/1")
    now[0] += 1.0
    names.change("c/1")
    assert [names.of(owner) for owner in ("a/1", "b/1", "c/1")] == ["a/1", "b/1#2", "c/1#1"]


def test_a_majority_that_is_damaged_is_no_outage():
    """Several servers: the error names the lock where it is damaged on most that answer."""
    with pytest.raises(DamagedLockError, match="is a string"):
        acquire(quorum([DAMAGED, DAMAGED, DAMAGED, FREE, AWAY])[0])
    with pytest.raises(StoreError) as caught:
        acquire(quorum([DAMAGED, DAMAGED, AWAY, AWAY, AWAY])[0])
    assert type(caught.value) is StoreError


def test_a_changed_name_is_known_to_all_connections_of_the_process():
    """An event loop has a store of its own, and so has the watchdog beside greenlets."""
    taker, _ = quorum([taken(), taken(), taken(), SILENT, SILENT])
    acquire(taker, "changed/1", place=90.0)
    renewer, peers = quorum([[1]] * 5)
    renewer.run_many(RENEW, [(LOCK, "changed/1", 30_000)], within=1.0)
    assert peers.asked[-1][1][1] == "changed/1#1"

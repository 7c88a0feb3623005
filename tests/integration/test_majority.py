"""What five servers say together: a majority decides, and a minority changes nothing."""

from contextlib import ExitStack, closing, nullcontext

import pytest
import redis
from celery import Celery
from kombu import Producer

from celery_dislock import (
    Dislock,
    LockHeldError,
    LockLostError,
    SettingsError,
    SingletonTask,
    StoreError,
    scripts,
)
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.scripts.names import crashes_of
from celery_dislock.servers import peers
from celery_dislock.servers.connections import is_answer
from celery_dislock.servers.memory import memory_server
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.replies import Granted, StalledState
from celery_dislock.servers.requests import Execution
from celery_dislock.servers.store import Store
from proof.proxy import Proxy, cut, lose_reply, runs, swallow_reply
from tests.holding import Holding, all_locks, name_of, wait_for
from tests.integration.driven import ALWAYS
from tests.integration.servers import HOLDER, LONG, WITHIN, round_trip, take
from tests.pace import LEASE, REPLY
from tests.unit.deliveries import deliver

LOCK = name_of("k")
OTHER = name_of("other")
PATIENCE = {"socket_timeout": 6 * REPLY}  # how long a server that is silent is waited for


def is_script(command):
    return command[0].upper() in {b"EVALSHA", b"EVAL"}


class Five:
    """Five servers inside this process, each behind a proxy."""

    def __init__(self, stack):
        self.servers = [memory_server(f"majority {number}") for number in range(5)]
        ports = [one.server_address[1] for one in self.servers]
        self.proxies = [stack.enter_context(Proxy(port)) for port in ports]
        self.clients = [
            stack.enter_context(redis.Redis.from_url(one.url, decode_responses=True))
            for one in self.servers
        ]
        for client in self.clients:
            client.flushall()
        self.urls = [proxy.url for proxy in self.proxies]
        self.dislock = self.open(stack)

    def open(self, stack):
        """Open what takes locks on them."""
        return stack.enter_context(Dislock.from_url(self.urls, transport_options=PATIENCE))

    def take_on(self, number, owner, seconds=30.0):
        """Take the lock on one server alone."""
        with closing(Store(self.servers[number].url)) as store:
            assert store.acquire([LOCK], owner, seconds, '{"task": "t"}')

    def become(self, number, state):
        """Let a server be free, taken by an owner, away, silent or damaged."""
        if state in {"away", "silent"}:
            what = {"away": cut, "silent": swallow_reply}[state]
            self.proxies[number].fault(lambda _: True, what, times=ALWAYS)
        elif state == "damaged":
            self.clients[number].set(LOCK, "damaged")
        elif state == "gone":
            self.clients[number].delete(LOCK)
        elif state != "free":
            owner, _, seconds = state.partition(" ")
            self.take_on(number, owner, float(seconds or 30))

    def all_become(self, states):
        for number, state in enumerate(states):
            self.become(number, state)

    def fail_once(self, store, *numbers):
        """Let servers be silent while a lock is taken: they are left alone for a moment then."""
        for number in numbers:
            self.become(number, "silent")
        take(store, "a/1", lock=OTHER)
        for number in numbers:
            self.proxies[number].forget_faults()

    def kept(self):
        """Return on which servers the lock has a lease."""
        return [number for number, client in enumerate(self.clients) if client.exists(LOCK)]


@pytest.fixture
def five():
    with ExitStack() as stack:
        yield Five(stack)


@pytest.fixture(autouse=True)
def names_are_the_tests_own(monkeypatch):
    """These tests use the same owners again and again, which no process does."""
    monkeypatch.setattr(peers.Names, "_changed", {})


@pytest.fixture
def lock(five):
    return five.dislock.lock("k")


@pytest.fixture
def store(five):
    """What sends requests, and has got an answer to each of them from all five."""
    with closing(Store(five.urls, PATIENCE)) as store:
        round_trip(store, LOCK)
        yield store


def test_a_majority_is_asked_once(five, lock):
    """What it grants is final: an uncontended lock costs each server one request."""
    assert lock.try_acquire()
    lock.release()
    before = [proxy.count(is_script) for proxy in five.proxies]
    assert lock.try_acquire()
    assert [proxy.count(is_script) for proxy in five.proxies] == [one + 1 for one in before]
    lock.release()


@pytest.mark.parametrize("rest", ["free", "b/1", "away", "silent", "damaged"])
def test_three_of_five_are_enough(five, lock, rest):
    """A majority grants the lock, whatever the others say; the token is the largest of them."""
    five.all_become(["free", "free", rest, "free", rest])
    with lock as lease:
        tokens = [
            int(client.hget(LOCK, lease.owner).split(" ")[2])
            for number, client in enumerate(five.clients)
            if number not in {2, 4}
        ]
        assert lease.token >= max(tokens)
        with ExitStack() as stack:
            assert not five.open(stack).lock("k").try_acquire()


@pytest.mark.parametrize("rest", ["b/1", "away", "silent"])
def test_two_of_five_are_too_few_and_given_back(five, lock, rest):
    """Less than a majority is no lock: all servers are told to release it."""
    five.all_become(["free", "free", rest, rest, rest])
    if rest == "b/1":
        conflict = lock.try_acquire()
        assert conflict.holder == {"task": "t"}
    else:
        with pytest.raises(StoreError, match=r"only \d of 5 servers answered"):
            lock.try_acquire()
    assert set(five.kept()) <= {2, 3, 4}


def test_it_remains_until_a_majority_can_be_had(five, lock):
    """The time that is told is the one after which enough servers are free."""
    five.all_become(["free", "away", "b/1 9", "b/1 3", "b/1 6"])
    assert lock.try_acquire().remaining == pytest.approx(6.0, abs=1.0)


def test_a_split_vote_is_tried_again_and_is_a_refusal_if_it_stays(five, lock):
    """Two that ask at once, and block each other, are not both told that the lock is held."""
    five.all_become(["b/1", "b/1", "c/1", "c/1", "away"])
    assert not lock.try_acquire()
    asked = five.proxies[0].count(lambda command: LOCK.encode() in command)
    assert asked > 3
    five.clients[0].delete(LOCK)
    five.clients[1].delete(LOCK)
    five.proxies[4].forget_faults()
    with lock as lease:
        assert lease


@pytest.mark.parametrize(
    ("states", "error"),
    [
        (["damaged", "damaged", "damaged", "free", "away"], DamagedLockError),
        (["damaged", "damaged", "away", "away", "away"], StoreError),
    ],
)
def test_a_majority_that_is_damaged_is_no_outage(five, lock, states, error):
    """The error names the lock if it is damaged on most that answer."""
    five.all_become(states)
    with pytest.raises(StoreError) as caught:
        lock.try_acquire()
    assert type(caught.value) is error


@pytest.mark.parametrize("full", [5, 4])
def test_servers_that_all_refuse_are_not_away(five, lock, full):
    """Each has answered, with an error: nothing was granted.  One that is away may have done so."""
    for nth, proxy in enumerate(five.proxies):
        proxy.fault(lambda _: True, "-OOM no memory" if nth < full else cut, times=ALWAYS)
    with pytest.raises(StoreError, match="only 0 of 5 servers answered") as caught:
        lock.try_acquire()
    assert is_answer(caught.value) is (full == 5)


@pytest.mark.parametrize(
    ("gone", "away", "extends", "releases"),
    [
        (0, 0, "held", "released"),
        (2, 0, "held", "released"),
        (3, 0, "lost", "lost"),
        (0, 2, "held", "released"),
        (1, 2, "unknown", "released"),  # perhaps on those that are away
        (2, 2, "unknown", "released"),
        (3, 2, "lost", "lost"),
        (0, 3, "unknown", "unknown"),
    ],
)
def test_what_a_majority_says_of_a_lease(five, lock, caplog, gone, away, extends, releases):
    """A majority decides; where it cannot be known what one says, that is a StoreError."""
    lease = lock.try_acquire()
    five.all_become(["gone"] * gone + ["away"] * away)
    errors = {"lost": LockLostError, "unknown": StoreError}
    with pytest.raises(errors[extends]) if extends in errors else nullcontext():
        lock.extend()
    lease.release()
    unknown = "unknown" if "could not be released" in caplog.text else "released"
    assert ("lost" if lease.lost else unknown) == releases


def test_holders_are_those_that_a_majority_names(five, lock):
    """An owner that a minority has left is no holder; the time is a majority's."""
    five.all_become(["b/1", "b/1", "free", "free", "away"])
    assert lock.holders() == []
    for number, seconds in enumerate([3, 9, 1]):
        five.clients[number].delete(LOCK)
        five.take_on(number, "a/1", seconds)
    [holder] = lock.holders()
    assert holder.owner == "a/1"
    assert holder.remaining == pytest.approx(1.0, abs=1.0)


@pytest.mark.parametrize("options", [{"mode": "shared"}, {"limit": 2}])
def test_what_is_not_exclusive_is_refused(five, options):
    """No lock is taken that is less than asked."""
    with pytest.raises(SettingsError, match="exclusive locks only"):
        five.dislock.lock("k", **options).try_acquire()
    assert five.kept() == []


def test_servers_that_fail_are_left_alone_for_a_while_and_told_of_once(five, lock, caplog):
    """And asked again after the others, and told of when they answer."""
    caplog.set_level("INFO", "celery_dislock")
    five.all_become(["away"])
    for _ in range(5):
        with lock:
            pass
    asked = five.proxies[0].count(lambda _: True)
    with lock:
        pass
    assert five.proxies[0].count(lambda _: True) - asked <= 2
    five.proxies[0].forget_faults()

    def again():
        with lock:
            return 0 in five.kept()

    wait_for(again, "the server that is back")
    gone, back = [line for line in caplog.messages if "Lock server" in line]
    assert f"Lock server {five.urls[0]} failed, the others go on without it: " in gone
    assert back == f"Lock server {five.urls[0]} answers again."


def test_what_was_granted_in_an_outage_is_released_after_it(five):
    """The servers took an acquisition and could not say so, nor be told that it was given up."""
    lock = five.dislock.lock("k", watchdog_timeout=600)
    with lock:
        pass  # the servers know the scripts
    for proxy in five.proxies[:3]:
        proxy.fault(runs(scripts.ACQUIRE), lose_reply, times=ALWAYS)
        proxy.fault(runs(scripts.RELEASE), cut, times=ALWAYS)
    with pytest.raises(StoreError):
        lock.acquire()
    assert five.kept() == [0, 1, 2]
    for proxy in five.proxies:
        proxy.forget_faults()
    wait_for(lambda: not five.kept(), "the release by the watchdog")


def test_a_retry_in_another_process_takes_over_what_was_kept_for_it(five, monkeypatch):
    """Though the servers know the owner by another name, as one of them was silent at first."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=five.urls, dislock_transport_options={"socket_timeout": 2 * REPLY})
    sent, tokens = [], []
    publish = Producer.publish

    def publishing(*args, **options):
        sent.append(options["headers"])
        return publish(*args, **options)

    @app.task(bind=True, base=SingletonTask, lock_key="k", lock_hold_on_retry=True, shared=False)
    def export(self):
        tokens.append(self.lease.token)
        if not self.request.retries:
            raise self.retry(countdown=60)

    monkeypatch.setattr(Producer, "publish", publishing)
    with five.dislock.lock("k"):
        pass  # the servers know the scripts
    with closing(Dislock(app)):
        five.all_become(["b/1", "b/1"])
        five.proxies[4].fault(runs(scripts.ACQUIRE), swallow_reply)
        deliver(export)
        [(owner, _)] = five.clients[4].hgetall(LOCK).items()
        assert owner.endswith("#1"), "it did not ask twice"
        monkeypatch.setattr(peers.Names, "_changed", {})  # as in another process
        deliver(export, headers=sent[-1], retries=1)
    assert len(tokens) == 2
    assert tokens == sorted(set(tokens))
    assert five.kept() == [0, 1]


def test_a_waiter_asks_again_soon(five):
    """Nobody is woken, so a wait is a short pause; the wait ends at its timeout."""
    five.all_become(["b/1 1"] * 5)
    with pytest.raises(LockHeldError), five.dislock.lock("k", timeout=0.05):
        pass
    with five.dislock.lock("k", timeout=30):
        pass


def test_connections_that_were_cut_are_not_an_outage(five, store, caplog):
    """A server that was restarted, or forgot its scripts, is asked anew without a word."""
    for client, proxy in zip(five.clients, five.proxies, strict=True):
        client.script_flush()
        proxy.cut_all()
    take(store, "a/1", lock=LOCK)
    assert five.kept() == [0, 1, 2, 3, 4]
    assert store.renew([([LOCK], "a/1", LONG)]) == [True]
    assert store.release([LOCK], "a/1") is True
    assert not [said for said in caplog.messages if "server" in said]


def test_every_lock_of_a_majority_is_found(five, store):
    """Locks are found though servers are away and others have forgotten them."""
    take(store, "a/1", lock=LOCK)
    five.all_become(["gone", "gone"])
    with closing(Store(five.servers[0].url)) as first:  # granted there, and never by a majority
        take(first, "c/1", lock=name_of("minority"))
    take(store, "b/1", lock=OTHER)
    for state in "free", "away":
        five.all_become([state, state])
        found = all_locks(Overview(store.lock_server, "dislock"))
        owners = {one.name: [held.owner for held in one.holders] for one in found if one.holders}
        assert owners == {LOCK: ["a/1"], OTHER: ["b/1"]}


@pytest.mark.parametrize("place", [0.0, LONG], ids=["asks", "waits"])
def test_nobody_is_refused_because_of_servers_left_alone(five, store, place):
    """Two servers missed a release, two others failed a moment ago: a majority is free."""
    five.all_become(["gone/1", "gone/1"])
    five.fail_once(store, 2, 3)
    assert isinstance(store.acquire([LOCK], "b/1", LONG, HOLDER, place=place), Granted)


@pytest.mark.parametrize("within", [{"within": WITHIN}, {}], ids=["batch", "alone"])
def test_no_lease_is_lost_because_of_servers_that_are_left_alone(five, store, within):
    """A majority has the lease, and two of it failed a moment ago: it is renewed."""
    take(store, "a/1", lock=LOCK)
    five.all_become(["gone", "gone"])
    five.fail_once(store, 2, 3)
    assert store.renew([([LOCK], "a/1", LONG)], **within) == [True]


def test_two_silent_servers_delay_no_renewal_for_long(five):
    """The leases of a process are renewed in time on the others."""
    with Holding(five.urls, {"socket_timeout": REPLY}) as holding:
        leases = [holding.take(f"export:{number}", timeout=1.2 * LEASE) for number in range(20)]
        wait_for(lambda: all(lease.renewals for lease in leases), "a renewal of each")
        five.become(3, "silent")
        five.become(4, "silent")
        wait_for(lambda: all(lease.renewals > 3 for lease in leases), "three more of each")
        assert holding.named("lock_lost") == []
        assert all(lease.held for lease in leases)


class TestExecutions:
    """What the main process of a worker, and an operator, do while a server is away."""

    @pytest.fixture(autouse=True)
    def away(self, five, store):
        five.become(0, "away")

    def test_a_dead_one_is_released_by_the_start_of_its_name(self, five, store):
        """Who has seen a process end frees its locks on all servers; so does an operator."""
        take(store, "id@w:7/1", lock=LOCK)
        assert store.release_dead([LOCK], "id@w:7/") == 1
        assert five.kept() == []
        assert store.free(LOCK, "a/1", take(store, "a/1", lock=LOCK)) is True
        assert store.holders(LOCK) == []

    def test_a_crash_is_counted_on_a_majority(self, store):
        """As often as it was counted on most servers; the same one counts once."""
        crashes, run = [crashes_of(LOCK, "id:0:0")], store.lock_server.run
        assert [run(scripts.CRASH, crashes, nonce, 60_000) for nonce in "abb"] == [1, 2, 2]

    def test_a_stalled_one_is_renewed_by_the_start_of_its_name(self, five, store):
        """On a majority; and where no majority has the lease, on none that counts."""
        take(store, "id@w:7/1", lock=LOCK)
        before = store.holders(LOCK)[0].remaining
        wait_for(lambda: store.holders(LOCK)[0].remaining < before - 0.1, "an older lease")
        execution = Execution([LOCK], "id@w:7/", LONG, 0.05, 0.0)
        (found,) = store.renew_stalled([execution], within=WITHIN)
        assert found.unrenewed >= 0.05
        assert store.holders(LOCK)[0].remaining > before - 0.1
        five.all_become(["free", "gone", "gone"])
        (found,) = store.renew_stalled([execution._replace(overdue=0.0)], within=WITHIN)
        assert found == StalledState(0, 0)


def test_an_acquisition_that_one_server_did_not_confirm_is_undone_there(five, store):
    """A server whose answer did not come is not counted, and keeps nothing."""
    five.proxies[0].fault(runs(scripts.ACQUIRE), swallow_reply)
    take(store, "a/1", lock=LOCK)
    assert five.proxies[0].count(runs(scripts.ACQUIRE), swallow_reply) == 1
    wait_for(lambda: five.kept() == [1, 2, 3, 4], "the undoing on the first server")
    assert store.renew([([LOCK], "a/1", LONG)], within=WITHIN) == [True]
    assert store.release([LOCK], "a/1") is True


def test_the_name_of_an_owner_is_forgotten_an_hour_after_its_last_use(monkeypatch):
    """A process that runs for months does not collect the names of all that failed."""
    now, names = 0.0, peers.Names()
    monkeypatch.setattr(peers, "monotonic", lambda: now)
    for owner in ("used", "done"):
        names.change(owner)
        assert names.of(owner) == owner
        assert names.of(owner, attempts=True) == f"{owner}#1"
    for now in (3000.0, 6000.0):  # noqa: B007 -- the clock
        assert names.of("used") == "used#1"
    names.change("another")
    assert [names.of(owner, attempts=True) for owner in ("used", "done", "another")] == [
        "used#1",
        "done",
        "another#1",
    ]

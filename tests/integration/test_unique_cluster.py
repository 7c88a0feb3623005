"""Uniqueness in a cluster whose slot moves: nothing is made beside what the other node has."""

import contextlib

import pytest
from redis.crc import key_slot

from celery_dislock.config.terms import Terms
from celery_dislock.exceptions import StoreError
from celery_dislock.servers import cluster as cluster_module
from celery_dislock.servers.records import decode
from celery_dislock.servers.replies import Granted, Replaced
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.reservations import Reservation, Reserved, Taken
from celery_dislock.servers.store import Store
from tests.integration.servers import RedisCluster

NODE_TIMEOUT = 5000  # milliseconds
LONG = 60.0  # seconds
LOCK = "dislock:{edit:1}"
RECORD = f"{LOCK}:unique"


@pytest.fixture(scope="module")
def cluster(redis_program, tmp_path_factory):
    with RedisCluster(tmp_path_factory.mktemp("cluster"), node_timeout=NODE_TIMEOUT) as cluster:
        yield cluster


@pytest.fixture
def store(cluster):
    for master in cluster.masters:
        with master.client() as client:
            client.flushall()
    store = Store(cluster.url)
    yield store
    store.close()


def reserve(store, task_id, *, replaces=False):
    wanted = Reservation(LOCK, task_id, "end", LONG)
    found = store.reservations.reserve(wanted, f"nonce-{task_id}", replaces=replaces)
    if isinstance(found, Reserved):
        return wanted._replace(mark=found.mark, number=found.number)
    return found


def on_nodes(cluster, name=RECORD):
    """On how many of the nodes a key is, whatever they would answer to who asks for it."""
    found = []
    for node in cluster.masters:
        with node.client() as client:
            keys = client.execute_command("CLUSTER", "GETKEYSINSLOT", key_slot(name.encode()), 100)
        found += [decode(key) for key in keys]
    return found.count(name)


@pytest.mark.parametrize("moved", ["the record", "the lock"])
@pytest.mark.parametrize("replaces", [False, True])
def test_sends_while_a_slot_moves(cluster, store, moved, replaces):
    """The record is found on either node, is on one of them only, and the slot arrives."""
    first = reserve(store, "a", replaces=replaces)
    store.acquire([LOCK], "other/1", LONG, "{}")
    with cluster.moving(LOCK, first=[RECORD if moved == "the record" else LOCK]):
        assert store.reservations.confirm(first)
        second = reserve(store, "b", replaces=replaces)
        assert isinstance(second, Reservation if replaces else Taken)
        assert on_nodes(cluster) == 1
    assert on_nodes(cluster) == 1
    assert store.reservations.end(second if replaces else first)


def test_a_first_send_while_a_slot_moves(cluster, store):
    """A record that was on neither node is made on one of them."""
    store.remember(LOCK, "x", "done", LONG)
    with cluster.moving(LOCK, first=[f"{LOCK}:mark:x"]):
        first = reserve(store, "a")
        assert isinstance(first, Reservation)
        assert store.reservations.confirm(first)
        assert isinstance(reserve(store, "b"), Taken)
        assert on_nodes(cluster) == 1
    assert isinstance(reserve(store, "c"), Taken)


@pytest.mark.parametrize("moved", ["the record", "the lock"])
@pytest.mark.parametrize("until", ["start", "end"])
def test_a_task_that_begins_while_a_slot_moves(cluster, store, moved, until, monkeypatch):
    """It begins, or is told to ask again; nothing of it is made on the other node."""
    monkeypatch.setattr(cluster_module, "WHOLE_LOOKS", 1)  # which would be two seconds for each
    older = reserve(store, "a", replaces=True)
    newer = reserve(store, "b", replaces=True)._replace(until=until)
    store.reservations.confirm(newer)
    store.acquire([LOCK], "other/1", LONG, "{}", terms=(Terms(limit=2),))
    with cluster.moving(LOCK, first=[RECORD if moved == "the record" else LOCK]):
        for reservation, owner in ((older, "a@w/1"), (newer, "b@w/1")):
            with contextlib.suppress(StoreError, Replaced):
                store.acquire(
                    [LOCK], owner, LONG, "{}", terms=(Terms(limit=2),), reservation=reservation
                )
            assert on_nodes(cluster) <= 1
            assert on_nodes(cluster, LOCK) <= 1
    with pytest.raises(Replaced):
        store.acquire([LOCK], "a@w/1", LONG, "{}", terms=(Terms(limit=2),), reservation=older)
    granted = store.acquire([LOCK], "b@w/1", LONG, "{}", terms=(Terms(limit=2),), reservation=newer)
    assert isinstance(granted, Granted)
    assert store.release([LOCK], "b@w/1", Ending(reservation=newer))
    assert isinstance(reserve(store, "c"), Reservation)

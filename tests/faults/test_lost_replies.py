"""The reply of one command is lost, or the command itself: nothing is locked twice or for ever."""

from __future__ import annotations

import logging
import time

import pytest

from celery_dislock import Conflict, StoreError
from celery_dislock.scripts import ACQUIRE, RELEASE, RELEASE_DEAD, RENEW
from proof.proxy import cut, lose_reply, runs, swallow_reply
from tests.holding import Holding, name_of, wait_for

pytestmark = pytest.mark.faults

KEY = "export:7"
LONG = 60.0  # seconds: no lease runs out by itself
WAYS = [cut, lose_reply, swallow_reply]

RESENT = 3  # times that a command is sent

any_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _scripts_known(redis_url):
    """So that the first EVALSHA that a fault hits is the one that does the work."""
    with Holding(redis_url) as holding:
        holding.take("warm-up", LONG)
        holding.store.renew([([name_of("warm-up")], "nobody", LONG)], within=10)
        holding.store.release_dead([name_of("warm-up")], "nobody")


@pytest.fixture
def holding(proxy):
    """Locks through the proxy, of a client that soon takes a reply for lost."""
    with Holding(proxy.url, {"socket_timeout": 0.3}) as holding:
        yield holding


@any_way
def test_an_acquisition_that_is_never_answered_is_given_up(proxy, holding, others, way):
    """When all resends fail there is no lease, and what may have been taken is soon free."""
    proxy.fault(runs(ACQUIRE), way, times=RESENT)
    with pytest.raises(StoreError):
        holding.lock(KEY, LONG).acquire()
    wait_for(lambda: not isinstance(others.try_take(KEY), Conflict), "the lock")


@any_way
def test_a_release_whose_reply_is_lost_is_done(proxy, holding, others, way):
    """The lock is gone, and gone is no loss: it is reported released, once."""
    lease = holding.take(KEY, LONG)
    proxy.fault(runs(RELEASE), way)
    lease.release()
    assert proxy.count(runs(RELEASE), way) == 1
    assert len(holding.named("lock_released", lease)) == 1
    assert holding.named("lock_lost") == []
    others.take(KEY)


def test_a_release_that_is_never_answered_leaves_the_lock_to_expire(proxy, holding, others, caplog):
    """When all resends fail nothing is raised, the log says it, and the lock frees itself."""
    lease = holding.take(KEY, 3.0)
    proxy.fault(runs(RELEASE), swallow_reply, times=RESENT)
    with caplog.at_level(logging.WARNING, "celery_dislock"):
        lease.release()
    assert "could not be released" in caplog.text
    assert holding.named("lock_lost") == []
    wait_for(lambda: not isinstance(others.try_take(KEY), Conflict), "the expiry")
    assert proxy.count(runs(RENEW)) == 0


@any_way
def test_a_release_after_a_death_whose_reply_is_lost_is_done(proxy, holding, others, way):
    """Sent again, the release of a dead execution's lease ends that one, and no newer."""
    holding.store.acquire([name_of(KEY)], "id-1@w:7/1", LONG, "{}")
    proxy.fault(runs(RELEASE_DEAD), way)
    holding.store.release_dead([name_of(KEY)], "id-1@w:7/")
    others.take(KEY)


@any_way
def test_a_lease_whose_renewals_are_lost_is_tried_again_early(proxy, holding, others, way):
    """Two renewals in a row may fail: with a third of the timeout in between it would be lost."""
    lease = holding.take(KEY, 4.0)
    proxy.fault(runs(RENEW), way, times=3)
    holding.wait_renewed(lease, 2)
    assert proxy.count(runs(RENEW), way) == 3
    assert lease.held
    assert holding.named("lock_lost") == []
    assert isinstance(others.try_take(KEY), Conflict)


@pytest.mark.parametrize(("way", "nth"), [(cut, 1), (lose_reply, 25), (swallow_reply, 50)])
def test_a_batch_that_is_cut_short_costs_no_lease(proxy, holding, way, nth):
    """When the reply of one renewal in a batch is lost, all of its leases are kept."""
    leases = [holding.take(f"export:{number}", 4.0) for number in range(50)]
    proxy.fault(runs(RENEW), way, nth=nth)
    wait_for(lambda: all(lease.renewals for lease in leases), "all renewals")
    assert proxy.count(runs(RENEW), way) == 1
    assert all(lease.held for lease in leases)
    assert holding.named("lock_lost") == []


def test_a_renewal_that_crosses_the_release_brings_nothing_back(proxy, holding, redis_server):
    """A renewal whose reply never came, and which is not sent again, leaves nothing behind."""
    lease = holding.take(KEY, 1.5)
    proxy.fault(runs(RENEW), swallow_reply, times=100)
    wait_for(lambda: proxy.count(runs(RENEW), swallow_reply), "a renewal")
    lease.release()
    with redis_server.client() as client:
        assert client.keys("*") == []
    marker = holding.take("marker", 30.0)
    time.sleep(0.5)  # for a renewal that should not come; a slow machine only makes it miss one
    assert proxy.count(lambda command: lease.owner.encode() in command and runs(RENEW)(command)) < 4
    assert marker.held
    assert holding.named("lock_lost") == []

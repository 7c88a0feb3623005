"""The lock server, or the way to it, is away for a while: kept where it can be, told where not."""

import logging

import pytest

from celery_dislock import Conflict
from tests.holding import Holding, wait_for

pytestmark = pytest.mark.faults

KEY = "export:7"
BLOCKED = 20.0  # seconds that a caller may wait for a reply; no report may wait for that


class TestBlackHole:
    """No byte comes through, and no connection ends: only a clock can tell."""

    @pytest.fixture
    def holding(self, proxy):
        with Holding(proxy.url, {"socket_timeout": BLOCKED}) as holding:
            yield holding
            proxy.heal()

    def test_every_lease_is_reported_lost_once(self, proxy, holding):
        """Longer than the lease: each is lost at its deadline, not when the socket gives up."""
        leases = [holding.take(f"export:{number}", 1.5) for number in range(20)]
        wait_for(lambda: all(lease.renewals for lease in leases), "the first renewals")
        proxy.black_hole()
        wait_for(lambda: not any(lease.held for lease in leases), "the deadline")
        wait_for(lambda: len(holding.named("lock_lost")) >= len(leases), "the reports", BLOCKED / 2)
        for lease in leases:
            (event,) = holding.named("lock_lost", lease)
            assert not event.held
            assert "could not be renewed in time" in event.arguments["reason"]

    def test_a_short_one_costs_no_lease(self, proxy, holding, others, caplog):
        """When renewals fail and the way is free again in time, the lease is kept."""
        lease = holding.take(KEY, 6.0)
        with caplog.at_level(logging.WARNING, "celery_dislock"):
            proxy.black_hole()
            wait_for(lambda: "Cannot renew" in caplog.text, "the first failure")
            proxy.heal()
            holding.wait_renewed(lease, 2)
        assert isinstance(others.try_take(KEY), Conflict)
        assert holding.named("lock_lost") == []

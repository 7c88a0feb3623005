"""Tasks of several keys in real workers: in line in no slot, narrow before wide, and to their end.

Each task calls an API for a tenant, until the tenant's gate is open.
"""

import os
import signal
import time

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Scene, wait_for
from tests.acceptance.scenarios import call

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]


class Calls(Scene):
    """The calls of one test: those of its tenants, and where they stand."""

    def tenants(self, names):
        """Return names of tenants that are this test's alone."""
        return [f"{self.key}-{name}" for name in names]

    def open(self, *tenants):
        """Let the calls for these tenants end."""
        for tenant in tenants:
            self.open_gate(tenant)

    def send(self, fleet, task, tenant, many=1, gate=None, **options):
        return [fleet.send(task, self.key, tenant, gate, **options) for _ in range(many)]

    def at(self, key):
        """The lock of a key, and its line."""
        return Scene(key, self.redis)

    def kept_by(self, key):
        """The owners of the leases of a lock; what is kept for a parked task has its ticket's."""
        return [lease.owner.partition(":")[0].partition("@")[0] for lease in self.at(key).leases]

    def of(self, tenant):
        """The tasks of a tenant in the order in which their bodies began."""
        return [event["id"] for event in self.reported("begin", tenant=tenant)]

    def wait_until_begun(self, tenant, many=1):
        self.wait_for_report("begin", times=many, tenant=tenant)

    def hold_the_api(self, fleet):
        """Let two tenants have the API, which admits no more; return both, and their calls."""
        tenants = self.tenants(["held", "held-too"])
        results = [fleet.send(call, self.key, tenant) for tenant in tenants]
        wait_for("both run", lambda: len(self.begun) == 2)
        return tenants, results


@pytest.fixture
def calls(scene):
    """The calls of one test; at its end, all gates that it has used are opened."""
    calls = Calls(scene.key, scene.redis)
    yield calls
    calls.open(*{event["tenant"] for event in calls.reported("begin")})


def get_all(results):
    for result in results:
        assert result.get(timeout=LIMIT) == {"held": True}


# A task that does not run, or not to its end


@PREFORK
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_what_a_task_keeps_is_handed_on_when_it_ends_in_line(fleet, calls, how):
    """It has passed its tenant and waits for the API; the tenant's next one goes on."""
    (a,) = calls.tenants("a")
    calls.open(a)
    (held, other), holders = calls.hold_the_api(fleet)
    (ended,) = calls.send(fleet, call, a, expires=1 if how == "expired" else None)
    expiry = time.time() + 1
    calls.at("api").wait_for_line(1)
    assert calls.kept_by(f"tenant:{a}") == [ended.id]
    following = calls.send(fleet, call, a)
    calls.at(f"tenant:{a}").wait_for_line(1)
    if how == "expired":
        wait_for("it has expired", lambda: time.time() > expiry)
    else:
        assert len(fleet.revoke(ended.id, reply=True)) == len(fleet.workers)
    calls.open(held)
    with pytest.raises(TaskRevokedError):
        ended.get(timeout=LIMIT)
    get_all(following)
    calls.open(other)
    get_all(holders)
    assert ended.id not in calls.begun


@PREFORK
def test_a_process_that_is_killed_frees_all_its_keys(fleet, calls):
    """The next of its tenant and the next of the API run, and it comes again, as it asks for."""
    held, a, b, first = calls.tenants(["held", "a", "b", "first"])
    calls.open(b)
    holder = calls.send(fleet, call, held)
    before = calls.send(fleet, call, a, gate=first)
    calls.wait_until_begun(held)
    calls.wait_until_begun(a)
    victim = calls.send(fleet, scenarios.call_and_survive, a)
    calls.at(f"tenant:{a}").wait_for_line(1)
    calls.open(first)
    get_all(before)
    dead = calls.wait_for_report("begin", id=victim[0].id)["pid"]
    others = calls.send(fleet, call, b)
    calls.at("api").wait_for_line(1)
    following = calls.send(fleet, call, a, gate=b)
    calls.at(f"tenant:{a}").wait_for_line(1)
    os.kill(dead, signal.SIGKILL)
    get_all([*others, *following])
    calls.open(held, a)
    get_all([*holder, *victim])
    assert calls.of(a).count(victim[0].id) == 2

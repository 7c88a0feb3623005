"""The command line of the worker: what must not lock.  What locks is told in test_first_contact."""

import socket

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT
from tests.leaks import SECRET


def test_with_no_dislock_nothing_locks(start_fleet, scene):
    """--no-dislock runs every task without its lock, says so loudly, and needs no lock server."""
    with socket.socket() as taken:  # a port at which nobody listens
        taken.bind(("127.0.0.1", 0))
        nowhere = f"redis://:{SECRET}@127.0.0.1:{taken.getsockname()[1]}/0"
        fleet = start_fleet("prefork", "--no-dislock", "--dislock-url", nowhere)
        assert fleet.says("WARNING", "LOCKS ARE OFF")
        results = [fleet.send(scenarios.hold, scene.key) for _ in range(2)]
        scene.wait_for_report("begin", times=2)
        assert not scene.reported("end")
        assert scene.is_free
        scene.open_gate()
        assert [one.get(timeout=LIMIT) for one in results] == [{"held": None}] * 2

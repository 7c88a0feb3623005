"""How long tests in real time wait for a process, or for a server that says nothing.

A test's lease is short, so that the test is, and a socket gives up soon.  On a busy machine a
process may stand still for longer than that, and then the test fails though nothing is wrong.  So
all such times are made here, and a slow machine makes them longer: ``DISLOCK_TEST_PACE=3 make
test``.
"""

import os

PACE = float(os.environ.get("DISLOCK_TEST_PACE", "1"))  # times as long
LEASE = 2.5 * PACE  # seconds: of a lease that ends, or is renewed, while a test waits for it
REPLY = 0.5 * PACE  # seconds for which a server that says nothing is waited for

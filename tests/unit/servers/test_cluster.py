"""A Redis Cluster: whose node is asked, and who is asked next."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.servers.server import server_for


class TestClusterWithoutNodes:
    def test_no_seed_answers(self):
        """When no node answers, everything is a StoreError that names the cluster."""
        server = server_for("redis+cluster://127.0.0.1:1,127.0.0.1:2", pause=lambda _: None)
        with pytest.raises(StoreError, match="no node tells the slots"):
            server.send("INFO")
        with pytest.raises(StoreError, match="no node tells the slots"):
            server.pop("dislock:{a}", 1.0)

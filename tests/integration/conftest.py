"""Lock servers for the tests: one in the process, one whose commands fail, and a real one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from celery_dislock import signals
from celery_dislock.servers.store import Store
from tests.driven import Shop
from tests.integration.driven import Driven, driving, listening
from tests.integration.lua_server import LuaServer
from tests.integration.servers import RedisCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@pytest.fixture
def server() -> LuaServer:
    """The scripts on bare Lua, under a clock that the test moves."""
    return LuaServer()


@pytest.fixture
def shop(caplog: pytest.LogCaptureFixture) -> Iterator[Shop]:
    """An app whose lock server and broker are in this process; what it logs is kept."""
    caplog.set_level("INFO", "celery_dislock")
    with Shop() as shop:
        yield shop


@pytest.fixture
def backend_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], AbstractContextManager[None]]:
    """Let a method of the shop's result backend fail for the task "2" while a block runs."""

    @contextmanager
    def away(method: str) -> Iterator[None]:
        call = getattr(shop.app.backend, method)

        def fail(task_id: str, *args: Any, **options: Any) -> Any:
            if task_id == "2":
                raise ConnectionError("backend is away")
            return call(task_id, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(shop.app.backend, method, fail)
            yield

    return away


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    """What sends commands to a real server, or to fakeredis."""
    store = Store(redis_url)
    yield store
    store.close()


@pytest.fixture(scope="module")
def cluster(
    redis_program: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisCluster]:
    """Three masters and a replica of each, for the tests of a file that end none of them."""
    with RedisCluster(tmp_path_factory.mktemp("cluster"), node_timeout=60_000) as cluster:
        yield cluster


@pytest.fixture
def driven(request: pytest.FixtureRequest) -> Iterator[Driven]:
    """A lock server whose time and commands are the test's, and locks on it."""
    with driving(request.node.nodeid) as driven:
        yield driven


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Names and arguments of the lock signals that were sent, in order."""
    with listening() as events:
        yield events


@pytest.fixture
def receive() -> Iterator[Callable[[str, Callable[..., object]], None]]:
    """Connect a receiver to a signal, by its name, until the test ends."""
    connected = []

    def connect(name: str, receiver: Callable[..., object]) -> None:
        signal = getattr(signals, name)
        signal.connect(receiver, weak=False)
        connected.append((signal, receiver))

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)

"""Workers to test with: a pair for each pool that lasts, and such as a test starts for itself."""

from __future__ import annotations

import importlib.util
import os
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import redis

from example_project import scenarios
from example_project.redis_server import RedisServer
from tests.acceptance.fleet import CONCURRENCY, Fleet, Scene, Worker, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOG_SHOWN = 20_000  # characters of each worker's log in the report of a failed test
WORKERS = pytest.StashKey[dict[Worker, int]]()  # with the length of its log when the test began


@pytest.fixture(scope="session")
def server(redis_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server for workers that outlive a test: nobody flushes it."""
    with RedisServer(tmp_path_factory.mktemp("acceptance") / "redis") as server:
        scenarios.app.conf.update(broker_url=server.url, result_backend=server.url)
        yield server
        scenarios.app.close()


@pytest.fixture(scope="session")
def redis_client(server: RedisServer) -> Iterator[redis.Redis]:
    """A client beside those of the package and of the tasks, which speaks str."""
    with server.client(decode_responses=True) as client:
        yield client


@pytest.fixture(scope="session")
def elsewhere(server: RedisServer) -> Iterator[redis.Redis]:
    """A client of another database of that server, in which no test but its user locks."""
    with redis.Redis.from_url(server.url.removesuffix("0") + "1") as client:
        yield client


@pytest.fixture(scope="session")
def workers(pytestconfig: pytest.Config) -> dict[Worker, int]:
    """All workers that run, for the logs that are shown with a failed test."""
    return pytestconfig.stash.setdefault(WORKERS, {})


@pytest.fixture(scope="session", params=list(CONCURRENCY))
def fleet(
    request: pytest.FixtureRequest,
    server: RedisServer,
    workers: dict[Worker, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Two workers of one pool with --dislock, for all tests of that pool."""
    pool = request.param
    _require(pool)
    folder = tmp_path_factory.mktemp(pool)
    queue = f"fleet-{pool}"
    options = [*_pool_options(pool), "--queues", queue, "--dislock"]
    pair: list[Worker] = []
    try:
        for number in (1, 2):
            worker = Worker(folder, f"{pool}{number}", *options, env=_env(server))
            pair.append(worker)
            workers[worker] = 0
        for worker in pair:
            worker.wait_until_ready()
        yield Fleet(pool, queue, pair)
    finally:
        _stop(pair, workers)


@pytest.fixture(params=list(CONCURRENCY))
def pool(request: pytest.FixtureRequest) -> str:
    """Each of the pools, for a test that starts its own worker."""
    return request.param


@pytest.fixture
def start_fleet(
    server: RedisServer, workers: dict[Worker, int], tmp_path: Path
) -> Iterator[Callable[..., Fleet]]:
    """Start a worker of this test alone, with its own queue: ``start_fleet(pool, *options)``."""
    started: list[Worker] = []

    def start(pool: str, *options: str, ready: bool = True, **kwargs: Any) -> Fleet:
        _require(pool)
        queue = f"own-{uuid.uuid4().hex[:8]}"
        env = {**_env(server), **kwargs.pop("env", {})}
        options = (*_pool_options(pool), "--queues", queue, *options)
        worker = Worker(tmp_path, f"own{len(started) + 1}", *options, env=env, **kwargs)
        started.append(worker)
        workers[worker] = 0
        if ready:
            worker.wait_until_ready()
        return Fleet(pool, queue, [worker])

    try:
        yield start
    finally:
        _stop(started, workers)


@pytest.fixture
def scene(redis_client: redis.Redis, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A key of this test alone; at its end, the gate of that key is opened."""
    name = getattr(request.node, "originalname", request.node.name)
    scene = Scene(f"{name}-{uuid.uuid4().hex[:8]}", redis_client)
    yield scene
    scene.open_gate()


@pytest.fixture(autouse=True)
def _nothing_is_left(
    redis_client: redis.Redis, elsewhere: redis.Redis, workers: dict[Worker, int]
) -> Iterator[None]:
    """Check after each test that no lock is left behind, in either database."""
    for worker in workers:
        workers[worker] = len(worker.log)
    yield
    for client in (redis_client, elsewhere):
        try:
            wait_for("no lock is left", lambda client=client: not client.keys("dislock*"))
        finally:
            for left in client.keys("dislock*"):
                client.delete(left)  # the next test is not to blame


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show with a failed test what the workers logged during it."""
    report = yield
    if report.failed:
        for worker, start in item.config.stash.get(WORKERS, {}).items():
            report.sections.append((f"log of {worker.name}", worker.log[start:][-LOG_SHOWN:]))
    return report


def _require(pool: str) -> None:
    if pool in {"gevent", "eventlet"} and importlib.util.find_spec(pool) is None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have {pool}", pytrace=False)
        pytest.skip(f"{pool} is not installed")


def _pool_options(pool: str) -> list[str]:
    return ["--pool", pool, "--concurrency", str(CONCURRENCY[pool])]


def _env(server: RedisServer) -> dict[str, str]:
    return {"SCENARIOS_URL": server.url}


def _stop(some: list[Worker], workers: dict[Worker, int]) -> None:
    for worker in some:
        if worker.running:
            worker.terminate()  # all at once: each takes a moment
    try:
        for worker in some:
            worker.stop()
    finally:
        for worker in some:
            workers.pop(worker, None)

"""Workers to test with: a pair for each pool that lasts, and such as a test starts for itself."""

import importlib.util
import json
import re
import uuid
from contextlib import contextmanager

import pytest

from tests.acceptance import scenarios
from tests.acceptance.fleet import CONCURRENCY, Fleet, Scene, Worker, leases_of, wait_for
from tests.programs import missing
from tests.redis_server import RedisServer

MEANT_TO_STAY = re.compile(
    r"dislock:(sweep:|lines:|epoch:|\{.*\}:(done:|crashes:|(newest|lasted)$))"
)
LOG_SHOWN = 20_000  # characters of each worker's log in the report of a failed test
WORKERS = pytest.StashKey[dict[Worker, int]]()  # with the length of its log when the test began


@pytest.fixture(scope="session")
def server(redis_program, tmp_path_factory):
    """A server for workers that outlive a test: nobody flushes it."""
    with RedisServer(tmp_path_factory.mktemp("acceptance") / "redis") as server:
        scenarios.app.conf.update(broker_url=server.url, result_backend=server.url)
        yield server
        scenarios.app.close()


@pytest.fixture(scope="session")
def redis_client(server):
    """A client beside those of the package and of the tasks, which speaks str."""
    with server.client(decode_responses=True) as client:
        yield client


@pytest.fixture(scope="session")
def workers(pytestconfig):
    """All workers that run, for the logs that are shown with a failed test."""
    return pytestconfig.stash.setdefault(WORKERS, {})


@pytest.fixture(scope="session")
def start_pair(server, workers, tmp_path_factory):
    """What starts workers of one pool, and ends them: pool, name, broker URL, options of each.

    Mostly two, with --dislock.  They send events, for they may end the tasks of another test: all
    workers sweep the one store.
    """

    @contextmanager
    def start(pool, name, broker_url=None, conf=None, modes=("--dislock", "--dislock"), **kwargs):
        _require(pool)
        folder = tmp_path_factory.mktemp(name)
        queue = f"fleet-{name}"
        options = [*_pool_options(pool), "--queues", queue, "--task-events"]
        env = {**_env(server, broker_url), "SCENARIOS_CONF": json.dumps(conf or {})}
        pair = []
        try:
            for number, mode in enumerate(modes, 1):
                given = [*options, *mode.split()]
                worker = Worker(folder, f"{name}{number}", *given, env=env, **kwargs)
                pair.append(worker)
                workers[worker] = 0
            for worker in pair:
                worker.wait_until_ready()
            yield Fleet(pool, queue, pair, broker_url)
        finally:
            _stop(pair, workers)

    return start


@pytest.fixture(scope="session")
def prefork_pair(start_pair):
    """The pair of the prefork pool, for all tests of it whose broker is Redis."""
    with start_pair("prefork", "prefork") as pair:
        yield pair


@pytest.fixture(scope="session")
def rabbitmq_pair(start_pair, rabbitmq):
    """A pair of the prefork pool whose broker is RabbitMQ."""
    with start_pair("prefork", "rabbitmq", rabbitmq.url) as pair:
        yield pair


@pytest.fixture(scope="session", params=list(CONCURRENCY))
def fleet(request, start_pair):
    """Workers of one pool with --dislock, for all tests of that pool; or of another broker.

    Two, but one of a pool of greenlets: it has many slots, and takes long to start.
    """
    pool = request.param
    if pool in {"prefork", "rabbitmq"}:
        yield request.getfixturevalue(f"{pool}_pair")
    else:
        modes = ["--dislock"] * (1 if pool in {"gevent", "eventlet"} else 2)
        with start_pair(pool, pool, modes=modes) as pair:
            yield pair


@pytest.fixture
def start_fleet(server, workers, tmp_path):
    """Start a worker of this test alone, with its own queue: ``start_fleet(pool, *options)``.

    It is killed at the end of the test, when no lock is left.
    """
    started = []

    def start(pool, *options, ready=True, queue=None, broker_url=None, conf=None, **kwargs):
        _require(pool)
        queue = queue or f"own-{uuid.uuid4().hex[:8]}"
        env = {**_env(server, broker_url), **kwargs.pop("env", {})}
        if conf is not None:
            env["SCENARIOS_CONF"] = json.dumps(conf)
        options = (*_pool_options(pool), "--queues", queue, *options)
        worker = Worker(tmp_path, f"own{len(started) + 1}", *options, env=env, **kwargs)
        started.append(worker)
        workers[worker] = 0
        if ready:
            worker.wait_until_ready()
        return Fleet(pool, queue, [worker], broker_url)

    try:
        yield start
    finally:
        _stop(started, workers)


@pytest.fixture
def scene(redis_client, _nothing_is_left, request):
    """A key of this test alone; at its end, the gate of that key is opened."""
    name = getattr(request.node, "originalname", request.node.name)
    scene = Scene(f"{name}-{uuid.uuid4().hex[:8]}", redis_client)
    yield scene
    scene.open_gate()


@pytest.fixture(autouse=True)
def _nothing_is_left(redis_client, workers, start_fleet):
    """Check after each test that no lock is left behind.

    By then the gate of the test's key is open, and its own workers are still there.  The gates of
    bodies that stay by themselves are opened here: one that a failed test has left would take a
    slot from all tests that follow.
    """
    for worker in workers:
        workers[worker] = len(worker.log)
    yield

    def is_over():
        for lock in (left := left_behind(redis_client)):
            for task_id in holders_of(redis_client, lock):
                redis_client.set(scenarios.gate_of(task_id), "open")
        return not left

    try:
        wait_for("no lock is left", is_over)
    except AssertionError as exc:
        raise AssertionError(f"{exc}: {left_behind(redis_client)}") from exc
    finally:
        for left in left_behind(redis_client):
            redis_client.delete(left)  # the next test is not to blame


def left_behind(client):
    """What locks have left, but for what is meant to stay for a while.

    That is the lease of the worker that sweeps, its list of lines, a mark for each task that was
    parked and has run and each delivery that was parked again, which tasks of a key were sent last,
    how long bodies took for which tasks were parked, the count of each that has killed its process,
    and the numbers of messages that have replaced each other.
    """
    keys = [key for key in client.keys("dislock*") if not MEANT_TO_STAY.match(key)]
    return [key for key in keys if not _keeps_numbers(client, key)]


def holders_of(client, lock):
    """The tasks that hold a lock."""
    if lock.endswith("}") and client.type(lock) == "hash":
        return [lease.holder["id"] for lease in leases_of(client, lock) if "id" in lease.holder]
    return []


def _keeps_numbers(client, key):
    if not key.endswith(":unique"):
        return False
    return (client.get(key) or "").startswith("1 - ")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Let one process run all tests of a fleet, so that each fleet is started once.

    A test that starts its own workers may run anywhere.  Most tests are of the prefork fleet: it is
    started twice, and each file of them is for the process that has fewer such tests so far.
    """
    sizes = [0, 0]
    halves = {}
    for item in items:
        if item.get_closest_marker("acceptance") and (group := _group(item)):
            if group == "prefork":
                half = halves.setdefault(item.path, sizes.index(min(sizes)))
                sizes[half] += 1
                group += str(half)
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item):
    if item.get_closest_marker("xdist_group"):
        return None  # it names its own
    asked = set(item.fixturenames)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    broker = params.get("broker")
    if asked & {"rabbitmq", "rabbitmq_pair"} or broker == "rabbitmq":
        return "rabbitmq"
    if "fleet" in asked and (shared := params.get("fleet", broker)):
        return "prefork" if shared == "redis" else shared
    if "prefork_pair" in asked:
        return "prefork"
    return item.path.stem if "canvas" in asked else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Show with a failed test what the workers logged during it."""
    report = yield
    if report.failed:
        for worker, start in item.config.stash.get(WORKERS, {}).items():
            report.sections.append((f"log of {worker.name}", worker.log[start:][-LOG_SHOWN:]))
    return report


def _require(pool):
    module = {"aio": "celery_aio_pool"}.get(pool, pool)
    if pool in {"gevent", "eventlet", "aio"} and importlib.util.find_spec(module) is None:
        missing(module)


def _pool_options(pool):
    if pool == "aio":
        return ["--pool", "custom", "--concurrency", "1"]
    return ["--pool", pool, "--concurrency", str(CONCURRENCY[pool])]


def _env(server, broker_url):
    return {
        "SCENARIOS_URL": server.url,
        "SCENARIOS_BROKER_URL": broker_url or server.url,
        "CELERY_CUSTOM_WORKER_POOL": "celery_aio_pool.pool:AsyncIOPool",
    }


def _stop(some, workers):
    for worker in some:
        worker.kill()
        workers.pop(worker, None)

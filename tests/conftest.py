"""What every tier shares: Redis servers of our own, started here and ended here."""

import logging
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakSet

import pytest
import redis
from celery import _state
from kombu.transport import memory

from celery_dislock.servers.memory import memory_server
from celery_dislock.tasks.request import told_to_end
from tests.acceptance.rabbitmq import own_rabbitmq
from tests.leaks import Watch, remember
from tests.orphans import pytest_configure, pytest_unconfigure  # noqa: F401 -- hooks
from tests.programs import find_redis, not_tried
from tests.redis_server import Client, RedisServer, ServerMissing, find_server
from tests.unclosed import (
    keep_subscriptions,
    note_connections,
    pytest_runtest_teardown,  # noqa: F401 -- a hook
)

TESTS = Path(__file__).parent
NOT_OF_TESTS = {"celery.app.builtins", "celery_dislock.plugin"}  # modules that extend all apps
# Parameters by which a test shows again what it shows with workers of the prefork pool on a Redis.
OTHERS = {"threads", "gevent", "eventlet", "solo", "rabbitmq", "classic", "quorum"}
PARTS = {"docs/test_snippets.py": 2, "faults/test_simulation.py": 4}
# Which tests start first: those that wait longest, largest group first.
TURN = {"acceptance": 0, "faults": 0, "docs": 0, "smoke": 0, "integration": 1, "unit": 2, "site": 3}

# redis-py 5.0 leaves connections to the garbage collector, those of Celery and kombu, too.
LEFT_SOCKETS = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)

if redis.VERSION[:2] != (5, 0):
    note_connections()
keep_subscriptions()

# The browser tests need the extra "site", which `make site` installs.
collect_ignore = [] if find_spec("playwright") else ["site"]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Keep the tests of a file in one process, if several run; the largest groups come first.

    Groups are those of pytest-xdist's ``--dist loadgroup``.  The acceptance tests have their own;
    so have all that use RabbitMQ, which takes long to start: two, which come before all others.
    The tests of a file of :data:`PARTS` take long, and are dealt out to several.
    """

    def group(item):
        mark = item.get_closest_marker("xdist_group")
        return mark.args[0] if mark else item.nodeid

    places = {path: path.relative_to(TESTS) for path in {item.path for item in items}}
    seen = Counter()
    for item in items:
        tier = places[item.path].parts[0]
        shown = item.callspec.id.split("-") if hasattr(item, "callspec") else ()
        if "rabbitmq" in item.fixturenames or (tier == "acceptance" and OTHERS.intersection(shown)):
            item.add_marker("extra")
        if tier == "acceptance":
            item.add_marker(tier)
        else:
            of_faults = "rabbitmq" in item.fixturenames
            own = "rabbitmq of faults" if of_faults else places[item.path].as_posix()
            seen[own] += 1
            if own in PARTS:
                own = f"{own} {seen[own] % PARTS[own]}"
            item.add_marker(pytest.mark.xdist_group(own))
        if redis.VERSION[:2] == (5, 0):
            item.add_marker(LEFT_SOCKETS)
    yield
    sizes = Counter(map(group, items))

    def turn(item):
        on_rabbitmq = group(item).startswith("rabbitmq")
        return TURN[places[item.path].parts[0]], not on_rabbitmq, -sizes[group(item)]

    items.sort(key=turn)


def pytest_report_header():
    """Say which Redis the tests run."""
    try:
        return f"lock server: {find_server()}"
    except ServerMissing as exc:
        return str(exc)


def pytest_terminal_summary(terminalreporter):
    """Say what this machine cannot try."""
    if line := not_tried(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def shared_tasks_are_the_tests_own(monkeypatch):
    """Celery gives a shared task to all apps, also to one of another test that is still alive."""
    monkeypatch.setattr(_state, "_apps", WeakSet())
    kept = {one for one in _state._on_app_finalizers if one.__module__ in NOT_OF_TESTS}
    monkeypatch.setattr(_state, "_on_app_finalizers", kept)


@pytest.fixture(autouse=True)
def messages_are_the_tests_own():
    """Brokers in memory share their queues, and keep what a test has left there."""
    memory.Channel.queues.clear()


@pytest.fixture(autouse=True)
def requests_are_the_tests_own():
    """A worker that ends waits in a thread for what was told to end, also by another test."""
    told_to_end.clear()


@pytest.fixture(autouse=True)
def warnings_are_the_tests_own():
    """What is logged once per process is logged once per test, whichever tests ran before."""
    for name, module in list(sys.modules.items()):
        if name.startswith("celery_dislock.") and hasattr(module, "WARNED_MOST"):
            for warns in vars(module).values():
                if getattr(warns, "__name__", "").startswith("_warn_of"):
                    warns.cache_clear()


@pytest.fixture(scope="session")
def redis_program():
    """The redis-server to run.  Where there is none the test is skipped; in CI it fails."""
    return find_redis()


@pytest.fixture(scope="session")
def redis_server(redis_program, tmp_path_factory):
    """One server for the whole session.  Tests share it: leave it running, and flush nothing."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(request):
    """The URL of the session's server, or of fakeredis's if a test asks, with nothing in it."""
    server = memory_server() if is_fake(request) else request.getfixturevalue("redis_server")
    with Client.from_url(server.url) as client:
        client.flushall()
    return server.url


def is_fake(request):
    """Tell whether a test's ``redis_url`` is parametrized, and this time with "fakeredis"."""
    return getattr(request, "param", "redis") == "fakeredis"


BOTH = pytest.mark.parametrize("redis_url", ["redis", "fakeredis"], indirect=True)


@pytest.fixture
def redis_client(redis_url):
    """A client of the flushed database, beside the package's own, that speaks str."""
    with Client.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory):
    """A RabbitMQ for the session.  Where there is none the test is skipped; in CI it fails."""
    with own_rabbitmq(tmp_path_factory.mktemp("broker") / "rabbitmq") as rabbitmq:
        yield rabbitmq


@pytest.fixture(scope="module")
def lock_server(redis_program, tmp_path_factory):
    """A server of this file alone, of which nobody else empties anything."""
    with RedisServer(tmp_path_factory.mktemp("locks")) as server:
        yield server


@pytest.fixture
def own_redis_server(redis_program, tmp_path):
    """A server of this test alone, to kill, pause and restart."""
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture(autouse=True)
def no_password_is_told():
    """Fail a test after which a log record or an error of the package has a password in it."""
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        remember(watch, patch)
        logging.getLogger().addHandler(watch)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(watch)
    leaks = list(watch.leaks())
    assert not leaks, f"a password is told: {leaks[:3]}"

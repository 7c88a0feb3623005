"""Beside libraries that add headers to messages, what waits for its lock still runs."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
from celery.result import AsyncResult

from tests.acceptance.delayed_app import LIMIT, close, made
from tests.acceptance.fleet import Worker, value_of, wait_for

pytestmark = [pytest.mark.xdist_group("neighbours"), pytest.mark.extra]

MANY = 5
# A header that the neighbour adds, as its module and the worker's settings say.
NEIGHBOURS = {
    "headers": ("celery", "x"),
    "sentry": ("sentry_sdk", "sentry-trace"),
    "opentelemetry": ("opentelemetry.instrumentation.celery", "traceparent"),
    "ddtrace": ("ddtrace", "x-datadog-trace-id"),
}
QUIET = {
    "DD_CELERY_DISTRIBUTED_TRACING": "true",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    "DD_TRACE_STARTUP_LOGS": "false",
}


@pytest.fixture(
    scope="module",
    # In a thread, a message is not written down once more for another process.
    params=[*((name, "prefork") for name in NEIGHBOURS), ("headers", "threads")],
    ids=" in ".join,
)
def beside(request, server, workers, tmp_path_factory):
    """A worker beside a neighbour, and an app that looks at its tasks."""
    neighbour, pool = request.param
    _require(NEIGHBOURS[neighbour][0])
    broker = server.url.removesuffix("0") + "3"
    env = {"DELAYED_LOCKS": server.url, "DELAYED_URL": server.url, "DELAYED_BROKER": broker}
    env |= {"DELAYED_QUEUES": "redis", "NEIGHBOUR": neighbour, **QUIET}
    options = ["--pool", pool, "--concurrency", "3", "--dislock"]
    folder = tmp_path_factory.mktemp("neighbours")
    started = Worker(folder, neighbour, *options, app="tests.acceptance.neighbours_app", env=env)
    workers[started] = 0
    try:
        started.wait_until_ready()
        app = made("redis", server.url, server.url, broker)
        with server.client(decode_responses=True) as client:
            known = {"neighbour": neighbour, "pool": pool, "app": app}
            yield SimpleNamespace(**known, worker=started, client=client)
        close(app)
    finally:
        started.kill()
        workers.pop(started)


def _require(module):
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have {module}", pytrace=False)
        pytest.skip(f"{module} is not installed")


def send(beside, *sent):
    """Let the worker send, since the neighbour is there; return results and who is a duplicate."""
    task = beside.app.send_task("send", ([one if len(one) > 2 else (*one, {}) for one in sent],))
    answers = value_of(task, LIMIT)
    return [AsyncResult(one, app=beside.app) for one, _ in answers], [is_it for _, is_it in answers]


@pytest.fixture
def key(beside, request):
    key = f"{beside.neighbour}-{beside.pool}-{request.node.originalname}"
    yield key
    beside.client.set(f"gate:{key}", "open")


def ran(beside, key):
    return beside.client.lrange(f"ran:{key}", 0, -1)


def test_the_neighbour_is_there(beside):
    """It adds its headers, and so the other tests of it mean something."""
    [result], _ = send(beside, ("headers", []))
    assert NEIGHBOURS[beside.neighbour][1] in value_of(result, LIMIT)


def test_parked_tasks_run_once_each(beside, key):
    """Their turns are claimed: none is parked again for its own."""
    [holder], _ = send(beside, ("hold", [key]))
    wait_for("it is held", lambda: beside.client.exists(f"dislock:{{{key}}}"))
    results, _ = send(beside, *(("queue", [key, str(n)]) for n in range(MANY)))
    line = f"dislock:{{{key}}}:line"
    wait_for("they are in line", lambda: beside.client.zcard(line) == MANY, LIMIT)
    beside.client.set(f"gate:{key}", "open")
    assert [value_of(one, LIMIT) for one in results] == list(map(str, range(MANY)))
    assert value_of(holder, LIMIT) == "held"
    assert sorted(ran(beside, key)) == list(map(str, range(MANY)))


def test_a_unique_key_is_free_when_its_task_has_ended(beside, key):
    """The next message is no duplicate then."""
    beside.client.set(f"gate:{key}", "open")
    for _ in range(3):
        [result, _], duplicates = send(beside, *[("unique", [key])] * 2)
        assert duplicates[0] is False
        assert value_of(result, LIMIT) == "held"
        wait_for("the key is free", lambda: not beside.client.exists(f"dislock:{{{key}}}:unique"))


def test_of_messages_that_replace_each_other_the_newest_runs(beside, key):
    """The older ones end as REVOKED when they come."""
    editions = [("debounce", [key, str(n)], {"countdown": 1}) for n in range(MANY)]
    results, _ = send(beside, *editions)
    assert value_of(results[-1], LIMIT) == str(MANY - 1)
    for result in results[:-1]:
        wait_for("it has ended", result.ready, LIMIT)
    assert {result.state for result in results[:-1]} == {"REVOKED"}
    assert ran(beside, key) == [str(MANY - 1)]


def test_the_newest_takes_over(beside, key):
    """The one that ran ends as REVOKED, which is no error to tell anybody of."""
    [older], _ = send(beside, ("cancel", [key]))
    wait_for("it runs", lambda: beside.client.exists(f"dislock:{{{key}}}"))
    [newest], _ = send(beside, ("cancel", [key]))
    wait_for("it has ended", older.ready, LIMIT)
    assert older.state == "REVOKED"
    assert newest.id in str(older.result)
    beside.client.set(f"gate:{key}", "open")
    assert value_of(newest, LIMIT) == "held"
    assert beside.client.lrange("sentry", 0, -1) == []


@pytest.mark.parametrize("name", ["retry", "retry_held", "retry_unique"])
def test_a_retry_goes_on_with_what_it_has(beside, key, name):
    """It is not put off by its own lease or its own reservation, and keeps them."""
    key += name
    [result], _ = send(beside, (name, [key, 2]))
    assert value_of(result, LIMIT) == "ran"
    assert ran(beside, key) == ["retries", "retries", "ran"]
    assert f"{name}[{result.id}] put off" not in beside.worker.log
    wait_for("the key is free", lambda: not beside.client.exists(f"dislock:{{{key}}}:unique"))

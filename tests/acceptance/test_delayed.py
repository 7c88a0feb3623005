"""What is sent again comes again, whatever delays it: RabbitMQ's quorum queues, or a worker."""

from itertools import product
from types import SimpleNamespace

import pytest
from kombu import Exchange, Queue

from tests.acceptance.delayed_app import LIMIT, QUEUES, SHORT, close, made
from tests.acceptance.fleet import Worker, value_of, wait_for
from tests.redis_server import RedisServer

# The acceptance tests on RabbitMQ share one, in one process of the test run.
KINDS = [
    pytest.param("quorum", marks=pytest.mark.xdist_group("rabbitmq")),
    pytest.param("classic", marks=pytest.mark.xdist_group("rabbitmq")),
    pytest.param("redis", marks=pytest.mark.xdist_group("delayed")),
]
MANY = 6
RETRIES = 5  # kombu 5.5 makes the routing key longer with each, and too long with the fifth


@pytest.fixture(scope="module")
def lock_server(redis_program, tmp_path_factory):
    """The Redis of the locks, and of nothing else."""
    with RedisServer(tmp_path_factory.mktemp("delayed") / "redis") as server:
        yield server


@pytest.fixture(scope="module", params=KINDS)
def queues(request, server, lock_server, workers, tmp_path_factory):
    """Two workers, and an app that sends to them, for one kind of queue."""
    kind = request.param
    broker = server.url.removesuffix("0") + "2"
    if kind != "redis":
        broker = request.getfixturevalue("rabbitmq").url
    folder = tmp_path_factory.mktemp(kind)
    env = {"DELAYED_LOCKS": lock_server.url, "DELAYED_URL": server.url, "DELAYED_BROKER": broker}
    env["DELAYED_QUEUES"] = kind
    options = ["--pool", "prefork", "--concurrency", "4", "--dislock", "--task-events"]
    worker = Worker(folder, kind, *options, app="tests.acceptance.delayed_app", env=env)
    workers[worker] = 0
    try:
        worker.wait_until_ready()
        app = made(kind, lock_server.url, server.url, broker)
        with lock_server.client() as locks, server.client(decode_responses=True) as client:
            yield SimpleNamespace(kind=kind, app=app, worker=worker, client=client, locks=locks)
        close(app)
    finally:
        worker.kill()
        workers.pop(worker)


@pytest.fixture
def key(queues, request):
    """A key of this test alone."""
    key = f"{queues.kind}-{request.node.originalname}-{id(request)}"
    yield key
    queues.client.set(f"gate:{key}", "open")


def send(queues, name, *args, queue="first", **options):
    return queues.app.tasks[name].apply_async(args, queue=f"{queues.kind}-{queue}", **options)


def hold(queues, key):
    """Let a task hold the lock until its gate is opened."""
    holder = send(queues, "hold", key)
    wait_for("it is held", lambda: queues.locks.exists(f"dislock:{{{key}}}"))
    return holder


def reports(queues, key):
    return queues.client.lrange(f"ran:{key}", 0, -1)


def test_a_task_that_is_put_off_comes_again_to_its_queue(queues, key):
    """Each time, until the lock is free, with what its sender gave it."""
    hold(queues, key)
    headers = {"tenant": "seven", "headers": {"trace": "7"}}
    results = [
        send(queues, "try", key, f"{queue}-{n}", queue=queue, headers=headers)
        for queue in QUEUES
        for n in range(MANY)
    ]

    def all_were_put_off(times):
        log = queues.worker.log
        return all(log.count(f"try[{one.id}] put off") >= times for one in results)

    wait_for("they come again", lambda: all_were_put_off(3), LIMIT)
    queues.client.set(f"gate:{key}", "open")
    expected = sorted(f"{queue}-{n}" for queue in QUEUES for n in range(MANY))
    assert sorted(value_of(one, LIMIT) for one in results) == expected
    assert sorted(reports(queues, key)) == expected


def test_messages_of_several_queues_do_not_multiply(queues, key):
    """An exchange copies them to its queues; delayed delivery to all queues with the same key."""
    hold(queues, key)

    def publish(name, exchange, route):
        where = {"exchange": f"{queues.kind}-{exchange}", "routing_key": f"{queues.kind}-{route}"}
        return queues.app.tasks[name].apply_async([key, f"{name}-{exchange}"], **where)

    def times(result, what):
        return queues.worker.log.count(f"[{result.id}] {what}")

    # With the number of their copies.
    tries = [(publish("try", "copied", "copied"), 2), (publish("try", "fifth", "same"), 1)]
    parked = publish("queue", "copied", "copied")
    wait_for(
        "they are put off",
        lambda: all(times(one, "put off") >= 3 * copies for one, copies in tries),
        LIMIT,
    )
    wait_for(
        "it is in line", lambda: times(parked, "received") >= 2 and times(parked, "parked"), LIMIT
    )
    queues.client.set(f"gate:{key}", "open")
    runs = ["queue-copied", "try-copied", "try-copied", "try-fifth"]
    wait_for("all have run", lambda: len(reports(queues, key)) >= len(runs), LIMIT)
    sent = [*tries, (parked, 3)]  # two copies, and its turn
    wait_for(
        "all have come",
        lambda: all(times(one, "received") == times(one, "put off") + by for one, by in sent),
        LIMIT,
    )
    assert {value_of(one, LIMIT) for one, _ in sent} == set(runs)
    assert sorted(reports(queues, key)) == runs


@pytest.mark.parametrize("name", ["try", "queue"])
def test_a_task_of_a_queue_that_was_added_later_comes_again(queues, key, name):
    """Of whose exchange the pool processes of the worker have not heard."""
    late = f"{queues.kind}-late-{name}"
    queue = Queue(late, Exchange(late, "topic"), f"{late}.#")
    about = {"exchange": late, "exchange_type": "topic", "routing_key": f"{late}.#"}
    its = {"destination": [f"{queues.worker.name}@here"], "reply": True, "timeout": LIMIT}
    queues.app.control.add_consumer(late, **its, **about)
    hold(queues, key)
    options = {"exchange": queue.exchange, "routing_key": f"{late}.one", "declare": [queue]}
    result = queues.app.tasks[name].apply_async([key], **options)
    ends = {"try": "put off", "queue": "parked"}[name]
    wait_for("it waits", lambda: f"{name}[{result.id}] {ends}" in queues.worker.log, LIMIT)
    queues.client.set(f"gate:{key}", "open")
    assert value_of(result, 20) == "ran"


def test_parked_tasks_run_though_they_were_delayed_before(queues, key):
    """Each has its turn once, also if it came with a countdown."""
    hold(queues, key)
    results = [send(queues, "queue", key, str(n), countdown=1) for n in range(MANY)]
    line = f"dislock:{{{key}}}:line"
    wait_for("they are in line", lambda: queues.locks.zcard(line) == MANY, LIMIT)
    queues.client.set(f"gate:{key}", "open")
    assert sorted(value_of(one, LIMIT) for one in results) == sorted(map(str, range(MANY)))
    assert len(reports(queues, key)) == MANY


def test_a_retry_of_less_than_a_second_comes(queues, key):
    """Celery asks for no delay then, which the broker refuses, and does not know the queue."""
    results = {
        own: send(queues, name, own, RETRIES, queue=queue)
        for name, queue in product(["retry", "retry_held"], QUEUES)
        for own in [f"{key}-{name}-{queue}"]
    }
    for own, result in results.items():
        assert value_of(result, LIMIT) == "ran"
        assert reports(queues, own) == ["retries"] * RETRIES + ["ran"]


def test_a_message_that_waits_for_newer_ones_comes(queues, key):
    """A countdown of less than a second, or one cut to that, is one that the broker takes."""
    first = send(queues, "debounce", key, "old", countdown=2)
    newest = send(queues, "debounce", key, "new", countdown=SHORT)
    assert value_of(newest, LIMIT) == "new"
    wait_for("the older one has ended", first.ready, LIMIT)
    assert first.state == "REVOKED"
    cut = send(queues, "debounce_briefly", key + "-cut", countdown=30)
    assert value_of(cut, LIMIT) == "ran"


def test_tasks_of_an_outage_run_after_it(queues, key, lock_server):
    """They were put off, in whole seconds if need be; none fails, and none is lost."""
    lock_server.pause()
    try:
        results = [send(queues, "try", f"{key}-{n}", str(n)) for n in range(MANY)]
        put_off = [f"try[{one.id}] put off" for one in results]
        wait_for("all were put off", lambda: all(one in queues.worker.log for one in put_off))
    finally:
        lock_server.resume()
    assert [value_of(one, LIMIT) for one in results] == list(map(str, range(MANY)))

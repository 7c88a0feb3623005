"""Every way in which an execution can end: its lock is freed by that, once, and no other's is.

The rows of the table in docs/inside/guarantees.md, in its order (those about options are in
tests/integration/test_releases.py), with Redis as broker, and with RabbitMQ as well if the broker
has a part in it.
The lock's expiry is longer than any wait here, so a lock that gets free was released; where the
table says that it expires, the server's own times are compared.
"""

import contextlib
import os
import select
import signal
import socket
import socketserver
import threading
import uuid

import celery
import pytest
from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery import states
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, REDELIVERY_IS_SLOW, Scene, value_of, wait_for
from tests.acceptance.scenarios import BRIEF
from tests.redis_server import RedisServer

ANY_BROKER = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
SOON = 2.0  # seconds: what comes too late after that are a message or a command
LATER = 2.5  # seconds until a task is due that must not run
SOFT = 3.0  # seconds that a soft shutdown waits for bodies
RELEASED = "Released the lock of"  # of the main process, about a child's execution

# Who frees the lock of an execution.
ITSELF = "itself"
MAIN = "main process"
EITHER = "either"  # whichever comes first
NOBODY = "nobody"  # it has none


@pytest.fixture(scope="session", params=["redis"])
def broker(request):
    """Redis as the broker; RabbitMQ as well, for a test with ANY_BROKER."""
    return request.param


@pytest.fixture
def fleet(request, broker):
    """Two workers of that broker, for all tests of it that leave them alive."""
    return request.getfixturevalue("prefork_pair" if broker == "redis" else "rabbitmq_pair")


@pytest.fixture
def start_worker(start_fleet, broker, request):
    """Start a prefork worker of that broker, or of that URL, for this test alone."""
    started = []
    url = request.getfixturevalue("rabbitmq").url if broker == "rabbitmq" else None

    def start(*options, broker_url=url, **kwargs):
        started.append(start_fleet("prefork", *options, broker_url=broker_url, **kwargs))
        return started[-1]

    yield start
    for fleet in started:
        with contextlib.suppress(ProcessLookupError):
            fleet.workers[0].kill()  # nothing is left to be done, or waited for


class Relay(socketserver.ThreadingTCPServer):
    """Connections to a port of the loopback interface, which can be cut."""

    def __init__(self, to):
        super().__init__(("127.0.0.1", 0), None)
        self.port, self._to, self._ends = self.server_address[1], ("127.0.0.1", to), []
        self._serving = threading.Thread(target=self.serve_forever, args=(0.05,))

    def __enter__(self):
        self._serving.start()
        return self

    def __exit__(self, *_failure):
        self.shutdown()
        self.cut()
        self.server_close()

    def finish_request(self, near, _address):
        with socket.create_connection(self._to) as far, contextlib.suppress(OSError):
            self._ends += near, far
            while True:
                for one in select.select([near, far], [], [])[0]:
                    if not (data := one.recv(65536)):
                        return
                    (far if one is near else near).sendall(data)

    def cut(self):
        while self._ends:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._ends.pop().shutdown(socket.SHUT_RDWR)


@pytest.fixture
def own_broker(request, broker, tmp_path):
    """The URL of a broker, and what drops its connections; the lock server stays what it is."""
    if broker == "rabbitmq":
        rabbitmq = request.getfixturevalue("rabbitmq")
        with Relay(rabbitmq.port) as relay:
            yield rabbitmq.url.replace(str(rabbitmq.port), str(relay.port)), relay.cut
    else:
        with RedisServer(tmp_path / "broker") as server, server.client() as client:
            kinds = ("normal", "pubsub")
            kill = client.client_kill_filter
            yield server.url, lambda: [kill(_type=kind, skipme=True) for kind in kinds]


def is_gone(pid):
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def assert_released(by, fleet, scene, task_id, dead=(), then=None):
    """
    Check that each execution of a task has freed its lock once, and not that of the next one.

    Args:
        by: Who is to have done that.
        fleet: The workers in which the task ran.
        scene: Its key.
        task_id: The task.
        dead: Process ids of executions that were killed.
        then: The workers in which the next one runs; None: the same.
    """

    def tokens(events):
        return sorted(event["token"] for event in events if event["id"] == task_id)

    def releases():
        return tokens(scene.releases), fleet.times_it_says(RELEASED, task_id)

    begun = tokens(scene.reported("begin"))
    due = {ITSELF: (begun, 0), MAIN: ([], len(begun)), NOBODY: ([], 0)}
    scene.wait_until_free()
    following = (then or fleet).send(scenarios.hold_by_itself, scene.key)
    scene.wait_for_report("begin", id=following.id)
    if by in due:
        wait_for(f"who released it: {by}", lambda: releases() == due[by])
    if any(worker.running for worker in fleet.workers):  # else nobody may be left to reap them
        for pid in dead:
            wait_for("the process is gone", lambda pid=pid: is_gone(pid))
    assert_it_holds(scene, following)
    scene.open_gate(following.id)
    assert following.get(timeout=LIMIT)["held"] is True
    scene.wait_until_free()
    if by in due:
        assert releases() == due[by]
    else:
        signals, lines = releases()
        assert len(signals) + lines <= len(begun)
    scene.assert_exclusive(dead)


def assert_it_holds(scene, holder):
    """Check that the lock is held by this task and no other."""
    assert scene.lease.holder["id"] == holder.id


# The body ends.


@pytest.mark.parametrize(
    ("name", "error", "state"),
    [
        ("step_slowly", None, states.SUCCESS),
        ("fail", "ValueError", states.FAILURE),
        ("ignore", "Ignore", states.PENDING),  # it leaves no result
    ],
)
def test_the_body_ends(fleet, scene, name, error, state):
    """Success, an exception and Ignore free the lock before a caller has the result."""
    result = fleet.send(getattr(scenarios, name), scene.key)
    assert scene.wait_for_report("end")["error"] == error
    if error != "Ignore":
        result.get(timeout=LIMIT, propagate=False)
        assert scene.is_free
    assert_released(ITSELF, fleet, scene, result.id)
    assert result.state == state


@pytest.mark.parametrize("task", [scenarios.retry_once, scenarios.autoretry_once])
def test_retry(fleet, scene, task):
    """self.retry() and autoretry_for free the lock, and take it again when their time has come."""
    result = fleet.send(task, scene.key)
    assert result.get(timeout=LIMIT) == 1
    assert [event["error"] for event in scene.reported("end")] in (
        ["Retry", None],
        ["ConnectionError", None],  # autoretry lies around the body
    )
    assert_released(ITSELF, fleet, scene, result.id)


@ANY_BROKER
@pytest.mark.parametrize(
    ("name", "ends"),
    [("reject", ["Reject"]), ("reject_once", ["Reject", None])],
    ids=["for good", "and requeue"],
)
def test_reject(fleet, scene, name, ends):
    """Reject frees the lock; a message that goes back to its queue takes it anew."""
    result = fleet.send(getattr(scenarios, name), scene.key)
    wait_for("its ends", lambda: [one["error"] for one in scene.reported("end")] == ends)
    assert_released(ITSELF, fleet, scene, result.id)
    assert len(scene.reported("begin", id=result.id)) == len(ends)


def test_system_exit(start_worker, fleet, scene):
    """A body that raises SystemExit frees the lock on the way out of its process."""
    own = start_worker()  # older Celery cannot store that as a result, and gives up
    result = own.send(scenarios.leave_the_process, scene.key)
    assert scene.wait_for_report("end")["error"] == "SystemExit"
    assert_released(ITSELF, own, scene, result.id, then=fleet)


# It is ended from outside.


def terminated(how):
    return lambda fleet, task_id, _pid: fleet.revoke(task_id, terminate=True, signal=how)


def killed(how):
    return lambda _fleet, _task_id, pid: os.kill(pid, how)


def left_alone(*_):
    """Its time limit ends it."""


ENDED = {  # options of the message, what ends it, what its caller gets, and who frees its lock
    "soft time limit": ({"soft_time_limit": 1}, left_alone, SoftTimeLimitExceeded, ITSELF),
    "hard time limit": ({"time_limit": 1}, left_alone, TimeLimitExceeded, EITHER),  # SIGTERM first
    "terminated": ({}, terminated("SIGTERM"), TaskRevokedError, EITHER),
    "terminated by SIGKILL": ({}, terminated("SIGKILL"), TaskRevokedError, MAIN),
    "SIGTERM": ({}, killed(signal.SIGTERM), (WorkerLostError, SystemExit), EITHER),
    "SIGKILL": ({}, killed(signal.SIGKILL), WorkerLostError, MAIN),
    "SIGSEGV": ({}, killed(signal.SIGSEGV), WorkerLostError, MAIN),
}


@pytest.mark.parametrize("how", ENDED)
def test_it_is_ended_from_outside(fleet, scene, how):
    """By a time limit, a revoke or the death of its process: the lock is free."""
    options, end, error, by = ENDED[how]
    result = fleet.send(scenarios.hold, scene.key, **options)
    pid = scene.wait_for_report("begin")["pid"]
    end(fleet, result.id, pid)
    with pytest.raises(error):
        result.get(timeout=LIMIT)
    assert not scene.reported("end", error=None)
    assert_released(by, fleet, scene, result.id, dead=[] if by == ITSELF else [pid])


@ANY_BROKER
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("revoked before it is sent", {}),
        ("revoked while it waits for its time", {"countdown": SOON}),
        ("expired", {"expires": SOON, "countdown": LATER}),
    ],
)
def test_it_never_begins(fleet, scene, how, options):
    """A task that is revoked or expires before its body begins neither runs nor locks."""
    task_id = str(uuid.uuid4())
    if how == "revoked before it is sent":
        assert len(fleet.revoke(task_id, reply=True)) == len(fleet.workers)
    result = fleet.send(scenarios.hold, scene.key, task_id=task_id, **options)
    if how == "revoked while it waits for its time":
        wait_for("the task has come", lambda: fleet.says(task_id, "received"))
        fleet.revoke(task_id)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=LIMIT)
    assert scene.history == []
    assert_released(NOBODY, fleet, scene, task_id)


def test_revoke_while_it_is_put_off(fleet, scene):
    """A second delivery that is revoked while it is put off leaves the first its lock."""
    result = scene.begin(fleet)
    fleet.send(scenarios.hold, scene.key, task_id=result.id)
    wait_for("it is put off", lambda: fleet.says("put off", result.id))
    assert len(fleet.revoke(result.id, reply=True)) == len(fleet.workers)
    wait_for("it is dropped", lambda: fleet.says("Discarding revoked task", result.id))
    assert_it_holds(scene, result)
    scene.open_gate()
    scene.wait_for_report("end", id=result.id, error=None)
    assert_released(ITSELF, fleet, scene, result.id)


def test_revoke_while_it_runs(fleet, scene):
    """A plain revoke of a running task changes nothing: it holds its lock to its end."""
    result = scene.begin(fleet)
    assert len(fleet.revoke(result.id, reply=True)) == len(fleet.workers)
    scene.assert_others_stay_out(fleet, result)
    assert_it_holds(scene, result)
    scene.open_gate()
    scene.wait_for_report("end", id=result.id, error=None)  # newer Celery tells the caller REVOKED
    assert_released(ITSELF, fleet, scene, result.id)


# Its process ends.


@ANY_BROKER
def test_death_of_the_child_and_redelivery(fleet, scene):
    """With acks_late and reject_on_worker_lost the message comes back, and finds the lock free."""
    result = fleet.send(scenarios.hold_and_survive, scene.key)
    first = scene.wait_for_report("begin")
    os.kill(first["pid"], signal.SIGKILL)
    again = scene.wait_for_report("begin", times=2)
    assert again["id"] == result.id
    assert again["pid"] != first["pid"]
    assert_it_holds(scene, result)
    assert fleet.times_it_says(RELEASED, result.id) == 1
    assert scene.finish(result)["held"]
    wait_for("one release", lambda: [r["token"] for r in scene.releases] == [again["token"]])
    assert_released(EITHER, fleet, scene, result.id, dead=[first["pid"]])


@pytest.mark.parametrize("how", ["the body ends", "the child is killed", "it is terminated"])
def test_a_lock_that_was_lost_is_not_released(fleet, scene, how):
    """An execution that ends after its lock was taken from it leaves that of the next holder."""
    first = fleet.send(scenarios.hold_by_itself, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    scene.lose_the_lock()
    second = scene.begin(fleet)
    lease = scene.lease
    if how == "the body ends":
        scene.open_gate(first.id)
    elif how == "the child is killed":
        os.kill(pid, signal.SIGKILL)
    else:
        fleet.revoke(first.id, terminate=True)
    first.get(timeout=LIMIT, propagate=False)
    if how != "the body ends":
        wait_for("the process is gone", lambda: is_gone(pid))
    scene.assert_others_stay_out(fleet, second)
    assert scene.lease == lease
    assert scene.finish(second)["held"]


# Its worker ends.


def test_warm_shutdown(start_worker, fleet, scene):
    """A worker that is told to stop keeps the lock until its last body has ended.

    A new worker of the same name starts meanwhile, as in a deploy, and takes no lock from it.
    """
    own = start_worker()
    result = scene.begin(own)
    own.worker.terminate()
    own.worker.wait_until_it_says("Warm shutdown")
    lease = scene.lease
    start_worker("--dislock", "-n", lease.holder["worker"])
    scene.assert_others_stay_out(fleet, result)
    assert scene.lease.token == lease.token
    scene.open_gate()
    assert own.worker.wait_until_it_ends() == 0
    assert result.get(timeout=LIMIT)["held"] is True
    assert scene.is_free
    assert_released(ITSELF, own, scene, result.id, then=fleet)


def test_soft_shutdown(start_worker, fleet, scene, redis_client):
    """A body that ends in the time of a soft shutdown keeps its lock; others are stopped then."""
    own = start_worker(conf={"worker_soft_shutdown_timeout": SOFT})
    slow = Scene(f"{scene.key}-slow", redis_client)
    results = [own.send(scenarios.hold, each.key) for each in (scene, slow)]
    dead = [each.wait_for_report("begin")["pid"] for each in (scene, slow)]
    own.worker.process.send_signal(signal.SIGQUIT)
    own.worker.wait_until_it_says("Initiating Soft Shutdown")
    for each, result in zip((scene, slow), results, strict=True):
        assert_it_holds(each, result)
    scene.open_gate()
    assert results[0].get(timeout=LIMIT)["held"] is True
    own.worker.wait_until_it_ends()
    assert_released(ITSELF, own, scene, results[0].id, then=fleet)
    assert not slow.reported("end", error=None)
    assert_released(EITHER, own, slow, results[1].id, dead=dead[1:], then=fleet)


@pytest.mark.parametrize("times", [1, 2])
def test_cold_shutdown(start_worker, fleet, scene, times):
    """A worker that is told to stop at once leaves no lock behind."""
    own = start_worker()
    result = own.send(scenarios.hold, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    own.worker.process.send_signal(signal.SIGQUIT)
    own.worker.wait_until_it_says("Cold shutdown")
    if times > 1:
        own.worker.process.send_signal(signal.SIGQUIT)
    own.worker.wait_until_it_ends()
    assert not scene.reported("end", error=None)
    assert_released(EITHER, own, scene, result.id, dead=[pid], then=fleet)


@ANY_BROKER
def test_cold_shutdown_and_redelivery(start_worker, scene):
    """With acks_late, a task that is stopped so runs again in another worker, at once."""
    first = start_worker()
    result = first.send(scenarios.hold_and_survive, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    first.worker.process.send_signal(signal.SIGQUIT)
    first.worker.wait_until_it_ends()
    second = start_worker(queue=first.queue)
    assert scene.wait_for_report("begin", times=2)["id"] == result.id
    assert scene.finish(result)["held"]
    assert_released(EITHER, second, scene, result.id, dead=[pid])


def test_death_of_the_worker(start_worker, fleet, scene):
    """Where nobody is left to release it, a lock lasts until its expiry, and not longer."""
    own = start_worker()
    result = own.send(scenarios.hold_renewed, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    left = scene.lease
    own.workers[0].kill()
    scene.wait_until_free()
    following = scene.begin(fleet)
    assert left.expires_ms <= scene.lease.acquired_ms
    scene.open_gate()
    assert value_of(following)["held"] is True
    assert not [r for r in scene.releases if r["id"] == result.id]
    scene.assert_exclusive([pid])


@ANY_BROKER
def test_death_of_the_worker_and_redelivery(start_worker, scene, broker):
    """With acks_late, another worker gets the message, and runs it when the lock has expired."""
    if broker == "redis" and REDELIVERY_IS_SLOW:
        pytest.skip("this kombu redelivers every 100 s")
    own = {"queue": scene.key, "env": {"SCENARIOS_VISIBILITY_TIMEOUT": "2"}, "ready": False}
    fleets = [start_worker(**own) for _ in range(2)]
    for fleet in fleets:
        fleet.workers[0].wait_until_ready()
    result = fleets[0].send(scenarios.hold_renewed_and_survive, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    left = scene.lease
    (victim,) = (f.workers[0] for f in fleets if f.workers[0].name in left.holder["worker"])
    victim.kill()
    again = scene.wait_for_report("begin", times=2)
    assert again["id"] == result.id
    assert left.expires_ms <= scene.lease.acquired_ms
    scene.open_gate()
    assert value_of(result)["held"] is True
    scene.wait_until_free()
    assert [release["token"] for release in scene.releases] == [again["token"]]
    scene.assert_exclusive([pid])


# Its worker and the broker lose each other.


def test_lost_connection(start_worker, own_broker, fleet, scene):
    """A task that was acknowledged early runs on under its lock, and only once."""
    url, drop_connections = own_broker
    own = start_worker(broker_url=url)
    result = scene.begin(own)
    lease = scene.lease
    drop_connections()
    own.worker.wait_until_it_says("Connection to broker lost")
    scene.assert_others_stay_out(fleet, result)
    assert scene.lease == lease
    assert scene.finish(result)["held"]
    assert_released(ITSELF, own, scene, result.id)
    assert len(scene.reported("begin", id=result.id)) == 1


def test_lost_connection_and_a_process_that_stands_still(start_worker, own_broker, scene):
    """The main process renews for a stopped process after it has connected again, too."""
    url, drop_connections = own_broker
    own = start_worker("--dislock", broker_url=url)
    result = own.send(scenarios.hold_renewed, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    drop_connections()
    wait_for("it has connected again", lambda: own.worker.log.count("Connected to") > 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(
            "the lease has outlived its process's renewals",
            lambda: scene.lease.extended_by > 3 * BRIEF,
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert scene.finish(result)["held"]


def test_lost_connection_and_a_process_that_is_killed(start_worker, own_broker, scene):
    """Celery before 5.6.3 forgets what its pool runs; the key of the task is free all the same."""
    url, drop_connections = own_broker
    own = start_worker(broker_url=url)
    own.send(scenarios.unique_to_the_end, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    drop_connections()
    wait_for("it has connected again", lambda: own.worker.log.count("Connected to") > 1)
    os.kill(pid, signal.SIGKILL)
    scene.wait_until_free()
    scene.wait_until_unreserved()


def test_lost_connection_and_what_the_worker_tells(start_worker, own_broker, scene):
    """A task that Celery before 5.6.3 has forgotten has its lock, and then is not told of."""
    url, drop_connections = own_broker
    own = start_worker(broker_url=url)
    result = scene.begin(own)
    drop_connections()
    wait_for("it has connected again", lambda: own.worker.log.count("Connected to") > 1)
    wait_for("it says so", lambda: [lease["held"] for lease in own.leases()] == [True])
    scene.finish(result)
    wait_for("nothing runs", lambda: own.leases() == [])


@pytest.mark.extra
def test_a_broker_that_is_away_and_a_process_that_stands_still(start_fleet, scene, tmp_path):
    """The main process waits for the broker, and renews for a stopped process meanwhile."""

    def outlives(seconds):
        wait_for("it outlives that", lambda: scene.lease.extended_by > seconds)
        return scene.lease.extended_by

    with RedisServer(tmp_path / "broker") as server:
        own = start_fleet("prefork", "--dislock", broker_url=server.url)
        result = own.send(scenarios.hold_renewed, scene.key)
        pid = scene.wait_for_report("begin")["pid"]
        server.stop()
        own.worker.wait_until_it_says("Connection to broker lost")
        os.kill(pid, signal.SIGSTOP)
        try:
            before = outlives(4 * BRIEF)
            server.start()
            wait_for("it has connected again", lambda: own.worker.log.count("Connected to") > 1)
            outlives(before + 4 * BRIEF)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert scene.finish(result)["held"]
        own.worker.terminate()
        own.worker.wait_until_it_ends()
    assert not own.says("is lost", scene.key)


@ANY_BROKER
def test_lost_connection_and_redelivery(start_worker, own_broker, scene):
    """With acks_late the message comes back while its task runs, and is put off until it ended."""
    url, drop_connections = own_broker
    fleet = start_worker(broker_url=url)
    result = scene.begin(fleet, scenarios.hold_and_survive)
    drop_connections()
    fleet.worker.wait_until_it_says("Connection to broker lost")
    wait_for("it comes again", lambda: fleet.times_it_says(result.id, "received") > 1)
    if celery.VERSION >= (5, 7):  # older ones start nothing then before a body has ended
        wait_for("the redelivery is put off", lambda: fleet.says("put off", result.id))
    assert len(scene.reported("begin")) == 1
    assert scene.finish(result)["held"]
    scene.wait_for_report("end", times=2, id=result.id)
    assert_released(ITSELF, fleet, scene, result.id)


@ANY_BROKER
def test_lost_connection_and_cancellation(start_worker, own_broker, scene):
    """A task that Celery stops for its lost connection frees its lock, and runs again at once."""
    url, drop_connections = own_broker
    conf = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    fleet = start_worker(broker_url=url, conf=conf)
    result = fleet.send(scenarios.hold_and_survive, scene.key)
    pid = scene.wait_for_report("begin")["pid"]
    drop_connections()
    again = scene.wait_for_report("begin", times=2)
    assert again["id"] == result.id
    assert_it_holds(scene, result)
    assert scene.finish(result)["held"]
    assert_released(EITHER, fleet, scene, result.id, dead=[pid])

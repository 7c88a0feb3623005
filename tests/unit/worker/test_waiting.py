"""A worker keeps what waits in it: reservations of messages, and turns of parked tasks."""

import pytest
from kombu.utils.limits import TokenBucket

from celery_dislock.parking.process import runtime_of
from celery_dislock.worker import waiting
from celery_dislock.worker.waiting import WaitingStep
from tests.declaring import declare, never
from tests.driven import Child, held, reservation
from tests.unit.deliveries import arrived, deliver


def begin(worker):
    step = WaitingStep(worker)
    assert step.include_if(worker)
    step.start(worker)
    return step


@pytest.fixture
def have(app, broker, worker):
    """Let the worker have a message of a task, sent with a reservation."""

    def have(**options):
        declared = {"lock_unique_until": "start", "lock_unique_for": 100, **options}
        task = declare(app, **declared)
        task.apply_async(task_id="a")
        request = arrived(task, "a", **broker.last.headers)
        worker.state.reserved_requests.add(request)
        return task, begin(worker)

    return have


@pytest.fixture
def run(app, broker, lock_server, worker):
    """Let a child of the worker run a reserved task, which its own process renews no more."""

    def run(**options):
        options = {"lock_unique_until": "end", "lock_unique_for": 100, **options}
        task = declare(app, **options)
        task.apply_async(task_id="a")
        child = Child(app, broker.last.headers, "a", name="runs", **options)
        worker.state.active_requests.add(child.request)
        begin(worker)
        lock_server.frozen.add(child.pid)
        return task, child

    return run


def test_what_waits_is_renewed_until_the_worker_stops(have, lock_server, worker):
    """Prefetched, or held for its ETA; then the broker delivers it to another worker."""
    task, step = have()
    lock_server.advance(1000)
    assert reservation(task).remaining > 80
    lock_server.away = True  # nothing stops it
    lock_server.advance(50)
    lock_server.away = False
    lock_server.advance(100)
    assert reservation(task).remaining > 80
    step.stop(worker)
    lock_server.advance(101)
    assert reservation(task) is None


def test_what_waits_for_its_rate_limit_is_renewed(have, lock_server, worker):
    """Celery keeps it in a bucket of its task, and says nowhere else that the worker has it."""
    task, _ = have()
    bucket = TokenBucket(1)
    bucket.add((worker.state.reserved_requests.pop(), 1))
    worker.consumer.task_buckets[task.name] = bucket
    lock_server.advance(1000)
    assert reservation(task).remaining > 80


@pytest.mark.parametrize("why", ["revoked", "forged", "another's", "expiry"])
def test_what_has_no_reservation_to_renew_is_left_alone(have, lock_server, worker, why):
    """A message that is revoked, has none, a forged one, or one that ends at a certain time."""
    other = declare(worker.app, name="other", lock_key="other", lock_unique_until="end")
    assert other.name
    task, _ = have(lock_unique_until="expiry" if why == "expiry" else "start")
    [request] = worker.state.reserved_requests
    worker.state.revoked |= {"a"} if why == "revoked" else set()
    note = {"forged": "x", "another's": ["other:{k}", "start"]}.get(why)
    if note:
        request._context.dislock["unique"] = request.message.headers["dislock"]["unique"] = note
    lock_server.advance(101)
    assert reservation(task) is None


@pytest.mark.parametrize("options", [{}, {"lock_limit": None}, {"lock_expire": 5}])
def test_what_runs_is_renewed(run, lock_server, worker, monkeypatch, options):
    """It may be stopped, or have no lease with which its process would renew it."""
    monkeypatch.setattr(waiting, "is_alive", lambda _pid: True)
    task, child = run(**options)
    worker.state.reserved_requests.add(child.request)
    lock_server.advance(1000)
    assert reservation(task).state == "running"
    child.go_on()
    assert reservation(task) is None


def test_what_ran_in_a_dead_process_is_not(run, lock_server, monkeypatch):
    """Celery before 5.6.3 keeps it among the active ones when it has lost its broker meanwhile."""
    task, child = run()
    monkeypatch.setattr(waiting, "is_alive", lambda pid: pid != child.pid)
    lock_server.advance(1000)
    assert reservation(task) is None


@pytest.fixture
def limit(app, broker, worker):
    """Let a parked task have its turn, and its message wait for its rate_limit in the worker."""

    def limit(**about):
        task = declare(app, never, lock_on_conflict="queue")
        with held(app):
            deliver(task, "a")
        assert broker.ids == ["a"]
        request = arrived(task, "a", **{**broker.last.headers, **about})
        bucket = worker.consumer.task_buckets[task.name] = TokenBucket(1)
        bucket.add((request, 1))
        return begin(worker)

    return limit


@pytest.fixture
def sweep(app):
    """Sweep the line, as another worker does, and return the ids of all that was sent."""

    def sweep(broker):
        runtime_of(app).process.lines.sweep(["dislock:{k}"])
        return broker.ids

    return sweep


def test_a_turn_that_waits_for_its_rate_limit_is_not_sent_again(
    limit, lock_server, worker, broker, sweep
):
    """Each copy would take a token; when the worker has stopped, the task has another turn."""
    step = limit()
    for _ in range(100):
        lock_server.advance(10)
        assert sweep(broker) == ["a"]
    step.stop(worker)
    lock_server.advance(20)
    assert sweep(broker) == ["a"]
    lock_server.advance(11)
    assert sweep(broker) == ["a", "a"]


@pytest.mark.parametrize("why", ["revoked", "expired", "another's", "prefetched"])
def test_a_turn_whose_message_another_worker_ends_or_runs_sooner_is_not_kept(
    limit, lock_server, worker, broker, sweep, why
):
    """A copy of a task that is not to run is discarded when it comes; an idle worker runs one."""
    about = {
        "expired": {"expires": "2023-01-01T00:00:00+00:00"},
        "another's": {"dislock": {"v": 1, "ticket": ["other:{k}", "a:0:0"]}},
    }
    limit(**about.get(why, {}))
    worker.state.revoked |= {"a"} if why == "revoked" else set()
    if why == "prefetched":
        request, _ = worker.consumer.task_buckets.pop("shop.t").pop()
        worker.state.reserved_requests.add(request)
    lock_server.advance(31)
    assert sweep(broker) == ["a", "a"]


def test_a_lock_server_that_is_away_costs_a_turn(limit, lock_server, broker, sweep):
    """Nothing stops the step: what is over is given again, and that turn is kept."""
    limit()
    lock_server.away = True
    lock_server.advance(31)
    lock_server.away = False
    assert sweep(broker) == ["a", "a"]
    for _ in range(100):
        lock_server.advance(10)
        assert sweep(broker) == ["a", "a"]


def test_a_worker_that_has_no_turn_asks_nothing(app, lock_server, worker):
    """A fleet without parked tasks pays a look at its buckets, and no round trip."""
    task = declare(app, lock_on_conflict="queue")
    bucket = worker.consumer.task_buckets[task.name] = TokenBucket(1)
    bucket.add((arrived(task, "a"), 1))
    begin(worker)
    lock_server.advance(1000)
    assert lock_server.requests == 0


def test_a_worker_without_unique_or_parked_tasks_does_not_step(app, worker):
    """Nor one of a task whose reservations end at a certain time, nor one that locks nothing."""
    declare(app, name="once", lock_unique_until="expiry")
    assert not WaitingStep(worker).include_if(worker)
    declare(app, lock_unique_until="end")
    assert WaitingStep(worker).include_if(worker)
    app.conf.dislock_enabled = False
    assert not WaitingStep(worker).include_if(worker)

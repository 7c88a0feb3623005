"""The same task twice: looked for, put off, and acknowledged unrun once it has succeeded."""

import pytest

from celery_dislock import signals
from tests.declaring import declare
from tests.driven import held, reservation
from tests.unit.deliveries import deliver


@pytest.fixture
def ran():
    return []


@pytest.fixture
def once(app, ran):
    options = {"lock_dedupe_redelivered": True, "lock_dedupe_for": 600}
    return declare(app, lambda self: ran.append(self.request.retries), **options)


def test_a_copy_after_the_success_is_acknowledged_unrun(app, lock_server, once, ran):
    """Without touching the result, for lock_dedupe_for.  Another task runs."""
    deliver(once, "1")
    assert deliver(once, "1").info.state == "IGNORED"
    assert app.AsyncResult("1").state == "SUCCESS"
    deliver(once, "2")
    assert ran == [0, 0]
    assert lock_server.locks() == []
    lock_server.advance(590)
    deliver(once, "1")
    assert ran == [0, 0]
    lock_server.advance(20)
    deliver(once, "1")
    assert ran == [0, 0, 0]


@pytest.mark.parametrize("strategy", ["skip", "raise", "retry", "wait", "queue", "reject"])
def test_a_copy_after_the_success_is_acknowledged_though_another_holds_the_lock(
    app, lock_server, broker, strategy
):
    """No strategy applies: its result would be REVOKED or RETRY, or its chord told of an error."""
    task = declare(app, lock_dedupe_redelivered=True, lock_on_conflict=strategy)
    deliver(task, "1")
    with held(app, task_id="2"):
        info = deliver(task, "1").info
    assert (info.state, str(info.retval)) == ("IGNORED", "it has succeeded under lock 'k' before")
    assert (app.AsyncResult("1").state, broker.ids) == ("SUCCESS", [])


def test_a_copy_of_a_success_that_is_not_over_is_put_off(
    app, lock_server, once, ran, broker, monkeypatch
):
    """Callbacks and the result may still be lost with their process: the copy comes again.

    Then it runs, if a lease would have ended meanwhile.
    """
    seen = []

    def stores(*_args, **_kwargs):
        seen.append(lock_server.ttls()["dislock:{k}:mark:1"] // 1000)
        seen.append(deliver(once, "1").info.state)

    monkeypatch.setattr(app.backend, "mark_as_done", stores)
    deliver(once, "1")
    assert (seen, broker.ids, ran) == ([30, "IGNORED"], ["1"], [0])
    assert lock_server.locks() == []


def test_a_copy_of_work_that_is_done_frees_its_key(app, once, ran, broker):
    """It has begun under the reservation of its message, and nothing else ends that."""
    deliver(once, "1")
    sender = declare(app, name="sent", lock_unique_until="end")
    sender.apply_async(task_id="1")
    deliver(once, "1", headers=broker.last.headers)
    assert ran == [0]
    assert reservation(sender) is None


def test_a_retry_is_no_copy_of_the_attempt_before_it(once, ran):
    """A mark is about an attempt and those before it: a later one is new work."""
    deliver(once, "1")
    deliver(once, "1", retries=1)
    deliver(once, "1")
    assert ran == [0, 1]


def test_a_failure_leaves_no_mark(app, lock_server):
    """Only what has succeeded needs not to run again."""
    deliver(declare(app, lambda: {}["x"], lock_dedupe_redelivered=True))
    assert lock_server.contents() == {}


def test_a_result_that_cannot_be_stored_leaves_no_mark_that_it_is_done(app, lock_server, ran):
    """The body has ended well, and its task has failed: a copy runs."""

    def body():
        ran.append(1)
        return object() if len(ran) == 1 else None

    task = declare(app, body, lock_dedupe_redelivered=True)
    assert deliver(task, "1").info.state == "FAILURE"
    lock_server.advance(31)  # a mark that it is on its way lasts as long as a lease
    deliver(task, "1")
    assert ran == [1, 1]
    assert app.AsyncResult("1").state == "SUCCESS"


def test_a_success_that_cannot_be_remembered_is_a_success(app, lock_server, ran, caplog):
    """The server is gone when the body has ended: a copy may run, and the log says so."""

    def body():
        ran.append(1)
        lock_server.away = len(ran) == 1

    task = declare(app, body, lock_dedupe_redelivered=True)
    deliver(task, "1")
    assert app.AsyncResult("1").state == "SUCCESS"
    assert "Task shop.t[1] has succeeded, but a copy of it may run again" in caplog.text
    lock_server.away = False
    lock_server.advance(31)
    deliver(task, "1")
    assert ran == [1, 1]


@pytest.mark.parametrize("may_run", [False, True])
def test_a_server_that_cannot_tell_of_copies(
    app, lock_server, once, ran, broker, receiving, may_run
):
    """What was acquired is released; the task is put off, or runs without its lock if it may."""
    app.conf.dislock_on_unavailable = "run" if may_run else "retry"

    def goes_away(**_):
        lock_server.away = True

    with receiving(signals.lock_acquired, goes_away):
        deliver(once, "1")
    assert (broker.ids, ran) == (([], [0]) if may_run else (["1"], []))
    lock_server.away = False
    lock_server.advance(2)
    assert lock_server.contents() == {}


@pytest.mark.parametrize("options", [{"lock_mode": "shared"}, {"lock_limit": 2}])
@pytest.mark.parametrize(("other", "runs"), [("1", False), ("2", True), ("left", True)])
def test_a_lock_for_several_is_not_shared_with_a_copy(
    app, lock_server, ran, broker, options, other, runs
):
    """Where a lock admits more than one, its holders are looked at for the same task id.

    One that was put off leaves its lease for lock_at_least_for: its task runs all the same.
    """
    task = declare(app, lambda: ran.append(1), **options)
    with held(app, task_id="1" if other == "left" else other, lock_at_least_for=12, **options):
        if other != "left":
            deliver(task, "1")
    if other == "left":
        deliver(task, "1")
    assert bool(ran) is runs
    assert broker.ids == ([] if runs else ["1"])
    if not runs:
        assert app.AsyncResult("1").state == "SUCCESS"  # of the other delivery


def test_eager_tasks_are_no_copies(lock_server, once, ran):
    """apply() with the same id is the caller's own wish, and leaves no mark."""
    once.apply(task_id="1")
    assert lock_server.contents() == {}
    deliver(once, "1")
    once.apply(task_id="1")
    assert ran == [0, 0, 0]

"""Events about tasks: who sends them, and what monitors make of them."""

from types import SimpleNamespace

from celery.events.state import Task

from celery_dislock.messages.events import revoked, worker_tells_revoked


def test_an_event_has_no_number_that_json_does_not_have():
    """A monitor that cannot read one event would lose the connection that has them all."""
    sent = []
    dispatcher = SimpleNamespace(send=lambda type_, **fields: sent.append((type_, fields)))
    worker_tells_revoked(None, {"1": "why"})  # it has no connection to the broker yet
    worker_tells_revoked(dispatcher, {float("nan"): "why"})
    assert sent == [("task-revoked", {"uuid": None, **revoked("why")})]


def test_monitors_take_a_parked_task_that_is_revoked_for_revoked():
    """Celery's State would keep PARKED, which it ranks higher."""
    task = Task("1")
    task.event("parked", 1.0, 1.0, {"key": "k"})
    assert task.state == "PARKED"
    task.event("revoked", 2.0, 2.0, revoked("why"))
    assert (task.state, task.reason, task.terminated) == ("REVOKED", "why", False)

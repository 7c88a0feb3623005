"""What a worker does with a message, and a producer that is not there."""

import json
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.app.trace import build_tracer
from kombu.message import Message
from kombu.utils.imports import symbol_by_name

from celery_dislock.messages.headers import HEADER, VERSION, with_notes
from celery_dislock.messages.message import AS_IT_CAME


def noted(**notes):
    """Return our header with these notes, by their names."""
    return {HEADER: {"v": VERSION, **notes}}


def deliver(task, task_id="1", *args, headers=None, notes=None, **about):
    """
    Run the task as a worker does: traced, not eager.

    Args:
        task: The task.
        task_id: Its id.
        args: Its arguments.
        headers: Headers of its message.
        notes: Notes to add to our header.
        about: What else the request has; some of it comes with the message's body.
    """
    tracer = build_tracer(task.name, task, app=task.app)
    headers = {"id": task_id, "task": task.name, "retries": 0, **with_notes(headers, notes or {})}
    body = json.dumps([args, {}, {}], default=repr).encode()
    info = {"exchange": "", "routing_key": "celery", **about.pop("delivery_info", {})}
    info.setdefault(AS_IT_CAME, (headers, "application/json", "utf-8", body))
    return tracer(task_id, args, {}, {**headers, "hostname": "w1", **about, "delivery_info": info})


def arrived(task, task_id="1", /, *args, **headers):
    """Make the worker's request of a message that has come."""
    message = Message(
        body=json.dumps([args, {}, {}]),
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": task_id, "task": task.name, "retries": 0, **headers},
        properties={"correlation_id": task_id, "reply_to": "caller"},
        delivery_info={"exchange": "", "routing_key": "celery"},
    )
    return symbol_by_name(task.Request)(message, app=task.app, task=task, hostname="w1")


def run(task, request):
    """Run the task as a pool process does that was sent a request."""
    tracer = build_tracer(task.name, task, app=task.app)
    return tracer(request.id, request.args, request.kwargs, request.request_dict)


def lose_process(request):
    """Tell a request what billiard tells the main process of a child that was killed."""
    try:
        Mock(side_effect=WorkerLostError("x"))()
    except WorkerLostError:
        request.on_failure(ExceptionInfo())


class Producer:
    """
    A broker that is published to.

    Attributes:
        connection: Says what kind of broker it is, as kombu's does.
        away: What it raises instead.
        sent: What was published: body, options.
    """

    def __init__(self, kind="amqp"):
        self.connection = SimpleNamespace(transport=SimpleNamespace(driver_type=kind))
        self.away = None
        self.sent = []

    @contextmanager
    def acquired(self):
        """Stand for producer_or_acquire."""
        yield self

    def publish(self, body, **options):
        if self.away is not None:
            raise self.away
        self.sent.append((body, options))

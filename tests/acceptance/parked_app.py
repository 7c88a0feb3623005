"""The scenarios, in a worker whose queues have exchanges of their own."""

from __future__ import annotations

from kombu import Exchange, Queue

from tests.acceptance.scenarios import app

__all__ = ["QUEUES", "app"]

QUEUES = {
    "direct": Queue("own-direct", Exchange("by-key", "direct"), routing_key="right.key"),
    "topic": Queue("own-topic", Exchange("by-topic", "topic"), routing_key="parked.#"),
}
app.conf.task_queues = list(QUEUES.values())

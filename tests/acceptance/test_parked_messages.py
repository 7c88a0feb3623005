"""A parked task's message comes again as it came, byte for byte."""

import json
import pickle
import uuid

import pytest
from amqp.exceptions import NotFound
from celery import Celery
from celery.result import AsyncResult
from kombu import Connection, Producer, Queue

from celery_dislock.messages.resending import publish
from tests.acceptance import scenarios
from tests.acceptance.fleet import BROKERS, LIMIT, wait_for
from tests.unit.deliveries import noted
from tests.unit.messages.test_resending import message

KEPT = ("correlation_id", "reply_to", "priority", "delivery_mode", "expiration", "type", "app_id")


def body_of(message):
    """The bytes of a body, which some clients make text of."""
    body = message.body
    return body.encode(message.content_encoding) if isinstance(body, str) else bytes(body)


def kinds(key, *, latin):
    """Messages of one task each, by kind: id, body, and what else they are published with."""
    task = scenarios.hold_shared_or_queue.name
    made = {}

    def make(kind, body, content_type="application/json", encoding="utf-8", **more):
        task_id = str(uuid.uuid4())
        headers = {"lang": "py", "task": task, "id": task_id, "retries": 0, "tenant": "zwölf"}
        options = {
            "headers": headers,
            "content_type": content_type,
            "content_encoding": encoding,
            "correlation_id": task_id,
            "reply_to": "somewhere",
            "priority": 2,
            **more,
        }
        made[kind] = (task_id, body, options)

    embedded = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    text = f'[ ["{key}"] ,{{ }},\n\t{{"callbacks" :null,"errbacks":null, "chain": null, '
    text += '"chord":null,  "note":"J\\u00fcrgen, Jürgen"} ]\n'
    make("odd spacing", text.encode())
    if latin:
        make("latin-1", text.encode("latin-1"), encoding="latin-1")
    make("gzip", text.encode(), compression="gzip")
    make("zlib", text.encode(), compression="zlib")
    make("expiration", text.encode(), expiration=3600)
    make("transient", text.encode(), delivery_mode=1)
    body = pickle.dumps(([key], {}, embedded), protocol=2)
    make("pickle", body, "application/x-python-serialize", "binary")
    make("pickle and gzip", body, "application/x-python-serialize", "binary", compression="gzip")
    task_id = str(uuid.uuid4())
    old = {"task": task, "id": task_id, "args": [key], "kwargs": {}, "retries": 0, "eta": None}
    make("protocol 1", json.dumps(old, indent=3).encode(), correlation_id=task_id, headers={})
    made["protocol 1"] = (task_id, *made["protocol 1"][1:])
    return made


@BROKERS
def test_a_message_comes_again_as_it_came(fleet, start_fleet, scene):
    """Byte for byte its body, and all else that a second delivery is to have, whatever its kind."""
    own = {
        "broker_url": fleet.broker_url,
        "conf": {"accept_content": ["json", "pickle"]},
        "env": {"C_FORCE_ROOT": "1"},  # Celery asks for it where it is to read pickle
    }
    own_fleet = start_fleet("prefork", **own)
    url = fleet.broker_url or scenarios.app.conf.broker_url
    messages = kinds(scene.key, latin=fleet.broker_url is not None)  # with others, JSON is UTF-8
    with Connection(url) as connection:
        producer = Producer(connection)
        scratch = Queue(f"scratch-{scene.key}", routing_key=f"scratch-{scene.key}")
        scratch(producer.channel).queue_declare()

        def publish(queue):
            for _, body, options in messages.values():
                producer.publish(body, routing_key=queue, **options)

        def received(queue):
            got = {}
            source = Queue(queue)(producer.channel)
            for _ in messages:
                message = wait_for("a message", lambda: source.get(no_ack=True))
                got[message.properties["correlation_id"]] = message
            return got

        publish(scratch.name)
        expected = received(scratch.name)
        holder = scene.hold(fleet)
        publish(own_fleet.queue)
        scene.wait_for_line(len(messages))
        own_fleet.workers[0].terminate()
        own_fleet.workers[0].wait_until_it_ends()
        scene.open_gate(holder.id)
        again = received(own_fleet.queue)
        for kind, (task_id, body, options) in messages.items():
            first, second = expected[task_id], again[task_id]
            assert body_of(second) == body, kind
            notes = second.headers.pop("dislock")
            assert notes.pop("ticket")[1].startswith(task_id), kind
            assert notes.keys() == {"v", "since"}, kind
            assert second.headers == first.headers, kind
            assert second.content_type == first.content_type, kind
            assert second.content_encoding == first.content_encoding, kind
            for name in KEPT:
                assert second.properties.get(name) == first.properties.get(name), (kind, name)
            note = noted(ticket=[scene.lock, f"{task_id}:0:0"])
            headers = {**options["headers"], **note}
            producer.publish(body, routing_key=own_fleet.queue, **{**options, "headers": headers})
        scene.open_gate()
        start_fleet("prefork", queue=own_fleet.queue, **own)
        for task_id, *_ in messages.values():
            assert AsyncResult(task_id, app=holder.app).get(timeout=LIMIT)["held"] is True


def test_a_message_whose_exchange_is_gone_takes_no_other_with_it(rabbitmq):
    """RabbitMQ closes the channel later, and forgets what was published on it meanwhile."""
    with Celery(broker=rabbitmq.url, set_as_current=False) as app:
        app.conf.update(task_default_queue="others", task_create_missing_queues=False)
        for _ in range(10):
            with pytest.raises(NotFound):
                publish(app, message("gone"), {})
            app.send_task("other")
        with app.connection_for_read() as connection:
            queue = Queue("others", no_declare=True)(connection.default_channel)
            wait_for("all others", lambda: queue.queue_declare(passive=True).message_count == 10)
            queue.delete()

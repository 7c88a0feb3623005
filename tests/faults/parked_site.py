"""Workers of ``tests.faults.parked_app``, and all that a test sees of them."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass

from celery import Celery

from tests.acceptance.fleet import ROOT, Worker
from tests.forked import OTHER_RELEASE
from tests.holding import name_of, wait_for
from tests.pace import LEASE

LIMIT = 60.0  # seconds until a condition must hold
TIMEOUT = 1.2 * LEASE  # lock_watchdog_timeout: all lines are looked at about once a second


@dataclass
class Run:
    """One run of a task's body, as far as it came."""

    id: str
    key: str
    pid: int
    token: int
    at: float
    ended: bool = False
    released: bool = False


class Site:
    """
    Workers that share a queue, a folder and a lock server.

    Args:
        folder: Of what they write, and of what they are told.
        server: Of the locks; and of all else that has no server of its own here.
        rabbitmq: The broker.
        after: Where the next release is.
    """

    def __init__(self, folder, server, *, rabbitmq=None, after=None):
        self.folder = folder
        self.redis = server.client(decode_responses=True)
        self._rabbitmq = rabbitmq
        broker = rabbitmq.url if rabbitmq else server.url
        self.queue = f"parked-{uuid.uuid4().hex[:8]}"
        self.workers = []
        self._client = Celery("parked-client", broker=broker, set_as_current=False)
        self._env = {
            "PARKED_FOLDER": str(folder),
            "PARKED_BROKER": broker,
            "PARKED_LOCKS": server.url,
            "PARKED_TIMEOUT": str(TIMEOUT),
        }
        self._started = 0
        self._after = after

    def close(self):
        """End all workers, and the connections."""
        for worker in self.workers:
            worker.kill()
        self._client.close()
        self.redis.close()

    # Workers

    def start(self, *, ready=True, is_next=False):
        """Start a worker, of this release or of the next."""
        self._started += 1
        name = f"{self.queue}-{self._started}"
        folder = self.folder / f"boot{self._started}"
        folder.mkdir()
        options = ["--pool", "prefork", "--concurrency", "2", "--dislock"]
        app = "tests.faults.parked_app"
        env = self._env
        if is_next:
            assert self._after is not None
            paths = os.pathsep.join([str(self._after), str(ROOT)])
            env = {**env, "PYTHONPATH": paths, OTHER_RELEASE: "next"}
        worker = Worker(folder, name, *options, "--queues", self.queue, app=app, env=env)
        self.workers.append(worker)
        if ready:
            worker.wait_until_ready()
        return worker

    def start_pair(self):
        """Have two workers that run."""
        while len(self.running) < 2:
            self.start(ready=False)
        for worker in self.running:
            worker.wait_until_ready()
        return self.running

    @property
    def running(self):
        return [worker for worker in self.workers if worker.running]

    def children(self, worker):
        """Process ids of a worker's pool."""
        pid = worker.process.pid
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 -- no real path
                return [int(child) for child in file.read().split()]
        except OSError:
            return []

    def log(self):
        """All that the workers have said."""
        return "".join(worker.log for worker in self.workers)

    def says(self, *words):
        """Count the lines of the logs with all these words."""
        return sum(all(word in line for word in words) for line in self.log().splitlines())

    # Tasks

    def send(self, task, key, task_id, **kwargs):
        """Send a task of this id."""
        self._client.send_task(task, (key,), kwargs, task_id=task_id, queue=self.queue, retry=False)
        return task_id

    def hold(self, key, task_id):
        """Let a task hold the lock until its gate is open."""
        self.send("early", key, task_id, gated=True)
        self.wait_for_event("begin", task_id)
        return task_id

    def signature(self, task, *args, task_id, **kwargs):
        """Make a signature that ignores the result before it."""
        options = {"task_id": task_id, "queue": self.queue}
        return self._client.signature(task, args, kwargs, options=options, immutable=True)

    def revoke(self, task_ids):
        """Tell the workers, and wait until all of them have answered."""
        names = [f"{worker.name}@here" for worker in self.running]
        answers = self._client.control.revoke(
            list(task_ids), destination=names, reply=True, timeout=LIMIT, limit=len(names)
        )
        assert len(answers) == len(names)

    def arm(self, place, task_id, victim):
        """Let a process, or its whole worker, die where it comes there with that task."""
        temporary = self.folder / f"arm-{place}-{task_id}"
        temporary.write_text(victim)
        temporary.rename(self.folder / f"die-{place}-{task_id}")

    def open_gate(self, task_id):
        (self.folder / f"gate-{task_id}").touch()

    def state(self, task_id):
        """The state in the result backend."""
        meta = self.redis.get(f"celery-task-meta-{task_id}")
        return json.loads(meta)["status"] if meta else None

    def raw(self, task, key, task_id, **kwargs):
        """Return the message that send() would publish, on a broker that is Redis."""
        aside = f"{self.queue}-aside"
        self._client.send_task(task, (key,), kwargs, task_id=task_id, queue=aside, retry=False)
        message = self.redis.rpop(aside)
        assert message
        return message.replace(aside, self.queue)

    def publish(self, *raws, ticket=None):
        """Publish messages at once; with this note, if any, in their headers."""
        messages = [json.loads(raw) for raw in raws]
        for message in messages:
            message["properties"]["delivery_tag"] = str(uuid.uuid4())
            if ticket is not None:
                message["headers"]["dislock"] = {"v": 1, "ticket": ticket}
        self.redis.lpush(self.queue, *map(json.dumps, messages))

    def unfinished(self):
        """Count the messages that the broker has, those with a worker included; takes a second."""
        if self._rabbitmq is None:
            return self.redis.llen(self.queue) + self.redis.hlen("unacked")
        listed = self._rabbitmq.control("list_queues", "--no-table-headers", "name", "messages")
        return int(dict(line.split() for line in listed.splitlines())[self.queue])

    def wait_until_no_message_is_left(self):
        wait_for(lambda: not self.unfinished(), "all messages are acknowledged", LIMIT)

    # What happened

    def events(self, what=None, task_id=None):
        """What was recorded, in its order."""
        try:
            written = (self.folder / "events").read_text()
        except FileNotFoundError:
            return []
        whole = written[: written.rfind("\n") + 1]  # the last line may be half written
        found = map(json.loads, whole.splitlines())
        return [
            event
            for event in found
            if what in {None, event["what"]} and task_id in {None, event["id"]}
        ]

    def runs(self, task_id=None):
        """The runs of a task, or of all."""
        found = []
        open_runs = {}
        for event in self.events(task_id=task_id):
            at = (event["pid"], event["id"])
            if event["what"] == "begin":
                run = Run(event["id"], event["key"], event["pid"], event["token"], event["at"])
                found.append(run)
                open_runs[at] = run
            elif event["what"] == "end":
                open_runs[at].ended = True
            elif event["what"] == "released" and at in open_runs:
                open_runs[at].released = True
        return found

    def wait_for_event(self, what, task_id, times=1):
        """Wait until this was recorded so often."""
        wait_for(
            lambda: len(self.events(what, task_id)) >= times,
            f"{times} x {what!r} of {task_id}",
            LIMIT,
        )
        return self.events(what, task_id)[times - 1]

    def wait_until_it_dies(self, task_id, victim):
        """Wait until the process that was to die with this task is dead, or its whole worker.

        The note comes half a second before the death of a worker.
        """
        self.wait_for_event("dies", task_id)
        if victim == "worker":
            wait_for(lambda: len(self.running) < 2, "the end of its worker", LIMIT)

    def is_in_line(self, key, task_id):
        """Whether a task waits for its turn."""
        return self.redis.zscore(f"{name_of(key)}:line", f"{task_id}:0:0#") is not None

    def wait_until_in_line(self, key, task_id):
        wait_for(lambda: self.is_in_line(key, task_id), f"{task_id} is in line", LIMIT)

    def wait_until_free(self, key):
        """Wait until nobody holds the lock or waits for it."""
        name = name_of(key)
        names = [name, *(f"{name}:{part}" for part in ("line", "tickets", "handed"))]
        wait_for(lambda: not self.redis.exists(*names), f"nobody has to do with {key}", LIMIT)

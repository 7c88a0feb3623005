"""Several ``celery beat --dislock`` of which one sends, as processes that are killed."""

import contextlib
import json
import os
import signal

import pytest

from tests.acceptance.fleet import ROOT, wait_for
from tests.forked import start_celery
from tests.groups import kill_group
from tests.redis_server import RedisServer

QUEUE = "ticks"  # that nobody reads
TIMEOUT = 2  # seconds; dislock_beat_timeout
LEADS, STANDS_BY = "Beat leads, lock 'beat'", "Beat stands by, lock 'beat'"


class Beat:
    """One beat, alone or in a worker, with its log in a file."""

    def __init__(self, folder, name, command, env):
        self.log_file = folder / f"{name}.log"
        arguments = ["-A", "tests.acceptance.beat_app", *command, "--loglevel", "INFO"]
        arguments += ["--schedule", str(folder / f"{name}-schedule")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **env}
        self.process = start_celery(arguments, folder, env, self.log_file)

    @property
    def log(self):
        return self.log_file.read_text("utf-8", "replace")

    @property
    def leads(self):
        """Whether it runs and leads, as it has said last."""
        runs = self.process.poll() is None
        return runs and self.log.rfind(LEADS) > self.log.rfind(STANDS_BY)

    def says(self, words, times=1):
        wait_for(f"{self.log_file.stem} says {words!r}", lambda: self.log.count(words) >= times)

    def send(self, number):
        """Send a signal to it, and to its worker's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Beats:
    """Some beats, a broker, and a lock server of their own."""

    def __init__(self, folder, broker, locks):
        self.folder, self.locks, self.broker = folder, locks, broker
        self.client = broker.client(decode_responses=True)
        self.started = []
        self.conf = {
            "broker_url": broker.url,
            "dislock_url": locks.url,
            "dislock_beat_timeout": TIMEOUT,
            "beat_schedule": {"often": {"task": "often", "schedule": 0.25}},
            "beat_max_loop_interval": 1,
            "task_default_queue": QUEUE,
        }

    def start(self, *command):
        """Start one more beat."""
        name = f"beat{len(self.started) + 1}"
        env = {"BEAT_CONF": json.dumps(self.conf)}
        self.started.append(Beat(self.folder, name, list(command or ("beat", "--dislock")), env))
        return self.started[-1]

    def ids(self):
        """Return the ids of all messages that were sent."""
        return [json.loads(one)["headers"]["id"] for one in self.client.lrange(QUEUE, 0, -1)]

    def go_on(self, messages=4):
        """Wait for some more messages."""
        more = self.client.llen(QUEUE) + messages
        wait_for("more messages", lambda: self.client.llen(QUEUE) >= more)


@pytest.fixture
def beats(redis_program, tmp_path):
    """Beats that are killed when the test ends."""
    with RedisServer(tmp_path / "broker") as broker, RedisServer(tmp_path / "locks") as locks:
        beats = Beats(tmp_path, broker, locks)
        try:
            yield beats
        finally:
            for one in beats.started:
                kill_group(one.process)
            beats.client.close()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_another_beat_takes_over(beats, how):
    """After a kill, and a halt that lasts longer than the lease; no tick has two ids."""
    leader = beats.start()
    leader.says(LEADS)
    others = [beats.start(), beats.start()]
    for one in others:
        one.says(STANDS_BY)
    beats.go_on()
    leader.send(getattr(signal, how))
    wait_for("another leads", lambda: any(LEADS in one.log for one in others))
    beats.go_on()
    if how == "SIGSTOP":
        leader.send(signal.SIGCONT)
        leader.says(STANDS_BY)
        beats.go_on()
        assert leader.process.poll() is None
    # The signal may strike between a message and the note that it has gone out.
    assert len(beats.ids()) - len(set(beats.ids())) <= 1


def test_beats_stand_by_while_the_lock_server_is_away(beats):
    """They say so once, send nothing, and go on when it is back, without their records."""
    both = [beats.start(), beats.start()]
    beats.go_on()
    beats.locks.kill()
    for one in both:
        one.says("until the lock server answers")
    sent = beats.ids()
    wait_for("the lease is lost", lambda: any("is lost" in one.log for one in both))
    assert beats.ids() == sent
    beats.locks.start()
    beats.go_on()
    assert [one.log.count("until the lock server answers") for one in both] == [1, 1]
    assert [one.process.poll() for one in both] == [None, None]
    assert len(set(beats.ids())) == len(beats.ids())


def test_workers_may_have_the_beats(beats):
    """Worker -B --dislock: of two workers one sends, and the other after it was killed."""
    beats.conf["worker_enable_remote_control"] = False
    workers = [
        beats.start(
            *("worker", "-B", "--dislock", "--pool", "threads", "--queues", "none"),
            *("--hostname", f"{name}@here", "--without-gossip", "--without-mingle"),
        )
        for name in "ab"
    ]
    beats.go_on()
    leader, other = sorted(workers, key=lambda one: LEADS not in one.log)
    other.says(STANDS_BY)
    kill_group(leader.process)
    other.says(LEADS)
    beats.go_on()
    # The signal may strike between a message and the note that it has gone out.
    assert len(beats.ids()) - len(set(beats.ids())) <= 1

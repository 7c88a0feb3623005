"""Several ``celery beat --dislock`` of which one sends, as processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.fleet import ROOT, wait_for
from tests.forked import start_celery
from tests.programs import run_code
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis

pytestmark = pytest.mark.acceptance

QUEUE = "ticks"  # that nobody reads
TIMEOUT = 2  # seconds; dislock_beat_timeout
HOUR = 3600
LEADS, STANDS_BY = "Beat leads, lock 'beat'", "Beat stands by, lock 'beat'"


class Beat:
    """One beat, alone or in a worker, with its log in a file."""

    def __init__(self, folder: Path, name: str, command: list[str], env: dict[str, str]) -> None:
        self.log_file = folder / f"{name}.log"
        arguments = ["-A", "tests.acceptance.beat_app", *command, "--loglevel", "INFO"]
        arguments += ["--schedule", str(folder / f"{name}-schedule")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **env}
        self.process = start_celery(arguments, folder, env, self.log_file)

    @property
    def log(self) -> str:
        return self.log_file.read_text("utf-8", "replace")

    @property
    def leads(self) -> bool:
        """Whether it runs and leads, as it has said last."""
        runs = self.process.poll() is None
        return runs and self.log.rfind(LEADS) > self.log.rfind(STANDS_BY)

    def says(self, words: str, times: int = 1) -> None:
        wait_for(f"{self.log_file.stem} says {words!r}", lambda: self.log.count(words) >= times)

    def send(self, number: int) -> None:
        """Send a signal to it, and to its worker's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Beats:
    """Some beats, a broker, and a lock server of their own."""

    def __init__(self, folder: Path, broker: RedisServer, locks: RedisServer) -> None:
        self.folder, self.locks, self.broker = folder, locks, broker
        self.client: redis.Redis = broker.client(decode_responses=True)
        self.started: list[Beat] = []
        self.conf: dict[str, Any] = {
            "broker_url": broker.url,
            "dislock_url": locks.url,
            "dislock_beat_timeout": TIMEOUT,
            "beat_schedule": {"often": {"task": "often", "schedule": 0.25}},
            "beat_max_loop_interval": 1,
            "task_default_queue": QUEUE,
        }

    def start(self, *command: str, **env: str) -> Beat:
        """Start one more beat."""
        given = {"BEAT_CONF": json.dumps(self.conf), **env}
        name = f"beat{len(self.started) + 1}"
        self.started.append(Beat(self.folder, name, list(command or ("beat", "--dislock")), given))
        return self.started[-1]

    def ids(self) -> list[str]:
        """Return the ids of all messages that were sent."""
        return [json.loads(one)["headers"]["id"] for one in self.client.lrange(QUEUE, 0, -1)]

    def sent(self) -> list[str]:
        """Return the tasks of all messages that were sent."""
        return [json.loads(one)["headers"]["task"] for one in self.client.lrange(QUEUE, 0, -1)]

    def go_on(self, messages: int = 4) -> None:
        """Wait for some more messages."""
        more = self.client.llen(QUEUE) + messages
        wait_for("more messages", lambda: self.client.llen(QUEUE) >= more)


@pytest.fixture
def beats(redis_program, tmp_path) -> Iterator[Beats]:
    """Beats that are killed when the test ends."""
    with RedisServer(tmp_path / "broker") as broker, RedisServer(tmp_path / "locks") as locks:
        beats = Beats(tmp_path, broker, locks)
        try:
            yield beats
        finally:
            for one in beats.started:
                one.send(signal.SIGKILL)
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


@pytest.mark.parametrize(
    ("how", "when"), [("SIGTERM", "before"), ("SIGTERM", "after"), ("SIGSTOP", "before")]
)
def test_a_beat_that_ends_as_it_sends(beats, how, when):
    """An entry that is due again by then goes on, and no tick is sent beside a later one."""
    leader = beats.start(BEAT_DIES=f"{when} {how}")
    leader.says(LEADS)
    other = beats.start()
    other.says(LEADS)
    beats.go_on(8)
    if how == "SIGSTOP":  # it sends what it was about to send
        leader.send(signal.SIGCONT)
        leader.says(STANDS_BY)
        beats.go_on()
    ids = beats.ids()
    # A beat that was stopped may be followed before its last entry is due again.
    assert len(ids) - len(set(ids)) <= (how == "SIGTERM")


def hourly_is_due(beats, seconds):
    """Let an entry that is sent once an hour be due soon, by the lock server's record."""
    beats.conf["beat_schedule"]["hourly"] = {"task": "hourly", "schedule": HOUR}
    last = time.time() + seconds - HOUR
    with beats.locks.client() as client:
        client.hset("dislock:{beat}:beat", "hourly", f"1 1 {last * 1e6:.0f} -")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_seldom_tick_of_a_beat_that_is_killed_as_it_sends(beats, when):
    """What may not have gone out is sent again under its id: the entry is not due for an hour."""
    beats.conf["beat_schedule"] = {}
    hourly_is_due(beats, 0)
    leader = beats.start(BEAT_DIES=f"{when} SIGKILL 1")
    wait_for("it dies", lambda: leader.process.poll() is not None)
    other = beats.start()
    other.says("Beat has sent a message that was kept, lock 'beat', entry 'hourly'")
    assert len(beats.ids()) == 1 + (when == "after")
    assert len(set(beats.ids())) == 1


def test_a_broker_that_is_restarted(beats):
    """What it did not take is sent when it is back, once, and not an hour later."""
    hourly_is_due(beats, 15)
    both = [beats.start(), beats.start()]
    beats.go_on(2)
    beats.broker.kill()
    wait_for(
        "it is not taken",
        lambda: any("not gone out, lock 'beat', entry 'hourly'" in one.log for one in both),
    )
    beats.broker.start()
    wait_for("it is taken", lambda: "hourly" in beats.sent())
    beats.go_on(8)
    assert beats.sent().count("hourly") == 1
    assert len(set(beats.ids())) == len(beats.ids())


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


def test_a_beat_whose_clock_is_wrong_sends_nothing(beats):
    """Not even if there is no other; it says what is wrong, and the next one leads at once."""
    wrong = beats.start(BEAT_AHEAD=str(HOUR))
    wrong.says("differs by")
    right = beats.start()
    beats.go_on()
    assert LEADS not in wrong.log
    assert wrong.log.count("differs by") == 1
    right.says(LEADS)


DJANGO = """
import os
SECRET_KEY = "none"
INSTALLED_APPS = ["django.contrib.contenttypes", "django_celery_beat"]
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DATABASE"],
        # A transaction that begins to write later than it reads fails at once, however long
        # its patience, if another beat has written meanwhile.
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 60},
    }
}
"""
ROWS = """
import django
django.setup()
from django.core.management import call_command
from django_celery_beat.models import IntervalSchedule, PeriodicTask
"""
MAKE = """
call_command("migrate", verbosity=0)
second = IntervalSchedule.objects.create(every=1, period="seconds")
for name in ("often", "other"):
    PeriodicTask.objects.create(name=name, task=name, interval=second)
"""
EDIT = """
other = PeriodicTask.objects.get(name="other")
other.enabled = False
other.save()
often = PeriodicTask.objects.get(name="often")
often.description = "edited while nobody led"
often.save()
PeriodicTask.objects.create(name="new", task="new", interval=often.interval)
"""


def test_a_schedule_edited_in_djangos_admin_during_a_takeover(beats):
    """No tick is sent again beside a later one, and the edit holds."""
    pytest.importorskip("django_celery_beat")
    (beats.folder / "proj_settings.py").write_text(DJANGO)
    env = {"DJANGO_SETTINGS_MODULE": "proj_settings", "DATABASE": str(beats.folder / "db")}

    def in_django(program: str) -> None:
        path = {"PYTHONPATH": str(beats.folder)}
        run_code(ROWS + program, env={**os.environ, **env, **path})

    in_django(MAKE)
    beats.conf["beat_schedule"] = {}
    command = ("beat", "--dislock", "--scheduler", "django")
    leader = beats.start(*command, **env, BEAT_DIES="after SIGKILL")
    leader.says(LEADS)
    other = beats.start(*command, **env)
    wait_for("the leader dies", lambda: leader.process.poll() is not None)
    in_django(EDIT)
    other.says(LEADS)
    disabled = beats.sent().count("other")
    beats.go_on(6)
    assert len(set(beats.ids())) == len(beats.ids())
    assert beats.sent().count("other") - disabled <= 1  # what it claimed before it was killed
    assert "new" in beats.sent()


def test_beats_over_redbeat(beats):
    """RedBeat's own lock is off; no tick is sent again beside a later one."""
    pytest.importorskip("redbeat")
    beats.conf["redbeat_redis_url"] = beats.conf["broker_url"]
    command = ("beat", "--dislock", "--scheduler", "redbeat.RedBeatScheduler")
    leader = beats.start(*command, BEAT_DIES="after SIGKILL")
    leader.says(LEADS)
    other = beats.start(*command)
    other.says(LEADS)
    beats.go_on(8)
    assert len(set(beats.ids())) == len(beats.ids())
    assert not beats.client.exists("redbeat::lock")


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
    leader.send(signal.SIGKILL)
    other.says(LEADS)
    beats.go_on()
    # The signal may strike between a message and the note that it has gone out.
    assert len(beats.ids()) - len(set(beats.ids())) <= 1

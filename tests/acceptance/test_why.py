"""``celery dislock why``, of tasks of real workers: what they, the broker and the results tell.

The sentences are those of tests/unit/operating/test_why.py; here is what real processes put into
them.  The incidents of an operator's night come last.
"""

import json
import re
import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery

from celery_dislock.operating.checks import troubles
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, POLL, PREFORK, Fleet, Scene, wait_for
from tests.acceptance.scenarios import BRIEF
from tests.commands import AWAY, Dislock
from tests.redis_server import RedisServer

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery 5.5
]

QUEUE = scenarios.hold_or_queue
TIME = r"\d+(\.\d)? (s|min)"
dislock = Dislock(scenarios.app)


def ask(result, *args, commands=dislock, code=0):
    """Return the answer about a task, as JSON has it."""
    answer = commands("why", getattr(result, "id", result), "--json", *args)
    assert answer.exit_code == code, answer.output
    return json.loads(answer.stdout)


def told(result, state, sentence, *args, **how):
    """Check the state and the sentence; a "~" in it is any time, and "*" anything."""
    answer = ask(result, *args, **how)
    wanted = re.escape(sentence).replace("\\~", TIME).replace("\\*", ".*")
    assert answer["state"] == state, answer
    assert re.fullmatch(wanted, answer["sentence"]), answer["sentence"]
    return answer


def told_at_last(*asked, **how):
    """Ask until the answer is as in :func:`told`: a task that is put off tries again meanwhile."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return told(*asked, **how)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL)


# It runs.


@PREFORK
def test_it_runs(fleet, scene):
    """Where, under which lock and for how long; the same from Python, and whatever key is given."""
    holder = scene.hold(fleet)
    pid = scene.wait_for_report("begin")["pid"]
    sentence = (
        f"{scenarios.hold_by_itself.name}[{holder.id}] runs on *@here (pid {pid}): it has held "
        f"lock '{scene.key}' for ~, last renewed ~ ago."
    )
    told(holder, "running", sentence)
    for locks in (scenarios.dislock, scenarios.hold_by_itself):
        assert locks.why(holder.id, key=scene.key).state == "running"
    told(holder, "running", sentence, "--key", "other")  # its worker knows better
    fleet.send(scenarios.hold_by_itself, scene.key, task_id=holder.id)
    wait_for("a copy is put off", lambda: fleet.says(holder.id, "put off"))
    told(holder, "running", "*runs on *")
    scene.open_gates(holder)
    wait_for("both have ended", lambda: len(scene.reported("end")) == 2)


@PREFORK
def test_it_runs_without_its_lock(fleet, scene):
    """Its lease was freed under it: the worker says that it runs."""
    holder = scene.begin(fleet, scenarios.outlive_loss)
    dislock("free", scene.key, "--yes")
    told(holder, "running without its lock", "*runs on *, and does not hold its lock *: *capped*")
    scene.open_gate()
    holder.get(timeout=LIMIT)


def test_it_runs_where_locks_are_off(start_fleet, scene):
    """Its worker says so."""
    fleet = start_fleet("prefork", "--no-dislock")
    holder = scene.begin(fleet, scenarios.hold)
    told(holder, "locks off", "*runs on *, for ~ so far, without its lock: *")
    scene.open_gate()
    holder.get(timeout=LIMIT)


# It waits.


@PREFORK
@pytest.mark.parametrize(
    ("task", "state", "where"),
    [
        (QUEUE, "in line", "is"),
        (scenarios.hold_or_wait, "waiting in its slot", "waits in its slot on *@here (pid *),"),
        (scenarios.hold_inside, "waiting in its slot", "waits in its body on *@here (pid *),"),
        (scenarios.hold_both, "waiting in its slot", "waits in its body on *@here (pid *),"),
    ],
    ids=["parked", "in its slot", "in its body", "in its body, under a lock of its own"],
)
def test_it_is_in_line(fleet, scene, task, state, where):
    """Where it waits, and behind whom."""
    holder = scene.hold(fleet)
    waiting = fleet.send(task, scene.key)
    scene.wait_for_line(1)
    sentence = (
        f"{task.name}[{waiting.id}] {where} alone in line for lock '{scene.key}', which "
        f"*[{holder.id}] on * has held for ~."
    )
    told(waiting, state, sentence)
    scene.open_gates(holder)
    waiting.get(timeout=LIMIT)


@PREFORK
def test_it_is_put_off(fleet, scene):
    """Until when, and why, as its result says."""
    holder = scene.hold(fleet)
    put_off = fleet.send(scenarios.hold_or_retry, scene.key)
    told_at_last(put_off, "put off", f"*is put off until *: lock '{scene.key}' is held by *")
    scene.open_gates(holder)
    put_off.get(timeout=LIMIT)


@PREFORK
def test_it_is_not_due(fleet, scene):
    """A worker keeps it until the time that its sender has given; then it is revoked."""
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    scheduled = fleet.send(scenarios.step, scene.key, eta=later)
    told_at_last(scheduled, "not due", "*is with *@here until *, in 59 min: *")
    fleet.revoke(scheduled.id, reply=True)
    revoked = ask(scheduled)  # Celery 5.7 stores its end at once
    assert revoked["state"] in {"revoked", "ended"}
    assert "revoked" in revoked["sentence"]


@PREFORK
def test_it_waits_for_a_free_slot(fleet, scene):
    """A worker has it, and its pool is busy."""
    keys = [f"{scene.key}-{number}" for number in range(12)]
    sent = [fleet.send(scenarios.hold_by_itself, key) for key in keys]
    others = [Scene(key, scene.redis) for key in keys]
    running = lambda: [one for one in others if one.reported("begin")]  # noqa: E731
    wait_for("the slots are taken", lambda: len(running()) == 6)
    begun = {one.key for one in running()}
    waiting = next(one for key, one in zip(keys, sent, strict=True) if key not in begun)
    told_at_last(waiting, "received", "*is with *@here, and waits for a free slot of its pool.")
    for one in sent:
        scene.open_gate(one.id)
    for one in sent:
        one.get(timeout=LIMIT)


@PREFORK
def test_it_has_ended(fleet, scene):
    """How and why: it has succeeded, failed, was skipped, dropped or replaced."""
    scene.open_gate()
    succeeded, failed = fleet.send(scenarios.step, scene.key), fleet.send(scenarios.fail, "f")
    wait_for("both have ended", lambda: succeeded.ready() and failed.ready())
    scene.redis.delete(scenarios.gate_of(scene.key))
    holder = scene.hold(fleet)
    skipped, dropped = fleet.send(scenarios.hold, scene.key), scene.park(fleet)
    dislock("drop", dropped.id, "--yes", "--key", scene.key)
    older = scene.park(fleet, task=scenarios.hold_newest)
    newer = fleet.send(scenarios.hold_newest, scene.key)
    wait_for("all three have ended", lambda: all(x.ready() for x in (skipped, dropped, older)))
    for ended, how in {
        succeeded: "has run, and has succeeded, at *, ~ ago.",
        failed: "has failed, at *, ~ ago: f.",
        skipped: f"was revoked, at *, ~ ago: lock '{scene.key}' is held by *",
        dropped: "was revoked, *: dropped by an operator *.",
        older: "was revoked, *: * took its place in line for lock *",
    }.items():
        told(ended, "ended", f"Task {ended.id} {how}")
    scene.open_gates(holder)
    newer.get(timeout=LIMIT)


# The incidents of an operator's night.


def trouble_of(key, commands=dislock):
    """What `ls` says is wrong with a lock."""
    listed = json.loads(commands("ls", "--json").stdout)
    return next(one for one in listed if one["key"] == key)["troubles"]


def doctor_says(words, commands=dislock):
    """Whether `doctor` has a finding with these words."""
    report = json.loads(commands("doctor", "--json").stdout)
    return any(words in one["what"] for one in report["findings"])


@PREFORK
def test_a_queue_without_a_worker(fleet, scene, monkeypatch):
    """A task has its turn, and nobody takes its message."""
    monkeypatch.setattr(troubles, "TURNS_MANY", 1)
    holder = scene.hold(fleet)
    elsewhere = Fleet("prefork", f"nobody-{scene.key}", fleet.workers)
    fleet.serve(elsewhere.queue)
    parked = scene.park(elsewhere)
    fleet.leave(elsewhere.queue)
    scene.open_gates(holder)
    scene.wait_for_line(0)
    assert trouble_of(scene.key) == ["unclaimed"]
    sentence = (
        f"{QUEUE.name}[{parked.id}] has its turn for lock '{scene.key}', for ~, and no worker that "
        f"answers consumes its queue '{elsewhere.queue}'."
    )
    answer = told(parked, "has its turn", sentence)
    assert f"1 message in queue '{elsewhere.queue}'" in str(answer["rests_on"])
    assert answer["remedy"].endswith(f"celery worker --dislock -Q {elsewhere.queue}")
    fleet.serve(elsewhere.queue)
    parked.get(timeout=LIMIT)
    fleet.leave(elsewhere.queue)


@pytest.mark.usefixtures("server")
def test_a_purged_unique_task(scene, monkeypatch):
    """Its key stays reserved, and nothing waits in its queue."""
    monkeypatch.setattr(troubles, "UNMET_LONG", 0.0)
    sent = scenarios.unique_to_the_end.delay(scene.key)
    known = f"Task {sent.id} was sent ~ ago"
    told(sent, "sent", f"{known}, and no worker *: it waits with the broker, as far as is known.")
    scenarios.app.control.purge()
    assert trouble_of(scene.key) == ["unmet"]
    sentence = f"{known}, no worker *, and nothing waits in its queue celery: it was purged or *."
    answer = told(sent, "sent", sentence)
    assert f"celery dislock free --reservation {scene.key}" in answer["remedy"]
    dislock("free", scene.key, "--yes")


class Night:
    """A worker whose locks are on a server of their own, and the commands that look there."""

    def __init__(self, locks, fleet):
        self.locks, self.fleet = locks, fleet
        self.client = locks.client(decode_responses=True)
        self.commands = self.looking_at(locks.url)

    def looking_at(self, url):
        """The commands of an app that has its locks there."""
        conf = scenarios.app.conf
        app = Celery("night", broker=conf.broker_url, backend=conf.result_backend)
        app.conf.dislock_url = url
        return Dislock(app)


@pytest.fixture(scope="module")
def night(start_pair, tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("night") / "locks") as locks:
        conf = {"dislock_url": locks.url, "dislock_watchdog_timeout": BRIEF}
        with start_pair("prefork", "night", conf=conf, modes=["--dislock"]) as fleet:
            yield Night(locks, fleet)


@pytest.mark.parametrize(
    ("fails", "mends", "why", "code"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "maxmemory", 0),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "replica", AWAY),
    ],
    ids=["full", "a replica"],
)
def test_the_lock_server_takes_no_writes(night, scene, fails, mends, why, code):
    """A task that comes is put off, and its result says why; so does doctor."""
    night.client.execute_command(*fails.split())
    put_off = night.fleet.send(scenarios.hold, scene.key)
    told_at_last(put_off, "put off", f"*is put off *: *{why}*", commands=night.commands, code=code)
    assert doctor_says(why, night.commands)
    night.client.execute_command(*mends.split())
    scene.open_gate()
    put_off.get(timeout=LIMIT)


def test_the_lock_server_has_moved(night, scene, server):
    """Its result says that it is parked, and the server that is asked knows nothing of it."""
    night.commands("pause", scene.key)
    parked = night.fleet.send(QUEUE, scene.key)
    wait_for("it is parked", lambda: parked.state == "PARKED")
    elsewhere = night.looking_at(server.url)
    sentence = (
        f"Task {parked.id} was parked for lock '{scene.key}', and this lock server knows nothing "
        "of that: it has lost its data, the workers use another one, or it did not answer when "
        "they parked it."
    )
    told(parked, "not in line", sentence, commands=elsewhere)
    told(parked, "paused", "*", commands=night.commands)
    words = ("looks elsewhere", "on different servers")  # if others lock these tasks, too
    wait_for("doctor says so", lambda: any(doctor_says(one, elsewhere) for one in words))
    scene.open_gate()
    night.commands("resume", scene.key)
    parked.get(timeout=LIMIT)


def test_the_lock_server_is_away(night, scene):
    """What the result and the workers tell is told, and that the lock server does not."""
    night.locks.pause()
    answer = told(
        "nobody",
        "not known",
        "Nothing is known of task nobody, and *away.",
        commands=night.commands,
        code=AWAY,
    )
    night.locks.resume()
    assert "has not told" in str(answer["rests_on"])


def test_all_workers_are_gone(night, scene):
    """Nobody sweeps its line, and nobody holds its lock; the one that ran has begun, it says."""
    night.commands("pause", scene.key)
    holder = night.fleet.send(QUEUE, scene.key)
    wait_for("it is parked", lambda: holder.state == "PARKED")
    night.commands("resume", scene.key)
    scene.wait_for_report("begin", id=holder.id)
    parked = night.fleet.send(QUEUE, scene.key)
    wait_for("it is parked", lambda: parked.state == "PARKED")
    night.fleet.workers[0].kill()
    wait_for("its lease has ended", lambda: not night.client.exists(f"dislock:{{{scene.key}}}"))
    wait_for("nobody sweeps", lambda: "no worker" in trouble_of(scene.key, night.commands))
    sentence = f"*[{parked.id}] is alone in line for lock '{scene.key}', which nobody holds now."
    answer = told(parked, "in line", sentence, commands=night.commands)
    assert answer["remedy"].startswith("Start a worker with --dislock")
    assert doctor_says("No worker", night.commands) or doctor_says("no worker", night.commands)
    sentence = (
        f"Task {holder.id} has begun, ~ ago, and does not hold lock '{scene.key}' any more: *"
    )
    told(holder, "began", sentence, commands=night.commands)

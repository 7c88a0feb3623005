"""``celery dislock why``, of tasks of real workers: each situation has its sentence.

The incidents of an operator's night come last: `why` tells them from the task, and `ls` or `doctor`
from the lock.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from celery.exceptions import InvalidTaskError

from celery_dislock.operating import inspection
from celery_dislock.operating.checks import troubles
from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, POLL, PREFORK, Fleet, Scene, wait_for
from tests.acceptance.scenarios import BRIEF
from tests.commands import AWAY, FOUND, Dislock
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


@pytest.fixture
def set_by_people(scene):
    """What an operator does to the key; it is taken back in the end."""
    yield lambda command, *args: dislock(command, scene.key, *args)
    dislock("resume", scene.key)


# It runs.


@PREFORK
def test_it_runs(fleet, scene):
    """Where, under which lock and for how long; the same from Python."""
    holder = scene.hold(fleet)
    pid = scene.wait_for_report("begin")["pid"]
    sentence = (
        f"{scenarios.hold_by_itself.name}[{holder.id}] runs on *@here (pid {pid}): it has held "
        f"lock '{scene.key}' for ~, last renewed ~ ago."
    )
    answer = told(holder, "running", sentence)
    assert answer["remedy"].endswith(f"celery dislock free --terminate {scene.key}")
    for locks in (scenarios.dislock, scenarios.hold_by_itself):
        assert locks.why(holder.id).state == "running"
        assert locks.why(holder.id, key=scene.key).state == "running"
    told(holder, "running", sentence, "--key", "other")  # its worker knows better
    scene.open_gates(holder)


@PREFORK
def test_a_newer_task_takes_over(fleet, scene):
    """The one that runs is cancelled, and then says who came; the newest waits for it."""
    old = scene.begin(fleet, scenarios.build_in_peace)
    new = fleet.send(scenarios.build_in_peace, scene.key)
    scene.wait_for_line(1)
    assert f"lock server: task {new.id} waits for it to end" in ask(old)["rests_on"]
    assert ask(new)["state"] == "in line"
    scene.open_gate(old.id)
    scene.open_gate(new.id)


@PREFORK
def test_it_runs_without_its_lock(fleet, scene):
    """Its lease was freed under it: the worker says that it runs."""
    holder = scene.begin(fleet, scenarios.outlive_loss)
    dislock("free", scene.key, "--yes")
    sentence = (
        f"{scenarios.outlive_loss.name}[{holder.id}] runs on *, and does not hold its lock "
        f"'{scene.key}': *capped*"
    )
    told(holder, "running without its lock", sentence)
    scene.open_gate()
    holder.get(timeout=LIMIT)


def test_it_runs_where_locks_are_off(start_fleet, scene):
    """Its worker says so."""
    fleet = start_fleet("prefork", "--no-dislock")
    holder = scene.begin(fleet, scenarios.hold)
    sentence = f"*[{holder.id}] runs on *, for ~ so far, without its lock: locks are off there (*)."
    told(holder, "locks off", sentence)
    scene.open_gate()
    holder.get(timeout=LIMIT)


# It waits.


@PREFORK
def test_it_is_in_line(fleet, scene):
    """Behind whom, and as nth of how many."""
    holder = scene.hold(fleet)
    parked = [scene.park(fleet) for _ in range(3)]
    sentence = (
        f"{QUEUE.name}[{parked[1].id}] is 2nd of 3 in line for lock '{scene.key}', which "
        f"{scenarios.hold_by_itself.name}[{holder.id}] on * has held for ~."
    )
    answer = told(parked[1], "in line", sentence)
    assert f"lock server: {QUEUE.name}[{parked[0].id}] is the first" in str(answer["rests_on"])
    scene.open_gates(holder)
    for one in parked:
        one.get(timeout=LIMIT)


@PREFORK
def test_it_waits_at_its_second_lock_and_keeps_the_first(fleet, scene):
    """The tenant is its own meanwhile, and the API is full."""
    tenants = [f"{scene.key}-{name}" for name in "abc"]
    holders = [fleet.send(scenarios.call, scene.key, tenant) for tenant in tenants[:2]]
    scene.wait_for_report("begin", times=2)
    parked = fleet.send(scenarios.call, scene.key, tenants[2])
    Scene("api", scene.redis).wait_for_line(1)
    sentence = (
        f"{scenarios.call.name}[{parked.id}] is alone in line for lock 'api' (the 2nd of its 2 "
        f"locks), which 2 hold; the oldest, *, has held for ~; it keeps 'tenant:{tenants[2]}' "
        "meanwhile."
    )
    told(parked, "in line", sentence)
    for tenant in tenants:
        scene.open_gate(tenant)
    for one in (*holders, parked):
        one.get(timeout=LIMIT)


@PREFORK
def test_it_waits_in_its_slot(fleet, scene):
    """Where, and behind whom."""
    holder = scene.hold(fleet)
    waiting = fleet.send(scenarios.hold_or_wait, scene.key)
    scene.wait_for_line(1)
    sentence = (
        f"{scenarios.hold_or_wait.name}[{waiting.id}] waits in its slot on *@here (pid *), alone "
        f"in line for lock '{scene.key}', which *[{holder.id}] on * has held for ~."
    )
    told(waiting, "waiting in its slot", sentence)
    scene.open_gates(holder)
    waiting.get(timeout=LIMIT)


@PREFORK
@pytest.mark.parametrize("task", [scenarios.hold_inside, scenarios.hold_both])
def test_its_body_waits_for_a_lock(fleet, scene, task):
    """Which one, and behind whom, whether the task has a lock of its own or not."""
    holder = scene.begin(fleet, scenarios.hold_inside)
    waiting = fleet.send(task, scene.key)
    scene.wait_for_line(1)
    sentence = (
        f"{task.name}[{waiting.id}] waits in its body on *@here (pid *), alone in line for lock "
        f"'{scene.key}', which *[{holder.id}] on * has held for ~."
    )
    told(waiting, "waiting in its slot", sentence)
    told(holder, "running", f"*[{holder.id}] runs on *: it has held lock '{scene.key}' for ~, *")
    scene.open_gate()
    waiting.get(timeout=LIMIT)


@PREFORK
def test_its_lock_is_paused(fleet, scene, set_by_people):
    """By whom, why and since when; and how to go on."""
    set_by_people("pause", "--note", "the bucket moves")
    parked = scene.park(fleet)
    sentence = (
        f"{QUEUE.name}[{parked.id}] is alone in line for lock '{scene.key}', which is paused (by "
        "*: the bucket moves), for ~ so far."
    )
    answer = told(parked, "paused", sentence)
    assert answer["remedy"] == f"To take it back: celery dislock resume {scene.key}"
    scene.open_gate()
    set_by_people("resume")
    parked.get(timeout=LIMIT)


@PREFORK
def test_its_lock_is_held_back(fleet, scene, set_by_people):
    """For how long, and why."""
    scenarios.dislock.hold_back(scene.key, 600, note="429")
    parked = scene.park(fleet)
    sentence = (
        f"{QUEUE.name}[{parked.id}] is alone in line for lock '{scene.key}', which is held back "
        "for ~ more (*429)."
    )
    told(parked, "held back", sentence)
    scene.open_gate()
    set_by_people("resume")
    parked.get(timeout=LIMIT)


@PREFORK
def test_it_is_too_early_for_its_rate(fleet, scene, set_by_people):
    """Which rate, and when it admits the next start."""
    scene.open_gate()
    set_by_people("limit", "--rate", "1/h")
    fleet.send(scenarios.rated, scene.key).get(timeout=LIMIT)
    parked = scene.park(fleet, task=scenarios.rated)
    sentence = (
        f"{scenarios.rated.name}[{parked.id}] is alone in line for lock '{scene.key}', whose rate "
        "of 1 an hour, set by an operator (by *), admits the next start at *, in ~."
    )
    told(parked, "too early", sentence)
    set_by_people("resume")
    parked.get(timeout=LIMIT)
    scene.redis.delete(f"{scene.lock}:starts")


@PREFORK
def test_it_is_put_off(fleet, scene):
    """Until when, and why, as its result says."""
    holder = scene.hold(fleet)
    put_off = fleet.send(scenarios.hold_or_retry, scene.key)
    sentence = f"*[{put_off.id}] is put off until *: lock '{scene.key}' is held by *[{holder.id}]*"
    told_at_last(put_off, "put off", sentence)
    scene.open_gates(holder)
    put_off.get(timeout=LIMIT)


@PREFORK
def test_a_copy_of_a_task_that_runs_says_so(fleet, scene):
    """Two messages of one id: the one that runs is told of."""
    holder = scene.hold(fleet)
    fleet.send(scenarios.hold_by_itself, scene.key, task_id=holder.id)
    wait_for("the copy is put off", lambda: fleet.says(holder.id, "put off"))
    told(holder, "running", f"*[{holder.id}] runs on *")
    scene.open_gates(holder)
    wait_for("both have ended", lambda: len(scene.reported("end")) == 2)


@PREFORK
def test_it_is_not_due(fleet, scene):
    """A worker keeps it until the time that its sender has given; then it is revoked."""
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    scheduled = fleet.send(scenarios.step, scene.key, eta=later)
    sentence = (
        f"{scenarios.step.name}[{scheduled.id}] is with *@here until *, in 59 min: that is when "
        "its sender wants it to start."
    )
    told_at_last(scheduled, "not due", sentence)
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
    sentence = f"*[{waiting.id}] is with *@here, and waits for a free slot of its pool."
    told_at_last(waiting, "received", sentence)
    for one in sent:
        scene.open_gate(one.id)
    for one in sent:
        one.get(timeout=LIMIT)


# It is over.


@PREFORK
def test_it_has_ended(fleet, scene):
    """How and when: it has succeeded, failed, was skipped, dropped or replaced."""
    scene.open_gate()
    succeeded, failed = fleet.send(scenarios.step, scene.key), fleet.send(scenarios.fail, "f")
    succeeded.get(timeout=LIMIT)
    wait_for("it failed", failed.ready)
    told(succeeded, "ended", f"Task {succeeded.id} has run, and has succeeded, at *, ~ ago.")
    told(failed, "ended", f"Task {failed.id} has failed, at *, ~ ago: f.")
    scene.redis.delete(scenarios.gate_of(scene.key))
    holder = scene.hold(fleet)
    skipped = fleet.send(scenarios.hold, scene.key)
    wait_for("it was skipped", skipped.ready)
    why = f"Task {skipped.id} was revoked, at *, ~ ago: lock '{scene.key}' is held by *"
    told(skipped, "ended", why)
    dropped = scene.park(fleet)
    dislock("drop", dropped.id, "--yes", "--key", scene.key)
    told(dropped, "ended", f"Task {dropped.id} was revoked, *: dropped by an operator *.")
    older = scene.park(fleet, task=scenarios.hold_newest)
    newer = fleet.send(scenarios.hold_newest, scene.key)
    wait_for("it was replaced", older.ready)
    told(older, "ended", f"Task {older.id} was revoked, *: * took its place in line for lock *")
    scene.open_gates(holder)
    newer.get(timeout=LIMIT)


@PREFORK
def test_it_was_set_aside(fleet, scene):
    """Its record was damaged: its result and its caller are told why, and what can be done."""
    holder = scene.hold(fleet)
    parked = scene.park(fleet)
    ticket = f"{parked.id}:0:0"
    scene.redis.hset(f"{scene.lock}:tickets", ticket, "damaged")
    scene.open_gates(holder)
    with pytest.raises(InvalidTaskError, match="cannot be run: the record of its ticket cannot"):
        parked.get(timeout=LIMIT)
    sentence = f"Task {parked.id} was set aside in the line of lock '{scene.key}'*cannot be run: *"
    answer = told_at_last(parked, "set aside", sentence)
    assert answer["remedy"].endswith("Send it again.")
    scene.redis.delete(f"{scene.lock}:aside")


@PREFORK
def test_it_was_never_sent(fleet, scene):
    """It was a duplicate of another, which runs."""
    first = scene.begin(fleet, scenarios.unique_to_the_end)
    fleet.send(scenarios.unique_to_the_end, scene.key, task_id=f"mine-{scene.key}")
    sentence = (
        f"Task mine-{scene.key} was never sent: it was a duplicate of task {first.id}, whose "
        f"message of key '{scene.key}' was there."
    )
    told(f"mine-{scene.key}", "duplicate", sentence)
    told(first, "running", f"*[{first.id}] runs on *")
    scene.redis.delete(f"{scene.lock}:unsent:mine-{scene.key}")
    scene.open_gate()
    first.get(timeout=LIMIT)


@pytest.mark.usefixtures("server")
def test_nobody_knows_it():
    """What that can mean is told; a hostile id is text, in a pattern and on the screen."""
    for task_id in ("nobody", "\x1b[31m*{?}[a-z]\\", "*", "9" * 10_000):
        answer = dislock("why", task_id, "--timeout", "0.2")
        assert answer.exit_code == FOUND
        assert " ".join(answer.stdout.split()).startswith("Nothing is known here of task ")
        assert "\x1b" not in answer.stdout
        assert max(map(len, answer.stdout.splitlines()), default=0) <= 80 or len(task_id) > 80


# The incidents of an operator's night.


def listed(key, commands=dislock):
    """Return a lock as `ls` has it."""
    return next(one for one in json.loads(commands("ls", "--json").stdout) if one["key"] == key)


def trouble_of(key, commands=dislock):
    """What `ls` says is wrong with a lock."""
    return listed(key, commands)["troubles"]


def doctor_says(words, commands=dislock):
    """Whether `doctor` has a finding with these words."""
    report = json.loads(commands("doctor", "--json").stdout)
    return any(words in one["what"] for one in report["findings"])


@PREFORK
def test_a_hung_body(fleet, scene, monkeypatch):
    """Both say so after twenty timeouts, and how to end it."""
    monkeypatch.setattr(troubles, "HELD_LONG", 0.0)
    holder = scene.hold(fleet)
    parked = scene.park(fleet)
    assert trouble_of(scene.key) == ["hung"]
    for one, state in ((holder, "running"), (parked, "in line")):
        answer = told(one, state, "*")
        assert f"celery dislock free --terminate {scene.key}" in answer["remedy"]
    scene.open_gates(holder)
    parked.get(timeout=LIMIT)


@PREFORK
def test_a_forgotten_pause(fleet, scene, set_by_people):
    """Both say who has paused it, and how to go on."""
    set_by_people("pause", "--note", "friday")
    parked = scene.park(fleet)
    assert trouble_of(scene.key) == ["paused"]
    told(parked, "paused", "*which is paused (by *: friday), for ~ so far.")
    scene.open_gate()
    set_by_people("resume")
    parked.get(timeout=LIMIT)


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


@PREFORK
def test_a_flood_of_one_tenant(fleet, scene):
    """The last of many says how many are before it, at which lock."""
    tenant = f"{scene.key}-busy"
    calls = [fleet.send(scenarios.call, scene.key, tenant) for _ in range(30)]
    line = Scene(f"tenant:{tenant}", scene.redis)
    line.wait_for_line(29)
    last = next(one for one in calls if line.line[-1].startswith(one.id))
    sentence = (
        f"*[{last.id}] is 29th of 29 in line for lock '{line.key}' (the 1st of its 2 locks), *"
    )
    told(last, "in line", sentence)
    assert listed(line.key)["waiting"] == 29
    scene.open_gate(tenant)
    for one in calls:
        one.get(timeout=LIMIT)


@PREFORK
def test_a_capped_body(fleet, scene, monkeypatch):
    """It runs on without its lock."""
    monkeypatch.setattr(inspection, "BEGINS_WITHIN", 0.0)
    capped = scene.begin(fleet, scenarios.run_past_cap)
    scene.wait_until_free()
    sentence = f"*[{capped.id}] runs on *, and does not hold its lock '{scene.key}': * capped (*)."
    told(capped, "running without its lock", sentence)
    scene.open_gate()
    capped.get(timeout=LIMIT)


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


def test_the_lock_server_is_full(night, scene):
    """A task that comes is put off, and its result says why; doctor tries a write."""
    night.client.config_set("maxmemory", "1")
    put_off = night.fleet.send(scenarios.hold, scene.key)
    sentence = f"*[{put_off.id}] is put off *: *used memory > 'maxmemory'*"
    told_at_last(put_off, "put off", sentence, commands=night.commands)
    assert doctor_says("maxmemory", night.commands)
    night.client.config_set("maxmemory", "0")
    scene.open_gate()
    put_off.get(timeout=LIMIT)


def test_the_lock_server_is_a_replica(night, scene):
    """Demoted, it takes no writes."""
    night.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    put_off = night.fleet.send(scenarios.hold, scene.key)
    sentence = f"*[{put_off.id}] is put off *: lock server *: it is a replica*"
    told_at_last(put_off, "put off", sentence, commands=night.commands, code=AWAY)
    assert doctor_says("replica", night.commands)
    night.client.execute_command("REPLICAOF", "NO", "ONE")
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

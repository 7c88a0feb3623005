"""The newest task of a key takes over from the one that runs, in real workers."""

import os
import signal

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, PREFORK, Fleet, fleets, wait_for
from tests.acceptance.scenarios import (
    build,
    build_and_survive,
    build_changed,
    build_for_ever,
    build_for_ever_late,
    build_in_c,
    build_in_peace,
    build_renewed,
    build_stubbornly,
    build_terminated,
    build_two,
)
from tests.commands import Dislock

pytestmark = pytest.mark.acceptance
dislock = Dislock(scenarios.app)


def assert_superseded(result, by):
    """Check that a task ended as REVOKED, and says who came."""
    with pytest.raises(TaskRevokedError, match=f"replaces it: task {by.id}"):
        result.get(timeout=LIMIT)


def finish(scene, result):
    scene.open_gate(result.id)
    return result.get(timeout=LIMIT)


def take_over(fleet, scene, old, new=build):
    """Let a newer task come while an older one runs; check the end of both."""
    old = scene.begin(fleet, old)
    new = scene.begin(fleet, new)
    assert_superseded(old, new)
    assert finish(scene, new)["held"]
    assert [*dict.fromkeys(scene.begun)] == [old.id, new.id]


@fleets("prefork", "threads", "gevent", "eventlet", "rabbitmq")
def test_the_newest_takes_over(fleet, scene):
    """The one that runs is stopped at once, and the newest starts then; never two at a time."""
    take_over(fleet, scene, build)
    assert [event["error"] for event in scene.reported("end")] == ["SupersededError", None]
    scene.assert_exclusive()


@fleets("solo")
def test_a_renewal_tells_where_no_command_is_heard(fleet, scene):
    """A solo worker hears no remote control while it runs a task."""
    take_over(fleet, scene, build_renewed, build_renewed)
    scene.assert_exclusive()


@PREFORK
def test_of_a_burst_the_newest_runs_last(fleet, scene):
    """Of twenty some begin and all but the last end as REVOKED; nobody runs after it."""
    sent = [fleet.send(build, scene.key) for _ in range(20)]
    scene.wait_for_report("begin", id=sent[-1].id)
    assert finish(scene, sent[-1])["held"]
    for result in sent[:-1]:
        with pytest.raises(TaskRevokedError, match="newer"):
            result.get(timeout=LIMIT)
    assert scene.begun[-1] == sent[-1].id
    scene.assert_exclusive()


@PREFORK
def test_the_oldest_of_several_goes(fleet, scene):
    """With a limit of two, the newest takes the place of the one that has run longest."""
    first, second, third = (scene.begin(fleet, build_two) for _ in range(3))
    assert_superseded(first, third)
    assert finish(scene, second)["held"]
    assert finish(scene, third)["held"]


@fleets("prefork", "threads")
def test_a_body_that_does_not_listen(fleet, scene):
    """It is stopped with what `except Exception` does not catch, after lock_cancel_after."""
    take_over(fleet, scene, build_stubbornly)
    errors = [event["error"] for event in scene.history if event["what"] in {"resisted", "end"}]
    assert errors == ["SupersededError", "SupersededError", "StopTask", None]


@PREFORK
@pytest.mark.parametrize("task", [build_for_ever, build_for_ever_late], ids=["early", "late"])
def test_a_body_that_nothing_ends_but_the_end_of_its_process(fleet, scene, task):
    """Its process is killed; it ends as REVOKED all the same, and does not come back."""
    take_over(fleet, scene, task, build_and_survive)


@PREFORK
@pytest.mark.parametrize("why", ["it holds the GIL", "its process was stopped"])
def test_a_body_that_cannot_hear_of_it(fleet, scene, why):
    """Nothing in its process runs: the main process kills that, and the newest starts then."""
    stopped = why == "its process was stopped"
    old = scene.begin(fleet, build_terminated if stopped else build_in_c)
    if stopped:
        os.kill(scene.inside[0]["pid"], signal.SIGSTOP)
    new = scene.begin(fleet, build)
    assert_superseded(old, new)
    assert finish(scene, new)["held"]
    assert scene.begun == [old.id, new.id]


@PREFORK
def test_a_newcomer_that_is_dropped_while_it_waits(fleet, scene):
    """The one that runs undisturbed goes on, as nobody waits for it any more."""
    old = scene.begin(fleet, build_in_peace)
    new = fleet.send(build_in_peace, scene.key)
    scene.wait_for_line(1)
    assert scene.lease.holder["superseded"] == new.id
    assert dislock("drop", new.id, "--key", scene.key, "--yes").exit_code == 0
    assert "superseded" not in scene.lease.holder
    assert finish(scene, old)["held"]


@PREFORK
def test_a_newcomer_that_is_revoked_while_it_waits(fleet, scene):
    """It ends at its turn, and an older one that comes later may run: it never took over."""
    old = scene.begin(fleet, build_in_peace)
    late = Fleet(fleet.pool, f"late-{scene.key}", fleet.workers, fleet.broker_url)
    other = late.send(build, scene.key)
    new = fleet.send(build_in_peace, scene.key)
    scene.wait_for_line(1)
    fleet.revoke(new.id, reply=True)
    assert finish(scene, old)["held"]
    with pytest.raises(TaskRevokedError, match="revoked"):
        new.get(timeout=LIMIT)
    fleet.serve(late.queue)
    assert finish(scene, other)["held"]
    fleet.leave(late.queue)


@PREFORK
def test_a_chord_is_told(fleet, scene):
    """A cancelled member ends its chord, as a revoked one does."""
    header = [fleet.signature(build, scene.key)]
    done = fleet.start(chord(header, fleet.signature(scenarios.gather, [])))
    wait_for("it runs", lambda: scene.begun)
    new = scene.begin(fleet, build)
    with pytest.raises(Exception, match="replaces it: task"):
        done.get(timeout=LIMIT)
    assert finish(scene, new)["held"]


@PREFORK
def test_the_worker_of_the_one_that_runs_dies(fleet, scene):
    """Its message comes back, and ends as REVOKED; the newest runs."""
    old = scene.begin(fleet, build_and_survive)
    pid = scene.reported("begin")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        new = fleet.send(build_and_survive, scene.key)
        scene.wait_for_line(1)
    finally:
        os.kill(pid, signal.SIGKILL)
    scene.wait_for_report("begin", id=new.id)
    assert_superseded(old, new)
    assert finish(scene, new)["held"]
    scene.assert_exclusive(dead=[pid])


@pytest.mark.extra
def test_beside_a_release_with_another_strategy(start_fleet, scene):
    """A task of the release before goes on; those that it has parked make room."""
    old = start_fleet("prefork", ready=False, env={"SCENARIOS_RELEASE": "old"})
    new = start_fleet("prefork")
    old.workers[0].wait_until_ready()
    first = scene.begin(old, build_changed)
    parked = scene.park(old, task=build_changed)
    newest = new.send(build_changed, scene.key)
    with pytest.raises(TaskRevokedError, match=f"took its place .*: task {newest.id}"):
        parked.get(timeout=LIMIT)
    assert finish(scene, first)["held"]
    assert finish(scene, newest)["held"]
    scene.assert_exclusive()

"""Celery's canvas in an app whose base class is SingletonTask, with and without keys."""

import celery
import pytest
from celery import chain, chord, group, states
from celery.exceptions import ChordError, Reject, TaskRevokedError
from celery.result import AsyncResult, allow_join_result

from celery_dislock import LockHeldError
from tests.acceptance import canvas_app
from tests.acceptance.canvas_app import ADD, HOLD, add, largest, note, total
from tests.acceptance.fleet import LIMIT, wait_for

REFUSED = {
    "skip": (states.REVOKED, TaskRevokedError),
    "callable": (states.REVOKED, TaskRevokedError),
    "raise": (states.FAILURE, LockHeldError),
    "reject": (states.FAILURE, Reject),
}


@pytest.fixture(scope="module")
def canvas(server, start_pair):
    """Two workers of the app, and the app in this process."""
    canvas_app.app.conf.update(broker_url=server.url, result_backend=server.url)
    with start_pair("prefork", "canvas", modes=["", ""], app=canvas_app.__name__):
        yield canvas_app.app
    canvas_app.app.close()


@pytest.fixture
def key(canvas, scene):
    """A key of this test alone."""
    return scene.key


def wait_until_told(scene):
    """Wait until a task has told of this key, which it does once."""
    told = f"notes:{scene.key}"
    wait_for("somebody is told", lambda: scene.redis.llen(told))
    assert scene.redis.llen(told) == 1


def signatures(kind, key):
    """Make ``add`` signatures; those of tasks that wait or retry have one key."""

    def make(*args):
        return add.s(*args) if kind == "without keys" else ADD[kind].s(*args, key=key)

    return make


CANVASES = {
    "chain": (lambda s: chain(s(1, 1), s(2), s(3)), 7),
    "group": (lambda s: group(s(n, n) for n in range(4)), [0, 2, 4, 6]),
    "chord": (lambda s: chord([s(n, 1) for n in range(3)], total.s()), 6),
    "chord in a chain": (lambda s: s(1, 1) | group(s(1), s(2)) | total.s() | s(10), 17),
    "group of chains": (lambda s: group(s(1, 1) | s(1), s(2, 2) | s(2)), [3, 6]),
    "group after a group": (
        lambda s: group(s(1, 1), s(2, 1)) | group(total.s(), largest.s() | s(1)),
        [5, 4],
    ),
    "chord of chains": (lambda s: chord([s(1, 1) | s(1), s(2, 2) | s(2)], total.s()), 9),
    "chord of chords": (
        lambda s: chord([chord([s(1, 1), s(2, 2)], total.s()), s(3, 3)], total.s()),
        12,
    ),
    "body that is a chain": (lambda s: chord([s(1, 1), s(2, 2)], total.s() | s(1) | s(1)), 8),
}


@pytest.mark.parametrize("kind", ["without keys", "wait", "retry"])
def test_a_canvas_of_locked_tasks_gives_what_celery_gives(key, kind):
    """Whatever is composed of tasks that lock completes, where all share one key, too."""
    for name in ["chord", "group of chains"] if kind == "retry" else CANVASES:  # it takes seconds
        build, expected = CANVASES[name]
        canvas = build(signatures(kind, f"{key}-{name}"))
        assert (name, canvas.delay().get(timeout=LIMIT)) == (name, expected)


@pytest.mark.parametrize("strategy", REFUSED)
def test_a_chord_with_a_member_that_is_refused_fails(key, scene, strategy):
    """Its body does not run, its errback is called once, and nobody waits for ever."""
    header = [HOLD[strategy].s(n, key=key) for n in (1, 2)]
    result = chord(header)(total.s().on_error(note.si(key)))
    members = result.parent.results
    state, error = REFUSED[strategy]
    wait_for("one is refused", lambda: state in [member.state for member in members])
    scene.open_gate()
    body = AsyncResult(result.id, app=canvas_app.app)  # without its parents: their error is known
    with pytest.raises(ChordError, match=key):
        body.get(timeout=LIMIT)
    wait_for("both members have ended", lambda: all(member.ready() for member in members))
    assert sorted(member.state for member in members) == sorted([state, states.SUCCESS])
    wait_until_told(scene)
    (refused,) = [member for member in members if member.state == state]
    with pytest.raises(error, match=key), allow_join_result():
        AsyncResult(refused.id, app=canvas_app.app).get(timeout=LIMIT)


@pytest.mark.parametrize("strategy", REFUSED)
def test_a_chain_with_a_step_that_is_refused_ends(key, scene, strategy):
    """Who waits for the last step, or for a chord further on, hears of it.

    A failure calls errbacks; being skipped, as being revoked, does not.
    """
    holder = HOLD["skip"].delay(0, key=key)
    wait_for("the lock is held", lambda: scene.leases)
    refused = ADD[strategy].si(1, 1, key=key)
    state, error = REFUSED[strategy]
    canvases = [chain(add.s(1, 1), refused, add.si(3, 3))]
    if celery.VERSION >= (5, 7):  # before, whatever has failed is not told to a chord further on
        canvases.append(chain(refused, group(add.si(4, 4), add.si(5, 5)), total.s()))
    for canvas in canvases:
        result = canvas.delay()
        with pytest.raises(error, match=holder.id):
            AsyncResult(result.id, app=canvas_app.app).get(timeout=LIMIT)
        assert AsyncResult(result.id, app=canvas_app.app).state == state
    result = refused.apply_async(link_error=note.si(key))
    with pytest.raises(error):
        result.get(timeout=LIMIT)
    if state == states.FAILURE:
        wait_until_told(scene)
    assert scene.redis.exists(f"notes:{key}") == (state == states.FAILURE)

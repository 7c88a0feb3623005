"""Beats of which one sends: takeovers in one process, with clocks that the test drives."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from celery.schedules import crontab

from celery_dislock import beat, scripts
from celery_dislock.scripts.names import beat_of
from tests.integration.beats import STEP, TIMEOUT, Killed, World
from tests.integration.schedulers import KINDS, schedules_in

TAKEOVERS = 200
EVERY = 2.0  # seconds, of an entry that is due more often than a takeover takes
SLACK = 3 * STEP + 0.02  # seconds: rounds of the loops


@pytest.fixture(autouse=True)
def _nobody_blocks(monkeypatch):
    """A beat that waits in line asks once in each round."""
    monkeypatch.setattr(beat, "WAIT_MOST", 0.0)


@pytest.fixture(params=KINDS)
def kept(request, tmp_path):
    """Where the beats keep their schedule."""
    with schedules_in(request.param, tmp_path) as kept:
        yield kept


def end_at_random(world, one):
    """Stop a beat, kill it at one of its next commands and messages, or halt it there a while."""
    if world.rng.random() < 0.3:
        one.stop()
        return
    left = 1 + world.rng.randrange(40)

    def around(_when):
        nonlocal left
        left -= 1
        if left == 0:
            if world.rng.random() < 0.5:
                one.alive = False
                raise Killed
            world.run(world.rng.uniform(0, 3 * TIMEOUT), but=one)

    one.around = around
    while left > 0:
        world.run(STEP)


@pytest.mark.parametrize("seed", range(4))
def test_takeovers_at_random(kept, seed):
    """No tick has two ids, none is missing, and nothing is silent for longer than a timeout."""
    world = World({"often": EVERY, "minutely": crontab()}, beats=3, seed=seed, kept=kept)
    world.run(5)
    for _ in range(TAKEOVERS // 4):
        end_at_random(world, world.leader)
        ended = [one.made for one in world.beats if not one.alive and world.rng.random() < 0.5]
        world.beats = [one for one in world.beats if one.alive]
        world.beats += [world.start(made=made) for made in ended]
        world.beats += [world.start() for _ in range(3 - len(world.beats))]
        world.run(TIMEOUT + 2 * STEP)
    world.run(61)

    often, minutely = world.ticks("often"), world.ticks("minutely")
    gaps = [later.tick - sooner.tick for sooner, later in pairwise(often)]
    assert min(gaps) >= EVERY - SLACK
    assert max(gaps) <= EVERY + TIMEOUT + SLACK
    minutes = [int(one.tick // 60) for one in minutely]
    assert minutes == list(range(minutes[0], minutes[-1] + 1))
    assert max(one.at - one.tick for one in often + minutely) <= TIMEOUT + SLACK
    for one in Counter(one.id for one in world.sent).values():
        assert one <= 2


def test_a_beat_that_does_not_lead_claims_nothing(redis_client):
    """Without its lease, after it, or under the token of an earlier one, nothing is written."""
    lock = "dislock:{beat}"

    def run(script, *arguments):
        return redis_client.eval(script.text, 2, lock, beat_of(lock), *arguments)

    def claim(owner, token):
        seconds, more = redis_client.time()
        tick = (seconds * 1_000_000 + more, 30_000_000, "entry", 1)
        return run(scripts.TICK, owner, token, *tick)[0]

    _, token = redis_client.eval(scripts.ACQUIRE.text, 1, lock, "a/1", 30_000, "{}", "x", 1, 0, 1)
    assert claim("b/1", token) == beat.NOT_LEADING
    assert claim("a/1", 7) == beat.NOT_LEADING
    assert not redis_client.exists(beat_of(lock))
    assert claim("a/1", token) == beat.DONE
    redis_client.eval(scripts.RELEASE.text, 1, lock, "a/1", 0)
    assert claim("a/1", token) == beat.NOT_LEADING


@pytest.mark.parametrize("enabled", [True, None])
def test_a_program_that_starts_beat(enabled):
    """As with --dislock, if locks are on for the app; nothing of Celery's command line is there."""
    program = (
        "import celery, celery_dislock\n"
        "app = celery.Celery('beats', broker='memory://')\n"
        "celery_dislock.Dislock(app)\n"
        f"app.conf.update(dislock_enabled={enabled}, dislock_url='redis://nowhere')\n"
        "beat = app.Beat()\n"
        "beat.init_loader()\n"
        "print(type(beat.Service(app).get_scheduler(lazy=True)).__name__)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.split() == [
        "DislockPersistentScheduler" if enabled else "PersistentScheduler"
    ]

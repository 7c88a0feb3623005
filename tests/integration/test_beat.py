"""Beats of which one sends: what its script refuses, and a program that starts one."""

import pytest

from celery_dislock import beat, scripts
from celery_dislock.scripts.names import beat_of
from tests.programs import run_code


def test_a_beat_that_does_not_lead_claims_nothing(redis_client):
    """Without its lease, after it, or under the token of an earlier one, nothing is written."""
    lock = "dislock:{beat}"

    def run(script, *arguments):
        return redis_client.eval(script.text, 2, lock, beat_of(lock), *arguments)

    def claim(owner, token):
        seconds, more = redis_client.time()
        tick = (seconds * 1_000_000 + more, 30_000_000, "entry", 1)
        return run(scripts.TICK, owner, token, *tick)[0]

    _, token = redis_client.eval(scripts.ACQUIRE.text, 1, lock, "a/1", 30_000, "{}", "x:1", 0, 1)
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
    told = run_code(program).stdout.split()
    assert told == ["DislockPersistentScheduler" if enabled else "PersistentScheduler"]

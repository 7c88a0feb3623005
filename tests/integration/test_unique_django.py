"""Uniqueness when sending in transactions of Django: what is sent and reserved, and when.

Each scene runs in an interpreter of its own, because Django's settings are those of a process.
"""

import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import redis
from celery import Celery

from celery_dislock import Dislock, DuplicateTaskError, SingletonTask
from tests.forked import ROOT
from tests.programs import run


def act(scene, url):
    """Play a scene in a new interpreter; its failed assertion is this test's."""
    pytest.importorskip("django")
    program = f"from {__name__} import make_site, {scene.__name__} as s; s(make_site({url!r}))"
    run(sys.executable, "-W", "ignore", "-c", program, cwd=ROOT)


def make_site(url):
    """Make a task for documents, and what begins a transaction and tells the state."""
    import django
    from celery.contrib.django.task import DjangoTask
    from django.conf import settings
    from django.db import transaction

    class LockedTask(SingletonTask, DjangoTask):
        """Locks, and has delay_on_commit()."""

    databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    settings.configure(DATABASES=databases, USE_TZ=True)
    django.setup()
    app = Celery("site", broker=url, set_as_current=False)
    Dislock(app)
    options = {"base": LockedTask, "lock_key": "edit:<doc>", "lock_unique_until": "end"}

    @app.task(name="edit", shared=False, **options)
    def edit(doc): ...

    @app.task(name="strict", shared=False, lock_on_duplicate="raise", **options)
    def strict(doc): ...

    client = redis.Redis.from_url(url, decode_responses=True)

    def state():
        """How many messages wait, and for which documents a key is reserved."""
        keys = sorted(client.keys("*:unique"))
        return client.llen("celery"), [key[len("dislock:{edit:") :][0] for key in keys]

    return SimpleNamespace(edit=edit, strict=strict, begin=transaction.atomic, state=state)


def commits(site):
    with site.begin():
        assert [site.edit.delay_on_commit("1") for _ in range(2)] == [None, None]
        assert site.state() == (0, [])
    assert site.state() == (1, ["1"])
    assert site.edit.delay("1").duplicate


def rolls_back(site):
    with site.begin():
        site.edit.delay_on_commit("1")
        with suppress(ZeroDivisionError), site.begin():
            site.edit.delay_on_commit("2")
            raise ZeroDivisionError
        assert site.state() == (0, [])
    assert site.state() == (1, ["1"])
    assert not site.edit.delay("2").duplicate


def sends_at_once(site):
    with suppress(ZeroDivisionError), site.begin():
        sent = site.edit.delay("1")
        raise ZeroDivisionError
    assert site.state() == (1, ["1"])
    later = site.edit.delay("1")
    assert (later.id, later.duplicate) == (sent.id, True)


def raises(site):
    for task, reserved in ((site.strict, ["1"]), (site.edit, ["1", "2"])):
        with suppress(DuplicateTaskError), site.begin():
            for doc in "112":
                task.delay_on_commit(doc)
        assert site.state() == (len(reserved), reserved)


def test_a_transaction_that_commits(redis_url):
    """Nothing before; then one message and one reservation, and the next is a duplicate."""
    act(commits, redis_url)


def test_a_savepoint_that_rolls_back(redis_url):
    """What was sent in the inner block is dropped; the outer one's goes out."""
    act(rolls_back, redis_url)


def test_a_plain_delay_in_a_transaction_that_rolls_back(redis_url):
    """It is out at once, as with Celery alone: it stays so, and the next is a duplicate of it."""
    act(sends_at_once, redis_url)


def test_an_error_for_a_duplicate_comes_after_the_commit(redis_url):
    """Django drops the calls that follow it: with delay_on_commit(), "return" is the one to use."""
    act(raises, redis_url)

"""The worker's options and steps: what ``Dislock(app)`` and ``--dislock`` turn on."""

import logging
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.bin.worker import worker as celerys_command
from celery.concurrency.solo import TaskPool
from kombu.utils.imports import symbol_by_name

from celery_dislock import Dislock, SettingsError, SingletonTask
from celery_dislock.plugin import worker_command
from celery_dislock.worker.steps import LockStep


@pytest.fixture
def app(plain_app):
    return plain_app


@pytest.fixture
def worker(app):
    return SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here")


def body(): ...


def guarded(app, name):
    return "dislock_guard" in vars(type(app.tasks[name]))


def test_the_worker_command_gets_the_options(app):
    """The import adds --dislock, --no-dislock and --dislock-url, and Dislock(app) nothing more."""
    assert worker_command is celerys_command
    assert not app.user_options["worker"]
    ours = [option for option in worker_command.params if option.name.startswith("dislock")]
    assert [option.opts + option.secondary_opts for option in ours] == [
        ["--dislock", "--no-dislock"],
        ["--dislock-url"],
    ]


def test_the_options_bring_the_step_that_reads_them():
    """An app whose tasks were final before the import has the step as soon as they are parsed."""
    app = Celery("shop", set_as_current=False)
    first = next(option for option in worker_command.params if option.name == "dislock")
    assert first.callback(SimpleNamespace(obj=SimpleNamespace(app=app)), first, True) is True
    assert LockStep in map(symbol_by_name, app.steps["worker"])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("redis://:secret@x", "app='redis://:***@x'"),
        ("shop", "app='shop'"),
        ("shop.celery", "app='shop.celery'"),
        ("localhost:6379", "app='localhost:6379'"),
        (":secret@x:6379", "app='***'"),
        (["redis://:secret@x"], "app=['redis://:***@x']"),
        ({"url": "redis://:secret@x"}, "app={'url': 'redis://:***@x'}"),
        (None, "app=None"),
        (Celery, "app=<class"),
    ],
)
def test_what_is_no_app_is_answered_with_the_way_to_give_a_url(wrong, told):
    """Dislock("redis://x") is an error of ours that names Dislock.from_url."""
    with pytest.raises(SettingsError, match=r"use Dislock\.from_url\(url\)") as caught:
        Dislock(wrong)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_client_logs_which_tasks_it_cannot_guard(app, caplog):
    """One line, where Celery would log a traceback; a worker exits with that message instead."""
    app.task(name="keyed", lock_key="k:<x>", shared=False)(body)
    app.conf.dislock_enabled = True
    app.finalize()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "keyed: lock_key='k:<x>'" in record.message
    assert record.exc_info is None


@pytest.mark.parametrize("flag", [True, None])
def test_dislock_guards_every_task_with_a_key(app, worker, reachable, flag):
    """Without the flag only SingletonTasks lock; without a key nothing is locked."""
    app.task(name="keyed", lock_key="k", shared=False)(body)
    app.task(name="plain", shared=False)(body)
    app.task(name="singleton", base=SingletonTask, shared=False)(body)
    LockStep(worker, dislock=flag)
    assert [guarded(app, name) for name in ("keyed", "plain", "singleton")] == [
        *(bool(flag), False, True)
    ]


class TestTasksThatComeLate:
    """With ``dislock_enabled=True`` a task with a key locks whenever it was declared or is used."""

    @pytest.fixture
    def app(self, app):
        app.conf.dislock_enabled = True
        Dislock(app)
        return app

    def test_a_task_that_is_used_before_the_app_is_final_is_guarded(self, app):
        """As an eager task of a test or a script is."""
        keyed = app.task(name="keyed", lock_key="k", shared=False)(body)
        assert keyed.name == "keyed"  # made now
        assert not app.finalized
        assert "dislock_guard" in vars(type(keyed._get_current_object()))

    @pytest.mark.parametrize("base", [Task, None])
    def test_a_task_that_is_declared_after_that_is_guarded(self, app, base):
        """Its module is imported late; Celery has a second way to add a task: a class."""
        app.finalize()
        if base is None:
            app.task(name="keyed", lock_key="k", shared=False)(body)
        else:
            app.register_task(type("Keyed", (base,), {"name": "keyed", "lock_key": "k"})())
        app.task(name="plain", shared=False)(body)
        assert guarded(app, "keyed")
        assert not guarded(app, "plain")

    @pytest.mark.parametrize("of_a_command", [False, True])
    def test_a_late_task_with_a_bad_option_is_refused(self, app, monkeypatch, of_a_command):
        """Where it is declared; Celery's command line would show a traceback."""
        app.finalize()
        monkeypatch.setattr(
            "celery_dislock.tasks.task._command_line_loads_the_app", lambda: of_a_command
        )
        error = SystemExit if of_a_command else SettingsError
        with pytest.raises(error, match="lock_key='k:<x>'"):
            app.task(name="keyed", lock_key="k:<x>", shared=False)(body)
        assert "keyed" not in app.tasks

    def test_what_is_there_when_the_dislock_is_made_late_is_guarded(self):
        """The app may have been final before."""
        app = Celery("late", set_as_current=False)
        app.task(name="keyed", lock_key="k", shared=False)(body)
        app.finalize()
        app.conf.dislock_enabled = True
        Dislock(app)
        assert guarded(app, "keyed")


SEVERAL = ["redis://a", "rediss://b:1/0", "unix:///c.sock"]


def test_a_task_that_was_bound_before_is_looked_at_again(app, worker, reachable):
    """A worker whose servers cannot do what a task asks for does not start."""
    app.task(name="reads", base=SingletonTask, lock_mode="shared", shared=False)(body)
    app.finalize()
    assert app.tasks["reads"]
    with pytest.raises(SystemExit, match="reads: lock_mode='shared': several lock servers"):
        LockStep(worker, dislock=True, dislock_url=SEVERAL)


class Mine(SingletonTask):
    """A class of one's own."""


@pytest.mark.parametrize("base", [SingletonTask, Mine])
def test_a_task_of_the_typed_decorator_is_one_of_celerys(app, base):
    """It has the name, the options and the lock of one by @app.task."""

    @Dislock(app).task(
        bind=True, base=base, lock_key="export:<corp_id>", max_retries=5, name=f"{base.__name__}.t"
    )
    def export(self, corp_id):
        return self, corp_id

    assert export(7) == (app.tasks[f"{base.__name__}.t"], 7)
    assert isinstance(export, base)
    assert export.lock_for(7).key == "export:7"
    assert (export.name, export.max_retries) == (f"{base.__name__}.t", 5)


def test_the_typed_decorator_needs_no_parentheses(app):
    """The key is the name and all arguments then, as for any SingletonTask."""

    @Dislock(app).task
    def export(corp_id):
        return corp_id

    assert export(7) == 7
    assert export.lock_for(7).key.startswith(f"{__name__}.export:")


@pytest.mark.parametrize("base", [Task, "SingletonTask", None])
def test_a_typed_task_locks_in_any_case(app, base):
    """A class that locks under --dislock only is for @app.task; plain Python has no tasks."""
    with pytest.raises(SettingsError, match="give SingletonTask"):
        Dislock(app).task(base=base, lock_key="k")
    with pytest.raises(SettingsError, match=r"use Dislock\(app\)"):
        Dislock.from_url("redis://a").task(lock_key="k")

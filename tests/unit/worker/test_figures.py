"""The figures of pool processes, in files, and the answer to ``celery inspect dislock``."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.concurrency import prefork, solo
from celery.worker.control import Panel

from celery_dislock import Dislock, SingletonTask
from celery_dislock.locks.figures import written
from celery_dislock.locks.renewals import Counts
from celery_dislock.parking.process import runtime_of
from celery_dislock.plugin import LockStep  # noqa: F401 -- as a worker does
from celery_dislock.worker import figures
from celery_dislock.worker.figures import (
    FOLDER,
    FigureFile,
    FiguresStep,
    Folder,
    figures_of,
    hide_figures,
    inspect_locks,
    remove_left_behind,
    show_figures,
)
from tests.unit.fakes import without_strangers

OTHER = os.getpid() + 1  # a process that is not there


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder of temporary files of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(FOLDER, raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def alive(monkeypatch):
    """This process lives, and no other one."""
    monkeypatch.setattr(figures, "is_alive", lambda pid: pid == os.getpid())


@pytest.fixture
def folder():
    folder = Folder()
    yield folder
    folder.remove()


@pytest.fixture
def worker(plain_app):
    without_strangers(plain_app)

    @plain_app.task(base=SingletonTask, name="export", lock_key="export:<n>", shared=False)
    def export(n): ...

    pool = SimpleNamespace(info={"processes": [os.getpid(), OTHER]})
    steps = [SimpleNamespace(warnings=["Raise it."]), object()]
    return SimpleNamespace(app=plain_app, pool_cls=prefork.TaskPool, pool=pool, steps=steps)


def figures_of_process(pid=None):
    return written(pid or os.getpid(), [], Counts(renewals=3), 0)


class TestFolder:
    def test_only_this_user_can_read_it(self, folder):
        """Keys and task ids are nobody else's business."""
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700

    def test_what_a_process_wrote_is_read(self, folder):
        """The figures come with the time for which they have been the same."""
        now = time.monotonic()
        FigureFile(folder.path, lambda: now - 2).write(figures_of_process())
        [told] = folder.read([os.getpid()], now).values()
        assert (told["pid"], told["renewals"], told["unchanged_for"]) == (os.getpid(), 3, 2.0)
        assert "at" not in told

    def test_files_of_dead_processes_are_deleted(self, folder):
        """A process that is not in the pool any more is neither told nor kept."""
        file = folder.path / f"{OTHER}.json"
        file.write_text(json.dumps(figures_of_process(OTHER)))
        assert folder.read([os.getpid()], 0.0) == {}
        assert not file.exists()

    def test_the_file_of_a_process_that_lives_is_kept(self, folder):
        """It was forked just now, and is not in the pool yet."""
        FigureFile(folder.path).write(figures_of_process())
        assert folder.read([OTHER], 0.0) == {}
        assert len(list(folder.path.glob("*.json"))) == 1

    def test_what_a_process_died_in_the_middle_of_is_deleted(self, folder):
        """Half a file under its temporary name is nobody's figures."""
        half = folder.path / f"{OTHER}.new.json"
        half.write_text("{")
        assert folder.read([os.getpid()], 0.0) == {}
        assert not half.exists()

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"leases": 7}', '"x"'])
    def test_a_file_that_cannot_be_read_is_no_error(self, folder, text):
        """The process is told as one that has not told its figures."""
        (folder.path / f"{OTHER}.json").write_text(text)
        assert folder.read([OTHER], 0.0) == {}

    def test_a_removed_folder_does_not_disturb_the_watchdog(self, folder):
        """The worker has ended first; its pool process writes in vain."""
        file = FigureFile(folder.path)
        folder.remove()
        file.write(figures_of_process())
        file.remove()
        assert not folder.path.exists()

    def test_a_child_does_not_remove_it(self, folder, monkeypatch):
        """A forked process has a copy of the object."""
        monkeypatch.setattr(os, "getpid", lambda: OTHER)
        folder.remove()
        assert folder.path.exists()
        monkeypatch.undo()


class TestLeftBehind:
    def old(self, path):
        os.utime(path, (time.time() - 3600,) * 2)

    def test_folders_of_killed_workers_are_deleted(self, temporary):
        """Nobody has its lock: the main process that made it is dead."""
        left = temporary / "celery-dislock-abc"
        left.mkdir()
        (left / "figures").touch()
        (left / "7.json").touch()
        self.old(left)
        remove_left_behind()
        assert not left.exists()

    def test_folders_of_live_workers_are_kept(self, folder):
        """Whoever made it has it locked."""
        self.old(folder.path)
        remove_left_behind()
        assert folder.path.exists()

    def test_a_folder_that_was_just_made_is_kept(self, temporary):
        """It may not have its lock yet."""
        new = temporary / "celery-dislock-abc"
        new.mkdir()
        (new / "figures").touch()
        remove_left_behind()
        assert new.exists()

    def test_what_is_no_folder_of_ours_is_kept(self, temporary):
        """A file, a folder of another kind, a link, and what somebody has put into a folder."""
        (temporary / "celery-dislock-file").touch()
        (temporary / "celery-dislock-else").mkdir()
        mixed = temporary / "celery-dislock-mixed"
        mixed.mkdir()
        (mixed / "figures").touch()
        (mixed / "thesis.tex").touch()
        (temporary / "celery-dislock-link").symlink_to(mixed)
        for path in list(temporary.iterdir()):
            self.old(path)
        remove_left_behind()
        assert len(list(temporary.iterdir())) == 4
        assert (mixed / "thesis.tex").exists()


class TestStep:
    def test_a_prefork_worker_has_a_folder_until_it_stops(self, worker, temporary):
        """The pool processes inherit its name in their environment."""
        step = FiguresStep(worker)
        assert step.include_if(worker)
        step.create(worker)
        [path] = temporary.iterdir()
        assert os.environ[FOLDER] == str(path)
        step.start(worker)
        step.stop(worker)
        assert list(temporary.iterdir()) == []
        assert FOLDER not in os.environ
        step.stop(worker)

    def test_other_pools_need_none(self, worker):
        """Their main process has the leases itself."""
        worker.pool_cls = solo.TaskPool
        assert not FiguresStep(worker).include_if(worker)

    def test_without_locks_there_is_none(self, worker):
        """--no-dislock: there is nothing to tell."""
        worker.app.conf.dislock_enabled = False
        assert not FiguresStep(worker).include_if(worker)

    def test_a_worker_that_uses_no_locks_has_none(self, worker):
        """Celery imports the plugin for each worker on the machine, also for those of strangers."""
        worker.app = without_strangers(Celery("other", set_as_current=False))
        assert not FiguresStep(worker).include_if(worker)
        Dislock(worker.app)
        assert FiguresStep(worker).include_if(worker)

    def test_the_folder_of_another_worker_is_not_inherited(self, worker, monkeypatch):
        """A task may start a worker, whose environment has the folder of the task's worker."""
        monkeypatch.setenv(FOLDER, "/elsewhere")
        FiguresStep(worker)
        assert FOLDER not in os.environ

    def test_a_worker_that_cannot_make_it_starts(self, worker, monkeypatch, caplog):
        """A read-only disk costs the figures of the pool processes, and nothing else."""
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        caplog.set_level("INFO", "celery_dislock")
        step = FiguresStep(worker)
        assert step.create(worker) is step
        assert "will not tell of pool processes" in caplog.text
        told = figures_of(worker.app, worker)
        assert [one["unchanged_for"] for one in told["processes"]] == [0.0, None, None]


class TestPoolProcess:
    @pytest.fixture
    def child(self, plain_app, folder, monkeypatch):
        """This process, as if it were one of the pool."""
        monkeypatch.setenv(FOLDER, str(folder.path))
        monkeypatch.setattr(figures, "is_pool_process", lambda: True)
        monkeypatch.setattr(figures, "current_app", plain_app)
        return runtime_of(plain_app).process.watchdog

    def test_it_shows_its_figures_from_its_start(self, child, folder):
        """Also one that has not run a task is told."""
        show_figures()
        assert child.showing.show is not None
        assert list(folder.read([os.getpid()], time.monotonic())) == [os.getpid()]

    def test_it_deletes_its_file_at_its_end(self, child, folder):
        """And writes no other one."""
        show_figures()
        hide_figures()
        assert child.showing.show is None
        assert list(folder.path.glob("*.json")) == []

    def test_without_a_lock_server_it_starts(self, child, plain_app, folder):
        """Its tasks say what is missing, and Celery logs no error of a signal handler."""
        runtime_of(plain_app).close()
        plain_app.conf.dislock_url = "http://x"
        show_figures()
        hide_figures()
        assert list(folder.path.glob("*.json")) == []

    def test_a_process_outside_a_pool_shows_nothing(self, child, folder, monkeypatch):
        """A script that a task has started has inherited the environment."""
        monkeypatch.setattr(figures, "is_pool_process", lambda: False)
        show_figures()
        hide_figures()
        assert child.showing.show is None
        assert list(folder.path.glob("*.json")) == []


class TestAnswer:
    def test_celery_knows_the_command(self):
        """``celery inspect dislock`` is refused unless the command line knows it."""
        assert Panel.meta["dislock"].type == "inspect"
        assert Panel.data["dislock"] is inspect_locks

    def test_it_has_all_processes(self, worker):
        """The main process, a pool process that has written, and one that has not."""
        step = FiguresStep(worker)
        step.create(worker)
        FigureFile(figures._folders[worker.app].path).write(figures_of_process())
        controller = SimpleNamespace(controller=worker)
        told = inspect_locks(SimpleNamespace(app=worker.app, consumer=controller))
        step.stop(worker)
        main, child, silent = told["processes"]
        assert (main["main"], main["pid"], main["held"]) == (True, os.getpid(), 0)
        assert (child["main"], child["pid"], child["renewals"]) == (False, os.getpid(), 3)
        assert silent == {"main": False, "pid": OTHER, "unchanged_for": None}
        json.dumps(told)

    def test_the_command_line_gets_it_in_short(self, worker):
        """A line for each process that holds something or had trouble; "full" has everything."""
        step = FiguresStep(worker)
        step.create(worker)
        FigureFile(figures._folders[worker.app].path).write(figures_of_process())
        state = SimpleNamespace(app=worker.app, consumer=SimpleNamespace(controller=worker))
        meta = Panel.meta["dislock"]
        given = {meta.variadic: []}
        short = inspect_locks(state, **given)
        full = inspect_locks(state, **{meta.variadic: ["full"]})
        step.stop(worker)
        assert short["tasks"] == 1
        assert f"{OTHER}: has not told its figures" in short["processes"]
        assert all(isinstance(one, str) for one in short["processes"])
        assert len(json.dumps(short, indent=4).splitlines()) < 20
        assert full["tasks"] == {"export": {"lock_key": "export:<n>"}}
        assert full["processes"][0]["main"]

    def test_it_has_what_can_be_compared(self, worker):
        """Version, server, prefix, whether tasks lock, and options that are not the defaults."""
        worker.app.conf.dislock_url = "redis://:secret-word@h:1/0"
        told = figures_of(worker.app, worker)
        assert told["server"] == "redis://:***@h:1/0"
        assert (told["prefix"], told["locks"], told["enabled"]) == ("dislock", True, None)
        assert told["tasks"] == {"export": {"lock_key": "export:<n>"}}
        assert told["warnings"] == ["Raise it."]
        assert "secret-word" not in json.dumps(told)

    def test_a_worker_without_a_lock_server_answers(self, worker):
        """It says what is missing."""
        worker.app.conf.dislock_url = None
        worker.app.conf.broker_url = "memory://"
        told = figures_of(worker.app, worker)
        assert "neither the broker nor the result backend is a Redis" in told["no_server"]
        assert told["processes"] == []

    def test_other_pools_answer_for_themselves(self, worker):
        """Threads and greenlets have the main process's watchdog."""
        worker.pool_cls = solo.TaskPool
        assert [one["main"] for one in figures_of(worker.app, worker)["processes"]] == [True]

    def test_a_pool_that_is_just_starting_is_no_error(self, worker):
        """Its processes are told the next time."""
        worker.pool = None
        assert len(figures_of(worker.app, worker)["processes"]) == 1

"""What a worker says to those who have just installed the package, or made a mistake."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, ROOT
from tests.forked import run_python
from tests.programs import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.acceptance

TASK = """
@app.task(name="shop.export", bind=True, lock_key="export:<corp_id>", shared=False, base=BASE)
def export(self, corp_id):
    return {"locked": bool(getattr(self, "lease", None))}
"""
IMPORTED = "from celery_dislock import SingletonTask\n"
APP = """
from celery import Celery
app = Celery("shop", broker=URL, backend=URL)
"""
# Without Dislock(app): how the package comes into the process of a worker.
WAYS = {
    "imported first": IMPORTED + APP + TASK.replace("BASE", "SingletonTask"),
    "imported last": APP + "app.finalize()\n" + IMPORTED + TASK.replace("BASE", "None"),
    "not imported": APP + TASK.replace("BASE", "None"),
    "imported by tasks that the worker loads": APP + 'app.conf.include = ["first_contact_tasks"]',
}
WITHOUT_ENTRY_POINTS = """
import importlib.metadata
importlib.metadata.entry_points = lambda **_: []
from celery.__main__ import main
main()
"""
BAD_OPTION = """
from celery_dislock import SingletonTask
app.conf.beat_schedule_filename = "schedule"

@app.task(name="shop.export", base=SingletonTask, lock_on_conflict="skipp", shared=False)
def export(): ...
"""
REFUSED = "shop.export: lock_on_conflict='skipp': use one of 'skip', 'raise'"


@pytest.fixture
def write_app(tmp_path: Path, server):
    """Write the module of an app, and of the tasks that only its worker loads; return its name."""

    def write(source: str) -> str:
        (tmp_path / "first_contact.py").write_text(source.replace("URL", repr(server.url)))
        tasks = "from first_contact import app\n" + IMPORTED
        tasks += TASK.replace("BASE", "SingletonTask")
        (tmp_path / "first_contact_tasks.py").write_text(tasks)
        return "first_contact"

    return write


@pytest.fixture
def celery(tmp_path: Path):
    """Run a celery command to its end; return its exit status and all that it says."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}

    def run_celery(*command: str, program: tuple[str, ...] = ()) -> tuple[int, str]:
        if program:
            done = run(sys.executable, *program, *command, cwd=tmp_path, env=env, status=None)
        else:
            done = run_python("celery", *command, folder=tmp_path, env=env)
        return done.returncode, done.stdout + done.stderr

    return run_celery


@pytest.mark.parametrize("way", WAYS)
def test_the_flag_works_wherever_the_package_is_installed(start_fleet, write_app, way):
    """An app needs no Dislock(app), and no import, for `worker --dislock` to lock its tasks."""
    fleet = start_fleet("solo", "--dislock", app=write_app(WAYS[way]))
    assert fleet.says("Locks are on", "lock server: redis://")
    result = scenarios.app.send_task("shop.export", (7,), queue=fleet.queue)
    assert result.get(timeout=LIMIT) == {"locked": True}


def test_without_entry_points_the_import_alone_brings_the_flag(celery, write_app):
    """The package may stand on PYTHONPATH, installed by nobody."""
    url = "redis://:secret@127.0.0.1:1/0"
    app = write_app(WAYS["imported last"])
    program = ("-c", WITHOUT_ENTRY_POINTS)
    status, said = celery(
        "-A", app, "worker", "--pool", "solo", "--dislock", "--dislock-url", url, program=program
    )
    assert (status, "Cannot start with locks: lock server redis://" in said) == (1, True)
    assert "--no-dislock" in said
    assert not any(word in said for word in ("--discard", "secret", "Traceback", " ready."))


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (BAD_OPTION, ["worker", "--pool", "solo"]),
        (BAD_OPTION + "export.s()", ["worker", "--pool", "solo", "--dislock"]),
        (BAD_OPTION, ["beat"]),
    ],
)
def test_a_bad_option_ends_a_command_in_one_message(celery, write_app, source, command):
    """The operator reads what is wrong, and no traceback."""
    status, said = celery("-A", write_app(APP + source), *command)
    assert status == 1
    assert said.count("Cannot start with locks: ") == said.count(REFUSED) == 1
    assert "Traceback" not in said
    assert "app.conf" not in said

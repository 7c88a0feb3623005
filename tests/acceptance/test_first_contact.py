"""What a worker says to those who have just installed the package, or made a mistake."""

import os

import pytest

from tests.acceptance import scenarios
from tests.acceptance.fleet import LIMIT, ROOT
from tests.forked import run_python

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
BAD_OPTION = """
from celery_dislock import SingletonTask
app.conf.beat_schedule_filename = "schedule"

@app.task(name="shop.export", base=SingletonTask, lock_on_conflict="skipp", shared=False)
def export(): ...
"""
REFUSED = "shop.export: lock_on_conflict='skipp': use one of 'skip', 'raise'"


@pytest.fixture
def write_app(tmp_path, server):
    """Write the module of an app, and of the tasks that only its worker loads; return its name."""

    def write(source):
        (tmp_path / "first_contact.py").write_text(source.replace("URL", repr(server.url)))
        tasks = "from first_contact import app\n" + IMPORTED
        tasks += TASK.replace("BASE", "SingletonTask")
        (tmp_path / "first_contact_tasks.py").write_text(tasks)
        return "first_contact"

    return write


@pytest.fixture
def celery(tmp_path):
    """Run a celery command to its end; return its exit status and all that it says."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}

    def run_celery(*command):
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

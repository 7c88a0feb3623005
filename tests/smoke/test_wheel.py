"""The package as ``pip install`` leaves it, in an environment that has nothing else.

Built as for a release: the sdist first, and the wheel from that.  ``DISLOCK_DIST`` names a folder
with the two of a release.  pip takes what the package needs from the index that this machine is
configured for.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import celery_dislock
from tests.programs import run

pytestmark = pytest.mark.smoke

PACKAGE = Path(celery_dislock.__file__).parent
ROOT = PACKAGE.parent
TESTED = ("celery", "kombu", "redis")  # the versions beside which the other tests run, too
LIMIT = 60.0  # seconds until the worker must be ready, and must have ended
POLL = 0.05  # seconds between two looks


def pip(*args):
    run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist, and the wheel that was built from it."""
    if made := os.environ.get("DISLOCK_DIST"):
        return Path(made)
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", dist, cwd=ROOT)
    (sdist,) = dist.iterdir()
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, sdist)
    return dist


@pytest.fixture(scope="module")
def wheel(dist):
    """The wheel."""
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("*.whl", id="wheel"),
        pytest.param("*.tar.gz", id="sdist", marks=pytest.mark.slow),  # pip makes a wheel of it
    ],
)
def python(dist, request, tmp_path_factory):
    """The Python of a fresh environment, with the package and what that asks for."""
    (package,) = dist.glob(request.param)
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version(name)}\n" for name in TESTED), "utf-8")
    pip("--python", python, "install", "--constraint", constraints, package)
    return python


@pytest.fixture
def environment(redis_url, tmp_path):
    """What the programs of that environment are told; nothing of this one is on their path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    shutil.copy(Path(__file__).with_name("plain_app.py"), tmp_path)
    return {"cwd": tmp_path, "env": {**kept, "REDIS_URL": redis_url}}


@pytest.fixture
def worker(python, environment, tmp_path):
    """The log of a worker of that environment, which is ready."""
    log = tmp_path / "worker.log"
    command = [python, "-m", "celery", "-A", "plain_app", "worker", "--dislock", "-c", "1"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "-l", "INFO"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **environment,
        )
    try:
        give_up = time.monotonic() + LIMIT
        while " ready." not in log.read_text("utf-8"):
            assert process.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < give_up, log.read_text("utf-8")
            time.sleep(POLL)
        yield log
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_the_wheel_has_every_file_of_the_package(wheel):
    """Built by way of the sdist: all modules, Lua scripts, files of the page, and the plugin."""
    kinds = {".py", ".lua", ".html", ".css", ".js", ".svg"}
    here = {
        file.relative_to(ROOT).as_posix()
        for file in PACKAGE.rglob("*")
        if file.suffix in kinds or file.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {name for name in packed if name.startswith("celery_dislock/")} == here
    assert "pytest_dislock.py" in packed
    assert "celery_dislock/py.typed" in packed
    assert "celery_dislock/scripts/acquire.lua" in packed
    for name in ("index.html", "page.css", "page.js", "icon.svg"):
        assert f"celery_dislock/operating/web/static/{name}" in packed


def test_the_links_of_the_readme_work_on_a_package_index(wheel):
    """There they are whole addresses; in the repository they are relative, and tested there."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert "Project-URL: Documentation, https://" in text


def test_pip_install_is_all_that_a_redis_broker_needs(python, worker, environment):
    """A worker with --dislock runs a task under its lock; errors cross processes, and pickle."""
    said = run(python, "plain_app.py", **environment).stdout

    assert "refused: lock 'export:7' is held by thread MainThread" in said
    assert "ran under: export:7" in said
    assert "pickled: SettingsError misspelt: lock_kye='a'" in said
    assert "Locks are on; lock server: redis://" in worker.read_text("utf-8")

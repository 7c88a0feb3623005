"""A release is made by one command from a tag."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import missing, run

ROOT = Path(__file__).parents[2]
VERSION = "0.1.0"


def git(clone, *args):
    """Do something in a clone, under a name of its own."""
    who = ("-c", "user.name=maintainer", "-c", "user.email=maintainer@localhost")
    run("git", *who, *args, cwd=clone)


@pytest.fixture
def clone(tmp_path):
    """A clone of what is committed here, as it is released, with this environment."""
    if not shutil.which("git"):
        missing("git")
    known = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    if known.returncode:
        pytest.skip("this is no clone, or somebody else's")
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", "--no-tags", ROOT, clone)
    (clone / ".venv").symlink_to(sys.prefix)
    for name in ("pyproject.toml", ".ci/release"):
        shutil.copy(ROOT / name, clone / name)
    changelog = clone / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    section = f"## [Unreleased]\n\n## [{VERSION}] - 2026-12-01"
    changelog.write_text(text.replace("## [Unreleased]", section, 1), "utf-8")
    git(clone, "commit", "--quiet", "--allow-empty", "--all", "--message", "Release it")
    return clone


def release(clone):
    """Type the command."""
    return run(clone / ".ci" / "release", cwd=clone, status=None, timeout=None)


def leave_out_the_tag(clone):
    git(clone, "tag", "--delete", f"v{VERSION}")


def leave_a_change_uncommitted(clone):
    (clone / "README.md").write_text("", "utf-8")


def tag_another_version(clone):
    leave_out_the_tag(clone)
    git(clone, "tag", "v0.1.1")


def leave_out_the_notes(clone):
    leave_out_the_tag(clone)
    text = (clone / "CHANGELOG.md").read_text("utf-8")
    (clone / "CHANGELOG.md").write_text(text.replace(f"## [{VERSION}]", "## [0.0.9]"), "utf-8")
    git(clone, "commit", "--quiet", "--all", "--message", "Forget the notes")
    git(clone, "tag", f"v{VERSION}")


@pytest.mark.parametrize(
    ("forget", "told"),
    [
        (leave_out_the_tag, "this commit has no tag"),
        (leave_a_change_uncommitted, "changes that are not in the tag"),
        (tag_another_version, "has another version than v0.1.1"),
        (leave_out_the_notes, "has no section of it"),
    ],
)
def test_what_is_forgotten_is_told(clone, forget, told):
    """Nothing is built then."""
    git(clone, "tag", f"v{VERSION}")
    forget(clone)
    said = release(clone)
    assert said.returncode == 1
    assert told in said.stderr
    assert not (clone / "dist").exists()


@pytest.mark.slow
@pytest.mark.smoke
def test_a_tag_is_built_and_tried(clone):
    """The sdist and the wheel are tried in fresh environments; the notes are beside them."""
    git(clone, "tag", f"v{VERSION}")
    said = release(clone)
    assert said.returncode == 0, said.stdout + said.stderr
    made = {file.name for file in (clone / "dist").iterdir()}
    files = {f"celery_dislock-{VERSION}{ending}" for ending in (".tar.gz", "-py3-none-any.whl")}
    assert made == files | {"notes.md"}
    assert "### Added" in (clone / "dist" / "notes.md").read_text("utf-8")

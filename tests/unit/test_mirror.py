"""Where the tests of a module are found."""

from __future__ import annotations

import ast
from pathlib import Path

import celery_dislock

TESTS = Path(__file__).parent
PACKAGE = Path(celery_dislock.__file__).parent
# Shown by the tests of what uses them.
BY_OTHERS = {
    *("operating/checks/table", "operating/cli/group", "operating/locks", "operating/metrics"),
    *("operating/web", "locks/channel", "servers/connecting", "servers/requests", "beat/reasons"),
    *("servers/memory", "servers/server"),
    *("clock", "testing", "testing/apps", "testing/messages", "testing/redis_server"),
}


def has_code(init: Path) -> bool:
    """Tell whether a package's own file defines something, beside imports and its docstring."""
    body = ast.parse(init.read_text("utf-8")).body
    return any(isinstance(node, (ast.Assign, ast.FunctionDef, ast.ClassDef)) for node in body)


def modules() -> set[Path]:
    """List the modules, relative to the package; a package with code of its own is one."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name != "__init__.py":
            found.add(file.relative_to(PACKAGE).with_suffix(""))
        elif has_code(file):
            found.add(file.parent.relative_to(PACKAGE.parent).relative_to(PACKAGE.name))
    return {Path(PACKAGE.name) if path == Path() else path for path in found}


def with_tests() -> set[Path]:
    """List what the unit tests are named after: ``locks/test_lease.py`` is of ``locks/lease``."""
    files = set(TESTS.rglob("test_*.py")) - {Path(__file__)}
    return {file.relative_to(TESTS).with_name(file.stem.removeprefix("test_")) for file in files}


def is_of(test: Path, module: Path) -> bool:
    """Tell whether a test file is of a module; ``lock_waiting`` is one part of ``lock``."""
    return test.parent == module.parent and f"{test.name}_".startswith(f"{module.name}_")


def test_every_module_has_a_test_file_of_its_name():
    """Who changes celery_dislock/locks/lease.py finds tests/unit/locks/test_lease.py."""
    assert sorted(modules() - with_tests() - set(map(Path, BY_OTHERS))) == []


def test_every_test_file_is_named_after_a_module():
    """A module that is renamed or taken away takes its tests along."""
    strangers = [
        test for test in with_tests() if not any(is_of(test, module) for module in modules())
    ]
    assert sorted(strangers) == []

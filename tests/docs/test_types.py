"""The typed snippets of the guide, read by mypy as a user's program is."""

import sys

import pytest

from tests.docs.page import DOCS, ROOT, blocks_of
from tests.programs import run

PREAMBLE = """
from collections.abc import Iterable

def pages(feed: str) -> Iterable[str]:
    return [feed]

def store(page: str, *, token: int) -> None:
    print(page, token)
"""

INI = """
[mypy]
strict = True
ignore_missing_imports = True

[mypy-celery_dislock.*]
ignore_errors = True
"""


def test_the_typed_snippets_of_the_guide_pass_a_strict_check(tmp_path):
    """Whoever copies them into a typed program has nothing to add and nothing to ignore."""
    pytest.importorskip("mypy", reason="it comes with the extra `check`")
    blocks = [block.code for block in blocks_of(DOCS / "guide.md") if block.language == "python"]
    made = next(block for block in blocks if block.startswith("# shop.py"))
    head = made[: made.index("@app.task")]
    typed = [block for block in blocks if "@dislock.task" in block]
    assert len(typed) > 1
    program = tmp_path / "shop.py"
    program.write_text("\n".join([head, PREAMBLE, *typed]), "utf-8")
    (tmp_path / "mypy.ini").write_text(INI, "utf-8")
    env = {"MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "pages")}
    mypy = (sys.executable, "-m", "mypy", "--config-file", "mypy.ini", program.name)
    run(*mypy, cwd=tmp_path, env=env)

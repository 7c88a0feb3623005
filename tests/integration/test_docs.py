"""The snippets of the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from example_project.redis_server import RedisServer

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def three(redis_program, tmp_path):
    """Three servers that know nothing of each other."""
    with (
        RedisServer(tmp_path / "1") as first,
        RedisServer(tmp_path / "2") as second,
        RedisServer(tmp_path / "3") as third,
    ):
        yield [first, second, third]


def test_the_page_about_the_kinds_of_locks_runs_from_top_to_bottom(redis_url, redis_client, three):
    """Every snippet works as it stands, in order, and leaves nothing in Redis."""
    text = (DOCS / "kinds.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"URL": redis_url} | {f"URL{n}": server.url for n, server in enumerate(three, 1)}
    for snippet in snippets:
        exec(compile(snippet, "kinds.md", "exec"), names)  # noqa: S102 -- it is our own
    assert len(snippets) >= 8
    assert redis_client.keys("dislock:*") == []
    for server in three:
        with server.client() as client:
            assert client.keys("dislock:*") == []
    for made in ("dislock", "majority"):
        names[made].runtime.process.store.close()

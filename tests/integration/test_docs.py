"""The snippets of the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_about_the_kinds_of_locks_runs_from_top_to_bottom(redis_url, redis_client):
    """Every snippet works as it stands, in order, and leaves nothing in Redis."""
    text = (DOCS / "kinds.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"URL": redis_url}
    for snippet in snippets:
        exec(compile(snippet, "kinds.md", "exec"), names)  # noqa: S102 -- it is our own
    assert len(snippets) >= 7
    assert redis_client.keys("dislock:*") == []
    names["dislock"].runtime.process.store.close()

"""The snippets of the documentation run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery

from celery_dislock.messages.message import Message
from tests.redis_server import RedisServer

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
# Binds every task of the snippets that it is given, in a process whose apps are no other test's.
BIND = """
import sys
from celery import Celery
from celery_dislock import Dislock, SingletonTask

names = {"SingletonTask": SingletonTask, "app": Celery("shop", broker="redis://localhost:6379/0")}
exec(sys.stdin.read(), names)
Dislock(names["app"])
names["app"].conf.dislock_enabled = True
names["app"].finalize()
bound = [task for task in names["app"].tasks.values() if hasattr(task, "dislock_guard")]
print(*(task.name for task in bound))
"""


def snippets_of(page: Path) -> list[str]:
    """Return the Python of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


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
    snippets = snippets_of(DOCS / "kinds.md")
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


@pytest.mark.parametrize(
    "page",
    [README, *(DOCS / f"{name}.md" for name in ("guide", "conflicts", "queue", "reference"))],
    ids=lambda page: page.stem,
)
def test_the_tasks_of_a_page_can_be_bound(page):
    """Every task that a page declares has options that are accepted together."""
    snippets = snippets_of(page)
    tasks = sum(snippet.count("@app.task(") for snippet in snippets)
    assert tasks
    bound = subprocess.run(
        [sys.executable, "-c", BIND],
        input="\n".join(snippets),
        capture_output=True,
        text=True,
        check=False,
    )
    assert bound.returncode == 0, bound.stderr
    assert len(bound.stdout.split()) == tasks


@pytest.mark.parametrize("heading", ["Parked tasks", "Somebody who can publish messages"])
def test_every_promise_of_a_table_has_its_test(heading):
    """The last column of that table in docs/guarantees.md names tests that exist."""
    text = (DOCS / "guarantees.md").read_text("utf-8")
    table = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = re.findall(r"\| `(\w+)` \|$", table, re.MULTILINE)
    assert len(names) == len(re.findall(r"^\| ", table, re.MULTILINE)) - 1  # without its heading
    tests = "".join(
        file.read_text("utf-8") for file in Path(__file__).parents[1].rglob("test_*.py")
    )
    assert [name for name in names if f"def {name}(" not in tests] == []


def test_what_was_set_aside_can_be_put_back(redis_url, redis_client):
    """The snippet publishes a message to its queue again, also one in a record that is damaged."""
    (snippet,) = snippets_of(DOCS / "operations.md")
    headers = {"task": "shop.apply_payment", "id": "1"}
    kept = Message("", "payments", headers, "application/json", "utf-8", {}, True, b"[[1, 5], {}]")
    aside = "dislock:{account:1}:aside"
    redis_client.hset(aside, "1:0:0", kept.to_bytes())
    redis_client.hset(aside, "2:0:0", b"1 damaged " + kept.to_bytes())
    with Celery("shop", broker=redis_url, set_as_current=False) as app:
        exec(compile(snippet, "operations.md", "exec"), {"URL": redis_url, "app": app})  # noqa: S102 -- our own
        with app.connection_for_read() as connection:
            queue = connection.SimpleQueue("payments")
            for _ in range(2):
                message = queue.get(block=False)
                assert message.headers["id"] == "1"
                assert message.body == kept.body
            queue.close()
    assert not redis_client.exists(aside)

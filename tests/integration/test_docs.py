"""The documentation is true: snippets run, links lead somewhere, tables and diagrams hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery

from celery_dislock.config.settings import task_options
from celery_dislock.messages.message import Message
from tests.redis_server import RedisServer

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *DOCS.rglob("*.md")])
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


def without_code(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    anchors = [word.replace(" ", "-") for word in words]
    assert len(set(anchors)) == len(anchors), "two headings of one name: the second has a number"
    return set(anchors)


def dead_links_of(page: Path) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            dead.append(link)
    return dead


def layers() -> list[list[str]]:
    """Return the floors of the packages, top floor first, as the build checks them."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(
        r'^containers = \["celery_dislock"\]\nlayers = \[(.*?)^\]', text, re.MULTILINE | re.DOTALL
    )
    return [floor.split(" | ") for floor in re.findall(r'"(.*?)"', listed)]


def runs_of_words(text: str) -> set[str]:
    """Return all runs of three words between the places of a text that are filled in."""
    runs = set()
    for part in re.split(r"…|%\S*[sdrf]|\d+(?:\.\d+)?", text):
        words = re.findall(r"[A-Za-z][\w-]*", part)
        runs |= {" ".join(words[at : at + 3]) for at in range(len(words) - 2)}
    return runs


def runs_of_the_package() -> set[str]:
    """Return the runs of three words in all texts of the package's code."""
    runs = set()
    for file in (ROOT / "celery_dislock").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
                runs |= runs_of_words("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                runs |= runs_of_words(node.value)
    return runs


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    """Relative links name files that exist, and anchors name headings of theirs."""
    assert dead_links_of(page) == []


def test_a_dead_link_is_found(tmp_path):
    """A link to a file that is gone, and one to a heading that was renamed, are both reported."""
    page = tmp_path / "page.md"
    page.write_text(
        "# The `page`: one\n[good](page.md#the-page-one) [here](#the-page-one) [gone](gone.md)\n"
        "[renamed\nheading](page.md#the-page) [web](https://example.org/#any)\n"
    )
    assert dead_links_of(page) == ["gone.md", "page.md#the-page"]


def test_every_word_of_the_glossary_is_linked_from_another_page():
    """A page that uses a word links to its meaning, so each word of the glossary is in use."""
    text = "".join(page.read_text("utf-8") for page in PAGES if page.stem != "glossary")
    words = re.findall(r"^### (.*)$", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    anchors = {word: word.lower().replace(" ", "-") for word in words}
    assert [word for word, anchor in anchors.items() if f"glossary.md#{anchor})" not in text] == []


def test_the_life_of_an_execution_shows_every_strategy():
    """The diagram has an arrow for each strategy that docs/conflicts.md tells, and each is one."""
    text = (DOCS / "architecture.md").read_text("utf-8")
    labels = re.findall(r"^ *strategy -- (.*?) -->", text, re.MULTILINE)
    drawn = {word for label in labels for word in re.findall(r"\b[a-z]+\b", label)}
    told = re.findall(r'^\| `"(\w+)"` \|', (DOCS / "conflicts.md").read_text("utf-8"), re.MULTILINE)
    assert drawn == set(told)
    for name in told:
        assert task_options("shop.export", {"lock_on_conflict": name}, {}).lock_on_conflict == name


def test_the_log_lines_of_the_operators_page_are_those_of_the_code():
    """At least half of the words of each line stand in the code; the rest may be put together."""
    text = (DOCS / "operations.md").read_text("utf-8").partition("\n## When the lock server")[0]
    lines = re.findall(r"^\| (?:[A-Z]+ )?`(.*?)`[^|]* \| ", text, re.MULTILINE)
    ours = [line for line in lines if "LockHeldError" not in line]  # that one is Celery's
    assert len(ours) > 50
    known = runs_of_the_package()
    unknown = []
    for line in ours:
        runs = runs_of_words(line)
        if len(runs & known) * 2 < len(runs):
            unknown.append(line)
    assert unknown == []


def test_the_diagram_of_the_packages_is_the_contract_of_the_build():
    """docs/architecture.md draws the floors of import-linter, in their order, and no others."""
    text = (DOCS / "architecture.md").read_text("utf-8").partition("\n## The packages\n")[2]
    (diagram,) = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", text, re.DOTALL)
    arrows = [line.strip().split(" --> ") for line in diagram.splitlines()]
    floors = [[name.split(" & ") for name in arrow] for arrow in arrows]
    assert floors == [[upper, lower] for upper, lower in zip(layers(), layers()[1:], strict=False)]


def test_the_table_of_the_packages_names_each_once():
    """docs/architecture.md says of each package and module what it is for, top floor first."""
    text = (DOCS / "architecture.md").read_text("utf-8").partition("\n## The packages\n")[2]
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert names == [name for floor in layers() for name in floor]


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

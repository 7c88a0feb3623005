"""The documentation is true: links lead somewhere, tables and diagrams hold, words are plain."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import celery_dislock
from celery_dislock.config.settings import task_options
from celery_dislock.operating import why
from tests.docs import tables
from tests.docs.page import DOCS, PAGES, ROOT, blocks_of, without_code
from tests.docs.words import USERS, words_of

# "So long a task waits ...", "whoever comes first", "the lock is to be released"
AVOIDED = (
    r"\bso (?:long|many) (?:a|an|the|tasks?|may|at)\b|\bwhoever\b|\bas above\b"
    r"|\bwhat is left of\b|\bor nearly so\b|\b(?:is|are) to be\b|\bby nobody\b"
)
LOGS = [f"logger.{level}" for level in ("info", "warning", "error", "exception")]
FEW = 2  # words of a text of which others fill in what it says: "Task … …"
INSIDE = sorted((DOCS / "inside").glob("*.md"))
WITH_SEQUENCES = [page for page in INSIDE if "sequenceDiagram" in page.read_text("utf-8")]


def anchors_of(page):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    anchors = [word.replace(" ", "-") for word in words]
    assert len(set(anchors)) == len(anchors), "two headings of one name: the second has a number"
    return set(anchors)


def dead_links_of(page):
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


def layers():
    """Return the floors of the packages, top floor first, as the build checks them."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(
        r'^containers = \["celery_dislock"\]\nlayers = \[(.*?)^\]', text, re.MULTILINE | re.DOTALL
    )
    return [floor.split(" | ") for floor in re.findall(r'"(.*?)"', listed)]


def runs_of_words(text):
    """Return all runs of three words between the places of a text that are filled in."""
    runs = set()
    for part in re.split(r"…|%\S*[sdrf]|\d+(?:\.\d+)?", text):
        words = re.findall(r"[A-Za-z][\w-]*", part)
        runs |= {" ".join(words[at : at + 3]) for at in range(len(words) - 2)}
    return runs


def runs_of_the_package():
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


def logged(node):
    """Return the first words of what a call logs that operators see; "": it logs nothing."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    if not is_call or ast.unparse(node.func) not in LOGS:
        return ""
    return tables.first_words(node.args[0])


def test_every_promise_of_a_table_has_its_test():
    """The last column of each such table in docs/inside/guarantees.md names tests that exist."""
    text = (DOCS / "inside" / "guarantees.md").read_text("utf-8")
    tables = re.findall(r"^\|.*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(tables) == len(re.findall(r"\| test \|$", text, re.MULTILINE)) > 1
    tests = "".join(
        file.read_text("utf-8") for file in Path(__file__).parents[1].rglob("test_*.py")
    )
    for row in "".join(tables).splitlines():
        (cell,) = re.findall(r"\| (`\w+`(?:, `\w+`)*) \|$", row)
        named = re.findall(r"\w+", cell)
        assert [name for name in named if f"def {name}(" not in tests] == [], row


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_code(page):
    """Each option, command, event, metric or error is described where it is declared."""
    text = page.read_text("utf-8")
    assert tables.fresh(text) == text, "run make tables"


def test_every_table_that_is_made_is_on_one_page():
    """None is made for nothing, and nobody has to keep two of them in mind."""
    found = [name for page in tables.PAGES for _, name, _ in tables.BLOCK.findall(page.read_text())]
    assert sorted(found) == sorted(tables.TABLES)


def test_the_events_that_are_sent_are_described():
    """All of them, and no other: monitors rely on them."""
    page = (DOCS / "reference/events.md").read_text("utf-8")
    rows = re.findall(r"^\| `(task-[a-z-]+)` \|", page, re.MULTILINE)
    code = "".join(file.read_text("utf-8") for file in (ROOT / "celery_dislock").rglob("*.py"))
    assert set(rows) == set(re.findall(r'send\w*\(.*"(task-[a-z-]+)"', code))


def test_every_link_of_a_page_leads_somewhere():
    """Relative links name files that exist, and anchors name headings of theirs."""
    assert {page: dead for page in PAGES if (dead := dead_links_of(page))} == {}


def test_every_word_of_the_glossary_is_linked_from_another_page():
    """A page that uses a word links to its meaning, so each word of the glossary is in use."""
    text = "".join(page.read_text("utf-8") for page in PAGES if page.stem != "glossary")
    words = re.findall(r"^### (.*)$", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    anchors = {word: word.lower().replace(" ", "-") for word in words}
    assert [word for word, anchor in anchors.items() if f"glossary.md#{anchor})" not in text] == []


def test_the_life_of_an_execution_shows_every_strategy():
    """The diagram has an arrow for each strategy in the table of strategies, and each is one."""
    text = (DOCS / "inside" / "execution.md").read_text("utf-8")
    table = (DOCS / "reference" / "strategies.md").read_text("utf-8")
    labels = re.findall(r"^ *strategy -- (.*?) -->", text, re.MULTILINE)
    drawn = {word for label in labels for word in re.findall(r"\b[a-z]+\b", label)}
    told = re.findall(r'^\| `"(\w+)"` \|', table, re.MULTILINE)
    assert drawn == set(told)
    for name in told:
        assert task_options("shop.export", {"lock_on_conflict": name}, {}).lock_on_conflict == name


def test_the_picture_of_what_to_choose_names_strategies_that_exist():
    """Each word in bold is a value of lock_on_conflict, or what the text below explains."""
    text = (DOCS / "how-to" / "choose-a-strategy.md").read_text("utf-8")
    drawn = re.findall(r"<b>(\w+)</b>", text)
    explained = re.findall(r'"(\w+)" (?:is )?\[', text)
    assert drawn
    for name in set(drawn) - set(explained):
        assert task_options("shop.export", {"lock_on_conflict": name}, {}).lock_on_conflict == name


@pytest.mark.parametrize("page", WITH_SEQUENCES, ids=lambda page: page.stem)
def test_a_sequence_diagram_names_scripts_that_exist(page):
    """What is sent to the lock server in a diagram is one of the scripts, or Redis's BLPOP."""
    scripts = {file.stem for file in (ROOT / "celery_dislock" / "scripts").glob("*.lua")}
    sent = []
    for block in blocks_of(page):
        servers = re.findall(
            r"participant (\w+) as (?:lock server|master|replica)", block.code, re.MULTILINE
        )
        assert servers
        for name in servers:
            sent += re.findall(rf"^ *\w+-(?:>>|x){name}: (\w+)", block.code, re.MULTILINE)
    assert sent
    assert set(sent) - scripts <= {"BLPOP"}


def test_every_public_name_is_on_the_page_of_the_api():
    """Each has a docstring, and a directive that shows it; errors and signals come by module."""
    page = (DOCS / "reference" / "api.md").read_text("utf-8")
    named = set(re.findall(r"\.\. auto(?:class|function):: (\w+)(?:\(\))?$", page, re.MULTILINE))
    errors = {name for name in celery_dislock.__all__ if name.endswith("Error")}
    assert named == set(celery_dislock.__all__) - errors
    for name in celery_dislock.__all__:
        assert getattr(celery_dislock, name).__doc__, name


def test_users_are_not_asked_to_read_too_much():
    """30,000 words in all, and 1,800 on a page but in the tables where one looks something up."""
    counts = {page: words_of(page.read_text("utf-8")) for page in USERS}
    assert sum(counts.values()) <= 30_000
    assert {page: words for page, words in counts.items() if words > 1_800} == {}


def test_a_page_is_written_in_plain_english():
    """No page has the turns of phrase that a reader has to read twice."""
    texts = {page: " ".join(without_code(page).split()) for page in PAGES}
    found = {page: re.findall(AVOIDED, text, re.IGNORECASE) for page, text in texts.items()}
    assert {page: words for page, words in found.items() if words} == {}


def test_the_page_of_benchmarks_shows_what_was_measured():
    """`make bench` wrote it from its figures, and nobody has changed it since by hand."""
    for module in ("psutil", "redis_lock"):
        pytest.importorskip(module, reason="needs the extra `bench`")
    page = importlib.import_module("benchmarks.page")
    assert page.PAGE.read_text("utf-8") == page.text(page.kept())


def test_the_log_lines_of_the_operators_page_are_those_of_the_code():
    """At least half of the words of each line stand in the code; the rest may be put together."""
    text = (DOCS / "reference" / "log-lines.md").read_text("utf-8")
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


def test_every_line_that_is_logged_is_described():
    """The comment above it says what it means, or that above another one with the same words."""
    described = {(line.file, line.row) for line in tables.lines()}
    words = [line.text.removesuffix(" …") for line in tables.lines()]
    missing = []
    for file in (ROOT / "celery_dislock").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        for statement in (one for one in ast.walk(tree) if isinstance(one, ast.Expr)):
            text = logged(statement.value)
            is_told = (file, statement.lineno - 1) in described or text.startswith(tuple(words))
            if len(re.findall(r"\w+", text)) > FEW and not is_told:
                missing.append(f"{file.name}:{statement.lineno}: {text}")
    assert missing == []


def test_the_states_that_why_tells_are_described():
    """All of them, and no other: programs read them."""
    told = {name.strip("`") for name, _ in tables.defined(why.__doc__)}
    code = "".join(
        file.read_text("utf-8")
        for file in Path(why.__file__).parent.glob("*.py")
        if file.name != "__init__.py"
    )
    given = set(re.findall(r'(?:\.answer|\btell)\(\s*"([a-z ]+)"', code))
    assert given <= told
    assert [name for name in told if f'"{name}"' not in code] == []


def test_the_diagram_of_the_packages_is_the_contract_of_the_build():
    """The page draws the floors of import-linter, in their order, and no others."""
    text = (DOCS / "inside" / "packages.md").read_text("utf-8")
    (diagram,) = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", text, re.DOTALL)
    arrows = [line.strip().split(" --> ") for line in diagram.splitlines()]
    floors = [[name.split(" & ") for name in arrow] for arrow in arrows]
    assert floors == [[upper, lower] for upper, lower in zip(layers(), layers()[1:], strict=False)]


def test_the_table_of_the_packages_names_each_once():
    """The page says of each package and module what it is for, top floor first."""
    text = (DOCS / "inside" / "packages.md").read_text("utf-8")
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert names == [name for floor in layers() for name in floor]

"""Advice: what people are told to do is right even if the body of a task still runs."""

import ast
import re
from pathlib import Path

import pytest

import celery_dislock
from tests.docs.page import DOCS
from tests.staged import RESERVED, holder, lock, place

PACKAGE = Path(celery_dislock.__file__).parent
PAGES = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
ALERTS = DOCS.parent / "contrib" / "alerts.yml"

CHANGE = r"(?:free|drop|put-back|pause|resume|limit)\b"
# A command in a text: options, and names in capitals or places that are filled in.
IN_TEXT = re.compile(rf"celery dislock ({CHANGE}(?: (?:--[a-z-]+|[A-Z]+\b|{{}}))*)")
# The same on a page, as code, or as a line that is typed.
IN_PAGE = re.compile(rf"(?:`|\$ )celery (?:-A \w+ )?dislock ({CHANGE}[^`#\n]*)")
# What is told of records of the lock server, and why it is right all the same.
BY_HAND = re.compile(r"[^.\n]*\b(?:delete|DEL|HDEL|FLUSH\w*|RENAME|[Rr]ename) [^.\n]*")
JUDGED = {
    "delete the key :beat": "no beat with --dislock leads, and it is no lease",
    "redis-cli DEL 'dislock:{beat:proj}:beat'": "all beats are stopped, and it is no lease",
    "delete them on the new one": "queues",
    "DEL` the keys of a lock**": "it is forbidden",
    "redis-cli HDEL 'dislock:{account:1}:aside'": "what is set aside does not run",
    "redis-cli RENAME 'dislock:{export:7}:line' saved": "a key of the wrong type has no lease",
    "HDEL 'dislock:{export:7}' <owner>`, once its task has ended": "then no body runs",
    "When its tasks have ended, rename the key": "then no body runs",
    "may delete a lock that is held": "a server does, and the advice is against it",
    "## Rename or remove a task": "a task of the code",
}
# The one page that tells how to free the lock of a process that is gone, and when not to.
FREES = "free export:7 --yes"
ONLY_IF = "Only if you have seen that the process is gone, leave `--terminate` out"


def texts():
    """All texts of the package, with empty places in f-strings, and what is said of log lines."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text("utf-8")
        parts = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts |= set(map(id, node.values))
                yield "".join(
                    str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values
                )
            elif isinstance(node, ast.Constant) and id(node) not in parts:
                yield str(node.value)
        yield " ".join(re.findall(r"^ *#: (.*)", source, re.MULTILINE))
    yield ALERTS.read_text("utf-8")


def pages():
    """The pages of users."""
    return {path.name: path.read_text("utf-8") for path in PAGES if "inside" not in path.parts}


def commands():
    """All commands that change a lock and that somebody is told to type."""
    told = {one for text in texts() for one in IN_TEXT.findall(text)}
    told |= {one.strip() for text in pages().values() for one in IN_PAGE.findall(text)}
    return sorted(one for one in told if " " in one and one != FREES)


def typed(command):
    """The command as it is typed about lock 'k' and the ticket of the first in line."""
    name, *words = command.split()
    given = []
    for word in words:
        is_ticket = given[-1:] == ["--ticket"] or (name == "drop" and not given)
        if word in {"TEXT", "TICKET", "RATE", "N"} or word.startswith("--") or is_ticket:
            given.append({"RATE": "9/m", "N": "2"}.get(word, word))
        else:
            is_key = "k" not in given and given[-1:] != ["--for"]
            given.append("k" if is_key else word)
    given = ["parked-1:0:0" if one in {"TICKET", "{}"} else one for one in given]
    if name in {"free", "drop"}:
        given.append("--yes")
    if "--terminate" in given:
        given += ["--wait", "0.001"]
    return [name, *given]


@pytest.mark.parametrize("command", commands())
@pytest.mark.parametrize(
    "changed",
    [{}, {"renewed": 25.0, "remaining": 5.0}, {"renewed": None}, {"held": 9000.0}],
    ids=["renewed", "overdue", "fixed", "hung"],
)
def test_what_people_are_told_to_type_ends_no_lease_of_a_body(
    dislock, server, app, monkeypatch, command, changed
):
    """The holder may be stopped or cut off, and hear nothing, and still run: it keeps its lock."""
    monkeypatch.setattr(app.control, "revoke", lambda *_, **__: None)
    monkeypatch.setattr("celery_dislock.tasks.actions.LOOK_EVERY", 0.0)
    held = holder(**changed)
    server.put(lock(holders=[held], reservation=RESERVED, waiting=1, line=[place()]))
    answer = dislock(*typed(command))
    assert "Usage: " not in answer.stderr
    left = server.overview.lock("dislock:{k}").holders
    assert (held.owner, held.token) in [(one.owner, one.token) for one in left]


def test_the_command_that_frees_all_the_same_says_when():
    """A process that is stopped or cut off looks as if it were gone."""
    found = [name for name, text in pages().items() if FREES in text]
    assert found == ["operate.md"]
    before = pages()["operate.md"].partition(FREES)[0]
    assert ONLY_IF in before


def test_nothing_is_deleted_by_hand_that_a_body_needs():
    """Each advice to delete or move a record was judged."""
    told = {one for text in pages().values() for one in re.findall(BY_HAND, text)}
    told |= {one for text in texts() if "\n" not in text for one in re.findall(BY_HAND, text)}
    assert not [one for one in told if not any(known in one for known in JUDGED)]

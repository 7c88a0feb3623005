"""
Write the tables that are made from the code into the pages: ``python -m tests.docs.tables``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; the function of that
name here makes it.  What a row says is declared with the thing itself: a comment, a docstring, a
help text.  A row says it in one line; what needs more belongs on a page about a task of users.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import fields
from functools import cache, partial
from inspect import Parameter
from pathlib import Path
from typing import NamedTuple

import click
import yaml

import celery_dislock
from celery_dislock import Dislock, Lease, exceptions, plugin, signals
from celery_dislock.config.options import TaskOptions
from celery_dislock.config.plain import PlainOptions
from celery_dislock.config.settings import AppSettings
from celery_dislock.messages import events
from celery_dislock.operating import why
from celery_dislock.operating.checks import locks, server, workers
from celery_dislock.operating.checks.troubles import MENTIONED, TROUBLES
from celery_dislock.operating.cli import dislock as group
from celery_dislock.operating.metrics import METRICS
from celery_dislock.servers.records import Conflict
from celery_dislock.testing import DislockServer
from tests.docs.page import DOCS

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
PAGES = sorted(page for page in DOCS.rglob("*.md") if "<!-- table: " in page.read_text("utf-8"))
# What is code in a text for a terminal: a command, an option, a name with an underscore.
CODE = re.compile(
    r"celery dislock [a-z-]+(?: --?[a-z-]+| [A-Z]+\b)*"
    r"|--[a-z-]+|\b\w+_\w+\b"
    r"|\"[^\" ]*\*[^\" ]*\""  # a pattern
)


def table(headings, rows):
    """Return a table; the headings are separated by bars."""
    head = [f"| {headings} |", "|" + "---|" * (headings.count(" | ") + 1)]
    body = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([*head, *body])


def shown(text):
    """Return a text for terminals, or a docstring, as Markdown."""
    parts = re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    for at, part in enumerate(parts):
        if part.startswith("`"):
            parts[at] = f"`{part.strip('`')}`"
        else:
            parts[at] = CODE.sub(r"`\g<0>`", part.replace("<", r"\<"))
    return "".join(parts)


def comment_above(source, declared):
    """Return the comment ``#: ...`` above a declaration."""
    above = re.search(rf"((?:^ *#: .*\n)+) *{declared}", source, re.MULTILINE)
    assert above, declared
    return " ".join(line.strip().removeprefix("#: ") for line in above[1].splitlines())


def declared(kind):
    """Make the table of options or settings: each field, and the comment above it."""
    source, default = inspect.getsource(kind), kind()
    rows = []
    for one in fields(kind):
        value, unit = getattr(default, one.name), one.metadata["unit"]
        shown_unit = f" ({unit})" if unit and value is None else f" {unit}"
        meaning = comment_above(source, f"{one.name}: ")
        rows.append((f"`{one.name}`", f"`{value!r}`{shown_unit}".strip(), meaning))
    return table("name | default | meaning", rows)


def options_of_a_task():
    """The options of a task."""
    return declared(TaskOptions)


def settings_of_an_app():
    """The settings that no task has."""
    return declared(AppSettings)


def metrics():
    """The metrics."""
    rows = (
        (
            f"`{one.name}`",
            one.kind,
            ", ".join(f"`{label}`" for label in one.labels),
            shown(one.meaning),
        )
        for one in METRICS
    )
    return table("metric | kind | labels | what it says", rows)


def alerts():
    """The alerts for Prometheus: what happened, and what to do first."""
    (group,) = yaml.safe_load((DOCS.parent / "contrib" / "alerts.yml").read_text("utf-8"))["groups"]
    rows = []
    for rule in group["rules"]:
        notes = rule["annotations"]
        page = notes["runbook_url"].partition("/how-to/")[2].replace(".html", ".md")
        name = page.partition(".md")[0].replace("-", " ")
        more = "" if name == "metrics" else f" See [{name}]({page})."
        what = re.sub(r"{{.*?}}", "…", notes["summary"])
        rows.append((f"`{rule['alert']}`", shown(what), shown(notes["action"]) + more))
    return table("alert | what happened | what to do first", rows)


# What docstrings say.


def first_sentence(text):
    """Return the first sentence of a docstring, as Markdown."""
    return shown(re.split(r"(?<=\.)\s", inspect.cleandoc(text or ""), maxsplit=1)[0])


def section(text, heading):
    """Return what a section of a docstring says of each name."""
    _, _, body = inspect.cleandoc(text or "").partition(f"{heading}:\n")
    body = re.split(r"\n(?=\S)", body)[0]  # up to the next section
    found = re.findall(r"^    ([\w, ]+): (.*\n?(?:     +.*\n?)*)", body, re.MULTILINE)
    return {names: " ".join(about.split()) for names, about in found}


def defined(text):
    """Yield what a docstring defines: a name in a line of its own, and the text below it."""
    for name, below in re.findall(r"^``(.*)``\n((?:    .*\n)+)", text or "", re.MULTILINE):
        yield f"`{name}`", " ".join(below.split())


def signals_of_a_lock():
    """The signals: the comment above each."""
    source = inspect.getsource(signals)
    rows = (
        (
            f"`{name}`",
            ", ".join(
                f"`{one}`"
                for one in sorted(
                    getattr(signals, name).providing_args, key=lambda one: (one != "lease", one)
                )
            ),
            shown(comment_above(source, f"{name} = ")),
        )
        for name in signals.__all__
    )
    return table("signal | arguments | sent when", rows)


def events_of_a_task():
    """The events."""
    told = ((name, *text.split(" Fields: ")) for name, text in defined(events.__doc__))
    rows = ((name, shown(when), shown(its_fields)) for name, when, its_fields in told)
    return table("event | when | fields", rows)


def errors():
    """The errors, with those that each is one of."""
    rows = []
    for name, one in vars(exceptions).items():
        if not (isinstance(one, type) and issubclass(one, exceptions.DislockError)):
            continue
        bases = [base.__name__ for base in one.__bases__ if base.__name__ != "ClickException"]
        kind = ", ".join(f"`{base}`" for base in bases if base not in {"DislockError", "Exception"})
        where = "" if hasattr(celery_dislock, name) else "; from `celery_dislock.exceptions`"
        had = dict.fromkeys(
            attribute
            for its in reversed(one.__mro__)
            for attribute in (
                *section(vars(its).get("__doc__"), "Attributes"),
                *(name for name, value in vars(its).items() if isinstance(value, property)),
            )
            if attribute != "raw"
        )
        rows.append(
            (
                f"`{name}`{kind and f', a {kind}'}{where}",
                first_sentence(one.__doc__),
                ", ".join(f"`{attribute}`" for attribute in had),
            )
        )
    return table("error | means | attributes", rows)


OF_A_LEASE = ("key", "owner", "token", "tokens", "held", "remaining", "acquired_at", "renewals")
OF_A_LEASE += ("capped", "superseded", "ensure_held")


def lease():
    """What a body may ask its lease."""
    said = section(Lease.__doc__, "Attributes")
    rows = (
        (
            f"`.{name}{'()' * callable(getattr(Lease, name, None))}`",
            first_sentence(said.get(name) or getattr(Lease, name).__doc__),
        )
        for name in OF_A_LEASE
    )
    return table("name | meaning", rows)


def server_of_a_test():
    """What a test may ask of its lock server."""
    said = section(DislockServer.__doc__, "Attributes")
    rows = [(f"`{name}`", shown(text)) for name, text in said.items()]
    for name, method in vars(DislockServer).items():
        if not name.startswith("_"):
            summary, more, *_ = [*inspect.cleandoc(method.__doc__).split("\n\n"), ""]
            rest = "" if re.match(r"\w+:\n", more) else first_sentence(more)
            rows.append((f"`{_called(method)}`", f"{shown(summary)} {rest}".strip()))
    return table("method or attribute | what it does", rows)


def _called(method):
    _, *parameters = inspect.signature(method).parameters.values()
    written = {
        Parameter.KEYWORD_ONLY: "{}=",
        Parameter.VAR_POSITIONAL: "*{}",
        Parameter.VAR_KEYWORD: "...",
    }
    given = (written.get(one.kind, "{}").format(one.name) for one in parameters)
    return f"{method.__name__}({', '.join(given)})"


def conflict():
    """What a conflict says."""
    said = section(Conflict.__doc__, "Attributes")
    said["early"] = first_sentence(Conflict.early.__doc__)
    names = ("key", "holder", "remaining", "early", "held_for", "renewed", "place")
    return table("name | meaning", ((f"`.{name}`", shown(said[name])) for name in names))


def options_of_a_lock():
    """The options of a lock in plain Python."""
    said = section(Dislock.lock.__doc__, "Args")
    assert said.keys() == {"key", *PlainOptions.__annotations__}
    rows = ((f"`{name}`", shown(said[name])) for name in PlainOptions.__annotations__)
    return table("option | meaning", rows)


def states():
    """The states that ``why`` tells."""
    rows = ((name, shown(text)) for name, text in defined(why.__doc__))
    return table("`state` | what the sentence says", rows)


# What doctor and lists look for.


def _row(one):
    return f"`{one.check}` {_level(one)}", f"{shown(one.what)}.", shown(one.remedy)


def _level(one):
    return one.finding.args[0]


def _function(check, finds):
    what = first_sentence(finds.__doc__).removeprefix("Find ")
    return f"`{check}`", f"{what[:1].upper()}{what[1:]}", ""


def checks(module):
    """What doctor looks for; a function there has findings of its own."""
    found = [_function(*one) for one in module.CHECKS if one[1] not in BY_ROWS]
    found += [_function(*one) for one in getattr(module, "AS_AT_START", {}).items()]
    found += map(_row, getattr(module, "ROWS", MENTIONED))
    return table("check and level | finds | what to do", sorted(found, key=lambda one: one[0]))


BY_ROWS = (server.members, workers.each, locks.troubles)  # judge by rows


def troubles():
    """What can be wrong with a lock."""
    rows = {}
    for one in TROUBLES:
        rows.setdefault(
            one.name,
            (
                f"`{one.name}`",
                f"`{one.check}` {_level(one)}",
                first_sentence(one.is_so.__doc__) or f"{shown(one.what)}.",
                shown(one.remedy),
            ),
        )
    return table("`TROUBLE` | doctor's check | when | what to do", rows.values())


# Commands and their options.


def _written(one):
    """Write a parameter as a person types it."""
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    if not isinstance(one, click.Option) or one.is_flag:
        return names
    kind = one.type
    named = {"integer": "NUMBER", "integer range": "NUMBER", "text": "TEXT"}.get(kind.name, "")
    choices = "|".join(getattr(kind, "choices", ()))
    return names.removesuffix("`") + f" {one.metavar or choices or named}`"


def _help(one):
    default = f" Default: `{one.default}`." if one.show_default else ""
    return shown(one.help or "") + default


def _usage(command):
    """Write a command with its arguments; its name leads to its section."""
    pieces = []
    for one in command.params:
        if isinstance(one, click.Argument):
            name = (one.metavar or one.name or "").upper().strip("[]")
            pieces.append(f"-- {name}" if one.nargs < 0 else name if one.required else f"[{name}]")
    anchor = TOGETHER if f"{command.name}" in TOGETHER.split("-") else command.name
    arguments = " ".join(pieces)
    return f"[`{command.name}`](#{anchor})" + (f" `{arguments}`" if arguments else "")


TOGETHER = "pause-resume-and-limit"  # have one section
COMMANDS = dict(group.commands)


def _shared():
    """Return the options that several commands have in common, and whose they are."""
    found = {}
    for name, command in COMMANDS.items():
        for one in command.params:
            if isinstance(one, click.Option):
                found.setdefault((_written(one), _help(one)), []).append(name)
    return {option: whose for option, whose in found.items() if len(whose) > 1}


def commands():
    """The commands."""
    rows = ((_usage(one), shown(one.short_help or "")) for one in COMMANDS.values())
    return table("`celery -A proj dislock` | what it does", rows)


def shared_options():
    """The options of several commands."""
    rows = ((*option, _named(whose)) for option, whose in _shared().items())
    return table("option | what it does | of", rows)


def _named(whose):
    """Name commands, or those few that are left."""
    others = [name for name in COMMANDS if name not in whose]
    few = len(others) < len(whose) / 2
    return ("all but " if few else "") + ", ".join(
        f"`{name}`" for name in (others if few else whose)
    )


def options_of(params):
    """The options that a command does not share with another."""
    shared = _shared()
    rows = [(_written(one), _help(one)) for one in params if isinstance(one, click.Option)]
    return table("option | what it does", [row for row in rows if row not in shared])


def options_for_celery(command):
    """The options that ``celery worker`` and ``celery beat`` have beside their own."""
    params = getattr(plugin, f"{command}_command").params
    return options_of([one for one in params if one.name.startswith("dislock")])


# Log lines.


class Line(NamedTuple):
    """
    A log line.

    Attributes:
        level: Its level.
        text: Its first words, with "…" for what is filled in.
        meaning: What it means, and what to do.
        file, row: Where the comment about it ends.
    """

    level: str
    text: str
    meaning: str
    file: Path
    row: int


def first_words(node):
    """Return the first words of the text that a node of a program is, or ""."""
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
        text = "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return ""
    text = re.sub(r"'?(?:%(?:\.\d)?[srdfg]|\{[^{}]*\})'?", "…", text)
    return textwrap.shorten(text.replace("…[…]", "…"), FIRST_WORDS, placeholder=" …")


@cache
def lines():
    """Return all lines that the code describes, in the order of their words."""
    found = {}
    for file in sorted(Path(celery_dislock.__file__).parent.rglob("*.py")):
        source = file.read_text("utf-8")
        texts = sorted(
            (node.lineno, node.col_offset, first_words(node))
            for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and " " in first_words(node)
        )
        for block in ABOUT_LINES.finditer(source):
            row = source[: block.end()].count("\n")
            told = " ".join(line.strip().removeprefix("#: ") for line in block[0].splitlines())
            for level, text, meaning in ABOUT_LINE.findall(told):
                of_code = next((words for at, _, words in texts if at > row), "")
                words = re.sub(r"(?:[ :;,.]*…)+\.?$", " …", text or of_code)  # filled in at the end
                found[level, words] = Line(level, words, shown(meaning), file, row)
    return sorted(found.values(), key=lambda line: re.findall(r"[a-z]+", line.text.lower()))


FIRST_WORDS = 90  # characters of a line that are shown
LEVELS = "INFO|WARNING|ERROR"
ABOUT_LINES = re.compile(rf"^ *#: (?:{LEVELS})\b.*\n(?: *#: .*\n)*", re.MULTILINE)
ABOUT_LINE = re.compile(rf"({LEVELS})(?: `([^`]*)`)?: (.*?)(?= (?:{LEVELS})(?: `|: )|$)")
SUBJECTS = ("Beat", "Command", "Lock", "Task")  # with which lines begin


def log_lines(subject):
    """The log lines that begin with a word, or with no other of these."""
    rows = []
    for line in lines():
        word = re.match(r"[A-Za-z]*", line.text.removeprefix("Parked ").capitalize())
        its = next((one for one in SUBJECTS if word and word[0] in {one, f"{one}s"}), "")
        if its == subject:
            rows.append((f"`{line.text}` {line.level}", line.meaning.replace("->", "→")))
    return table("line and level | what it means → what to do", rows)


TABLES = {
    "alerts": alerts,
    "options of a task": options_of_a_task,
    "settings of an app": settings_of_an_app,
    "options of celery worker": partial(options_for_celery, "worker"),
    "options of celery beat": partial(options_for_celery, "beat"),
    "options of a lock": options_of_a_lock,
    "lease": lease,
    "conflict": conflict,
    "test server": server_of_a_test,
    "commands": commands,
    "options of several commands": shared_options,
    **{
        f"options of {name}": partial(options_of, one.params)
        for name, one in COMMANDS.items()
        if name not in {"show", "pause", "resume"}  # they have those that others have
    },
    "states": states,
    "troubles": troubles,
    "checks of the server": partial(checks, server),
    "checks of the workers": partial(checks, workers),
    "checks of the locks": partial(checks, locks),
    **{f"log lines: {one}": partial(log_lines, one) for one in SUBJECTS},
    "log lines": partial(log_lines, ""),
    "events": events_of_a_task,
    "signals": signals_of_a_lock,
    "errors": errors,
    "metrics": metrics,
}


def fresh(text):
    """Return the text of a page with its tables as the code has them."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main():
    """Write the tables into all pages."""
    for page in PAGES:
        text = page.read_text("utf-8")
        if (made := fresh(text)) != text:
            page.write_text(made, "utf-8")
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()

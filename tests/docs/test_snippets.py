"""Every snippet of the documentation is run, and prints what the page shows."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.page import DIRECTIVES, DOCS, PAGES, ROOT, RUN, SHOWN, blocks_of
from tests.docs.terminal import LIMIT, POLL, Prompt, Terminal, pattern_of
from tests.programs import find_redis_cli
from tests.redis_server import RedisServer
from tests.serving import serving

HERE = Path(__file__).parent
KEPT = ("HOME", "LANG", "TERM")  # of the environment's variables, and pip's
PORTS = ("6379", "6380", "6381")  # of the Redis that a page uses, and of others beside it
RUNNABLE = [page for page in PAGES if any(block.language in RUN for block in blocks_of(page))]


def names_of(page):
    return str(page.relative_to(ROOT))


class Reader:
    """Does what a page says, in a folder of its own, with a Redis of its own."""

    def __init__(self, folder, ports, environment):
        self.folder = folder
        self._ports = ports  # of the servers here, by the ports that the pages name
        self._environment = environment
        self._terminals = {}
        self._prompt = None

    def follow(self, page):
        """Do it all, from top to bottom."""
        for block in blocks_of(page):
            if block.word == "before":
                self._python("python", block.said, block.line - 1, page)
            if block.word == "not run" or block.language not in RUN:
                continue
            code = self._here(block.code)
            if block.file:
                target = self.folder / block.file
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("a" if block.is_added else "w", encoding="utf-8") as file:
                    file.write(code)
            elif block.language == "console":
                self._console(block, code, page)
            else:
                self._python(block.language, code, block.line, page)
        if self._prompt is not None:
            self._python("python", "app.finalize()", block.line, page)

    def _here(self, code):
        for named, port in self._ports.items():
            code = re.sub(rf"\b{named}\b", str(port), code)
        return code

    def _python(self, language, code, line, page):
        if self._prompt is None:
            made = self.folder / ".venv" / "bin" / "python"
            python = made if made.exists() else Path(sys.executable)
            self._prompt = Prompt(python, self.folder, self._environment)
        code = self._here(code)
        wrong = self._prompt.run(language, code, line, page)
        assert not wrong, wrong

    def _console(self, block, code, page):
        name = block.said if block.word == "terminal" else ""
        if block.word == "printed in":
            self._wait_for(block.said.split(" or "), code.splitlines())
            return
        if name not in self._terminals:
            self._terminals[name] = Terminal(self.folder, self._environment)
        terminal = self._terminals[name]
        for command, shown in commands_of(code):
            if command == "^C":
                terminal.interrupt()
            elif name:
                terminal.start(command, shown)
            else:
                status, printed = terminal.run(command)
                where = f"{page.name}, line {block.line}: $ {command}\n{printed}"
                if shown:
                    assert pattern_of(shown).fullmatch(printed), where
                else:
                    assert status == 0, where

    def _wait_for(self, names, shown):
        """Wait until one of these terminals has printed this."""
        terminals = [self._terminals[name] for name in names]
        give_up = time.monotonic() + LIMIT
        while not any(terminal.has(shown) for terminal in terminals):
            assert time.monotonic() < give_up, "".join(terminal.printed for terminal in terminals)
            time.sleep(POLL)

    def close(self):
        """End everything that the page has started."""
        if self._prompt is not None:
            self._prompt.close()
        for terminal in self._terminals.values():
            terminal.close()


def commands_of(code):
    """Return the commands of a console block, each with what it is shown to print."""
    commands = []
    more = False
    for line in code.splitlines():
        if more:
            command, shown = commands.pop()
            commands.append((f"{command}\n{line}", shown))
        elif line.startswith("$ "):
            commands.append((line[2:], []))
        elif line == "^C":
            commands.append((line, []))
        else:
            commands[-1][1].append(line)
        more = line.endswith("\\") and not commands[-1][1]
    return commands


@pytest.fixture(scope="module")
def servers(redis_program, tmp_path_factory):
    """Servers for this module, that others do not flush: one for each of the pages' ports."""
    with contextlib.ExitStack() as stack:
        yield {
            named: stack.enter_context(RedisServer(tmp_path_factory.mktemp("redis")))
            for named in PORTS
        }


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the wheel of this checkout, for pages that make an environment of their own."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture
def ports(servers):
    """The ports of empty servers, by the ports that the pages name."""
    for server in servers.values():
        with server.client() as client:
            client.replicaof("NO", "ONE")
            client.flushall()
    return {named: server.port for named, server in servers.items()}


@pytest.fixture
def served():
    """Those of one who has no Redis, and starts the server for trying."""
    with serving() as (_, url):
        yield {PORTS[0]: urlsplit(url).port}


@pytest.fixture
def reader(request, dist, tmp_path, page):
    """A reader with an empty folder, this environment's programs, and an empty Redis."""
    ports = request.getfixturevalue(getattr(request, "param", "ports"))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("pip", "redis-cli"):
        shutil.copy(HERE / "programs" / name, programs)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {
        name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")
    }
    environment = {
        **kept,
        "PATH": path,
        "PIP_FIND_LINKS": str(dist),
        "PYTHONUNBUFFERED": "1",
        "SHOP_BROKER_URL": f"redis://localhost:{ports[PORTS[0]]}/0",
        "REDIS_PORT": str(ports[PORTS[0]]),
        "REDIS_CLI": find_redis_cli() if "redis-cli" in page.read_text("utf-8") else "",
    }
    if not page.is_relative_to(DOCS):
        environment["PYTHONPATH"] = str(ROOT)  # the other pages are read in the repository
    reader = Reader(folder, ports, environment)
    yield reader
    reader.close()


def test_every_block_has_a_language_that_says_what_becomes_of_it():
    """No snippet escapes: a block is run, or shows a format, or says why it cannot be run."""
    for page in PAGES:
        unknown = [
            f"{page}, line {block.line}: {block.language!r}"
            for block in blocks_of(page)
            if block.language not in (*RUN, *SHOWN, *DIRECTIVES)
        ]
        assert unknown == []
        fences = re.findall(r"^`{3,}", page.read_text("utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page


def test_no_code_stands_outside_a_fence():
    """Indented code has no language, so nobody would run it."""
    for page in PAGES:
        text = page.read_text("utf-8")
        text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"\n\n {4,}\S.*", text) == [], page


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name == "README.md" else pytest.mark.extra)
        for page in RUNNABLE
    ],
    ids=names_of,
)
def test_a_page_can_be_followed_from_top_to_bottom(reader, page):
    """What it says to type works, in order, and prints what it shows."""
    reader.follow(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", [DOCS / "tutorial.md"], ids=names_of)
@pytest.mark.parametrize("reader", ["served"], indirect=True)
def test_the_tutorial_needs_no_redis(reader, page):
    """All of it goes as on a Redis, on the server that it says to start in its place."""
    reader.follow(page)

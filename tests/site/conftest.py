"""The site, built and served as readers get it, and a browser that asks no other host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import pytest
from playwright.sync_api import sync_playwright

from tests.programs import missing
from tests.site.built import MERMAID, ROOT, SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page, Route

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SIZES = {  # in CSS pixels
    "desktop": {"width": 1280, "height": 800},
    "phone": {"width": 390, "height": 844},
}
CDN = "https://cdn.jsdelivr.net/npm/mermaid@"
# Stands in for the copy on the CDN: it draws nothing, and complains of nothing.
NO_MERMAID = "export default {initialize() {}, async run() {}};"
DRAWN = """
[...document.querySelectorAll("pre.mermaid")]
    .every(diagram => diagram.querySelector("svg[aria-roledescription]"))
    || document.querySelector("[aria-roledescription=error]")
"""


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Keep requests out of the tests' output."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site.  DOCS_SITE names one that is there already."""
    if built := os.environ.get("DOCS_SITE"):
        return Path(built).resolve()
    folder = tmp_path_factory.mktemp("site").resolve()
    options = ("-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees")
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, SOURCES, folder / "html"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if build.returncode:
        pytest.fail(f"the site cannot be built:\n{build.stderr}", pytrace=False)
    return folder / "html"


@pytest.fixture(scope="session")
def mermaid(site: Path) -> bool:
    """Whether Mermaid was built in.  In CI it must be; elsewhere no diagram is drawn without it."""
    return (site / MERMAID).exists()


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The URL of the front page's folder."""
    handler = partial(Handler, directory=os.fspath(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A headless Chromium.  Where there is none the test is skipped; in CI it fails.

    It ends with this package: its event loop would stand in the way of the other tiers' own.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        missing("a Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab(NamedTuple):
    """A tab of the browser, and what it has complained of: console errors, other hosts."""

    page: Page
    faults: list[str]


@pytest.fixture(scope="package")
def tab(browser: Browser, address: str, mermaid: bool) -> Tab:
    """The one tab of all tests: to open one for each takes twice as long."""
    page = browser.new_page(reduced_motion="reduce")
    faults: list[str] = []

    def meet(route: Route) -> None:
        url = route.request.url
        if url.startswith(CDN) and not mermaid:
            route.fulfill(content_type="text/javascript", body=NO_MERMAID)
        else:
            faults.append(f"asks for {url}")
            route.abort()

    page.route(re.compile(f"^(?!{re.escape(address)})"), meet)
    page.on("console", lambda line: line.type == "error" and faults.append(line.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    return Tab(page, faults)


@pytest.fixture
def faults(tab: Tab) -> list[str]:
    """What the browser has complained of in this test."""
    tab.faults.clear()
    return tab.faults


@pytest.fixture
def visit(
    tab: Tab, faults: list[str], address: str, mermaid: bool
) -> Iterator[Callable[..., Page]]:
    """Open a page of the site, and wait until its diagrams are drawn."""

    def go(path: str, size: str = "desktop", scheme: str = "light") -> Page:
        tab.page.set_viewport_size(SIZES[size])
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.goto(address + path)
        if mermaid:
            tab.page.wait_for_function(DRAWN)
        return tab.page

    yield go
    tab.page.goto("about:blank")  # so that nothing of this test is heard in the next

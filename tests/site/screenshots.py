"""
Take the pictures of the page that the documentation shows: ``make screenshots``.

The locks are made up, and the clock stands still, so that a picture changes only with the page.
"""

from __future__ import annotations

import datetime as dt
import shutil
from typing import TYPE_CHECKING

from playwright.sync_api import expect, sync_playwright

from tests.pages import serving, staged
from tests.site.built import SOURCES
from tests.site.conftest import PROGRAMS
from tests.staged import RESERVED, holder, lock, place

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STATIC = SOURCES / "_static"
NOW = dt.datetime(2026, 3, 14, 3, 0, 7, tzinfo=dt.timezone.utc)
DESK = {"width": 1000, "height": 640}
LINE = 3  # tasks in line


def of(task: str, task_id: str, worker: str, **changes: object):
    """Return a holder with a short id."""
    owner = f"{task_id}@{worker}:711/1"
    return holder(task=task, id=task_id, worker=worker, host="w1", pid=711, owner=owner, **changes)


def shop() -> list:
    """Return the locks of a shop, at three in the morning."""
    pay = of("shop.apply_payment", "7f31c2", "celery@w1", held=734.0, remaining=27.4, renewed=2.6)
    line = [
        place(
            nth,
            task="shop.apply_payment",
            id=task_id,
            waiting=720.0 - 100 * nth,
            args=f"(1, {nth + 4})",
        )
        for nth, task_id in enumerate(("90ab1e", "c3d94f", "e51770"), 1)
    ]
    return [
        lock("account:1", holders=[pay], waiting=LINE, line=line),
        lock("account:2", holders=[of("shop.apply_payment", "ab09d1", "celery@w2", held=4.0)]),
        lock("export:7", holders=[of("shop.export", "9b1d0c", "celery@w1", held=7512.0)]),
        lock(
            "export:8", limit=0, limit_age=5400.0, limit_note="by ann: its disk is full", waiting=1
        ),
        lock("report:weekly", reservation=RESERVED),
        lock(
            "tenant:acme",
            limit=3,
            holders=[
                of("shop.sync", task_id, "celery@w2", held=held)
                for task_id, held in (("44aa10", 31.0), ("44aa11", 12.0))
            ],
        ),
    ]


def open_page(browser: Browser, address: str, scheme: str, size: dict[str, int]) -> Page:
    """Open the page of the list."""
    tab = browser.new_page(color_scheme=scheme, viewport=size, locale="en-GB", timezone_id="UTC")
    tab.clock.set_fixed_time(NOW)
    tab.goto(address)
    expect(tab.locator("#locks tbody tr")).not_to_have_count(0)
    tab.evaluate("document.activeElement.blur()")
    return tab


def main() -> None:
    """Take them all."""
    program = next(filter(None, map(shutil.which, PROGRAMS)))
    site, server = staged(show_arguments=True)
    server.put(*shop())
    with serving(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = open_page(browser, address, scheme, DESK)
            tab.screenshot(path=STATIC / f"web-page-{scheme}.png")
            tab.close()
        tab = open_page(browser, address, "light", DESK)
        tab.get_by_role("link", name="account:1").click()
        expect(tab.locator("#line li")).to_have_count(LINE)
        tab.evaluate("document.activeElement.blur()")
        tab.screenshot(path=STATIC / "web-page-lock.png")
        browser.close()


if __name__ == "__main__":
    main()

"""The page of locks in a browser: with a mouse, a keyboard, a phone, at night, and left open."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import StoreError
from celery_dislock.servers.overrides import RateState
from tests.pages import serving, staged
from tests.site.conftest import SIZES
from tests.site.test_pages import RULES
from tests.staged import RESERVED, holder, lock, place

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.staged import Staged

POLL = 3000  # milliseconds between two questions of the page
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "a\nb\x1b[31m\u202e",
    "%2e%2e/%00?#&lock=x",
    "'><a href=//evil.example>",
]
TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"


class Opened(NamedTuple):
    """The page in a browser, and the locks that it shows."""

    tab: Page
    locks: Staged
    site: Any  # the WSGI application
    address: str
    asked: list[str]  # what the browser has asked for
    faults: list[str]  # what it has complained of

    def pass_by(self, milliseconds=POLL + 100):
        """Let time pass in the browser, and wait for what it then asks."""
        self.tab.clock.run_for(milliseconds)

    def state(self, key="account:1"):
        return self.locks.overview.lock(f"dislock:{{{key}}}")

    def show(self, key):
        self.tab.get_by_role("link", name=key, exact=True).click()
        expect(self.tab.get_by_role("heading", name=f"Lock {key}")).to_be_focused()


@pytest.fixture
def opened(browser):
    """Open the page, with these options; time passes in the browser only when it is told to."""

    def open_page(*locks, size="desktop", scheme="light", start=True, **options):
        site, server = staged(**options)
        server.put(*locks)
        address = stack.enter_context(serving(site))
        context = browser.new_context(viewport=SIZES[size], color_scheme=scheme)
        stack.callback(context.close)
        tab = context.new_page()
        asked = []
        faults = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda line: line.type == "error" and faults.append(line.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("dialog", lambda dialog: faults.append(dialog.message) or dialog.dismiss())
        tab.clock.install()
        tab.set_default_timeout(10_000)
        if start:
            tab.goto(address)
            expect(tab.locator("#count")).to_contain_text("lock")
        return Opened(tab, server, site, address, asked, faults)

    with ExitStack() as stack:
        yield open_page


def shop():
    """Some locks of a shop: held, with a line, paused, reserved, of several holders."""
    return [
        lock(
            "account:1",
            holders=[holder(1)],
            waiting=2,
            line=[place(1), place(2, parked=False, ticket="", task=None, id=None, thread="main")],
            turns=[place(9, turns=2)],
            reservation=RESERVED,
        ),
        lock("export:7", holders=[holder(2), holder(3, mode="shared", renewed=None)]),
        lock("paused", limit=0, limit_note="by ann: deploy", limit_since=1.8e9),
        lock("limited", limit=3, limit_remaining=600.0, aside=1),
    ]


def rows(tab):
    return tab.locator("#locks tbody th").all_inner_texts()


def test_thousands_of_locks_are_searched_sorted_and_turned_like_pages(opened):
    """The browser never has more than one page of them, and "back" goes back."""
    page = opened(
        *(
            lock(f"export:{number:04}", holders=[holder(number)], waiting=number % 7)
            for number in range(2000)
        )
    )
    tab = page.tab
    expect(tab.locator("#count")).to_have_text("2,000 locks, 1 to 50")
    assert len(rows(tab)) == 50
    tab.get_by_role("button", name="Next page").click()
    expect(tab.locator("#count")).to_have_text("2,000 locks, 51 to 100")
    expect(tab.get_by_role("button", name="Previous page")).to_be_enabled()
    tab.get_by_label("Search").fill("export:177")
    page.pass_by(400)
    expect(tab.locator("#count")).to_have_text("10 locks of 2,000, 1 to 10")
    tab.get_by_label("Order").select_option("held longest first")
    expect(tab.locator("#locks tbody th").first).to_have_text("export:1779")
    page.show("export:1779")
    tab.go_back()
    expect(tab.locator("#locks tbody th").first).to_have_text("export:1779")
    expect(tab.get_by_label("Search")).to_have_value("export:177")
    tab.reload()
    expect(tab.locator("#count")).to_have_text("10 locks of 2,000, 1 to 10")
    tab.get_by_label("Search").fill("nothing")
    page.pass_by(400)
    tab.get_by_role("link", name="Look at the lock of key nothing").click()
    expect(tab.locator("#lock-text")).to_contain_text("nobody holds it")
    assert page.faults == []


def test_the_list_and_a_locks_own_view_tell_all(opened):
    """Who, since when, how much is left, who waits, and what an operator has changed."""
    page = opened(*shop(), show_arguments=True)
    tab = page.tab
    account = tab.get_by_role("row", name=re.compile("account:1"))
    for text in ("shop.export[id-1] on celery@w1 (pid 7)", "61 s", "29 s", "2", "reserved"):
        expect(account).to_contain_text(text)
    export = tab.get_by_role("row", name=re.compile("export:7"))
    expect(export).to_contain_text("and 1 more")
    expect(tab.get_by_role("row", name=re.compile("limited"))).to_contain_text("limit 3")
    page.show("account:1")
    view = tab.locator("#lock-view")
    for text in (
        "held for 61 s, renewed 1 s ago, 29 s left unless renewed again",
        "host w1, pid 7, token 1",
        "For task id-9, 3.0 s ago; it is waiting. It ends in 20 s, unless it is renewed.",
        *("shop.pay[parked-9]", "2 turns", "1. shop.pay[parked-1]", "4111-1111"),
        "2. thread main on web (pid 3)",
    ):
        expect(view).to_contain_text(text)
    page.pass_by(10_000)
    expect(view).to_contain_text(re.compile(r"held for 6[1-9] s|held for 7\d s"))
    tab.get_by_role("link", name="All locks").click()
    page.show("paused")
    expect(view).to_contain_text("until that is taken back (by ann: deploy): nobody gets it")
    assert page.faults == []
    assert all(url.startswith(page.address) for url in page.asked)


def test_why_a_task_does_not_run_is_asked_on_the_start_page(opened):
    """Its id is typed, and one sentence comes, with what it rests on and a way to the lock."""
    page = opened(*shop(), size="phone")
    tab = page.tab
    tab.get_by_label("Why does a task not run?").fill(" parked-1 ")
    tab.get_by_role("button", name="Ask").click()
    expect(tab.get_by_role("heading", name="Task parked-1")).to_be_focused()
    expect(tab.locator("#why-sentence")).to_contain_text("1st of 2 in line for lock 'account:1'")
    expect(tab.locator("#why-facts li")).not_to_have_count(0)
    assert not tab.evaluate(TOO_WIDE)
    tab.get_by_role("link", name="Lock account:1").click()
    expect(tab.get_by_role("heading", name="Lock account:1")).to_be_focused()
    tab.go_back()
    expect(tab.locator("#why-sentence")).to_contain_text("in line")
    tab.get_by_role("link", name="All locks").click()
    tab.get_by_label("Why does a task not run?").fill(HOSTILE[0])
    tab.keyboard.press("Enter")
    expect(tab.locator("#why-sentence")).to_contain_text("Nothing is known here of task <script>")
    assert page.faults == []


def test_what_is_wrong_is_counted_on_top_and_can_be_chosen(opened):
    """Trouble comes first, with a badge and since when; each number is a filter."""
    overdue = lock("zebra", holders=[holder(9, renewed=25.0, remaining=5.0)])
    page = opened(*shop(), lock("off", limit=0, limit_age=7200.0), overdue)
    tab = page.tab
    expect(tab.locator("#locks tbody th").first).to_have_text("zebra")
    expect(tab.get_by_role("row", name=re.compile("zebra"))).to_contain_text("overdue")
    expect(tab.get_by_role("row", name=re.compile("off"))).to_contain_text("paused 2 h 00 min ago")
    account = tab.get_by_role("row", name=re.compile("account:1"))
    expect(account).to_contain_text("reserved 3.0 s ago")
    totals = tab.get_by_role("group", name="How many locks there are")
    assert totals.locator("button").all_inner_texts() == [
        *("3 held", "1 in line", "1 overdue", "2 paused", "1 reserved", "0 damaged"),
    ]
    totals.get_by_role("button", name="1 overdue").click()
    expect(tab.locator("#count")).to_have_text("1 lock of 6, 1 to 1")
    expect(totals.get_by_role("button", name="1 overdue")).to_have_attribute("aria-pressed", "true")
    totals.get_by_role("button", name="1 overdue").click()
    expect(tab.locator("#count")).to_have_text("6 locks, 1 to 6")
    assert page.faults == []


def test_a_page_that_never_reached_the_lock_server_says_why(opened):
    """It shows nothing that it does not know: no empty table, and no "nobody holds it"."""
    page = opened(start=False)
    page.locks.error = StoreError("redis://locks.example.com:6379/0", "no answer in time")
    tab = page.tab
    tab.goto(page.address)
    expect(tab.get_by_role("alert")).to_contain_text("no answer in time")
    for part in ("#locks", "#turn", "#totals", "#empty"):
        expect(tab.locator(part)).to_be_hidden()
    tab.goto(f"{page.address}#key=export%3A7")
    expect(tab.locator("#lock-title")).to_be_visible()
    expect(tab.locator("#lock-told")).to_be_hidden()


def test_what_is_freed_is_what_the_question_showed(opened):
    """Although another has the lock by the time of the answer."""
    page = opened(*shop())
    page.show("account:1")
    page.tab.get_by_role("button", name="Free the lock of shop.export[id-1]").click()
    expect(page.tab.get_by_role("dialog")).to_contain_text("End the task first")
    expect(page.tab.get_by_role("dialog")).to_contain_text("shop.export[id-1] on celery@w1")
    page.locks.put(lock("account:1", holders=[holder(5)]))
    page.pass_by()
    expect(page.tab.locator("#holders")).to_contain_text("id-5")
    page.tab.get_by_role("button", name="Free it").click()
    expect(page.tab.get_by_role("status")).to_contain_text("Nothing was changed")
    assert [one.id for one in page.state().holders] == ["id-5"]
    expect(page.tab.get_by_role("heading", name="Lock account:1")).to_be_focused()
    page.tab.get_by_role("button", name="Free the lock of shop.export[id-5]").click()
    page.tab.get_by_role("button", name="Free it").click()
    expect(page.tab.get_by_role("status")).to_contain_text("Freed lock 'account:1'")
    assert page.state().holders == []


def test_the_reservation_that_ends_is_what_the_question_showed(opened):
    """Although the key is reserved for another message by the time of the answer."""
    page = opened(*shop())
    page.show("account:1")
    page.tab.get_by_role("button", name="End the reservation").click()
    dialog = page.tab.get_by_role("dialog")
    expect(dialog).to_contain_text("Its message may still wait, and runs then as well.")
    later = RESERVED._replace(id="id-10", state="ended", number=8)
    page.locks.put(lock("account:1", reservation=later))
    page.pass_by()
    expect(page.tab.locator("#reservation")).to_contain_text(
        "For task id-10, which ended 3.0 s ago."
    )
    page.tab.get_by_role("button", name="End it").click()
    expect(page.tab.get_by_role("status")).to_contain_text("Nothing was changed")
    assert page.state().reservation.id == "id-10"


def test_tasks_are_dropped_and_locks_paused_limited_and_resumed(opened):
    """Each asks first, and can be cancelled; only a task can be ended, and no thread."""
    account = shop()[0]
    thread = holder(2, id=None, task=None, thread="main")
    page = opened(account._replace(holders=[holder(1), thread]))
    tab = page.tab
    page.show("account:1")
    tab.get_by_role("button", name="Drop shop.pay[parked-1] from the line").click()
    tab.get_by_role("button", name="Cancel").click()
    tab.get_by_role("button", name="Drop shop.pay[parked-1] from the line").click()
    tab.get_by_role("button", name="Drop it").click()
    expect(tab.get_by_role("status")).to_contain_text("Dropped the parked task")
    assert [one.id for one in page.state().line if one.parked] == []
    assert tab.get_by_role("button", name=re.compile("^End the task")).count() == 1
    tab.get_by_role("button", name="End the task shop.export[id-1]").click()
    expect(tab.get_by_role("dialog")).to_contain_text("SIGTERM")
    tab.get_by_role("button", name="End it").click()
    expect(tab.get_by_role("status")).to_contain_text("Told the workers to end")
    tab.get_by_label("Why: shown").fill("deploy")
    tab.get_by_role("button", name="Pause").click()
    tab.get_by_role("button", name="Pause it").click()
    expect(tab.get_by_role("status")).to_contain_text("Paused lock 'account:1'")
    assert (page.state().limit, page.state().limit_note) == (0, "by ann: deploy")
    tab.get_by_label("Leases at a time").fill("3")
    tab.get_by_role("button", name="Limit", exact=True).click()
    tab.get_by_role("button", name="Limit it").click()
    expect(tab.get_by_role("status")).to_contain_text("Limited lock 'account:1' to 3 at a time")
    assert page.state().limit == 3
    page.locks.put(account._replace(limit=0))
    page.pass_by()
    tab.get_by_role("button", name="Resume").click()
    tab.get_by_role("button", name="Take it back").click()
    expect(tab.get_by_role("status")).to_contain_text("Took back the limit")
    assert page.faults == []


def test_a_task_of_several_keys_is_told_at_each_and_dropped_at_a_later_one(opened):
    """The line tells what it keeps, and what it keeps tells what it waits for."""
    stations = ["tenant:a", "api"]
    waits = place(1, stations=stations, keeps=stations[:1], beside="dislock:{tenant:a}")
    kept = {"turn": True, "waits": "api", "renewed": None, "task": None, "worker": None}
    unit = holder(1, id="parked-1", owner="parked-1:0:0#", **kept)
    page = opened(lock("api", waiting=1, line=[waits]), lock("tenant:a", holders=[unit]))
    told = "kept for task parked-1, which waits for lock 'api'"
    expect(page.tab.get_by_role("row", name="tenant:a")).to_contain_text(told)
    page.show("api")
    line = page.tab.get_by_role("listitem").filter(has_text="shop.pay[parked-1]")
    expect(line).to_contain_text("lock 2 of 2, keeps tenant:a")
    page.tab.get_by_role("button", name="Drop shop.pay[parked-1] from the line").click()
    page.tab.get_by_role("button", name="Drop it").click()
    expect(page.tab.get_by_role("status")).to_contain_text("Dropped the parked task")
    assert not page.state("api").line
    assert not page.state("tenant:a").holders
    assert page.faults == []


def test_a_holder_is_told_for_whose_end_a_newer_task_waits(opened):
    """By the id of the newer one."""
    page = opened(lock("deploy", holders=[holder(1, superseded="id-2")]))
    page.show("deploy")
    holds = page.tab.get_by_role("listitem").filter(has_text="shop.export[id-1]")
    expect(holds).to_contain_text("token 1, newer task id-2 waits for this one to end")
    assert page.faults == []


def test_costs_are_told(opened):
    """Of the lock in the list, of each holder and of those in line, and what the first lacks."""
    holders = [holder(1, cost=1200, spent=900), holder(2, cost=2)]
    line = [place(1, cost=3, limit=1203), place(2)]
    page = opened(
        lock("api", holders=holders, waiting=2, line=line), lock("plain", holders=[holder(3)])
    )
    expect(page.tab.get_by_role("row", name="api")).to_contain_text("cost 1,202")
    expect(page.tab.get_by_role("row", name="plain")).not_to_contain_text("cost")
    page.show("api")
    needs = "The first in line needs 3 of 1,203 units, and 1 is free: nobody passes it."
    expect(page.tab.locator("#lock-text")).to_contain_text(needs)
    told = {"id-1": "cost 1,200, spent 900, host", "id-2": "cost 2, host", "parked-1": "cost 3"}
    for who, cost in told.items():
        expect(page.tab.get_by_role("listitem").filter(has_text=who)).to_contain_text(cost)
    small = page.tab.get_by_role("listitem").filter(has_text="parked-2")
    expect(small).not_to_contain_text("cost")
    assert page.faults == []


def test_rates_are_told_set_and_taken_back(opened):
    """The code's and that of people, until when, and when the next may start; a form sets one."""
    rate = RateState(Rate(100, 60.0), 12.0)
    note = {"note": "by ana: 429", "age": 60.0}
    page = opened(
        lock("code", rate=rate, waiting=1),
        lock("held", rate=RateState(None, 0.0, held_back=90.0, age=60.0, back_note="by ana: 429")),
        lock("set", rate=rate._replace(is_set=True, remaining=600.0, **note)),
    )
    tab = page.tab
    told = {
        "code": (
            "next in 12 s",
            (
                "Its rate is 100 a minute; the next may start in 12 s. "
                "The first in line goes by 100 a minute, as its code says."
            ),
        ),
        "held": (
            "held back 90 s",
            "It is held back for 90 s more (by ana: 429): nobody gets it.",
        ),
        "set": (
            "rate 100 a minute",
            "Its rate is 100 a minute, for 10 min more (by ana: 429); the next may start in 12 s.",
        ),
    }
    for key, (listed, shown) in told.items():
        expect(tab.get_by_role("row", name=re.compile(f"^{key}"))).to_contain_text(listed)
        page.show(key)
        expect(tab.locator("#lock-text")).to_have_text(shown)
        tab.get_by_role("link", name="All locks").click()
    page.show("code")
    unrate = tab.locator("#unrate")
    expect(unrate).to_be_hidden()
    tab.get_by_label("Rate, such as").fill("5")
    tab.get_by_role("button", name="Set the rate").click()
    tab.get_by_role("button", name="Set it").click()
    expect(tab.get_by_role("status")).to_contain_text("give a rate as '100/m' or '5/10s'")
    tab.get_by_label("Rate, such as").fill("5/10s")
    tab.get_by_label("Why: shown").fill("429")
    tab.get_by_role("button", name="Set the rate").click()
    expect(tab.get_by_role("dialog")).to_contain_text("It is taken 5/10s at most from now on")
    tab.get_by_role("button", name="Set it").click()
    expect(tab.get_by_role("status")).to_contain_text("Limited lock 'code' to 5 in 10 s")
    expect(tab.locator("#lock-text")).to_contain_text("Its rate is 5 in 10 s, until that is taken")
    assert page.state("code").rate.note == "by ann: 429"
    unrate.click()
    tab.get_by_role("button", name="Take it back").click()
    expect(tab.get_by_role("status")).to_contain_text("Let lock 'code' be taken as often as the")
    expect(unrate).to_be_hidden()
    tab.get_by_role("link", name="All locks").click()
    page.show("held")
    expect(unrate).to_have_text("End the hold-back")
    assert [one for one in page.faults if "400" not in one] == []


def test_a_long_line_is_shown_in_parts(opened):
    """Fifty places at a time."""
    line = [place(number) for number in range(1, 121)]
    page = opened(lock("long", waiting=120, line=line))
    page.show("long")
    tab = page.tab
    expect(tab.locator("#line li")).to_have_count(50)
    tab.get_by_role("button", name="After these").click()
    expect(tab.locator("#line li").first).to_contain_text("51. ")
    tab.get_by_role("button", name="After these").click()
    expect(tab.locator("#line li")).to_have_count(20)
    expect(tab.get_by_role("button", name="After these")).to_be_disabled()
    tab.get_by_role("button", name="Before these").click()
    expect(tab.locator("#line li").first).to_contain_text("51. ")


@pytest.mark.parametrize("key", HOSTILE)
def test_a_hostile_key_is_text(opened, key):
    """It runs nothing, loads nothing, becomes no element, and its lock can be looked at."""
    page = opened(
        lock(
            key,
            holders=[holder(task=key, host=key)],
            waiting=1,
            line=[place(task=key, args=key)],
            limit=0,
            limit_note=key,
        ),
        show_arguments=True,
    )
    tab = page.tab
    scripts, images = tab.locator("script").count(), tab.locator("img").count()
    tab.locator("#locks tbody a").click()
    expect(tab.locator("#holders li")).to_have_count(1)
    shown = tab.locator("#lock-title").inner_text()
    assert not re.search("[\x00-\x1f\u202e]", shown)
    assert tab.locator("#lock-view").locator("a, img, script").count() == 1  # "All locks"
    tab.get_by_role("button", name=re.compile("^Free the lock of")).click()
    tab.get_by_role("button", name="Free it").click()
    expect(tab.get_by_role("status")).to_contain_text("Freed lock")
    assert page.state(key).holders == []
    assert (tab.locator("script").count(), tab.locator("img").count()) == (scripts, images)
    assert page.faults == []
    assert all(url.startswith(page.address) for url in page.asked)


def test_it_can_be_used_with_a_keyboard_alone(opened):
    """Search, open, free, cancel with Escape, and come back; the focus is always somewhere."""
    page = opened(*shop())
    tab = page.tab

    def tab_to(locator):
        for _ in range(40):
            if locator.evaluate("element => element === document.activeElement"):
                return
            tab.keyboard.press("Tab")
        pytest.fail(f"{locator} is not reached by Tab")

    tab_to(tab.get_by_label("Search"))
    tab.keyboard.type("account")
    page.pass_by(400)
    expect(tab.locator("#locks tbody th")).to_have_count(1)
    tab_to(tab.get_by_role("link", name="account:1"))
    page.pass_by()  # what is read again leaves the focus alone
    expect(tab.get_by_role("link", name="account:1")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", name="Lock account:1")).to_be_focused()
    free = tab.get_by_role("button", name="Free the lock of shop.export[id-1]")
    tab_to(free)
    assert free.evaluate("button => getComputedStyle(button).outlineStyle") == "solid"
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("button", name="Cancel")).to_be_focused()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("dialog")).to_be_hidden()
    expect(free).to_be_focused()
    assert len(page.state().holders) == 1
    tab.keyboard.press("Enter")
    tab_to(tab.get_by_role("button", name="Free it"))
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("status")).to_contain_text("Freed lock 'account:1'")


def test_a_dialog_that_is_opened_again_at_once_is_asked(opened):
    """The browser says late that the one before was closed, which is no answer to this one."""
    page = opened(*shop())
    tab = page.tab
    page.show("account:1")
    tab.get_by_role("button", name="Free the lock of shop.export[id-1]").click()
    tab.evaluate("document.getElementById('confirm').dispatchEvent(new Event('close'))")
    tab.get_by_role("button", name="Free it").click()
    expect(tab.get_by_role("status")).to_contain_text("Freed lock 'account:1'")


def test_what_was_cancelled_is_not_done_with_what_is_confirmed_next(opened):
    """Also if the browser says that the first dialog was closed when the second one is open."""
    page = opened(*shop())
    tab = page.tab
    page.show("account:1")
    free = tab.get_by_role("button", name="Free the lock of shop.export[id-1]")
    free.evaluate("""button => {
        document.getElementById("pause").click();
        document.getElementById("cancel").click();
        button.click();
    }""")
    tab.get_by_role("button", name="Free it").click()
    expect(tab.get_by_role("status")).to_contain_text("Freed lock 'account:1'")
    assert not page.state().is_limited


def test_somebody_who_may_not_look_any_more_sees_nothing(opened):
    """Nothing that was shown stays, the page says why, and shows all again when they may."""
    known = ["ann"]
    page = opened(*shop(), user=lambda _environ: known[0])
    tab = page.tab
    page.show("account:1")
    tab.get_by_role("button", name=re.compile("^Free")).click()
    known[0] = None
    page.pass_by()
    expect(tab.get_by_role("alert")).to_contain_text("You may not look at this page")
    for part in ("#confirm", "#lock-view", "#list-view"):
        expect(tab.locator(part)).to_be_hidden()
    for part in ("#who", "#age", "#server"):
        expect(tab.locator(part)).to_be_empty()
    expect(tab).to_have_title("Locks")
    known[0] = "ann"
    page.pass_by(2 * POLL)
    expect(tab.get_by_role("heading", name="Lock account:1")).to_be_visible()
    expect(tab.get_by_role("alert")).to_be_empty()


def test_somebody_who_may_not_act_any_more_loses_the_buttons(opened):
    """What was asked before changes nothing, and says so."""
    may_act = [True]
    page = opened(*shop(), allow_actions=lambda _environ: may_act[0])
    page.show("account:1")
    page.tab.get_by_role("button", name=re.compile("^Free")).click()
    may_act[0] = False
    page.tab.get_by_role("button", name="Free it").click()
    expect(page.tab.get_by_role("status")).to_contain_text("Nothing was changed")
    expect(page.tab.locator("#holders")).to_contain_text("id-1")
    expect(page.tab.get_by_role("button", name=re.compile("^Free"))).to_have_count(0)


def test_the_last_state_is_kept_and_marked_while_the_lock_server_is_away(opened):
    """Times stand still, the reason is told once, and all is well again after it."""
    page = opened(*shop())
    tab = page.tab
    page.site._cache._clock = lambda: 1e9  # due
    page.locks.error = StoreError("redis://locks.example.com:6379/0", "no answer in time")
    page.pass_by()
    expect(tab.get_by_role("alert")).to_contain_text("What you see is old")
    expect(tab.get_by_role("alert")).to_contain_text("no answer in time")
    expect(tab.locator("#age")).to_contain_text("old, of")
    expect(tab.get_by_role("row", name=re.compile("account:1"))).to_be_visible()
    held = tab.get_by_role("row", name=re.compile("account:1")).inner_text()
    page.pass_by(30_000)
    assert tab.get_by_role("row", name=re.compile("account:1")).inner_text() == held
    page.locks.error = None
    page.site._cache._clock = lambda: 2e9
    page.pass_by()
    expect(tab.get_by_role("alert")).to_be_empty()
    expect(tab.locator("#age")).to_contain_text("as of")
    assert page.faults == []


def test_the_page_asks_less_often_while_nobody_answers(opened):
    """An open page is no load on a server that comes back, and no heap of errors."""
    page = opened(*shop())
    tab = page.tab
    tab.route("**/api/**", lambda route: route.abort())
    page.pass_by()
    expect(tab.get_by_role("alert")).to_contain_text("does not answer")
    page.asked.clear()
    for _ in range(600):
        page.pass_by(1000)
    assert 9 <= len(page.asked) <= 15  # in ten minutes; once a minute in the end
    tab.unroute("**/api/**")
    with tab.expect_response("**/api/locks?*"):
        page.pass_by(61_000)
        page.pass_by(61_000)  # if the last of the others has failed only now
    expect(tab.get_by_role("alert")).to_be_empty()


def test_an_answer_of_something_else_is_told(opened):
    """Such as the login page of a proxy in front."""
    page = opened(*shop())
    page.tab.route("**/api/**", lambda route: route.fulfill(body="<html>", status=200))
    page.pass_by()
    expect(page.tab.get_by_role("alert")).to_contain_text("Something else than the page answers")


def test_a_hidden_page_asks_nothing(opened):
    """It asks at once when it is looked at again."""
    page = opened(*shop())
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.tab.evaluate(hide, True)
    page.pass_by()
    page.asked.clear()
    page.pass_by(3_600_000)
    assert page.asked == []
    with page.tab.expect_response("**/api/locks?*"):
        page.tab.evaluate(hide, False)


def test_an_action_without_an_answer_says_that_it_may_be_done(opened):
    """It does not say that nothing was changed."""
    page = opened(*shop())
    page.show("account:1")
    page.locks.error = StoreError("redis://locks.example.com:6379/0", "no answer in time")
    page.tab.get_by_role("button", name=re.compile("^Free")).click()
    page.tab.get_by_role("button", name="Free it").click()
    expect(page.tab.get_by_role("status")).to_contain_text("It may have been done all the same")


VIEWS = ("list", "lock", "question", "why", "refused", "old")


def bring_about(page, view):
    """Go to a view of the page."""
    if view in ("lock", "question", "old"):
        page.show("account:1")
        expect(page.tab.locator("#holders li")).to_have_count(1)
    if view == "question":
        page.tab.get_by_role("button", name=re.compile("^Free")).click()
    if view == "why":
        page.tab.goto(f"{page.address}#why={'parked-1' * 40}")
        expect(page.tab.locator("#why-sentence")).to_contain_text("Nothing is known")
    if view == "refused":
        page.site._user = lambda _environ: None
        page.pass_by()
        expect(page.tab.get_by_role("alert")).to_contain_text("may not look")
    if view == "old":
        page.tab.route("**/api/**", lambda route: route.abort())
        page.pass_by()
        expect(page.tab.get_by_role("alert")).to_contain_text("old")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("view", VIEWS)
def test_everybody_can_read_each_view(opened, view, size, scheme):
    """It fits the window and breaks no rule of WCAG 2.1, levels A and AA."""
    long = lock("long " * 40 + "x" * 150, holders=[holder(task="w" * 300)])
    page = opened(*shop(), long, size=size, scheme=scheme)
    page.locks.damage("bad")
    page.site._cache.forget()
    page.pass_by()
    bring_about(page, view)
    assert not page.tab.evaluate(TOO_WIDE)
    results = Axe().run(page.tab, options=RULES)
    assert not results.violations_count, results.generate_report()

"""Ways through the site: from the front page to an answer, and through the menus."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

# Where the front page sends readers who ask this.
ANSWERS = {
    "My task runs twice, why?": "faq.html#my-task-runs-twice-why",
    "Who holds this lock?": "how-to/operate.html#who-holds-a-lock",
    "What happens when Redis is down?": "how-to/operate.html#when-the-lock-server-is-away",
    "How do I test my task?": "how-to/test-your-tasks.html",
    "Skip or queue?": "how-to/choose-a-strategy.html",
}
MENUS = {"__navigation": ".sidebar-drawer", "__toc": ".toc-drawer"}  # by the id of the switch
PAGE = "how-to/choose-a-strategy.html"


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_one_click_from_the_front_page(visit, address, question):
    """The front page asks the question, and its link shows the answer."""
    page = visit("index.html")
    page.locator("article").get_by_role("link", name=question, exact=True).click(timeout=1000)
    expect(page).to_have_url(address + ANSWERS[question])
    expect(page.locator(":target" if "#" in page.url else "h1")).to_be_in_viewport()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("switch", MENUS)
def test_the_keyboard_opens_and_closes_a_menu_of_a_phone(visit, switch, scheme):
    """A menu's switch gets the focus by Tab and shows it; a closed menu takes no focus."""
    page = visit(PAGE, "phone", scheme)
    menu = page.locator(MENUS[switch])
    icon = page.locator(f".mobile-header label[for={switch}]")
    expect(menu).to_be_hidden()
    while page.evaluate("document.activeElement.id") != switch:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "sidebar-toggle"
    expect(icon).not_to_have_css("outline-style", "none")
    page.keyboard.press("Space")
    expect(menu.get_by_role("link").first).to_be_in_viewport()
    page.keyboard.press("Space")
    expect(menu).to_be_hidden()


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_the_menu_says_where_the_reader_is(visit, size):
    """The page that is open is in the menu, in bold."""
    page = visit(PAGE, size)
    if size == "phone":
        page.locator(".mobile-header label[for=__navigation]").click()
    here = page.locator(".sidebar-tree .current-page > a")
    expect(here).to_be_in_viewport()
    expect(here).to_have_text(page.title().partition(" - ")[0])
    expect(here).to_have_css("font-weight", "700")

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


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_one_click_from_the_front_page(visit, address, question):
    """The front page asks the question, and its link shows the answer."""
    page = visit("index.html")
    page.locator("article").get_by_role("link", name=question, exact=True).click(timeout=1000)
    expect(page).to_have_url(address + ANSWERS[question])
    expect(page.locator(":target" if "#" in page.url else "h1")).to_be_in_viewport()

"""Sphinx's search, asked what readers ask."""

from urllib.parse import urlencode

import pytest

FIRST = 5  # results that a reader looks at
EXPECTED = {
    "lock_key": {"reference/options"},
    "export twice": {"faq"},
    "visibility timeout": {"how-to/long-tasks"},
    "stale lock": {"faq"},
    "stuck": {"faq"},
    "409": {"how-to/django"},
    "fakeredis": {"how-to/test-your-tasks"},
    "latest wins": {"how-to/cancel-what-runs"},
    "cancel the running": {"how-to/cancel-what-runs"},
    "throttle": {"how-to/limit-what-runs"},
    "per minute": {"how-to/limit-what-runs"},
    "tenant": {"how-to/limit-what-runs"},
    "debounce": {"how-to/send-once"},
    "preload": {"how-to/lock-in-python"},
    "gunicorn": {"how-to/lock-in-python"},
    "sentry": {"faq"},
    "one at a time": {"how-to/queue", "guide"},
    "acks_late": {"how-to/long-tasks"},
    "keyprefix": {"how-to/set-up-the-lock-server"},
    "Dragonfly": {"what-it-runs-on"},
    "quorum queue": {"what-it-runs-on"},
    "liveness probe": {"how-to/kubernetes"},
    "why": {"faq", "how-to/operate", "reference/command-line"},
}


@pytest.mark.parametrize("query", EXPECTED)
def test_the_search_finds_the_page_that_answers(visit, address, faults, query):
    """Among the first results is a page that answers the question."""
    page = visit(f"search.html?{urlencode({'q': query})}")
    page.get_by_role("heading", name="Search Results").wait_for()  # not "Searching" any more
    links = page.locator("#search-results li > a").evaluate_all("all => all.map(a => a.href)")
    names = [link.removeprefix(address).partition(".html")[0] for link in links]
    assert EXPECTED[query] & set(names[:FIRST]), f"found {names[: 2 * FIRST]}"
    assert not faults


def test_what_users_read_comes_first(visit, address):
    """Pages of contributors have the same words, and come after all pages of users."""
    page = visit(f"search.html?{urlencode({'q': 'parked'})}")
    page.get_by_role("heading", name="Search Results").wait_for()
    links = page.locator("#search-results li > a").evaluate_all("all => all.map(a => a.href)")
    inside = [link.removeprefix(address).startswith("inside/") for link in links]
    assert any(inside)
    assert inside == sorted(inside)

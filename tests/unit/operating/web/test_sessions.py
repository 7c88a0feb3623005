"""Cookies and tokens that cannot be made up, and how often one may guess a password."""

from __future__ import annotations

import pytest

from celery_dislock.operating.web import sessions
from celery_dislock.operating.web.http import Request
from celery_dislock.operating.web.sessions import Sessions, Throttle, set_cookie
from tests.unit.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def stamps():
    """What changes with each user's password."""
    return {"ann": b"1", "ann.lee@example.com": b"2", "": b"3", "é\n;=": b"4"}


@pytest.fixture
def made(clock, stamps):
    return Sessions(b"a secret of sixteen", stamps.get, seconds=60, clock=clock)


@pytest.mark.parametrize("user", ["ann", "ann.lee@example.com", "", "é\n;="])
def test_a_cookie_is_the_users_session_until_it_ends(made, clock, user):
    """A name of any characters fits in a cookie."""
    session, cookie = made.begin(user)
    assert cookie.replace(".", "").replace("-", "").replace("_", "").isalnum()
    assert made.of(cookie) == session
    assert session.user == user
    clock.advance(59)
    assert made.of(cookie) == session
    clock.advance(1)
    assert made.of(cookie) is None


def test_no_part_of_a_cookie_can_be_changed(made):
    """Not one character of it."""
    _, cookie = made.begin("ann")
    for at, char in enumerate(cookie):
        other = "0" if char != "0" else "1"
        assert made.of(cookie[:at] + other + cookie[at + 1 :]) is None
    for other in ("", "1", cookie + "0", cookie[:-1], " " + cookie, cookie + "\n", "1....", "é"):
        assert made.of(other) is None


def test_another_secret_knows_no_cookie(made, stamps):
    """Nor does one that shares its beginning."""
    _, cookie = made.begin("ann")
    assert Sessions(b"another secret of", stamps.get).of(cookie) is None
    assert Sessions(b"a secret of sixteen.", stamps.get).of(cookie) is None


def test_a_new_password_ends_the_users_sessions(made, stamps):
    """And so does taking the user out."""
    _, cookie = made.begin("ann")
    stamps["ann"] = b"changed"
    assert made.of(cookie) is None
    stamps["ann"] = b"1"
    assert made.of(cookie) is not None
    del stamps["ann"]
    assert made.of(cookie) is None


def test_a_session_can_be_ended_before_its_time(made, monkeypatch):
    """The number of those that are remembered is bounded."""
    monkeypatch.setattr(sessions, "ENDED_MOST", 2)
    ended = [made.begin("ann") for _ in range(3)]
    for session, _ in ended:
        made.end(session)
    assert [made.of(cookie) for _, cookie in ended[1:]] == [None, None]


def test_a_token_is_of_its_session_alone(made):
    """It is no cookie's MAC, either."""
    one, cookie = made.begin("ann")
    other, _ = made.begin("ann")
    assert made.is_token(one, made.token(one))
    assert not made.is_token(other, made.token(one))
    assert not made.is_token(one, cookie.rpartition(".")[2])


def test_a_cookie_is_of_the_pages_path():
    """Other applications of the host do not get it."""
    request = Request({"SCRIPT_NAME": "/ops/a;b", "HTTP_HOST": "localhost"})
    assert set_cookie(request, "x", 60) == (
        "Set-Cookie",
        "dislock_session=x; Path=/ops/a%3Bb; Max-Age=60; HttpOnly; SameSite=Strict",
    )


def test_an_address_has_five_attempts_in_five_minutes(clock):
    """The answer is the time to wait."""
    throttle = Throttle(clock)
    assert [throttle.begin("192.0.2.1") for _ in range(5)] == [0.0] * 5
    clock.advance(100)
    assert throttle.begin("192.0.2.1") == pytest.approx(200)
    assert throttle.begin("192.0.2.2") == 0
    clock.advance(200)
    assert throttle.begin("192.0.2.1") == 0


def test_a_login_that_succeeds_gives_its_attempts_back(clock):
    """Somebody who mistypes four times a day is never kept out."""
    throttle = Throttle(clock)
    for _ in range(10):
        for _ in range(4):
            assert throttle.begin("192.0.2.1") == 0
        throttle.succeeded("192.0.2.1")


def test_one_customers_ipv6_addresses_are_one(clock):
    """There are 2**64 of them; an IPv4 address in IPv6's form is that address."""
    throttle = Throttle(clock)
    for number in range(5):
        throttle.begin(f"2001:db8::{number}")
    assert throttle.begin("2001:db8::ffff%eth0") > 0
    assert throttle.begin("2001:db8:0:1::1") == 0
    for _ in range(5):
        throttle.begin("192.0.2.1")
    assert throttle.begin("::ffff:192.0.2.1") > 0


def test_many_addresses_together_have_a_bound_too(clock):
    """And the table does not grow with them."""
    throttle = Throttle(clock)
    pauses = [throttle.begin(f"198.51.{number // 250}.{number % 250}") for number in range(2000)]
    assert pauses.count(0.0) == sessions.OVERALL
    assert len(throttle) == sessions.OVERALL
    for _ in range(30):
        clock.advance(sessions.WINDOW)
        for number in range(100):
            throttle.begin(f"203.0.{clock.now % 250:.0f}.{number} {clock.now}")
    assert len(throttle) <= sessions.ADDRESSES_MOST

"""The token of a page that is served alone: who may look, and who may act."""

import pytest
from werkzeug.test import create_environ

from celery_dislock.operating.web import token
from celery_dislock.operating.web.token import Token, is_local
from tests.pages import ORIGIN, Visitor, staged

READ = "/api/locks"
PAUSE = {"name": "dislock:{export:1}", "limit": "0"}
AWAY = {"REMOTE_ADDR": "192.0.2.7"}
MARKS_OF_A_PROXY = [
    {"HTTP_X_FORWARDED_FOR": "127.0.0.1"},
    {"HTTP_X_FORWARDED_PROTO": "http"},
    {"HTTP_X_REAL_IP": "127.0.0.1"},
    {"HTTP_FORWARDED": "for=127.0.0.1"},
    {"HTTP_VIA": "1.1 proxy"},
    {"SERVER_PROTOCOL": "HTTP/1.0"},
]


class Alone:
    """A page as ``celery dislock web`` serves it, and a browser that has not been there yet."""

    def __init__(self, *, is_free=True, allow_actions=True):
        self.token = Token("ann", is_free=is_free)
        may_act = self.token.is_there if allow_actions else False
        page, self.server = staged(user=self.token.user, allow_actions=may_act)
        self.page = self.token.taken_from_address(page)
        self.visitor = Visitor(self.page)

    def take_token(self, **request):
        return self.visitor.get("/", query_string={"token": self.token.value}, **request)

    def may(self, **environ):
        """Return whether the browser may read, and whether it may act."""
        reads = self.visitor.get(READ, environ_overrides=environ).status_code
        acts = self.visitor.post(
            "/api/limit", data=PAUSE, headers={"Origin": ORIGIN}, environ_overrides=environ
        ).status_code
        assert {reads, acts} <= {200, 403}
        assert bool(self.server.names()) == (acts == 200)
        return reads == 200, acts == 200


@pytest.mark.parametrize("allow_actions", [True, False])
@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("environ", [{}, AWAY, *MARKS_OF_A_PROXY], ids=str)
def test_reading_is_open_on_this_machine_only(environ, is_free, allow_actions):
    """All others need the token, past a proxy also on this machine; actions always need it."""
    alone = Alone(is_free=is_free, allow_actions=allow_actions)
    assert alone.may(**environ) == (is_free and environ == {}, False)
    alone.take_token()
    assert alone.may(**environ) == (True, allow_actions)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"REMOTE_ADDR": "::1", "HTTP_HOST": "[::1]:8765"}, True),
        ({"REMOTE_ADDR": "127.0.0.2", "HTTP_HOST": "LOCALHOST"}, True),
        ({"REMOTE_ADDR": "::ffff:127.0.0.1"}, True),
        ({"REMOTE_ADDR": "::ffff:192.0.2.7"}, False),
        ({"REMOTE_ADDR": ""}, False),
        ({"REMOTE_ADDR": "unix:"}, False),
        ({"HTTP_HOST": "ops.example.com"}, False),
        ({"HTTP_HOST": "127.0.0.1.evil.example"}, False),
        ({"HTTP_HOST": ""}, False),
    ],
    ids=str,
)
def test_this_machine_is_known_by_its_address_and_its_name(environ, expected):
    """In IPv4 and IPv6; a name of somebody else's that leads here does not count."""
    known = create_environ(base_url=ORIGIN, environ_base={"REMOTE_ADDR": "127.0.0.1"})
    assert is_local({**known, **environ}) is expected


@pytest.mark.parametrize("mount", ["", "/ops/locks", "/a b", "//evil.example"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_token_moves_from_the_address_into_a_cookie(mount, scheme):
    """Scripts and other sites cannot use it, and the address that stays has no token."""
    alone = Alone()
    path = {"/a b": "/a%20b", "//evil.example": "/evil.example"}.get(mount, mount)
    environ = {"SCRIPT_NAME": mount, "wsgi.url_scheme": scheme}
    answer = alone.take_token(environ_overrides=environ)
    assert (answer.status_code, answer.headers["Location"]) == (302, f"{path}/")
    cookie = answer.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", f"Path={path}/"} <= set(cookie)
    assert ("Secure" in cookie) is (scheme == "https")
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "same-origin"


@pytest.mark.parametrize("given", ["", "x", "\ud800", "ä", "'\r\nSet-Cookie: a=b"])
def test_a_wrong_token_gives_nothing(given):
    """In the address or in a cookie that somebody made up; the answer says where it is."""
    alone = Alone(is_free=False)
    written = given.encode("utf-8", "surrogatepass")
    answer = alone.visitor.get("/", query_string={"token": written})
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers
    assert b"celery dislock web" in answer.data
    alone.visitor.set_cookie(alone.token._cookie, "made up", domain="127.0.0.1")
    assert alone.may() == (False, False)


def test_each_start_has_a_token_and_a_cookie_of_its_own():
    """Browsers send a cookie to all ports of a host."""
    one, other = Alone(is_free=False), Alone(is_free=False)
    assert len(one.token.value) >= 43  # 256 bits
    assert one.token.value != other.token.value
    assert one.token._cookie != other.token._cookie
    one.take_token()
    other.visitor._cookies = one.visitor._cookies
    assert other.may() == (False, False)


def test_secrets_are_compared_in_constant_time(monkeypatch):
    """What hmac.compare_digest says holds, of a token in the address and in a cookie."""
    monkeypatch.setattr(token.hmac, "compare_digest", lambda *_: True)
    alone = Alone(is_free=False)
    assert alone.may() == (True, True)
    assert alone.visitor.get("/", query_string={"token": "x"}).status_code == 302

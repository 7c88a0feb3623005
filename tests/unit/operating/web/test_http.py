"""What a request is taken for, beyond what the tests of the page show."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from celery_dislock.operating.web.http import Refused, Request, Response, number, refusal


@pytest.mark.parametrize(
    ("host", "read"),
    [
        ("localhost", ("localhost", "")),
        ("LOCALHOST:80", ("localhost", "80")),
        ("[::1]:8765", ("[::1]", "8765")),
        ("a-b_c.example", ("a-b_c.example", "")),
    ],
)
def test_a_host_has_a_name_and_a_port(host, read):
    """In small letters, IPv6 in brackets."""
    assert Request({"HTTP_HOST": host}).host == read


@pytest.mark.parametrize("host", ["", "a:b", "a/b", "a@b", "a b", "a\n", "::1", "a:80:80", "ä"])
def test_what_is_no_host_is_refused(host):
    """Nothing else is made of it."""
    with pytest.raises(Refused) as caught:
        _ = Request({"HTTP_HOST": host}).host
    assert caught.value.status == HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    ("given", "read"),
    [("a=1; b=2", "2"), ("b=2", "2"), ("ab=1", ""), ("b=1; b=2", ""), ("", ""), ("b", "")],
)
def test_a_cookie_is_found_by_its_whole_name(given, read):
    """One that is there twice was set by somebody else, perhaps, and is none."""
    assert Request({"HTTP_COOKIE": given}).cookie("b") == read


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("ops.example.com", "https://ops.example.com"),
        ("ops.example.com", "https://ops.example.com:443"),
        ("ops.example.com:443", "https://ops.example.com"),
        ("ops.example.com:8443", "https://OPS.example.com:8443"),
        ("[::1]:8765", "http://[::1]:8765"),
    ],
)
def test_a_form_of_this_host_is_accepted(host, origin):
    """Whatever the case, and with the scheme's port said or not."""
    Request({"HTTP_HOST": host, "HTTP_ORIGIN": origin}).check_origin()


def test_a_number_has_bounds():
    """It is made of digits, none is given for an empty one, and the limit is in the error."""
    assert number({"page": "7"}, "page", 1, 9) == 7
    assert number({"page": ""}, "page", 1, 9) == 1
    with pytest.raises(Refused, match="page is not a number from 0 to 9"):
        number({"page": "10"}, "page", 1, 9)


def test_a_refusal_is_json():
    """Its text is data, and its headers are those of every answer."""
    response = refusal(Refused(HTTPStatus.UNAUTHORIZED, "<b>", login=True))
    assert response.body == b'{"error": "<b>", "login": true}'
    assert dict(response.headers)["X-Content-Type-Options"] == "nosniff"


def test_an_answer_says_how_long_it_is():
    """Its body is one piece."""
    headers = []
    body = Response.json({}).send(lambda _status, given: headers.extend(given))
    assert (body, dict(headers)["Content-Length"]) == ([b"{}"], "2")


def test_an_answer_has_no_number_that_json_does_not_have():
    """A browser would refuse the whole answer for one of them."""
    assert Response.json({"a": [float("nan"), 1]}).body == b'{"a": [null, 1]}'

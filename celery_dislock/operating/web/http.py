"""Requests and answers of the page, without a framework.

What comes from outside is bounded and checked here, before anything else looks at it.  A path is
compared with the paths that there are, and never becomes the name of a file.
"""

from __future__ import annotations

import ipaddress
import re
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlsplit

from celery_dislock.words import to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

BODY_MOST = 16 * 1024  # bytes of a form
QUERY_MOST = 8 * 1024  # bytes of a query string
COOKIES_MOST = 16 * 1024  # bytes of all cookies of a request
FIELDS_MOST = 20  # of a form or a query string

FORM = "application/x-www-form-urlencoded"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # the names of this machine in a URL
PORTS = {"http": "80", "https": "443"}
PROXIED = ("HTTP_VIA", "HTTP_FORWARDED", "HTTP_X_FORWARDED", "HTTP_X_REAL_IP")  # beginnings

# The page loads its own files only, runs no inline script, and is shown in no frame.
POLICY = (
    "default-src 'none'; "
    "script-src 'self'; "
    "style-src 'self'; "
    "img-src 'self' data:; "
    "connect-src 'self'; "
    "form-action 'self'; "
    "frame-ancestors 'none'; "
    "base-uri 'none'"
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),  # "no-referrer" makes browsers send "Origin: null"
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)

_HOST = re.compile(r"(?P<name>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::(?P<port>\d{1,5}))?")


class Refused(Exception):  # noqa: N818 -- an answer
    """
    The request is not served.

    Attributes:
        status: Status of the answer.
        text: Why, for people.
        headers: More headers of the answer.
        told: More members of its JSON.
    """

    def __init__(
        self,
        status: HTTPStatus,
        text: str,
        headers: Iterable[tuple[str, str]] = (),
        **told: Any,
    ) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.headers = tuple(headers)
        self.told = told


class Request:
    """
    What a browser asks.

    Args:
        environ: The environment of WSGI.

    Attributes:
        method: "GET", or another.
        path: The path below the mount, decoded by the server.
        address: The address that asks; empty: not known.
    """

    def __init__(self, environ: WSGIEnvironment) -> None:
        self.environ = environ
        self.method: str = environ.get("REQUEST_METHOD", "")
        self.path: str = environ.get("PATH_INFO", "")
        self.address: str = environ.get("REMOTE_ADDR") or ""

    @cached_property
    def mount(self) -> str:
        """The path at which the page is mounted, encoded as in a URL; empty: at the root."""
        script_name: str = self.environ.get("SCRIPT_NAME", "")
        path = quote(script_name.encode("latin-1", "replace"), safe="/").strip("/")
        return f"/{path}" if path else ""

    @property
    def is_encrypted(self) -> bool:
        """Whether the browser asked with https, as far as the server knows."""
        return bool(self.environ.get("wsgi.url_scheme") == "https")

    @cached_property
    def host(self) -> tuple[str, str]:
        """
        The host that the browser asked for: its name, and its port or an empty string.

        Raises:
            Refused: The header is missing, or is no host.
        """
        given = _HOST.fullmatch(str(self.environ.get("HTTP_HOST", "")).lower())
        if given is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "The Host header is missing, or is not a host.")
        return given["name"], given["port"] or ""

    @cached_property
    def is_local(self) -> bool:
        """Whether it comes from this machine, by a loopback name, and past no proxy that shows.

        A proxy on this machine that adds no header is not seen.  Some ask with HTTP/1.0, which no
        browser does.
        """
        if self.host[0] not in LOOPBACK or self.environ.get("SERVER_PROTOCOL") == "HTTP/1.0":
            return False
        if any(name.startswith(PROXIED) for name in self.environ):
            return False
        try:
            address = ipaddress.ip_address(self.address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    @cached_property
    def query(self) -> Mapping[str, str]:
        """
        The parameters of the URL.

        Raises:
            Refused: They are too long, too many or not text, or one is there twice.
        """
        given = str(self.environ.get("QUERY_STRING", ""))
        if len(given) > QUERY_MOST:
            raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        return _fields(given)

    @cached_property
    def form(self) -> Mapping[str, str]:
        """
        The fields of the form that was sent.

        Raises:
            Refused: There is none, or it is too long, or it cannot be read.
        """
        kind = str(self.environ.get("CONTENT_TYPE", "")).partition(";")[0].strip().lower()
        if kind != FORM:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Send a form: {FORM}.")
        given = str(self.environ.get("CONTENT_LENGTH", ""))
        if not given:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "The Content-Length is missing.")
        if not re.fullmatch("[0-9]{1,18}", given):
            raise Refused(HTTPStatus.BAD_REQUEST, "The Content-Length is not a number.")
        length = int(given)
        if length > BODY_MOST:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The form is too long.")
        body = self.environ["wsgi.input"].read(length)
        if len(body) != length:
            raise Refused(HTTPStatus.BAD_REQUEST, "The form is cut off.")
        return _fields(body.decode("latin-1"))

    def cookie(self, name: str) -> str:
        """Return a cookie; an empty string if it is not there, or is there twice."""
        given = str(self.environ.get("HTTP_COOKIE", ""))
        if len(given) > COOKIES_MOST:
            return ""
        pairs = (part.partition("=") for part in given.split(";"))
        found = [value.strip() for key, _, value in pairs if key.strip() == name]
        return found[0] if len(found) == 1 else ""

    def check_origin(self) -> None:
        """
        Check that a page of this host sends the form.

        The scheme may be another behind a proxy that ends TLS, but a page that came without TLS
        may send nothing to one with TLS.

        Raises:
            Refused: It comes from elsewhere, or does not say where it comes from.
        """
        if self.environ.get("HTTP_SEC_FETCH_SITE", "same-origin") != "same-origin":
            raise _from_elsewhere()
        told = self.environ.get("HTTP_ORIGIN", self.environ.get("HTTP_REFERER"))
        if told is None:
            raise _from_elsewhere()
        try:
            origin = urlsplit(str(told))
            came_from = (origin.netloc.lower(), origin.scheme)
        except ValueError:
            raise _from_elsewhere() from None
        given = _HOST.fullmatch(came_from[0])
        if given is None or origin.scheme not in PORTS:
            raise _from_elsewhere()
        if self.is_encrypted and origin.scheme != "https":
            raise _from_elsewhere()
        default = PORTS[origin.scheme]
        name, port = self.host
        if (given["name"], given["port"] or default) != (name, port or default):
            raise _from_elsewhere()


class Response:
    """
    An answer.

    Args:
        body: What the browser gets.
        kind: Its Content-Type.
        status: Its status.
        headers: More headers.
    """

    def __init__(
        self,
        body: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.body = body
        self.status = status
        self.headers = [
            *HEADERS,
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            *headers,
        ]

    @classmethod
    def json(
        cls,
        told: object,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Iterable[tuple[str, str]] = (),
    ) -> Response:
        """Make an answer of JSON."""
        return cls(to_json(told).encode(), "application/json", status, headers)

    def send(self, start_response: StartResponse, *, without_body: bool = False) -> list[bytes]:
        """Answer, as WSGI has it."""
        start_response(f"{self.status.value} {self.status.phrase}", self.headers)
        return [] if without_body else [self.body]


def refusal(refused: Refused) -> Response:
    """Make the answer to a request that is refused."""
    told = {"error": refused.text, **refused.told}
    return Response.json(told, refused.status, refused.headers)


def number(fields: Mapping[str, str], name: str, default: int, most: int) -> int:
    """
    Return a parameter as a number from 0 to *most*.

    Raises:
        Refused: It is no such number.
    """
    given = fields.get(name, "")
    if not given:
        return default
    if not re.fullmatch("[0-9]{1,18}", given) or int(given) > most:
        raise Refused(HTTPStatus.BAD_REQUEST, f"{name} is not a number from 0 to {most}.")
    return int(given)


def text(fields: Mapping[str, str], name: str) -> str:
    """
    Return a field that must be there.

    Raises:
        Refused: It is not there.
    """
    try:
        return fields[name]
    except KeyError:
        raise Refused(HTTPStatus.BAD_REQUEST, f"The field {name} is missing.") from None


def _fields(given: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            given, keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MOST
        )
    except ValueError:  # UnicodeDecodeError, too
        raise Refused(HTTPStatus.BAD_REQUEST, "The fields cannot be read.") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Refused(HTTPStatus.BAD_REQUEST, "A field is there twice.")
    return fields


def _from_elsewhere() -> Refused:
    text = "This form was not sent by this page: its Origin is another, or is missing."
    return Refused(HTTPStatus.FORBIDDEN, text)

"""Who may ask a page that is served alone: those who have its token, as with Jupyter.

The token stands in the address that ``celery dislock web`` prints.  A browser that opens that
address gets the token as a cookie, and is sent on to the address without it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from typing import TYPE_CHECKING

from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

from celery_dislock.operating.web.page import HEADERS, LOOPBACK, host_of, root_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

TOKEN = 32  # random bytes
PROXIED = ("HTTP_VIA", "HTTP_FORWARDED", "HTTP_X_FORWARDED", "HTTP_X_REAL_IP")  # beginnings
THIS_MACHINE = "this machine"  # the name of those who read without the token
WRONG = (
    "This is not the token of this page, which is a new one at each start.\n"
    "Open the address that `celery dislock web` has printed.\n"
)


class Token:
    """
    Says who asks, for ``Page``.

    Args:
        name: In whose name those act who have the token.
        is_free: Whether browsers on this machine may look without it.

    Attributes:
        value: The token.
    """

    def __init__(self, name: str, *, is_free: bool) -> None:
        self.value = secrets.token_urlsafe(TOKEN)
        self._name = name
        self._is_free = is_free
        # Browsers send a cookie to all ports of a host: each server of this machine needs its own.
        self._cookie = f"dislock_{hashlib.sha256(self.value.encode()).hexdigest()[:8]}"

    def user(self, environ: WSGIEnvironment) -> str | None:
        """Return the name of who asks; None: somebody who may not look."""
        if self.is_there(environ):
            return self._name
        return THIS_MACHINE if self._is_free and is_local(environ) else None

    def is_there(self, environ: WSGIEnvironment) -> bool:
        """Tell whether a request comes with the token, in its cookie."""
        return self._is_right(Request(environ).cookies.get(self._cookie, ""))

    def taken_from_address(self, page: WSGIApplication) -> WSGIApplication:
        """Return the page in an application that turns the token of an address into a cookie."""

        def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            request = Request(environ)
            given = request.args.get("token")
            if given is None:
                return page(environ, start)
            if not self._is_right(given):
                response = Response(WRONG, 403)
            else:
                path = root_of(request)
                response = redirect(path)
                response.set_cookie(
                    self._cookie,
                    self.value,
                    path=path,
                    secure=request.is_secure,
                    httponly=True,
                    samesite="Strict",
                )
            response.headers.update(HEADERS)
            return response(environ, start)

        return application

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.value.encode())


def is_local(environ: WSGIEnvironment) -> bool:
    """Tell whether a request comes from a browser on this machine, through no proxy that shows.

    A proxy on this machine that adds no header does not show, unless it asks with HTTP/1.0, as no
    browser does.
    """
    if host_of(environ) not in LOOPBACK or environ.get("SERVER_PROTOCOL") == "HTTP/1.0":
        return False
    if any(name.startswith(PROXIED) for name in environ):
        return False
    try:
        address = ipaddress.ip_address(str(environ.get("REMOTE_ADDR", "")).partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback

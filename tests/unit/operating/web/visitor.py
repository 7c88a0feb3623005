"""A browser for WSGI applications: it keeps cookies, and sends what a test tells it to."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any
from urllib.parse import urlencode
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from tests.pages import PASSWORD

HOST = "127.0.0.1:8765"
ORIGIN = f"http://{HOST}"


class Answer:
    """What came back: its status, its headers and its body."""

    def __init__(self, status: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status = int(status.partition(" ")[0])
        self.headers = {name.lower(): value for name, value in headers}
        self.body = body

    @property
    def told(self) -> dict[str, Any]:
        return json.loads(self.body)


class Visitor:
    """
    Asks a page, as a browser on this machine does.

    Attributes:
        environ: Added to what each request has; None takes something away.
        cookies: What the page has set.
        csrf: The token of the session, once logged in.
    """

    def __init__(self, page: Any, **environ: Any) -> None:
        self.page = page
        self.environ = environ
        self.cookies: dict[str, str] = {}
        self.csrf = ""

    def get(self, path: str, query: str | dict[str, str] = "", **environ: Any) -> Answer:
        query = query if isinstance(query, str) else urlencode(query)
        return self.ask("GET", path, QUERY_STRING=query, **environ)

    def post(self, path: str, form: bytes | dict[str, str] = b"", **environ: Any) -> Answer:
        """Send a form, as a form of this page does."""
        body = form if isinstance(form, bytes) else urlencode(form).encode()
        given = {
            "HTTP_ORIGIN": ORIGIN,
            "CONTENT_TYPE": "application/x-www-form-urlencoded",
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": BytesIO(body),
        }
        return self.ask("POST", path, **{**given, **environ})

    def act(self, path: str, **form: str) -> Answer:
        """Send a form with the token of the session."""
        return self.post(path, {"csrf": self.csrf, **form})

    def log_in(self, user: str = "ann", password: str = PASSWORD) -> Answer:
        answer = self.post("/api/login", {"user": user, "password": password})
        if answer.status == 200:
            self.csrf = answer.told["csrf"]
        return answer

    def ask(self, method: str, path: str, **environ: Any) -> Answer:
        given: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "HTTP_HOST": HOST,
            "REMOTE_ADDR": "127.0.0.1",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.input": BytesIO(),
        }
        if self.cookies:
            given["HTTP_COOKIE"] = "; ".join(f"{name}={v}" for name, v in self.cookies.items())
        given.update(self.environ)
        given.update(environ)
        given = {name: value for name, value in given.items() if value is not None}
        answers: list[Any] = []
        given.setdefault("QUERY_STRING", "")
        given.setdefault("SCRIPT_NAME", "")
        app = self.page
        if _is_valid(given):  # a server lets nothing else through
            setup_testing_defaults(given)
            app = validator(app)
        body = app(given, lambda status, headers, _exc=None: answers.append((status, headers)))
        try:
            read = b"".join(body)
        finally:
            getattr(body, "close", lambda: None)()
        answer = Answer(*answers[0], read)
        cookie = answer.headers.get("set-cookie")
        if cookie:
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer


def _is_valid(environ: dict[str, Any]) -> bool:
    length = environ.get("CONTENT_LENGTH") or "0"
    path = environ["PATH_INFO"] or environ["SCRIPT_NAME"]
    return "HTTP_HOST" in environ and path.startswith("/") and length.isdigit()

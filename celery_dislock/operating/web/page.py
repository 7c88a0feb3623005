"""The page as a WSGI application: ``Page(app)`` can be mounted at any path of any framework.

It serves three static files and a little JSON that their script asks for.  Reading changes nothing.
A change needs a login, a POST from this page itself, and the token of the session.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_dislock.exceptions import (
    DamagedLockError,
    DislockError,
    LockKeyError,
    SettingsError,
    StoreError,
)
from celery_dislock.keys.templates import key_of
from celery_dislock.operating.metrics import Metrics
from celery_dislock.operating.web.backend import Backend, lock_as_json, row_as_json
from celery_dislock.operating.web.figures import LastHour
from celery_dislock.operating.web.http import (
    HEADERS,
    LOOPBACK,
    Refused,
    Request,
    Response,
    number,
    refusal,
    text,
)
from celery_dislock.operating.web.listing import ORDERS, PAGE, SHOWN
from celery_dislock.operating.web.login import LoginFile
from celery_dislock.operating.web.metrics import NEEDS, make_wsgi_app
from celery_dislock.operating.web.sessions import (
    COOKIE,
    SECRET_LEAST,
    SESSION,
    Sessions,
    Throttle,
    set_cookie,
)
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.view import ReservationState, shown_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from celery_dislock.operating.web.sessions import Session
    from celery_dislock.servers.view import Holder

STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/page.css": ("page.css", "text/css; charset=utf-8"),
    "/static/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGES_MOST = 10**6
MEASURING_MOST = 2  # requests for /metrics that are answered at a time
LIMIT_MOST = 10**6  # of leases
TOKEN_MOST = 2**63

logger = logging.getLogger("celery_dislock")


class Page:
    """
    The locks of an app in a browser; a WSGI application.

    Reading is open to browsers on this machine, if the page has loopback names only.  All others
    have to log in.  The lock server is read every few seconds at most, for all browsers together.

    *figures* returns ``{"tasks": [{"task": "shop.export", "acquired": 3, "refused": 1, "parked": 0,
    "lost": 0}], "seconds": 3600}``, or None if nobody counts.

    Args:
        app: The Celery app, or its ``Dislock``.
        login: Tells whether a password is right: called with user and password.  If it has a method
            ``stamp``, sessions of a user end when ``stamp(user)`` returns other bytes than before,
            or None.  Or the path of a login file, see
            :class:`celery_dislock.operating.web.login.LoginFile`.  None: nobody can log in.
        allow_actions: Whether those who are logged in may free, drop, pause and limit.
        show_arguments: Whether arguments of parked tasks are shown.
        read_without_login: Whether one may read without a login.  None: only on this machine, and
            only if *allowed_hosts* has no other name.
        allowed_hosts: Host names by which the page is reached, without ports; ``"*"`` is any.
            Other names are refused: a page of somebody else can give its own name this address.
            None: the loopback names.
        secret: Signs the sessions, 16 bytes or more; None: a random one, of this object.  Several
            processes that serve one page need the same.
        session_seconds: For how long a login lasts.
        figures: Returns the last hour's counts, as above; None: those of ``dislock_metrics``.
        metrics: A WSGI application for ``/metrics``, for those who may read; None: that of
            :mod:`celery_dislock.operating.web.metrics`, if its extra is installed.

    Raises:
        SettingsError: An argument cannot be used, or two of them together.
    """

    def __init__(  # noqa: PLR0913 -- each is a parameter of its own
        self,
        app: Any,
        *,
        login: Callable[[str, str], bool] | str | None = None,
        allow_actions: bool = False,
        show_arguments: bool = False,
        read_without_login: bool | None = None,
        allowed_hosts: Sequence[str] | None = None,
        secret: bytes | str | None = None,
        session_seconds: float = SESSION,
        figures: Callable[[], Mapping[str, Any] | None] | None = None,
        metrics: WSGIApplication | None = None,
    ) -> None:
        if allow_actions and login is None:
            remedy = "give a login, too: an action needs somebody who did it"
            raise SettingsError("the page", "allow_actions", allow_actions, remedy)
        if isinstance(allowed_hosts, str):
            remedy = "give a list of host names"
            raise SettingsError("the page", "allowed_hosts", allowed_hosts, remedy)
        key = secret.encode() if isinstance(secret, str) else secret
        if key is not None and len(key) < SECRET_LEAST:
            remedy = f"use {SECRET_LEAST} bytes at least"
            raise SettingsError("the page", "secret", "...", remedy)
        self._login = _checker(login)
        self._allow_actions = allow_actions
        self._show_arguments = show_arguments
        self._read_without_login = read_without_login
        self._hosts = {
            name.lower() for name in (LOOPBACK if allowed_hosts is None else allowed_hosts)
        }
        self._session_seconds = session_seconds
        self._backend = _backend(app)
        self._figures = figures or LastHour(Metrics(self._backend.runtime).counters)
        self._metrics = metrics or _own_metrics(app)
        self._sessions = Sessions(
            key or secrets.token_bytes(32),
            getattr(self._login, "stamp", lambda _user: b""),
            seconds=session_seconds,
        )
        self._throttle = Throttle()
        self._measuring = threading.BoundedSemaphore(MEASURING_MOST)
        static = files("celery_dislock.operating.web").joinpath("static")
        self._static = {
            path: (static.joinpath(name).read_bytes(), kind)
            for path, (name, kind) in STATIC.items()
        }
        self._reads: Mapping[str, Callable[[Request], Response]] = {
            "/api/session": self._session,
            "/api/locks": self._locks,
            "/api/lock": self._lock,
            "/api/figures": self._last_hour,
        }
        self._changes: Mapping[str, Callable[[Request, Session], Response]] = {
            "/api/logout": self._log_out,
            "/api/free": self._acting(self._free),
            "/api/unreserve": self._acting(self._unreserve),
            "/api/terminate": self._acting(self._terminate),
            "/api/drop": self._acting(self._drop),
            "/api/limit": self._acting(self._limit),
        }

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        request = Request(environ)
        try:
            self._check_host(request)
            if request.path == "/metrics":
                return self._measured(request, start_response)
            response = self._answer(request)
        except Refused as exc:
            response = refusal(exc)
        except LockKeyError as exc:
            response = refusal(Refused(HTTPStatus.BAD_REQUEST, str(exc)))
        except DamagedLockError as exc:  # the others can be used
            response = refusal(Refused(HTTPStatus.CONFLICT, str(exc)))
        except StoreError as exc:
            response = refusal(Refused(HTTPStatus.SERVICE_UNAVAILABLE, str(exc)))
        except SettingsError as exc:
            logger.error("The page cannot answer: %s", exc)  # noqa: TRY400 -- it says all
            told = "The page is not set up right; its log says what is wrong."
            response = refusal(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, told))
        except DislockError as exc:
            response = refusal(Refused(HTTPStatus.CONFLICT, str(exc)))
        except Exception:
            logger.exception("The page cannot answer")
            told = "Something went wrong; the page's log has more."
            response = refusal(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, told))
        return response.send(start_response, without_body=request.method == "HEAD")

    def note(self) -> None:
        """
        Note what was counted, for the last hour; blocks for a round trip, every few minutes.

        Called for each reading of the list, and by a server of the page also while nobody looks.
        """
        if isinstance(self._figures, LastHour):
            with suppress(StoreError):  # the next note has what this one lacks
                self._figures.note()

    def _answer(self, request: Request) -> Response:
        path = request.path
        if path == "":  # without a slash at the end, relative addresses lead elsewhere
            self._check_method(request, "GET", "HEAD")
            headers = [("Location", f"{request.mount}/")]
            return Response(b"", "text/plain", HTTPStatus.PERMANENT_REDIRECT, headers)
        if path in self._static:
            self._check_method(request, "GET", "HEAD")
            return Response(*self._static[path])
        if path in self._reads:
            self._check_method(request, "GET", "HEAD")
            if path != "/api/session":
                self._check_reader(request)
            return self._reads[path](request)
        if path == "/api/login":
            self._check_method(request, "POST")
            request.check_origin()
            return self._log_in(request)
        if path in self._changes:
            self._check_method(request, "POST")
            request.check_origin()
            return self._changes[path](request, self._check_session(request))
        raise Refused(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def _measured(self, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        self._check_method(request, "GET", "HEAD")
        self._check_reader(request)
        if self._metrics is None:
            raise Refused(HTTPStatus.NOT_FOUND, NEEDS)
        if not self._measuring.acquire(blocking=False):  # the others' threads are for the page
            headers = [("Retry-After", "5")]
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE, "Others ask for the metrics now.", headers
            )
        try:
            return list(self._metrics(request.environ, _protected(start_response)))
        finally:
            self._measuring.release()

    # Who may do what.

    def _check_host(self, request: Request) -> None:
        if "*" not in self._hosts and request.host[0] not in self._hosts:
            told = "The page does not answer to this host name; see allowed_hosts (--allow-host)."
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, told)

    @staticmethod
    def _check_method(request: Request, *allowed: str) -> None:
        if request.method not in allowed:
            told = f"Use {allowed[0]} here."
            headers = [("Allow", ", ".join(allowed))]
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, told, headers)

    def _user(self, request: Request) -> Session | None:
        return self._sessions.of(request.cookie(COOKIE)) if self._login is not None else None

    def _may_read(self, request: Request) -> bool:
        is_open = self._read_without_login
        if is_open is None:
            # A page with another name is served past a proxy, perhaps, which hides where a request
            # comes from.
            is_open = self._hosts.issubset(LOOPBACK) and request.is_local
        return is_open or self._user(request) is not None

    def _check_reader(self, request: Request) -> None:
        if self._may_read(request):
            return
        if self._login is None:
            told = (
                "From another machine, or past a proxy, one has to log in to read, and this page "
                "has no login; see login (--login-file) and read_without_login."
            )
            raise Refused(HTTPStatus.FORBIDDEN, told)
        raise _no_session()

    def _check_session(self, request: Request) -> Session:
        """Return the session of a form, whose token is right."""
        session = self._user(request)
        if session is None:
            raise _no_session()
        if not self._sessions.is_token(session, text(request.form, "csrf")):
            raise Refused(HTTPStatus.FORBIDDEN, "The form's token is not that of your session.")
        return session

    # Logging in and out.

    def _session(self, request: Request) -> Response:
        return Response.json(self._told_of(request, self._user(request)))

    def _told_of(self, request: Request, session: Session | None) -> dict[str, Any]:
        return {
            "user": session.user if session else None,
            "csrf": self._sessions.token(session) if session else None,
            "ends": session.ends if session else None,
            "may_read": session is not None or self._may_read(request),
            "may_act": session is not None and self._allow_actions,
            "has_login": self._login is not None,
            "has_actions": self._allow_actions,
        }

    def _log_in(self, request: Request) -> Response:
        if self._login is None:
            raise Refused(HTTPStatus.FORBIDDEN, "This page has no login.")
        user, password = text(request.form, "user"), text(request.form, "password")
        pause = self._throttle.begin(request.address)
        if pause:
            logger.warning(
                "Page: a login as %r from %s was not tried: too many have failed.",
                *(user[:64], request.address),
            )
            told = f"Too many logins have failed. Try again in {pause:.0f} s."
            headers = [("Retry-After", str(int(pause) + 1))]
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, told, headers)
        if not self._login(user, password):
            logger.warning("Page: a login as %r from %s failed.", user[:64], request.address)
            raise Refused(HTTPStatus.UNAUTHORIZED, "The name or the password is wrong.", login=True)
        self._throttle.succeeded(request.address)
        logger.info("Page: %r logged in from %s.", user, request.address)
        session, cookie = self._sessions.begin(user)
        headers = [set_cookie(request, cookie, self._session_seconds)]
        return Response.json(self._told_of(request, session), headers=headers)

    def _log_out(self, request: Request, session: Session) -> Response:
        self._sessions.end(session)
        told = {**self._told_of(request, None), "may_read": self._may_read(request)}
        return Response.json(told, headers=[set_cookie(request, "", 0)])

    # Reading.

    def _locks(self, request: Request) -> Response:
        order, shown = request.query.get("order", "key"), request.query.get("show", "all")
        if order not in ORDERS or shown not in SHOWN:
            raise Refused(HTTPStatus.BAD_REQUEST, "There is no such order or choice.")
        page = number(request.query, "page", 1, PAGES_MOST)
        reading = self._backend.listing()
        if reading.away is None:
            self.note()
        rows = reading.value.find(request.query.get("search", ""), shown, order)
        pages = max(1, -(-len(rows) // PAGE))
        page = min(max(page, 1), pages)
        return Response.json(
            {
                "locks": [row_as_json(row) for row in rows[(page - 1) * PAGE : page * PAGE]],
                "found": len(rows),
                "all": len(reading.value),
                "is_cut": reading.value.is_cut,
                "totals": reading.value.totals,
                "page": page,
                "pages": pages,
                "first": (page - 1) * PAGE,
                "age": reading.age,
                "away": str(reading.away) if reading.away else None,
                "server": self._backend.server,
            }
        )

    def _lock(self, request: Request) -> Response:
        if "key" in request.query:
            name = self._backend.name_of(request.query["key"])
        else:
            name = self._name(request.query)
        first = number(request.query, "first", 0, PAGES_MOST)
        session = self._user(request)
        reading = self._backend.lock(name, first)
        told = lock_as_json(
            reading.value,
            first,
            show_owners=session is not None and self._allow_actions,
            show_arguments=self._show_arguments,
        )
        away = str(reading.away) if reading.away else None
        return Response.json({**told, "age": reading.age, "away": away})

    def _last_hour(self, _request: Request) -> Response:
        told = self._figures()
        return Response.json(told if told is not None else {"off": True})

    def _name(self, fields: Mapping[str, str]) -> str:
        name = text(fields, "name")
        if not self._backend.is_name(name):
            raise Refused(HTTPStatus.BAD_REQUEST, "This is not the name of a lock.")
        return name

    # Actions.

    def _acting(
        self, act: Callable[[Request, Session, str], str | None]
    ) -> Callable[[Request, Session], Response]:
        return partial(self._act, act)

    def _act(
        self,
        act: Callable[[Request, Session, str], str | None],
        request: Request,
        session: Session,
    ) -> Response:
        if not self._allow_actions:
            raise Refused(HTTPStatus.FORBIDDEN, "This page is for reading only.")
        try:
            done = act(request, session, self._name(request.form))
        except SettingsError as exc:  # such as a limit that this lock server cannot keep
            raise Refused(HTTPStatus.CONFLICT, str(exc)) from exc
        finally:
            self._backend.forget()
        if done is None:
            told = "Nothing was changed: it had ended already."
            return Response.json({"done": False, "text": told})
        logger.warning("Page: %r %s; asked from %s.", session.user, done, request.address)
        return Response.json({"done": True, "text": f"{done[:1].upper()}{done[1:]}."})

    def _free(self, request: Request, _session: Session, name: str) -> str | None:
        holder = self._shown_holder(request, name)
        if holder is None or not self._backend.actions.free(name, holder.owner, holder.token):
            return None
        return f"freed lock {key_of(name)!r} of {_of(holder)}"

    def _unreserve(self, request: Request, _session: Session, name: str) -> str | None:
        task_id, mark = text(request.form, "id"), text(request.form, "mark")
        shown = ReservationState(
            task_id, "", 0, 0, mark, number(request.form, "number", 0, TOKEN_MOST)
        )
        if not self._backend.actions.end_reservation(name, shown):
            return None
        return f"ended the reservation of lock {shown_key(name)!r} for task {task_id!r}"

    def _terminate(self, request: Request, _session: Session, name: str) -> str | None:
        holder = self._shown_holder(request, name)
        if holder is None:
            return None
        if not holder.can_be_terminated:
            raise Refused(HTTPStatus.CONFLICT, "No worker runs it as a task that could be ended.")
        self._backend.actions.terminate(holder)
        return f"told the workers to end {_of(holder)}, which holds lock {key_of(name)!r}"

    def _shown_holder(self, request: Request, name: str) -> Holder | None:
        """Return the lease that the form names; None if it has ended."""
        owner = text(request.form, "owner")
        token = number(request.form, "token", 0, TOKEN_MOST)
        state = self._backend.look(name)
        same = [one for one in state.holders if (one.owner, one.token) == (owner, token)]
        return same[0] if same else None

    def _drop(self, request: Request, _session: Session, name: str) -> str | None:
        ticket = text(request.form, "ticket")
        if not self._backend.actions.drop(name, ticket):
            return None
        return (
            f"dropped the parked task of ticket {ticket!r} from the line of lock {key_of(name)!r}"
        )

    def _limit(self, request: Request, session: Session, name: str) -> str | None:
        key, actions = key_of(name), self._backend.actions
        if not text(request.form, "limit"):
            actions.limit(name, None)
            return f"took back the limit of lock {key!r}"
        limit = number(request.form, "limit", 0, LIMIT_MOST)
        why = request.form.get("why", "")
        note = f"by {session.user}{': ' if why else ''}{why}"
        actions.limit(name, limit, note=note)
        done = f"paused lock {key!r}" if limit == 0 else f"limited lock {key!r} to {limit} leases"
        return f"{done}, with the note {note!r}"


def _of(holder: Holder) -> str:
    return f"{holder.who!r} (owner {holder.owner!r}, token {holder.token})"


def _protected(start_response: StartResponse) -> StartResponse:
    """Add our headers to the answer of another application."""

    def start(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Callable[..., object]:
        return start_response(status, [*headers, *HEADERS], *exc_info)

    return start


def _no_session() -> Refused:
    return Refused(HTTPStatus.UNAUTHORIZED, "Log in first.", login=True)


def _backend(app: Any) -> Backend:
    if isinstance(app, Celery):
        return Backend(runtime_of(app), app)
    runtime = getattr(app, "runtime", None)
    if runtime is None:
        raise SettingsError("the page", "app", app, "give a Celery app, or its Dislock")
    return Backend(runtime, vars(app).get("_app"))


def _own_metrics(app: Any) -> WSGIApplication | None:
    try:
        return make_wsgi_app(app)
    except ImportError:
        return None


def _checker(
    login: Callable[[str, str], bool] | str | None,
) -> Callable[[str, str], bool] | None:
    return login if login is None or callable(login) else LoginFile(login)

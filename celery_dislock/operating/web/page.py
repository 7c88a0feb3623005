"""The page as a WSGI application: ``Page(app, user=...)`` can be mounted at any path.

It serves three static files and the JSON that their script asks for.  It has no accounts: the
application that mounts it says at each request who asks.  Reading changes nothing.  A change needs
a POST that this page itself has sent, by somebody who may change locks.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict
from importlib.resources import files
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from werkzeug.exceptions import BadRequest, Conflict, Forbidden, HTTPException, NotFound
from werkzeug.routing import Map, Rule
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

from celery_dislock.config.terms import LIMIT_MOST, Rate
from celery_dislock.exceptions import (
    DamagedLockError,
    DislockError,
    LockKeyError,
    SettingsError,
    StoreError,
)
from celery_dislock.keys.templates import check_key
from celery_dislock.operating import audit
from celery_dislock.operating.checks.troubles import troubles_of
from celery_dislock.operating.locks import AppLocks
from celery_dislock.operating.web.cache import Cache
from celery_dislock.operating.web.listing import CHOICES, ORDERS, as_json, find, listing
from celery_dislock.operating.web.metrics import NEEDS, make_wsgi_app
from celery_dislock.operating.why import why
from celery_dislock.scripts.names import lock_in
from celery_dislock.servers.view import ReservationState
from celery_dislock.words import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from celery_dislock.operating.web.cache import CachedValue
    from celery_dislock.servers.view import Holder, LockState
    from celery_dislock.tasks.answer import Answer

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # the names of this machine in a URL
BODY_MOST = 16 * 1024  # bytes of a form
FILES = {
    "/": ("index.html", "text/html"),
    "/static/page.css": ("page.css", "text/css"),
    "/static/page.js": ("page.js", "text/javascript"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
PER_PAGE = 50  # locks of a page of the list
PLACES_A_PAGE = 50  # places of a line that are shown at once
HOLDERS_LISTED = 3  # of a lock in the list; its own view has more
PAGES_MOST = 10**6
TOKEN_MOST = 2**63
ID_MOST = 1000  # characters of a task's id

# The page loads its own files only, runs no inline script, and is shown in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # "no-referrer" makes browsers send "Origin: null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

NO_HOST = "The page does not answer to this host name; see allowed_hosts (--allow-host)."
NO_USER = (
    "You may not look at this page. Log in where it is mounted, or open the address with the token "
    "that `celery dislock web` has printed."
)
READ_ONLY = "You may look at this page, and not change anything."
FROM_ELSEWHERE = "This form was not sent by this page: its Origin is another, or is missing."
TOO_LATE = "Nothing was changed: it had ended already."
WRONG = "Something went wrong; the page's log has more."

logger = logging.getLogger("celery_dislock")


class Visitor(NamedTuple):
    """
    Who asks.

    Attributes:
        name: The name, for the log.
        may_act: Whether the visitor may change locks.
    """

    name: str
    may_act: bool


class PageRequest(Request):
    """A request whose body is bounded."""

    max_content_length = max_form_memory_size = BODY_MOST


class Page:
    """
    The locks of an app in a browser; a WSGI application.

    The lock server is read every few seconds at most, for all browsers together.

    Args:
        app: The Celery app, or its ``Dislock``.
        user: Says who asks: called with the WSGI environment of each request, returns the name of
            somebody who may look at the page; None: nobody who may.
        allow_actions: Whether they may free, drop, pause and limit.  Or a function that says so:
            called as *user* is, for those who may look.
        show_arguments: Whether arguments of parked tasks are shown.
        allowed_hosts: Host names by which the page is reached, without ports; ``"*"`` is any.
            Other names are refused: a site of somebody else can give its own name this address.

    Raises:
        SettingsError: An argument cannot be used.
    """

    def __init__(
        self,
        app: Any,
        *,
        user: Callable[[WSGIEnvironment], str | None],
        allow_actions: bool | Callable[[WSGIEnvironment], bool] = False,
        show_arguments: bool = False,
        allowed_hosts: Sequence[str] = LOOPBACK,
    ) -> None:
        if isinstance(allowed_hosts, str):
            remedy = "give a list of host names"
            raise SettingsError("the page", "allowed_hosts", allowed_hosts, remedy)
        for name in allowed_hosts:
            if "/" in name or host_of({"HTTP_HOST": name}) != name.lower():
                remedy = "give the name alone, without scheme, port and path"
                raise SettingsError("the page", "allowed_hosts", name, remedy)
        self._user = user
        self._allow_actions = allow_actions
        self._show_arguments = show_arguments
        self._hosts = {name.lower() for name in allowed_hosts}
        self._locks = AppLocks(app)
        self._cache = Cache()
        self._asking = Lock()
        self._metrics = _metrics(app)
        static = files("celery_dislock.operating.web").joinpath("static")
        self._files = {
            path: (static.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }
        reads = {
            "/api/locks": self._list,
            "/api/lock": self._lock,
            "/api/why": self._why,
            "/metrics": self._measure,
        }
        acts = {
            "/api/free": self._free,
            "/api/unreserve": self._unreserve,
            "/api/terminate": self._terminate,
            "/api/drop": self._drop,
            "/api/limit": self._limit,
            "/api/rate": self._rate,
        }
        rules = [
            *(Rule(path, endpoint=path, methods=["GET"]) for path in FILES),
            *(Rule(path, endpoint=read, methods=["GET"]) for path, read in reads.items()),
            *(Rule(path, endpoint=act, methods=["POST"]) for path, act in acts.items()),
        ]
        self._routes = Map(rules, merge_slashes=False).bind("")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        request = PageRequest(environ)
        try:
            response = self._answer(request)
        except HTTPException as exc:
            response = _error(exc.description, exc.get_response(environ))
        except DislockError as exc:
            response = _error(str(exc), Response(status=_status(exc)))
        except Exception:
            #: ERROR: An error that the page does not know, or one of your `user` function. -> See
            #: the traceback.
            logger.exception("The page cannot answer")
            response = _error(WRONG, Response(status=500))
        response.headers.update(HEADERS)
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        self._check_host(request)
        if not request.environ.get("PATH_INFO"):  # relative addresses need a slash at the end
            return redirect(root_of(request), 308)
        endpoint, _ = self._routes.match(request.path, request.method)
        if endpoint in self._files:
            content, kind = self._files[endpoint]
            return Response(content, mimetype=kind)
        visitor = self._visitor(request)
        if request.method == "POST":
            return self._act(endpoint, request, visitor)
        answer: Response = endpoint(request, visitor)
        return answer

    # Who may do what.

    def _check_host(self, request: Request) -> None:
        host = host_of(request.environ)
        if not host or self._hosts.isdisjoint({host, "*"}):
            raise BadRequest(NO_HOST)

    def _visitor(self, request: Request) -> Visitor:
        name = self._user(request.environ)
        if not name:
            raise Forbidden(NO_USER)
        if not isinstance(name, str):  # True, or an anonymous user of a framework
            raise TypeError(f"user() of the page returned {name!r}: return a name, or None")
        allow = self._allow_actions
        return Visitor(name, bool(allow(request.environ) if callable(allow) else allow))

    # Reading.

    def _list(self, request: Request, visitor: Visitor) -> Response:
        order, shown = request.args.get("order", "key"), request.args.get("show", "all")
        if order not in ORDERS or shown not in CHOICES:
            raise BadRequest("There is no such order or choice.")
        kept = self._cache.get("list", lambda: listing(self._locks.site))
        found = find(kept.value.rows, request.args.get("search", ""), shown, order)
        pages = max(1, -(-len(found) // PER_PAGE))
        page = min(max(request.args.get("page", 1, int), 1), pages)
        first = (page - 1) * PER_PAGE
        locks = [
            {
                **(as_json(row.state, most=HOLDERS_LISTED) if row.state else {}),
                "key": row.key,
                "name": row.name,
                "problem": str(row.problem) if row.problem else None,
                "troubles": row.troubles,
            }
            for row in found[first : first + PER_PAGE]
        ]
        answer = {
            "locks": locks,
            "found": len(found),
            "all": len(kept.value.rows),
            "is_cut": kept.value.is_cut,
            "totals": kept.value.totals,
            "page": page,
            "pages": pages,
            "first": first,
            "server": str(self._locks.process.store.server),
        }
        return _read(answer, kept, visitor)

    def _lock(self, request: Request, visitor: Visitor) -> Response:
        key = request.args.get("key")
        if key is None:
            name = self._lock_name(request.args)
        else:
            [name] = self._locks.runtime.lock_names([check_key(key)])
        first = min(max(request.args.get("first", 0, int), 0), PAGES_MOST)
        kept = self._cache.get((name, first), lambda: self._look(name, first))
        state, told = kept.value
        answer = as_json(state, show_owners=visitor.may_act, show_arguments=self._show_arguments)
        return _read(
            {**answer, "told": told, "first": first, "places": PLACES_A_PAGE}, kept, visitor
        )

    def _look(self, name: str, first: int) -> tuple[LockState, list[str]]:
        """Look at one lock; return what is wrong with it, too, in words."""
        site = self._locks.site
        state = site.overview.lock(name, first, PLACES_A_PAGE)
        # Of a pause and a limit the page tells more by itself.
        found = (
            trouble
            for trouble in troubles_of(state, site)
            if trouble.name not in {"paused", "limited"}
        )
        told = [f"{one[:1].upper()}{one[1:]}." for one in (state.lack, state.words) if one]
        return state, told + list(filter(None, (trouble.told(state) for trouble in found)))

    def _why(self, request: Request, visitor: Visitor) -> Response:
        task_id = request.args.get("id", "")
        if not 0 < len(task_id) <= ID_MOST:
            raise BadRequest("This is no id of a task.")
        kept = self._cache.get(("why", task_id), lambda: self._ask(task_id))
        return _read(asdict(kept.value), kept, visitor)

    def _ask(self, task_id: str) -> Answer:
        with self._asking:  # a search reads the names of all keys
            locks, told = self._locks, self._show_arguments
            return why(locks.app, task_id, errors=told, runtime=locks.runtime)

    def _measure(self, request: Request, _visitor: Visitor) -> Response:
        if self._metrics is None:
            raise NotFound(NEEDS)
        return Response.from_app(self._metrics, request.environ)

    def _lock_name(self, fields: Mapping[str, str]) -> str:
        """Return a lock's name in Redis: a name that no lock of this app has is refused."""
        name, prefix = fields["name"], self._locks.runtime.settings.dislock_prefix
        if not name.startswith(f"{prefix}:{{") or lock_in(name) != name:
            raise BadRequest("This is not the name of a lock.")
        return name

    # Actions: each returns what was done, in words; None if there was nothing to do it to.

    def _act(
        self,
        act: Callable[[Mapping[str, str], str, str], str | None],
        request: Request,
        visitor: Visitor,
    ) -> Response:
        check_origin(request)
        if not visitor.may_act:
            raise Forbidden(READ_ONLY)
        try:
            done = act(request.form, self._lock_name(request.form), visitor.name)
        finally:
            self._cache.forget()
        if done is None:
            return _json({"done": False, "text": TOO_LATE})
        #: WARNING: Somebody has done on the page what the line says, in the words of the lines of
        #: commands.
        logger.warning("Page: %r %s; asked from %s.", visitor.name, done, request.remote_addr)
        return _json({"done": True, "text": f"{done[:1].upper()}{done[1:]}."})

    def _free(self, form: Mapping[str, str], name: str, _user: str) -> str | None:
        holder = self._shown_holder(form, name)
        if holder is None or not self._locks.actions.free(name, holder.owner, holder.token):
            return None
        return audit.freed(name, holder)

    def _unreserve(self, form: Mapping[str, str], name: str, _user: str) -> str | None:
        number = _number(form, "number", TOKEN_MOST)
        shown = ReservationState(form["id"], "", 0, 0, form["mark"], number)
        is_done = self._locks.actions.end_reservation(name, shown)
        return audit.unreserved(name, shown.id) if is_done else None

    def _terminate(self, form: Mapping[str, str], name: str, _user: str) -> str | None:
        holder = self._shown_holder(form, name)
        if holder is None:
            return None
        if not holder.can_be_terminated:
            raise Conflict("No worker runs it as a task that could be ended.")
        self._locks.actions.terminate(holder)
        return audit.terminated(name, holder)

    def _shown_holder(self, form: Mapping[str, str], name: str) -> Holder | None:
        """Return the lease that the form names; None if it has ended."""
        shown = form["owner"], _number(form, "token", TOKEN_MOST)
        holders = self._locks.overview.lock(name, 0, 0).holders
        return next((holder for holder in holders if (holder.owner, holder.token) == shown), None)

    def _drop(self, form: Mapping[str, str], name: str, _user: str) -> str | None:
        beside = self._lock_name({"name": form["beside"]}) if form.get("beside") else ""
        is_done = self._locks.actions.drop(name, form["ticket"], beside=beside)
        return audit.dropped(name, form["ticket"]) if is_done else None

    def _limit(self, form: Mapping[str, str], name: str, user: str) -> str | None:
        limit = _number(form, "limit", LIMIT_MOST) if form["limit"] else None
        note = "" if limit is None else audit.signed(user, form.get("why", ""))
        self._locks.actions.limit(name, limit, note=note)
        return audit.log_limit(name, limit, note)

    def _rate(self, form: Mapping[str, str], name: str, user: str) -> str | None:
        try:
            rate = Rate.of(form["rate"]) if form["rate"] else None
        except ValueError as exc:
            raise BadRequest(f"This is no rate: {exc}.") from exc
        note = "" if rate is None else audit.signed(user, form.get("why", ""))
        self._locks.actions.rate(name, rate, note=note)
        return audit.rated(name, rate, note)


def host_of(environ: WSGIEnvironment) -> str:
    """Return the host that a browser asked for, without the port; empty: it named none."""
    return re.sub(r":\d*$", "", str(environ.get("HTTP_HOST", "")).lower())


def check_origin(request: Request) -> None:
    """
    Check that a page of this host sends the form.

    The scheme may be another behind a proxy that ends TLS, but a page that came without TLS may
    send nothing to one with TLS.

    Raises:
        Forbidden: It comes from elsewhere, or does not say where it comes from.
    """
    sender = request.headers.get("Origin", request.headers.get("Referer", "")).lower()
    scheme, _, rest = sender.partition("://")
    if (
        request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
        or scheme not in (("https",) if request.is_secure else ("http", "https"))
        or rest.partition("/")[0] != request.headers["Host"].lower()
    ):
        raise Forbidden(FROM_ELSEWHERE)


def root_of(request: Request) -> str:
    """Return the path at which the page is mounted; slashes in front would name another host."""
    path = request.root_path.strip("/")
    return f"/{path}/" if path else "/"


def _number(fields: Mapping[str, str], name: str, most: int) -> int:
    """Return a field as a number from 0 to *most*."""
    given = fields[name]
    if not re.fullmatch("[0-9]{1,20}", given) or int(given) > most:
        raise BadRequest(f"{name} is not a number from 0 to {most}.")
    return int(given)


def _json(answer: Mapping[str, Any]) -> Response:
    return Response(to_json(answer), mimetype="application/json")


def _read(answer: Mapping[str, Any], kept: CachedValue[Any], visitor: Visitor) -> Response:
    away = str(kept.away) if kept.away else None
    return _json(
        {**answer, "age": kept.age, "away": away, "user": visitor.name, "may_act": visitor.may_act}
    )


def _error(text: str | None, response: Response) -> Response:
    """Say in JSON why a request is refused."""
    response.data = to_json({"error": text})
    response.mimetype = "application/json"
    return response


def _status(error: DislockError) -> int:
    if isinstance(error, LockKeyError):
        return 400
    if isinstance(error, StoreError) and not isinstance(error, DamagedLockError):
        return 503
    return 409  # the lock is damaged, or what was asked cannot be done to it


def _metrics(app: Any) -> WSGIApplication | None:
    try:
        return make_wsgi_app(app)
    except ImportError:
        return None

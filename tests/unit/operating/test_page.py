"""The page as a WSGI application: what it answers, and to whom."""

import logging
import sys
from io import BytesIO
from wsgiref.validate import validator

import pytest
from celery import Celery
from werkzeug.test import create_environ, run_wsgi_app

from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.operating import web
from celery_dislock.operating.web import Page, listing
from celery_dislock.operating.web.page import BODY_MOST
from celery_dislock.servers.overrides import RateState
from tests.pages import ORIGIN, Visitor, ann, staged
from tests.staged import RESERVED, holder, lock, place

NAME = "dislock:{export:1}"
OWNER = "id-1@celery@w1:7/ab.1"
FREE = {"name": NAME, "owner": OWNER, "token": "1"}
CHANGES = {
    "/api/free": FREE,
    "/api/terminate": FREE,
    "/api/unreserve": {"name": NAME, "id": "id-9", "mark": "5eed", "number": "7"},
    "/api/drop": {"name": NAME, "ticket": "parked-1:0:0"},
    "/api/limit": {"name": NAME, "limit": "0"},
    "/api/rate": {"name": NAME, "rate": "5/10s"},
}
READS = ("/api/locks", f"/api/lock?name={NAME}", "/api/why?id=parked-1", "/metrics")
FILES = {
    "/": "text/html; charset=utf-8",
    "/static/page.css": "text/css; charset=utf-8",
    "/static/page.js": "text/javascript; charset=utf-8",
    "/static/icon.svg": "image/svg+xml; charset=utf-8",
}
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a\r\nSet-Cookie: a=b"]
AWAY = StoreError("redis://:***@host", "no answer in time")


class Site(Visitor):
    """Somebody who asks a page, and the lock server with the locks that it shows."""

    def __init__(self, **options):
        self.page, self.server = staged(**options)
        self.page._locks.app.control.revoke = lambda *told, **how: self.ended.append((*told, how))
        self.ended = []  # what the workers were told to end
        line, reserved = [place(1), place(2)], RESERVED
        self.put(lock("export:1", holders=[holder()], waiting=2, line=line, reservation=reserved))
        super().__init__(validator(self.page))

    def put(self, *states):
        self.server.put(*states)
        self._as_made = self.server.contents()

    @property
    def is_unchanged(self):
        """Whether nothing was done to a lock since it was made up."""
        return self.server.contents() == self._as_made and self.ended == []

    def state(self, name=NAME):
        return self.server.overview.lock(name)

    def lock(self, key="export:1", **query):
        return self.get("/api/lock", query_string={"key": key, **query}).json

    def keys(self, **query):
        """The keys of the list, in a word."""
        return "".join(
            one["key"] for one in self.get("/api/locks", query_string=query).json["locks"]
        )

    def raw(self, method, path, **environ):
        """Ask with an environment that a server might not let through; return status and body."""
        given = {**create_environ("/", ORIGIN, method=method), "PATH_INFO": path, **environ}
        body, status, headers = run_wsgi_app(self.page, given)
        assert "Set-Cookie" not in headers
        return int(status[:3]), b"".join(body)


@pytest.fixture(autouse=True)
def _all_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="celery_dislock")


@pytest.fixture
def site():
    return Site()


@pytest.fixture
def reader():
    """Somebody who may only look."""
    return Site(allow_actions=False)


# What it shows.


def test_its_files_are_served_with_strict_headers(site):
    """Each has its type, loads nothing from elsewhere, and is kept nowhere."""
    for path, kind in FILES.items():
        answer = site.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        for directive in ("form-action 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
            assert directive in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"


def test_the_list_tells_who_holds_what(site):
    """Key, holder, how long, who waits, limit and reservation, and who looks."""
    site.put(lock("pay:7", limit=0, reservation=RESERVED))
    told = site.get("/api/locks").json
    export, pay = told["locks"]
    assert export["key"] == "export:1"
    assert export["holders"][0]["who"] == "shop.export[id-1] on celery@w1 (pid 7)"
    assert export["holders"][0]["held"] == 61.0
    assert export["waiting"] == 2
    assert (pay["limit"], pay["reservation"]["state"], pay["holders"]) == (0, "waiting", [])
    assert (told["found"], told["all"], told["page"], told["pages"]) == (2, 2, 1, 1)
    assert told["server"] == "redis://locks.example.com:6379/0"
    assert (told["user"], told["may_act"]) == ("ann", True)


LISTED = [
    lock("export:1"),
    lock("b", holders=[holder(2)], waiting=1),
    lock("a", holders=[holder(1, worker="celery@W2"), holder(3)]),
    lock("c", limit=0, aside=2),
    lock("d", reservation=RESERVED),
    lock("f", holders=[holder(4, task="t", renewed=25.0, remaining=5.0), holder(5, task="t")]),
    lock("gone"),
]


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        *(
            ({"search": search}, keys)
            for search, keys in (
                *(("", "abcdef"), ("shop.export", "ab"), ("SHOP id-2", "b"), ("id-9", "d")),
                *(("celery@w2", "a"), ("e", "abef"), ("nothing", "")),
                (" ".join("abcdefghij"), ""),
            )
        ),
        *(
            ({"show": show}, keys)
            for show, keys in (
                *(("held", "abf"), ("line", "b"), ("limited", "c"), ("reserved", "d")),
                *(("trouble", "cef"), ("paused", "c"), ("damaged", "e"), ("overdue", "f")),
            )
        ),
        ({"order": "key"}, "abcdef"),
        ({"order": "held"}, "fabcde"),
        ({"order": "waiting"}, "bacdef"),
        ({"order": "trouble"}, "efcabd"),
    ],
    ids=str,
)
def test_the_list_is_searched_chosen_from_and_sorted(site, query, keys):
    """All words must be there, in any case; kinds are counted; what is equal comes by key."""
    site.put(*LISTED)
    site.server.damage("e")
    assert site.keys(**query) == keys
    totals = site.get("/api/locks").json["totals"]
    assert totals.get(query.get("show"), len(keys)) == len(keys)


def test_the_list_is_paged_on_the_server_and_bounded(site, monkeypatch):
    """The browser gets fifty locks, however many there are; a page too far is the last."""
    site.put(*(lock(f"x:{number:04}", holders=[holder()]) for number in range(219)))
    pages = [site.get(f"/api/locks?page={page}").json for page in (1, 2, 5, 999)]
    assert [len(page["locks"]) for page in pages] == [50, 50, 20, 20]
    assert [page["page"] for page in pages] == [1, 2, 5, 5]
    assert pages[1]["locks"][0]["key"] == "x:0049"
    assert (site.server.scans, pages[0]["is_cut"]) == (1, False)  # for all of them
    monkeypatch.setattr(listing, "LOCKS_MOST", 150)
    site.page._cache.forget()
    told = site.get("/api/locks").json
    assert (told["all"], told["is_cut"]) == (150, True)


def test_one_lock_has_its_own_view(site):
    """By its name in Redis or by its key, with its line from any place, and its oldest leases."""
    told = site.get("/api/lock", query_string={"name": NAME}).json
    assert told["holders"][0]["renewed"] == 1.0
    assert [one["who"] for one in told["line"]] == ["shop.pay[parked-1]", "shop.pay[parked-2]"]
    assert site.lock()["name"] == NAME
    assert [one["place"] for one in site.lock(first="1")["line"]] == [2]
    assert site.lock("nothing")["exists"] is False
    many = [holder(number, token=2**53 + 1) for number in range(1, 206)]
    site.put(lock("many", holders=many))
    told = site.lock("many")
    assert (len(told["holders"]), told["held_by"]) == (200, 205)
    assert (told["holders"][0]["id"], told["holders"][0]["token"]) == ("id-205", str(2**53 + 1))


def test_costs_are_told(site):
    """Of each holder, of all of them together, and of those in line; and what the first lacks."""
    line = [place(1, cost=3, limit=5)]
    site.put(lock("k", holders=[holder(1, cost=2), holder(2)], waiting=1, line=line))
    told = site.lock("k")
    assert [lease["cost"] for lease in told["holders"]] == [1, 2]
    assert (told["held_by"], told["units"], told["line"][0]["cost"]) == (2, 3, 3)
    lack = "The first in line needs 3 of 5 units, and 2 are free: nobody passes it."
    assert told["told"][0] == lack


def test_why_a_task_does_not_run_is_answered(site):
    """As the command does; an error of a body may have arguments, and has its name alone."""
    site.page._locks.app.control.broadcast = lambda *_args, **_how: None
    told = site.get("/api/why", query_string={"id": "parked-2"}).json
    assert told["sentence"].startswith("shop.pay[parked-2] is 2nd of 2 in line for lock 'export:1'")
    assert (told["key"], told["away"], told["user"]) == ("export:1", None, "ann")
    for one, words in ((site, "ValueError"), (Site(show_arguments=True), "card 4111")):
        backend = one.page._locks.app.backend
        backend.mark_as_failure("failed", ValueError("card 4111"))
        told = one.get("/api/why", query_string={"id": "failed"}).json
        assert told["sentence"].endswith(f"{words}.")
    for wrong in ("", "x" * 1001):
        assert site.get("/api/why", query_string={"id": wrong}).status_code == 400


def test_arguments_are_shown_only_if_asked_for(site):
    """They may be somebody's card number."""
    for one, is_shown in ((site, False), (Site(show_arguments=True), True)):
        one.put(lock("pay:7", turns=[place()]))
        for key in ("export:1", "pay:7"):
            assert ("4111" in str(one.lock(key))) is is_shown


def test_an_owner_is_shown_only_to_those_who_may_act(site, reader):
    """Somebody who knows an owner can write a message that ends its lease."""
    for one in (site, reader):
        one.put(lock("pay:7", reservation=RESERVED))
        assert "ab.1" not in one.get("/api/locks").text
    assert reader.lock()["holders"][0]["owner"] is None
    assert reader.lock("pay:7")["reservation"]["mark"] is None
    assert site.lock()["holders"][0]["owner"] == OWNER
    assert site.lock("pay:7")["reservation"]["mark"] == "5eed"


def test_a_damaged_lock_is_shown_beside_the_others(site):
    """The list says what is wrong with it, and so does its own view."""
    site.server.damage("damaged")
    by_key = {one["key"]: one for one in site.get("/api/locks").json["locks"]}
    assert "WRONGTYPE" in by_key["damaged"]["problem"]
    assert by_key["export:1"]["problem"] is None
    answer = site.get("/api/lock", query_string={"key": "damaged"})
    assert answer.status_code == 409
    assert "WRONGTYPE" in answer.json["error"]


def test_the_pages_own_metrics_need_their_extra(monkeypatch):
    """Without it /metrics says what to install, and the rest of the page works."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    site = Site()
    answer = site.get("/metrics")
    assert answer.status_code == 404
    assert "celery-dislock[metrics]" in answer.json["error"]
    assert site.get("/api/locks").status_code == 200


# Where it is mounted.


def test_a_list_of_hosts_is_not_one_name():
    """It would be a list of letters."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    with pytest.raises(SettingsError, match="allowed_hosts"):
        Page(app, user=ann, allowed_hosts="ops.example.com")


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "a b", "[::2]"]
)
def test_other_host_names_are_refused(site, host):
    """A page of somebody else that points its own name here (DNS rebinding) reads nothing."""
    for path in (*FILES, *READS, "/nothing"):
        answer = site.get(path, headers={"Host": host})
        assert answer.status_code == 400
        assert "export" not in answer.text


def test_host_names_can_be_allowed():
    """By name whatever the case and the port, or all of them; without a name nobody is answered."""
    site = Site(allowed_hosts=["Ops.example.com"])
    assert site.get("/", headers={"Host": "ops.EXAMPLE.com:8443"}).status_code == 200
    assert site.get("/").status_code == 400
    site = Site(allowed_hosts=["*"])
    assert site.get("/", headers={"Host": "any.example"}).status_code == 200
    assert site.get("/", headers={"Host": ""}).status_code == 400


# Who may look, and who may act.


@pytest.mark.parametrize("name", [None, ""])
def test_somebody_without_a_name_sees_the_files_alone(name):
    """The page itself is there, and says why it is empty."""
    site = Site(user=lambda _environ: name)
    for path in FILES:
        assert site.get(path).status_code == 200
    for path in READS:
        answer = site.get(path)
        assert answer.status_code == 403
        assert "Log in" in answer.json["error"]
    for path, form in CHANGES.items():
        assert site.act(path, **form).status_code == 403
    assert site.is_unchanged


@pytest.mark.parametrize("returned", [True, object()])
def test_a_user_that_is_no_name_is_an_error(returned, caplog):
    """An anonymous user of a framework is an object, too."""
    site = Site(user=lambda _environ: returned)
    assert site.get(READS[0]).status_code == 500
    assert "return a name, or None" in caplog.text


# Actions.


def test_free_ends_exactly_the_lease_that_was_shown(site, caplog):
    """Owner and token travel in the form; answer and log say what was freed, and who did it."""
    site.put(lock("export:1", holders=[holder(), holder(2)]))
    answer = site.act("/api/free", **FREE)
    assert [one.id for one in site.state().holders] == ["id-2"]
    assert answer.json["done"] is True
    assert "shop.export[id-1] on celery@w1 (pid 7)" in answer.json["text"]
    assert "'ann' freed lock 'export:1' of 'shop.export[id-1] on celery@w1 (pid 7)'" in caplog.text
    assert f"owner '{OWNER}', token 1); asked from 127.0.0.1" in caplog.text


@pytest.mark.parametrize("path", ["/api/free", "/api/terminate", "/api/unreserve", "/api/drop"])
def test_what_has_come_since_is_left_alone(site, caplog, path):
    """A newer lease of the same owner, a newer reservation, and a task that has left the line."""
    later = RESERVED._replace(number=8)
    site.put(lock("export:1", holders=[holder(token=2)], reservation=later))
    ended = {"done": False, "text": "Nothing was changed: it had ended already."}
    assert site.act(path, **CHANGES[path]).json == ended
    assert site.is_unchanged
    assert caplog.text == ""


def test_a_reservation_ends_by_all_that_was_shown_of_it(site, caplog):
    """Id, mark and number travel in the form; the log says who did it, and to which key."""
    form = CHANGES["/api/unreserve"]
    assert site.act("/api/unreserve", **form).json["done"] is True
    assert site.state().reservation is None
    told = "'ann' ended the reservation of lock 'export:1' for task 'id-9'; asked from 127.0.0.1"
    assert told in caplog.text
    together = f"{NAME}:and:0123456789abcdef"
    site.put(lock("export:1 and others", name=together, reservation=RESERVED))
    answer = site.act("/api/unreserve", **{**form, "name": together})
    assert "'export:1 and others'" in answer.json["text"]


def test_a_holder_can_be_ended_first(site, caplog):
    """The workers are told to end exactly the execution that was shown, if it is one."""
    assert site.act("/api/terminate", **FREE).json["done"] is True
    assert site.ended == [("id-1", {"terminate": True, "signal": "TERM"})]
    assert "'ann' told the workers to end 'shop.export[id-1] on celery@w1 (pid 7)'" in caplog.text
    site.put(lock("export:1", holders=[holder(id=None, task=None, thread="main")]))
    assert site.act("/api/terminate", **FREE).status_code == 409
    assert len(site.ended) == 1


def test_parked_tasks_are_dropped_and_locks_paused_and_limited(site, caplog):
    """Each is logged with the name of who did it."""
    site.act("/api/drop", name=NAME, ticket="parked-1:0:0")
    assert [one.id for one in site.state().line] == ["parked-2"]
    assert "'ann' dropped the parked task of ticket 'parked-1:0:0'" in caplog.text
    for limit, why, note in (("0", "deploy", "by ann: deploy"), ("3", "", "by ann"), ("", "", "")):
        site.act("/api/limit", name=NAME, limit=limit, why=why)
        found = site.state()
        assert (found.limit, found.limit_note) == (int(limit) if limit else None, note)
    assert "'ann' paused lock 'export:1', with the note 'by ann: deploy'" in caplog.text
    assert "'ann' took back the limit of lock 'export:1'" in caplog.text


def test_a_rate_is_set_and_taken_back(site, caplog):
    """It is logged with the name of who did it; what it is taken back to is the code's."""
    site.act("/api/rate", **CHANGES["/api/rate"], why="429")
    rate = site.state().rate
    assert (str(rate.rate), rate.is_set, rate.note) == ("5 in 10 s", True, "by ann: 429")
    assert "'ann' limited lock 'export:1' to 5 in 10 s, with the note 'by ann: 429'" in caplog.text
    told = site.lock()["rate"]
    assert (told["words"], told["is_set"], told["note"]) == ("5 in 10 s", True, "by ann: 429")
    site.page._locks.actions.hold_back(NAME, 60.0)
    site.act("/api/rate", name=NAME, rate="")
    assert site.state().rate is None
    assert "'ann' let lock 'export:1' be taken as often as the code says" in caplog.text
    refused = site.act("/api/rate", name=NAME, rate="5")
    assert refused.json["error"].startswith("This is no rate: give ")


def test_a_limit_set_by_people_is_listed_as_such(site):
    """A limit, a rate, or that it is held back; not what the code says."""
    rate = RateState(Rate(9, 60.0), 5.0)
    site.put(
        lock("a", rate=rate, waiting=1),
        lock("b", rate=rate._replace(is_set=True)),
        lock("c", rate=RateState(None, 0.0, held_back=9.0)),
        lock("d", limit=3),
    )
    assert site.keys(show="limited") == "bcd"
    assert [site.lock(key)["rate"].get("words") for key in "abc"] == ["9 a minute"] * 2 + [None]


def test_the_locks_are_read_again_after_an_action(site):
    """Somebody who freed a lock sees what has come of it; until then all get one reading."""
    for nth, limit in ((1, None), (2, 0)):
        for _ in range(2):
            site.get("/api/locks")
            assert site.lock()["limit"] == limit
        assert site.server.scans == nth
        site.act("/api/limit", **CHANGES["/api/limit"])


def test_an_action_that_failed_says_whether_it_may_be_done(site, caplog):
    """The status tells the page's script; nothing is logged as done."""
    site.server.keeps_lines = False
    answer = site.act("/api/limit", name=NAME, limit="3")
    assert (answer.status_code, "several" in answer.json["error"]) == (409, True)
    site.server.error = AWAY
    assert site.act("/api/free", **FREE).status_code == 503
    assert caplog.text == ""


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_a_post_changes_anything(site, method):
    """A link, an image or a prefetch does nothing, whatever is in its address."""
    for path, form in CHANGES.items():
        answer = site.open(path, method=method, query_string=form, headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert site.is_unchanged


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://localhost:8765"},
        {"Origin": "http://127.0.0.1:8765.evil.example"},
        {"Origin": "http://127.0.0.1:8765@evil.example"},
        {"Origin": "http://[bad"},
        {"Origin": "ftp://127.0.0.1:8765"},
        {"Referer": "https://evil.example/127.0.0.1:8765"},
        {"Origin": "", "Referer": f"{ORIGIN}/"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "same-site"},
        {"Origin": f"http://{'a' * 10**6}"},
    ],
    ids=lambda headers: str(headers)[:80],
)
def test_a_form_of_another_page_is_refused(site, headers):
    """Although it comes from somebody who may act."""
    for path, form in CHANGES.items():
        answer = site.post(path, data=form, headers=headers)
        assert answer.status_code == 403
        assert "Origin" in answer.json["error"]
    assert site.is_unchanged


@pytest.mark.parametrize(
    ("headers", "scheme", "is_taken"),
    [
        ({"Referer": f"{ORIGIN}/#lock"}, "http", True),
        (
            {"Origin": ORIGIN.replace("http", "https"), "Sec-Fetch-Site": "same-origin"},
            "http",
            True,
        ),
        ({"Origin": ORIGIN}, "https", False),
    ],
)
def test_a_form_of_this_page_is_taken(site, headers, scheme, is_taken):
    """From a browser that sends only a Referer, and past a proxy that ends TLS."""
    environ = {"wsgi.url_scheme": scheme}
    answer = site.post("/api/free", data=FREE, headers=headers, environ_overrides=environ)
    assert (answer.status_code == 200, site.is_unchanged) == (is_taken, not is_taken)


# Hostile input.


@pytest.mark.parametrize("key", HOSTILE)
def test_a_hostile_key_is_data(site, key, caplog):
    """It comes as JSON, which no browser takes for a page, and leaves headers and log alone."""
    name = f"dislock:{{{key}}}"
    site.put(lock(key, holders=[holder(task=key)]))
    for path in ("/api/locks", "/api/lock"):
        answer = site.get(path, query_string={"name": name})
        assert answer.headers["content-type"] == "application/json"
        assert "set-cookie" not in answer.headers
    assert answer.json["key"] == key
    assert site.act("/api/free", **{**FREE, "name": name}).json["done"] is True
    assert "\nSet-Cookie" not in caplog.text


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../page.py", "/static/..%2fpage.py", "/static//page.js"),
        *("/static/page.js\x00.html", "/static/", "//evil.example", "/../../etc/passwd"),
        *("/api/locks/", "/api/free/", "/API/LOCKS", "/\r\nSet-Cookie: a=b", "/\xff\xfe", "*"),
    ],
)
def test_other_paths_lead_nowhere(site, path):
    """A path is compared, and never becomes the name of a file."""
    for method in ("GET", "HEAD", "POST"):
        status, body = site.raw(method, path, HTTP_ORIGIN=ORIGIN)
        assert status == 404
        assert b"evil" not in body


@pytest.mark.parametrize(
    "name",
    [
        *("", "dislock", "other:{export:1}", "dislock:sweep:{abc}", "dislock:lines:abc"),
        *("dislock:{export:1}:line", "dislock:{export:1}:tickets", "dislock:{export:1}x"),
        *("celery", "xdislock:{export:1}", "dislock:{export:1}\x00"),
    ],
)
def test_only_locks_of_this_app_can_be_named(site, name):
    """A form touches no other key of the server, and no part of a lock."""
    for path, form in CHANGES.items():
        assert site.act(path, **{**form, "name": name}).status_code == 400
    assert site.get("/api/lock", query_string={"name": name}).status_code == 400
    assert site.is_unchanged


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        *((path, {field: None}) for path, form in CHANGES.items() for field in form),
        *(
            ("/api/free", {"token": token})
            for token in ("", "-1", "x", "1e3", "1_0", "٣", "9" * 30, "9" * 10_000)
        ),
        ("/api/limit", {"limit": "1000000001"}),
        ("/api/limit", {"limit": "0" * 20 + "9" * 16}),
        *(("/api/rate", {"rate": one}) for one in ("5", "0/m", "5/9", "1/90d", "x" * 1000)),
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_field_that_is_missing_or_no_number_is_refused(site, path, changes):
    """Nothing is done by halves."""
    form = {
        name: value for name, value in {**CHANGES[path], **changes}.items() if value is not None
    }
    assert site.act(path, **form).status_code == 400
    assert site.is_unchanged


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        *(({"CONTENT_LENGTH": length}, 400) for length in ("", "-1", "9999", "abc")),
        ({"wsgi.input": BytesIO(b"a" * (BODY_MOST + 1)), "CONTENT_LENGTH": "16385"}, 413),
        ({"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked"}, 400),
        ({"CONTENT_TYPE": "application/json"}, 400),
    ],
    ids=lambda given: str(given)[:20],  # without the address of a BytesIO
)
def test_forms_are_limited(site, environ, status):
    """In bytes and in kind; one that is cut off or has no length is refused."""
    body = b"name=dislock%3A%7Bexport%3A1%7D&limit=0"
    given = {
        "HTTP_ORIGIN": ORIGIN,
        "CONTENT_TYPE": "application/x-www-form-urlencoded",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": BytesIO(body),
    }
    assert site.raw("POST", "/api/limit", **{**given, **environ})[0] == status
    assert site.is_unchanged
    assert site.raw("POST", "/api/limit", **{**given, "wsgi.input": BytesIO(body)})[0] == 200


PAGES = ["-1", "x", "", "9" * 5000, "1&page=2", "%ff", "\u0663"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((f"/api/locks?page={page}", 200) for page in PAGES),
        *((f"/api/lock?name={NAME}&first={page}", 200) for page in PAGES),
        *((f"/api/locks?{one}", 400) for one in ("order=key;", "order=", "show=..")),
        ("/api/locks?show=__class__", 400),
    ],
    ids=lambda given: str(given)[-30:],
)
def test_a_page_that_there_is_not_is_another(site, path, status):
    """The first page is shown, or the last; an order or choice that there is not is refused."""
    assert site.get(path).status_code == status


def test_an_unexpected_error_shows_nothing_of_itself(site, caplog):
    """It is logged with its traceback."""
    site.server.error = RuntimeError("secret detail")
    answer = site.get("/api/locks")
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert "secret detail" in caplog.text


def test_without_werkzeug_the_error_names_the_extra(monkeypatch):
    """It is raised when the page is asked for: the metrics beside it do not need Werkzeug."""
    monkeypatch.setitem(sys.modules, "celery_dislock.operating.web.page", None)
    with pytest.raises(ImportError, match=r"celery-dislock\[web\]"):
        _ = web.Page
    with pytest.raises(AttributeError, match="Pages"):
        _ = web.Pages

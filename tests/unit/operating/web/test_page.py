"""The page as a WSGI application: what it answers, and to whom."""

from __future__ import annotations

import hmac
import logging
import sys

import pytest

from celery_dislock import Dislock
from celery_dislock.exceptions import DamagedLockError, SettingsError, StoreError
from celery_dislock.operating.web import Page, login, sessions
from celery_dislock.operating.web.figures import LastHour
from celery_dislock.operating.web.http import BODY_MOST
from tests.pages import PASSWORD, RESERVED, holder, lock, place
from tests.unit.operating.web.visitor import HOST, ORIGIN, Visitor

NAME = "dislock:{export:1}"
OWNER = "id-1@celery@w1:7/ab.1"
FREE = {"name": NAME, "owner": OWNER, "token": "1"}
CHANGES = {
    "/api/free": FREE,
    "/api/terminate": FREE,
    "/api/unreserve": {"name": NAME, "id": "id-9", "mark": "5eed", "number": "7"},
    "/api/drop": {"name": NAME, "ticket": "parked-1:0:0"},
    "/api/limit": {"name": NAME, "limit": "0"},
}
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a\r\nSet-Cookie: a=b"]


@pytest.fixture
def held(overview):
    """A lock with a holder and a line of two."""
    overview.add(lock(holders=[holder()], waiting=2, line=[place(1), place(2)]))


# What it shows.


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/static/page.css", "text/css; charset=utf-8"),
        ("/static/page.js", "text/javascript; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml"),
    ],
)
def test_its_files_are_served_with_strict_headers(make, path, kind):
    """Each has its type, loads nothing from elsewhere, and is kept nowhere."""
    answer = make().get(path)
    assert answer.status == 200
    assert answer.headers["content-type"] == kind
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    for directive in ("form-action 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert directive in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"


def test_the_html_has_no_inline_script_or_style_and_names_no_other_host(make):
    """What the policy forbids is not tried, and the page works without the network."""
    html = make().get("/").body.decode()
    assert " style=" not in html
    assert " onclick=" not in html
    assert "<style" not in html
    assert html.count("<script") == 1
    assert "//" not in html.replace("<!doctype html>", "")


def test_the_list_tells_who_holds_what(make, overview):
    """Key, holder, how long, who waits, limit and reservation."""
    overview.add(
        lock(holders=[holder()], waiting=3),
        lock("pay:7", limit=0, reservation=RESERVED),
    )
    told = make().get("/api/locks").told
    export, pay = told["locks"]
    assert export["key"] == "export:1"
    assert export["holders"][0]["who"] == "shop.export[id-1] on celery@w1 (pid 7)"
    assert export["holders"][0]["held"] == 61.0
    assert export["waiting"] == 3
    assert (pay["limit"], pay["reserved"], pay["holders"]) == (0, True, [])
    assert (told["found"], told["all"], told["page"], told["pages"]) == (2, 2, 1, 1)
    assert told["server"] == "redis://fake"


def test_the_list_is_paged_on_the_server(make, overview):
    """The browser gets fifty locks, however many there are; a page too far is the last."""
    overview.add(*(lock(f"export:{number:04}", holders=[holder()]) for number in range(1020)))
    visitor = make()
    pages = [visitor.get("/api/locks", f"page={page}").told for page in (1, 2, 21, 999)]
    assert [len(page["locks"]) for page in pages] == [50, 50, 20, 20]
    assert [page["page"] for page in pages] == [1, 2, 21, 21]
    assert pages[1]["locks"][0]["key"] == "export:0050"
    assert overview.scans == 1  # for all of them


def test_one_lock_has_its_own_view(make, held, overview):
    """By its name in Redis or by its key, with its line from any place."""
    visitor = make()
    told = visitor.get("/api/lock", {"name": NAME}).told
    assert told["holders"][0]["renewed"] == 1.0
    assert [one["who"] for one in told["line"]] == ["shop.pay[parked-1]", "shop.pay[parked-2]"]
    assert visitor.get("/api/lock", {"key": "export:1"}).told["name"] == NAME
    later = visitor.get("/api/lock", {"name": NAME, "first": "1"}).told
    assert [one["id"] for one in later["line"]] == ["parked-2"]
    assert visitor.get("/api/lock", {"key": "nothing"}).told["exists"] is False


def test_arguments_are_shown_only_if_asked_for(make, held):
    """They may be somebody's card number."""
    assert b"4111" not in make().get("/api/lock", {"name": NAME}).body
    assert b"4111" in make(show_arguments=True).get("/api/lock", {"name": NAME}).body


def test_an_owner_is_shown_only_to_those_who_may_act(make, check, held, ann, overview):
    """Somebody who knows an owner can write a message that ends its lease."""
    assert b"ab.1" not in make().get("/api/lock", {"name": NAME}).body
    reader = make(login=check)
    reader.log_in()
    assert b"ab.1" not in reader.get("/api/lock", {"name": NAME}).body
    assert ann.get("/api/lock", {"name": NAME}).told["holders"][0]["owner"] == OWNER
    overview.add(lock("pay:7", reservation=RESERVED))
    told = make().get("/api/lock", {"key": "pay:7"}).told["reservation"]
    assert (told["id"], told["state"], "mark" in told) == ("id-9", "waiting", False)
    told = ann.get("/api/lock", {"key": "pay:7"}).told["reservation"]
    assert (told["mark"], told["number"]) == ("5eed", 7)
    assert b"ab.1" not in ann.get("/api/locks").body


def test_a_damaged_lock_is_shown_beside_the_others(make, held, overview):
    """The list says what is wrong with it, and so does its own view."""
    damaged = "dislock:{damaged}"
    overview.known[damaged] = DamagedLockError("redis://fake", "wrong type", damaged)
    visitor = make()
    by_key = {one["key"]: one for one in visitor.get("/api/locks").told["locks"]}
    assert "wrong type" in by_key["damaged"]["problem"]
    assert by_key["export:1"]["problem"] is None
    answer = visitor.get("/api/lock", {"name": damaged})
    assert answer.status == 409
    assert "wrong type" in answer.told["error"]


def test_a_lock_server_that_is_away_is_told(make, overview):
    """With nothing to show, the answer is an error without a password in it."""
    overview.error = StoreError("redis://:***@host", "no answer in time")
    answer = make().get("/api/locks")
    assert answer.status == 503
    assert "no answer in time" in answer.told["error"]


def test_the_last_that_was_read_is_shown_while_the_lock_server_is_away(make, held, overview):
    """It comes with its age and with the reason."""
    visitor = make()
    visitor.get("/api/locks")
    visitor.page._backend.forget()
    overview.error = StoreError("redis://fake", "no answer in time")
    told = visitor.get("/api/locks").told
    assert told["locks"][0]["key"] == "export:1"
    assert "no answer in time" in told["away"]
    assert told["age"] >= 0


def test_the_last_hour_is_told_by_whoever_counts(make):
    """Without anybody who counts, the answer says so."""
    task = {"task": "shop.export", "acquired": 3, "refused": 1, "parked": 0, "lost": 0}
    assert make().get("/api/figures").told == {"off": True}
    assert make(figures=lambda: None).get("/api/figures").told == {"off": True}
    assert make(figures=lambda: {"tasks": [task]}).get("/api/figures").told["tasks"] == [task]


def test_the_list_notes_what_was_counted(make):
    """So that the last hour is known when somebody asks; an outage is no error there."""
    readings = []
    visitor = make(figures=LastHour(lambda: readings.append(1) or {}))
    visitor.get("/api/locks")
    visitor.get("/api/locks")
    assert len(readings) == 1

    def fail():
        raise StoreError("redis://fake", "no answer in time")

    assert make(figures=LastHour(fail)).get("/api/locks").status == 200


def test_the_pages_own_metrics_need_their_extra(make, monkeypatch):
    """Without it /metrics says what to install, and the rest of the page works."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    visitor = make()
    answer = visitor.get("/metrics")
    assert answer.status == 404
    assert "celery-dislock[metrics]" in answer.told["error"]
    assert visitor.get("/api/locks").status == 200


def test_metrics_leave_the_page_its_threads(make):
    """While two are being answered, a third is told to come again; the page answers."""
    visitor = make(metrics=lambda *_answer: nested())
    answers = []

    def nested():
        if len(answers) == 0 and visitor.page._measuring.acquire(blocking=False):
            answers.append(visitor.get("/metrics"))
            answers.append(visitor.get("/api/session"))
            visitor.page._measuring.release()
        raise RuntimeError

    visitor.get("/metrics")
    assert [answer.status for answer in answers] == [503, 200]
    assert answers[0].headers["retry-after"] == "5"


def test_metrics_are_served_to_those_who_may_read(stranger):
    """/metrics is another application, behind the same door."""

    def metrics(_environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"celery_dislock_leases 1"]

    visitor = stranger(metrics=metrics)
    assert visitor.get("/metrics").status == 401
    assert visitor.post("/metrics").status == 405
    visitor.log_in()
    answer = visitor.get("/metrics")
    assert answer.body == b"celery_dislock_leases 1"
    assert answer.headers["x-content-type-options"] == "nosniff"


# Where it is mounted.


@pytest.mark.parametrize("mount", ["", "/ops/locks", "/a b", "//evil.example"])
def test_it_can_be_mounted_anywhere(make, check, mount):
    """Addresses are relative, a missing slash is added, and the cookie is of that path."""
    visitor = make(login=check)
    visitor.environ["SCRIPT_NAME"] = mount
    path = {"/a b": "/a%20b", "//evil.example": "/evil.example"}.get(mount, mount)
    if mount:
        answer = visitor.get("")
        assert (answer.status, answer.headers["location"]) == (308, f"{path}/")
    assert f"Path={path or '/'};" in visitor.log_in().headers["set-cookie"]
    assert b'src="static/page.js"' in visitor.get("/").body


def test_a_dislock_can_be_given_too(app, overview):
    """The page finds the app through it."""
    overview.add(lock(holders=[holder()]))
    assert Visitor(Page(Dislock(app))).get("/api/locks").told["found"] == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allow_actions": True}, "allow_actions"),
        ({"secret": "short"}, "secret"),
        ({"allowed_hosts": "ops.example.com"}, "allowed_hosts"),
        ({"login": "/nowhere/users"}, "login"),
    ],
)
def test_options_are_checked_when_the_page_is_made(app, options, named):
    """An error names the option, and shows no secret."""
    with pytest.raises(SettingsError, match=named) as caught:
        Page(app, **options)
    assert "short" not in str(caught.value)


def test_something_else_than_an_app_is_refused():
    """The error says what to give."""
    with pytest.raises(SettingsError, match="Celery app"):
        Page("redis://")


# Who may read.


def test_reading_is_open_on_this_machine_only(make, held):
    """Another address, or a proxy in between, gets nothing without a login."""
    visitor = make()
    assert visitor.get("/api/locks").status == 200
    for signs in (
        {"REMOTE_ADDR": "192.0.2.7"},
        {"REMOTE_ADDR": ""},
        {"REMOTE_ADDR": "::ffff:192.0.2.7"},
        {"HTTP_X_FORWARDED_FOR": "127.0.0.1"},
        {"HTTP_FORWARDED": "for=127.0.0.1"},
        {"HTTP_X_FORWARDED_PROTO": "http"},
        {"HTTP_VIA": "1.1 proxy"},
        {"SERVER_PROTOCOL": "HTTP/1.0"},
    ):
        for path in ("/api/locks", "/api/lock", "/api/figures"):
            answer = visitor.get(path, {"name": NAME}, **signs)
            assert answer.status == 403, signs
            assert b"export" not in answer.body
    for address in ("::1", "127.0.0.2", "::ffff:127.0.0.1"):
        assert visitor.get("/api/locks", REMOTE_ADDR=address).status == 200


def test_a_page_with_another_name_is_never_open_by_itself(make, held, check):
    """It is behind a proxy, which may come from this machine under a loopback name."""
    visitor = make(login=check, allowed_hosts=["localhost", "127.0.0.1", "ops.example.com"])
    assert visitor.get("/api/locks").status == 401
    visitor.log_in()
    assert visitor.get("/api/locks").status == 200


def test_reading_can_be_opened_and_closed(make, check, held):
    """read_without_login says so for everybody."""
    away = {"REMOTE_ADDR": "192.0.2.7"}
    assert make(read_without_login=True).get("/api/locks", **away).status == 200
    assert make(read_without_login=False, login=check).get("/api/locks").status == 401


def test_files_without_data_are_for_everybody(stranger):
    """The page itself has the form to log in."""
    visitor = stranger()
    assert visitor.get("/").status == 200
    told = visitor.get("/api/session").told
    assert told["may_read"] is False
    assert told["has_login"] is True
    assert told["csrf"] is None


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "a b", "[::1"]
)
def test_other_host_names_are_refused(make, held, host):
    """A page of somebody else that points its own name here (DNS rebinding) reads nothing."""
    for path in ("/", "/api/locks", "/api/session", "/static/page.js", "/nothing"):
        answer = make().get(path, HTTP_HOST=host)
        assert answer.status in (400, 421)
        assert b"export" not in answer.body
    assert make().ask("GET", "/", HTTP_HOST=None).status == 400


def test_host_names_can_be_allowed(make):
    """By name whatever the case and the port, or all of them."""
    visitor = make(allowed_hosts=["Ops.example.com"], read_without_login=True)
    assert visitor.get("/", HTTP_HOST="ops.EXAMPLE.com:8443").status == 200
    assert visitor.get("/").status == 421
    assert make(allowed_hosts=["*"]).get("/", HTTP_HOST="any.example").status == 200


# Logging in.


def test_a_login_gives_a_cookie_that_scripts_and_other_sites_cannot_use(stranger, held):
    """HttpOnly, SameSite=Strict, and Secure where the browser uses TLS."""
    visitor = stranger()
    assert visitor.get("/api/locks").status == 401
    cookie = visitor.log_in().headers["set-cookie"]
    assert "; HttpOnly" in cookie
    assert "; SameSite=Strict" in cookie
    assert "Secure" not in cookie
    assert visitor.get("/api/locks").status == 200
    secure = visitor.post(
        "/api/login",
        {"user": "ann", "password": "correct horse"},
        **{"wsgi.url_scheme": "https", "HTTP_ORIGIN": f"https://{HOST}"},
    )
    assert "; Secure" in secure.headers["set-cookie"]


def test_a_wrong_password_gives_nothing(stranger, caplog):
    """Neither does an unknown user; the log has the name on one line, and no password."""
    visitor = stranger()
    for user, password in (("ann", "wrong"), ("eve\nroot logged in", "correct horse"), ("", "")):
        answer = visitor.log_in(user, password)
        assert answer.status == 401
        assert "set-cookie" not in answer.headers
    assert "as 'ann' from 192.0.2.7 failed" in caplog.text
    assert r"'eve\nroot logged in'" in caplog.text
    assert "wrong" not in caplog.text
    assert "correct horse" not in caplog.text


def test_logins_are_rate_limited(stranger):
    """After five that failed, not even the right password is tried; other addresses go on."""
    visitor = stranger()
    for _ in range(5):
        assert visitor.log_in(password="wrong").status == 401  # noqa: S106
    answer = visitor.log_in()
    assert answer.status == 429
    assert 0 < int(answer.headers["retry-after"]) <= 301
    visitor.environ["REMOTE_ADDR"] = "192.0.2.8"
    assert visitor.log_in().status == 200


def test_a_session_ends(make, check, held, monkeypatch):
    """By its age, by logging out, and with a restart that has another secret."""
    visitor = make(login=check, read_without_login=False, session_seconds=60)
    visitor.log_in()
    cookie = dict(visitor.cookies)
    assert visitor.get("/api/locks").status == 200
    assert visitor.act("/api/logout").status == 200
    assert visitor.cookies == {sessions.COOKIE: ""}
    visitor.cookies = cookie  # somebody has kept it
    assert visitor.get("/api/locks").status == 401
    visitor.log_in()
    visitor.page._sessions._clock = lambda: sessions.time.time() + 61
    assert visitor.get("/api/locks").status == 401
    other = make(login=check, read_without_login=False)
    other.cookies = visitor.cookies
    assert other.get("/api/locks").status == 401


def test_pages_with_one_secret_know_each_others_sessions(make, check, held):
    """Several processes can serve one page."""
    options = {"login": check, "secret": "a secret of sixteen", "read_without_login": False}
    first, second = make(**options), make(**options)
    first.log_in()
    second.cookies = first.cookies
    assert second.get("/api/locks").status == 200


def test_a_page_without_a_login_has_no_sessions(make, held):
    """A cookie of another page is nothing here, and there is no way to log in."""
    visitor = make(secret="a secret of sixteen")  # noqa: S106 -- of nobody
    assert visitor.log_in().status == 403
    _, cookie = visitor.page._sessions.begin("ann")
    visitor.cookies = {sessions.COOKIE: cookie}
    assert visitor.get("/api/session").told["user"] is None


def test_a_login_file_that_is_gone_lets_nobody_in(app, overview, tmp_path, monkeypatch, caplog):
    """Not those with a session, either, until it is back; the log says what is wrong."""
    monkeypatch.setattr(login, "N", 2)
    path = tmp_path / "users"
    login.set_password(path, "ann", PASSWORD)
    visitor = Visitor(Page(app, login=str(path), read_without_login=False))
    assert visitor.log_in().status == 200
    assert visitor.get("/api/locks").status == 200
    text = path.read_bytes()
    path.unlink()
    for answer in (visitor.get("/api/locks"), visitor.log_in()):
        assert answer.status == 500
        assert b"users" not in answer.body
    assert "No such file" in caplog.text
    assert visitor.get("/").status == 200
    path.write_bytes(text)
    assert visitor.get("/api/locks").status == 200


def test_a_login_of_ones_own_can_end_sessions(make, held):
    """A stamp that changes ends those of its user."""

    class Login:
        stamps = {"ann": b"1"}  # noqa: RUF012

        def __call__(self, user, password):
            return True

        def stamp(self, user):
            return self.stamps.get(user)

    visitor = make(login=Login(), read_without_login=False)
    visitor.log_in()
    assert visitor.get("/api/locks").status == 200
    Login.stamps["ann"] = b"2"
    assert visitor.get("/api/locks").status == 401


# Actions.


def test_free_ends_exactly_the_lease_that_was_shown(ann, held, actions, caplog):
    """Owner and token travel in the form; answer and log say what was freed, and who did it."""
    answer = ann.act("/api/free", **FREE)
    assert actions.done == [("free", NAME, OWNER, 1)]
    assert answer.told["done"] is True
    assert "shop.export[id-1] on celery@w1 (pid 7)" in answer.told["text"]
    assert "'ann' freed lock 'export:1' of 'shop.export[id-1] on celery@w1 (pid 7)'" in caplog.text
    assert f"owner '{OWNER}', token 1" in caplog.text
    assert "from 127.0.0.1" in caplog.text


def test_what_has_come_since_is_not_freed(ann, overview, actions):
    """Another owner, or the same with a newer lease, keeps the lock."""
    overview.add(lock(holders=[holder(token=2)]))
    answer = ann.act("/api/free", **FREE)
    assert answer.told == {
        "done": False,
        "text": "Nothing was changed: it had ended already.",
    }
    assert actions.done == []


def test_a_lease_that_ends_in_between_is_not_freed(ann, held, actions):
    """The script has the last word."""
    actions.answer = False
    assert ann.act("/api/free", **FREE).told["done"] is False


def test_a_reservation_ends_by_all_that_was_shown_of_it(ann, actions, caplog):
    """Id, mark and number travel in the form; the log says who did it, and to which key."""
    form = CHANGES["/api/unreserve"]
    assert ann.act("/api/unreserve", **form).told["done"] is True
    assert actions.done == [("unreserve", NAME, "id-9", "5eed", 7)]
    told = "'ann' ended the reservation of lock 'export:1' for task 'id-9'; asked from 127.0.0.1"
    assert told in caplog.text
    together = f"{NAME}:and:0123456789abcdef"
    assert (
        "'export:1 and others'"
        in ann.act("/api/unreserve", **{**form, "name": together}).told["text"]
    )
    actions.answer = False
    assert ann.act("/api/unreserve", **form).told["done"] is False


def test_a_holder_can_be_ended_first(ann, overview, actions, caplog):
    """The workers are told to end exactly the execution that was shown, if it is one."""
    overview.add(lock(holders=[holder()]))
    assert ann.act("/api/terminate", **FREE).told["done"] is True
    assert actions.done == [("terminate", "id-1", OWNER, 1)]
    assert "'ann' told the workers to end 'shop.export[id-1] on celery@w1 (pid 7)'" in caplog.text
    overview.add(lock(holders=[holder(token=2)]))
    assert ann.act("/api/terminate", **FREE).told["done"] is False
    overview.add(lock(holders=[holder(id=None, task=None, thread="main")]))
    assert ann.act("/api/terminate", **FREE).status == 409
    assert len(actions.done) == 1


def test_parked_tasks_are_dropped_and_locks_paused_and_limited(ann, held, actions, caplog):
    """Each is logged with the name of who did it."""
    ann.act("/api/drop", name=NAME, ticket="parked-1:0:0")
    assert "'ann' dropped the parked task of ticket 'parked-1:0:0'" in caplog.text
    ann.act("/api/limit", name=NAME, limit="0", why="deploy")
    assert "'ann' paused lock 'export:1', with the note 'by ann: deploy'" in caplog.text
    ann.act("/api/limit", name=NAME, limit="3")
    ann.act("/api/limit", name=NAME, limit="")
    assert "'ann' took back the limit of lock 'export:1'" in caplog.text
    assert actions.done == [
        ("drop", NAME, "parked-1:0:0"),
        ("limit", NAME, 0, "by ann: deploy"),
        ("limit", NAME, 3, "by ann"),
        ("limit", NAME, None, ""),
    ]


def test_the_list_is_read_again_after_an_action(ann, held, overview):
    """Somebody who freed a lock sees what has come of it."""
    ann.get("/api/locks")
    ann.get("/api/lock", {"name": NAME})
    scans, asked = overview.scans, len(overview.asked)
    ann.act("/api/drop", name=NAME, ticket="parked-1:0:0")
    ann.get("/api/locks")
    ann.get("/api/lock", {"name": NAME})
    assert (overview.scans, len(overview.asked)) == (scans + 1, asked + 1)


def test_an_action_that_got_no_answer_says_that_it_may_be_done(ann, held, actions):
    """The status tells the page; nothing is logged as done."""
    actions.error = StoreError("redis://fake", "no answer in time")
    assert ann.act("/api/free", **FREE).status == 503
    actions.error = SettingsError("export:1", "limit", 3, "cannot be kept here")
    answer = ann.act("/api/limit", name=NAME, limit="3")
    assert answer.status == 409
    assert "cannot be kept here" in answer.told["error"]


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_a_post_changes_anything(ann, held, actions, path, method):
    """A link, an image or a prefetch does nothing, whatever is in its address."""
    query = "&".join(f"{name}={value}" for name, value in CHANGES[path].items())
    answer = ann.ask(method, path, QUERY_STRING=f"{query}&csrf={ann.csrf}", HTTP_ORIGIN=ORIGIN)
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    assert actions.done == []


@pytest.mark.parametrize(
    "signs",
    [
        {"HTTP_ORIGIN": "https://evil.example"},
        {"HTTP_ORIGIN": "null"},
        {"HTTP_ORIGIN": ""},
        {"HTTP_ORIGIN": None},
        {"HTTP_ORIGIN": "http://127.0.0.1:9999"},
        {"HTTP_ORIGIN": "http://127.0.0.1"},
        {"HTTP_ORIGIN": "http://localhost:8765"},
        {"HTTP_ORIGIN": "http://127.0.0.1:8765.evil.example"},
        {"HTTP_ORIGIN": "http://[bad"},
        {"HTTP_ORIGIN": "ftp://127.0.0.1:8765"},
        {"HTTP_ORIGIN": None, "HTTP_REFERER": "https://evil.example/127.0.0.1:8765"},
        {"HTTP_SEC_FETCH_SITE": "cross-site"},
        {"HTTP_SEC_FETCH_SITE": "same-site"},
        {"wsgi.url_scheme": "https"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [*CHANGES, "/api/login", "/api/logout"])
def test_a_form_of_another_page_is_refused(ann, held, actions, signs, path):
    """Even with the cookie and the token."""
    form = {**CHANGES.get(path, {}), "csrf": ann.csrf, "user": "ann", "password": "correct horse"}
    answer = ann.post(path, form, **signs)
    assert answer.status == 403
    assert "Origin" in answer.told["error"]
    assert actions.done == []


def test_a_browser_that_sends_only_a_referer_can_act(ann, held):
    """It names the same host."""
    form = {**FREE, "csrf": ann.csrf}
    answer = ann.post("/api/free", form, HTTP_ORIGIN=None, HTTP_REFERER=f"{ORIGIN}/#lock")
    assert answer.told["done"] is True


def test_the_scheme_may_be_another_behind_a_proxy(make, check):
    """The proxy ends TLS and keeps the host; the cookie is for TLS all the same."""
    visitor = make(login=check, allowed_hosts=["ops.example.com"])
    visitor.environ |= {"HTTP_HOST": "ops.example.com", "HTTP_ORIGIN": "https://ops.example.com"}
    answer = visitor.post(
        "/api/login",
        {"user": "ann", "password": "correct horse"},
        HTTP_ORIGIN="https://ops.example.com",
    )
    assert answer.status == 200
    assert "; Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("token", [None, "", "0" * 64, "ä", "\ud800"])
@pytest.mark.parametrize("path", CHANGES)
def test_a_form_without_the_token_is_refused(ann, held, actions, path, token):
    """So is one with another token, of any characters."""
    form = dict(CHANGES[path])
    if token is not None:
        form["csrf"] = token.encode("utf-8", "replace").decode()
    assert ann.post(path, form).status in (400, 403)
    assert actions.done == []


def test_the_token_of_another_session_is_refused(ann, held, actions):
    """A token is bound to its session, also of the same user."""
    first = ann.csrf
    ann.log_in()
    assert ann.csrf != first
    assert ann.post("/api/free", {**FREE, "csrf": first}).status == 403
    assert actions.done == []


@pytest.mark.parametrize("path", CHANGES)
def test_nobody_acts_without_a_login(make, check, held, actions, path):
    """Not on this machine, not with a token that was kept, not with a cookie of one's own."""
    visitor = make(login=check, allow_actions=True)
    visitor.log_in()
    kept = dict(visitor.cookies)
    good = kept[sessions.COOKIE]
    for cookie in (None, "", "1.YW5u.9999999999." + "0" * 32 + "." + "0" * 64, good[:-1] + "x"):
        visitor.cookies = {} if cookie is None else {sessions.COOKIE: cookie}
        assert visitor.act(path, **CHANGES[path]).status == 401
    twice = f"{sessions.COOKIE}={good}; {sessions.COOKIE}=x"
    form = {**CHANGES[path], "csrf": visitor.csrf}
    assert visitor.post(path, form, HTTP_COOKIE=twice).status == 401
    assert actions.done == []


@pytest.mark.parametrize("path", CHANGES)
def test_a_page_for_reading_does_nothing(make, check, held, actions, path):
    """Whoever is logged in."""
    visitor = make(login=check)
    visitor.log_in()
    assert visitor.get("/api/session").told["may_act"] is False
    assert visitor.act(path, **CHANGES[path]).status == 403
    assert actions.done == []


def test_secrets_are_compared_in_constant_time(make, check, held, monkeypatch):
    """Cookies and tokens go through hmac.compare_digest, also where a prefix is right."""
    compared = []

    def compare(one, other):
        compared.append((one, other))
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    visitor = make(login=check, allow_actions=True)
    visitor.log_in()
    visitor.act("/api/free", **FREE)
    macs = [pair for pair in compared if len(pair[0]) == 64]
    assert len(macs) == 2  # the cookie's, and the token's


# Hostile input.


@pytest.mark.parametrize("key", HOSTILE)
def test_a_hostile_key_is_data(make, overview, ann, actions, key, caplog):
    """It comes as JSON, which no browser takes for a page, and leaves headers and log alone."""
    name = f"dislock:{{{key}}}"
    overview.add(lock(key, holders=[holder(who=key, task=key)]))
    for answer in (make().get("/api/locks"), make().get("/api/lock", {"name": name})):
        assert answer.headers["content-type"] == "application/json"
        assert "set-cookie" not in answer.headers
    assert answer.told["key"] == key
    ann.act("/api/free", name=name, owner=OWNER, token="1")  # noqa: S106
    assert actions.done[0][1] == name
    assert "\nSet-Cookie" not in caplog.text


@pytest.mark.parametrize(
    "path",
    [
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static//page.js",
        "/static/page.js\x00.html",
        "/static/",
        "//evil.example",
        "/../../etc/passwd",
        "/api/locks/",
        "/api/free/",
        "/API/LOCKS",
        "/\r\nSet-Cookie: a=b",
        "/\xff\xfe",
        "api/locks",
        "*",
    ],
)
def test_other_paths_lead_nowhere(make, held, path):
    """A path is compared, and never becomes the name of a file."""
    visitor = make()
    for method in ("GET", "HEAD", "POST"):
        answer = visitor.ask(method, path, HTTP_ORIGIN=ORIGIN)
        assert answer.status == 404
        assert "set-cookie" not in answer.headers
        assert b"evil" not in answer.body


@pytest.mark.parametrize(
    "name",
    [
        "",
        "dislock",
        "other:{export:1}",
        "dislock:sweep:{abc}",
        "dislock:lines:abc",
        "dislock:{export:1}:line",
        "dislock:{export:1}:tickets",
        "dislock:{export:1}x",
        "celery",
        "xdislock:{export:1}",
        "dislock:{export:1}\x00",
    ],
)
def test_only_locks_of_this_app_can_be_named(ann, actions, name):
    """A form touches no other key of the server, and no part of a lock."""
    for path, form in CHANGES.items():
        assert ann.act(path, **{**form, "name": name}).status == 400
    assert ann.get("/api/lock", {"name": name}).status == 400
    assert actions.done == []


@pytest.mark.parametrize("length", ["-1", "+5", "1e3", "0x10", " 5", "5, 5", "٣", "9" * 30, "abc"])
def test_a_content_length_that_is_no_number_is_refused(ann, actions, length):
    """Nothing is read."""
    assert ann.post("/api/free", FREE, CONTENT_LENGTH=length).status in (400, 413)
    assert actions.done == []


def test_forms_are_limited(ann, actions):
    """In bytes, in fields, in kind; one that is cut off or has no length is refused."""
    many = "&".join(f"a{number}=" for number in range(100)).encode()
    assert ann.post("/api/free", b"a" * (BODY_MOST + 1)).status == 413
    assert ann.post("/api/free", FREE, CONTENT_LENGTH=str(10**15)).status == 413
    assert ann.post("/api/free", many).status == 400
    assert ann.post("/api/free", b"name=a&name=b").status == 400
    assert ann.post("/api/free", b"name=%ff").status == 400
    assert ann.post("/api/free", b"name=\xff").status in (400, 403)
    assert ann.post("/api/free", FREE, CONTENT_LENGTH="").status == 411
    chunked = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"}
    assert ann.post("/api/free", FREE, **chunked).status == 411
    assert ann.post("/api/free", FREE, CONTENT_LENGTH="9999").status == 400
    assert ann.post("/api/free", FREE, CONTENT_TYPE="application/json").status == 415
    assert ann.post("/api/free", FREE, CONTENT_TYPE="text/plain").status == 415
    assert actions.done == []


@pytest.mark.parametrize(
    "query",
    [
        "page=-1",
        "page=x",
        "page=" + "9" * 30,
        "order=key;",
        "show=..",
        "a=%ff",
        "a=1&a=2",
        "&".join(f"a{number}=" for number in range(100)),
        "search=" + "a" * 9000,
    ],
    ids=lambda query: query[:20],
)
def test_parameters_are_checked(make, held, query):
    """What cannot be meant is refused; nothing fails."""
    assert make().get("/api/locks", query).status in (400, 414)


@pytest.mark.parametrize("search", [*HOSTILE, "*", "[0-9]", "\\", "%00", "(" * 100, "é" * 100])
def test_a_search_is_plain_text(make, held, search):
    """It is no pattern of any kind."""
    assert make().get("/api/locks", {"search": search}).told["found"] == 0


def test_huge_headers_do_no_harm(make, held):
    """A server refuses them first; the page ignores what it does not need."""
    huge = "a" * 10**6
    visitor = make()
    assert visitor.get("/api/session", HTTP_COOKIE=f"{sessions.COOKIE}={huge}").status == 200
    assert visitor.get("/api/session", HTTP_COOKIE=";" * 10**6).status == 200
    assert visitor.get("/", HTTP_HOST=huge).status == 400
    assert visitor.post("/api/login", {}, HTTP_ORIGIN=f"http://{huge}").status == 403


@pytest.mark.parametrize("header", ["HTTP_HOST", "HTTP_COOKIE", "HTTP_ORIGIN", "QUERY_STRING"])
def test_line_breaks_in_headers_are_not_repeated(stranger, header):
    """No header of an answer, and no line of its body, comes from the request."""
    answer = stranger().post("/api/login", {}, **{header: "127.0.0.1:8765\r\nSet-Cookie: a=b"})
    assert answer.status in (400, 403)
    assert "set-cookie" not in answer.headers
    assert b"Set-Cookie" not in answer.body


def test_an_unexpected_error_shows_nothing_of_itself(make, held, overview, caplog):
    """It is logged with its traceback."""
    overview.error = RuntimeError("secret detail")
    answer = make().get("/api/locks")
    assert answer.status == 500
    assert b"secret detail" not in answer.body
    assert "secret detail" in caplog.text


def test_head_is_answered_without_a_body(make, held):
    """As HTTP has it."""
    answer = make().ask("HEAD", "/api/locks")
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) > 0


@pytest.fixture(autouse=True)
def _loud(caplog):
    caplog.set_level(logging.INFO, logger="celery_dislock")

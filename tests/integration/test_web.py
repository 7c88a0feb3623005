"""The page with a real lock server: mounted in frameworks, and with very many locks."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
import warnings

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.operating.web import Page
from celery_dislock.operating.web.shared import FRESH
from celery_dislock.parking.process import runtime_of
from tests.holding import name_of
from tests.integration.servers import MASTER_NAME, RedisCluster, Watched
from tests.pages import PASSWORD, is_ann, serving
from tests.redis_server import RedisServer
from tests.unit.operating.web.visitor import HOST, ORIGIN, Visitor

MOUNT = "/ops/locks"
MANY = 10_000
HOLDER = json.dumps({"task": "shop.export", "id": "id-1", "worker": "celery@w1", "pid": 7})


@pytest.fixture
def app(redis_url):
    """An app that has never made a Dislock."""
    app = Celery("shop", broker=redis_url, set_as_current=False)
    yield app
    runtime_of(app).close()


@pytest.fixture
def held(redis_url):
    """Somebody holds export:7."""
    with Dislock.from_url(redis_url) as dislock, dislock.lock("export:7"):
        yield


@pytest.fixture
def page(app):
    return Page(app, login=is_ann, allow_actions=True)


def in_django(page):
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler

    if not settings.configured:
        settings.configure(ROOT_URLCONF="tests.integration.test_web", ALLOWED_HOSTS=["*"])
    import django

    django.setup()
    handler = WSGIHandler()

    def application(environ, start_response):  # as in docs/how-to/web-page.md
        below = environ["PATH_INFO"].removeprefix(MOUNT)
        if below == environ["PATH_INFO"] or below[:1] not in ("", "/"):
            return handler(environ, start_response)
        environ["SCRIPT_NAME"] += MOUNT
        environ["PATH_INFO"] = below
        return page(environ, start_response)

    return application


urlpatterns: list[object] = []  # of the Django site


def in_flask(page):
    from flask import Flask
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    flask = Flask("shop")
    flask.add_url_rule("/", view_func=lambda: "the shop")
    flask.wsgi_app = DispatcherMiddleware(flask.wsgi_app, {MOUNT: page})
    return flask


FRAMEWORKS = {"django": in_django, "flask": in_flask, "alone": lambda page: page}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_is_mounted_in_a_wsgi_framework(framework, page, held):
    """Its addresses, its cookie and its answers are right below the mount."""
    mount = "" if framework == "alone" else MOUNT
    with serving(FRAMEWORKS[framework](page)) as address:
        _check_mounted(address.rstrip("/") + mount, mount)


def test_it_is_mounted_in_starlette(page, held):
    """The same below an ASGI application, through its WSGI middleware."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    with warnings.catch_warnings():  # it names a2wsgi as its successor, which is used alike
        warnings.simplefilter("ignore")
        from starlette.middleware.wsgi import WSGIMiddleware
        from starlette.testclient import TestClient

        app = Starlette(routes=[Mount(MOUNT, app=WSGIMiddleware(page))])
        client = TestClient(app, base_url=ORIGIN, client=("127.0.0.1", 50000))
    assert client.get(f"{MOUNT}/").text.startswith("<!doctype html>")
    told = client.get(f"{MOUNT}/api/locks").json()
    assert [one["key"] for one in told["locks"]] == ["export:7"]
    form = {"user": "ann", "password": PASSWORD}
    answer = client.post(f"{MOUNT}/api/login", data=form, headers={"Origin": ORIGIN})
    assert f"Path={MOUNT};" in answer.headers["set-cookie"]
    assert client.get(f"{MOUNT}/api/session").json()["user"] == "ann"


class Following(urllib.request.HTTPRedirectHandler):
    """Follows what browsers follow; Python 3.10 knows no 308."""

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return super().redirect_request(req, fp, min(code, 307), msg, headers, newurl)


def _check_mounted(address, mount):
    def get(path):
        with urllib.request.build_opener(Following).open(address + path) as answer:
            return answer.url, answer.read()

    url, html = get("" if mount else "/")
    assert url == f"{address}/"  # also without the slash
    assert html.startswith(b"<!doctype html>")
    assert b"setInterval" in get("/static/page.js")[1]
    told = json.loads(get("/api/locks")[1])
    assert [one["key"] for one in told["locks"]] == ["export:7"]
    origin = address.removesuffix(mount)
    request = urllib.request.Request(  # noqa: S310 -- ours
        f"{address}/api/login",
        data=f"user=ann&password={PASSWORD.replace(' ', '+')}".encode(),
        headers={"Origin": origin},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310 -- ours
        assert f"Path={mount or '/'};" in answer.headers["Set-Cookie"]


@pytest.fixture
def many(app, redis_client):
    """Ten thousand locks that are held."""
    store = runtime_of(app).process.store
    for number in range(MANY):
        store.acquire([name_of(f"export:{number:05}")], f"o@w:7/{number}", 3600.0, HOLDER)
    redis_client.config_resetstat()


def test_ten_thousand_locks_are_read_in_pages_and_once_for_all(page, many, redis_client):
    """No command looks at more than a few hundred keys, and a hundred browsers cost as one."""
    visitor = Visitor(page)
    for number in range(100):
        told = visitor.get("/api/locks", f"page={number + 1}").told
        assert told["all"] == MANY
    if told["age"] < FRESH:  # else it was read again: this machine is slow
        stats = redis_client.info("commandstats")
        assert stats["cmdstat_scan"]["calls"] <= MANY * 2 / 500
        assert stats["cmdstat_evalsha"]["calls"] <= MANY + 100
    assert "cmdstat_keys" not in redis_client.info("commandstats")


def test_one_reads_while_the_others_are_answered(page, held):
    """Many browsers at once, from many threads, get the same list."""
    answers = []

    def ask():
        answers.append(Visitor(page).get("/api/locks").told["found"])

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 20


def test_a_pause_on_the_page_is_a_pause_for_everybody(page, held, redis_url):
    """And it is taken back there."""
    ann = Visitor(page)
    ann.log_in()
    name = name_of("export:8")
    assert ann.act("/api/limit", name=name, limit="0", why="deploy").told["done"] is True
    with Dislock.from_url(redis_url) as dislock:
        assert "by ann: deploy" in str(dislock.lock("export:8").try_acquire())
        told = ann.get("/api/lock", {"key": "export:8"}).told
        assert (told["limit"], told["limit_note"]) == (0, "by ann: deploy")
        assert ann.act("/api/limit", name=name, limit="").told["done"] is True
        with dislock.lock("export:8"):
            assert ann.get("/api/lock", {"key": "export:8"}).told["limit"] is None


def test_a_lock_server_that_comes_back_is_asked_again(own_redis_server):
    """Until then the list that was read last is shown."""
    own_redis_server.start()
    app = Celery("shop", broker=own_redis_server.url, set_as_current=False)
    page = Page(app)
    visitor = Visitor(page)
    with Dislock.from_url(own_redis_server.url) as dislock:
        assert dislock.lock("export:7").acquire()
        assert visitor.get("/api/locks").told["away"] is None
        own_redis_server.kill()
        clock = page._backend._listing._clock
        page._backend.forget()
        told = visitor.get("/api/locks").told
        assert told["away"]
        assert told["locks"][0]["key"] == "export:7"
        own_redis_server.restart()
        page._backend._listing._clock = lambda: clock() + 60
        assert visitor.get("/api/locks").told["away"] is None
    runtime_of(app).close()


@pytest.fixture(params=["sentinel", "cluster", "quorum"])
def kind(request, redis_program, tmp_path):
    """The URL of another kind of lock server."""
    with contextlib.ExitStack() as stack:
        if request.param == "quorum":
            folders = [tmp_path / str(number) for number in range(3)]
            yield [stack.enter_context(RedisServer(folder)).url for folder in folders]
        else:
            is_cluster = request.param == "cluster"
            made = RedisCluster(tmp_path, node_timeout=60_000) if is_cluster else Watched(tmp_path)
            yield stack.enter_context(made).url


def test_it_shows_the_locks_of_every_kind_of_server(kind):
    """One list, wherever in it a lock is kept; a pause holds there as well."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dislock_url = kind
    if str(kind).startswith("sentinel"):
        app.conf.dislock_transport_options = {"master_name": MASTER_NAME}
    with contextlib.ExitStack() as stack:
        dislock = stack.enter_context(Dislock(app))
        keys = [f"export:{number}" for number in range(5)]
        for key in keys:
            stack.enter_context(dislock.lock(key))
        ann = Visitor(Page(dislock, login=is_ann, allow_actions=True))
        ann.log_in()
        assert [one["key"] for one in ann.get("/api/locks").told["locks"]] == keys
        told = ann.get("/api/lock", {"key": "export:3"}).told
        assert told["holders"][0]["thread"] == "MainThread"
        assert ann.act("/api/limit", name=name_of("export:9"), limit="0").told["done"] is True
        assert not dislock.lock("export:9").try_acquire()


def test_the_last_hour_and_the_metrics_are_those_that_were_counted(page, redis_url):
    """By processes with dislock_metrics; without them, the page says that nobody counts."""
    visitor = Visitor(page)
    assert visitor.get("/api/figures").told == {"off": True}
    with Dislock.from_url(redis_url, metrics=True) as dislock, dislock.lock("export:7"):
        pass
    (told,) = visitor.get("/api/figures").told["tasks"]
    assert (told["task"], told["acquired"], told["lost"]) == ("", 1, 0)
    answer = visitor.get("/metrics")
    assert b"celery_dislock_acquisitions_total{" in answer.body
    assert b"celery_dislock_server_up 1.0" in answer.body
    assert b"export:7" not in answer.body


def test_an_empty_server_has_an_empty_list(page, redis_url):
    """Nothing is wrong with that."""
    told = Visitor(page).get("/api/locks").told
    assert (told["locks"], told["found"], told["pages"], told["away"]) == ([], 0, 1, None)
    assert told["server"].startswith("redis://")


def test_a_password_is_never_shown(redis_url):
    """Neither with a server that answers nor with one that is away."""
    secret = "sec%2Fret%40word"  # noqa: S105 -- of nobody
    app = Celery("shop", broker=f"redis://:{secret}@127.0.0.1:1/0", set_as_current=False)
    answer = Visitor(Page(app)).get("/api/locks", HTTP_HOST=HOST)
    assert answer.status == 503
    for form in (b"sec%2Fret", b"sec/ret", b"word"):
        assert form not in answer.body

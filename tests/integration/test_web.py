"""The page with a real lock server: mounted in frameworks, and with very many locks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from celery import Celery
from werkzeug.wrappers import Response

from celery_dislock import Dislock
from celery_dislock.locks.runtime import Process
from celery_dislock.operating.locks import AppLocks, rows
from celery_dislock.operating.web import Page
from celery_dislock.parking.process import runtime_of
from tests.holding import name_of
from tests.pages import Visitor, ann

MOUNT = "/ops/locks"
HOLDER = json.dumps({"task": "shop.export", "id": "id-1", "worker": "celery@w1", "pid": 7})


@pytest.fixture
def app(redis_url, monkeypatch):
    """An app that has never made a Dislock."""
    stores, new_store = [], Process.new_store

    def kept(process, most=None):
        stores.append(new_store(process, most))
        return stores[-1]

    monkeypatch.setattr(Process, "new_store", kept)
    app = Celery("shop", broker=redis_url, set_as_current=False)
    yield app
    runtime_of(app).close()
    for store in stores:  # a page keeps its own for as long as the process lives
        store.close()


@pytest.fixture
def held(redis_url):
    """Somebody holds export:7."""
    with Dislock.from_url(redis_url) as dislock, dislock.lock("export:7"):
        yield


@pytest.fixture
def page(app):
    return Page(app, user=ann, allow_actions=True)


def in_django(page, stack):
    """Show the page in a view, which hands on who is logged in."""
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse
    from django.test import override_settings
    from django.urls import re_path
    from django.views.decorators.csrf import csrf_exempt

    @csrf_exempt
    def locks(request, path=""):
        environ = {**request.environ, "SCRIPT_NAME": MOUNT, "PATH_INFO": path}
        answer = Response.from_app(page, environ | {"shop.user": request.COOKIES.get("who")})
        return HttpResponse(answer.data, status=answer.status_code, headers=dict(answer.headers))

    import django

    if not settings.configured:
        settings.configure(TIME_ZONE="UTC")  # as in schedulers.py
    django.setup()
    stack.enter_context(
        override_settings(
            ROOT_URLCONF=__name__,
            ALLOWED_HOSTS=["*"],
            MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
        )
    )
    urlpatterns[:] = [re_path(rf"^{MOUNT[1:]}(?P<path>/.*)?$", locks)]
    return WSGIHandler()


urlpatterns: list[object] = []  # of the Django site


def in_flask(page, _stack):
    """Mount the page beside an application, which knows who a request comes from."""
    from flask import Flask, request
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    flask = Flask("shop")

    def beside(environ, start_response):
        with flask.request_context(environ):
            environ["shop.user"] = request.cookies.get("who")
        return page(environ, start_response)

    flask.wsgi_app = DispatcherMiddleware(flask.wsgi_app, {MOUNT: beside})
    return flask


def in_starlette(page, _stack):
    """Mount the page in an ASGI application, and this in a WSGI server, for the test's client."""
    a2wsgi = pytest.importorskip("a2wsgi")
    from starlette.applications import Starlette
    from starlette.routing import Mount

    def told(environ, start_response):
        headers = dict(environ["asgi.scope"]["headers"])
        environ["shop.user"] = headers.get(b"cookie", b"").decode().removeprefix("who=") or None
        return page(environ, start_response)

    routes = [Mount(MOUNT, app=a2wsgi.WSGIMiddleware(told))]
    return a2wsgi.ASGIMiddleware(Starlette(routes=routes))


@pytest.fixture
def stack():
    """What a framework needs for as long as the test runs."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("mounted", [in_django, in_flask, in_starlette])
def test_it_is_mounted_in_a_framework(mounted, app, held, stack):
    """Its addresses are right below the mount, and the framework says at each request who asks."""
    admins = {"ann"}
    page = Page(
        app,
        user=lambda environ: environ["shop.user"],
        allow_actions=lambda environ: environ["shop.user"] in admins,
    )
    visitor = Visitor(mounted(page, stack))
    assert visitor.get(MOUNT).location.endswith(f"{MOUNT}/")
    assert visitor.get(f"{MOUNT}/").text.startswith("<!doctype html>")
    assert "setInterval" in visitor.get(f"{MOUNT}/static/page.js").text
    assert visitor.get(f"{MOUNT}/api/locks").status_code == 403
    assert visitor.get("/elsewhere").status_code == 404
    visitor.set_cookie("who", "ann", domain="127.0.0.1")
    told = visitor.get(f"{MOUNT}/api/locks").json
    assert [one["key"] for one in told["locks"]] == ["export:7"]
    form = {"name": name_of("export:7"), "limit": "3"}
    assert visitor.act(f"{MOUNT}/api/limit", **form).json["done"] is True
    assert visitor.post(f"{MOUNT}/api/limit", data=form).status_code == 403  # without an Origin
    admins.clear()
    assert visitor.act(f"{MOUNT}/api/limit", **form).status_code == 403


def test_many_readers_at_once_read_what_is_theirs(app, held):
    """Each of many threads that list the locks at once gets the replies to what it has asked."""
    locks = AppLocks(app)
    with ThreadPoolExecutor() as threads:
        listed = threads.map(lambda _: list(rows(locks.overview)), range(20))
        assert {(row.key, len(row.holders)) for (row,) in listed} == {("export:7", 1)}

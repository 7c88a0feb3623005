"""The page with a real lock server, mounted in a framework."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.locks.runtime import Process
from celery_dislock.operating.locks import AppLocks, rows
from celery_dislock.operating.web import Page
from celery_dislock.parking.process import runtime_of
from tests.holding import name_of
from tests.pages import Visitor

MOUNT = "/ops/locks"


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


def in_flask(page):
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


def test_it_is_mounted_in_a_framework(app, held):
    """Its addresses are right below the mount, and the framework says at each request who asks.

    How Django and Starlette have it is run as the page of the documentation says.
    """
    admins = {"ann"}
    page = Page(
        app,
        user=lambda environ: environ["shop.user"],
        allow_actions=lambda environ: environ["shop.user"] in admins,
    )
    visitor = Visitor(in_flask(page))
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

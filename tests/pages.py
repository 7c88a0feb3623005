"""The page with locks that a test makes up, asked by a test or served to a browser."""

from contextlib import contextmanager
from threading import Thread

import pytest
from waitress import wasyncore
from waitress.server import create_server
from werkzeug.test import Client

from celery_dislock.operating.web import Page
from celery_dislock.parking.process import runtime_of
from tests.staged import Staged, make_app, reach

LIMIT = 10.0  # seconds for a server to end
ORIGIN = "http://127.0.0.1:8765"


def ann(_environ):
    """Say that ann asks."""
    return "ann"


def staged(**options):
    """Make a page, and the lock server that it reads."""
    server = Staged()
    with pytest.MonkeyPatch.context() as patch:
        reach(patch, server)
        app = make_app(server)
    # Whoever reads the locks makes a store, later.
    runtime_of(app).process.new_store = lambda _most=None: server.store()
    return Page(app, **{"user": ann, "allow_actions": True, **options}), server


class Visitor(Client):
    """A browser on this machine: it keeps cookies, and sends forms as the page does."""

    def open(self, *args, **kwargs):
        kwargs.setdefault("buffered", True)  # a browser reads to the end
        kwargs.setdefault("base_url", ORIGIN)
        kwargs.setdefault("environ_base", {"REMOTE_ADDR": "127.0.0.1"})
        return super().open(*args, **kwargs)

    def act(self, path, **form):
        return self.post(path, data=form, headers={"Origin": ORIGIN})


@contextmanager
def serving(application):
    """Serve an application on a free port of this machine; gives its address."""
    server = create_server(application, host="127.0.0.1", port=0, threads=4, ident=None)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}/"
    finally:
        # In the server's own thread: its loop ends when nothing is left in its map.
        server.trigger.pull_trigger(lambda: wasyncore.close_all(server._map))
        thread.join(LIMIT)
        server.task_dispatcher.shutdown()

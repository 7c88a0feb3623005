"""The kit in the suites of users: runs in an empty folder, beside everybody's plugins."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.programs import missing, run

# No warning is let through, but one of Celery's own result backend.
STRICT = ["-W", "error", "-W", "ignore:Call to deprecated setex:DeprecationWarning"]

USERS_APP = """
from celery import Celery
from celery_dislock import Dislock, SingletonTask
app = Celery("shop", broker="redis://localhost:1/0", backend="redis://localhost:1/1")
dislock = Dislock(app)
@app.task(base=SingletonTask, lock_key="export:<n>")
def export(n):
    return n
"""


NOT_STRICT = ["-pno:asyncio", "-pno:celery", "-pno:docker_tools"]  # plugins that warn
COMMAND = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", *STRICT]
ALONE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def beside(*plugins):
    """Return the options of a run with no other plugins, which is sooner there."""
    return [f"-p{plugin}" for plugin in ("pytest_dislock", *plugins)]


@pytest.fixture
def users(tmp_path):
    """Run pytest in a folder, as a user does: beside these plugins, or all that are installed."""

    def run_pytest(test, *arguments, plugins=None):
        (tmp_path / "shop.py").write_text(USERS_APP)
        (tmp_path / "test_it.py").write_text("import pytest\nfrom shop import *\n" + test)
        more = NOT_STRICT if plugins is None else beside(*plugins)
        env = os.environ if plugins is None else ALONE
        return run(*COMMAND, *more, *arguments, cwd=tmp_path, env=env, status=None)

    return run_pytest


def need(plugin):
    """Skip a test where a plugin is not installed; in CI it is."""
    if find_spec(plugin) is None:
        missing(plugin)


@pytest.mark.extra
def test_a_leak_fails_its_test(users):
    """At its teardown, with the lock, the holder and the test; the next test begins empty."""
    outcome = users(
        "def test_leak(dislock_server):\n"
        "    dislock_server.use(app)\n"
        "    dislock.lock('k').acquire()\n"
        "def test_failure(dislock_server):\n"
        "    dislock_server.use(app)\n"
        "    for n in range(12):\n"
        "        dislock.lock(f'k:{n}').acquire()\n"
        "    assert not 'what failed'\n"
        "def test_next(dislock_server):\n"
        "    dislock_server.use(app)\n"
        "    dislock_server.assert_free('k')\n"
        "    with dislock.lock('k'), dislock.lock('k:7'):\n"
        "        pass\n"
    )
    assert "1 failed, 2 passed, 2 errors" in outcome.stdout, outcome.stdout
    told = "test_it.py::test_leak has ended, and lock 'k' is still held by thread MainThread on "
    assert told in outcome.stdout
    assert "assert not 'what failed'" in outcome.stdout
    assert "; 2 more are" in outcome.stdout


def test_an_unused_plugin_imports_nothing(tmp_path):
    """Neither the package nor fakeredis, in a suite that does not ask for it."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test():\n"
        "    assert 'pytest_dislock' in sys.modules\n"
        "    assert not {'celery', 'celery_dislock', 'fakeredis'} & set(sys.modules)\n"
    )
    run(*COMMAND, *beside(), tmp_path, env=ALONE)


CELERYS = """
from celery.contrib.pytest import celery_worker  # pytest-celery has one for containers

@pytest.fixture
def celery_app(dislock_server):
    dislock_server.use(app)
    return app

@pytest.fixture
def celery_worker_parameters():
    return {"perform_ping_check": False}

@pytest.mark.parametrize("n", [1, 2])
def test(dislock_server, celery_worker, n):
    assert export.delay(n).get(timeout=30) == n
    with dislock_server.hold("export:7"):
        result = export.delay(7)
        result.get(timeout=30, propagate=False)
    dislock_server.assert_skipped(result)
"""


@pytest.mark.parametrize("more", [[], ["pytest_celery.plugin", "pytest_docker_tools.plugin"]])
def test_celerys_own_fixture_uses_the_server(users, more):
    """A worker in a thread of the test's process, one after the other; Docker is not asked for."""
    if more:
        need("pytest_celery")
    outcome = users(CELERYS, plugins=["celery.contrib.pytest", *more])
    assert "2 passed" in outcome.stdout, outcome.stdout


@pytest.mark.extra
@pytest.mark.parametrize("is_real", [False, True])
def test_each_process_of_xdist_has_a_server_or_databases_of_its_own(users, redis_url, is_real):
    """A test in one process finds nothing of a test in another."""
    need("xdist")
    outcome = users(
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test(dislock_server, n):\n"
        "    with dislock_server.hold('k'):\n"
        "        dislock_server.advance(0.3)\n",
        *([f"--dislock-redis={redis_url}"] if is_real else []),
        "-n2",
        plugins=["xdist.plugin"],
    )
    assert "4 passed" in outcome.stdout, outcome.stdout


COROUTINES = """
import asyncio, pytest_asyncio

@pytest_asyncio.fixture
async def own(dislock_server):
    async with Dislock.from_url(dislock_server.url) as dislock:
        yield dislock

@pytest.mark.asyncio
async def test_a_fixture(dislock_server, own):
    with dislock_server.hold("k"):
        assert not await own.async_lock("k").try_acquire()
    async with own.async_lock("k"):
        dislock_server.assert_locked("k")

@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("again", [False, True])
async def test_a_loop_of_the_session(dislock_server, again):
    dislock_server.use(app)
    async with dislock.async_lock("k") as lease:
        dislock_server.advance(100)
        assert lease.held

@pytest.mark.asyncio
async def test_blocking_calls(dislock_server):
    dislock_server.use(app)
    with dislock_server.hold("export:7"):
        dislock_server.assert_skipped(export.apply((7,)))
        dislock_server.assert_skipped(await asyncio.to_thread(export.apply, (7,)))

@pytest.mark.asyncio
@pytest.mark.xfail(raises=ValueError, strict=True)
async def test_a_failure(dislock_server):
    dislock_server.use(app)
    async with dislock.async_lock("k"):
        raise ValueError
"""


@pytest.mark.extra
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_coroutines_of_pytest_asyncio(users, mode):
    """With a loop for each test, and with one for all, after which the app's clients are others."""
    need("pytest_asyncio")
    outcome = users(COROUTINES, f"--asyncio-mode={mode}", plugins=["pytest_asyncio.plugin"])
    assert "4 passed, 1 xfailed" in outcome.stdout, outcome.stdout


DJANGO = {
    "settings.py": """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["orders"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
CELERY_BROKER_URL = "redis://localhost:1/0"
CELERY_RESULT_BACKEND = "redis://localhost:1/1"
""",
    "orders/__init__.py": "",
    "orders/models.py": """
from django.db import models

class Order(models.Model):
    paid = models.BooleanField(default=False)
""",
    "orders/tasks.py": """
from celery import Celery
from celery_dislock import Dislock, SingletonTask
from orders.models import Order

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
Dislock(app)

@app.task(base=SingletonTask, lock_key="pay:<n>", lock_unique_until="end")
def pay(n):
    Order.objects.filter(pk=n).update(paid=True)
""",
    "test_it.py": """
import pytest
from django.db import transaction
from django.test import override_settings
from orders.tasks import Order, app, pay

@pytest.fixture
def server(dislock_server):
    dislock_server.use(app)
    return dislock_server

@pytest.mark.django_db(transaction=True)
def test_a_transaction(server):
    with transaction.atomic():
        order = Order.objects.create()
        transaction.on_commit(lambda: pay.delay(order.pk))
        assert server.run_parked() == 0
    assert server.run_parked() == 1
    order.refresh_from_db()
    assert order.paid

@pytest.mark.django_db
def test_callbacks(server, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        transaction.on_commit(lambda: pay.delay(1))
    server.assert_duplicate(pay.delay(1))
    assert server.run_parked() == 1

@pytest.mark.parametrize("again", [False, True])
def test_settings(server, db, settings, again):
    with server.hold("pay:1"):
        server.assert_skipped(pay.apply((1,)))
        settings.CELERY_DISLOCK_ENABLED = False
        assert pay.apply((1,)).successful()
        with override_settings(CELERY_DISLOCK_ENABLED=True, CELERY_TASK_ALWAYS_EAGER=True):
            server.assert_skipped(pay.delay(1))
""",
}


@pytest.mark.extra
def test_pytest_django(tmp_path):
    """What is sent on commit, and what a test overrides; Django's settings have a prefix."""
    need("pytest_django")
    for name, text in DJANGO.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    ran = run(*COMMAND, *beside("pytest_django.plugin"), "--ds=settings", cwd=tmp_path, env=ALONE)
    assert "4 passed" in ran.stdout, ran.stdout


@pytest.mark.extra
def test_the_same_test_runs_on_a_real_server(users, redis_url):
    """With --dislock-redis; time takes its time there, and what would take too long is skipped."""
    outcome = users(
        "def test(dislock_server):\n"
        "    dislock_server.use(app)\n"
        "    dislock_server.crash_holder('export:7', timeout=1)\n"
        "    dislock_server.assert_skipped(export.apply((7,)))\n"
        "    dislock_server.advance(1.1)\n"
        "    assert export.apply((7,)).get() == 7\n"
        "    with pytest.raises(Exception), dislock.lock('k') as lease:\n"
        "        dislock_server.lose('k')\n"
        "        assert not lease.held\n"
        "    assert Dislock.from_url(dislock_server.url).runtime.process.store.ping()['executable']"
        ".endswith('-server')\n"
        "def test_long(dislock_server):\n"
        "    dislock_server.use(app)\n"
        "    @app.task(base=SingletonTask)\n"
        "    def hour():\n"
        "        dislock_server.advance(3600)\n"
        "    hour.apply()\n"
        "def test_outage(dislock_server):\n"
        "    with dislock_server.outage():\n"
        "        pass\n",
        f"--dislock-redis={redis_url}",
        plugins=[],
    )
    assert "1 passed, 2 skipped" in outcome.stdout, outcome.stdout

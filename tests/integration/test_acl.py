"""A lock server whose user may do what the documentation says, and nothing more."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dislock import Dislock, scripts
from celery_dislock.exceptions import ForbiddenError
from celery_dislock.operating.cli import dislock as command
from celery_dislock.operating.web.metrics import make_wsgi_app
from celery_dislock.scripts import Script
from celery_dislock.servers.store import Store
from celery_dislock.servers.trial import CALLED, check_scripts
from tests.holding import name_of, wait_for
from tests.integration.acl import RULES, start_worker
from tests.integration.test_async_servers import used
from tests.integration.test_doctor import Report
from tests.leaks import SECRET
from tests.pace import LEASE
from tests.redis_server import RedisServer
from tests.scraping import scrape

LOCK = name_of("acl")
WITHIN = 10.0  # seconds

COMMANDS = re.findall(r"\+([\w|]+)", RULES)
SENT = {"eval", "evalsha", "blpop", "scan", "info"}  # beside what scripts run
TEXTS = {file.name: file.read_text("utf-8") for file in Path(scripts.__file__).parent.glob("*.lua")}
CALLS = {name.lower() for text in TEXTS.values() for name in CALLED.findall(text)}
SCRIPTS = {name: one for name, one in vars(scripts).items() if isinstance(one, Script)}


@pytest.fixture(scope="module")
def server(redis_program, tmp_path_factory):
    """A server with the user of the documentation, and one beside that may do all."""
    folder = tmp_path_factory.mktemp("acl")
    users = folder / "users.acl"
    users.write_text(
        f"user default on nopass ~* &* +@all\nuser dislock {RULES.replace('PASSWORD', SECRET)}\n"
    )
    with RedisServer(folder / "redis", args=["--aclfile", str(users)]) as server:
        yield server


@pytest.fixture
def admin(server):
    """A client that may do all, of a server that is empty."""
    with server.client() as client:
        client.flushall()
        client.execute_command("SCRIPT", "FLUSH")
        client.config_resetstat()
        yield client


@pytest.fixture
def url(server, admin):
    """The server's URL, with the documentation's user."""
    return url_of(server, "dislock")


@pytest.fixture
def limited(server, admin):
    """Return the URL of a user with other rules than the documentation's."""

    def make(rules):
        given = rules.replace("PASSWORD", SECRET).split()
        admin.execute_command("ACL", "SETUSER", "limited", "reset", *given)
        return url_of(server, "limited")

    yield make
    admin.execute_command("ACL", "DELUSER", "limited")


def url_of(server, user):
    return f"redis://{user}:{SECRET}@127.0.0.1:{server.port}/0"


def without(command):
    """Return the documentation's rules but for one command."""
    return " ".join(rule for rule in RULES.split() if rule != f"+{command}")


def test_the_page_allows_what_the_scripts_run_and_no_more():
    """The commands of the documentation are those in the scripts, and those sent beside them."""
    assert sorted(COMMANDS) == sorted(SENT | CALLS)


def test_every_call_of_a_script_is_counted():
    """No script runs a command whose name is not written in it."""
    for name, text in TEXTS.items():
        assert len(re.findall(r"redis\.p?call\b", text)) == len(CALLED.findall(text)), name


def test_the_user_of_the_page_can_do_all(url, admin):
    """A lock that is waited for, renewed, counted and shown needs no more than the trial tries."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(dislock_url=url, dislock_watchdog_timeout=LEASE)
    with Dislock(app) as dislock, ThreadPoolExecutor(1) as thread:
        lock, page = dislock.lock("acl"), make_wsgi_app(app)
        with lock as lease:
            waiting = thread.submit(used, url)
            wait_for(lambda: lease.renewals, "a renewal")
            other = thread.submit(dislock.lock("acl").acquire)
            waiting.result(WITHIN)
            wait_for(lambda: admin.zcard(f"{LOCK}:line"), "a waiter in line")
            for words in (["ls"], ["show", "acl"], ["line", "acl"], ["doctor"]):
                told = CliRunner().invoke(command, words, obj=SimpleNamespace(app=app))
                assert "NOPERM" not in told.output
                assert "may not" not in told.output
            assert scrape(page)["server_up",] == 1
        assert other.result(WITHIN)


def missing(admin):
    """Return the commands of the documentation and the scripts that the server has not run."""
    stats = admin.info("commandstats")
    ran = admin.script_exists(*(one.sha for one in SCRIPTS.values()))
    return (
        [name for name in COMMANDS if f"cmdstat_{name}" not in stats],
        [name for name, yes in zip(SCRIPTS, ran, strict=True) if not yes],
    )


def test_a_worker_tries_everything_and_leaves_nothing_behind(url, admin):
    """At its start it runs each script and each command; the second time the server knows them."""
    for _ in range(2):
        admin.config_resetstat()
        start_worker(url)
        assert missing(admin) == ([], [])
        assert admin.keys() == []


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "info"])
def test_a_worker_names_the_command_that_is_missing(limited, admin, command):
    """Without any one of the documented commands a worker does not start, and says which it is."""
    with pytest.raises(ForbiddenError, match=rf"(?i)\b{command}\b"):
        start_worker(limited(without(command)))
    wait_for(lambda: admin.keys() == [], "a server with nothing left behind")


def test_a_worker_starts_without_info(limited):
    """It says what it cannot know."""
    server, warnings = start_worker(limited(without("info")))
    assert server
    assert "INFO" in warnings[0]
    [(level, _)] = Report(limited(without("info"))).found("settings")
    assert level == "note"


def test_doctor_needs_no_more(limited):
    """It asks for nothing that the page does not allow; a missing right is told with its rule."""
    assert {level for level, _ in Report(limited(RULES)).all("rights")} == {"ok"}
    [(level, what)] = Report(limited(without("hset"))).found("rights")
    assert (level, "may not run HSET" in what) == ("serious", True)


@pytest.mark.parametrize("keys", ["~other:*", "~dislock:{*}", "~dislock:{*", ""])
def test_a_worker_names_the_keys_that_are_missing(limited, keys):
    """A pattern that leaves out some of the names is told, with the one that is needed."""
    with pytest.raises(ForbiddenError, match=re.escape("'dislock'; allow it on every server")):
        start_worker(limited(RULES.replace("~dislock:*", keys)))


def test_one_server_of_several_that_forbids_is_enough(redis_program, server, limited, tmp_path):
    """Of independent servers each is checked; one that is away keeps no worker from starting."""
    with RedisServer(tmp_path / "1") as first, RedisServer(tmp_path / "2") as second:
        store = Store([first.url, second.url, limited(without("hkeys"))])
        with pytest.raises(ForbiddenError, match="may not run HKEYS;"):
            check_scripts(store.lock_server, "dislock")
        store.close()
        store = Store([first.url, second.url, limited(RULES)])
        second.kill()
        check_scripts(store.lock_server, "dislock")
        store.close()

"""A task of several keys in line, as the commands, the page and the metrics show it, and end it."""

import json

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from celery_dislock.config.terms import ALONE, Rate, Terms
from celery_dislock.messages.message import Message
from celery_dislock.operating.web import Page
from celery_dislock.operating.web.metrics import Collector
from celery_dislock.parking.answers import Parked
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import Ticket
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.replies import Granted
from tests.commands import FOUND, Dislock
from tests.holding import name_of
from tests.integration.lua_server import LuaServer
from tests.integration.test_stations import API, Fleet, tenant
from tests.pages import Visitor, ann
from tests.unit.deliveries import noted

A = tenant("a")


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False)

    @app.task(base=SingletonTask, name="shop.call", lock_on_conflict="queue", shared=False)
    def call(_): ...

    yield app
    runtime_of(app).close()
    app.close()


@pytest.fixture
def dislock(app):
    return Dislock(app)


@pytest.fixture
def send(app):
    """Have a worker take a task's locks, or park the task."""

    def send(task, *locks, terms=(ALONE,)):
        headers = {"task": "shop.call", "id": task, "argsrepr": f"({task!r},)", **noted()}
        given = Message("", "celery", headers, "application/json", "utf-8", {}, True, b"[[],{},{}]")
        ticket = Ticket(f"{task}:0:0", marked=False, message=given.to_bytes(), terms=terms)
        holder = json.dumps({"task": "shop.call", "id": task, "worker": "w", "timeout": 30})
        return runtime_of(app).process.lines.park(locks, f"{task}@w:1/1", 30.0, holder, ticket)

    return send


@pytest.fixture
def parked(send):
    """The API has its one; a1 has passed its tenant, and a2 and a3 wait there behind it."""
    assert isinstance(send("h1", API), Granted)
    answers = [send(task, A, API) for task in ("a1", "a2", "a3")]
    assert [(type(one), one.key) for one in answers] == [
        (Parked, "api"),
        (Parked, "tenant:a"),
        (Parked, "tenant:a"),
    ]


@pytest.mark.usefixtures("parked")
def test_each_lock_tells_where_a_task_stands(dislock):
    """The line where it waits tells what it keeps; what it keeps tells for whom, and until what."""
    head, place = dislock("line", "api").stdout.splitlines()
    assert head.split() == ["PLACE", "WAITING", "TURNS", "TICKET", "WHO", "QUEUE", "LOCKS"]
    assert place.endswith("a1:0:0  shop.call  celery  2/2, keeps tenant:a")
    assert dislock("line", "tenant:a").stdout.splitlines()[1].endswith("  1/2")
    told = dislock("show", "tenant:a").stdout
    assert "\n  kept for task a1, which waits for lock 'api'\n    id        a1\n" in told
    assert "unless a worker's sweep renews it" in told
    assert "  2 in line\n    1. shop.call[a2]" in told
    assert "\n       waits for lock 1 of 2\n" in told
    assert "\n       waits for lock 2 of 2, keeps tenant:a\n" in dislock("show", "api").stdout
    assert dislock("ls").stdout.endswith("  kept, waits for 'api': a1\n")
    troubles = {one["key"]: one["troubles"] for one in dislock.json("ls")}
    assert troubles == {"api": ["no worker"], "tenant:a": ["no worker"]}
    [place] = dislock.json("line", "api")["line"]  # programs are told the same
    known = {"stations": ["tenant:a", "api"], "keeps": ["tenant:a"], "beside": A}
    assert {name: place[name] for name in known} == known
    [kept] = dislock.json("show", "tenant:a")["holders"]
    assert (kept["waits"], kept["turn"], kept["owner"]) == ("api", True, "a1:0:0#")


@pytest.mark.usefixtures("parked")
def test_a_task_is_counted_at_one_lock(dislock, app):
    """It stands in one line, whatever it keeps at others."""
    collector = Collector(app)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert found["celery_dislock_parked", "shop.call"] == 3
    told = [one["what"] for one in dislock.json("doctor", "--timeout", "0.1")["findings"]]
    assert "2 locks, 2 leases, 3 waiting." in told


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("wanted", ["a1", "a1:0:0"])
@pytest.mark.parametrize("key", [["--key", "tenant:a"], ["--key", "api"], []])
def test_a_task_is_dropped_from_any_of_its_locks(dislock, app, key, wanted):
    """It leaves the line where it waits, and what it kept goes to the next."""
    answer = dislock("drop", wanted, *key, "--yes")
    assert (answer.exit_code, answer.output.count("Dropped.")) == (0, 1)
    assert "[a1], place 1 in line for lock api, keeps tenant:a, parked for" in answer.stderr
    assert app.AsyncResult("a1").state == "REVOKED"
    assert dislock.json("line", "api")["line"][0]["id"] == "a2"
    assert [one["id"] for one in dislock.json("show", "tenant:a")["holders"]] == ["a2"]
    assert dislock("drop", wanted, *key, "--yes").exit_code == FOUND


@pytest.mark.parametrize("key", ["tenant:a", "api"])
def test_a_turn_is_taken_away_from_any_of_its_locks(dislock, app, send, parked, key):
    """A task whose message is on its way keeps all its locks; its ticket is beside the first."""
    runtime_of(app).process.store.release([API], "h1@w:1/1")
    assert "has its turn: shop.call[a1] (turn 1, its message is on its way, keeps" in (
        dislock("show", "tenant:a").stdout
    )
    answer = dislock("drop", "a1", "--key", key, "--yes")
    assert "shop.call[a1], its turn in line for lock tenant:a, parked for" in answer.stderr
    assert answer.exit_code == 0
    assert [one["id"] for one in dislock.json("show", "api")["holders"]] == ["a2"]


@pytest.mark.usefixtures("parked")
def test_what_is_kept_is_taken_away(dislock):
    """The task waits anew at the end of its first line, and is not said to run."""
    answer = dislock("free", "tenant:a", input="y\n")
    assert "The task gives back all that it keeps, and waits anew." in answer.stderr
    assert (answer.exit_code, "two may run" in answer.output) == (0, False)
    assert [one["id"] for one in dislock.json("line", "tenant:a")["line"]] == ["a3", "a1"]


@pytest.mark.usefixtures("parked")
def test_the_page_drops_a_task_from_a_later_line(app):
    """The page sends what it was shown; the name of the other lock is checked as any."""
    site = Visitor(Page(app, user=ann, allow_actions=True))

    def head():
        return site.get("/api/lock", query_string={"key": "api"}).json["line"][0]

    place, form = head(), {"name": API, "ticket": "a1:0:0"}
    assert (place["stations"], place["keeps"]) == (["tenant:a", "api"], ["tenant:a"])
    assert not site.act("/api/drop", **form).json["done"]
    assert site.act("/api/drop", **form, beside="session:{1}").status_code == 400
    assert site.act("/api/drop", **form, beside=place["beside"]).json["done"]
    assert head()["id"] == "a2"


def test_a_long_list_of_locks_is_read_whole(dislock, send):
    """A task of a hundred locks with long names tells all of them, and its mode at each."""
    names = [f"{'long' * 40}:{nth}" for nth in range(100)]
    terms = [Terms()] * 99 + [Terms("shared")]
    assert isinstance(send("h1", name_of(names[-1])), Granted)
    assert isinstance(send("a1", *map(name_of, names), terms=tuple(terms)), Parked)
    [place] = dislock.json("line", names[-1])["line"]
    assert (place["stations"], place["keeps"]) == (names, names[:-1])
    assert (place["mode"], place["task"]) == ("shared", "shop.call")


def test_the_rate_is_that_of_the_first_in_line_at_this_lock():
    """Each station of a ticket has a rate of its own; gates at this lock count as starts."""
    fleet = Fleet(LuaServer())
    rates = Terms(rate=Rate(1, 60.0)), Terms(limit=5, rate=Rate(3, 30.0))
    assert isinstance(fleet.send("b1", [API], rates[1]), Granted)
    assert isinstance(fleet.send("b2", [API], rates[1]), Granted)
    assert isinstance(fleet.send("b3", [API], rates[1]), Granted)
    assert fleet.send("a1", [A, API], *rates).key == "api"
    overview = Overview(fleet.server, "dislock")
    rate = overview.lock(API).rate
    assert (rate.rate, rate.early) == (rates[1].rate, pytest.approx(30.0, abs=0.1))
    assert overview.lock(A).rate is None
    assert fleet.send("a2", [A, API], *rates).key == "tenant:a"
    rate = overview.lock(A).rate
    assert (rate.rate, rate.early) == (rates[0].rate, pytest.approx(60.0, abs=0.1))

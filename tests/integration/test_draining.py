"""``celery dislock drain``: what was parked on another lock server, or under another prefix."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.messages.message import Message
from celery_dislock.operating.cli import dislock as command
from celery_dislock.operating.cli.draining import Drain
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import Ticket
from celery_dislock.servers.replies import Done, Granted, Parked
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.store import Store
from tests.redis_server import RedisServer
from tests.unit.deliveries import noted

LONG = 600.0  # seconds
FOUND, USAGE, AWAY = 1, 2, 3


@pytest.fixture(scope="module")
def other_server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("other")) as server:
        yield server


@pytest.fixture
def other(other_server):
    with other_server.client(decode_responses=True) as client:
        client.flushall()
        yield client


def make_app(redis_url, **conf):
    app = Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False)
    app.conf.update(conf)

    @app.task(
        base=SingletonTask,
        name="shop.export",
        lock_key="<key>",
        lock_on_conflict="queue",
        lock_watchdog_timeout=0.1,  # so that the command looks for workers for a moment only
        shared=False,
    )
    def export(key): ...

    return app


@pytest.fixture
def app(redis_url):
    """The app as it is now."""
    with make_app(redis_url) as app:
        yield app


@pytest.fixture(params=["prefix", "server"])
def old(request, redis_url, redis_client, other_server, other):
    """The app as it was, and how the command is told where that was."""
    if request.param == "prefix":
        conf, told = {"dislock_prefix": "old"}, ("--from-prefix", "old")
    else:
        conf, told = {"dislock_url": other_server.url}, ("--from-url", other_server.url)
    with make_app(redis_url, **conf) as app:
        at = redis_client if request.param == "prefix" else other
        process = runtime_of(app).process
        yield SimpleNamespace(app=app, conf=conf, told=told, process=process, client=at)


@pytest.fixture
def drain(app, old):
    def run(*args, told=old.told, **how):
        answer = CliRunner().invoke(
            command, ["drain", *told, *args], obj=SimpleNamespace(app=app), **how
        )
        if answer.exception is not None and not isinstance(answer.exception, SystemExit):
            raise answer.exception
        return answer

    return run


@pytest.mark.parametrize("change", ["without", "with"])
def test_the_prefix_of_celery_is_part_of_what_the_option_says(redis_url, change):
    """The whole prefix is given, as workers log it, whatever Celery has there now."""
    before, now = {"global_keyprefix": "old:"}, {"global_keyprefix": "new:"}
    conf = {"dislock_prefix": "ours", "broker_url": redis_url, "dislock_url": None}
    with make_app(redis_url, **conf, broker_transport_options=now) as app:
        then = before if change == "with" else {}
        with make_app(redis_url, **conf, broker_transport_options=then) as old:
            known = runtime_of(old).settings.dislock_prefix
        with closing(Drain(app, None, known)) as draining:
            assert draining.there.endswith("prefix old:ours" if then else "prefix ours")
            assert draining.here.endswith("prefix new:ours")


def lock_of(process, key):
    return f"{process.identity._key.removesuffix(':lines:@store')}:{{{key}}}"


def park(process, key, task_id=None, holder=None):
    """Park a task in the line of a key, as a worker does; return its ticket."""
    task_id = task_id or str(uuid.uuid4())
    about = {"task": "shop.export", "id": task_id, **noted(store=process.identity.name())}
    message = Message("", "celery", about, "application/json", "utf-8", {}, True, b"[[],{},{}]")
    ticket, lock = (
        Ticket(f"{task_id}:0:0", f"{task_id}@", False, message.to_bytes()),
        lock_of(process, key),
    )
    process.store.acquire([lock], "holder", LONG, json.dumps(holder or {}))
    assert isinstance(process.lines.park(lock, f"{task_id}@w/1", LONG, "{}", ticket), Parked)
    return ticket.name


def sent(client):
    """Return the notes of the messages that were sent, in order."""
    return [
        json.loads(one)["headers"]["dislock"] for one in reversed(client.lrange("celery", 0, -1))
    ]


def test_what_is_parked_there_is_sent_with_its_turn_here(app, old, drain, redis_client):
    """In the order of its line; nothing is left there, and late messages from there belong here."""
    tickets = [park(old.process, key) for key in ("a", "a", "b")]
    here = runtime_of(app).process
    assert not here.identity.whose(old.process.identity.name())
    answer = drain("--yes", "--json")
    assert answer.exit_code == 0, answer.stderr
    assert "3 parked in 2 lines" in answer.stderr
    assert "Sent on 3." in answer.stderr
    assert {one["problem"] for one in json.loads(answer.stdout)} == {None}
    headers = sent(redis_client)
    turns = {one["ticket"][1]: one["ticket"][0] for one in headers}
    assert turns == dict(zip(tickets, ["dislock:{a}", "dislock:{a}", "dislock:{b}"], strict=True))
    of_a = [ticket for ticket in turns if ticket in tickets[:2]]
    assert of_a == tickets[:2]
    assert {one["store"] for one in headers} == {here.identity.name()}
    assert list(old.process.lines.aside(lock_of(old.process, "a"))) == []
    assert here.identity.whose(old.process.identity.name())
    assert not old.process.identity.whose(here.identity.name())
    park(old.process, "c")  # by a worker that was started with the old settings, by mistake
    assert not here.identity.whose(old.process.identity.name())
    assert drain("--yes").exit_code == 0
    assert here.identity.whose(sent(redis_client)[0]["store"])
    assert "0 parked in 0 lines" in drain("--yes").stderr


def test_a_late_copy_of_what_was_done_there_does_not_run(app, old, drain):
    """Its marks are there; the drain has sent all that was not done, so nothing else is to run."""
    here = runtime_of(app).process
    done, parked, claimed = (park(old.process, "a") for _ in range(3))
    there, lock = lock_of(old.process, "a"), lock_of(here, "a")
    old.process.lines._hand_over = lambda _turns: None
    old.process.store.release([there], "holder")
    for ticket, ends in ((done, True), (claimed, False)):
        if not ends:
            old.process.lines.withdraw(there, parked)
        task = ticket.partition(":")[0]
        shown = Ticket(ticket, f"{task}@", marked=True)
        claim = old.process.lines.park(there, f"{task}@w/2", 0.2, "{}", shown)
        assert isinstance(claim, Granted)
        if ends:
            old.process.store.release([there], f"{task}@w/2", Ending(ticket=ticket))
    assert old.process.lines.claims(there) == [claimed]
    assert drain("--yes", "--look-for", "1").exit_code == 0
    for ticket, answer in ((done, Done), (parked, Done), (claimed, Granted)):
        task = ticket.partition(":")[0]
        late = Ticket(ticket, f"{task}@", marked=True, drained=True)
        assert isinstance(here.lines.park(lock, f"{task}@w/3", LONG, "{}", late), answer), ticket
    assert here.lines.claims(lock) == [claimed]


def test_a_turn_that_is_on_its_way_is_sent_on_as_well(old, drain, redis_client):
    """Whoever published it may have died before: it comes twice, and one of the two runs."""
    ticket = park(old.process, "a")
    old.process.store.release([lock_of(old.process, "a")], "holder")
    assert drain("--yes").exit_code == 0
    assert [one["ticket"][1] for one in sent(redis_client)] == [ticket] * 2


@pytest.mark.parametrize(("by", "uses"), [("sweep", True), ("holder", True), ("thread", False)])
def test_lines_that_a_worker_still_uses_are_left_alone(by, uses, old, drain, redis_client):
    """It sweeps there, or it holds one of the locks: its tasks go on there."""
    about = {"task": "t", "id": "1", "worker": "w1", "pid": 1, "timeout": LONG}
    if by == "sweep":
        old.process.store.acquire([old.process.sweep_name], "w1", LONG, json.dumps(about))
        park(old.process, "a")
    else:  # a program's thread sweeps nothing
        park(old.process, "a", holder=about | ({"worker": None} if by == "thread" else {}))
    answer = drain("--yes", "--look-for", "0.1")
    assert answer.exit_code == (FOUND if uses else 0)
    assert ("A worker still uses it: w1." in answer.stderr) is uses
    assert len(sent(redis_client)) == (not uses)


def test_the_lines_are_shown_and_sent_on_after_a_yes(old, drain, redis_client):
    """With how many are in each, those with a turn too; it looks for as long as tasks sweep."""
    for key in ("a", "a", "b\x1b"):
        park(old.process, key)
    old.process.store.release([lock_of(old.process, "a")], "holder")
    answer = drain(input="n\n")
    assert answer.exit_code == FOUND
    assert len(sent(redis_client)) == 1  # the turn
    answer = drain(input="y\n")
    assert answer.exit_code == 0
    shown = sorted(line.split() for line in answer.stdout.splitlines()[:3])
    assert shown[:2] == [["KEY", "IN", "LINE"], ["a", "2"]]
    assert "\x1b" not in answer.stdout
    assert "Looking for 0.1 s whether a worker still uses" in answer.stderr
    assert "3 parked in 2 lines on" in answer.stderr
    assert "Send them on, to redis" in answer.stderr
    assert "Sent on 3." in answer.stderr


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ((), "--from-url URL, --from-prefix PREFIX"),
        (("--from-prefix", "dislock"), "where the app's locks are"),
        (("--lost", "all"), "is no name of a store"),
    ],
)
def test_a_drain_from_nowhere_and_from_here_is_wrong_usage(old, drain, told, why, redis_client):
    """Nothing is looked at."""
    answer = drain(told=told)
    assert answer.exit_code == USAGE
    assert why in answer.stderr


def test_several_servers_keep_no_lines(app, old, drain):
    """There is nothing to drain, and nothing to take over."""
    app.conf.dislock_url = ["redis://a", "redis://b", "redis://c"]
    for told in (old.told, ("--lost", "f" * 16)):
        answer = drain(told=told)
        assert (answer.exit_code, "keep no parked tasks" in answer.stderr) == (USAGE, True)


def test_a_store_that_is_lost_is_taken_over_by_its_name(app, old, drain):
    """Nothing is left there to be sent on; its tasks that are on their way run here."""
    answer = drain(told=("--lost", "f" * 16))
    assert (answer.exit_code, "belong here now" in answer.stderr) == (0, True)
    assert runtime_of(app).process.identity.whose("f" * 16)


def test_the_tasks_of_another_broker_are_left_alone(old, drain, redis_client, other_server):
    """Their messages would be sent to queues that nobody consumes."""
    conf = {"dislock_url": old.app.conf.broker_url, **old.conf}
    with make_app(other_server.url, **conf) as elsewhere:
        process = runtime_of(elsewhere).process
        theirs, ours = park(process, "a"), park(old.process, "a")
        assert drain("--yes").exit_code == 0
        assert [one["ticket"][1] for one in sent(redis_client)] == [ours]
        assert list(process.lines.names())
        assert theirs not in dict(process.lines.aside(lock_of(process, "a")))


def test_what_cannot_be_read_stays_there_and_the_others_are_sent_on(old, drain, redis_client):
    """A message, or a lock: each is a finding."""
    broken, good = park(old.process, "a"), [park(old.process, key) for key in "ab"]
    park(old.process, "damaged")
    name = f"{lock_of(old.process, 'a')}:tickets"
    old.client.hset(name, broken, old.client.hget(name, broken).replace('1 {"', '1 ["', 1))
    old.client.hset(lock_of(old.process, "damaged"), "holder", "rubbish")
    answer = drain("--yes")
    assert answer.exit_code == FOUND
    assert "its message is lost" in answer.stderr
    assert "Left there: lock" in answer.stderr
    assert sorted(one["ticket"][1] for one in sent(redis_client)) == sorted(good)


def test_a_broker_that_goes_away_meanwhile_loses_nothing(app, old, drain, monkeypatch):
    """What was not sent is set aside there, and the command says how it is sent."""
    ticket = park(old.process, "a")

    def publish(*_args, **_kwargs):
        raise ConnectionError("broker")

    monkeypatch.setattr(Message, "publish", publish)
    answer = drain("--yes")
    assert answer.exit_code == AWAY
    assert "put-back" in answer.stderr
    assert [one for one, _ in old.process.lines.aside(lock_of(old.process, "a"))] == [ticket]
    assert not runtime_of(app).process.identity.whose(old.process.identity.name())


def test_what_had_lost_its_place_there_ends(app, old, drain):
    """Its result says so, though no worker sweeps there any more."""
    ticket = park(old.process, "a", "7")
    old.process.lines.drop(lock_of(old.process, "a"), ticket, '"replaced": "by hand"')
    assert drain("--yes").exit_code == 0
    assert app.AsyncResult("7").state == "REVOKED"


class TestStoreName:
    """What store.lua promises."""

    @pytest.fixture
    def identity(self, redis_url):
        return StoreIdentity(Store(redis_url).lock_server, "dislock")

    def test_all_processes_get_one_name_and_it_is_kept(self, identity, redis_url, redis_client):
        """For as long as a line is: thirty days from the last time that it was asked for."""
        name = identity.name()
        assert StoreIdentity(Store(redis_url).lock_server, "dislock").name() == name
        assert redis_client.hgetall("dislock:lines:@store") == {"name": name}
        redis_client.pexpire("dislock:lines:@store", 1000)
        identity.confirm()
        assert redis_client.ttl("dislock:lines:@store") > 29 * 86400

    def test_forged_names_leave_one_record(self, identity, redis_client):
        """Anybody who can publish a message can send one with any name."""
        for number in range(50):
            assert not identity.whose(f"{number:016x}")
        assert redis_client.hlen("dislock:lines:@store") == 2
        assert identity.last_stranger().store == f"{49:016x}"
        identity.take_over(f"{49:016x}")
        assert identity.last_stranger() is None

    def test_stores_that_were_taken_over_are_not_without_number(self, identity, redis_client):
        """An operator takes over one or two; the record does not grow for ever."""
        with pytest.raises(StoreError, match="too many"):
            for number in range(150):
                identity.take_over(f"{number:016x}")
        assert redis_client.hlen("dislock:lines:@store") == 101
        assert identity.whose(f"{0:016x}")

    def test_a_name_that_is_given_twice_is_given_once(self, identity, redis_client):
        """The command may be sent again."""
        before = identity.name()
        for _ in range(2):
            identity._ask("f" * 16, "renamed")
        assert redis_client.hgetall("dislock:lines:@store") == {"name": "f" * 16, before: "drained"}

"""A beat on a lock server that refuses, moves, fails over, or has what no beat has written."""

import logging
import re
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_dislock import Dislock, beat
from celery_dislock.parking.process import runtime_of
from tests.holding import name_of, wait_for
from tests.integration.acl import RULES
from tests.integration.beats import recording
from tests.integration.servers import MASTER_NAME, RedisCluster, Watched, wait_for_replicas
from tests.leaks import SECRET
from tests.pace import LEASE
from tests.redis_server import Client, RedisServer

LOCK = name_of("beat")
RECORDS = f"{LOCK}:beat"
US = 1_000_000
ROUNDS = 20  # of a beat that stands by
HUGE = b"9" * 400


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    """A beat that waits in line asks soon again, and one that was refused, too."""
    monkeypatch.setattr(beat, "WAIT_MOST", 0.01)


@pytest.fixture
def client(redis_url):
    """A client that speaks bytes."""
    with Client.from_url(redis_url) as client:
        yield client


@pytest.fixture
def beats():
    """Return a function that makes a beat; all are closed at the end."""
    made = []

    def make(url, names=("often",), **conf):
        app = Celery("beats", set_as_current=False)
        Dislock(app)
        schedule = {name: {"task": name, "schedule": 0.05} for name in names}
        app.conf.update(
            dislock_url=url,
            beat_schedule=schedule,
            dislock_beat_timeout=LEASE,
            result_expires=None,
            **conf,
        )
        app.sent = []
        app.beat = SimpleNamespace(alive=True, sends=lambda *message: app.sent.append(message))
        made.append(recording(Scheduler)(app))
        return made[-1]

    yield make
    for one in made:
        one.close()
        runtime_of(one.app).close()


def goes_on(one, messages=3):
    """Let a beat's loop go round until it has sent some more messages, all under their own ids."""
    sent = len(one.app.sent) + messages

    def has_sent():
        one.tick()
        return len(one.app.sent) >= sent

    wait_for(has_sent, "messages")
    assert len(set(one.app.sent)) == len(one.app.sent)


def stands_by(one, caplog):
    """Let the loop of a beat go round until it stands by, and on; return why."""
    caplog.clear()

    def says():
        one.tick()
        return any(said.startswith("Beat stands by") for said in caplog.messages)

    wait_for(says, "a beat that stands by")
    sent = len(one.app.sent)
    for _ in range(ROUNDS):
        one.tick()
    assert len(one.app.sent) == sent
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    # Each time that the lease ends meanwhile, another command is refused, and that is told, too.
    reasons = [said for said in warnings if said.startswith("Beat stands by")]
    assert len(set(reasons)) == len(reasons)
    return reasons[0]


def record_of(client, name=b"often"):
    return client.hget(RECORDS, name)


WRITTEN = [
    *(
        b"",
        b"garbage",
        b"\xff\x00\n",
        b"2 5 5 5",
        b"1 5 5 --1-",
        b"1 5 1-2 -",
        b"1 5 5 -5",
        b"x" * US,
    ),
    *(b"1 5 %b 5" % HUGE, b"1 5 5 %b" % HUGE, b"1 5 %b5 -" % (b"0" * 5000), b"1 %b 5 5" % HUGE),
    *(b"1 5 99999999999999999 -", b"1 5 4000000000000000 -"),
]


@pytest.mark.parametrize("written", WRITTEN, ids=lambda one: repr(one[:24]))
def test_a_record_that_no_beat_has_written_is_as_none(redis_url, client, beats, written):
    """The beat sends on, whoever has written what; also a time that is to come holds nothing up."""
    one = beats(redis_url)
    for _ in ("as it begins to lead", "as it leads"):
        client.hset(RECORDS, mapping={"often": written, b"\xff": written, b"": written})
        goes_on(one)
        assert record_of(client) != written


@pytest.mark.parametrize("key", [LOCK, RECORDS, f"{LOCK}:limit", f"{LOCK}:line"])
@pytest.mark.parametrize("leads", [True, False])
def test_a_key_of_another_type(redis_url, client, beats, key, leads, caplog):
    """The beat stands by, says once which key, and goes on when that is gone."""
    one = beats(redis_url)
    if leads:
        goes_on(one)
    client.delete(key)
    client.lpush(key, "x")
    if not (key.endswith(":line") and leads):  # which it does not need
        assert key in stands_by(one, caplog)
        client.delete(key)
    goes_on(one)


def test_a_full_server(own_redis_server, beats, caplog):
    """The beat that leads sends on; none begins to lead there, and it says so once."""
    with own_redis_server.client() as client:
        leader, other = beats(own_redis_server.url), beats(own_redis_server.url)
        goes_on(leader)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        goes_on(leader)
        leader.close()
        assert "maxmemory" in stands_by(other, caplog)
        client.config_set("maxmemory", 0)
        goes_on(other)


@pytest.fixture(scope="module")
def limited(redis_program, tmp_path_factory):
    """A server whose user may do what the documentation says."""
    folder = tmp_path_factory.mktemp("acl")
    users = folder / "users.acl"
    users.write_text("user default on nopass ~* &* +@all\nuser dislock off\n")
    with RedisServer(folder / "redis", args=["--aclfile", str(users)]) as server:
        yield server


BY_CLAIMS = {"~dislock:*", "+evalsha", "+time", "+hget", "+hset", "+hdel", "+pexpire"}
NEEDED = {True: BY_CLAIMS, False: BY_CLAIMS | {"+exists", "+hgetall"}}  # of one that leads, or not
NEEDLESS = {rule for rule in RULES.split() if rule[0] == "+"} - NEEDED[False]
OTHERS = {leads: (*NEEDLESS, *(NEEDED[False] - rules)) for leads, rules in NEEDED.items()}


@pytest.mark.parametrize(
    ("leads", "rules"),
    [(leads, [rule]) for leads in NEEDED for rule in sorted(NEEDED[leads])] + [*OTHERS.items()],
)
def test_a_right_that_is_missing(limited, beats, leads, rules, caplog):
    """The beat stands by and says once what is missing, or does not need it, as all the others."""
    with limited.client() as client:
        client.flushall()

        def allow(*more):
            given = RULES.replace("PASSWORD", SECRET).split()
            client.execute_command("ACL", "SETUSER", "dislock", "reset", *given, *more)

        allow()
        one = beats(f"redis://dislock:{SECRET}@127.0.0.1:{limited.port}/0")
        if leads:
            goes_on(one)
        allow(*("resetkeys" if rule[0] == "~" else "-" + rule[1:] for rule in rules))
        if len(rules) > 1:
            goes_on(one)
        else:
            assert re.search("(?i)no permissions|can't run", stands_by(one, caplog))
        assert SECRET not in caplog.text
        allow()
        goes_on(one)


@pytest.mark.parametrize("first", [LOCK, RECORDS])
def test_a_slot_that_moves(redis_program, tmp_path, beats, first, caplog):
    """Nothing goes out that was not claimed; the beat goes on when both keys are in one place."""
    with RedisCluster(tmp_path, node_timeout=2000) as cluster:
        one = beats(cluster.url)
        goes_on(one)
        with cluster.moving(LOCK, first=[first]):
            for _ in range(3):
                one.tick()
        goes_on(one)
        assert caplog.text.count("until the lock server answers") <= 1


@pytest.mark.extra
def test_a_failover_of_the_sentinels(redis_program, tmp_path, beats):
    """The beat stands by until there is a new master, and sends no tick twice there."""
    with Watched(tmp_path) as watched:
        options = {"master_name": MASTER_NAME}
        one = beats(watched.url, dislock_transport_options=options)
        goes_on(one)
        master = watched.master
        wait_for_replicas(master, 2)
        master.kill()
        goes_on(one)
        assert watched.wait_for_master(other_than=master)

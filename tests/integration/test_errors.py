"""What the answers of a lock server mean for who takes a lock: errors, and refusals."""

from contextlib import closing

import pytest

from celery_dislock import DamagedLockError, Dislock, StoreError, scripts
from celery_dislock.exceptions import ForbiddenError, UnreachableError
from celery_dislock.servers.connecting import Driver
from celery_dislock.servers.store import Store
from proof.proxy import cut, lose_reply
from tests.holding import name_of

NUMBER = "f" * 40
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NIL = "user_script:5: attempt to compare nil with number"
RECORD = "a lease in it cannot be read: 2 7"
BEHIND = f" script: {NUMBER}, on @user_script:5."
BEFORE = f"ERR Error running script (call to f_{NUMBER}): @user_script:5: "
FULL = "command not allowed when used memory > 'maxmemory'"


def refused(driven, answer, keys=("k", "l")):
    """Have the server answer with an error; return what a caller is told."""
    driven.fault(scripts.ACQUIRE, f"-{answer}")
    with pytest.raises(StoreError) as caught:
        driven.lock(list(keys)).try_acquire()
    return caught.value


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WRONG_TYPE, WRONG_TYPE),
        (f"{WRONG_TYPE}{BEHIND}", WRONG_TYPE),
        (f"{BEFORE}{WRONG_TYPE}", WRONG_TYPE),
        (f"ERR {NIL}{BEHIND}", NIL),
        (f"{BEFORE}{NIL}", "attempt to compare nil with number"),
        (f"ERR dislock: {RECORD}{BEHIND}", RECORD),
        (f"{BEFORE}dislock: {RECORD}", RECORD),
        (f"ERR hash value is not an integer{BEHIND}", "hash value is not an integer"),
    ],
)
def test_an_error_about_a_lock_names_it(driven, answer, reason):
    """Redis says it in other words before 7.0 and from then on; what it puts around is left out."""
    error = refused(driven, answer)
    assert isinstance(error, DamagedLockError)
    assert (error.reason, error.lock) == (reason, "dislock:{k}, dislock:{l}")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (f"OOM {FULL}{BEHIND}", StoreError),
        (f"{BEFORE}OOM {FULL}", StoreError),
        (f"ERR Unknown Redis command called from script{BEHIND}", StoreError),
        ("MISCONF Redis is configured to save RDB snapshots", StoreError),
        ("LOADING Redis is loading the dataset in memory", StoreError),
        ("NOPERM this user has no permissions to run the 'evalsha' command", ForbiddenError),
    ],
)
def test_an_error_of_the_server_is_about_all_locks(driven, answer, kind):
    """Memory and permissions are the server's affair."""
    assert type(refused(driven, answer)) is kind


@pytest.mark.parametrize(
    "answer",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_0): @user_script:1: -READONLY You can't write",
    ],
)
def test_a_replica_is_known_by_its_answer(driven, answer):
    """Redis before 7 wraps a script's READONLY in an error of its own; both are known."""
    assert "no longer the master" in refused(driven, answer).reason


@pytest.mark.parametrize("way", [cut, lose_reply])
def test_what_gets_no_reply_is_sent_three_times(driven, way):
    """Then it is an error; what was sent may have been done, and is never called unsent."""
    driven.fault(scripts.ACQUIRE, way, times=2)
    with driven.lock():
        assert driven.asked(scripts.ACQUIRE) == 3
    driven.fault(scripts.ACQUIRE, way, times=3)
    with pytest.raises(StoreError) as caught:
        driven.lock().acquire()
    assert not isinstance(caught.value, UnreachableError)
    assert driven.asked(scripts.ACQUIRE) == 6
    driven.advance(1.5)
    driven.assert_free("k")


def test_a_server_that_cut_the_connection_is_given_a_moment(driven):
    """The second try follows at once: the connection was idle.  The third waits."""
    driven.fault(scripts.ACQUIRE, cut)
    pauses = []
    store = Store(driven.url, driver=Driver(pauses.append))
    with closing(store), pytest.raises(StoreError):
        store.acquire([name_of("k")], "a/1", 30.0, "{}")
    assert pauses == [0.0, 0.1]


def test_idle_connections_that_were_cut_are_tried_once(driven):
    """One that has broken says that the others have, too: a new one serves the second try."""
    with closing(Store(driven.url)) as store:
        wire, ping = store.lock_server.wire, (("PING",),)
        used = [wire.start(ping) for _ in range(3)]
        for connection in used:
            assert wire.finish(connection, ping) == [b"PONG"]
        driven.proxy.cut_all()
        assert wire.ask(ping, again=True) == [b"PONG"]


def test_a_server_that_is_not_there_was_sent_nothing():
    """Nothing has to be given up."""
    with Dislock.from_url("redis://localhost:1") as dislock, pytest.raises(UnreachableError):
        dislock.lock("k").try_acquire()


# redis-py 5.0 leaves a socket of a path to the garbage collector if nobody listens there.
@pytest.mark.filterwarnings("ignore:unclosed <socket.*AF_UNIX:ResourceWarning")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:s3cret@localhost:1/2?client_name=s3cret", "redis://u:***@localhost:1/2"),
        ("rediss://:s3cret@localhost:1", "rediss://:***@localhost:1"),
        ("unix:///nowhere/a,b?db=1&password=s3cret", "unix:///nowhere/a,b"),
        ("redis+socket:///nowhere/a", "redis+socket:///nowhere/a"),
        (
            "sentinel://u:s3cret@localhost:1;sentinel://localhost:2/3",
            "sentinel://u:***@localhost:1;sentinel://localhost:2/3",
        ),
        ("redis+cluster://u:s3cret@localhost:1,localhost:2", "redis+cluster://u:***@localhost:1,"),
        ("rediss+cluster://:s3cret@[::1]:1", "rediss+cluster://:***@[::1]:1"),
    ],
)
def test_a_server_is_named_without_its_password(url, shown):
    """All hosts are named."""
    options = {"master_name": "m"} if url.startswith("sentinel") else {}
    dislock = Dislock.from_url(url, transport_options=options)
    with dislock, pytest.raises(StoreError) as caught:
        dislock.lock("k").try_acquire()
    assert shown in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "holder", "held", "told"),
    [
        ("a/1", "{}", -500, (None, None)),  # the server's clock was set back
        ("a/1", "{}", 720, (720, None)),
        ("a/1", '{"timeout":30}', 720, (720, 1)),
        ("a/1", '{"timeout":30.5}', 720, (720, 1.5)),
        ("a/1", '{"timeout":20}', 720, (720, 0)),  # of a majority, which adds a margin
        ("a/1", '{"timeout":900}', 4, (4, 4)),  # handed over, and not renewed yet
        ("a/1", '{"timeout":"30"}', 4, (4, None)),
        ("a/1", '{"timeout":true}', 4, (4, None)),
        ("a/1", "no JSON", 4, (4, None)),
        ("~a/1", '{"timeout":30}', 720, (720, None)),  # left to run out
    ],
)
def test_a_refusal_says_for_how_long_the_lock_has_been_held(driven, owner, holder, held, told):
    """And when its lease was renewed, if the holder says for how long a renewal lasts."""
    now = round(driven.now * 1000)
    record = f"1 {now + 29_000} 5 {now - held * 1000} x {holder}"
    driven.client.hset(name_of("k"), owner, record)
    conflict = driven.lock().try_acquire()
    driven.client.delete(name_of("k"))
    assert conflict.remaining == pytest.approx(29, abs=0.5)
    for found, expected in zip((conflict.held_for, conflict.renewed), told, strict=True):
        assert found == (None if expected is None else pytest.approx(expected, abs=0.5))

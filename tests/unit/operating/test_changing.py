"""``free``, ``drop``, ``put-back``: what is asked, done, told and logged."""

import click
import pytest

from tests.commands import AWAY, FOUND, USAGE
from tests.staged import RESERVED, holder, lock, place

OWNER = "id-1@celery@w1:7/ab.1"
WHO = f"'shop.export[id-1] on celery@w1 (pid 7)' (owner '{OWNER}', token 1)"


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch):
    monkeypatch.setattr("celery_dislock.tasks.actions.LOOK_EVERY", 0.0)


@pytest.fixture
def meanwhile(monkeypatch):
    """Let something happen between the question and the answer, which is yes."""

    def answer(happens):
        monkeypatch.setattr(click, "confirm", lambda *_, **__: happens() or True)

    return answer


class Workers:
    """What the workers were told to end, and what happens then."""

    def __init__(self):
        self.told = []
        self.ends = lambda: None

    def revoke(self, task_id, *, terminate, signal):
        self.told.append((task_id, terminate, signal))
        self.ends()


@pytest.fixture
def workers(app, monkeypatch):
    workers = Workers()
    monkeypatch.setattr(app.control, "revoke", workers.revoke)
    return workers


@pytest.fixture
def state(server):
    """Look at a lock: its owners and tokens, and the id of its reservation."""

    def look(key="k"):
        found = server.overview.lock(f"dislock:{{{key}}}")
        reserved = found.reservation and found.reservation.id
        return [(one.owner, one.token) for one in found.holders], reserved

    return look


def outcomes(answer):
    return [one["outcome"] for one in answer]


HELD, GONE = [(OWNER, 1)], []
TWO = [*HELD, ("id-2@celery@w1:7/ab.2", 2)]


def test_what_was_shown_is_freed(dislock, server, state, caplog):
    """By its owner and its token, after the answer yes; the log says who did it."""
    server.put(lock(holders=[holder()]))
    answer = dislock("free", "k", input="y\n")
    assert (answer.exit_code, state()) == (0, (GONE, None))
    assert "held by shop.export[id-1] on celery@w1 (pid 7)" in answer.stdout
    assert answer.stderr.endswith(
        "Freed lock k. Its holder learns of it within 10 s; until then two may run.\n"
    )
    assert caplog.messages == [f"Command: 'me' on here freed lock 'k' of {WHO}."]
    answer = dislock("free", "k")
    assert (answer.exit_code, answer.stderr) == (FOUND, "Nobody holds lock k.\n")


@pytest.mark.parametrize("command", ["free k", "drop parked-1"])
@pytest.mark.parametrize("given", ["n\nn\n", "\n\n", ""])
def test_any_other_answer_changes_nothing(dislock, server, enlist, caplog, command, given):
    """No, nothing, or nobody there; nothing is logged either."""
    server.put(lock(holders=[holder()], reservation=RESERVED, waiting=1, line=[place()]))
    enlist("k")
    before = server.contents()
    answer = dislock(*command.split(), input=given)
    assert (answer.exit_code, server.contents()) == (FOUND, before)
    assert ("Nobody answers: give --yes" in answer.stderr) is not given
    assert "Left as it is." in answer.stderr
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("command", "shown", "then"),
    [
        ("free k", {"holders": [holder()]}, {"holders": [holder(token=2)]}),
        ("free k", {"reservation": RESERVED}, {"reservation": RESERVED._replace(number=8)}),
        ("free k", {"reservation": RESERVED}, {"reservation": RESERVED._replace(mark="other")}),
        ("drop parked-1", {"waiting": 1, "line": [place()]}, {}),
    ],
)
def test_what_has_come_since_is_left_alone(
    dislock, server, enlist, meanwhile, command, shown, then
):
    """The second of two operators changes nothing, and is told so."""
    server.put(lock(**shown))
    enlist("k")
    meanwhile(lambda: server.put(lock(**then)))
    answer = dislock(*command.split(), "--json")
    assert answer.exit_code == FOUND
    assert "meanwhile" in answer.stderr
    left = server.contents()
    server.put(lock(**then))
    assert server.contents() == left


@pytest.mark.parametrize(
    ("changed", "asked", "told"),
    [
        ({}, "two may run at a time", "within 10 s"),
        ({"renewed": None}, "two may run at a time", "when it renews or releases"),
        ({"turn": True}, "goes to the end of the line", "Freed lock k.\n"),
        ({"expiring": True}, "to be held for longer", "Freed lock k.\n"),
    ],
)
def test_the_risk_is_told(dislock, server, changed, asked, told):
    """If a body goes on, two may run; if none does, something else is asked."""
    server.put(lock(holders=[holder(**changed)]))
    answer = dislock("free", "k", input="y\n")
    assert asked in answer.stderr
    assert told in answer.stderr


def test_the_holder_is_terminated_first(dislock, server, workers):
    """If its lease has ended by that, there is nothing to be freed."""
    server.put(lock(holders=[holder()]))
    workers.ends = lambda: server.put(lock())
    options = ["--terminate", "--signal", "KILL", "--wait", "5"]
    answer = dislock("free", "k", *options, input="y\n")
    assert answer.exit_code == 0
    assert "Terminate shop.export[id-1] on celery@w1 (pid 7) and free the lock?" in answer.stderr
    assert "waiting for 5.0 s at most" in answer.stderr
    assert answer.stderr.endswith("It has ended. Lock k is free, or handed on.\n")
    assert workers.told == [("id-1", True, "KILL")]


@pytest.mark.parametrize(
    ("given", "told"), [("KILL", "KILL"), ("sigkill", "KILL"), ("9", "KILL"), ("int", "INT")]
)
def test_a_signal_is_given_as_to_kill(dislock, server, workers, given, told):
    """Workers know it by its name in capitals, and log a traceback if they do not know it."""
    server.put(lock(holders=[holder()]))
    dislock("free", "k", "--terminate", "--signal", given, "--wait", "0.001", "--yes")
    assert workers.told == [("id-1", True, told)]
    workers.told.clear()
    answer = dislock("free", "k", "--terminate", "--signal", f"{given}X", "--yes")
    assert (answer.exit_code, workers.told) == (USAGE, [])
    assert f"{given}X is no signal; give TERM" in answer.stderr


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, ["still runs"]),
        ({"renewed": None}, ["still runs"]),
        ({"renewed": 21.0, "remaining": 9.0}, ["still runs"]),
        ({"expiring": True}, ["freed", "freed"]),
    ],
)
def test_one_that_is_still_there_is_freed_if_its_body_has_ended(
    dislock, server, workers, state, caplog, changed, outcome
):
    """A body that is stopped or cut off may go on, and keeps its lock and its reservation."""
    server.put(lock(holders=[holder()], reservation=RESERVED))
    then = lock(holders=[holder(**changed)], reservation=RESERVED)
    workers.ends = lambda: server.put(then)
    answer = dislock.json("free", "k", "--terminate", "--wait", "0.001", "--yes")
    assert outcomes(answer) == outcome
    assert state() == ((HELD, "id-9") if "still runs" in outcome else (GONE, None))
    said = f"Command: 'me' on here told the workers to end {WHO}, which holds lock 'k'."
    assert (caplog.messages[0], len(caplog.messages)) == (said, 1 if len(outcome) == 1 else 3)


@pytest.mark.parametrize(
    ("changed", "left"),
    [({"thread": "T", "task": None, "id": None}, 1), ({"turn": True}, 0), ({"expiring": True}, 0)],
)
def test_what_is_no_task_cannot_be_terminated(dislock, server, workers, state, changed, left):
    """A thread keeps its lock; a turn, or a lease that only runs out, has no body."""
    server.put(lock(holders=[holder(**changed)]))
    answer = dislock("free", "k", "--terminate", "--yes")
    assert "It cannot be terminated: " in answer.stderr
    assert (workers.told, len(state()[0])) == ([], left)


def test_a_broker_that_is_away_frees_nothing(dislock, server, workers, state):
    """Exit code 3, as for the lock server."""

    def refuse():
        raise ConnectionError("refused")

    workers.ends = refuse
    server.put(lock(holders=[holder()]))
    answer = dislock("free", "k", "--terminate", "--yes")
    assert (answer.exit_code, state()[0]) == (AWAY, HELD)
    assert answer.stderr.endswith("the broker did not take the command for the workers: refused\n")


@pytest.mark.parametrize(
    ("option", "again", "left", "told"),
    [
        (["--reservation"], ["--reservation"], (TWO, None), "Key k is not reserved.\n"),
        (["--token", "2"], ["--token", "7"], (HELD, "id-9"), "lock k with token 7."),
    ],
    ids=["the reservation", "one of two leases"],
)
def test_one_alone_is_ended(dislock, server, state, option, again, left, told):
    """Whoever holds the lock keeps it; if there is no such one, that is said, and nothing ends."""
    server.put(lock(holders=[holder(1), holder(2)], reservation=RESERVED))
    assert dislock("free", "k", *option, "--yes").exit_code == 0
    assert state() == left
    answer = dislock("free", "k", *again, "--yes")
    assert (answer.exit_code, state()) == (FOUND, left)
    assert told in answer.stderr


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("being sent", "Its message may still wait, and runs then as well."),
        ("waiting", "Its message may still wait, and runs then as well."),
        ("running", "Its task goes on."),
        ("ended", "Its task has ended."),
    ],
)
def test_a_reservation_that_was_shown_is_ended(dislock, server, state, caplog, now, words):
    """Nobody holds the lock, and no message of its key would be sent; what it means is told."""
    server.put(lock(reservation=RESERVED._replace(state=now)))
    answer = dislock("free", "k", input="y\n")
    assert (answer.exit_code, state()) == (0, (GONE, None))
    assert "reserved " in answer.stdout
    assert f"so that the next message is sent? {words}" in answer.stderr
    assert "Nobody holds" not in answer.stderr
    assert answer.stderr.endswith("Ended the reservation of k.\n")
    done = "ended the reservation of lock 'k' for task 'id-9'"
    assert caplog.messages == [f"Command: 'me' on here {done}."]


@pytest.mark.parametrize(
    ("given", "outcome", "left"),
    [("n\ny\n", ["left", "freed"], (HELD, None)), ("y\nn\n", ["freed", "left"], (GONE, "id-9"))],
)
def test_lease_and_reservation_are_asked_for_one_by_one(
    dislock, server, state, given, outcome, left
):
    """A task may run while its key is reserved for a message that was purged."""
    server.put(lock(holders=[holder()], reservation=RESERVED))
    answer = dislock.json("free", "k", input=given)
    assert (outcomes(answer), state()) == (outcome, left)
    assert {"key": "k", "reserved_for": "id-9", "outcome": outcome[1]} in answer


@pytest.mark.parametrize("wanted", ["parked-2", "parked-2:0:0"])
def test_a_parked_task_is_searched_in_all_lines(dislock, server, enlist, caplog, wanted):
    """By its ticket or its id; what is dropped is shown before; a damaged line costs nothing."""

    @dislock.app.task(name="shop.pay", shared=False)
    def pay(): ...

    line = [place(), place(2)]
    server.put(lock("k", holders=[holder()], waiting=2, line=line), lock("j"))
    enlist("i", "j", "k")
    server.damage("i")
    answer = dislock("drop", wanted, input="y\n")
    assert answer.exit_code == 0
    assert "shop.pay[parked-2], place 2 in line for lock k, parked for 5.0 s" in answer.stderr
    assert "Not looked into: lock server " in answer.stderr
    assert "'dislock:{i}'" in answer.stderr
    assert "Dropped.\n" in answer.stderr
    assert [one.id for one in server.overview.lock("dislock:{k}").line] == ["parked-1"]
    assert dislock.app.AsyncResult("parked-2").state == "REVOKED"
    done = "dropped the parked task of ticket 'parked-2:0:0' from the line of lock 'k'"
    assert f"Command: 'me' on here {done}." in caplog.messages
    assert dislock("drop", wanted, "--key", "i", "--yes").exit_code == FOUND
    answer = dislock("drop", wanted, "--key", "k", "--yes")
    assert (answer.exit_code, answer.stderr) == (FOUND, f"No parked task {wanted} is in line.\n")


def test_what_was_set_aside_is_put_back(dislock, server):
    """Each ticket says what became of it; a finding if nothing was sent."""
    server.put(lock(waiting=1, line=[place(routing_key="of-put-back")]))
    record = server.send("HGET", "dislock:{k}:tickets", "parked-1:0:0")
    message = record[record.index(b'1 {"') :]
    others = record.replace(server.broker.encode(), b"other")
    for ticket, kept in (
        *(("t1:0:0", record), ("t2:0:0", "1 "), ("u", message), ("v", others)),
        ("w", b"1 damaged " + message),
    ):
        server.send("HSET", "dislock:{k}:aside", ticket, kept)
    answer = dislock("put-back", "k", "--ticket", "t1:0:0")
    assert (answer.exit_code, answer.stdout) == (0, "t1:0:0: put back\n")
    answer = {one["ticket"]: one["problem"] for one in dislock.json("put-back", "k")}
    assert answer.pop("t2:0:0").startswith("its message is lost")
    assert answer == {"u": None, "v": "its message belongs to another broker", "w": None}
    assert dislock("put-back", "k").exit_code == FOUND
    assert set(server.contents()["dislock:{k}:aside"]) == {b"t2:0:0", b"v"}
    answer = dislock("put-back", "j")
    assert (answer.exit_code, answer.stderr) == (FOUND, "Nothing is set aside there.\n")
    with dislock.app.connection_for_read() as connection:
        queue = connection.SimpleQueue("of-put-back")
        assert [queue.get(block=False).headers["id"] for _ in range(3)] == ["parked-1"] * 3


@pytest.mark.parametrize("command", ["drop id", "limit k 2", "put-back k"])
def test_several_servers_keep_no_lines(dislock, server, command):
    """That is said, and nothing is searched; they admit one lease at most."""
    server.keeps_lines, server.kind = False, "quorum"
    assert dislock(*command.split()).exit_code == USAGE
    assert server.contents() == {}

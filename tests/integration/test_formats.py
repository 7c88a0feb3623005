"""Records and messages of a made-up next release: each is counted, passed or put off by its head.

The next release writes a higher version, and fields that are not known here behind the head.
"""

import json
import time

import pytest

from celery_dislock.beat import DONE, SENT_SINCE
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import LaterReleaseError
from celery_dislock.parking.epoch import Epoch
from celery_dislock.parking.store import Bounds
from celery_dislock.scripts import RENEW_STALLED, TICK
from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.reservations import Reservation, Reserved
from tests.driven import reservation
from tests.integration.parked import LOCK, LONG, REPLACES, TURN, Line, sent

DAY = 86400  # seconds
HOLDER = json.dumps({"id": "new", "more": [1]})
NOW = 2_000_000_000_000  # a time of sending that is over, in microseconds
NEWEST = Bounds(most=1, overflow="replace")  # of tasks with "cancel"


@pytest.fixture
def broker(server):
    return Line(server)


def field_of(server, key, field):
    return server.client().hget(key, field)


class TestLease:
    """A later version of a lease is counted; of an unknown mode, as exclusive and as shared."""

    def lease(self, server, mode, version=2):
        ends = server.now_ms + 30_000
        record = f"{version} {ends} 7 {server.now_ms} {mode} new {HOLDER}"
        server.send("HSET", LOCK, "new@w:1/1", record)
        server.send("PEXPIRE", LOCK, 30_000)

    @pytest.mark.parametrize(
        ("mode", "asked", "admitted"),
        [
            ("x", {}, False),
            ("x", {"limit": 2}, True),
            ("x", {"mode": "shared"}, False),
            ("s", {"mode": "shared"}, True),
            ("s", {"limit": 2}, False),
            ("w", {"limit": 2}, False),
            ("w", {"mode": "shared"}, False),
        ],
    )
    def test_it_takes_the_room_that_its_head_says(self, broker, server, mode, asked, admitted):
        """A lease of a later release counts by its mode, and ends when its head says."""
        self.lease(server, mode)
        assert broker.wait("me@w:1/1", place=0, **asked) is admitted
        assert broker.store.holders(LOCK)[0].owner == "new@w:1/1"
        server.advance(31)
        assert broker.wait("you@w:1/1", place=0, **asked)

    def test_what_goes_on_with_it_writes_it_as_it_was(self, broker, server):
        """The main process renews it, and it is left to run out: nothing of it is lost."""
        self.lease(server, "w", version=31)
        server.advance(20)
        assert server.run(RENEW_STALLED, [LOCK], "new@w:1/", 30_000, 1, 0) > 0
        record = field_of(server, LOCK, "new@w:1/1").split(b" ", 5)
        assert (record[0], record[4:]) == (b"31", [b"w", f"new {HOLDER}".encode()])
        assert broker.store.release_dead([LOCK], "new@w:1/", Ending(at_least=LONG)) == 1
        (left,) = server.client().hgetall(LOCK).values()
        assert (left.split(b" ")[0], left.endswith(HOLDER.encode())) == (b"31", True)

    def test_its_holder_is_told_of_a_newer_task(self, broker, server):
        """The mark is put into the JSON of its record, and nothing else of that is changed."""
        self.lease(server, "x", version=31)
        assert broker.park("b", bounds=NEWEST, sent=NOW) == "parked"
        told = json.dumps({"superseded": "b"})[:-1]
        ends = f"x new {told},{HOLDER[1:]}".replace(": ", ":", 1).encode()
        assert field_of(server, LOCK, "new@w:1/1").endswith(ends)
        assert broker.store.renew([([LOCK], "new@w:1/1", LONG)], within=1.0) == ["b"]
        assert broker.leave("b")
        assert field_of(server, LOCK, "new@w:1/1").endswith(f"x new {HOLDER}".encode())
        assert broker.store.renew([([LOCK], "new@w:1/1", LONG)], within=1.0) == [True]


class TestPlace:
    """A waiter of a later version is handed the lock on the terms of its head, or waited for."""

    def place(self, server, mode, seconds):
        record = f"2 {server.now_ms + seconds * 1000} 30000 {mode}:1 new {HOLDER}"
        server.send("HSET", f"{LOCK}:places", "new@w:1/1", record)
        server.send("ZADD", f"{LOCK}:line", 1, "new@w:1/1")

    def test_it_is_handed_the_lock(self, broker, server):
        """A place of a later release is served in its turn, with the record that it wrote."""
        broker.ask("first")
        self.place(server, "x", 60)
        broker.wait("next@w:1/1")
        broker.end("first")
        assert broker.owners() == ["new@w:1/1"]
        record = field_of(server, LOCK, "new@w:1/1")
        assert (record[:2], record.endswith(HOLDER.encode())) == (b"2 ", True)

    def test_on_terms_that_are_not_known_it_stops_the_line_until_its_deadline(self, broker, server):
        """Nobody here can grant them, so the next waits until that place is over."""
        broker.ask("first")
        self.place(server, "w", 60)
        broker.wait("next@w:1/1")
        broker.end("first")
        assert broker.owners() == []
        server.advance(61)
        broker.sweep()
        assert broker.owners() == ["next@w:1/1"]


def newer(record):
    """Return the record of a ticket, or of a claim, as the next release would write it."""
    *head, terms, message = record.partition(b" x:1")
    return b"2" + head[0][1:] + b" stations=w:3" + message if terms else None


class TestTicket:
    """A ticket of a later version has its turn; who cannot read all of it does not claim it."""

    @pytest.fixture
    def ticket(self, broker, server):
        """Two tasks are in line; the next release has parked the first of them."""
        broker.ask("first")
        for task in "ab":
            broker.park(task, message=sent(5))
        record = broker.record_of("a")
        changed = newer(record)
        server.send("HSET", f"{LOCK}:tickets", "a:0:0", changed)
        server.send("HINCRBY", f"{LOCK}:tickets", "bytes", len(changed) - len(record))
        return changed

    def test_it_has_its_turn_and_is_not_claimed_here(self, broker, ticket, server):
        """Nothing is set aside; after its turn has run out it has another one."""
        broker.end("first")
        assert [turn.message for turn in broker.published] == [sent(5)]
        assert broker.given() == ["a"]
        for _ in range(3):
            assert broker.claim("a") == "later"
            server.advance(TURN * 20)
            broker.sweep()
            assert broker.given() == ["a"]
        kept = broker.record_of("a")
        assert (kept[:2], b"stations=w:3" in kept) == (b"2 ", True)
        assert broker.records().aside == {}
        server.send("HSET", f"{LOCK}:tickets", "a:0:0", ticket)  # back to how it was
        assert broker.park("a", 3) == "parked"

    def test_it_can_be_dropped_revoked_and_replaced(self, broker, ticket):
        """By people, by its sender, and where the oldest makes room."""
        assert broker.lines.drop(LOCK, "a:0:0", '"replaced":"why"').message
        broker.park("c")
        broker.client.hset(f"{LOCK}:tickets", "c:0:0", newer(broker.record_of("c")))
        assert broker.leave("c")
        assert broker.line() == ["b"]
        assert broker.park("d", message=sent(9), bounds=REPLACES) == "parked"
        assert broker.line() == ["d"]

    def test_of_those_in_line_the_one_that_was_sent_last_stays(self, broker, ticket):
        """A newcomer that was sent before it ends, and takes nobody's place."""
        assert broker.leave("b")
        assert broker.park("older", message=sent(4), bounds=NEWEST).replaced == {"older": sent(4)}
        assert broker.line() == ["a"]
        assert broker.park("newer", message=sent(6), bounds=NEWEST) == "parked"
        assert broker.line() == ["newer"]

    def test_a_claim_is_not_deleted_and_claims_again_when_its_process_is_gone(self, broker, server):
        """A claim of a later release keeps a copy off while its lease lives, and no longer."""
        broker.ask("first")
        broker.park("a")
        broker.end("first")
        broker.claim("a", 1)
        claim = newer(field_of(server, f"{LOCK}:running", "a:0:0"))
        server.send("HSET", f"{LOCK}:running", "a:0:0", claim)
        assert broker.claim("a", 2) == "refused"
        broker.clear("a")
        server.advance(8 * DAY)
        server.send("HSET", f"{LOCK}:running", "a:0:0", claim)
        broker.sweep()
        assert field_of(server, f"{LOCK}:running", "a:0:0") == claim
        assert broker.claim("a", 3) == "granted"


def test_a_done_mark_counts_by_its_key_alone(broker, server):
    """Whatever a later release writes into it, that work is done."""
    server.send("SET", f"{LOCK}:done:a:0:0", "2 what it means later", "PX", 100_000)
    assert broker.claim("a") == "done"


@pytest.mark.parametrize(
    ("record", "admitted", "later"),
    [
        ("limit 0 {now} 0", False, False),
        ("limit 3 {now} 0", True, True),
        ("rate 1/60000 {now} 0", False, False),
        ("back - {now} {end}", False, True),
    ],
    ids=["a pause", "a limit", "a rate", "a hold-back"],
)
def test_what_people_set_counts_by_its_head(broker, server, record, admitted, later):
    """What a later release adds to a limit, a rate or a hold-back is passed over."""
    terms = {"limit": 9, "rate": Rate(9, 60.0)} if "limit" not in record else {}
    broker.ask("first", **terms)
    written = record.format(now=server.now_ms, end=server.now_ms + 5000)
    server.send("SET", f"{LOCK}:limit", f"3 {written} new more text")
    assert broker.wait("me@w:1/1", place=0, **terms) is admitted
    server.advance(5)
    assert broker.wait("me@w:1/1", place=0, **terms) is later
    if "limit" in record:
        value = broker.store.override(LOCK, limit=None)["limit"].value
        assert value.decode() == record.split()[1]


@pytest.mark.parametrize("which", ["waits", "began"])
def test_the_newest_task_is_known_by_its_head(broker, server, which):
    """A task that was sent before it ends, and is told which one came; one sent later runs."""
    server.send("HSET", f"{LOCK}:newest", which, f"2 {NOW - 5} x:1 a%20b new more text")
    server.send("PEXPIRE", f"{LOCK}:newest", DAY * 1000)
    with pytest.raises(Replaced) as told:
        broker.ask("older", sent=NOW - 6)
    assert told.value.by == "a%20b"
    assert broker.ask("a b", sent=NOW - 5) == "granted"
    broker.clear("a b")
    assert broker.ask("newer", sent=NOW - 4) == "granted"


def test_the_starts_are_kept_as_a_later_version_wants_them(broker, server):
    """This release keeps as many starts as the most that any has asked for."""
    rate = {"limit": 9, "rate": Rate(1, 1.0)}
    broker.ask("first", **rate)
    server.send("LTRIM", f"{LOCK}:starts", 0, 0)
    server.send("RPUSH", f"{LOCK}:starts", "2 5 60000 new")
    server.advance(1)
    assert broker.wait("me@w:1/1", place=0, **rate)
    kept = server.send("LRANGE", f"{LOCK}:starts", 0, -1)
    assert (len(kept), kept[-1]) == (3, b"1 5 60000")


def test_the_number_of_a_line_in_the_index_may_be_anything(broker, server):
    """Only that it is there counts."""
    server.send("HSET", "dislock:lines:here", LOCK, "2 7 new")
    broker.ask("first")
    assert broker.park("a") == "parked"


def test_an_epoch_is_compared_by_its_head_and_left_alone(broker, server):
    """A record of a later version is not written here, and a loss is told by workers of then."""
    name = "dislock:epoch:here"
    known, new = (Epoch(server, "dislock", "here") for _ in range(2))
    known.look(1)
    kept = server.client().get(name).replace(b"1 ", b"2 ", 1) + b" new"
    server.send("SET", name, kept)
    assert (known.look(2), new.look(2), new.is_known, new.last_loss()) == (None, None, True, None)
    later = kept.replace(kept.split()[1], b"ab")
    server.send("SET", name, later)
    assert known.look(2) is None
    assert server.client().get(name) == later


def test_beats_claim_by_when_an_entry_was_last_sent(broker, server):
    """A later version of its record says that another beat has sent this tick; then it is due."""
    beat, last = f"{LOCK}:beat", server.now_ms * 1000
    (token,) = broker.store.acquire([LOCK], "b@w/1", LONG, "{}").tokens
    server.send("HSET", beat, "entry", f"2 {last} 7 - new")

    def claim(before):
        known = "b@w/1", token, server.now_ms * 1000, 30_000_000, "entry", before
        return server.run(TICK, [LOCK, beat], *known)

    assert claim(last - 1) == [SENT_SINCE, str(last).encode()]
    assert claim(last) == [DONE]


class TestReservation:
    """It is compared with nothing, and neither written nor deleted: messages go out without one."""

    MINE = Reservation(LOCK, "b", "end", 60.0, "ab", 2)

    @pytest.fixture
    def record(self, server):
        ends = server.now_ms + 900_000
        record = f"2 w {ends} new-id a-field-of-then {server.now_ms}".encode()
        server.send("SET", f"{LOCK}:unique", record, "PX", 900_000)
        return record

    def test_nothing_touches_it(self, broker, server, record):
        """A reservation of a later release is neither ended nor replaced, and prevents no run."""
        kept = broker.store.reservations
        assert kept.reserve(self.MINE, "nonce") is None
        assert kept.reserve(self.MINE, "nonce", replaces=True) is None
        assert kept.reserve(self.MINE, "nonce", again=True) is None
        assert kept.confirm(self.MINE) is False
        for until in ("start", "end", "expiry"):
            kept.begin(self.MINE._replace(until=until))
        assert kept.end(self.MINE) is False
        kept.end_waiting(self.MINE)
        granted = broker.store.acquire([LOCK], "b@w/1", LONG, "{}", reservation=self.MINE)
        assert granted.tokens
        broker.end("b", reservation=self.MINE)
        assert server.client().get(f"{LOCK}:unique") == record
        server.advance(901)  # its expiry is that of the key, which any release can end
        server.end_keys()
        assert isinstance(kept.reserve(self.MINE, "nonce"), Reserved)


class TestMessage:
    """A header of a later version; some of its members mean the same in every version."""

    def test_a_message_is_sent_without_a_reservation_that_is_newer(self, shop, caplog):
        """With one warning, however many there are."""
        task = shop.declare(lock_unique_until="end")
        shop.server.send("SET", f"{LOCK}:unique", b"2 w 9999999999999 x new", "PX", 900_000)
        for task_id in "23":
            shop.run(task, task_id)
        assert shop.ran == ["2", "3"]
        assert caplog.text.count("was written by a later release of celery-dislock") == 1
        assert "delete" not in caplog.text

    @pytest.mark.parametrize("note", ["ticket", "held"])
    def test_what_has_a_turn_or_a_lease_of_then_is_put_off_for_a_day(self, shop, caplog, note):
        """It does not run; the task fails after that, and the error says why."""
        task = shop.declare()
        notes = {"ticket": [LOCK, "2:0:0"]} if note == "ticket" else {"held": ["2@w:1/x.1", LOCK]}
        header = {"v": 2, **notes, "new": {"a": 1}}
        shop.send(task, "2", headers={"dislock": header})
        for _ in range(5):
            shop.work(later=90)
        (waiting,) = shop.put_off
        assert waiting.message.headers["dislock"].items() >= header.items()
        assert "was written by a later release of celery-dislock" in caplog.text
        header["since"] = time.time() - 2 * DAY  # for so long it was in line
        shop.run(task, headers={"dislock": header})
        assert (shop.ran, shop.app.AsyncResult("2").state) == ([], "PENDING")
        shop.run(task, headers={"dislock": {**header, "later": time.time() - DAY - 1}})
        assert shop.ran == []
        result = shop.app.AsyncResult("2")
        assert (result.state, type(result.result)) == ("FAILURE", LaterReleaseError)

    def test_all_else_is_ignored_kept_and_sent_on(self, shop):
        """It runs; a turn is written into it; what is dropped says so."""
        task = shop.declare()
        header = {"v": 2, "new": {"a": 1}, "put_off": "?"}
        with shop.held():
            for task_id in "23":
                shop.send(task, task_id, headers={"dislock": header})
            shop.work()
            shop.other.lines.drop(LOCK, "3:0:0", '"replaced":"dropped by an operator"')
        (turn,) = shop.sent
        assert turn["ticket"] == [LOCK, "2:0:0"]
        assert turn.items() >= {"v": 2, "new": {"a": 1}}.items()
        shop.sweep()
        shop.work()
        dropped = shop.app.AsyncResult("3")
        assert (dropped.state, str(dropped.result)) == ("REVOKED", "dropped by an operator")
        assert shop.line == []

    @pytest.fixture
    def later(self, shop):
        """Let the next release have sent what is in the queue."""

        def later(nth=-1, **notes):
            header = shop.queue[nth]["headers"].setdefault("dislock", {})
            header |= {"v": 2, "new": {"a": 1}, **notes}

        return later

    @pytest.mark.parametrize(
        "options",
        [
            {"lock_on_conflict": "cancel"},
            {"lock_queue_limit": 1, "lock_queue_overflow": "replace"},
        ],
        ids=["cancel", "replace"],
    )
    def test_of_those_in_line_the_one_that_was_sent_last_stays(self, shop, later, options):
        """Whichever came first: an older one that comes later ends as REVOKED."""
        task = shop.declare(**options)
        now = int(shop.clock() * 1e6)
        with shop.held():
            for task_id, sent_at in (("newer", now - 1000), ("older", now - 2000)):
                shop.send(task, task_id)
                later(sent=sent_at)
                shop.work()
            assert (shop.line, shop.app.AsyncResult("older").state) == (["newer"], "REVOKED")

    def test_a_task_that_runs_ends_for_one_that_was_sent_later_and_no_other(self, shop, later):
        """With "cancel", of three tasks the newest stays."""

        def body(self):
            for task_id, sent_at in (("newer", now + 2), ("older", now)):
                shop.send(task, task_id)
                later(sent=sent_at)
                shop.work()
            waits.extend(holder.superseded for holder in shop.other.store.holders(LOCK))

        waits = []
        task = shop.declare(body, lock_on_conflict="cancel")
        now = int(shop.clock() * 1e6) - 9000
        shop.send(task, "first")
        later(sent=now + 1)
        shop.work()
        states = {one: shop.app.AsyncResult(one).state for one in ("newer", "older")}
        assert (waits, states) == (["newer"], {"newer": "PARKED", "older": "REVOKED"})

    @pytest.mark.parametrize("until", ["start", "end", "expiry"])
    def test_a_reservation_ends_with_its_task(self, shop, later, until):
        """Its first four members are those of today."""
        seen = []
        task = shop.declare(lambda self: seen.append(reservation(self)), lock_unique_until=until)
        shop.send(task, "2")
        later(unique=[*shop.sent[0]["unique"], "new"])
        shop.work()
        states = {"start": [None], "end": ["running"], "expiry": ["running"]}
        assert [one and one.state for one in seen] == states[until]
        left = reservation(task)
        assert (left and left.state) == ("ended" if until == "expiry" else None)

    def test_of_messages_that_replace_each_other_the_newest_runs(self, shop, later):
        """With lock_on_duplicate="replace", in whatever order they come."""
        task = shop.declare(lock_unique_until="start", lock_on_duplicate="replace")
        for task_id in ("older", "newer"):
            shop.send(task, task_id)
            later()
        shop.work()
        assert (shop.ran, shop.app.AsyncResult("older").state) == (["newer"], "REVOKED")

    @pytest.mark.parametrize("release", ["this", "the next"])
    @pytest.mark.parametrize(
        ("until", "is_kept"), [("start", True), ("end", True), ("expiry", False)]
    )
    def test_a_key_stays_reserved_while_its_task_is_parked(
        self, shop, later, until, is_kept, release
    ):
        """As long as a worker sweeps its line; with "expiry" no longer than it says."""
        task = shop.declare(lock_unique_until=until, lock_unique_for=90)
        with shop.held():
            shop.send(task, "2")
            if release == "the next":
                later()
            shop.work()
            for _ in range(4):
                shop.server.advance(30)
                shop.sweep()
            assert (reservation(task) is not None) is is_kept

    def test_its_tries_have_an_end(self, shop, later):
        """With "retry": the time of the last one is not set anew by each worker."""
        task = shop.declare(lock_on_conflict="retry", lock_retry_for=60)
        with shop.held():
            for task_id, until in (("2", time.time() + 30), ("3", time.time() - 1)):
                shop.send(task, task_id)
                later(retry_until=until)
                shop.work()
        (waiting,) = shop.put_off
        assert time.time() < waiting.message.headers["dislock"]["retry_until"] < time.time() + 31
        states = [shop.app.AsyncResult(one).state for one in ("2", "3")]
        assert (shop.ran, states) == ([], ["RETRY", "FAILURE"])

    def test_what_it_may_hold_unknown_to_it_is_released(self, shop, later):
        """A lock that an earlier delivery has asked for without a reply."""
        task = shop.declare(lock_on_conflict="skip")
        shop.other.ask("2")
        shop.send(task, "2")
        later(given_up=["2@w:1/1"])
        shop.work()
        assert shop.ran == ["2"]

    def test_a_retry_starts_a_wait_of_its_own(self, shop, later):
        """It takes along what this release does not know, and what is the message's own."""

        def body(self):
            if not self.request.retries:
                raise self.retry(countdown=60)

        task = shop.declare(body, lock_on_conflict="cancel")
        now = int(shop.clock() * 1e6)
        shop.send(task, "2")
        later(put_off=3, retry_until=now, since=now, sent=now - 1)
        shop.work()
        (waiting,) = shop.put_off
        expected = {"v": 2, "new": {"a": 1}, "sent": now - 1}
        assert waiting.message.headers["dislock"] == expected

    def test_a_task_that_has_failed_for_that_gives_its_turn_on(self, shop):
        """Its line goes on with the next."""
        task = shop.declare()
        with shop.held():
            for task_id in "23":
                shop.send(task, task_id)
            shop.work()
        shop.queue[0]["headers"]["dislock"] |= {"v": 2, "later": time.time() - DAY - 1}
        shop.work()
        assert (shop.ran, shop.line) == (["3"], [])
        assert shop.app.AsyncResult("2").state == "FAILURE"

    def test_a_stored_message_of_a_later_version_is_published(self, shop):
        """What its first line has more is left out."""
        task = shop.declare()
        with shop.held():
            shop.run(task)
            record = shop.other.record_of("2")
            old, new = b'1 {"sent":0,"until":"",', b'2 {"sent":0,"until":"","new":1,'
            assert record.count(old) == 1
            record = record.replace(old, new)
            head = record.split(b" ", 6)
            head[5] = str(int(head[5]) + len(new) - len(old)).encode()
            record = b" ".join(head)
            grown = len(record) - len(shop.other.record_of("2"))
            shop.server.send("HSET", f"{LOCK}:tickets", "2:0:0", record)
            shop.server.send("HINCRBY", f"{LOCK}:tickets", "bytes", grown)
        shop.work()
        assert shop.ran == ["2"]

    def test_who_was_told_of_its_end_by_an_older_release_does_not_run(self, shop):
        """The sweep of this release has written why into a header of the next one."""
        task = shop.declare()
        shop.server.away = True  # its message says why; nobody is asked
        result = shop.run(task, headers={"dislock": {"v": 2, "replaced": "a newer one", "new": 1}})
        assert (shop.ran, result.state, str(result.result)) == ([], "REVOKED", "a newer one")

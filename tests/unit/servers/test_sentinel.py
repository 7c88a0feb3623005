"""Which of several answers about the master counts."""

import inspect
import sys
import threading

import pytest
import redis

from celery_dislock.servers import sentinel
from celery_dislock.servers.connections import store_error
from celery_dislock.servers.sentinel import (
    CONFIRMED_FOR,
    LEFT_ALONE,
    SentinelReply,
    Sentinels,
    choose,
    parse_sentinel_reply,
)

OLD, NEW = ("10.0.0.1", 6379), ("10.0.0.2", 6379)


class Clock:
    """Seconds that the test lets pass."""

    now = 1000.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class FakeSentinel:
    """Says what it is told to say, and notes how often it was asked."""

    def __init__(self, number, clock):
        self.address = (f"s{number}", 26379)
        self.says = SentinelReply(1, OLD)
        self.takes = 0.0
        self.asked = []
        self._clock = clock

    def ask(self, _commands, *, within, again):
        assert again
        self.asked.append(within)
        self._clock.advance(min(self.takes, within))
        if isinstance(self.says, Exception):
            raise store_error(self.address[0], self.says)
        return answered(self.says)

    def close(self):
        pass


def answered(says):
    """The two replies of a Sentinel that says this."""
    host, port = (str(part).encode() for part in says.address or ("", 0))
    fields = {b"ip": host, b"port": port, b"num-other-sentinels": b"2"}
    fields |= {b"flags": b"master", b"config-epoch": str(says.epoch).encode()}
    return [fields, [host, port]]


class Connection:
    def __init__(self, address):
        self.host, self.port = address


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def three(clock):
    return [FakeSentinel(number, clock) for number in range(3)]


@pytest.fixture
def sentinels(three, clock):
    return watching(three, clock)


def watching(three, clock):
    return Sentinels({one.address: one for one in three}, "locks", timeout=2.0, clock=clock)


def asked(three):
    return [len(one.asked) for one in three]


# Whose answer holds


@pytest.mark.parametrize(
    ("answers", "master"),
    [
        ([], None),
        ([SentinelReply(1, OLD), SentinelReply(1, OLD)], OLD),
        ([SentinelReply(1, OLD), SentinelReply(2, NEW), SentinelReply(1, OLD)], NEW),
        ([SentinelReply(1, OLD), SentinelReply(2, None)], None),
        ([SentinelReply(1, None), SentinelReply(1, OLD)], OLD),
        ([SentinelReply(1, OLD), SentinelReply(1, None, is_replaced=True)], None),
        ([SentinelReply(2, NEW), SentinelReply(1, OLD, is_replaced=True)], NEW),
    ],
    ids=["none", "all", "newest", "newest down", "one's view", "about to change", "old change"],
)
def test_the_newest_answer_holds(answers, master):
    """Each failover has a higher epoch; while one is under way nobody is the master."""
    assert choose(answers) == master


@pytest.mark.parametrize(
    ("flags", "epoch", "at", "named", "answer"),
    [
        ("master", 3, OLD, OLD, SentinelReply(3, OLD)),
        ("master,disconnected", 3, OLD, OLD, SentinelReply(3, OLD)),
        ("s_down,master", 3, OLD, OLD, SentinelReply(3, None)),
        ("s_down,o_down,master", 3, OLD, OLD, SentinelReply(3, None)),
        ("master,failover_in_progress", 3, OLD, OLD, SentinelReply(3, OLD, is_replaced=True)),
        ("s_down,master,failover_in_progress", 4, OLD, NEW, SentinelReply(4, NEW)),
    ],
)
@pytest.mark.parametrize("protocol", [2, 3])
def test_what_a_sentinel_says(flags, epoch, at, named, answer, protocol):
    """The next master is named from the moment at which it is one, before the failover is over."""
    fields = {
        b"name": b"locks",
        b"ip": at[0].encode(),
        b"port": str(at[1]).encode(),
        b"flags": flags.encode(),
        b"num-other-sentinels": b"2",
        b"config-epoch": str(epoch).encode(),
    }
    state = fields if protocol == 3 else [part for pair in fields.items() for part in pair]
    name = [named[0].encode(), str(named[1]).encode()]
    assert parse_sentinel_reply(state, name, 2) == answer
    assert parse_sentinel_reply(state, name, 3) is None


# How often they are asked


def test_an_answer_holds_for_a_moment(sentinels, three, clock):
    """Within it nobody is asked again; after it all are.  An answer is as old as its question."""
    assert sentinels.find() == OLD
    clock.advance(CONFIRMED_FOR * 0.9)
    for _ in range(100):
        sentinels.confirm(Connection(OLD))
    assert asked(three) == [1, 1, 1]
    clock.advance(CONFIRMED_FOR)
    three[2].takes = CONFIRMED_FOR
    for nth in (2, 3):
        sentinels.confirm(Connection(OLD))
        assert asked(three) == [nth] * 3


# Those that do not answer


def test_one_that_is_away_is_left_alone_for_a_while(sentinels, three, clock):
    """It costs its part of the time once, then nothing for ten times as long."""
    three[0].says = redis.TimeoutError("silence")
    three[0].takes = 10.0
    began = clock.now
    sentinels.find(within=0.9)
    took = clock.now - began
    assert took == pytest.approx(0.3)
    while clock.now < began + took * LEFT_ALONE - CONFIRMED_FOR:
        clock.advance(CONFIRMED_FOR)
        sentinels.confirm(Connection(OLD))
    assert asked(three)[0] == 1
    clock.advance(2 * CONFIRMED_FOR)
    sentinels.confirm(Connection(OLD))
    assert asked(three)[0] == 2


def test_those_left_alone_are_asked_where_no_other_answers(sentinels, three, clock):
    """They may have come back before the others went away."""
    three[0].says = redis.ConnectionError("refused")
    three[0].takes = 0.5
    sentinels.find()
    three[0].says = SentinelReply(1, OLD)
    for one in three[1:]:
        one.says = redis.ConnectionError("refused")
    clock.advance(CONFIRMED_FOR)
    assert sentinels.find() == OLD
    assert asked(three) == [2, 2, 2]


def test_while_none_answers_the_last_master_counts(sentinels, three, clock, caplog):
    """For open connections, not for new ones; the log says so once, and when it is over."""
    caplog.set_level("INFO", "celery_dislock")
    sentinels.find()
    for one in three:
        one.says = redis.ConnectionError("refused")
    for _ in range(3):
        clock.advance(CONFIRMED_FOR)
        sentinels.confirm(Connection(OLD))
    with pytest.raises(redis.ConnectionError, match="call 10"):
        sentinels.confirm(Connection(NEW))
    [record] = caplog.records
    said_once = "No Sentinel answers; 10.0.0.1:6379 counts as the master until one does"
    assert said_once in record.message
    assert "s1:26379: the connection broke, or could not be made" in record.message
    with pytest.raises(redis.ConnectionError, match="no Sentinel names a master"):
        sentinels.find()
    sentinels.confirm(Connection(OLD))
    three[1].says = SentinelReply(1, OLD)
    sentinels.find()
    assert [record.message for record in caplog.records[1:]] == ["The Sentinels answer again."]


def test_sentinels_that_cost_time_are_asked_less_often(sentinels, three, clock):
    """Where all stand still, commands wait for them for a tenth of the time at most."""
    sentinels.find()
    for one in three:
        one.says = redis.TimeoutError("silence")
        one.takes = 10.0
    began, waited = clock.advance(CONFIRMED_FOR) or clock.now, 0.0
    while clock.now < began + 60.0:
        before = clock.now
        sentinels.confirm(Connection(OLD))
        waited += clock.now - before
        clock.advance(0.1)
    assert 0 < waited < 60.0 / 5


def test_who_has_little_time_does_not_wait_for_another(sentinels, three):
    """The watchdog is not held up by a command that waits for a Sentinel."""
    inside, done = threading.Event(), threading.Event()

    def ask(*_args, **_options):
        inside.set()
        done.wait()
        return answered(SentinelReply(1, OLD))

    three[0].ask = ask
    slow = threading.Thread(target=sentinels.find)
    slow.start()
    inside.wait()
    with pytest.raises(redis.ConnectionError, match="have not answered yet"):
        sentinels.confirm(Connection(OLD), 0.01)
    done.set()
    slow.join()
    sentinels.confirm(Connection(OLD))


def test_a_signal_handler_may_ask_while_its_thread_does(sentinels, three):
    """It asks on connections of its own, and does not wait for the question that it interrupts."""
    answers = []

    def ask(*_args, **_options):
        three[0].ask = lambda *_args, **_options: answered(SentinelReply(1, OLD))
        answers.append(sentinels.find())
        return answered(SentinelReply(1, OLD))

    three[0].ask = ask
    asking = threading.Thread(target=lambda: answers.append(sentinels.find()), daemon=True)
    asking.start()
    asking.join(30)
    assert answers == [OLD, OLD]


class Struck(BaseException):
    """What a signal handler raises."""


def strike(call, nth):
    """
    Raise at the nth instruction of the module; return whether it has that many.

    A line counts as one more: early releases of Python 3.12 trace lines alone.
    """
    seen = 0

    def trace(frame, event, _arg):
        nonlocal seen
        code = frame.f_code  # what is raised while a generator is closed, Python drops
        if code.co_filename != sentinel.__file__ or code.co_flags & inspect.CO_GENERATOR:
            return None
        frame.f_trace_opcodes = True
        seen += event in {"line", "opcode"}
        if seen == nth:
            sys.settrace(None)
            raise Struck
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Struck:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_signal_at_whatever_instruction_lets_the_next_one_ask(three, clock):
    """A soft time limit, for one: else every later command of the process waited for ever."""
    nth = 0
    while True:
        nth += 1
        sentinels = watching(three, clock)
        if not strike(lambda: sentinels.confirm(Connection(OLD)), nth):  # noqa: B023 -- called here
            break
        sentinels.confirm(Connection(OLD), 0.0)
    assert nth > 30

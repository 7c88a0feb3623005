"""A key is that of what the worker gets, whatever the serializer makes of the arguments."""

from __future__ import annotations

import enum
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from datetime import time, timedelta, timezone
from typing import NamedTuple

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from hypothesis import given
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_dislock.keys.builders import key_builder
from celery_dislock.tasks.received import Received
from tests.declaring import declare
from tests.unit.deliveries import deliver


class Color(enum.Enum):
    RED = "red"


class Size(str, enum.Enum):
    BIG = "big"


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    __slots__ = ()


@dataclass(frozen=True)
class Order:
    x: int

    def __json__(self):  # as kombu asks for it
        return {"x": self.x, "text": str(self.x)}


@dataclass(frozen=True)
class Plain:
    x: int


class Point(NamedTuple):
    x: object
    y: object


TEXT = st.text(st.characters(), max_size=6) | st.sampled_from(["1", "yes", "~", "\ud800", "\x85"])
NUMBERS = st.integers(-(10**40), 10**40) | st.floats() | st.sampled_from([1e400, -0.0, 2**63])
SCALARS = st.one_of(
    TEXT,
    NUMBERS,
    st.booleans(),
    st.none(),
    st.binary(max_size=6),
    st.decimals(),
    st.uuids(),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, timezone.utc, timezone(timedelta(hours=2))])),
    st.sampled_from([Color.RED, Size.BIG, Level.HIGH, Name("n"), Order(7), Plain(7), time(1, 2)]),
)
KEYS = TEXT | st.integers() | st.booleans() | st.none() | st.floats() | st.sampled_from(Size)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from(["x", "y", 1, None, True]), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.frozensets(TEXT, max_size=3),
        st.dictionaries(TEXT, inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=6,
)


def call(a, b={1: 2}, *more, c=(1,), **others): ...  # noqa: B006 -- a default is not serialized


def by_call(a, b=None, *more, c=None, **others):
    """Make a key of what it sees, as a user's function does that is not robust."""
    shown = ascii([a, b, more, c, sorted(others.items())])
    return shown.replace("{", "(").replace("}", ")")


SIGNATURE = inspect.signature(call)
DECLARED = [None, "k:<a>", "k:<a.x>", "k:<b.x>:<c>", "k:<z>", "k:<others.z>", by_call]
BUILDERS = [key_builder(one, signature=SIGNATURE, task_name="t") for one in DECLARED]


def serializers():
    """Name those that are installed here."""
    for name in ("json", "pickle", "yaml", "msgpack"):
        try:
            dumps([1], name)
        except Exception as exc:  # noqa: BLE001 -- kombu's, which differs
            yield pytest.param(name, marks=pytest.mark.skip(reason=str(exc)))
        else:
            yield name


def sent(value, serializer):
    """Return what the worker gets."""
    content_type, encoding, data = dumps(value, serializer)
    return loads(data, content_type, encoding, accept={content_type})


def key_of(builder, args, kwargs):
    try:
        return builder.key(args, kwargs)
    except Exception as exc:  # noqa: BLE001 -- of a user's function, too
        return type(exc)


ARGUMENTS = st.tuples(
    st.lists(VALUES, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["c", "z", "y"]), VALUES, max_size=3),
)


@pytest.mark.parametrize("serializer", list(serializers()))
@given(arguments=ARGUMENTS)
def test_a_caller_knows_the_key_that_the_worker_will_build(serializer, arguments):
    """For all that can be sent, and however the key is declared."""
    args, kwargs = arguments
    try:
        gets = sent([args, kwargs], serializer)
    except Exception:  # noqa: BLE001 -- it is not sent
        return
    for builder in BUILDERS:
        mine = Received([builder], SIGNATURE).of(args, kwargs, serializer)
        assert key_of(builder, *mine) == key_of(builder, *gets)


@pytest.mark.parametrize(
    ("value", "serializer"),
    [*((one, "no such serializer") for one in (7, "seven", 7.5, True, None)), (object(), "json")],
    ids=["int", "str", "float", "bool", "None", "an object that cannot be sent"],
)
def test_what_no_serializer_changes_is_not_serialized(value, serializer):
    """Most arguments are text and numbers; what cannot be sent, as of an eager task, stays."""
    args, kwargs = [value], {"z": value}
    assert Received(BUILDERS, SIGNATURE).of(args, kwargs, serializer) == (args, kwargs)


class Counted(dict):
    """Counts how often it is serialized."""

    times = 0

    def items(self):
        type(self).times += 1
        return super().items()


@pytest.mark.parametrize(("declared", "times"), [("k:<a>", 0), ("k:<b.x>", 1), (None, 1)])
def test_what_no_key_reads_is_not_serialized(monkeypatch, declared, times):
    """A large argument costs a sender nothing whose key is another's."""
    monkeypatch.setattr(Counted, "times", 0)
    builder = key_builder(declared, signature=SIGNATURE, task_name="t")
    Received([builder], SIGNATURE).of([7], {"b": Counted(x=1)}, "json")
    assert Counted.times == times


def test_what_is_thrown_into_a_sender_is_no_error_of_its_arguments():
    """A time limit may end it at any instruction."""

    class Slow:
        def __json__(self):
            raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded):
        Received(BUILDERS, SIGNATURE).of([Slow()], {}, "json")


# Whoever builds a key of arguments that have not come with a message


FIRST, AS_SENT = {1: (2, 3)}, {"1": [2, 3]}


def test_a_lock_that_is_looked_at_is_the_one_that_is_taken(app, lock_server):
    """By its worker, and by an eager task."""
    taken = []
    orders = declare(app, lambda order: taken.append(*lock_server.locks()), lock_key=None)  # noqa: ARG005
    deliver(orders, "1", AS_SENT)
    orders.apply([FIRST])
    assert taken == [orders.lock_for(FIRST).key] * 2


@pytest.mark.parametrize(
    ("declared", "options", "is_one"),
    [
        ("json", {}, True),
        ("pickle", {}, False),
        ("pickle", {"serializer": "json"}, True),
        ("json", {"serializer": "pickle"}, False),
    ],
)
def test_a_key_is_reserved_as_its_message_is_serialized(app, broker, declared, options, is_one):
    """By the task's serializer, or the one that the caller names."""
    orders = declare(app, lock_key=None, lock_unique_until="end", serializer=declared)
    orders.apply_async([FIRST], **options)
    assert orders.apply_async([AS_SENT], **options).duplicate is is_one

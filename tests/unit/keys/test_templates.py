"""From a task's declaration and its arguments to a key: templates, callables and digests."""

from __future__ import annotations

import inspect
import re
import sys
from ast import literal_eval
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_dislock.exceptions import LockKeyError
from celery_dislock.keys.builders import CallableKey, key_builder
from celery_dislock.keys.templates import InvalidTemplate, check_key
from tests.unit.keys.support import LoudText, assert_valid

# No test is timed: a shared machine may stall.
examples = partial(settings, deadline=None)

TASK = "shop.export"
REFUSED = Path(__file__).with_name("refused.txt")
ID = UUID("12345678123456781234567812345678")

# Texts that are made to collide: few letters, and every character that templates below use.
tight = st.text("ab1:-_|.%#<>{}→\n%3A", max_size=4)
literals = st.text("ab1:-_%#→]", max_size=2)
# Long ones differ at their ends only.
long = st.builds(lambda begin, end: begin * 100 + end, st.sampled_from(["a:", "%\ud800"]), tight)
texts = st.one_of(tight, st.text(), long)

TEMPLATES = [
    "<a>:<b>:<c>",
    "<a>-<b>-<c>",
    "x<a>_<b>y:<c>",
    "<a>b-1<b>1_a<c>a",
    "<a>%3A:<b>5%-<c>%",
    "<<<a>>><<<b>>><<<c>>>",
    "<a>→<b>|:-<c>",
    "<a>ab^]<b>]-<c>",
    "export:<a>#<b>%5E^<c>" + "long" * 60,
]


class Color(Enum):
    """Values of every sort: allowed, nested and not allowed."""

    RED = "red"
    NUMBER = 7
    NESTED = IntEnum("Size", "S M").M
    TUPLE = (1, 2)


@dataclass
class Customer:
    """An argument with attributes."""

    id: object
    _private: str = ""


@dataclass
class Order:
    """An argument whose attribute has attributes."""

    customer: object


def signature(function):
    """Return the signature of a task's function."""
    return inspect.signature(function)


def built(declared, function, name=TASK):
    """Return the key builder of a task's function."""
    return key_builder(declared, signature=signature(function), task_name=name)


def key_of(template, **values):
    """Return the key of a template for a call with exactly these arguments."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in values]
    its = inspect.Signature(parameters)
    return key_builder(template, signature=its, task_name=TASK).key((), values)


def three(a, b, c):
    """Be a task of three required arguments."""


def optional(corp_id, year=2024, *, fmt="csv"):
    """Be a task with defaults."""


def variadic(corp_id, *args, **kwargs):
    """Be a task that takes anything more."""


def positional_only(a, /, b=2, **kwargs):
    """Be a task of which one argument has no name."""


def no_arguments():
    """Be a task that takes nothing."""


TEXTLESS = {None: "None", 1.5: "float", b"x": "bytes", Color.TUPLE: "Color of tuple"}
REMEDY = "is not allowed in a key; use str, int, bool, UUID, Enum, date, datetime or Decimal"


class TestTemplates:
    """What keys a template gives for which values."""

    @pytest.mark.parametrize(
        ("template", "values", "key"),
        [
            ("export:<corp_id>", {"corp_id": 7}, "export:7"),
            ("nightly", {}, "nightly"),
            ("<a>", {"a": "Größe 5"}, "Größe 5"),
            ("<<a>>:<a>", {"a": 1}, "<a>:1"),
            ("<<<a>>>", {"a": 1}, "<1>"),
            ("<a>:<a>", {"a": 1}, "1:1"),
            ("<a>-<b>:x", {"a": "1-2", "b": "3_4"}, "1%2D2-3_4:x"),
            ("<a>-<b>", {"a": -7, "b": 0}, "%2D7-0"),
            ("<a>:-<b>", {"a": "1-2", "b": 3}, "1-2:-3"),
            ("100%:<a>", {"a": "100%"}, "100%:100%25"),
            ("<a>→<b>", {"a": "x→", "b": "é"}, "x%E2%86%92→é"),
            ("e:<a>", {"a": "{7}:<x>"}, "e:%7B7%7D%3A%3Cx%3E"),
            ("e:<a>", {"a": "\0\x1f\x7f\x9f\u2028"}, "e:%00%1F%7F%C2%9F%E2%80%A8"),
            ("e:<a>", {"a": "\ud800"}, "e:%ED%A0%80"),
        ],
    )
    def test_key(self, template, values, key):
        """A value stands for its placeholder, encoded only where it could be misread."""
        assert key_of(template, **values) == key

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (7, "7"),
            (True, "True"),
            (ID, str(ID)),
            (Color.RED, "red"),
            (Color.NUMBER, "7"),
            (Color.NESTED, "2"),
            (date(2024, 2, 29), "2024-02-29"),
            (datetime(2024, 2, 29, 12, tzinfo=timezone.utc), "2024-02-29T12:00:00+00:00"),
            (Decimal("1.50"), "1.50"),
            (LoudText("quiet"), "quiet"),
        ],
    )
    def test_a_value_and_its_text_give_the_same_key(self, value, text):
        """What a serializer turns into text on the way locks the same as before."""
        assert key_of("k:<a>", a=value) == key_of("k:<a>", a=text)

    @pytest.mark.skipif(
        not hasattr(sys, "get_int_max_str_digits"), reason="this Python prints any int"
    )
    def test_an_int_that_python_does_not_print_is_refused(self):
        """An int with too many digits for a text is a LockKeyError with Python's reason."""
        with pytest.raises(LockKeyError, match="argument <a>: Exceeds the limit"):
            key_of("k:<a>", a=10**5000)

    @pytest.mark.parametrize(
        "order",
        [
            Order(Customer(7)),
            {"customer": {"id": 7}},
            Order({"id": 7}),
            OrderedDict(customer=SimpleNamespace(id="7")),
        ],
    )
    def test_dots_walk_attributes_and_mappings(self, order):
        """A dotted placeholder finds the same value in objects, mappings and mixtures of both."""
        assert key_of("pay:<order.customer.id>", order=order) == "pay:7"

    @pytest.mark.parametrize(
        ("order", "reason"),
        [
            # A value without one stable text.
            *((Order(Customer(value)), f"{kind} {REMEDY}") for value, kind in TEXTLESS.items()),
            (Order(Customer([1])), f"list {REMEDY}"),
            (Order(Customer(Customer(1))), f"Customer {REMEDY}"),
            # A path that leads nowhere.
            (Order(None), "None has no 'id'"),
            ({"customer": {}}, "dict has no 'id'"),
            ({}, "dict has no 'customer'"),
            ({"customer": defaultdict(int)}, "defaultdict has no 'id'"),
        ],
    )
    def test_what_has_no_text_is_refused(self, order, reason):
        """The error names the argument with its path, the type or the step, and the remedy."""
        with pytest.raises(LockKeyError) as caught:
            key_of("pay:<order.customer.id>", order=order)
        path = "order.customer.id"
        assert str(caught.value) == f"lock_key 'pay:<{path}>', argument <{path}>: {reason}"
        assert (caught.value.template, caught.value.argument) == (f"pay:<{path}>", path)


class TestBadTemplates:
    """What is refused when a task declares it."""

    @pytest.mark.parametrize("told", REFUSED.read_text("utf-8").splitlines())
    def test_refused_when_declared(self, told):
        """A template that cannot work is refused before any call, with what to write instead."""
        template, message = re.match("('.*?'): (.*)", told).groups()
        with pytest.raises(InvalidTemplate) as caught:
            built(literal_eval(template), optional)
        assert str(caught.value) == message


@pytest.mark.parametrize("template", ["e:$usd", "100%", "5%sure", "%S", "%3A", "e:%-<corp_id>"])
def test_a_dollar_or_a_percent_sign_is_no_placeholder_of_others(template):
    """Unless a name of the task, or a conversion, follows it."""
    assert built(template, optional).key((7,), {})


OF_ALL = "<corp_id>:<year>:<fmt>"
CALLS = [
    ((7,), {}),
    ([7, 2024], {}),
    ((), {"corp_id": 7}),
    ((7,), {"year": 2024}),
    ((), {"fmt": "csv", "year": 2024, "corp_id": "7"}),
]


class TestCalls:
    """How arguments are found in a call."""

    @pytest.mark.parametrize(
        ("template", "task", "args", "kwargs", "key"),
        [
            *((OF_ALL, optional, *call, "7:2024:csv") for call in CALLS),
            # A keyword named like the ``**kwargs`` parameter itself does not replace it.
            ("<kwargs.kwargs>", variadic, (7,), {"kwargs": "x"}, "x"),
            ("<a>:<b>:<kwargs.a>", positional_only, (1,), {"a": 3}, "1:2:3"),
        ],
    )
    def test_ways_to_give_an_argument(self, template, task, args, kwargs, key):
        """Arguments given by position, by keyword or by default are found by their names."""
        assert built(template, task).key(args, kwargs) == key

    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((), {}, "^shop.export.. missing 1 required positional argument: 'corp_id'"),
            ((1, 2, 3), {}, "takes from 1 to 2 positional arguments but 3 were given"),
            ((1,), {"corp_id": 1}, "multiple values for argument 'corp_id'"),
            ((1,), {"corpid": 1}, "got an unexpected keyword argument 'corpid'"),
        ],
    )
    @pytest.mark.parametrize("declared", ["<corp_id>", "fixed", None])
    def test_arguments_that_do_not_fit(self, declared, args, kwargs, message):
        """A call that the task itself could not take is the TypeError of that call."""
        builder = built(declared, optional)
        with pytest.raises(TypeError, match=message):
            builder.key(args, kwargs)

    @pytest.mark.parametrize("template", ["<extra>", "<extra.id>"])
    def test_a_variadic_keyword_that_is_not_given(self, template):
        """A name that could be in ``**kwargs`` and is not there is a LockKeyError."""
        with pytest.raises(LockKeyError, match="the call does not give it"):
            built(template, variadic).key((7,), {})


class TestInjectivity:
    """Different calls, different keys."""

    @given(one=st.tuples(texts, texts, texts), other=st.tuples(texts, texts, texts))
    @example(one=("1_b-2", "3", ""), other=("1", "2_b-3", ""))
    @example(one=(":", "", ""), other=("%3A", "", ""))
    @example(one=("", ":", ""), other=("", "", ":"))
    @examples(max_examples=100)
    def test_different_texts_never_share_a_key(self, one, other):
        """Two calls that differ in the text of any argument never meet in one lock."""
        for template in TEMPLATES:
            builder = built(template, three)
            assert (builder.key(one, {}) == builder.key(other, {})) == (one == other)

    @given(
        outer=st.tuples(literals, literals),
        inner=st.tuples(
            st.builds("{}{}{}".format, literals, st.sampled_from("1:-_#→^]"), literals),
            st.builds("{}{}{}".format, literals, st.sampled_from("1:-_#→^]"), literals),
        ),
        one=st.tuples(tight, tight, tight),
        other=st.tuples(tight, tight, tight),
    )
    @examples(max_examples=300)
    def test_any_template_that_is_accepted_is_injective(self, outer, inner, one, other):
        """Whatever literals a template has: it is refused, or keeps all different calls apart."""
        template = f"{outer[0]}<a>{inner[0]}<b>{inner[1]}<c>{outer[1]}"
        try:
            builder = built(template, three)
        except InvalidTemplate:
            return
        assert (builder.key(one, {}) == builder.key(other, {})) == (one == other)

    def test_a_value_cannot_forge_a_shortened_key(self):
        """A value that is written like a shortened key gives another key."""
        shortened = key_of("<a>", a="x" * 300)
        assert key_of("<a>", a=shortened) != shortened

    @given(a=texts, b=texts, c=texts)
    @examples()
    def test_every_key_is_valid(self, a, b, c):
        """Whatever the values: at most 200 bytes, no braces, no control characters."""
        for template in TEMPLATES:
            assert_valid(built(template, three).key((a, b, c), {}))
        for value in (a, [a, b], {a: (b, c)}):
            assert_valid(built(None, three, a or TASK).key((value, b, c), {}))


class TestDigests:
    """Keys of tasks that declare no lock_key."""

    builder = built(None, optional)

    def digest(self, value):
        """Return the key of a call with one argument."""
        return self.builder.key((value,), {})

    def test_is_pinned(self):
        """Workers of different releases agree on a digest: its value does not change."""
        value = {"ids": [1, 2.5, None, True], "when": date(2024, 2, 29), "raw": b"x", "s": {"a"}}
        assert self.digest(value) == "shop.export:135f24690fafb29e256d83d6d6be8190"

    def test_scalars_of_different_kinds_differ(self):
        """Scalars that compare or print alike, but survive serializers as they are, differ."""
        values = [1, "1", True, None, 1.0, b"1", "True", "None", "", [], {}, [1], [[1]], {1: 1}]
        keys = {self.digest(value) for value in [*values, {"1": 1}, frozenset({1}), 0, False, -1]}
        assert len(keys) == len(values) + 5

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([1, [2]], (1, (2,))),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            ({"a": 1}, OrderedDict(a=1)),
            ({0, 8}, frozenset([8, 0])),  # an order of their own
            (ID, str(ID)),
            (Decimal("1.5"), "1.5"),
            (date(2024, 2, 29), "2024-02-29"),
            (Color.RED, "red"),
            (Color.NUMBER, 7),
            (Color.TUPLE, [1, 2]),
        ],
    )
    def test_what_serializers_change_is_equal(self, one, other):
        """Values that a serializer may turn into one another give one digest."""
        assert self.digest(one) == self.digest(other)

    plain = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tight, inner, max_size=3),
        max_leaves=8,
    )

    @given(one=plain, other=plain)
    @example(one=["a", "b"], other=["ab"])
    @example(one=[["a"], "b"], other=[["a", "b"]])
    @example(one={"a": "b"}, other=["a", "b"])
    @example(one=0.0, other=-0.0)
    @examples(max_examples=200)
    def test_different_data_never_share_a_key(self, one, other):
        """Plain data share a digest exactly when they are the same data."""
        # repr tells 1, 1.0 and True apart, as == does not; sorted, as the order of a dict is not.
        same = self.sorted_repr(one) == self.sorted_repr(other)
        assert (self.digest(one) == self.digest(other)) == same

    def sorted_repr(self, value):
        """Return a text that is equal for the same data only."""
        if isinstance(value, list):
            return f"[{[self.sorted_repr(item) for item in value]}]"
        if isinstance(value, dict):
            return f"dict{sorted((key, self.sorted_repr(item)) for key, item in value.items())}"
        return repr(value)

    def test_variadic_arguments_count(self):
        """``*args`` and ``**kwargs`` are arguments like any other."""
        builder = built(None, variadic)
        calls = [((1,), {}), ((1, 2), {}), ((1,), {"x": 2}), ((1,), {"x": 3}), ((1, 2), {"x": 2})]
        assert len({builder.key(args, kwargs) for args, kwargs in calls}) == len(calls)

    @pytest.mark.parametrize(
        ("value", "kind"),
        [(Customer(1), "Customer"), ([{"a": Customer(1)}], "Customer"), ({Customer: 1}, "type")],
    )
    def test_other_objects_are_refused(self, value, kind):
        """An object that is no plain data is an error that names argument, type and remedy."""
        with pytest.raises(LockKeyError) as caught:
            self.digest(value)
        assert str(caught.value) == (
            f"lock_key 'shop.export:<all arguments>', argument <corp_id>: {kind} cannot be "
            "digested; declare an explicit lock_key"
        )

    def test_data_without_end(self):
        """Data that contain themselves are a LockKeyError, not a RecursionError."""
        endless: list[object] = []
        endless.append(endless)
        with pytest.raises(LockKeyError, match="data nested this deep cannot be digested"):
            self.digest(endless)

    @pytest.mark.parametrize("name", ["a{b}:c\n", "x" * 300, "%#"])
    def test_any_task_name(self, name):
        """Task names with any characters, of any length, give valid keys of their own."""
        key = built(None, no_arguments, name).key((), {})
        assert_valid(key)
        assert key != built(None, no_arguments, name + "x").key((), {})


class TestCallables:
    """Keys that a callable of the user returns."""

    def build(self, function):
        """Return what a task that declares this callable gets."""
        builder = built(function, three)
        assert isinstance(builder, CallableKey)
        return builder

    def test_takes_the_arguments_of_the_task(self):
        """A callable gets the arguments as the call gave them, and its key is used as it is."""
        builder = self.build(lambda a, b, *, c: f"{a}:<{b}>%{c}")
        assert builder.keys((1,), {"b": 2, "c": 3}) == ["1:<2>%3"]

    def test_what_does_not_take_them_is_refused(self):
        """When the task is declared, and not when it runs."""
        with pytest.raises(InvalidTemplate, match=r"^give a callable .* takes \(self, a, b, c\)$"):
            self.build(TestCallables.build_from)

    def build_from(self, a, b, c): ...

    @pytest.mark.parametrize("several", [["b", "a", "b"], ("a",), ["x" * 300, "y"]])
    def test_it_may_return_several(self, several):
        """In a list or a tuple, each checked as one alone is."""
        builder = self.build(lambda *_, **__: several)
        assert builder.keys((1, 2), {"c": 3}) == [check_key(one) for one in several]

    @pytest.mark.parametrize(
        ("returned", "why"),
        [
            (None, "a key is a str, not None"),
            ({"a"}, "a key is a str, not set"),
            (iter([]), "a key is a str, not list_iterator"),
            (["a", 7], "a key is a str, not int"),
            (["a", None], "a key is a str, not None"),
            ([["a"]], "a key is a str, not list"),
            ([], "a task has one at least"),
            ((), "a task has one at least"),
        ],
    )
    def test_what_is_no_key(self, returned, why):
        """A callable that returns anything else is named with its task, and what it returned."""
        builder = self.build(lambda *_, **__: returned)
        with pytest.raises(LockKeyError) as caught:
            builder.keys((1, 2), {"c": 3})
        said = str(caught.value)
        assert "<lambda>': it returned " in said
        assert said.endswith(f" for task {TASK}; {why}")

    def test_where_there_may_be_one_only(self):
        """Two that are different are refused, for the reason; the same one twice is one."""
        several = []
        how = {"signature": inspect.signature(three), "task_name": TASK}
        builder = key_builder(lambda *_, **__: several, **how, why_one=lambda: "give one")
        several[:] = ["a", "a"]
        assert set(builder.keys((1, 2), {"c": 3})) == {"a"}
        several[:] = ["a", "b"]
        with pytest.raises(LockKeyError, match=f"it returned 2 keys for task {TASK}; give one$"):
            builder.keys((1, 2), {"c": 3})

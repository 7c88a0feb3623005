"""What a value must be, and what is said of one that is not."""

from __future__ import annotations

from datetime import timedelta
from types import MappingProxyType

import pytest

from celery_dislock.config import options as checks


@pytest.mark.parametrize(
    ("check", "given", "used"),
    [
        (checks.seconds(above=0), 30, 30.0),
        (checks.seconds(above=0), timedelta(milliseconds=1), 0.001),
        (checks.seconds(at_least=0), 0, 0.0),
        (checks.whole_number, -3, -3),
        (checks.number_from(0), 0, 0),
        (checks.yes_or_no, False, False),
        (checks.text, "dislock", "dislock"),
        (checks.mapping, MappingProxyType({"db": 1}), {"db": 1}),
        (checks.optional(checks.whole_number), None, None),
        (checks.optional(checks.whole_number), 0, 0),
        (checks.one_of("warn", "raise"), "raise", "raise"),
        (checks.one_or_several_urls, "redis://a", "redis://a"),
        (checks.one_or_several_urls, ["redis://a", "redis://b", "redis://c"], None),
    ],
)
def test_a_good_value_comes_back_as_the_code_uses_it(check, given, used):
    """A duration is a float, a mapping a dict of its own, a list of URLs a tuple."""
    checked = check(given)
    if isinstance(given, list):
        assert checked == tuple(given)
        return
    assert checked == used
    assert type(checked) is type(used)
    assert checked is not given or not isinstance(given, dict)


@pytest.mark.parametrize(
    ("check", "given", "remedy"),
    [
        (checks.seconds(above=0), 0, "seconds above 0"),
        (checks.seconds(above=0), float("nan"), "finite"),
        (checks.seconds(at_least=5), 4.9, "of 5 or more"),
        (checks.seconds(at_least=0), True, "a number of seconds"),
        (checks.whole_number, 1.0, "a whole number"),
        (checks.whole_number, True, "a whole number"),
        (checks.number_from(0), -1, "0 or more"),
        (checks.number_from(0), "1", "a whole number"),
        (checks.yes_or_no, 1, "True or False"),
        (checks.text, "", "not empty"),
        (checks.text, b"dislock", "give a string"),
        (checks.mapping, [("db", 1)], "a dict"),
        (checks.optional(checks.text), "", "not empty"),
        (checks.one_of("warn", "raise"), "rise", "'warn', 'raise'; did you mean 'raise'?"),
        (checks.one_of("warn", "raise"), ["raise"], "'warn', 'raise'"),
        (checks.one_or_several_urls, "amqp://a", "redis://host"),
        (checks.one_or_several_urls, ["redis://a", 5], "a list of them"),
        (checks.one_or_several_urls, None, "redis://host"),
    ],
)
def test_a_bad_value_is_answered_with_what_to_give(check, given, remedy):
    """A boolean is no number, a number no boolean, and no value is quietly converted."""
    with pytest.raises(ValueError, match=r"give|use one of") as caught:
        check(given)
    assert remedy in str(caught.value)

"""What every finished key goes through."""

import pytest

from celery_dislock.exceptions import LockKeyError
from celery_dislock.keys.templates import check_key, check_written
from tests.unit.keys.support import LoudText, assert_valid

FORBIDDEN = "{}\0\n\x1f\x7f\x80\x9f\u2028\u2029\ud800\udfff"


class TestCheckKey:
    """What every finished key goes through."""

    @pytest.mark.parametrize(
        "key", ["export:7", "Größe <5> 100%", " ", "x" * 200, "é" * 100, LoudText("quiet")]
    )
    def test_good_keys_stay(self, key):
        """A key of up to 200 bytes comes back as it is, as a plain str."""
        assert (check_key(key), type(check_key(key))) == (key, str)

    @pytest.mark.parametrize("char", ["é", "日", "😀", "x"])
    @pytest.mark.parametrize("offset", range(4))
    def test_long_keys_are_shortened(self, char, offset):
        """A longer key keeps what fits of its head, in whole characters, and ends in a digest."""
        key = "x" * offset + char * 201
        head, mark, digest = check_key(key).rpartition("%#")
        assert_valid(check_key(key))
        assert mark
        assert len(digest) == 32
        assert key.startswith(head)
        assert 166 - len(head.encode()) < len(char.encode())

    @pytest.mark.parametrize(
        ("key", "reason"),
        [
            *((f"a{char}b", f"the key holds {char!r}, which no key may") for char in FORBIDDEN),
            ("", "the key is empty"),
            (7, "a key is a str, not int"),
            (b"k", "a key is a str, not bytes"),
        ],
        ids=ascii,
    )
    def test_no_key_at_all(self, key, reason):
        """Braces, control characters and surrogates are named; what is no str, with its type."""
        with pytest.raises(LockKeyError) as caught:
            check_key(key)
        assert caught.value.reason == reason
        assert caught.value.argument is None


class TestCheckWritten:
    """A key that somebody writes, in a program or at the command line."""

    @pytest.mark.parametrize("key", ["export:7", "a<5>", "a < b", "</b>", "x%3Ax", "5%", "$x"])
    def test_a_key(self, key):
        """It is what a key is elsewhere."""
        assert check_written(key) == key

    @pytest.mark.parametrize(
        ("key", "found"),
        [
            ("export:<corp_id>", "<corp_id>"),
            ("pay:<order.customer.id>:x", "<order.customer.id>"),
            ("export:%(corp_id)s", "%(corp_id)s"),
            ("export:%s", "%s"),
            ("x" * 300 + "<corp_id>", "<corp_id>"),
        ],
    )
    def test_a_template_that_nobody_has_filled_in(self, key, found):
        """It would be the name of another lock."""
        with pytest.raises(LockKeyError) as caught:
            check_written(key)
        why = "stands for no value in a key: write the value, as in 'export:7'"
        assert caught.value.reason == f"{found!r} {why}"

"""What a holder says of itself, as Python reads it."""

import pytest

from celery_dislock.servers import records

HUGE = b"9" * 400


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            b'{"id": NaN, "pid": Infinity, "timeout": -Infinity}',
            dict.fromkeys(("id", "pid", "timeout")),
        ),
        (b'{"timeout": %b, "pid": 1e999}' % HUGE, {"timeout": None, "pid": None}),
        (b'{"id": {}, "task": ["t"], "pid": true}', {"id": None, "task": None, "pid": True}),
        (b'{"id": "%b"}' % (b"x" * 5000), {"id": "x" * 1000 + "..."}),
        (b'{"id": "\\ud800"}', {"id": "\ud800"}),
        (b"{}", {}),
    ],
)
def test_what_a_holder_says_is_bounded(written, told):
    """It comes from a message, and a number too large to count with once ended the task."""
    assert records.holder_of(written) == told
    assert records.Conflict.of("dislock:{k}", 1000, b"o", written, 5000).renewed is None


def test_a_holder_of_many_bytes_is_not_read():
    """It is shown, shortened, as one that is no JSON."""
    assert [*records.holder_of(b'{"a": "%b"}' % (b"x" * 20_000))] == ["unreadable"]


@pytest.mark.parametrize(
    "written", [b"", b"by hand", b"[1]", b'"text"', b"\xff{}", b"[" * 100_000, b"null"]
)
def test_a_holder_that_cannot_be_read_is_shown_as_it_is(written):
    """A record that somebody wrote by hand makes a message, shortened, and no error."""
    [(name, shown)] = records.holder_of(written).items()
    assert name == "unreadable"
    assert len(shown) < 100


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        ({"task": "t"}, "t[?] on ? (pid ?)"),  # something else has written it
        ({"task": ["x"], "id": {}}, "['x'][{}] on ? (pid ?)"),
        ({"task": "\x1b", "worker": "\ud800"}, "\\x1b[?] on \\ud800 (pid ?)"),
    ],
)
def test_words_for_a_holder_of_any_shape(holder, words):
    """Missing parts and strange ones still make a message."""
    assert records.in_words(holder) == words

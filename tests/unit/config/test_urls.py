"""How the URL of a lock server is spelt, and what a message shows of it."""

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dislock.config import urls


@pytest.mark.parametrize(
    "line", ["", *(Path(__file__).parent / "shown.txt").read_text().splitlines()]
)
def test_a_message_shows_what_stands_in_its_place(line):
    """Of a URL in which a password may stand anywhere, only the scheme is shown, or nothing."""
    url, _, shown = line.partition(" -> ")
    assert urls.without_password(url) == shown


@given(
    st.sampled_from(["redis", "unix", "sentinel", "redis+cluster", "rediss", "redis+socket"]),
    st.text(alphabet=":@/;,?#[]%&=.", max_size=6),
    st.text(alphabet=":@/;,?#[]%&=.a1", max_size=8),
)
def test_a_password_before_the_at_sign_is_never_shown(scheme, before, after):
    """Whatever signs stand around a password, it is not shown if an @ comes after it."""
    url = f"{scheme}://{before}:s3cret@{after}"
    assert "s3cret" not in urls.without_password(url)


class TestSpelling:
    @pytest.mark.parametrize(
        ("given", "taken"),
        [
            ("CERT_REQUIRED", "required"),
            ("CERT_NONE", "none"),
            ("required", "required"),
            (ssl.CERT_OPTIONAL, "optional"),
            (None, None),
        ],
    )
    def test_verification_in_celerys_spelling_and_redis_pys(self, given, taken):
        """ssl_cert_reqs may be Celery's name, redis-py's, or the constant."""
        assert urls.redis_options({"ssl_cert_reqs": given}) == {"ssl_cert_reqs": taken}

    @pytest.mark.parametrize(
        ("url", "hosts", "single"),
        [
            ("sentinel://a;sentinel://b:2/3", (("a", 26379), ("b", 2)), "redis://localhost/3"),
            ("sentinel://u:p@a:1/0;b:2", (("a", 1), ("b", 2)), "redis://u:p@localhost/0"),
            ("redis+cluster://a,b:2", (("a", 6379), ("b", 2)), "redis://localhost"),
            ("rediss+cluster://a?x=1", (("a", 6379),), "rediss://localhost?x=1"),
            ("redis+cluster://[::1]:1", (("::1", 1),), "redis://localhost"),
        ],
    )
    def test_several_hosts_in_one_url(self, url, hosts, single):
        """Each host has its port; user, database and query are common to all."""
        group = urls.group(url)
        assert (group.hosts, group.url) == (hosts, single)

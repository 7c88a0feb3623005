"""How the URL of a lock server is spelt, and what a message shows of it."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dislock.config import urls


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:s3cret@a", "redis://u:***@a"),
        ("redis://s3cret@a", "redis://***@a"),
        ("redis://s3cret:@a", "redis://***@a"),
        ("redis://s3/cret:x@a", "redis://***"),
        ("redis://user:s3cret", "redis://***"),
        ("redis://:12345/0", "redis://***"),
        ("redis://u:12/s3cret@a:1/0", "redis://***"),
        ("redis://a/s3cret", "redis://***"),
        ("redis://a:1/0#s3cret", "redis://***"),
        ("redis://a:6379?password=s3cret", "redis://a:6379"),
        ("redis://[::1]:1/0", "redis://[::1]:1/0"),
        ("redis://", "redis://***"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("unix://:s3cret@/run/redis.sock", "unix://:***@/run/redis.sock"),
        ("unix://:s3cret/run/redis.sock", "unix://***"),
        ("redis+socket://u:s3cret@/run/redis.sock", "redis+socket://u:***@/run/redis.sock"),
        ("sentinel://u:s3cret@a;b:2/3", "sentinel://u:***@a;b:2/3"),
        ("sentinel://a;sentinel://u:s3cret@b", "sentinel://***"),
        ("sentinel://u:12;s3cret@a", "sentinel://***"),
        ("redis+cluster://u:12,s3cret@a", "redis+cluster://***"),
        ("redis+cluster://a,", "redis+cluster://***"),
        ("http://u:s3cret@a/0", "http://u:***@a/0"),
        ("u:s3cret@a", "***"),
        ("", ""),
        ("localhost:6379", "localhost:6379"),
        ("redis.example.com", "redis.example.com"),
        ("redis:/localhost:6379/0", "redis:/localhost:6379/0"),
        ("redis//localhost:6379", "redis//localhost:6379"),
        ("/run/redis.sock", "/run/redis.sock"),
        ("/s3cret", "***"),
        ("s3cret", "***"),
        ("redis:s3cret", "***"),
        ("u:s3cret/0", "***"),
        ("REDIS://:s3cret@h", "REDIS://:***@h"),
    ],
)
def test_a_message_shows_what_stands_in_its_place(url, shown):
    """Of a URL in which a password may stand anywhere, only the scheme is shown, or nothing."""
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

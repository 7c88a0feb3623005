"""Where the lock server is found."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_dislock.config.urls import lock_server
from celery_dislock.exceptions import SettingsError


class TestLockServer:
    def test_sentinels_come_with_the_masters_name(self):
        """Of the broker's transport options those are taken over that say where the master is."""
        conf = {
            "broker_url": ["sentinel://a", "sentinel://b"],
            "broker_transport_options": {"master_name": "m", "visibility_timeout": 1},
        }
        assert lock_server(conf) == ("sentinel://a;sentinel://b", {"master_name": "m"})

    def test_the_result_backends_own_options_come_with_its_url(self):
        """A result backend's Sentinels are found by its transport options, not the broker's."""
        conf = {
            "broker_url": "amqp://b",
            "broker_transport_options": {"master_name": "wrong"},
            "result_backend": "sentinel://a",
            "result_backend_transport_options": {"master_name": "m"},
        }
        assert lock_server(conf) == ("sentinel://a", {"master_name": "m"})

    def test_dislock_url_that_is_the_brokers_has_its_options(self):
        """Naming the broker explicitly is no different from leaving it to be found."""
        conf = {"broker_url": "rediss://b", "broker_use_ssl": {"ssl_ca_certs": "ca.pem"}}
        assert lock_server({**conf, "dislock_url": "rediss://b"}) == lock_server(conf)
        assert lock_server({**conf, "dislock_url": "rediss://a"})[1] == {}

    @pytest.mark.parametrize(
        ("url", "use_ssl", "options"),
        [
            ("redis://b", True, {"ssl": True}),
            ("redis://b", {"ssl_ca_certs": "ca.pem"}, {"ssl": True, "ssl_ca_certs": "ca.pem"}),
            ("rediss://b", True, {}),
            ("sentinel://b", True, {"ssl": True}),
            ("redis+socket:///b", True, {}),
            ("redis://b", False, {}),
        ],
    )
    def test_broker_use_ssl_means_tls_whatever_the_url_says(self, url, use_ssl, options):
        """As in kombu: where broker_use_ssl is on, no lock goes over the wire in the clear."""
        assert lock_server({"broker_url": url, "broker_use_ssl": use_ssl})[1] == options


@pytest.mark.parametrize(
    ("conf", "url"),
    [
        ({"dislock_url": "redis://a", "broker_url": "redis://b"}, "redis://a"),
        ({"broker_url": "redis://b", "result_backend": "redis://c"}, "redis://b"),
        ({"broker_url": "amqp://b", "result_backend": "redis://c"}, "redis://c"),
        ({"broker_url": "rediss://b"}, "rediss://b"),
        ({"broker_url": "redis+socket:///b"}, "redis+socket:///b"),
        ({"broker_url": "redis://b;redis://c"}, "redis://b"),
        ({"broker_url": ["redis://b", "redis://c"]}, "redis://b"),
        ({"broker_write_url": "redis://w", "broker_url": "redis://b"}, "redis://w"),
    ],
)
def test_the_lock_server_is_dislock_url_then_broker_then_backend(conf, url):
    """The first of the three that is a Redis."""
    assert lock_server(conf)[0] == url


def test_the_brokers_url_may_come_from_the_environment(monkeypatch):
    """What Celery takes for its broker is the lock server: --broker is an environment variable."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://environment")
    assert lock_server(app.conf)[0] == "redis://environment"


@pytest.mark.parametrize("conf", [{}, {"broker_url": "amqp://"}, {"dislock_url": "http://x"}])
def test_without_a_redis_the_error_says_what_to_give(conf):
    """The remedy is in the message."""
    with pytest.raises(SettingsError, match="give the lock server's URL"):
        lock_server(conf)

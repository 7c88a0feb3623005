"""Where the lock server is found."""

import pytest
from celery import Celery

from celery_dislock.config.settings import app_settings
from celery_dislock.config.urls import any_keyprefix, lock_server
from celery_dislock.exceptions import SettingsError

MASTER = {"master_name": "m"}
CA = {"ssl_ca_certs": "ca.pem"}
SECURED = {"broker_url": "rediss://b", "broker_use_ssl": CA}
WATCHED = {"broker_transport_options": {"master_name": "b", "visibility_timeout": 1}}
OF_BOTH = "sentinel://a;sentinel://b", {"master_name": "b"}
OF_RESULTS = {"result_backend": "sentinel://c", "result_backend_transport_options": MASTER}


@pytest.mark.parametrize(
    ("conf", "url", "options"),
    [
        ({"dislock_url": "redis://a", "broker_url": "redis://b"}, "redis://a", {}),
        ({"broker_url": "redis://b", "result_backend": "redis://c"}, "redis://b", {}),
        ({"broker_url": "amqp://b", "result_backend": "redis://c"}, "redis://c", {}),
        ({"broker_url": "rediss://b"}, "rediss://b", {}),
        ({"broker_url": "redis+socket:///b"}, "redis+socket:///b", {}),
        ({"broker_url": "redis://b;redis://c"}, "redis://b", {}),
        ({"broker_url": ["redis://b", "redis://c"]}, "redis://b", {}),
        ({"broker_write_url": "redis://w", "broker_url": "redis://b"}, "redis://w", {}),
        # Of the transport options those are taken over that say where the master is.
        ({**WATCHED, "broker_url": ["sentinel://a", "sentinel://b"]}, *OF_BOTH),
        ({**WATCHED, **OF_RESULTS, "broker_url": "amqp://b"}, "sentinel://c", MASTER),
        # The broker has its options, named explicitly or not; another server has none of them.
        (SECURED, "rediss://b", CA),
        ({**SECURED, "dislock_url": "rediss://b"}, "rediss://b", CA),
        ({**SECURED, "dislock_url": "rediss://a"}, "rediss://a", {}),
        # As in kombu: where broker_use_ssl is on, no lock goes over the wire in the clear.
        ({"broker_url": "redis://b", "broker_use_ssl": True}, "redis://b", {"ssl": True}),
        ({"broker_url": "redis://b", "broker_use_ssl": CA}, "redis://b", {"ssl": True, **CA}),
        ({"broker_url": "rediss://b", "broker_use_ssl": True}, "rediss://b", {}),
        ({"broker_url": "sentinel://b", "broker_use_ssl": True}, "sentinel://b", {"ssl": True}),
        ({"broker_url": "redis+socket:///b", "broker_use_ssl": True}, "redis+socket:///b", {}),
        ({"broker_url": "redis://b", "broker_use_ssl": False}, "redis://b", {}),
    ],
)
def test_the_lock_server_is_dislock_url_then_broker_then_backend(conf, url, options):
    """The first of the three that is a Redis, with its own options."""
    assert lock_server(conf) == (url, options)


def given(keyprefix):
    return {"global_keyprefix": keyprefix}


BROKER = {"broker_url": "redis://b", "broker_transport_options": given("staging:")}
BACKEND = {"result_backend": "redis://c", "result_backend_transport_options": given("results")}


@pytest.mark.parametrize(
    ("conf", "prefix", "keyprefix"),
    [
        ({"broker_url": "redis://b"}, "dislock", ""),
        (BROKER, "staging:dislock", "staging:"),
        ({**BROKER, "dislock_prefix": "ours"}, "staging:ours", "staging:"),
        ({**BROKER, "broker_url": "sentinel://b"}, "staging:dislock", "staging:"),
        # Named as the lock server or not, it is the broker; another server, or database, is not.
        ({**BROKER, "dislock_url": "redis://b"}, "staging:dislock", "staging:"),
        ({**BROKER, "dislock_url": "redis://b/1"}, "dislock", "staging:"),
        ({**BROKER, "dislock_url": ["redis://b", "redis://c", "redis://d"]}, "dislock", "staging:"),
        ({**BROKER, "dislock_url": "memory://"}, "dislock", "staging:"),
        # Of the server that keeps the locks, and no other.
        ({**BROKER, "broker_url": "amqp://b"}, "dislock", ""),
        ({**BROKER, **BACKEND}, "staging:dislock", "staging:"),
        ({**BROKER, **BACKEND, "broker_url": "amqp://b"}, "results_dislock", "results_"),
        ({**BROKER, **BACKEND, "dislock_url": "redis://c"}, "results_dislock", "staging:"),
        ({**BACKEND, "broker_url": "redis://b"}, "dislock", "results_"),
        # Braces mark the key.
        ({**BROKER, "broker_transport_options": given("{a}%")}, "%7Ba%7D%25dislock", "%7Ba%7D%25"),
        ({**BROKER, "broker_transport_options": given("")}, "dislock", ""),
        ({**BROKER, "broker_transport_options": None}, "dislock", ""),
        ({"dislock_url": "redis://a"}, "dislock", ""),
        ({}, "dislock", ""),
    ],
)
def test_celerys_prefix_on_its_server_is_part_of_ours(conf, prefix, keyprefix):
    """Environments that share a Redis by it do not share locks; doctor is told of any."""
    assert app_settings(conf).dislock_prefix == prefix
    assert any_keyprefix(conf) == keyprefix


def test_the_brokers_url_may_come_from_the_environment(monkeypatch):
    """What Celery takes for its broker is the lock server: --broker is an environment variable."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://environment")
    assert lock_server(app.conf)[0] == "redis://environment"


@pytest.mark.parametrize("conf", [{}, {"broker_url": "amqp://"}])
def test_without_a_redis_the_error_says_what_to_give(conf):
    """The remedy is in the message."""
    with pytest.raises(SettingsError, match="give the lock server's URL"):
        lock_server(conf)

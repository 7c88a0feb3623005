from __future__ import annotations

import ssl
import traceback

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from celery_dislock.config import urls
from celery_dislock.config.server import lock_server
from celery_dislock.config.settings import app_settings
from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.locks.runtime import Runtime
from celery_dislock.servers.cluster import Cluster
from celery_dislock.servers.connections import demoted
from celery_dislock.servers.node import Node
from celery_dislock.servers.server import server_for


class TestServerFor:
    @pytest.mark.parametrize(
        ("url", "kind"),
        [
            ("redis://a", Node),
            ("rediss://a", Node),
            ("unix:///a", Node),
            ("redis+socket:///a", Node),
            ("sentinel://a;sentinel://b", Node),
            ("redis+cluster://a", Cluster),
            ("rediss+cluster://a,b:7001", Cluster),
        ],
    )
    def test_every_scheme_has_its_kind_of_server(self, url, kind):
        """The scheme decides, and nothing is connected to yet."""
        options = {"master_name": "m"} if url.startswith("sentinel") else {}
        assert type(server_for(url, options)) is kind

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("redis://u:s3cret@a:1/2?x=s3cret", "redis://u:***@a:1/2"),
            ("sentinel://u:s3cret@a;sentinel://b:2/3", "sentinel://u:***@a:26379,b:2/3"),
            ("redis+cluster://u:s3cret@a,b:2", "redis+cluster://u:***@a:6379,b:2"),
            ("rediss+cluster://:s3cret@[::1]:7000", "rediss+cluster://:***@[::1]:7000"),
            ("redis://s3cret@a:1/2", "redis://***@a:1/2"),
            ("sentinel://s3cret@a", "sentinel://***@a:26379"),
            ("unix:///run/a,b?db=1", "unix:///run/a,b"),
        ],
    )
    def test_the_name_does_not_tell_the_password(self, url, name):
        """What messages call the server has all of its hosts, and no password."""
        if url.startswith(urls.SINGLE):
            assert urls.without_password(url) == name
        else:
            assert server_for(url, {"master_name": "m"} if "sentinel" in url else {}).name == name

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://u:s3cret@a", "redis://u:***@a"),
            ("redis://:s3cret@a:1/", "redis://:***@a:1/"),
            ("redis://s3cret@a", "redis://***@a"),
            ("redis://s3cret:@a", "redis://***@a"),
            ("redis://s3/cret:x@a", "redis://***"),
            ("redis://x@s3cret:x@a", "redis://***@a"),
            ("redis://user:s3cret", "redis://***"),
            ("redis://:s3cret/host", "redis://***"),
            ("redis://:s3cret", "redis://***"),
            ("redis://:12345/0", "redis://***"),
            ("redis://u:12/s3cret@a:1/0", "redis://***"),
            ("redis://u:12#s3cret@a:1/0", "redis://u:***@a:1/0"),
            ("redis://u:12?s3cret@a:1/0", "redis://***"),
            ("redis://a/s3cret", "redis://***"),
            ("redis://a:1/0#s3cret", "redis://***"),
            ("redis://a:1;redis://:s3cret@b:1", "redis://***"),
            ("redis://a:6379?password=s3cret", "redis://a:6379"),
            ("redis://[::1]:1/0", "redis://[::1]:1/0"),
            ("redis://", "redis://"),
            ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
            ("unix://:s3cret@/run/redis.sock", "unix://:***@/run/redis.sock"),
            ("unix://:s3cret/run/redis.sock", "unix://***"),
            ("unix:///:s3cret@/run/redis.sock", "unix://***"),
            ("redis+socket://u:s3cret@/run/redis.sock", "redis+socket://u:***@/run/redis.sock"),
            ("sentinel://u:s3cret@a;b:2/3", "sentinel://u:***@a:26379,b:2/3"),
            ("sentinel://a;sentinel://u:s3cret@b", "sentinel://u:***@a:26379,b:26379"),
            ("sentinel://u:12;s3cret@a", "sentinel://***"),
            ("sentinel://:s3;cret@a", "sentinel://***"),
            ("redis+cluster://u:12,s3cret@a", "redis+cluster://***"),
            ("redis+cluster://a,:s3cret", "redis+cluster://***"),
            ("redis+cluster://a,", "redis+cluster://***"),
            ("http://u:s3cret@a/0", "http://u:***@a/0"),
            ("u:s3cret@a", "***"),
            ("s3cret", "***"),
            ("s3cret@a://", "***"),
            ("", "***"),
        ],
    )
    def test_a_message_shows_what_stands_in_its_place(self, url, shown):
        """Of a URL in which a password may stand anywhere, only the scheme is shown, or nothing."""
        assert urls.without_password(url) == shown

    @given(
        st.sampled_from(["redis", "unix", "sentinel", "redis+cluster", "rediss", "redis+socket"]),
        st.text(alphabet=":@/;,?#[]%&=.", max_size=6),
        st.text(alphabet=":@/;,?#[]%&=.a1", max_size=8),
    )
    def test_a_password_before_the_at_sign_is_never_shown(self, scheme, before, after):
        """Whatever signs stand around a password, it is not shown if an @ comes after it."""
        url = f"{scheme}://{before}:s3cret@{after}"
        assert "s3cret" not in urls.without_password(url)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://u:s3cret@a:port",
            "sentinel://u:s3cret@a:port",
            "sentinel://u:s3cret@a;redis://b",
            "redis+cluster://u:s3cret@a,",
            "redis+cluster://u:s3cret@a/3",
            "redis+cluster://u:se/cret@a",
        ],
    )
    def test_a_url_that_cannot_be_read_is_refused(self, url):
        """The error names the setting, and not the password."""
        with pytest.raises(SettingsError, match="dislock_url") as raised:
            server_for(url, {"master_name": "m"} if "sentinel" in url else {})
        assert "s3cret" not in str(raised.value)
        assert raised.value.__cause__ is None

    @pytest.mark.parametrize(
        "conf",
        [
            {"dislock_url": "u:s3cret@a"},
            {"dislock_url": "s3cret@a"},
            {"dislock_url": "redis//:s3cret@a"},
            {"dislock_url": ["redis://a", "s3cret"]},
            {"dislock_url": {"redis://:s3cret@a"}},
            {"dislock_ulr": "redis://:s3cret@a"},
            {"dislock_password": "s3cret"},
            {"dislock_transport_options": "s3cret"},
            {"dislock_transport_options": [("password", "s3cret")]},
            {"dislock_transport_option": {"password": "s3cret"}},
            {
                "dislock_url": "redis://a",
                "dislock_transport_options": {"password": "s3cret", "sokcet_timeout": 1},
            },
            {
                "dislock_url": "redis://a",
                "dislock_transport_options": {"credential_provider": "s3cret"},
            },
            {
                "dislock_url": "redis://a",
                "dislock_transport_options": {"credential_provider": {"password": "s3cret"}},
            },
            {
                "dislock_url": "sentinel://a",
                "dislock_transport_options": {"master_name": "m", "sentinel_kwargs": "s3cret"},
            },
            {
                "dislock_url": "sentinel://a",
                "dislock_transport_options": {
                    "master_name": "m",
                    "sentinel_kwargs": {"password": "s3cret", "sokcet_timeout": 1},
                },
            },
            {
                "dislock_url": "sentinel://a",
                "dislock_transport_options": {"password": "s3cret"},
            },
        ],
    )
    def test_no_setting_that_is_refused_shows_a_password(self, conf):
        """A URL or options in the wrong place, misspelt or of the wrong type, are not shown."""
        with pytest.raises(SettingsError) as raised:
            Runtime(lambda: conf).process  # noqa: B018 -- making it is what fails
        assert "s3cret" not in "".join(traceback.format_exception_only(raised.value))
        assert "s3cret" not in repr(raised.value.args)
        assert raised.value.__cause__ is None or "s3cret" not in str(raised.value.__cause__)

    def test_settings_do_not_show_their_secrets(self):
        """What a debugger or a failed assertion prints of the settings has no password in it."""
        conf = {
            "dislock_url": "redis://:s3cret@a",
            "dislock_transport_options": {"password": "s3cret"},
        }
        assert "s3cret" not in repr(app_settings(conf))
        assert "s3cret" not in repr(urls.group("sentinel://:s3cret@a;b"))
        assert "s3cret" not in repr(vars(server_for("redis://:s3cret@a")))

    @pytest.mark.parametrize("options", [{}, {"master_name": None}, {"master_name": 7}])
    def test_sentinels_need_the_masters_name(self, options):
        """Without master_name the error says what it is and where it goes."""
        with pytest.raises(SettingsError, match="'master_name'"):
            server_for("sentinel://a", options)

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            ("redis://a", {"sokcet_timeout": 1}),
            ("redis://a", {"ssl_ca_certs": "ca.pem"}),
            ("redis+cluster://a", {"sokcet_timeout": 1}),
            ("sentinel://a", {"master_name": "m", "sokcet_timeout": 1}),
            ("sentinel://a", {"master_name": "m", "sentinel_kwargs": {"sokcet_timeout": 1}}),
        ],
    )
    def test_an_option_that_redis_py_does_not_have_is_refused(self, url, options):
        """A misspelt option, or one of TLS where there is none, is an error at once."""
        with pytest.raises(SettingsError, match="dislock_transport_options"):
            server_for(url, options)


class TestSpelling:
    @pytest.mark.parametrize(
        ("given", "taken"),
        [
            ("CERT_REQUIRED", "required"),
            ("CERT_NONE", "none"),
            ("required", "required"),
            (ssl.CERT_OPTIONAL, ssl.CERT_OPTIONAL),
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


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_min_replicas_is_a_count(value):
    """dislock_min_replicas is a whole number of 0 or more."""
    with pytest.raises(SettingsError, match="dislock_min_replicas"):
        app_settings({"dislock_min_replicas": value})


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (redis.ReadOnlyError("You can't write against a read only replica."), True),
        (
            redis.ResponseError(
                "Error running script (call to f_0): @user_script:1: -READONLY You can't write"
            ),
            True,
        ),
        (redis.ResponseError("WRONGTYPE"), False),
        (redis.ConnectionError("READONLY"), False),
    ],
)
def test_a_replica_is_known_by_its_answer(error, is_one):
    """Redis before 7 wraps a script's READONLY in an error of its own; both are known."""
    assert demoted(error) is is_one


class TestClusterWithoutNodes:
    def test_no_seed_answers(self):
        """When no node answers, everything is a StoreError that names the cluster."""
        server = server_for("redis+cluster://127.0.0.1:1,127.0.0.1:2", pause=lambda _: None)
        with pytest.raises(StoreError, match="no node tells the slots"):
            server.send("INFO")
        with pytest.raises(StoreError, match="no node tells the slots"):
            server.pop("dislock:{a}", 1.0)

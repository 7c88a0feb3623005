"""Which kind of server a URL asks for, and what is refused."""

from __future__ import annotations

import pytest

from celery_dislock.config import urls
from celery_dislock.config.settings import app_settings
from celery_dislock.exceptions import SettingsError
from celery_dislock.servers.cluster import Cluster
from celery_dislock.servers.kinds import server_for
from celery_dislock.servers.node import Node


class TestServerFor:
    @pytest.mark.parametrize(
        ("url", "kind", "name"),
        [
            ("redis://u:s3cret@a:1/2?client_name=s3cret", Node, "redis://u:***@a:1/2"),
            ("rediss://a", Node, "rediss://a"),
            ("unix:///run/a,b?db=1", Node, "unix:///run/a,b"),
            ("redis+socket:///a", Node, "redis+socket:///a"),
            ("sentinel://u:s3cret@a;sentinel://b/3", Node, "sentinel://u:***@a;sentinel://b/3"),
            ("redis+cluster://u:s3cret@a,b:2", Cluster, "redis+cluster://u:***@a,b:2"),
            ("rediss+cluster://:s3cret@[::1]:70", Cluster, "rediss+cluster://:***@[::1]:70"),
        ],
    )
    def test_every_scheme_has_its_kind_of_server(self, url, kind, name):
        """Its name has all hosts and no password, and nothing is connected to yet."""
        server = server_for(url, {"master_name": "m"} if url.startswith("sentinel") else {})
        assert (type(server), server.name) == (kind, name)

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

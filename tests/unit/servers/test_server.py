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
            ("sentinel://u:s3cret@a;sentinel://b:2/3", "sentinel://u:***@a;sentinel://b:2/3"),
            ("redis+cluster://u:s3cret@a,b:2", "redis+cluster://u:***@a,b:2"),
            ("rediss+cluster://:s3cret@[::1]:7000", "rediss+cluster://:***@[::1]:7000"),
            ("redis://s3cret@a:1/2", "redis://***@a:1/2"),
            ("sentinel://s3cret@a", "sentinel://***@a"),
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


@pytest.mark.parametrize(
    ("url", "options", "kind", "names"),
    [
        ("redis://:s3cret@h:1/0", {}, "single", ["redis://:***@h:1/0"]),
        ("sentinel://h:1/0", {"master_name": "m"}, "sentinel", ["sentinel://h:1/0"]),
        (
            ["redis://c:1", "redis://:s3cret@a:1", "redis://b:1"],
            {},
            "quorum",
            ["redis://:***@a:1", "redis://b:1", "redis://c:1"],
        ),
    ],
)
def test_a_server_tells_its_kind_and_its_members(url, options, kind, names):
    """Each member has a name without its password, and a function that sends it commands."""
    server = server_for(url, options)
    assert server.kind == kind
    assert [name for name, _ in server.members()] == names
    assert len(server.senders()) == len(names)
    server.close()


def test_only_sentinels_watch():
    """A single server has nobody who watches it."""
    assert server_for("redis://h:1/0").watchers() == []

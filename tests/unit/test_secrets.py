"""Lock servers that cannot be used, with passwords in their URLs and options."""

from __future__ import annotations

import traceback

import pytest

from celery_dislock import Dislock, SettingsError

SECRET = {"password": "s3cret"}
MISSPELT = {**SECRET, "sokcet_timeout": 1}
MASTER = {"master_name": "m"}


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("redis://u:s3cret@a:port", {}, "dislock_url"),
        ("redis://u:s3cret@a/O", {}, "dislock_url.*the database is a number"),
        ("rediss://a/s3cret", {}, "dislock_url.*the database is a number"),
        ("sentinel://u:s3cret@a:port", MASTER, "dislock_url"),
        ("sentinel://u:s3cret@a;redis://b", MASTER, "dislock_url"),
        ("redis+cluster://u:s3cret@a,", {}, "dislock_url"),
        ("redis+cluster://u:s3cret@a/3", {}, "dislock_url"),
        ("redis+cluster://u:se/cret@a", {}, "dislock_url"),
        ("sentinel://a", SECRET, "'master_name'"),
        ("sentinel://a", {"master_name": None}, "'master_name'"),
        ("sentinel://a", {"master_name": 7}, "'master_name'"),
        ("redis://a", MISSPELT, "dislock_transport_options"),
        ("redis://a", {"ssl_ca_certs": "ca.pem"}, "dislock_transport_options"),
        ("redis://a", {"credential_provider": "s3cret"}, "dislock_transport_options"),
        ("redis://a", {"credential_provider": SECRET}, "dislock_transport_options"),
        ("redis+cluster://a", MISSPELT, "dislock_transport_options"),
        ("sentinel://a", {**MASTER, "sokcet_timeout": 1}, "dislock_transport_options"),
        ("sentinel://a", {**MASTER, "sentinel_kwargs": MISSPELT}, "dislock_transport_options"),
        ("sentinel://a", {**MASTER, "sentinel_kwargs": "s3cret"}, "dislock_transport_options"),
    ],
)
def test_a_url_or_an_option_that_cannot_be_used_is_refused(url, options, told):
    """The error names the setting, and not the password; nothing is connected to."""
    with pytest.raises(SettingsError, match=told) as caught:
        Dislock.from_url(url, transport_options=options).lock("k").try_acquire()
    error = caught.value
    texts = [*traceback.format_exception_only(error), repr(error.args), str(error.__cause__)]
    assert "s3cret" not in "".join(texts)

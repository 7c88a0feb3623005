"""Settings that are refused, with passwords in them."""

from __future__ import annotations

import traceback

import pytest
from celery import Celery

from celery_dislock import Dislock, SettingsError


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
        {"dislock_url": "sentinel://a", "dislock_transport_options": {"password": "s3cret"}},
    ],
)
def test_no_setting_that_is_refused_shows_a_password(conf):
    """A URL or options in the wrong place, misspelt or of the wrong type, are not shown."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    with pytest.raises(SettingsError) as raised:
        app.conf.update(conf)
        Dislock(app).lock("k").locked()
    assert "s3cret" not in "".join(traceback.format_exception_only(raised.value))
    assert "s3cret" not in repr(raised.value.args)
    assert raised.value.__cause__ is None or "s3cret" not in str(raised.value.__cause__)

"""What telemetry makes of what it is told: counts, spans, and no harm."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_dislock.config.settings import AppSettings
from celery_dislock.operating import telemetry
from celery_dislock.operating.telemetry import Telemetry


@pytest.fixture
def broken(world, monkeypatch):
    """Have a method of telemetry raise an error."""

    def raising(error):
        def current_span():
            raise error

        monkeypatch.setattr(telemetry, "current_span", current_span)
        return Telemetry(SimpleNamespace(settings=AppSettings(dislock_metrics=False)))

    return raising


def test_a_defect_is_logged_and_harms_no_lock(broken, caplog):
    """The task goes on, and an operator finds the reason for what is missing."""
    with caplog.at_level(logging.ERROR):
        assert broken(ValueError("defect")).begin() is None
    assert "locks are not affected" in caplog.text


def test_a_time_limit_that_comes_in_the_middle_is_not_swallowed(broken):
    """It is for the task, and no defect."""
    with pytest.raises(SoftTimeLimitExceeded):
        broken(SoftTimeLimitExceeded()).begin()

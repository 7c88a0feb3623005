"""The group of the commands."""

from __future__ import annotations

from celery_dislock.operating.cli import dislock as command


def test_each_command_has_a_line_of_help():
    """``celery dislock --help`` says of each what it is for."""
    for name, one in command.commands.items():
        assert one.get_short_help_str(limit=100), name


def test_a_server_that_is_given_takes_the_place_of_the_apps(dislock):
    """One, or several of which a majority decides."""
    dislock("--dislock-url", "redis://a", "show", "k")
    assert dislock.app.conf.dislock_url == "redis://a"
    urls = ["redis://a", "redis://b", "redis://c"]
    dislock(*(part for url in urls for part in ("--dislock-url", url)), "show", "k")
    assert dislock.app.conf.dislock_url == urls

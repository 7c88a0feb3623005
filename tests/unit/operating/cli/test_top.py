"""The command ``top``: what fits on the screen, and in which order."""

from __future__ import annotations

import builtins
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner
from rich.console import Console, Group

from celery_dislock.operating.cli import dislock
from celery_dislock.operating.cli.top import screen
from celery_dislock.operating.site import Site
from tests.unit.operating.checks.examples import holder, lock


@pytest.fixture
def shown(capsys):
    """Return the lines of the screen, for these locks."""

    def lines(*states, width=160, height=20):
        names = [f"dislock:{{{number}}}" for number in range(len(states))]
        overview = SimpleNamespace(
            names=lambda _pattern, _failed: [names], look=lambda _names, **_most: states
        )
        site = Site(overview, "dislock")
        console = Console(width=width, height=height)
        console.print(Group(*screen(SimpleNamespace(site=site), width, height)))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return lines


def held(key, seconds=1.0, **given):
    return lock(key=key, holders=[holder(held=seconds, renewed=1.0)], **given)


def test_trouble_comes_first_then_the_longest_lines_then_the_longest_held(shown):
    """What does not fit is left out."""
    many = [held(f"k{number}", float(number)) for number in range(1000)]
    lines = shown(*many, held("line", waiting=3), lock(key="paused", limit=0), height=9)
    assert [line.split()[0] for line in lines[3:]] == ["paused", "line", "k999", "k998", "k997"]


def test_keys_of_strangers_are_shown_as_text(shown):
    """A key may contain what a terminal takes for a command; rich gets no markup from us."""
    state = lock(
        key="[red]x[/red]\x1b[31m\n", holders=[holder(who="[link=x]t[/link]", renewed=1.0)]
    )
    text = "\n".join(shown(state))
    assert "[red]x[/red]\\x1b[31m\\n" in text
    assert "[link=x]t[/link]" in text
    assert "\x1b" not in text


def test_a_narrow_terminal_has_the_key_and_the_time(shown):
    """Long names are cut."""
    text = shown(held("export:" + "7" * 70, 61.0), width=60)
    assert "61 s" in text[3]
    assert ".." in text[3]
    assert max(map(len, text)) <= 60


def test_without_rich_the_error_names_the_extra(monkeypatch):
    """It is no dependency of workers."""
    real = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    result = CliRunner().invoke(dislock, ["top"], obj=SimpleNamespace(app=app))
    assert result.exit_code == 1
    assert 'pip install "celery-dislock[cli]"' in result.output

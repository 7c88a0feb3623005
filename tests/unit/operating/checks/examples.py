"""Facts as the tests of the checks need them: a healthy site, of which each test changes a part."""

from __future__ import annotations

from types import SimpleNamespace

from celery_dislock.operating.checks.facts import Facts, Fleet, Locks, Member
from celery_dislock.operating.site import Site
from tests import pages
from tests.pages import FakeOverview


def holder(worker="w9@gone", **given):
    known = {"held": 5.0, "remaining": 20.0, "renewed": None, "who": "t[1]"}
    return pages.holder(**{**known, "worker": worker, **given})


def place(**given):
    known = {"ticket": "t:0:0", "exchange": "", "routing_key": "celery"}
    return pages.place(**{**known, **given})


def lock(**given):
    return pages.lock(**{"key": "k", "limit_differs": 0, **given})


def described(**given):
    """How a worker describes its locks."""
    lease = {"key": "export:7", "held": True, "overdue": False}
    return {
        "version": "1",
        "enabled": True,
        "locks": True,
        "server": "redis://h/0",
        "prefix": "dislock",
        "no_server": None,
        "tasks": {"export": {"lock_key": "export:<n>"}},
        "warnings": [],
        "unavailable": None,
        "errors": 0,
        "leases": [{**lease, **given.pop("lease", {})}],
        **given,
    }


FLEET = Fleet({"w1@here": described()})


def facts(kind="single", **given):
    """The facts of a site; *locks* are what was seen, *members* are the processes."""
    server = SimpleNamespace(name="redis://h", kind=kind, keeps_lines=kind != "quorum")
    about = {
        "server": given.pop("server", server),
        "prefix": "dislock",
        "min_replicas": 0,
        "site": given.pop("site", None) or Site(FakeOverview(), "dislock"),
        "ours": described(),
        "fleet": FLEET,
        "members": [Member("redis://h")],
        "locks": Locks(),
    }
    return Facts(**{**about, **given})


def found(check, *given, **about):
    """Level and text of what a check finds and is not ok."""
    return [(one.level, one.what) for one in check(*given, facts(**about)) if one.level != "ok"]


def levels(check, *given, **about):
    return [level for level, _ in found(check, *given, **about)]

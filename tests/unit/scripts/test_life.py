"""The life in which each script runs; that it calls each command is shown on a real server."""

from celery_dislock import scripts
from celery_dislock.scripts import Script
from celery_dislock.scripts.life import Life

SCRIPTS = {name for name, one in vars(scripts).items() if isinstance(one, Script)}


def test_each_script_runs():
    """A new script is tried before a worker starts, too."""
    ran = [script for script, *_ in Life("dislock", "x").steps()]
    assert {name for name in SCRIPTS if getattr(scripts, name) in ran} == SCRIPTS


def test_all_keys_are_of_one_slot_and_are_known():
    """A node of a cluster has all of them, and all of them can be deleted."""
    life = Life("shop", "x")
    keys = life.keys()
    assert all(key.startswith("shop:") and "{x}" in key for key in keys)
    assert {key for _, keys, _ in life.steps() for key in keys} | {life.news} <= set(keys)

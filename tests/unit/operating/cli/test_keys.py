"""How a command is told which lock."""

from __future__ import annotations

import pytest

from celery_dislock import SingletonTask
from celery_dislock.keys.names import reserved_lock


@pytest.fixture
def tasks(dislock):
    app = dislock.app

    @app.task(base=SingletonTask, name="shop.export", lock_key="export:<corp>", shared=False)
    def export(corp): ...

    @app.task(name="shop.move", lock_key=["to:<b>", "from:<a>"], shared=False)
    def move(a, b): ...

    @app.task(base=SingletonTask, name="shop.open", lock_key=False, shared=False)
    def opened(): ...


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["export:7"], ["dislock:{export:7}"]),
        (["--task", "shop.export", "--args", "[7]"], ["dislock:{export:7}"]),
        (["--task", "shop.export", "--kwargs", '{"corp": 7}'], ["dislock:{export:7}"]),
        (["--task", "shop.move", "--args", "[1, 2]"], ["dislock:{from:1}", "dislock:{to:2}"]),
    ],
)
def test_a_key_or_a_task_names_locks(dislock, tasks, overview, args, names):
    """The key as people write it; or what the task computes, in the order in which it locks."""
    dislock("show", *args)
    asked = names if len(names) == 1 else [*names, reserved_lock(names)]
    assert [name for name, *_ in overview.asked] == asked


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Give KEY, or --task"),
        (["k", "--task", "shop.export"], "Give KEY, or --task"),
        (["k", "--kwargs", "{}"], "are the arguments of --task"),
        (["--task", "shop.expor"], "Did you mean 'shop.export'?"),
        (["--task", "x"], "Does -A name the right app?"),
        (["--task", "shop.open"], "takes no lock"),
        (["--task", "shop.export"], "corp"),
        (["--task", "shop.export", "--args", "{}"], "--args must be a list"),
        (["--task", "shop.export", "--kwargs", "[]"], "--kwargs must be an object"),
        (["--task", "shop.export", "--args", "["], "--args is no JSON"),
        (["--task", "shop.export", "--args", "[" * 100_000], "--args is no JSON"),
        (["{k}"], "which no key may"),
        ([""], "the key is empty"),
    ],
)
def test_what_names_no_lock_is_wrong_usage(dislock, tasks, overview, args, words):
    """The message says what is missing; nothing is asked of the server."""
    answer = dislock("show", *args)
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert overview.asked == []

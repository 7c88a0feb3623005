"""Three apps in one process, and how their tasks differ from tasks of a plain base class.

Each scenario runs in a process of its own, which multiprocessing spawns: a base class that gets
bound stays bound, and shared tasks are registered in every later app.
"""

from __future__ import annotations

import re
import threading
from itertools import product
from typing import Any

from celery import Celery, Task, shared_task

from celery_dislock import Dislock, SingletonTask

OURS = {"__call__", "apply", "bind", "dislock_guard", "lease", "lock_key", "on_replace"}
OURS |= {"lock_for", "why", "Request"}  # extended, so that it hears of a process that died
OF_EACH = {"__dict__", "__doc__", "__header__", "__weakref__", "request_stack"}
OF_EACH |= {"__firstlineno__", "__static_attributes__"}  # of each class body
OF_EACH |= {"_default_request"}  # made when somebody asks for `request`
CONFS: tuple[dict[str, Any], ...] = (
    {"task_acks_late": True, "task_serializer": "json", "task_default_rate_limit": "10/m"},
    {"task_serializer": "pickle", "task_ignore_result": True},
    {"task_acks_late": True, "task_annotations": {"*": {"expires": 7}}},
)


class Plain(Task):  # type: ignore[misc]
    """What any user's base class looks like."""

    abstract = True


class Custom(SingletonTask):
    """A user's base class on ours."""

    abstract = True


BASES = {"plain": Plain, "singleton": SingletonTask, "custom": Custom}
KINDS: dict[str, dict[str, Any]] = {"locked": {}, "free": {"lock_key": False}}


def body() -> None:
    """Do nothing."""


def apps(*, as_current: bool, shared: bool) -> list[Celery]:
    """Make the apps; in each of them, each base has a task with a lock and one without."""
    declared = [
        {"name": f"{base}.{kind}", "base": BASES[base], **options}
        for base in BASES
        for kind, options in KINDS.items()
    ]
    if shared:
        for options in declared:
            shared_task(**options)(body)
    made = []
    for number, conf in enumerate(CONFS):
        app = Celery(f"app{number}", broker="memory://", set_as_current=as_current)
        app.conf.update(conf, dislock_url="redis://localhost:1/0")
        Dislock(app)
        if not shared:
            for options in declared:
                app.task(shared=False, **options)(body)
        made.append(app)
    return made


def touch_in_a_thread(app: Celery) -> None:
    """Let another thread, whose current app is another, be the first to need the app's tasks."""
    thread = threading.Thread(target=app.finalize)
    thread.start()
    thread.join()


def differences(*, as_current: bool, shared: bool, in_thread: bool) -> list[str]:
    """Tell in what the tasks of our bases differ from those of the plain one."""
    made = apps(as_current=as_current, shared=shared)
    if in_thread:
        touch_in_a_thread(made[1])
    found = []
    stacks = set()
    for app, base, kind in product(reversed(made), ("singleton", "custom"), KINDS):
        task, plain = app.tasks[f"{base}.{kind}"], app.tasks[f"plain.{kind}"]
        found += [f"{app.main}: {task.name}: {name}" for name in differing(task, plain)]
        stacks.add(task.request_stack)
    if len(stacks) != len(made) * 4:
        found.append("tasks share a request stack")
    return found


def differing(task: Task, plain: Task) -> list[str]:
    """Name the attributes of a task that another has not, or has otherwise."""
    names = {*dir(task), *dir(plain)}.difference(OURS, OF_EACH, dir(object))
    return [
        name
        for name in sorted(names)
        if told(task, name) != told(plain, name).replace(plain.name, task.name)
    ]


def told(task: Task, name: str) -> str:
    """Describe an attribute: a method by its function, and nothing by its address."""
    value = getattr(task, name, "missing")
    return re.sub(" at 0x[0-9a-f]+", "", repr(getattr(value, "__func__", value)))

"""How the guard gets around a body: what is wrapped, and what is left alone."""

import asyncio
import inspect
import re
from contextvars import copy_context
from itertools import chain
from threading import Thread
from unittest import mock

import pytest
from celery import Celery, Task, group
from celery.app.amqp import AMQP
from celery.app.task import Context, extract_exec_options
from celery.exceptions import Ignore
from celery.signals import task_postrun, task_prerun
from kombu import Producer

from celery_dislock import SettingsError, SingletonTask, current_lease, ensure_held
from celery_dislock.config.execution import meant_for_tasks
from celery_dislock.tasks.task import follow_contexts
from tests.declaring import declare
from tests.driven import held
from tests.unit.deliveries import deliver


@pytest.mark.parametrize(
    ("name", "key", "locks"),
    [
        ("shop.t", "k", True),
        ("shop.t", False, False),
        ("celery.t", None, False),
        ("celery.t", "k", True),
    ],
)
def test_celerys_own_tasks_and_those_that_say_false_are_left_alone(
    app, lock_server, name, key, locks
):
    """Celery's tasks inherit the app's base class, and nobody means them unless a key says so."""
    app.conf.dislock_enabled = True
    deliver(declare(app, name=name, base=Task, lock_key=key))
    assert bool(lock_server.requests) is locks


def test_the_options_of_a_class_count_for_more_than_those_of_its_base(app):
    """A base class says what most of its tasks do; one of them may do the opposite."""

    class Renewed(SingletonTask):
        lock_watchdog_timeout = 60
        lock_on_cap = "raise"
        lock_on_conflict = "wait"
        lock_wait_timeout = 5

    class Fixed(Renewed):
        lock_expire = 600
        lock_on_conflict = "skip"

    class RenewedAgain(Fixed):
        lock_watchdog_timeout = 90

    for base, seconds in ((Renewed, 60), (Fixed, 600), (RenewedAgain, 90)):
        task = declare(app, lambda self: self.lease.remaining, base=base, name=base.__name__)
        assert deliver(task).retval == pytest.approx(seconds, abs=1)
        with held(app):
            deliver(task, base.__name__)
        state = "FAILURE" if base is Renewed else "REVOKED"
        assert app.AsyncResult(base.__name__).state == state


def test_what_ends_a_task_unrun_leaves_no_traceback(app):
    """A pool process would copy each frame and send them all; the body's own are kept."""

    def body():
        raise Ignore

    task = declare(app, body)
    own = deliver(task).retval.traceback
    with held(app):
        refused = deliver(task, "2").retval.traceback
    assert "in body" in own
    assert refused.count("File") < own.count("File") - 2


class TestPatched:
    """A method of Celery's that a test patches is patched for our tasks, too, and no longer."""

    @pytest.mark.parametrize("used_before", [False, True])
    def test_apply(self, app, used_before):
        """It is asked for its result once, and runs nothing."""
        ran = []
        task = declare(app, lambda: ran.append(1), lock_unique_until="end")
        if used_before:
            assert task.lock_for()
        with mock.patch.object(Task, "apply") as patched:
            result = task.apply()
        assert (result, patched.call_count, ran) == (patched.return_value, 1, [])
        task.apply()
        assert (patched.call_count, ran) == (1, [1])

    def test_on_replace(self, app):
        """As a test does that is not to send what replaces a task."""
        task = declare(app, lambda self: self.replace(self.si()))
        assert task.lock_for()
        with mock.patch.object(Task, "on_replace", return_value=7) as patched:
            assert task.apply().get() == 7
        assert patched.called


CALLS = {
    "apply_async": lambda task, options: task.apply_async((7,), **options),
    "apply": lambda task, options: task.apply((7,), **options),
    "send_task": lambda task, options: task.app.send_task(task.name, (7,), **options),
    "by an unknown name": lambda task, options: task.app.send_task("far.t", (7,), **options),
    "set": lambda task, options: task.s(7).set(**options),  # before any step of a chain is sent
    "signature": lambda task, options: task.signature((7,), **options).delay(),
    "chain": lambda task, options: (task.si(7) | task.si(8)).apply_async(**options),
    "group": lambda task, options: group(task.si(7), task.si(8)).apply_async(**options),
}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lock_key": "k"}, "lock_key='k': without effect in a call: declare it with the task"),
        ({"lock_on_conflict": "queue"}, "@app.task(lock_on_conflict=…)"),
        ({"countdown": 5, "max_renew_times": 1}, "max_renew_times=1"),
        ({"lokc_key": "k"}, "; did you mean 'lock_key'?"),
        ({"lock_timeout": 5}, "lock_timeout=5: without effect"),
    ],
)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("base", [SingletonTask, Task])
def test_an_option_of_a_task_is_refused_in_a_call(app, broker, given, words, how, base):
    """Celery ignores what it does not know: the call would run without what it asks for."""
    task = declare(app, base=base, lock_key=None)
    app.finalize()
    if (how, base) == ("apply", Task):
        return  # a plain task is run by Celery alone
    with pytest.raises(SettingsError, match=re.escape(words)):
        CALLS[how](task, given)
    assert broker.sent == []


@pytest.mark.parametrize("base", [SingletonTask, Task])
def test_an_option_of_a_task_is_refused_in_a_retry(app, broker, base):
    """Celery would reject the task for what cannot be sent: the task fails with the reason."""
    task = declare(app, lambda self: self.retry(lock_key="k"), base=base, lock_key=None)
    app.finalize()
    with pytest.raises(SettingsError, match="without effect in a call"):
        raise deliver(task).retval.exception
    assert broker.sent == []


def test_what_celery_takes_in_a_call_is_no_option_of_ours():
    """Neither do its names resemble ours."""
    callables = [Task.apply_async, Task.apply, Task.retry, Celery.send_task, AMQP.as_task_v2]
    names = [*chain.from_iterable(inspect.signature(one).parameters for one in callables)]
    names += [*inspect.signature(Producer.publish).parameters, *extract_exec_options(Task())]
    assert meant_for_tasks((*names, *Context().as_execution_options(), "app_id")) == ()


def test_a_stamp_may_have_any_name(app, broker):
    """Celery keeps stamps among the options of a call."""
    task = declare(app)
    task.s(7).stamp(lock_key="stamped").apply_async()
    assert broker.last.headers["stamps"]["lock_key"] == "stamped"


def test_an_attribute_of_a_class_may_have_any_name(app):
    """A task's class has a timeout of its own, and a task of that class may set it."""

    class Fetch(SingletonTask):
        timeout = 5
        key = "own"

    task = declare(app, base=Fetch, timeout=10)
    assert (task.timeout, task.key, task.lock_for().key) == (10, "own", "k")


async def coroutine(self=None, *_): ...


async def generator(self=None):
    yield


@pytest.mark.parametrize("where", ["run", "__call__"])
def test_a_generator_that_no_pool_awaits_is_refused(app, where):
    """Celery would make an object of it, and the lock would be released before it begins."""
    kind = type("Export", (SingletonTask,), {"name": "t", where: generator})
    with pytest.raises(SettingsError, match=rf"t: {where}=.* which no pool awaits"):
        app.register_task(kind())
    assert "t" not in app._tasks


def test_a_task_of_batches_is_refused(app):
    """Its body would run unlocked: celery-batches pushes a request as of a direct call."""
    batches = type("Batches", (Task,), {"abstract": True, "__module__": "celery_batches"})
    both = type("Both", (SingletonTask, batches), {"abstract": True})
    with pytest.raises(SettingsError, match=r"t: base=.*Batches'>: .* in the body, with `with"):
        declare(app, base=both).bind(app)
    assert "shop.t" not in app._tasks
    assert not hasattr(declare(app, base=batches, name="shop.plain"), "dislock_guard")
    assert not hasattr(declare(app, base=both, name="shop.off", lock_key=False), "dislock_guard")
    app.conf.dislock_enabled = True
    with pytest.raises(SettingsError, match=r"keyed: base=.*Batches'>"):
        declare(app, base=batches, name="shop.keyed").bind(app)


@pytest.mark.parametrize("where", ["run", "__call__"])
def test_a_body_that_nobody_awaits_fails_and_takes_no_lock(app, broker, heard, where):
    """A sender has no pool, so the task is bound; who runs it has to await it."""
    kind = type("Export", (SingletonTask,), {"name": "t", "lock_key": "k", where: coroutine})
    task = app.register_task(kind())
    task.delay()
    assert len(broker.sent) == 1
    failed = deliver(task, "1").retval
    assert isinstance(failed.exception, SettingsError)
    assert "t: worker_pool='no worker': its body is an `async def`" in str(failed.exception)
    assert not heard


@pytest.mark.parametrize("enabled", [True, False])
def test_an_eager_body_is_awaited_under_its_lock(app, enabled):
    """As a worker with a pool that awaits does it; without its lock where locks are off."""

    async def body(self):
        await asyncio.sleep(0)
        if enabled:
            ensure_held()
        return self.lease.held, enabled and current_lease() is self.lease, self.request.id

    app.conf.dislock_enabled = enabled
    result = declare(app, body).apply()
    assert result.get() == (enabled, enabled, result.id)


def test_what_a_plain_body_returns_must_not_have_to_be_awaited(app):
    """It would run when the lock is free again."""
    task = declare(app, lambda: coroutine())  # noqa: PLW0108 -- a plain function
    with pytest.raises(SettingsError, match=r"t.*: run='coroutine': .*without its lock"):
        task.apply().get()


def test_a_body_that_the_tracer_runs_elsewhere_takes_its_lock(app, monkeypatch):
    """celery-aio-pool's tracer has the request on the stack of its own thread."""
    leases = []
    monkeypatch.setattr(task_prerun, "receivers", [*task_prerun.receivers])
    monkeypatch.setattr(task_postrun, "receivers", [*task_postrun.receivers])
    follow_contexts()

    plain = {"base": Task, "lock_key": None}
    eager = declare(app, name="eager", **plain)
    task = declare(app, lambda self: (eager.apply(), leases.append(self.lease.held)))
    other = declare(app, lambda: task(), name="other", **plain)  # noqa: PLW0108 -- not a task
    kind = type(app.tasks[task.name])
    inner = kind.__call__

    def in_a_thread(self):  # also where another task calls it as a function
        thread = Thread(target=copy_context().run, args=(inner, self))
        thread.start()
        thread.join()

    monkeypatch.setattr(kind, "__call__", in_a_thread)
    deliver(task)
    task()
    deliver(other)
    assert leases == [True, False, False]


def by_function(corp_id):
    return f"plain:{corp_id}"


def by_method(self, corp_id):
    return f"{self.prefix}:{corp_id}"


def body(self, corp_id): ...


def class_of(key):
    return type("T", (SingletonTask,), {"name": "t", "prefix": "own", "lock_key": key, "run": body})


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (by_method, "own:7"),
        (by_function, "plain:7"),
        (staticmethod(by_function), "plain:7"),
        (classmethod(by_method), "own:7"),
        (property(lambda self: f"{self.prefix}:<corp_id>"), "own:7"),
        ("t:<corp_id>", "t:7"),
    ],
)
@pytest.mark.parametrize("as_base", [False, True])
def test_the_key_of_a_class_may_be_a_method(app, key, found, as_base):
    """It takes the arguments of the task; a plain function in a class stays one."""
    if as_base:
        task = app.task(base=class_of(key), name="of a base", bind=True)(body)
    else:
        task = app.register_task(class_of(key)())
    assert task.lock_for(7).key == found
    assert task.apply((), {"corp_id": 7}).successful()


@pytest.mark.parametrize("takes", ["", "args, kwargs"])
def test_a_method_that_does_not_take_what_the_task_takes_is_refused(app, takes):
    """When the task is bound; the message leaves `self` out."""
    method = eval(f"lambda self, {takes}: 'k'")  # noqa: S307 -- of this file
    with pytest.raises(SettingsError) as caught:
        app.register_task(class_of(method)())
    assert str(caught.value).startswith("t: lock_key=<bound method ")
    assert caught.value.remedy == (
        f"give a callable that takes the arguments of the task, (corp_id); this one takes ({takes})"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # Celery would take another name for an attribute, and lock by all its arguments.
        ({"lock_key": None, "key": "export"}, "lock_key"),
        ({"lock_key": None, "lock": "export"}, "lock_key"),
        ({"lock_key": None, "timeout": "export"}, "lock_watchdog_timeout"),
        ({"lock_key": None, "ttl": "export"}, "lock_expire"),
        # What a decorator is given is an option, also if it is a callable.
        ({"lock_key": None, "lock_keys": lambda n: f"export:{n}"}, "did you mean 'lock_key'"),
        # Somebody means lock_at_least_for, and would lose the method.
        ({"lock_for": 5}, "lock_for=5: no such option"),
        # A coroutine would be no key, and no strategy.
        ({"lock_key": coroutine}, "is not awaited"),
        ({"lock_on_conflict": coroutine}, "is not awaited"),
        ({"lock_on_conflict": len}, "takes the task and the conflict"),
        # A function that is given to the decorator is no method.
        ({"body": body, "lock_key": by_method}, r"this one takes \(self, corp_id\)$"),
    ],
    ids=[
        *("key", "lock", "timeout", "ttl", "misspelt", "lock_for", "a key that nobody awaits"),
        *("a strategy that nobody awaits", "no strategy", "a method"),
    ],
)
def test_an_option_that_a_task_cannot_have_is_refused(app, options, words):
    """When the task is bound; one by a name that others use is answered with ours."""
    declare(app, **options)
    with pytest.raises(SettingsError, match=words) as caught:
        app.finalize()
    assert caught.value.option == [name for name in options if name != "body"][-1]


def test_a_class_may_have_a_method_lock_for_of_its_own(app):
    """It is no option."""

    class Own(SingletonTask):
        abstract = True

        def lock_for(self, *args, **kwargs):
            return "mine"

    assert declare(app, base=Own).lock_for() == "mine"

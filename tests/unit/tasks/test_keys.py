"""The keys of tasks whose body gets models of pydantic, in the worker and when sending."""

from __future__ import annotations

import sys
from datetime import timedelta  # noqa: TC003 -- pydantic reads it
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from uuid import uuid4

import pytest
from celery import Task
from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator

from celery_dislock import Key, SingletonTask
from celery_dislock.config.settings import task_options
from celery_dislock.exceptions import LockKeyError
from celery_dislock.tasks.keys import TaskKeys
from celery_dislock.tasks.task import guard_of
from tests.declaring import declare
from tests.unit.deliveries import deliver


class Customer(BaseModel):
    """What an order has."""

    id: int


class Order(BaseModel):
    """What a task gets."""

    customer: Customer
    kind: str = "csv"
    every: timedelta | None = None

    @field_validator("kind")
    @classmethod
    def of_the_context(cls, value: str, info: ValidationInfo) -> str:
        """Take it from the context, if that has one."""
        return (info.context or {}).get("kind", value)

    @property
    def shard(self) -> int:
        """What no message has."""
        return self.customer.id % 10


def plain(order, n=1):
    return order.shard


def bound(self, order, n=1):
    return order.shard, self.lease.key


for body in (plain, bound):  # Celery 5.5 reads no annotation that is text
    body.__annotations__ = {"order": Order}


def export(app, body=plain, **options):
    key = "e:<order.customer.id>:<order.kind>:<order.shard>:<n>"
    options = {"lock_key": key, "pydantic": True, **options}
    return declare(app, body, **options)


SAME = [
    {"customer": {"id": 17}},
    {"customer": {"id": "17"}, "kind": "csv"},
    Order(customer=Customer(id=17)),
]


@pytest.mark.parametrize("sent", SAME)
@pytest.mark.parametrize("body", [plain, bound])
def test_a_key_is_made_of_the_model_that_the_body_gets(app, body, sent):
    """With defaults, converted values and properties; given by position or by name."""
    task = export(app, body)
    assert task.lock_for(sent).key == task.lock_for(order=sent).key == "e:17:csv:7:1"
    ran = deliver(task, "1", sent).retval
    assert ran == (7 if body is plain else (7, "e:17:csv:7:1"))


def test_the_key_of_a_message_is_that_of_its_task(app, broker):
    """Whether it names the defaults of the model or not."""
    task = export(app, lock_unique_until="end")
    assert [task.delay(sent).duplicate for sent in SAME[:2]] == [False, True]
    assert not task.delay({"customer": {"id": 17}, "kind": "pdf"}).duplicate
    deliver(task, broker.ids[0], SAME[1], headers=broker.sent[0].headers)
    assert not task.delay(SAME[0]).duplicate


def test_a_callable_gets_the_model(app):
    """As the body does."""
    task = export(app, lock_key=lambda order, n: f"{order.shard}:{n}")
    assert task.lock_for(SAME[0], n=2).key == "7:2"


def test_the_digest_is_that_of_the_model(app):
    """A default that is left out makes no other key."""
    task = export(app, lock_key=None)
    assert len({task.lock_for(sent).key for sent in SAME}) == 1
    assert task.lock_for({"customer": {"id": 18}}).key != task.lock_for(SAME[0]).key


def test_a_model_that_cannot_be_digested_is_digested_as_it_was_sent(app):
    """What JSON can have can be digested."""
    task = export(app, lock_key=None)
    keys = {task.lock_for({"customer": {"id": 17}, "every": every}).key for every in (60, 61)}
    assert len(keys) == 2
    with pytest.raises(LockKeyError, match="Order cannot be digested"):
        task.lock_for(Order(customer=Customer(id=17), every=60))


def test_celerys_options_for_models_are_heeded(app):
    """Strictness and context are those of the body."""
    task = export(app, pydantic_strict=True, pydantic_context={"kind": "pdf"})
    assert task.lock_for({"customer": {"id": 17}, "kind": "csv"}).key == "e:17:pdf:7:1"
    with pytest.raises(ValidationError, match="valid integer"):
        task.lock_for({"customer": {"id": "17"}})


@pytest.mark.parametrize("unique", [{}, {"lock_unique_until": "end"}])
def test_arguments_that_are_not_valid_fail_the_task_as_they_do_without_a_lock(
    app, lock_server, unique
):
    """With the same error, and no lock is taken."""
    task = export(app, **unique)
    failed = deliver(task, "1", {"customer": {}}).retval.exception
    app.task(plain, name="unlocked", pydantic=True, shared=False)
    expected = deliver(app.tasks["unlocked"], "2", {"customer": {}}).retval.exception
    assert type(failed) is type(expected) is ValidationError
    assert failed.errors() == expected.errors()
    assert lock_server.requests == 0


def test_what_is_said_of_arguments_that_are_not_valid_is_one_line(app, broker, caplog):
    """The error of pydantic has several."""
    export(app, lock_unique_until="end").delay({"customer": {}})
    [told] = caplog.messages
    assert "its key is unknown: 1 validation error for Order\\ncustomer.id\\n" in told
    assert "\n" not in told


CLUSTER = {"dislock_url": "redis+cluster://a"}


class Body:
    """A task's class, as far as its keys need it."""

    def run(self, t):
        """Do nothing."""


def in_order(**declared):
    """Return the keys of a call in the order in which they are taken, and their terms."""
    options = task_options("t", declared, {})
    keys = TaskKeys("t", Body, options, SimpleNamespace(conf={}))
    return keys.in_order(keys.of([7], {}), options.terms)


@pytest.mark.parametrize(
    ("declared", "order"),
    [
        (["api", "tenant:<t>"], ["tenant:7", "api"]),
        (["b", "a"], ["a", "b"]),
        ([Key("a", limit=5), Key("b", limit=2), "z"], ["z", "b", "a"]),
        ([Key("a:<t>", limit=10), "tenant:<t>", "api"], ["tenant:7", "a:7", "api"]),
        ([Key("a", rate="100/s"), Key("b", limit=5), Key("c", rate="1/m")], ["c", "b", "a"]),
        ([Key("a", rate="1/m"), Key("b", rate="1/h"), Key("c", rate="1/s")], ["b", "a", "c"]),
        ([Key("a", rate="100/s", limit=3), Key("b", limit=2)], ["b", "a"]),
        ([lambda t: f"shelf-{t}", "api"], ["shelf-7", "api"]),
        (lambda t: ["b", f"a{t}", "b"], ["a7", "b"]),
        ([Key(lambda _: ("z", "y"), limit=5), Key("x", limit=9), "api"], ["y", "z", "api", "x"]),
        ([lambda _: ["api", "a"], "api", Key("b", limit=2)], ["a", "api", "b"]),
        (["api", "<t>", "<<api>>"], ["7", "<api>", "api"]),
    ],
)
def test_narrow_keys_come_before_wide_ones(declared, order):
    """Who has many tasks waits in a line of his own; a slow rate is narrower than a small limit."""
    assert in_order(lock_key=declared)[0] == order


def test_the_mode_does_not_change_the_order():
    """A reader and a writer pass the same keys in one order, or they wait for each other."""
    for mode in ("shared", "exclusive"):
        assert in_order(lock_key=["b", "a"], lock_mode=mode)[0] == ["a", "b"]


def test_each_key_that_a_callable_returns_has_its_terms():
    """Beside those of the keys around it; of two for one key, the stricter ones."""
    declared = [Key(lambda t: [f"repo:{t}", "all"], limit=3), Key("all", limit=2), "other"]
    names, terms = in_order(lock_key=declared)
    assert names == ["all", "repo:7", "other"]
    assert [its.limit for its in terms] == [2, 3, 1]


@pytest.mark.parametrize(
    ("options", "conf", "why"),
    [
        ({"lock_on_conflict": "cancel"}, {}, "cancels nobody"),
        ({"lock_on_conflict": "queue"}, CLUSTER, "a cluster keeps no line"),
        ({"lock_rate": "1/s", "lock_on_conflict": "wait"}, CLUSTER, "count for themselves"),
        ({"lock_on_conflict": "wait"}, CLUSTER, None),
    ],
)
def test_a_callable_returns_several_only_where_a_list_may_have_them(options, conf, why):
    """It is refused at the call, for the reason for which a list is when the task is bound."""
    options = task_options("t", {"lock_key": lambda t: t, **options}, conf)
    keys = TaskKeys("t", Body, options, SimpleNamespace(conf=conf))
    assert keys.of([["one"]], {}) == [["one"]]
    if why is None:
        assert keys.of([["a", "b"]], {}) == [["a", "b"]]
        return
    with pytest.raises(LockKeyError, match=f"it returned 2 keys for task t; .*{why}"):
        keys.of([["a", "b"]], {})


def test_two_tasks_that_may_wait_for_each_other_are_told(app, caplog):
    """Their limits put the same two keys in different orders; those that take one are no matter."""
    for name, a, b in [("t.one", 2, 5), ("t.two", 5, 2), ("t.same", 1, 5)]:
        keys = [Key("a", limit=a), Key("b", limit=b), "c:<t>"]
        declare(app, lambda t: t, name=name, lock_key=keys, lock_on_conflict="queue")
    declare(app, lambda t: t, name="t.alone", lock_key="b", lock_on_conflict="queue")
    declare(app, lambda t: t, name="t.skips", lock_key=["b", "a"], lock_on_conflict="skip")
    app.finalize()
    told = [one for one in caplog.messages if "different orders" in one]
    pairs = [one.partition(" take ")[0] for one in told]
    assert pairs == ["Tasks t.one and t.two", "Tasks t.two and t.same"]


def none_of_doc(doc=None): ...


@pytest.mark.parametrize(
    ("declared", "body", "told"),
    [
        ("index:<doc>", none_of_doc, "'index:<doc>', argument <doc>: None is not allowed"),
        ("<doc.id>", none_of_doc, "argument <doc.id>: None has no 'id'"),
        (
            ["all", Key("<doc>", limit=2)],
            lambda self, *, doc=(): (self, doc),
            "<doc>: tuple is not",
        ),
        ("<doc>", lambda doc=sys: doc, "<doc>: module is not allowed"),
        ("<a>:<doc>", lambda a, doc=1.5: (a, doc), "<doc>: float is not allowed"),
        ("<doc>", lambda doc=7: doc, None),
        ("<doc>", lambda doc="": doc, "<doc>: the key is empty"),
        ("index:<doc>", lambda doc="": doc, None),
        ("<a>:<doc>", lambda a, doc="": (a, doc), None),
        ("<doc.numerator>", lambda doc=7: doc, None),
        ("<doc>", lambda doc, kind=None: (doc, kind), None),
        ("<doc>", lambda doc: doc, None),
        (lambda doc=None: f"k{doc}", none_of_doc, None),
        (None, none_of_doc, None),  # a digest may have it
    ],
)
def test_a_default_that_no_key_can_have_is_told_when_the_task_is_bound(
    app, caplog, declared, body, told
):
    """Each call without the argument fails, as the line says; one with it works as before."""
    task = declare(app, body, name=f"t.{uuid4()}", lock_key=declared, lock_on_conflict="wait")
    app.finalize()
    app.finalize()
    lines = [one for one in caplog.messages if "without the argument" in one]
    assert len(lines) == bool(told)
    others = {"a": 1} if "a" in signature(body).parameters else {}
    if told:
        assert told in lines[0]
        assert task.name in lines[0]
        with pytest.raises(LockKeyError) as caught:
            task.lock_for(**others)
        assert caught.value.reason in lines[0]
    assert task.lock_for(doc=Customer(id=7) if ".id" in str(declared) else 7, **others).key


def test_a_default_is_told_once_in_a_process(app, caplog):
    """A task that is guarded elsewhere gets a guard for each look at its lock."""
    name = f"t.{uuid4()}"
    declare(app, none_of_doc, base=Task, name=name, lock_key="<doc>")
    for _ in range(2):
        assert guard_of(app.tasks[name]).keys([7], {}) == ["7"]
    assert len([one for one in caplog.messages if "without the argument" in one]) == 1


def with_session(body):
    """Give a body an argument that no call has."""

    @wraps(body)
    def given(*args, **kwargs):
        return body(*args, session="session", **kwargs)

    return given


def unwrapped(body):
    """Hide the signature of a body; the task is one of its arguments."""

    def given(*args, **kwargs):
        return body(*args, **kwargs)

    return given


def narrowed(body):
    """Take other arguments than the body."""

    @wraps(body)
    def given(self, corp_id):
        return body(self, corp_id, session="session")

    return given


@pytest.mark.parametrize("around", [with_session, unwrapped, narrowed])
def test_a_decorator_may_give_a_body_what_no_call_has(app, around):
    """Celery runs such a task; its arguments alone make the key."""

    def body(self, corp_id, session="none"):
        return corp_id, session, self.lease.key

    def needs(self, corp_id, session):
        return corp_id, session, self.lease.key

    inner = around(body if around is unwrapped else needs)
    task = app.task(inner, name="t", bind=True, base=SingletonTask, shared=False)
    given = "none" if around is unwrapped else "session"
    for args, kwargs in (((7,), {}), ((), {"corp_id": 7})):
        key = task.lock_for(*args, **kwargs).key
        assert task.apply(args, kwargs).get() == (7, given, key)
    assert task.lock_for(8).key != task.lock_for(7).key


@pytest.mark.parametrize("says", [False, True])
def test_a_template_of_such_a_task_says_what_to_do(app, says):
    """A signature on what the decorator returns; else nobody knows which argument is which."""

    def body(corp_id, session):
        return corp_id, session

    inner = with_session(body)
    if says:
        inner.__signature__ = signature(lambda corp_id: corp_id)
    app.task(inner, name="t", lock_key="e:<corp_id>", base=SingletonTask, shared=False)
    task = app.tasks["t"]
    if says:
        assert task.lock_for(7).key == task.lock_for(corp_id=7).key == "e:7"
        assert task.apply((7,)).get() == (7, "session")
        return
    with pytest.raises(LockKeyError) as refused:
        task.apply((7,)).get()
    assert str(refused.value).startswith("lock_key 'e:<corp_id>': t() missing 1 required ")
    assert "set the __signature__" in refused.value.reason


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_types_that_only_a_type_checker_imports_are_not_evaluated(app):
    """Python 3.14 evaluates them when they are asked for; Celery does not ask."""
    lines = (
        "def body(order: OnlyChecked): return order",
        "def by_callable(order: OnlyChecked) -> OnlyChecked: return f'order:{order}'",
        "def decide(task: OnlyChecked, conflict: OnlyChecked): return 'skip'",
    )
    written = {}
    exec(compile("\n".join(lines), "shop", "exec", dont_inherit=True), written)  # noqa: S102
    for key in ("order:<order>", written["by_callable"]):
        options = {"lock_key": key, "lock_on_conflict": written["decide"]}
        about = {"name": f"t.{callable(key)}", "base": SingletonTask, "shared": False}
        task = app.task(**options, **about)(written["body"])
        assert task.lock_for(7).key == "order:7"

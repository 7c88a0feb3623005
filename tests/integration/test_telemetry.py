"""What is counted, traced and sent as an event of the locks of a process, while time is driven."""

import logging
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.exceptions import SoftTimeLimitExceeded
from celery.worker import state
from freezegun import freeze_time

import celery_dislock
from celery_dislock import Dislock, LockLostError, SingletonTask, current_lease
from celery_dislock.operating import counting, telemetry
from celery_dislock.operating.metrics import METRICS
from celery_dislock.operating.web.metrics import make_wsgi_app
from celery_dislock.parking.process import runtime_of
from tests.driven import KEY, Shop
from tests.holding import wait_for
from tests.scraping import scrape

NAME = 'a:of:b "c"\n\x1b[31m <script> ü {x}'
LIMIT = 30.0  # seconds


@pytest.fixture
def server(dislock_server):
    return dislock_server


@pytest.fixture
def app(request, server):
    nowhere = "redis://localhost:1/0"  # until the server is used in its place
    app = Celery("shop", broker=nowhere, backend="cache+memory://", set_as_current=False)
    app.conf.dislock_metrics = getattr(request, "param", True)
    Dislock(app)
    server.use(app)
    yield app
    runtime_of(app).close()


@pytest.fixture
def declare(app):
    """Declare a task with a lock; its body is run by what it is given."""

    def declare(body=lambda: None, **options):
        def run(*_args):
            return body()

        options = {"lock_key": "k", "name": NAME, "lock_watchdog_timeout": 3, **options}
        return app.task(base=SingletonTask, shared=False, **options)(run)

    return declare


@pytest.fixture
def scraped(app):
    """End the process, and tell what it has counted: by metric, outcome, task."""

    def read():
        runtime_of(app).close()
        samples = scrape(page)
        return {
            (name, *(label for label in labels if "@" not in label and label != worker)): number
            for (name, *labels), number in samples.items()
        }

    page, worker = make_wsgi_app(app), runtime_of(app).process.host
    return read


def pass_time(server, seconds):
    """Let time pass in steps, between which each renewal is over."""
    for _ in range(int(seconds * 2)):
        server.advance(0.5)


def test_all_that_happens_to_locks_is_counted(app, server, declare, scraped, monkeypatch):
    """Under the task's name, whatever it is called; without one in plain Python."""
    monkeypatch.setattr(counting, "EVERY", 1e12)  # no batch is on its way in an outage
    dislock, task = Dislock(app), declare()
    unique = declare(name="unique", lock_unique_until="start")
    task.apply()
    lock = dislock.lock("k")
    with server.hold("k"):
        task.apply()
        assert not lock.acquire(blocking=False)
    rated = dislock.lock("rated", rate="1/h")
    with rated:
        pass
    assert not rated.acquire(blocking=False)
    for end in ("capped", "gone", "expired"):
        lock = dislock.lock(end, watchdog_timeout=3, max_renew_times=2)
        lock.acquire()
        pass_time(server, 1.5)
        if end == "gone":
            server.lose(end)
        with server.outage() if end == "expired" else nullcontext():
            pass_time(server, 5)
        with pytest.raises(LockLostError):
            lock.release()
    for _ in range(2):
        unique.delay()
    with server.outage():
        task.apply(throw=False)
    told = scraped()
    expected = {
        ("acquisitions_total", "at_once", NAME): 1,
        ("acquisitions_total", "at_once", ""): 1 + 1 + 3,
        ("conflicts_total", "skip", NAME): 1,
        ("conflicts_total", "refused", ""): 1 + 1,
        ("early_total", ""): 1,
        ("renewals_total", ""): 2 + 1 + 1,
        ("capped_total", ""): 1,
        ("lost_total", "expired", ""): 1,
        ("lost_total", "gone", ""): 1,
        ("unavailable_total", "retry", NAME): 1,
        ("messages_total", "sent", "unique"): 1,
        ("messages_total", "duplicate", "unique"): 1,
        ("held_seconds_count", NAME): 1,
        ("held_seconds_count", ""): 1 + 1 + 3,
        ("wait_seconds_count", NAME): 1,
    }
    assert {sample: told.get(sample) for sample in expected} == expected
    named = {name.removesuffix("_count") for name, *_ in expected}
    assert named == {
        metric.name.removeprefix("celery_dislock_") for metric in METRICS if metric.kind != "gauge"
    }


def test_a_turn_that_comes_too_early_is_no_conflict(receive):
    """Its task comes again when it may start: no other delivery of it has the lock."""
    told = []
    with freeze_time(), Shop(dislock_metrics=True) as shop:
        task = shop.declare(name="t", lock_rate="1/10s")
        for task_id in "ab":
            shop.send(task, task_id)
        shop.work(later=1)
        shop.sweep()  # the turn's message is on its way
        shop.dislock.hold_back(KEY, 14)
        receive("lock_conflict", lambda **_: told.append(1))
        shop.work(later=10)
        assert (shop.ran, len(shop.put_off), told) == (["a"], 1, [])
        for _ in range(10):
            shop.work(later=1)
        assert shop.ran == ["a", "b"]
        shop.dislock.runtime.close()
        counts = next(one for name, one in shop.server.contents().items() if ":of:" in name)
    found = {field.decode(): int(number) for field, number in counts.items()}
    early = {one: many for one, many in found.items() if one.startswith(("conflicts", "early"))}
    assert early == {"conflicts queue t": 1, "early - t": 1}


@pytest.mark.parametrize("app", [False], indirect=True)
def test_where_nobody_asked_nothing_is_counted(app, declare, scraped):
    """The lock server gets no key of metrics."""
    declare().apply()
    assert set(scraped()) == {("server_up",)}


def test_an_outage_loses_no_counts(server, declare, scraped, caplog, monkeypatch):
    """They wait, and are sent when the server answers; an operator is told once per outage."""
    monkeypatch.setattr(counting, "EVERY", 0.0)
    task = declare()
    for _ in range(2):
        with server.outage():
            task.apply(throw=False)
            for _ in range(3):
                server.advance(0)
        server.advance(0)
    told = [one for one in caplog.messages if one.startswith("Counts for metrics cannot be sent")]
    assert len(told) == 2
    assert scraped()["unavailable_total", "retry", NAME] == 2


@pytest.mark.extra
def test_counts_wait_while_renewals_fail(server, declare, caplog, monkeypatch):
    """The time of an outage is for leases: none is sent until no lease is left to renew."""
    monkeypatch.setattr(counting, "EVERY", 0.0)
    failed = []

    def body():
        pass_time(server, 1)  # in which all that was counted before is sent
        with server.outage():
            pass_time(server, 3)
            other.apply(throw=False)
            pass_time(server, 1.5)
            failed.append("Counts for metrics cannot be sent" in caplog.text)
            pass_time(server, 9)

    other = declare(name="other", lock_key="other")
    declare(body, lock_watchdog_timeout=9).apply(throw=True)
    assert failed == [False]
    assert "Counts for metrics cannot be sent" in caplog.text


# Spans, in a process that uses OpenTelemetry.


class Span:
    def __init__(self):
        self.records = True
        self.attributes = {}
        self.events = []

    def is_recording(self):
        return self.records

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def add_event(self, name, attributes):
        self.events.append((name.removeprefix("celery_dislock."), attributes))


@pytest.fixture
def span(monkeypatch):
    """The span that is current."""
    span = Span()
    module = SimpleNamespace(get_current_span=lambda: span)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    return span


def test_this_package_does_not_import_opentelemetry():
    """An app that has it installed and does not use it pays nothing for it."""
    files = Path(celery_dislock.__file__).parent.rglob("*.py")
    imports = re.compile(r"^\s*(import|from) opentelemetry", re.MULTILINE)
    assert not any(imports.search(file.read_text("utf-8")) for file in files)


@pytest.mark.parametrize("module", [SimpleNamespace(), None, "sampled out"])
def test_where_nothing_records_nobody_is_told(declare, span, monkeypatch, module):
    """A trace that is sampled out; the module is being imported right now, or never was."""
    if module == "sampled out":
        span.records = False
    else:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    assert declare(lambda: 7).apply().get() == 7
    assert (span.attributes, span.events) == ({}, [])


def test_the_span_of_a_refused_task_names_the_holder(server, declare, span):
    """Who reads the trace of a skipped task sees why it was skipped."""
    with server.hold("k"):
        declare().apply()
    assert span.attributes == {"celery_dislock.key": "k", "celery_dislock.outcome": "skip"}
    [(name, about)] = span.events
    assert name == "conflict"
    assert about["celery_dislock.holder"].startswith("thread somebody else on ")


def test_losses_and_caps_are_events_of_the_span(server, declare, span):
    """They happen in the watchdog, which tells the span that the task had."""
    declare(lambda: pass_time(server, 10), max_renew_times=2).apply()
    assert [name for name, _ in span.events] == ["acquired", "capped", "lost"]
    assert span.events[1][1] == {"celery_dislock.key": "k", "celery_dislock.renewals": 2}
    assert "ran out" in span.events[2][1]["celery_dislock.reason"]


def test_a_defect_is_logged_and_harms_no_lock(declare, span, monkeypatch, caplog):
    """The task goes on, and an operator finds the reason for what is missing."""

    def broken():
        raise ValueError("defect")

    monkeypatch.setattr(sys.modules["opentelemetry.trace"], "get_current_span", broken)
    with caplog.at_level(logging.ERROR):
        assert declare(lambda: current_lease().held).apply().get() is True
    assert "locks are not affected" in caplog.text


@pytest.mark.parametrize("thrown", [SoftTimeLimitExceeded(), LockLostError("k", "gone")])
def test_what_is_thrown_into_the_body_in_the_middle_is_not_swallowed(
    declare, span, monkeypatch, thrown
):
    """It is for the task, and no defect."""

    def throw():
        raise thrown

    monkeypatch.setattr(sys.modules["opentelemetry.trace"], "get_current_span", throw)
    assert isinstance(declare().apply(throw=False).result, type(thrown))


def test_the_instrumentors_span_tells_of_the_lock(redis_url):
    """OpenTelemetry's own, in a worker: key, way, wait and token, and when it was released."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider, instrumentor = (
        InMemorySpanExporter(),
        TracerProvider(),
        CeleryInstrumentor(),
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor.instrument(tracer_provider=provider, meter_provider=MeterProvider())
    level = logging.getLogger().level
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=redis_url, worker_hijack_root_logger=False)

    @app.task(base=SingletonTask, lock_key="export:<n>", name="shop.export", shared=False)
    def export(n):
        return current_lease().token

    def spans():
        found = exporter.get_finished_spans()
        return [one for one in found if one.attributes.get("celery.action") == "run"]

    try:
        with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
            result = export.delay(7)
            token = result.get(timeout=LIMIT)
        (span,) = wait_for(spans, "the span of the task")
    finally:
        instrumentor.uninstrument()
        provider.shutdown()
        runtime_of(app).close()
        logging.getLogger().setLevel(level)  # the worker has changed it
    ours = {name: value for name, value in span.attributes.items() if "dislock" in name}
    prefix = "celery_dislock."
    wait, owner = ours.pop(f"{prefix}wait"), ours.pop(f"{prefix}owner")
    assert ours == {
        f"{prefix}key": "export:7",
        f"{prefix}outcome": "at_once",
        f"{prefix}token": token,
    }
    assert 0 <= wait < LIMIT
    assert owner.startswith(result.id)
    events = [event.name for event in span.events if event.name.startswith(prefix)]
    assert events == [f"{prefix}acquired", f"{prefix}released"]


# Events for those who watch the worker.


@pytest.fixture
def heard(monkeypatch):
    """Events that the worker's dispatcher gets, by their request; and those of a pool process."""
    heard = []

    def send_event(request, type_, **about):
        if type_.startswith("task-lock"):
            heard.append((request.id, type_, about))

    monkeypatch.setattr("celery.worker.request.Request.send_event", send_event)
    monkeypatch.setattr(telemetry, "send_events", lambda _app, *event: heard.append(event))
    return heard


def runs(app, server, task):
    """Run the task as a worker does; its request is one of those that run."""
    result = task.delay()
    server.run_parked()
    return result.id


@pytest.mark.parametrize("cap", [False, True])
def test_a_main_process_has_the_dispatcher_of_the_request(app, server, declare, heard, cap):
    """Key, reason and what becomes of the body; the dispatcher knows whether anybody listens."""
    happens = (lambda: pass_time(server, 3.5)) if cap else (lambda: server.lose("k"))
    task = declare(happens, max_renew_times=2)
    task_id = runs(app, server, task)
    [(of, type_, about)] = heard
    assert of == task_id
    if cap:
        assert 0 < about.pop("ends_in") < 3
        assert (type_, about) == (
            "task-lock-capped",
            {"key": "k", "renewals": 2, "action": "expire"},
        )
    else:
        assert "no longer has it" in about.pop("reason")
        assert (type_, about) == ("task-lock-lost", {"key": "k", "action": "warn"})


@pytest.mark.parametrize("wanted", [True, False])
def test_a_pool_process_sends_them_from_the_loop(app, server, declare, heard, monkeypatch, wanted):
    """A broker that is away delays no report; a task without events has none, as Celery's own."""
    monkeypatch.setattr(telemetry, "is_pool_process", lambda: True)
    before = set(state.active_requests)

    def body():
        server.lose("k")
        assert heard == []
        server.advance(0)

    task_id = runs(app, server, declare(body, send_events=wanted, lock_on_lost="warn"))
    if wanted:
        [(_, type_, about)] = heard
        assert (type_, about["uuid"], about["key"]) == ("task-lock-lost", task_id, "k")
    else:
        assert heard == []
    assert set(state.active_requests) <= before

"""The page for Prometheus: counters that never go down, gauges, and text that parses back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from wsgiref.util import setup_testing_defaults

import pytest

from celery_dislock.config.settings import AppSettings
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.counting import OTHER, TASKS_MOST
from celery_dislock.operating.metrics import BUCKETS, METRICS, PARTS
from celery_dislock.operating.web import metrics
from celery_dislock.operating.web.cache import Cache
from celery_dislock.operating.web.metrics import Collector, make_wsgi_app
from celery_dislock.scripts import COUNTS
from celery_dislock.servers.view import ReservationState
from tests.pages import FakeOverview, holder, lock, place
from tests.programs import NOT_HERE
from tests.unit.fakes import FakeClock

parser = pytest.importorskip("prometheus_client.parser")
CONTRIB = Path(__file__).parents[4] / "contrib"
INDEX = "dislock:metrics:{counts}"
HOSTILE = ['a"b', "a\nb", "a\\b", "\x1b[31mred", "<script>", "ü€", '"} 1\nevil_total 7', ""]


@pytest.fixture
def reading():
    """What is read: it is away, and a test says what else."""
    return {"celery_dislock_server_up": {(): 0.0}}


@pytest.fixture
def page(reading, monkeypatch):
    """Ask the page, as Prometheus does, and return the samples of its text."""
    monkeypatch.setattr(Collector, "read", lambda _self: reading)
    app = make_wsgi_app(SimpleNamespace(runtime=object()))

    def ask():
        environ = {}
        setup_testing_defaults(environ)
        text = b"".join(app(environ, lambda *_: None)).decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }

    return ask


def test_a_reading_that_takes_long_is_read_once_for_all(monkeypatch, reading):
    """A hundred thousand locks take a minute, and not a minute for each who asks."""
    asked = []
    clock = FakeClock()

    def read(_self):
        asked.append(clock.advance(60.0))
        return reading

    reading["celery_dislock_server_up"][()] = 1.0
    monkeypatch.setattr(Collector, "read", read)
    collector = Collector(SimpleNamespace(runtime=object()))
    collector._cache = Cache(0.0, clock)
    for _ in range(20):
        list(collector.collect())
    assert len(asked) == 1
    reading["celery_dislock_server_up"][()] = 0.0  # it took long because nobody answered
    clock.advance(600.0)
    for _ in range(2):
        list(collector.collect())
    assert len(asked) == 3


@pytest.mark.parametrize("name", HOSTILE)
def test_names_come_back_as_they_were(page, reading, name):
    """Whatever a task or a worker is called, the text is valid and has no sample of its making."""
    reading["celery_dislock_acquisitions_total"] = {(name, name, "at_once"): 3.0}
    labels = (("outcome", "at_once"), ("task", name), ("worker", name))
    up = ("celery_dislock_server_up", ())
    assert page() == {("celery_dislock_acquisitions_total", labels): 3.0, up: 0.0}


def test_a_histogram_is_cumulative(page, reading):
    """Each bucket has all that is at most its limit; the last has all."""
    numbers = [2, *[0] * (len(PARTS) - 3), 1, 4_000_500_000]
    reading["celery_dislock_held_seconds"] = {("t", "w"): numbers}
    found = page()
    of = (("task", "t"), ("worker", "w"))
    assert found["celery_dislock_held_seconds_count", of] == 3
    assert found["celery_dislock_held_seconds_sum", of] == 4000.5
    assert found["celery_dislock_held_seconds_bucket", (("le", "0.01"), *of)] == 2
    assert found["celery_dislock_held_seconds_bucket", (("le", "3600.0"), *of)] == 2
    assert found["celery_dislock_held_seconds_bucket", (("le", "+Inf"), *of)] == 3


def test_the_documentation_names_every_metric():
    """Its table is made of the declarations, to the letter; a bucket's word is its limit."""
    page = (CONTRIB.parent / "docs" / "how-to" / "metrics.md").read_text("utf-8")
    told = [line for line in page.splitlines() if line.startswith("| `celery_dislock_")]
    assert told == [
        f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)}"
        f" | {metric.meaning} |"
        for metric in METRICS
    ]
    assert tuple(map(float, PARTS[:-2])) == BUCKETS


EXPORTED = {
    f"{metric.name}{end}": {*metric.labels, *(("le",) if end == "_bucket" else ())}
    for metric in METRICS
    for end in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def expressions():
    """List the expressions of the dashboard and of the alerts, each with where it stands."""
    yaml = pytest.importorskip("yaml")
    dashboard = json.loads((CONTRIB / "grafana.json").read_text("utf-8"))
    found = [
        (f"panel {panel['title']}", target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    queries = [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    found += [
        ("variable", query if isinstance(query, str) else query["query"]) for query in queries
    ]
    alerts = yaml.safe_load((CONTRIB / "alerts.yml").read_text("utf-8"))
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    return found + [(f"alert {rule['alert']}", rule["expr"]) for rule in rules]


def test_dashboard_and_alerts_name_what_is_exported():
    """A metric or a label that is renamed breaks this test, and no dashboard in silence."""
    found = expressions()
    assert len(found) > 12
    for where, expression in found:
        names = set(re.findall(r"celery_dislock_\w+", expression))
        assert names, where
        assert names <= set(EXPORTED), (where, names - set(EXPORTED))
        labels = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression))
        for by in re.findall(r"(?:by|without|on)\s*\(([^)]*)\)", expression):
            labels |= {label.strip() for label in by.split(",") if label.strip()}
        of_these = set().union(*(EXPORTED[name] for name in names)) | {"job", "instance"}
        assert labels <= of_these, (where, labels - of_these)


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    """What nobody looks at need not be exported."""
    shown = " ".join(expression for _, expression in expressions())
    assert [metric.name for metric in METRICS if metric.name not in shown] == []


def test_every_alert_says_what_to_do():
    """Each has a severity, a summary and a description, and names the page that helps."""
    yaml = pytest.importorskip("yaml")
    alerts = yaml.safe_load((CONTRIB / "alerts.yml").read_text("utf-8"))
    for group in alerts["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"critical", "warning"}
            assert {"summary", "description", "runbook_url"} <= set(rule["annotations"])
            assert rule["alert"].startswith("Dislock")
            site, page, heading = re.fullmatch(
                r"(https://[\w.-]+/en/stable)/([\w/-]+)\.html(?:#([\w-]+))?",
                rule["annotations"]["runbook_url"],
            ).groups()
            text = (CONTRIB.parent / "docs" / f"{page}.md").read_text("utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
            assert heading is None or heading in slugs, (site, page, heading)


def test_the_alerts_are_on_their_page():
    """Who is woken finds there what happened and what to do."""
    page = (CONTRIB.parent / "docs" / "how-to" / "metrics.md").read_text("utf-8")
    told = set(re.findall(r"^\| `(Dislock\w+)` \|", page, re.MULTILINE))
    alerts = (CONTRIB / "alerts.yml").read_text("utf-8")
    assert told == set(re.findall(r"^ +- alert: (\w+)$", alerts, re.MULTILINE))


@pytest.mark.skipif(shutil.which("promtool") is None, reason=f"{NOT_HERE}promtool")
def test_promtool_accepts_the_alerts():
    """Prometheus itself parses the expressions."""
    subprocess.run(["promtool", "check", "rules", CONTRIB / "alerts.yml"], check=True)


# What is read of the lock server.


class FakeServer(FakeOverview):
    """What the workers have counted, and the locks; *failed* are errors of its members."""

    kind = "single"

    def __init__(self):
        super().__init__()
        self.counts = {}
        self.failed = []

    def run(self, script, keys):
        assert (script, keys) == (COUNTS, [INDEX])
        return [f"{INDEX}:of:{worker}".encode() for worker in self.counts]

    def run_many(self, script, calls, *, within):
        assert (script, within > 0) == (COUNTS, True)
        counts = [self.counts[name.rpartition(":of:")[2]] for _, name in calls]
        return [[[str(part).encode() for one in of.items() for part in one]] for of in counts]

    def names(self, failed):
        failed += self.failed
        return super().names()

    def look(self, names, most=0):
        return [state._replace(line=state.line[:most]) for state in super().look(names)]


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def read(server, monkeypatch):
    """Read the metrics of that server."""
    monkeypatch.setattr(metrics, "Overview", lambda _server, _prefix: server)
    store = SimpleNamespace(lock_server=server)
    process = SimpleNamespace(new_store=lambda _most: store)
    runtime = SimpleNamespace(process=process, settings=AppSettings())
    return Collector(SimpleNamespace(runtime=runtime)).read


def value(values, name, *labels):
    return values[f"celery_dislock_{name}"][labels]


def test_counters_have_the_labels_of_what_was_counted(server, read):
    """The worker comes from the name of the hash, the rest from the field."""
    server.counts["celery@w1"] = {
        "acquisitions at_once shop.export": 3,
        "capped - shop export": 1,
        "conflicts skip ": 2,
    }
    values = read()
    assert value(values, "acquisitions_total", "shop.export", "celery@w1", "at_once") == 3
    assert value(values, "capped_total", "shop export", "celery@w1") == 1
    assert value(values, "conflicts_total", "", "celery@w1", "skip") == 2
    assert value(values, "server_up") == 1


def test_what_another_version_counts_is_left_out(server, read):
    """An exporter that is older than the workers serves what it knows."""
    server.counts["w"] = {"dropped x t": 1, "held 0.3 t": 1, "held inf t": 2, "lost gone t": 1}
    values = read()
    assert value(values, "lost_total", "t", "w", "gone") == 1
    assert sum(value(values, "held_seconds", "t", "w")) == 2


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"lost gone t": 99}, 100),  # a failover lost the last one, or another server is asked
        ({"lost gone t": 101}, 101),
        ({"lost gone t": 40}, 40),  # the server was emptied
        ({"lost expired t": 60}, 100),  # a field that is missing
    ],
)
def test_a_counter_does_not_go_down_unless_it_begins_anew(server, read, now, told):
    """Prometheus would take the whole of a counter that went down a little for new."""
    server.counts["w"] = {"lost gone t": 100}
    read()
    server.counts["w"] = now
    assert value(read(), "lost_total", "t", "w", "gone") == told


def test_a_worker_that_went_away_is_forgotten(server, read):
    """Its series end; they are not added to another's, where they would look like new events."""
    server.counts["w"] = {"lost gone t": 100}
    read()
    del server.counts["w"]
    assert "celery_dislock_lost_total" not in read()
    server.counts["w"] = {"lost gone t": 60}
    assert value(read(), "lost_total", "t", "w", "gone") == 60


@pytest.mark.parametrize(("kind", "up"), [("cluster", 0), ("quorum", 1)])
def test_a_member_that_is_away_is_told_unless_the_others_have_its_locks(server, read, kind, up):
    """Of a cluster some locks are missing; several servers have the same."""
    server.kind, server.failed = kind, [StoreError("redis://fake", "away")]
    assert value(read(), "server_up") == up


def waiting(*tasks, **given):
    """Make a lock with these in line; None is no parked task."""
    line = [place(nth, parked=bool(task), task=task) for nth, task in enumerate(tasks)]
    return {"waiting": len(tasks), "line": line, **given}


def reserved(state, since):
    return {"reservation": ReservationState("i", state, since, 9.0, "m", 1)}


@pytest.mark.parametrize(
    ("locks", "gauges"),
    [
        (
            [{"holders": [holder()]}, {"holders": [holder(renewed=25.0, remaining=5.0)]}],
            {
                "leases": {("shop.export", "celery@w1"): 2},
                "leases_overdue": {("shop.export", "celery@w1"): 1},
            },
        ),
        (  # of what is not looked at, all is taken to be of the most frequent task
            [waiting("one", "two", "two"), waiting("two", "one", "two", "two", "two", waiting=9)],
            {
                "parked": {("one",): 1 + 1, ("two",): 2 + 8},
                "parked_oldest_seconds": {("one",): 5.0, ("two",): 5.0},
            },
        ),
        ([waiting(None, None)], {"parked": {}}),  # threads and worker slots
        (
            [reserved("waiting", 40.0), reserved("waiting", 10.0), reserved("ended", 5.0)],
            {
                "reservations": {("waiting",): 2, ("ended",): 1},
                "reservations_oldest_seconds": {("waiting",): 40.0, ("ended",): 5.0},
            },
        ),
        (
            [
                {"limit": 0, "limit_age": 40.0, "waiting": 3},
                {"limit": 0, "limit_age": 10.0, "waiting": 1},
                {"limit": 2, "limit_age": 5.0},
            ],
            {
                "limits": {("paused",): 2, ("limited",): 1},
                "limits_oldest_seconds": {("paused",): 40.0, ("limited",): 5.0},
                "limits_waiting": {("paused",): 4, ("limited",): 0},
            },
        ),
        (
            [
                {"ticked": 1.0, "holders": [holder(thread="beat")], "waiting": 2},
                {"ticked": 9.0},
                {"ticked": 9.0, "limit": 0, "limit_age": 9.0},
            ],
            {"beats": {("leading",): 1, ("standing by",): 2, ("missing",): 1}},
        ),
        ([{"waiting": 1}], {"beats": {}}),
    ],
)
def test_locks_are_counted(server, read, monkeypatch, locks, gauges):
    """By task and worker, or by state: how many there are, and the age of the oldest."""
    monkeypatch.setattr(metrics, "PLACES", 4)
    server.put(*(lock(str(nth), **given) for nth, given in enumerate(locks)))
    values = read()
    assert {name: values[f"celery_dislock_{name}"] for name in gauges} == gauges


def test_the_locks_that_are_looked_at_are_bounded(server, read, monkeypatch):
    """Beyond that the gauges are too low, and one says so."""
    server.put(*(lock(str(number), holders=[holder()]) for number in range(150)))
    assert "celery_dislock_locks_cut" not in read()
    monkeypatch.setattr(metrics, "PAGES_MOST", 1)
    found = read()
    assert (value(found, "locks_cut"), value(found, "server_up")) == (1, 1)
    assert value(found, "leases", "shop.export", "celery@w1") == 100


def test_labels_are_bounded(server, read):
    """Records in Redis may say anything, in any number; what stands in a label can be printed."""
    many = [f"t{number}" for number in range(TASKS_MOST - 1)]
    holders = [holder(task=task, worker="w") for task in ("\x1b", *many, "x" * 10_000)]
    server.put(lock(holders=holders, **reserved("waiting", 1.0)))
    values = read()
    assert len(values["celery_dislock_leases"]) == TASKS_MOST
    assert value(values, "leases", r"\x1b", "w") == 1
    assert value(values, "leases", OTHER, "w") == 2
    assert value(values, "reservations", "waiting") == 1

"""The page for Prometheus: what is read, as text that parses back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from wsgiref.util import setup_testing_defaults

import pytest

from celery_dislock.operating.metrics import METRICS, PARTS
from celery_dislock.operating.scraping import Reading
from celery_dislock.operating.web import metrics
from celery_dislock.operating.web.cache import Cache
from celery_dislock.operating.web.metrics import make_wsgi_app
from tests.unit.fakes import FakeClock

parser = pytest.importorskip("prometheus_client.parser")
CONTRIB = Path(__file__).parents[4] / "contrib"
HOSTILE = ['a"b', "a\nb", "a\\b", "\x1b[31mred", "<script>", "ü€", '"} 1\nevil_total 7', ""]


@pytest.fixture
def reading():
    return Reading()


@pytest.fixture
def page(reading, monkeypatch):
    """Ask the page, as Prometheus does or otherwise; return status, headers and text."""
    fake = SimpleNamespace(read=lambda: reading)
    monkeypatch.setattr(metrics, "Metrics", lambda _runtime: fake)
    app = make_wsgi_app(SimpleNamespace(runtime=object()))

    def ask(**environ):
        setup_testing_defaults(environ)
        answers = []
        body = b"".join(app(environ, lambda *answer: answers.append(answer)))
        (status, headers) = answers[0]
        return status, dict(headers), body.decode()

    return ask


def test_a_reading_that_takes_long_is_read_once_for_all(monkeypatch, reading):
    """A hundred thousand locks take a minute, and not a minute for each who asks."""
    asked = []
    clock = FakeClock()

    def read():
        asked.append(clock.advance(60.0))
        reading.up = True
        return reading

    monkeypatch.setattr(metrics, "Metrics", lambda _runtime: SimpleNamespace(read=read))
    collector = metrics.Collector(SimpleNamespace(runtime=object()))
    collector._cache = Cache(0.0, clock)
    for _ in range(20):
        list(collector.collect())
    assert len(asked) == 1


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_without_the_extra_the_error_names_it(monkeypatch):
    """Who has not installed prometheus_client is told what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'celery-dislock\[metrics\]'"):
        make_wsgi_app(SimpleNamespace(runtime=object()))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_come_back_as_they_were(page, reading, name):
    """Whatever a task or a worker is called, the text is valid and has no sample of its making."""
    reading.values["celery_dislock_acquisitions_total"] = {(name, name, "at_once"): 3.0}
    _, _, text = page()
    assert samples(text) == {
        (
            "celery_dislock_acquisitions_total",
            (("outcome", "at_once"), ("task", name), ("worker", name)),
        ): 3.0
    }


def test_a_histogram_is_cumulative(page, reading):
    """Each bucket has all that is at most its limit; the last has all."""
    numbers = [2, *[0] * (len(PARTS) - 3), 1, 4_000_500_000]
    reading.values["celery_dislock_held_seconds"] = {("t", "w"): numbers}
    found = samples(page()[2])
    of = (("task", "t"), ("worker", "w"))
    assert found["celery_dislock_held_seconds_count", of] == 3
    assert found["celery_dislock_held_seconds_sum", of] == 4000.5
    assert found["celery_dislock_held_seconds_bucket", (("le", "0.01"), *of)] == 2
    assert found["celery_dislock_held_seconds_bucket", (("le", "3600.0"), *of)] == 2
    assert found["celery_dislock_held_seconds_bucket", (("le", "+Inf"), *of)] == 3


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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts():
    """Prometheus itself parses the expressions."""
    subprocess.run(["promtool", "check", "rules", CONTRIB / "alerts.yml"], check=True)

"""What a process counts and sends, and the page for Prometheus that is read from the server."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating import counting
from celery_dislock.operating.checks.troubles import DAMAGED, NOT_READ, TROUBLES
from celery_dislock.operating.counting import OTHER, TASKS_MOST, Counters, instruments
from celery_dislock.operating.metrics import BUCKETS, COUNTED, METRICS, PARTS
from celery_dislock.operating.web import cache, metrics
from celery_dislock.operating.web.metrics import make_wsgi_app
from celery_dislock.scripts import COUNT
from tests.programs import NOT_HERE
from tests.scraping import scrape
from tests.staged import RESERVED, holder, lock, place
from tests.unit.operating.examining import told_in

CONTRIB = Path(__file__).parents[3] / "contrib"
INDEX = "dislock:metrics:{counts}"
HOSTILE = ['a"b', "a\nb", "a\\b", "\x1b[31mred", "<script>", "ü€", '"} 1\nevil_total 7', ""]
AWAY = StoreError("redis://fake", "away")
TOLD = told_in("gauges.txt")


@pytest.fixture(autouse=True)
def _no_reading_is_kept(monkeypatch):
    """However long it took on a busy machine."""
    monkeypatch.setattr(cache, "QUICK", 60.0)  # seconds


@pytest.fixture
def read(app):
    """Ask the page for its samples."""
    page = make_wsgi_app(app)
    return lambda: scrape(page)


@pytest.fixture
def count(server):
    """Have counts on the server, as a worker sends them, in place of those that it has sent."""

    def count(worker="w", **fields):
        name = f"{INDEX}:of:{worker}"
        server.send("DEL", name)
        if fields:
            written = ((field.replace("__", " "), number) for field, number in fields.items())
            added = [part for field in written for part in field]
            server.run(COUNT, [INDEX], name, 60_000, 1000, 1000, *added)

    return count


def of(values, name):
    """The samples of a metric, by the values of its labels."""
    return {tuple(labels): value for (metric, *labels), value in values.items() if metric == name}


# What is counted, and how it is sent: in batches, and again until they are confirmed.


class Sender:
    """Sends the counts of a process; notes how many fields it was sent.

    Attributes:
        error: Raised in place of a reply.
        loses: Whether the server does what it is asked all the same.
    """

    def __init__(self, server):
        self._server = server
        self.error = None
        self.loses = False
        self.sent = []
        self.counters = Counters("dislock", lambda: self.sent.append("woken"))

    def __call__(self, calls):
        if self.error and not self.loses:
            raise self.error
        replies = self._server.run_many(COUNT, calls, within=1.0)
        self.sent += [(len(call) - 5) // 2 for call in calls]
        if self.error:
            raise self.error
        return replies

    def add(self, what="acquisitions", outcome="at_once", task="shop.export", worker="w", **value):
        self.counters.add(what, {"task": task, "worker": worker}, outcome, **value)

    def flush(self):
        """Send what there is; tell whether something is left."""
        self.counters.flush(self)
        return self.counters.due_at < float("inf")


@pytest.fixture
def sender(server):
    sender = Sender(server)
    yield sender
    sender.error = None
    sender.flush()  # nothing is left to be sent when this process ends


def test_counts_are_added_up_and_sent_in_batches(sender, read):
    """A batch has a field for each kind of event; the first after a batch asks for the next."""
    assert (sender.flush(), sender.sent) == (False, [])  # an idle process costs nothing
    for number in (2, 4):
        for _ in range(2):
            sender.add()
        sender.add("renewals", "")
        assert not sender.flush()
        values = read()
        assert values["acquisitions_total", "at_once", "shop.export", "w"] == number
        assert values["renewals_total", "shop.export", "w"] == number / 2
    assert sender.sent == ["woken", 2] * 2


def test_seconds_go_into_their_bucket_and_into_the_sum(sender, read):
    """A bucket has what is at most its limit; on the page each has all of those before it, too."""
    for seconds in (0.01, 0.011, 0.5, 4000.0, -1.0):  # a clock that goes back counts as no time
        sender.add("held", "", value=seconds)
    sender.flush()
    told = of(read(), "held_seconds_bucket")
    at = {le: told[le, "shop.export", "w"] for le in ("0.01", "0.05", "0.5", "3600.0", "+Inf")}
    assert at == {"0.01": 2, "0.05": 3, "0.5": 4, "3600.0": 4, "+Inf": 5}
    assert read()["held_seconds_sum", "shop.export", "w"] == 4000.521
    assert read()["held_seconds_count", "shop.export", "w"] == 5


def test_a_batch_whose_reply_was_lost_counts_twice_at_most(sender, read):
    """A server that hangs finds it once in its sockets; until it answers it gets no other."""
    sender.error, sender.loses = AWAY, True
    for _ in range(5):
        sender.add()
        assert sender.flush()
    assert [one for one in sender.sent if one != "woken"] == [1, 0, 0, 0, 0]
    sender.error = None
    assert not sender.flush()
    assert read()["acquisitions_total", "at_once", "shop.export", "w"] == 1 + 5


def test_an_error_of_one_worker_leaves_the_others_alone(sender, read):
    """Only what was refused is sent again."""
    for worker in ("a", "b"):
        sender.add(worker=worker)
    sender.counters.flush(lambda calls: [*sender(calls[:1]), AWAY])
    assert not sender.flush()
    each = {("at_once", "shop.export", worker): 1 for worker in ("a", "b")}
    assert of(read(), "acquisitions_total") == each


def test_names_of_tasks_are_bounded(sender, read):
    """An app that makes up names of tasks does not fill the lock server."""
    for number in range(TASKS_MOST + 10):
        sender.add(task=f"t{number}")
    sender.add(task="x" * 10_000, worker="w" * 10_000)
    sender.flush()
    told = of(read(), "acquisitions_total")
    assert len(told) == TASKS_MOST + 2
    assert told["at_once", OTHER, "w"] == 10
    assert max(len(label) for labels in told for label in labels) == 200


def test_what_could_not_be_sent_is_left_for_the_next_batch(sender, read):
    """It is sent once; a server that is away raises nothing."""
    sender.add()
    sender.error = AWAY
    assert sender.flush()
    sender.error = None
    for _ in range(2):
        assert not sender.flush()
    assert of(read(), "acquisitions_total") == {("at_once", "shop.export", "w"): 1}


# OpenTelemetry.


def provided(monkeypatch, provider):
    """Have a process use OpenTelemetry's metrics with this provider."""
    module = SimpleNamespace(get_meter_provider=lambda: provider)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", module if provider else None)
    monkeypatch.setattr(counting, "_made", [])


@pytest.mark.parametrize("name", ["_ProxyMeterProvider", "NoOpMeterProvider", None])
def test_the_api_alone_records_nothing(monkeypatch, name):
    """redis-py imports it wherever it is installed; what counts is that the app has set it up."""
    provided(monkeypatch, name and type(name, (), {})())
    assert instruments() is None


def test_every_metric_has_an_instrument(monkeypatch):
    """What is counted for Prometheus is recorded for OpenTelemetry, too, by the same labels."""
    recorded = []

    def make(name, **_about):
        def record(value, attributes):
            recorded.append((name.removeprefix("celery_dislock."), value, dict(attributes)))

        return SimpleNamespace(add=record, record=record)

    kinds = ("create_counter", "create_histogram", "create_up_down_counter")
    meter = SimpleNamespace(**dict.fromkeys(kinds, make))
    provided(monkeypatch, SimpleNamespace(get_meter=lambda _name: meter))
    for word in COUNTED:
        instruments().record(word, "skip", "t", "w", 1)
    assert sorted(name for name, *_ in recorded) == sorted([*COUNTED, "leases", "leases"])
    assert ("conflicts", 1, {"task": "t", "worker": "w", "outcome": "skip"}) in recorded


# The counts on the lock server.


def test_every_key_of_counts_expires(server):
    """Nothing stays for ever of workers that have gone; a call without counts adds none."""
    add(server)
    assert server.names() == set()
    for _ in range(2):
        add(server, "lost gone t", 3)
    assert server.contents()[f"{INDEX}:of:w"] == {b"lost gone t": b"6"}
    assert server.ttls() == dict.fromkeys([INDEX, f"{INDEX}:of:w"], 60_000)
    server.advance(61)
    assert server.names() == set()


def test_workers_and_fields_are_bounded(server):
    """Those that counted last are kept; a full hash goes on with the names that it has."""
    for number in range(10):
        add(server, "a", 1, worker=f"w{number}", most=3)
        server.advance(0.001)
    assert server.names() == {INDEX, *(f"{INDEX}:of:w{number}" for number in (7, 8, 9))}
    server.advance(30)
    add(server, *(part for n in range(20) for part in (f"f{n}", 1)), room=10)
    add(server, "f0", 1, "new", 1, room=10)
    server.advance(31)  # those of before have ended, and leave the index with the next batch
    add(server, "f0", 1, room=10)
    assert server.names() == {INDEX, f"{INDEX}:of:w"}
    counts = server.contents()[f"{INDEX}:of:w"]
    assert (len(counts), counts[b"f0"]) == (10, b"3")
    assert server.send("ZRANGE", INDEX, 0, -1) == [f"{INDEX}:of:w".encode()]


def add(server, *fields, worker="w", most=1000, room=1000):
    """Send a batch as a process does."""
    counts = f"{INDEX}:of:{worker}"
    assert server.run(COUNT, [INDEX], counts, 60_000, most, room, *fields) == 1


# The page.


@pytest.mark.parametrize("name", HOSTILE)
def test_names_come_back_as_they_were(sender, read, name):
    """Whatever a task or a worker is called, the text is valid and has no sample of its making."""
    sender.add(task=name, worker=name)
    sender.flush()
    values = read()
    assert of(values, "acquisitions_total") == {("at_once", name, name): 1.0}
    assert values["server_up",] == 1
    assert not any("evil" in metric for metric, *_ in values)


def test_what_another_version_counts_is_left_out(count, read):
    """An exporter that is older than the workers serves what it knows."""
    count(
        **{"dropped x t": 1, "held 0.3 t": 1, "held inf t": 2, "lost gone t": 1, "lost gone u": "x"}
    )
    values = read()
    assert of(values, "lost_total") == {("gone", "t", "w"): 1}
    assert values["held_seconds_count", "t", "w"] == 2


@pytest.mark.parametrize(
    "steps",
    [
        [({"lost gone t": 99}, 100)],  # a failover lost the last one, or another server is asked
        [({"lost gone t": 101}, 101)],
        [({"lost gone t": 40}, 40)],  # the server was emptied
        [({"lost expired t": 60}, 100)],  # a field that is missing
        [({}, None), ({"lost gone t": 60}, 60)],  # of a worker that went away the series end
    ],
)
def test_a_counter_does_not_go_down_unless_it_begins_anew(count, read, steps):
    """Prometheus would take the whole of a counter that went down a little for new."""
    count(**{"lost gone t": 100})
    read()
    for now, told in steps:
        count(**now)
        assert of(read(), "lost_total").get(("gone", "t", "w")) == told


@pytest.mark.parametrize("damaged", [INDEX, f"{INDEX}:of:w"])
def test_a_key_of_a_wrong_type_stops_no_page(server, count, read, damaged):
    """Somebody wrote over our names: the page says that something is wrong, and is served."""
    count(**{"lost gone t": 100})
    server.send("SET", damaged, "?")
    assert read()["server_up",] == 0


@pytest.mark.parametrize(("kind", "up"), [("cluster", 0), ("quorum", 1)])
def test_a_member_that_is_away_is_told_unless_the_others_have_its_locks(server, read, kind, up):
    """Of a cluster some locks are missing; several servers have the same."""

    def away(*_command):
        raise AWAY

    server.kind, server.senders = kind, lambda: [server.send, server.send, away]
    assert read()["server_up",] == up


def test_a_reading_that_takes_long_is_read_once_for_all(server, app, monkeypatch):
    """A hundred thousand locks take a minute, and not a minute for each who asks."""
    now, scans = 0.0, []

    def scan():
        nonlocal now
        now += 90.0
        scans.append(now)
        if server.error:
            raise server.error
        return [server.send]

    server.senders = scan
    monkeypatch.setattr(metrics, "Cache", lambda kept: cache.Cache(kept, lambda: now))
    page = make_wsgi_app(app)
    for _ in range(20):
        scrape(page)
    assert len(scans) == 1
    server.error = AWAY  # it takes long because nobody answers
    now += 600.0
    server.run = lambda *_: []
    for _ in range(2):
        assert scrape(page)["server_up",] == 0
    assert len(scans) == 3


def waiting(*tasks, **given):
    """Make a lock with these in line; None is no parked task."""
    line = [place(nth, parked=bool(task), task=task) for nth, task in enumerate(tasks)]
    return {"waiting": len(tasks), "line": line, **given}


def reserved(state, since):
    return {"reservation": RESERVED._replace(state=state, since=since)}


OVERDUE = {"holders": [holder(renewed=25.0, remaining=5.0)]}
LOCKS = {
    "leases": [{"holders": [holder()]}, OVERDUE],
    # Of what is not looked at, all is taken to be of the most frequent task.
    "parked": [waiting("one", "two", "two"), waiting("two", "one", *["two"] * 3, waiting=9)],
    "threads and worker slots": [waiting(None, None)],
    "reservations": [reserved("waiting", 40.0), reserved("waiting", 10.0), reserved("ended", 5.0)],
    "troubles": [
        {"limit": 0, "limit_age": 40.0, "waiting": 3},
        {"limit": 0, "limit_age": 10.0},
        {"limit": 2, "limit_age": 5.0, "aside": 1},
        {"limit": 2, "limit_age": 5.0},  # nobody waits
        OVERDUE,
    ],
    "beats": [
        {"ticked": 1.0, "holders": [holder(thread="beat")], "waiting": 2},
        {"ticked": 9.0},
        {"ticked": 9.0, "limit": 0, "limit_age": 9.0},
    ],
    "no beats": [{"waiting": 1}],
    "a turn": [{"turns": [place(0, turns=3)]}],  # and nobody in line
}


@pytest.mark.parametrize("case", LOCKS)
def test_locks_are_counted(server, read, monkeypatch, case):
    """By task and worker, state or trouble: how many there are, and the age of the oldest."""
    monkeypatch.setattr(metrics, "PLACES_SHOWN", 4)
    server.put(*(lock(str(nth), **given) for nth, given in enumerate(LOCKS[case])))
    told = sorted(", ".join([*series, f"{number:.1f}"]) for series, number in read().items())
    assert told == TOLD[case]


def test_a_lock_that_is_damaged_is_counted_as_such(server, read):
    """The others are counted as ever."""
    server.put(lock("k", holders=[holder()]))
    server.damage("d")
    values = read()
    assert (values["troubles", "damaged"], values["server_up",]) == (1, 1)
    assert values["leases", "shop.export", "celery@w1"] == 1


def test_the_locks_that_are_looked_at_are_bounded(server, read, monkeypatch):
    """Beyond that the gauges are too low, and one says so."""
    server.put(*(lock(str(number), holders=[holder()]) for number in range(150)))
    assert of(read(), "locks_cut") == {}
    monkeypatch.setattr(metrics, "LOCKS_MOST", 100)
    found = read()
    assert (found["locks_cut",], found["server_up",]) == (1, 1)
    assert found["leases", "shop.export", "celery@w1"] == 100


def test_labels_are_bounded(server, read):
    """Records in Redis may say anything, in any number; what stands in a label can be printed."""
    many = [f"t{number}" for number in range(TASKS_MOST - 1)]
    named = enumerate(("\x1b", *many, "x" * 10_000))
    holders = [holder(number, task=task, worker="w") for number, task in named]
    server.put(lock(holders=holders, **reserved("waiting", 1.0)))
    values = read()
    assert len(of(values, "leases")) == TASKS_MOST
    assert values["leases", r"\x1b", "w"] == 1
    assert values["leases", OTHER, "w"] == 2
    assert values["reservations", "waiting"] == 1


# What is said of the metrics elsewhere.


def test_the_word_of_a_bucket_is_its_limit():
    """As processes count it, and Prometheus calls it."""
    assert tuple(map(float, PARTS[:-2])) == BUCKETS


EXPORTED = {
    f"{metric.name}{end}": {*metric.labels, *(("le",) if end == "_bucket" else ())}
    for metric in METRICS
    for end in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


ALERTS = (CONTRIB / "alerts.yml").read_text("utf-8")


def rules():
    """List the rules of all alerts."""
    groups = pytest.importorskip("yaml").safe_load(ALERTS)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions():
    """List the expressions of the dashboard and of the alerts, each with where it stands."""
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
    return found + [(f"alert {rule['alert']}", rule["expr"]) for rule in rules()]


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
    """Each has a severity, says what happened and what to do, and names the page that helps."""
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert {"summary", "description", "action", "runbook_url"} == set(rule["annotations"])
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
    told = set(re.findall(r"^\| \[?`(Dislock\w+)`", page, re.MULTILINE))
    assert told == set(re.findall(r"^ +- alert: (\w+)$", ALERTS, re.MULTILINE))


def test_every_trouble_of_a_lock_has_an_alert():
    """What `ls` calls trouble wakes somebody: by its name, or by a metric that says it better."""
    otherwise = {"overdue", "not read", "no leader"}  # leases_overdue, server_up, beats
    names = {row.name for row in (*TROUBLES, DAMAGED, NOT_READ)}
    told = re.findall(r'trouble=~?"([^"]+)"', ALERTS)
    assert set("|".join(told).split("|")) == names - otherwise


@pytest.mark.skipif(shutil.which("promtool") is None, reason=f"{NOT_HERE}promtool")
def test_promtool_accepts_the_alerts():
    """Prometheus itself parses the expressions."""
    subprocess.run(["promtool", "check", "rules", CONTRIB / "alerts.yml"], check=True)

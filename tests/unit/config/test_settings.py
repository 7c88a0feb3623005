"""Options and settings: what they accept, and what they say when they do not."""

import math
import re
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.config.settings import app_settings, apply_options, check_settings, task_options
from celery_dislock.config.urls import group
from celery_dislock.exceptions import SettingsError

SEVERAL = {"dislock_url": ["redis://a", "rediss://b:1/0", "unix:///c.sock"]}
CLUSTER = {"dislock_url": "redis+cluster://a"}
UNTIL_START = {"lock_unique_until": "start"}


def refused(**declared):
    with pytest.raises(SettingsError) as caught:
        task_options("shop.export", declared, {})
    return caught.value


@pytest.mark.parametrize(
    ("declared", "conf", "strategy"),
    [
        (UNTIL_START, {}, "queue"),
        ({**UNTIL_START, "lock_key": ["<a>", "<b>"]}, {}, "queue"),
        ({**UNTIL_START, "lock_key": ["a", "b"]}, CLUSTER, "retry"),  # has no line
        ({"lock_unique_until": "end", "lock_on_duplicate": "replace"}, {}, "queue"),
        ({"lock_unique_until": "end"}, {}, "skip"),
        ({"lock_unique_until": "expiry"}, {}, "skip"),
        ({**UNTIL_START, "lock_on_conflict": "skip"}, {}, "skip"),
    ],
)
def test_what_has_changed_since_a_task_began_is_not_missed(declared, conf, strategy):
    """Where a message may be sent while an older one runs, it is not dropped unless you say so."""
    assert task_options("t", declared, conf).lock_on_conflict == strategy


def refuse(owner, option, value):
    """Give a task, an app or a lock an option that it cannot have."""
    if owner == "shop.export":
        task_options(owner, {option: value}, {})
    elif owner == "app.conf":
        app_settings({option: value})
    else:
        Dislock(Celery("shop", set_as_current=False)).lock("k", **{option: value})


@pytest.mark.parametrize("told", (Path(__file__).parent / "refused.txt").read_text().splitlines())
def test_a_bad_value_names_task_option_value_and_remedy(told):
    """The error carries what an operator needs to mend it, as text and as attributes.

    An option that looks like one of ours, or is one of another library, is not silently ignored.
    """
    owner, option, written, remedy = re.match(r"(.+?): (\w+)=(\{.*?\}|.*?): (.*)", told).groups()
    value = eval(written, {"inf": math.inf, "nan": math.nan})  # noqa: S307 -- of our file
    with pytest.raises(SettingsError) as caught:
        refuse(owner, option, value)
    error = caught.value
    assert (error.owner, error.option, repr(error.value)) == (owner, option, written)
    assert (error.remedy, str(error)) == (remedy, told)


@pytest.mark.parametrize(
    ("declared", "at_fault"),
    [
        ({"lock_expire": 600, "lock_watchdog_timeout": 60}, "lock_watchdog_timeout"),
        ({"lock_expire": 600, "max_renew_times": 60}, "max_renew_times"),
        ({"lock_expire": 600, "lock_on_cap": "raise"}, "lock_on_cap"),
        ({"lock_mode": "shared", "lock_limit": 5}, "lock_limit"),
        ({"lock_on_conflict": "retry", "lock_wait_timeout": 5}, "lock_wait_timeout"),
    ],
)
def test_two_options_of_which_one_has_no_effect_are_refused(declared, at_fault):
    """The task says both, and means one of them: the message names the two."""
    error = refused(**declared)
    other, value = next(iter(declared.items()))
    assert (error.owner, error.option) == ("shop.export", at_fault)
    assert error.remedy.startswith(f"it has no effect with {other}={value!r}")
    assert error.remedy.endswith("leave one of the two out")


def decide(task, conflict):
    raise AssertionError


@pytest.mark.parametrize(
    ("conf", "declared", "resolved"),
    [
        ({"dislock_max_renew_times": 5}, {}, {"max_renew_times": 5, "lock_on_conflict": "skip"}),
        (
            {"dislock_watchdog_timeout": 60},
            {"lock_watchdog_timeout": 9},
            {"lock_watchdog_timeout": 9},
        ),
        # An option of a strategy: what a callable returns is not known before.
        ({}, {"lock_on_conflict": decide, "lock_wait_timeout": 5}, {"lock_wait_timeout": 5}),
        ({"dislock_on_conflict": "wait"}, {"lock_wait_timeout": 5}, {"lock_on_conflict": "wait"}),
        ({"dislock_wait_timeout": 5, "dislock_dedupe_for": 6}, {}, {"lock_wait_timeout": 5}),
        # A strategy for all tasks counts for more than any default.
        ({"dislock_on_conflict": "skip"}, UNTIL_START, {"lock_on_conflict": "skip"}),
        ({"dislock_watchdog_timeout": 60}, {"lock_expire": 600}, {"lock_expire": 600}),
        ({"dislock_on_cap": "raise"}, {"lock_expire": 600}, {"lock_expire": 600}),
        ({"dislock_limit": 5}, {"lock_mode": "shared"}, {"lock_mode": "shared", "lock_limit": 1}),
        ({"dislock_expire": 600}, {"lock_watchdog_timeout": 60}, {"lock_expire": None}),
        ({"dislock_expire": 600}, {"max_renew_times": 6}, {"lock_expire": None}),
        ({"dislock_mode": "shared"}, {"lock_limit": 5}, {"lock_mode": "exclusive"}),
        ({"dislock_expire": 600, "dislock_on_cap": "raise"}, {}, {"lock_expire": 600}),
    ],
)
def test_what_a_task_declares_overrules_a_setting_and_that_a_default(conf, declared, resolved):
    """The app's settings are meant for tasks that say nothing else."""
    options = task_options("t", declared, conf)
    assert {name: getattr(options, name) for name in resolved} == resolved


def test_a_good_value_comes_back_as_the_code_uses_it():
    """A duration is a float, a mapping a dict of its own, a list of URLs a tuple."""
    brief = timedelta(milliseconds=1)
    options = task_options("t", {"lock_expire": brief, "lock_at_least_for": 0}, {})
    assert [options.lock_expire, options.lock_at_least_for] == [0.001, 0.0]
    assert type(options.lock_at_least_for) is float
    given = MappingProxyType({"db": 1})
    settings = app_settings({**SEVERAL, "dislock_transport_options": given})
    assert settings.dislock_url == tuple(SEVERAL["dislock_url"])
    assert type(settings.dislock_transport_options) is dict
    assert settings.dislock_transport_options == given


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"backend": "celery_once.backends.Redis"}, {"backend": "celery_once.backends.Redis"}),
        ({"url": "redis://:s3cret@x/1"}, {"url": "redis://:***@x/1"}),
        ({"settings": {"url": "s3cret"}}, {"settings": {"url": "***"}}),
        ({"db_password": 12345, "keys": ["a", "b"]}, {"db_password": "***", "keys": ["a", "b"]}),
        (["redis://:s3cret@x", b"redis://:s3cret@x"], ["redis://:***@x", "***"]),
    ],
)
def test_an_option_is_shown_but_for_what_may_be_secret_in_it(given, shown):
    """What hides everything leaves nobody the wiser."""
    assert refused(once=given).value == shown


QUEUE, TWO_KEYS = {"lock_on_conflict": "queue"}, {"lock_key": ["a", "b"]}


@pytest.mark.parametrize(
    ("declared", "conf", "remedy"),
    [
        ({**TWO_KEYS, **QUEUE}, CLUSTER, "give one key, or"),
        (TWO_KEYS, {"dislock_on_conflict": "queue", **CLUSTER}, "give one key, or"),
        (QUEUE, {"dislock_url": ["redis://a", "redis://b", "redis://c"]}, "keep no line;"),
        (QUEUE, {"dislock_url": ("redis://a",) * 3}, "keep no line;"),
    ],
)
def test_a_task_whose_keys_are_on_several_servers_is_not_parked(declared, conf, remedy):
    """No script sees all of its lines; the message names what can be done."""
    with pytest.raises(SettingsError) as caught:
        task_options("t", declared, conf)
    assert (caught.value.option, caught.value.value) == ("lock_on_conflict", "queue")
    assert f"{remedy} use 'wait' or 'retry'" in caught.value.remedy


def test_other_attributes_are_nobodys_business():
    """Attributes that look like none of our options are left alone."""
    task_options("t", {"mode": 5, "queue_name": "x", "retries_left": 2}, {})


def configured(namespace=None, **settings):
    """Return the configuration of an app that has these settings, as Django's are read."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object(SimpleNamespace(**settings), namespace=namespace)
    return app.conf


@pytest.mark.parametrize("line", (Path(__file__).parent / "misnamed.txt").read_text().splitlines())
def test_a_setting_that_nobody_reads_is_answered_with_the_name_that_is_read(line):
    """An option's name, or another namespace, would leave the default without a word."""
    namespace, told = line.split(" | ")
    option = re.match(r"app\.conf: (\w+)=", told)[1]
    with pytest.raises(SettingsError) as caught:
        check_settings(configured(None if namespace == "none" else namespace, **{option: "raise"}))
    assert (caught.value.option, str(caught.value)) == (option, told)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(("namespace", "prefix"), [(None, ""), ("CELERY", "CELERY_")])
def test_a_command_line_wins_over_the_settings(namespace, prefix, read):
    """Also over Django's, before they are read and after; Celery 5.5 prefers those."""
    app = Celery("shop", set_as_current=False)
    given = {"dislock_url": "redis://a", "dislock_enabled": True}
    given = {prefix + (name.upper() if prefix else name): given[name] for name in given}
    app.config_from_object(SimpleNamespace(**given), namespace=namespace)
    if read:
        assert app.conf.dislock_url == "redis://a"
    apply_options(app, dislock=False, dislock_url=["redis://b"])
    assert app.conf.dislock_url == "redis://b"
    assert app.conf.dislock_enabled is False
    assert app_settings(app.conf).dislock_url == "redis://b"


@pytest.mark.parametrize(
    "settings",
    [
        {"DISLOCK_URL": "redis://a", "CELERY_DISLOCK_URL": "redis://a"},
        {"CELERY_DISLOCK_ON_CONFLICT": "skip", "CELERY_LOCK_ON_CONFLICT": "skip"},
        {"LOCK_MODE": "theirs", "LOCK_LIMIT": 5, "BLOCK_URL": "x", "CELERY_CLOCK_LIMIT": 5},
        {"TEST_DISLOCK_URL": "redis://a", "DLOCK_URL": "x", "MAX_RENEW_TIMES": 5},
    ],
)
def test_the_settings_of_others_are_nobodys_business(settings):
    """Django's are those of a whole project; and a name may be there to feed the right one."""
    check_settings(configured("CELERY", **settings))


def test_a_setting_of_a_later_version_is_a_warning(caplog):
    """After a rollback of the package alone the workers start; each name is told once."""
    later = {"CELERY_DISLOCK_WEATHER": "redis://:s3cret@a", "CELERY_DISLOCK_ICE_CREAM": "3"}
    for _ in range(2):
        assert task_options("t", {}, configured("CELERY", **later)).lock_mode == "exclusive"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert [name for name in later if name not in caplog.text] == []
    assert "is ignored" in caplog.text
    assert "s3cret" not in caplog.text


def of_a_task(**declared):
    return lambda conf: task_options("t", declared, conf)


@pytest.mark.parametrize(
    ("reads", "conf", "says"),
    [
        (of_a_task(lock_expire=600), {"dislock_watchdog_timeout": 0}, "dislock_watchdog_timeout=0"),
        (of_a_task(lock_rate="1/d"), SEVERAL, r"lock_rate=.*keep exclusive locks only"),
        (app_settings, {**SEVERAL, "dislock_min_replicas": 1}, "replicas=1: not with several"),
        (app_settings, {"dislock_transport_options": [1]}, r"options='\*\*\*': give a dict"),
        (check_settings, {"dislock_on_conflikt": 5}, r"^app\.conf: dislock_on_conflikt=5: no such"),
        (lambda conf: Dislock.from_url("redis://a", **conf), {"ice": "lemon"}, "no such setting"),
    ],
    ids=[
        "overruled by a task",
        "a rate",
        "replicas",
        "options",
        "misspelt",
        "of a later version, in a call",
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name_and_value(reads, conf, says):
    """Whatever the tasks say; a rate by its name, and not by that of the limit that it leaves."""
    with pytest.raises(SettingsError, match=says):
        reads(conf)


SECRET_URLS = ["http://user:secret@x/path?secret", "redis:secret@x", "secret", "http://:se/cr@et@x"]


@pytest.mark.parametrize(
    "conf",
    [
        lambda url: {"dislock_url": url},
        lambda url: {"dislock_url": [url, url, url]},
        lambda url: {"dislock_url": {"url": url}},
        lambda url: {"dislock_url": {url}},
        lambda url: {"dislock_transport_options": url},
        lambda url: {"dislock_urls": url},
        lambda url: {"CELERY_DISLOCK_SERVER_URL": url},
        lambda url: {"dislock_transport_options": [("password", url)]},
        lambda url: {"dislock_transport_option": {"password": url}},
    ],
)
def test_no_error_about_a_setting_shows_a_password(conf):
    """Whatever is wrong with the URL, and wherever it stands."""
    for url in SECRET_URLS:
        with pytest.raises(SettingsError) as caught:
            app_settings(conf(url))
        told = f"{caught.value} {caught.value!r}"
        assert not any(part in told for part in ("se/cr", "@et", "cret"))


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://:s3cret@a;redis://b",
        "sentinel://:s3cret@a:port",
        "redis+cluster://:s3cret@",
    ],
)
def test_no_error_about_hosts_shows_a_password(url):
    """One has another scheme, a port is no number, or there is no host."""
    with pytest.raises(SettingsError) as caught:
        group(url)
    assert "s3cret" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    ("urls", "remedy"),
    [
        ([], "3 or more"),
        (["redis://u:s3cret@a"], "3 or more"),
        (["redis://u:s3cret@a", "redis://b"], "3 or more"),
        (["redis://u:s3cret@a", "redis://b", "redis://A:6379/1"], "named twice"),
        (["unix:///s?db=0", "redis+socket:///s", "redis://u:s3cret@b"], "named twice"),
        (["redis://u:s3cret@a", "sentinel://b", "redis://c"], "stands alone"),
        (["redis://u:s3cret@a", "redis+cluster://b", "redis://c"], "stands alone"),
        (["redis://u:s3cret@a", "redis://b", 5], "a list of them"),
        (["redis://u:s3cret@a", "http://b", "redis://c"], "single one"),
    ],
)
def test_servers_that_cannot_be_used_together(urls, remedy):
    """The error names the setting, the servers without their passwords, and the remedy."""
    with pytest.raises(SettingsError, match="dislock_url") as raised:
        app_settings({"dislock_url": urls})
    assert remedy in str(raised.value)
    assert "s3cret" not in str(raised.value)
    assert "s3cret" not in repr(raised.value.args)


class TestResolvedOptions:
    """Options of ``dislock.lock()`` are resolved once for each set of them."""

    @pytest.fixture
    def app(self):
        return Celery("shop", broker="redis://localhost:1/0", set_as_current=False)

    @pytest.mark.parametrize("way", ["update", "add_defaults"])
    def test_a_setting_that_changes_is_heeded(self, app, way):
        """Whatever was resolved before it; Celery keeps a default in a layer below what was set."""
        dislock = Dislock(app)
        for _ in range(2):
            assert dislock.lock("a")._options.lock_watchdog_timeout == 30
        (app.conf.update if way == "update" else app.add_defaults)({"dislock_watchdog_timeout": 5})
        assert dislock.lock("a")._options.lock_watchdog_timeout == 5

    @pytest.mark.parametrize("limit", [True, 1.0, [1]])
    def test_what_equals_a_good_value_is_refused_all_the_same(self, app, limit):
        """``True == 1``, and a list has no hash: neither is a limit."""
        dislock = Dislock(app)
        dislock.lock("a", limit=1)
        for _ in range(2):
            with pytest.raises(SettingsError, match="limit"):
                dislock.lock("a", limit=limit)

"""Every option and setting, each declared once.

An option belongs to a task: ``@app.task(lock_watchdog_timeout=60)``.  Its default for a whole app
is the setting of the same name under ``dislock_``: ``app.conf.dislock_watchdog_timeout = 60``.
Name, type, default, unit, check and description stand in one field of :class:`TaskOptions` or
:class:`AppSettings`; the error messages, the near misses and the reference page come from there.

A check takes what the user gave and returns what the code uses, or raises ``ValueError`` with the
remedy.  All of them run when a task is bound or a worker starts, never later.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from celery_dislock.checks import (
    NEAR_MISS,
    did_you_mean,
    mapping,
    natural_number,
    one_of,
    one_or_several_urls,
    optional,
    text,
    yes_or_no,
)
from celery_dislock.exceptions import SettingsError
from celery_dislock.options import ALONE, BELONG_TO, TaskOptions, declare
from celery_dislock.urls import NO_REPLICAS, ONLY_EXCLUSIVE, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class AppSettings:
    """What all locks of one app share."""

    dislock_enabled: bool | None = declare(
        default=None,
        check=optional(yes_or_no),
        unit="",
        description=(
            "True: every task with a `lock_key` locks, whatever its base class, and a worker "
            "checks the lock server at start-up (`--dislock`). False: no task takes a lock "
            "(`--no-dislock`). None: tasks with the base class SingletonTask lock."
        ),
    )
    dislock_url: str | tuple[str, ...] | None = declare(
        default=None,
        check=optional(one_or_several_urls),
        unit="",
        description=(
            "URL of the lock server: redis://, rediss://, unix://, sentinel://, redis+cluster:// "
            "or rediss+cluster://; or a list of the URLs of three or more independent servers, of "
            "which a majority decides. None: the broker, then the result backend, whichever is a "
            "Redis."
        ),
    )
    dislock_on_unavailable: str = declare(
        default="retry",
        check=one_of("retry", "raise", "run"),
        unit="",
        description=(
            "What a task does whose lock server does not answer: `retry` comes again later, under "
            "its own id and with its own retries unspent, `raise` fails with StoreError, `run` "
            "runs without its lock."
        ),
    )
    dislock_prefix: str = declare(
        default="dislock",
        check=text,
        unit="",
        description="First part of every name in Redis: `<prefix>:{<key>}`.",
    )
    dislock_transport_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "check": mapping,
            "unit": "",
            "description": "Options of the connections to the lock server, as redis-py's "
            "Connection takes them, e.g. `socket_timeout`; for sentinel:// also `master_name` and "
            "`sentinel_kwargs`.",
        },
    )
    dislock_min_replicas: int = declare(
        default=0,
        check=natural_number,
        unit="",
        description=(
            "An acquisition counts only when so many replicas have it, within a second; else it "
            "is given back, and the lock server counts as away."
        ),
    )


def setting_name(option: str) -> str | None:
    """Name of the setting that gives an option its default; None where there is none."""
    if option == "lock_key":
        return None
    return "dislock_" + option.removeprefix("lock_")


_SETTINGS = {f.name for f in fields(AppSettings)} | {
    name for f in fields(TaskOptions) if (name := setting_name(f.name))
}


def task_options(owner: str, declared: Mapping[str, Any], conf: Mapping[str, Any]) -> TaskOptions:
    """Resolve a task's options: its own, else the app's settings, else the defaults.

    Args:
        owner: The task's name, for messages.
        declared: The task's attributes that may be options, by name.
        conf: The app's configuration.

    Raises:
        SettingsError: An option cannot be used, or looks like one that is misspelt.
    """
    known = [f.name for f in fields(TaskOptions)]
    suspicious = {
        name: value
        for name, value in declared.items()
        if name.startswith("lock_") or get_close_matches(name, known, 1, NEAR_MISS)
    }
    refuse_unknown(owner, suspicious, known)
    check_settings(conf)

    values: dict[str, Any] = {}
    for option in fields(TaskOptions):
        setting = setting_name(option.name)
        if option.name in declared:
            values[option.name] = _checked(owner, option.name, option, declared[option.name])
        elif setting and setting in conf:
            values[option.name] = _checked("app.conf", setting, option, conf[setting])
    options = TaskOptions(**values)
    check_servers(owner, options, conf)
    keys = options.lock_key
    if options.lock_on_conflict == "queue" and isinstance(keys, tuple) and len(keys) > 1:
        remedy = "a task waits in one line: give one key, or use 'wait' or 'retry'"
        raise SettingsError(owner, "lock_on_conflict", "queue", remedy)
    for name, (other, value) in BELONG_TO.items():
        actual = getattr(options, other)
        if name in declared and actual != value and not callable(actual):
            remedy = f"it belongs to {other}={value!r}: give that too, or leave it out"
            raise SettingsError(owner, name, declared[name], remedy)
    return options


def refuse_unknown(owner: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """
    Refuse an option that does not exist.

    Raises:
        SettingsError: Names the option, and the one that was probably meant.
    """
    for name, value in given.items():
        if name not in known:
            near = did_you_mean(name.removeprefix("lock_"), known) or did_you_mean(name, known)
            raise SettingsError(owner, name, value, f"no such option{near}")


def app_settings(conf: Mapping[str, Any]) -> AppSettings:
    """Read an app's settings.

    Raises:
        SettingsError: A setting cannot be used, or looks like one that is misspelt.
    """
    check_settings(conf)
    settings = AppSettings(
        **{
            f.name: _checked("app.conf", f.name, f, conf[f.name])
            for f in fields(AppSettings)
            if f.name in conf
        }
    )
    if isinstance(settings.dislock_url, tuple) and settings.dislock_min_replicas:
        replicas = settings.dislock_min_replicas
        raise SettingsError("app.conf", "dislock_min_replicas", replicas, NO_REPLICAS)
    return settings


def check_servers(owner: str, options: TaskOptions, conf: Mapping[str, Any]) -> None:
    """Refuse what several lock servers cannot do.

    Raises:
        SettingsError: Names the option.
    """
    if not isinstance(conf.get("dislock_url"), (list, tuple)):
        return
    for name, value in ALONE.items():
        if (given := getattr(options, name)) != value:
            raise SettingsError(owner, name, given, ONLY_EXCLUSIVE)
    if options.lock_on_conflict == "queue":
        remedy = "several lock servers (dislock_url is a list) keep no line; use 'wait' or 'retry'"
        raise SettingsError(owner, "lock_on_conflict", "queue", remedy)


def check_settings(conf: Mapping[str, Any]) -> None:
    """Refuse a ``dislock_`` setting that does not exist.

    Raises:
        SettingsError: Names the setting, and the one that was probably meant.
    """
    for given in conf:
        # Celery may keep a namespace in front, in capitals: CELERY_DISLOCK_URL.
        _, found, rest = given.lower().rpartition("dislock_")
        name = found + rest
        if found and name not in _SETTINGS:
            near = did_you_mean(name, _SETTINGS)
            raise SettingsError("app.conf", given, conf[given], f"no such setting{near}")


def reference(kind: type[TaskOptions | AppSettings]) -> str:
    """Write the table of options or settings for the documentation, in Markdown."""
    rows = ["| name | default | unit | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{f.name}` | `{_default(f)!r}` | {f.metadata['unit']} "
        f"| {f.metadata['description'].replace('|', '&#124;')} |"
        for f in fields(kind)
    ]
    return "\n".join(rows)


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return option.default


def _checked(owner: str, name: str, option: Field[Any], value: Any) -> Any:
    try:
        return option.metadata["check"](value)
    except ValueError as exc:
        told = shown(value) if name == "dislock_url" else value
        raise SettingsError(owner, name, told, str(exc)) from exc

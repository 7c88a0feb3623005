"""Every option and setting, each declared once.

An option belongs to a task: ``@app.task(lock_watchdog_timeout=60)``.  Its default for a whole app
is the setting of the same name under ``dislock_``: ``app.conf.dislock_watchdog_timeout = 60``.
Name, type, default, unit, check and description are declared in one field of :class:`TaskOptions`
or :class:`AppSettings`; the description is the comment above it.  The error messages, the
suggestions for misspelt names and the reference page are made from these fields.

A check takes the user's value and returns the value that the code uses, or raises ``ValueError``
with the remedy.  All checks run when a task is bound, a lock is made or a worker starts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from celery_dislock.config.censoring import alone, censored, checked, refused
from celery_dislock.config.options import (
    BELONG_TO,
    IN_LINE,
    MEANT,
    MIGRATING,
    NEED,
    NOT_CANCELLED,
    OF_OTHERS,
    QUORUM_VALUES,
    TaskOptions,
    declare,
)
from celery_dislock.config.terms import LIMIT_MOST
from celery_dislock.config.urls import (
    CLUSTER,
    NO_REPLICAS,
    ONLY_EXCLUSIVE,
    harmless,
    keyprefix,
)
from celery_dislock.config.values import (
    NEAR_MISS,
    did_you_mean,
    mapping,
    number_from,
    one_of,
    one_or_several_urls,
    optional,
    seconds,
    start_of_names,
    text,
    yes_or_no,
)
from celery_dislock.exceptions import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger("celery_dislock")

NEAR_SETTING = 0.91  # minimum difflib ratio of two settings, which share most of their letters
# A lock server under a misspelt name must not be replaced by the broker without a word.
URL_WORDS = {"url", "urls", "uri"}

ONE_BY_ONE = "nodes of a cluster count for themselves: give one key, or no rate"
APART = "a cluster keeps no line for them: give one key, or use 'wait' or 'retry'"
CANCELS_ONE = "a task of several keys cancels nobody: give one key, or use 'queue'"


@dataclass(frozen=True)
class AppSettings:
    """Settings that all locks of one app share."""

    #: True (`--dislock`): every task with a `lock_key` locks, and workers check the lock server at
    #: start-up. False (`--no-dislock`): no task locks. None: only tasks of the class SingletonTask
    #: lock.
    dislock_enabled: bool | None = declare(None, optional(yes_or_no))
    #: URL of the lock server; three or more URLs: independent servers, of which a majority decides.
    #: None: the broker if it is a Redis, else the result backend if that is one.
    dislock_url: str | tuple[str, ...] | None = declare(
        None, optional(one_or_several_urls), secret=True
    )
    #: What a task does when the lock server does not answer: `retry` puts it off and spends none of
    #: its retries, `raise` fails it with StoreError, `run` runs it without its lock.
    dislock_on_unavailable: str = declare("retry", one_of("retry", "raise", "run"))
    #: First part of every name in Redis: `<prefix>:{<key>}`. On a Redis of Celery's own, the
    #: `global_keyprefix` that Celery has there stands before it.
    dislock_prefix: str = declare("dislock", start_of_names)
    #: Options of the connections to the lock server, as redis-py's Connection takes them, such as
    #: `socket_timeout`. For sentinel:// also `master_name` and `sentinel_kwargs`.
    dislock_transport_options: dict[str, Any] = declare({}, mapping, secret=True)  # noqa: RUF009
    #: Number of replicas that must confirm an acquisition within one second. If fewer confirm, the
    #: lock is given back, and the lock server counts as away.
    dislock_min_replicas: int = declare(0, number_from(0))
    #: Whether a prefork worker's main process renews the lock of a task whose process was stopped,
    #: or whose body holds the GIL. False: such a task loses its lock.
    dislock_renew_for_stalled: bool = declare(True, yes_or_no)
    #: Whether processes count what they do with locks, for metrics, and add their counts up on the
    #: lock server every few seconds.
    dislock_metrics: bool = declare(False, yes_or_no)
    #: Key of the lock that `celery beat --dislock` leads by: of all beats with one key, one sends.
    dislock_beat_key: str = declare("beat", text)
    #: Expiry of that lock: the longest silence after the leading beat was killed. A beat whose
    #: clock differs by more from the lock server's does not send.
    dislock_beat_timeout: float = declare(30.0, seconds(above=0), unit="s")
    #: Whether a beat that takes over sends, once for each entry, what became due while none sent.
    #: False: such an entry waits for its next time.
    dislock_beat_catch_up: bool = declare(True, yes_or_no)


def setting_name(option: str) -> str | None:
    """Return the name of the setting that is an option's default; None if there is no setting."""
    if option == "lock_key":
        return None
    return "dislock_" + option.removeprefix("lock_")


OPTIONS = tuple(f.name for f in fields(TaskOptions))  # names of all options of a task
_SETTINGS = {f.name for f in fields(AppSettings)} | set(filter(None, map(setting_name, OPTIONS)))


@alone
def task_options(owner: str, declared: Mapping[str, Any], conf: Mapping[str, Any]) -> TaskOptions:
    """Resolve a task's options from its own, the app's settings and the defaults, in this order.

    Args:
        owner: The task's name, for messages.
        declared: Attributes of the task that may be options, by name.
        conf: The app's configuration.

    Raises:
        SettingsError: An option cannot be used, or looks misspelt.
    """
    _check_names(owner, declared)
    check_settings(conf)

    values: dict[str, Any] = {}
    for option in fields(TaskOptions):
        setting, check = setting_name(option.name), option.metadata["check"]
        if option.name in declared:
            values[option.name] = checked(owner, option.name, check, declared[option.name])
        elif setting and setting in conf:
            default = checked("app.conf", setting, check, conf[setting])
            if not _overruled(option.name, default, declared):
                values[option.name] = default
    if values.get("lock_rate") and "lock_limit" not in values:
        values["lock_limit"] = LIMIT_MOST
    options = TaskOptions(**values)
    if "lock_on_conflict" not in values and options.newest_counts:
        apart = len(options.keys) > 1 and is_cluster(conf)  # these have no line
        options = replace(options, lock_on_conflict="retry" if apart else "queue")
    if options.cancels:  # the newest waits alone, and runs when the lock is free
        options = replace(options, lock_queue_limit=1, lock_queue_overflow="replace")
    check_servers(owner, options, conf)
    _check_together(owner, declared, options)
    return options


def _check_names(owner: str, declared: Mapping[str, Any]) -> None:
    for name, value in declared.items():
        if name in OF_OTHERS:
            library, ours = OF_OTHERS[name]
            remedy = f"an option of {library}, without effect here: {ours}; see {MIGRATING}"
            raise refused(owner, name, value, remedy)
        if name.startswith("lock_") or name in MEANT or did_you_mean(name, OPTIONS):
            refuse_unknown(owner, {name: value}, OPTIONS, MEANT)


def _check_together(owner: str, declared: Mapping[str, Any], options: TaskOptions) -> None:
    keys = options.lock_key
    for name, (other, value) in BELONG_TO.items():
        actual = getattr(options, other)
        if name in declared and actual != value and not callable(actual):
            remedy = (
                f"it has no effect with {other}={actual!r}: leave one of the two out"
                if other in declared
                else f"it belongs to {other}={value!r}: give that too, or leave it out"
            )
            raise refused(owner, name, declared[name], remedy)
    if options.limits_keys and (options.lock_limit is None or options.lock_mode == "shared"):
        other = "lock_limit=None" if options.lock_limit is None else "lock_mode='shared'"
        remedy = f"the limit of a key has no effect with {other}: leave one of the two out"
        raise refused(owner, "lock_key", keys, remedy)
    if options.lock_limit is None and options.lock_unique_until is None:
        remedy = "give a number; None is for tasks with lock_unique_until, which then take no lock"
        raise refused(owner, "lock_limit", None, remedy)
    if options.has_rate:
        _check_rate(owner, options)
    _check_costs(owner, options)
    _check_cancelling(owner, declared, options)
    for name, other in NEED.items():
        if name in declared and getattr(options, other) is None:
            raise refused(owner, name, declared[name], f"it has no effect without {other}")


def _check_cancelling(owner: str, declared: Mapping[str, Any], options: TaskOptions) -> None:
    for name in () if options.on_cancel else ("lock_cancel_after", "lock_cancel_not_before"):
        if name in declared:
            remedy = "it has no effect without lock_on_conflict='cancel' or lock_on_cancel"
            raise refused(owner, name, declared[name], remedy)
    if not options.cancels:
        return
    for name, (value, remedy) in NOT_CANCELLED.items():
        if getattr(options, name) != value:
            raise refused(owner, name, getattr(options, name), remedy)
    if options.lock_unique_until is not None and options.lock_on_duplicate in {"replace", "sooner"}:
        remedy = "each says in its own way which one counts: leave one of the two out"
        raise refused(owner, "lock_on_duplicate", options.lock_on_duplicate, remedy)


def _check_rate(owner: str, options: TaskOptions) -> None:
    rate = options.lock_rate or options.lock_key
    name = "lock_rate" if options.lock_rate else "lock_key"
    if options.lock_limit is None:
        remedy = "a rate has no effect with lock_limit=None: leave one of the two out"
        raise refused(owner, name, rate, remedy)
    if options.lock_hold_on_retry:
        remedy = "a retry that keeps its lease is not counted: leave it out, or the rate"
        raise refused(owner, "lock_hold_on_retry", options.lock_hold_on_retry, remedy)


def _check_costs(owner: str, options: TaskOptions) -> None:
    name = "lock_key" if options.lock_cost is None else "lock_cost"
    given = options.lock_cost or options.lock_key
    for key, terms in zip(options.declared, options.terms, strict=True):
        if key.cost is None:
            continue
        if options.cancels:
            remedy = "with lock_on_conflict='cancel' all tasks cost 1: leave the cost out"
        elif options.lock_limit is None:
            remedy = "a cost has no effect with lock_limit=None: leave one of the two out"
        elif options.lock_mode == "shared" and not key.rate:
            remedy = "nothing counts the cost: give a rate, or leave it out"
        elif terms.limit == 1 and not key.rate:
            remedy = "a cost needs a limit or a rate: give one, or leave the cost out"
        elif terms.too_much:
            remedy = f"a cost of {key.cost} is more than {terms.too_much}: it could never start"
        else:
            continue
        raise refused(owner, name, given, remedy)


def nearer(inherited: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of a base class and a class; on a conflict, those of the class win."""
    kept = {name: value for name, value in inherited.items() if not _overruled(name, value, own)}
    return {**kept, **own}


def _overruled(name: str, value: object, own: Mapping[str, Any]) -> bool:
    """Return whether an inherited option conflicts with a task's own and is therefore dropped.

    For example, a task with its own `lock_expire` ignores the inherited watchdog options.  A task
    with its own `lock_watchdog_timeout` is renewed, even if it inherits a `lock_expire`.
    """
    for option, (other, needed) in BELONG_TO.items():
        if option == name and other in own:
            if own[other] != needed and not callable(own[other]):
                return True
        elif other == name and option in own and value != needed == getattr(TaskOptions, other):
            return True
    return False


def refuse_unknown(
    owner: str,
    given: Mapping[str, object],
    known: tuple[str, ...],
    meant: Mapping[str, str],
) -> None:
    """
    Refuse options that do not exist.

    Raises:
        SettingsError: Names the option, and says what to give instead, or which option has a
            similar name.
    """
    for name, value in given.items():
        if name not in known:
            bare = name.removeprefix("lock_")
            hint = f": {meant[bare]}" if bare in meant else did_you_mean(bare, known)
            hint = hint or did_you_mean(name, known)
            raise refused(owner, name, value, f"no such option{hint}")


@alone
def app_settings(conf: Mapping[str, Any]) -> AppSettings:
    """Read and check an app's settings; Celery's key prefix is put before ``dislock_prefix``.

    Raises:
        SettingsError: A setting is unknown, or cannot be used.
    """
    check_settings(conf)
    settings = AppSettings(
        **{
            f.name: checked("app.conf", f.name, f.metadata["check"], conf[f.name])
            for f in fields(AppSettings)
            if f.name in conf
        }
    )
    if isinstance(settings.dislock_url, tuple) and settings.dislock_min_replicas:
        replicas = settings.dislock_min_replicas
        raise SettingsError("app.conf", "dislock_min_replicas", replicas, NO_REPLICAS)
    return replace(settings, dislock_prefix=keyprefix(conf) + settings.dislock_prefix)


def apply_options(
    app: Any, *, dislock: bool | None = None, dislock_url: Sequence[str] = ()
) -> None:
    """Write the options of a command line into an app's configuration; None, (): not given."""
    if dislock is not None:
        set_settings(app, {"dislock_enabled": dislock})
    if dislock_url:
        url = dislock_url[0] if len(dislock_url) == 1 else dislock_url
        set_settings(app, {"dislock_url": url})


def set_settings(app: Any, settings: Mapping[str, Any]) -> None:
    """Change an app's settings, without reading the old ones."""
    app.conf.update(settings)
    if app.namespace:  # Celery 5.5 prefers settings with this prefix, such as Django's
        prefixed = {f"{app.namespace}_{name}".upper(): settings[name] for name in settings}
        app.conf.update(prefixed)


def only_one_key(options: TaskOptions, conf: Mapping[str, Any]) -> tuple[str, str]:
    """Return the option because of which a task may have one key only, and why; empty: none."""
    if options.cancels:
        return "lock_on_conflict", CANCELS_ONE
    if is_cluster(conf) and options.has_rate:
        return "lock_key", ONE_BY_ONE
    if is_cluster(conf) and options.lock_on_conflict in IN_LINE:
        return "lock_on_conflict", APART
    return "", ""


@alone
def check_servers(owner: str, options: TaskOptions, conf: Mapping[str, Any]) -> None:
    """Refuse options that several independent lock servers do not support.

    Raises:
        SettingsError: Names the option.
    """
    url = conf.get("dislock_url")
    option, remedy = only_one_key(options, conf)
    if remedy and len(options.keys) > 1:
        raise SettingsError(owner, option, getattr(options, option), remedy)
    if not isinstance(url, (list, tuple)):
        return
    for name, value in QUORUM_VALUES.items():
        if (given := getattr(options, name)) != value:
            raise SettingsError(owner, name, given, ONLY_EXCLUSIVE)
    if options.admits_several:
        raise SettingsError(owner, "lock_key", options.lock_key, ONLY_EXCLUSIVE)
    if options.lock_on_conflict in IN_LINE:
        remedy = "several lock servers (dislock_url is a list) keep no line; use 'wait' or 'retry'"
        raise SettingsError(owner, "lock_on_conflict", options.lock_on_conflict, remedy)


def is_cluster(conf: Mapping[str, Any]) -> bool:
    """Tell whether the lock server of an app's configuration is a cluster."""
    url = conf.get("dislock_url")
    return isinstance(url, str) and url.startswith(CLUSTER)


@alone
def check_settings(conf: Mapping[str, Any], *, strict: bool = False) -> None:
    """
    Refuse settings that are meant for this package, and that it does not read.

    A setting may also be one of a later version: the package was rolled back, and the configuration
    was not.  A setting that resembles none of ours is therefore logged and ignored.

    Args:
        conf: The app's configuration.
        strict: Refuse also settings that resemble none of ours.

    Raises:
        SettingsError: Names the setting, and the one that was probably meant.
    """
    names = list(conf)  # Celery loads its configuration now, and then knows its namespace
    prefix = getattr(conf, "prefix", None) or ""
    for given in names:
        found = _split(given)
        if found is None:
            continue
        before, name = found
        meant = name if name in _SETTINGS else _near(name)
        read_as = prefix + (meant.upper() if prefix.isupper() else meant)
        if name in (meant, "lock_key"):
            if meant in conf or before not in ("", "celery_", prefix.lower()):
                continue  # it is read, or is not meant for this package
            remedy = f"nobody reads this setting: write it as {read_as}"
            if not meant:
                remedy = "an option of a task, and no setting: give it to each task"
        elif meant:
            remedy = f"no such setting; did you mean {read_as!r}?"
        elif strict:
            remedy = "no such setting"
        else:
            if given not in _ignored:
                _ignored.add(given)
                #: WARNING: The configuration was written for a later version. -> Update the
                #: package, or remove the setting.
                logger.warning(
                    "The setting %s does not exist in this version of celery-dislock, and is "
                    "ignored.",
                    given,
                )
            continue
        value = conf[given]
        shown_value = censored(meant, value) if meant else harmless(value)
        raise SettingsError("app.conf", given, shown_value, remedy)


_ignored: set[str] = set()  # settings that this process has warned of


@lru_cache(maxsize=4096)  # a task that is bound looks at all settings of its app
def _split(given: str) -> tuple[str, str] | None:
    """
    Split a setting that may be meant for this package, in lower case.

    Returns:
        The namespace before the name, and the name, which need not be that of a known setting.
        None: the setting is not meant for this package.
    """
    lower = given.lower()
    before, found, rest = lower.rpartition("dislock_")
    if found:
        return before, _of_option(rest) or found + rest
    for before in ("", lower.partition("_")[0] + "_"):
        if before or given.islower():  # others are the project's constants
            name = lower.removeprefix(before)
            near = _of_option(name) or _near(name)
            if near:
                return before, near
    return None


def _of_option(given: str) -> str:
    """Return the setting that has the name of an option; empty if it is the name of none."""
    return setting_name(given) or given if given in OPTIONS else ""


def _near(given: str) -> str:
    """Return the setting of which a name is a misspelling; empty if there is none."""
    first, *rest = given.split("_")
    if SequenceMatcher(None, first[: len("dislock")], "dislock").ratio() < NEAR_MISS:
        return ""
    if URL_WORDS.intersection(rest):
        return "dislock_url"
    return next(iter(get_close_matches(given, _SETTINGS, 1, NEAR_SETTING)), "")

"""Tell OpenTelemetry about locks, in a process that uses it.

This package never imports OpenTelemetry.  It looks whether the application has: then the span that
is current when a task's guard is entered, such as the one of Celery's instrumentor, gets attributes
and events, and what is counted is also recorded by instruments of the metrics API.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from celery_dislock.operating.metrics import COUNTED

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "celery_dislock."
UNSET = ("Proxy", "NoOp")  # of the names of meter providers: the application has set none


class Span:
    """
    The span of one execution.

    Args:
        span: OpenTelemetry's span, which records.
    """

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        self._span = span

    def note(self, **attributes: str | float) -> None:
        """Set attributes ``celery_dislock.<name>``."""
        self._span.set_attributes({PREFIX + name: value for name, value in attributes.items()})

    def event(self, name: str, **attributes: str | float) -> None:
        """Add an event ``celery_dislock.<name>`` with attributes of that prefix."""
        told = {PREFIX + attribute: value for attribute, value in attributes.items()}
        self._span.add_event(PREFIX + name, told)


def current_span() -> Span | None:
    """Return the current span; None if there is none that records."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    get = getattr(trace, "get_current_span", None)  # missing during an import
    span = get() if get is not None else None
    return Span(span) if span is not None and span.is_recording() else None


class Instruments:
    """
    The instruments of OpenTelemetry's metrics API.

    Args:
        meter: OpenTelemetry's meter.
    """

    def __init__(self, meter: Any) -> None:
        self._record: dict[str, Callable[..., None]] = {}
        for word, metric in COUNTED.items():
            about = {"name": PREFIX + word, "description": metric.meaning}
            if metric.kind == "histogram":
                self._record[word] = meter.create_histogram(unit="s", **about).record
            else:
                self._record[word] = meter.create_counter(**about).add
        leases = meter.create_up_down_counter(
            f"{PREFIX}leases", description="Leases that this process holds"
        )
        self._lease = leases.add

    def record(self, what: str, outcome: str, task: str, worker: str, value: float) -> None:
        """Record what was counted."""
        about = {"task": task, "worker": worker}
        if what == "acquisitions":
            self._lease(1, about)
        elif what == "held":
            self._lease(-1, about)
        if outcome:
            about["outcome"] = outcome
        self._record[what](value, about)


_made: list[Instruments] = []


def instruments() -> Instruments | None:
    """Return the instruments; None in a process that does not use OpenTelemetry's metrics."""
    metrics: Any = sys.modules.get("opentelemetry.metrics")
    if metrics is None:
        return None
    if not _made:
        get_provider = getattr(metrics, "get_meter_provider", None)  # missing during an import
        provider = get_provider() if get_provider is not None else None
        # redis-py imports the API wherever it is installed; that alone means nothing.
        if provider is None or type(provider).__name__.lstrip("_").startswith(UNSET):
            return None
        _made.append(Instruments(provider.get_meter("celery_dislock")))
    return _made[0]

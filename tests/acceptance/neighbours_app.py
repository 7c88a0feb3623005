"""The tasks of the delayed app, beside a library that adds headers to each message.

NEIGHBOUR says which.  Each adds a header named "headers", in which Celery would look for all
others, or, as OpenTelemetry does, headers of its own.
"""

import os

NEIGHBOUR = os.environ.get("NEIGHBOUR", "")
NOWHERE = "127.0.0.1:9"  # where nobody listens

if NEIGHBOUR == "sentry":
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration

    def note(event, hint):
        """Note an error that Sentry would be told of, in place of sending it."""
        app.backend.client.rpush("sentry", repr(hint.get("exc_info")))

    integrations = [CeleryIntegration()]
    sentry_sdk.init(f"http://key@{NOWHERE}/1", integrations=integrations, before_send=note)
elif NEIGHBOUR == "opentelemetry":
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    CeleryInstrumentor().instrument(tracer_provider=TracerProvider())
elif NEIGHBOUR == "ddtrace":
    import ddtrace

    ddtrace.patch(celery=True)

from tests.acceptance.delayed_app import app  # noqa: E402 -- they are there before the app is


@app.task(name="send", shared=False)
def send(sent):
    """Send tasks beside the neighbour; return their ids, and whether they are duplicates."""
    foreign = {"headers": {"headers": {"x": "1"}}} if NEIGHBOUR == "headers" else {}
    results = [app.tasks[name].apply_async(args, **about, **foreign) for name, args, about in sent]
    return [(result.id, result.duplicate) for result in results]


@app.task(name="headers", bind=True, shared=False)
def headers(self):
    """Name all that Celery shows of the message's headers."""
    return sorted(self.request.headers or ())

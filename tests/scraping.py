"""The page for Prometheus, asked as Prometheus does."""

from wsgiref.util import setup_testing_defaults

from prometheus_client.parser import text_string_to_metric_families

from tests.leaks import SECRET


def scrape(page):
    """Return the samples, by name and the values of its labels in the labels' order of names."""
    environ = {}
    setup_testing_defaults(environ)
    statuses = []
    body = b"".join(page(environ, lambda status, _headers: statuses.append(status))).decode()
    assert statuses == ["200 OK"]
    assert SECRET not in body
    return {
        (
            sample.name.removeprefix("celery_dislock_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }

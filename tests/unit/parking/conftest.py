"""Fixtures of tests on a store that is not there."""

from tests.unit.fakes import app, broker  # noqa: F401 -- fixtures

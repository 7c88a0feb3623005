"""``celery dislock ...`` as tests run it: in this process, by its command line."""

import json
from types import SimpleNamespace

from click.testing import CliRunner

from celery_dislock.operating.cli import dislock

FOUND, USAGE, AWAY = 1, 2, 3  # exit codes
HELD, LOST, CANNOT_RUN, NOT_FOUND = 75, 76, 126, 127  # of `run`


class Dislock:
    """
    The commands of an app.

    Args:
        app: The app.
        args: Arguments before all others.
    """

    def __init__(self, app, *args):
        self.app = app
        self._args = args

    def __call__(self, *args, charset="utf-8", **how):
        """Run a command; the answer has ``exit_code``, ``stdout``, ``stderr`` and ``output``."""
        runner, obj = CliRunner(charset=charset), SimpleNamespace(app=self.app)
        answer = runner.invoke(dislock, [*self._args, *args], obj=obj, **how)
        if answer.exception is not None and not isinstance(answer.exception, SystemExit):
            raise answer.exception
        return answer

    def json(self, *args, **how):
        """Run a command with ``--json``, and return what it tells; nothing else is in it."""
        answer = self(*args, "--json", **how)
        assert answer.stdout, answer.output
        return json.loads(answer.stdout, parse_constant=_refuse)


def _refuse(constant):
    raise AssertionError(f"{constant} is no JSON")

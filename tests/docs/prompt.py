"""
Run snippets that come as lines of JSON, in one namespace; answer each with what is wrong, or "".

Every page may suppose that there is an ``app`` with a ``dislock``, whose Redis is the page's, and
that ``SingletonTask`` is imported.  The app is final at the end, so each task of the page is bound.

A snippet has the line numbers that it has on its page, so a traceback leads there.  ``pycon`` is
what doctest calls an example; ``...`` in its output is any text.
"""

import doctest
import io
import json
import os
import sys
import traceback
from pathlib import Path

from celery import Celery

from celery_dislock import Dislock, SingletonTask

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run(language, code, line, page):
    """Run one snippet, and return what is wrong with it."""
    if language == "pycon":
        shown = io.StringIO()
        test = doctest.DocTestParser().get_doctest(code, {}, page, page, line)
        test.globs = NAMES
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=shown.write, clear_globs=False)
        return shown.getvalue()
    try:
        exec(compile("\n" * line + code, page, "exec"), NAMES)  # noqa: S102 -- our own pages
    except Exception:  # noqa: BLE001 -- whatever a snippet raises is what is wrong with it
        return traceback.format_exc()
    return ""


def names():
    """Return what is there before the first snippet."""
    url = f"redis://localhost:{os.environ['REDIS_PORT']}/0"
    app = Celery("shop", broker=url, backend=url)
    return {"__name__": "page", "app": app, "dislock": Dislock(app), "SingletonTask": SingletonTask}


if __name__ == "__main__":
    NAMES = names()
    sys.path.insert(0, str(Path.cwd()))
    answers, sys.stdout = sys.stdout, sys.stderr
    for asked in sys.stdin:
        answers.write(json.dumps(run(**json.loads(asked))) + "\n")
        answers.flush()

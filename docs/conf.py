"""
Sphinx's settings for the site; ``make docs`` builds it, and treats warnings as errors.

The build asks no server for anything: the other projects' inventories stand in ``inventories/``.
They are fetched anew with ``curl -Lo docs/inventories/celery.inv <address below>/objects.inv``.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.addnodes import toctree
from sphinx.environment.adapters.toctree import TocTree

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "celery-dislock"
author = "celery-dislock contributors"
project_copyright = author
version = release = version_of(project)

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build"]
suppress_warnings = ["config.cache"]
nitpicky = True

# The Markdown is written for a repository's browser: its fences and anchors are GitHub's.
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

_site = {
    "python": "https://docs.python.org/3",
    "celery": "https://docs.celeryq.dev/en/stable",
    "kombu": "https://docs.celeryq.dev/projects/kombu/en/stable",
    "redis": "https://redis.readthedocs.io/en/stable",
}
intersphinx_mapping = {
    name: (address, str(HERE / "inventories" / f"{name}.inv")) for name, address in _site.items()
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
nitpick_ignore = [
    ("py:class", "click.exceptions.ClickException"),  # a base; click has no inventory
    ("py:class", "timedelta"),  # imported for type checkers only
    *(("py:class", name) for name in ("P", "R", "LockedTask", "DeclaredOptions")),  # as above
    *(("py:class", name) for name in ("PlainOptions", "Reservation", "End")),  # as above
]
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

copybutton_prompt_text = r"^(\$|>>>|\.\.\.) "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "celery-dislock"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/celery-dislock/celery-dislock/",
    "source_branch": "main",
    "source_directory": "docs/",
}

# ``make docs`` brings Mermaid with the site where npm can fetch it; else readers' browsers ask
# the public copy for it.
if mermaid := os.environ.get("DOCS_MERMAID"):
    html_static_path.append(mermaid)
    mermaid_use_local = "mermaid.esm.min.mjs"
mermaid_version = "11.12.1"
mermaid_fullscreen = False  # its button's sign is in few fonts; site.css makes diagrams readable
# Drawn at their own size, and narrow: then the letters of a large one stay large enough.
mermaid_init_config = {
    "startOnLoad": False,
    "flowchart": {"useMaxWidth": False, "wrappingWidth": 120, "nodeSpacing": 15, "padding": 7},
    "sequence": {"useMaxWidth": False},
    "state": {"useMaxWidth": False},
}


def setup(app: Sphinx) -> None:
    """Change what the theme made of each page."""
    app.connect("html-page-context", _navigate_inside, priority=100)  # before the theme
    app.connect("html-page-context", _give_captions_a_level, priority=900)  # after it
    app.connect("source-read", _index)


def _index(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Make an index entry of a comment ``<!-- index: 409 -->``: the search knows no numbers."""
    entry = r"```{index} single: \1\n```"
    source[0] = re.sub(r"^<!-- index: (.+) -->$", entry, source[0], flags=re.MULTILINE)


def _navigate_inside(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _tree: object
) -> None:
    """Give the pages of ``inside/`` a menu of their own: they are in no menu of users."""
    if page.startswith("inside/"):
        tree = TocTree(app.env)
        (menu,) = app.env.get_doctree("inside/index").findall(toctree)
        resolved = tree.resolve(page, app.builder, menu, titles_only=True, includehidden=True)
        context["toctree"] = lambda **_: app.builder.render_partial(resolved)["fragment"]


def _give_captions_a_level(
    _app: Sphinx, _page: str, _template: str, context: dict[str, str], _tree: object
) -> None:
    """The menu's captions are headings of no level, which screen readers cannot place."""
    context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )

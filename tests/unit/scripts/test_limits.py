"""The limits of Lua that the scripts stay below."""

import re

import pytest

from celery_dislock import scripts

ALL = {name: one for name, one in vars(scripts).items() if isinstance(one, scripts.Script)}
LOCALS_MOST = 190  # Lua has 200 in a function; a test or a release may add some
LOCAL = re.compile(r"^local (?:function (\w+)|([\w, \n]+?)(?: = |$))", re.MULTILINE)

INNER = re.compile(
    r"^local function \w+\(\)\n(-- .*?)^end\n\nlocal answer", re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_script_has_room_for_more_local_variables(name):
    """A function with more of them than Lua allows is an error on the lock server."""
    inner = "".join(INNER.findall(ALL[name].text))
    for text in (INNER.sub("", ALL[name].text), inner):
        found = [function or names for function, names in LOCAL.findall(text)]
        assert len(re.findall(r"\w+", " ".join(found))) <= LOCALS_MOST

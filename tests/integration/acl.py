"""The rules of the documentation for the lock server's user."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "set-up-the-lock-server.md"
(RULES,) = re.findall(r"^user dislock (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)

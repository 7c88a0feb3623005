"""The scenarios, with a folder for a broker from which no message is read that is half written.

kombu's own transport opens a file under its final name and writes it after that: a worker that
looks just then ends with an error.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kombu.transport import filesystem
from kombu.utils.json import dumps

from tests.acceptance.scenarios import app

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["URL", "app", "folders"]

URL = "filesystem://"


def put(channel: filesystem.Channel, queue: str, payload: Mapping[str, Any], **_: Any) -> None:
    """Write a message to a file that gets its name when it is complete."""
    name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
    part = Path(channel.data_folder_out, f".{name}")
    part.write_text(dumps(payload), "utf-8")
    part.rename(part.with_name(name))


filesystem.Channel._put = put


def folders(folder: Path) -> dict[str, Any]:
    """Make the folders of a broker; return its transport options."""
    messages, control = folder / "messages", folder / "control"
    for one in (messages, control):
        one.mkdir()
    options = {"data_folder_in": messages, "data_folder_out": messages, "control_folder": control}
    return {**{name: str(path) for name, path in options.items()}, "polling_interval": 0.05}

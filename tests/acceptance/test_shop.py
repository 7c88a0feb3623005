"""The shop of the example project, in a worker; ``make demo`` plays all of its tasks."""

from __future__ import annotations

import csv

import pytest
from celery.exceptions import TaskRevokedError

from example_project import shop
from tests.acceptance.fleet import LIMIT, wait_for

pytestmark = pytest.mark.acceptance

EDITS = 6  # of one shelf, sent at once


@pytest.fixture
def send(server, start_fleet, tmp_path, monkeypatch):
    """Send tasks of the shop to a worker that has a folder of its own."""
    settings = {
        "SHOP_BROKER_URL": server.url,
        "SHOP_FOLDER": str(tmp_path / "shop"),
        "SHOP_REINDEX_PAUSE": "0.5",
        "SHOP_ROW_PAUSE": "0.02",
    }
    for name, value in shop.settings(settings).items():
        monkeypatch.setitem(shop.app.conf, name, value)
    fleet = start_fleet("prefork", "--dislock", app="example_project.shop", env=settings)
    yield lambda task, *args: task.apply_async(args, queue=fleet.queue)
    shop.app.close()


def test_the_shop_works(send, redis_client):
    """Of two exports one runs, edits that meet share one run, and nobody met in the shop."""
    first = send(shop.export, 3)
    wait_for("it has its lock", lambda: redis_client.exists("dislock:{export:3}"))
    with pytest.raises(TaskRevokedError, match=r"'export:3' is held by example_project\.shop\."):
        send(shop.export, 3).get(timeout=LIMIT)
    rows = first.get(timeout=LIMIT)
    with (shop.shop_folder() / "corp-3.csv").open(encoding="utf-8") as written:
        assert len(list(csv.reader(written))) == rows + 1

    edits = [send(shop.reindex, "lamps", edition) for edition in range(1, EDITS + 1)]
    wait_for("all edits have ended", lambda: all(edit.ready() for edit in edits))
    ran = [edit for edit in edits if edit.state == "SUCCESS"]
    assert 2 <= len(ran) < EDITS
    assert {edit.state for edit in edits} == {"SUCCESS", "REVOKED"}
    assert shop.overlaps() == []

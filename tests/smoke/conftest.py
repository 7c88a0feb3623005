"""The stock Redis and worker containers of pytest-celery, with locks on.

Without more they run as local processes.  ``CELERY_TEST_ENGINE=docker`` takes the real engine, and
the images that pytest-celery builds or pulls.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pytest_celery import CeleryBackendCluster, CeleryBrokerCluster, CeleryWorkerContainer

import celery_dislock
from tests.smoke.local_docker import LocalDocker

if TYPE_CHECKING:
    from types import ModuleType

PACKAGE = Path(celery_dislock.__file__).parent


@pytest.fixture(scope="session")
def docker_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The one place where pytest-celery touches Docker."""
    if os.environ.get("CELERY_TEST_ENGINE") == "docker":
        import docker

        with docker.from_env() as client:
            yield client
        return
    request.getfixturevalue("redis_program")  # else skip
    with pytest.MonkeyPatch.context() as patch:
        # Where the tests themselves run in a container, addresses would be looked up in there.
        patch.setattr(
            "pytest_docker_tools.wrappers.container.tests_inside_container", lambda: False
        )
        yield LocalDocker(tmp_path_factory.mktemp("docker"))


class LockingWorker(CeleryWorkerContainer):
    """The stock worker, with ``--dislock`` and our tasks."""

    @classmethod
    def command(cls, *args: str, **kwargs) -> list[str]:
        """Two pool processes, so that only a lock can keep two tasks apart."""
        return super().command("--dislock", "--concurrency=2", *args, **kwargs)

    @classmethod
    def app_module(cls) -> ModuleType:
        """The app with ``Dislock(app)``."""
        from tests.smoke import app

        return app

    @classmethod
    def tasks_modules(cls) -> set[ModuleType]:
        """Our tasks beside the stock ones, of which ``celery_setup.ready(ping=True)`` needs one."""
        from tests.smoke import tasks

        return super().tasks_modules() | {tasks}

    @classmethod
    def initial_content(cls, **modules) -> dict[str, bytes]:
        """The stock content, and this package: it is in no image."""
        content = super().initial_content(**modules)
        for file in PACKAGE.rglob("*"):
            if file.suffix in {".py", ".lua"}:
                content[str(file.relative_to(PACKAGE.parent))] = file.read_bytes()
        return content


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    """Command, app and tasks of the stock worker container come from ours."""
    return LockingWorker


@pytest.fixture
def celery_broker_cluster(celery_redis_broker):
    """Redis alone; the stock fixture adds RabbitMQ."""
    return CeleryBrokerCluster(celery_redis_broker)


@pytest.fixture
def celery_backend_cluster(celery_redis_backend):
    """Redis alone."""
    return CeleryBackendCluster(celery_redis_backend)


@pytest.fixture
def celery_setup_app(celery_setup_app):
    """The app through which the tests send, with its connections closed in the end."""
    yield celery_setup_app
    celery_setup_app.close()

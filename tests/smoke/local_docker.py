"""What pytest-celery asks of a Docker engine, done with processes of this machine.

Its containers are started, looked at and ended through one object, the ``docker_client`` fixture.
This one runs a ``redis-server`` container as a server of :mod:`tests.redis_server`, and
a ``celery`` container as ``python -m celery`` in the folder that stands for its volume.  Networks
and images are only names here.  A container is ended by the ids of the processes that it started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from pathlib import Path

BOOT_TIMEOUT = 30  # seconds for which the start of a container waits for its worker
STOP_TIMEOUT = 10  # seconds for a warm shutdown, as Docker's
POLL_INTERVAL = 0.05  # seconds
REDIS_PORT = "6379/tcp"
# /proc/net/tcp inside a container whose server listens on that port.
LISTENING = b"0: 00000000:18EB 00000000:0000 0A"


class Named:
    """A network, an image, or a volume, which has a folder."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name = self.id = name
        self.folder = folder

    def remove(self, force: bool = False) -> None:
        """Remove it, and a volume's files with it."""
        if self.folder is not None:
            shutil.rmtree(self.folder)


class Container:
    """What all containers have in common; this kind runs nothing, and fills a volume."""

    hostname = "localhost"
    ports = ()

    def __init__(self, command, folder, volume, environment, labels) -> None:
        self.id = uuid.uuid4().hex
        self.name = self.id[:12]
        self.command = command
        self.folder = folder / self.name
        self.volume = volume
        self.environment = environment
        self.labels = labels

    @property
    def attrs(self):
        """The part of ``docker inspect`` that is read."""
        env = [f"{name}={value}" for name, value in self.environment.items()]
        return {
            "Config": {"Hostname": self.hostname, "Env": env, "Labels": self.labels},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": dict(self.ports)},
        }

    def reload(self) -> None:
        """Do nothing: all state is read when asked for."""

    def put_archive(self, path: str, archive) -> None:
        """Unpack into the volume, wherever the container has it."""
        with tarfile.open(fileobj=archive) as tar:
            for member in tar.getmembers():
                file = self.volume.folder / member.name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(tar.extractfile(member).read())

    def remove(self, force: bool = False) -> None:
        """Do nothing: there is no process."""


class RedisContainer(Container):
    def start(self) -> None:
        """Start the server on a free port, and wait until it answers."""
        self.server = RedisServer(self.folder, args=self.command[1:])
        self.server.start()

    @property
    def status(self) -> str:
        """In Docker's words."""
        return "running" if self.server.running else "exited"

    @property
    def hostname(self) -> str:
        """Where workers find it: here all share one network, so the port belongs to it."""
        return f"127.0.0.1:{self.server.port}"

    @property
    def ports(self):
        """Where the tests find it."""
        return {REDIS_PORT: [{"HostPort": str(self.server.port)}]}

    def exec_run(self, command: str) -> tuple[int, bytes]:
        """Answer the one question that is put to this container: does the server listen yet?"""
        assert "/proc/net/tcp" in command
        return 0, LISTENING

    def logs(self) -> bytes:
        """What the server has written."""
        return (self.folder / "redis-server.log").read_bytes()

    def remove(self, force: bool = False) -> None:
        """End the server."""
        self.server.stop()


class WorkerContainer(Container):
    def start(self) -> None:
        """Start the worker, and wait until it is ready or has ended."""
        # Else the caller looks once a second, and for minutes at a worker that refused to start.
        self._launch()
        give_up = time.monotonic() + BOOT_TIMEOUT
        while self.status == "running" and b" ready." not in self.logs():
            if time.monotonic() > give_up:
                break
            time.sleep(POLL_INTERVAL)

    @property
    def status(self) -> str:
        """In Docker's words."""
        return "running" if self.process.poll() is None else "exited"

    def logs(self) -> bytes:
        """What the worker has written, over all restarts."""
        return (self.folder / "worker.log").read_bytes()

    def kill(self, number: str | int | None = None) -> None:
        """Send a signal to the main process; SIGKILL ends all processes, as in a container."""
        number = signal.Signals[number] if isinstance(number, str) else number
        if number in (None, signal.SIGKILL):
            self._kill_all()
        else:
            self.process.send_signal(number)

    def restart(self, timeout: float = STOP_TIMEOUT) -> None:
        """Warm shutdown if it runs, then start a new one, and return before it is ready."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        self._kill_all()
        self._launch()

    def remove(self, force: bool = False) -> None:
        """End the worker."""
        self._kill_all()

    def _launch(self) -> None:
        # As in Docker, each container has a host name of its own, and its volume on the path.
        command = [part.replace("%h", self.name) for part in self.command]
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(self.volume.folder)}
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.volume.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, to be killed as a whole
            )
        atexit.register(self._kill_all)

    def _kill_all(self) -> None:
        atexit.unregister(self._kill_all)
        # Once the main process has been waited for, the group's id may be another's.  Its children
        # do not outlive it: Celery has the kernel see to that.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


PROGRAMS = {"redis-server": RedisContainer, "celery": WorkerContainer}


class LocalDocker:
    """
    Stands for ``docker.DockerClient``.

    Args:
        folder: Where containers and volumes keep their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._volumes: dict[str, Named] = {}
        self.networks = SimpleNamespace(create=lambda name, **_: Named(name))
        self.images = SimpleNamespace(build=lambda **options: (Named(options.get("tag", "")), []))
        self.volumes = SimpleNamespace(create=self._create_volume)
        self.containers = SimpleNamespace(create=self._create, run=self._run)

    def _create_volume(self, name: str, **_) -> Named:
        folder = self._folder / name
        folder.mkdir()
        volume = self._volumes[name] = Named(name, folder)
        return volume

    def _create(self, image, command=(), environment=None, volumes=None, labels=None, **_):
        kind = PROGRAMS[command[0]] if command else Container
        volume = next((self._volumes[name] for name in volumes or ()), None)
        return kind(command, self._folder, volume, environment or {}, labels or {})

    def _run(self, **options) -> Container:
        container = self._create(**options)
        container.start()
        return container

"""
End a process group as a power cut does, and wait until its servers have noticed.

A signal is only sent when ``killpg`` returns, and a broker serves a connection until it reads that
this has ended: meanwhile it gives a message to a worker that is dead.  On a busy machine that
lasts.  Processes and connections are those of ``/proc``; on a system without that, the wait is for
the processes alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

from tests.holding import wait_for

PROC = Path("/proc")
ESTABLISHED, CLOSE_WAIT, LISTEN = "01", "08", "0A"  # states in /proc/net/tcp


class Socket(NamedTuple):
    """A TCP socket of this machine."""

    port: int
    peer: int
    state: str
    inode: str


def kill_group(leader):
    """Kill a process and its group; return when nobody serves them any more."""
    group = leader.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)  # none of them connects while we look
    links = _links({pid for pid in _running() if _group_of(pid) == group})
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    leader.wait()
    wait_for(lambda: not _is_left(group), f"the end of group {group}")
    wait_for(lambda: not _served(links), f"the end of the connections of group {group}")


def _is_left(group):
    """Tell whether a process of the group runs; it outlives its leader."""
    if PROC.is_dir():
        return any(_group_of(pid) == group for pid in _running())
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _links(pids):
    """Return both ports of each connection that these processes have opened."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    mine = [one for one in _sockets() if one.inode in inodes]
    served = {one.port for one in mine if one.state == LISTEN}
    return {(one.port, one.peer) for one in mine if one.peer and one.port not in served}


def _served(links):
    """Return the ports of servers that still have one of these, but for servers that are halted."""
    if not links:
        return set()
    sockets = list(_sockets())
    busy = {
        one.port
        for one in sockets
        if one.state in {ESTABLISHED, CLOSE_WAIT} and (one.peer, one.port) in links
    }
    if not busy:
        return busy
    listeners = {one.inode: one.port for one in sockets if one.state == LISTEN and one.port in busy}
    halted = [pid for pid in _running() if _stat(pid)[:1] == ["T"]]
    return busy - {listeners[inode] for pid in halted for inode in _inodes(pid) & {*listeners}}


def _running():
    """Return the processes that have not ended, zombies left out."""
    pids = [int(path.name) for path in PROC.glob("[0-9]*")]
    return [pid for pid in pids if _stat(pid)[:1] not in ([], ["Z"], ["X"])]


def _group_of(pid):
    stat = _stat(pid)
    return int(stat[2]) if stat else None


def _stat(pid):
    """Return the state, the parent, the group and more; nothing of a process that is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _inodes(pid):
    """Return the sockets that a process has open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for path in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


def _sockets():
    for table in (PROC / "net/tcp", PROC / "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                (_, here, there, state, *_) = fields = line.split()
                port, peer = (int(one.rpartition(":")[2], 16) for one in (here, there))
                yield Socket(port, peer, state, fields[9])

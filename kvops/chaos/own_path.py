"""Whether a fault would cut the way by which its injector is reached: then nobody could take it back in time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvops.chaos import netns, nft

if TYPE_CHECKING:
    from kvops.chaos.model import Fault

ANCESTORS_MAX: Final = 64
CONNECTION: Final = "SSH_CONNECTION"  # client address and port, server address and port: sshd(8)


def cut_by(fault: Fault) -> str | None:
    """
    Why a fault would cut our own path; None when it would not.

    Our path is whoever started us (a shell, sshd), and the connection by which we are spoken to.
    """
    target, ancestors = fault.target, list(_ancestors())
    for one in target.processes:
        if one.pid in ancestors:
            return f"{target.name} (pid {one.pid}) has started us: it would take our own path with it"
    if not fault.name.startswith("net."):
        return None
    if not nft.shares_namespace(target):
        inside = [pid for pid in ancestors if _netns(pid) == target.netns]
        if inside:
            return f"{target.name} is on the node of pid {inside[0]}, which has started us"
        return None
    words = os.environ.get(CONNECTION, "").split()
    served, own = nft.ports_of(target.processes)
    if len(words) == 4 and int(words[3]) in served | own:
        return f"port {words[3]} of {target.name} carries the SSH connection that we are spoken to by"
    return None


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    for _ in range(ANCESTORS_MAX):
        if pid <= 1:
            return
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return  # it has ended: we are an orphan


def _netns(pid: int) -> int:
    try:
        return netns.inode_of(pid)
    except OSError:
        return 0

"""
Network namespaces by inode: enter one, run a program in one.

A namespace is known by its inode (nsfs gives one to each for its life), never by the pid that happened to be
in it: a target that restarts during a fault must not hide the rules it leaves behind.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from kvops.chaos.procs import pids
from kvops.errors import Unsupported

COMMAND_TIMEOUT_S: Final = 5.0
NAMED: Final = Path("/run/netns")  # ip-netns(8)
_CLONE_NEWNET: Final = 0x40000000  # sched.h

Result = TypeVar("Result")


def inode_of(pid: int | str = "thread-self") -> int:
    """The namespace that a process is in; our own thread's by default."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino  # noqa: PTH116 (follows the magic link)


def _paths() -> Iterator[str]:
    yield "/proc/self/ns/net"
    try:
        yield from (str(path) for path in sorted(NAMED.iterdir()))
    except OSError:
        pass  # no named ones
    yield from (f"/proc/{pid}/ns/net" for pid in pids())


def open_netns(inode: int) -> int | None:
    """A descriptor of the namespace; None when it has ended (no name and no process keeps it)."""
    for path in _paths():
        try:
            if os.stat(path).st_ino == inode:  # noqa: PTH116
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(handle).st_ino == inode:
                    return handle
                os.close(handle)
        except OSError:
            continue  # it ended while we looked
    return None


def run_in(
    inode: int, argv: list[str], *, text: str = "", timeout_s: float = COMMAND_TIMEOUT_S
) -> subprocess.CompletedProcess[str] | None:
    """
    Run a program in a namespace, with ``text`` on its standard input; None when the namespace has ended.

    Raises:
        Unsupported: The program is not installed.
    """
    prefix: list[str] = []
    handle: int | None = None
    if inode != inode_of():
        handle = open_netns(inode)
        if handle is None:
            return None
        prefix = ["nsenter", f"--net=/proc/self/fd/{handle}"]
    try:
        return subprocess.run(
            [*prefix, *argv],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            pass_fds=() if handle is None else (handle,),
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise Unsupported(
            f"{error.filename} is not installed", fix=f"apt install {_PACKAGES.get(argv[0], argv[0])}"
        ) from error
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(argv, 124, "", f"gave up after {error.timeout:g} s")
    finally:
        if handle is not None:
            os.close(handle)


_PACKAGES: Final = {
    "nft": "nftables",
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "nsenter": "util-linux",
}


def call_in(inode: int, function: Callable[[], Result]) -> Result:
    """
    Call a function in a namespace, on a thread that ends afterwards: setns(2) moves one thread alone.

    Raises:
        Unsupported: The namespace has ended, or we may not enter it.
    """
    if inode == inode_of():
        return function()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter(inode)
            results.append(function())
        except BaseException as error:  # noqa: BLE001 (raised again by the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run, name=f"netns-{inode}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter(inode: int) -> None:
    """
    Move the calling thread to a namespace, with all threads and processes that it starts from now on.

    Raises:
        Unsupported: The namespace has ended, or we may not enter it.
    """
    handle = open_netns(inode)
    if handle is None:
        raise Unsupported(f"network namespace {inode} has ended", fix="start the target again")
    try:
        _set(handle, inode)
    finally:
        os.close(handle)


@contextmanager
def entered(inode: int) -> Iterator[None]:
    """While this lasts, the calling thread is in a namespace; see ``enter``."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(inode)
        try:
            yield
        finally:
            _set(back, 0)
    finally:
        os.close(back)


def _set(handle: int, inode: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise Unsupported(f"cannot enter network namespace {inode}: {reason}", fix="run as root")

"""
Registered memory: what a store on the same host copies from by itself.

A writer allocates its buffers in a *region*, a sealed memfd, and registers it on a connection to the store's Unix
socket: REGISTER, the store's "send it", one byte with the descriptor, and the store's second answer. From then on
a write names bytes of the region, and no payload crosses the socket.

The store reads a region by its descriptor and never maps it. Touching a mapping of memory that its writer has not
touched yet, or has given back by fallocate(2), takes a page at the cost of whoever touches it, or is SIGBUS where
the kernel has none (memfd_create(2) with MFD_HUGETLB; vm.overcommit_memory 2): a writer could fill its store's
control group, or end it. A read of such memory gives zeros and takes nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import operator
import os
import socket
import time
from typing import Final

from kvops.errors import Refused, Unreachable, UsageError
from kvops.limits import REGION_BYTES_MAX
from kvops.net.link import Link, receive, send
from kvops.net.wire import Kind
from kvops.transfer import messages as tm

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
REGISTER_S_MAX: Final = 0.2  # a store that is slower gets its bytes by socket
REGISTER_S_MIN: Final = 0.005  # a put that has less time left leaves registering to the next one


class Region:
    """Memory of this process, shared by descriptor."""

    _numbers = itertools.count(1)

    def __init__(self, size_bytes: int) -> None:
        """
        Raises:
            UsageError: No such size.
            Refused: The kernel gives none.
        """
        try:
            size_bytes = operator.index(size_bytes)
        except TypeError:
            raise UsageError(f"a region of {size_bytes!r} B", fix="pass a whole number of bytes") from None
        if not 0 < size_bytes <= REGION_BYTES_MAX:
            raise UsageError(f"a region of {size_bytes} B", fix=f"ask for 1 to {REGION_BYTES_MAX} B")
        self.number = next(self._numbers)
        self.size_bytes = size_bytes
        try:
            self.fd = os.memfd_create("kvops-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Refused(f"no memory to share: {error}", fix="close some files") from error
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            # Ours as long as the region lives: were it unmapped when its last user lets go, other memory could come
            # to lie at its address and be taken for it.
            self._own = memoryview(mmap.mmap(self.fd, size_bytes))
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise Refused(f"cannot map {size_bytes} B to share: {error}", fix="ask for less") from error
        self.address = _address(self._own)

    @property
    def view(self) -> memoryview:
        """All of it, to be used and released at will."""
        return memoryview(self._own)

    def close(self) -> None:
        """Share it no more; its memory stays while somebody holds a view of it."""
        os.close(self.fd)


class Regions:
    """The regions of one client."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def __bool__(self) -> bool:
        return bool(self._regions)

    def allocate(self, size_bytes: int) -> memoryview:
        """A new region's memory, all zeros; raises as ``Region`` does."""
        region = Region(size_bytes)
        self._regions.append(region)
        return region.view

    def find(self, data: memoryview) -> tuple[Region, int] | None:
        """The region in which all of ``data`` lies, and where in it."""
        try:
            address = _address(data)
        except TypeError:
            return None  # read-only: no memory of ours
        for region in self._regions:
            offset = address - region.address
            if 0 <= offset <= region.size_bytes - len(data):
                return region, offset
        return None

    def close(self) -> None:
        """Share none of them any more."""
        while self._regions:
            self._regions.pop().close()


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def register(link: Link, region: Region, *, deadline: float) -> None:
    """
    Let the store behind an idle link to its Unix socket copy from a region.

    Whether it does is in ``link.registered``: a store that takes no more regions, or is of an older version, goes on
    getting its bytes by the socket.

    Raises:
        Unreachable: The store did not answer in time, or hung up; the link is closed.
    """
    deadline = min(deadline, time.monotonic() + REGISTER_S_MAX)
    head = tm.REGISTER.pack(region.number, 0, region.size_bytes)
    send(link, Kind.REGISTER, head, request=region.number)
    answer = receive(link, Kind.REGISTER, request=region.number, deadline=deadline)
    if answer == tm.GO_ON:
        try:
            socket.send_fds(link.sock, [b"\0"], [region.fd])
        except OSError as error:
            link.close()
            raise Unreachable(f"cannot reach {link.address}: {error}", fix="kvops status") from error
        answer = receive(link, Kind.REGISTER, request=region.number, deadline=deadline)
    link.registered[region.number] = answer == tm.REGISTERED


class Borrowed:
    """Somebody else's region, to copy from; the descriptor is ours to close."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """
        Raises:
            Refused: It is none, could shrink, is not of the size that was said, or cannot be read; ``fd`` is closed.
        """
        try:
            # Of a memfd alone: whatever else the descriptor is has no seals, and reading it might block for ever.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise Refused("a region that is not sealed", fix="allocate it with Pool.allocate")
            if not size_bytes or os.fstat(fd).st_size != size_bytes:
                raise Refused("a region of another size than was said", fix="allocate it with Pool.allocate")
            os.pread(fd, 1, 0)  # opened for writing alone?
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise Refused(f"no region: {error}", fix="allocate it with Pool.allocate") from error
            raise
        self.size_bytes = size_bytes
        self._fd = fd

    def copy(self, target: memoryview, offset: int) -> None:
        """
        Fill ``target`` from an offset on, as the bytes are now; all of it must lie inside.

        Raises:
            Refused: The kernel cannot read it.
        """
        try:
            done = 0
            while done < len(target):
                got = os.preadv(self._fd, [target[done:]], offset + done)
                if not got:
                    raise OSError("it ends early")
                done += got
        except OSError as error:
            raise Refused(f"cannot read registered memory: {error}", fix="register it again") from error

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)

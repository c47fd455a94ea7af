"""Making pages of memory real before anybody needs them, without holding the GIL."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

MADV_HUGEPAGE: Final = 14  # mman.h
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14

_libc: Final = ctypes.CDLL(None, use_errno=True)  # a call through it releases the GIL; mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address_of(memory: mmap.mmap) -> int:
    """Where a writable mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def populate(address: int, size_bytes: int) -> bool:
    """
    Give whole pages memory, as if each had been written to; their contents stay.

    Returns:
        False where the kernel cannot (before Linux 5.14): touch the pages yourself.

    Raises:
        OSError: It has no more memory.
    """
    if _libc.madvise(address, size_bytes, MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))
        return False
    return True


def advise_huge(address: int, size_bytes: int) -> bool:
    """
    Let the kernel use transparent huge pages there, where its settings allow that.

    For memory files they are those of ``/sys/kernel/mm/transparent_hugepage/shmem_enabled``.

    Returns:
        False where the kernel knows no transparent huge pages.
    """
    return not _libc.madvise(address, size_bytes, MADV_HUGEPAGE)

"""The bytes behind whatever callers hand in as buffers."""

from __future__ import annotations

import re
from typing import Any, Final

from kvops.errors import WrongBuffer
from kvops.limits import OBJECT_BYTES_MAX

_FIELD_NAMES: Final = re.compile(":[^:]*:")  # in a buffer's format: PEP 3118


def writable(buffer: Any) -> memoryview:
    """
    A buffer's bytes, to read an object into.

    Raises:
        WrongBuffer: It is none, or cannot be written.
    """
    view = _bytes_of(buffer)
    if view.readonly:
        raise WrongBuffer(
            "a buffer to read into cannot be written", fix="give a bytearray, numpy array or mmap"
        )
    return view


def readable(buffer: Any) -> memoryview:
    """
    A buffer's bytes, to be stored.

    Raises:
        WrongBuffer: It is none, or of no size that an object may have.
    """
    view = _bytes_of(buffer)
    if not 0 < len(view) <= OBJECT_BYTES_MAX:
        raise WrongBuffer(f"an object of {len(view)} B", fix=f"objects have 1 to {OBJECT_BYTES_MAX} B")
    return view


def _bytes_of(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
        if view.format == "B" and view.ndim == 1 and view.c_contiguous:
            return view
        if "O" in _FIELD_NAMES.sub("", view.format):
            raise WrongBuffer("a buffer of Python objects", fix="give an array of numbers")
        return view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise WrongBuffer(
            f"not a contiguous buffer: {error}", fix="give bytes, a numpy array or a memoryview"
        ) from error

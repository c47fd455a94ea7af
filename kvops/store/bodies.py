"""Bodies of requests to the master, checked for shape and bounds before they are read."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvops.errors import WireError
from kvops.limits import DIGEST_BYTES, KEYS_PER_FRAME_MAX


def check_digests(body: bytes) -> None:
    """
    Check that a body is a batch of key digests.

    Raises:
        WireError: It is not, or they are too many.
    """
    if len(body) % DIGEST_BYTES or len(body) > KEYS_PER_FRAME_MAX * DIGEST_BYTES:
        raise WireError(
            f"a request of {len(body)} B is no batch of up to {KEYS_PER_FRAME_MAX} digests",
            fix="send smaller batches",
        )


def unpack_head(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    """
    The head of a body.

    Raises:
        WireError: The body is shorter.
    """
    try:
        return layout.unpack_from(body)
    except struct.error as error:
        raise WireError("a request is shorter than its head", fix="") from error


def rows_of(
    body: bytes, dtype: np.dtype[np.void], *, start: int = 0, count_max: int = KEYS_PER_FRAME_MAX
) -> NDArray[np.void]:
    """
    The packed rows of a body.

    Raises:
        WireError: Not a whole number of rows, or too many.
    """
    size = len(body) - start
    if size < 0 or size % dtype.itemsize or size // dtype.itemsize > count_max:
        raise WireError(
            f"a body of {len(body)} B holds no whole rows of {dtype.itemsize} B, or more than {count_max}",
            fix="",
        )
    return np.frombuffer(body, dtype, offset=start)

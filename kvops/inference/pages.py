"""Page contents that follow from the key alone, so that every byte read from anywhere can be checked."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvops.errors import UsageError

PAGE_BYTES_MIN: Final = 64
_PATTERN_SEED: Final = 0x6B766F7073  # any fixed number: engines of one replay must agree on it

Bytes = NDArray[np.uint8]


class PageBook:
    """
    Makes and checks pages of one size.

    Word ``i`` of a page is ``pattern[i] XOR xxh3_64(key)``. The pattern's words all differ, so a page of
    another key differs in every word, a page that is shifted differs in nearly every word, and each single
    wrong byte shows: the check compares all of them. Making or checking a page costs one pass over it.
    """

    def __init__(self, page_bytes: int) -> None:
        if page_bytes < PAGE_BYTES_MIN or page_bytes % 8:
            what = f"a page of {page_bytes} bytes is not possible"
            raise UsageError(
                what, fix=f"choose at least {PAGE_BYTES_MIN} bytes, a multiple of 8, such as 64KiB"
            )
        self.page_bytes = page_bytes
        rng = np.random.Generator(np.random.PCG64(_PATTERN_SEED))
        self._pattern: NDArray[np.uint64] = rng.integers(0, 1 << 64, page_bytes // 8, dtype=np.uint64)
        self._scratch = np.empty_like(self._pattern)

    @staticmethod
    def _seed(key: str) -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(key.encode()))

    def fill(self, page: Bytes, key: str) -> None:
        """Write the page of ``key``; ``page`` has shape ``[page_bytes]``, contiguous."""
        np.bitwise_xor(self._pattern, self._seed(key), out=page.view(np.uint64))

    def wrong_bytes(self, page: Bytes, key: str) -> int:
        """How many bytes of ``page`` are not those of ``key``'s page; 0 is what must be."""
        np.bitwise_xor(self._pattern, self._seed(key), out=self._scratch)
        if np.array_equal(page.view(np.uint64), self._scratch):
            return 0
        return int(np.count_nonzero(page != self._scratch.view(np.uint8)))

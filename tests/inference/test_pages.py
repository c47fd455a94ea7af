"""Pages whose bytes follow from their keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvops.errors import UsageError
from kvops.inference.pages import PageBook

PAGE = 1024


def page(key: str) -> np.ndarray:
    made = np.zeros(PAGE, dtype=np.uint8)
    PageBook(PAGE).fill(made, key)
    return made


@given(key=st.text(max_size=20), at=st.integers(0, PAGE - 1), flip=st.integers(1, 255))
def test_each_wrong_byte_is_found(key: str, at: int, flip: int) -> None:
    """A right page is right; one changed byte, wherever, is exactly one wrong byte."""
    right = page(key)
    damaged = right.copy()
    damaged[at] ^= flip

    assert PageBook(PAGE).wrong_bytes(right, key) == 0
    assert PageBook(PAGE).wrong_bytes(damaged, key) == 1


@given(key=st.text(max_size=20), other=st.text(max_size=20))
def test_another_keys_page_is_wrong_everywhere(key: str, other: str) -> None:
    """A page mixed up with another one differs in every word."""
    assume(key != other)

    assert PageBook(PAGE).wrong_bytes(page(other), key) >= PAGE // 8


@given(key=st.text(max_size=20), shift=st.integers(1, PAGE - 1))
def test_a_shifted_or_torn_page_is_wrong(key: str, shift: int) -> None:
    """Bytes of the right page at the wrong place are found, and so is half a page."""
    book = PageBook(PAGE)
    torn = page(key)
    torn[shift:] ^= 0xFF  # zeros could be the page's own

    assert book.wrong_bytes(np.roll(page(key), shift), key) > 0
    assert book.wrong_bytes(torn, key) > 0


@pytest.mark.parametrize("size", [0, 8, 100])
def test_sizes_that_cannot_be_checked_are_refused(size: int) -> None:
    """The error names the size and a possible one."""
    with pytest.raises(UsageError, match="multiple of 8"):
        PageBook(size)

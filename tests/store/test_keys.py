"""Digests of keys and namespaces."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import UsageError
from kvops.limits import KEY_BYTES_MAX
from kvops.store import keys

OURS = keys.namespace_digest(model="m", revision="1", dtype="bfloat16", page_tokens=64)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_golden_digests() -> None:
    """Digests never change: clients and masters of different versions must agree on them."""
    assert keys.NAMESPACE_DEFAULT.hex() == "19585ba423796d7563bbea736bbf07a0"
    assert OURS.hex() == "3412dd4da927f222ad2fb35b95e0850f"
    assert keys.index_digests(OURS, ["", "a", "ключ"]).hex() == (
        "16183a86cd64c605f88bb5d9431bac7f1b57e197d2eff54c11eac7276a720a422eb301c309b714871cc45c181b70c360"
    )
    assert keys.key_digest(OURS, "a").hex() == "4e070894669e676b8a31f9e6d22cf0c8"


@given(st.lists(texts, max_size=5))
def test_batch_equals_one_by_one(some: list[str]) -> None:
    """A key's digest is the same alone and in any batch, 16 bytes each in the keys' order."""
    assert keys.index_digests(OURS, some) == b"".join(keys.index_digests(OURS, [key]) for key in some)


def test_words_of_a_digest() -> None:
    """The index reads a digest as two little-endian words: bytes 0–7, then bytes 8–15."""
    digest = keys.index_digests(OURS, ["a"])

    words = np.frombuffer(digest, "<u8")

    assert [int(word) for word in words] == [
        int.from_bytes(digest[:8], "little"),
        int.from_bytes(digest[8:], "little"),
    ]


def test_key_digest_is_blake2b_of_namespace_and_key() -> None:
    """The header's digest can be recomputed by anyone from the page that describes it."""
    assert keys.key_digest(OURS, "k") == hashlib.blake2b(OURS + b"k", digest_size=16).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"revision": "2"},
        {"dtype": "fp8_e4m3"},
        {"layout": "page_first"},
        {"page_tokens": 128},
        {"tp_size": 1},
        {"pp_size": 1},
        {"cp_size": 1},
        {"kv_split": "k"},
        {"label": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_namespace_counts(change: dict[str, str | int]) -> None:
    """Two deployments that differ in one field share no key, in the index or in a header."""
    base = {"model": "m", "revision": "1", "dtype": "bfloat16", "page_tokens": 64}

    theirs = keys.namespace_digest(**(base | change))  # type: ignore[arg-type]

    assert theirs != OURS
    assert keys.index_digests(theirs, ["k"]) != keys.index_digests(OURS, ["k"])
    assert keys.key_digest(theirs, "k") != keys.key_digest(OURS, "k")


def test_fields_of_a_namespace_cannot_run_into_each_other() -> None:
    """Text moved from one field to its neighbour makes another namespace."""
    assert keys.namespace_digest(model="ab") != keys.namespace_digest(model="a", revision="b")
    assert keys.namespace_digest(label="1:a5:model1:b") != keys.namespace_digest(label="1:a", model="b")


def test_a_lone_surrogate_is_refused() -> None:
    """A key that is not text raises, with what to do, and is never replaced by another key."""
    for call in (
        lambda: keys.index_digests(OURS, ["a", "\udc80"]),
        lambda: keys.key_digest(OURS, "\udc80"),
        lambda: keys.key_bytes("\udc80"),
    ):
        with pytest.raises(UsageError, match="surrogate") as caught:
            call()
        assert caught.value.fix


def test_key_length_is_bounded_in_bytes() -> None:
    """The longest key passes, one more byte does not, and neither does an empty key."""
    assert keys.key_bytes("é" * (KEY_BYTES_MAX // 2)) == ("é" * (KEY_BYTES_MAX // 2)).encode()
    for bad in ("é" * (KEY_BYTES_MAX // 2) + "a", ""):
        with pytest.raises(UsageError, match="B of UTF-8"):
            keys.key_bytes(bad)


def test_a_namespace_has_sixteen_bytes() -> None:
    """A name passed where its digest belongs is caught at the first call."""
    with pytest.raises(AssertionError):
        keys.index_digests(b"prod", ["a"])
    with pytest.raises(AssertionError):
        keys.key_digest(b"prod", "a")

"""
Digests of keys: 16 bytes that find an object, and 16 that prove it is the one that was asked for.

An *index digest* is fast and goes with every lookup; it can be made to collide on purpose. A *key digest* is
cryptographic and lies in the object's header: a reader compares it before it says "hit". Both are bound to a
*namespace*, so that two deployments with the same key text never share an object.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from itertools import repeat
from typing import Final

from xxhash import xxh3_128_digest

from kvops.errors import UsageError
from kvops.limits import DIGEST_BYTES, KEY_BYTES_MAX

NAMESPACE_BYTES: Final = 16

_encode: Final = str.encode  # strict UTF-8: a lone surrogate is refused, never replaced


def namespace_digest(
    *,
    model: str = "",
    revision: str = "",
    dtype: str = "",
    layout: str = "",
    page_tokens: int = 0,
    tp_size: int = 0,
    pp_size: int = 0,
    cp_size: int = 0,
    kv_split: str = "",
    label: str = "",
) -> bytes:
    """
    The 16 bytes that stand for everything two engines must agree on before they may share a page.

    Args:
        model: Name of the model.
        revision: Of its weights.
        dtype: Element type of the cache, such as ``"bfloat16"`` or ``"fp8_e4m3"``.
        layout: Order of the dimensions in a page, such as ``"page_first"``.
        page_tokens: Tokens a page holds.
        tp_size: Ranks of tensor parallelism; 0 where objects are laid out so that any number may read them.
        pp_size: Of pipeline parallelism, likewise.
        cp_size: Of context parallelism, likewise.
        kv_split: How keys and values are divided between objects.
        label: Free text for what the other fields cannot say.

    A field left at its default is not hashed: one added later changes no existing namespace.
    """
    fields = {name: value for name, value in locals().items() if value not in ("", 0)}
    # Lengths before the texts: no two sets of fields are written alike.
    parts = (f"{len(text.encode())}:{text}" for name in sorted(fields) for text in (name, str(fields[name])))
    return blake2b("".join(parts).encode(), digest_size=NAMESPACE_BYTES, person=b"kvops.namespace").digest()


NAMESPACE_DEFAULT: Final = namespace_digest()
"""The namespace of a pool that was opened without one."""


@lru_cache(maxsize=64)
def _seed(namespace: bytes) -> int:
    assert len(namespace) == NAMESPACE_BYTES, "a namespace is what namespace_digest() returned"
    return int.from_bytes(blake2b(namespace, digest_size=8, person=b"kvops.seed").digest(), "little")


def index_digests(namespace: bytes, keys: Iterable[str]) -> bytes:
    """
    What the wire and the master's index know keys by.

    Args:
        namespace: 16 bytes of ``namespace_digest``; they seed the hash.
        keys: Texts of any length.

    Returns:
        16 bytes a key, in the order of ``keys``. They are xxh3_128 in its canonical (big-endian) form; the
        index reads them as two little-endian words: word 0 is bytes 0–7 (the hash's high half with its bytes
        swapped), word 1 is bytes 8–15. Both are uniform.

    Raises:
        UsageError: A key cannot be written as UTF-8.
    """
    # On the path of every lookup. 1,000 keys of 68 characters cost 95 µs of CPU so, 103 as a comprehension,
    # 133 with the namespace before each key, 172 through one join and split of all keys; hashing alone 53.
    try:
        return b"".join(map(xxh3_128_digest, map(_encode, keys), repeat(_seed(namespace))))
    except UnicodeEncodeError as error:
        raise _not_text(error) from None
    except TypeError as error:
        raise _no_text(error) from None


def key_digest(namespace: bytes, key: str) -> bytes:
    """
    What an object's header knows its key by: blake2b of namespace and key, 16 bytes.

    Raises:
        UsageError: The key cannot be written as UTF-8.
    """
    assert len(namespace) == NAMESPACE_BYTES, "a namespace is what namespace_digest() returned"
    try:
        return blake2b(namespace + key.encode(), digest_size=DIGEST_BYTES).digest()
    except UnicodeEncodeError as error:
        raise _not_text(error) from None


def key_bytes(key: str) -> bytes:
    """
    The text of a key as a store node keeps it.

    Raises:
        UsageError: The key is empty, longer than ``KEY_BYTES_MAX``, or cannot be written as UTF-8.
    """
    try:
        text = _encode(key)
    except UnicodeEncodeError as error:
        raise _not_text(error) from None
    except TypeError as error:
        raise _no_text(error) from None
    if not 0 < len(text) <= KEY_BYTES_MAX:
        raise UsageError(
            f"a key of {len(text)} B; a key has 1 to {KEY_BYTES_MAX} B of UTF-8",
            fix="use a digest of the text as key" if text else "name the object",
        )
    return text


def _not_text(error: UnicodeEncodeError) -> UsageError:
    return UsageError(
        f"key {error.object[:40]!r} cannot be written as UTF-8: character {error.start} is a lone surrogate",
        fix="decode file names with errors='backslashreplace', or use their digest as key",
    )


def _no_text(error: TypeError) -> UsageError:
    return UsageError(f"a key that is no text: {error}", fix="pass keys as str")

"""
A master's term, kept so that no crash can take it back.

Every start raises it before the first put is granted, and every generation carries it: an allocation of this
start is younger than any of an earlier one, whatever was in flight when that ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

from kvops.errors import ConfigError, Refused
from kvops.store.model import GENERATION_SEQUENCE_BITS

TERM_MAX: Final = (1 << 64 - GENERATION_SEQUENCE_BITS) - 1
EPOCH_S: Final = 1_704_067_200  # 2024-01-01
_FILE: Final = "term.json"


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    term: int


def read_term(state_dir: Path) -> int:
    """
    The last term of this state directory, 0 when there was none.

    Raises:
        ConfigError: The file cannot be read. A guess could give one generation twice, so there is none.
    """
    path = state_dir / _FILE
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(
            f"the term in {path} cannot be read: {error.strerror}", fix="see its owner and mode"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from None
    if stored.schema != 1 or not 0 <= stored.term <= TERM_MAX:
        raise _unreadable(path, f"schema {stored.schema}, term {stored.term}")
    return stored.term


def first_term() -> int:
    """
    Below the first term of a state directory without one: minutes since 2024, which last for 31 years.

    The directory may have been lost while stores were away that have seen its terms: counting from one, a store
    that comes back later would hold generations that are being given a second time.
    """
    return max(0, int(time.time()) - EPOCH_S) // 60


def raise_term(state_dir: Path, at_least: int = 0, *, first: int | None = None) -> int:
    """
    Begin a new term. It is on disk before this returns; takes a disk's time, so never on the loop.

    Args:
        state_dir: Where the last term is kept.
        at_least: One more than the highest term that others were seen to use, such as by stores.
        first: What to count from where there is no last term; None: ``first_term``.

    Returns:
        One more than the last term, or ``at_least`` where that is more.

    Raises:
        ConfigError: The file cannot be read or written.
        Refused: There are no terms left.
    """
    last = read_term(state_dir) or (first_term() if first is None else first)
    term = max(last, at_least - 1) + 1
    if term > TERM_MAX:
        raise Refused(
            f"term {term} is beyond {TERM_MAX}", fix="start a new group: this one's generations are used up"
        )
    path, fresh = state_dir / _FILE, state_dir / f"{_FILE}.new"
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(_Stored(schema=1, term=term)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        sync_directory(state_dir)
    except OSError as error:
        raise ConfigError(
            f"the term cannot be kept in {path}: {error.strerror}",
            fix="give this user a writable state_dir with free space: without it no put is safe",
        ) from None
    return term


def note_term(state_dir: Path, term: int) -> None:
    """Remember a term that etcd gave us, where it is above the last one; ``ConfigError`` as ``raise_term``."""
    if term > read_term(state_dir):
        raise_term(state_dir, at_least=term)


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory outlive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the term in {path} is damaged: {why}",
        fix='write {"schema":1,"term":N} there, N above every term that stores and logs of this group show',
    )

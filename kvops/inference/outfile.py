"""Files that users ask for: each appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvops.errors import UsageError


@contextmanager
def whole_file(path: str, *, what: str) -> Iterator[IO[bytes]]:
    """
    A stream to a file beside ``path``, which takes that name when the block ends well and vanishes otherwise.

    Args:
        path: In a folder that is there.
        what: The file's part in the error, such as ``"the report"``.

    Raises:
        UsageError: It cannot be written.
    """
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            try:
                yield stream
                stream.flush()
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _problem(path, error, what=what) from None


def check_writable(path: str, *, what: str) -> None:
    """
    Refuse a place for a file before the long work that is to fill it.

    Raises:
        UsageError: No file can be made there.
    """
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        part.touch()
        part.unlink()
        if Path(path).is_dir():
            raise IsADirectoryError(None, "it is a folder")
    except OSError as error:
        raise _problem(path, error, what=what) from None


def _problem(path: str, error: OSError, *, what: str) -> UsageError:
    folder = Path(path).parent
    if isinstance(error, FileNotFoundError):
        return UsageError(
            f"{what} {path} cannot be written: there is no folder {folder}", fix=f"make it: mkdir -p {folder}"
        )
    return UsageError(
        f"{what} {path} cannot be written: {error.strerror}", fix="name a file in a writable folder"
    )

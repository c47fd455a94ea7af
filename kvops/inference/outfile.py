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
        path: Its folder is made where it is missing.
        what: The file's part in the error, such as ``"the report"``.

    Raises:
        UsageError: It cannot be written.
    """
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            try:
                yield stream
                stream.flush()
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        problem = f"{what} {path} cannot be written: {error.strerror}"
        raise UsageError(problem, fix="name a file in a writable folder") from None


def check_writable(path: str, *, what: str) -> None:
    """
    Refuse a place for a file before the long work that is to fill it; makes its folder.

    Raises:
        UsageError: No file can be made there.
    """
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
        if Path(path).is_dir():
            raise IsADirectoryError(None, "it is a folder")
    except OSError as error:
        problem = f"{what} {path} cannot be written: {error.strerror}"
        raise UsageError(problem, fix="name a file in a writable folder") from None

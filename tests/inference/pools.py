"""Pools for the tests of the inference side: in memory, and in a folder that several processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvops.store.model import Outcome, PutOptions, Reason
from kvops.transfer.region import Region


class MemoryPool:
    """A pool in a dict, unbounded, with switches for trouble."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.touched: list[str] = []
        self.gets: list[list[str]] = []
        self.get_reasons: dict[str, Reason] = {}  # what reading these keys ends with, though they are there
        self.put_reason: Reason | None = None  # what every put ends with
        self.closed = False

    def allocate(self, size_bytes: int) -> memoryview:
        return Region(size_bytes).view

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def batch_exists(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> list[bool]:
        return [key in self.objects for key in keys]

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        self.gets.append(list(keys))
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            reason = self.get_reasons.get(key, Reason.HIT if key in self.objects else Reason.MISS)
            if reason is Reason.HIT:
                buffer[:] = self.objects[key]
            outcomes.append(Outcome(reason is Reason.HIT, reason, len(buffer)))
        return outcomes

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        *,
        deadline_ms: int | None = None,
        options: PutOptions | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[Outcome]:
        if self.put_reason is not None:
            return [Outcome(False, self.put_reason)] * len(keys)
        assert depths is None or len(depths) == len(keys)
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            reason = Reason.EXISTS if key in self.objects else Reason.STORED
            self.objects.setdefault(key, bytes(buffer))
            outcomes.append(Outcome(True, reason, len(buffer)))
        return outcomes

    def touch(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> None:
        self.touched += keys

    def close(self) -> None:
        self.closed = True

    def health(self) -> dict[str, Any]:
        return {}


class FolderPool:
    """A pool whose objects are files: engines in other processes share it by its path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def _trouble(self) -> Reason | None:
        """The word in the file ``trouble``: what a test wants to go wrong from then on."""
        try:
            word = (self._folder / "trouble").read_text()
        except FileNotFoundError:
            return None
        if word == "hang":
            time.sleep(3600)  # the one thing a pool must never do: the replay has to notice
        if word == "crash":
            os._exit(9)
        if word == "bug":
            raise ZeroDivisionError("a bug of the pool")
        return Reason(word)

    def allocate(self, size_bytes: int) -> memoryview:
        return Region(size_bytes).view

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        if self._trouble():
            return 0
        return next((i for i, key in enumerate(keys) if not self._path(key).exists()), len(keys))

    def batch_exists(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        trouble = self._trouble()
        if trouble:
            return [Outcome(False, trouble)] * len(keys)
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            try:
                buffer[:] = self._path(key).read_bytes()
            except FileNotFoundError:
                outcomes.append(Outcome(False, Reason.MISS))
            else:
                outcomes.append(Outcome(True, Reason.HIT, len(buffer)))
        return outcomes

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        *,
        deadline_ms: int | None = None,
        options: PutOptions | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[Outcome]:
        trouble = self._trouble()
        if trouble:
            return [Outcome(False, trouble)] * len(keys)
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            path = self._path(key)
            if path.exists():
                outcomes.append(Outcome(True, Reason.EXISTS, len(buffer)))
                continue
            beside = path.with_name(f"{path.name}.{os.getpid()}")
            beside.write_bytes(buffer)
            beside.rename(path)  # appears whole, as an object of a real pool
            outcomes.append(Outcome(True, Reason.STORED, len(buffer)))
        return outcomes

    def touch(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> None:
        """Nothing is ever evicted."""

    def close(self) -> None:
        """Nothing is held open."""

    def health(self) -> dict[str, Any]:
        trouble = (self._folder / "trouble").exists()
        return {"stores": [{"name": "store-2", "breaker": "open" if trouble else "closed"}]}


def open_folder(*, folder: str, host: str, name: str) -> FolderPool:
    """The factory that engines are given by name."""
    assert host.removeprefix("host-") == name.removeprefix("replay node-")
    return FolderPool(Path(folder))

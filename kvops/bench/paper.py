"""
A store node on paper: it mounts, announces slots, beats and frees through the real session, and holds no data.

With it a master can be measured with millions of objects on a machine that could not hold them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvops.limits import CHUNK_BYTES, DIGEST_BYTES
from kvops.net.auth import Hello
from kvops.net.link import Address
from kvops.store import messages as m
from kvops.store.clock import boot_id
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.session import SLOTS_PER_FRAME, Session
from kvops.transfer.layout import footprint_bytes

READY_TIMEOUT_S: Final = 300.0
_STEP: Final = 65_536


class Actor:
    """The process around one paper store."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._name = f"paper-{config['prefix']}"
        self._group: str = config["group"]
        self._size: int = config["object_bytes"]
        self._footprint = footprint_bytes(self._size, CHUNK_BYTES)
        self._capacity = config["capacity_bytes"]
        self._count: int = config["objects"]
        prefix = config["prefix"]
        # Digests alone: millions of key texts would take longer and need a GiB.
        self._digests = b"".join(
            index_digests(NAMESPACE_DEFAULT, (f"{prefix}/{number:09d}" for number in range(first, last)))
            for first, last in ((at, min(at + _STEP, self._count)) for at in range(0, self._count, _STEP))
        )
        assert self._count * self._footprint <= self._capacity, "announced slots lie in the segment"
        self._incarnation = secrets.randbits(63) | 1
        self._freed = 0
        self._mounted = threading.Event()
        self._session = Session(
            [Address.parse(text) for text in config["masters"]],
            secret=bytes.fromhex(config["secret"]),
            hello=self._hello,
            owner=self,
        )

    def ready(self) -> dict[str, Any]:
        """Mount, and wait until the master has everything."""
        self._session.start()
        return {"mounted": self._mounted.wait(READY_TIMEOUT_S)}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """How many slots it was told to free."""
        return {"freed": self._freed}

    def _hello(self) -> Hello:
        return Hello(
            role="store",
            group=self._group,
            name=self._name,
            host="host-paper",
            numa_node=0,
            pid=os.getpid(),
            boot_id=boot_id(),
            nonce=os.urandom(16),
        )

    # The session's owner.

    def mount(self) -> m.Mount:
        return m.Mount(
            name=self._name,
            host="host-paper",
            numa_node=0,
            incarnation=self._incarnation,
            boot_id=boot_id(),
            pid=os.getpid(),
            address="127.0.0.1:1",  # nobody reads from it
            unix_path="",
            http_address="",
            capacity_bytes=self._capacity,
            populated_bytes=self._capacity,
            highest_generation=0,
            objects=self._count,
            transports=["tcp"],
        )

    def beat(self) -> m.Beat:
        return m.Beat(
            populated_bytes=self._capacity,
            objects=self._count,
            used_bytes=self._count * self._footprint,
            loop_lag_ms=0,
        )

    def announce(self, cursor: int) -> tuple[bytes, int]:
        end = min(cursor + SLOTS_PER_FRAME, self._count)
        rows = np.zeros(end - cursor, m.SLOT_ROW)
        digests = self._digests[cursor * DIGEST_BYTES : end * DIGEST_BYTES]
        rows["digest"] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        rows["generation"] = np.arange(cursor + 1, end + 1)
        rows["offset"] = np.arange(cursor, end) * self._footprint
        rows["size"] = self._size
        rows["chunk"] = CHUNK_BYTES
        return rows.tobytes(), end

    def free(self, body: bytes, done: Callable[[bytes], None]) -> None:
        rows = body[m.FREE_HEAD.size :]
        self._freed += len(rows) // m.FREE_ROW.itemsize
        done(rows)

    def floor(self, generation: int) -> None:
        pass

    def migrate(self, number: int, bandwidth_bps: int) -> None:
        """There are no bytes to copy."""

    def mounted(self, store_id: int, term: int) -> None:
        self._mounted.set()

"""The stores a client knows: those of its master's last view, each with its connections, memory and breaker."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from kvops.store.channel import Identity, StoreChannel
from kvops.store.model import StoreInfo, View


class KnownStores:
    """
    Channels by store id; ids mean something beside one process of a master alone.

    Args:
        identity: Of the client.
        transports: Allowed ones towards stores of its own logical host.
        transports_between_hosts: Towards others.
    """

    def __init__(
        self, identity: Identity, *, transports: Sequence[str], transports_between_hosts: Sequence[str]
    ) -> None:
        self._identity = identity
        self._transports = frozenset(transports)
        self._between_hosts = frozenset(transports_between_hosts)
        self._lock = threading.Lock()
        self._channels: dict[int, StoreChannel] = {}
        self._epoch = 0
        self._incarnation = 0  # of the master whose view it is

    def get(self, store_id: int) -> StoreChannel | None:
        """The store of an id."""
        return self._channels.get(store_id)

    def now(self) -> list[StoreChannel]:
        """All of them."""
        with self._lock:
            return list(self._channels.values())

    def are_of(self, incarnation: int) -> bool:
        """Whether they are what that master's process said."""
        return incarnation == self._incarnation

    def know(self, store_ids: set[int], *, epoch: int) -> bool:
        """Whether an answer that names these, given at that epoch, names nobody new."""
        return epoch == self._epoch or store_ids <= {0, *self._channels}

    def take(self, view: View, *, incarnation: int) -> None:
        """Know the stores of a view that this process of a master gave; hang up on all others."""
        with self._lock:
            self._incarnation = incarnation
            known = {info.id for info in view.stores}
            for store_id in [i for i in self._channels if i not in known]:
                self._channels.pop(store_id).close()
            for info in view.stores:
                channel = self._channels.get(info.id)
                if channel is None or channel.info.incarnation != info.incarnation:
                    if channel is not None:
                        channel.close()
                    self._channels[info.id] = StoreChannel(
                        info, self._identity, same_memory=self._shares(info)
                    )
                else:
                    channel.info = info
            self._epoch = view.epoch

    def close(self) -> None:
        """Hang up, unmap."""
        for channel in self.now():
            channel.close()

    def _shares(self, info: StoreInfo) -> bool:
        """Whether a store's memory can be mapped here: the same machine, and nobody forbids it."""
        hello = self._identity.hello
        allowed = self._transports if info.host == hello.host else self._transports & self._between_hosts
        return (
            "shm" in allowed
            and "shm" in info.transports
            and info.boot_id == hello.boot_id
            and os.path.exists(info.unix_path)  # noqa: PTH110  another mount namespace cannot reach it
        )

"""What moves bytes between a caller's memory and stores, and tells each store's breaker how that went."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvops.errors import KvopsError, Unreachable
from kvops.net.link import LinkState
from kvops.store.breaker import Failure
from kvops.store.caretaker import Caretaker
from kvops.store.channel import StoreChannel, now_ms
from kvops.store.judgement import carried, unanswered
from kvops.store.known_stores import KnownStores
from kvops.store.model import Reason, StoreInfo
from kvops.store.trail import Trail
from kvops.transfer import shm
from kvops.transfer.engine import Until, drive
from kvops.transfer.model import Job, ReadSlice, SliceState, WriteSlice
from kvops.transfer.region import REGISTER_S_MIN, Regions, register
from kvops.transfer.stream import ReadJob, WriteJob


class Carrier:
    """
    Carries slices to and from the stores of a client, all of them side by side.

    Args:
        stores: Those that are known.
        caretaker: Hears of breakers that open.
        regions: Memory from which stores of this host copy by themselves.
    """

    def __init__(self, stores: KnownStores, caretaker: Caretaker, regions: Regions) -> None:
        self.trail: Trail | None = None
        self._stores, self._caretaker, self._regions = stores, caretaker, regions

    def route(self, store_id: int) -> StoreInfo | Reason:
        """The store of an id if it may be used now, or why not."""
        channel = self._stores.get(store_id)
        if channel is None:
            return Reason.STORE_DOWN
        return channel.info if channel.usable else Reason.BREAKER_OPEN

    def read(self, groups: dict[int, list[ReadSlice]], until: Until) -> None:
        """Start the sockets, copy from mapped memory meanwhile, then wait for the sockets."""
        if self.trail is not None:
            self.trail.requests += len(groups)
        jobs: list[tuple[StoreChannel, Job]] = []
        mapped: list[tuple[shm.Mapping, list[ReadSlice]]] = []
        unmapped: list[tuple[StoreChannel, shm.MapJob, list[ReadSlice]]] = []
        for store_id, slices in groups.items():
            channel = self._stores.get(store_id)
            if channel is None:  # another thread has learnt that it is gone
                _fail(slices)
                continue
            mapping = channel.mapping
            if mapping is not None:
                mapped.append((mapping, slices))
                continue
            try:
                link = channel.link()
                if channel.same_memory:
                    map_job = shm.MapJob(link)
                    unmapped.append((channel, map_job, slices))
                    jobs.append((channel, map_job))
                else:
                    jobs.append((channel, ReadJob(link, slices)))
                link.flush()
            except Unreachable:
                _fail(slices)
                self._failed(channel, Failure.REFUSED)
        for mapping, slices in mapped:
            shm.read(mapping, slices, until)
        began = time.monotonic()
        drive([job for _, job in jobs], until)
        for channel, map_job, slices in unmapped:
            if map_job.mapping is None:
                _fail(slices, SliceState.LATE if until.left(time.monotonic()) <= 0 else SliceState.FAILED)
                continue
            shm.read(map_job.mapping, slices, until)
            channel.adopt(map_job.mapping, map_job.link)
            self._caretaker.wake()
        for channel, job in jobs:
            if isinstance(job, ReadJob):
                self._judge(channel, groups[channel.info.id], job, began, until)
            elif job.link.state is not LinkState.READY:
                late = until.left(time.monotonic()) <= 0
                failure = unanswered(late=late, given_s=until.deadline - began)
                if failure is not None:
                    self._failed(channel, failure)

    def _judge(
        self,
        channel: StoreChannel,
        slices: Iterable[ReadSlice | WriteSlice],
        job: ReadJob | WriteJob,
        began: float,
        until: Until,
    ) -> None:
        """Tell the store's breaker how it went; keep the link if it is in order."""
        now = time.monotonic()
        match carried(
            slices,
            given_s=until.deadline - began,
            took_s=now - began,
            silent_s=now - max(job.progress_at, began),
        ):
            case Failure() as failure:
                self._failed(channel, failure)
            case "well":
                channel.breaker.record(None, now_ms=now_ms())
        channel.put_back(job.link)

    def _failed(self, channel: StoreChannel, failure: Failure) -> None:
        channel.breaker.record(failure, now_ms=now_ms())
        if not channel.usable:
            self._caretaker.report(
                channel.info.id, Reason.TIMEOUT if failure is Failure.TIMEOUT else Reason.STORE_DOWN
            )

    def write(self, groups: dict[int, list[WriteSlice]], deadline: float) -> None:
        """Send or name what is to be written; each slice has a state by the deadline."""
        if self.trail is not None:
            self.trail.requests += len(groups)
        jobs: list[tuple[StoreChannel, WriteJob]] = []
        for store_id, slices in groups.items():
            channel = self._stores.get(store_id)
            if channel is None:  # another thread has learnt that it is gone
                _fail(slices)
                continue
            try:
                regions = self._regions if channel.takes_regions(now_s=time.monotonic()) else None
                jobs.append((channel, WriteJob(channel.link(), slices, regions)))
            except Unreachable:
                _fail(slices)
                self._failed(channel, Failure.REFUSED)
        began = time.monotonic()
        until = Until(deadline)
        drive([job for _, job in jobs], until)
        for channel, job in jobs:
            self._register(channel, job, deadline)
            self._judge(channel, groups[channel.info.id], job, began, until)

    def _register(self, channel: StoreChannel, job: WriteJob, deadline: float) -> None:
        """After the bytes have gone by the socket: let the next write do without."""
        try:
            for region in job.unregistered.values():
                if job.link.state is LinkState.READY and time.monotonic() + REGISTER_S_MIN < deadline:
                    register(job.link, region, deadline=deadline)
        except KvopsError:  # the link is closed
            channel.refused_regions(now_s=time.monotonic())


def _fail(slices: Iterable[ReadSlice | WriteSlice], state: SliceState = SliceState.FAILED) -> None:
    for piece in slices:
        piece.state = state

"""What a transport moves: slices of objects, each with its own result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from kvops.net.link import Link

READ_SLICES_PER_FRAME_MAX: Final = 64
WRITES_PER_FRAME_MAX: Final = 64


class SliceState(Enum):
    """What became of one slice."""

    PENDING = auto()
    DONE = auto()
    STALE = auto()  # the location no longer holds that object
    CORRUPT = auto()  # it does, and its bytes are not those that were put
    REFUSED = auto()  # the node does not take it
    FAILED = auto()  # the store could not be reached, or hung up
    LATE = auto()  # not done by the deadline


@dataclass(slots=True, eq=False)
class ReadSlice:
    """A chunk-aligned range of one object, on its way into the caller's memory."""

    index: int  # the caller's own
    generation: int
    offset: int  # of the object, in the segment
    size: int  # of the object's payload
    chunk: int
    incarnation: int
    key_digest: bytes
    start: int  # of the range, in the payload
    buffer: memoryview  # exactly the range's length
    state: SliceState = SliceState.PENDING


@dataclass(slots=True, eq=False)
class WriteSlice:
    """A chunk-aligned range of one object, on its way into a segment."""

    store: int  # id
    digest: bytes
    key_digest: bytes
    key: bytes
    generation: int
    offset: int
    size: int
    chunk: int
    depth: int
    tenant: int
    flags: int
    start: int
    data: memoryview
    digests: bytes = b""  # of its chunks, where they are known already
    state: SliceState = SliceState.PENDING
    sealed: bool = False  # this range completed the object


class Job(Protocol):
    """What one link has to do before a deadline."""

    link: Link

    @property
    def done(self) -> bool:
        """Nothing is pending."""

    def advance(self, events: int) -> None:
        """The link is ready; raises Unreachable or WireError when it failed."""

    def abandon(self, state: SliceState) -> None:
        """Give up: what is pending ends in that state, the link is closed, no buffer is touched again."""

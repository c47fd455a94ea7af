"""What the end of an exchange says of the peer: the one rule of the client, and of its model in the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from kvops.store.breaker import Failure
from kvops.transfer.model import ReadSlice, SliceState, WriteSlice

PATIENCE_S: Final = (
    0.002  # an exchange that had less time than this says nothing about the peer it did not hear from
)
STALLED_S: Final = 0.1  # a store that moved nothing for this long before the deadline is counted as hung


def unanswered(*, late: bool, given_s: float, known: bool = False) -> Failure | None:
    """
    How a peer failed that did not answer.

    Args:
        late: The deadline has come; else nobody listens there, or the connection was reset.
        given_s: How long it had.
        known: Meanwhile it has spoken to us, or another call that waited beside this one has counted its silence. A
            leader that speaks is not gone: it may keep an answer until its standbys have what it says.

    Returns:
        None when its silence means nothing, or nothing new.
    """
    if not late:
        return Failure.REFUSED
    return Failure.TIMEOUT if given_s >= PATIENCE_S and not known else None


def carried(
    slices: Iterable[ReadSlice | WriteSlice], *, given_s: float, took_s: float, silent_s: float
) -> Failure | Literal["well", "unclear"]:
    """
    How a store did that slices were carried to or from.

    Args:
        slices: In their last states.
        given_s: From the beginning to the deadline.
        took_s: From the beginning to now.
        silent_s: How much of that has passed since it last moved anything; all of it when it never did.

    Returns:
        ``unclear`` when a deadline came before all was done, and the store was still at work or had no time.
    """
    states = {piece.state for piece in slices}
    if SliceState.FAILED in states:
        return Failure.REFUSED
    if SliceState.LATE not in states:
        return "well"
    stalled = silent_s >= min(STALLED_S, took_s / 2)
    return (unanswered(late=True, given_s=given_s) if stalled else None) or "unclear"

"""What an exchange says of the peer."""

from __future__ import annotations

import pytest

from kvops.store.breaker import Failure
from kvops.store.judgement import PATIENCE_S, STALLED_S, carried, unanswered
from kvops.transfer.model import ReadSlice, SliceState


def piece(state: SliceState) -> ReadSlice:
    """A slice that ended so."""
    return ReadSlice(0, 1, 0, 1, 4096, 1, b"", 0, memoryview(bytearray(1)), state)


@pytest.mark.parametrize(
    ("late", "given_s", "failure"),
    [
        (False, PATIENCE_S / 2, Failure.REFUSED),
        (True, PATIENCE_S, Failure.TIMEOUT),
        (True, PATIENCE_S / 2, None),
    ],
    ids=["reset", "silent", "no-time"],
)
def test_no_answer(late: bool, given_s: float, failure: Failure | None) -> None:
    """A reset always counts; silence does once there was time for an answer."""
    assert unanswered(late=late, given_s=given_s) is failure


@pytest.mark.parametrize(
    ("states", "took_s", "silent_s", "said"),
    [
        ({SliceState.DONE, SliceState.STALE, SliceState.CORRUPT}, 1.0, 1.0, "well"),
        ({SliceState.DONE, SliceState.FAILED, SliceState.LATE}, 1.0, 0.0, Failure.REFUSED),
        ({SliceState.DONE, SliceState.LATE}, 1.0, STALLED_S, Failure.TIMEOUT),
        ({SliceState.DONE, SliceState.LATE}, 1.0, STALLED_S / 2, "unclear"),
        ({SliceState.LATE}, STALLED_S / 2, STALLED_S / 4, Failure.TIMEOUT),
        ({SliceState.LATE}, PATIENCE_S / 2, PATIENCE_S / 2, "unclear"),
    ],
    ids=["answered", "hung-up", "hung", "slow", "hung-for-half", "no-time"],
)
def test_slices(states: set[SliceState], took_s: float, silent_s: float, said: Failure | str) -> None:
    """A store that is late is blamed only for silence: of a tenth of a second, or of half the time it had."""
    found = carried(map(piece, states), given_s=took_s, took_s=took_s, silent_s=silent_s)

    assert found == said

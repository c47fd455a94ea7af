"""What a client makes of the master's and the stores' answers, without either."""

from __future__ import annotations

import numpy as np
import pytest

from kvops.limits import CHUNK_BYTES
from kvops.store import messages as m
from kvops.store.client_core import PutPlan
from kvops.store.keys import index_digests
from kvops.store.messages import PutStatus
from kvops.store.model import LOCATION, Outcome, PutOptions, Reason, StoreInfo, StoreState
from kvops.transfer.model import SliceState


def store_info(number: int) -> StoreInfo:
    """A store that may be used."""
    return StoreInfo(
        id=number,
        name=f"store-{number}",
        host=f"host-{number}",
        numa_node=0,
        incarnation=1,
        boot_id="b",
        pid=10,
        address="127.0.0.1:1",
        unix_path="",
        http_address="",
        state=StoreState.READY,
        capacity_bytes=CHUNK_BYTES,
        populated_bytes=CHUNK_BYTES,
        used_bytes=0,
        objects=0,
        transports=["tcp"],
    )


@pytest.mark.parametrize(
    ("states", "status", "outcome"),
    [
        ("DD", PutStatus.STORED, Outcome(True, Reason.STORED, 3, "store-1", replicas=2)),
        ("DF", PutStatus.STORED, Outcome(True, Reason.STORED, 3, "store-1", replicas=1)),
        ("FD", PutStatus.STORED, Outcome(True, Reason.STORED, 3, "store-2", replicas=1)),
        ("FF", PutStatus.STORED, Outcome(False, Reason.STORE_DOWN, 0, "store-1")),
        ("DD", PutStatus.REFUSED, Outcome(False, Reason.STALE)),
    ],
)
def test_a_put_says_how_many_replicas_were_written(states: str, status: PutStatus, outcome: Outcome) -> None:
    """One replica of two is a success that shows; the store named is one that has the object."""
    digests = index_digests(b"n" * 16, ["k"])
    plan = PutPlan(b"n" * 16, ["k"], [b"k"], [memoryview(b"abc")], digests, PutOptions(replicas=2), None)
    rows = np.array([(7, 0, 3, 1, 0), (7, 0, 3, 2, 0)], LOCATION)
    plan.started(m.PUT_REPLY_HEAD.pack(1, 2) + bytes([PutStatus.GRANTED]) + bytes(7) + rows.tobytes())
    groups = plan.groups(store_info)
    for number, letter in enumerate(states, start=1):
        groups[number][0].state = SliceState.DONE if letter == "D" else SliceState.FAILED

    plan.end_body()
    plan.ended(bytes([status]))

    assert plan.outcomes == [outcome]

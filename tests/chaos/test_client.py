"""What a chaos client leaves on record of requests that it had in hand when it was told to stop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from kvops.chaos.client import ClientSpec, Engine, NoPool, Recorder, now_ns
from kvops.chaos.history import Arm, HistoryWriter, Outcome, Request, Run, encode
from kvops.chaos.profiles import Planned
from tests.chaos.histories import read
from tests.waiting import WAIT_S, until


class Slow(NoPool):
    """A pool whose look-ups wait until they are let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        self.asked.set()
        self.go.wait(WAIT_S)
        return 0


def test_a_request_in_hand_is_on_record_once(tmp_path: Path) -> None:
    """Given up with its budget and the moment; an answer that comes later is no second row of the same request."""
    history = tmp_path / "c.jsonl"
    spec = ClientSpec(
        name="c",
        group="g",
        host="h",
        arm=Arm.FAULT,
        block=0,
        history=str(history),
        plan=[
            Planned(request="r1", at_s=0.0, engine=0, input_tokens=512, hash_ids=[1], seen_blocks=0),
            Planned(request="r2", at_s=3_600.0, engine=0, input_tokens=512, hash_ids=[2], seen_blocks=0),
        ],
        warmup_s=0.0,
        duration_s=3_600.0,
        seed=1,
        key_prefix="k/",
        page_bytes=4_096,
        l2_pages=0,
        deadline_ms=200,
        budget_ms=60_000.0,
        register_rps=0.0,
    )
    pool, stop, before = Slow(), threading.Event(), set(threading.enumerate())
    with HistoryWriter(history) as writer:
        engine = Engine(spec, pool, Recorder(spec, writer), stop)
        runs = threading.Thread(target=engine.run, args=(now_ns(),))
        runs.start()
        assert pool.asked.wait(WAIT_S)
        stop.set()
        runs.join(WAIT_S)
        pool.go.set()
        until(lambda: set(threading.enumerate()) <= before, "its workers have ended")

    requests: Sequence[Request] = read(encode(Run()) + history.read_bytes()).requests
    assert [(row.request, row.outcome, row.cut_short) for row in requests] == [("r1", Outcome.INFO, True)]

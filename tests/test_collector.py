"""The garbage collector beside an event loop."""

from __future__ import annotations

import gc
import subprocess
import sys

from tests.waiting import WAIT_S

CHECK = """
import gc
from kvops import collector

collector.settle()
before = gc.get_stats()[2]["collections"]
held = [[] for _ in range(2_000_000)]
print(gc.get_stats()[2]["collections"] - before, len(gc.get_objects()) > 2_000_000, gc.get_freeze_count() > 1_000)
"""


def test_millions_of_new_objects_cause_no_full_collection() -> None:
    """However much a process comes to hold, no request waits until all of it was walked."""
    answer = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)

    assert answer.stdout.split() == ["0", "True", "True"]
    assert gc.isenabled()


def test_a_sweep_frees_cycles_of_any_age() -> None:
    """What was settled, or has grown old since, is freed all the same: a standby's former directories are such."""
    code = """
import gc, weakref
from kvops import collector
class Cycle:
    def __init__(self): self.own = self
before = Cycle(); refs = [weakref.ref(before)]
collector.settle()
after = Cycle(); refs.append(weakref.ref(after))
gc.collect(0); gc.collect(1)
del before, after
gc.collect(1)
assert all(ref() is not None for ref in refs), "young collections leave them"
collector.sweep()
assert all(ref() is None for ref in refs)
assert gc.get_freeze_count() > 0 and gc.get_threshold()[2] == collector.NEVER
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=WAIT_S
    )

    assert done.returncode == 0, done.stderr

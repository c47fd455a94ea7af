"""The garbage collector beside an event loop."""

from __future__ import annotations

import gc
import subprocess
import sys

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

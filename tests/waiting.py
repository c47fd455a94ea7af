"""How tests wait for what a machine, however busy, does in its own time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvops.errors import KvopsError

# Nobody waits that long unless something is broken: a busy machine may take ten times as long as a quiet one.
WAIT_S = 60.0


def until(condition: Callable[[], Any], what: str, *, timeout_s: float = WAIT_S) -> Any:
    """Wait until a condition holds, or no longer raises an error of kvops; its value."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        trouble: KvopsError | None = None
        try:
            if value := condition():
                return value
        except KvopsError as error:  # a pool in trouble says so until it has settled
            trouble = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"still waiting after {timeout_s} s: {what}") from trouble
        pause.wait(0.01)

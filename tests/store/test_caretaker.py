"""The thread that looks after a pool's connections."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvops.store import caretaker
from kvops.store.breaker import Breaker
from kvops.store.caretaker import Caretaker
from tests.waiting import WAIT_S


def test_close_while_it_is_busy_and_was_woken_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it was told that there is something to do, a pool can be closed."""
    monkeypatch.setattr(caretaker, "PROBE_TIMEOUT_S", 0.01)
    busy, go_on = threading.Event(), threading.Event()

    def stores() -> list[Any]:
        busy.set()
        go_on.wait(WAIT_S)
        return []

    master: Any = SimpleNamespace(breaker=Breaker(rng=random.Random(1)))
    keeper = Caretaker(master, stores, lambda deadline: True, lambda is_open: None)
    try:
        keeper.wake()
        assert busy.wait(WAIT_S)
        for _ in range(1 << 17):  # more than a pipe holds
            keeper.wake()

        keeper.close()
    finally:
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "kvops-caretaker":
                thread.join(WAIT_S)

"""Steps that Ctrl-C must not tear."""

from __future__ import annotations

import signal

import pytest

from kvops.signals import signals_held


def test_held_signals() -> None:
    """Ctrl-C in the middle of a step that must not be torn comes after the step, not never."""
    done = []

    with pytest.raises(KeyboardInterrupt), signals_held():  # noqa: PT012 (the order is the point)
        signal.raise_signal(signal.SIGINT)
        done.append("the step")

    assert done == ["the step"]

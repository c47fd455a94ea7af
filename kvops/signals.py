"""Steps that Ctrl-C must not tear."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_HELD_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """
    Put off Ctrl-C, SIGTERM and SIGHUP until the block is done, then deliver them.

    For steps that must not be torn: a daemon that was started but not yet written down would be lost. Only
    the main thread gets signals; elsewhere this does nothing. Handlers are replaced rather than signals
    blocked, since a blocked mask would be inherited by whatever the block starts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)

    previous = {}
    try:
        for signum in _HELD_SIGNALS:
            if callable(
                signal.getsignal(signum)
            ):  # SIG_DFL and SIG_IGN raise nothing that could tear the block
                previous[signum] = signal.signal(signum, note)
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        for number in arrived:
            signal.raise_signal(number)

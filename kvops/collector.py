"""
The cyclic garbage collector beside an event loop: its pauses must not grow with what the process holds.

A full collection walks every container object: 10 to 15 ms for the modules of a master alone. Reference counts free
nearly everything without it.
"""

from __future__ import annotations

import gc
from typing import Final

NEVER: Final = 1_000_000_000


def ease() -> None:
    """
    Look for cycles a thirtieth as often: a command makes many objects at once, keeps most of them, and ends.

    A fourteenth of the time of judging a snapshot went into looking.
    """
    gc.set_threshold(20_000, 50, 50)


def settle() -> None:
    """
    Take everything that exists now out of the collector's sight, and let it look at young objects only.

    To be called once the process serves. Cycles that live through two young collections are freed by ``sweep`` alone:
    there are none on the paths of requests.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def sweep() -> None:
    """
    Free what is in cycles, whatever its age: 10 to 15 ms, so for a moment at which nobody is served.

    A master's directory is in one. Without this a standby would keep every directory that it ever followed with.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()

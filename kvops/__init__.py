"""Run, drain, diagnose and break (on purpose) the KV-cache pool of an LLM inference cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvops.store.client import Pool as Pool
    from kvops.store.connect import connect as connect
    from kvops.store.model import Outcome as Outcome
    from kvops.store.model import PutOptions as PutOptions
    from kvops.store.model import Reason as Reason

__all__ = ["Outcome", "Pool", "PutOptions", "Reason", "__version__", "connect"]

_HOMES = {
    "Outcome": "kvops.store.model",
    "Pool": "kvops.store.client",
    "PutOptions": "kvops.store.model",
    "Reason": "kvops.store.model",
    "connect": "kvops.store.connect",
}


def __getattr__(name: str) -> Any:
    """Import the client on first use: `kvops --version` must not load numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What completion in a Python shell offers: also what is not imported yet."""
    return sorted({*globals(), *__all__})

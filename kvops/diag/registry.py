"""
Every check, declared like data: id, what it looks at, why it hurts and how to mend it.

A check is a generator over facts. It yields findings; yielding nothing means ok. It raises :class:`Skip`
where it does not apply and lets :class:`Unseen` pass where a fact is missing. With ``per`` the runner calls
it once a subject (port, target, PCI function), so that one port that cannot be seen hides none of the
others.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from kvops.diag.facts.host import HostFacts
from kvops.diag.model import Finding

CheckFunction = TypeVar("CheckFunction", bound=Callable[..., Iterator[Finding]])


class Per(StrEnum):
    """What a check is called for, one call each."""

    HOST = "host"
    DEVICE = "device"  # RDMA devices in scope
    PORT = "port"  # their ports
    ROCE = "roce"  # ports that speak RoCE (Ethernet, neither iWARP nor EFA)
    IB = "ib"  # InfiniBand ports
    FUNCTION = "function"  # PCI functions of RDMA devices in scope
    TARGET = "target"  # processes to be judged
    USE = "use"  # (target, RoCE port, GID index) in use
    FLEET = "fleet"  # all nodes at once


class Kind(StrEnum):
    """How a check comes to its verdict."""

    STATE = "S"
    RATE = "Δ"  # difference of two samples
    LOG = "L"
    PROBE = "A"  # active, opt-in
    CROSS = "X"  # compares nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check's declaration and its function."""

    id: str
    title: str
    why: str
    source: str
    fix: str
    undo: str
    per: Per
    kind: str
    root: str  # "n", "y", "p" (works with less detail)
    nodes_min: int  # a fleet check is skipped below this many nodes
    function: Callable[..., Iterator[Finding]]

    @property
    def family(self) -> str:
        return self.id.partition(".")[0]


_CHECKS: dict[str, Check] = {}


def check(
    id: str,
    *,
    title: str,
    why: str,
    source: str,
    fix: str,
    undo: str = "",
    per: Per = Per.HOST,
    kind: str = "S",
    root: str = "n",
    nodes_min: int = 2,
) -> Callable[[CheckFunction], CheckFunction]:
    """Declare a check. The id is ``family.what_is_wrong`` and is never used again for anything else."""

    def register(function: CheckFunction) -> CheckFunction:
        assert id not in _CHECKS, f"check {id} is declared twice"
        _CHECKS[id] = Check(
            id=id,
            title=title,
            why=why,
            source=source,
            fix=fix,
            undo=undo,
            per=per,
            kind=kind,
            root=root,
            nodes_min=nodes_min,
            function=function,
        )
        return function

    return register


def checks() -> dict[str, Check]:
    """Every check by id, in the order of the families' files."""
    from kvops.diag import checks as families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
    return _CHECKS


def subjects_of(host: HostFacts, per: Per) -> Sequence[Any]:
    """
    What a check is called for on this host.

    Raises:
        Unseen: The host's RDMA devices or targets could not be seen.
        Skip: There are none.
    """
    match per:
        case Per.DEVICE:
            return host.judged(host.devices_in_scope, "RDMA device")
        case Per.FUNCTION:
            return host.judged([d for d in host.devices_in_scope if d.pci is not None], "RDMA device on PCI")
        case Per.PORT:
            return host.judged(host.ports, "RDMA port")
        case Per.ROCE:
            return host.judged([p for p in host.ports if p.is_roce], "RoCE port")
        case Per.IB:
            return host.judged([p for p in host.ports if p.is_infiniband], "InfiniBand port")
        case Per.TARGET:
            return host.judged(host.targets, "target process")
        case Per.USE:
            return host.judged(host.gid_uses, "RoCE port used by a target")
        case Per.HOST | Per.FLEET:
            raise AssertionError("these have no subjects")

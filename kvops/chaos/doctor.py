"""What this machine offers to faults: privileges, kernel features, programs, and what was left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvops.chaos import nft
from kvops.chaos.faults import catalogue
from kvops.chaos.ledger import Book
from kvops.errors import UsageError

PROGRAMS = {
    "nft": "nftables",
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "strace": "strace",
    "cc": "gcc",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault on this machine."""

    fault: str
    available: bool
    backend: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """One machine, looked at."""

    facts: dict[str, str]
    faults: list[Finding]
    dirty: list[str]


def examine(state_dir: Path, names: Sequence[str] = ()) -> Examination:
    """
    Look at this machine; nothing is changed.

    Args:
        state_dir: Where ledgers lie.
        names: Of faults, or of areas (``net``); none: all.

    Raises:
        UsageError: No such fault.
    """
    faults: dict[str, Any] = catalogue()
    chosen = list(faults)
    if names:
        chosen = []
        for name in names:
            found = [one for one in faults if one == name or one.startswith(f"{name}.")]
            if not found:
                near = get_close_matches(name, faults, n=1)
                hint = f"did you mean {near[0]}?" if near else "see kvops chaos catalog"
                raise UsageError(f"there is no fault {name!r}", fix=hint)
            chosen += found
    findings = []
    for name in dict.fromkeys(chosen):
        here = faults[name].here()
        findings.append(
            Finding(
                fault=name, available=here.missing is None, backend=here.backend, reason=here.missing or ""
            )
        )
    return Examination(facts=_facts(), faults=findings, dirty=[one.id for one in Book(state_dir).dirty()])


def _facts() -> dict[str, str]:
    v1 = Path("/sys/fs/cgroup/cpu").is_dir()
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    facts = {
        "kernel": os.uname().release,
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "control groups": "version 2" if v2 else "version 1" if v1 else "none",
    }
    from kvops.chaos.faults.net import netem_missing

    netem, queue = netem_missing(), nft.queue_missing()
    facts["netem"] = netem or "there: net.netem"
    facts["NFQUEUE"] = queue or "there; no fault uses it"
    facts["delay and loss"] = "net.delay by a proxy, net.loss by nft" + (
        "" if netem else "; net.netem in labs"
    )
    for program, package in PROGRAMS.items():
        facts[program] = shutil.which(program) or f"not installed: apt install {package}"
    return facts

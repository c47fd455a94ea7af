"""
The pages under ``playbooks/``, one a family, written from the checks themselves so that they cannot drift
apart.

``python -m kvops.diag.playbook playbooks`` writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvops.diag.registry import Check, Kind, Per, checks
from kvops.diag.report import EXPLAINS

FAMILIES = {
    "cpu": "CPU: whatever lets a polling thread wait",
    "ctr": "Counters and rates",
    "driver": "Driver and firmware",
    "gdr": "GPUDirect",
    "gid": "GIDs and RoCE version",
    "iommu": "IOMMU",
    "ip": "IP, routes, ARP",
    "k8s": "Kubernetes, containers, clouds",
    "limits": "Limits of NIC, process and host",
    "link": "Links, ports, bonds, InfiniBand",
    "mem": "Memory, locking, registration",
    "mtu": "MTU",
    "numa": "NUMA",
    "ovs": "Open vSwitch and offload",
    "pcie": "PCIe",
    "probe": "Active probes",
    "proc": "The process and its environment",
    "qos": "Priorities, PFC, ECN, congestion control",
    "time": "Time",
    "xnode": "Nodes compared",
}
_KINDS = {
    Kind.STATE.value: "state",
    Kind.RATE.value: "two samples",
    Kind.LOG.value: "log",
    Kind.PROBE.value: "active probe",
    Kind.CROSS.value: "several nodes",
}
_ROOT = {"n": "any user", "y": "root", "p": "any user, root sees more"}


def section(check: Check) -> str:
    """One check's part of its page: symptom, confirm, fix, undo, verify."""
    kinds = " or ".join(_KINDS[kind] for kind in check.kind.split("/"))
    caused = [cause for cause, effects in EXPLAINS.items() if check.id in effects]
    nodes = "--host A --host B " if check.per is Per.FLEET and check.nodes_min > 1 else ""
    verify = f"kvops diagnose {nodes}--only {check.id}"
    lines = [
        f"## {check.id}",
        "",
        f"{check.title}. ({kinds}; {_ROOT[check.root]})",
        "",
        f"- **Symptom**: {check.why}",
        f"- **Confirm**: look at {check.source}; `{verify} -v` prints the values.",
        f"- **Fix**: {check.fix}.",
        f"- **Undo**: {check.undo or 'nothing to undo, or put the part or setting back as it was'}.",
        f"- **Verify**: `{verify}` says ok"
        + (", with traffic and a window of at least 10 s." if "Δ" in check.kind else "."),
    ]
    if caused:
        lines.append(f"- **Often caused by**: {', '.join(caused)}.")
    return "\n".join(lines) + "\n"


def page(family: str) -> str:
    """A family's page."""
    mine = [check for check in checks().values() if check.family == family]
    contents = "\n".join(f"- [{check.id}](#{check.id.replace('.', '')}): {check.title}" for check in mine)
    return f"# {FAMILIES[family]}\n\n{contents}\n\n" + "\n".join(section(check) for check in mine)


def main() -> None:
    """Write every page into the folder that was named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        (folder / f"{family}.md").write_text(page(family), encoding="utf-8")


if __name__ == "__main__":
    main()

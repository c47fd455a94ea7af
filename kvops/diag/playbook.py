"""
The pages under ``playbooks/``, one a family, written from the checks themselves so that they cannot drift
apart.

``python -m kvops.diag.playbook playbooks`` writes them.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from kvops.diag.explain import SYMPTOMS
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


_REMEDY_KEYS = ("confirm", "fix", "keep", "undo", "leave")
# What a line of a remedy begins with if it is to be typed; anything else is said in words.
_PROGRAMS = """apt-get apt-mark arping awk aws capsh cat chronyc cma_roce_mode cpupower dcb devlink df dkms dmesg
echo edac-util ethtool getent grep head ib_read_bw ib_write_bw ib_write_lat ibv_devices ibv_devinfo
ip journalctl kubectl kvops ldconfig lldpctl lldptool ls lsmod lspci mlnx_qos mlxconfig mlxfwmanager
mlxfwreset mlxlink mlxreg modinfo modprobe mount mstflint nc nft nstat numactl nvidia-smi ovs-appctl
ovs-vsctl pgrep pip3 ping printf prlimit ps rdma rm rping sed set_irq_affinity_bynode.sh setpci
show_gids sminfo sort ss ssh sysctl systemctl systemd-detect-virt tcpdump tr tuned-adm uname unset
vmstat for export /etc/init.d/openibd"""
_TYPED = re.compile(rf"(?:v=\$|[A-Z][A-Z0-9_]*=|(?:{'|'.join(map(re.escape, _PROGRAMS.split()))})(?=[ ;]|$))")
_VARIABLES = """Set these first; commands below use them:

```sh
DEV=mlx5_0 PORT=1 IF=ens1 BDF=0000:18:00.0   # the NIC: rdma link show; lspci -D -d 15b3:
PID=$(pgrep -of mooncake_client) PEER=10.0.0.3 GID=3   # the store, a peer's address on this rail, the GID index in use
```
"""


class Remedy(NamedTuple):
    """What to type for one check: lines by heading, in the order of the file."""

    confirm: tuple[str, ...]
    fix: tuple[str, ...]
    keep: tuple[str, ...]  # whether the fix persists, and what makes it
    undo: tuple[str, ...]
    leave: tuple[str, ...]  # when it is harmless


def remedies(family: str) -> dict[str, Remedy]:
    """
    The remedies of a family by check id, read from ``remedies/<family>.txt``.

    A file holds ``[check.id]`` lines, below each ``heading text`` lines with one of those headings.
    """
    text = resources.files("kvops.diag.remedies").joinpath(f"{family}.txt").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[str]]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("["):
            current = line.strip("[]")
            found[current] = {key: [] for key in _REMEDY_KEYS}
        elif line:
            key, _, rest = line.partition(" ")
            found[current][key].append(rest)
    return {
        check: Remedy(**{key: tuple(lines) for key, lines in kept.items()}) for check, kept in found.items()
    }


def is_typed(line: str) -> bool:
    """Whether a remedy's line is a command, not a sentence."""
    return _TYPED.match(line) is not None


def _block(lines: Sequence[str]) -> list[str]:
    """Commands in a block, sentences outside it, in their order."""
    text: list[str] = []
    for typed, members in itertools.groupby(lines, key=is_typed):
        group = list(members)
        text += ["```sh", *group, "```"] if typed else [f"{_sentence(line)}" for line in group]
    return text


def _sentence(line: str) -> str:
    body = line if is_typed(line) else line[0].upper() + line[1:]
    return body if body.endswith((".", "!", "?")) else body + "."


def section(check: Check) -> str:
    """One check's part of its page: symptom, confirm, fix, persistence, undo, verify."""
    remedy = remedies(check.family)[check.id]
    kinds = " or ".join(_KINDS[kind] for kind in check.kind.split("/"))
    caused = [cause for cause, effects in EXPLAINS.items() if check.id in effects]
    said = [symptom.meaning for symptom in SYMPTOMS if check.id in symptom.checks]
    nodes = "--host A --host B " if check.per is Per.FLEET and check.nodes_min > 1 else ""
    verify = f"kvops diagnose {nodes}--only {check.id}"
    when = "says ok, with traffic and a window of at least 10 s." if "Δ" in check.kind else "says ok."
    lines = [f"## {check.id}", "", f"{check.title}. ({kinds}; {_ROOT[check.root]})", ""]
    lines += [f"**Symptom.** {check.why}", *(f"Engines report it as: {_sentence(text)}" for text in said), ""]
    lines += [f"**Confirm.** The finding rests on {check.source}.", ""]
    lines += [*_block([*remedy.confirm, f"{verify} -v"]), ""]
    lines += [f"**Fix.** {_sentence(check.fix)}", "", *_block(remedy.fix), ""]
    lines += ["**Persists.**", "", *_block(remedy.keep), ""]
    lines += ["**Undo.**", "", *_block(remedy.undo), ""]
    lines += [f"**Verify.** `{verify}` {when}", ""]
    lines += ["**Leave it alone.**", *(_sentence(line) for line in remedy.leave), ""]
    if caused:
        lines += [f"**Often caused by** {', '.join(caused)}.", ""]
    return "\n".join(lines)


def page(family: str) -> str:
    """A family's page."""
    mine = [check for check in checks().values() if check.family == family]
    contents = "\n".join(f"- [{check.id}](#{check.id.replace('.', '')}): {check.title}" for check in mine)
    return f"# {FAMILIES[family]}\n\n{contents}\n\n{_VARIABLES}\n" + "\n".join(
        section(check) for check in mine
    )


def main() -> None:
    """Write every page into the folder that was named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        (folder / f"{family}.md").write_text(page(family), encoding="utf-8")


if __name__ == "__main__":
    main()

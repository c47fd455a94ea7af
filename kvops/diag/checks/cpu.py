"""CPU: whatever lets a polling thread wait."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.model import Finding, Skip, Unseen, info, warn
from kvops.diag.parsers import proc, sysfs
from kvops.diag.registry import check
from kvops.host import Sight

EXIT_LATENCY_US_MAX = 50  # [E]
STEAL_PERCENT_MAX = 1.0  # [E]
STEAL_COLUMN = 7


@check(
    "cpu.governor",
    title="CPUs run at full clock",
    why="A governor that follows the load adds latency jitter.",
    source="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    fix="cpupower frequency-set -g performance (or tuned-adm profile network-latency)",
    undo="cpupower frequency-set -g schedutil",
)
def governor(host: HostFacts) -> Iterator[Finding]:
    folder = "/sys/devices/system/cpu"
    cpus = [name for name in host.ls(folder) if re.fullmatch(r"cpu\d{1,5}", name, re.ASCII)]
    paths = [f"{folder}/{cpu}/cpufreq/scaling_governor" for cpu in cpus]
    if not any(host.peek(path) for path in paths):
        policies = attempt(lambda: host.ls(f"{folder}/cpufreq")) or ()
        paths = [
            f"{folder}/cpufreq/{policy}/scaling_governor"
            for policy in policies
            if policy.startswith("policy")
        ]
    modes: dict[str, list[str]] = {}
    for path in paths:
        text = host.peek(path)
        if text is not None:
            modes.setdefault(sysfs.parse_word(text), []).append(path)
    if not modes:
        raise Skip("no frequency scaling here")
    for mode, where in modes.items():
        if mode == "performance":
            continue
        driver = (host.peek(where[0].replace("scaling_governor", "scaling_driver")) or "").strip()
        evidence = [host.at(where[0])]
        if mode == "powersave" and driver in ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp"):
            yield info(
                "CPU governor",
                f"powersave on {len(where)} CPUs, by {driver}: follows the load by itself",
                "performance",
                evidence=evidence,
            )
        else:
            yield warn(
                "CPU governor",
                f"{mode} on {len(where)} CPUs",
                "performance",
                fix="cpupower frequency-set -g performance",
                persists=False,
                evidence=evidence,
            )


@check(
    "cpu.cstates",
    title="Idle CPUs wake fast",
    why="Leaving a deep idle state takes longer than a small transfer; threads that poll never enter one.",
    source="/sys/devices/system/cpu/cpu0/cpuidle/state*/{latency,disable}",
    fix="tuned-adm profile network-latency, or hold /dev/cpu_dma_latency open",
    undo="tuned-adm profile throughput-performance",
)
def cstates(host: HostFacts) -> Iterator[Finding]:
    folder = "/sys/devices/system/cpu/cpu0/cpuidle"
    for state in host.ls(folder):
        latency = attempt(lambda: host.number(f"{folder}/{state}/latency"))
        disabled = attempt(lambda: host.number(f"{folder}/{state}/disable"))
        if latency is not None and latency > EXIT_LATENCY_US_MAX and not disabled:
            yield info(
                f"idle {state}",
                f"{latency} µs to wake",
                f"at most {EXIT_LATENCY_US_MAX} µs",
                evidence=[host.at(f"{folder}/{state}/latency")],
            )


@check(
    "cpu.steal",
    title="The hypervisor gives the guest its CPUs",
    why="Stolen time is jitter that no setting in the guest can mend.",
    source="/proc/stat, column steal",
    fix="ask for dedicated CPUs",
    kind="Δ",
)
def steal(host: HostFacts) -> Iterator[Finding]:
    window_s = host.need_window()
    before, after = (proc.parse_cpu_ticks(host.text("/proc/stat", sample)) for sample in (0, 1))
    if len(before) <= STEAL_COLUMN or len(after) <= STEAL_COLUMN:
        raise Unseen("/proc/stat: steal", Sight.ABSENT)
    # guest time (columns 8 and 9) is counted in user time already
    total = sum(after[: STEAL_COLUMN + 1]) - sum(before[: STEAL_COLUMN + 1])
    percent = 100 * (after[STEAL_COLUMN] - before[STEAL_COLUMN]) / total if total > 0 else 0.0
    if percent > STEAL_PERCENT_MAX:
        yield warn(
            "CPU steal",
            f"{percent:.2f} % over {window_s:g} s",
            f"at most {STEAL_PERCENT_MAX:g} %",
            fix="move to a dedicated host or instance type",
            persists=True,
            evidence=[host.at("/proc/stat", f"steal {before[STEAL_COLUMN]} → {after[STEAL_COLUMN]}")],
        )


@check(
    "cpu.softirq",
    title="The kernel's receive queues keep up",
    why="Dropped packets of the control path (handshake over TCP) make connections slow; RDMA data are "
    "not concerned.",
    source="/proc/net/softnet_stat, column 2",
    fix="sysctl -w net.core.netdev_max_backlog=250000; spread receive queues (RPS)",
    undo="write the former value",
    kind="Δ",
)
def softirq(host: HostFacts) -> Iterator[Finding]:
    window_s = host.need_window()
    before, after = (
        proc.parse_softnet_drops(host.text("/proc/net/softnet_stat", sample)) for sample in (0, 1)
    )
    if after > before:
        yield warn(
            "receive backlog",
            f"{after - before} packets dropped in {window_s:g} s",
            "0",
            fix="sysctl -w net.core.netdev_max_backlog=250000",
            persists=False,
            evidence=[host.at("/proc/net/softnet_stat", f"dropped {before} → {after}")],
        )

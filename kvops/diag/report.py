"""From results to a verdict: causes, what each explains, what could not be seen, and one document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvops.diag.facts import HostFacts, attempt
from kvops.diag.model import LOUD, Finding, Outcome, Result
from kvops.diag.rails import rails_of
from kvops.diag.registry import Check, checks
from kvops.errors import ConfigError
from kvops.host import Sight

SCHEMA = 1
_ORDER = list(Outcome)  # from worst to best

_LOSS = ("ctr.retransmit_rate", "ctr.timeout_rate", "ctr.jitter", "proc.first_error", "xnode.peer_counters")
_UNREACHED = ("ip.neigh_failed", "xnode.rail_connectivity", "probe.udp_4791", "probe.rping", *_LOSS)
_SLOW = (
    "ctr.pause_share",
    "pcie.stall",
    "probe.pair_bandwidth",
    "probe.bidirectional",
    "probe.loopback_host",
)

# What a cause explains: its consequences, and the same fault seen from elsewhere. Directed and without circles; the
# chains are those of the symptom index and of the "why it hurts" column of the catalogue.
EXPLAINS: dict[str, tuple[str, ...]] = {
    "driver.fw_package": ("driver.device_count", "driver.rdma_protocol", "proc.device_names"),
    "driver.device_unbound": ("driver.device_count", "proc.device_names", "k8s.allocatable"),
    "driver.modules_loaded": (
        "driver.device_count",
        "driver.char_devices",
        "proc.device_names",
        "k8s.allocatable",
    ),
    "driver.char_devices": ("k8s.allocatable", "k8s.plugin_socket"),
    "driver.rdma_protocol": ("gid.no_routable", "gid.index_out_of_range", "gid.table_empty"),
    "driver.vf_revoked": ("link.flap", "gid.changed", *_LOSS),
    "driver.health": ("link.flap", "driver.kernel_log", "ctr.pause_storm", *_LOSS),
    "driver.module_temp": ("link.flap", "link.symbol_errors", "link.ber", *_LOSS),
    "driver.dpu_mode": _UNREACHED,
    "driver.ofed_mismatch": ("gdr.peermem_symbol", "gdr.peermem_loaded"),
    "gdr.peermem_symbol": ("gdr.peermem_loaded", "gdr.dmabuf"),
    "gdr.peermem_loaded": ("gdr.dmabuf",),
    "gdr.gpu_lost": ("pcie.device_lost",),
    "pcie.device_lost": ("driver.device_count", "link.port_state", "proc.device_names"),
    "pcie.link_width": ("pcie.capacity", *_SLOW),
    "pcie.link_speed": ("pcie.capacity", *_SLOW),
    "pcie.capacity": _SLOW,
    "pcie.aer_errors": ("pcie.link_width", "pcie.link_speed", "pcie.capacity", *_SLOW),
    "pcie.acs_redirect": ("probe.gpu_vs_host", *_SLOW, *_LOSS),
    "pcie.max_read_request": _SLOW,
    "pcie.stall": ("ctr.pause_share", "ctr.discards", "qos.global_pause"),
    "iommu.cmdline_invalid": ("iommu.domain_type", *_SLOW),
    "iommu.domain_type": _SLOW,
    "numa.nic_pinning": ("numa.store_per_node", "numa.balancing", *_SLOW),
    "numa.store_per_node": _SLOW,
    "link.port_state": (
        "link.netdev_down",
        "link.rate",
        "gid.table_empty",
        "gid.no_routable",
        "ip.address_missing",
        "ctr.nic_imbalance",
        "driver.char_devices",
        *_UNREACHED,
    ),
    "link.symbol_errors": ("link.ber", "ctr.icrc", *_LOSS),
    "link.flap": ("gid.changed", *_LOSS),
    "link.width": ("link.rate", "ctr.nic_imbalance"),
    "link.bond_mode": ("gid.duplicate", "mtu.bond_members", *_LOSS),
    "link.netdev_down": ("gid.table_empty", "gid.no_routable", "ip.address_missing", *_UNREACHED),
    "link.ib_sm": ("link.port_state", *_UNREACHED),
    "link.pkey_membership": _UNREACHED,
    "ip.mac_multicast": ("gid.table_empty", "gid.no_routable"),
    "ip.ipv6_disabled": ("gid.no_routable", "gid.table_empty", "ip.address_missing"),
    "ip.address_missing": ("gid.no_routable", "gid.link_local_selected", "gid.table_empty"),
    "ip.arp_flux": ("ip.subnet_overlap", "ip.rp_filter", *_UNREACHED),
    "ip.peer_route": ("ip.rp_filter", "ip.source_rules", *_UNREACHED),
    "ip.rp_filter": ("ip.source_rules", "ip.neigh_failed"),
    "ip.neigh_overflow": ("ip.neigh_failed", *_LOSS),
    "gid.link_local_selected": (
        "gid.index_consistency",
        "gid.no_routable",
        "gid.family_mismatch",
        *_UNREACHED,
    ),
    "gid.index_consistency": (
        "gid.type_v1_selected",
        "gid.index_empty",
        "xnode.env_drift",
        "gid.family_mismatch",
        *_UNREACHED,
    ),
    "gid.type_v1_selected": _UNREACHED,
    "gid.table_empty": ("gid.no_routable", "k8s.pod_rdma_netdev", *_UNREACHED),
    "gid.netns_mismatch": ("k8s.pod_rdma_netdev", *_UNREACHED),
    "k8s.pod_rdma_netdev": ("gid.no_routable",),
    "k8s.dev_infiniband": (
        "driver.userspace_libs",
        "proc.device_names",
        "ctr.hw_counter_flow",
        "driver.userspace_abi",
    ),
    "k8s.vf_settings": ("ip.neigh_failed", "link.rate"),
    "driver.userspace_libs": ("ctr.hw_counter_flow",),
    "driver.userspace_abi": ("ctr.hw_counter_flow", "proc.device_names"),
    "proc.protocol": ("ctr.hw_counter_flow",),
    "mem.memlock_limit": ("k8s.ipc_lock", "mem.pin_budget", "probe.reg_mr"),
    "mem.mkey_resources": ("driver.kernel_log", "limits.cq_mr_capacity", "mem.max_map_count", "probe.reg_mr"),
    "limits.qp_capacity": ("driver.kernel_log",),
    "mem.cgroup_limit": ("mem.oom_events",),
    "mem.hugepages": ("numa.hugepage_balance", "k8s.hugepages"),
    "mem.hugepage_fragmented": ("mem.hugepages", "numa.hugepage_balance"),
    "mtu.peer_mismatch": (
        "mtu.app_vs_active",
        "mtu.below_max",
        "ctr.local_errors",
        "xnode.config_drift",
        *_LOSS,
    ),
    "mtu.bond_members": ("mtu.active_vs_netdev", "mtu.peer_mismatch"),
    "mtu.path_mtu": ("probe.mtu_ladder", *_LOSS),
    "qos.trust_mode": (
        "qos.lossless_vlan0",
        "qos.tclass_mapping",
        "qos.cross_nic",
        "ctr.discards",
        "xnode.config_drift",
        *_LOSS,
    ),
    "qos.direction_asymmetry": (
        "qos.trust_mode",
        "qos.lossless_vlan0",
        "qos.tclass_mapping",
        "qos.cross_nic",
        "xnode.config_drift",
        "xnode.env_drift",
        "ctr.discards",
        *_LOSS,
    ),
    "qos.tclass_mapping": ("ctr.discards", "xnode.env_drift", *_LOSS),
    "qos.pfc_enabled": ("ctr.discards", "qos.cross_nic", *_LOSS),
    "qos.buffer": ("ctr.discards", *_LOSS),
    "qos.global_pause": ("ctr.pause_share",),
    "qos.cross_nic": ("xnode.config_drift",),
    "qos.dcbx_owner": ("qos.pfc_enabled", "qos.trust_mode"),
    "ctr.discards": _LOSS,
    "ctr.timeout_rate": ("ctr.retransmit_rate", "proc.first_error"),
    "ovs.hw_offload": ("ovs.flow_not_offloaded", "ovs.eswitch_mode", "mtu.ovs_bridge"),
    "ovs.eswitch_mode": ("ovs.flow_not_offloaded",),
    "ovs.flow_not_offloaded": ("ovs.lost_upcalls",),
    "xnode.rail_connectivity": _LOSS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One check whose findings explain most, and what else it explains."""

    check: Check
    severity: Outcome
    results: tuple[Result, ...]  # its own
    explained: tuple[Result, ...]  # others that follow from it

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(result.node for result in (*self.results, *self.explained)))


def playbook(check: Check) -> str:
    """Where the page of a check lies."""
    return f"playbooks/{check.family}.md#{check.id.replace('.', '')}"


def causes(results: Iterable[Result]) -> list[Cause]:
    """
    Group what is loud by the cause that explains most of it; the most harmful first.

    A cause explains a consequence only where both were found: on the same node, or in a comparison of nodes.
    """
    loud = [result for result in results if result.outcome in LOUD]
    table = checks()
    left = list(loud)
    found: list[Cause] = []

    def follows(cause: str, effect: Result, nodes: set[str]) -> bool:
        near = effect.node in nodes or "fleet" in nodes or effect.node == "fleet"
        return near and effect.check in EXPLAINS.get(cause, ())

    while left:
        best: tuple[tuple[int, int, int], str, list[Result], list[Result]] | None = None
        for cause in dict.fromkeys(result.check for result in left):
            own = [result for result in left if result.check == cause]
            nodes = {result.node for result in own}
            effects = [r for r in left if r.check != cause and follows(cause, r, nodes)]
            # What is itself a consequence of something that was found is never chosen before its cause.
            rank = sum(r.check != cause and cause in EXPLAINS.get(r.check, ()) for r in loud)
            fails = sum(r.outcome is Outcome.FAIL for r in (*own, *effects))
            key = (-rank, len(effects) + len(own), fails)
            if best is None or key > best[0]:
                best = (key, cause, own, effects)
        assert best is not None
        _, cause, own, effects = best
        taken = {id(result) for result in (*own, *effects)}
        left = [result for result in left if id(result) not in taken]
        severity = min((r.outcome for r in (*own, *effects)), key=_ORDER.index)
        found.append(
            Cause(check=table[cause], severity=severity, results=tuple(own), explained=tuple(effects))
        )
    return sorted(found, key=lambda c: (_ORDER.index(c.severity), -len(c.explained) - len(c.results)))


def verdict(results: Sequence[Result], *, unreached: bool = False) -> Outcome:
    """The whole in one word: FAIL, WARN, UNKNOWN (of what was asked for, or a host not reached) or OK."""
    outcomes = {result.outcome for result in results}
    for outcome in (Outcome.FAIL, Outcome.WARN):
        if outcome in outcomes:
            return outcome
    return Outcome.UNKNOWN if unreached or any(r.asked for r in results) else Outcome.OK


def exit_code(results: Sequence[Result], *, fail_on: str = "fail") -> int:
    """
    0 clean, 1 the answer is no, 3 something that was asked for could not be seen.

    Asked for is what the collection set out to read and was refused, what failed, hung or crashed, and
    every check that was named with ``--only``. What a snapshot never held, or a tool that is not installed,
    is unknown and no more.
    """
    outcomes = {result.outcome for result in results}
    unseen = any(r.asked for r in results)
    worse: dict[str, set[Outcome]] = {"fail": set(), "warn": {Outcome.WARN}, "unknown": {Outcome.UNKNOWN}}
    enough = worse[fail_on] | {Outcome.FAIL}
    if outcomes & enough:
        return 1
    return 3 if unseen else 0


def path_of(host: HostFacts, results: Sequence[Result]) -> list[tuple[str, Outcome]]:
    """The way of a transfer, hop by hop, each with the worst that was found there on any rail."""
    rails = rails_of(host, results)
    return [
        (hops[0].stage, min((hop.outcome for hop in hops), key=_ORDER.index))
        for hops in zip(*(rail.hops for rail in rails), strict=True)
    ]


def path_text(host: HostFacts, results: Sequence[Result]) -> str:
    """``store store0 ok → NIC mlx5_0/1 ✗ → PCIe 0000:18:00.0 ok → …`` of the worst rail."""
    rails = rails_of(host, results)
    alike = sum(rail.outcome is rails[0].outcome for rail in rails)
    more = f"   ({alike} of {len(rails)} rails {rails[0].outcome})" if len(rails) > 1 else ""
    return rails[0].text + more


def unseen_groups(results: Iterable[Result]) -> list[tuple[str, list[str], bool]]:
    """(reason, checks, asked for) of what could not be seen, the most checks first."""
    groups: dict[tuple[str, bool], dict[str, None]] = {}
    for result in results:
        if result.outcome is Outcome.UNKNOWN:
            reason = result.reason.rpartition(": ")[2] if result.unseen else result.reason
            groups.setdefault((reason, result.asked), {})[result.check] = None
    rows = [(reason, list(names), asked) for (reason, asked), names in groups.items()]
    return sorted(rows, key=lambda row: (not row[2], -len(row[1])))


def needs_root(nodes: Iterable[HostFacts], results: Iterable[Result]) -> list[str]:
    """
    Checks that root would see more for, of hosts that were looked at by another user.

    Those that are unknown because something was refused, or because the collector as that user could not ask
    for what root may; what is not installed stays unseen for root, too.
    """
    others = {host.name for host in nodes if host.uid not in (0, None)}
    table = checks()
    found: dict[str, None] = {}
    for result in results:
        if result.outcome is not Outcome.UNKNOWN or result.node not in others:
            continue
        sights = {text.rpartition(": ")[2] for text in result.unseen or (result.reason,)}
        refused = Sight.UNREADABLE in sights
        if refused or (table[result.check].root != "n" and sights - {Sight.NO_TOOL, Sight.ABSENT}):
            found[result.check] = None
    return list(found)


def by_family(names: Iterable[str]) -> str:
    """``pcie.* (3), ip.firewall``: many checks in few words."""
    names = list(names)
    if len(names) <= 2:
        return ", ".join(names)
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.partition(".")[0], []).append(name)
    return ", ".join(
        f"{family}.* ({len(ids)})" if len(ids) > 1 else ids[0] for family, ids in families.items()
    )


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "severity": str(finding.severity),
        "subject": finding.subject,
        "observed": finding.observed,
        "expected": finding.expected,
        "fix": finding.fix,
        "persists": finding.persists,
        "evidence": [item.as_json() for item in finding.evidence],
    }


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "check": result.check,
        "node": result.node,
        "outcome": str(result.outcome),
        "reason": result.reason,
        "findings": [_finding_json(finding) for finding in result.findings],
    }


def _node_json(host: HostFacts, results: Sequence[Result]) -> dict[str, Any]:
    counts = {str(outcome): 0 for outcome in Outcome}
    for result in results:
        if result.node == host.name:
            counts[str(result.outcome)] += 1
    devices = attempt(lambda: host.devices_in_scope)
    return {
        "name": host.name,
        "role": host.role,
        "kernel": host.kernel,
        "uid": host.uid,
        "window_s": host.snapshot.window_s,
        "judged": [device.name for device in devices or ()],
        "listed": attempt(lambda: host.out_of_scope) or {},
        "counts": counts,
        "path": [{"hop": name, "outcome": str(outcome)} for name, outcome in path_of(host, results)],
        "rails": [
            {
                "name": rail.name,
                "hops": [
                    {
                        "hop": h.stage,
                        "devices": list(h.devices),
                        "outcome": str(h.outcome),
                        "checks": list(h.checks),
                    }
                    for h in rail.hops
                ],
            }
            for rail in rails_of(host, results)
        ],
    }


def document(
    nodes: Sequence[HostFacts],
    results: Sequence[Result],
    *,
    fail_on: str = "fail",
    unreached: bool = False,
) -> dict[str, Any]:
    """Everything, as JSON prints it: keys are added, never renamed."""
    return {
        "verdict": str(verdict(results, unreached=unreached)),
        "exit_code": exit_code(results, fail_on=fail_on),
        "nodes": [_node_json(host, results) for host in nodes],
        "causes": [
            {
                "check": cause.check.id,
                "severity": str(cause.severity),
                "title": cause.check.title,
                "why": cause.check.why,
                "nodes": cause.nodes,
                "explains": [{"check": r.check, "node": r.node} for r in cause.explained],
                "findings": [
                    {"node": result.node, **_finding_json(f)}
                    for result in cause.results
                    for f in result.findings
                    if f.severity in LOUD
                ],
                "playbook": playbook(cause.check),
            }
            for cause in causes(results)
        ],
        "unseen": [
            {"reason": r, "checks": names, "asked": asked} for r, names, asked in unseen_groups(results)
        ],
        "needs_root": needs_root(nodes, results),
        "results": [_result_json(result) for result in results],
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, str]]:
    """
    What differs between two documents: checks that got worse first, then better, then findings that changed.

    Raises:
        ConfigError: The older one is no document of ours.
    """
    try:
        old = {(r["check"], r["node"]): r for r in before["results"]}
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "the older document has no results", fix="save it with: kvops diagnose -o json"
        ) from error
    names = {str(outcome): place for place, outcome in enumerate(_ORDER)}
    rows = []
    for result in after["results"]:
        known = old.get((result["check"], result["node"]))
        if known is None or known.get("outcome") not in names:
            continue
        step = names[result["outcome"]] - names[known["outcome"]]
        subjects = [{f["subject"]: f["observed"] for f in r["findings"]} for r in (known, result)]
        if step == 0 and (subjects[0] == subjects[1] or result["outcome"] not in LOUD):
            continue
        rows.append(
            {
                "change": "worse" if step < 0 else "better" if step > 0 else "otherwise",
                "check": result["check"],
                "node": result["node"],
                "was": known["outcome"],
                "now": result["outcome"],
                "observed": "; ".join(f"{k}: {v}" for k, v in subjects[1].items())[:200],
            }
        )
    order = {"worse": 0, "otherwise": 1, "better": 2}
    return sorted(rows, key=lambda row: order[row["change"]])

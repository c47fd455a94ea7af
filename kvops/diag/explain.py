"""From an engine's error text to the checks that explain it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symptom:
    """A pattern of an engine's log, what it means, and which checks to look at first."""

    pattern: str
    meaning: str
    checks: tuple[str, ...]


_UNRESOLVED = ("ip.peer_route", "ip.neigh_failed", "gid.link_local_selected", "gid.netns_mismatch")

SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        r"transport retry counter exceeded|IBV_WC_RETRY_EXC_ERR|vendor.{0,6}(129|0x81)",
        "The peer never acknowledged: not reachable on this NIC, or packets are lost.",
        (
            "link.port_state",
            "ip.peer_route",
            "ip.arp_flux",
            "xnode.rail_connectivity",
            "gid.link_local_selected",
            "gid.index_consistency",
            "mtu.path_mtu",
            "qos.tclass_mapping",
            "qos.pfc_enabled",
            "ctr.timeout_rate",
            "pcie.acs_redirect",
        ),
    ),
    Symptom(
        r"modify QP to RTR.*(\[110\]|timed out|ETIMEDOUT)",
        "The neighbour was not resolved on that NIC.",
        _UNRESOLVED,
    ),
    Symptom(
        r"modify QP to RTR.*(\[22\]|[Ii]nvalid argument|EINVAL)",
        "The GID slot is empty, or the MTU or the outstanding reads are not allowed.",
        (
            "gid.index_empty",
            "gid.table_empty",
            "mtu.app_vs_active",
            "limits.rd_atomic",
            "gid.family_mismatch",
        ),
    ),
    Symptom(
        r"modify QP to RTR.*([Nn]o such device|unreachable|ENODEV|ENETUNREACH)",
        "The GID's interface is not in this namespace, or there is no route.",
        ("gid.netns_mismatch", "k8s.rdma_netns_mode", "ip.peer_route"),
    ),
    Symptom(
        r"modify QP to RTS.*(\[22\]|[Ii]nvalid argument|EINVAL)",
        "The port speaks iWARP, or allows fewer outstanding reads.",
        ("driver.rdma_protocol", "limits.rd_atomic"),
    ),
    Symptom(
        r"RNR retry counter exceeded",
        "The receiver has no buffer posted, or no CPU to post one.",
        ("ctr.rnr", "numa.nic_pinning", "cpu.governor"),
    ),
    Symptom(
        r"local protection error",
        "The memory is not (or no longer) registered as the NIC needs it.",
        ("gdr.peermem_loaded", "gdr.peermem_symbol", "gdr.expandable_segments", "pcie.acs_redirect"),
    ),
    Symptom(
        r"local length error|remote invalid request",
        "The two sides disagree on the MTU.",
        ("mtu.peer_mismatch",),
    ),
    Symptom(
        r"remote access error",
        "The key is wrong: memory registered anew after a restart, or cut.",
        ("mem.max_mr_size", "proc.restart_stale", "ctr.remote_access"),
    ),
    Symptom(
        r"flushed error|WR_FLUSH",
        "A consequence, no cause: look for the first error that is no flush.",
        ("proc.first_error",),
    ),
    Symptom(
        r"register memory.*(\[14\]|Bad address|EFAULT)",
        "The range is mapped read-only, or it is GPU memory without a path to it.",
        ("mem.readonly_mapping", "gdr.peermem_loaded", "gdr.expandable_segments"),
    ),
    Symptom(
        r"register memory.*(\[12\]|Cannot allocate|ENOMEM)",
        "The process may not lock as much.",
        ("mem.memlock_limit", "mem.pin_budget", "k8s.ipc_lock"),
    ),
    Symptom(
        r"register memory.*(\[11\]|EAGAIN|temporarily unavailable)",
        "The NIC's memory keys are used up.",
        ("mem.mkey_resources",),
    ),
    Symptom(
        r"register memory.*(\[5\]|\[22\]|EIO|EINVAL|[Ii]nvalid argument|Input/output)",
        "The region is larger than the device, or the GPU's window, takes.",
        ("mem.max_mr_size", "gdr.bar1_size"),
    ),
    Symptom(
        r"[Cc]reate QP.*Cannot allocate",
        "Queue pairs or locked memory ran out.",
        ("limits.qp_capacity", "mem.memlock_limit"),
    ),
    Symptom(
        r"[Cc]reate CQ.*\[22\]|rdma_create_qp.*\[22\]",
        "Libraries and kernel do not fit, or two devices share one GID.",
        ("driver.userspace_libs", "driver.kernel_drift", "link.bond_mode", "gid.duplicate"),
    ),
    Symptom(
        r"[Nn]o matched device|No IB devices found|no RDMA devices",
        "The names are wrong, or no device opens.",
        ("proc.device_names", "k8s.dev_infiniband", "driver.userspace_abi", "driver.modules_loaded"),
    ),
    Symptom(
        r"port not active",
        "The port is down, or the port number is wrong.",
        ("link.port_state", "proc.ib_port"),
    ),
    Symptom(
        r"GID is NULL|GID \d+ not available",
        "There is no GID at that index.",
        ("gid.table_empty", "gid.index_empty", "gid.index_out_of_range"),
    ),
    Symptom(
        r"ADDR_ERROR.*-19|error: -19",
        "The RDMA subsystem's namespace mode does not fit.",
        ("k8s.rdma_netns_mode",),
    ),
    Symptom(
        r"does not support the kernel ABI", "The image's libraries are too old.", ("driver.userspace_abi",)
    ),
)


def explain_error(text: str) -> list[Symptom]:
    """The symptoms that a text shows, in the order of the index."""
    return [symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text[:100_000])]

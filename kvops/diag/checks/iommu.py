"""IOMMU: whether every DMA is translated, and whether the boot command line says what its author believes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.pci import PciFunction
from kvops.diag.facts.rdma import RdmaDevice
from kvops.diag.model import Finding, Outcome, Skip, Unseen, fail, finding, info
from kvops.diag.registry import Per, check

TRANSLATED = frozenset({"DMA", "DMA-FQ"})  # Documentation/ABI/testing/sysfs-kernel-iommu_groups [K]

# Documentation/admin-guide/kernel-parameters.txt [K]
_ACCEPTED = {
    "intel_iommu": {
        "on",
        "off",
        "igfx_off",
        "forcedac",
        "strict",
        "sp_off",
        "sm_on",
        "sm_off",
        "tboot_noforce",
    },
    "amd_iommu": {"fullflush", "off", "force_isolation", "force_enable", "irtcachedis", "v2_pgsizes_only"}
    | {"pgtbl_v1", "pgtbl_v2", "nohugepages", "nosnp"},
    "iommu": {
        "off",
        "force",
        "noforce",
        "biomerge",
        "merge",
        "nomerge",
        "soft",
        "pt",
        "nopt",
        "allowdac",
        "nodac",
    }
    | {"usedac", "forcesac", "noagp", "noaperture", "fullflush", "panic", "nopanic", "calgary", "strict"},
}


def domain_type(function: PciFunction | None) -> str | None:
    """``identity``, ``DMA``, …; None if the function has no IOMMU group. Raises Unseen."""
    if function is None:
        return None
    host = function.host
    group = host.snapshot.readlink(f"{function.path}/iommu_group")
    if group is None:
        host.ls(function.path)  # raises Unseen unless the function itself was collected
        return None
    return host.text(f"{function.path}/iommu_group/type").strip()


def gpu_peer_to_peer(host: HostFacts) -> bool:
    """Whether a NIC is likely to read and write GPU memory here."""
    if not host.gpus:
        return False
    if host.expect_int("gpu_buffer_bytes"):
        return True
    modules = attempt(lambda: host.modules)
    return modules is None or "nvidia_peermem" in modules or "nv_peer_mem" in modules


def _is_translated(host: HostFacts) -> bool | None:
    """Whether a judged function's DMA is translated; None if nothing tells."""
    devices = attempt(lambda: host.devices_in_scope) or []
    kinds = [attempt(lambda: domain_type(device.pci)) for device in devices]
    seen = [kind for kind in kinds if kind is not None]
    if seen:
        return any(kind in TRANSLATED for kind in seen)
    lines = attempt(lambda: host.log_lines(r"iommu: Default domain type: (\w+)"))
    return any("Translated" in line.text for line in lines) if lines else None


@check(
    "iommu.domain_type",
    title="DMA of the NIC is not translated",
    why="Translation on each DMA costs bandwidth and adds jitter; GPU peer-to-peer through a translated "
    "domain hangs.",
    source="/sys/bus/pci/devices/<bdf>/iommu_group/type, dmesg 'iommu: Default domain type'",
    fix="boot with iommu=pt (and intel_iommu=on where VFs are used), then reboot",
    undo="take iommu=pt off the boot command line and reboot",
    per=Per.FUNCTION,
)
def domain(device: RdmaDevice) -> Iterator[Finding]:
    host, function = device.host, device.pci
    assert function is not None
    if host.is_vm:
        raise Skip("a guest's own IOMMU groups say nothing about the machine's")
    if function.driver == "vfio-pci":
        raise Skip(f"{function.bdf} is handed to a guest on purpose (vfio-pci)")
    kind = domain_type(function)
    if kind is None or kind == "identity":
        return
    if kind in TRANSLATED:
        peer = gpu_peer_to_peer(host)
        yield finding(
            Outcome.FAIL if peer else Outcome.WARN,
            f"{device.name} {function.bdf}",
            f"IOMMU domain type {kind}" + (", with GPUs as peers" if peer else ""),
            "identity (passthrough), or no IOMMU",
            fix="grubby --update-kernel=ALL --args=iommu=pt && reboot",
            persists=True,
            evidence=[host.at(f"{function.path}/iommu_group/type"), host.at("/proc/cmdline")],
        )
    elif kind == "blocked":
        yield fail(
            f"{device.name} {function.bdf}",
            "IOMMU domain type blocked: no DMA is let through",
            "identity",
            fix=f"rebind the driver: echo {function.bdf} > /sys/bus/pci/drivers_probe",
            persists=False,
            evidence=[host.at(f"{function.path}/iommu_group/type")],
        )


@check(
    "iommu.cmdline_invalid",
    title="The kernel accepts the IOMMU options it was booted with",
    why="The operator believes that passthrough is on while the kernel ignored the option.",
    source="/proc/cmdline; dmesg 'AMD-Vi: Unknown option', 'DMAR: Unknown option'",
    fix="spell it iommu=pt on every platform; drop options of the other vendor and those that contradict it",
    undo="restore the former boot command line",
    kind="S/L",
    root="p",
)
def cmdline_invalid(host: HostFacts) -> Iterator[Finding]:
    options: dict[str, str] = {}
    for word in host.kernel_words:
        name, equals, value = word.partition("=")
        if equals and name in _ACCEPTED:
            options[name] = value  # the last one wins, as in the kernel
    problems: list[str] = []
    for name, value in options.items():
        wrong = [
            part
            for part in value.split(",")
            if part and part not in _ACCEPTED[name] and not part.startswith("memaper")
        ]
        if name == "amd_iommu" and wrong == ["on"]:
            yield info(
                "amd_iommu=on", "the kernel ignores it: AMD's IOMMU is on by default", "no such option"
            )
            continue
        problems += [f"{name}={part} is not accepted" for part in wrong]
    if options.get("intel_iommu", "").split(",")[0] == "off" and "pt" in options.get("iommu", "").split(","):
        problems.append("intel_iommu=off contradicts iommu=pt")
    if "off" in options.get("iommu", "").split(",") and "on" in options.get("intel_iommu", "").split(","):
        problems.append("iommu=off contradicts intel_iommu=on")
    if "off" in options.get("amd_iommu", "").split(",") and "pt" in options.get("iommu", "").split(","):
        problems.append("amd_iommu=off contradicts iommu=pt")
    cpu = re.search(r"^vendor_id\s*:\s*(\w+)", host.peek("/proc/cpuinfo") or "", re.MULTILINE)
    alien = {"GenuineIntel": "amd_iommu", "AuthenticAMD": "intel_iommu"}.get(cpu[1]) if cpu else None
    if alien in options and "iommu" not in options and len(options) == 1:
        problems.append(f"{alien}={options[alien]} does nothing on a {cpu[1] if cpu else ''} processor")
    logged = attempt(lambda: host.log_lines(r"(AMD-Vi|DMAR|iommu): Unknown option")) or []
    logged = [line for line in logged if "'on'" not in line.text]
    if not problems and not logged:
        return
    severity = Outcome.FAIL if _is_translated(host) else Outcome.WARN
    yield finding(
        severity,
        "boot command line",
        "; ".join(problems) or logged[0].text,
        "iommu=pt, spelt as the kernel knows it",
        fix="grubby --update-kernel=ALL --remove-args='amd_iommu intel_iommu' --args=iommu=pt && reboot",
        persists=True,
        evidence=[host.at("/proc/cmdline"), *(host.log_evidence(line) for line in logged[:2])],
    )


@check(
    "iommu.sriov_needs",
    title="Virtual functions for guests have an IOMMU",
    why="Without an IOMMU no virtual function can be handed to a guest.",
    source="/sys/bus/pci/devices/<bdf>/sriov_numvfs, /sys/class/iommu",
    fix="enable VT-d or AMD-Vi in the firmware and boot with intel_iommu=on iommu=pt",
    undo="disable it again in the firmware",
)
def sriov_needs(host: HostFacts) -> Iterator[Finding]:
    functions = [f for f in host.pci if (attempt(lambda: host.number(f"{f.path}/sriov_numvfs")) or 0) > 0]
    if not functions:
        raise Skip("no virtual functions")
    modules = attempt(lambda: host.modules) or {}
    to_guests = [f for f in host.pci if f.driver == "vfio-pci"]
    if not to_guests and "vfio_pci" not in modules:
        raise Skip("the virtual functions are not handed to guests (no vfio-pci)")
    try:
        instances = list(host.ls("/sys/class/iommu"))
    except Unseen as unseen:
        if not unseen.absent:
            raise
        instances = []
    if instances:
        return
    for function in functions:
        yield fail(
            function.bdf,
            f"{host.number(f'{function.path}/sriov_numvfs')} virtual functions, no IOMMU instance",
            "an IOMMU: guests cannot be given a function without one",
            fix="enable VT-d/AMD-Vi in the firmware; grubby --update-kernel=ALL --args='intel_iommu=on "
            "iommu=pt'; reboot",
            persists=True,
            evidence=[host.at(f"{function.path}/sriov_numvfs"), host.at("/sys/class/iommu")],
        )

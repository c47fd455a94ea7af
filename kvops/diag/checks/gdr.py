"""GPUDirect: whether the NIC can read and write GPU memory, and whether the bytes are right."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvops.diag.checks.iommu import gpu_peer_to_peer
from kvops.diag.checks.mem import gib
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.facts.target import Target
from kvops.diag.model import Finding, Outcome, Skip, Unseen, fail, finding, warn
from kvops.diag.parsers import misc, proc, sysfs
from kvops.diag.registry import Per, check
from kvops.host import Sight

DMABUF_KERNEL = (5, 12)  # [K]
SMALL_BAR1_BYTES = 256 << 20  # [C36]
PEERMEM = ("nvidia_peermem", "nv_peer_mem")


def _wants_gpu(host: HostFacts) -> bool:
    """Whether somebody means to register GPU memory; Skip where nobody does."""
    if host.expect_int("gpu_buffer_bytes"):
        return True
    for target in host.targets:
        words = " ".join(attempt(lambda: target.command_line) or [])
        if re.search(r"use_vram|gpu_direct|cuda|--gpu", words):
            return True
        log = target.log
        for hit in re.finditer(
            r"register memory[^\n]*?(0x[0-9a-fA-F]{4,16})[^\n]*(?:Bad address|\[14\])", log[1] if log else ""
        ):
            regions = attempt(lambda: proc.parse_maps(target.text("maps")))
            address = int(hit[1], 16)
            region = next((r for r in regions or () if r.start <= address < r.end), None)
            if host.gpus and (region is None or "nvidia" in region.name):
                return True  # no mapping of the process has it: an address of the GPU
    raise Skip("nobody registers GPU memory here")


def _open_modules(host: HostFacts) -> bool | None:
    """Whether the GPU driver's open kernel modules run; None if nothing tells."""
    text = host.peek("/proc/driver/nvidia/version")
    return None if text is None else "Open Kernel Module" in text or "Open" in text.split("\n")[0]


def _peermem(host: HostFacts) -> bool:
    """Raises Unseen."""
    return any(host.module_present(name) for name in PEERMEM)


def _dmabuf(host: HostFacts) -> bool | None:
    """Whether kernel and driver can export GPU memory as dma-buf; None if unknown."""
    version = host.kernel_version
    opened = _open_modules(host)
    if version is not None and version < DMABUF_KERNEL:
        return False
    return opened if version is not None else None


@check(
    "gdr.peermem_loaded",
    title="The NIC may register GPU memory",
    why="Bad address [14], or a detour through host memory.",
    source="/proc/modules nvidia_peermem (old nv_peer_mem); kernel and GPU driver for dma-buf",
    fix="modprobe nvidia-peermem, and list it in /etc/modules-load.d",
    undo="modprobe -r nvidia-peermem",
)
def peermem_loaded(host: HostFacts) -> Iterator[Finding]:
    _wants_gpu(host)
    if _peermem(host) or _dmabuf(host):
        return
    logs = [target.log for target in host.targets if target.log is not None]
    yield fail(
        "GPU memory",
        "nvidia_peermem is not loaded, and there is no dma-buf path",
        "one of both",
        fix="modprobe nvidia-peermem && echo nvidia-peermem > /etc/modules-load.d/nvidia-peermem.conf",
        persists=True,
        evidence=[
            host.at("/proc/modules", "nvidia_peermem is not listed"),
            host.at("/proc/driver/nvidia/version"),
            *(
                host.at(path, "Failed to register memory … [14]")
                for path, text in logs
                if "egister memory" in text
            ),
        ],
    )


@check(
    "gdr.peermem_symbol",
    title="peermem fits the RDMA modules",
    why="Built against other modules it does not load, whatever modprobe is told.",
    source="dmesg 'nvidia_peermem: disagrees about version of symbol', 'Unknown symbol'",
    fix="reinstall the GPU driver after the RDMA stack, then modprobe nvidia-peermem",
    kind="L",
    root="p",
)
def peermem_symbol(host: HostFacts) -> Iterator[Finding]:
    lines = host.log_lines(r"nv(idia)?_peer_?mem: (disagrees about version of symbol|Unknown symbol)")
    if not lines:
        return
    loaded = attempt(lambda: _peermem(host))
    yield finding(
        Outcome.INFO if loaded else Outcome.FAIL,
        "nvidia_peermem",
        lines[-1].text[:160] + (" (it is loaded now)" if loaded else ""),
        "built against the RDMA modules that run",
        fix="reinstall the GPU driver (dkms) after the RDMA stack; modprobe nvidia-peermem",
        persists=True,
        evidence=[host.log_evidence(lines[-1]), host.at("/proc/modules", "")],
    )


@check(
    "gdr.dmabuf",
    title="There is a path to GPU memory",
    why="Neither dma-buf nor peermem: every transfer goes through host memory.",
    source="kernel 5.12 or newer, /proc/driver/nvidia/version (open kernel modules), nvidia_peermem",
    fix="install the open GPU kernel modules on kernel 5.12 or newer, or load nvidia-peermem",
)
def dmabuf(host: HostFacts) -> Iterator[Finding]:
    _wants_gpu(host)
    path = _dmabuf(host)
    if path or _peermem(host):
        return
    if path is None:
        raise Unseen("/proc/driver/nvidia/version", Sight.NOT_COLLECTED)
    yield fail(
        "GPU memory",
        f"kernel {host.kernel}, closed GPU modules or too old a kernel, and no peermem",
        "dma-buf or peermem",
        fix="install the open GPU kernel modules, or modprobe nvidia-peermem",
        persists=True,
        evidence=[host.at("/proc/driver/nvidia/version"), host.at("/proc/sys/kernel/osrelease")],
    )


def _bar1(host: HostFacts) -> list[misc.GpuMemory]:
    for argv in host.argvs("nvidia-smi"):
        if "MEMORY" in argv or argv[1:] == ("-q",):
            return misc.parse_gpu_memory(host.command(*argv))
    found = []
    for gpu in host.gpus:
        rows = (host.peek(f"{gpu.path}/resource") or "").split("\n")
        if len(rows) > 1 and len(words := rows[1].split()) >= 2:
            limits = [attempt(lambda: sysfs.parse_int(w)) for w in words[:2]]
            if limits[0] is not None and limits[1]:
                size = limits[1] - limits[0] + 1
                found.append(misc.GpuMemory(gpu.bdf, size, size))
    if not found:
        raise Unseen("nvidia-smi -q -d MEMORY (BAR1)", host.why_not("nvidia-smi"))
    return found


@check(
    "gdr.bar1_size",
    title="The GPU's window holds the buffers",
    why="Registration fails beyond the BAR1 window.",
    source="nvidia-smi -q -d MEMORY: BAR1 Total, Free; /sys/bus/pci/devices/<gpu>/resource",
    fix="large-BAR mode in the firmware (Above 4G Decoding, resizable BAR), or register less",
)
def bar1_size(host: HostFacts) -> Iterator[Finding]:
    if not host.gpus and not host.argvs("nvidia-smi"):
        host.pci  # noqa: B018 - raises Unseen where PCI was not collected
        raise Skip("no GPU")
    need = host.expect_int("gpu_buffer_bytes")
    if need is None and not (gpu_peer_to_peer(host) and attempt(lambda: _peermem(host))):
        raise Skip("nobody registers GPU memory here")
    for gpu in _bar1(host):
        evidence = [next((host.said(*a) for a in host.argvs("nvidia-smi") if "MEMORY" in a), None)]
        if need is not None and need > gpu.bar1_free:
            yield fail(
                f"GPU {gpu.bdf}",
                f"BAR1 {gib(gpu.bar1_free)} free of {gib(gpu.bar1_total)}",
                f"{gib(need)}: its buffers",
                fix="enable large BAR (Above 4G Decoding) in the firmware, or register less",
                persists=True,
                evidence=evidence,
            )
        elif gpu.bar1_total <= SMALL_BAR1_BYTES:
            yield warn(
                f"GPU {gpu.bdf}",
                f"BAR1 of {gib(gpu.bar1_total)}",
                "as large as its memory",
                fix="enable large BAR (Above 4G Decoding) in the firmware",
                persists=True,
                evidence=evidence,
            )


@check(
    "gdr.expandable_segments",
    title="PyTorch's segments can be registered",
    why="Expandable segments are no single allocation: peermem refuses them with Bad address.",
    source="PYTORCH_CUDA_ALLOC_CONF of the targets",
    fix="expandable_segments:False, or the dma-buf path",
    undo="set it again",
    per=Per.TARGET,
)
def expandable_segments(target: Target) -> Iterator[Finding]:
    host = target.host
    environ = target.environ
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environ.get(name, "")
        if not re.search(r"expandable_segments\s*:\s*[Tt]rue", value):
            continue
        loaded = attempt(lambda: _peermem(host))
        if loaded is False:
            raise Skip("no peermem: the dma-buf path takes them")
        yield warn(
            target.label,
            f"{name}={value}, with peermem",
            "expandable_segments:False",
            fix=f"export {name}=expandable_segments:False and restart it",
            persists=True,
            evidence=[
                target.evidence("environ", f"{name}={value}"),
                host.at("/proc/modules", "nvidia_peermem"),
            ],
        )


@check(
    "gdr.p2p_in_vm",
    title="Peer-to-peer in the guest is proven",
    why="Without ATS and ACS DirectTrans, transfers may succeed with wrong bytes.",
    source="virtualisation, GPU and NIC passed through, lspci ATSCtl and ACSCtl DirectTrans; probe.integrity",
    fix="ATS on the NIC and DirectTrans on the switch ports (on the host), or stage through host memory",
    kind="S/A",
    root="p",
)
def p2p_in_vm(host: HostFacts) -> Iterator[Finding]:
    if not host.is_vm:
        raise Skip("no guest")
    if not host.gpus or not (attempt(lambda: host.devices_in_scope) or []):
        raise Skip("no GPU beside an RDMA device")
    for probe in host.meta.get("probes") or []:
        if (
            isinstance(probe, dict)
            and probe.get("probe") == "integrity"
            and probe.get("memory") == "gpu"
            and probe.get("mismatches")
        ):
            yield fail(
                "GPU memory",
                f"{probe['mismatches']} mismatches in the data check",
                "none",
                fix="stage through host memory",
                persists=True,
                evidence=[host.meta_evidence("probes", "integrity")],
            )
            return
    if host.expect("provider"):
        raise Skip("a provider's certified platform")
    if not gpu_peer_to_peer(host):
        raise Skip("nobody registers GPU memory here")
    table = attempt(lambda: host.lspci) or {}
    nics = [d.pci for d in host.devices_in_scope if d.pci is not None]
    ats = [bool(table[n.bdf].flag("ATSCtl", "Enable")) for n in nics if n.bdf in table]
    direct = [
        bool(block.flag("ACSCtl", "DirectTrans"))
        for block in table.values()
        if block.flag("ACSCtl", "SrcValid") is not None
    ]
    if ats and all(ats) and direct and all(direct):
        return
    yield warn(
        "NIC and GPU",
        "peer-to-peer in a guest, with ATS or ACS DirectTrans off"
        if table
        else "peer-to-peer in a guest, with the state of ATS and ACS not seen",
        "both on, or a data check that passes",
        fix="on the host: mlxconfig set ATS_ENABLED=1, DirectTrans on; verify with: kvops diagnose "
        "--probe integrity",
        persists=True,
        evidence=[
            host.lspci_evidence("ATSCtl/ACSCtl of NIC and switch ports"),
            host.said("systemd-detect-virt") or host.meta_evidence("role", host.role),
        ],
    )


@check(
    "gdr.gpu_lost",
    title="Every GPU is on the bus",
    why="A GPU that fell off takes its processes and registrations with it.",
    source="lspci '(rev ff)', dmesg 'GPU has fallen off the bus' (Xid 79)",
    fix="drain the node, reset or power cycle it",
    kind="L",
    root="p",
)
def gpu_lost(host: HostFacts) -> Iterator[Finding]:
    table = attempt(lambda: host.lspci) or {}
    gone = [
        bdf
        for bdf, block in table.items()
        if block.lost and re.search(r"NVIDIA|3D controller|VGA", block.title)
    ]
    lines = attempt(lambda: host.log_lines(r"GPU has fallen off the bus|Xid.*: 79\b"))
    for bdf in gone:
        yield fail(
            f"GPU {bdf}",
            table[bdf].title,
            "its own revision",
            fix="drain the node and power cycle it",
            persists=True,
            evidence=[host.lspci_evidence(f"{bdf} {table[bdf].title}")],
        )
    if lines and not gone:
        bdf_ = re.search(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(\.\d)?", lines[-1].text)
        yield fail(
            f"GPU {bdf_[0] if bdf_ else ''}".strip(),
            lines[-1].text[:160],
            "on the bus",
            fix="drain the node; nvidia-smi -r, or power cycle",
            persists=True,
            evidence=[host.log_evidence(lines[-1])],
        )
    if not table and lines is None:
        host.log  # noqa: B018 - raises the reason


@check(
    "gdr.versions",
    title="peermem is the GPU driver's own",
    why="A peermem of another driver version does not load, or misbehaves.",
    source="/sys/module/{nvidia,nvidia_peermem}/version",
    fix="reinstall the GPU driver; modprobe -r nvidia_peermem; modprobe nvidia-peermem",
)
def versions(host: HostFacts) -> Iterator[Finding]:
    peermem = host.get("/sys/module/nvidia_peermem/version")
    if peermem is None:
        raise Skip("no nvidia_peermem")
    driver = host.get("/sys/module/nvidia/version")
    if driver is None:
        raise Skip("no nvidia module version")
    if peermem.strip() != driver.strip():
        yield fail(
            "nvidia_peermem",
            peermem.strip(),
            f"{driver.strip()}, the GPU driver's",
            fix="reinstall the GPU driver, reload nvidia-peermem",
            persists=True,
            evidence=[host.at("/sys/module/nvidia_peermem/version"), host.at("/sys/module/nvidia/version")],
        )

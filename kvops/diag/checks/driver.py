"""Drivers and firmware: whether the devices are there, whole and of one kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvops.diag.compare import Groups
from kvops.diag.facts import HostFacts, PciFunction, Port, RdmaDevice, attempt
from kvops.diag.model import Evidence, Finding, Outcome, Skip, Unseen, fail, finding, info, warn
from kvops.diag.parsers import rdma, sysfs, tools
from kvops.diag.registry import Per, check
from kvops.host import Sight

MELLANOX = 0x15B3
NETWORK_CLASSES = (0x0200, 0x0207)  # Ethernet, InfiniBand controllers
PROVIDER_MODULES = {
    "mlx5": "mlx5_ib",
    "mlx4": "mlx4_ib",
    "bnxt": "bnxt_re",
    "irdma": "irdma",
    "efa": "efa",
} | {
    "erdma": "erdma",
    "hns": "hns_roce_hw_v2",
    "rxe": "rdma_rxe",
    "siw": "siw",
}
PROVIDER_LIBRARIES = {
    "mlx5": "mlx5",
    "mlx4": "mlx4",
    "bnxt": "bnxt_re",
    "irdma": "irdma",
    "efa": "efa",
    "erdma": "erdma",
} | {
    "hns": "hns",
    "rxe": "rxe",
    "siw": "siw",
}
HOUR_S, DAY_S = 3600.0, 86400.0
REVOKED_PER_HOUR_MAX = 3  # [E]
BLUEFIELD_IDS = frozenset({0xA2D2, 0xA2D6, 0xA2DC, 0xA2DF})


def wants_rdma(host: HostFacts) -> bool:
    """Whether somebody here means to use RDMA."""
    if host.expect_strings("rdma_devices"):
        return True
    return any(target.protocol in ("rdma", None) and target.protocol != "tcp" for target in host.targets)


def _nics(host: HostFacts) -> list[PciFunction]:
    """PCI functions that carry RDMA whenever their driver is whole: Mellanox network functions."""
    return [f for f in host.pci if f.vendor == MELLANOX and (f.pci_class or 0) >> 8 in NETWORK_CLASSES]


def _should_carry_rdma(host: HostFacts) -> Iterator[tuple[PciFunction, PciFunction | None]]:
    """
    Functions that should have an RDMA device, with one of the same make that has: for other makers than
    Mellanox, whose every card does, only such a twin tells a NIC with RDMA from one without.
    """
    owners = [device.pci for device in attempt(lambda: host.devices) or () if device.pci is not None]
    twins = {(owner.vendor, owner.device): owner for owner in owners}
    nics = {function.bdf for function in _nics(host)}
    for function in host.pci:
        twin = twins.get((function.vendor, function.device))
        if twin is not None or function.bdf in nics:
            yield function, twin


@check(
    "driver.modules_loaded",
    title="The modules of the RDMA path are loaded",
    why="Without the provider's module or ib_uverbs there is no device to open.",
    source="/proc/modules; /sys/module for what is built in",
    fix="modprobe <module>, and list it in /etc/modules-load.d",
    undo="modprobe -r <module>",
)
def modules_loaded(host: HostFacts) -> Iterator[Finding]:
    wanted: dict[str, str] = {}
    devices = attempt(lambda: host.devices) or []
    for device in devices:
        module = PROVIDER_MODULES.get(device.kind)
        if module:
            wanted.setdefault(module, device.name)
    nics = [f for f in attempt(lambda: _nics(host)) or [] if f.driver != "vfio-pci" and not f.is_virtual]
    if nics and not host.is_container and (wants_rdma(host) or devices):
        for module in ("mlx5_core", "mlx5_ib"):
            wanted.setdefault(module, nics[0].bdf)
    if not wanted:
        raise Skip("no RDMA device here")
    wanted["ib_uverbs"] = "verbs"
    for module, owner in wanted.items():
        if not host.module_present(module):
            yield fail(
                module,
                f"not loaded, needed by {owner}",
                "loaded, or built in",
                fix=f"modprobe {module} && echo {module} > /etc/modules-load.d/rdma-{module}.conf",
                persists=True,
                evidence=[host.at("/proc/modules", f"{module} is not listed")],
            )


def _uses_cm(host: HostFacts) -> bool:
    """Whether somebody needs the connection manager: the shared device plugin, or a target that says so."""
    for argv in host.argvs("kubectl"):
        text = attempt(lambda: host.command(*argv)) or ""
        if "rdma-shared" in " ".join(argv) or "rdma_cm" in text or '"rdma/' in text:
            return True
    return any(re.search(r"rdma_?cm", " ".join(attempt(lambda: t.command_line) or [])) for t in host.targets)


@check(
    "driver.char_devices",
    title="Every device has its nodes under /dev/infiniband",
    why="Without uverbs no process opens the device; without rdma_cm the shared device plugin advertises "
    "nothing.",
    source="/dev/infiniband/{uverbsN,umadN,issmN,rdma_cm}",
    fix="modprobe rdma_ucm ib_umad ib_uverbs, and list them in /etc/modules-load.d",
    undo="modprobe -r rdma_ucm",
)
def char_devices(host: HostFacts) -> Iterator[Finding]:
    if host.is_container:
        raise Skip("in a container: see k8s.dev_infiniband")
    devices = host.devices
    if not devices:
        raise Skip("no RDMA device")
    try:
        nodes = set(host.ls("/dev/infiniband"))
    except Unseen as unseen:
        if not unseen.absent:
            raise
        nodes = set()
    evidence = [
        host.meta_evidence("dev", "/dev/infiniband: " + (" ".join(sorted(nodes)) or "does not exist")),
        *([host.at("/proc/modules", "")] if host.peek("/proc/modules") else []),
    ]
    for name in attempt(lambda: host.ls("/sys/class/infiniband_verbs")) or ():
        if not re.fullmatch(r"uverbs\d{1,4}", name, re.ASCII):
            continue
        device = (host.peek(f"/sys/class/infiniband_verbs/{name}/ibdev") or "").strip()
        if name not in nodes:
            yield fail(
                f"{device or name}",
                f"/dev/infiniband/{name} is missing",
                "a character device, major 231",
                fix="modprobe ib_uverbs; udevadm trigger --subsystem-match=infiniband_verbs",
                persists=False,
                evidence=evidence,
            )
    if "rdma_cm" not in nodes:
        used = _uses_cm(host)
        yield finding(
            Outcome.FAIL if used else Outcome.INFO,
            "/dev/infiniband/rdma_cm",
            "missing"
            + (", and the device plugin or an engine needs it" if used else "; nobody seems to need it"),
            "a character device",
            fix="modprobe rdma_ucm && echo rdma_ucm > /etc/modules-load.d/rdma_ucm.conf",
            persists=True,
            evidence=[*evidence, *(host.said(*argv) for argv in host.argvs("kubectl", "logs"))],
        )
    if any(n.startswith("umad") for n in nodes) and not any(n.startswith("issm") for n in nodes):
        yield info("/dev/infiniband/issm*", "missing: only a subnet manager needs it", evidence=evidence[:1])


def _in_bond(function: PciFunction) -> bool:
    """Whether its interface is a bond's member: the RDMA device may be the bond's."""
    netdevs = attempt(lambda: function.host.ls(f"{function.path}/net")) or ()
    bonds = attempt(lambda: function.host.bonds) or {}
    return any(member.name in netdevs for bond in bonds.values() for member in bond.members)


@check(
    "driver.device_count",
    title="Every NIC has its RDMA device",
    why="A NIC without a verbs device is missing from the store's topology without a word.",
    source="/sys/class/infiniband against PCI functions of RDMA vendors and the operator's list",
    fix="bind the driver, load its RDMA module, or look into dmesg for the probe's error",
)
def device_count(host: HostFacts) -> Iterator[Finding]:
    names = [device.name for device in host.devices]
    evidence: list[Evidence] = [host.at("/sys/class/infiniband", " ".join(names) or "empty")]
    for name in host.expect_strings("rdma_devices"):
        if name not in names:
            yield fail(
                name,
                "no such RDMA device",
                "present: the operator's list has it",
                fix="dmesg | grep -i 'mlx5\\|rdma'; rebind the driver of its PCI function",
                persists=None,
                evidence=evidence,
            )
    count = host.expect_int("rdma_device_count")
    if count is not None and len(names) < count:
        yield fail(
            "RDMA devices",
            str(len(names)),
            str(count),
            fix="find the NIC that is missing: lspci -d 15b3:",
            evidence=evidence,
        )
    if host.is_container:
        return
    bonded = {d.pci.bdf.rpartition(".")[0] for d in host.devices if d.pci is not None and d.is_bond}
    owners = {device.pci.bdf for device in host.devices if device.pci is not None}
    for function, _ in attempt(lambda: list(_should_carry_rdma(host))) or ():
        quiet = function.driver in (None, "vfio-pci") or function.is_virtual or _in_bond(function)
        if quiet or function.bdf in owners or function.bdf.rpartition(".")[0] in bonded:
            continue
        if not (wants_rdma(host) or owners):
            continue
        yield fail(
            function.bdf,
            f"driver {function.driver}, but no device under /sys/class/infiniband",
            "an RDMA device",
            fix=f"devlink dev param show pci/{function.bdf} name enable_roce; modprobe mlx5_ib",
            persists=False,
            evidence=[*evidence, host.at(f"{function.path}/vendor")],
        )


def _verbs_words(host: HostFacts) -> Iterator[tuple[str, Evidence]]:
    """Everything that libibverbs printed: (text, where)."""
    for tool in ("ibv_devices", "ibv_devinfo", "ucx_info", "fi_info"):
        for argv in host.argvs(tool):
            result = host.snapshot.run(*argv)
            for text, name in (
                (result.stdout, result.file),
                (result.stderr, result.file.replace(".txt", ".err.txt")),
            ):
                if text:
                    yield text, Evidence(source=" ".join(argv), file=name, text=text.strip()[:240])
    for target in host.targets:
        if target.log is not None:
            yield target.log[1], Evidence(source=target.log[0], file=f"root{target.log[0]}", text="")


def _quote(evidence: Evidence, line: str) -> Evidence:
    return Evidence(source=evidence.source, file=evidence.file, text=line.strip()[:240])


@check(
    "driver.userspace_abi",
    title="The image's libraries know this kernel",
    why="An old rdma-core in the image finds no device although the host has all of them.",
    source="stderr of ibv_devices: 'does not support the kernel ABI'",
    fix="build the image with an rdma-core at least as new as the kernel's driver",
)
def userspace_abi(host: HostFacts) -> Iterator[Finding]:
    seen = False
    for text, evidence in _verbs_words(host):
        seen = True
        line = next((line for line in text.splitlines() if "does not support the kernel ABI" in line), None)
        if line:
            yield fail(
                "rdma-core",
                line.strip(),
                "libraries that support the kernel's ABI",
                fix="install a newer rdma-core (libibverbs, its provider) in the image",
                persists=True,
                evidence=[_quote(evidence, line)],
            )
            return
    if not seen and not host.has_command("ibv_devices"):
        raise Unseen("ibv_devices", host.why_not("ibv_devices"))


_LIBRARY_FOLDERS = (
    "/etc/libibverbs.d",
    "/usr/lib64/libibverbs",
    "/usr/lib/x86_64-linux-gnu/libibverbs",
    "/usr/lib/aarch64-linux-gnu/libibverbs",
)


@check(
    "driver.userspace_libs",
    title="The provider's library is installed",
    why="Without it libibverbs opens nothing, and the engine falls back to TCP.",
    source="ldconfig -p, libibverbs/ folders, ucx_info -d, fi_info, warnings of libibverbs",
    fix="install the provider: apt install ibverbs-providers, or dnf install libibverbs",
    undo="remove the package",
)
def userspace_libs(host: HostFacts) -> Iterator[Finding]:
    devices = host.devices_in_scope
    if not devices:
        raise Skip("no RDMA device in scope")
    seen = False
    for text, evidence in _verbs_words(host):
        seen = True
        for line in text.splitlines():
            if re.search(
                r"couldn't load driver|no userspace device-specific driver|cannot open shared object "
                r"file.*(verbs|rdmav)",
                line,
            ):
                yield fail(
                    "libibverbs",
                    line.strip(),
                    "the provider's library",
                    fix="apt install ibverbs-providers (or dnf install libibverbs)",
                    persists=True,
                    evidence=[_quote(evidence, line)],
                )
                return
    kinds = {PROVIDER_LIBRARIES[device.kind] for device in devices if device.kind in PROVIDER_LIBRARIES}
    folders = {path: list(names) for path in _LIBRARY_FOLDERS if (names := attempt(lambda: host.ls(path)))}
    if folders:
        seen = True
        files = [name for names in folders.values() for name in names]
        for kind in sorted(kinds):
            if not any(kind in name for name in files):
                yield fail(
                    kind,
                    f"no library for it in {', '.join(folders)}",
                    f"lib{kind}-rdmav*.so",
                    fix="apt install ibverbs-providers (or dnf install libibverbs)",
                    persists=True,
                    evidence=[host.at(path, " ".join(names)) for path, names in folders.items()],
                )
    cache = attempt(lambda: host.command("ldconfig", "-p"))
    if cache is not None and "=>" in cache:
        seen = True
        if "libibverbs.so" not in cache:
            yield fail(
                "libibverbs",
                "not in the linker's cache",
                "libibverbs.so.1",
                fix="apt install libibverbs1 ibverbs-providers",
                persists=True,
                evidence=[host.said("ldconfig", "-p")],
            )
    ucx = attempt(lambda: tools.parse_ucx_devices(host.command("ucx_info", "-d")))
    if ucx is not None and not any(name.startswith(("rc", "dc", "ud", "srd")) for name in ucx):
        yield fail(
            "UCX",
            "built without verbs transports",
            "rc_verbs or rc_mlx5",
            fix="install a UCX built --with-verbs",
            persists=True,
            evidence=[host.said("ucx_info", "-d")],
        )
    if any(device.kind == "efa" for device in devices):
        runs = [host.snapshot.run(*argv) for argv in host.argvs("fi_info")]
        answers = [run for run in runs if run.stdout or run.stderr]
        offered = {e.get("provider") for run in answers for e in tools.parse_fi_info(run.stdout)}
        if answers and not any(str(name).startswith("efa") for name in offered):
            yield fail(
                "libfabric",
                "has no EFA provider",
                "provider: efa",
                fix="install the EFA package of the cloud provider",
                persists=True,
                evidence=[host.said("fi_info")],
            )
    for argv in host.argvs("ldd"):
        text = attempt(lambda: host.command(*argv)) or ""
        seen = True
        lost = re.search(
            r"^\s*(lib(?:ibverbs|rdmacm|mlx5|efa|ucp|uct|fabric)\S*) => not found", text, re.MULTILINE
        )
        if lost:
            yield fail(
                argv[-1],
                f"{lost[1]} not found",
                "every library found",
                fix="apt install libibverbs1 librdmacm1 ibverbs-providers",
                persists=True,
                evidence=[host.said(*argv, text=lost[0].strip())],
            )
    if not seen:
        raise Unseen("libibverbs and its providers", Sight.NOT_COLLECTED)


@check(
    "driver.ofed_mismatch",
    title="The RDMA modules are of one make, and those on disk",
    why="Modules of two makes disagree about symbols; after an update without a reboot peermem refuses to "
    "load.",
    source="/sys/module/{mlx5_core,mlx5_ib,ib_core,nvidia_peermem}/{version,srcversion}, modinfo, dmesg",
    fix="reinstall RDMA stack, then GPU driver, in this order, and reboot",
)
def ofed_mismatch(host: HostFacts) -> Iterator[Finding]:
    symbols = (
        attempt(
            lambda: host.log_lines(r"(mlx5|ib_|rdma)\w*: (disagrees about version of symbol|Unknown symbol)")
        )
        or []
    )
    versions: dict[str, str] = {}
    for module in ("ib_core", "mlx5_core", "mlx5_ib"):
        if attempt(lambda: host.ls(f"/sys/module/{module}")) is None:
            continue
        version = host.get(f"/sys/module/{module}/version")
        # Kernels before 5.10 gave every mlx5 module one constant such as "5.0-0": that is the kernel's own.
        vendor = version is not None and not re.fullmatch(r"\d\.\d-\d", version.strip(), re.ASCII)
        versions[module] = version.strip() if version is not None and vendor else "inbox"
    severity = Outcome.FAIL if symbols else Outcome.WARN
    logged = [host.log_evidence(line) for line in symbols[:2]]
    if len(set(versions.values())) > 1:
        yield finding(
            severity,
            "RDMA modules",
            ", ".join(f"{m} {v}" for m, v in versions.items()),
            "one version",
            fix="reinstall the RDMA stack, rebuild the initramfs, reboot",
            persists=True,
            evidence=[*(host.at(f"/sys/module/{m}/version") for m in versions), *logged],
        )
    compared = False
    for module in ("ib_core", "mlx5_core", "mlx5_ib", "nvidia_peermem"):
        text = attempt(lambda: host.command("modinfo", module))
        if text is None:
            continue
        disk = dict(re.findall(r"^(version|srcversion):\s+(\S+)", text, re.MULTILINE))
        for name, value in disk.items():
            running = host.peek(f"/sys/module/{module}/{name}")
            if running is None:
                continue
            compared = True
            if running.strip() != value:
                yield finding(
                    severity,
                    module,
                    f"{name} {running.strip()} is running",
                    f"{value}, as on disk",
                    fix="reboot (the module was replaced while loaded)",
                    persists=True,
                    evidence=[host.at(f"/sys/module/{module}/{name}"), host.said("modinfo", module), *logged],
                )
                break
    if not versions and not compared:
        raise Unseen("/sys/module/ib_core", Sight.NOT_COLLECTED)


@check(
    "driver.fw_consistency",
    title="One firmware a board",
    why="Boards of one kind with different firmware react differently to congestion and loss.",
    source="/sys/class/infiniband/<dev>/{fw_ver,board_id}, within and across nodes",
    fix="mlxfwmanager -u on the odd ones, then a reset",
    undo="burn the former image",
    per=Per.FLEET,
    kind="X",
    nodes_min=1,
)
def fw_consistency(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    boards: dict[str, dict[str, list[RdmaDevice]]] = {}
    for host in nodes:
        for device in attempt(lambda: host.devices_in_scope) or ():
            board = attempt(lambda: device.text("board_id"))
            version = attempt(lambda: device.text("fw_ver"))
            if board and version:
                boards.setdefault(board, {}).setdefault(version, []).append(device)
    if not boards:
        raise Skip("no device tells board and firmware")
    for board, versions in boards.items():
        if len(versions) < 2:
            continue
        usual = max(versions, key=lambda v: (len(versions[v]), v))
        for version, devices in versions.items():
            if version == usual:
                continue
            for device in devices[:16]:
                yield warn(
                    f"{device.host.name} {device.name}",
                    f"firmware {version} on board {board}",
                    f"{usual}, as {len(versions[usual])} others",
                    fix=f"mlxfwmanager -d {device.pci.bdf if device.pci else device.name} -u",
                    persists=True,
                    evidence=[
                        device.host.at(f"{device.path}/fw_ver"),
                        device.host.at(f"{device.path}/board_id"),
                    ],
                )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text, re.ASCII))


@check(
    "driver.fw_policy",
    title="Firmware is of the site's set",
    why="Known bugs of older firmware.",
    source="/sys/class/infiniband/<dev>/fw_ver against the profile's firmware list",
    fix="mlxfwmanager -u, then a reset",
    per=Per.DEVICE,
)
def fw_policy(device: RdmaDevice) -> Iterator[Finding]:
    policy = device.host.expect("firmware")
    if not isinstance(policy, dict):
        raise Skip("the profile has no firmware list")
    board = device.text("board_id")
    least = policy.get(board)
    if not isinstance(least, str):
        raise Skip(f"the profile says nothing about board {board}")
    version = device.text("fw_ver")
    if _version(version) < _version(least):
        yield warn(
            device.name,
            f"firmware {version}",
            f"at least {least} on board {board}",
            fix=f"mlxfwmanager -d {device.pci.bdf if device.pci else device.name} -u",
            persists=True,
            evidence=[device.host.at(f"{device.path}/fw_ver")],
        )


@check(
    "driver.fw_package",
    title="The NIC's loadable package is in",
    why="In safe mode the NIC carries packets, but has no RDMA device.",
    source="dmesg 'ice … DDP package … Safe Mode', 'RDMA is not supported on this device'; devlink dev info",
    fix="install the DDP package, rebuild the initramfs, reload the driver",
    kind="S/L",
    root="p",
)
def fw_package(host: HostFacts) -> Iterator[Finding]:
    functions = [f for f in attempt(lambda: host.pci) or [] if f.driver in ("ice", "idpf")]
    lines = attempt(
        lambda: host.log_lines(r"\bice\b.*(Safe Mode|safe mode|DDP package|RDMA is not supported)")
    )
    if not functions and not lines:
        raise Skip("no NIC with a loadable package")
    if lines is None:
        host.log  # noqa: B018 - raises the reason
        return
    safe = [
        line for line in lines if re.search(r"[Ss]afe [Mm]ode|package.*(not found|missing|failed)", line.text)
    ]
    if safe:
        yield fail(
            _bdf(safe[-1].text),
            safe[-1].text[:160],
            "the DDP package loaded",
            fix="install linux-firmware (intel/ice/ddp/ice.pkg), rebuild the initramfs, reload ice",
            persists=True,
            evidence=[host.log_evidence(safe[-1])],
        )
        return
    for line in lines:
        if "RDMA is not supported" in line.text:
            yield fail(
                _bdf(line.text),
                "the package is loaded, and still no RDMA on this port",
                "a port mode with RDMA",
                fix="change the port option: devlink port … or epct; see the vendor's list of port modes",
                persists=True,
                evidence=[host.log_evidence(line)],
            )
            return


def _bdf(text: str) -> str:
    match = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", text)
    return match[0] if match else "NIC"


@check(
    "driver.fw_pending",
    title="The next boot changes nothing",
    why="Settings or firmware that wait for a reset change behaviour at the next reboot, unexpectedly.",
    source="mlxconfig -e q (current against next boot), mstflint q (running against image)",
    fix="plan a reset: mlxfwreset -d <dev> reset",
    per=Per.FUNCTION,
    root="y",
)
def fw_pending(device: RdmaDevice) -> Iterator[Finding]:
    host, function = device.host, device.pci
    assert function is not None
    config = attempt(lambda: rdma.parse_mlxconfig(host.command("mlxconfig", "-d", function.bdf)))
    image = attempt(lambda: tools.parse_mstflint(host.command("mstflint", "-d", function.bdf)))
    if config is None and image is None:
        raise Unseen(f"mlxconfig -e q, mstflint q of {function.bdf}", host.why_not("mlxconfig", "mstflint"))
    waiting = [f"{n}: {v[-2]} → {v[-1]}" for n, v in (config or {}).items() if len(v) == 3 and v[-2] != v[-1]]
    if waiting:
        yield info(
            device.name,
            "; ".join(waiting[:6]),
            "no setting that waits for a reset",
            fix=f"mlxfwreset -d {function.bdf} reset",
            persists=True,
            evidence=[host.said("mlxconfig", "-d", function.bdf, text="; ".join(waiting[:4]))],
        )
    flashed, running = (image or {}).get("FW Version"), (image or {}).get("FW Version(Running)")
    if flashed and running and flashed != running:
        yield info(
            device.name,
            f"firmware {running} runs, {flashed} is on flash",
            "the same",
            fix=f"mlxfwreset -d {function.bdf} reset",
            persists=True,
            evidence=[host.said("mstflint", "-d", function.bdf)],
        )


@check(
    "driver.health",
    title="The NIC's health reporters are content",
    why="When the firmware recovers from an error, every queue pair dies.",
    source="devlink health show; dmesg 'health compromised', 'assert_var', firmware fatal",
    fix="collect a firmware dump for the vendor; reload the driver or power cycle",
    kind="S/L",
    root="p",
)
def health(host: HostFacts) -> Iterator[Finding]:
    reports: list[tuple[str, str, int]] = []
    seen = None
    for argv in host.argvs("devlink", "health"):
        result = attempt(lambda: host.result(*argv))
        if result is not None:
            reports += rdma.parse_devlink_health(result.stdout)
            seen = host.said(*argv)
    for reporter, state, errors in reports:
        if state != "healthy":
            yield fail(
                f"reporter {reporter}",
                f"state {state}, {errors} errors",
                "healthy",
                fix=f"devlink health diagnose … reporter {reporter}; devlink health recover …",
                persists=False,
                evidence=[seen],
            )
    lines = attempt(
        lambda: host.log_lines(
            r"health compromised|assert_var\[|[Ff]irmware fatal|FW fatal|fw_fatal|device's "
            r"health.*compromised"
        )
    )
    if lines:
        yield fail(
            _bdf(lines[-1].text),
            lines[-1].text[:160],
            "no firmware error since boot",
            fix="devlink health dump show … > dump; open a case with the vendor",
            persists=None,
            evidence=[host.log_evidence(line) for line in lines[-2:]],
        )
    if seen is None and lines is None:
        host.log  # noqa: B018 - raises the reason


_RESOURCE = re.compile(r"no resources\s*\(0xf\)|limits exceeded\s*\(0x8\)")
_BAD_PARAMETER = re.compile(r"bad (?:parameter|param)\s*\(0x3\)")
_VERB = re.compile(
    r"\b(CREATE_MKEY|CREATE_QP|CREATE_CQ|CREATE_SRQ|RST2INIT_QP|INIT2RTR_QP|RTR2RTS_QP|INIT2INIT_QP|ALLOC_PD)\b"
)


@check(
    "driver.kernel_log",
    title="The driver's verbs succeed",
    why="The kernel's log names the verb that failed and the reason, which the engine's does not.",
    source="dmesg mlx5_cmd_*failed, bnxt_en Firmware, irdma AE",
    fix="by class: no resources → mem.mkey_resources; limits exceeded → limits.qp_capacity; bad parameter "
    "→ GID and MTU",
    kind="L",
    root="p",
)
def kernel_log(host: HostFacts) -> Iterator[Finding]:
    lines = host.log_lines(
        r"mlx5_cmd_\w*.*failed|mlx5_core .*\bfailed, status|bnxt_(en|re) .*(Firmware|failed)|irdma .*\bAE\b"
    )
    classes: dict[tuple[Outcome, str], list[int]] = {}
    for index, line in enumerate(lines):
        if "ACCESS_REG" in line.text:
            continue  # a restricted function refuses some registers while counters are polled: harmless [G]
        verb = _VERB.search(line.text)
        if _RESOURCE.search(line.text):
            key = (Outcome.WARN, f"{verb[1] if verb else 'a command'} refused: out of a resource")
        elif _BAD_PARAMETER.search(line.text) and verb:
            key = (Outcome.WARN, f"{verb[1]} refused: bad parameter")
        else:
            key = (Outcome.INFO, "the driver logged a failed command")
        classes.setdefault(key, []).append(index)
    for (severity, text), where in classes.items():
        last = lines[where[-1]]
        yield finding(
            severity,
            _bdf(last.text),
            f"{text} ({len(where)} times since boot)",
            "no failing verb",
            fix="see mem.mkey_resources, limits.qp_capacity, gid.index_empty",
            persists=None,
            evidence=[host.log_evidence(last)],
        )


@check(
    "driver.device_unbound",
    title="Every NIC is bound to its driver",
    why="A function without a driver is no device at all.",
    source="/sys/bus/pci/devices/<bdf>/driver",
    fix="echo <bdf> > /sys/bus/pci/drivers_probe; dmesg tells why the probe failed",
    undo="echo <bdf> > /sys/bus/pci/drivers/mlx5_core/unbind",
)
def device_unbound(host: HostFacts) -> Iterator[Finding]:
    if host.is_container:
        raise Skip("in a container")
    for function, twin in _should_carry_rdma(host):
        bound = function.driver or attempt(lambda: host.ls(f"{function.path}/net"))
        if not bound and host.snapshot.sight_of(f"{function.path}/driver")[0] is not Sight.ABSENT:
            raise Unseen(f"{function.path}/driver", Sight.NOT_COLLECTED)
        if not bound and not function.is_virtual:
            yield fail(
                function.bdf,
                "no driver bound",
                f"{(twin and twin.driver) or 'mlx5_core'} (vfio-pci if it is for a guest)",
                fix=f"echo {function.bdf} > /sys/bus/pci/drivers_probe",
                persists=False,
                evidence=[
                    host.at(f"{function.path}/vendor"),
                    host.at(f"{function.path}/driver", "no such link"),
                ],
            )


@check(
    "driver.dpu_mode",
    title="A DPU's Arm side passes traffic, the same way on all nodes",
    why="In DPU mode the Arm side owns the switch: without its software the link is up and nothing passes.",
    source="mlxconfig q INTERNAL_CPU_OFFLOAD_ENGINE (ENABLED(0) is DPU mode), ip neigh",
    fix="load the Arm side's switch, or: mlxconfig set INTERNAL_CPU_OFFLOAD_ENGINE=1 and a power cycle",
    undo="mlxconfig set INTERNAL_CPU_OFFLOAD_ENGINE=0 and a power cycle",
    per=Per.FLEET,
    kind="S/X",
    root="y",
    nodes_min=1,
)
def dpu_mode(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    modes: dict[str, list[RdmaDevice]] = {}
    bluefields = False
    reason: Unseen | None = None
    for host in nodes:
        for device in attempt(lambda: host.devices_in_scope) or ():
            if device.pci is None:
                continue
            try:
                config = rdma.parse_mlxconfig(host.command("mlxconfig", "-d", device.pci.bdf))
            except Unseen as unseen:
                reason = unseen
                bluefields = bluefields or device.pci.device in BLUEFIELD_IDS
                continue
            value = (config.get("INTERNAL_CPU_OFFLOAD_ENGINE") or [""])[-1]
            if not value:
                continue
            bluefields = True
            dpu = value.startswith("ENABLED") or value == "0"
            modes.setdefault("DPU" if dpu else "NIC", []).append(device)
            name = device.ports[0].netdev_name if device.ports else None
            states = [n.state for n in attempt(lambda: host.neighbours) or () if n.device == name]
            dead = bool(states) and all(state in ("FAILED", "INCOMPLETE") for state in states)
            moved = attempt(lambda: device.ports[0].traffic_bytes) if device.ports else None
            silent = moved is not None and moved[0] > 0 and moved[1] == 0
            if dpu and (dead or silent):
                yield fail(
                    f"{host.name} {device.name}",
                    "DPU mode, and " + ("all neighbours FAILED" if dead else "nothing is received"),
                    "a switch on the Arm side, or NIC mode",
                    fix=f"on the Arm side: ovs-vsctl show; or mlxconfig -d {device.pci.bdf} set "
                    f"INTERNAL_CPU_OFFLOAD_ENGINE=1",
                    persists=True,
                    evidence=[
                        host.said(
                            "mlxconfig", "-d", device.pci.bdf, text=f"INTERNAL_CPU_OFFLOAD_ENGINE {value}"
                        ),
                        *host.ip_evidence("neigh"),
                    ],
                )
    if not modes:
        if bluefields and reason is not None:
            raise reason
        raise Skip("no BlueField seen")
    if len(modes) > 1:
        few = min(modes, key=lambda mode: len(modes[mode]))
        yield warn(
            ", ".join(f"{d.host.name} {d.name}" for d in modes[few][:8]),
            f"{few} mode",
            f"{'NIC' if few == 'DPU' else 'DPU'} mode, as the others",
            fix="set one mode on all nodes",
            persists=True,
        )


@check(
    "driver.vf_revoked",
    title="The provider leaves the virtual function alone",
    why="Host maintenance takes the VF away: contexts and memory regions are dead, while TCP survives.",
    source="dmesg 'Data path switched from VF', 'VF unregistering'; devices that vanish between samples",
    fix="let the engine rebuild the device; above a rate, ask the provider",
    kind="L/Δ",
    root="p",
)
def vf_revoked(host: HostFacts) -> Iterator[Finding]:
    gone = host.meta.get("gone")
    for path in gone if isinstance(gone, list) else []:
        match = re.fullmatch(r"/sys/class/infiniband/([^/]+)", str(path))
        if match:
            yield fail(
                match[1],
                "vanished between the two samples",
                "there all the time",
                fix="restart the processes that use it",
                persists=False,
                evidence=[host.meta_evidence("gone", str(path))],
            )
    lines = host.log_lines(r"Data path switched from VF|VF unregistering")
    if not lines:
        return
    stamps = [line.seconds for line in host.log if line.seconds is not None]
    now = host.uptime_s or (max(stamps) if stamps else None)
    ages = [now - line.seconds for line in lines if line.seconds is not None and now is not None]
    window = host.snapshot.window_s or 0.0
    recent = sum(age <= HOUR_S for age in ages)
    today = sum(age <= DAY_S for age in ages)
    if recent >= REVOKED_PER_HOUR_MAX or any(age <= window for age in ages if window):
        severity = Outcome.FAIL
    else:
        severity = Outcome.WARN if today else Outcome.INFO
    yield finding(
        severity,
        "virtual function",
        f"taken away {recent} times in the last hour, {today} in the last day",
        "never while in use",
        fix="restart the store; ask the provider about maintenance",
        persists=False,
        evidence=[host.log_evidence(lines[-1])],
    )


@check(
    "driver.rdma_protocol",
    title="The port speaks RoCE, not iWARP",
    why="The engine makes its queue pairs by hand, which an iWARP port cannot connect: RTS fails with "
    "EINVAL.",
    source="/sys/class/infiniband/<dev>/node_type ('4: RNIC'), devlink dev param "
    "enable_roce/enable_iwarp, roce_ena",
    fix="devlink dev param set pci/<bdf> name enable_roce value true cmode runtime, or irdma roce_ena=1",
    undo="set enable_iwarp again",
    per=Per.DEVICE,
)
def rdma_protocol(device: RdmaDevice) -> Iterator[Finding]:
    host = device.host
    if device.kind in ("erdma", "efa"):
        raise Skip(f"{device.kind} is a class of its own")
    node_type = sysfs.parse_enum(device.text("node_type"))
    bdf = device.pci.bdf if device.pci is not None else ""
    params = {}
    for argv in host.argvs("devlink", "param"):
        if f"pci/{bdf}" in argv or len(argv) == 4:
            params.update(attempt(lambda: rdma.parse_devlink_params(host.command(*argv))) or {})
    roce_off = (
        params.get("enable_roce", {}).get("runtime") == "false"
        and params.get("enable_iwarp", {}).get("runtime") == "true"
    )
    if node_type[0] == 4 or roce_off:
        targets = [target for target in host.targets if target.protocol == "tcp"]
        if host.targets and len(targets) == len(host.targets):
            raise Skip("every target uses TCP")
        yield fail(
            device.name,
            f"node_type {node_type[0]}: {node_type[1]}"
            + (", enable_iwarp true" if roce_off else "")
            + " (iWARP)",
            "RoCE v2: the engine's queue pairs need it",
            fix=f"devlink dev param set pci/{bdf} name enable_roce value true cmode runtime && "
            f"devlink dev reload pci/{bdf}   (older: modprobe irdma roce_ena=1)",
            persists=False,
            evidence=[
                host.at(f"{device.path}/node_type"),
                *(host.said(*argv) for argv in host.argvs("devlink", "param")),
            ],
        )


@check(
    "driver.kernel_drift",
    title="The nodes run one kernel",
    why="Names, GID order and defaults differ between kernels; a new failure after an update has its "
    "cause here.",
    source="/proc/sys/kernel/osrelease across nodes",
    fix="align the kernels",
    per=Per.FLEET,
    kind="X",
)
def kernel_drift(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    versions = Groups()
    for host in nodes:
        if host.kernel:
            versions.add(host.kernel, host.name, host.at("/proc/sys/kernel/osrelease", host.kernel))
    yield from versions.odd_ones(Outcome.INFO, says=lambda version: f"kernel {version}")


@check(
    "driver.module_temp",
    title="Optical modules are cool and seated",
    why="Overheated or badly seated modules flap.",
    source="ethtool -S module_{high_temp,bus_stuck,bad_shorted,unplug}; dmesg 'Port module event[error]'; "
    "ethtool -m",
    fix="check airflow, reseat or replace the module",
    per=Per.PORT,
    kind="Δ/L",
    root="p",
)
def module_temp(port: Port) -> Iterator[Finding]:
    host = port.host
    lines = attempt(lambda: host.log_lines(r"Port module event\[error\]")) or []
    bdf = port.device.pci.bdf if port.device.pci is not None else ""
    mine = [line for line in lines if not bdf or bdf in line.text]
    if mine:
        yield fail(
            port.label,
            mine[-1].text[:160],
            "no module error since boot",
            fix="reseat or replace the module",
            persists=True,
            evidence=[host.log_evidence(mine[-1])],
        )
    names = ("module_high_temp", "module_bus_stuck", "module_bad_shorted", "module_unplug")
    try:
        steps = port.wire_steps
    except Unseen:
        if lines or attempt(lambda: host.log) is not None:
            return
        raise
    grown = {name: steps[name] for name in names if steps.get(name, 0) > 0}
    if grown:
        yield warn(
            port.label,
            ", ".join(f"{n} +{c}" for n, c in grown.items()),
            "+0",
            fix="check airflow; reseat or replace the module",
            persists=True,
            evidence=port.wire_evidence(*grown),
        )

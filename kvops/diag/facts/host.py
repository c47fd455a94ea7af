"""
What a host is, as checks see it: devices, ports, GIDs, addresses, routes, targets.

Nothing here reads a live machine: a live machine is collected first, so both ways give the same verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from kvops.diag.facts.fact import PORTS_MAX, T, attempt, fact
from kvops.diag.facts.netdev import Netdev
from kvops.diag.facts.pci import PciFunction
from kvops.diag.facts.rdma import GidUse, Port, RdmaDevice, rate_gbps
from kvops.diag.facts.target import Target
from kvops.diag.model import EVIDENCE_TEXT_MAX, Evidence, Skip, Unseen
from kvops.diag.parsers import ethtool, ip, misc, pcie, proc, qos, rdma, sysfs, tools
from kvops.errors import ParseError
from kvops.host import CommandResult, Sight, SnapshotHost

OUTPUT_CHARS_MAX = 2 << 20  # of one command that a parser gets to see; logs and flow tables may be longer

_LOG_TOOLS = frozenset({"dmesg", "journalctl", "ovs-appctl", "kubectl"})

NETDEVS_MAX = 4096

SAME_SOCKET_DISTANCE = (
    15  # sub-NUMA clusters of one socket are 11-12 apart, sockets 20 and more [ACPI SLIT in practice]
)


class HostFacts:
    """One host. ``peers`` and ``others`` are filled in when several nodes are compared."""

    def __init__(self, snapshot: SnapshotHost, *, name: str = "") -> None:
        self.snapshot = snapshot
        self.meta = snapshot.meta
        self.name = name or snapshot.name or str(self.meta.get("hostname") or "") or "localhost"
        self.profile: dict[str, Any] = {}
        self.others: list[HostFacts] = []
        # What a check has read so far, each as evidence: made when a finding cites it, which few do.
        self.touched: dict[str, Callable[[], Evidence]] | None = None

    # Reading

    def text(self, path: str, sample: int = 0) -> str:
        """The content. Raises Unseen with the reason: absent, unreadable, not collected."""
        reading = self.snapshot.read(path, sample=sample)
        if not reading.present:
            raise Unseen(path, reading.sight)
        self._touch(path, reading.text)
        return reading.text

    def _touch(self, path: str, text: str) -> None:
        if self.touched is not None and path not in self.touched and len(self.touched) < 64:
            self.touched[path] = partial(self._file_evidence, path, text)

    def get(self, path: str, sample: int = 0) -> str | None:
        """The content; None if it is absent. Raises Unseen for any other reason."""
        try:
            return self.text(path, sample)
        except Unseen as unseen:
            if unseen.absent:
                return None
            raise

    def peek(self, path: str, sample: int = 0) -> str | None:
        """The content; None for any reason: for one of several sources of a fact."""
        reading = self.snapshot.read(path, sample=sample)
        if not reading.present:
            return None
        self._touch(path, reading.text)
        return reading.text

    def number(self, path: str, sample: int = 0) -> int:
        return sysfs.parse_int(self.text(path, sample))

    def ls(self, path: str) -> Sequence[str]:
        """Names in a folder. Raises Unseen."""
        listing = self.snapshot.listdir(path)
        if listing.sight is not Sight.PRESENT:
            raise Unseen(path, listing.sight)
        return listing.names

    def need_window(self) -> float:
        """Seconds between the two samples. Raises Unseen if there is only one."""
        window = self.snapshot.window_s
        if window is None:
            raise Unseen("a second sample (rates need --window)", Sight.NOT_COLLECTED)
        return window

    # Commands

    @cached_property
    def _argv_by_tool(self) -> dict[str, list[tuple[str, ...]]]:
        table: dict[str, list[tuple[str, ...]]] = {}
        for argv in self.snapshot.commands():
            table.setdefault(argv[0].rpartition("/")[2], []).append(argv)
        return table

    def argvs(self, tool: str, *words: str) -> list[tuple[str, ...]]:
        """Every collected command of a tool with all these words among its arguments; shortest first."""
        wanted = set(words)
        name = tool.rpartition("/")[2]
        found = [argv for argv in self._argv_by_tool.get(name, ()) if wanted.issubset(argv[1:])]
        return sorted(found, key=len)

    def has_command(self, tool: str, *words: str) -> bool:
        return bool(self.argvs(tool, *words))

    def result(self, tool: str, *words: str, sample: int = 0) -> CommandResult:
        """
        The output of a command, exact arguments preferred.

        Raises:
            Unseen: It was not run, is not installed, was refused or failed without output.
        """
        exact = (tool, *words)
        candidates = self.argvs(tool, *words)
        if exact in candidates:
            candidates = [exact]
        if not candidates:
            missing = self.why_not(tool) is Sight.NO_TOOL
            raise Unseen(" ".join(exact), Sight.NO_TOOL if missing else Sight.NOT_COLLECTED)
        result = self.snapshot.run(*candidates[0], sample=sample)
        if len(result.stdout) > OUTPUT_CHARS_MAX and tool not in _LOG_TOOLS:
            result = replace(result, stdout=result.stdout[:OUTPUT_CHARS_MAX])
        if result.sight is not Sight.PRESENT:
            raise Unseen(" ".join(candidates[0]), result.sight)
        if result.return_code not in (0, None) and not result.stdout.strip():
            denied = re.search(r"not permitted|ermission denied|must be root|EPERM|EACCES", result.stderr)
            raise Unseen(" ".join(candidates[0]), Sight.UNREADABLE if denied else Sight.FAILED)
        if self.touched is not None and len(self.touched) < 64:
            self.touched.setdefault(result.file, partial(self._command_evidence, result))
        return result

    def command(self, tool: str, *words: str, sample: int = 0) -> str:
        """Standard output of a command. Raises Unseen."""
        return self.result(tool, *words, sample=sample).stdout

    def why_not(self, *tools: str) -> Sight:
        """Why there is no usable output of any of these tools."""
        sights = []
        for tool in tools:
            for argv in self._argv_by_tool.get(tool, ()):
                result = self.snapshot.run(*argv)
                if result.sight is not Sight.PRESENT:
                    sights.append(result.sight)
                elif result.return_code not in (0, None):
                    sights.append(Sight.FAILED)
        for sight in (Sight.TIMED_OUT, Sight.UNREADABLE, Sight.FAILED, Sight.NO_TOOL):
            if sight in sights:
                return sight
        return Sight.NOT_COLLECTED

    def _ip_outputs(
        self, words: frozenset[str], *, without: frozenset[str] = frozenset()
    ) -> Iterator[CommandResult]:
        for argv in self._argv_by_tool.get("ip", ()):
            rest = set(argv[1:])
            if rest & words and not rest & without and "netns" not in rest:
                result = attempt(lambda: self.result(*argv))
                if result is not None and result.argv == argv:
                    yield result

    # Evidence

    def _file_evidence(self, path: str, text: str) -> Evidence:
        quoted = text.replace("\0", " ").strip()[:EVIDENCE_TEXT_MAX]
        return Evidence(source=path, file=f"root{self.snapshot.resolve(path)}", text=quoted)

    def _command_evidence(self, result: CommandResult, text: str = "") -> Evidence:
        quoted = (text or result.stdout or result.stderr).strip()[:EVIDENCE_TEXT_MAX]
        name = self.snapshot._argv.get(result.argv)
        return Evidence(
            source=" ".join(result.argv), file=f"cmd/{name}" if name else result.file, text=quoted
        )

    def at(self, path: str, text: str = "") -> Evidence:
        """A path as evidence, with its content (or the reason why it has none)."""
        if not text:
            reading = self.snapshot.read(path)
            text = reading.text if reading.present else f"({reading.detail or reading.sight})"
        return self._file_evidence(path, text)

    def said(self, tool: str, *words: str, text: str = "") -> Evidence | None:
        """A command as evidence; None if it gave nothing."""
        result = attempt(lambda: self.result(tool, *words))
        return None if result is None else self._command_evidence(result, text)

    def meta_evidence(self, key: str, text: str) -> Evidence:
        """An entry of meta.json as evidence."""
        return Evidence(source=f"meta.json#{key}", file="meta.json", text=text[:EVIDENCE_TEXT_MAX])

    # What the operator expects

    def expect(self, key: str) -> Any:
        """The operator's intent: from the profile, else the snapshot's own; None if nothing was said."""
        if key in self.profile:
            return self.profile[key]
        own = self.meta.get("expect")
        return own.get(key) if isinstance(own, dict) else None

    def expect_int(self, key: str) -> int | None:
        value = self.expect(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def expect_strings(self, key: str) -> list[str]:
        value = self.expect(key)
        return [str(item) for item in value] if isinstance(value, list) else []

    @property
    def roce_priority(self) -> int | None:
        priority = self.expect_int("roce_priority")
        return priority if priority is not None and 0 <= priority < qos.PRIORITIES else None

    @property
    def lossless(self) -> bool:
        """
        The site wants a lossless RoCE priority. ``"lossless": false`` says that its fabric is lossy on
        purpose.
        """
        wanted = self.expect("lossless")
        return bool(wanted) if wanted is not None else self.roce_priority is not None

    @cached_property
    def peers(self) -> list[tuple[str, list[ip.Address]]]:
        """Other nodes and their RDMA addresses: as expected, or as seen on the compared nodes."""
        found: list[tuple[str, list[ip.Address]]] = []
        stated = self.expect("peers")
        for peer in stated if isinstance(stated, list) else []:
            if isinstance(peer, dict) and isinstance(peer.get("rdma_ips"), list):
                addresses = [ip.parse_address(str(text)) for text in peer["rdma_ips"]]
                found.append((str(peer.get("node", "peer")), [a for a in addresses if a is not None]))
        if found:
            return found
        return [(other.name, other.rdma_addresses) for other in self.others if other.rdma_addresses]

    @cached_property
    def rdma_addresses(self) -> list[ip.Address]:
        """Routable addresses of this node's ports in scope."""
        addresses: dict[ip.Address, None] = {}
        for port in attempt(lambda: self.ports) or ():
            for gid in attempt(lambda: port.gids) or ():
                if gid.routable:
                    addresses[gid.ip] = None
        return list(addresses)

    # What kind of machine

    @cached_property
    def role(self) -> str:
        return str(self.meta.get("role") or "host")

    @property
    def uid(self) -> int | None:
        uid = self.meta.get("uid")
        return uid if isinstance(uid, int) else None

    @cached_property
    def is_container(self) -> bool:
        return self.role == "container"

    @cached_property
    def is_vm(self) -> bool:
        if self.role == "vm":
            return True
        said = attempt(lambda: self.command("systemd-detect-virt", "--vm")) or attempt(
            lambda: self.command("systemd-detect-virt")
        )
        if said and said.strip() not in (
            "none",
            "docker",
            "podman",
            "lxc",
            "container-other",
            "systemd-nspawn",
            "",
        ):
            return True
        vendor = (self.peek("/sys/class/dmi/id/sys_vendor") or "").strip()
        product = (self.peek("/sys/class/dmi/id/product_name") or "").strip()
        if vendor in (
            "QEMU",
            "Xen",
            "innotek GmbH",
            "VMware, Inc.",
            "Google",
            "Alibaba Cloud",
            "Tencent Cloud",
        ):
            return "bare" not in product.lower()
        if vendor == "Amazon EC2":
            return "metal" not in product
        if (vendor == "Microsoft Corporation" and product == "Virtual Machine") or "KVM" in product:
            return True
        return bool(re.search(r"^flags\s*:.*\bhypervisor\b", self.peek("/proc/cpuinfo") or "", re.MULTILINE))

    @property
    def is_bare_metal(self) -> bool:
        """A host, or a container on one, as far as can be seen."""
        return not self.is_vm

    @cached_property
    def kernel(self) -> str:
        return (self.peek("/proc/sys/kernel/osrelease") or str(self.meta.get("kernel") or "")).strip()

    @property
    def kernel_version(self) -> tuple[int, int] | None:
        match = re.match(r"(\d{1,3})\.(\d{1,4})", self.kernel, re.ASCII)
        return (int(match[1]), int(match[2])) if match else None

    @fact
    def kernel_words(self) -> list[str]:
        """The boot command line, word by word."""
        return self.text("/proc/cmdline").split()

    @fact
    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes (page counts as they are)."""
        fields = proc.parse_fields(self.text("/proc/meminfo"))
        parsed = {key: attempt(lambda: proc.parse_kb(value)) for key, value in fields.items()}
        return {key: value for key, value in parsed.items() if value is not None}

    @fact
    def modules(self) -> dict[str, str]:
        return proc.parse_modules(self.text("/proc/modules"))

    def module_present(self, name: str) -> bool:
        """Loaded, or built into the kernel (then only /sys/module has it). Raises Unseen."""
        return name in self.modules or bool(attempt(lambda: self.ls(f"/sys/module/{name}")))

    @fact
    def log(self) -> list[misc.LogLine]:
        """The kernel's log. Raises Unseen."""
        reason: Unseen | None = None
        for argv in [
            *self.argvs("dmesg"),
            *self.argvs("journalctl", "-k"),
            *self.argvs("journalctl", "--dmesg"),
        ]:
            try:
                return misc.parse_dmesg(self.result(*argv).stdout, boot_epoch_s=self._boot_epoch_s)
            except Unseen as unseen:
                reason = unseen
        for path in ("/var/log/dmesg", "/var/log/kern.log"):
            text = self.peek(path)
            if text is not None:
                return misc.parse_dmesg(text, boot_epoch_s=self._boot_epoch_s)
        raise reason or Unseen("dmesg", Sight.NOT_COLLECTED)

    @property
    def _boot_epoch_s(self) -> float | None:
        match = re.search(r"^btime (\d{1,12})$", self.peek("/proc/stat") or "", re.MULTILINE)
        return float(match[1]) if match else None

    def log_lines(self, pattern: str, *, ignore_case: bool = False) -> list[misc.LogLine]:
        """Lines of the kernel's log that match. Raises Unseen."""
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        return [line for line in self.log if compiled.search(line.text)]

    def log_evidence(self, line: misc.LogLine) -> Evidence:
        stamp = f"[{line.seconds:.6f}] " if line.seconds is not None else ""
        for tool in ("dmesg", "journalctl"):
            for argv in self.argvs(tool):
                result = attempt(lambda: self.result(*argv))
                if result is not None:
                    return self._command_evidence(result, stamp + line.text)
        return Evidence(source="/var/log/dmesg", file="root/var/log/dmesg", text=stamp + line.text)

    @property
    def uptime_s(self) -> float | None:
        words = (self.peek("/proc/uptime") or "").split()
        return attempt(lambda: _float(words[0])) if words else None

    # NUMA

    @fact
    def numa_nodes(self) -> list[int]:
        """Nodes online. Raises Unseen."""
        try:
            return sorted(sysfs.parse_cpulist(self.text("/sys/devices/system/node/online")))
        except Unseen:
            names = self.ls("/sys/devices/system/node")
            return sorted(int(n[4:]) for n in names if re.fullmatch(r"node\d{1,4}", n, re.ASCII))

    def numa_near(self, one: int, other: int) -> bool:
        """The same node, or nodes of one socket."""
        if one == other:
            return True
        text = self.peek(f"/sys/devices/system/node/node{one}/distance")
        distances = [
            int(word) for word in (text or "").split() if word.isascii() and word.isdigit() and len(word) < 5
        ]
        nodes = attempt(lambda: self.numa_nodes) or []
        if len(distances) != len(nodes) or other not in nodes:
            return False
        return distances[nodes.index(other)] <= SAME_SOCKET_DISTANCE

    def node_cpus(self, node: int) -> frozenset[int]:
        return sysfs.parse_cpulist(self.text(f"/sys/devices/system/node/node{node}/cpulist"))

    # PCI

    @cached_property
    def _pci_functions(self) -> dict[str, PciFunction]:
        return {}

    def pci_function(self, bdf: str) -> PciFunction:
        return self._pci_functions.setdefault(bdf, PciFunction(self, bdf))

    @fact
    def pci(self) -> list[PciFunction]:
        """Every PCI function. Raises Unseen."""
        names = self.ls("/sys/bus/pci/devices")
        return [
            self.pci_function(n)
            for n in names
            if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", n)
        ]

    @cached_property
    def gpus(self) -> list[PciFunction]:
        return [function for function in attempt(lambda: self.pci) or () if function.is_gpu]

    @fact
    def lspci(self) -> dict[str, pcie.PciText]:
        """``lspci -vvv`` by address. Raises Unseen."""
        reason: Unseen | None = None
        for argv in reversed(self.argvs("lspci")):
            try:
                table = pcie.parse_lspci(self.result(*argv).stdout)
            except Unseen as unseen:
                reason = unseen
                continue
            if table:
                return table
        raise reason or Unseen("lspci -vvv", self.why_not("lspci"))

    def lspci_of(self, bdf: str) -> pcie.PciText:
        """One function's block with its capabilities. Raises Unseen, also where lspci was refused them."""
        block = self.lspci.get(bdf)
        if block is None:
            raise Unseen(f"lspci of {bdf}", Sight.NOT_COLLECTED)
        if block.denied:
            raise Unseen(f"PCI capabilities of {bdf} (lspci needs root)", Sight.UNREADABLE)
        return block

    def lspci_evidence(self, text: str) -> Evidence | None:
        argvs = self.argvs("lspci")
        return self.said(*argvs[-1], text=text) if argvs else None

    # Network

    @cached_property
    def _netdevs(self) -> dict[str, Netdev]:
        return {}

    def netdev(self, name: str) -> Netdev:
        return self._netdevs.setdefault(name, Netdev(self, name))

    @cached_property
    def netdev_names(self) -> frozenset[str]:
        """Interfaces of this namespace, as far as was collected."""
        names = set(attempt(lambda: self.ls("/sys/class/net")) or ())
        names.update(attempt(lambda: self.addresses) or ())
        return frozenset(sorted(names)[:NETDEVS_MAX])

    @fact
    def addresses(self) -> dict[str, ip.LinkAddresses]:
        """``ip addr show`` by interface. Raises Unseen."""
        links: dict[str, ip.LinkAddresses] = {}
        for result in self._ip_outputs(frozenset({"addr", "address", "a"})):
            links.update(ip.parse_addr(result.stdout))
        if not links:
            raise Unseen(
                "ip addr show", self.why_not("ip") if not self.has_command("ip") else Sight.NOT_COLLECTED
            )
        return links

    @fact
    def routes(self) -> list[ip.Route]:
        """Every route of every collected table. Raises Unseen."""
        found: dict[ip.Route, None] = {}
        seen = False
        for result in self._ip_outputs(frozenset({"route", "r", "ro"}), without=frozenset({"get"})):
            table = _after(result.argv, "table") or "main"
            named = "main" if table == "all" else table
            routes = ip.parse_routes(result.stdout, table=named, device=_after(result.argv, "dev"))
            seen = seen or bool(routes) or not result.stdout.strip()
            found.update(dict.fromkeys(routes))
        if not seen:
            raise Unseen("ip route show", Sight.NOT_COLLECTED)
        return list(found)

    @fact
    def rules(self) -> list[ip.Rule]:
        """Policy rules in order. Raises Unseen."""
        found: list[ip.Rule] = []
        seen = False
        for result in self._ip_outputs(frozenset({"rule", "ru"})):
            rules = ip.parse_rules(result.stdout)
            seen = seen or bool(rules) or not result.stdout.strip()
            found.extend(rules)
        if not seen:
            raise Unseen("ip rule show", Sight.NOT_COLLECTED)
        return sorted(found, key=lambda rule: rule.preference)

    @fact
    def neighbours(self) -> list[ip.Neighbour]:
        """The neighbour table. Raises Unseen."""
        found: list[ip.Neighbour] = []
        seen = False
        for result in self._ip_outputs(frozenset({"neigh", "neighbor", "neighbour", "n"})):
            seen = True
            found.extend(ip.parse_neighbours(result.stdout, device=_after(result.argv, "dev")))
        if not seen:
            raise Unseen("ip neigh show", Sight.NOT_COLLECTED)
        return found

    def ip_evidence(self, *kinds: str) -> list[Evidence]:
        """``ip route show`` and the like as evidence, whichever form was collected."""
        return [
            self._command_evidence(result)
            for kind in kinds
            for result in self._ip_outputs(frozenset({kind}), without=frozenset({"get"}))
        ]

    def route_through(
        self, address: ip.Address, device: str | None, source: ip.Address | None
    ) -> ip.Route | None:
        """
        The route that a lookup takes to ``address``; with ``device``, one that is bound to it. Raises Unseen.

        Rules are walked in order: those for another source, mark or incoming interface do not match. Within
        a table the longest prefix wins, then the lowest metric. A table that a matching rule names and
        nobody collected makes the answer unknown.
        """
        routes = self.routes
        try:
            rules = self.rules
        except Unseen:
            # Without the rules nobody knows who uses the other tables; with the main table alone there is no doubt.
            if any(route.table not in ("main", "254", "local", "255") for route in routes):
                raise
            rules = []
        rules = rules or [ip.Rule(32766, "all", "main", "from all lookup main")]
        for rule in rules:
            if rule.table in ("local", "255", "") or any(
                w in rule.text.split() for w in ("iif", "fwmark", "to", "not")
            ):
                continue
            if rule.source != "all" and (source is None or not rule.from_address(source)):
                continue
            bound = re.search(r"\boif (\S+)", rule.text)
            if bound is not None and bound[1] != device:
                continue
            table = [route for route in routes if _same_table(route.table, rule.table)]
            if not table and not _same_table(rule.table, "default") and not self._all_tables_collected:
                raise Unseen(f"ip route show table {rule.table}", Sight.NOT_COLLECTED)
            candidates = [r for r in table if (device is None or r.leaves_by(device)) and r.covers(address)]
            if candidates:
                best = min(candidates, key=lambda route: (-route.prefix_length, route.metric))
                return best if best.kind == "unicast" else None
        return None

    @cached_property
    def _all_tables_collected(self) -> bool:
        return any("table" in argv and "all" in argv for argv in self._argv_by_tool.get("ip", ()))

    @cached_property
    def default_route_devices(self) -> frozenset[str]:
        """Interfaces that carry the default route of the main table."""
        return frozenset(
            device
            for route in attempt(lambda: self.routes) or ()
            if route.prefix_length == 0 and _same_table(route.table, "main")
            for device in (route.device, *route.devices)
            if device
        )

    @cached_property
    def bonds(self) -> dict[str, proc.Bond]:
        names = attempt(lambda: self.ls("/proc/net/bonding")) or ()
        found = {}
        for name in names:
            bond = attempt(lambda: proc.parse_bonding(self.text(f"/proc/net/bonding/{name}")))
            if bond is not None:
                found[name] = bond
        return found

    @fact
    def lldp(self) -> dict[str, tuple[str, str]]:
        """Interface → (switch, its port), where the switch tells. Raises Unseen."""
        argvs = self.argvs("lldpctl", "json") or self.argvs("lldpctl")
        if not argvs:
            raise Unseen("lldpctl -f json", self.why_not("lldpctl"))
        return tools.parse_lldp(self.command(*argvs[0]))

    @cached_property
    def _stats(self) -> dict[tuple[str, int], dict[str, int]]:
        return {}

    def stats(self, netdev: str, sample: int = 0) -> dict[str, int]:
        """``ethtool -S`` of an interface. Raises Unseen."""
        key = (netdev, sample)
        if key not in self._stats:
            try:
                self._stats[key] = ethtool.parse_stats(self.command("ethtool", "-S", netdev, sample=sample))
            except ParseError as error:
                raise Unseen(error.what, Sight.FAILED) from error
        return self._stats[key]

    def sysctl(self, name: str) -> str | None:
        """``net.ipv4.conf.all.rp_filter`` by its path below /proc/sys; None if absent. Raises Unseen."""
        text = self.get(f"/proc/sys/{name}")
        return None if text is None else text.strip()

    def conf_max(self, netdev: str, name: str) -> int:
        """
        An IPv4 setting of an interface as the kernel takes it: the larger of ``all`` and its own. Raises
        Unseen.
        """
        values = []
        reason: Unseen | None = None
        for where in ("all", netdev):
            try:
                values.append(self.number(f"/proc/sys/net/ipv4/conf/{where}/{name}"))
            except Unseen as unseen:
                reason = unseen
        if not values:
            assert reason is not None
            raise reason
        return max(values)

    # RDMA

    @fact
    def devices(self) -> list[RdmaDevice]:
        """Every RDMA device. Raises Unseen."""
        try:
            names = self.ls("/sys/class/infiniband")
        except Unseen as unseen:
            if not unseen.absent:
                raise
            return []  # the class does not exist before the first driver is loaded
        return [RdmaDevice(self, name) for name in names[:PORTS_MAX]]

    @fact
    def devinfo(self) -> dict[str, rdma.DevInfo]:
        """``ibv_devinfo``, all forms joined; the verbose one wins. Raises Unseen."""
        table: dict[str, rdma.DevInfo] = {}
        for argv in self.argvs("ibv_devinfo"):
            result = attempt(lambda: self.result(*argv))
            if result is None:
                continue
            for name, info in rdma.parse_ibv_devinfo(result.stdout).items():
                known = table.setdefault(name, rdma.DevInfo())
                known.labels.update(info.labels)
                for number, labels in info.ports.items():
                    known.ports.setdefault(number, {}).update(labels)
        if not table:
            raise Unseen("ibv_devinfo", self.why_not("ibv_devinfo"))
        return table

    def devinfo_evidence(self, device: str) -> Evidence | None:
        for argv in [*self.argvs("ibv_devinfo", device), *self.argvs("ibv_devinfo")]:
            if (seen := self.said(*argv)) is not None:
                return seen
        return None

    @fact
    def resources(self) -> dict[str, dict[str, int]]:
        """Objects in use a device. Raises Unseen."""
        return rdma.parse_resources(self.command("rdma", "resource", "show"))

    @cached_property
    def targets(self) -> list[Target]:
        entries = self.meta.get("targets")
        return [
            Target(self, str(entry.get("name") or "target"), entry["pid"])
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("pid"), int)
        ]

    @cached_property
    def wanted_names(self) -> list[str] | None:
        """Devices that the operator or every target named; None if the store chooses for itself."""
        stated = self.expect_strings("rdma_devices")
        if stated:
            return stated
        names: dict[str, None] = {}
        for target in self.targets:
            if not target.device_names:
                return None
            names.update(dict.fromkeys(target.device_names))
        return list(names) or None

    @fact
    def devices_in_scope(self) -> list[RdmaDevice]:
        """Devices the store uses: those named, else all but management and spare ones. Raises Unseen."""
        wanted = self.wanted_names
        if wanted is not None:
            named = [device for device in self.devices if device.name in wanted]
            if named or self.expect_strings("rdma_devices"):
                return named
        out = self.out_of_scope
        return [device for device in self.devices if device.name not in out]

    @fact
    def out_of_scope(self) -> dict[str, str]:
        """Devices that are listed, not judged, with the reason. Raises Unseen."""
        reasons: dict[str, str] = {}
        wanted = self.wanted_names
        if wanted is not None and (
            self.expect_strings("rdma_devices") or any(device.name in wanted for device in self.devices)
        ):
            return {
                device.name: "not used by the store" for device in self.devices if device.name not in wanted
            }
        rates = {d.name: max((rate_gbps(p) for p in d.ports), default=0.0) for d in self.devices}
        for device in self.devices:
            names = {
                name for port in device.ports for name in (port.netdev_name, *port.own_netdev_names) if name
            }
            faster = [o for o in self.devices if o is not device and rates[o.name] > rates[device.name]]
            if names & self.default_route_devices and faster:
                reasons[device.name] = "management: carries the default route and is slower than its siblings"
            elif device.ports and all(self._spare(port) for port in device.ports):
                reasons[device.name] = "spare: no cable and no address, while siblings are in use"
        return reasons if len(reasons) < len(self.devices) else {}

    def _spare(self, port: Port) -> bool:
        if port.active or not any(p.active for d in self.devices for p in d.ports):
            return False
        if any(gid.routable for gid in attempt(lambda: port.gids) or ()):
            return False
        netdev = port.netdev
        addresses = (attempt(lambda: netdev.addresses) or []) if netdev is not None else []
        if any(not a.is_link_local for a in addresses):
            return False
        return port.is_ethernet or (attempt(lambda: port.phys_state) or (0, ""))[0] in (2, 3)

    @fact
    def ports(self) -> list[Port]:
        """Ports to be judged. Raises Unseen."""
        return [port for device in self.devices_in_scope for port in device.ports]

    @fact
    def gid_uses(self) -> list[GidUse]:
        """
        Every GID that a target uses on a port with a table; without targets, what a choice by content
        takes.
        """
        uses: list[GidUse] = []
        reason: Unseen | None = None
        for target in self.targets:
            if target.protocol == "tcp":
                continue
            try:
                forced = target.gid_index
            except Unseen as unseen:
                reason = unseen
                continue
            uses.extend(self._uses(target, forced, target.ports))
        if not self.targets:
            uses.extend(self._uses(None, None, self.ports))
        if not uses and reason is not None:
            raise reason
        return uses

    def _uses(
        self, target: Target | None, forced: tuple[int, str] | None, ports: Iterable[Port]
    ) -> Iterator[GidUse]:
        for port in ports:
            if forced is not None:
                yield GidUse(target, port, forced[0], forced[1])
                continue
            best = attempt(lambda: port.best_gid)
            yield GidUse(target, port, best.index if best else None, None)

    def judged(self, subjects: Sequence[T], what: str) -> Sequence[T]:
        """The subjects if there are any; else Skip."""
        if subjects:
            return subjects
        raise Skip(f"no {what} here")


def _after(argv: Sequence[str], word: str) -> str:
    """The argument behind a word; empty if the word is not there."""
    return argv[argv.index(word) + 1] if word in argv[:-1] else ""


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise ParseError(f"{word[:20]!r} is no number", fix="see the raw file") from error


_TABLES = {"254": "main", "253": "default", "255": "local"}


def _same_table(one: str, other: str) -> bool:
    return _TABLES.get(one, one) == _TABLES.get(other, other)

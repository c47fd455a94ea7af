"""A healthy node as a snapshot in memory, and small edits that break one thing each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvops.diag.facts.host import HostFacts
from kvops.diag.model import LOUD, Result
from kvops.diag.runner import run, select
from kvops.host import MemoryFiles, SnapshotHost

GIB = 1 << 30
WINDOW_S = 60.0
RAILS = (("mlx5_0", "ens1", "0000:18:00.0", 0), ("mlx5_1", "ens2", "0000:9a:00.0", 1))
GPUS = (("0000:19:00.0", 0), ("0000:9b:00.0", 1))
STORES = (("store0", 100, 0, "mlx5_0", "0-47"), ("store1", 101, 1, "mlx5_1", "48-95"))
PORT = "/sys/class/infiniband/{}/ports/1"

COUNTERS = [
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_wait",
    "VL15_dropped",
]
HW_COUNTERS = [
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "duplicate_request",
    "out_of_buffer",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "req_transport_retries_exceeded",
    "req_rnr_retries_exceeded",
    "resp_remote_access_errors",
    "req_remote_access_errors",
    "req_remote_invalid_request",
    "resp_local_length_error",
    "resp_cqe_error",
    "req_cqe_error",
    "resp_cqe_flush_error",
    "req_cqe_flush_error",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "rx_icrc_encapsulated",
    "rx_write_requests",
]
STATS = [
    "rx_bytes",
    "tx_bytes",
    "rx_out_of_buffer",
    "rx_discards_phy",
    "tx_discards_phy",
    "rx_crc_errors_phy",
    "rx_symbol_err_phy",
    "rx_pcs_symbol_err_phy",
    "rx_corrected_bits_phy",
    "link_down_events_phy",
    "rx_oversize_pkts_phy",
    "rx_out_of_range_len_phy",
    "rx_pci_signal_integrity",
    "tx_pci_signal_integrity",
    "outbound_pci_stalled_rd_events",
    "outbound_pci_stalled_wr_events",
    "outbound_pci_buffer_overflow",
    "module_high_temp",
    "module_bus_stuck",
    "module_bad_shorted",
    "module_unplug",
    "tx_pause_storm_warning_events",
    "tx_pause_storm_error_events",
    "rx_buffer_passed_thres_phy",
    "rx_prio0_bytes",
    "tx_prio0_bytes",
    "rx_prio0_discards",
    "rx_prio0_buf_discard",
    "rx_prio3_bytes",
    "tx_prio3_bytes",
    "rx_prio3_packets",
    "tx_prio3_packets",
    "rx_prio3_discards",
    "rx_prio3_buf_discard",
    "rx_prio3_pause",
    "rx_prio3_pause_duration",
    "tx_prio3_pause",
    "tx_prio3_pause_duration",
]
MOVED_BYTES = 1_500_000_000_000  # in the window, about 200 Gbit/s each way

QOS = """DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
	prio:0 dscp:07,06,05,04,03,02,01,00,
	prio:3 dscp:31,30,29,28,27,26,25,24,
	prio:6 dscp:55,54,53,52,51,50,49,48,
Receive buffer size (bytes): 20480,1019616,0,0,0,0,0,0,max_buffer_size=2080768
Cable len: 7
PFC configuration:
	priority    0   1   2   3   4   5   6   7
	enabled     0   0   0   1   0   0   0   0
	buffer      0   0   0   1   0   0   0   0
"""
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             8253024              8253024              processes
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""


class World:
    """Files and meta of one node; edits change them in place."""

    def __init__(self, name: str = "node-a", octet: int = 61) -> None:
        self.name = name
        self.octet = octet
        self.files: dict[str, str] = {}
        self.later: dict[str, str] = {}
        self.outputs: dict[tuple[str, ...], tuple[int, str, str]] = {}
        self.outputs_later: dict[tuple[str, ...], str] = {}
        self.meta: dict[str, Any] = {
            "schema": 1,
            "kind": "node",
            "node": name,
            "role": "host",
            "kernel": "5.15.0-105-generic",
            "uid": 0,
            "samples": [{"id": "t0", "t": 0.0}, {"id": "t1", "t": WINDOW_S}],
            "scope": ["/proc", "/sys", "/dev/infiniband", "/etc", "/var/lib/kubelet", "/var/log"],
            "not_collected": [],
            "links": {},
            "realpath": {},
            "errors": {},
            "dev": [],
            "targets": [{"name": store[0], "pid": store[1]} for store in STORES],
            "expect": {
                "roce_priority": 3,
                "roce_dscp": 26,
                "rdma_devices": [rail[0] for rail in RAILS],
                "peers": [{"node": "far", "rdma_ips": ["10.30.10.9", "10.30.11.9"]}],
            },
        }
        self._machine()
        for index, rail in enumerate(RAILS):
            self._rail(index, *rail)
        for gpu in GPUS:
            self._gpu(*gpu)
        for store in STORES:
            self._store(*store)
        self._tools()

    # Edits

    def put(self, path: str, text: str) -> World:
        self.files[path] = text
        return self

    def put_later(self, path: str, text: str) -> World:
        self.later[path] = text
        return self

    def drop(self, *prefixes: str) -> World:
        """Remove files, links and scope-visible children below these paths: they become absent."""
        for table in (self.files, self.later, self.meta["links"], self.meta["errors"]):
            for path in [p for p in table if p.startswith(prefixes)]:
                del table[path]
        return self

    def say(self, argv: str, text: str, later: str | None = None, code: int = 0, stderr: str = "") -> World:
        words = tuple(argv.split())
        self.outputs[words] = (code, text, stderr)
        if later is not None:
            self.outputs_later[words] = later
        return self

    def unsay(self, *argvs: str) -> World:
        for argv in argvs:
            self.outputs.pop(tuple(argv.split()), None)
            self.outputs_later.pop(tuple(argv.split()), None)
        return self

    def swap(self, argv: str, old: str, new: str) -> World:
        """Replace text in a command's output."""
        words = tuple(argv.split())
        code, text, stderr = self.outputs[words]
        assert old in text, f"{old!r} is not in the output of {argv}"
        self.outputs[words] = (code, text.replace(old, new), stderr)
        return self

    def log(self, *lines: str) -> World:
        code, text, stderr = self.outputs[("dmesg",)]
        self.outputs[("dmesg",)] = (
            code,
            text + "".join(f"[{5000 + i}.000000] {x}\n" for i, x in enumerate(lines)),
            stderr,
        )
        return self

    def expect(self, **values: Any) -> World:
        self.meta["expect"] |= values
        return self

    def env(self, pid: int = 100, **values: str | None) -> World:
        path = f"/proc/{pid}/environ"
        pairs = dict(item.split("=", 1) for item in self.files[path].split("\0") if item)
        for name, value in values.items():
            if value is None:
                pairs.pop(name, None)
            else:
                pairs[name] = value
        self.files[path] = "".join(f"{name}={value}\0" for name, value in pairs.items())
        return self

    def arg(self, pid: int, name: str, value: str) -> World:
        path = f"/proc/{pid}/cmdline"
        words = [w for w in self.files[path].split("\0") if w and not w.startswith(f"--{name}=")]
        self.files[path] = "\0".join([*words, f"--{name}={value}"]) + "\0"
        return self

    def limit(self, pid: int, name: str, value: str) -> World:
        path = f"/proc/{pid}/limits"
        lines = [x for x in self.files[path].splitlines() if not x.startswith(name)]
        self.files[path] = "\n".join([*lines, f"{name:<26}{value:<21}{value:<21}units"]) + "\n"
        return self

    def status(self, pid: int, **values: str) -> World:
        path = f"/proc/{pid}/status"
        fields = dict(x.split(":\t", 1) for x in self.files[path].splitlines()) | values
        self.files[path] = "".join(f"{k}:\t{v}\n" for k, v in fields.items())
        return self

    def grow(self, name: str, step: int, device: str = "mlx5_0") -> World:
        """A counter of the port moves by so much within the window."""
        for folder, names in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
            if name in names or name.startswith("port_"):
                path = f"{PORT.format(device)}/{folder}/{name}"
                if path in self.files:
                    self.later[path] = str(int(self.files[path]) + step)
                    return self
        raise AssertionError(name)

    def grow_wire(self, step: int, *names: str, netdev: str = "ens1") -> World:
        """Counters of ethtool -S move by so much within the window."""
        words = ("ethtool", "-S", netdev)
        before = _stats(self.outputs[words][1])
        after = _stats(self.outputs_later[words])
        for name in names:
            before.setdefault(name, 7)
            after[name] = before[name] + step
        self.outputs[words] = (0, _print_stats(before), "")
        self.outputs_later[words] = _print_stats(after)
        return self

    def container(self) -> World:
        self.meta["role"] = "container"
        return self

    def vm(self) -> World:
        self.meta["role"] = "vm"
        return self

    # Facts

    def snapshot(self) -> SnapshotHost:
        files = {"root" + path: text.encode() for path, text in self.files.items()}
        files |= {"root.t1" + path: text.encode() for path, text in self.later.items()}
        commands = {}
        for index, (argv, (code, text, stderr)) in enumerate(self.outputs.items()):
            name = f"c{index}.txt"
            commands[name] = {"argv": list(argv), "rc": code}
            files[f"cmd/{name}"] = text.encode()
            if stderr:
                files[f"cmd/c{index}.err.txt"] = stderr.encode()
            if argv in self.outputs_later:
                files[f"cmd.t1/{name}"] = self.outputs_later[argv].encode()
        meta = json.loads(json.dumps({**self.meta, "cmd": commands}))
        return SnapshotHost(meta=meta, files=MemoryFiles(files))

    def facts(self) -> HostFacts:
        return HostFacts(self.snapshot())

    # The healthy node

    def _machine(self) -> None:
        put = self.put
        put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro intel_iommu=on iommu=pt")
        put("/proc/sys/kernel/osrelease", "5.15.0-105-generic")
        put(
            "/proc/meminfo",
            "MemTotal: 2113421312 kB\nHugePages_Total: 524288\nHugePages_Free: 262144\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n",
        )
        modules = [
            "nvidia_peermem",
            "nvidia",
            "rdma_ucm",
            "ib_umad",
            "mlx5_ib",
            "ib_uverbs",
            "ib_core",
            "mlx5_core",
        ]
        put("/proc/modules", "".join(f"{m} 16384 0 - Live 0x0\n" for m in modules))
        put("/proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=1056710656k 0 0\n")
        put("/proc/uptime", "9000.00 100.00")
        put("/proc/stat", "cpu  1000 0 1000 80000 0 0 0 0 0 0\nbtime 1760000000\n").put_later(
            "/proc/stat", "cpu  2000 0 2000 160000 0 0 0 0 0 0\nbtime 1760000000\n"
        )
        put("/proc/net/softnet_stat", "00001000 00000000 00000000\n")
        put(
            "/proc/net/udp",
            "   sl  local_address rem_address\n   1: 00000000:0044 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 812 2 0 0\n",
        )
        put(
            "/proc/interrupts",
            "            CPU0  CPU1\n"
            + "".join(
                f" {64 + i}: 10 12 IR-PCI-MSI 0-edge mlx5_comp0@pci:{r[2]}\n" for i, r in enumerate(RAILS)
            ),
        )
        for i, (_, _, _, node) in enumerate(RAILS):
            put(f"/proc/irq/{64 + i}/effective_affinity_list", "3" if node == 0 else "50")
        put("/sys/devices/system/node/online", "0-1")
        for node in (0, 1):
            put(f"/sys/devices/system/node/node{node}/distance", "10 21" if node == 0 else "21 10")
            put(f"/sys/devices/system/node/node{node}/cpulist", "0-47" if node == 0 else "48-95")
            put(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages", "262144")
            put(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/free_hugepages", "131072")
        for path, text in {
            "/proc/sys/kernel/numa_balancing": "0",
            "/proc/sys/vm/zone_reclaim_mode": "0",
            "/proc/sys/vm/max_map_count": "16777216",
            "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
            "/proc/sys/net/ipv4/neigh/default/gc_thresh2": "8192",
            "/proc/sys/net/ipv4/neigh/default/gc_thresh3": "16384",
            "/proc/sys/net/netfilter/nf_conntrack_count": "1200",
            "/proc/sys/net/netfilter/nf_conntrack_max": "262144",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "/sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never",
            "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
            "/sys/devices/system/cpu/cpu0/cpuidle/state1/latency": "2",
            "/sys/devices/system/cpu/cpu0/cpuidle/state1/disable": "0",
            "/sys/devices/system/edac/mc/mc0/ce_count": "3",
            "/sys/devices/system/edac/mc/mc0/ue_count": "0",
            "/sys/class/iommu/dmar0/intel-iommu/cap": "d2008c222f0686",
            "/sys/fs/cgroup/memory.max": "max",
            "/sys/fs/cgroup/hugetlb.2MB.max": "max",
            "/sys/fs/cgroup/pids.max": "max",
            "/sys/fs/cgroup/memory.events": "oom 0\noom_kill 0\n",
            "/sys/module/mlx5_core/version": "24.10-2.1.8",
            "/sys/module/mlx5_ib/version": "24.10-2.1.8",
            "/sys/module/ib_core/version": "24.10-2.1.8",
            "/sys/module/nvidia/version": "550.127.08",
            "/sys/module/nvidia_peermem/version": "550.127.08",
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.08",
            "/etc/hosts": "127.0.0.1 localhost\n192.0.2.61 node-a\n",
            "/etc/udev/rules.d/99-qos.rules": 'RUN+="/usr/bin/mlnx_qos -i ens1 --trust dscp"\n',
        }.items():
            put(path, text)
        for where in ("all", "default"):
            for name, value in (
                ("arp_ignore", "1"),
                ("arp_announce", "2"),
                ("rp_filter", "2"),
                ("arp_filter", "0"),
            ):
                put(f"/proc/sys/net/ipv4/conf/{where}/{name}", value)
        self._pci_bridge("0000:15:01.0", "pci0000:15/0000:15:01.0")
        self._pci_bridge("0000:97:01.0", "pci0000:97/0000:97:01.0")
        for root, switch in (("15", "17"), ("97", "99")):
            for port in ("00.0", "02.0"):
                upstream = f"pci0000:{root}/0000:{root}:01.0/0000:{int(switch, 16) - 1:02x}:00.0/0000:{switch}:{port}"
                self._pci_bridge(f"0000:{switch}:{port}", upstream)
        self._netdev("eno1", "02:00:00:00:03:5a", 1500, 25000)

    def _pci_bridge(self, bdf: str, real: str) -> None:
        path = f"/sys/bus/pci/devices/{bdf}"
        for name, text in (
            ("class", "0x060400"),
            ("vendor", "0x1000"),
            ("device", "0xc030"),
            ("numa_node", "0"),
        ):
            self.put(f"{path}/{name}", text)
        for name, text in (("link_speed", "32.0 GT/s PCIe"), ("link_width", "16")):
            self.put(f"{path}/current_{name}", text).put(f"{path}/max_{name}", text)
        self.meta["links"][f"{path}/driver"] = "/sys/bus/pci/drivers/pcieport"
        self.meta["realpath"][path] = f"/sys/devices/{real}"

    def _netdev(self, name: str, mac: str, mtu: int, speed: int) -> None:
        for file, text in {
            "address": mac,
            "mtu": str(mtu),
            "operstate": "up",
            "carrier": "1",
            "flags": "0x1003",
            "carrier_changes": "2",
            "speed": str(speed),
            "type": "1",
        }.items():
            self.put(f"/sys/class/net/{name}/{file}", text)
        for file, text in (
            ("arp_ignore", "1"),
            ("arp_announce", "2"),
            ("rp_filter", "2"),
            ("arp_filter", "0"),
        ):
            self.put(f"/proc/sys/net/ipv4/conf/{name}/{file}", text)
        self.put(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "0")

    def _rail(self, index: int, device: str, netdev: str, bdf: str, node: int) -> None:
        put, links = self.put, self.meta["links"]
        pci, ib, port = f"/sys/bus/pci/devices/{bdf}", f"/sys/class/infiniband/{device}", PORT.format(device)
        for name, text in {
            "class": "0x020000",
            "vendor": "0x15b3",
            "device": "0x1021",
            "numa_node": str(node),
            "local_cpulist": "0-47" if node == 0 else "48-95",
            "current_link_speed": "32.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_width": "16",
            "sriov_numvfs": "0",
            "aer_dev_correctable": "RxErr 2\nTOTAL_ERR_COR 2\n",
            "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0\n",
            "aer_dev_fatal": "TOTAL_ERR_FATAL 0\n",
        }.items():
            put(f"{pci}/{name}", text)
        links |= {
            f"{pci}/driver": "/sys/bus/pci/drivers/mlx5_core",
            f"{pci}/iommu_group": f"/sys/kernel/iommu_groups/{60 + index}",
            f"{pci}/net/{netdev}": f"/sys/class/net/{netdev}",
            f"{pci}/infiniband/{device}": ib,
            f"{ib}/device": pci,
            f"/sys/class/net/{netdev}/device": pci,
        }
        root, switch = ("15", "17") if index == 0 else ("97", "99")
        self.meta["realpath"][pci] = (
            f"/sys/devices/pci0000:{root}/0000:{root}:01.0/0000:{int(switch, 16) - 1:02x}:00.0/0000:{switch}:00.0/{bdf}"
        )
        put(f"/sys/kernel/iommu_groups/{60 + index}/type", "identity")
        guid = f"0200:00ff:fe00:0{self.octet}{index}"
        for name, text in {
            "node_type": "1: CA",
            "node_guid": guid,
            "fw_ver": "28.43.1014",
            "board_id": "MT_0000000838",
        }.items():
            put(f"{ib}/{name}", text)
        for name, text in {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "Ethernet",
            "lid": "0x0",
            "sm_lid": "0x0",
            "sm_sl": "0",
            "pkeys/0": "0xffff",
        }.items():
            put(f"{port}/{name}", text)
        ipv4 = f"0000:0000:0000:0000:0000:ffff:0a1e:{index:02x}{self.octet:02x}"
        link_local = f"fe80:0000:0000:0000:0000:00ff:fe00:0{self.octet}{index}"
        for slot, (gid, kind) in enumerate(
            ((link_local, "IB/RoCE v1"), (link_local, "RoCE v2"), (ipv4, "IB/RoCE v1"), (ipv4, "RoCE v2"))
        ):
            put(f"{port}/gids/{slot}", gid)
            put(f"{port}/gid_attrs/types/{slot}", kind)
            put(f"{port}/gid_attrs/ndevs/{slot}", netdev)
        put(f"{port}/gids/4", "0000:0000:0000:0000:0000:0000:0000:0000")
        self.meta["errors"][f"{port}/gid_attrs/types/4"] = "EINVAL"
        self.meta["errors"][f"{port}/gid_attrs/ndevs/4"] = "EINVAL"
        for name in COUNTERS:
            put(f"{port}/counters/{name}", "15")
        for side in ("xmit", "rcv"):
            put(f"{port}/counters/port_{side}_data", "1000").put_later(
                f"{port}/counters/port_{side}_data", str(1000 + MOVED_BYTES // 4)
            )
            put(f"{port}/counters/port_{side}_packets", "50").put_later(
                f"{port}/counters/port_{side}_packets", str(50 + MOVED_BYTES // 4096)
            )
        for name in HW_COUNTERS:
            put(f"{port}/hw_counters/{name}", "9")
        put(f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", device)
        put(f"/sys/class/infiniband_verbs/uverbs{index}/abi_version", "1")
        for kind, minor in (("uverbs", 192), ("umad", 0), ("issm", 64)):
            self.meta["dev"].append(
                {
                    "path": f"/dev/infiniband/{kind}{index}",
                    "type": "c",
                    "major": 231,
                    "minor": minor + index,
                    "mode": "crw-rw-rw-",
                }
            )
        if index == 0:
            self.meta["dev"].append(
                {
                    "path": "/dev/infiniband/rdma_cm",
                    "type": "c",
                    "major": 10,
                    "minor": 122,
                    "mode": "crw-rw-rw-",
                }
            )
        self._netdev(netdev, f"02:00:00:00:0{self.octet % 10}:0{index + 1}", 9000, 400000)
        put(f"/sys/class/net/{netdev}/qos/trust", "dscp")
        for side in ("roce_np", "roce_rp"):
            put(f"/sys/class/net/{netdev}/ecn/{side}/enable/3", "1")
        put(f"/sys/class/net/{netdev}/ecn/roce_np/cnp_dscp", "48")
        put(f"/sys/class/net/{netdev}/ecn/roce_np/cnp_802p_prio", "6")
        stats = dict.fromkeys(STATS, 1000)
        later = dict(stats)
        for side in ("rx", "tx"):
            later[f"{side}_prio3_bytes"] += MOVED_BYTES
            later[f"{side}_prio3_packets"] += MOVED_BYTES // 4096
        self.say(f"ethtool -S {netdev}", _print_stats(stats), _print_stats(later))
        self.say(f"ethtool -i {netdev}", f"driver: mlx5_core\nversion: 24.10\nbus-info: {bdf}\n")
        self.say(
            f"ethtool -a {netdev}",
            f"Pause parameters for {netdev}:\nAutonegotiate:\toff\nRX:\t\toff\nTX:\t\toff\n",
        )
        self.say(
            f"ethtool --show-fec {netdev}",
            f"FEC parameters for {netdev}:\nConfigured FEC encodings: Auto\nActive FEC encoding: RS\n",
        )
        self.say(f"ethtool --show-eee {netdev}", f"EEE settings for {netdev}:\n\tEEE status: disabled\n")
        self.say(f"mlnx_qos -i {netdev}", QOS)
        self.say(
            f"mlxlink -d {device} -c",
            "Effective Physical BER             : 15E-255\nRaw Physical BER                   : 1E-9\n",
        )
        self.say(
            f"mlxconfig -d {bdf} -e q",
            "Configurations:                    Default         Current         Next Boot\n"
            "         ATS_ENABLED                         False(0)        False(0)        False(0)\n"
            "         PCI_WR_ORDERING                     per_mkey(0)     per_mkey(0)     per_mkey(0)\n"
            "         ROCE_CC_PRIO_MASK_P1                255             255             255\n"
            "         USER_PROGRAMMABLE_CC                True(1)         True(1)         True(1)\n",
        )

    def _gpu(self, bdf: str, node: int) -> None:
        path = f"/sys/bus/pci/devices/{bdf}"
        for name, text in (
            ("class", "0x030200"),
            ("vendor", "0x10de"),
            ("device", "0x2330"),
            ("numa_node", str(node)),
        ):
            self.put(f"{path}/{name}", text)
        self.meta["links"][f"{path}/driver"] = "/sys/bus/pci/drivers/nvidia"
        root, switch = ("15", "17") if node == 0 else ("97", "99")
        self.meta["realpath"][path] = (
            f"/sys/devices/pci0000:{root}/0000:{root}:01.0/0000:{int(switch, 16) - 1:02x}:00.0/0000:{switch}:02.0/{bdf}"
        )

    def _store(self, name: str, pid: int, node: int, device: str, cpus: str) -> None:
        words = [
            "mooncake_client",
            "--host=192.0.2.61",
            "--protocol=rdma",
            f"--device_names={device}",
            "--global_segment_size=256 GB",
        ]
        words.append("--metadata_server=http://192.0.2.10:8080/metadata")
        self.put(f"/proc/{pid}/cmdline", "\0".join(words) + "\0")
        self.put(f"/proc/{pid}/environ", "MC_GID_INDEX=3\0MC_IB_TC=106\0MC_STORE_USE_HUGEPAGE=1\0")
        self.put(f"/proc/{pid}/limits", LIMITS)
        self.put(
            f"/proc/{pid}/status",
            f"Name:\t{name}\nState:\tS (sleeping)\nHugetlbPages:\t268435456 kB\nCapEff:\t000001ffffffffff\n"
            f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{node}\n",
        )
        self.put(
            f"/proc/{pid}/numa_maps",
            f"7f0000000000 bind:{node} file=/anon_hugepage\\040(deleted) huge anon=131072 N{node}=131072 kernelpagesize_kB=2048\n",
        )
        self.put(f"/proc/{pid}/cgroup", "0::/system.slice/store.service\n")
        self.put(
            f"/proc/{pid}/maps", "7f0000000000-7f4000000000 rw-s 00000000 00:0f 1 /anon_hugepage (deleted)\n"
        )
        self.put(
            f"/proc/{pid}/stat", f"{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {20000 + pid} 0 0\n"
        )

    def _tools(self) -> None:
        lspci = ""
        for bdf in ("15:01.0", "17:00.0", "17:02.0", "97:01.0", "99:00.0", "99:02.0"):
            kind = "Root" if bdf.endswith("01.0") else "Downstream"
            lspci += (
                f"{bdf} PCI bridge: Broadcom PEX890xx (rev b0)\n\tCapabilities: [68] Express (v2) {kind} Port (Slot+), MSI 00\n"
                "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl+ DirectTrans+\n"
                "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-\n\n"
            )
        for _, _, bdf, _ in RAILS:
            lspci += (
                f"{bdf[5:]} Ethernet controller: Mellanox Technologies MT2910 Family [ConnectX-7]\n\tCapabilities: [60] Express (v2) Endpoint, MSI 00\n"
                "\t\tDevCap:\tMaxPayload 512 bytes, PhantFunc 0\n\t\tDevCtl:\tCorrErr+ NonFatalErr+\n"
                "\t\t\tRlxdOrd+ ExtTag+ NoSnoop+\n\t\t\tMaxPayload 256 bytes, MaxReadReq 4096 bytes\n"
                "\tCapabilities: [1c0 v1] Address Translation Service (ATS)\n\t\tATSCtl:\tEnable-, Smallest Translation Unit: 00\n\n"
            )
        for bdf, _ in GPUS:
            lspci += f"{bdf[5:]} 3D controller: NVIDIA Corporation Device 2330 (rev a1)\n\tKernel driver in use: nvidia\n\n"
        self.say("lspci -vvv", lspci)
        self.say(
            "dmesg",
            "[    0.000000] Command line: iommu=pt\n[    1.220000] iommu: Default domain type: Passthrough\n[   14.200000] mlx5_core 0000:18:00.0 ens1: Link up\n",
        )
        octet = self.octet
        addr = "1: lo: <LOOPBACK,UP> mtu 65536 state UNKNOWN\n    inet 127.0.0.1/8 scope host lo\n"
        addr += f"2: eno1: <BROADCAST,UP> mtu 1500 state UP\n    inet 192.0.2.{octet}/24 scope global eno1\n"
        routes = f"default via 192.0.2.254 dev eno1 proto static \n192.0.2.0/24 dev eno1 proto kernel scope link src 192.0.2.{octet} \n"
        rules = "0:\tfrom all lookup local\n"
        neighbours = ""
        for i, (_, netdev, _, _) in enumerate(RAILS):
            addr += f"{i + 3}: {netdev}: <BROADCAST,UP> mtu 9000 state UP\n    inet 10.30.{i}.{octet}/24 scope global {netdev}\n"
            routes += f"10.30.{i}.0/24 dev {netdev} proto kernel scope link src 10.30.{i}.{octet} \n"
            routes += f"default via 10.30.{i}.1 dev {netdev} table {200 + i} \n10.30.{i}.0/24 dev {netdev} table {200 + i} scope link src 10.30.{i}.{octet} \n"
            rules += f"{1000 + i}:\tfrom 10.30.{i}.{octet} lookup {200 + i}\n"
            neighbours += f"10.30.{i}.1 dev {netdev} lladdr 02:00:00:00:fe:0{i} REACHABLE \n"
        neighbours += "10.30.0.99 dev ens1 FAILED \n"
        self.say("ip addr show", addr).say("ip route show table all", routes).say("ip neigh show", neighbours)
        self.say("ip rule show", rules + "32766:\tfrom all lookup main\n32767:\tfrom all lookup default\n")
        self.say("rdma system show", "netns shared copy-on-fork on\n")
        self.say(
            "rdma link show",
            "".join(f"link {d}/1 state ACTIVE physical_state LINK_UP netdev {n} \n" for d, n, _, _ in RAILS),
        )
        self.say(
            "rdma resource show",
            "".join(
                f"{i}: {r[0]}: pd 12 cq 101 qp 2113 cm_id 8 mr 640 ctx 11 srq 2 \n"
                for i, r in enumerate(RAILS)
            ),
        )
        self.say(
            "ibv_devinfo -v",
            "".join(
                f"hca_id:\t{r[0]}\n\tfw_ver:\t\t\t\t28.43.1014\n\tmax_mr_size:\t\t\t0xffffffffffffffff\n\tmax_qp:\t\t\t\t131072\n\tmax_cq:\t\t\t\t16777216\n"
                "\tmax_mr:\t\t\t\t16777216\n\tmax_qp_rd_atom:\t\t\t16\n\tmax_res_rd_atom:\t\t2097152\n\t\tport:\t1\n"
                "\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tmax_mtu:\t\t4096 (5)\n\t\t\tactive_mtu:\t\t4096 (5)\n"
                for r in RAILS
            ),
        )
        self.say("ibv_devices", "    device          \t   node GUID\n    mlx5_0\t0200\n")
        self.say("ldconfig -p", "\tlibibverbs.so.1 (libc6,x86-64) => /lib/libibverbs.so.1\n")
        self.say(
            "devlink health show", "pci/0000:18:00.0:\n  reporter fw\n    state healthy error 2 recover 2\n"
        )
        self.say(
            "chronyc -c tracking",
            "C0000201,192.0.2.1,3,1767607200.1,0.000012345,0.000008,0.00002,-12.3,0.001,0.012,0.0004,0.0002,64.4,Normal\n",
        )
        self.say(
            "nstat -az TcpExtIPReversePathFilter",
            "#kernel\nTcpExtIPReversePathFilter       1811               0.0\n",
        )
        self.say("iptables -S", "-P INPUT ACCEPT\n-P FORWARD ACCEPT\n-P OUTPUT ACCEPT\n")
        self.say(
            "nvidia-smi -q -d MEMORY",
            "".join(
                f"GPU 0000{b.upper()}\n    BAR1 Memory Usage\n        Total                             : 131072 MiB\n        Used : 1 MiB\n        Free                              : 131071 MiB\n"
                for b, _ in GPUS
            ),
        )


def _stats(text: str) -> dict[str, int]:
    return {k.strip(): int(v) for k, _, v in (x.rpartition(":") for x in text.splitlines()[1:])}


def _print_stats(stats: dict[str, int]) -> str:
    return "NIC statistics:\n" + "".join(f"     {name}: {value}\n" for name, value in stats.items())


Edit = Callable[[World], object]


def judge(*worlds: World) -> list[Result]:
    """Every check over these nodes."""
    return run([world.facts() for world in worlds], select())


def outcomes(results: list[Result]) -> dict[str, str]:
    """Check → its worst outcome over nodes, loud first."""
    order = ["fail", "warn", "unknown", "info", "ok", "skipped"]
    found: dict[str, str] = {}
    for result in results:
        known = found.get(result.check)
        if known is None or order.index(result.outcome) < order.index(known):
            found[result.check] = str(result.outcome)
    return found


def loud(results: list[Result]) -> dict[str, str]:
    """Only those that warn or fail."""
    return {
        r.check: str(r.outcome)
        for r in sorted(results, key=lambda r: r.outcome == "fail")
        if r.outcome in LOUD
    }

"""Healthy hosts with NICs of other makers, in the snapshot format, to be broken one defect at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvops.diag.snapshot import from_files
from kvops.host import SnapshotHost

WINDOW_S = 20
PID = 5100
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Maker:
    """What differs between NICs: names, ids, rate, the counters that the driver has."""

    driver: str
    rdma_module: str
    vendor: str
    device: str
    title: str
    rate: str
    gbps: int
    fw: str
    names: tuple[str, ...]  # of verbs devices
    netdevs: tuple[str, ...]
    hw_counters: tuple[str, ...]
    ib_counters: bool = True
    node_type: str = "1: CA"
    link_layer: str = "Ethernet"


_MLX5_COUNTERS = (
    "duplicate_request implied_nak_seq_err lifespan local_ack_timeout_err np_cnp_sent np_ecn_marked_roce_packets "
    "out_of_buffer out_of_sequence packet_seq_err req_cqe_error req_cqe_flush_error req_remote_access_errors "
    "req_remote_invalid_request req_rnr_retries_exceeded req_transport_retries_exceeded resp_cqe_error "
    "resp_cqe_flush_error resp_local_length_error resp_remote_access_errors rnr_nak_retry_err roce_adp_retrans "
    "roce_adp_retrans_to roce_slow_restart roce_slow_restart_cnps roce_slow_restart_trans rp_cnp_handled "
    "rp_cnp_ignored rx_atomic_requests rx_dct_connect rx_icrc_encapsulated rx_read_requests rx_write_requests"
)
_BNXT_COUNTERS = (
    "active_pds active_ahs active_qps active_srqs active_cqs active_mrs active_mws rx_pkts rx_bytes tx_pkts tx_bytes "
    "recoverable_errors rx_roce_errors rx_roce_discards to_retransmits seq_err_naks_rcvd max_retry_exceeded "
    "rnr_naks_rcvd missing_resp unrecoverable_err bad_resp_err local_qp_op_err local_protection_err mem_mgmt_op_err "
    "remote_invalid_req_err remote_access_err remote_op_err dup_req res_exceed_max res_length_mismatch "
    "res_tx_pci_err res_rx_pci_err oos_drop_count rx_roce_good_pkts rx_out_of_buffer"
)
_IRDMA_COUNTERS = (
    "ip4InOctets ip4InPkts ip4OutOctets ip4OutPkts ip4InDiscards ip4OutNoRoutes tcpRetransSegs tcpInOptErrors "
    "tcpInProtoErrors iwInRdmaReads iwInRdmaSends iwInRdmaWrites iwOutRdmaReads iwOutRdmaSends iwOutRdmaWrites "
    "cnpHandled cnpIgnored cnpSent RxECNMrkd RxUDP TxUDP"
)
_EFA_COUNTERS = (
    "tx_bytes tx_pkts rx_bytes rx_pkts rx_drops send_bytes send_wrs recv_bytes recv_wrs rdma_read_wrs rdma_read_bytes "
    "rdma_read_wr_err rdma_read_resp_bytes rdma_write_wrs rdma_write_bytes rdma_write_wr_err rdma_write_recv_bytes "
    "retrans_bytes retrans_pkts retrans_timeout_events unresponsive_remote_events impaired_remote_conn_events"
)
_IB_COUNTERS = (
    "VL15_dropped excessive_buffer_overrun_errors link_downed link_error_recovery local_link_integrity_errors "
    "port_rcv_data port_rcv_errors port_rcv_packets port_xmit_data port_xmit_discards port_xmit_packets port_xmit_wait "
    "symbol_error unicast_rcv_packets unicast_xmit_packets"
)

CONNECTX = Maker(
    driver="mlx5_core",
    rdma_module="mlx5_ib",
    vendor="0x15b3",
    device="0x1021",
    title="Mellanox Technologies MT2910 Family [ConnectX-7]",
    rate="400 Gb/sec (4X NDR)",
    gbps=400,
    fw="28.43.1014",
    names=("mlx5_0", "mlx5_1"),
    netdevs=("ens2f0np0", "ens6f0np0"),
    hw_counters=tuple(_MLX5_COUNTERS.split()),
)
BLUEFIELD = Maker(
    driver="mlx5_core",
    rdma_module="mlx5_ib",
    vendor="0x15b3",
    device="0xa2dc",
    title="Mellanox Technologies MT43244 BlueField-3 integrated ConnectX-7 network controller (rev 01)",
    rate="400 Gb/sec (4X NDR)",
    gbps=400,
    fw="32.43.2024",
    names=("mlx5_0", "mlx5_1"),
    netdevs=("ens2f0np0", "ens6f0np0"),
    hw_counters=tuple(_MLX5_COUNTERS.split()),
)
BROADCOM = Maker(
    driver="bnxt_en",
    rdma_module="bnxt_re",
    vendor="0x14e4",
    device="0x1760",
    title="Broadcom Inc. and subsidiaries BCM57608 25Gb/50Gb/100Gb/200Gb/400Gb Ethernet (rev 11)",
    rate="400 Gb/sec (4X NDR)",
    gbps=400,
    fw="231.2.63.0",
    names=("bnxt_re0", "bnxt_re1"),
    netdevs=("ens2np0", "ens6np0"),
    hw_counters=tuple(_BNXT_COUNTERS.split()),
    ib_counters=False,
)
INTEL = Maker(
    driver="ice",
    rdma_module="irdma",
    vendor="0x8086",
    device="0x1592",
    title="Intel Corporation Ethernet Controller E810-C for QSFP (rev 02)",
    rate="100 Gb/sec (4X EDR)",
    gbps=100,
    fw="1.71",
    names=("rocep24s0f0", "rocep161s0f0"),
    netdevs=("ens2f0", "ens6f0"),
    hw_counters=tuple(_IRDMA_COUNTERS.split()),
    ib_counters=False,
)
EFA = Maker(
    driver="efa",
    rdma_module="efa",
    vendor="0x1d0f",
    device="0xefa2",
    title="Amazon.com, Inc. Elastic Fabric Adapter (EFA)",
    rate="100 Gb/sec (4X EDR)",
    gbps=100,
    fw="0.0.0.0",
    names=("rdmap24s0", "rdmap161s0"),
    netdevs=(),
    hw_counters=tuple(_EFA_COUNTERS.split()),
    ib_counters=False,
    node_type="7: unspecified",
    link_layer="Unspecified",
)
INFINIBAND = Maker(
    driver="mlx5_core",
    rdma_module="mlx5_ib",
    vendor="0x15b3",
    device="0x1021",
    title="Mellanox Technologies MT2910 Family [ConnectX-7]",
    rate="400 Gb/sec (4X NDR)",
    gbps=400,
    fw="28.43.1014",
    names=("mlx5_0", "mlx5_1"),
    netdevs=("ibp24s0", "ibp161s0"),
    hw_counters=tuple(n for n in _MLX5_COUNTERS.split() if not n.startswith(("np_", "rp_", "roce_"))),
    link_layer="InfiniBand",
)

BDFS = ("0000:18:00.0", "0000:a1:00.0")
PORTS = ("0000:17:01.0", "0000:a0:01.0")  # root ports above them


@dataclass
class Node:
    """One host that can be changed before it is judged. Paths are those of the host."""

    maker: Maker
    name: str = "gpu-7"
    number: int = 7  # last octet of its addresses
    files: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)  # second sample
    commands: dict[tuple[str, ...], tuple[str, int, str]] = field(default_factory=dict)
    commands_later: dict[tuple[str, ...], str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    # The parts that cases touch by name

    def device(self, index: int) -> str:
        return f"/sys/class/infiniband/{self.maker.names[index]}"

    def port(self, index: int) -> str:
        return f"{self.device(index)}/ports/1"

    def pci(self, index: int) -> str:
        return f"/sys/bus/pci/devices/{BDFS[index]}"

    def net(self, index: int) -> str:
        return f"/sys/class/net/{self.maker.netdevs[index]}"

    def put(self, path: str, text: str, later: str | None = None) -> None:
        self.files[path] = text
        if later is not None:
            self.later[path] = later

    def drop(self, *prefixes: str) -> None:
        """Remove whatever lies at or below these paths."""
        for table in (self.files, self.later, self.links, self.errors):
            for path in [p for p in table if any(p == x or p.startswith(x + "/") for x in prefixes)]:
                del table[path]

    def run(self, *argv: str, out: str = "", rc: int = 0, err: str = "", later: str | None = None) -> None:
        self.commands[argv] = (out, rc, err)
        if later is not None:
            self.commands_later[argv] = later

    def edit(self, *argv: str, old: str, new: str) -> None:
        """Change a command's output in both samples; what is to go must be there."""
        out, rc, err = self.commands[argv]
        assert old in out, (argv, old)
        self.commands[argv] = (out.replace(old, new), rc, err)
        if argv in self.commands_later:
            self.commands_later[argv] = self.commands_later[argv].replace(old, new)

    def counter(self, index: int, name: str, step: int, before: int = 1000) -> None:
        """Let a counter of a port move over the window."""
        folder = "counters" if self.maker.ib_counters and name in _IB_COUNTERS.split() else "hw_counters"
        path = f"{self.port(index)}/{folder}/{name}"
        assert path in self.files, path
        self.put(path, str(before), str(before + step))

    def stat(self, index: int, steps: dict[str, int], before: int = 1000) -> None:
        """Let counters of ``ethtool -S`` move over the window."""
        argv = ("ethtool", "-S", self.maker.netdevs[index])
        out, later = self.commands[argv][0], self.commands_later[argv]
        for name, step in steps.items():
            lines = [line for line in out.splitlines() if line.split(":")[0].strip() != name]
            after = [line for line in later.splitlines() if line.split(":")[0].strip() != name]
            out = "\n".join([*lines, f"     {name}: {before}"]) + "\n"
            later = "\n".join([*after, f"     {name}: {before + step}"]) + "\n"
        self.commands[argv] = (out, 0, "")
        self.commands_later[argv] = later

    def environment(self, **values: str | None) -> None:
        """Change the process' environment; None takes a variable out."""
        path = f"/proc/{PID}/environ"
        table = dict(pair.split("=", 1) for pair in self.files[path].split("\0") if pair)
        table |= {key: value for key, value in values.items() if value is not None}
        self.put(path, "".join(f"{k}={v}\0" for k, v in table.items() if values.get(k, v) is not None))

    def snapshot_files(self) -> dict[str, bytes]:
        """As a snapshot's folder holds it."""
        names = {argv: f"{n:03d}_{argv[0].rpartition('/')[2]}.txt" for n, argv in enumerate(self.commands)}
        meta = {
            "schema": 1,
            "kind": "node",
            "node": self.name,
            "role": "host",
            "os": "Debian 12",
            "kernel": "6.1.0-28-amd64",
            "arch": "x86_64",
            "uid": 0,
            "samples": [{"id": "t0", "t": 100.0}, {"id": "t1", "t": 100.0 + WINDOW_S}],
            "scope": [
                *(
                    "/proc/cmdline",
                    "/proc/cpuinfo",
                    "/proc/meminfo",
                    "/proc/modules",
                    "/proc/mounts",
                    "/proc/uptime",
                ),
                *("/proc/sys", "/proc/interrupts", "/proc/irq", "/proc/net", "/proc/stat", f"/proc/{PID}"),
                *(
                    "/sys/devices/system",
                    "/sys/kernel/mm",
                    "/sys/kernel/iommu_groups",
                    "/sys/bus/pci/devices",
                ),
                *(
                    "/sys/class/net",
                    "/sys/class/infiniband",
                    "/sys/class/infiniband_verbs",
                    "/sys/class/iommu",
                ),
                *(
                    "/sys/module",
                    "/sys/fs/cgroup",
                    "/dev/infiniband",
                    "/var/log/mooncake",
                    "/sys/class/dmi/id",
                ),
            ],
            "targets": [{"name": "store", "pid": PID}],
            "expect": {"rdma_devices": list(self.maker.names), "roce_priority": 3, "roce_dscp": 26},
            "links": self.links,
            "errors": self.errors,
            "realpath": {
                f"/sys/bus/pci/devices/{bdf}": f"/sys/devices/pci{port[:7]}/{port}/{bdf}"
                for bdf, port in zip(BDFS, PORTS, strict=True)
            }
            | {f"/sys/bus/pci/devices/{port}": f"/sys/devices/pci{port[:7]}/{port}" for port in PORTS},
            "dev": [
                {
                    "path": f"/dev/infiniband/{kind}{n}",
                    "type": "c",
                    "major": 231,
                    "minor": base + n,
                    "mode": mode,
                }
                for n in range(len(self.maker.names))
                for kind, base, mode in (("uverbs", 192, "crw-rw-rw-"), ("umad", 0, "crw-------"))
            ]
            + [
                {
                    "path": "/dev/infiniband/rdma_cm",
                    "type": "c",
                    "major": 10,
                    "minor": 125,
                    "mode": "crw-rw-rw-",
                }
            ],
            "cmd": {
                names[argv]: {"argv": list(argv), "rc": rc} for argv, (_, rc, _) in self.commands.items()
            },
        }
        for key, value in self.meta.items():
            meta[key] = {**meta[key], **value} if key == "expect" else value
        files = {"meta.json": json.dumps(meta)}
        files |= {f"root{path}": text for path, text in self.files.items()}
        files |= {f"root.t1{path}": text for path, text in self.later.items()}
        files |= {f"cmd/{names[argv]}": out for argv, (out, _, _) in self.commands.items()}
        files |= {f"cmd.t1/{names[argv]}": out for argv, out in self.commands_later.items()}
        files |= {
            f"cmd/{names[argv].removesuffix('.txt')}.err.txt": err
            for argv, (_, _, err) in self.commands.items()
            if err
        }
        return {name: text.encode() for name, text in files.items()}

    def snapshot(self) -> SnapshotHost:
        return from_files(self.snapshot_files(), self.name)[0]


def healthy(maker: Maker, *, name: str = "gpu-7", number: int = 7) -> Node:
    """A host of two sockets with two NICs of this maker on the first, busy with transfers, without a defect."""
    node = Node(maker=maker, name=name, number=number)
    _machine(node)
    for index in range(len(maker.names)):
        _function(node, index)
        _verbs(node, index)
        if maker.netdevs:
            _interface(node, index)
    _ip(node)
    _process(node)
    return node


def _machine(node: Node) -> None:
    put = node.put
    put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/md0 ro intel_iommu=on iommu=pt\n")
    put(
        "/proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) 8480+\n\n"
    )
    put(
        "/proc/meminfo",
        f"MemTotal:  {GIB} kB\nMemFree:  {GIB // 4} kB\nMemAvailable:  {GIB // 2} kB\n"
        "HugePages_Total:  0\nHugePages_Free:  0\nHugePages_Rsvd:  0\nHugepagesize:  2048 kB\n",
    )
    put("/proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=528482304k 0 0\n")
    put("/proc/uptime", "864000.50 90000000.00\n", "864020.50 90000900.00\n")
    put("/proc/sys/kernel/osrelease", "6.1.0-28-amd64\n")
    put("/proc/sys/kernel/numa_balancing", "0\n")
    put("/proc/sys/vm/max_map_count", "16777216\n")
    put("/proc/sys/vm/zone_reclaim_mode", "0\n")
    put("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    for threshold, value in (("1", 1024), ("2", 8192), ("3", 16384)):
        put(f"/proc/sys/net/ipv4/neigh/default/gc_thresh{threshold}", f"{value}\n")
    for conf in ("all", "default", *node.maker.netdevs):
        for key, value in (("arp_ignore", 1), ("arp_announce", 2), ("rp_filter", 2), ("arp_filter", 0)):
            put(f"/proc/sys/net/ipv4/conf/{conf}/{key}", f"{value}\n")
    put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    put("/sys/kernel/mm/transparent_hugepage/defrag", "always defer defer+madvise [madvise] never\n")
    put("/sys/devices/system/node/online", "0-1\n")
    for n, cpus in ((0, "0-31"), (1, "32-63")):
        put(f"/sys/devices/system/node/node{n}/cpulist", f"{cpus}\n")
        put(f"/sys/devices/system/node/node{n}/distance", "10 21\n" if n == 0 else "21 10\n")
        put(f"/sys/devices/system/node/node{n}/meminfo", f"Node {n} MemTotal:  {GIB // 2} kB\n")
    put("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n")
    put("/sys/class/dmi/id/sys_vendor", "Supermicro\n")
    put("/sys/class/dmi/id/product_name", "SYS-821GE\n")
    modules = [
        node.maker.driver,
        node.maker.rdma_module,
        "ib_uverbs",
        "ib_core",
        "rdma_cm",
        "rdma_ucm",
        "ib_umad",
    ]
    put("/proc/modules", "".join(f"{m} 540672 1 - Live 0x0000000000000000\n" for m in dict.fromkeys(modules)))
    node.run(
        "dmesg",
        out="[    0.000000] Linux version 6.1.0-28-amd64\n[   12.100000] systemd[1]: Detected architecture x86-64.\n",
    )
    node.run(
        "chronyc",
        "-c",
        "tracking",
        out="C0000201,192.0.2.1,2,1732950000.1,0.000012,0.000004,0.00003,-5.1,0.001,0.02,0.0004,0.0002,64.2,Normal\n",
    )
    node.run("rdma", "system", "show", out="netns shared copy-on-fork on\n")
    links = zip(node.maker.names, node.maker.netdevs or ("", ""), strict=True)
    node.run(
        "rdma",
        "link",
        "show",
        out="".join(
            f"link {name}/1 state ACTIVE physical_state LINK_UP{' netdev ' + netdev if netdev else ''} \n"
            for name, netdev in links
        ),
    )
    node.run(
        "rdma",
        "resource",
        "show",
        out="".join(
            f"{n}: {name}: pd 4 cq 12 qp 64 cm_id 0 mr 40 ctx 2 \n" for n, name in enumerate(node.maker.names)
        ),
    )
    node.run("ibv_devinfo", "-v", out="".join(_devinfo(node, n) for n in range(len(node.maker.names))))


def _devinfo(node: Node, index: int) -> str:
    maker = node.maker
    return (
        f"hca_id:\t{maker.names[index]}\n\ttransport:\t\t\tInfiniBand (0)\n\tfw_ver:\t\t\t\t{maker.fw}\n"
        "\tmax_mr_size:\t\t\t0xffffffffffffffff\n\tmax_qp:\t\t\t\t131072\n\tmax_cq:\t\t\t\t16777216\n"
        "\tmax_mr:\t\t\t\t16777216\n\tmax_qp_rd_atom:\t\t\t16\n\tmax_res_rd_atom:\t\t2097152\n"
        "\tphys_port_cnt:\t\t\t1\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n"
        f"\t\t\tmax_mtu:\t\t4096 (5)\n\t\t\tactive_mtu:\t\t4096 (5)\n\t\t\tlink_layer:\t\t{maker.link_layer}\n\n"
    )


def _function(node: Node, index: int) -> None:
    pci, maker, put = node.pci(index), node.maker, node.put
    speed = "32.0 GT/s PCIe"
    put(f"{pci}/vendor", f"{maker.vendor}\n")
    put(f"{pci}/device", f"{maker.device}\n")
    put(f"{pci}/class", "0x020700\n" if maker.link_layer == "InfiniBand" else "0x020000\n")
    put(f"{pci}/numa_node", "0\n")
    put(f"{pci}/local_cpulist", "0-31\n")
    for path in (pci, f"/sys/bus/pci/devices/{PORTS[index]}"):
        for end in ("current", "max"):
            put(f"{path}/{end}_link_speed", f"{speed}\n")
            put(f"{path}/{end}_link_width", "16\n")
    for kind in ("correctable", "nonfatal", "fatal"):
        total = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}[kind]
        put(f"{pci}/aer_dev_{kind}", f"RxErr 0\nBadTLP 0\nTOTAL_ERR_{total} 0\n")
    upstream = f"/sys/bus/pci/devices/{PORTS[index]}"
    put(f"{upstream}/vendor", "0x8086\n")
    put(f"{upstream}/device", "0x352a\n")
    put(f"{upstream}/class", "0x060400\n")
    node.links[f"{pci}/driver"] = f"/sys/bus/pci/drivers/{maker.driver}"
    node.links[f"{pci}/iommu_group"] = f"/sys/kernel/iommu_groups/{index}"
    node.links[f"{pci}/infiniband/{maker.names[index]}"] = node.device(index)
    node.links[f"{upstream}/driver"] = "/sys/bus/pci/drivers/pcieport"
    put(f"/sys/kernel/iommu_groups/{index}/type", "identity\n")


def _verbs(node: Node, index: int) -> None:
    device, port, maker, put = node.device(index), node.port(index), node.maker, node.put
    infiniband = maker.link_layer == "InfiniBand"
    node.links[f"{device}/device"] = node.pci(index)
    put(f"{device}/node_type", f"{maker.node_type}\n")
    put(f"{device}/fw_ver", f"{maker.fw}\n")
    put(f"{device}/board_id", "MT_0000000838\n" if maker.vendor == "0x15b3" else "1\n")
    put(f"{device}/node_guid", f"5e25:73ff:fe00:{node.number:02x}{index:02x}\n")
    put(f"{device}/node_desc", f"{node.name} HCA-{index + 1}\n")
    put(f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", f"{maker.names[index]}\n")
    put(f"/sys/class/infiniband_verbs/uverbs{index}/abi_version", "1\n")
    put(f"{port}/state", "4: ACTIVE\n")
    put(f"{port}/phys_state", "5: LinkUp\n")
    put(f"{port}/rate", f"{maker.rate}\n")
    put(f"{port}/link_layer", f"{maker.link_layer}\n")
    put(f"{port}/lid", "0x1f\n" if infiniband else "0x0\n")
    put(f"{port}/sm_lid", "0x1\n" if infiniband else "0x0\n")
    put(f"{port}/sm_sl", "0\n")
    put(f"{port}/pkeys/0", "0xffff\n")
    link_local = f"fe80:0000:0000:0000:5e25:73ff:fe00:{node.number:02x}{index:02x}"
    v4 = f"0000:0000:0000:0000:0000:ffff:0a28:{index:02x}{node.number:02x}"
    gids = [link_local] if infiniband or not maker.netdevs else [link_local, link_local, v4, v4]
    for slot in range(1 if not maker.netdevs else 8):
        put(f"{port}/gids/{slot}", (gids[slot] if slot < len(gids) else "0000" + ":0000" * 7) + "\n")
        if slot < len(gids):
            put(
                f"{port}/gid_attrs/types/{slot}",
                "RoCE v2\n" if slot % 2 and not infiniband else "IB/RoCE v1\n",
            )
            if maker.netdevs and not infiniband:
                put(f"{port}/gid_attrs/ndevs/{slot}", f"{maker.netdevs[index]}\n")
            else:
                node.errors[f"{port}/gid_attrs/ndevs/{slot}"] = "EINVAL"
        else:
            node.errors[f"{port}/gid_attrs/types/{slot}"] = node.errors[f"{port}/gid_attrs/ndevs/{slot}"] = (
                "EINVAL"
            )
    for name in maker.hw_counters:
        put(f"{port}/hw_counters/{name}", "12\n" if name == "lifespan" else "0\n")
    moved = 60 * 10**9  # bytes each way in the window
    if maker.ib_counters:
        for name in _IB_COUNTERS.split():
            put(f"{port}/counters/{name}", "0\n")
        for name, step in (
            ("port_xmit_data", moved // 4),
            ("port_rcv_data", moved // 4),
            ("port_xmit_packets", moved // 4096),
            ("port_rcv_packets", moved // 4096),
        ):
            put(f"{port}/counters/{name}", "1000\n", f"{1000 + step}\n")
    for name in maker.hw_counters:
        if name in ("tx_bytes", "rx_bytes", "ip4InOctets", "ip4OutOctets", "rdma_read_bytes"):
            put(f"{port}/hw_counters/{name}", "1000\n", f"{1000 + moved}\n")
        if name in ("tx_pkts", "rx_pkts", "ip4InPkts", "ip4OutPkts", "rx_roce_good_pkts"):
            put(f"{port}/hw_counters/{name}", "1000\n", f"{1000 + moved // 4096}\n")


def _interface(node: Node, index: int) -> None:
    net, name, maker, put = node.net(index), node.maker.netdevs[index], node.maker, node.put
    infiniband = maker.link_layer == "InfiniBand"
    node.links[f"{net}/device"] = node.pci(index)
    node.links[f"{node.pci(index)}/net/{name}"] = net
    put(f"{net}/mtu", "4092\n" if infiniband else "9000\n")
    put(f"{net}/operstate", "up\n")
    put(f"{net}/carrier", "1\n")
    put(f"{net}/carrier_changes", "2\n")
    put(f"{net}/speed", f"{maker.gbps * 1000}\n")
    put(f"{net}/flags", "0x1003\n")
    put(f"{net}/type", "32\n" if infiniband else "1\n")
    put(f"{net}/address", f"5c:25:73:00:{node.number:02x}:{index:02x}\n")
    put(f"{net}/ifindex", f"{index + 3}\n")
    if infiniband:
        return
    node.run(
        "ethtool",
        "-i",
        name,
        out=f"driver: {maker.driver}\nversion: 6.1.0-28-amd64\nfirmware-version: {maker.fw}\nbus-info: {BDFS[index]}\nsupports-statistics: yes\n",
    )
    node.run(
        "ethtool",
        "-a",
        name,
        out=f"Pause parameters for {name}:\nAutonegotiate:\toff\nRX:\t\toff\nTX:\t\toff\n\n",
    )
    stats = {
        "mlx5_core": {
            "rx_prio3_bytes": 60 * 10**9,
            "tx_prio3_bytes": 60 * 10**9,
            "rx_prio0_bytes": 10**6,
            "tx_prio0_bytes": 10**6,
            "rx_prio3_pause": 0,
            "tx_prio3_pause": 0,
            "rx_prio3_pause_duration": 0,
            "tx_prio3_pause_duration": 0,
            "rx_discards_phy": 0,
            "tx_discards_phy": 0,
            "rx_crc_errors_phy": 0,
            "rx_prio3_buf_discard": 0,
            "rx_prio3_discards": 0,
            "link_down_events_phy": 0,
            "outbound_pci_stalled_wr": 0,
            "outbound_pci_stalled_wr_events": 0,
            "tx_pause_storm_warning_events": 0,
            "tx_pause_storm_error_events": 0,
            "module_high_temp": 0,
            "rx_pci_signal_integrity": 0,
            "tx_pci_signal_integrity": 0,
            "outbound_pci_buffer_overflow": 0,
        },
        "bnxt_en": {
            "rx_bytes": 60 * 10**9,
            "tx_bytes": 60 * 10**9,
            "rx_pfc_ena_frames_pri3": 0,
            "tx_pfc_ena_frames_pri3": 0,
        },
        "ice": {
            "rx_bytes": 10**6,
            "tx_bytes": 10**6,
            "rx_priority_3_xoff.nic": 0,
            "tx_priority_3_xoff.nic": 0,
            "rx_crc_errors.nic": 0,
        },
    }[maker.driver]
    before = "".join(f"     {key}: 5000\n" for key in stats)
    after = "".join(f"     {key}: {5000 + step}\n" for key, step in stats.items())
    node.run("ethtool", "-S", name, out="NIC statistics:\n" + before, later="NIC statistics:\n" + after)
    if maker.driver == "mlx5_core":
        node.run("mlnx_qos", "-i", name, out=_MLNX_QOS)
    else:
        node.run(
            "dcb",
            "pfc",
            "show",
            "dev",
            name,
            out="pfc-cap 8 macsec-bypass off delay 0 \nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off \n",
        )
        node.run("dcb", "app", "show", "dev", name, out="dscp-prio 24:3 25:3 26:3 48:6 \n")


_MLNX_QOS = """DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:3 dscp:31,30,29,28,27,26,25,24,
\tprio:6 dscp:55,54,53,52,51,50,49,48,
Receive buffer size (bytes): 20480,1019616,0,0,0,0,0,0,max_buffer_size=2080768
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0
\tbuffer      0   0   0   1   0   0   0   0
"""


def _ip(node: Node) -> None:
    n, addresses, routes, table, rules, neighbours = node.number, [], [], [], [], []
    addresses.append(
        "1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN group default qlen 1000\n"
        "    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00\n    inet 127.0.0.1/8 scope host lo\n       valid_lft forever preferred_lft forever\n"
    )
    addresses.append(
        f"2: eno1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc mq state UP group default qlen 1000\n"
        f"    link/ether 3c:ec:ef:00:00:{n:02x} brd ff:ff:ff:ff:ff:ff\n    inet 192.0.2.{n}/24 brd 192.0.2.255 scope global eno1\n"
    )
    routes.append("default via 192.0.2.254 dev eno1 \n")
    routes.append(f"192.0.2.0/24 dev eno1 proto kernel scope link src 192.0.2.{n} \n")
    node.put("/sys/class/net/eno1/operstate", "up\n")
    node.put("/sys/class/net/eno1/mtu", "1500\n")
    node.put("/sys/class/net/eno1/address", f"3c:ec:ef:00:00:{n:02x}\n")
    for index, name in enumerate(node.maker.netdevs):
        kind = "infiniband" if node.maker.link_layer == "InfiniBand" else "ether"
        addresses.append(
            f"{index + 3}: {name}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP group default qlen 1000\n"
            f"    link/{kind} 5c:25:73:00:{n:02x}:{index:02x} brd ff:ff:ff:ff:ff:ff\n"
            f"    inet 10.40.{index}.{n}/24 brd 10.40.{index}.255 scope global {name}\n       valid_lft forever preferred_lft forever\n"
            f"    inet6 fe80::5e25:73ff:fe00:{n:02x}{index:02x}/64 scope link \n       valid_lft forever preferred_lft forever\n"
        )
        routes.append(f"10.40.{index}.0/24 dev {name} proto kernel scope link src 10.40.{index}.{n} \n")
        table.append(f"default via 10.40.{index}.1 dev {name} table {200 + index} \n")
        table.append(f"10.40.{index}.0/24 dev {name} table {200 + index} scope link src 10.40.{index}.{n} \n")
        rules.append(f"{1000 + index}:\tfrom 10.40.{index}.{n} lookup {200 + index}\n")
        neighbours.append(f"10.40.{index}.1 dev {name} lladdr 00:1c:73:00:00:{index:02x} REACHABLE \n")
        neighbours.append(f"10.40.{index}.9 dev {name} lladdr 5c:25:73:00:09:{index:02x} REACHABLE \n")
    node.run("ip", "addr", "show", out="".join(addresses))
    node.run("ip", "route", "show", out="".join(routes))
    node.run("ip", "route", "show", "table", "all", out="".join(table + routes))
    node.run(
        "ip",
        "rule",
        "show",
        out="0:\tfrom all lookup local\n"
        + "".join(rules)
        + "32766:\tfrom all lookup main\n32767:\tfrom all lookup default\n",
    )
    node.run("ip", "neigh", "show", out="".join(neighbours))


def _process(node: Node) -> None:
    proc, put = f"/proc/{PID}", node.put
    put(
        f"{proc}/cmdline",
        "\0".join(
            (
                "mooncake_client",
                f"--host=192.0.2.{node.number}",
                "--protocol=rdma",
                f"--device_names={','.join(node.maker.names)}",
                "--global_segment_size=64 GB",
                "--master_server_address=192.0.2.200:50051",
            )
        )
        + "\0",
    )
    put(
        f"{proc}/environ",
        "MC_IB_TC=106\0HOME=/root\0" if node.maker.link_layer == "Ethernet" else "HOME=/root\0",
    )
    put(
        f"{proc}/status",
        "Name:\tmooncake_client\nUid:\t0\t0\t0\t0\nVmLck:\t       0 kB\nVmPin:\t134217728 kB\nThreads:\t40\n"
        "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-31\nMems_allowed_list:\t0\n",
    )
    limits = [
        ("Max processes", "unlimited", "unlimited", "processes"),
        ("Max open files", "1048576", "1048576", "files"),
        ("Max locked memory", "unlimited", "unlimited", "bytes"),
    ]
    put(
        f"{proc}/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        + "".join(f"{a:<26}{b:<21}{c:<21}{d:<10}\n" for a, b, c, d in limits),
    )
    put(
        f"{proc}/numa_maps",
        "7f0000000000 bind:0 file=/memfd:segment anon=16777216 N0=16777216 kernelpagesize_kB=4\n",
    )

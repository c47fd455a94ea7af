"""Values that look frightening and are not: each row of "false positives" of the catalogue that can be set up."""

from __future__ import annotations

from collections.abc import Callable

from defects import BOND, NIC, PORT0, bond, dev
from world import COUNTERS, HW_COUNTERS, PORT, World

BENIGN: dict[str, Callable[[World], object]] = {}


def row(name: str, edit: Callable[[World], object]) -> None:
    BENIGN[name] = edit


row(
    "lifetime totals are huge",
    lambda w: [
        w.put(f"{PORT0}/{f}/{n}", "4200000000")
        for f, names in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS))
        for n in names
    ],
)
row(
    "counters were reset by a driver reload",
    lambda w: [
        w.put(f"{PORT0}/hw_counters/{n}", "90000").put_later(f"{PORT0}/hw_counters/{n}", "0")
        for n in HW_COUNTERS
    ],
)
row(
    "congestion control at work",
    lambda w: (
        w.grow("np_ecn_marked_roce_packets", 900_000)
        .grow("np_cnp_sent", 800_000)
        .grow("rp_cnp_handled", 700_000)
    ),
)
row("pause frames without pause time", lambda w: w.grow_wire(500_000, "rx_prio3_pause", "tx_prio3_pause"))
row("port_xmit_wait grows", lambda w: w.grow("port_xmit_wait", 10**9))
row("corrected bits grow with FEC", lambda w: w.grow_wire(10**9, "rx_corrected_bits_phy"))
row("flush completions at teardown", lambda w: w.grow("req_cqe_flush_error", 900).grow("req_cqe_error", 900))
row("a few retransmissions", lambda w: w.grow("packet_seq_err", 30).grow("out_of_sequence", 40))
row("duplicate requests", lambda w: w.grow("duplicate_request", 400))
row("out of buffer for IP", lambda w: w.grow("out_of_buffer", 5000))
row("best-effort drops", lambda w: w.grow_wire(5000, "rx_prio0_discards", "rx_discards_phy"))
row(
    "27 W slot message",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: mlx5_pcie_event:299:(pid 3): Detected insufficient power on the PCIe slot (27W)."
    ),
)
row(
    "ACCESS_REG fails while polling",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:829:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3), syndrome (0x305684), err(-22)"
    ),
)
row(
    "SrcValid on switch ports",
    lambda w: w.swap(
        "lspci -vvv", "ACSCtl:\tSrcValid+ TransBlk- ReqRedir-", "ACSCtl:\tSrcValid+ TransBlk- ReqRedir-"
    ),
)
row(
    "relaxed ordering off on bridges",
    lambda w: w.swap(
        "lspci -vvv",
        "17:00.0 PCI bridge: Broadcom PEX890xx (rev b0)\n",
        "17:00.0 PCI bridge: Broadcom PEX890xx (rev b0)\n\t\tDevCtl:\tCorrErr+\n\t\t\tRlxdOrd- ExtTag-\n",
    ),
)
row(
    "no IOMMU groups",
    lambda w: [
        w.meta["links"].pop(f"/sys/bus/pci/devices/{b}/iommu_group") for b in ("0000:18:00.0", "0000:9a:00.0")
    ],
)
row("IOMMU off without SR-IOV", lambda w: w.put("/proc/cmdline", "root=/dev/sda1 intel_iommu=off"))
row("the last token wins", lambda w: w.put("/proc/cmdline", "intel_iommu=off intel_iommu=on iommu=pt"))
row(
    "tokens for both vendors",
    lambda w: w.put("/proc/cmdline", "intel_iommu=on amd_iommu=on iommu=pt").put(
        "/proc/cpuinfo", "vendor_id\t: GenuineIntel\n"
    ),
)
row(
    "VFs for containers without IOMMU",
    lambda w: (w.put(f"{NIC}/sriov_numvfs", "8"), w.drop("/sys/class/iommu")),
)
row(
    "an x8 card by design",
    lambda w: (
        w.put(f"{NIC}/max_link_width", "8"),
        w.put(f"{NIC}/current_link_width", "8"),
        [w.put(f"{PORT.format(d)}/rate", "200 Gb/sec (4X HDR)") for d in ("mlx5_0", "mlx5_1")],
    ),
)
row(
    "a card whose functions share a port",
    lambda w: [
        *(w.put(f"{NIC}/{k}_link_width", "4") for k in ("max", "current")),
        *(
            w.put(f"/sys/class/infiniband/{d}/sys_image_guid", "0800:0000:0000:0001")
            for d in ("mlx5_0", "mlx5_1")
        ),
    ],
)
row(
    "the slot is narrower than the card",
    lambda w: (
        w.put(f"{NIC}/current_link_width", "8"),
        [w.put(f"/sys/bus/pci/devices/0000:17:00.0/{k}_link_width", "8") for k in ("max", "current")],
        [w.put(f"{PORT.format(d)}/rate", "200 Gb/sec (4X HDR)") for d in ("mlx5_0", "mlx5_1")],
    ),
)
row(
    "an idle GPU downshifts",
    lambda w: w.put("/sys/bus/pci/devices/0000:19:00.0/current_link_speed", "2.5 GT/s PCIe"),
)
row(
    "2: memory tiering",
    lambda w: (
        w.put("/proc/sys/kernel/numa_balancing", "2")
        .put("/sys/devices/system/node/online", "0-2")
        .put("/sys/devices/system/node/node2/cpulist", "")
        .put("/sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages", "262144")
        .put("/sys/devices/system/node/node2/hugepages/hugepages-2048kB/free_hugepages", "0")
    ),
)
row(
    "intel_pstate powersave",
    lambda w: w.put("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave").put(
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate"
    ),
)
row(
    "sub-NUMA clusters of one socket",
    lambda w: (
        w.put("/sys/devices/system/node/node0/distance", "10 12"),
        w.put("/sys/devices/system/node/node1/distance", "12 10"),
        w.put(
            "/proc/100/numa_maps", "7f0000000000 bind:1 huge anon=131072 N1=131072 kernelpagesize_kB=2048\n"
        ),
    ),
)
row("memlock limited, with the capability", lambda w: w.limit(100, "Max locked memory", "65536"))
row("VmPin above RAM", lambda w: w.status(100, VmPin="99999999999 kB"))
row(
    "another process was killed for memory",
    lambda w: w.log("Out of memory: Killed process 99 (chrome) total-vm:1kB"),
)
row(
    "built-in modules",
    lambda w: (
        w.put("/proc/modules", w.files["/proc/modules"].replace("ib_uverbs 16384", "other 1")),
        w.put("/sys/module/ib_uverbs/initstate", "live"),
    ),
)
row("no issm nodes", lambda w: dev(w, "issm0", "issm1"))
row(
    "inbox modules have no version",
    lambda w: (
        w.drop("/sys/module/mlx5_core", "/sys/module/mlx5_ib", "/sys/module/ib_core")
        .put("/sys/module/mlx5_core/srcversion", "A")
        .put("/sys/module/mlx5_ib/srcversion", "B")
        .put("/sys/module/ib_core/srcversion", "C")
    ),
)
row(
    "old kernels give mlx5 a constant version",
    lambda w: (
        w.drop("/sys/module/ib_core")
        .put("/sys/module/ib_core/srcversion", "C")
        .put("/sys/module/mlx5_core/version", "5.0-0")
        .put("/sys/module/mlx5_ib/version", "5.0-0")
    ),
)
row(
    "a function is handed to a guest",
    lambda w: (
        [
            w.put(f"/sys/bus/pci/devices/0000:2a:00.0/{k}", v)
            for k, v in (("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x1021"))
        ],
        w.meta["links"].update({"/sys/bus/pci/devices/0000:2a:00.0/driver": "/sys/bus/pci/drivers/vfio-pci"}),
    ),
)
row("health reporters have old errors", lambda w: w.swap("devlink health show", "error 2", "error 77"))
row(
    "the VF was taken long ago",
    lambda w: w.log("hv_netvsc eth0: Data path switched from VF: x").put("/proc/uptime", "900000 1"),
)
row(
    "link went down while booting",
    lambda w: w.say(
        "dmesg",
        w.outputs[("dmesg",)][1]
        + "".join(f"[  {20 + i}.000000] mlx5_core 0000:18:00.0 ens1: Link down\n" for i in range(9)),
    ),
)
row("carrier changed twice", lambda w: w.put_later("/sys/class/net/ens1/carrier_changes", "4"))
row("a bond shows the rate of a member", lambda w: bond(w, BOND).put(f"{PORT0}/rate", "200 Gb/sec (2X NDR)"))
row(
    "active-backup by choice",
    lambda w: bond(
        w,
        BOND.replace("IEEE 802.3ad Dynamic link aggregation", "fault-tolerance (active-backup)").replace(
            "layer3+4 (1)", "layer2 (0)"
        ),
    ).env(MC_NUM_QP_PER_EP="1"),
)
row("a spare port is down", lambda w: _third(w, "1: DOWN", "2: Polling"))
row("a management NIC is slower, with MTU 1500", lambda w: _third(w, "4: ACTIVE", "5: LinkUp"))
row(
    "EINVAL of empty slots",
    lambda w: [w.put(f"{PORT0}/gids/{i}", "0000:" * 7 + "0000") for i in range(5, 16)],
)
row(
    "another index, the same kind of slot",
    lambda w: [
        w.put(f"{PORT.format('mlx5_1')}/gids/5", w.files[f"{PORT.format('mlx5_1')}/gids/3"])
        .put(f"{PORT.format('mlx5_1')}/gid_attrs/types/5", "RoCE v2")
        .put(f"{PORT.format('mlx5_1')}/gid_attrs/ndevs/5", "ens2")
        .env(101, MC_GID_INDEX="5")
    ],
)
row(
    "a stale FAILED neighbour",
    lambda w: w.swap(
        "ip neigh show",
        "10.30.0.99 dev ens1 FAILED",
        "10.30.0.98 dev ens1 FAILED \n10.30.0.99 dev ens1 INCOMPLETE",
    ),
)
row("a locally administered MAC", lambda w: w.put("/sys/class/net/ens1/address", "06:00:00:00:01:01"))
row(
    "strict filter on a symmetric host",
    lambda w: [w.put(f"/proc/sys/net/ipv4/conf/{n}/rp_filter", "1") for n in ("all", "ens1", "ens2")],
)
row(
    "old reverse-path drops",
    lambda w: w.say("nstat -az TcpExtIPReversePathFilter", "TcpExtIPReversePathFilter 99999 0.0\n"),
)
row(
    "a rule drops UDP 4791",
    lambda w: w.say("iptables -S", "-P INPUT ACCEPT\n-A INPUT -p udp -m udp --dport 4791 -j DROP\n"),
)
row(
    "the ports are opened before the policy",
    lambda w: w.say(
        "iptables -S",
        "-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m multiport --dports 12001,15000:17000 -j ACCEPT\n",
    ),
)
row(
    "soft RoCE's tunnel socket",
    lambda w: w.put(
        "/proc/net/udp",
        "  sl\n  12: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 0 2 0 0\n",
    ),
)
row("IPv6 off on an IPv4 fabric", lambda w: w.put("/proc/sys/net/ipv6/conf/ens1/disable_ipv6", "1"))
row(
    "reserved ports inside the range",
    lambda w: w.put("/proc/sys/net/ipv4/ip_local_port_range", "1024 65000").put(
        "/proc/sys/net/ipv4/ip_local_reserved_ports", "4791,12001,15000-17000"
    ),
)
row(
    "ICMP is filtered",
    lambda w: w.say(
        "ping -M do -c 1 -s 4172 -I ens1 10.30.10.9",
        "1 packets transmitted, 0 received, 100% packet loss, time 0ms\n",
        code=1,
    ),
)
row(
    "a lossy fabric by policy",
    lambda w: (
        [
            w.swap(f"mlnx_qos -i {n}", "enabled     0   0   0   1", "enabled     0   0   0   0")
            for n in ("ens1", "ens2")
        ],
        w.expect(lossless=False),
    ),
)
row(
    "RTT-based control instead of DCQCN",
    lambda w: (
        [
            w.put(f"/sys/class/net/{n}/ecn/{s}/enable/3", "0")
            for n in ("ens1", "ens2")
            for s in ("roce_np", "roce_rp")
        ],
        w.expect(congestion_control="rtt"),
        w.grow("np_ecn_marked_roce_packets", 50_000),
    ),
)
row(
    "acknowledgements in another priority",
    lambda w: (w.grow_wire(0, "rx_prio3_bytes"), w.grow_wire(3_000_000_000, "rx_prio0_bytes")),
)
row(
    "global tclass instead of MC_IB_TC",
    lambda w: [
        w.env(p, MC_IB_TC=None).put(f"/sys/class/infiniband/mlx5_{i}/tc/1/traffic_class", "Global tclass=106")
        for i, p in enumerate((100, 101))
    ],
)
row(
    "lldpad runs, and agrees",
    lambda w: w.say("lldptool -t -i ens1 -V PFC", "IEEE 8021QAZ PFC TLV\n\t PFC enabled: 3\nenableTx=yes\n"),
)
row("flows upcall at first", lambda w: w.say("ovs-vsctl get Open_vSwitch . other_config", "{}"))
row(
    "clock of a guest",
    lambda w: (
        w.vm(),
        w.put("/sys/devices/system/clocksource/clocksource0/current_clocksource", "kvm-clock"),
        w.drop("/sys/bus/pci/devices/0000:19", "/sys/bus/pci/devices/0000:9b"),
    ),
)
row(
    "peermem complained before it loaded",
    lambda w: w.log("nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)"),
)
row(
    "expandable segments without peermem",
    lambda w: (
        w.put("/proc/modules", w.files["/proc/modules"].replace("nvidia_peermem ", "other "))
        .drop("/sys/module/nvidia_peermem")
        .env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    ),
)
row("TCP is wanted", lambda w: [w.arg(p, "protocol", "tcp") for p in (100, 101)])
row("a short burst of pause", lambda w: w.grow_wire(500_000, "rx_prio3_pause_duration"))
row("nobody collected anything but sysfs", lambda w: (w.outputs.clear(), w.outputs_later.clear()))
row("one sample only", lambda w: w.meta.update(samples=[{"id": "t0", "t": 0.0}]))
row("an idle window", lambda w: (w.later.clear(), w.outputs_later.clear()))


def _third(w: World, state: str, phys: str) -> None:
    """A third, slower RDMA NIC on eno1, which nobody named: management if it is up, a spare if it is down."""
    w.meta["expect"].pop("rdma_devices")
    ib, port, pci = "/sys/class/infiniband/mlx5_8", PORT.format("mlx5_8"), "/sys/bus/pci/devices/0000:31:00.0"
    for name, text in (("node_type", "1: CA"), ("fw_ver", "26.41.1000"), ("board_id", "MT_0000000531")):
        w.put(f"{ib}/{name}", text)
    for name, text in (
        ("state", state),
        ("phys_state", phys),
        ("rate", "25 Gb/sec (1X EDR)"),
        ("link_layer", "Ethernet"),
    ):
        w.put(f"{port}/{name}", text)
    w.put(f"{port}/gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0699").put(
        f"{port}/gid_attrs/types/0", "RoCE v2"
    ).put(f"{port}/gid_attrs/ndevs/0", "eno1")
    for name, text in (("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x1017"), ("numa_node", "0")):
        w.put(f"{pci}/{name}", text)
    w.meta["links"] |= {
        f"{ib}/device": pci,
        f"{pci}/driver": "/sys/bus/pci/drivers/mlx5_core",
        f"{pci}/net/eno1": "/sys/class/net/eno1",
        f"{pci}/infiniband/mlx5_8": ib,
    }
    w.put("/sys/class/infiniband_verbs/uverbs8/ibdev", "mlx5_8")
    w.meta["dev"].append(
        {"path": "/dev/infiniband/uverbs8", "type": "c", "major": 231, "minor": 200, "mode": "crw-rw-rw-"}
    )

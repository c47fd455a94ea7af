"""One defect for every check: what to change in a healthy node, and what else may then report with reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from world import GIB, PORT, World

NIC = "/sys/bus/pci/devices/0000:18:00.0"
PORT0 = PORT.format("mlx5_0")
ADDR_B = "10.30.0.62"
FAR = [{"node": "far", "rdma_ips": ["10.30.10.9", "10.30.11.9"]}]


@dataclass(frozen=True)
class Defect:
    check: str
    severity: str
    edit: Callable[..., object]
    also: tuple[str, ...] = ()  # consequences that may report as well
    nodes: int = 1

    @property
    def name(self) -> str:
        return f"{self.check}-{self.severity}-{getattr(self.edit, '__name__', '')}".replace("-<lambda>", "")


DEFECTS: list[Defect] = []


def one(check: str, severity: str, edit: Callable[[World], object], *also: str) -> None:
    DEFECTS.append(Defect(check, severity, edit, also))


def pair(check: str, severity: str, edit: Callable[[World, World], object], *also: str) -> None:
    DEFECTS.append(Defect(check, severity, edit, also, nodes=2))


def probes(*records: dict[str, object]) -> Callable[[World], object]:
    return lambda w: w.meta.update(probes=list(records))


def kube(kind: str, **item: object) -> str:
    return json.dumps(
        {"kind": "List", "items": [{"kind": kind, "metadata": {"name": "x", "namespace": "kv"}, **item}]}
    )


def dev(w: World, *drop: str) -> None:
    w.meta["dev"] = [d for d in w.meta["dev"] if not d["path"].endswith(drop)]


def bond(w: World, text: str, device: str = "mlx5_0", netdev: str = "ens1") -> World:
    """Put mlx5_0's addresses on bond0 over ens1 and ens1b (the second function of the same adapter)."""
    for slot in range(4):
        w.put(f"{PORT.format(device)}/gid_attrs/ndevs/{slot}", "bond0")
    w._netdev("bond0", "02:00:00:00:01:01", 9000, 800000)
    w._netdev("ens1b", "02:00:00:00:01:01", 9000, 400000)
    w.meta["links"]["/sys/class/net/ens1b/device"] = "/sys/bus/pci/devices/0000:18:00.1"
    for tool in ("-S", "-i", "-a", "--show-fec", "--show-eee"):
        code, out, err = w.outputs[("ethtool", tool, netdev)]
        w.outputs[("ethtool", tool, "ens1b")] = (code, out, err)
    w.outputs_later[("ethtool", "-S", "ens1b")] = w.outputs_later[("ethtool", "-S", netdev)]
    w.say("mlnx_qos -i ens1b", w.outputs[("mlnx_qos", "-i", netdev)][1])
    w.put("/sys/class/net/ens1b/qos/trust", "dscp")
    for argv in ("ip addr show", "ip route show table all", "ip neigh show"):
        words = tuple(argv.split())
        w.outputs[words] = (
            0,
            w.outputs[words][1].replace(f"dev {netdev} ", "dev bond0 ").replace(f": {netdev}:", ": bond0:"),
            "",
        )
    return w.put("/proc/net/bonding/bond0", text)


BOND = """Ethernet Channel Bonding Driver: v5.15
Bonding Mode: IEEE 802.3ad Dynamic link aggregation
Transmit Hash Policy: layer3+4 (1)
MII Status: up

Slave Interface: ens1
MII Status: up
Aggregator ID: 1
Actor Churn State: none

Slave Interface: ens1b
MII Status: up
Aggregator ID: 1
Actor Churn State: none
"""


def infiniband(w: World, device: str = "mlx5_0") -> World:
    port = PORT.format(device)
    for name, text in (
        ("link_layer", "InfiniBand"),
        ("lid", "0x1f"),
        ("sm_lid", "0x1"),
        ("gids/0", "fe80:0000:0000:0000:0200:00ff:fe00:0001"),
    ):
        w.put(f"{port}/{name}", text)
    w.drop(*(f"{port}/gids/{i}" for i in range(1, 5)), f"{port}/gid_attrs")
    w.put(f"{port}/gid_attrs/types/0", "IB/RoCE v1")
    w.meta["errors"][f"{port}/gid_attrs/ndevs/0"] = "EINVAL"
    return w


def all_infiniband(w: World) -> World:
    for pid in (100, 101):
        w.env(pid, MC_GID_INDEX=None)
    return infiniband(infiniband(w), "mlx5_1")


def ovs(
    w: World,
    config: str = '{hw-offload="true"}',
    flow: str = "udp(dst=4791), packets:5, bytes:9, offloaded:yes, dp:tc, actions:3",
) -> World:
    w.expect(ovs_offload=True)
    w.say("ovs-vsctl get Open_vSwitch . other_config", config)
    w.say("ovs-appctl dpctl/dump-flows -m", f"in_port(3),{flow}\n")
    return w.say(
        "devlink dev eswitch show pci/0000:18:00.0", "pci/0000:18:00.0: mode switchdev inline-mode none\n"
    )


def management_nic(w: World) -> None:
    """A third, slower NIC that carries the default route, and stores that name no devices."""
    w.meta["expect"].pop("rdma_devices")
    ib, port, pci = "/sys/class/infiniband/mlx5_8", PORT.format("mlx5_8"), "/sys/bus/pci/devices/0000:31:00.0"
    w.put(f"{ib}/node_type", "1: CA").put(f"{ib}/board_id", "MT_0000000531").put(f"{ib}/fw_ver", "26.41.1000")
    for name, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", "25 Gb/sec (1X EDR)")):
        w.put(f"{port}/{name}", text)
    w.put(f"{port}/link_layer", "Ethernet")
    for name, text in (("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x1017"), ("numa_node", "0")):
        w.put(f"{pci}/{name}", text)
    w.meta["links"] |= {
        f"{ib}/device": pci,
        f"{pci}/driver": "/sys/bus/pci/drivers/mlx5_core",
        f"{pci}/net/eno1": "/sys/class/net/eno1",
        f"{pci}/infiniband/mlx5_8": ib,
    }
    for pid in (100, 101):
        path = f"/proc/{pid}/cmdline"
        w.put(path, "\0".join(x for x in w.files[path].split("\0") if not x.startswith("--device_names")))


def gone(path: str) -> Callable[[World], object]:
    return lambda w: w.drop(path)


# IOMMU and PCIe
one("iommu.domain_type", "fail", lambda w: w.put("/sys/kernel/iommu_groups/60/type", "DMA-FQ"))
one(
    "iommu.domain_type",
    "warn",
    lambda w: w.drop("/sys/bus/pci/devices/0000:19", "/sys/bus/pci/devices/0000:9b").put(
        "/sys/kernel/iommu_groups/60/type", "DMA"
    ),
)
one("iommu.cmdline_invalid", "warn", lambda w: w.put("/proc/cmdline", "root=/dev/sda1 amd_iommu=pt"))
one(
    "iommu.cmdline_invalid",
    "fail",
    lambda w: w.put("/proc/cmdline", "intel_iommu=off iommu=pt").put(
        "/sys/kernel/iommu_groups/60/type", "DMA"
    ),
    "iommu.domain_type",
)
one(
    "iommu.sriov_needs",
    "fail",
    lambda w: (
        w.put(f"{NIC}/sriov_numvfs", "8"),
        w.drop("/sys/class/iommu"),
        w.put("/proc/modules", w.files["/proc/modules"] + "vfio_pci 1 0 - Live 0x0\n"),
    ),
)
one(
    "pcie.acs_redirect",
    "fail",
    lambda w: w.swap(
        "lspci -vvv",
        "ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl-",
        "ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl-",
    ),
)
one("pcie.ats", "warn", lambda w: w.swap("lspci -vvv", "ATSCtl:\tEnable-", "ATSCtl:\tEnable+"))
one("pcie.link_width", "fail", lambda w: w.put(f"{NIC}/current_link_width", "8"), "pcie.capacity")
one(
    "pcie.link_width",
    "warn",
    lambda w: (
        w.put(f"{NIC}/current_link_width", "8")
        .put(f"{PORT0}/rate", "100 Gb/sec (4X EDR)")
        .put(f"{PORT.format('mlx5_1')}/rate", "100 Gb/sec (4X EDR)")
    ),
)
one("pcie.link_speed", "fail", lambda w: w.put(f"{NIC}/current_link_speed", "8.0 GT/s PCIe"), "pcie.capacity")
one(
    "pcie.link_speed",
    "warn",
    lambda w: (
        w.put(f"{NIC}/current_link_speed", "8 GT/s")
        .put(f"{PORT0}/rate", "100 Gb/sec (4X EDR)")
        .put(f"{PORT.format('mlx5_1')}/rate", "100 Gb/sec (4X EDR)")
    ),
)
one(
    "pcie.capacity",
    "fail",
    lambda w: (
        [
            w.put(f"/sys/bus/pci/devices/0000:{b}/{k}_link_speed", "16.0 GT/s PCIe")
            for b in ("17:00.0",)
            for k in ("max", "current")
        ]
        + [w.put(f"{NIC}/current_link_speed", "16.0 GT/s PCIe")]
    ),
)
one("pcie.max_read_request", "warn", lambda w: w.swap("lspci -vvv", "MaxReadReq 4096", "MaxReadReq 512"))
one("pcie.max_read_request", "fail", lambda w: w.swap("lspci -vvv", "MaxReadReq 4096", "MaxReadReq 128"))
one(
    "pcie.max_payload",
    "fail",
    lambda w: w.swap(
        "lspci -vvv",
        "17:00.0 PCI bridge: Broadcom PEX890xx (rev b0)\n",
        "17:00.0 PCI bridge: Broadcom PEX890xx (rev b0)\n\t\tDevCtl:\tCorrErr+\n\t\t\tMaxPayload 512 bytes, MaxReadReq 128 bytes\n",
    ),
)
one(
    "pcie.max_payload",
    "info",
    lambda w: w.swap(
        "lspci -vvv",
        "17:00.0 PCI bridge: Broadcom PEX890xx (rev b0)\n",
        "17:00.0 PCI bridge: Broadcom PEX890xx (rev b0)\n\t\tDevCap:\tMaxPayload 512 bytes\n",
    ),
)
one("pcie.relaxed_ordering", "warn", lambda w: w.swap("lspci -vvv", "RlxdOrd+", "RlxdOrd-"))
one("pcie.relaxed_ordering", "warn", lambda w: w.env(MC_IB_PCI_RELAXED_ORDERING="0"))
one("pcie.aer_errors", "fail", lambda w: w.put_later(f"{NIC}/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 1\n"))
one(
    "pcie.aer_errors",
    "warn",
    lambda w: w.put_later(f"{NIC}/aer_dev_correctable", "RxErr 2\nTOTAL_ERR_COR 22\n"),
)
one("pcie.aer_errors", "fail", lambda w: w.put_later(f"{NIC}/aer_dev_correctable", "TOTAL_ERR_COR 222\n"))
one(
    "pcie.device_lost",
    "fail",
    lambda w: w.swap(
        "lspci -vvv",
        "19:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)",
        "19:00.0 3D controller: NVIDIA Corporation Device 2330 (rev ff)",
    ),
    "gdr.gpu_lost",
)
one(
    "pcie.slot_power",
    "info",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: mlx5_pcie_event:299:(pid 3): Detected insufficient power on the PCIe slot (27W)."
    ),
)
one("pcie.stall", "warn", lambda w: w.grow_wire(4, "outbound_pci_stalled_wr_events"))
one("pcie.stall", "fail", lambda w: w.grow_wire(100, "rx_pci_signal_integrity"))
one(
    "pcie.nic_gpu_distance",
    "warn",
    lambda w: w.expect(rdma_devices=["mlx5_0"]),
    "proc.device_names",
    "numa.nic_pinning",
    "numa.store_per_node",
)
# NUMA, CPU
one(
    "numa.nic_pinning",
    "warn",
    lambda w: w.put(
        "/proc/100/numa_maps", "7f0000000000 bind:1 huge anon=131072 N1=131072 kernelpagesize_kB=2048\n"
    ).status(100, Cpus_allowed_list="48-95", Mems_allowed_list="1"),
)
one(
    "numa.store_per_node",
    "warn",
    lambda w: (w.arg(100, "device_names", "mlx5_0,mlx5_1"), w.meta["targets"].pop()),
)
one(
    "numa.store_per_node",
    "warn",
    lambda w: (w.arg(100, "device_names", "mlx5_0,mlx5_1"), w.arg(101, "device_names", "mlx5_0,mlx5_1")),
)
one("numa.unknown", "info", lambda w: w.put(f"{NIC}/numa_node", "-1"))
one("numa.balancing", "warn", lambda w: w.put("/proc/sys/kernel/numa_balancing", "1"))
one(
    "numa.hugepage_balance",
    "warn",
    lambda w: w.put("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "20000"),
)
one(
    "numa.hugepage_balance",
    "fail",
    lambda w: (
        w.status(100, HugetlbPages="0 kB")
        .put("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "10")
        .put("/proc/100/numa_maps", "")
        .put(
            "/proc/meminfo",
            "MemTotal: 2113421312 kB\nHugePages_Total: 524288\nHugePages_Free: 262144\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n",
        )
    ),
)
one("numa.irq_affinity", "warn", lambda w: w.put("/proc/irq/64/effective_affinity_list", "60"))
one("numa.zone_reclaim", "warn", lambda w: w.put("/proc/sys/vm/zone_reclaim_mode", "1"))
one(
    "cpu.governor",
    "warn",
    lambda w: w.put("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "schedutil"),
)
one("cpu.cstates", "info", lambda w: w.put("/sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "133"))
one(
    "cpu.steal",
    "warn",
    lambda w: w.put_later("/proc/stat", "cpu  2000 0 2000 150000 0 0 0 10000 0 0\nbtime 1760000000\n"),
)
one("cpu.softirq", "warn", lambda w: w.put_later("/proc/net/softnet_stat", "00001000 00000010 00000000\n"))
# Memory
one(
    "mem.memlock_limit",
    "fail",
    lambda w: w.limit(100, "Max locked memory", "67108864").status(100, CapEff="00000000a80425fb"),
)
one(
    "mem.memlock_limit",
    "info",
    lambda w: w.limit(100, "Max locked memory", str(512 * GIB)).status(100, CapEff="00000000a80425fb"),
)
one(
    "mem.pin_budget",
    "fail",
    lambda w: (
        w.limit(100, "Max locked memory", str(300 * GIB))
        .status(100, CapEff="00000000a80425fb")
        .arg(100, "device_names", "mlx5_0,mlx5_1")
    ),
    "numa.store_per_node",
)
one(
    "mem.max_mr_size",
    "fail",
    lambda w: w.swap(
        "ibv_devinfo -v", "max_mr_size:\t\t\t0xffffffffffffffff", "max_mr_size:\t\t\t0x1000000000"
    ),
)
one(
    "mem.readonly_mapping",
    "fail",
    lambda w: w.put(
        "/var/log/mooncake/store0.log",
        "E0105 rdma_context.cpp:1] Failed to register memory 0x7f1000000000: Bad address [14]\n",
    ).put("/proc/100/maps", "7f0000000000-7f4000000000 r--s 00000000 00:0f 1 /dev/shm/segment\n"),
)
one(
    "mem.mkey_resources",
    "fail",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:829:(pid 1): CREATE_MKEY(0x200) op_mod(0x0) failed, status no resources(0xf), syndrome (0x2aac7c), err(-11)"
    ),
    "driver.kernel_log",
)
one(
    "mem.mkey_resources",
    "warn",
    lambda w: w.swap("ibv_devinfo -v", "max_mr:\t\t\t\t16777216", "max_mr:\t\t\t\t650"),
    "limits.cq_mr_capacity",
)
one(
    "mem.registration_page_size",
    "warn",
    lambda w: (
        w.arg(100, "global_segment_size", "2TB")
        .put("/proc/100/numa_maps", "7f0000000000 bind:0 anon=536870912 N0=536870912 kernelpagesize_kB=4\n")
        .env(MC_STORE_USE_HUGEPAGE=None)
        .status(100, HugetlbPages="0 kB")
    ),
)
one(
    "mem.hugepages",
    "fail",
    lambda w: w.status(100, HugetlbPages="0 kB").put(
        "/proc/meminfo",
        "MemTotal: 2113421312 kB\nHugePages_Total: 10\nHugePages_Free: 10\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n",
    ),
)
one("mem.hugepage_fragmented", "warn", lambda w: w.put("/etc/sysctl.d/90.conf", "vm.nr_hugepages = 600000\n"))
one(
    "mem.thp",
    "info",
    lambda w: w.put("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never").put(
        "/sys/kernel/mm/transparent_hugepage/defrag", "[always] madvise"
    ),
)
one("mem.max_map_count", "warn", lambda w: w.put("/proc/sys/vm/max_map_count", "65530"))
one(
    "mem.shm_size",
    "fail",
    lambda w: w.put("/proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n").expect(shm_bytes=GIB),
)
one(
    "mem.shm_size",
    "warn",
    lambda w: w.container().put("/proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n"),
)
one(
    "mem.cgroup_limit",
    "fail",
    lambda w: w.put("/sys/fs/cgroup/system.slice/store.service/hugetlb.2MB.max", str(GIB)),
)
one(
    "mem.cgroup_limit",
    "fail",
    lambda w: w.env(MC_STORE_USE_HUGEPAGE=None).put("/sys/fs/cgroup/memory.max", str(260 * GIB)),
)
one(
    "mem.fork_safety",
    "warn",
    lambda w: w.say("rdma system show", "netns shared copy-on-fork off\n").put(
        "/proc/100/cmdline", "python3\0-m\0sglang\0--protocol=rdma\0--device_names=mlx5_0\0"
    ),
)
one("mem.oom_events", "fail", lambda w: w.log("Out of memory: Killed process 99 (store0) total-vm:1kB"))
one("mem.oom_events", "fail", lambda w: w.put_later("/sys/fs/cgroup/memory.events", "oom 1\noom_kill 1\n"))
one("mem.ecc", "fail", lambda w: w.put_later("/sys/devices/system/edac/mc/mc0/ue_count", "1"))
one("mem.ecc", "warn", lambda w: w.put_later("/sys/devices/system/edac/mc/mc0/ce_count", "9"))
# Drivers
one(
    "driver.modules_loaded",
    "fail",
    lambda w: w.put("/proc/modules", w.files["/proc/modules"].replace("ib_uverbs 16384", "other 1")),
)
one("driver.char_devices", "fail", lambda w: dev(w, "uverbs1"))
one(
    "driver.char_devices",
    "fail",
    lambda w: (
        dev(w, "rdma_cm"),
        w.say("kubectl logs -n kube-system ds/rdma-shared-dp-ds", 'RDMA device "rdma_cm" not found\n'),
    ),
)
one("driver.device_count", "fail", lambda w: w.expect(rdma_devices=["mlx5_0", "mlx5_1", "mlx5_7"]))
one(
    "driver.device_count",
    "fail",
    lambda w: (
        [
            w.put(f"/sys/bus/pci/devices/0000:2a:00.0/{k}", v)
            for k, v in (("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x1021"))
        ]
        and w.meta["links"].update(
            {"/sys/bus/pci/devices/0000:2a:00.0/driver": "/sys/bus/pci/drivers/mlx5_core"}
        )
    ),
)
one(
    "driver.userspace_abi",
    "fail",
    lambda w: w.say(
        "ibv_devices",
        "",
        stderr="libibverbs: Warning: Driver mlx5 does not support the kernel ABI of 1 (supports 6 to 6) for device /sys/class/infiniband/mlx5_0\n",
    ),
)
one("driver.userspace_libs", "fail", lambda w: w.put("/etc/libibverbs.d/rxe.driver", "driver rxe"))
one(
    "driver.userspace_libs",
    "fail",
    lambda w: w.say(
        "ibv_devices",
        "",
        stderr="libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': cannot open shared object file\n",
    ),
)
one("driver.ofed_mismatch", "warn", lambda w: w.put("/sys/module/mlx5_ib/version", "5.8-1.1.2"))
one(
    "driver.ofed_mismatch",
    "warn",
    lambda w: w.say("modinfo mlx5_core", "filename: /lib/x.ko\nversion:        24.10-9.9.9\n"),
)
pair("driver.fw_consistency", "warn", lambda a, b: b.put("/sys/class/infiniband/mlx5_0/fw_ver", "28.39.1002"))
one("driver.fw_consistency", "warn", lambda w: w.put("/sys/class/infiniband/mlx5_0/fw_ver", "28.39.1002"))
one("driver.fw_policy", "warn", lambda w: w.expect(firmware={"MT_0000000838": "28.44.0"}))
one(
    "driver.fw_package",
    "fail",
    lambda w: w.log(
        "ice 0000:4b:00.0: The DDP package file was not found or could not be read. Entering Safe Mode"
    ),
)
one(
    "driver.fw_pending",
    "info",
    lambda w: w.swap(
        "mlxconfig -d 0000:18:00.0 -e q",
        "True(1)         True(1)         True(1)",
        "True(1)         True(1)         False(0)",
    ),
    "qos.rtt_cc",
)
one(
    "driver.health",
    "fail",
    lambda w: w.swap("devlink health show", "state healthy error 2", "state error error 3"),
)
one(
    "driver.health",
    "fail",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: poll_health:840: device's health compromised - reached miss count"
    ),
)
one(
    "driver.kernel_log",
    "warn",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: mlx5_cmd_check:810:(pid 5): CREATE_QP(0x500) op_mod(0x0) failed, status bad parameter(0x3), syndrome (0x31)"
    ),
)
one(
    "driver.device_unbound",
    "fail",
    lambda w: [
        w.put(f"/sys/bus/pci/devices/0000:2a:00.0/{k}", v)
        for k, v in (("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x1021"))
    ],
)
one(
    "driver.dpu_mode",
    "fail",
    lambda w: (
        w.swap(
            "mlxconfig -d 0000:18:00.0 -e q",
            "         ATS",
            "         INTERNAL_CPU_OFFLOAD_ENGINE         ENABLED(0)      ENABLED(0)      ENABLED(0)\n         ATS",
        ),
        w.say(
            "ip neigh show",
            "10.30.0.1 dev ens1 FAILED \n10.30.1.1 dev ens2 lladdr 02:00:00:00:fe:01 REACHABLE \n",
        ),
    ),
    "ip.neigh_failed",
)
one(
    "driver.vf_revoked",
    "warn",
    lambda w: w.put("/proc/uptime", "12000 1").log("hv_netvsc eth0: Data path switched from VF: enP1s1"),
)
one(
    "driver.vf_revoked",
    "fail",
    lambda w: w.log(*["hv_netvsc eth0: VF unregistering: enP1s1"] * 3).put("/proc/uptime", "6000 1"),
)
one(
    "driver.rdma_protocol",
    "fail",
    lambda w: (
        w.put("/sys/class/infiniband/mlx5_0/node_type", "4: RNIC"),
        w.meta["links"].update({f"{NIC}/driver": "/sys/bus/pci/drivers/ice"}),
    ),
    "ctr.availability",
    "driver.modules_loaded",
    "driver.device_count",
)
pair("driver.kernel_drift", "info", lambda a, b: b.put("/proc/sys/kernel/osrelease", "6.8.0"))
one(
    "driver.module_temp",
    "fail",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: Port module event[error]: module 0, Cable error, High Temperature"
    ),
)
one("driver.module_temp", "warn", lambda w: w.grow_wire(1, "module_high_temp"))
one(
    "driver.modules_loaded",
    "fail",
    lambda w: (
        w.drop("/sys/class/infiniband"),
        w.meta.update(dev=[]),
        w.meta["links"].pop(f"{NIC}/infiniband/mlx5_0", None),
        w.put("/proc/modules", "mlx5_core 1 0 - Live 0x0\n"),
    ),
    "driver.device_count",
    "proc.device_names",
    "driver.char_devices",
    "gdr.versions",
)
# Links
one(
    "link.port_state",
    "fail",
    lambda w: w.put(f"{PORT0}/state", "1: DOWN").put(f"{PORT0}/phys_state", "3: Disabled"),
    "link.netdev_down",
)
one("link.rate", "fail", lambda w: w.put(f"{PORT0}/rate", "200 Gb/sec (4X HDR)"))
one("link.width", "fail", lambda w: w.put(f"{PORT0}/rate", "200 Gb/sec (2X NDR)"), "link.rate")
one("link.flap", "fail", lambda w: w.grow("link_downed", 1))
one("link.flap", "warn", lambda w: w.put_later("/sys/class/net/ens1/carrier_changes", "6"))
one("link.flap", "fail", lambda w: w.log(*["mlx5_core 0000:18:00.0 ens1: Link down"] * 5))
one("link.symbol_errors", "fail", lambda w: w.grow("symbol_error", 500))
one("link.symbol_errors", "warn", lambda w: w.grow("port_rcv_errors", 700))
one("link.ber", "warn", lambda w: w.swap("mlxlink -d mlx5_0 -c", "15E-255", "3E-12"))
one("link.ber", "fail", lambda w: w.swap("mlxlink -d mlx5_0 -c", "1E-9", "2E-5"))
one("link.fec", "fail", lambda w: w.swap("ethtool --show-fec ens1", "encoding: RS", "encoding: Off"))
one("link.layer", "fail", lambda w: w.expect(link_layer="InfiniBand"))
one("link.ib_sm", "fail", lambda w: all_infiniband(w).put(f"{PORT0}/sm_lid", "0x0"))
one("link.pkey_membership", "fail", lambda w: all_infiniband(w).put(f"{PORT0}/pkeys/0", "0x7fff"))
pair(
    "link.ib_sl",
    "warn",
    lambda a, b: (all_infiniband(a), all_infiniband(b).env(MC_IB_SL="3")),
    "xnode.env_drift",
)
one(
    "link.bond_mode",
    "fail",
    lambda w: bond(
        w, BOND.replace("Slave Interface: ens1b\nMII Status: up", "Slave Interface: ens1b\nMII Status: down")
    ),
)
one(
    "link.bond_mode",
    "fail",
    lambda w: bond(
        w, BOND.replace("ens1b\nMII Status: up\nAggregator ID: 1", "ens1b\nMII Status: up\nAggregator ID: 2")
    ),
)
one("link.bond_mode", "warn", lambda w: bond(w, BOND.replace("layer3+4 (1)", "layer2 (0)")))
one("link.bond_qp_spread", "warn", lambda w: bond(w, BOND).env(MC_NUM_QP_PER_EP="1"))
one("link.netdev_down", "fail", lambda w: w.put("/sys/class/net/ens1/operstate", "down"))
one(
    "link.autosuspend_eee",
    "info",
    lambda w: w.swap("ethtool --show-eee ens1", "status: disabled", "status: enabled - active"),
)
# GIDs
one("gid.index_out_of_range", "fail", lambda w: w.env(MC_GID_INDEX="9"), "gid.index_consistency")
one("gid.index_empty", "fail", lambda w: w.env(MC_GID_INDEX="4"), "gid.index_consistency")
one("gid.type_v1_selected", "fail", lambda w: [w.env(p, MC_GID_INDEX="2") for p in (100, 101)])
one(
    "gid.type_v1_selected",
    "warn",
    lambda w: (
        [w.env(p, MC_GID_INDEX="2") for p in (100, 101)]
        and w.expect(peers=[{"node": "near", "rdma_ips": ["10.30.0.9", "10.30.1.9"]}])
    ),
    "ip.peer_route",
)
one("gid.link_local_selected", "fail", lambda w: [w.env(p, MC_GID_INDEX="1") for p in (100, 101)])
one(
    "gid.no_routable",
    "fail",
    lambda w: (
        [w.drop(f"{PORT0}/gids/{i}").put(f"{PORT0}/gids/{i}", "0000:" * 7 + "0000") for i in (2, 3)]
        and w.env(MC_GID_INDEX=None)
    ),
)
one(
    "gid.table_empty",
    "fail",
    lambda w: (
        [w.put(f"{PORT0}/gids/{i}", "0000:" * 7 + "0000") for i in range(4)] and w.env(MC_GID_INDEX=None)
    ),
)
one(
    "gid.netns_mismatch",
    "warn",
    lambda w: (
        w.container(),
        [
            w.put(f"{PORT0}/gids/{i}", "0000:0000:0000:0000:0000:ffff:0a14:0007").put(
                f"{PORT0}/gid_attrs/ndevs/{i}", "host0"
            )
            for i in (2, 3)
        ],
    ),
)
pair(
    "gid.index_consistency",
    "fail",
    lambda a, b: [b.put(f"{PORT0}/gid_attrs/types/{i}", t) for i, t in ((3, "IB/RoCE v1"), (2, "RoCE v2"))],
    "gid.type_v1_selected",
)
pair(
    "gid.family_mismatch",
    "fail",
    lambda a, b: [
        b.put(f"{PORT.format(d)}/gids/{i}", f"fd00:0000:0000:000{n}:0000:0000:0000:0062")
        for n, d in enumerate(("mlx5_0", "mlx5_1"))
        for i in (2, 3)
    ],
    "gid.index_consistency",
    "gid.stale",
)
one("gid.changed", "fail", lambda w: w.put_later(f"{PORT0}/gids/3", "0000:" * 7 + "0000"))
one(
    "gid.stale",
    "warn",
    lambda w: (
        w.put(f"{PORT0}/gids/4", "0000:0000:0000:0000:0000:ffff:0a1e:0909")
        and w.meta["errors"].pop(f"{PORT0}/gid_attrs/types/4")
        and w.meta["errors"].pop(f"{PORT0}/gid_attrs/ndevs/4")
        and w.put(f"{PORT0}/gid_attrs/types/4", "RoCE v2").put(f"{PORT0}/gid_attrs/ndevs/4", "ens1")
    ),
)
pair(
    "gid.duplicate",
    "fail",
    lambda a, b: [b.put(f"{PORT0}/gids/{i}", a.files[f"{PORT0}/gids/{i}"]) for i in (2, 3)],
    "gid.stale",
)
one(
    "gid.duplicate",
    "warn",
    lambda w: [w.put(f"{PORT.format('mlx5_1')}/gids/{i}", w.files[f"{PORT0}/gids/{i}"]) for i in (2, 3)],
)
one(
    "gid.default_roce_mode",
    "warn",
    lambda w: w.put("/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_mode", "IB/RoCE v1").arg(
        100, "transport", "rdma_cm"
    ),
)
pair(
    "gid.vlan",
    "fail",
    lambda a, b: b.put(
        "/proc/net/vlan/ens1", "ens1  VID: 100  REORDER_HDR: 1\nEGRESS priority mappings: 0:3\n"
    ),
)
# IP
one(
    "ip.address_missing",
    "fail",
    lambda w: w.swap("ip addr show", "    inet 10.30.0.61/24 scope global ens1\n", ""),
    "gid.stale",
)
one("ip.mac_multicast", "fail", lambda w: w.put("/sys/class/net/ens1/address", "03:00:00:00:01:01"))
one(
    "ip.subnet_overlap",
    "info",
    lambda w: w.swap("ip addr show", "10.30.1.61/24", "10.30.0.62/24"),
    "gid.stale",
    "ip.source_rules",
    "ip.peer_route",
)
one(
    "ip.arp_flux",
    "fail",
    lambda w: (
        w.swap("ip addr show", "10.30.1.61/24", "10.30.0.62/24"),
        w.say("ip rule show", "0:\tfrom all lookup local\n32766:\tfrom all lookup main\n"),
        *[w.put(f"/proc/sys/net/ipv4/conf/{n}/arp_ignore", "0") for n in ("all", "ens1", "ens2")],
    ),
    "ip.subnet_overlap",
    "gid.stale",
    "ip.source_rules",
    "ip.peer_route",
)
one(
    "ip.rp_filter",
    "warn",
    lambda w: (
        w.put("/proc/sys/net/ipv4/conf/all/rp_filter", "1"),
        *[w.put(f"/proc/sys/net/ipv4/conf/{n}/rp_filter", "1") for n in ("ens1", "ens2")],
        w.say("ip rule show", "0:\tfrom all lookup local\n32766:\tfrom all lookup main\n"),
        w.say(
            "ip route show table all",
            "default via 192.0.2.254 dev eno1\n10.30.0.0/24 dev ens1\n10.30.1.0/24 dev ens2\n10.30.0.0/16 via 10.30.0.1 dev ens1\n",
        ),
    ),
    "ip.peer_route",
)
one(
    "ip.rp_filter",
    "fail",
    lambda w: (
        w.put("/proc/sys/net/ipv4/conf/all/rp_filter", "1"),
        w.put("/proc/sys/net/ipv4/conf/ens1/rp_filter", "1"),
        w.say(
            "nstat -az TcpExtIPReversePathFilter",
            "TcpExtIPReversePathFilter 1811 0.0\n",
            "TcpExtIPReversePathFilter 1900 0.0\n",
        ),
    ),
)
one(
    "ip.peer_route",
    "fail",
    lambda w: w.swap("ip route show table all", "default via 10.30.0.1 dev ens1 table 200 \n", ""),
)
one(
    "ip.peer_route",
    "warn",
    lambda w: w.swap(
        "ip route show table all",
        "default via 10.30.0.1 dev ens1 table 200",
        "10.30.10.0/24 via 10.30.0.1 dev ens1 table 200",
    ),
)
one(
    "ip.neigh_failed",
    "fail",
    lambda w: w.swap(
        "ip neigh show", "10.30.0.1 dev ens1 lladdr 02:00:00:00:fe:00 REACHABLE", "10.30.0.1 dev ens1 FAILED"
    ),
)
one("ip.neigh_overflow", "fail", lambda w: w.log("neighbour: arp_cache: neighbor table overflow!"))
one("ip.neigh_overflow", "warn", lambda w: w.expect(peer_count=9000))
one(
    "ip.duplicate",
    "fail",
    lambda w: w.say(
        "arping -D -c 2 -I ens1 10.30.0.61",
        "ARPING 10.30.0.61 from 0.0.0.0 ens1\nReceived 1 response(s)\n",
        code=1,
    ),
)
one(
    "ip.firewall",
    "fail",
    lambda w: w.say("iptables -S", "-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp --dport 12001 -j DROP\n"),
)
one(
    "ip.firewall",
    "fail",
    lambda w: w.unsay("iptables -S").say(
        "nft list ruleset",
        "table inet filter {\n chain input {\n type filter hook input priority 0; policy drop;\n ct state established accept\n tcp dport 22 accept\n }\n}\n",
    ),
)
one(
    "ip.port_4791",
    "warn",
    lambda w: w.put(
        "/proc/net/udp",
        "  sl\n  12: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 48123 2 0 0\n",
    ),
)
one(
    "ip.source_rules",
    "warn",
    lambda w: (
        w.say("ip rule show", "0:\tfrom all lookup local\n32766:\tfrom all lookup main\n"),
        w.say(
            "ip route show table all",
            "10.30.10.0/24 via 10.30.0.1 dev ens1\n10.30.11.0/24 via 10.30.1.1 dev ens2\n10.30.11.0/24 via 10.30.0.1 dev ens1 metric 9\n10.30.10.0/24 via 10.30.1.1 dev ens2 metric 9\n",
        ),
    ),
)
one(
    "ip.ipv6_disabled",
    "fail",
    lambda w: w.put("/proc/sys/net/ipv6/conf/ens1/disable_ipv6", "1").expect(ip_family=6),
)
one("ip.ecmp_ports", "info", lambda w: w.env(MC_NUM_QP_PER_EP="1"))
# MTU
one(
    "mtu.below_max",
    "warn",
    lambda w: (
        [w.put(f"/sys/class/net/{n}/mtu", "1500") for n in ("ens1", "ens2")]
        and w.swap("ibv_devinfo -v", "active_mtu:\t\t4096 (5)", "active_mtu:\t\t1024 (3)")
    ),
)
one(
    "mtu.active_vs_netdev",
    "fail",
    lambda w: w.swap("ibv_devinfo -v", "active_mtu:\t\t4096 (5)", "active_mtu:\t\t1024 (3)"),
)
pair(
    "mtu.peer_mismatch",
    "fail",
    lambda a, b: (
        [b.put(f"/sys/class/net/{n}/mtu", "1500") for n in ("ens1", "ens2")]
        and b.swap("ibv_devinfo -v", "active_mtu:\t\t4096 (5)", "active_mtu:\t\t1024 (3)")
    ),
    "mtu.below_max",
    "xnode.config_drift",
)
one("mtu.app_vs_active", "warn", lambda w: w.env(MC_MTU="9000"))
one(
    "mtu.path_mtu",
    "fail",
    lambda w: (
        w.say(
            "ping -M do -c 1 -s 4172 -I ens1 10.30.10.9",
            "1 packets transmitted, 0 received, 100% packet loss, time 0ms\n",
            code=1,
        ),
        w.say(
            "ping -c 1 -I ens1 10.30.10.9", "1 packets transmitted, 1 received, 0% packet loss, time 0ms\n"
        ),
    ),
)
one("mtu.path_mtu", "fail", lambda w: w.grow_wire(50, "rx_oversize_pkts_phy"))
one("mtu.bond_members", "fail", lambda w: bond(w, BOND).put("/sys/class/net/ens1b/mtu", "1500"))
one(
    "mtu.ovs_bridge",
    "fail",
    lambda w: (
        ovs(w),
        w._netdev("pf0vf0", "02:00:00:00:07:07", 1500, 400000),
        w.put("/sys/class/net/pf0vf0/phys_port_name", "pf0vf0"),
    ),
)
# QoS
one(
    "qos.trust_mode",
    "fail",
    lambda w: w.swap("mlnx_qos -i ens1", "trust state: dscp", "trust state: pcp"),
    "qos.lossless_vlan0",
    "qos.cross_nic",
)
one(
    "qos.pfc_enabled",
    "fail",
    lambda w: [
        w.swap(f"mlnx_qos -i {n}", "enabled     0   0   0   1", "enabled     0   0   0   0")
        for n in ("ens1", "ens2")
    ],
)
one(
    "qos.pfc_enabled",
    "warn",
    lambda w: [
        w.swap(
            f"mlnx_qos -i {n}",
            "enabled     0   0   0   1   0   0   0   0",
            "enabled     0   0   0   1   1   1   0   0",
        )
        for n in ("ens1", "ens2")
    ],
)
one(
    "qos.pfc_enabled",
    "fail",
    lambda w: w.say(
        "lldptool -t -n -i ens1 -V PFC", "PFC TLV\n\t Willing: no\n\t CBS capable: 8\n\t PFC enabled: 4\n"
    ),
)
one("qos.global_pause", "fail", lambda w: w.swap("ethtool -a ens1", "RX:\t\toff", "RX:\t\ton"))
one("qos.tclass_mapping", "fail", lambda w: w.env(MC_IB_TC="0"))
one("qos.tclass_mapping", "fail", lambda w: w.env(MC_IB_TC=None))
one(
    "qos.direction_asymmetry",
    "fail",
    lambda w: (w.grow_wire(0, "rx_prio3_bytes"), w.grow_wire(1_000_000_000_000, "rx_prio0_bytes")),
)
one("qos.cc_enabled", "warn", lambda w: w.put("/sys/class/net/ens1/ecn/roce_np/enable/3", "0"))
one("qos.rtt_cc", "warn", lambda w: w.expect(rtt_cc=False))
one("qos.cnp_priority", "warn", lambda w: w.put("/sys/class/net/ens1/ecn/roce_np/cnp_dscp", "26"))
one("qos.dcbx_owner", "warn", lambda w: w.swap("mlnx_qos -i ens1", "OS controlled", "Firmware controlled"))
one(
    "qos.buffer",
    "fail",
    lambda w: w.swap("mlnx_qos -i ens1", "buffer      0   0   0   1", "buffer      0   0   0   2"),
)
one("qos.persistence", "info", lambda w: w.put("/etc/udev/rules.d/99-qos.rules", "# nothing"))
pair(
    "qos.cross_nic",
    "fail",
    lambda a, b: [
        b.swap(f"mlnx_qos -i {n}", "enabled     0   0   0   1   0", "enabled     0   0   0   1   1")
        for n in ("ens1", "ens2")
    ],
    "xnode.config_drift",
)
one(
    "qos.lossless_vlan0",
    "warn",
    lambda w: (
        [w.swap(f"mlnx_qos -i {n}", "trust state: dscp", "trust state: pcp") for n in ("ens1", "ens2")],
        w.meta["expect"].pop("roce_dscp"),
    ),
)
# Counters
one("ctr.retransmit_rate", "warn", lambda w: w.grow("packet_seq_err", 30_000))
one("ctr.retransmit_rate", "fail", lambda w: w.grow("packet_seq_err", 3_000_000))
one("ctr.timeout_rate", "warn", lambda w: w.grow("local_ack_timeout_err", 120))
one("ctr.timeout_rate", "fail", lambda w: w.grow("local_ack_timeout_err", 1200))
one("ctr.timeout_rate", "fail", lambda w: w.grow("req_transport_retries_exceeded", 1))
one("ctr.rnr", "warn", lambda w: w.grow("rnr_nak_retry_err", 5))
one("ctr.rnr", "fail", lambda w: w.grow("req_rnr_retries_exceeded", 1))
one("ctr.remote_access", "fail", lambda w: w.grow("resp_remote_access_errors", 2))
one("ctr.local_errors", "warn", lambda w: w.grow("resp_local_length_error", 2))
one("ctr.out_of_buffer", "info", lambda w: w.grow("out_of_buffer", 20))
one("ctr.discards", "fail", lambda w: w.grow_wire(5, "rx_prio3_buf_discard"))
one("ctr.discards", "warn", lambda w: w.grow_wire(50, "rx_discards_phy"))
one("ctr.discards", "fail", lambda w: w.grow_wire(50_000, "rx_discards_phy"))
one("ctr.pause_share", "warn", lambda w: w.grow_wire(13_000_000, "tx_prio3_pause_duration"))
one("ctr.pause_share", "fail", lambda w: w.grow_wire(25_000_000, "rx_prio3_pause_duration"))
one("ctr.pause_share", "info", lambda w: w.grow_wire(3_000_000, "rx_prio3_pause_duration"))
one("ctr.pause_storm", "fail", lambda w: w.grow_wire(1, "tx_pause_storm_error_events"))
one("ctr.pause_storm", "warn", lambda w: w.grow_wire(1, "tx_pause_storm_warning_events"))
one("ctr.ecn_cnp", "warn", lambda w: w.grow("rp_cnp_ignored", 1))
one("ctr.ecn_cnp", "warn", lambda w: w.grow("np_ecn_marked_roce_packets", 50_000))
one("ctr.ecn_cnp", "info", lambda w: w.grow("np_ecn_marked_roce_packets", 50_000).grow("np_cnp_sent", 900))
one("ctr.jitter", "warn", lambda w: w.meta.update(series={"mlx5_0/1": [25e9, 2e9] * 20}))
one(
    "ctr.nic_imbalance",
    "fail",
    lambda w: (
        [w.arg(p, "device_names", "mlx5_0,mlx5_1") for p in (100, 101)]
        and [w.put_later(f"{PORT0}/counters/port_{s}_data", "1000") for s in ("xmit", "rcv")]
        and w.grow_wire(0, "rx_prio3_bytes", "tx_prio3_bytes")
    ),
    "numa.store_per_node",
    "qos.tclass_mapping",
)
one("ctr.port_xmit_wait", "info", lambda w: w.grow("port_xmit_wait", 9_000_000))
one("ctr.integrity", "fail", lambda w: w.grow("excessive_buffer_overrun_errors", 1))
one("ctr.icrc", "warn", lambda w: w.grow("rx_icrc_encapsulated", 1))
one("ctr.dup_requests", "info", lambda w: w.grow("duplicate_request", 9))
one("ctr.availability", "info", gone(f"{PORT0}/hw_counters"))
one(
    "ctr.hw_counter_flow",
    "fail",
    lambda w: (
        [w.put_later(f"{PORT0}/counters/port_{s}_data", "1000") for s in ("xmit", "rcv")]
        and (
            w.grow_wire(0, "rx_prio3_bytes", "tx_prio3_bytes"),
            w.grow_wire(900_000_000_000, "rx_bytes", "tx_bytes"),
        )
    ),
    "ctr.nic_imbalance",
)
# Open vSwitch
one("ovs.hw_offload", "fail", lambda w: ovs(w, "{}"))
one(
    "ovs.flow_not_offloaded",
    "fail",
    lambda w: ovs(w, flow="udp(dst=4791), packets:5, bytes:9, offloaded:partial, dp:ovs, actions:3"),
)
one(
    "ovs.flow_not_offloaded",
    "fail",
    lambda w: ovs(w).put(
        "/var/log/openvswitch/ovs-vswitchd.log",
        "2026-01-05T10:02:11.318Z|00041|dpif_netlink(handler2)|ERR|failed to offload flow: Operation not supported: ens3f0_0\n",
    ),
)
one(
    "ovs.eswitch_mode",
    "fail",
    lambda w: ovs(w).say("devlink dev eswitch show pci/0000:18:00.0", "pci/0000:18:00.0: mode legacy\n"),
)
one(
    "ovs.tc_policy",
    "warn",
    lambda w: ovs(
        w,
        '{hw-offload="true", tc-policy=skip_sw}',
        "ct_state(-new+est+trk),udp(dst=4791), packets:5, offloaded:yes, dp:tc, actions:3",
    ),
)
one(
    "ovs.lost_upcalls",
    "warn",
    lambda w: ovs(w).say(
        "ovs-appctl dpctl/show", "lookups: hit:1 missed:2 lost:3\n", "lookups: hit:1 missed:2 lost:9\n"
    ),
)
one("ovs.conntrack_full", "fail", lambda w: w.log("nf_conntrack: nf_conntrack: table full, dropping packet"))
one("ovs.conntrack_full", "warn", lambda w: w.put("/proc/sys/net/netfilter/nf_conntrack_count", "250000"))
one("ovs.max_idle", "info", lambda w: ovs(w, '{hw-offload="true", max-idle="1000"}'))
one(
    "ovs.vf_lag",
    "warn",
    lambda w: bond(ovs(w), BOND).log(
        "bond0: (slave ens1): Enslaving as a backup interface",
        "mlx5_core 0000:18:00.0: E-Switch: Enable: mode(OFFLOADS), nvfs(4)",
    ),
)
# Kubernetes, containers
one("k8s.dev_infiniband", "fail", lambda w: (w.container(), dev(w, "uverbs0", "uverbs1")))
one(
    "k8s.dev_infiniband_foreign",
    "warn",
    lambda w: w.container().meta["errors"].update({"/dev/infiniband/uverbs1": "EPERM"}),
)
one(
    "k8s.pod_rdma_netdev",
    "fail",
    lambda w: (
        w.container(),
        w.drop("/sys/class/net/ens", "/sys/class/net/eno1"),
        w._netdev("eth0", "02:42:00:00:00:01", 1450, 10000),
        w.say("ethtool -i eth0", "driver: veth\n"),
        w.say("ip addr show", "2: eth0: <UP> mtu 1450\n    inet 10.244.1.2/24 scope global eth0\n"),
    ),
    "gid.netns_mismatch",
)
one(
    "k8s.rdma_netns_mode",
    "fail",
    lambda w: w.say(
        "kubectl get net-attach-def -A -o json",
        kube(
            "NetworkAttachmentDefinition",
            spec={"config": json.dumps({"plugins": [{"type": "sriov"}, {"type": "rdma"}]})},
        ),
    ),
)
one(
    "k8s.rdma_netns_mode",
    "fail",
    lambda w: w.say("kubectl logs -n kube-system ds/rdma-shared-dp-ds", "ok\n").say(
        "rdma system show", "netns exclusive copy-on-fork on\n"
    ),
)
one(
    "k8s.allocatable",
    "fail",
    lambda w: w.say(
        "kubectl get node node-a -o json",
        json.dumps(
            {
                "kind": "Node",
                "metadata": {"name": "node-a"},
                "status": {"allocatable": {"rdma/hca": "0"}, "capacity": {"rdma/hca": "2"}},
            }
        ),
    ),
)
one(
    "k8s.plugin_socket",
    "warn",
    lambda w: w.put("/var/lib/kubelet/device-plugins/kubelet.sock", "").put(
        "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", '{"rdma/hca": 1}'
    ),
)
one(
    "k8s.ipc_lock",
    "fail",
    lambda w: (
        w.container()
        .env(KUBERNETES_SERVICE_HOST="10.0.0.1")
        .limit(100, "Max locked memory", "8388608")
        .status(100, CapEff="00000000a80425fb")
    ),
    "mem.memlock_limit",
)
one(
    "k8s.hugepages",
    "fail",
    lambda w: w.say(
        "kubectl get pod store -o json",
        kube("Pod", spec={"containers": [{"resources": {"limits": {"cpu": "4"}}}]}),
    ),
)
one(
    "k8s.topology_manager",
    "warn",
    lambda w: w.put(
        "/var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\ntopologyManagerPolicy: none\n"
    ),
)
one(
    "k8s.vf_guid",
    "fail",
    lambda w: (
        all_infiniband(w)
        .put("/sys/class/infiniband/mlx5_0/node_guid", "0000:0000:0000:0000")
        .put(f"{NIC}/device", "0x101e")
    ),
)
one(
    "k8s.vf_settings",
    "warn",
    lambda w: w.say(
        "ip link show ens1",
        "3: ens1: <UP> mtu 9000\n    vf 0     link/ether 02:00:00:00:00:01 brd ff:ff:ff:ff:ff:ff, spoof checking on, link-state auto, trust on, max_tx_rate 10000\n",
    ),
)
one(
    "k8s.sriov_state",
    "warn",
    lambda w: w.say(
        "kubectl get sriovnetworknodestates -A -o json",
        kube("SriovNetworkNodeState", status={"syncStatus": "Failed"}),
    ),
)
one(
    "k8s.network_policy",
    "fail",
    lambda w: w.say(
        "kubectl get networkpolicy -A -o json",
        kube(
            "NetworkPolicy",
            spec={
                "podSelector": {},
                "policyTypes": ["Ingress"],
                "ingress": [{"ports": [{"port": 443, "protocol": "TCP"}]}],
            },
        ),
    ),
)
one(
    "k8s.pod_mtu",
    "fail",
    lambda w: w.say(
        "kubectl get net-attach-def -A -o json",
        kube(
            "NetworkAttachmentDefinition",
            spec={"config": json.dumps({"type": "macvlan", "master": "ens1", "mtu": 1500})},
        ),
    ),
)
one(
    "k8s.ipam_overlap",
    "fail",
    lambda w: w.say(
        "kubectl get net-attach-def -A -o json",
        kube(
            "NetworkAttachmentDefinition",
            spec={
                "config": json.dumps(
                    {"type": "macvlan", "ipam": {"type": "whereabouts", "range": "10.30.0.0/24"}}
                )
            },
        ),
    ),
)
one(
    "k8s.cloud_firewall",
    "fail",
    lambda w: (
        w.meta["links"].update({f"{NIC}/driver": "/sys/bus/pci/drivers/efa"}),
        w.say(
            "aws ec2 describe-security-groups",
            json.dumps(
                {"SecurityGroups": [{"GroupId": "sg-1", "IpPermissions": [], "IpPermissionsEgress": []}]}
            ),
        ),
    ),
    "driver.modules_loaded",
    "ctr.availability",
)
one(
    "k8s.host_services",
    "warn",
    lambda w: w.say(
        "kubectl get ds -A -o json",
        json.dumps(
            {
                "items": [
                    {
                        "kind": "DaemonSet",
                        "metadata": {"name": "mofed-driver", "namespace": "n"},
                        "status": {"desiredNumberScheduled": 4, "numberReady": 3},
                    }
                ]
            }
        ),
    ),
)
# GPUDirect
one(
    "gdr.peermem_loaded",
    "fail",
    lambda w: (
        w.expect(gpu_buffer_bytes=GIB)
        .put("/proc/modules", w.files["/proc/modules"].replace("nvidia_peermem ", "other "))
        .drop("/sys/module/nvidia_peermem")
    ),
    "gdr.dmabuf",
)
one(
    "gdr.peermem_symbol",
    "fail",
    lambda w: (
        w.put("/proc/modules", w.files["/proc/modules"].replace("nvidia_peermem ", "other "))
        .drop("/sys/module/nvidia_peermem")
        .log("nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client")
    ),
)
one(
    "gdr.dmabuf",
    "fail",
    lambda w: (
        w.expect(gpu_buffer_bytes=GIB)
        .put("/proc/modules", w.files["/proc/modules"].replace("nvidia_peermem ", "other "))
        .drop("/sys/module/nvidia_peermem")
    ),
    "gdr.peermem_loaded",
)
one("gdr.bar1_size", "fail", lambda w: w.expect(gpu_buffer_bytes=200 * GIB))
one("gdr.bar1_size", "warn", lambda w: w.swap("nvidia-smi -q -d MEMORY", "131072 MiB", "256 MiB"))
one("gdr.expandable_segments", "warn", lambda w: w.env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))
one("gdr.p2p_in_vm", "warn", lambda w: w.vm(), "pcie.ats")
one(
    "gdr.gpu_lost",
    "fail",
    lambda w: w.log("NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus."),
)
one("gdr.versions", "fail", lambda w: w.put("/sys/module/nvidia_peermem/version", "535.1"))
# Limits, process
one(
    "limits.qp_capacity",
    "fail",
    lambda w: w.log(
        "mlx5_core 0000:18:00.0: mlx5_cmd_out_err:829:(pid 1): CREATE_QP(0x500) op_mod(0x0) failed, status limits exceeded(0x8), syndrome (0x4), err(-12)"
    ),
    "driver.kernel_log",
)
one("limits.qp_capacity", "warn", lambda w: w.swap("rdma resource show", "qp 2113", "qp 110000"))
one("limits.qp_capacity", "warn", lambda w: w.swap("rdma resource show", "qp 2113", "qp 25000"))
one(
    "limits.cq_mr_capacity",
    "fail",
    lambda w: w.swap("ibv_devinfo -v", "max_cq:\t\t\t\t16777216", "max_cq:\t\t\t\t104"),
)
one(
    "limits.rd_atomic",
    "fail",
    lambda w: w.swap("ibv_devinfo -v", "max_qp_rd_atom:\t\t\t16", "max_qp_rd_atom:\t\t\t8"),
)
one("limits.nofile", "warn", lambda w: w.limit(100, "Max open files", "1024"))
one("limits.nproc", "warn", lambda w: w.limit(100, "Max processes", "1024"))
one("limits.port_range", "warn", lambda w: w.put("/proc/sys/net/ipv4/ip_local_port_range", "10000 65000"))
one("proc.protocol", "info", lambda w: w.arg(100, "protocol", "tcp"))
one("proc.protocol", "warn", lambda w: w.env(MC_FORCE_TCP="1"))
one("proc.device_names", "fail", lambda w: w.arg(100, "device_names", "mlx5_0,mlx5_9"))
one("proc.device_names", "warn", lambda w: management_nic(w))
one("proc.ib_port", "fail", lambda w: w.env(MC_IB_PORT="2"))
one("proc.env_values", "warn", lambda w: w.env(MC_IB_TC="300"), "qos.tclass_mapping")
one("proc.env_values", "warn", lambda w: w.env(MC_ENABLE_DEST_DEVICE_AFFINITY="0"))
one("proc.advertised_host", "fail", lambda w: w.arg(100, "host", "127.0.0.1"))
one("proc.proxy_env", "warn", lambda w: w.env(http_proxy="http://proxy:3128"))
pair(
    "proc.versions",
    "warn",
    lambda a, b: (
        a.say("pip show mooncake-transfer-engine", "Name: mooncake-transfer-engine\nVersion: 0.3.6\n"),
        b.say("pip show mooncake-transfer-engine", "Name: mooncake-transfer-engine\nVersion: 0.3.4\n"),
    ),
)
SLICE = "E0603 20:16:59.104586 27322 worker_pool.cpp:271] Worker: Process failed for slice (opcode: 1, source_addr: 0x7f20fe0f1680, length: 65536, dest_addr: 0x7f3d820f3a80, local_nic: {}, peer_nic: {}, dest_rkey: 2116517, retry_cnt: 0): {}\n"
one(
    "proc.first_error",
    "warn",
    lambda w: w.put(
        "/var/log/mooncake/store0.log",
        "".join(
            SLICE.format("mlx5_0", f"10.30.10.{i}:15001@mlx5_{i}", "transport retry counter exceeded")
            for i in range(5)
        ),
    ),
)
one(
    "proc.first_error",
    "info",
    lambda w: w.put(
        "/var/log/mooncake/store0.log",
        SLICE.format("mlx5_0", "10.30.10.9:15001@mlx5_0", "transport retry counter exceeded"),
    ),
)
pair(
    "proc.restart_stale",
    "fail",
    lambda a, b: (
        a.put(
            "/var/log/mooncake/store0.log",
            SLICE.format("mlx5_0", "10.30.0.62:15001@mlx5_0", "remote access error"),
        ),
        b.put("/proc/100/stat", "100 (store0) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 900000 0 0\n"),
    ),
)
# Time
one(
    "time.sync",
    "warn",
    lambda w: w.say(
        "chronyc -c tracking", "7F7F0101,,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised\n"
    ),
)
one("time.sync", "fail", lambda w: w.swap("chronyc -c tracking", "0.000012345", "1.5"))
pair(
    "time.skew_nodes",
    "warn",
    lambda a, b: (a.meta.update(clock_offset_s=0.0), b.meta.update(clock_offset_s=0.5)),
)
one(
    "time.clocksource",
    "warn",
    lambda w: w.put("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet"),
)
# Nodes compared
pair(
    "xnode.config_drift",
    "warn",
    lambda a, b: (
        b.put("/proc/sys/net/core/rmem_max", "4").say("x", "")
        and a.put("/proc/sys/net/core/rmem_max", "212992")
    ),
)
pair(
    "xnode.env_drift",
    "warn",
    lambda a, b: b.env(100, MC_SLICE_SIZE="131072").env(101, MC_SLICE_SIZE="131072"),
)
pair(
    "xnode.nic_map",
    "fail",
    lambda a, b: b.say(
        "ip addr show",
        b.outputs[("ip", "addr", "show")][1]
        .replace("10.30.0.", "10.30.9.")
        .replace("10.30.1.", "10.30.0.")
        .replace("10.30.9.", "10.30.1."),
    ),
    "gid.stale",
    "ip.peer_route",
)


def rails_only(a: World, b: World) -> None:
    for i, netdev in enumerate(("ens1", "ens2")):
        for j in (0, 1):
            a.say(
                f"ping -c 1 -W 1 -I {netdev} 10.30.{j}.62",
                f"1 packets transmitted, {int(i == j)} received, 0% packet loss\n",
            )


pair("xnode.rail_connectivity", "warn", rails_only)
one(
    "xnode.switch_ports",
    "warn",
    lambda w: w.say(
        "lldpctl -f json",
        json.dumps(
            {
                "lldp": {
                    "interface": [
                        {
                            n: {
                                "chassis": {"leaf1": {"id": {"value": "x"}}},
                                "port": {"id": {"value": f"Eth{i}"}},
                            }
                        }
                        for i, n in enumerate(("ens1", "ens2"))
                    ]
                }
            }
        ),
    ),
)
pair(
    "xnode.peer_counters",
    "info",
    lambda a, b: (a.grow("packet_seq_err", 50), b.grow_wire(10, "rx_discards_phy")),
    "ctr.discards",
)
# Probes
one(
    "probe.tcp_control",
    "fail",
    probes({"probe": "tcp_control", "address": "192.0.2.10:8080", "ok": False, "error": "refused"}),
)
one(
    "probe.udp_4791",
    "fail",
    probes({"probe": "udp_4791", "device": "mlx5_0", "peer": "far", "answered": False, "icmp": True}),
)
one(
    "probe.rping",
    "fail",
    lambda w: w.say(
        "rping -c -a 10.30.10.9 -C 10 -v",
        "",
        code=255,
        stderr="cma event RDMA_CM_EVENT_ADDR_ERROR, error -110\n",
    ),
)
LAT = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]\n 2       1000          1.80           60.0         2.00               2.02             0.3            2.5                     {}\n"
one(
    "probe.pair_latency",
    "warn",
    lambda w: w.say("ib_write_lat -d mlx5_0 -x 3 10.30.10.9", LAT.format("55.0")),
)
BW = " Number of qps   : 4\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n 1048576    5000             {0}             {0}            0.3\n"
one(
    "probe.pair_bandwidth",
    "warn",
    lambda w: w.say("ib_write_bw -d mlx5_0 -x 3 -q 4 --report_gbits 10.30.10.9", BW.format("330.0")),
)
one(
    "probe.pair_bandwidth",
    "fail",
    lambda w: w.say("ib_write_bw -d mlx5_0 -x 3 -q 4 --report_gbits 10.30.10.9", BW.format("200.0")),
)
one(
    "probe.bidirectional",
    "warn",
    lambda w: w.say("ib_write_bw -d mlx5_0 -q 4 --report_gbits 10.30.10.9", BW.format("390.0")).say(
        "ib_write_bw -d mlx5_0 -q 4 -b --report_gbits 10.30.10.9", BW.format("400.0")
    ),
)
one(
    "probe.loopback_host",
    "warn",
    probes(
        *(
            {"probe": "loopback_host", "device": d, "memory": m, "gbps": 150 if d == "mlx5_1" else 390}
            for d in ("mlx5_0", "mlx5_1", "mlx5_2")
            for m in ("node0", "node1")
        )
    ),
)
one(
    "probe.gpu_vs_host",
    "fail",
    probes({"probe": "gpu_vs_host", "device": "mlx5_0", "host_gbps": 196, "gpu_gbps": 63}),
)
one(
    "probe.mtu_ladder",
    "fail",
    probes(
        *(
            {"probe": "mtu_ladder", "netdev": "ens1", "peer": "10.30.10.9", "bytes": b, "answered": b < 2000}
            for b in (552, 1064, 2088, 4136)
        )
    ),
)
one(
    "probe.tclass",
    "fail",
    probes({"probe": "tclass", "device": "mlx5_0", "peer": "far", "sent_priority": 3, "arrived_priority": 0}),
)
one(
    "probe.all_to_all",
    "warn",
    probes(
        *(
            {"probe": "all_to_all", "from": a, "to": b, "gbps": 100 if a == "n1" else 390}
            for a in ("n1", "n2", "n3")
            for b in ("n1", "n2", "n3")
            if a != b
        )
    ),
)
one(
    "probe.incast_jitter",
    "warn",
    probes({"probe": "incast_jitter", "receiver": "n1", "gbps": [390, 100, 390, 90], "retries": 0}),
)
one("probe.reg_mr", "fail", probes({"probe": "reg_mr", "device": "mlx5_0", "gib": 64, "error": "ENOMEM"}))
one("probe.reg_mr", "warn", probes({"probe": "reg_mr", "device": "mlx5_0", "gib": 8, "seconds": 20}))
one(
    "probe.integrity",
    "fail",
    probes({"probe": "integrity", "device": "mlx5_0", "memory": "host", "mismatches": 3}),
)
one(
    "probe.kv_end_to_end",
    "warn",
    probes({"probe": "kv_end_to_end", "device": "mlx5_0", "store_gbps": 100, "raw_gbps": 390}),
)

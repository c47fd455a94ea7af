"""Defects on NICs of several makers, alone and together, each with what a right diagnosis says about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vendors import (
    BDFS,
    BLUEFIELD,
    BROADCOM,
    CONNECTX,
    EFA,
    GIB,
    INFINIBAND,
    INTEL,
    PID,
    PORTS,
    Node,
    healthy,
)

Expected = dict[str, str]  # check → severity
Builder = Callable[[], Sequence[Node]]

CASES: dict[str, tuple[Builder, Expected]] = {}
BENIGN: dict[str, Builder] = {}


def case(**expected: str) -> Callable[[Callable[[], Node | Sequence[Node]]], None]:
    """Register a defect; ``gid__stale="warn"`` expects gid.stale to warn."""

    def register(build: Callable[[], Node | Sequence[Node]]) -> None:
        CASES[build.__name__] = (_many(build), {k.replace("__", "."): v for k, v in expected.items()})

    return register


def benign(build: Callable[[], Node | Sequence[Node]]) -> None:
    """Register a host that looks frightening and is well."""
    BENIGN[build.__name__] = _many(build)


def _many(build: Callable[[], Node | Sequence[Node]]) -> Builder:
    def built() -> Sequence[Node]:
        made = build()
        return [made] if isinstance(made, Node) else made

    return built


# IOMMU, PCIe


@case(iommu__domain_type="warn")
def broadcom_translated() -> Node:
    node = healthy(BROADCOM)
    node.put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro quiet\n")
    for n in (0, 1):
        node.put(f"/sys/kernel/iommu_groups/{n}/type", "DMA-FQ\n")
    return node


@case(iommu__cmdline_invalid="fail")
def amd_passthrough_misspelt() -> Node:
    node = healthy(BROADCOM)
    node.put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro amd_iommu=pt\n")
    node.put("/proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9654\n\n")
    for n in (0, 1):
        node.put(f"/sys/kernel/iommu_groups/{n}/type", "DMA\n")
    node.run(
        "dmesg",
        out="[    0.412101] AMD-Vi: Unknown option - 'pt'\n[    1.000001] iommu: Default domain type: Translated\n",
    )
    return node


@case(pcie__link_width="fail", pcie__capacity="fail")
def broadcom_half_slot() -> Node:
    node = healthy(BROADCOM)
    node.put(f"{node.pci(1)}/current_link_width", "8\n")
    return node


@case(pcie__link_speed="fail")
def intel_at_first_generation() -> Node:
    node = healthy(INTEL)
    for path in (node.pci(0), f"/sys/bus/pci/devices/{PORTS[0]}"):
        node.put(f"{path}/max_link_speed", "16.0 GT/s PCIe\n")
    node.put(f"{node.pci(0)}/current_link_speed", "2.5 GT/s PCIe\n")
    return node


@case(pcie__aer_errors="fail")
def intel_nonfatal_errors() -> Node:
    node = healthy(INTEL)
    node.put(
        f"{node.pci(0)}/aer_dev_nonfatal",
        "DLP 0\nTLP 4\nCmpltTO 0\nTOTAL_ERR_NONFATAL 4\n",
        "DLP 0\nTLP 5\nCmpltTO 0\nTOTAL_ERR_NONFATAL 5\n",
    )
    return node


@case(pcie__device_lost="fail")
def bluefield_lost() -> Node:
    node = healthy(BLUEFIELD)
    node.run(
        "lspci",
        "-vvv",
        out=f"{BDFS[0][5:]} Ethernet controller: {BLUEFIELD.title.replace('(rev 01)', '(rev ff)')} (prog-if ff)\n\t!!! Unknown header type 7f\n\tKernel driver in use: mlx5_core\n\n",
    )
    return node


@case(pcie__stall="warn", ctr__pause_share="fail")
def host_cannot_drain() -> Node:
    node = healthy(CONNECTX)
    node.stat(
        0,
        {
            "outbound_pci_stalled_wr_events": 9,
            "tx_prio3_pause": 90_000,
            "tx_prio3_pause_duration": 8_400_000,
            "tx_prio3_pause_transition": 45_000,
        },
    )
    return node


# NUMA, memory


@case(numa__nic_pinning="warn")
def broadcom_store_on_the_other_socket() -> Node:
    node = healthy(BROADCOM)
    status = node.files[f"/proc/{PID}/status"]
    node.put(
        f"/proc/{PID}/status",
        status.replace("list:\t0-31", "list:\t32-63").replace(
            "Mems_allowed_list:\t0", "Mems_allowed_list:\t1"
        ),
    )
    node.put(
        f"/proc/{PID}/numa_maps",
        "7f0000000000 bind:1 file=/memfd:segment anon=16777216 N1=16777216 kernelpagesize_kB=4\n",
    )
    return node


@case(numa__irq_affinity="warn", numa__zone_reclaim="warn")
def interrupts_on_the_other_socket() -> Node:
    node = healthy(CONNECTX)
    rows = [
        f"{140 + n}:  {n * 7}  0  IR-PCI-MSIX-{BDFS[0]}  {n}-edge  mlx5_comp{n}@pci:{BDFS[0]}"
        for n in range(4)
    ]
    node.put("/proc/interrupts", "            CPU0       CPU1\n" + "\n".join(rows) + "\n")
    for n in range(4):
        node.put(f"/proc/irq/{140 + n}/effective_affinity_list", f"{40 + n}\n")
    node.put("/proc/sys/vm/zone_reclaim_mode", "1\n")
    return node


@case(mem__memlock_limit="fail")
def unit_without_memlock() -> Node:
    node = healthy(BROADCOM)
    status = node.files[f"/proc/{PID}/status"]
    node.put(
        f"/proc/{PID}/status",
        status.replace("000001ffffffffff", "0000000000000000")
        .replace("Uid:\t0\t0\t0\t0", "Uid:\t998\t998\t998\t998")
        .replace("VmPin:\t134217728 kB", "VmPin:\t       0 kB"),
    )
    node.put(
        f"/proc/{PID}/limits",
        node.files[f"/proc/{PID}/limits"].replace(
            "Max locked memory         unlimited            unlimited",
            "Max locked memory         8388608              8388608  ",
        ),
    )
    return node


@case(mem__pin_budget="fail")
def efa_page_budget() -> Node:
    node = healthy(EFA)
    node.edit("ibv_devinfo", "-v", old="0xffffffffffffffff", new=f"0x{48 * GIB:x}")
    for n in (0, 1):
        node.put(f"{node.device(n)}/hw_counters/reg_mr_err", "3\n", "9\n")
    return node


@case(mem__cgroup_limit="fail")
def pod_with_too_little_memory() -> Node:
    node = healthy(BROADCOM)
    node.meta["role"] = "container"
    group = "/kubepods.slice/kubepods-burstable.slice/cri-containerd-1f.scope"
    node.put(f"/proc/{PID}/cgroup", f"0::{group}\n")
    node.put(f"/sys/fs/cgroup{group}/memory.max", f"{60 * GIB}\n")
    node.put(f"/sys/fs/cgroup{group}/memory.current", f"{50 * GIB}\n")
    node.put("/sys/fs/cgroup/memory.max", f"{60 * GIB}\n")
    return node


@case(mem__ecc="fail", cpu__steal="warn")
def bad_memory_module() -> Node:
    node = healthy(INTEL)
    for name, step in (("ce_count", 40), ("ue_count", 1)):
        node.put(f"/sys/devices/system/edac/mc/mc0/{name}", "2\n", f"{2 + step}\n")
    node.put("/proc/stat", "cpu  1000 0 1000 80000 0 0 0 0 0 0\n", "cpu  2000 0 2000 81000 0 0 0 300 0 0\n")
    return node


@case(mem__mkey_resources="fail")
def bluefield_out_of_keys() -> Node:
    node = healthy(BLUEFIELD)
    node.run(
        "dmesg",
        out=f"[863990.112233] mlx5_core {BDFS[0]}: mlx5_cmd_out_err:803:(pid 5100): CREATE_MKEY(0x200) op_mod(0x0) failed, status no resources(0xf), syndrome (0x8c4f5a), err(-11)\n",
    )
    return node


@case(mem__max_mr_size="fail")
def log_names_oversized_region() -> Node:
    node = healthy(INTEL)
    node.edit("ibv_devinfo", "-v", old="0xffffffffffffffff", new=f"0x{16 * GIB:x}")
    return node


# Driver


@case(driver__fw_package="fail")
def ice_safe_mode() -> Node:
    node = healthy(INTEL)
    node.drop(*(node.device(n) for n in (0, 1)), "/sys/class/infiniband_verbs")
    for n in (0, 1):
        del node.links[f"{node.pci(n)}/infiniband/{INTEL.names[n]}"]
    node.run(
        "dmesg",
        out=f"[    9.102938] ice {BDFS[0]}: The DDP package file was not found or could not be read. Entering Safe Mode\n[    9.202938] ice {BDFS[0]}: Package download failed. Advanced features disabled - Device now in Safe Mode\n",
    )
    node.run("rdma", "link", "show")
    return node


@case(driver__modules_loaded="fail")
def broadcom_without_uverbs() -> Node:
    node = healthy(BROADCOM)
    lines = [line for line in node.files["/proc/modules"].splitlines() if not line.startswith("ib_uverbs")]
    node.put("/proc/modules", "\n".join(lines) + "\n")
    node.drop("/sys/class/infiniband_verbs")
    node.meta["dev"] = []
    return node


@case(driver__userspace_abi="fail")
def image_with_old_rdma_core() -> Node:
    node = healthy(BROADCOM)
    node.meta["role"] = "container"
    node.run(
        "ibv_devices",
        out="    device          \t   node GUID\n    ------          \t----------------\n",
        err="libibverbs: Warning: Driver bnxt_re does not support the kernel ABI of 7 (supports 1 to 6) for device /sys/class/infiniband/bnxt_re0\n",
    )
    return node


@case(driver__device_unbound="fail")
def second_function_unbound() -> Node:
    node = healthy(BROADCOM)
    del node.links[f"{node.pci(1)}/driver"]
    node.drop(node.device(1), "/sys/class/infiniband_verbs/uverbs1", node.net(1))
    for path in (f"{node.pci(1)}/infiniband/{BROADCOM.names[1]}", f"{node.pci(1)}/net/{BROADCOM.netdevs[1]}"):
        del node.links[path]
    return node


@case(driver__dpu_mode="fail", ip__neigh_failed="fail")
def bluefield_in_dpu_mode() -> Node:
    node = healthy(BLUEFIELD)
    node.run(
        "mlxconfig",
        "-d",
        BDFS[0],
        "q",
        "INTERNAL_CPU_OFFLOAD_ENGINE",
        out="Device #1:\n----------\n\nDevice type:        BlueField3\nConfigurations:                                      Next Boot\n        INTERNAL_CPU_OFFLOAD_ENGINE                 ENABLED(0)\n",
    )
    node.edit(
        "ip",
        "neigh",
        "show",
        old="10.40.0.9 dev ens2f0np0 lladdr 5c:25:73:00:09:00 REACHABLE",
        new="10.40.0.9 dev ens2f0np0 FAILED",
    )
    node.edit(
        "ip",
        "neigh",
        "show",
        old="10.40.0.1 dev ens2f0np0 lladdr 00:1c:73:00:00:00 REACHABLE",
        new="10.40.0.1 dev ens2f0np0 FAILED",
    )
    node.meta["expect"] = {"peers": [{"node": "gpu-9", "rdma_ips": ["10.40.0.9", "10.40.1.9"]}]}
    return node


@case(driver__vf_revoked="fail")
def cloud_takes_the_function() -> Node:
    node = healthy(CONNECTX)
    node.meta["role"] = "vm"
    lines = [
        f"[{863000 + n * 200}.100000] hv_netvsc 000d3a00-0000-0000-0000-000000000001 eth1: Data path switched from VF: ens2f0np0\n[{863000 + n * 200}.300000] hv_netvsc 000d3a00 eth1: VF unregistering: ens2f0np0\n"
        for n in range(4)
    ]
    node.run("dmesg", out="".join(lines))
    return node


@case(driver__health="fail")
def firmware_reporter_in_error() -> Node:
    node = healthy(BLUEFIELD)
    node.run(
        "devlink",
        "health",
        "show",
        out=f"pci/{BDFS[0]}:\n  reporter fw\n    state healthy error 0 recover 0 auto_dump true\n  reporter fw_fatal\n    state error error 1 recover 0 last_dump_date 2026-11-30 last_dump_time 10:01:02 grace_period 1200000 auto_recover true auto_dump true\n",
    )
    return node


@case(driver__rdma_protocol="fail")
def intel_in_iwarp_mode() -> Node:
    node = healthy(INTEL)
    for n in (0, 1):
        node.put(f"{node.device(n)}/node_type", "4: RNIC\n")
        node.drop(f"{node.port(n)}/gids", f"{node.port(n)}/gid_attrs")
        node.put(f"{node.port(n)}/gids/0", f"5c25:7300:070{n}:0000:0000:0000:0000:0000\n")
        node.errors[f"{node.port(n)}/gid_attrs/types/0"] = "EINVAL"
    return node


@case(driver__device_count="fail")
def second_function_without_rdma() -> Node:
    node = healthy(BROADCOM)
    node.meta["expect"] = {"rdma_devices": ["bnxt_re0"]}
    node.put(
        f"/proc/{PID}/cmdline", node.files[f"/proc/{PID}/cmdline"].replace("bnxt_re0,bnxt_re1", "bnxt_re0")
    )
    node.drop(node.device(1), "/sys/class/infiniband_verbs/uverbs1")
    del node.links[f"{node.pci(1)}/infiniband/{BROADCOM.names[1]}"]
    return node


# Link


@case(link__port_state="fail")
def broadcom_port_down() -> Node:
    node = healthy(BROADCOM)
    node.put(f"{node.port(1)}/state", "1: DOWN\n")
    node.put(f"{node.port(1)}/phys_state", "3: Disabled\n")
    node.put(f"{node.net(1)}/operstate", "down\n")
    node.put(f"{node.net(1)}/flags", "0x1002\n")
    node.put(f"{node.net(1)}/carrier", "0\n")
    node.edit(
        "rdma",
        "link",
        "show",
        old="bnxt_re1/1 state ACTIVE physical_state LINK_UP",
        new="bnxt_re1/1 state DOWN physical_state DISABLED",
    )
    return node


@case(link__rate="fail")
def intel_port_at_a_quarter() -> Node:
    node = healthy(INTEL)
    node.put(f"{node.port(0)}/rate", "25 Gb/sec (1X EDR)\n")
    node.put(f"{node.net(0)}/speed", "25000\n")
    return node


@case(link__flap="warn")
def intel_carrier_changes() -> Node:
    node = healthy(INTEL)
    node.put(f"{node.net(0)}/carrier_changes", "12\n", "16\n")
    return node


@case(link__symbol_errors="fail")
def integrity_of_the_local_link() -> Node:
    node = healthy(INFINIBAND)
    node.counter(1, "local_link_integrity_errors", 2, before=0)
    return node


@case(link__ib_sm="fail")
def no_subnet_manager() -> Node:
    node = healthy(INFINIBAND)
    node.put(f"{node.port(0)}/sm_lid", "0x0\n")
    return node


@case(link__pkey_membership="fail")
def limited_member() -> Node:
    node = healthy(INFINIBAND)
    node.put(f"{node.port(0)}/pkeys/0", "0x7fff\n")
    node.put(f"{node.port(0)}/pkeys/1", "0x0000\n")
    return node


@case(link__port_state="fail")
def infiniband_port_initialising() -> Node:
    node = healthy(INFINIBAND)
    node.put(f"{node.port(0)}/state", "2: INIT\n")
    node.put(f"{node.port(0)}/lid", "0xffff\n")
    node.put(f"{node.port(0)}/sm_lid", "0x0\n")
    return node


# GID


@case(gid__link_local_selected="fail")
def broadcom_link_local() -> Node:
    node = healthy(BROADCOM)
    node.environment(MC_GID_INDEX="1")
    return node


@case(gid__type_v1_selected="warn")
def intel_version_one() -> Node:
    node = healthy(INTEL)
    node.environment(NCCL_IB_GID_INDEX="2")
    return node


@case(gid__index_out_of_range="fail")
def efa_index_three() -> Node:
    node = healthy(EFA)
    node.environment(MC_GID_INDEX="3")
    return node


@case(gid__stale="warn", gid__index_empty="fail")
def broadcom_old_address() -> Node:
    node = healthy(BROADCOM)
    node.put(f"{node.port(0)}/gids/4", "0000:0000:0000:0000:0000:ffff:0a63:0007\n")
    node.put(f"{node.port(0)}/gid_attrs/types/4", "RoCE v2\n")
    node.put(f"{node.port(0)}/gid_attrs/ndevs/4", f"{BROADCOM.netdevs[0]}\n")
    del node.errors[f"{node.port(0)}/gid_attrs/types/4"], node.errors[f"{node.port(0)}/gid_attrs/ndevs/4"]
    node.environment(MC_GID_INDEX="6")
    return node


@case(gid__duplicate="fail")
def two_hosts_one_address() -> Sequence[Node]:
    first, second = healthy(BROADCOM, name="a", number=7), healthy(BROADCOM, name="b", number=8)
    for slot in (2, 3):
        second.put(f"{second.port(0)}/gids/{slot}", first.files[f"{first.port(0)}/gids/{slot}"])
    return [first, second]


@case(gid__changed="fail")
def address_churn_while_running() -> Node:
    node = healthy(INTEL)
    old, new = node.files[f"{node.port(0)}/gids/3"], "0000:0000:0000:0000:0000:ffff:0a28:0063\n"
    for slot in (2, 3):
        node.put(f"{node.port(0)}/gids/{slot}", old, new)
    return node


# IP


@case(ip__peer_route="fail")
def second_rail_without_a_route() -> Node:
    node = healthy(BROADCOM)
    node.meta["expect"] = {"peers": [{"node": "gpu-9", "rdma_ips": ["10.50.0.9", "10.50.1.9"]}]}
    for argv in (("ip", "route", "show", "table", "all"),):
        node.edit(*argv, old="default via 10.40.1.1 dev ens6np0 table 201 \n", new="")
    return node


@case(ip__mac_multicast="fail")
def multicast_mac() -> Node:
    node = healthy(BROADCOM)
    node.put(f"{node.net(0)}/address", "5d:25:73:00:07:00\n")
    return node


@case(ip__port_4791="warn", limits__port_range="warn")
def socket_on_the_roce_port() -> Node:
    node = healthy(INTEL)
    node.put(
        "/proc/net/udp",
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n  101: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 55123 2 0000000000000000 0\n",
    )
    node.put("/proc/sys/net/ipv4/ip_local_port_range", "10000\t60999\n")
    return node


@case(ip__arp_flux="fail")
def two_rails_in_one_subnet() -> Node:
    node = healthy(BROADCOM)
    for argv in (
        ("ip", "addr", "show"),
        ("ip", "route", "show"),
        ("ip", "route", "show", "table", "all"),
        ("ip", "rule", "show"),
        ("ip", "neigh", "show"),
    ):
        out, rc, err = node.commands[argv]
        node.commands[argv] = (
            out.replace("10.40.1.7", "10.40.0.107").replace("10.40.1.", "10.40.0."),
            rc,
            err,
        )
    for slot in (2, 3):
        node.put(f"{node.port(1)}/gids/{slot}", "0000:0000:0000:0000:0000:ffff:0a28:006b\n")
    node.run("ip", "rule", "show", out="0:\tfrom all lookup local\n32766:\tfrom all lookup main\n")
    for conf in ("all", "default", *BROADCOM.netdevs):
        node.put(f"/proc/sys/net/ipv4/conf/{conf}/arp_ignore", "0\n")
        node.put(f"/proc/sys/net/ipv4/conf/{conf}/arp_announce", "0\n")
    return node


@case(ip__firewall="fail")
def handshake_port_dropped() -> Node:
    node = healthy(BROADCOM)
    node.run(
        "nft",
        "list",
        "ruleset",
        out="table inet filter {\n\tchain input {\n\t\ttype filter hook input priority filter; policy accept;\n\t\ttcp dport 12001 drop\n\t}\n}\n",
    )
    return node


@case(ip__neigh_overflow="fail")
def neighbour_table_full() -> Node:
    node = healthy(INTEL)
    node.run("dmesg", out="[863001.000001] neighbour: arp_cache: neighbor table overflow!\n")
    return node


# MTU, QoS


@case(mtu__active_vs_netdev="fail")
def broadcom_stale_mtu() -> Node:
    node = healthy(BROADCOM)
    out, rc, err = node.commands["ibv_devinfo", "-v"]
    node.commands["ibv_devinfo", "-v"] = (
        out.replace("active_mtu:\t\t4096 (5)", "active_mtu:\t\t1024 (3)", 1),
        rc,
        err,
    )
    return node


@case(mtu__peer_mismatch="fail")
def peers_of_two_sizes() -> Sequence[Node]:
    first, second = healthy(BROADCOM, name="a", number=7), healthy(BROADCOM, name="b", number=8)
    second.edit("ibv_devinfo", "-v", old="active_mtu:\t\t4096 (5)", new="active_mtu:\t\t2048 (4)")
    for n in (0, 1):
        second.put(f"{second.net(n)}/mtu", "2200\n")
    return [first, second]


@case(qos__pfc_enabled="fail")
def broadcom_without_pfc() -> Node:
    node = healthy(BROADCOM)
    node.edit("dcb", "pfc", "show", "dev", "ens2np0", old="3:on", new="3:off")
    node.meta["expect"] = {"lossless": True}
    return node


@case(qos__trust_mode="fail")
def bluefield_trusts_pcp() -> Node:
    node = healthy(BLUEFIELD)
    node.edit(
        "mlnx_qos", "-i", "ens6f0np0", old="Priority trust state: dscp", new="Priority trust state: pcp"
    )
    return node


@case(qos__tclass_mapping="fail")
def unmarked_traffic() -> Node:
    node = healthy(CONNECTX)
    node.environment(MC_IB_TC="40")
    return node


@case(qos__global_pause="fail")
def intel_global_pause() -> Node:
    node = healthy(INTEL)
    node.edit("ethtool", "-a", "ens2f0", old="RX:\t\toff\nTX:\t\toff", new="RX:\t\ton\nTX:\t\ton")
    return node


@case(qos__buffer="fail")
def lossless_priority_without_buffer() -> Node:
    node = healthy(CONNECTX)
    node.edit(
        "mlnx_qos",
        "-i",
        "ens2f0np0",
        old="\tbuffer      0   0   0   1   0",
        new="\tbuffer      0   0   0   2   0",
    )
    return node


# Counters


@case(ctr__retransmit_rate="fail", ctr__timeout_rate="warn")
def broadcom_losing_packets() -> Node:
    node = healthy(BROADCOM)
    node.counter(0, "seq_err_naks_rcvd", 30_000)
    node.counter(0, "oos_drop_count", 30_000)
    node.counter(0, "to_retransmits", 60)
    return node


@case(ctr__timeout_rate="fail")
def broadcom_gives_up() -> Node:
    node = healthy(BROADCOM)
    node.counter(1, "max_retry_exceeded", 2)
    return node


@case(ctr__retransmit_rate="warn")
def efa_resends() -> Node:
    node = healthy(EFA)
    for name in ("tx_pkts", "rx_pkts"):
        node.counter(0, name, 7_000_000)
    node.counter(0, "retrans_pkts", 400)
    return node


@case(ctr__retransmit_rate="fail")
def intel_resends() -> Node:
    node = healthy(INTEL)
    node.counter(0, "tcpRetransSegs", 60_000)
    return node


@case(ctr__remote_access="fail")
def stale_keys() -> Node:
    node = healthy(BROADCOM)
    node.counter(0, "remote_access_err", 3)
    return node


@case(ctr__pause_storm="fail", ctr__discards="fail")
def storm_and_loss() -> Node:
    node = healthy(CONNECTX)
    node.stat(1, {"tx_pause_storm_error_events": 1, "rx_prio3_buf_discard": 40})
    return node


@case(ctr__rnr="warn")
def broadcom_receiver_not_ready() -> Node:
    node = healthy(BROADCOM)
    node.counter(0, "rnr_naks_rcvd", 40)
    return node


# OVS, Kubernetes


@case(ovs__lost_upcalls="warn", ovs__conntrack_full="warn")
def switch_under_pressure() -> Node:
    node = healthy(CONNECTX)
    text = "system@ovs-system:\n  lookups: hit:900 missed:90 lost:{}\n  flows: 12\n  port 0: ovs-system (internal)\n  port 1: ens2f0np0\n"
    node.run("ovs-appctl", "dpctl/show", out=text.format(4), later=text.format(19))
    node.put("/proc/sys/net/netfilter/nf_conntrack_count", "250000\n")
    node.put("/proc/sys/net/netfilter/nf_conntrack_max", "262144\n")
    return node


@case(k8s__dev_infiniband="fail")
def pod_without_device_nodes() -> Node:
    node = healthy(BROADCOM)
    node.meta["role"] = "container"
    node.meta["dev"] = []
    return node


@case(k8s__dev_infiniband_foreign="fail")
def efa_of_another_pod() -> Node:
    node = healthy(EFA)
    node.meta["role"] = "container"
    node.errors["/dev/infiniband/uverbs1"] = "EPERM"
    return node


@case(k8s__vf_guid="fail")
def infiniband_function_without_guid() -> Node:
    node = healthy(INFINIBAND)
    node.put(f"{node.device(0)}/node_guid", "0000:0000:0000:0000\n")
    node.links[f"{node.pci(0)}/physfn"] = "/sys/bus/pci/devices/0000:18:00.1"
    return node


@case(k8s__topology_manager="warn")
def kubelet_without_policy() -> Node:
    node = healthy(BROADCOM)
    node.put(
        "/var/lib/kubelet/config.yaml",
        "kind: KubeletConfiguration\ncpuManagerPolicy: none\ntopologyManagerPolicy: none\n",
    )
    node.put("/sys/bus/pci/devices/0000:19:00.0/class", "0x030200\n")
    node.put("/sys/bus/pci/devices/0000:19:00.0/vendor", "0x10de\n")
    node.put("/sys/bus/pci/devices/0000:19:00.0/numa_node", "0\n")
    node.links["/sys/bus/pci/devices/0000:19:00.0/driver"] = "/sys/bus/pci/drivers/nvidia"
    return node


# Limits, process, time, fleet


@case(limits__rd_atomic="fail", limits__qp_capacity="fail")
def small_function() -> Node:
    node = healthy(BROADCOM)
    node.edit("ibv_devinfo", "-v", old="max_qp_rd_atom:\t\t\t16", new="max_qp_rd_atom:\t\t\t8")
    node.edit("ibv_devinfo", "-v", old="max_qp:\t\t\t\t131072", new="max_qp:\t\t\t\t66")
    return node


@case(limits__nofile="warn", limits__nproc="warn")
def small_limits() -> Node:
    node = healthy(EFA)
    text = node.files[f"/proc/{PID}/limits"]
    node.put(
        f"/proc/{PID}/limits",
        text.replace("1048576              1048576", "1024                 1048576").replace(
            "Max processes             unlimited            unlimited",
            "Max processes             1024                 1024     ",
        ),
    )
    return node


@case(proc__device_names="fail")
def names_of_another_maker() -> Node:
    node = healthy(BROADCOM)
    cmdline = node.files[f"/proc/{PID}/cmdline"]
    node.put(f"/proc/{PID}/cmdline", cmdline.replace("bnxt_re0,bnxt_re1", "mlx5_0,mlx5_1"))
    return node


@case(proc__env_values="warn", proc__ib_port="fail")
def ignored_values() -> Node:
    node = healthy(INTEL)
    node.environment(MC_IB_PORT="2", MC_IB_TC="300")
    return node


@case(proc__advertised_host="fail")
def advertises_loopback() -> Node:
    node = healthy(BROADCOM)
    node.put(
        f"/proc/{PID}/cmdline",
        node.files[f"/proc/{PID}/cmdline"].replace("--host=192.0.2.7", "--host=127.0.0.1"),
    )
    return node


@case(time__sync="warn")
def clock_not_synchronised() -> Node:
    node = healthy(INTEL)
    node.run(
        "chronyc",
        "-c",
        "tracking",
        out="00000000,,0,0.000000000,0.000000000,0.000000000,0.000000000,0.000,0.000,0.000,1.000000000,1.000000000,0.0,Not synchronised\n",
    )
    return node


@case(driver__fw_consistency="warn", xnode__env_drift="warn")
def one_host_of_three_differs() -> Sequence[Node]:
    nodes = [healthy(BROADCOM, name=f"n{n}", number=n) for n in (7, 8, 9)]
    for n in (0, 1):
        nodes[2].put(f"{nodes[2].device(n)}/fw_ver", "229.0.154.0\n")
    nodes[2].environment(MC_NUM_QP_PER_EP="8")
    return nodes


# Frightening, and well


@benign
def lifetime_totals() -> Node:
    node = healthy(CONNECTX)
    for n in (0, 1):
        for name in CONNECTX.hw_counters:
            if name != "lifespan":
                node.put(f"{node.port(n)}/hw_counters/{name}", "91827364\n")
        for name in (
            "symbol_error",
            "link_downed",
            "port_rcv_errors",
            "excessive_buffer_overrun_errors",
            "port_xmit_wait",
            "link_error_recovery",
        ):
            node.put(f"{node.port(n)}/counters/{name}", "4294967295\n")
    return node


@benign
def congestion_control_at_work() -> Node:
    node = healthy(CONNECTX)
    for name in ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"):
        node.counter(0, name, 5_000_000)
    node.stat(0, {"rx_prio3_pause": 2_000_000, "rx_prio3_pause_duration": 90_000})
    node.stat(1, {"rx_corrected_bits_phy": 10**12, "rx_pcs_symbol_err_phy": 0})
    return node


@benign
def no_power_message() -> Node:
    node = healthy(BLUEFIELD)
    node.run(
        "dmesg",
        out=f"[    7.100000] mlx5_core {BDFS[0]}: mlx5_pcie_event:299:(pid 9): Detected insufficient power on the PCIe slot (27W).\n"
        f"[  500.100000] mlx5_core {BDFS[0]}: mlx5_cmd_out_err:803:(pid 71): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3), syndrome (0x1c0e39), err(-22)\n"
        f"[    9.500000] mlx5_core {BDFS[0]} ens2f0np0: Link down\n[   10.500000] mlx5_core {BDFS[0]} ens2f0np0: Link up\n",
    )
    return node


@benign
def bluefield_service_function() -> Node:
    node = healthy(BLUEFIELD)
    path = "/sys/bus/pci/devices/0000:18:00.2"
    for key, value in (("vendor", "0x15b3"), ("device", "0xc2d5"), ("class", "0x080100"), ("numa_node", "0")):
        node.put(f"{path}/{key}", f"{value}\n")
    return node


@benign
def bluefield_in_dpu_mode_that_works() -> Node:
    node = healthy(BLUEFIELD)
    for bdf in BDFS:
        node.run(
            "mlxconfig",
            "-d",
            bdf,
            "q",
            "INTERNAL_CPU_OFFLOAD_ENGINE",
            out="Configurations:                                      Next Boot\n        INTERNAL_CPU_OFFLOAD_ENGINE                 ENABLED(0)\n",
        )
    return node


@benign
def efa_as_it_is() -> Node:
    node = healthy(EFA)
    for n in (0, 1):
        node.put(f"{node.device(n)}/node_guid", "0000:0000:0000:0000\n")
        node.put(f"{node.port(n)}/hw_counters/rx_drops", "88123\n")
        node.put(f"{node.pci(n)}/current_link_width", "0\n")
        node.put(f"{node.pci(n)}/current_link_speed", "Unknown\n")
        node.put(f"{node.pci(n)}/max_link_width", "0\n")
        node.put(f"{node.pci(n)}/max_link_speed", "Unknown\n")
    node.meta["role"] = "vm"
    return node


@benign
def intel_with_lid_one() -> Node:
    node = healthy(INTEL)
    for n in (0, 1):
        node.put(f"{node.port(n)}/lid", "0x1\n")
        node.put(f"{node.port(n)}/hw_counters/cnpIgnored", "8812\n")
        node.put(f"{node.port(n)}/hw_counters/RNR sent", "0\n")
    return node


@benign
def guest_without_topology() -> Node:
    node = healthy(CONNECTX)
    node.meta["role"] = "vm"
    node.run("systemd-detect-virt", out="kvm\n")
    for n in (0, 1):
        for key, value in (
            ("current_link_width", "0"),
            ("max_link_width", "0"),
            ("current_link_speed", "Unknown"),
            ("max_link_speed", "Unknown"),
            ("numa_node", "-1"),
        ):
            node.put(f"{node.pci(n)}/{key}", f"{value}\n")
        del node.links[f"{node.pci(n)}/iommu_group"]
        node.commands.pop(("mlnx_qos", "-i", CONNECTX.netdevs[n]))
        argv = ("ethtool", "-S", CONNECTX.netdevs[n])
        node.run(
            *argv,
            out="NIC statistics:\n     rx_packets: 10\n     rx_vport_rdma_unicast_bytes: 500\n",
            later="NIC statistics:\n     rx_packets: 12\n     rx_vport_rdma_unicast_bytes: 60000000500\n",
        )
    node.drop("/sys/kernel/iommu_groups")
    node.put("/sys/devices/system/clocksource/clocksource0/current_clocksource", "kvm-clock\n")
    return node


@benign
def infiniband_oddities() -> Node:
    node = healthy(INFINIBAND)
    node.counter(0, "port_xmit_wait", 10**10)
    node.put(f"{node.port(0)}/pkeys/1", "0x7fff\n")
    for n in (0, 1):
        node.put(f"{node.net(n)}/mtu", "2044\n")
    return node


@benign
def spare_port_is_down() -> Node:
    node = healthy(BROADCOM)
    node.meta["expect"] = {"rdma_devices": ["bnxt_re0"]}
    cmdline = node.files[f"/proc/{PID}/cmdline"]
    node.put(f"/proc/{PID}/cmdline", cmdline.replace("bnxt_re0,bnxt_re1", "bnxt_re0"))
    node.put(f"{node.port(1)}/state", "1: DOWN\n")
    node.put(f"{node.port(1)}/phys_state", "3: Disabled\n")
    node.put(f"{node.port(1)}/rate", "10 Gb/sec (4X SDR)\n")
    node.put(f"{node.net(1)}/operstate", "down\n")
    node.put(f"{node.net(1)}/flags", "0x1002\n")
    return node


@benign
def broadcom_with_history() -> Node:
    node = healthy(BROADCOM)
    for n in (0, 1):
        for name in BROADCOM.hw_counters:
            path = f"{node.port(n)}/hw_counters/{name}"
            if path not in node.later:
                node.put(path, "7712399\n")
        node.put(f"{node.net(n)}/carrier_changes", "412\n")
    return node


@benign
def counters_that_cannot_be_read() -> Node:
    node = healthy(CONNECTX)
    for n in (0, 1):
        for name in ("symbol_error", "link_downed", "port_rcv_errors"):
            node.put(f"{node.port(n)}/counters/{name}", "N/A (no PMA)\n")
        node.errors[f"{node.port(n)}/hw_counters/out_of_sequence"] = "EINVAL"
    return node


@benign
def counters_that_wrap_and_reset() -> Node:
    node = healthy(CONNECTX)
    node.put(f"{node.port(0)}/hw_counters/local_ack_timeout_err", "90000\n", "0\n")
    node.put(f"{node.port(0)}/counters/symbol_error", "65535\n", "3\n")
    node.stat(0, {"rx_discards_phy": -900_000}, before=1_000_000)
    return node


@benign
def seen_without_root() -> Node:
    node = healthy(BROADCOM)
    node.meta["uid"] = 1000
    node.errors[f"/proc/{PID}/environ"] = "EACCES"
    node.errors[f"/proc/{PID}/numa_maps"] = "EACCES"
    node.drop(f"/proc/{PID}/environ", f"/proc/{PID}/numa_maps")
    node.errors[f"/proc/{PID}/environ"] = "EACCES"
    node.run("dmesg", rc=1, err="dmesg: read kernel buffer failed: Operation not permitted\n")
    node.run(
        "lspci",
        "-vvv",
        out="18:00.0 Ethernet controller: Broadcom Inc. and subsidiaries BCM57608 (rev 11)\n\tCapabilities: <access denied>\n",
    )
    return node


@benign
def policy_without_pfc() -> Node:
    node = healthy(BROADCOM)
    for name in BROADCOM.netdevs:
        node.edit("dcb", "pfc", "show", "dev", name, old="3:on", new="3:off")
    node.meta["expect"] = {"roce_priority": None, "roce_dscp": None}
    return node


@benign
def idle_and_old_messages() -> Node:
    node = healthy(INTEL)
    node.later = {path: text for path, text in node.later.items() if "hw_counters" not in path}
    node.run(
        "dmesg",
        out="[   11.000000] ice 0000:18:00.0: The DDP package was successfully loaded: ICE OS Default Package version 1.3.36.0\n[   12.000000] ice 0000:18:00.0 ens2f0: NIC Link is Down\n[   14.000000] ice 0000:18:00.0 ens2f0: NIC Link is up 100 Gbps Full Duplex, Requested FEC: RS-FEC, Negotiated FEC: RS-FEC\n",
    )
    return node

"""Healthy nodes of other kinds: nothing may report on any of them."""

from __future__ import annotations

from collections.abc import Callable

from defects import BOND, all_infiniband, bond
from world import PORT, RAILS, World


def _driver(w: World, name: str, vendor: str, device: str, kind: str) -> World:
    for old, netdev, bdf, _ in RAILS:
        pci = f"/sys/bus/pci/devices/{bdf}"
        w.meta["links"][f"{pci}/driver"] = f"/sys/bus/pci/drivers/{name}"
        w.put(f"{pci}/vendor", vendor).put(f"{pci}/device", device)
        w.unsay(f"mlnx_qos -i {netdev}", f"mlxconfig -d {bdf} -e q", f"mlxlink -d {old} -c")
    module = {"bnxt": "bnxt_re", "efa": "efa", "erdma": "erdma", "irdma": "irdma"}[kind]
    w.put("/proc/modules", w.files["/proc/modules"] + f"{module} 1 0 - Live 0x0\n")
    return w.unsay("lspci -vvv")


def efa() -> World:
    """A guest of a cloud with EFA: one GID, link layer Unknown, no counters folder, always ACTIVE."""
    w = _driver(World().vm(), "efa", "0x1d0f", "0xefa2", "efa")
    w.meta["expect"] = {"rdma_devices": ["mlx5_0", "mlx5_1"], "provider": "aws"}
    for device, netdev, bdf, _ in RAILS:
        port = PORT.format(device)
        w.drop(
            f"{port}/counters",
            f"{port}/gids",
            f"{port}/gid_attrs",
            f"{port}/hw_counters",
            f"/sys/class/net/{netdev}/ecn",
        )
        w.put(f"{port}/link_layer", "Unknown").put(
            f"/sys/class/infiniband/{device}/node_type", "7: unspecified"
        )
        w.put(f"{port}/gids/0", "fe80:0000:0000:0000:0400:00ff:fe00:0001").put(
            f"{port}/rate", "100 Gb/sec (4X EDR)"
        )
        w.put(f"/sys/class/infiniband/{device}/node_guid", "0000:0000:0000:0000")
        for name in ("current_link_speed", "max_link_speed"):
            w.put(f"/sys/bus/pci/devices/{bdf}/{name}", "Unknown")
        w.put(f"/sys/bus/pci/devices/{bdf}/current_link_width", "0")
        for counter, step in (("tx_bytes", 10**12), ("rx_bytes", 10**12), ("retrans_bytes", 0)):
            w.put(f"{port}/hw_counters/{counter}", "5").put_later(
                f"{port}/hw_counters/{counter}", str(5 + step)
            )
        w.say(
            f"ethtool -S {netdev}",
            "NIC statistics:\n     tx_timeout: 0\n",
            "NIC statistics:\n     tx_timeout: 0\n",
        )
        w.put(f"/sys/class/net/{netdev}/mtu", "9001")
    for pid in (100, 101):
        w.env(pid, MC_GID_INDEX=None, MC_IB_TC=None)
    w.drop("/sys/bus/pci/devices/0000:19", "/sys/bus/pci/devices/0000:9b")
    return w.unsay("ibv_devinfo -v", "nvidia-smi -q -d MEMORY")


def erdma() -> World:
    """A guest of a cloud with erdma: RNIC class, one GID made of the MAC, MTU 1500, numa_node -1."""
    w = _driver(World().vm(), "erdma", "0x1ded", "0x107f", "erdma")
    w.meta["expect"] = {"rdma_devices": ["mlx5_0", "mlx5_1"]}
    for device, netdev, bdf, _ in RAILS:
        port = PORT.format(device)
        w.drop(
            f"{port}/gids",
            f"{port}/gid_attrs",
            f"{port}/counters",
            f"{port}/hw_counters",
            f"/sys/class/net/{netdev}/ecn",
        )
        w.put(f"{port}/gids/0", "0200:0000:0205:0000:0000:0000:0000:0000").put(
            f"{port}/gid_attrs/types/0", "IB/RoCE v1"
        )
        w.put(f"/sys/class/infiniband/{device}/node_type", "4: RNIC").put(
            f"/sys/class/net/{netdev}/mtu", "1500"
        )
        w.put(f"/sys/bus/pci/devices/{bdf}/numa_node", "-1").put(
            f"/sys/bus/pci/devices/{bdf}/current_link_width", "0"
        )
        w.put(f"/sys/bus/pci/devices/{bdf}/current_link_speed", "Unknown")
    for pid in (100, 101):
        w.env(pid, MC_GID_INDEX=None, MC_IB_TC=None)
    w.drop("/sys/bus/pci/devices/0000:19", "/sys/bus/pci/devices/0000:9b")
    return w.unsay("ibv_devinfo -v", "nvidia-smi -q -d MEMORY")


def bnxt() -> World:
    """Broadcom NICs: other counters, no vendor tools, priorities by dcb."""
    w = _driver(World(), "bnxt_en", "0x14e4", "0x1760", "bnxt")
    for device, netdev, _, _ in RAILS:
        port = PORT.format(device)
        w.drop(f"{port}/hw_counters", f"/sys/class/net/{netdev}/ecn", f"/sys/class/net/{netdev}/qos")
        for name in (
            "to_retransmits",
            "seq_err_naks_rcvd",
            "max_retry_exceeded",
            "oos_drop_count",
            "rnr_naks_rcvd",
        ):
            w.put(f"{port}/hw_counters/{name}", "12")
        w.say(
            f"dcb pfc show dev {netdev}",
            "pfc-cap 8 macsec-bypass off delay 0\nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off\n",
        )
        w.say(f"dcb app show dev {netdev}", "dscp-prio 26:3 48:6\n")
    return w


def infiniband() -> World:
    """Two InfiniBand rails: one GID of type IB/RoCE v1, no PFC, no ECN, IPoIB MTU 2044."""
    w = all_infiniband(World())
    w.meta["expect"] = {"rdma_devices": ["mlx5_0", "mlx5_1"]}
    for device, netdev, _, _ in RAILS:
        port = PORT.format(device)
        for name in ("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored"):
            w.drop(f"{port}/hw_counters/{name}")
        w.drop(f"/sys/class/net/{netdev}/qos", f"/sys/class/net/{netdev}/ecn")
        w.put(f"/sys/class/net/{netdev}/mtu", "2044").put(f"/sys/class/net/{netdev}/type", "32")
        w.unsay(f"mlnx_qos -i {netdev}")
        w.grow("port_xmit_wait", 10**9, device)
    for pid in (100, 101):
        w.env(pid, MC_IB_TC=None)
    addr = w.outputs[("ip", "addr", "show")][1]
    kept = [line for line in addr.splitlines(keepends=True) if "10.30." not in line]
    return w.say("ip addr show", "".join(kept))


def pod() -> World:
    """A pod with two virtual functions of its own: capabilities given, only its interfaces and nodes."""
    w = World().container()
    w.meta["expect"] |= {"allocated_devices": ["mlx5_0", "mlx5_1"]}
    for _, netdev, bdf, _ in RAILS:
        pci = f"/sys/bus/pci/devices/{bdf}"
        w.put(f"{pci}/device", "0x101e").put(f"{pci}/current_link_speed", "Unknown").put(
            f"{pci}/current_link_width", "0"
        )
        w.say(f"mlnx_qos -i {netdev}", "Priority trust state is not supported on your system\n", code=1)
        w.drop(f"/sys/class/net/{netdev}/qos", f"/sys/class/net/{netdev}/ecn")
        stats = (
            "NIC statistics:\n     rx_vport_rdma_unicast_bytes: {}\n     tx_vport_rdma_unicast_bytes: {}\n"
        )
        w.say(f"ethtool -S {netdev}", stats.format(5, 5), stats.format(10**12, 10**12))
    for pid in (100, 101):
        w.env(pid, KUBERNETES_SERVICE_HOST="10.0.0.1")
    w.drop("/proc/modules")
    return w.unsay("lspci -vvv", "dmesg", "iptables -S", "chronyc -c tracking")


def ipv6() -> World:
    """An IPv6 fabric: ULA GIDs, no IPv4 on the rails."""
    w = World()
    addr = w.outputs[("ip", "addr", "show")][1]
    routes = "default via 192.0.2.254 dev eno1\n"
    for index, (device, netdev, _, _) in enumerate(RAILS):
        for slot, _kind in ((2, "IB/RoCE v1"), (3, "RoCE v2")):
            w.put(f"{PORT.format(device)}/gids/{slot}", f"fd00:0000:0000:000{index}:0000:0000:0000:0061")
        addr = addr.replace(f"inet 10.30.{index}.61/24 scope", f"inet6 fd00:0:0:{index}::61/64 scope")
        routes += f"fd00:0:0:{index}::/64 dev {netdev} proto kernel\nfd00::/32 via fe80::1 dev {netdev} metric {100 + index}\n"
    w.expect(peers=[{"node": "far", "rdma_ips": ["fd00:0:0:10::9", "fd00:0:0:11::9"]}])
    w.say("ip -6 route show", routes).say(
        "ip neigh show", "fe80::1 dev ens1 lladdr 02:00:00:00:fe:00 router REACHABLE \n"
    )
    return w.say("ip addr show", addr)


def bonded() -> World:
    """A RoCE LAG with two queue pairs an endpoint."""
    return bond(World(), BOND).env(MC_NUM_QP_PER_EP="2")


def unprivileged() -> World:
    """Collected by an ordinary user: refused here and there."""
    w = World()
    w.meta["uid"] = 1000
    for pid in (100, 101):
        w.drop(f"/proc/{pid}/environ", f"/proc/{pid}/maps", f"/proc/{pid}/numa_maps")
        w.meta["errors"] |= {f"/proc/{pid}/environ": "EACCES", f"/proc/{pid}/numa_maps": "EACCES"}
    w.say(
        "lspci -vvv",
        "18:00.0 Ethernet controller: Mellanox Technologies MT2910\n\tCapabilities: <access denied>\n",
    )
    w.say("dmesg", "", code=1, stderr="dmesg: read kernel buffer failed: Operation not permitted\n")
    w.say("iptables -S", "", code=4, stderr="iptables: Permission denied (you must be root).\n")
    return w.say("devlink health show", "", code=1, stderr="kernel answers: Operation not permitted\n")


def no_rdma() -> World:
    """A machine without any RDMA device."""
    w = World()
    w.meta["targets"], w.meta["expect"], w.meta["dev"] = [], {}, []
    w.drop("/sys/class/infiniband", "/sys/bus/pci", "/proc/100", "/proc/101")
    w.outputs.clear()
    w.outputs_later.clear()
    return w


def lossy() -> World:
    """A site without PFC and without any policy."""
    w = World()
    w.meta["expect"] = {}
    for _, netdev, _, _ in RAILS:
        w.swap(f"mlnx_qos -i {netdev}", "enabled     0   0   0   1", "enabled     0   0   0   0")
        w.swap(f"mlnx_qos -i {netdev}", "trust state: dscp", "trust state: pcp")
        w.put(f"/sys/class/net/{netdev}/qos/trust", "pcp")
    for pid in (100, 101):
        w.env(pid, MC_IB_TC=None)
    return w


HEALTHY: dict[str, Callable[[], World]] = {
    f.__name__: f
    for f in (World, efa, erdma, bnxt, infiniband, pod, ipv6, bonded, unprivileged, no_rdma, lossy)
}

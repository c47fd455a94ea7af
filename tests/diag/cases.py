"""
Unpacks the written cases of ``tests/snapshots`` into snapshot folders.

A case is one entry of a YAML list: which rails and stores the node has, then only what is special about it. Unpacked, it has the
layout that ``kvops diagnose --collect`` writes, so that a case takes the same way in as a real snapshot.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"
FAR_MAC = "02:00:00:00:{:02x}:{:02x}"
PORT = "/sys/class/infiniband/{}/ports/1"
ABSENT = "!absent"
SCOPE = ["/proc/cmdline", "/proc/sys/kernel/osrelease", "/proc/meminfo", "/sys/devices/system/node",
         "/sys/bus/pci/devices", "/sys/class/net", "/sys/class/infiniband"]  # fmt: skip
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
TRAFFIC_WORDS = 180_000_000_000  # of four bytes, moved between the two samples where a rail is busy
TRAFFIC_PACKETS = 176_000_000
EMPTY_GID = ":".join(["0000"] * 8)


def documents(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Every written case, in the order of the files; each has a ``case`` name and an ``expected`` verdict."""
    found: list[dict[str, Any]] = []
    for file in sorted(SNAPSHOTS.glob("*.yaml")):
        found += yaml.safe_load(file.read_text(encoding="utf-8"))
    return [d for d in found if names is None or d["case"] in names]


def unpack(document: dict[str, Any], parent: Path) -> Path:
    """Write one case below ``parent``; returns the folder that ``--from`` takes."""
    folder = parent / document["case"]
    nodes = document.get("nodes")
    if nodes:
        shared = document.get("node", {})
        for name, part in nodes.items():
            _write_node({**_merged(shared, part), "name": name}, folder / "nodes" / name)
        meta = {"schema": 1, "kind": "cluster", "nodes": list(nodes)}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    else:
        _write_node(document.get("node", {}), folder)
    expected = {"why": document["why"], **document["expected"]}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")
    return folder


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _write_node(node: dict[str, Any], folder: Path) -> None:
    meta = _meta(node)
    files: dict[str, str] = {
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/mapper/vg-root ro quiet iommu=pt",
        "/proc/sys/kernel/osrelease": meta["kernel"],
        "/proc/meminfo": "MemTotal:       1056710656 kB\nMemFree:         528355328 kB\nMemAvailable:    634026393 kB",
    }
    later: dict[str, str] = {}
    short = {}
    rails = node.get("rails", [{}])
    for index, rail in enumerate(rails):
        rail = _rail_defaults(index, rail)
        _rail(rail, node, files, later, meta)
        number = str(index) if index else ""
        short |= {f"PORT{number}": PORT.format(rail["device"]), f"IB{number}": f"/sys/class/infiniband/{rail['device']}",
                  f"NET{number}": f"/sys/class/net/{rail['netdev']}", f"PCI{number}": f"/sys/bus/pci/devices/{rail['pci']}"}  # fmt: skip
    if node.get("numa_nodes", 2) > 1:
        files |= {"/sys/devices/system/node/online": "0-1", "/sys/devices/system/node/node0/cpulist": "0-31",
                  "/sys/devices/system/node/node1/cpulist": "32-63", "/sys/devices/system/node/node0/distance": "10 21",
                  "/sys/devices/system/node/node1/distance": "21 10"}  # fmt: skip
    for index, store in enumerate(node.get("stores", [])):
        _store(index, store, files, meta)
    for sample, target in (("root", files), ("root_t1", later)):
        for path, text in node.get(sample, {}).items():
            full = _long(path, short)
            if text == ABSENT:
                target.pop(full, None)
                meta["links"].pop(full, None)
            else:
                target[full] = str(text)
                meta["errors"].pop(full, None)
    for key in ("errors", "links", "realpath"):
        meta[key] |= {_long(k, short): _long(str(v), short) for k, v in node.get(key, {}).items()}
    for key in ("scope", "not_collected"):
        meta[key] = meta[key] + [_long(p, short) for p in node.get(key, [])]
    for top, content in (("root", files), ("root.t1", later)):
        for path, text in content.items():
            file = folder / top / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.rstrip("\n") + ("" if text.endswith("\0") else "\n"), encoding="utf-8")
    _commands(node, folder, meta)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _meta(node: dict[str, Any]) -> dict[str, Any]:
    samples: list[dict[str, Any]] = [{"id": "t0", "t": 0.0}]
    if node.get("window_s"):
        samples.append({"id": "t1", "t": float(node["window_s"])})
    meta: dict[str, Any] = {
        "schema": 1, "kind": "node", "role": node.get("role", "host"), "os": "Ubuntu 22.04",
        "kernel": node.get("kernel", "5.15.0-105-generic"), "arch": "x86_64", "uid": node.get("uid", 0),
        "samples": samples, "scope": list(SCOPE), "not_collected": [], "truncated": {}, "links": {}, "realpath": {},
        "errors": {}, "cmd": {}, "targets": [], "expect": node.get("expect", {}),
    }  # fmt: skip
    if "name" in node:
        meta["node"] = node["name"]
    if "dev" in node:
        meta["dev"] = node["dev"]
        meta["scope"].append("/dev/infiniband")
    return meta


def _rail_defaults(index: int, rail: dict[str, Any]) -> dict[str, Any]:
    bdf = ("0000:1a:00.0", "0000:3c:00.0", "0000:9a:00.0", "0000:bc:00.0")[index]
    return {"device": f"mlx5_{index}", "netdev": f"ens{index + 1}f0np0", "pci": bdf, "numa": 0,
            "ip": f"10.20.{index}.11", "mtu": 9000, "rate": "400 Gb/sec (4X NDR)", "layer": "Ethernet", "vendor": "0x15b3",
            "id": "0x1021", "speed": "32.0 GT/s PCIe", "width": 16, "module": "mlx5_core", "fw": "28.43.1014",
            "board": "MT_0000000838", "node_type": "1: CA", "counters": None, "state": "4: ACTIVE",
            "phys": "5: LinkUp", "mac": FAR_MAC.format(2, 16 + index), **rail}  # fmt: skip


def gid_of(address: str) -> str:
    """The eight-group form in which the kernel prints the GID of an IPv4 address."""
    high, mid, low, last = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{high:02x}{mid:02x}:{low:02x}{last:02x}"


def _rail(
    rail: dict[str, Any],
    node: dict[str, Any],
    files: dict[str, str],
    later: dict[str, str],
    meta: dict[str, Any],
) -> None:
    device, netdev, bdf = rail["device"], rail["netdev"], rail["pci"]
    port, net, pci, ib = (
        PORT.format(device),
        f"/sys/class/net/{netdev}",
        f"/sys/bus/pci/devices/{bdf}",
        f"/sys/class/infiniband/{device}",
    )
    mac = [int(part, 16) for part in rail["mac"].split(":")]
    local = f"fe80:0000:0000:0000:{mac[0] ^ 2:02x}{mac[1]:02x}:{mac[2]:02x}ff:fe{mac[3]:02x}:{mac[4]:02x}{mac[5]:02x}"
    guid = f"{mac[0] ^ 2:02x}{mac[1]:02x}:{mac[2]:02x}ff:fe{mac[3]:02x}:{mac[4]:02x}{mac[5]:02x}"
    files |= {f"{ib}/node_guid": guid, f"{ib}/sys_image_guid": guid, f"{ib}/node_desc": device, f"{ib}/hca_type": "MT4129",
              f"{ib}/node_type": rail["node_type"], f"{ib}/fw_ver": rail["fw"], f"{ib}/board_id": rail["board"]}  # fmt: skip
    files |= {f"{port}/state": rail["state"], f"{port}/phys_state": rail["phys"], f"{port}/rate": rail["rate"],
              f"{port}/link_layer": rail["layer"], f"{port}/lid": "0x0", f"{port}/sm_lid": "0x0", f"{port}/sm_sl": "0",
              f"{port}/lid_mask_count": "0", f"{port}/cap_mask": "0x04010000", f"{port}/pkeys/0": "0xffff"}  # fmt: skip
    if rail["layer"] == "Ethernet":
        table = [
            (local, "IB/RoCE v1"),
            (local, "RoCE v2"),
            (gid_of(rail["ip"]), "IB/RoCE v1"),
            (gid_of(rail["ip"]), "RoCE v2"),
        ]
        for slot, (gid, kind) in enumerate(table):
            files |= {
                f"{port}/gids/{slot}": gid,
                f"{port}/gid_attrs/types/{slot}": kind,
                f"{port}/gid_attrs/ndevs/{slot}": netdev,
            }
        for slot in (4, 5):
            files[f"{port}/gids/{slot}"] = EMPTY_GID
            meta["errors"] |= {
                f"{port}/gid_attrs/types/{slot}": "EINVAL",
                f"{port}/gid_attrs/ndevs/{slot}": "EINVAL",
            }
        meta["truncated"][f"{port}/gids"] = 6
    speed = rail["rate"].split()[0]
    files |= {f"{net}/address": rail["mac"], f"{net}/mtu": str(rail["mtu"]), f"{net}/operstate": "up", f"{net}/carrier": "1",
              f"{net}/carrier_changes": "2", f"{net}/duplex": "full", f"{net}/ifindex": str(rail["numa"] + 3),
              f"{net}/speed": f"{speed}000", f"{net}/type": "1"}  # fmt: skip
    files |= {f"{pci}/vendor": rail["vendor"], f"{pci}/device": rail["id"], f"{pci}/class": "0x020000",
              f"{pci}/numa_node": str(rail["numa"]), f"{pci}/local_cpulist": ("0-31", "32-63")[rail["numa"]],
              f"{pci}/current_link_speed": rail["speed"], f"{pci}/max_link_speed": rail["speed"],
              f"{pci}/current_link_width": str(rail["width"]), f"{pci}/max_link_width": str(rail["width"])}  # fmt: skip
    bridge = bdf[:5] + f"{int(bdf[5:7], 16) - 1:02x}"
    meta["links"] |= {f"{ib}/device": pci, f"{net}/device": pci, f"{pci}/net/{netdev}": net, f"{pci}/infiniband/{device}": ib,
                      f"{pci}/driver": f"/sys/bus/pci/drivers/{rail['module']}"}  # fmt: skip
    meta["realpath"][pci] = f"/sys/devices/pci{bridge}/{bridge}:01.0/{bdf}"
    if rail["counters"] is None:
        meta["not_collected"] += [f"{port}/counters", f"{port}/hw_counters"]
        return
    files |= {f"{port}/hw_counters/{name}": "0" for name in HW_COUNTERS} | {
        f"{port}/hw_counters/lifespan": "12"
    }
    files |= {f"{port}/counters/{name}": "0" for name in COUNTERS}
    moved = 0 if rail["counters"] == "idle" else 1
    for way in ("xmit", "rcv"):
        files |= {f"{port}/counters/port_{way}_data": "7000", f"{port}/counters/port_{way}_packets": "90",
                  f"{port}/counters/unicast_{way}_packets": "90"}  # fmt: skip
        if node.get("window_s"):
            later |= {f"{port}/counters/port_{way}_data": str(7000 + moved * TRAFFIC_WORDS),
                      f"{port}/counters/port_{way}_packets": str(90 + moved * TRAFFIC_PACKETS),
                      f"{port}/counters/unicast_{way}_packets": str(90 + moved * TRAFFIC_PACKETS)}  # fmt: skip


def _store(index: int, store: dict[str, Any], files: dict[str, str], meta: dict[str, Any]) -> None:
    pid = store.get("pid", 4242 + index)
    proc = f"/proc/{pid}"
    memlock = store.get("memlock", "unlimited")
    size, devices = store.get("size", "64 GB"), store.get("devices", "mlx5_0")
    argv = ["mooncake_client", f"--host={store.get('host', '10.20.0.11')}", f"--protocol={store.get('protocol', 'rdma')}",
            f"--device_names={devices}", f"--global_segment_size={size}",
            "--master_server_address=192.0.2.10:50051", *store.get("args", [])]  # fmt: skip
    environ = {"MC_GID_INDEX": "3", **store.get("env", {})}
    files |= {
        f"{proc}/cmdline": "".join(f"{part}\0" for part in argv),
        f"{proc}/environ": "".join(f"{k}={v}\0" for k, v in environ.items() if v is not None),
        f"{proc}/limits": f"{'Limit':<26}{'Soft Limit':<21}{'Hard Limit':<21}Units\n"
        f"{'Max processes':<26}{'8253024':<21}{'8253024':<21}processes\n"
        f"{'Max open files':<26}{store.get('nofile', 1048576)!s:<21}{'1048576':<21}files\n"
        f"{'Max locked memory':<26}{memlock!s:<21}{memlock!s:<21}bytes\n",
        f"{proc}/status": f"Name:\tmooncake_client\nState:\tS (sleeping)\nTgid:\t{pid}\nPid:\t{pid}\nUid:\t0\t0\t0\t0\n"
        f"VmLck:\t       0 kB\nVmPin:\t       0 kB\nHugetlbPages:\t       0 kB\nThreads:\t64\n"
        f"CapEff:\t{store.get('caps', '000001ffffffffff')}\nCpus_allowed_list:\t{store.get('cpus', '0-31')}\n"
        f"Mems_allowed_list:\t{store.get('mems', '0')}\n",
    }
    meta["scope"].append(proc)
    meta["targets"].append({"name": store.get("name", f"store{index}"), "pid": pid})


def _commands(node: dict[str, Any], folder: Path, meta: dict[str, Any]) -> None:
    for line, output in node.get("cmd", {}).items():
        argv = line.split()
        slug = re.sub(r"[^A-Za-z0-9._=-]", "-", "_".join(argv))[:120]
        given = output if isinstance(output, dict) else {"out": output}
        entry: dict[str, Any] = {"argv": argv, "rc": given.get("rc", 0)}
        if given.get("missing"):
            entry = {"argv": argv, "missing": True}
        for key, top, suffix in (
            ("out", "cmd", ".txt"),
            ("err", "cmd", ".err.txt"),
            ("t1", "cmd.t1", ".txt"),
        ):
            if key in given:
                (folder / top).mkdir(parents=True, exist_ok=True)
                (folder / top / f"{slug}{suffix}").write_text(str(given[key]), encoding="utf-8")
        meta["cmd"][f"{slug}.txt"] = entry


def _long(path: str, short: dict[str, str]) -> str:
    head, slash, rest = path.partition("/")
    return short[head] + slash + rest if head in short else path

"""A site's policy as YAML: what a healthy node has, and what differs from it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvops.diag.checks.mtu import active_mtu
from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.errors import ConfigError

_BOOL, _INT, _STR, _LIST, _MAP = (bool,), (int,), (str,), (list,), (dict,)
# Key → accepted types. The keys are what checks read with ``expect``.
KEYS: dict[str, tuple[type, ...]] = {
    "rdma_devices": _LIST,
    "rdma_device_count": _INT,
    "pci_devices": _LIST,
    "roce_priority": _INT,
    "roce_dscp": _INT,
    "lossless": _BOOL,
    "trust": _STR,
    "mtu": _INT,
    "rate_gbps": _INT,
    "link_layer": _STR,
    "congestion_control": _STR,
    "rtt_cc": _BOOL,
    "adaptive_routing": _BOOL,
    "dcbx": _STR,
    "firmware": _MAP,
    "switch_ports": _MAP,
    "stores_per_numa_node": _INT,
    "segment_bytes": _INT,
    "gpu_buffer_bytes": _INT,
    "shm_bytes": _INT,
    "provider": _STR,
    "ovs_offload": _BOOL,
    "ip_family": (int, str),
    "vlan": _INT,
    "vf_max_tx_rate_mbps": _INT,
    "peer_count": _INT,
    "peers": _LIST,
    "allocated_devices": _LIST,
}


def load_profile(path: Path) -> dict[str, Any]:
    """
    Read a profile.

    Raises:
        ConfigError: It cannot be read, is no mapping, or has a key that no check knows; the message names it.
    """
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}", fix="give a profile made by: kvops diagnose profile init"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} is not YAML: {str(error).splitlines()[0]}", fix="correct the line"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no mapping", fix="write key: value lines")
    return checked(value, str(path))


def checked(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The profile if each key is known and of its type. Raises ConfigError."""
    for key, item in value.items():
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(KEYS)}"
            raise ConfigError(f"{where}: unknown key {key!r}", fix=hint)
        wanted = KEYS[key]
        if not isinstance(item, wanted) or (isinstance(item, bool) and bool not in wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise ConfigError(f"{where}: {key} is {item!r}", fix=f"give a value of type {names}")
    return {str(key): item for key, item in value.items()}


def derive(host: HostFacts) -> dict[str, Any]:
    """What this node has, as a profile; what could not be seen is left out."""
    ports = [port for port in attempt(lambda: host.ports) or () if port.active]
    found: dict[str, Any] = {}
    devices = attempt(lambda: host.devices_in_scope) or []
    if devices:
        found["rdma_devices"] = [device.name for device in devices]
    rates = {rate.gbps for port in ports if (rate := attempt(lambda: port.rate)) is not None}
    if len(rates) == 1 and not any(device.is_bond for device in devices):
        found["rate_gbps"] = int(rates.pop())
    layers = {attempt(lambda: port.link_layer) for port in ports} - {None, "Unknown"}
    if len(layers) == 1:
        found["link_layer"] = layers.pop()
    mtus = {attempt(lambda: active_mtu(port)) for port in ports} - {None}
    if len(mtus) == 1:
        found["mtu"] = mtus.pop()
    settings = [q for p in ports for n in p.wire_netdevs if (q := attempt(lambda: n.qos)) is not None]
    trusts = {q.trust for q in settings if q.trust}
    if len(trusts) == 1:
        found["trust"] = trusts.pop()
    lossless = {q.lossless for q in settings if q.pfc is not None}
    if len(lossless) == 1:
        priorities = sorted(lossless.pop())
        found["lossless"] = bool(priorities)
        if len(priorities) == 1:
            found["roce_priority"] = priorities[0]
    firmware: dict[str, str] = {}
    for device in devices:
        board, version = attempt(lambda: device.text("board_id")), attempt(lambda: device.text("fw_ver"))
        if board and version:
            firmware[board] = min(firmware.get(board, version), version)
    if firmware:
        found["firmware"] = firmware
    found |= {key: host.expect(key) for key in ("roce_priority", "roce_dscp") if host.expect(key) is not None}
    return found


def dump(profile: Mapping[str, Any]) -> str:
    """The profile as YAML."""
    import yaml

    return str(yaml.safe_dump(dict(profile), sort_keys=False, allow_unicode=True))


def differences(profile: Mapping[str, Any], node: Mapping[str, Any]) -> list[dict[str, str]]:
    """Keys of the profile that the node has otherwise."""
    return [
        {"key": key, "profile": str(value), "node": str(node[key])}
        for key, value in profile.items()
        if key in node and node[key] != value
    ]

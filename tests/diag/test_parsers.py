"""Parsers give a value or raise ParseError, whatever the text."""

from __future__ import annotations

import inspect
import ipaddress
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from kvops.diag.parsers import ethtool, ip, misc, pcie, proc, qos, rdma, sysfs, tools
from kvops.errors import ParseError

PARSERS: list[Callable[[str], Any]] = [
    function
    for module in (ethtool, ip, misc, pcie, proc, qos, rdma, sysfs, tools)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if name.startswith("parse_") and function.__module__ == module.__name__ and name != "parse_mount_size"
]
SAMPLES = [text for _, text, _ in World().outputs.values()] + list(World().files.values())


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.__name__)
@settings(max_examples=25, deadline=None)
@given(text=st.text() | st.text(alphabet="0123456789:.,-x \n\tabcdef+/%()[]{}<>=", max_size=400))
def test_any_text(parser: Callable[[str], Any], text: str) -> None:
    """Arbitrary text never crashes a parser."""
    try:
        parser(text)
    except ParseError:
        pass  # refused, which is the other good answer


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_damaged_output(parser: Callable[[str], Any], data: st.DataObject) -> None:
    """Real output with a piece cut out, doubled or replaced never crashes a parser, whichever parser gets it."""
    text = data.draw(st.sampled_from(SAMPLES))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    middle = data.draw(st.sampled_from(["", text[start:end] * 2, "9" * 5000, "-", "\x00\xff", "٣", "²"]))
    try:
        parser(text[:start] + middle + text[end:])
    except ParseError:
        pass


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.__name__)
def test_large_garbage_takes_bounded_time(parser: Callable[[str], Any]) -> None:
    """Long runs of each kind of garbage are refused or read at once: no pattern backtracks without end."""
    began = time.process_time()
    for unit in (
        "a",
        "0",
        " ",
        "\n",
        "\t",
        ":",
        "(",
        "0:",
        "1 ",
        "ff:",
        " a: 1\n",
        "Slave Interface:\n",
        "GPU \n",
        "12: x",
        "dp:",
    ):
        try:
            parser(unit * (50_000 // len(unit)))
        except ParseError:
            pass

    assert time.process_time() - began < 60  # seconds for all of them: a runaway pattern would take hours


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: sysfs.parse_rate("400 Gb/sec (4X NDR)"), sysfs.Rate(400.0, 4, "NDR")),
        (lambda: sysfs.parse_rate("2.5 Gb/sec (1X SDR)\n").gbps, 2.5),
        (lambda: sysfs.parse_enum("4: ACTIVE\n"), (4, "ACTIVE")),
        (lambda: sysfs.parse_link_speed("8 GT/s"), 8.0),
        (lambda: sysfs.parse_link_speed("Unknown"), None),
        (lambda: sysfs.parse_int("0xffff"), 65535),
        (lambda: sysfs.parse_int("-1"), -1),
        (lambda: sysfs.parse_cpulist("0-2,9"), frozenset({0, 1, 2, 9})),
        (lambda: sysfs.parse_cpulist(""), frozenset()),
        (
            lambda: sysfs.parse_gid("0000:0000:0000:0000:0000:ffff:0a14:0b0c").ipv4_mapped,
            ipaddress.IPv4Address("10.20.11.12"),
        ),
        (lambda: proc.parse_size("256 GB"), 256 << 30),
        (lambda: proc.parse_size("17179869184"), 16 << 30),
        (lambda: qos.parse_tclass("Global tclass=106"), 106),
        (lambda: qos.parse_dcb_app("dscp-prio 26:3 48:6"), {26: 3, 48: 6}),
        (lambda: rdma.parse_mtu("4096 (5)"), 4096),
        (lambda: ethtool.parse_stats("NIC statistics:\n     RNR sent: 4\n")["RNR sent"], 4),
        (lambda: ip.parse_ping("1 packets transmitted, 0 received, 100% packet loss"), False),
        (lambda: misc.parse_lost_upcalls("lookups: hit:1 missed:2 lost:3"), 3),
        (lambda: pcie.full_bdf("18:00.0"), "0000:18:00.0"),
        (lambda: sysfs.parse_word("performance\n"), "performance"),
        (
            lambda: tools.parse_mlxlink("\x1b[32mRaw Physical BER \x1b[0m   : 3E-9\n"),
            {"raw physical ber": "3E-9"},
        ),
        (lambda: tools.parse_ber("15E-255"), 15e-255),
        (lambda: tools.parse_ber("1.2e-08"), 1.2e-8),
        (
            lambda: tools.parse_mstflint(
                "Image type:            FS4\nFW Version:            28.43.1014\nFW Version(Running):   28.39.2048\n"
            ),
            {"Image type": "FS4", "FW Version": "28.43.1014", "FW Version(Running)": "28.39.2048"},
        ),
        (
            lambda: tools.parse_mlxreg(
                "Sending access register...\n\nField Name   | Data\n=====\nstatus | 0x00000000\nvalue  | 0x00000001\n"
            ),
            {"status": 0, "value": 1},
        ),
        (
            lambda: tools.parse_fi_info(
                "provider: efa\n    fabric: efa\n    domain: rdmap16s27-rdm\nprovider: efa\n    fabric: efa-direct\n"
            ),
            [
                {"provider": "efa", "fabric": "efa", "domain": "rdmap16s27-rdm"},
                {"provider": "efa", "fabric": "efa-direct"},
            ],
        ),
        (lambda: tools.parse_fi_info("fi_getinfo: -61 (No data available)\n"), []),
        (
            lambda: tools.parse_ucx_devices(
                "# Memory domain: mlx5_0\n#      Transport: rc_mlx5\n#         Device: mlx5_0:1\n#           Type: network\n"
            ),
            {"rc_mlx5": {"mlx5_0:1"}},
        ),
        (
            lambda: tools.parse_arping(
                "Unicast reply from 10.0.0.2 [02:00:00:00:09:9A]  0.7ms\nReceived 1 response(s)\n"
            ),
            (1, {"02:00:00:00:09:9a"}),
        ),
        (
            lambda: tools.parse_arping("2 packets transmitted, 0 packets received, 100% unanswered"),
            (0, set()),
        ),
        (
            lambda: tools.parse_lldp(
                '{"lldp": {"interface": {"ens1": {"chassis": {"id": {"value": "02:00"}, "name": {"value": "leaf"}}, "port": {"id": {"value": "E1"}}}}}}'
            ),
            {"ens1": ("leaf", "E1")},
        ),
        (lambda: tools.parse_lldp('{"lldp": {}}'), {}),
        (
            lambda: rdma.parse_holders(
                "link mlx5_0/1 lqpn 5 type RC state RTS pid 9 comm old\n0/1: mlx5_0/1 lqpn 6 type GSI comm [mlx5_ib]\n"
            ),
            {("mlx5_0", 1): {"old (pid 9)": 1, "[mlx5_ib]": 1}},
        ),
        (lambda: ip.parse_neighbours("10.0.0.2  FAILED\n", device="ens1")[0].device, "ens1"),
    ],
)
def test_known_forms(call: Callable[[], Any], value: Any) -> None:
    """The forms that the kernel and the tools print are read as what they say."""
    assert call() == value


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (sysfs.parse_rate, "fast"),
        (sysfs.parse_gid, "fe80::1"),
        (sysfs.parse_int, "N/A (no PMA)"),
        (sysfs.parse_cpulist, "0-99999999"),
        (proc.parse_limits, ""),
        (qos.parse_mlnx_qos, "Priority trust state is not supported on your system"),
        (misc.parse_chrony, "506 Cannot talk to daemon"),
        (misc.parse_json, "[" * 100_000),
        (sysfs.parse_word, "12: x"),
        (tools.parse_mlxlink, "-E- Failed to open device"),
        (tools.parse_ber, "N/A"),
        (tools.parse_ber, "1E9999"),
        (tools.parse_mstflint, "-E- Cannot open 0000:18:00.0: Permission denied"),
        (tools.parse_mlxreg, "-E- Failed to send access register: Register not supported"),
        (tools.parse_ucx_devices, "# Failed to open /dev/infiniband"),
        (tools.parse_arping, "arping: socket: Operation not permitted"),
        (proc.parse_modules, "1 2 3 4"),
    ],
)
def test_refused(parser: Callable[[str], Any], text: str) -> None:
    """What is no value is refused with an error that quotes it, never read as zero."""
    with pytest.raises(ParseError):
        parser(text)


@pytest.mark.parametrize(
    ("text", "boot_epoch_s", "seconds"),
    [
        ("<3>[1.5] a\n[  2.25] b\nkern  :err   : [3.5] c\n[4.5] host kernel: d", None, [1.5, 2.25, 3.5, 4.5]),
        ("[Mon Nov 30 10:00:00 2026] Linux version 6\n[Mon Nov 30 11:00:00 2026] a", None, [0, 3600]),
        ("2026-11-30T10:00:00,5+00:00 a\n2026-11-30T12:00:00+02:00 h kernel: b", 1796032800.0, [0, 0]),
        (
            "2026-11-30T10:00:00Z a\n[Mon Nov 30 11:00:00 2026] b\nNov 30 11:00:00 h kernel: c",
            None,
            [None] * 3,
        ),
        (
            "Nov 30 09:00:00 h a\nNov 30 10:00:00 h kernel: Linux version 6\nNov 30 10:00:09 h b",
            None,
            [-3600, 0, 9],
        ),
        (
            "Dec 31 23:00:00 h a\nJan  1 10:00:00 h kernel: Linux version 6\nFeb 31 10:00:00 h b",
            None,
            [None, 0, None],
        ),
    ],
    ids=["since boot", "dmesg -T", "iso", "no anchor", "syslog", "new year"],
)
def test_stamps_of_kernel_logs(text: str, boot_epoch_s: float | None, seconds: list[float | None]) -> None:
    """However a kernel's log is stamped, its lines are placed after the boot, where the log or btime tell when that was."""
    assert [line.seconds for line in misc.parse_dmesg(text, boot_epoch_s=boot_epoch_s)] == seconds

"""Faults of the network's IP path: packets that do not arrive, by rules that the kernel ends by itself."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from kvops.chaos import netns, nft
from kvops.chaos.faults.common import control_is_well, expect, must, new_token, not_here
from kvops.chaos.model import EXPIRES_S_DEFAULT, OVER_IP, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.probe import Ending, Probe, address_of, ask_target
from kvops.chaos.steps import DeleteQdisc, UndoStep
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.host import Host

LOSS_PROBES_AT_ONCE: Final = 16
LOSS_ROUNDS_MAX: Final = 12
LOSS_PACKETS_MIN: Final = 300
RTO_MIN_MS: Final = (
    180.0  # the kernel sends again after 200 ms at the earliest (TCP_RTO_MIN), measured with slack
)
SIGMAS: Final = 4.0
NETEM_HANDLE: Final = "7f01:"  # ours: nobody chooses it by chance
NETEM_ASKED: Final = 24  # requests of a proof of loss
ORDINARY_QDISCS: Final = frozenset({"noqueue", "pfifo_fast", "fq_codel", "mq", "fq"})  # what the kernel gives
NOT_RDMA: Final = "RDMA: hardware bypasses the kernel's path"


def _from_outside(target: Target, control: Target, *, timeout_s: float = 0.5) -> Probe:
    """A neighbour's request: from the control's namespace where the target has one of its own."""
    return ask_target(target, timeout_s=timeout_s, from_netns=control.netns)


def _control(control: Target) -> Signal:
    return control_is_well(control)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What faults by rules share."""

    target: Target
    control: Target
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    layer: ClassVar = Layer.NETWORK
    transports: ClassVar[frozenset[Transport]] = OVER_IP
    conflicts: ClassVar[frozenset[str]] = frozenset({"net.", "process.kill", "process.pause"})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("nft rules with a time-out", nft.missing())

    def unavailable(self, host: Host) -> str | None:
        return self.here().missing or not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        return nft.undo(self.target, self.token)

    def _load(self, inward: list[str], outward: list[str]) -> None:
        nft.load(self.target, nft.ruleset(self.token, inward, outward, expires_s=self.expires_s))

    def _hits(self) -> dict[str, int]:
        return nft.hits(self.target, self.token)


def _each(patterns: list[str], action: str) -> list[str]:
    return [f"meta l4proto @on {pattern} {action}" for pattern in patterns]


@fault("net.partition")
@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(_Rules):
    """Cut a node off, both ways: what it sends and what it is sent is dropped, established connections included."""

    peers: tuple[str, ...] = ()

    name: ClassVar[str]
    certifies: ClassVar[str] = "a lost host or link: nothing is refused or reset, only deadlines end a wait"
    does_not_certify: ClassVar[str] = NOT_RDMA

    def unavailable(self, host: Host) -> str | None:
        return _Rules.unavailable(self, host) or nft.no_cgroup(self.target)

    def inject(self, host: Host) -> None:
        found = nft.match(self.target, peers=self.peers)
        own = nft.join_cgroup(self.target, self.token) if nft.shares_namespace(self.target) else ""
        outward = [*found.outward, *([own] if own and not self.peers else [])]
        self._load(
            _each(found.inward, "counter name in_hits drop"), _each(outward, "counter name out_hits drop")
        )

    def verify(self, host: Host) -> Evidence:
        before = self._hits()
        # Of named peers only they are cut: a neighbour's request shows nothing then, the peer's own traffic does.
        seen = _from_outside(self.target, self.control)
        after = self._hits()
        dropped = sum(after[name] - before[name] for name in ("in_hits", "out_hits"))
        must(dropped > 0 or (self.peers and sum(after.values()) > 0), "no packet was dropped")
        wanted = (
            (Ending.ANSWERED,) if self.peers and not self._cut_from_control() else (Ending.NO_CONNECTION,)
        )
        return Evidence(
            signals=(
                Signal("nft counter", f"+{dropped} packets dropped"),
                expect(seen, *wanted, target=self.target),
            ),
            control=_control(self.control),
        )

    def _cut_from_control(self) -> bool:
        hosts = {address.rpartition(":")[0] for address in self.control.addresses.values()}
        return not nft.shares_namespace(self.target) and any(peer in hosts for peer in self.peers)


@fault("net.oneway")
@dataclass(frozen=True, slots=True, kw_only=True)
class Oneway(_Rules):
    """Drop what goes in one direction: a broken optic, an accidental firewall rule."""

    direction: Literal["in", "out"] = "in"

    name: ClassVar[str]
    certifies: ClassVar[str] = "asymmetric loss: one side believes that it is connected"
    does_not_certify: ClassVar[str] = NOT_RDMA

    def unavailable(self, host: Host) -> str | None:
        return _Rules.unavailable(self, host) or nft.no_cgroup(self.target)

    def inject(self, host: Host) -> None:
        found = nft.match(self.target)
        own = nft.join_cgroup(self.target, self.token) if nft.shares_namespace(self.target) else ""
        dropped = {"in": "counter name in_seen", "out": "counter name out_seen"}
        dropped[self.direction] = f"counter name {self.direction}_hits drop"
        self._load(
            _each(found.inward, dropped["in"]),
            _each([*found.outward, *([own] if own else [])], dropped["out"]),
        )

    def verify(self, host: Host) -> Evidence:
        before = self._hits()
        seen = _from_outside(self.target, self.control)
        after = self._hits()
        other = "out" if self.direction == "in" else "in"
        dropped = after[f"{self.direction}_hits"] - before[f"{self.direction}_hits"]
        must(dropped > 0, f"no packet was dropped on its way {self.direction}")
        must(after[f"{other}_hits"] == 0, f"packets were dropped on their way {other}, too")
        return Evidence(
            signals=(
                Signal("nft counter", f"+{dropped} packets dropped {self.direction}, none {other}"),
                expect(seen, Ending.NO_CONNECTION, target=self.target),
            ),
            control=_control(self.control),
        )


@fault("net.loss")
@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(_Rules):
    """Drop a share of a node's packets, each by itself: connections live, and stall for 200 ms and more."""

    percent: float = 20.0

    name: ClassVar[str]
    certifies: ClassVar[str] = "a lossy link: the median is as ever, the tail is retransmissions"
    does_not_certify: ClassVar[str] = f"{NOT_RDMA}, and loss there costs far more; bursts of loss"

    def __post_init__(self) -> None:
        if not 1 <= self.percent <= 90:
            raise ValueError(f"percent {self.percent:g} is not between 1 and 90")

    def inject(self, host: Host) -> None:
        found = nft.match(self.target)
        share = round(self.percent * 100)

        def rules(patterns: list[str], way: str) -> list[str]:
            lost = f"numgen random mod 10000 < {share} counter name {way}_hits drop"
            return [*_each(patterns, f"counter name {way}_seen"), *_each(patterns, lost)]

        self._load(rules(found.inward, "in"), rules(found.outward, "out"))

    def verify(self, host: Host) -> Evidence:
        before = self._hits()
        slowest = 0.0
        packets = dropped = 0
        with ThreadPoolExecutor(LOSS_PROBES_AT_ONCE) as pool:
            for _ in range(LOSS_ROUNDS_MAX):
                asked = [
                    pool.submit(_from_outside, self.target, self.control, timeout_s=1.5)
                    for _ in range(LOSS_PROBES_AT_ONCE)
                ]
                slowest = max(slowest, *(one.result().total_ms for one in asked))
                after = self._hits()
                packets = sum(after[name] - before[name] for name in ("in_seen", "out_seen"))
                dropped = sum(after[name] - before[name] for name in ("in_hits", "out_hits"))
                if packets >= LOSS_PACKETS_MIN and slowest >= RTO_MIN_MS:
                    break
        must(packets > 0, "no packet passed the rules")
        wanted = self.percent / 100
        slack = SIGMAS * math.sqrt(wanted * (1 - wanted) / packets)
        must(
            abs(dropped / packets - wanted) <= slack,
            f"{dropped} of {packets} packets were dropped, not {self.percent:g} % ± {slack:.1%}",
        )
        must(
            slowest >= RTO_MIN_MS,
            f"no request waited for a retransmission: the slowest took {slowest:.0f} ms",
        )
        return Evidence(
            signals=(
                Signal("nft counters", f"{dropped} of {packets} packets dropped ({dropped / packets:.1%})"),
                Signal(f"requests to {self.target.name}", f"slowest {slowest:.0f} ms"),
            ),
            control=_control(self.control),
        )


@fault("net.blackhole")
@dataclass(frozen=True, slots=True, kw_only=True)
class Blackhole(_Rules):
    """
    Swallow whatever others send to the ports that a node serves; what it begins itself goes on.

    Its heartbeats arrive, so that its master calls it healthy, while its clients wait: a gray failure.
    """

    name: ClassVar[str]
    certifies: ClassVar[str] = "silence at a healthy looking peer: connections time out"
    does_not_certify: ClassVar[str] = (
        f"{NOT_RDMA}; a refusal (net.fast_fail) takes another path through clients"
    )

    def inject(self, host: Host) -> None:
        found = nft.match(self.target, served_only=True)
        self._load(_each(found.inward, "counter name in_hits drop"), [])

    def verify(self, host: Host) -> Evidence:
        return _served_is(self, Ending.NO_CONNECTION)


@fault("net.fast_fail")
@dataclass(frozen=True, slots=True, kw_only=True)
class FastFail(_Rules):
    """Refuse whatever others send to the ports that a node serves, at once, with a reset."""

    name: ClassVar[str]
    certifies: ClassVar[str] = "refusals at network speed: retries without back-off show"
    does_not_certify: ClassVar[str] = f"{NOT_RDMA}; silence (net.blackhole)"

    def inject(self, host: Host) -> None:
        found = nft.match(self.target, served_only=True)
        self._load(_each(found.inward, "counter name in_hits reject with tcp reset"), [])

    def verify(self, host: Host) -> Evidence:
        return _served_is(self, Ending.REFUSED, Ending.RESET)


def _served_is(one: Blackhole | FastFail, *endings: Ending) -> Evidence:
    before = one._hits()
    seen = _from_outside(one.target, one.control)
    caught = one._hits()["in_hits"] - before["in_hits"]
    must(caught > 0, "no packet met the rule")
    return Evidence(
        signals=(Signal("nft counter", f"+{caught} packets"), expect(seen, *endings, target=one.target)),
        control=_control(one.control),
    )


@fault("net.reset")
@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Reset every established connection to the ports that a node serves: both ends see it break."""

    target: Target
    control: Target
    seen: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # at the moment it happened

    name: ClassVar[str]
    layer: ClassVar = Layer.NETWORK
    transports: ClassVar[frozenset[Transport]] = OVER_IP
    certifies: ClassVar[str] = "a middlebox or a fail-over that forgets its connections: clients reconnect"
    does_not_certify: ClassVar[str] = NOT_RDMA
    conflicts: ClassVar[frozenset[str]] = frozenset({"net.", "process."})
    lasting: ClassVar[bool] = False

    @classmethod
    def here(cls) -> Here:
        if shutil.which("ss") is None:
            return Here("ss -K", "ss is not installed: apt install iproute2")
        return Here(
            "ss -K (INET_DIAG_DESTROY)", nft.missing() if nft.missing() == "rules need root" else None
        )

    def unavailable(self, host: Host) -> str | None:
        missing = self.here().missing or not_here(host, self.target)
        if missing is None and not nft.ports_of(self.target.processes)[0]:
            return f"{self.target.name} serves no tcp port"
        return missing

    def undo(self) -> list[UndoStep]:
        return []

    def inject(self, host: Host) -> None:
        served, _ = nft.ports_of(self.target.processes)
        address = address_of(self.target)
        assert address is not None  # unavailable() said so
        # What the others will meet is seen by a connection that a neighbour holds meanwhile.
        self.seen["witness"] = netns.call_in(
            self.control.netns, lambda: socket.create_connection(address, timeout=1.0)
        )
        self.seen["before"] = _established(self.target, served)
        for port in sorted(served):
            argv = ["ss", "-K", "-t", "state", "established", "sport", "=", f":{port}"]
            netns.run_in(self.target.netns, argv)

    def verify(self, host: Host) -> Evidence:
        witness = self.seen.pop("witness", None)
        must(witness is not None, "no connection was held while it happened")
        with witness:
            try:
                witness.settimeout(0.5)
                ended = "closed" if not witness.recv(1) else "answered"
            except ConnectionError as error:
                ended = f"reset ({error.strerror})"
            except TimeoutError:
                ended = "still open"
        must(ended.startswith("reset"), f"a neighbour's connection is {ended}")
        served, _ = nft.ports_of(self.target.processes)
        before = self.seen["before"]
        left = before & _established(self.target, served)
        must(before and not left, f"{len(left)} of {len(before)} connections are still there")
        return Evidence(
            signals=(
                Signal("a neighbour's connection", ended),
                Signal("/proc/net/tcp", f"{len(before)} established connections are gone"),
            ),
            control=_control(self.control),
        )


def _established(target: Target, served: set[int]) -> frozenset[str]:
    """The established connections to ports, by both their addresses."""
    found = set()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/{target.leader.pid}/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01" and int(words[1].rpartition(":")[2], 16) in served:
                found.add(f"{words[1]} {words[2]}")
    return frozenset(found)


@fault("net.netem")
@dataclass(frozen=True, slots=True, kw_only=True)
class Netem:
    """
    Delay, jitter and loss of every packet that a node sends, by the kernel's network emulator.

    Handshakes and connections that were there before are hit as well. Nothing ends it but its undo.
    """

    target: Target
    control: Target
    delay_ms: float = 50.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    seen: dict[str, str] = field(default_factory=dict, compare=False, repr=False)  # the device

    name: ClassVar[str]
    layer: ClassVar = Layer.NETWORK
    transports: ClassVar[frozenset[Transport]] = OVER_IP
    certifies: ClassVar[str] = "a far or congested path, from the first packet of a handshake on"
    does_not_certify: ClassVar[str] = f"{NOT_RDMA}; what the node receives is not touched"
    conflicts: ClassVar[frozenset[str]] = frozenset({"net.", "process.kill", "process.pause"})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.delay_ms <= 10_000 or not 0 <= self.jitter_ms <= self.delay_ms:
            raise ValueError("delay_ms must be 1 to 10000 and jitter_ms at most that")
        if not 0 <= self.loss_percent <= 90:
            raise ValueError(f"loss_percent {self.loss_percent:g} is not between 0 and 90")
        if "device" not in self.seen:
            self.seen["device"] = "" if nft.shares_namespace(self.target) else _device(self.target)

    @classmethod
    def here(cls) -> Here:
        return Here("tc qdisc netem", netem_missing())

    def unavailable(self, host: Host) -> str | None:
        trouble = self.here().missing or not_here(host, self.target)
        if trouble is not None:
            return trouble
        if nft.shares_namespace(self.target):
            return "it shares its network namespace with others: netem shapes a whole device (use net.delay)"
        if not self.seen["device"]:
            return f"{self.target.name} has its address on no device of its namespace"
        kind = (_qdiscs(self.target, self.seen["device"]).split() or ["", "noqueue"])[1]
        return None if kind in ORDINARY_QDISCS else f"its device has a queueing discipline already: {kind}"

    def undo(self) -> list[UndoStep]:
        return [DeleteQdisc(netns=self.target.netns, device=self.seen["device"], handle=NETEM_HANDLE)]

    def inject(self, host: Host) -> None:
        words = ["delay", f"{self.delay_ms}ms", *([f"{self.jitter_ms}ms"] if self.jitter_ms else [])]
        words += ["loss", f"{self.loss_percent}%"] if self.loss_percent else []
        argv = ["tc", "qdisc", "add", "dev", self.seen["device"], "root", "handle", NETEM_HANDLE, "netem"]
        result = netns.run_in(self.target.netns, [*argv, *words])
        if result is None or result.returncode != 0:
            reason = result.stderr.strip()[:200] if result is not None else "its namespace has ended"
            raise FaultNotApplied(f"the kernel refused netem: {reason}", fix="see kvops chaos doctor")

    def verify(self, host: Host) -> Evidence:
        before = self._sent()
        asked = [
            _from_outside(self.target, self.control, timeout_s=self.delay_ms / 1000 * 4 + 3)
            for _ in range(NETEM_ASKED if self.loss_percent else 3)
        ]
        sent = self._sent() - before
        must(sent > 0, "no packet passed the emulator")
        # Its first packet back completes the connection, the next ones carry the answer.
        quickest, slowest = min(one.total_ms for one in asked), max(one.total_ms for one in asked)
        least = 0.8 * 2 * (self.delay_ms - self.jitter_ms)
        must(quickest >= least, f"a request took {quickest:.0f} ms: less than {least:.0f} ms")
        if self.loss_percent:
            must(
                slowest >= least + RTO_MIN_MS,
                f"no request waited for a retransmission: the slowest took {slowest:.0f} ms",
            )
        return Evidence(
            signals=(
                Signal("tc qdisc", f"netem {NETEM_HANDLE} passed {sent} packets"),
                Signal(f"requests to {self.target.name}", f"{quickest:.0f} to {slowest:.0f} ms"),
            ),
            control=_control(self.control),
        )

    def _sent(self) -> int:
        text = _qdiscs(self.target, self.seen["device"], statistics=True)
        must(f"netem {NETEM_HANDLE}" in text, "the emulator is not there")
        found = re.search(r"Sent \d+ bytes (\d+) pkt", text)
        return int(found[1]) if found else 0


@cache
def netem_missing() -> str | None:
    """Why netem cannot be used: asked of the kernel, in a namespace that ends at once."""
    if os.geteuid() != 0:
        return "queueing disciplines need root"
    if shutil.which("tc") is None:
        return "tc is not installed: apt install iproute2"
    words = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried: {error}"
    if result.returncode == 0:
        return None
    said = (result.stderr.strip().splitlines() or ["no reason"])[0]
    return f"the kernel has no netem ({said}): load sch_netem; net.delay and net.loss do without"


def _qdiscs(target: Target, device: str, *, statistics: bool = False) -> str:
    argv = ["tc", *(["-s"] if statistics else []), "qdisc", "show", "dev", device]
    result = netns.run_in(target.netns, argv)
    return result.stdout if result is not None else ""


def _device(target: Target) -> str:
    """The device that has the target's address in its namespace; "" when none has."""
    address = address_of(target)
    result = netns.run_in(target.netns, ["ip", "-j", "address"])
    if address is None or result is None or result.returncode != 0:
        return ""
    for link in json.loads(result.stdout or "[]"):
        if any(one.get("local") == address[0] for one in link.get("addr_info", [])):
            return str(link["ifname"])
    return ""

"""
Faults in the byte stream, by a proxy that a rule puts between a node and whoever connects to it.

Connections that are already there go past it: reset them (net.reset) to bring them in. Baseline and fault should
both run through the idle proxy where figures are compared: it costs about 0.1 ms a request itself.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from kvops.chaos import holder, netns, nft
from kvops.chaos.faults.common import control_is_well, must, new_token, not_here
from kvops.chaos.model import EXPIRES_S_DEFAULT, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.probe import Ending, address_of, ask
from kvops.chaos.procs import with_word
from kvops.chaos.proxy import MARK
from kvops.chaos.steps import DeleteNftTable, KillHolder, RemovePath, UndoStep
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.host import Host
from kvops.store.clock import boot_ms

NAT_PRIORITY: Final = -110  # before anybody's own redirections
RUN_DIR: Final = Path("/dev/shm")  # noqa: S108 (a file with a token nobody can guess, made exclusively)
ASKED: Final = 12
CORRUPT_ASKED_MAX: Final = 60
PATH: Final = "/metrics"  # a long answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proxied:
    """What faults by proxy share."""

    target: Target
    control: Target
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    layer: ClassVar = Layer.STREAM
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL})
    conflicts: ClassVar[frozenset[str]] = frozenset(
        {"net.", "process.kill", "process.pause", "process.restart"}
    )
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("proxy behind an nft redirection", nft.missing())

    def unavailable(self, host: Host) -> str | None:
        return self.here().missing or not_here(host, self.target)

    @property
    def control_file(self) -> Path:
        """What the proxy does, and until when."""
        return RUN_DIR / f"{self.token}.json"

    def undo(self) -> list[UndoStep]:
        # The rule first: a proxy that has ended behind it would refuse everything.
        return [
            DeleteNftTable(netns=self.target.netns, table=self.token),
            RemovePath(path=str(self.control_file)),
            KillHolder(token=self.token),
        ]

    def _place(self, toxic: dict[str, Any]) -> None:
        served, _ = nft.ports_of(self.target.processes)
        must(served, f"{self.target.name} serves no tcp port")
        port = netns.call_in(self.target.netns, _free_port)
        said = {"until_boot_ms": boot_ms() + int(self.expires_s * 1000), **toxic}
        handle = os.open(self.control_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(said, file)
        settings = {"listen": ["0.0.0.0", port], "target": None, "control": str(self.control_file), "seed": 1}  # noqa: S104
        # Longer than the rule: while that stands the proxy must be there.
        holder.spawn(
            "proxy", settings, token=self.token, expires_s=self.expires_s + 5, enter=self.target.netns
        )
        numbers = ", ".join(map(str, sorted(served)))
        there = f"meta l4proto @on tcp dport {{ {numbers} }} counter name in_hits redirect to :{port};"
        ours = f'meta mark != {MARK:#x} oifname "lo" {there}' if nft.shares_namespace(self.target) else ""
        more = "\n".join(
            [
                f"chain arriving {{ type nat hook prerouting priority {NAT_PRIORITY}; policy accept; {there} }}",
                f"chain leaving {{ type nat hook output priority {NAT_PRIORITY}; policy accept; {ours} }}",
            ]
        )
        nft.load(self.target, nft.ruleset(self.token, [], [], expires_s=self.expires_s, more=more))

    def _ask(self, *, path: str = "/health", timeout_s: float) -> tuple[float, bytes]:
        """
        A neighbour's request through the proxy.

        Raises:
            FaultNotApplied: It did not pass through it, or was not answered.
        """
        must(list(with_word(self.token)), "the proxy is gone")
        before = nft.hits(self.target, self.token)["in_hits"]
        address = address_of(self.target)
        assert address is not None
        seen = ask(address, path=path, timeout_s=timeout_s, from_netns=self.control.netns)
        must(
            nft.hits(self.target, self.token)["in_hits"] > before, "the request did not pass the redirection"
        )
        if seen.ending is not Ending.ANSWERED and not isinstance(self, Corrupt):
            raise FaultNotApplied(f"a request to {self.target.name} was {seen}", fix="see kvops chaos doctor")
        return seen.total_ms, seen.answer

    def _direct(self, path: str = "/health") -> tuple[float, bytes]:
        """The same request past the proxy: from the node itself, or with the proxy's mark."""
        address = address_of(self.target)
        assert address is not None
        mark = MARK if nft.shares_namespace(self.target) else 0
        seen = ask(address, path=path, timeout_s=2.0, from_netns=self.target.netns, mark=mark)
        return seen.total_ms, seen.answer

    def _control(self) -> Signal:
        return control_is_well(self.control)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))  # noqa: S104 (closed at once: only the number is wanted)
        return int(sock.getsockname()[1])


@fault("net.delay")
@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(_Proxied):
    """Let every piece of a stream arrive later, in both directions: a far rack, a congested path."""

    delay_ms: float = 50.0
    jitter_ms: float = 0.0

    name: ClassVar[str]
    certifies: ClassVar[str] = "a slow path to a node: each piece of a stream waits, connecting does not"
    does_not_certify: ClassVar[str] = "RDMA; slow handshakes; connections that were there before"

    def __post_init__(self) -> None:
        if not 1 <= self.delay_ms <= 10_000 or not 0 <= self.jitter_ms <= self.delay_ms:
            raise ValueError("delay_ms must be 1 to 10000 and jitter_ms at most that")

    def inject(self, host: Host) -> None:
        self._place({"delay_ms": self.delay_ms, "jitter_ms": self.jitter_ms})

    def verify(self, host: Host) -> Evidence:
        wanted = 2 * self.delay_ms  # the request waits, and the answer
        took, _ = self._ask(timeout_s=wanted / 1000 * 3 + 2)
        direct, _ = self._direct()
        least = 0.8 * (wanted - 2 * self.jitter_ms)
        must(took - direct >= least, f"a request took {took:.0f} ms, {direct:.0f} ms past the proxy")
        return Evidence(
            signals=(
                Signal("nft counter", "the request passed the redirection"),
                Signal(f"request to {self.target.name}", f"{took:.0f} ms, {direct:.0f} ms past the proxy"),
            ),
            control=self._control(),
        )


@fault("net.bandwidth")
@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(_Proxied):
    """Let each connection have only so many bytes a second, in each direction: a port that came up at 1 Gbit/s."""

    kbytes_per_s: float = 100.0

    name: ClassVar[str]
    certifies: ClassVar[str] = "a thin path: small requests are quick, large reads outlast their leases"
    does_not_certify: ClassVar[str] = "RDMA; a shared bottleneck: each connection has its own"

    def __post_init__(self) -> None:
        if not 1 <= self.kbytes_per_s <= 1e6:
            raise ValueError("kbytes_per_s must be 1 to 1000000")

    def inject(self, host: Host) -> None:
        self._place({"bytes_per_s": self.kbytes_per_s * 1000})

    def verify(self, host: Host) -> Evidence:
        took, answer = self._ask(path=PATH, timeout_s=4.0)
        direct, _ = self._direct(PATH)
        rate = len(answer) / (took / 1000) / 1000
        must(rate <= 1.2 * self.kbytes_per_s, f"{len(answer)} B came at {rate:.0f} kB/s")
        must(took >= 2 * direct, f"{len(answer)} B took {took:.0f} ms, {direct:.0f} ms past the proxy")
        return Evidence(
            signals=(
                Signal("nft counter", "the request passed the redirection"),
                Signal(
                    f"{len(answer)} B of {self.target.name}", f"{took:.0f} ms, {direct:.0f} ms past the proxy"
                ),
            ),
            control=self._control(),
        )


@fault("net.corrupt")
@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(_Proxied):
    """Flip a bit in some pieces of a stream: past every checksum below the application."""

    share: float = 0.2  # of pieces

    name: ClassVar[str]
    certifies: ClassVar[str] = "bytes that change on their way: only the application's own digests see it"
    does_not_certify: ClassVar[str] = "RDMA; bytes that change in memory or on disk (store.wrong_bytes)"

    def __post_init__(self) -> None:
        if not 0.01 <= self.share <= 1:
            raise ValueError("share must be 0.01 to 1")

    def inject(self, host: Host) -> None:
        self._place({"flip_per_chunk": self.share})

    def verify(self, host: Host) -> Evidence:
        whole = {_body(self._direct()[1]) for _ in range(ASKED // 4)}
        must(len(whole) == 1 and whole != {b""}, f"{self.target.name} does not answer alike twice")
        changed = asked = 0
        for _ in range(CORRUPT_ASKED_MAX):
            asked += 1
            _, answer = self._ask(timeout_s=1.0)
            changed += _body(answer) not in whole
            if changed:
                break
        must(changed > 0, f"{asked} answers were all as they should be")
        return Evidence(
            signals=(
                Signal("nft counter", "the requests passed the redirection"),
                Signal(
                    f"answers of {self.target.name}",
                    f"{changed} of {asked} were changed, none past the proxy",
                ),
            ),
            control=self._control(),
        )


def _body(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].partition(b" ")[2] + body  # status and body: the date changes by itself

"""Faults of a store: bytes that change under its objects, an address at which it is not found."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from kvops.chaos import netns, nft
from kvops.chaos.faults.common import control_is_well, expect, must, new_token, not_here, not_root
from kvops.chaos.model import (
    ALL_TRANSPORTS,
    EXPIRES_S_DEFAULT,
    Evidence,
    Here,
    Layer,
    Signal,
    Transport,
    fault,
)
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.steps import DeleteNftTable, RestartRole, RestoreMemory, UndoStep
from kvops.chaos.targets import Target, fellows
from kvops.errors import FaultNotApplied, KvopsError
from kvops.host import Host

if TYPE_CHECKING:
    from kvops.store.client import Pool

OBJECTS_MAX: Final = 4096
HEADER_BYTES: Final = 64  # before each object's payload: DESIGN.md §3
READ_BACK_MAX: Final = 8  # objects that the proof reads through a client
CLIENT_DEADLINE_MS: Final = 2_000
NAT_PRIORITY: Final = -110  # before anybody's own redirections
CONNECT_TIMEOUT_S: Final = 1.0


@fault("store.wrong_bytes")
@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBytes:
    """Flip one byte in the payload of some of a store's objects, in its memory: what a reader gets fails its digest."""

    target: Target
    control: Target
    objects: int = 256
    namespace: str = ""  # hex digits, of the keys that the proof reads back
    seen: dict[str, list[tuple[str, int, int, int]]] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str]
    layer: ClassVar = Layer.DATA
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = "a store that answers wrong bytes: never a hit, on any transport"
    does_not_certify: ClassVar[str] = "bytes that change on their way (net.corrupt), headers that lie"
    conflicts: ClassVar[frozenset[str]] = frozenset({"store.", "process.kill", "process.restart", "rolling."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.objects <= OBJECTS_MAX:
            raise ValueError(f"objects must be 1 to {OBJECTS_MAX}")
        if "spots" not in self.seen:
            self.seen["spots"] = self._choose() if self.target.role == "store" else []

    @classmethod
    def here(cls) -> Here:
        return Here("/proc/<pid>/mem", not_root("writing another process's memory"))

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "store" or not isinstance(self.target.restart, RestartRole):
            return f"{self.target.name} is no store of a local group"
        trouble = self.here().missing or not_here(host, self.target)
        if trouble is None and not self.seen["spots"]:
            return f"{self.target.name} holds no objects, or they could not be listed"
        return trouble

    @contextmanager
    def _client(self) -> Iterator[Pool]:
        import kvops
        from kvops.fleet.local import LocalGroup
        from kvops.store.keys import NAMESPACE_DEFAULT

        restart = self.target.restart
        assert isinstance(restart, RestartRole)
        group = LocalGroup(Path(restart.state_dir), restart.group)
        masters = [one.addresses["listen"] for one in fellows(self.target, "master")]
        namespace = bytes.fromhex(self.namespace) if self.namespace else NAMESPACE_DEFAULT
        with kvops.connect(
            masters,
            group=restart.group,
            secret_file=group.secret_file,
            deadline_ms=CLIENT_DEADLINE_MS,
            host="kvops-chaos",
            namespace=namespace,
        ) as pool:
            yield pool

    def _choose(self) -> list[tuple[str, int, int, int]]:
        """Key, address, byte before and after, of objects that lie there now."""
        if not isinstance(self.target.restart, RestartRole) or os.geteuid() != 0:
            return []
        spots = []
        try:
            start, end, shift = _segment(self.target.leader.pid)
            with (
                self._client() as pool,
                Path(f"/proc/{self.target.leader.pid}/mem").open("rb", buffering=0) as memory,
            ):
                rows, _ = pool.ls(store=self.target.name, limit=self.objects)
                for row in rows:
                    stat = pool.stat(row["key"])
                    if stat is None or stat["store"] != self.target.name or not stat["size_bytes"]:
                        continue
                    address = start + stat["offset"] - shift + HEADER_BYTES + stat["size_bytes"] // 2
                    if not start <= address < end:
                        continue
                    memory.seek(address)
                    before = memory.read(1)[0]
                    spots.append((row["key"], address, before, before ^ 0x01))
        except (OSError, KvopsError, IndexError):
            return []  # unavailable() says so
        return spots

    def undo(self) -> list[UndoStep]:
        process = self.target.leader
        return [
            RestoreMemory(
                pid=process.pid,
                started_ticks=process.started_ticks,
                boot_id=process.boot_id,
                spots=[(address, before, after) for _, address, before, after in self.seen["spots"]],
            )
        ]

    def inject(self, host: Host) -> None:
        with Path(f"/proc/{self.target.leader.pid}/mem").open("r+b", buffering=0) as memory:
            for _, address, before, after in self.seen["spots"]:
                memory.seek(address)
                if memory.read(1)[0] == before:
                    memory.seek(address)
                    memory.write(bytes([after]))

    def verify(self, host: Host) -> Evidence:
        start, _, shift = _segment(self.target.leader.pid)
        spots = self.seen["spots"]
        changed = 0
        with _segment_file(self.target.leader.pid).open("rb", buffering=0) as file:
            for _, address, _, after in spots:
                file.seek(address - start + shift)
                changed += file.read(1) == bytes([after])
        must(changed, "no byte of its segment is changed")
        wrong: list[str] = []
        with self._client() as pool:
            for key, *_ in spots[:READ_BACK_MAX]:
                buffer = bytearray((pool.stat(key) or {}).get("size_bytes", 0))
                outcome = pool.batch_get_into([key], [memoryview(buffer)])[0]
                wrong.append(str(outcome.reason))
            elsewhere, _ = (
                pool.ls(store=self.control.name, limit=READ_BACK_MAX)
                if self.control.role == "store"
                else ([], None)
            )
            well = [
                str(pool.batch_get_into([row["key"]], [bytearray(row["size_bytes"])])[0].reason)
                for row in elsewhere
            ]
        must("CORRUPT" in wrong, f"a client read {', '.join(wrong)}")
        must("CORRUPT" not in well, f"objects of {self.control.name} are wrong, too")
        control = control_is_well(self.control)
        return Evidence(
            signals=(
                Signal("the segment's file", f"{changed} of {len(spots)} bytes changed"),
                Signal("a client's reads", f"{wrong.count('CORRUPT')} of {len(wrong)} CORRUPT"),
            ),
            control=Signal(f"reads of {self.control.name}", ", ".join(well)) if well else control,
        )


def _segment(pid: int) -> tuple[int, int, int]:
    """
    Where a store's segment is mapped: first address, end, offset in its file.

    Raises:
        FaultNotApplied: The process has none.
    """
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:kvops-" in line:
                words = line.split()
                start, _, end = words[0].partition("-")
                return int(start, 16), int(end, 16), int(words[2], 16)
    except OSError as error:
        raise FaultNotApplied(f"pid {pid} has ended, or is not ours to see", fix="run as root") from error
    raise FaultNotApplied(f"pid {pid} has no segment mapped", fix="is it a store?")


def _segment_file(pid: int) -> Path:
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError as error:
        raise FaultNotApplied(f"pid {pid} has ended, or is not ours to see", fix="run as root") from error
    for path in files:
        try:
            if str(path.readlink()).startswith("/memfd:kvops-"):
                return path
        except OSError:
            continue  # closed meanwhile
    raise FaultNotApplied(f"pid {pid} has no segment open", fix="is it a store?")


@fault("store.stale_address")
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleAddress:
    """
    Let the address under which a store is registered lead astray: to nobody, or to another store of its machine.

    The store itself is well, and its heartbeats arrive. Connections that it has are reset, so that all are made anew.
    """

    target: Target
    control: Target
    answered_by: Literal["nobody", "another"] = "nobody"
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    name: ClassVar[str]
    layer: ClassVar = Layer.STREAM
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP})
    certifies: ClassVar[str] = (
        "one wrong entry in the metadata: its own share is lost, and the peer is set aside"
    )
    does_not_certify: ClassVar[str] = "RDMA; readers that have its memory mapped; silence (net.blackhole)"
    conflicts: ClassVar[frozenset[str]] = frozenset({"net.", "process.kill", "process.restart", "rolling."})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        missing = nft.missing()
        if missing is None and shutil.which("ss") is None:
            missing = "ss is not installed: apt install iproute2"
        return Here("nft redirection, and ss -K", missing)

    def unavailable(self, host: Host) -> str | None:
        trouble = self.here().missing or not_here(host, self.target)
        if trouble is None and self._wire(self.target) is None:
            return f"{self.target.name} has no address for the wire"
        lone = self.control.role != self.target.role or self.control.netns != self.target.netns
        if trouble is None and self.answered_by == "another" and lone:
            return f"no other store shares the network namespace of {self.target.name}"
        return trouble

    @staticmethod
    def _wire(target: Target) -> tuple[str, int] | None:
        host, _, port = target.addresses.get("listen", "").rpartition(":")
        return (host.strip("[]"), int(port)) if port.isdigit() else None

    def undo(self) -> list[UndoStep]:
        return [DeleteNftTable(netns=self.target.netns, table=self.token)]

    def inject(self, host: Host) -> None:
        wire, other = self._wire(self.target), self._wire(self.control)
        assert wire is not None  # unavailable() said so
        if self.answered_by == "another":
            assert other is not None
            port = other[1]
        else:
            port = netns.call_in(self.target.netns, _closed_port)
        there = f"meta l4proto @on tcp dport {wire[1]} counter name in_hits redirect to :{port};"
        more = "\n".join(
            f"chain {name} {{ type nat hook {hook} priority {NAT_PRIORITY}; policy accept; {there} }}"
            for name, hook in (("arriving", "prerouting"), ("leaving", "output"))
        )
        nft.load(self.target, nft.ruleset(self.token, [], [], expires_s=self.expires_s, more=more))
        # A redirection is for new connections alone.
        argv = ["ss", "-K", "-t", "state", "established", "sport", "=", f":{wire[1]}"]
        netns.run_in(self.target.netns, argv)

    def verify(self, host: Host) -> Evidence:
        wire = self._wire(self.target)
        assert wire is not None
        before = nft.hits(self.target, self.token)["in_hits"]
        seen = netns.call_in(self.control.netns, lambda: self._who_answers(wire))
        caught = nft.hits(self.target, self.token)["in_hits"] - before
        must(caught > 0, "no connection met the redirection")
        wanted = "nobody" if self.answered_by == "nobody" else self.control.name
        must(seen == wanted, f"{wire[0]}:{wire[1]} is answered by {seen}, not by {wanted}")
        health = ask_target(self.target, timeout_s=2.0, from_netns=self.control.netns)
        expect(health, Ending.ANSWERED, target=self.target)
        return Evidence(
            signals=(
                Signal("nft counter", f"+{caught} connections led astray"),
                Signal(
                    f"connection to {wire[0]}:{wire[1]}",
                    f"answered by {seen}, while {self.target.name} answers for its health",
                ),
            ),
            control=control_is_well(self.control),
        )

    def _who_answers(self, wire: tuple[str, int]) -> str:
        """The name of the member at the other end of a new connection; ``nobody`` when it is refused."""
        try:
            with socket.create_connection(wire, timeout=CONNECT_TIMEOUT_S) as connection:
                ours = connection.getsockname()[1]
                for one in (self.target, self.control):
                    there = self._wire(one)
                    found = nft.connections_of(one, there[1]) if there is not None else frozenset()
                    if any(int(address.rpartition(":")[2], 16) == ours for address in found):
                        return one.name
                return "somebody else"
        except ConnectionRefusedError:
            return "nobody"
        except OSError as error:
            return f"silence ({error})"


def _closed_port() -> int:
    """A port on which connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

"""
Runs probes between hosts: sends each its prober, has them talk to one another, gathers a matrix.

Everything is opt-in and bounded. What could fill a link is refused while the link carries somebody else's
traffic, unless it is forced.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvops.diag.collect import prober
from kvops.diag.collect.agent import LADDER_HEADERS, MTU_LADDER
from kvops.diag.fleet import BOOT, CONNECT_TIMEOUT_S, at_once
from kvops.diag.matrix import Cell, GidPair, Matrix, rounds
from kvops.errors import KvopsError, Refused, Unreachable, UsageError
from kvops.host import SshHost, SshLogin

PROBES = (
    "tcp",
    "udp",
    "icmp",
    "mtu",
    "latency",
    "bandwidth",
    "incast",
    "verbs",
    "memory",
    "register",
)
DEFAULT = ("tcp", "udp", "icmp", "mtu", "latency")
SELF_TESTS = ("memory", "register")
SATURATING = ("bandwidth", "incast")
CELLS_MAX = 20_000
BUSY_SHARE = 0.1  # of the link's rate, carried by others, that a saturating probe must not disturb
BUSY_GBPS = 1.0  # where the rate is unknown
INCAST_SENDERS_MAX = 8
VERBS_BYTES = 1 << 20
GID_BYTES = 1 << 12  # of a queue pair that only shows whether two GIDs reach one another
GID_PAIRS_MAX = 16  # of two ports; the most promising first
GID_SECONDS_MAX = 60.0  # of two hosts: a GID that does not answer takes several seconds to say so
REGISTER_BYTES = (1 << 28, 1 << 30, 8 << 30)  # in steps; a quarter of the free memory at most
LINE_BYTES_MAX = 16 << 20
NICS_MAX = 64  # of one host
ASK_TIMEOUT_S = 15.0


_NETDEV = re.compile(r"[^\s/-][^\s/]{0,14}")  # as dev_valid_name() in net/core/dev.c, and no option


class Talk(Protocol):
    """A prober on one host, asked one question at a time."""

    name: str

    def ask(self, do: str, *, timeout_s: float = ASK_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """
        The answer to one request.

        Raises:
            Unreachable: None came within the time; the host is not asked again.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to probe, and how hard."""

    probes: tuple[str, ...] = DEFAULT
    seconds: float = 1.0  # of one stream
    rate_gbps: float | None = None  # limit of one stream
    count: int = 200  # datagrams of one pair's latency
    port: int = 0  # that the listeners take; any free one
    gid_index: int | None = (
        None  # of verbs, on both sides; otherwise all that fit are tried, the best is measured
    )
    force: bool = False  # fill links that carry traffic already


class _LineTalk:
    """Requests and answers over two byte streams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._buffer = b""
        self._number = 0
        self._lost = ""

    def _send(self, data: bytes) -> None:
        raise NotImplementedError

    def _receive(self, timeout_s: float) -> bytes:
        """Some bytes; none when the other side has ended. Raises TimeoutError."""
        raise NotImplementedError

    def ask(self, do: str, *, timeout_s: float = ASK_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        if self._lost:
            raise Unreachable(f"{self.name}: {self._lost}", fix="")
        self._number += 1
        end = time.monotonic() + timeout_s
        try:
            self._send(json.dumps({"id": self._number, "do": do, **arguments}).encode() + b"\n")
            while True:
                line, newline, rest = self._buffer.partition(b"\n")
                if newline:
                    self._buffer = rest
                    # Anything else is a greeting of the shell there.
                    if line.startswith(b"KVOPS "):
                        answer: dict[str, Any] = json.loads(line[6:])
                        if answer.pop("id", None) == self._number:
                            return answer
                    continue
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                data = self._receive(left)
                if not data:
                    raise EOFError
                self._buffer += data
                if len(self._buffer) > LINE_BYTES_MAX:
                    raise ValueError("an answer without end")
        except TimeoutError:
            self._lost = f"no answer to {do} within {timeout_s:g} s"
        except EOFError:
            self._lost = self._last_words() or "the prober ended"
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self._lost = f"a damaged answer to {do}: {error}"
        raise Unreachable(f"{self.name}: {self._lost}", fix="")

    def _last_words(self) -> str:
        return ""

    def close(self) -> None:
        raise NotImplementedError


class SshTalk(_LineTalk):
    """A prober over SSH."""

    def __init__(self, login: SshLogin, *, timeout_s: float, lifetime_s: float) -> None:
        super().__init__(login.name)
        script = Path(prober.__file__).read_bytes()
        self._host: SshHost = login.connect(min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            options = json.dumps({"lifetime_s": lifetime_s})
            self._channel = self._host.converse(
                ("python3", "-c", BOOT, str(len(script)), options), timeout_s=timeout_s
            )
            self._channel.sendall(script)
        except BaseException:
            self._host.close()
            raise

    def _send(self, data: bytes) -> None:
        self._channel.sendall(data)

    def _receive(self, timeout_s: float) -> bytes:
        self._channel.settimeout(timeout_s)
        return self._channel.recv(1 << 16)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            self._channel.settimeout(1.0)
            lines = self._channel.recv_stderr(1 << 14).decode("utf-8", "replace").strip().splitlines()
            return lines[-1][:200] if lines else ""
        return ""

    def close(self) -> None:
        """End the prober: its standard input closes."""
        self._channel.close()
        self._host.close()


class LocalTalk(_LineTalk):
    """A prober on this machine."""

    def __init__(self, name: str, *, python: str = sys.executable, lifetime_s: float = 600.0) -> None:
        super().__init__(name)
        script = Path(prober.__file__).read_bytes()
        argv = [python, "-c", BOOT, str(len(script)), json.dumps({"lifetime_s": lifetime_s})]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._send(script)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def _receive(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError
        return self._process.stdout.read(1 << 16) or b""

    def close(self) -> None:
        """End it, at once if it does not by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def open_talks(
    logins: Sequence[SshLogin], *, timeout_s: float, lifetime_s: float = prober.LIFETIME_S_MAX
) -> tuple[list[Talk], list[tuple[str, str]]]:
    """Probers on all hosts that can be reached, and why the others cannot."""
    work: dict[str, Callable[[], Talk]] = {
        login.name: partial(_greeted, login, timeout_s, lifetime_s) for login in logins
    }
    talks: list[Talk] = []
    unreached = []
    for name, found in at_once(work, timeout_s=timeout_s + 1.0).items():
        if isinstance(found, KvopsError) or found is None:
            what = (
                found.what.removeprefix(f"{name}: ") if found is not None else f"no answer in {timeout_s:g} s"
            )
            unreached.append((name, f"{what}; {found.fix}" if found is not None and found.fix else what))
        else:
            talks.append(found)
    return talks, unreached


def _greeted(login: SshLogin, timeout_s: float, lifetime_s: float) -> Talk:
    """A prober that has answered once: what hangs is found out here."""
    talk = SshTalk(login, timeout_s=timeout_s, lifetime_s=lifetime_s)
    try:
        talk.ask("load", netdevs=[], window_s=0.0, timeout_s=timeout_s)
    except BaseException:
        talk.close()
        raise
    return talk


def checked(names: Iterable[str], *, hosts: int) -> tuple[str, ...]:
    """The probes if there are such. Raises UsageError."""
    import difflib

    chosen = tuple(dict.fromkeys(names)) or DEFAULT
    for name in chosen:
        if name not in PROBES:
            near = difflib.get_close_matches(name, PROBES, n=1)
            raise UsageError(
                f"there is no probe {name!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(PROBES)}",
            )
    between = [name for name in chosen if name not in SELF_TESTS]
    if between and hosts < 2:
        raise UsageError(
            f"{', '.join(between)} are probes between hosts, and {hosts or 'no'} host is named",
            fix="name two or more with --host, or only: --probe memory,register",
        )
    return chosen


class Session:
    """One run over a set of probers."""

    def __init__(
        self,
        talks: Sequence[Talk],
        plan: Plan,
        *,
        unreached: Sequence[tuple[str, str]] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.plan = plan
        self.note = note
        self.talks = {talk.name: talk for talk in talks}
        self.matrix = Matrix(
            probes=plan.probes, hosts=[talk.name for talk in talks], cells=[], unreached=list(unreached)
        )
        self.token = secrets.token_hex(16)
        self.hellos: dict[str, dict[str, Any]] = {}
        self.listeners: dict[str, dict[str, dict[str, Any]]] = {}

    def run(self) -> Matrix:
        """
        Every probe of the plan.

        Raises:
            Refused: A saturating probe was asked for, and a link is busy.
        """
        wanted = set(self.plan.probes)
        self._each("hello", self._hello)
        if wanted & set(SELF_TESTS):
            self._self_tests(wanted)
        if not wanted - set(SELF_TESTS):
            return self.matrix
        self._each("listen", self._listen)
        self._make_cells()
        if wanted & set(SATURATING):
            self._refuse_busy()
        if wanted & {"tcp", "udp", "icmp"}:
            self._each("reach", self._reach)
        if "latency" in wanted:
            for name in self.matrix.hosts:  # one after the other: two at once would measure each other
                self._each("latency", self._latency, [name])
        if "mtu" in wanted:
            self._each("mtu", self._mtu)
        if "verbs" in wanted:
            self._verbs()
        if "bandwidth" in wanted:
            self._bandwidth()
        if "incast" in wanted:
            self._incast()
        for cell in self.matrix.cells:
            lost = [name for name in (cell.source, cell.target) if name not in self.talks]
            if lost and not cell.unseen:
                cell.unseen = f"{lost[0]} answers no more"
        return self.matrix

    def _each(
        self,
        what: str,
        work: Callable[[Talk], Any],
        names: Sequence[str] | None = None,
        limit_s: float = 300.0,
    ) -> None:
        """Call for every host still there, at once; who does not answer is dropped with its reason."""
        chosen = [self.talks[name] for name in (names or self.matrix.hosts) if name in self.talks]
        found = at_once({talk.name: partial(_done, work, talk) for talk in chosen}, timeout_s=limit_s)
        for name, result in found.items():
            if result is True:
                continue
            reason = result.what.removeprefix(f"{name}: ") if isinstance(result, KvopsError) else "no answer"
            self.matrix.unreached.append((name, f"{what}: {reason}"))
            self.talks.pop(name).close()

    def _hello(self, talk: Talk) -> None:
        self.hellos[talk.name] = _checked_hello(talk.ask("hello"))

    def _listen(self, talk: Talk) -> None:
        own = [(nic["netdev"], nic["addresses"][0]) for nic in self.hellos[talk.name]["nics"]]
        answer = talk.ask("listen", token=self.token, addresses=own, port=self.plan.port)
        self.listeners[talk.name] = {str(address): dict(row) for address, row in answer["listeners"].items()}

    def _make_cells(self) -> None:
        """A cell for each pair of interfaces of two hosts; rails alone when there are too many."""
        nics = {
            name: [(nic["netdev"], nic["addresses"][0]) for nic in self.hellos[name].get("nics", [])]
            for name in self.matrix.hosts
            if name in self.talks
        }
        for name, own in nics.items():
            if not own:
                self.matrix.unreached.append((name, "no interface with carrier and an address"))
        cells = []
        for source, own in nics.items():
            for target, theirs in nics.items():
                if source == target:
                    continue
                alike = {n for n, _ in own} == {n for n, _ in theirs}
                for i, (netdev, address) in enumerate(own):
                    for j, (other, remote) in enumerate(theirs):
                        if (":" in address) != (":" in remote):
                            continue
                        cells.append(
                            Cell(
                                source=source,
                                source_netdev=netdev,
                                source_address=address,
                                target=target,
                                target_netdev=other,
                                target_address=remote,
                                same_rail=netdev == other if alike else i == j,
                            )
                        )
        if len(cells) > CELLS_MAX:
            kept = [cell for cell in cells if cell.same_rail][:CELLS_MAX]
            self.matrix.left_out = len(cells) - len(kept)
            self.note(f"{self.matrix.left_out} pairs of different rails are left out: more than {CELLS_MAX}")
            cells = kept
        self.matrix.cells = cells

    def _refuse_busy(self) -> None:
        loads: dict[str, dict[str, Any]] = {}

        def look(talk: Talk) -> None:
            netdevs = [nic["netdev"] for nic in self.hellos[talk.name].get("nics", [])]
            loads[talk.name] = talk.ask("load", netdevs=netdevs, window_s=1.0)

        self._each("load", look)
        busy = []
        for name, answer in loads.items():
            self.matrix.self_tests.setdefault(name, {})["load"] = answer
            for nic in self.hellos[name].get("nics", []):
                row = answer.get("netdevs", {}).get(nic["netdev"], {})
                carried = max(row.get("rx_gbps", 0.0), row.get("tx_gbps", 0.0))
                rate = nic.get("rate_gbps")
                if carried > (rate * BUSY_SHARE if rate else BUSY_GBPS):
                    of = f" of {rate:g}" if rate else ""
                    busy.append(f"{name} {nic['netdev']} carries {carried:.2f}{of} Gbit/s")
        if busy and not self.plan.force:
            more = f"; and {len(busy) - 3} more" if len(busy) > 3 else ""
            raise Refused(
                f"the link is busy: {'; '.join(busy[:3])}{more}; bandwidth probes would take it from its users",
                fix="wait until it is quiet, or say --yes",
            )

    def _grouped(self, source: str, cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            if cell.source == source and cell.target in self.talks:
                groups.setdefault((cell.source_netdev, cell.source_address), []).append(cell)
        return groups

    def _port(self, cell: Cell, kind: str) -> int | None:
        port = self.listeners.get(cell.target, {}).get(cell.target_address, {}).get(kind)
        return port if isinstance(port, int) else None

    def _ask_rows(
        self, talk: Talk, do: str, cells: Sequence[Cell], kind: str, timeout_s: float, **more: Any
    ) -> list[tuple[Cell, dict[str, Any]]]:
        """One question about many cells of one interface, and the row for each."""
        ready = [(cell, port) for cell in cells if (port := self._port(cell, kind)) is not None]
        for cell in cells:
            if self._port(cell, kind) is None:
                cell.unseen = f"{cell.target} could not listen on {cell.target_address}"
        if not ready:
            return []
        first = ready[0][0]
        answer = talk.ask(
            do,
            source=first.source_address,
            netdev=first.source_netdev,
            targets=[[cell.target_address, port] for cell, port in ready],
            timeout_s=timeout_s,
            **more,
        )
        if "error" in answer:
            for cell, _ in ready:
                cell.unseen = f"{do}: {answer['error']}"
            return []
        return list(zip([cell for cell, _ in ready], answer["rows"], strict=False))

    def _reach(self, talk: Talk) -> None:
        for cells in self._grouped(talk.name, self.matrix.cells).values():
            if "tcp" in self.plan.probes:
                waves = -(-len(cells) // 32)
                for cell, row in self._ask_rows(talk, "tcp", cells, "tcp", ASK_TIMEOUT_S + 2 * waves):
                    cell.tcp = bool(row.get("ok"))
                    cell.error = str(row.get("error", ""))[:120]
                    if row.get("seconds") is not None:
                        cell.connect_ms = round(row["seconds"] * 1000, 3)
            if "udp" in self.plan.probes:
                for cell, row in self._ask_rows(talk, "udp", cells, "udp", 30.0, count=3):
                    cell.udp = row["received"] > 0
                    cell.error = cell.error or str(row.get("error", ""))[:120]
            if "icmp" in self.plan.probes:
                answer = talk.ask(
                    "icmp",
                    source=cells[0].source_address,
                    netdev=cells[0].source_netdev,
                    targets=[cell.target_address for cell in cells],
                    timeout_s=60.0,
                )
                for cell, row in zip(cells, answer.get("rows", []), strict=False):
                    cell.icmp = row.get("answered")
                    cell.unseen = cell.unseen or str(row.get("unseen", ""))

    def _rails(self) -> list[Cell]:
        """Cells worth a measurement: the same rail, and not known to be unreachable."""
        return [cell for cell in self.matrix.cells if cell.same_rail and cell.reached is not False]

    def _latency(self, talk: Talk) -> None:
        for cells in self._grouped(talk.name, self._rails()).values():
            rows = self._ask_rows(talk, "udp", cells, "udp", 60.0, count=self.plan.count, interval_s=0.002)
            for cell, row in rows:
                cell.udp = row["received"] > 0
                cell.rtt_us, cell.jitter_us = row.get("rtt_us"), row.get("jitter_us")
                cell.loss_percent = row["loss_percent"]
                cell.loss_windows_percent = row.get("loss_windows_percent")

    def _mtu(self, talk: Talk) -> None:
        mtus = {nic["netdev"]: nic["mtu"] for nic in self.hellos[talk.name].get("nics", [])}
        for (netdev, _), cells in self._grouped(talk.name, self._rails()).items():
            own = mtus.get(netdev, 1500)
            sizes = sorted({*(mtu + LADDER_HEADERS for mtu in MTU_LADDER), 1280, 1500, own, own + 1})
            for cell, row in self._ask_rows(talk, "mtu", cells, "udp", 120.0, sizes=sizes):
                cell.path_mtu = row.get("path_mtu")
                # What is larger than our own interface's MTU says nothing about the path.
                cell.mtu_steps = {
                    size: passed for size, passed in (row.get("steps") or {}).items() if int(size) <= own
                }
                if cell.path_mtu is None:
                    cell.mtu_steps = None  # nothing came back at all: that is no MTU

    def _measured(self, pairs: Sequence[tuple[str, str]], rail: str) -> list[Cell]:
        wanted = set(pairs)
        return [c for c in self._rails() if (c.source, c.target) in wanted and c.source_netdev == rail]

    def _send(self, cell: Cell, talk: Talk) -> dict[str, Any]:
        port = self._port(cell, "tcp")
        if port is None:
            return {"error": f"{cell.target} could not listen"}
        return talk.ask(
            "stream",
            source=cell.source_address,
            netdev=cell.source_netdev,
            targets=[[cell.target_address, port]],
            seconds=self.plan.seconds,
            rate_gbps=self.plan.rate_gbps,
            timeout_s=self.plan.seconds + ASK_TIMEOUT_S,
        )

    def _stream_all(self, cells: Sequence[Cell], store: Callable[[Cell, dict[str, Any]], None]) -> None:
        """One stream for each cell, at once; each host sends one at most."""
        by_source = {cell.source: cell for cell in cells}

        def work(talk: Talk) -> None:
            cell = by_source[talk.name]
            answer = self._send(cell, talk)
            if "error" in answer:
                cell.unseen = f"bandwidth: {answer['error']}"
            else:
                store(cell, answer)

        if by_source:
            self._each("bandwidth", work, list(by_source))

    def _bandwidth(self) -> None:
        """Pair after pair, none sharing a host with another at the same time; then all in a ring at once."""

        def alone(cell: Cell, answer: dict[str, Any]) -> None:
            cell.gbps, cell.retransmits = answer["gbps"], answer["retransmits"]
            cell.windows_gbps = answer["windows_gbps"]

        def together(cell: Cell, answer: dict[str, Any]) -> None:
            cell.gbps_together = answer["gbps"]

        hosts = self.matrix.hosts
        rails = sorted({cell.source_netdev for cell in self._rails()})
        self.note(f"bandwidth: {len(rails) * 2 * len(rounds(len(hosts)))} rounds of {self.plan.seconds:g} s")
        for rail in rails:
            for pairs in rounds(len(hosts)):
                for turn in (pairs, [(b, a) for a, b in pairs]):
                    named = [(hosts[a], hosts[b]) for a, b in turn]
                    self._stream_all(self._measured(named, rail), alone)
            if len(hosts) > 2:
                ring = [(name, hosts[(i + 1) % len(hosts)]) for i, name in enumerate(hosts)]
                self._stream_all(self._measured(ring, rail), together)

    def _incast(self) -> None:
        """Several senders to one receiver, each host in its turn, on its first rail."""
        for target in self.matrix.hosts:
            cells = [c for c in self._rails() if c.target == target]
            if not cells:
                continue
            rail = cells[0].target_netdev
            senders = {c.source: c for c in cells if c.target_netdev == rail}
            chosen = list(senders.values())[:INCAST_SENDERS_MAX]
            if len(chosen) < 2:
                continue
            answers: list[dict[str, Any]] = []
            self._stream_all(chosen, lambda cell, answer, kept=answers: kept.append(answer))  # type: ignore[misc]
            # The first window holds the streams' start, and a last one their ends.
            length = min((len(a["windows_gbps"]) for a in answers), default=0)
            sums = [
                round(sum(a["windows_gbps"][i] for a in answers), 4) for i in range(1, max(length - 1, 1))
            ]
            if answers:
                self.matrix.incast.append(
                    {
                        "receiver": target,
                        "senders": len(answers),
                        "gbps": sums,
                        "total_gbps": round(sum(a["gbps"] for a in answers), 4),
                        "retries": sum(a["retransmits"] or 0 for a in answers),
                    }
                )

    def _verbs(self) -> None:
        """Queue pairs between GIDs of the same rail: round trips of reads, speed when asked for, and bytes."""
        hosts = self.matrix.hosts
        for pairs in rounds(len(hosts)):
            work = {
                f"{hosts[a]} ↔ {hosts[b]}": partial(self._verbs_pair, hosts[a], hosts[b]) for a, b in pairs
            }
            for found in at_once(work, timeout_s=300.0).values():
                if isinstance(found, KvopsError):
                    self.note(str(found))

    def _verbs_pair(self, first: str, second: str) -> None:
        gids_end = time.monotonic() + GID_SECONDS_MAX
        for cell in self._rails():
            if (cell.source, cell.target) != (first, second):
                continue
            back = next(
                (
                    c
                    for c in self.matrix.cells
                    if (c.source, c.source_netdev, c.target, c.target_netdev)
                    == (second, cell.target_netdev, first, cell.source_netdev)
                ),
                None,
            )
            if back is None or first not in self.talks or second not in self.talks:
                continue
            ports = []
            for name, netdev in ((first, cell.source_netdev), (second, cell.target_netdev)):
                trouble = self.hellos[name].get("verbs")
                port = _port(self.hellos[name].get("rdma", []), netdev, self.plan.gid_index)
                if trouble is None and port is None:
                    which = "a GID" if self.plan.gid_index is None else f"GID {self.plan.gid_index}"
                    trouble = f"{netdev} belongs to no active RDMA port with {which}"
                if trouble is not None:
                    cell.unseen = back.unseen = f"verbs: {name}: {trouble}"
                    break
                ports.append((name, port))
            if len(ports) == 2:
                try:
                    self._verbs_gids(cell, back, ports, gids_end)
                except _DAMAGED as error:
                    cell.unseen = back.unseen = f"verbs: a damaged answer: {type(error).__name__}: {error}"

    def _verbs_gids(self, there: Cell, back: Cell, ports: Sequence[tuple[str, Any]], end: float) -> None:
        """Measure the pair of GIDs that an engine should take; of the others, only whether they answer."""
        (first, mine), (second, theirs) = ports
        pairs = gid_pairs(mine["gids"], theirs["gids"], self.plan.gid_index)

        def ends(pair: tuple[Any, Any]) -> list[tuple[str, Any]]:
            return [
                (name, {"device": port["device"], "port": port["port"], "gid_index": gid["index"]})
                for (name, port), gid in zip(((first, mine), (second, theirs)), pair, strict=True)
            ]

        self._verbs_cell(there, back, ends(pairs[0]))
        rtt_us = (there.verbs_rtt_us or {}).get("p50")
        found = [_gid_pair(pairs[0], bool(there.verbs), rtt_us, "" if there.verbs else there.error)]
        for pair in pairs[1:GID_PAIRS_MAX]:
            if time.monotonic() > end or first not in self.talks or second not in self.talks:
                break
            found.append(self._verbs_gid(ends(pair), pair))
        there.gids, back.gids = found, [pair.turned() for pair in found]
        there.gids_left_out = back.gids_left_out = len(pairs) - len(found)

    def _verbs_gid(self, ends: Sequence[tuple[str, Any]], pair: tuple[Any, Any]) -> GidPair:
        """Whether a queue pair between these two GIDs connects and reads."""
        mark = secrets.token_hex(4)
        talks = [self.talks[name] for name, _ in ends]
        try:
            self._connected(talks, ends, mark, GID_BYTES)
            row = _good(
                talks[0].ask(
                    "verbs_run",
                    name=mark,
                    bytes=GID_BYTES,
                    seed=f"{mark}1",
                    count=3,
                    seconds=0.0,
                    timeout_s=30.0,
                )
            )
            wrong = row.get("mismatches")
            error = f"{wrong} wrong bytes" if wrong else ""
            return _gid_pair(pair, not wrong, row["rtt_us"].get("p50"), error)
        except _Said as said:
            return _gid_pair(pair, False, None, str(said))
        finally:
            for talk in talks:
                with contextlib.suppress(KvopsError):
                    talk.ask("verbs_close", name=mark)

    def _connected(
        self, talks: Sequence[Talk], ends: Sequence[tuple[str, Any]], mark: str, size: int
    ) -> None:
        """Open a queue pair on both ends and bring them to RTS. Raises what the other side said."""
        infos = [
            _good(talk.ask("verbs_open", name=mark, bytes=size, seed=f"{mark}{i}", **ends[i][1]))
            for i, talk in enumerate(talks)
        ]
        for i, talk in enumerate(talks):
            _good(talk.ask("verbs_connect", name=mark, remote=infos[1 - i]["local"]))

    def _verbs_cell(self, there: Cell, back: Cell, ends: Sequence[tuple[str, Any]]) -> None:
        mark = secrets.token_hex(4)
        talks = [self.talks[name] for name, _ in ends]
        seconds = self.plan.seconds if "bandwidth" in self.plan.probes else 0.0
        try:
            self._connected(talks, ends, mark, VERBS_BYTES)
            for i, (talk, cell) in enumerate(zip(talks, (there, back), strict=True)):
                row = talk.ask(
                    "verbs_run",
                    name=mark,
                    bytes=VERBS_BYTES,
                    seed=f"{mark}{1 - i}",
                    count=self.plan.count,
                    seconds=seconds,
                    timeout_s=seconds + 60.0,
                )
                cell.verbs = "error" not in row
                cell.error = cell.error or str(row.get("error", ""))
                cell.verbs_rtt_us, cell.verbs_gbps = row.get("rtt_us"), row.get("gbps")
                cell.verbs_mismatches = row.get("mismatches")
        except _Said as error:
            # A queue pair that cannot be brought to RTR or RTS is the finding that is looked for.
            there.verbs = back.verbs = False
            there.error = back.error = str(error)
        finally:
            for talk in talks:
                with contextlib.suppress(KvopsError):
                    talk.ask("verbs_close", name=mark)

    def _self_tests(self, wanted: set[str]) -> None:
        def work(talk: Talk) -> None:
            tests = self.matrix.self_tests.setdefault(talk.name, {})
            if "memory" in wanted:
                tests["memory"] = talk.ask("memory", timeout_s=120.0)
            if "register" in wanted:
                tests["register"] = talk.ask("register", sizes=list(REGISTER_BYTES), timeout_s=180.0)

        self._each("self-test", work)


class _Said(Exception):
    """The other side's error."""


def _good(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise _Said(str(answer["error"])[:200])
    return answer


# What reading an answer raises that is not shaped as it should be.
_DAMAGED = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def _done(work: Callable[[Talk], Any], talk: Talk) -> bool:
    try:
        work(talk)
    except _DAMAGED as error:
        raise Unreachable(
            f"{talk.name}: a damaged answer: {type(error).__name__}: {error}", fix=""
        ) from error
    return True


def _checked_hello(answer: dict[str, Any]) -> dict[str, Any]:
    """A host's word about itself, with only what can be an interface and its address left in it."""
    nics = []
    for nic in answer["nics"][:NICS_MAX]:
        found = []
        for text in nic["addresses"]:
            with contextlib.suppress(ValueError):
                found.append(str(ipaddress.ip_address(text)))
        if found and _NETDEV.fullmatch(nic["netdev"]):
            nics.append({**nic, "addresses": found, "mtu": int(nic["mtu"])})
    return {**answer, "nics": nics}


def _port(ports: Sequence[dict[str, Any]], netdev: str, index: int | None) -> dict[str, Any] | None:
    """The active RDMA port of an interface that has GIDs, or the one of this index."""
    for port in ports:
        if port["netdev"] == netdev and port["active"]:
            gids = [gid for gid in port["gids"] if index in (None, gid["index"])]
            if gids:
                return {**port, "gids": gids}
    return None


def _family(gid: dict[str, Any]) -> str:
    address = ipaddress.IPv6Address(gid["gid"])
    return "IPv4" if address.ipv4_mapped else "link-local" if address.is_link_local else "IPv6"


def gid_pairs(
    mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], index: int | None = None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """
    Pairs of GIDs of two ports that can speak to one another: of one type and one address family.

    Args:
        mine: Of one port: ``{"index", "gid", "type"}`` each, at least one.
        theirs: Of the other.
        index: The one index that was asked for on both sides: then whatever there is, is a pair.

    Returns:
        At least one; first what an engine should take, routable RoCE v2 before link-local and RoCE v1.
    """

    def rank(gid: dict[str, Any]) -> tuple[bool, bool, int]:
        return "v2" not in gid["type"], _family(gid) == "link-local", gid["index"]

    pairs = [(a, b) for a in mine for b in theirs if (a["type"], _family(a)) == (b["type"], _family(b))]
    if index is not None or not pairs:
        pairs = [(min(mine, key=rank), min(theirs, key=rank))]
    return sorted(
        pairs, key=lambda pair: (rank(pair[0])[:2], rank(pair[0])[2] + rank(pair[1])[2], rank(pair[0])[2])
    )


def _gid_pair(pair: tuple[Any, Any], answered: bool, rtt_us: float | None, error: str) -> GidPair:
    mine, theirs = pair
    family = _family(mine)
    return GidPair(
        source_index=mine["index"],
        target_index=theirs["index"],
        kind=mine["type"] if "RoCE" not in mine["type"] else f"{mine['type'].removeprefix('IB/')}, {family}",
        by_design=family == "link-local" or "v2" not in mine["type"],
        answered=answered,
        rtt_us=rtt_us,
        error=error,
    )


def run_matrix(
    logins: Sequence[SshLogin],
    plan: Plan,
    *,
    timeout_s: float,
    note: Callable[[str], None] = lambda text: None,
) -> Matrix:
    """
    Probe between hosts, or this machine alone when none is named.

    Raises:
        Refused: A saturating probe was asked for, and a link is busy.
    """
    talks, unreached = open_talks(logins, timeout_s=timeout_s) if logins else ([], [])
    if not logins:
        import os

        talks = [LocalTalk(os.uname().nodename)]
    session = Session(talks, plan, unreached=unreached, note=note)
    try:
        return session.run()
    finally:
        for talk in talks:
            talk.close()

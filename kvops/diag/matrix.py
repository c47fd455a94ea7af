"""
What probes between hosts found: a cell for each pair of interfaces, percentiles over all, and who stands
out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

LATENCY_RATIO_MAX = 2.0  # of a row or column against the others [E], as probe.pair_latency
LATENCY_US_MIN = 200.0  # below it user space's own noise is larger than any fabric's: not told apart
VERBS_LATENCY_US_MIN = 20.0  # likewise of a read that Python posts
BANDWIDTH_SHARE_MIN = 0.7  # as probe.all_to_all
LOSS_PERCENT_MAX = 0.1
ODD_MAX = 64

REACH = ("tcp", "udp", "icmp", "verbs")


class GidPair(NamedTuple):
    """What a queue pair between one GID of each end's port said."""

    source_index: int
    target_index: int
    kind: str  # such as "RoCE v2, IPv4"
    by_design: bool  # link-local or RoCE v1: no router passes it, so no answer is no fault
    answered: bool
    rtt_us: float | None = None
    error: str = ""

    @property
    def indices(self) -> str:
        """``3 → 3``."""
        return f"{self.source_index} → {self.target_index}"

    def turned(self) -> GidPair:
        """The same, seen from the other end."""
        return self._replace(source_index=self.target_index, target_index=self.source_index)


@dataclass(slots=True, kw_only=True)
class Cell:
    """From one interface to another; None is not probed, or not seen (``unseen`` says why)."""

    source: str  # host
    source_netdev: str
    source_address: str
    target: str  # host
    target_netdev: str
    target_address: str
    same_rail: bool = True
    tcp: bool | None = None
    udp: bool | None = None
    icmp: bool | None = None
    verbs: bool | None = None
    connect_ms: float | None = None
    rtt_us: dict[str, float | None] | None = None  # p50, p99, p999 (of 1,000 and more), max
    jitter_us: float | None = None
    loss_percent: float | None = None
    loss_windows_percent: dict[str, float] | None = None  # p50, p99, max over windows of 20 packets
    path_mtu: int | None = None
    mtu_steps: dict[str, bool] | None = None
    gbps: float | None = None  # one stream alone
    gbps_together: float | None = None  # while all hosts send
    windows_gbps: list[float] | None = None
    retransmits: int | None = None
    verbs_gbps: float | None = None
    verbs_rtt_us: dict[str, float | None] | None = None
    verbs_mismatches: int | None = None
    gids: list[GidPair] = field(default_factory=list)  # the first is the one that was measured
    gids_left_out: int = 0  # beyond the bounds of number or time
    error: str = ""
    unseen: str = ""

    @property
    def name(self) -> str:
        """``a eth1 → b eth1``."""
        return f"{self.source_end} → {self.target_end}"

    @property
    def source_end(self) -> str:
        """``a eth1``."""
        return f"{self.source} {self.source_netdev}"

    @property
    def target_end(self) -> str:
        """``b eth1``."""
        return f"{self.target} {self.target_netdev}"

    @property
    def reached(self) -> bool | None:
        """Whether anything came back, by any way that was tried."""
        tried = [value for way in REACH if (value := getattr(self, way)) is not None]
        return any(tried) if tried else None

    def as_json(self) -> dict[str, Any]:
        """Only what was looked at."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["gids"] = [pair._asdict() for pair in self.gids] or None
        values["gids_left_out"] = self.gids_left_out or None
        return {name: value for name, value in values.items() if value not in (None, "")}


@dataclass(slots=True, kw_only=True)
class Matrix:
    """All cells, what each host said of itself, and whom nobody could ask."""

    probes: tuple[str, ...]
    hosts: list[str]
    cells: list[Cell]
    self_tests: dict[str, dict[str, Any]] = field(default_factory=dict)  # host → memory, register, load
    incast: list[dict[str, Any]] = field(default_factory=list)
    unreached: list[tuple[str, str]] = field(default_factory=list)
    left_out: int = 0  # pairs beyond the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """One host, interface or pair that is not like the others."""

    kind: str  # host, interface, sender, receiver, pair, NUMA node
    name: str
    metric: str
    observed: str
    expected: str

    def as_json(self) -> dict[str, str]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """
    Every pair of ``count`` members once, in rounds in which each takes part in one pair at most.

    The circle method of tournaments: ``count - 1`` rounds, one more for an odd count.
    """
    ring = list(range(count + count % 2))
    found = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        found.append([(min(p), max(p)) for p in pairs if max(p) < count])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Median, p90, p99 and maximum; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, max(-int(-share * len(ordered) // 1) - 1, 0))]

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1]}


def spread(matrix: Matrix) -> dict[str, dict[str, float]]:
    """Percentiles of each metric over all cells."""
    columns: dict[str, Callable[[Cell], float | None]] = {
        "rtt_us": lambda c: (c.rtt_us or {}).get("p50"),
        "rtt_p99_us": lambda c: (c.rtt_us or {}).get("p99"),
        "jitter_us": lambda c: c.jitter_us,
        "loss_percent": lambda c: c.loss_percent,
        "gbps": lambda c: c.gbps,
        "gbps_together": lambda c: c.gbps_together,
        "verbs_gbps": lambda c: c.verbs_gbps,
        "path_mtu": lambda c: c.path_mtu,
    }
    table = {}
    for name, read in columns.items():
        found = percentiles(value for cell in matrix.cells if (value := read(cell)) is not None)
        if found is not None:
            table[name] = found
    return table


def odd_ones(matrix: Matrix) -> list[Odd]:
    """Who stands out, the widest first: a host before its interfaces, those before single pairs."""
    found: list[Odd] = []
    found += _unreached(matrix)
    silent = {odd.name for odd in found if odd.kind == "host"}
    cells = [c for c in matrix.cells if not {c.source, c.target} & silent]
    trips: tuple[tuple[str, float, Callable[[Cell], float | None]], ...] = (
        ("round trip", LATENCY_US_MIN, lambda c: (c.rtt_us or {}).get("p50")),
        ("verbs round trip", VERBS_LATENCY_US_MIN, lambda c: (c.verbs_rtt_us or {}).get("p50")),
    )
    for metric, least, read in trips:
        slow = partial(_slow, least)
        found += _unlike(cells, metric, read, slow, "µs")
    for metric, read in (
        ("bandwidth", lambda c: c.gbps),
        ("verbs bandwidth", lambda c: c.verbs_gbps),
    ):
        found += _unlike(
            cells, metric, read, lambda own, others: own < BANDWIDTH_SHARE_MIN * others, "Gbit/s"
        )
    usual = _usual_mtu(cells)
    if len(matrix.hosts) > 2:
        found += _unlike(cells, "path MTU", lambda c: c.path_mtu, lambda own, _: own < usual, "B")
    # Two hosts have no others to be unlike: their own interfaces say what should pass.
    found += [
        Odd(
            kind="pair",
            name=c.name,
            metric="path MTU",
            observed=f"{c.path_mtu} B",
            expected=f"{max(map(int, c.mtu_steps))} B, as the interface",
        )
        for c in cells
        if len(matrix.hosts) == 2 and c.mtu_steps and (c.path_mtu or 0) < max(map(int, c.mtu_steps))
    ]
    found += [
        Odd(
            kind="pair",
            name=c.name,
            metric="loss",
            observed=f"{c.loss_percent:g} %",
            expected=f"at most {LOSS_PERCENT_MAX:g} %",
        )
        for c in cells
        if c.udp and (c.loss_percent or 0) > LOSS_PERCENT_MAX
    ]
    found += [
        Odd(
            kind="pair",
            name=c.name,
            metric="integrity",
            observed=f"{c.verbs_mismatches} wrong bytes",
            expected="none",
        )
        for c in cells
        if c.verbs_mismatches
    ]
    found += _gids(cells)
    found += _memory(matrix)
    return found[:ODD_MAX]


def _gids(cells: Sequence[Cell]) -> Iterator[Odd]:
    """GIDs that do not answer where others of the same two ports do: of an interface by itself, else of a pair."""
    silent: list[tuple[Cell, GidPair, GidPair]] = []
    tried: dict[tuple[str, int], set[str]] = {}  # interface and index → interfaces at the other end
    failed: dict[tuple[str, int], set[str]] = {}
    for cell in cells:
        well = next((pair for pair in cell.gids if pair.answered), None)
        for number, pair in enumerate(cell.gids if well is not None else ()):
            bad = not pair.answered and (number == 0 or not pair.by_design)
            for end, index, other in (
                (cell.source_end, pair.source_index, cell.target_end),
                (cell.target_end, pair.target_index, cell.source_end),
            ):
                tried.setdefault((end, index), set()).add(other)
                if bad:
                    failed.setdefault((end, index), set()).add(other)
            if bad and well is not None:
                silent.append((cell, pair, well))
    # To blame is who is silent towards everybody, if the others are not: one at the other end of every failure.
    dead = {key for key, others in failed.items() if len(others) > 1 and others == tried[key]}
    told: set[tuple[str, int]] = set()
    for cell, pair, well in silent:
        kind, name, key = "pair", cell.name, None
        for end, index in ((cell.source_end, pair.source_index), (cell.target_end, pair.target_index)):
            if (end, index) in dead:
                kind, name, key = "interface", end, (end, index)
                break
        if key is not None and key in told:
            continue
        if key is not None:
            told.add(key)
        indices = str(key[1]) if key is not None else pair.indices
        yield Odd(
            kind=kind,
            name=name,
            metric="GID",
            observed=f"{indices} ({pair.kind}): {pair.error or 'no answer'}",
            expected=f"an answer, as by {well.indices} ({well.kind})",
        )


def _groups(cells: Iterable[Cell], key: Callable[[Cell], tuple[str, ...]]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        for name in key(cell):
            groups.setdefault(name, []).append(cell)
    return groups


# Who may be to blame, the widest first: (kind, what it does, whose name).
_VIEWS: tuple[tuple[str, str, Callable[[Cell], tuple[str, ...]]], ...] = (
    ("host", "answers nobody and is answered by nobody", lambda c: (c.source, c.target)),
    ("interface", "answers nobody and is answered by nobody", lambda c: (c.source_end, c.target_end)),
    ("receiver", "is reached by nobody", lambda c: (c.target,)),
    ("receiver", "is reached by nobody", lambda c: (c.target_end,)),
    ("sender", "reaches nobody", lambda c: (c.source,)),
    ("sender", "reaches nobody", lambda c: (c.source_end,)),
)


def _slow(least_us: float, own: float, others: float) -> bool:
    return own > LATENCY_RATIO_MAX * others and own > least_us


def _unreached(matrix: Matrix) -> Iterator[Odd]:
    """Hosts, then interfaces, that nothing passes by while the others work; then pairs."""
    # On a rail-only fabric other rails do not answer by design: xnode.rail_connectivity judges that.
    tried = [c for c in matrix.cells if c.reached is not None and c.same_rail]
    told: set[int] = set()
    for kind, word, key in _VIEWS:
        for name, cells in _groups(tried, key).items():
            others = [c for c in tried if name not in key(c)]
            if (
                all(c.reached is False for c in cells)
                and any(c.reached for c in others)
                and not all(id(c) in told for c in cells)
            ):
                told.update(id(c) for c in cells)
                yield Odd(
                    kind=kind,
                    name=name,
                    metric="reachability",
                    observed=f"{word}: {cells[0].error or 'no answer'}",
                    expected=f"an answer on all of {len(cells)} ways",
                )
    for cell in tried:
        silent = [way for way in REACH if getattr(cell, way) is False]
        if silent and id(cell) not in told:
            yield Odd(
                kind="pair",
                name=cell.name,
                metric="reachability",
                observed=f"no answer by {', '.join(silent)}" + (f": {cell.error}" if cell.error else ""),
                expected="an answer",
            )


def _unlike(
    cells: Sequence[Cell],
    metric: str,
    read: Callable[[Cell], float | None],
    bad: Callable[[float, float], bool],
    unit: str,
) -> Iterator[Odd]:
    """Those whose median is bad against the others'; each cell is told once, by the widest that is bad."""
    seen = {id(c): (c, value) for c in cells if (value := read(c)) is not None}
    if len(seen) < 3:
        return
    told: set[int] = set()
    # Between two hosts nobody can tell whose fault it is: there the pair is named.
    decidable = len({c.source for c in cells} | {c.target for c in cells}) > 2
    for kind, _, key in _VIEWS if decidable else ():
        groups = _groups((c for c, _ in seen.values()), key)
        if len(groups) < 3:
            continue
        for name, own in groups.items():
            rest = [value for c, value in seen.values() if name not in key(c)]
            mine = [seen[id(c)][1] for c in own]
            # All of them: the median of a host's ways is bad, too, where only what it sends is.
            if (
                rest
                and not all(id(c) in told for c in own)
                and all(bad(value, statistics.median(rest)) for value in mine)
            ):
                told.update(id(c) for c in own)
                yield Odd(
                    kind=kind,
                    name=name,
                    metric=metric,
                    observed=f"{statistics.median(mine):.4g} {unit}",
                    expected=f"{statistics.median(rest):.4g} {unit}, as the others",
                )
    middle = statistics.median(value for _, value in seen.values())
    for cell, value in seen.values():
        if bad(value, middle) and id(cell) not in told:
            yield Odd(
                kind="pair",
                name=cell.name,
                metric=metric,
                observed=f"{value:.4g} {unit}",
                expected=f"{middle:.4g} {unit}, as the median",
            )


def _usual_mtu(cells: Sequence[Cell]) -> int:
    values = [c.path_mtu for c in cells if c.path_mtu is not None]
    return max(set(values), key=lambda value: (values.count(value), value)) if values else 0


def _memory(matrix: Matrix) -> Iterator[Odd]:
    speeds = {
        f"{host} node {row['node']}": float(row["gib_s"])
        for host, tests in matrix.self_tests.items()
        for row in tests.get("memory", {}).get("rows", [])
    }
    for name, speed in speeds.items():
        others = [value for other, value in speeds.items() if other != name]
        if len(others) > 1 and speed < BANDWIDTH_SHARE_MIN * statistics.median(others):
            yield Odd(
                kind="NUMA node",
                name=name,
                metric="memory copy",
                observed=f"{speed:g} GiB/s",
                expected=f"{statistics.median(others):g} GiB/s, as the others",
            )


def records(matrix: Matrix) -> dict[str, list[dict[str, Any]]]:
    """The same as records that checks read (``meta.json``, ``probes``), by the host that sent."""
    found: dict[str, list[dict[str, Any]]] = {host: [] for host in matrix.hosts}
    ways: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in matrix.cells:
        rows = found[cell.source]
        if cell.tcp is not None:
            ways.setdefault((cell.source, cell.source_netdev, cell.target), []).append(cell)
        if cell.icmp is not None:
            rows.append(
                {
                    "probe": "icmp",
                    "netdev": cell.source_netdev,
                    "address": cell.target_address,
                    "answered": cell.icmp,
                }
            )
        for size, answered in (cell.mtu_steps or {}).items():
            rows.append(
                {
                    "probe": "mtu_ladder",
                    "netdev": cell.source_netdev,
                    "peer": cell.target_address,
                    "bytes": int(size),
                    "answered": answered,
                }
            )
        if cell.verbs is not None and cell.icmp is not None:
            rows.append(
                {
                    "probe": "udp_4791",
                    "device": cell.source_netdev,
                    "peer": cell.target_address,
                    "answered": cell.verbs,
                    "icmp": cell.icmp,
                }
            )
        for value, together in ((cell.gbps, False), (cell.gbps_together, True)):
            speed = cell.verbs_gbps if cell.verbs_gbps is not None and not together else value
            if speed is not None:
                rows.append(
                    {
                        "probe": "all_to_all",
                        "from": cell.source,
                        "to": cell.target,
                        "gbps": speed,
                        "simultaneous": together,
                    }
                )
        if cell.verbs_mismatches is not None:
            rows.append(
                {"probe": "integrity", "device": cell.source_netdev, "mismatches": cell.verbs_mismatches}
            )
    for (source, netdev, target), cells in ways.items():
        # One address that answers is enough: on a rail-only fabric the others do not, by design.
        best = next((c for c in cells if c.tcp), cells[0])
        record: dict[str, Any] = {
            "probe": "tcp_control",
            "address": f"{target} {best.target_address} by {netdev}",
            "ok": bool(best.tcp),
        }
        if best.tcp and best.connect_ms is not None:
            record["seconds"] = best.connect_ms / 1000
        if not best.tcp:
            record["error"] = best.error or "no answer"
        found[source].append(record)
    for row in matrix.incast:
        found[row["receiver"]].append({"probe": "incast_jitter", **row})
    for host, tests in matrix.self_tests.items():
        found.setdefault(host, []).extend(
            {"probe": "reg_mr", **row} for row in tests.get("register", {}).get("rows", [])
        )
    return found


def document(matrix: Matrix) -> dict[str, Any]:
    """The JSON form."""
    return {
        "probes": list(matrix.probes),
        "hosts": matrix.hosts,
        "cells": [cell.as_json() for cell in matrix.cells],
        "percentiles": spread(matrix),
        "odd": [odd.as_json() for odd in odd_ones(matrix)],
        "incast": matrix.incast,
        "self_tests": matrix.self_tests,
        "left_out": matrix.left_out,
        "unreached": [{"host": name, "reason": reason} for name, reason in matrix.unreached],
    }

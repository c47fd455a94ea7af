"""Watches hosts, one short window after the other: what moved, what checks say, and what moved together."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from kvops.diag.collect import agent
from kvops.diag.correlate import EFFECTS, relations
from kvops.diag.facts import HostFacts, Port, attempt
from kvops.diag.model import LOUD, Result
from kvops.diag.registry import Check
from kvops.diag.runner import run, select
from kvops.diag.scrape import Totals
from kvops.diag.snapshot import from_files
from kvops.errors import KvopsError

EVERY_S_MIN = 1.0  # hw_counters are cached for 12 ms and more; a shorter window shows noise
SERIES_MAX = 100_000  # windows kept for the jitter at the end
HOSTS_MAX = 64  # at once
ROWS_WAITING_MAX = 10_000  # of all hosts: a reader that is slower than that holds the watches up

# Names of ethtool -S and hw_counters that are signs of a kind (the catalogue's counter appendix).
_PFC = re.compile(r"^[rt]x_(?:prio\d_pause|global_pause)$")
_INCAST = re.compile(r"^(?:tx_prio\d_pause|rx_prio\d_(?:buf_discard|cong_discard|discards)|rx_discards_phy)$")
_HW = {
    "ecn": ("np_ecn_marked_roce_packets",),
    "cnp": ("np_cnp_sent", "rp_cnp_handled"),
    "retransmits": ("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "roce_adp_retrans"),
}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def signs(ports: Sequence[Port], window_s: float) -> dict[str, float | None]:
    """Per second, summed over ports: ecn, cnp, pfc, incast, retransmits; None where no port shows it."""
    found: dict[str, float | None] = dict.fromkeys(("ecn", "cnp", "pfc", "incast", "retransmits"))

    def add(name: str, steps: Sequence[int]) -> None:
        if steps:
            found[name] = (found[name] or 0.0) + sum(steps) / window_s

    for port in ports:
        for name, counters in _HW.items():
            add(name, list((attempt(lambda: port.steps(*counters)) or {}).values()))
        wire = attempt(lambda: port.wire_steps) or {}
        add("pfc", [n for counter, n in wire.items() if _PFC.match(counter)])
        add("incast", [n for counter, n in wire.items() if _INCAST.match(counter)])
    return found


class Watch:
    """
    One watch. Iterate :meth:`rows`; between them, ``results`` and ``rates`` are those of the last window.

    Args:
        duration_s: How long.
        every_s: Length of one window, at least EVERY_S_MIN.
        selected: Checks to judge each window with.
        collect: Takes the length of a window and gives a snapshot's files; this machine's collector by
            default.
        scrape: Gives the pool's counters so far, where there are any.
        clock: Seconds that only go forward.
        name: Of the host, in words.
        pause: Waits so many seconds after a window that could not be collected.
    """

    def __init__(
        self,
        *,
        duration_s: float,
        every_s: float,
        selected: Sequence[Check],
        collect: Callable[[float], dict[str, bytes]] | None = None,
        scrape: Callable[[], Totals] | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "this host",
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.duration_s = duration_s
        self.every_s = max(every_s, EVERY_S_MIN)
        self.selected = selected
        self.results: list[Result] = []
        self.rates: dict[str, tuple[float, float]] = {}  # bits a second: sent, received
        self._collect = collect or (lambda window_s: agent.collect(window_s=window_s))
        self._scrape = scrape
        self._clock = clock
        self._pause = pause
        self._series: dict[str, list[float]] = {}  # port → bytes a second
        self._columns: dict[str, list[float | None]] = {}  # sign or effect → one value a window
        self._saying: dict[tuple[str, str], str] = {}
        self._unseen: set[str] = set()

    def rows(self) -> Iterator[dict[str, Any]]:
        """
        Rows for as long as asked.

        Yields:
            ``{"time", "event", "subject", "text", ...}``: event ``rate`` for each port and window, ``pool``
            for each window of its metrics, ``info``, ``warn`` or ``fail`` when a check starts to say so,
            ``over`` when it stops, ``unseen`` once for what cannot be seen; at the end the steadiness of each
            port, and ``correlation`` for each sign and effect.
        """
        deadline = self._clock() + self.duration_s
        host: HostFacts | None = None
        before = self._scrape() if self._scrape is not None else None
        began = self._clock()
        while self._clock() < deadline:
            try:
                host = HostFacts(from_files(self._collect(self.every_s), self.name)[0])
            except KvopsError as error:
                yield from self._once(self.name, f"{error.what}: no word about that time")
                self._pause(self.every_s)  # one that refuses at once is not asked again at once
                continue
            after = self._scrape() if self._scrape is not None else None
            now = self._clock()
            took_s, began = now - began, now
            yield from self._window(host, before, after, took_s)
            yield from self._judged(host)
            before = after
        if host is not None and self._series:
            yield from self._steadiness(host)
        for effect, words in EFFECTS.items():
            if self._columns and not any(value is not None for value in self._columns[effect]):
                yield from self._once("correlation", f"{words} was seen in no window")
        for relation in relations(self._columns):
            if not relation.n:
                continue
            yield {
                "time": _now(),
                "event": "correlation",
                "subject": f"{relation.sign} ~ {relation.effect}",
                "text": relation.verdict,
                **asdict(relation),
            }

    def _once(self, subject: str, text: str) -> Iterator[dict[str, Any]]:
        if (key := f"{subject} {text}") not in self._unseen and len(self._unseen) < 1000:
            self._unseen.add(key)
            yield {"time": _now(), "event": "unseen", "subject": subject, "text": text}

    def _window(
        self, host: HostFacts, before: Totals | None, after: Totals | None, took_s: float
    ) -> Iterator[dict[str, Any]]:
        """What moved in one window."""
        ports = list(attempt(lambda: host.ports) or ())
        window_s = host.snapshot.window_s
        self.rates = {}
        for port in ports:
            moved = attempt(lambda: port.traffic_bytes)
            if moved is None or window_s is None:
                yield from self._once(port.label, "no counter of its bytes can be read")
                continue
            rates = [size * 8 / window_s / 1e9 for size in moved]
            self.rates[port.label] = (rates[0] * 1e9, rates[1] * 1e9)
            self._series.setdefault(port.label, []).append(sum(moved) / window_s)
            del self._series[port.label][:-SERIES_MAX]
            text = f"tx {rates[0]:.1f} rx {rates[1]:.1f} Gbit/s"
            yield {"time": _now(), "event": "rate", "subject": port.label, "text": text, "gbps": rates}
        if not ports:
            yield from self._once(self.name, "no RDMA port can be seen: no rates, no signs of congestion")
        speed: float | None = sum(sum(pair) for pair in self.rates.values()) / 8 if self.rates else None
        first: float | None = None
        if before is not None and after is not None:
            for text in after.unseen:
                yield from self._once("metrics", text)
            # A counter that went back belongs to a process that was started again: that window says nothing.
            moved_bytes = _step(before.moved_bytes, after.moved_bytes)
            seconds, count = (
                _step(before.first_token_s, after.first_token_s),
                _step(before.first_tokens, after.first_tokens),
            )
            if moved_bytes is not None:
                speed = moved_bytes / took_s
            if seconds is not None and count:
                first = seconds / count
            said = [f"{speed / 1e9:.3f} GB/s"] if moved_bytes is not None and speed is not None else []
            said += [f"first token {first * 1000:.0f} ms (mean of {count:.0f})"] if first is not None else []
            if said:
                yield {
                    "time": _now(),
                    "event": "pool",
                    "subject": "pool",
                    "text": ", ".join(said),
                    "bytes_per_second": speed,
                    "ttft_s": first,
                }
        if window_s is not None:
            values = {**signs(ports, window_s), "speed": speed, "ttft": first}
            for name, value in values.items():
                column = self._columns.setdefault(name, [])
                column.append(value)
                del column[:-SERIES_MAX]

    def _judged(self, host: HostFacts) -> Iterator[dict[str, Any]]:
        """What checks start and stop to say."""
        now: dict[tuple[str, str], str] = {}
        self.results = run([host], self.selected)
        for result in self.results:
            for finding in result.findings:
                key = (result.check, finding.subject)
                now[key] = str(finding.severity)
                if self._saying.get(key) != now[key]:
                    text = f"{result.check}: {finding.observed}"
                    yield {"time": _now(), "event": now[key], "subject": finding.subject, "text": text}
        for check, subject in self._saying.keys() - now.keys():
            yield {"time": _now(), "event": "over", "subject": subject, "text": check}
        self._saying = now

    def _steadiness(self, host: HostFacts) -> Iterator[dict[str, Any]]:
        host.meta["series"] = self._series
        for result in run([host], select(["ctr.jitter"])):
            for finding in result.findings:
                if finding.severity in LOUD:
                    yield {
                        "time": _now(),
                        "event": str(finding.severity),
                        "subject": finding.subject,
                        "text": f"{result.check}: {finding.observed}",
                    }


def together(watches: Mapping[str, Watch]) -> Iterator[dict[str, Any]]:
    """
    Rows of several hosts' watches as they come, each with its ``host``; every watch runs on a thread of its own.

    Args:
        watches: Host → its watch, at most HOSTS_MAX.
    """
    assert len(watches) <= HOSTS_MAX
    rows: queue.Queue[tuple[str, dict[str, Any] | BaseException | None]] = queue.Queue(ROWS_WAITING_MAX)

    def run_one(host: str, watch: Watch) -> None:
        try:
            for row in watch.rows():
                rows.put((host, row))
            rows.put((host, None))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the rows are read
            rows.put((host, error))

    for host, watch in watches.items():
        # A daemon: a host that hangs does not keep the process from ending.
        threading.Thread(target=run_one, args=(host, watch), name=f"watch-{host}", daemon=True).start()
    left = len(watches)
    while left:
        host, row = rows.get()
        if isinstance(row, BaseException):
            raise row
        if row is None:
            left -= 1
        else:
            yield {**row, "host": host}


def _step(before: float | None, after: float | None) -> float | None:
    return after - before if before is not None and after is not None and after >= before else None

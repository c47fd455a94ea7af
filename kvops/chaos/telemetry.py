"""What clients see right now, read from the histories that they are writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvops.chaos.client import ClientSpec, now_ns
from kvops.chaos.history import Request
from kvops.chaos.probes import good

SETTLED_S: Final = 1.0  # a request this old has had its time; younger ones are not judged
LOOK_BACK_S: Final = 4.0
REQUESTS_MIN: Final = 5  # fewer say nothing
READ_BYTES_MAX: Final = 8 << 20  # at one look


@dataclass(slots=True)
class _Tail:
    """The end of one file, read as it grows."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def lines(self) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return []
        self.offset += len(data)
        whole, _, self.rest = (self.rest + data).rpartition(b"\n")
        return whole.splitlines()


@dataclass(slots=True)
class Telemetry:
    """The clients of one stretch, as their histories show them."""

    specs: Sequence[ClientSpec]
    start_ns: int
    clock: Callable[[], float] = time.monotonic
    silent: str = ""
    """The client that was silent longest, when ``age_s`` was last asked for."""
    _tails: list[_Tail] = field(default_factory=list)
    _done: dict[str, bool] = field(default_factory=dict)
    _left: list[set[str]] = field(default_factory=list)
    _grown_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is read yet."""
        self._tails = [_Tail(Path(spec.history)) for spec in self.specs]
        self._grown_s = [self.clock()] * len(self.specs)
        self._left = [{one.request for one in spec.plan} for spec in self.specs]

    def success_rate(self) -> float | None:
        """Share of the requests due lately that were good; one that was never answered is not."""
        self._read()
        now_s = (now_ns() - self.start_ns) / 1e9
        due = [
            f"{spec.name}/{one.request}"
            for spec in self.specs
            for one in spec.plan
            if now_s - LOOK_BACK_S <= one.at_s <= now_s - SETTLED_S
        ]
        if len(due) < REQUESTS_MIN:
            return None
        return sum(self._done.get(name, False) for name in due) / len(due)

    def age_s(self) -> float:
        """
        Seconds since the client that was silent longest last wrote anything, as far as was looked; one that is done
        may be silent. A file's time of change says nothing: a full disk changes it, too.
        """
        self._read()
        oldest, self.silent = 0.0, ""
        for spec, left, grown_s in zip(self.specs, self._left, self._grown_s, strict=True):
            age_s = 0.0 if spec.plan and not left else self.clock() - grown_s
            if age_s > oldest:
                oldest, self.silent = age_s, spec.name
        return oldest

    def unrecorded(self) -> list[str]:
        """Of clients that have ended: whose requests are not all on record, such as "g1e0: 3 of 40 requests"."""
        while self._read():
            pass
        return [
            f"{spec.name}: {len(left):,} of {len(spec.plan):,} requests"
            for spec, left in zip(self.specs, self._left, strict=True)
            if left
        ]

    def _read(self) -> int:
        """Take what was written since the last time; returns how many lines that were."""
        count = 0
        for index, (tail, spec, left) in enumerate(zip(self._tails, self.specs, self._left, strict=True)):
            for line in tail.lines():
                count += 1
                self._grown_s[index] = self.clock()
                if b'"type":"request"' not in line[:40]:
                    continue
                try:
                    row = msgspec.json.decode(line, type=Request)
                except msgspec.DecodeError:
                    continue  # judged from the whole file later
                self._done[f"{spec.name}/{row.request}"] = good(row)
                left.discard(row.request)
        return count

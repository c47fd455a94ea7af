"""What clients see right now, read from the histories that they are writing."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    _tails: list[_Tail] = field(default_factory=list)
    _done: dict[str, bool] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Nothing is read yet."""
        self._tails = [_Tail(Path(spec.history)) for spec in self.specs]

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
        """Seconds since the client that was silent longest last wrote anything."""
        oldest = 0.0
        for spec in self.specs:
            try:
                age_s = time.time() - Path(spec.history).stat().st_mtime
            except OSError:
                age_s = time.monotonic() - self._began_s
            oldest = max(oldest, age_s)
        return oldest

    def _read(self) -> None:
        for tail, spec in zip(self._tails, self.specs, strict=True):
            for line in tail.lines():
                if b'"type":"request"' not in line[:40]:
                    continue
                try:
                    row = msgspec.json.decode(line, type=Request)
                except msgspec.DecodeError:
                    continue  # judged from the whole file later
                self._done[f"{spec.name}/{row.request}"] = good(row)

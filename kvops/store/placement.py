"""stub"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Writer:
    host: str
    numa_node: int


@dataclass(frozen=True)
class Candidate:
    id: int
    host: str
    numa_node: int


class Placement:
    def __init__(self, policy: Any, seed: int) -> None: ...
    def order(self, writer: Writer, stores: list[Candidate], epoch: int) -> tuple[Any, ...]:
        return tuple(c.id for c in sorted(stores, key=lambda c: (c.host != writer.host, c.id)))

    def choose(self, order: Any, size: int, allocate: Any, host_of: Any, replicas: int) -> Any:
        out = []
        hosts = set()
        for sid in order:
            if host_of(sid) in hosts:
                continue
            o = allocate(sid, size)
            if o is not None:
                out.append((sid, o))
                hosts.add(host_of(sid))
            if len(out) == replicas:
                break
        return out

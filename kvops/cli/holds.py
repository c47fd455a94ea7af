"""What the commands about holds share: who asks, targets, rows, the price before and the receipt after."""

from __future__ import annotations

import getpass
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvops.cli.clients import leader
from kvops.cli.context import Target
from kvops.cli.output import Column, Output
from kvops.cli.units import split_list
from kvops.errors import Refused, Unreachable, UsageError
from kvops.fleet.preflight import human_bytes, human_objects

if TYPE_CHECKING:
    from kvops.store.model import HoldInfo, HoldReply, MasterStatus

SWEPT_PER_S: Final = 10_000  # about, beside lookups; alone some times faster
LOOK_S: Final = 0.1  # between two looks at the progress
LINE_S: Final = 5.0  # between two lines about the same stage

COLUMNS: Final = (
    Column("target"),
    Column("hold"),
    Column("state"),
    Column("objects_at_call", "count"),
    Column("swept", "count"),
    Column("left", "count"),
    Column("migrated", "count"),
    Column("unmoved", "count"),
    Column("stores", "list"),
    Column("reason"),
)


def owner() -> str:
    """Who asks: ``user@machine``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def named(targets: Sequence[str]) -> list[str]:
    """
    The targets that were named, ranges and commas spread out.

    Raises:
        UsageError: None was.
    """
    names = split_list(targets)
    if not names:
        raise UsageError("no target", fix="name stores or hosts: store-2, gpu-017, gpu-017/1, gpu-[001-040]")
    return names


def count_of(number: int, word: str) -> str:
    """``1 store``, ``2 stores``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def row_of(hold: HoldInfo) -> dict[str, Any]:
    """One target as JSON and tables give it."""
    return {
        "target": hold.target,
        "stores": hold.stores,
        "kind": str(hold.kind),
        "state": str(hold.state),
        "hold": hold.number,
        "reason": hold.reason,
        "owner": hold.owner,
        "since": hold.since,
        "objects_at_call": hold.objects_at_call,
        "bytes_at_call": hold.bytes_at_call,
        "leases_left_ms": hold.leases_left_ms,
        "swept": hold.swept,
        "left": None if hold.left < 0 else hold.left,
        "migrated": hold.migrated,
        "migrated_bytes": hold.migrated_bytes,
        "unmoved": hold.unmoved,
    }


def summary(holds: Sequence[HoldInfo]) -> dict[str, Any]:
    """The same of all targets together."""
    counted = bool(holds) and all(hold.left >= 0 for hold in holds)
    states = [str(hold.state) for hold in holds]
    order = ("migrating", "draining", "lost", "drained", "cordoned", "lifted")  # the one that is behind
    return {
        "objects_at_call": sum(hold.objects_at_call for hold in holds),
        "swept": sum(hold.swept for hold in holds),
        "left": sum(hold.left for hold in holds) if counted else None,
        "migrated": sum(hold.migrated for hold in holds),
        "unmoved": sum(hold.unmoved for hold in holds),
        "state": min(states, key=order.index, default=None),
        "hold": holds[0].number if holds else None,
    }


def document(target: Target, reply: HoldReply, *, call_ms: float, dry_run: bool) -> dict[str, Any]:
    """What a call that only sets or lifts holds answers as JSON."""
    return {
        "group": target.name,
        "targets": [row_of(hold) for hold in reply.holds],
        "call_ms": round(call_ms, 3),
        **summary(reply.holds),
        "unchanged": reply.unchanged,
    } | ({"dry_run": True} if dry_run else {})


@dataclass(frozen=True, slots=True)
class Price:
    """What taking stores away will cost, before it is done."""

    objects: int
    bytes: int
    share: float  # of the pool's capacity
    full: float  # how full the rest would be if it took everything
    hit_ratio: float | None  # so far; None when nobody has looked anything up
    hit_ratio_after: float | None
    seconds: float

    def document(self) -> dict[str, Any]:
        """As JSON gives it."""
        return {
            "objects": self.objects,
            "bytes": self.bytes,
            "capacity_share": round(self.share, 4),
            "hit_ratio": _rounded(self.hit_ratio),
            "hit_ratio_after": _rounded(self.hit_ratio_after),
            "seconds": round(self.seconds, 1),
        }

    def lines(self, reply: HoldReply) -> list[str]:
        """For people, indented."""
        ratio = "nobody has looked anything up yet"
        if self.hit_ratio is not None and self.hit_ratio_after is not None:
            ratio = f"hit ratio {self.hit_ratio:.1%} → about {self.hit_ratio_after:.1%} at first"
        safe = "; ".join(check.text for check in reply.checks)
        if self.share < 1:
            safe = f"the rest would be {self.full:.0%} full with all of it; {safe}"
        return [
            f"  holds   {human_objects(self.objects)}, {human_bytes(self.bytes)}; "
            f"{self.share:.1%} of the pool's capacity",
            f"  costs   {ratio}, about {max(1, round(self.seconds))} s until it is empty",
            f"  {'safe  ' if all(check.ok for check in reply.checks) else 'unsafe'}  {safe}",
        ]


def price(reply: HoldReply, status: MasterStatus, *, migrate: bool = False, bandwidth_bps: int = 0) -> Price:
    """
    The price that a dry run of a drain tells.

    The hit ratio is an estimate: all objects are equally hot, and a migration keeps those for which there is room.
    """
    objects = sum(hold.objects for hold in reply.holds)
    size = sum(hold.bytes_at_call for hold in reply.holds)
    rest = max(1, reply.pool_bytes - reply.capacity_bytes)
    ratio = status.hits_total / status.lookups_total if status.lookups_total else None
    lost = min(1.0, objects / max(1, status.objects))
    if reply.pool_bytes <= reply.capacity_bytes:
        lost = 1.0  # nothing would be left
    if migrate and size:
        room = max(0, reply.pool_bytes - reply.capacity_bytes - (reply.pool_used_bytes - size))
        lost *= max(0.0, 1 - room / size)
    return Price(
        objects=objects,
        bytes=size,
        share=reply.capacity_bytes / max(1, reply.pool_bytes),
        full=min(1.0, reply.pool_used_bytes / rest),
        hit_ratio=ratio,
        hit_ratio_after=None if ratio is None else ratio * (1 - lost),
        seconds=1 + objects / SWEPT_PER_S + (size * 8 / bandwidth_bps if migrate and bandwidth_bps else 0),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def clock_line(word: str, text: str) -> str:
    """``03:04:11  hidden    …``."""
    return f"{datetime.now(UTC):%H:%M:%S}  {word:<8}  {text}"


class NotInTime(Unreachable):
    """A drain takes longer than somebody wanted to watch it."""


def _under_way(holds: Sequence[HoldInfo]) -> bool:
    return any(str(hold.state) in ("migrating", "draining") for hold in holds)


class Watch:
    """Follows holds until they are done, by whatever master leads."""

    def __init__(self, out: Output, target: Target, names: Sequence[str]) -> None:
        self._out, self._target = out, target
        self._names = set(names)
        self._wait = threading.Event()
        self._said: tuple[str, float] = ("", 0.0)
        self._began: tuple[int, float] | None = None

    def run(self, first: Sequence[HoldInfo], *, deadline: float) -> list[HoldInfo]:
        """
        Wait for the end.

        Raises:
            Refused: A hold was lifted meanwhile.
            NotInTime: The drain goes on without us.
        """
        holds = list(first)
        while _under_way(holds):
            try:
                left_s = deadline - time.monotonic()
                with leader(self._target, timeout_s=max(0.1, min(2.0, left_s))) as (client, _):
                    while _under_way(holds):
                        self._pause(holds, deadline)
                        holds = self._follow(client)
            except NotInTime:
                raise
            except Unreachable:
                self._pause(holds, deadline)  # a master that restarts finishes what it began
        return holds

    def _pause(self, holds: Sequence[HoldInfo], deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise NotInTime(
                f"{', '.join(sorted(self._names))} not drained in time; the drain goes on",
                fix=f"{self._target.kvops} drain {' '.join(sorted(self._names))} watches it again",
            )
        self._tell(holds)
        self._wait.wait(min(LOOK_S, left_s))

    def _follow(self, client: Any) -> list[HoldInfo]:
        found = [hold for hold in client.holds().holds if hold.target in self._names]
        gone = self._names - {hold.target for hold in found}
        if gone:
            raise Refused(f"somebody lifted the hold on {', '.join(sorted(gone))}", fix="see kvops events")
        return found

    def _tell(self, holds: Sequence[HoldInfo]) -> None:
        if any(str(hold.state) == "migrating" for hold in holds):
            done, total = sum(h.migrated for h in holds), sum(h.objects_at_call for h in holds)
            word, text = "migrate", f"{done:,} of {total:,}{self._eta(done, total)}"
        elif leases := max(hold.leases_left_ms for hold in holds):
            word, text = "leases", f"the last ends in {leases / 1_000:.1f} s"
        else:
            done, total = sum(h.swept for h in holds), sum(h.objects_at_call for h in holds)
            word, text = "sweep", f"{done:,} of {total:,}{self._eta(done, total)}" if total else "nothing"
        now = time.monotonic()
        if word != self._said[0] or now - self._said[1] >= LINE_S:
            self._said = (word, now)
            if self._out.human or not self._out.structured:
                self._out.note(clock_line(word, text))

    def _eta(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self._began is None or done < self._began[0]:
            self._began = (done, now)
        since, began = self._began
        if done <= since or now - began < 1 or total <= done:
            return ""
        return f", about {(total - done) * (now - began) / (done - since):.0f} s left"

"""When a store's objects were out of sight by its master's own word: misses then are no losses."""

from __future__ import annotations

from typing import Final

from kvops.chaos.history import EventKind, RunRecord

CLOCK_NS: Final = 50_000_000  # a master's events carry whole milliseconds of a wall clock
_BACK: Final = (EventKind.STORE_READY, EventKind.STORE_RECOVERED)
_FOREVER: Final = 1 << 62


class Hidden:
    """
    The stretches in which a master named some store in no lookup, although the store may have kept all it held.

    They begin when the master suspects it (silence, a connection that closed, reports), and end when it is heard of
    again. A store that mounts anew is visible at once, or once it has announced what it holds, which is told apart
    by whether that follows.
    """

    def __init__(self, record: RunRecord) -> None:
        self._spans: dict[tuple[str, str], list[tuple[int, int]]] = {}  # by group and store
        since: dict[tuple[str, str], int] = {}
        mounted: dict[tuple[str, str], int] = {}
        for event in sorted(record.events, key=lambda one: one.t_ns):
            key = (event.group, event.subject)
            if event.kind == EventKind.STORE_SUSPECTED:
                if key in mounted:
                    self._add(key, since.pop(key), mounted.pop(key))
                since.setdefault(key, event.t_ns)
            elif event.kind in _BACK and key in since:
                mounted.pop(key, None)
                self._add(key, since.pop(key), event.t_ns)
            elif event.kind == EventKind.STORE_MOUNTED and key in since:
                mounted[key] = event.t_ns
        for key, begin_ns in since.items():
            self._add(key, begin_ns, mounted.get(key, _FOREVER))

    def _add(self, key: tuple[str, str], begin_ns: int, end_ns: int) -> None:
        self._spans.setdefault(key, []).append((begin_ns - CLOCK_NS, end_ns + CLOCK_NS))

    def any(self, group: str, store: str, begin_ns: int, end_ns: int) -> bool:
        """Whether a store of a group, any of them where it is empty, was hidden at some time of a stretch."""
        return any(
            begin <= end_ns and end >= begin_ns
            for (of, name), spans in self._spans.items()
            if of in ("", group) and store in ("", name)
            for begin, end in spans
        )

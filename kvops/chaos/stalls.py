"""How long a client's process stood still, by its own samples: what is late then is the machine's doing."""

from __future__ import annotations

from bisect import bisect_left

from kvops.chaos.history import RunRecord


class Stalls:
    """The stalls of every client of a run."""

    def __init__(self, record: RunRecord) -> None:
        self._seen: dict[str, list[tuple[int, float]]] = {}
        for one in record.samples:
            if one.role == "client":
                self._seen.setdefault(one.subject, []).append((one.t_ns, one.stalled_ms))
        for seen in self._seen.values():
            seen.sort()

    def ms(self, client: str, begin_ns: int, end_ns: int) -> float:
        """
        For how long a client may have stood still in a stretch of time, in ms: no longer than the stretch.

        Args:
            client: As operations name it; a second pool client of the same process has a suffix after a dash.
            begin_ns: Of the stretch.
            end_ns: Of the stretch.
        """
        seen = self._seen.get(client) or self._seen.get(client.rpartition("-")[0])
        if not seen:
            return 0.0
        total = 0.0
        for at_ns, stalled_ms in seen[bisect_left(seen, (begin_ns, 0.0)) :]:
            total += stalled_ms
            if at_ns >= end_ns:
                break  # the first sample after the stretch may hold some of it, later ones none
        return min(total, (end_ns - begin_ns) / 1e6)

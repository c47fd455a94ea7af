"""What a master shows under /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvops.metrics import Reading
from kvops.store.master_core import MasterCore


def readings(
    core: Callable[[], MasterCore],
    *,
    term: Callable[[], int],
    leads: Callable[[], bool],
    standbys: Callable[[], int],
    connections: Callable[[], int],
    slice_s: Callable[[], float],
    request_s: Callable[[], float],
) -> list[Reading]:
    """
    One row a metric, read when somebody scrapes.

    Args:
        core: What the master leads with, or follows.
        term: Its own or its leader's.
        leads: Whether it leads.
        standbys: In the in-sync set, itself apart; 0 for whoever does not lead.
        connections: Open ones.
        slice_s: CPU time of the longest slice of background work.
        request_s: CPU time of the longest request that was no lookup.
    """

    def counter(name: str, text: str, read: Callable[[], float]) -> Reading:
        return Reading(name=name, help=text, read=read, kind="counter")

    return [
        Reading(name="kvops_master_term", help="Term of this master.", read=term),
        Reading(
            name="kvops_master_standbys",
            help="In the in-sync set, as far as a leader knows.",
            read=standbys,
        ),
        Reading(
            name="kvops_master_leads",
            help="Whether it leads: 1, or 0 for a standby.",
            read=leads,
        ),
        Reading(name="kvops_master_objects", help="Readable objects.", read=lambda: len(core().index)),
        Reading(name="kvops_master_processing", help="Puts under way.", read=lambda: len(core().puts)),
        Reading(
            name="kvops_master_index_bytes",
            help="Memory of the index.",
            read=lambda: core().index.memory_bytes(),
        ),
        Reading(
            name="kvops_master_capacity_bytes",
            help="Mounted memory.",
            read=lambda: core().stores.capacity_bytes(),
        ),
        Reading(name="kvops_master_used_bytes", help="Memory in use.", read=lambda: core().used_bytes()),
        Reading(name="kvops_master_connections", help="Open connections.", read=connections),
        Reading(
            name="kvops_master_stores",
            help="Stores by state.",
            read=lambda: _count((store.state.value,) for store in core().stores),
            labels=("state",),
        ),
        Reading(
            name="kvops_master_breaker_open",
            help="Whether the group's is.",
            read=lambda: float(core().breaker_open),
        ),
        Reading(
            name="kvops_master_slice_seconds_max",
            help="CPU time of the longest slice of background work.",
            read=slice_s,
        ),
        Reading(
            name="kvops_master_request_seconds_max",
            help="CPU time of the longest request that was no lookup.",
            read=request_s,
        ),
        counter("kvops_master_lookups_total", "Keys looked up.", lambda: core().index.lookups_total),
        counter("kvops_master_hits_total", "Keys found.", lambda: core().index.hits_total),
        counter("kvops_master_puts_total", "Objects completed.", lambda: core().outbox.counters.puts),
        counter("kvops_master_evicted_total", "Objects evicted.", lambda: core().outbox.counters.evicted),
        counter("kvops_master_removed_total", "Objects removed.", lambda: core().outbox.counters.removed),
        counter(
            "kvops_master_preempted_total", "Puts of dead writers.", lambda: core().outbox.counters.preempted
        ),
        counter("kvops_master_no_space_total", "Puts without room.", lambda: core().outbox.counters.no_space),
        counter(
            "kvops_master_swept_total",
            "Objects of lost stores forgotten.",
            lambda: core().sweeper.swept_total,
        ),
    ]


def _count(labels: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return counts

"""What a store node shows on /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.metrics import Reading

if TYPE_CHECKING:
    from kvops.store.node import Node


def readings(node: Node) -> list[Reading]:
    """Every metric; read at each scrape, on the HTTP server's threads."""
    core, segment = node.core, node.segment
    return [
        Reading(
            name="kvops_store_segment_bytes", help="Size of the segment.", read=lambda: segment.size_bytes
        ),
        Reading(
            name="kvops_store_populated_bytes",
            help="Memory that is prepared and may be allocated.",
            read=lambda: segment.populated_bytes,
        ),
        Reading(
            name="kvops_store_populate_seconds",
            help="How long preparing all memory took; 0 while it goes on.",
            read=lambda: segment.populate_s,
        ),
        Reading(
            name="kvops_store_elsewhere_bytes",
            help="Memory of the segment on other NUMA nodes than the store's; -1 while not known.",
            read=lambda: -1 if node.elsewhere_bytes is None else node.elsewhere_bytes,
        ),
        Reading(name="kvops_store_used_bytes", help="Memory of slots.", read=lambda: core.used_bytes),
        Reading(name="kvops_store_objects", help="Complete objects.", read=lambda: core.objects),
        Reading(name="kvops_store_connections", help="Open connections.", read=lambda: len(node.connections)),
        Reading(
            name="kvops_store_regions",
            help="Registered memory of writers that the store copies from, by connection.",
            read=lambda: len(node.regions),
        ),
        Reading(
            name="kvops_store_read_bytes_total",
            help="Payload sent to readers over sockets.",
            read=lambda: core.read_bytes_total,
            kind="counter",
        ),
        Reading(
            name="kvops_store_written_bytes_total",
            help="Payload received from writers.",
            read=lambda: core.written_bytes_total,
            kind="counter",
        ),
        Reading(
            name="kvops_store_registered_bytes_total",
            help="Payload copied from writers' registered memory.",
            read=lambda: node.registered_bytes_total,
            kind="counter",
        ),
        Reading(
            name="kvops_store_stale_total",
            help="Reads and writes of generations that are not there.",
            read=lambda: core.stale_total,
            kind="counter",
        ),
    ]

"""Which prefill node gets a request: the one that is expected to give the first token earliest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvops.inference.gpu_model import GpuModel
from kvops.inference.trace import Request

READ_MS_PER_PAGE: Final = 0.1
"""What a page from the pool costs more than one that is in L2 already: breaks the tie for the node that has
it."""


class Router:
    """
    Expected time to first token = wait for the GPU + reads from the pool + GPU time for what nobody has
    computed.

    The wait is what keeps hot prefixes from piling up on one node: as soon as queueing there costs more than
    reading the prefix elsewhere, another node is chosen. Everything is estimated from the requests alone, on
    the trace's clock, so the same trace is routed the same way each time, however fast the machine is.
    """

    def __init__(self, *, nodes: int, l2_pages: int, gpu: GpuModel) -> None:
        self._gpu = gpu
        self._l2_pages = l2_pages
        self._gpu_free_ms = [0.0] * nodes
        self._gpu_busy_ms = [0.0] * nodes  # in all: among equals, the one that had least to do
        self._l2: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(nodes)]

    def choose(self, request: Request, *, seen_pages: int, alive: Sequence[int]) -> int:
        """
        Pick a node, and book the request there.

        Args:
            request: What has arrived.
            seen_pages: How much of its prefix some node has computed before: expected in the pool.
            alive: The nodes to choose from, at least one.
        """
        cached_tokens = request.tokens_of_prefix(seen_pages)
        gpu_ms = self._gpu.prefill_ms(input_tokens=request.input_tokens, cached_tokens=cached_tokens)
        at_ms = request.timestamp_ms

        def cost(node: int) -> tuple[float, float, int]:
            read_pages = max(0, seen_pages - self._held(node, request))
            start_ms = max(self._gpu_free_ms[node], at_ms + READ_MS_PER_PAGE * read_pages)
            return start_ms, self._gpu_busy_ms[node], node

        node = min(alive, key=cost)
        self._gpu_free_ms[node] = cost(node)[0] + gpu_ms
        self._gpu_busy_ms[node] += gpu_ms
        self._remember(node, request)
        return node

    def _held(self, node: int, request: Request) -> int:
        held = self._l2[node]
        return next(
            (i for i, block in enumerate(request.hash_ids) if block not in held), len(request.hash_ids)
        )

    def _remember(self, node: int, request: Request) -> None:
        """As ``HostTier``: deepest page oldest, nothing deeper than the L2."""
        held = self._l2[node]
        for block in reversed(request.hash_ids[: self._l2_pages]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._l2_pages:
            held.popitem(last=False)

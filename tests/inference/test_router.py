"""Which node gets a request."""

from __future__ import annotations

from collections import Counter

from kvops.inference.gpu_model import LLAMA_70B
from kvops.inference.router import Router
from kvops.inference.synth import AGENTIC, generate
from kvops.inference.trace import Request, SeenBlocks


def request(ids: list[int], at_ms: int = 0) -> Request:
    return Request(timestamp_ms=at_ms, input_tokens=512 * len(ids), output_tokens=1, hash_ids=tuple(ids))


def test_a_prefix_stays_where_it_is_while_that_costs_nothing() -> None:
    """The node that holds the pages serves the next turn; another prefix goes to a free node."""
    router = Router(nodes=3, l2_pages=100, gpu=LLAMA_70B)
    home = router.choose(request([1, 2, 3]), seen_pages=0, alive=[0, 1, 2])

    other = router.choose(request([7, 8, 9]), seen_pages=0, alive=[0, 1, 2])

    assert other != home
    assert router.choose(request([1, 2, 3, 4], 60_000), seen_pages=3, alive=[0, 1, 2]) == home
    assert router.choose(request([7, 8, 9, 10], 90_000), seen_pages=3, alive=[0, 1, 2]) == other


def test_a_hot_prefix_spreads_rather_than_queue() -> None:
    """Many requests for one prefix at one time go to every node: the pool serves it anywhere."""
    router = Router(nodes=4, l2_pages=1_000, gpu=LLAMA_70B)
    prefix = list(range(40))
    router.choose(request(prefix), seen_pages=0, alive=[0, 1, 2, 3])

    nodes = Counter(
        router.choose(request([*prefix, 1_000 + i], 60_000), seen_pages=40, alive=[0, 1, 2, 3])
        for i in range(40)
    )

    assert len(nodes) == 4
    assert max(nodes.values()) <= 2 * min(nodes.values())


def test_strangers_are_spread_evenly() -> None:
    """Requests that share nothing and never wait go round, rather than to the first node always."""
    router = Router(nodes=3, l2_pages=1_000, gpu=LLAMA_70B)
    nodes = Counter(
        router.choose(request([10 * i, 10 * i + 1], i * 60_000), seen_pages=0, alive=[0, 1, 2])
        for i in range(30)
    )

    assert nodes == {0: 10, 1: 10, 2: 10}


def test_a_dead_node_gets_nothing() -> None:
    """Only nodes that are alive are chosen, even for prefixes that the dead one held."""
    router = Router(nodes=2, l2_pages=100, gpu=LLAMA_70B)
    home = router.choose(request([1, 2, 3]), seen_pages=0, alive=[0, 1])

    assert router.choose(request([1, 2, 3, 4], 60_000), seen_pages=3, alive=[1 - home]) == 1 - home


def test_the_same_trace_is_routed_the_same_way() -> None:
    """Routing follows from the requests alone: two runs can be compared request by request."""
    requests = list(generate(AGENTIC, requests=300, seed=5))

    def route() -> list[int]:
        router, seen, chosen = Router(nodes=3, l2_pages=500, gpu=LLAMA_70B), SeenBlocks(), []
        for one in requests:
            chosen.append(router.choose(one, seen_pages=seen.prefix(one.hash_ids), alive=[0, 1, 2]))
            seen.add(one.hash_ids)
        return chosen

    assert route() == route()
    assert set(route()) == {0, 1, 2}

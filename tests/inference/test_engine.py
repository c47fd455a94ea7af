"""A prefill node: hits, losses and the time to first token of a request."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvops.errors import ConfigError
from kvops.inference.channel import Done, NodeConfig, Work
from kvops.inference.engine import IN_FLIGHT, PrefillNode, load_factory
from kvops.inference.gpu_model import LLAMA_70B
from kvops.inference.synth import AGENTIC, CHAT, Workload, generate
from kvops.inference.trace import Request, SeenBlocks, describe
from kvops.store.model import Reason

from .pools import MemoryPool


def node_over(pool: MemoryPool, *, l2_pages: int = 16, prefetch: str = "timeout") -> PrefillNode:
    config = NodeConfig(
        node="node-0",
        host="host-0",
        key_prefix="t/",
        page_bytes=64,
        page_tokens=512,
        l2_pages=l2_pages,
        prefetch=prefetch,
        deadline_ms=30_000,  # these pools answer at once, if the machine lets them
        prefetch_ms_max=30_000,
        model="llama-70b",
        pool_factory="",
        pool_options={},
    )
    return PrefillNode(config, pool)


def work(ids: list[int], *, seen: int = 0, settled: int | None = None, at_ms: float = 0.0) -> Work:
    return Work(
        index=0,
        arrival_ms=at_ms,
        input_tokens=len(ids) * 512 - 100,
        hash_ids=ids,
        seen_pages=seen,
        settled_pages=seen if settled is None else settled,
    )


def one_at_a_time(node: PrefillNode, requests: Iterable[Request]) -> list[Done]:
    seen = SeenBlocks()
    done = []
    for index, request in enumerate(requests):
        prefix = seen.prefix(request.hash_ids)
        done.append(
            node.handle(
                Work(
                    index=index,
                    arrival_ms=request.timestamp_ms,
                    input_tokens=request.input_tokens,
                    hash_ids=list(request.hash_ids),
                    seen_pages=prefix,
                    settled_pages=prefix,
                )
            )
        )
        seen.add(request.hash_ids)
    return done


@pytest.mark.parametrize("workload", [CHAT, AGENTIC], ids=lambda workload: workload.name)
@pytest.mark.parametrize("l2_pages", [0, 100])
def test_a_pool_that_forgets_nothing_reaches_the_traces_limit(workload: Workload, l2_pages: int) -> None:
    """
    One node, one request at a time, an unbounded pool: every possible hit is made, nothing is lost, to the
    token.
    """
    requests = list(generate(workload, requests=400, seed=1))

    done = one_at_a_time(node_over(MemoryPool(), l2_pages=l2_pages), requests)

    facts = describe(requests)
    assert sum(one.l2_tokens + one.l3_tokens for one in done) == round(
        facts.token_hit_limit * facts.input_tokens
    )
    assert sum(one.lost_tokens + one.wrong_bytes for one in done) == 0


@pytest.mark.parametrize(
    ("reason", "settled", "expected"),
    [(None, 3, "MISS"), (Reason.STORE_DOWN, 3, "STORE_DOWN"), (None, 1, IN_FLIGHT)],
    ids=["evicted", "store down", "still being computed"],
)
def test_every_lost_token_has_its_reason(reason: Reason | None, settled: int, expected: str) -> None:
    """
    Tokens computed before but not served are lost for the pool's reason, or because they were not ready yet.
    """
    pool = MemoryPool()
    node_over(pool).handle(work([1, 2, 3]))
    if reason is None:
        del pool.objects["t/2"]
    else:
        pool.get_reasons["t/2"] = reason

    done = node_over(pool).handle(work([1, 2, 3, 4], seen=3, settled=settled))

    assert (done.l3_tokens, done.lost_tokens, done.lost_reason) == (512, 1024, expected)


def test_time_to_first_token_is_the_sum_of_its_parts() -> None:
    """Look-up, read, queue and GPU add up; a request waits for the one before it on the trace's clock."""
    node = node_over(MemoryPool())
    first = node.handle(work([1, 2, 3]))
    second = node.handle(work([9, 8], at_ms=1.0))
    later = node.handle(work([1, 2, 3], at_ms=60_000.0))

    for one in (first, second, later):
        assert one.ttft_ms == pytest.approx(one.lookup_ms + one.read_ms + one.queue_ms + one.gpu_ms)
    assert first.gpu_ms == LLAMA_70B.prefill_ms(input_tokens=1436, cached_tokens=0)
    assert second.ttft_ms == pytest.approx(first.ttft_ms - 1.0 + second.gpu_ms)
    assert later.queue_ms == 0
    assert later.gpu_ms < first.gpu_ms


def test_best_effort_reads_only_while_the_gpu_is_busy() -> None:
    """With an idle GPU a request does not wait for the pool at all; behind another one it has time to."""
    pool = MemoryPool()
    node_over(pool).handle(work([1, 2]))

    idle = node_over(pool, prefetch="best_effort").handle(work([1, 2], seen=2))
    busy_node = node_over(pool, prefetch="best_effort")
    busy_node.handle(work([7, 8, 9]))
    busy = busy_node.handle(work([1, 2], seen=2))

    assert (idle.l3_tokens, idle.lost_reason) == (0, "TIMEOUT")
    assert (busy.l3_tokens, busy.lost_tokens) == (924, 0)


@pytest.mark.parametrize("name", ["", "kvops", "kvops.nothing:x", "kvops.errors:nothing"])
def test_a_pool_factory_that_does_not_exist_is_named(name: str) -> None:
    """The error says which name was meant and how one looks."""
    with pytest.raises(ConfigError, match="module:function"):
        load_factory(name)

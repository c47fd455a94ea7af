"""Generated traces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.inference.synth import AGENTIC, CHAT, WORKLOADS, Workload, generate
from kvops.inference.trace import BLOCK_TOKENS, describe


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@given(seed=st.integers(0, 1 << 64), count=st.integers(1, 60))
@settings(max_examples=15)
def test_the_same_seed_gives_the_same_trace_and_a_longer_one_goes_on(
    workload: Workload, seed: int, count: int
) -> None:
    """
    A run can be repeated from its seed, also with more requests; time never goes back; IDs fit the lengths.
    """
    short = list(generate(workload, requests=count, seed=seed))
    longer = list(generate(workload, requests=count + 20, seed=seed))

    assert short == longer[:count]
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in itertools.pairwise(longer))
    for request in longer:
        assert len(request.hash_ids) == -(-request.input_tokens // BLOCK_TOKENS)
        assert len(set(request.hash_ids)) == len(request.hash_ids)


def test_an_id_stands_for_everything_before_it() -> None:
    """Equal IDs at a position mean equal IDs before it: otherwise hits would be invented."""
    before: dict[int, tuple[int, ...]] = {}
    for request in generate(AGENTIC, requests=400, seed=3):
        for index, block in enumerate(request.hash_ids):
            assert before.setdefault(block, request.hash_ids[:index]) == request.hash_ids[:index]


def test_chat_looks_like_the_published_conversation_trace() -> None:
    """
    Rate, lengths and the share that repeats lie near the published figures: 3.4 a second, 12,035, 343, 0.374.
    """
    facts = describe(list(generate(CHAT, requests=12_000, seed=1)))

    assert facts.requests / facts.span_s == pytest.approx(3.4, rel=0.1)
    assert facts.input_tokens_mean == pytest.approx(12_035, rel=0.1)
    assert facts.output_tokens_mean == pytest.approx(343, rel=0.1)
    assert facts.token_hit_limit == pytest.approx(0.374, abs=0.03)


def test_agents_repeat_nearly_everything() -> None:
    """Tool loops resend their whole prefix each turn, which is what makes a pool pay."""
    assert describe(list(generate(AGENTIC, requests=2_000, seed=1))).token_hit_limit > 0.9

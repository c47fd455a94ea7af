"""The GPU time model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.inference.gpu_model import LLAMA_8B, LLAMA_70B, MODELS, GpuModel


def test_weights_are_those_of_the_real_models() -> None:
    """The linear layers hold what the model cards' totals leave after embedding and vocabulary."""
    embeddings = 2 * 128_256

    assert LLAMA_70B.weights + embeddings * LLAMA_70B.hidden == pytest.approx(70.55e9, rel=0.001)
    assert LLAMA_8B.weights + embeddings * LLAMA_8B.hidden == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@given(tokens=st.integers(1, 200_000), share=st.floats(0, 1), more=st.floats(0, 1))
def test_cached_tokens_only_ever_save_time(model: GpuModel, tokens: int, share: float, more: float) -> None:
    """More of the prompt cached is never slower, and a request always costs something."""
    some = int(tokens * share)
    larger = some + int((tokens - some) * more)

    first = model.prefill_ms(input_tokens=tokens, cached_tokens=some)
    second = model.prefill_ms(input_tokens=tokens, cached_tokens=larger)

    assert first >= second > 0


@given(parts=st.lists(st.integers(1, 5_000), min_size=1, max_size=6))
def test_work_adds_up_over_pieces(parts: list[int]) -> None:
    """
    Prefilling in pieces is as many operations as in one go: what a cache saves is exactly the cached part.
    """
    done = 0
    flop = 0.0
    for part in parts:
        flop += LLAMA_70B.prefill_flop(cached_tokens=done, new_tokens=part)
        done += part

    assert flop == pytest.approx(LLAMA_70B.prefill_flop(cached_tokens=0, new_tokens=done))

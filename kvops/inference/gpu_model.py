"""
How long a GPU node would compute for a prefill: the one figure of a replay that is modelled, not measured.

Work of a decoder-only transformer for ``new`` tokens behind ``cached`` ones, in floating-point operations:

* linear layers: 2 per weight and token. Llama 3.1 70B has, in each of 80 layers, query and output projections
  of 8192 × 8192, key and value of 8192 × 1024 (8 of 64 heads), and three MLP matrices of 8192 × 28672: 855.6
  M weights. The embedding is a look-up, and the vocabulary's matrix is needed for the last token alone: both
  left out.
* attention: a query meets every earlier key and itself, 4 × heads × head_dim per pair and layer (two for QKᵀ,
  two for PV). Pairs: ``new × cached + new × (new + 1) / 2``, causally.

Sources: layers, hidden sizes and heads from the model cards' ``config.json`` (meta-llama/Llama-3.1-70B and
-8B); peak of an H100 SXM, 989.4 TFLOPS BF16 dense and 3.35 TB/s of HBM3, from NVIDIA's H100 data sheet; the
share of the peak that is reached, 0.40, from "The Llama 3 Herd of Models", table 4 (38 to 43 % BF16 MFU on
H100, in training, whose forward pass is the same matrix products). Communication between the eight GPUs is
inside that share.

A prefill never takes less than reading all weights once from HBM. At least one token is computed, even when
every block was cached: its logits give the first output token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A model on the GPUs of one prefill node."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    gpus: int
    peak_flops: float = 989.4e12  # of one GPU, a second
    memory_bytes_per_s: float = 3.35e12  # of one GPU
    utilisation: float = 0.40  # share of the peak that a prefill reaches
    weight_bytes: int = 2  # BF16

    @property
    def weights(self) -> int:
        """Weights in the linear layers that every token passes."""
        kv_hidden = self.hidden * self.kv_heads // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv_hidden
        return self.layers * (attention + 3 * self.hidden * self.mlp_hidden)

    def prefill_flop(self, *, cached_tokens: int, new_tokens: int) -> float:
        """Floating-point operations for ``new_tokens`` behind ``cached_tokens``."""
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        return 2.0 * self.weights * new_tokens + 4.0 * self.hidden * self.layers * pairs

    def prefill_ms(self, *, input_tokens: int, cached_tokens: int) -> float:
        """
        Milliseconds of GPU time for a request.

        Args:
            input_tokens: Length of the prompt, above 0.
            cached_tokens: How much of it, from the start, is already in memory.
        """
        assert 0 <= cached_tokens <= input_tokens
        new_tokens = max(1, input_tokens - cached_tokens)
        flop = self.prefill_flop(cached_tokens=input_tokens - new_tokens, new_tokens=new_tokens)
        compute_s = flop / (self.gpus * self.peak_flops * self.utilisation)
        weights_s = self.weights * self.weight_bytes / (self.gpus * self.memory_bytes_per_s)
        return 1000.0 * max(compute_s, weights_s)


LLAMA_70B: Final = GpuModel(
    name="llama-3.1-70b on 8 H100", layers=80, hidden=8192, heads=64, kv_heads=8, mlp_hidden=28672, gpus=8
)
LLAMA_8B: Final = GpuModel(
    name="llama-3.1-8b on 1 H100", layers=32, hidden=4096, heads=32, kv_heads=8, mlp_hidden=14336, gpus=1
)
MODELS: Final = {"llama-70b": LLAMA_70B, "llama-8b": LLAMA_8B}

"""
What chaos clients are asked: seeded requests of short sessions, each with the engine that will serve it.

The same seed gives the same requests at the same moments on the same engines, whatever the arm: that is what
makes two requests twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from kvops.inference.gpu_model import LLAMA_8B, GpuModel
from kvops.inference.router import Router
from kvops.inference.synth import LogNormal, Workload, generate
from kvops.inference.trace import Request, SeenBlocks

GPU: Final[GpuModel] = LLAMA_8B
PRELUDE_S: Final = 12.0
"""Left out at the start: sessions begin one after another, and load is even only once the first have ended."""

AGENTIC_PREFIX: Final = Workload(
    name="agentic-prefix",
    # Tool loops as in synth.AGENTIC, with prompts a tenth as long: a window of ten seconds then sees whole sessions,
    # and one small machine carries the bytes. No published trace.
    requests_per_s=1.0,
    turns_mean=7.0,
    system_prompts=(1_024,) * 12,
    first_message=LogNormal(median=450, sigma=0.6, least=50, most=2_000),
    next_message=LogNormal(median=200, sigma=0.6, least=20, most=800),
    output=LogNormal(median=60, sigma=0.5, least=10, most=200),
    think_s_mean=1.2,
    think_s_least=0.3,
)
CHAT_PREFIX: Final = replace(
    AGENTIC_PREFIX,
    name="chat-prefix",
    turns_mean=2.0,
    system_prompts=(512,) * 6,
    first_message=LogNormal(median=1_500, sigma=0.6, least=100, most=4_000),
)
PROFILES: Final = {one.name: one for one in (AGENTIC_PREFIX, CHAT_PREFIX)}


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One request, before it is sent."""

    request: str  # its name; the same in every arm
    at_s: float  # intended, after the start of the stretch
    engine: int
    input_tokens: int
    hash_ids: list[int]
    seen_blocks: int  # of its prefix: some request of this stretch has computed them before


def schedule(
    profile: str, *, rps: float, duration_s: float, engines: int, l2_pages: int, seed: int, prefix: str = ""
) -> list[Planned]:
    """
    Requests of one group for one stretch, in the order of their moments.

    Args:
        profile: A name of ``PROFILES``.
        rps: Requests a second, over all engines.
        duration_s: Length of the stretch.
        engines: Of the group.
        l2_pages: Of each engine, as the router believes.
        seed: Decides everything.
        prefix: Of the requests' names: two groups' must differ.
    """
    workload = replace(PROFILES[profile], requests_per_s=rps)
    begin_ms, end_ms = PRELUDE_S * 1000, (PRELUDE_S + duration_s) * 1000
    router = Router(nodes=engines, l2_pages=l2_pages, gpu=GPU)
    routed, seen = SeenBlocks(), SeenBlocks()
    planned: list[Planned] = []
    count = max(
        16, round(4 * rps * (PRELUDE_S + duration_s))
    )  # more than enough; the end is a moment, not a count
    for number, request in enumerate(generate(workload, requests=count, seed=seed)):
        if request.timestamp_ms >= end_ms:
            break
        engine = router.choose(request, seen_pages=routed.prefix(request.hash_ids), alive=range(engines))
        routed.add(request.hash_ids)
        if request.timestamp_ms < begin_ms:
            continue
        at_s = (request.timestamp_ms - begin_ms) / 1000
        planned.append(_planned(f"{prefix}r{number}", request, engine, at_s=at_s, seen=seen))
        seen.add(request.hash_ids)
    return planned


def load_share(planned: Sequence[Planned], *, engines: int, duration_s: float) -> float:
    """Offered load in proportion to what the engines' GPUs could do without any cache."""
    busy_ms = sum(GPU.prefill_ms(input_tokens=one.input_tokens, cached_tokens=0) for one in planned)
    return busy_ms / 1000 / (engines * duration_s)


def _planned(name: str, request: Request, engine: int, *, at_s: float, seen: SeenBlocks) -> Planned:
    return Planned(
        request=name,
        at_s=at_s,
        engine=engine,
        input_tokens=request.input_tokens,
        hash_ids=list(request.hash_ids),
        seen_blocks=seen.prefix(request.hash_ids),
    )

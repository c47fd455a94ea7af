"""Seeded request traces, made of sessions whose prompts grow from turn to turn."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvops.inference.trace import BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A length in tokens: half of the draws are below ``median``; ``sigma`` is of the logarithm."""

    median: float
    sigma: float
    least: int = 1
    most: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return min(self.most, max(self.least, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What requests are like; every length in tokens."""

    name: str
    requests_per_s: float
    turns_mean: float  # of a session; geometric, at least one
    system_prompts: tuple[int, ...]  # lengths; the first is the most popular, the n-th 1/n as popular
    first_message: LogNormal
    next_message: LogNormal  # a user's answer, or a tool's result
    output: LogNormal
    think_s_mean: float  # between a turn's arrival and the next one's, exponential
    think_s_least: float
    context_tokens_max: int = 128_000  # a session that would pass it ends


CHAT: Final = Workload(
    name="synth",
    # Set so that requests look like the published conversation trace: 12,031 requests in 3,537 s, six of ten
    # open a session, mean input 12,035 tokens and output 343, 0.37 of all tokens shared with an earlier
    # request.
    requests_per_s=3.4,
    turns_mean=1.65,
    system_prompts=(560,),
    first_message=LogNormal(median=4_600, sigma=1.25, least=100, most=120_000),
    next_message=LogNormal(median=500, sigma=1.3, least=10, most=60_000),
    output=LogNormal(median=255, sigma=0.8, least=3, most=2_000),
    think_s_mean=60.0,
    think_s_least=5.0,
)
AGENTIC: Final = Workload(
    name="agentic",
    # Tool loops: a long system prompt with the tools' schemas, many short turns seconds apart, each adding
    # the model's call and the tool's result. Nearly everything repeats. An assumption of ours, no published
    # trace.
    requests_per_s=4.0,
    turns_mean=14.0,
    system_prompts=(9_300, 6_100, 12_700, 4_000),
    first_message=LogNormal(median=900, sigma=1.0, least=50, most=30_000),
    next_message=LogNormal(median=700, sigma=1.1, least=20, most=30_000),
    output=LogNormal(median=140, sigma=0.7, least=10, most=2_000),
    think_s_mean=4.0,
    think_s_least=1.0,
)
WORKLOADS: Final = {workload.name: workload for workload in (CHAT, AGENTIC)}


class _Ids:
    """Block IDs in the order they are first needed."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        start = self._next
        self._next += count
        return list(range(start, self._next))


@dataclass(slots=True)
class _Session:
    rng: random.Random
    turns_left: int
    context_tokens: int  # the prompt of the next request
    blocks: list[int] = field(default_factory=list)  # full blocks that have an ID already

    def request(self, at_ms: int, output_tokens: int, ids: _Ids) -> Request:
        """The next request. Full blocks keep their IDs; a partial last one is new each time, as its text
        grows.
        """
        full, rest = divmod(self.context_tokens, BLOCK_TOKENS)
        self.blocks += ids.take(full - len(self.blocks))
        tail = ids.take(1) if rest else []
        return Request(
            timestamp_ms=at_ms,
            input_tokens=self.context_tokens,
            output_tokens=output_tokens,
            hash_ids=tuple(self.blocks + tail),
        )


def generate(workload: Workload, *, requests: int, seed: int) -> Iterator[Request]:
    """
    Make a trace: sessions arrive at random (Poisson), their turns follow each other, in order of time.

    The same workload and seed give the same trace, whatever ``requests``: a longer one only goes on.
    """
    arrivals = random.Random(f"{workload.name}/{seed}/arrivals")
    ids = _Ids()
    prompts = [ids.take(tokens // BLOCK_TOKENS) for tokens in workload.system_prompts]
    popularity = [1 / rank for rank in range(1, len(prompts) + 1)]
    session_gap_s = workload.turns_mean / workload.requests_per_s
    queue: list[
        tuple[float, int, _Session]
    ] = []  # (time in s, number, session); numbers differ: no tie reaches it
    next_session_s, sessions, made = 0.0, 0, 0
    while made < requests:
        while not queue or next_session_s <= queue[0][0]:
            rng = random.Random(f"{workload.name}/{seed}/{sessions}")
            heapq.heappush(
                queue, (next_session_s, sessions, _open_session(workload, rng, prompts, popularity))
            )
            sessions += 1
            next_session_s += arrivals.expovariate(1 / session_gap_s)
        at_s, number, session = heapq.heappop(queue)
        output_tokens = workload.output.draw(session.rng)
        yield session.request(round(at_s * 1000), output_tokens, ids)
        made += 1
        session.turns_left -= 1
        session.context_tokens += output_tokens + workload.next_message.draw(session.rng)
        if session.turns_left and session.context_tokens <= workload.context_tokens_max:
            pause_s = session.rng.expovariate(1 / (workload.think_s_mean - workload.think_s_least))
            heapq.heappush(queue, (at_s + workload.think_s_least + pause_s, number, session))


def _open_session(
    workload: Workload, rng: random.Random, prompts: list[list[int]], popularity: list[float]
) -> _Session:
    which = rng.choices(range(len(prompts)), popularity)[0]
    context_tokens = workload.system_prompts[which] + workload.first_message.draw(rng)
    # Geometric with the wanted mean, at least one turn.
    turns = 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / workload.turns_mean))
    return _Session(
        rng=rng,
        turns_left=turns,
        context_tokens=min(context_tokens, workload.context_tokens_max),
        blocks=list(prompts[which]),
    )

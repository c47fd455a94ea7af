"""Request traces in Mooncake's open format: one JSON object a line, a block ID for every 512 input tokens."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np

from kvops.errors import ParseError
from kvops.inference.outfile import whole_file

BLOCK_TOKENS: Final = 512
"""Input tokens of one block. Source: the README of the published traces (Mooncake, FAST'25 release)."""
INPUT_TOKENS_MAX: Final = 16 * 1024 * 1024
BLOCK_ID_MAX: Final = (1 << 63) - 1
LINE_BYTES_MAX: Final = 4 << 20
REQUESTS_MAX: Final = 5_000_000  # of one replay: the results' rows are allocated at its start


_FIELDS: Final = {
    "timestamp_ms": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
}


class Request(msgspec.Struct, frozen=True, rename=_FIELDS):
    """
    One line of a trace.

    A block ID stands for its 512 tokens and everything before them, so two requests share exactly the blocks
    at the start of which their ``hash_ids`` agree. The last block may be partial: ``input_tokens`` counts.
    """

    timestamp_ms: int  # arrival, after the trace's start
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    def tokens_of_prefix(self, blocks: int) -> int:
        """Input tokens in the first ``blocks`` blocks; the last block may be partial."""
        return min(blocks * BLOCK_TOKENS, self.input_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """What a trace contains, and the most that any cache could serve of it."""

    requests: int
    span_s: float
    input_tokens: int
    input_tokens_mean: float
    input_tokens_p50: int
    input_tokens_p99: int
    input_tokens_max: int
    output_tokens_mean: float
    blocks: int
    distinct_blocks: int
    block_hit_limit: float  # of an unbounded cache, one request at a time
    token_hit_limit: float


_DECODER: Final = msgspec.json.Decoder(Request)
_ENCODER: Final = msgspec.json.Encoder()


def blocks_of(input_tokens: int) -> int:
    """How many blocks hold so many input tokens."""
    return -(-input_tokens // BLOCK_TOKENS)


def parse_request(line: bytes | str, *, where: str) -> Request:
    """
    Read one line.

    Args:
        line: One JSON object; fields we do not know are ignored.
        where: File and line for the error, such as ``trace.jsonl:17``.

    Raises:
        ParseError: It is no such object, or its numbers contradict each other.
    """
    try:
        request = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        fix = (
            "a line is {timestamp, input_length, output_length, hash_ids}; a cut last line is a cut download"
        )
        raise ParseError(f"{where}: not a request of a trace: {error}", fix=fix) from None
    wrong = _contradiction(request)
    if wrong:
        fix = f"a block is {BLOCK_TOKENS} tokens; convert a trace that was made for another block size"
        raise ParseError(f"{where}: {wrong}", fix=fix)
    return request


def _contradiction(request: Request) -> str:
    if request.timestamp_ms < 0 or request.output_tokens < 0:
        return "timestamp and output_length must not be negative"
    if not 0 < request.input_tokens <= INPUT_TOKENS_MAX:
        return f"input_length {request.input_tokens} is not within 1 … {INPUT_TOKENS_MAX}"
    ids = request.hash_ids
    if len(ids) != blocks_of(request.input_tokens):
        wanted = blocks_of(request.input_tokens)
        return f"{request.input_tokens} input tokens are {wanted} blocks, but hash_ids has {len(ids)}"
    if min(ids) < 0 or max(ids) > BLOCK_ID_MAX:
        return "a hash ID is negative or needs more than 63 bits"
    if len(set(ids)) != len(ids):
        return "a hash ID appears twice in one request, though it stands for everything before it"
    return ""


def iter_requests(stream: IO[bytes], *, name: str) -> Iterator[Request]:
    """
    Read a trace line by line; blank lines are skipped.

    Raises:
        ParseError: A line is no request, is too long, or is earlier than the one before it.
    """
    number = 0
    earlier_ms = 0
    while True:
        line = stream.readline(LINE_BYTES_MAX + 1)
        if not line:
            return
        number += 1
        where = f"{name}:{number}"
        if len(line) > LINE_BYTES_MAX:
            raise ParseError(
                f"{where}: longer than {LINE_BYTES_MAX} bytes", fix="a trace has one request a line"
            )
        if line.isspace():
            continue
        request = parse_request(line, where=where)
        if request.timestamp_ms < earlier_ms:
            what = f"{where}: timestamp {request.timestamp_ms} is before {earlier_ms} of the line above"
            raise ParseError(what, fix="sort the trace by timestamp")
        earlier_ms = request.timestamp_ms
        yield request


def read_trace(path: str, *, requests: int | None = None) -> list[Request]:
    """
    Read a trace file, or standard input for ``-``.

    Args:
        path: The file.
        requests: Stop after so many: what lies behind them is not read, so it cannot be wrong.

    Raises:
        ParseError: A line is wrong (names it), the file cannot be read, or it holds no request at all.
    """
    name = "standard input" if path == "-" else path
    limit = REQUESTS_MAX + 1 if requests is None else min(requests, REQUESTS_MAX)
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as stream:
            found = list(itertools.islice(iter_requests(stream, name=name), limit))
    except OSError as error:
        fix = "name a readable trace, or generate one: kvops workload synth --output trace.jsonl"
        raise ParseError(f"{name}: cannot be read: {error.strerror}", fix=fix) from None
    if len(found) > REQUESTS_MAX:
        fix = f"replay a part of it: --requests N, at most {REQUESTS_MAX}"
        raise ParseError(f"{name}: more than {REQUESTS_MAX} requests", fix=fix)
    if not found:
        raise ParseError(
            f"{name}: no request in it", fix="generate one: kvops workload synth --output trace.jsonl"
        )
    return found


def write_trace(path: str, requests: Iterable[Request]) -> int:
    """
    Write a trace to a file, whole or not at all, or to standard output for ``-``; returns how many requests.

    Raises:
        UsageError: The file cannot be written.
    """
    if path == "-":
        return _write(sys.stdout.buffer, requests)
    with whole_file(path, what="the trace") as stream:
        return _write(stream, requests)


def _write(stream: IO[bytes], requests: Iterable[Request]) -> int:
    count = 0
    for request in requests:
        stream.write(_ENCODER.encode(request) + b"\n")
        count += 1
    stream.flush()
    return count


class SeenBlocks:
    """
    What a cache that never forgets would hold: the yardstick for every hit and every loss.

    ``prefix`` and ``add`` in trace order give the trace's own limit.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def prefix(self, ids: Sequence[int]) -> int:
        """How many blocks from the start have been added."""
        known = self._ids
        for index, block in enumerate(ids):
            if block not in known:
                return index
        return len(ids)

    def add(self, ids: Iterable[int]) -> None:
        """These blocks have been computed."""
        self._ids.update(ids)


def describe(requests: Sequence[Request]) -> TraceFacts:
    """
    Count what a trace contains.

    The limits are those of an unbounded cache that sees one request at a time: 0.3736 of the tokens for the
    published conversation trace, 0.6512 for the synthetic one.
    """
    assert requests, "a trace has at least one request"
    seen = SeenBlocks()
    hit_blocks = hit_tokens = blocks = 0
    for request in requests:
        prefix = seen.prefix(request.hash_ids)
        seen.add(request.hash_ids)
        blocks += len(request.hash_ids)
        hit_blocks += prefix
        hit_tokens += request.tokens_of_prefix(prefix)
    inputs = np.array([request.input_tokens for request in requests])
    return TraceFacts(
        requests=len(requests),
        span_s=(requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000,
        input_tokens=int(inputs.sum()),
        input_tokens_mean=float(inputs.mean()),
        input_tokens_p50=int(np.percentile(inputs, 50)),
        input_tokens_p99=int(np.percentile(inputs, 99)),
        input_tokens_max=int(inputs.max()),
        output_tokens_mean=float(np.mean([request.output_tokens for request in requests])),
        blocks=blocks,
        distinct_blocks=len(seen),
        block_hit_limit=hit_blocks / blocks,
        token_hit_limit=hit_tokens / int(inputs.sum()),
    )

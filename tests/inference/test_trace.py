"""Reading and writing request traces."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ParseError, UsageError
from kvops.inference.trace import (
    BLOCK_TOKENS,
    Request,
    describe,
    iter_requests,
    parse_request,
    read_trace,
    write_trace,
)

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}


def line(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def test_a_published_line_is_read() -> None:
    """The fields carry the published names; unknown ones, as other traces have, are ignored."""
    request = parse_request(line(session="x"), where="t:1")

    assert request == Request(timestamp_ms=5, input_tokens=700, output_tokens=3, hash_ids=(0, 7))
    assert [request.tokens_of_prefix(n) for n in (0, 1, 2)] == [0, 512, 700]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"timestamp": 1, "input_le', "not a request"),
        (b"[1, 2]", "not a request"),
        (b'{"prompt": "hello"}', "not a request"),
        (line(input_length="700"), "not a request"),
        (line(hash_ids=[0]), "2 blocks, but hash_ids has 1"),
        (line(hash_ids=[]), "2 blocks, but hash_ids has 0"),
        (line(input_length=0, hash_ids=[]), "input_length 0"),
        (line(timestamp=-1), "negative"),
        (line(hash_ids=[0, -1]), "negative"),
        (line(hash_ids=[0, 1 << 63]), "not a request|63 bits"),
        (line(hash_ids=[4, 4]), "twice"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place(text: bytes, says: str) -> None:
    """
    A truncated, foreign or contradictory line names file and line, what is wrong with it and what to do.
    """
    stream = io.BytesIO(line() + b"\n\n" + text + b"\n")

    with pytest.raises(ParseError, match=rf"^trace\.jsonl:3: .*({says})") as caught:
        list(iter_requests(stream, name="trace.jsonl"))
    assert caught.value.fix


def test_time_goes_forward_only() -> None:
    """Lines out of order would give nonsense for every tier: refused, with the line."""
    stream = io.BytesIO(line() + b"\n" + line(timestamp=4))

    with pytest.raises(ParseError, match="t:2: timestamp 4 is before 5"):
        list(iter_requests(stream, name="t"))


def test_requests_behind_the_wanted_ones_are_not_looked_at(tmp_path: Path) -> None:
    """A cut download can still be replayed up to the cut."""
    path = tmp_path / "cut.jsonl"
    path.write_bytes(line() + b"\n" + line(timestamp=9) + b"\n" + line()[:20])

    assert [request.timestamp_ms for request in read_trace(str(path), requests=2)] == [5, 9]
    with pytest.raises(ParseError, match=r"cut.jsonl:3"):
        read_trace(str(path))


@pytest.mark.parametrize("content", [None, b"", b"\n\n"], ids=["missing", "empty", "blank"])
def test_no_trace_is_an_error_with_a_way_out(tmp_path: Path, content: bytes | None) -> None:
    """A missing or empty file says so and names the command that makes one."""
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ParseError, match="kvops workload synth"):
        read_trace(str(path))


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_line_gives_a_request_or_a_parse_error(text: bytes | str) -> None:
    """No input gets any other exception out of the parser."""
    try:
        request = parse_request(text, where="t:1")
    except ParseError:
        return
    assert len(request.hash_ids) == -(-request.input_tokens // BLOCK_TOKENS)


@given(
    st.lists(
        st.builds(
            lambda at, tokens, out, first: Request(
                timestamp_ms=at,
                input_tokens=tokens,
                output_tokens=out,
                hash_ids=tuple(range(first, first - (-tokens // BLOCK_TOKENS))),
            ),
            st.integers(0, 1 << 40),
            st.integers(1, 5_000),
            st.integers(0, 5_000),
            st.integers(0, 1 << 40),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, made: list[Request]) -> None:
    """Writing and reading a trace changes nothing."""
    made.sort(key=lambda request: request.timestamp_ms)
    path = str(tmp_path_factory.mktemp("trace") / "t.jsonl")

    assert write_trace(path, made) == len(made)
    assert read_trace(path) == made


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """Half a trace would look like a whole one: it appears complete or not at all."""

    def broken() -> Any:
        yield parse_request(line(), where="t")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(str(tmp_path / "t.jsonl"), broken())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(str(tmp_path / "file" / "t.jsonl"), [])


def test_the_limits_count_tokens_of_contiguous_prefixes() -> None:
    """
    A block counts as a hit only when all before it were seen, and a partial last block with its own tokens.
    """
    requests = [
        Request(timestamp_ms=0, input_tokens=1_000, output_tokens=1, hash_ids=(0, 1)),
        Request(timestamp_ms=1, input_tokens=1_000, output_tokens=1, hash_ids=(0, 1)),
        Request(timestamp_ms=2, input_tokens=1_536, output_tokens=1, hash_ids=(0, 2, 1)),
    ]

    facts = describe(requests)

    assert facts.token_hit_limit == (1_000 + 512) / 3_536
    assert facts.block_hit_limit == 3 / 7
    assert facts.distinct_blocks == 3

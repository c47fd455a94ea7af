"""Lists of names as people write them: commas, repeats and ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kvops.errors import ParseError

LIST_ITEMS_MAX: Final = 10_000

_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def split_list(texts: Iterable[str]) -> list[str]:
    """
    Items of repeated options, commas and ranges: ``a,gpu-[001-003,7]`` gives a, gpu-001, gpu-002, gpu-003,
    gpu-7.

    Order is kept, a repeated item counts once.

    Raises:
        ParseError: A bracket is not closed, a range runs backwards, or the list is too long.
    """
    items: dict[str, None] = {}
    for text in texts:
        for part in _split_commas(text):
            for item in _expand(part):
                items[item] = None
                if len(items) > LIST_ITEMS_MAX:
                    raise ParseError(f"{text!r} names more than {LIST_ITEMS_MAX} items", fix="name fewer")
    return list(items)


def _split_commas(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth != 0:
        raise ParseError(f"brackets of {text!r} do not match", fix="write ranges like gpu-[001-040]")
    return [part.strip() for part in parts if part.strip()]


def _expand(part: str) -> Iterable[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise ParseError(f"{piece!r} in {part!r} is not a range", fix="write ranges like gpu-[001-040]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ParseError(
                f"range {piece!r} in {part!r} runs backwards", fix="the smaller number comes first"
            )
        if int(last) - int(first) >= LIST_ITEMS_MAX:
            raise ParseError(f"{piece!r} names more than {LIST_ITEMS_MAX} items", fix="name fewer")
        for number in range(int(first), int(last) + 1):
            # The first number says how wide: 001 counts 001, 002, …
            for tail in _expand(after):
                yield f"{before}{number:0{len(first)}d}{tail}"

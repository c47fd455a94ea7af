"""Reads /metrics of a pool: how fast it moves bytes, how long first tokens take."""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvops.errors import UsageError

PAGE_BYTES_MAX = 8 << 20
TIMEOUT_S = 2.0
URLS_MAX = 64

# ``name{labels} value``: the text format of Prometheus, which OpenMetrics keeps for these lines.
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]{0,200})(?:\{.{0,4000}\})? ([-+.0-9a-zA-Z]{1,40})(?: |$)")
_MOVED = re.compile(r"^kvops_store_(?:read|written)_bytes_total$")
# kvops', vLLM's and SGLang's histograms of the time to the first token.
_FIRST = re.compile(r"(?:time_to_first_token|ttft)(_ms|_seconds|_milliseconds)?_(sum|count)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counters so far, summed over all pages that answered; None where no page has them."""

    moved_bytes: float | None = None
    first_token_s: float | None = None
    first_tokens: float | None = None
    unseen: tuple[str, ...] = ()


def parse(text: str) -> dict[str, float]:
    """Sums over all labels, by name; lines that are no samples are passed over."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            found[match[1]] = found.get(match[1], 0.0) + value
    return found


def totals(pages: Iterable[Mapping[str, float]], unseen: Iterable[str] = ()) -> Totals:
    """What matters of pages that were parsed."""
    moved: float | None = None
    seconds: float | None = None
    count: float | None = None
    for page in pages:
        for name, value in page.items():
            if _MOVED.match(name):
                moved = (moved or 0.0) + value
            match = _FIRST.search(name)
            if match is not None and match[2] == "count":
                count = (count or 0.0) + value
            elif match is not None:
                seconds = (seconds or 0.0) + (value / 1000 if (match[1] or "").startswith("_m") else value)
    return Totals(moved_bytes=moved, first_token_s=seconds, first_tokens=count, unseen=tuple(unseen))


def checked_urls(texts: Iterable[str]) -> list[str]:
    """``host:port`` and URLs as URLs of /metrics. Raises UsageError."""
    found = []
    for text in texts:
        url = text if "://" in text else f"http://{text}"
        match = re.fullmatch(r"(https?)://[^/?#\s@]+(/\S*)?", url)
        if match is None:
            raise UsageError(f"{text!r} is no address of metrics", fix="write http://HOST:PORT/metrics")
        found.append(url if match[2] not in (None, "/") else url.rstrip("/") + "/metrics")
    if len(found) > URLS_MAX:
        raise UsageError(f"{len(found)} addresses of metrics", fix=f"name at most {URLS_MAX}")
    return list(dict.fromkeys(found))


def scrape(urls: Iterable[str]) -> Totals:
    """Ask each page once; one that does not answer is named, and holds up nothing beyond TIMEOUT_S."""
    pages, unseen = [], []
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http and https alone
                pages.append(parse(answer.read(PAGE_BYTES_MAX).decode("utf-8", "replace")))
        except (OSError, ValueError, urllib.error.URLError) as error:
            unseen.append(f"{url}: {getattr(error, 'reason', None) or error}")
    return totals(pages, unseen)

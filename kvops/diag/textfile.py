"""Outcomes and rates for node-exporter's textfile folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvops.diag.model import Result
from kvops.errors import ConfigError


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write(
    path: Path, results: Iterable[Result], rates: Mapping[str, tuple[float, float]] | None = None
) -> None:
    """
    Write gauges beside their place and move them there, so that nobody reads a half.

    Args:
        path: Should end in ``.prom``, or node-exporter passes it over.
        results: What is not well becomes a gauge of 1.
        rates: Port → bits a second (sent, received).

    Raises:
        ConfigError: It cannot be written.
    """
    lines = [
        "# HELP kvops_diag_check_outcome 1 for the outcome that the check has.",
        "# TYPE kvops_diag_check_outcome gauge",
    ]
    lines += [
        f'kvops_diag_check_outcome{{check="{r.check}",node="{_label(r.node)}",outcome="{r.outcome}"}} 1'
        for r in results
        if r.outcome in ("fail", "warn", "unknown")
    ]
    if rates:
        lines += [
            "# HELP kvops_diag_port_bits_per_second Traffic of an RDMA port over the last window.",
            "# TYPE kvops_diag_port_bits_per_second gauge",
        ]
        for port, pair in rates.items():
            lines += [
                f'kvops_diag_port_bits_per_second{{port="{_label(port)}",direction="{way}"}} {value:.0f}'
                for way, value in zip(("sent", "received"), pair, strict=True)
            ]
    new = path.with_name(path.name + ".new")
    try:
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", fix="make its folder writable") from error

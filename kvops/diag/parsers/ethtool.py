"""Parsers of ethtool's text."""

from __future__ import annotations

import re

from kvops.diag.parsers.sysfs import bad


def parse_stats(text: str) -> dict[str, int]:
    """
    Read ``ethtool -S``: ``     name: value`` lines. Names may hold blanks (third-generation irdma).

    Raises:
        ParseError: There is no counter at all.
    """
    stats: dict[str, int] = {}
    for line in text.splitlines():
        name, colon, value = line.rpartition(":")
        value = value.strip()
        if colon and value.isascii() and value.isdigit() and len(value) <= 20:
            stats[name.strip()] = int(value)
    if not stats:
        raise bad("ethtool -S", text)
    return stats


def parse_labels(text: str) -> dict[str, str]:
    """
    Read ``Label: value`` lines (``-i``, ``-a``, ``-k``, ``--show-fec``, ``--show-eee``), labels in lower
    case.
    """
    labels: dict[str, str] = {}
    for line in text.splitlines():
        label, colon, value = line.partition(":")
        if colon and label.strip():
            labels.setdefault(label.strip().lower(), value.strip())
    if not labels:
        raise bad("ethtool", text)
    return labels


def is_on(labels: dict[str, str], label: str) -> bool | None:
    """Whether ``Label: on`` stands there; None if the label is missing."""
    value = labels.get(label)
    return None if value is None else bool(re.match(r"on\b|enabled\b|yes\b", value))

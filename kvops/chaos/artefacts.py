"""The files beside a run's history: its report for people, programs, CI and the Chaos Toolkit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvops.chaos.history import RunRecord
from kvops.chaos.verdict import Judgement
from kvops.files import write_private

if TYPE_CHECKING:
    from kvops.chaos.report.compare import Side

PAGE: Final = "report.html"
COMPARISON: Final = "comparison.html"


def write(folder: Path, record: RunRecord, judgement: Judgement) -> Path:
    """
    Write ``report.html``, ``report.json``, ``junit.xml`` and ``journal.json`` into a run's folder; gives the page.

    Raises:
        ConfigError: The folder cannot be written.
    """
    from kvops.chaos.report import document, html, journal, junit

    made = {
        PAGE: html.render(record, judgement),
        "report.json": json.dumps(document.document(record, judgement), ensure_ascii=False, indent=2) + "\n",
        "junit.xml": junit.render(record, judgement),
        "journal.json": json.dumps(journal.journal(record, judgement), ensure_ascii=False, indent=2) + "\n",
    }
    for name, text in made.items():
        write_private(folder / name, text.encode())
    return folder / PAGE


def write_comparison(folder: Path, sides: Sequence[Side]) -> Path:
    """
    Write ``comparison.html`` into the folder of the last of several runs; gives the page.

    Raises:
        ConfigError: The folder cannot be written.
    """
    from kvops.chaos.report import compare

    page = folder / COMPARISON
    write_private(page, compare.page(sides).encode())
    return page

"""The files beside a run's history: its report for people, programs, CI and the Chaos Toolkit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from kvops.chaos.history import RunRecord
from kvops.chaos.verdict import Judgement
from kvops.files import write_private

PAGE: Final = "report.html"


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

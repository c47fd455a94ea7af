"""Mutes: checks that somebody has seen and will mend later, each with an end and a reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kvops.diag.model import LOUD, Outcome, Result
from kvops.errors import ConfigError

FILE = "diag-mutes.json"
MUTE_DAYS_MAX = 90  # what is muted for longer is a matter for the profile


def load_mutes(folder: Path) -> dict[str, dict[str, str]]:
    """
    Check → {"until", "reason"}; empty if nothing was ever muted.

    Who may not read the file (another user's state folder) has muted nothing: the report is louder, never quieter.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        return _read(folder / FILE)
    except PermissionError:
        return {}


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        return {str(k): {"until": str(v["until"]), "reason": str(v["reason"])} for k, v in value.items()}
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}", fix="remove it, and mute again") from error


def add_mute(folder: Path, checks: Iterable[str], *, until: datetime, reason: str, now: datetime) -> None:
    """Mute checks until a time. Raises ConfigError if that is too far away, or the file cannot be written."""
    if until - now > timedelta(days=MUTE_DAYS_MAX):
        raise ConfigError(
            f"a mute lasts {MUTE_DAYS_MAX} days at most", fix="put what is meant for good into a profile"
        )
    try:
        mutes = _read(folder / FILE)
        mutes |= {
            check: {"until": until.astimezone(UTC).isoformat(timespec="seconds"), "reason": reason}
            for check in checks
        }
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / (FILE + ".new")
        new.write_text(json.dumps(mutes, indent=1), encoding="utf-8")
        new.replace(folder / FILE)
    except OSError as error:
        raise ConfigError(
            f"{folder / FILE}: {error}", fix="give a --state-dir that can be written"
        ) from error


def apply_mutes(
    results: Sequence[Result], mutes: dict[str, dict[str, str]], *, now: datetime
) -> list[Result]:
    """The results with loud ones of muted checks turned into info that says who is silent, and until when."""
    muted = []
    for result in results:
        mute = mutes.get(result.check)
        if mute is None or result.outcome not in LOUD or _over(mute["until"], now):
            muted.append(result)
            continue
        findings = tuple(replace(f, severity=Outcome.INFO) for f in result.findings)
        reason = f"muted until {mute['until']}: {mute['reason']} (was {result.outcome})"
        muted.append(replace(result, outcome=Outcome.INFO, reason=reason, findings=findings))
    return muted


def _over(until: str, now: datetime) -> bool:
    try:
        return datetime.fromisoformat(until) <= now
    except ValueError:
        return True  # a mute without a readable end has none that counts

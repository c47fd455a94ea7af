"""Runs a command of ``kvops chaos`` on other machines over SSH, where their ledgers lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

from kvops.cli.hosts import SshSaid, find_logins
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.errors import KvopsError
from kvops.host import Sight

CONNECT_TIMEOUT_S: Final = 10.0
COMMAND_TIMEOUT_S: Final = 120.0  # an undo's own deadline is 60 s
EXIT_LEFT_BEHIND: Final = 4
EXIT_UNREACHABLE: Final = 3
COLUMNS: Final = (
    Column("host"),
    Column("exit_code"),
    Column("experiment"),
    Column("state"),
    Column("detail"),
)


def on_hosts(settings: Settings, hosts: Sequence[str], ssh: SshSaid, *words: str) -> int:
    """
    Run ``kvops chaos WORDS`` on each host and print what each said.

    Returns:
        4 when something is left on one of them, else 3 when one could not be asked, else the worst of theirs.
    """
    out = Output(settings)
    said: list[dict[str, Any]] = []
    for login in find_logins(settings, hosts, ssh):
        try:
            with closing(login.connect(CONNECT_TIMEOUT_S)) as there:
                argv = ("kvops", "chaos", *words, "-o", "json")
                result = there.run_with_input(argv, b"", timeout_s=COMMAND_TIMEOUT_S)
        except KvopsError as error:
            said.append({"host": login.name, "exit_code": error.exit_code, "error": str(error)})
            continue
        code = result.return_code
        if result.sight is not Sight.PRESENT or code is None:
            why = result.detail or "it has no kvops on its PATH"
            said.append({"host": login.name, "exit_code": EXIT_UNREACHABLE, "error": why})
            continue
        said.append({"host": login.name, "exit_code": code, "said": _document(result.stdout)})
    rows = [row for one in said for row in _rows(one)]
    out.rows("hosts", COLUMNS, said if out.structured else rows)
    codes = [int(one["exit_code"]) for one in said]
    for grave in (EXIT_LEFT_BEHIND, EXIT_UNREACHABLE):
        if grave in codes:
            return grave
    return max(codes)


def _document(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {"text": text[:500]}
    return found if isinstance(found, dict) else {"text": text[:500]}


def _rows(one: dict[str, Any]) -> list[dict[str, Any]]:
    head = {"host": one["host"], "exit_code": one["exit_code"]}
    experiments = one.get("said", {}).get("experiments", [])
    if not experiments:
        return [head | {"experiment": "-", "state": "-", "detail": one.get("error", "nothing to do")}]
    return [
        head | {"experiment": row["id"], "state": row["state"], "detail": row.get("detail", "")}
        for row in experiments
    ]

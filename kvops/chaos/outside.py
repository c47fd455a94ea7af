"""What others say: kvops' own commands and etcd's HTTP, each asked from outside with a deadline."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

COMMAND_TIMEOUT_S: Final = 20.0
ETCD_KEY: Final = b"kvops-chaos-probe"


def kvops_json(state_dir: str, group: str, *words: str) -> dict[str, Any] | None:
    """What a kvops command says as JSON, whatever its exit code; None when it said nothing that can be read."""
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-P", "-m", "kvops", *words, "-g", group, "--state-dir", state_dir, "-o", "json"]
    try:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        said = json.loads(result.stdout)
    except (subprocess.TimeoutExpired, OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One call of etcd's HTTP gateway."""

    ok: bool
    ms: float
    body: dict[str, Any]
    error: str = ""


def etcd(address: str, path: str, body: dict[str, Any], *, timeout_s: float = 1.0) -> Answer:
    """Call ``/v3/...`` of one member."""
    request = urllib.request.Request(
        f"http://{address}/v3/{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            said = json.loads(answer.read(1 << 20))
        return Answer(ok=True, ms=(time.monotonic() - began) * 1000, body=said)
    except (OSError, ValueError) as error:
        return Answer(ok=False, ms=(time.monotonic() - began) * 1000, body={}, error=str(error))


def etcd_put(address: str, *, timeout_s: float = 1.0) -> Answer:
    """Write one key of ours through a member."""
    key, value = (base64.b64encode(one).decode() for one in (ETCD_KEY, b"1"))
    return etcd(address, "kv/put", {"key": key, "value": value}, timeout_s=timeout_s)


def etcd_leader(address: str, *, timeout_s: float = 1.0) -> tuple[str, str] | None:
    """The ids of the leader and of the member asked, as this member sees it; None when it does not answer."""
    said = etcd(address, "maintenance/status", {}, timeout_s=timeout_s).body
    leader = str(said.get("leader", "0"))
    member = str(said.get("header", {}).get("member_id", ""))
    return None if leader == "0" or not member else (leader, member)

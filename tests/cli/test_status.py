"""What ``kvops status`` prints of a judgement."""

from __future__ import annotations

from typing import Any

import pytest

from kvops.cli.context import Target
from kvops.cli.options import Settings
from kvops.cli.output import Output
from kvops.cli.status import show
from kvops.fleet.health import Health, Judgement

GIB = 1 << 30
MIB = 1 << 20


def shown(capsys: pytest.CaptureFixture[str], *, output: str = "table", **fields: Any) -> str:
    """What a person sees of a healthy group with these fields."""
    known: dict[str, Any] = {"health": Health.HEALTHY, "reasons": [], "masters": [], "stores": []}
    judgement = Judgement(group="local", environment="local", **known | fields)
    out = Output(Settings(output=output))
    out.format = output  # as on a terminal
    show(out, Target(name="local", environment="local"), judgement)
    return capsys.readouterr().out


def store_row(name: str, *, eta_s: float | None) -> dict[str, Any]:
    """A store whose memory is being prepared."""
    return {"name": name, "state": "ready", "populate_eta_s": eta_s}


def test_capacity_while_segments_fill(capsys: pytest.CaptureFixture[str]) -> None:
    """Just after a start the whole capacity is shown, how much of it is prepared, and how long the rest takes."""
    stores = [store_row("store-0", eta_s=0.0), store_row("store-1", eta_s=41.6)]
    filling = shown(capsys, capacity_bytes=3 * GIB, populated_bytes=768 * MIB, stores=stores)
    unknown = shown(
        capsys, capacity_bytes=3 * GIB, populated_bytes=768 * MIB, stores=[store_row("s", eta_s=None)]
    )
    full = shown(capsys, capacity_bytes=3 * GIB, populated_bytes=3 * GIB, used_bytes=GIB)

    assert "0 B of 3.0 GiB (25% prepared, 42 s to go)" in filling
    assert "0 B of 3.0 GiB (25% prepared)" in unknown
    assert "1.0 GiB of 3.0 GiB (33%)" in full


def test_clients_are_in_the_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Who uses the pool is shown with -o wide, and that nobody does."""
    clients = [{"name": "vllm-0", "host": "gpu-1", "pid": 77, "connections": 2}]

    assert "vllm-0  gpu-1  77             2" in shown(capsys, output="wide", clients=clients)
    assert "no clients" in shown(capsys, output="wide")
    assert "client" not in shown(capsys, clients=clients)

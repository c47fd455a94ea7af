"""Benchmarks: their figures' shape, the machine they name, and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from kvops.bench import replay_quality, start
from kvops.bench.machine import parse_cpu_model, parse_memory_bytes
from kvops.bench.model import Effort, Result, percentile
from kvops.bench.pool import BenchPool, ChildFailed
from kvops.cli.bench import BENCHMARKS
from kvops.inference.synth import WORKLOADS, generate
from tests.waiting import WAIT_S


def test_a_figure_is_the_median_with_its_lowest_and_highest_run() -> None:
    """One slow run moves the spread, not the value."""
    row = Result(name="a", unit="µs", runs=[30.0, 10.123456, 11.0], params={"batch": 1}).row()

    assert row == {
        "name": "a",
        "params": {"batch": 1},
        "value": 11,
        "unit": "µs",
        "spread": [10.12, 30],
        "runs": [30, 10.12, 11],
    }


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    """No interpolation: of 100 values the 99th percentile is the 99th."""
    assert percentile([float(number) for number in range(1, 101)], share) == value


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
        ("Model\t\t: Board 4\n", "Board 4"),
        ("", os.uname().machine),
    ],
    ids=["x86", "arm", "unnamed"],
)
def test_the_processor_is_named(cpuinfo: str, model: str) -> None:
    """A figure without its processor means nothing; where the kernel has no name, the architecture stands."""
    assert parse_cpu_model(cpuinfo) == model


def test_memory_is_read_in_bytes() -> None:
    """The kernel's kB are KiB."""
    assert parse_memory_bytes("MemTotal:       2 kB\nMemFree: 1 kB\n") == 2_048


def test_eviction_by_the_master_comes_within_a_hundredth_of_exact_lru() -> None:
    """On a small generated trace, in virtual time, with as much memory."""
    requests = list(generate(WORKLOADS["synth"], requests=600, seed=3))

    ours, held = replay_quality.replay_master(requests, 1_000)

    assert abs(ours - replay_quality.replay_lru(requests, held)) < 0.01


@pytest.mark.process
def test_a_benchmark_ends_with_all_its_processes_and_files() -> None:
    """Whatever happens inside, no process and no directory of a benchmark outlives it."""
    with BenchPool() as pool:
        pool.start_master()
        pool.start_paper(objects=1_000, capacity_bytes=1 << 20)
        client = pool.child("client", "lookups", {"masters": "nonsense", "objects": 1, "seed": 1})
        with pytest.raises(ChildFailed, match="lookups"):
            client.hear(WAIT_S)

    assert not pool.directory.exists()
    assert [child.process.poll() is None for child in pool.children.values()] == [False] * 3


@pytest.mark.process
def test_lookups_are_measured_end_to_end() -> None:
    """The quick run gives every figure, all above zero."""
    results: list[Result] = []

    import_module("kvops.bench.lookup").run(Effort(quick=True, repeats=1), results.append)

    assert {result.name for result in results} >= {"lookup.keys_per_s", "lookup.p50", "lookup.p99"}
    assert all(result.value > 0 for result in results)


@pytest.mark.process
def test_a_start_is_measured_beside_the_kernels_own_pace() -> None:
    """Populate, first use and stop of a real store, each with what the kernel alone takes; all above zero."""
    results: list[Result] = []

    import_module("kvops.bench.start").run(Effort(quick=True, repeats=1), results.append)

    assert {result.name for result in results} == {
        "start.populate",
        "start.kernel_populate",
        "start.populate_of_kernel",
        "start.first_allocatable",
        "start.stop",
        "start.kernel_release",
    }
    assert all(result.value > 0 for result in results)


@pytest.mark.parametrize(
    ("gib", "sizes"), [(64, [1, 4, 8]), (8, [1, 4]), (2, [1]), (1, [])], ids=["all", "two", "one", "none"]
)
def test_segments_that_are_measured_fit_the_machine(gib: int, sizes: list[int]) -> None:
    """Never more than this machine can spare; a small one instead when none fits."""
    plan = start.Plan.of(Effort(), available_bytes=gib << 30)

    assert [size >> 30 for size in plan.sizes if size >> 30] == sizes
    assert plan.sizes


def run_cli(args: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvops", *args], capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.process
def test_json_names_the_machine_and_every_figure(tmp_path: Path) -> None:
    """``-o json`` can be kept in docs/: schema, machine, results."""
    answer = run_cli(["bench", "replay-quality", "--quick", "-o", "json", "--state-dir", str(tmp_path)])

    document = json.loads(answer.stdout)
    assert answer.returncode == 0
    assert document["schema"] == 1
    assert {"cpu", "cores", "kernel", "python", "load_average"} <= set(document["machine"])
    assert {"name", "params", "value", "unit", "spread", "runs"} == set(document["results"][0])


def test_every_benchmark_has_a_module_and_a_description() -> None:
    """The table of the command names what is there."""
    assert all(hasattr(import_module(f"kvops.bench.{name}"), "run") for name in BENCHMARKS)

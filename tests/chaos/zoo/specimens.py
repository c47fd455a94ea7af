"""Which bug is caught by which checker, under which fault, and how such a run is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvops.chaos.experiment import (
    FAULT_MODULE,
    Activity,
    BreakerExpectation,
    Deadlines,
    Expect,
    Experiment,
    Kvops,
    PoolSpec,
    Provider,
    Scope,
    Select,
    Workload,
)
from kvops.chaos.history import Arm
from kvops.chaos.runner import Options
from kvops.fleet.programs import Command, serve_command
from tests.chaos.zoo.servers import BUGS


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One bug."""

    name: str
    caught_by: str  # a checker's id
    fault: str = "process.pause"
    arguments: dict[str, object] = field(default_factory=dict)
    arms: tuple[Arm, ...] = (Arm.BASELINE, Arm.FAULT)
    fault_s: float = 4.0
    tail_s: float = 4.0
    rps: float = 24.0
    opens_within: str = "2s"
    pool: PoolSpec = field(default_factory=lambda: PoolSpec(stores=3, engines=3, segment_size="64MiB"))
    scope: Scope = field(default_factory=Scope)


SPECIMENS = (
    Specimen(name="no_deadline", caught_by="L2"),
    Specimen(name="resurrect", caught_by="S2"),
    # The master hides a silent store after two seconds: by then a breaker has long been open.
    Specimen(name="no_breaker", caught_by="C3", opens_within="500ms", rps=30.0, fault_s=3.0, tail_s=6.0),
    Specimen(name="no_checksum", caught_by="S1"),
    Specimen(name="no_fencing", caught_by="S1", fault_s=2.0, tail_s=2.0),
    Specimen(name="memory_reused_early", caught_by="S4", fault_s=2.0, tail_s=2.0),
    Specimen(name="no_lease_check", caught_by="S4"),
    Specimen(
        name="old_leader",
        caught_by="S7",
        fault_s=6.0,  # long enough for another to be elected
        tail_s=8.0,  # in which the old one answers again
        pool=PoolSpec(masters=3, etcd=1, stores=3, engines=3),
        scope=Scope(domain="master", select=Select(role="master", leads=True), max_capacity_fraction=1.0),
    ),
    # Not a store that is silent: the master hides it after two seconds, and nothing is asked of it any more.
    Specimen(
        name="no_retry_budget",
        caught_by="C2",
        fault="store.wrong_bytes",
        arguments={"objects": 400},
        arms=(Arm.BASELINE, Arm.CONTROL, Arm.FAULT),
    ),
    Specimen(name="lying_put", caught_by="S8"),
    Specimen(name="forget", caught_by="S3"),
    Specimen(name="leak", caught_by="S9"),
    Specimen(name="wide_breaker", caught_by="C3"),
    Specimen(name="hole", caught_by="S5"),
    Specimen(name="shared_fate", caught_by="C1", arms=(Arm.BASELINE, Arm.CONTROL, Arm.FAULT), fault_s=8.0),
    Specimen(
        name="metastable",
        caught_by="L1",
        arms=(Arm.BASELINE, Arm.CONTROL, Arm.FAULT),
        tail_s=8.0,
        rps=18.0,
    ),
)
CORRECT = Specimen(name="correct", caught_by="")


def experiment(specimen: Specimen, *, seed: int = 7) -> Experiment:
    """A short run with the specimen's fault on one store of three."""
    func = specimen.fault.replace(".", "_", 1)
    window_s = 0.5 + specimen.fault_s + specimen.tail_s
    return Experiment(
        title=specimen.name,
        description="a deliberately broken variant",
        method=[
            Activity(
                provider=Provider(
                    type="python", module=FAULT_MODULE, func=func, arguments=dict(specimen.arguments)
                )
            )
        ],
        kvops=Kvops(
            pool=specimen.pool,
            scope=specimen.scope,
            workload=Workload(
                rps=specimen.rps,
                arms=list(specimen.arms),
                windows=f"1x{window_s:g}s",
                warmup="2s",
                seed=seed,
                register_rps=12,
            ),
            deadlines=Deadlines(fault=specimen.fault_s, recover="10s"),
            guards=[],
            expect=Expect(
                t_recover="1s", breaker=BreakerExpectation(scope="node", opens_within=specimen.opens_within)
            ),
        ),
    )


def command(bug: str) -> Command:
    """How the pool's roles are run."""

    def run(role: str, config_file: Path) -> Sequence[str]:
        if role not in ("master", "store"):
            return serve_command(role, config_file)
        return [sys.executable, "-P", "-m", "tests.chaos.zoo", bug, role, str(config_file)]

    return run


def options(specimen: Specimen, folder: Path) -> Options:
    """A run of it that keeps everything under one folder."""
    from tests.chaos.zoo import clients

    in_client = hasattr(clients, specimen.name)
    return Options(
        state_dir=folder / "state",
        runs_dir=folder / "runs",
        source=f"zoo/{specimen.name}",
        command=command(specimen.name if specimen.name in BUGS else "correct"),
        pool_factory=f"tests.chaos.zoo.clients:{specimen.name}" if in_client else "",
        folder=folder,
    )

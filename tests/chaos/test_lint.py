"""What is said of an experiment before anything is touched, and whom it would hit."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvops
from kvops.chaos.experiment import Experiment, load, parse
from kvops.chaos.faults import catalogue
from kvops.chaos.lint import NOT_BUILT, lint, unsupported
from kvops.chaos.pool import PoolSpec, planned_parts
from kvops.chaos.resolve import choose
from kvops.errors import Refused, UsageError

EXPERIMENTS = Path(kvops.__file__).parents[1] / "playbooks" / "experiments"
FILES = sorted(EXPERIMENTS.glob("*.yaml"))


def made(fault: str = "process_pause", arguments: str = "{}", ours: str = "{}", more: str = "") -> Experiment:
    """An experiment with one fault."""
    provider = f"{{type: python, module: kvops.chaos.faults, func: {fault}, arguments: {arguments}}}"
    action = f"{{type: action, provider: {provider}}}"
    return parse(f"title: t\ndescription: d\nmethod: [{action}{more}]\nkvops: {ours}\n", source="t")


def hypothesis(func: str, tolerance: str) -> Experiment:
    """An experiment with one probe."""
    provider = f"{{type: python, module: kvops.chaos.probes, func: {func}}}"
    probe = f"{{type: probe, tolerance: {tolerance}, provider: {provider}}}"
    action = "{type: action, provider: {type: python, module: kvops.chaos.faults, func: process_pause, arguments: {}}}"
    steady = f"steady-state-hypothesis: {{title: h, probes: [{probe}]}}"
    return parse(f"title: t\ndescription: d\n{steady}\nmethod: [{action}]\nkvops: {{}}\n", source="t")


def errors(experiment: Experiment) -> list[str]:
    """Texts of what would refuse it."""
    return [
        f"{one.rule}: {one.text}; {one.fix}"
        for one in lint(experiment, catalogue())
        if one.severity == "error"
    ]


def test_a_good_one_is_not_refused() -> None:
    """The simplest experiment, with all defaults, runs."""
    assert errors(made()) == []


TWO_MASTERS = "{select: {role: master}, mode: count, value: 2, max_capacity_fraction: 1}"
WHOLE_GROUP = "{domain: group, select: {role: '', group: g1}, mode: all, max_capacity_fraction: 1}"
SECOND = ", {type: action, provider: {type: python, module: kvops.chaos.faults, func: process_kill, arguments: {}}}"


@pytest.mark.parametrize(
    ("experiment", "says"),
    [
        (made("process_paus"), "did you mean process.pause?"),
        (made(arguments="{cpu_shar: 1}", fault="process_slow"), "did you mean cpu_share?"),
        (made(arguments="{target: stor-1}"), "did you mean store-1?"),
        (made(ours="{scope: {select: {role: rooter}}}"), "matches nothing: role rooter"),
        (made(ours="{scope: {mode: count, value: 2}}"), "67% of the capacity"),
        (made(ours="{scope: {mode: count, value: 9}}"), "9 (count) of 3 members"),
        (made(ours="{scope: {protect: [store]}}"), "protected"),
        (made(ours="{workload: {arms: [fault]}}"), "BASELINE_NOT_STEADY"),
        (made(ours="{workload: {arms: [baseline]}}"), "no fault arm"),
        (made(ours="{deadlines: {fault: 30s}}"), "does not fit into a window"),
        (made(ours="{deadlines: {total: 10s}}"), "deadlines.total"),
        (made(ours="{checkers: [integrty]}"), "did you mean integrity?"),
        (made(more=SECOND), "hide each other"),
        (hypothesis("succes_rate", "[0, 1]"), "did you mean success_rate?"),
        (hypothesis("success_rate", "null"), "has no tolerance"),
        (
            made(ours=f"{{pool: {{masters: 3}}, scope: {TWO_MASTERS}}}"),
            "lose a quorum: g1 master 2 of 3",
        ),
        (
            made(
                "clock_skew",
                arguments="{target: etcd}",
                ours="{pool: {etcd: 3}, scope: {max_capacity_fraction: 1}}",
            ),
            "Go programs",
        ),
    ],
)
def test_what_is_refused(experiment: Experiment, says: str) -> None:
    """Each mistake is found from the file alone, with what to write instead."""
    found = errors(experiment)

    assert any(says in text for text in found), found


def test_a_network_fault_does_not_reach_rdma() -> None:
    """A fault of the kernel's path is refused where data goes past the kernel."""
    assert any(
        "hardware RDMA" in text for text in errors(made("net_delay", ours="{pool: {transports: [verbs]}}"))
    )


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_faults_of_the_design_are_unsupported_rather_than_typos(name: str) -> None:
    """A fault that is known but not built yet lets the file stand, and the run end UNSUPPORTED."""
    experiment = made(name.replace(".", "_", 1))

    assert name not in catalogue()
    assert errors(experiment) == []
    assert unsupported(experiment) == [name]


def test_the_same_seed_chooses_the_same_target() -> None:
    """A run repeats with its seed, and another seed may choose another store."""
    experiment, parts = made(), planned_parts(PoolSpec(stores=3))

    chosen = {seed: choose(experiment, parts, seed=seed).hits[0].part.name for seed in range(20)}
    assert chosen == {seed: choose(experiment, parts, seed=seed).hits[0].part.name for seed in range(20)}
    assert len(set(chosen.values())) == 3


def test_a_whole_group_leaves_the_other_as_control() -> None:
    """When everything of a group is hit, what must stay well is in the other one."""
    experiment = made(ours=f"{{pool: {{groups: 2}}, scope: {WHOLE_GROUP}}}")

    chosen = choose(experiment, planned_parts(experiment.ours.pool), seed=1)

    assert chosen.groups == ("g1",)
    assert chosen.capacity_share == 1.0
    assert {hit.control.group for hit in chosen.hits if hit.control} == {"g2"}
    assert chosen.hits[-1].part.role == "master", "undone first: stores come back to a master that is there"
    assert all(name.startswith("g1/") for name in chosen.domains)


def test_a_typo_is_refused_before_capacity() -> None:
    """A target that matches nothing is a usage mistake, too large a scope a refusal."""
    parts = planned_parts(PoolSpec())
    with pytest.raises(UsageError):
        choose(made(arguments="{target: nobody}"), parts, seed=1)
    with pytest.raises(Refused):
        choose(made(ours="{scope: {mode: all}}"), parts, seed=1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_of_the_playbooks_stands(path: Path) -> None:
    """None of the shipped files would be refused, and a whole run of each sends enough to conclude something."""
    experiment = load(path)
    assert errors(experiment) == []
    too_few = [remark.text for remark in lint(experiment, catalogue()) if " needs " in remark.text]
    assert too_few == []


def test_the_playbooks_cover_what_they_promise() -> None:
    """Every incident that needs no RDMA hardware has an experiment, and every kill has its pause twin."""
    experiments = {path.stem: load(path) for path in FILES}
    tags = {tag for one in experiments.values() for tag in one.tags}

    assert len(experiments) >= 24
    assert {f"incident-{number}" for number in range(1, 23) if number != 13} <= tags
    for name, one in experiments.items():
        for call in one.faults:
            if call.name != "process.kill":
                continue
            twins = [
                other
                for other in experiments.values()
                if any(each.name == "process.pause" and each.target == call.target for each in other.faults)
                and other.ours.scope == one.ours.scope
                and other.ours.pool == one.ours.pool
            ]
            assert twins, f"{name} has no pause twin"

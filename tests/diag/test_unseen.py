"""Hosts with NICs of several makers, one or two defects each, that the checks were not written for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from unseen import BENIGN, CASES
from vendors import BLUEFIELD, BROADCOM, CONNECTX, EFA, INFINIBAND, INTEL, Maker, Node, healthy

from kvops.diag.facts import HostFacts
from kvops.diag.model import LOUD, Result
from kvops.diag.runner import run, select


def judge(nodes: Sequence[Node]) -> list[Result]:
    return run([HostFacts(node.snapshot(), name=node.name) for node in nodes], select())


@pytest.mark.parametrize("name", CASES)
def test_defect_is_named(name: str) -> None:
    """Every defect is reported by its check at its severity, whoever made the NIC, and no check crashes."""
    build, expected = CASES[name]

    results = judge(build())

    outcomes = {(result.check, str(result.outcome)) for result in results}
    assert expected.items() <= outcomes
    assert not [result for result in results if "crashed" in result.reason]


@pytest.mark.parametrize("name", BENIGN)
def test_frightening_host_is_well(name: str) -> None:
    """What the catalogue calls benign neither warns nor fails."""
    loud = [(r.check, [f.observed for f in r.findings]) for r in judge(BENIGN[name]()) if r.outcome in LOUD]

    assert loud == []


@pytest.mark.parametrize(
    "maker",
    [CONNECTX, BLUEFIELD, BROADCOM, INTEL, EFA, INFINIBAND],
    ids=["connectx", "bluefield", "broadcom", "intel", "efa", "infiniband"],
)
def test_healthy_host_is_silent(maker: Maker) -> None:
    """A healthy host neither warns nor fails, and most of what there is to see was judged."""
    results = judge([healthy(maker)])

    assert [result.check for result in results if result.outcome in LOUD] == []
    assert sum(result.outcome == "ok" for result in results) > 50

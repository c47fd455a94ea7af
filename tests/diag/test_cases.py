"""The written cases of tests/snapshots, judged through the command as a scheduler would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import documents, unpack

from kvops.cli.main import main

LOUD = {"warn", "fail"}
QUIET = {"skipped", "unknown"}
CASES = documents()


def wrong_with(expected: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """
    What is wrong with a report, one sentence each.

    A case is right if the expected check reports at the expected severity, nothing in ``must_not`` warns or
    fails, and all in ``must_skip`` are skipped or unknown. Where no check is expected nothing may warn or fail.
    Unlike the given cases, whatever is not listed in ``may_also`` counts as a false alarm.
    """
    outcomes: dict[str, set[str]] = {}
    for result in report["results"]:
        outcomes.setdefault(result["check"], set()).add(result["outcome"])
    loud = {check for check, seen in outcomes.items() if seen & LOUD}
    check = expected["check"]
    wrong = []
    if check is not None and expected["severity"] not in outcomes.get(check, set()):
        wrong.append(f"{check} should be {expected['severity']}, is {sorted(outcomes.get(check, set()))}")
    allowed = set() if check is None else {check, *expected.get("may_also", [])}
    if expected["severity"] not in LOUD:
        allowed = set()
    if loud - allowed:
        wrong.append(f"must not report: {', '.join(sorted(loud - allowed))}")
    if loud & set(expected.get("must_not", [])):
        wrong.append(f"must not report: {', '.join(sorted(loud & set(expected['must_not'])))}")
    wrong += [
        f"{quiet} should be skipped or unknown, is {sorted(outcomes.get(quiet, {'ok'}))}"
        for quiet in expected.get("must_skip", [])
        if not outcomes.get(quiet, {"ok"}) <= QUIET
    ]
    return wrong


def cites(expected: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether the expected check's findings name one of the files that prove it."""
    cited = " ".join(
        f"{item['source']} {item['file']}"
        for result in report["results"]
        if result["check"] == expected["check"]
        for finding in result["findings"]
        for item in finding["evidence"]
    )
    names = [path.partition("#")[0].removeprefix("root").rpartition("/")[2] for path in expected["evidence"]]
    return any(name in cited for name in names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_case(case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case's defect is named at its severity with its evidence, and a case without one stays silent."""
    folder = unpack(case, tmp_path)

    main(["diagnose", "--from", str(folder), "-o", "json"])

    report = json.loads(capsys.readouterr().out)
    assert wrong_with(case["expected"], report) == []
    assert case["expected"]["check"] is None or cites(case["expected"], report)


def test_cases_cover_what_happens() -> None:
    """There are a hundred defects of many families, and as many kinds of look-alikes as make a good temptation."""
    checks = {case["expected"]["check"] for case in CASES} - {None}

    assert len(CASES) == len({case["case"] for case in CASES})
    assert len(checks) >= 100
    assert sum(case["expected"]["check"] is None for case in CASES) >= 12
    assert {check.partition(".")[0] for check in checks} >= {
        "cpu",
        "ctr",
        "driver",
        "gdr",
        "gid",
        "iommu",
        "ip",
        "k8s",
        "limits",
        "link",
        "mem",
        "mtu",
        "numa",
        "ovs",
        "pcie",
        "proc",
        "qos",
        "time",
        "xnode",
    }


@pytest.mark.parametrize(
    ("expected", "outcomes", "right"),
    [
        ({"check": "a.b", "severity": "fail", "evidence": ["root/x"]}, {"a.b": "fail"}, True),
        ({"check": "a.b", "severity": "fail", "evidence": ["root/x"]}, {"a.b": "warn"}, False),
        ({"check": "a.b", "severity": "fail", "evidence": ["root/x"]}, {}, False),
        ({"check": "a.b", "severity": "fail", "evidence": [], "must_not": ["c.d"]}, {"a.b": "fail", "c.d": "warn"}, False),
        ({"check": "a.b", "severity": "fail", "evidence": [], "may_also": ["c.d"]}, {"a.b": "fail", "c.d": "warn"}, True),
        ({"check": None, "severity": "ok"}, {"c.d": "warn"}, False),
        ({"check": None, "severity": "ok"}, {"c.d": "info", "a.b": "unknown"}, True),
        ({"check": None, "severity": "ok", "must_skip": ["a.b"]}, {"a.b": "ok"}, False),
        ({"check": None, "severity": "ok", "must_skip": ["a.b"]}, {"a.b": "unknown"}, True),
        ({"check": "a.b", "severity": "info", "evidence": []}, {"a.b": "info", "c.d": "fail"}, False),
    ],
)  # fmt: skip
def test_scorer(expected: dict[str, Any], outcomes: dict[str, str], right: bool) -> None:
    """The scorer itself tells a right verdict from each kind of wrong one."""
    report = {"results": [{"check": check, "outcome": outcome} for check, outcome in outcomes.items()]}

    assert (wrong_with(expected, report) == []) is right

"""Runs checks over facts and turns what they yield, skip and miss into one result a check and node."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvops.diag.facts import HostFacts
from kvops.diag.model import Finding, Outcome, Result, Skip, Unseen
from kvops.diag.registry import Check, Per, checks, subjects_of
from kvops.errors import ParseError, UsageError
from kvops.host import Sight

FLEET = "fleet"  # the node's name in results of checks that compare nodes
_RANK = {Outcome.FAIL: 0, Outcome.WARN: 1, Outcome.INFO: 2}
# A program that fails here says that it does not apply; a refusal or a hang hides something.
_NOT_ASKED = frozenset({Sight.NOT_COLLECTED, Sight.NO_TOOL, Sight.ABSENT, Sight.FAILED})


def select(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Check]:
    """
    The checks to run. Patterns are ids, families (``gid``) or globs (``gid.*``).

    Raises:
        UsageError: A pattern names no check; the message suggests the nearest.
    """
    every = checks()

    def expand(patterns: Sequence[str]) -> set[str]:
        names: set[str] = set()
        for pattern in patterns:
            found = {
                n
                for n in every
                if n == pattern or fnmatch.fnmatchcase(n, pattern) or n.startswith(pattern + ".")
            }
            if not found:
                import difflib

                near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.5)
                hint = f"did you mean {', '.join(near)}?" if near else "see: kvops diagnose list"
                raise UsageError(f"there is no check {pattern!r}", fix=hint)
            names |= found
        return names

    wanted = expand(only) if only else set(every)
    dropped = expand(skip)
    return [check for name, check in every.items() if name in wanted and name not in dropped]


def run(nodes: Sequence[HostFacts], selected: Iterable[Check], *, asked: bool = False) -> list[Result]:
    """
    Every selected check on every node, and those that compare nodes once.

    Args:
        nodes: The facts; each node's ``others`` are filled in.
        selected: From :func:`select`.
        asked: Whether the checks were named one by one: then whatever cannot be seen counts.
    """
    for node in nodes:
        node.others = [other for other in nodes if other is not node]
    results: list[Result] = []
    for check in selected:
        if check.per is Per.FLEET:
            results.append(_run_fleet(check, nodes, asked))
        else:
            results.extend(_run_node(check, node, asked) for node in nodes)
    return results


def _run_fleet(check: Check, nodes: Sequence[HostFacts], asked: bool) -> Result:
    name = nodes[0].name if len(nodes) == 1 else FLEET
    if len(nodes) < check.nodes_min:
        return Result(
            check=check.id, node=name, outcome=Outcome.SKIPPED, reason="compares nodes; there is one"
        )
    return _Judge(check, name, asked).judge(nodes[0] if len(nodes) == 1 else None, [nodes])


def _run_node(check: Check, node: HostFacts, asked: bool) -> Result:
    judge = _Judge(check, node.name, asked)
    if check.per is Per.HOST:
        return judge.judge(node, [node])
    try:
        subjects = subjects_of(node, check.per)
    except Skip as skip:
        return Result(check=check.id, node=node.name, outcome=Outcome.SKIPPED, reason=str(skip))
    except Unseen as unseen:
        if unseen.absent:
            return Result(
                check=check.id,
                node=node.name,
                outcome=Outcome.SKIPPED,
                reason=f"no {check.per} here: no {unseen.what}",
            )
        counts = asked or unseen.sight not in _NOT_ASKED
        return Result(
            check=check.id, node=node.name, outcome=Outcome.UNKNOWN, reason=str(unseen), asked=counts
        )
    return judge.judge(node, subjects)


class _Judge:
    """Collects what one check said about its subjects on one node."""

    def __init__(self, check: Check, node: str, asked: bool) -> None:
        self.check = check
        self.node = node
        self.asked = asked
        self.findings: list[Finding] = []
        self.unseen: dict[str, Sight] = {}
        self.skips: dict[str, None] = {}
        self.ok_count = 0
        self.crash = ""

    def judge(self, host: HostFacts | None, subjects: Iterable[object]) -> Result:
        for subject in subjects:
            if host is not None:
                host.touched = {}
            before = len(self.findings)
            try:
                for finding in self.check.function(subject):
                    self.findings.append(self._with_evidence(finding, host))
                self.ok_count += len(self.findings) == before
            except Skip as skip:
                self.skips[str(skip)] = None
            except Unseen as unseen:
                self.unseen[unseen.what] = unseen.sight
            except ParseError as error:
                self.unseen[error.what] = Sight.FAILED
            except Exception:  # noqa: BLE001 - a check that crashes must not take the others with it: it is unknown
                import traceback

                self.crash = traceback.format_exc(limit=-2).strip().replace("\n", " | ")
            finally:
                if host is not None:
                    host.touched = None
        return self._result()

    def _with_evidence(self, finding: Finding, host: HostFacts | None) -> Finding:
        """A finding that cites nothing gets what the check read last."""
        if finding.evidence or host is None or not host.touched:
            return finding
        return replace(finding, evidence=tuple(list(host.touched.values())[-4:]))

    def _result(self) -> Result:
        findings = tuple(sorted(self.findings, key=lambda finding: _RANK[finding.severity]))
        count = self.ok_count + len({finding.subject for finding in findings})
        unseen = tuple(f"{what}: {sight}" for what, sight in self.unseen.items())
        absent_only = bool(self.unseen) and all(sight is Sight.ABSENT for sight in self.unseen.values())
        outcome, reason, asked = Outcome.OK, "", False
        if findings and findings[0].severity in (Outcome.FAIL, Outcome.WARN):
            outcome = findings[0].severity
        elif self.crash:
            outcome, reason, asked = Outcome.UNKNOWN, f"the check crashed: {self.crash}", True
        elif self.unseen and not absent_only:
            refused = any(sight not in _NOT_ASKED for sight in self.unseen.values())
            outcome = Outcome.INFO if findings else Outcome.UNKNOWN
            reason, asked = "; ".join(unseen[:3]), self.asked or refused
        elif findings:
            outcome = Outcome.INFO
        elif not self.ok_count:
            outcome = Outcome.SKIPPED
            reason = "; ".join([*self.skips, *unseen][:3]) or "nothing to judge"
        return Result(
            check=self.check.id,
            node=self.node,
            outcome=outcome,
            reason=reason,
            findings=findings,
            asked=asked,
            subjects=count,
            unseen=unseen,
        )


def loud(results: Iterable[Result]) -> Iterator[Result]:
    """Those that warn or fail."""
    return (result for result in results if result.outcome in (Outcome.FAIL, Outcome.WARN))

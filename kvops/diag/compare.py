"""Who differs from the majority, for checks that compare nodes or the ports of one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvops.diag.model import Evidence, Finding, Outcome, finding

NAMES_MAX = 8  # of one finding


class Groups:
    """Members by the value they have, with where that value was seen."""

    def __init__(self) -> None:
        self._members: dict[str, list[str]] = {}
        self._seen: dict[str, list[Evidence]] = {}

    def __bool__(self) -> bool:
        return bool(self._members)

    def add(self, value: str, member: str, *evidence: Evidence | None) -> None:
        self._members.setdefault(value, []).append(member)
        self._seen.setdefault(value, []).extend(item for item in evidence if item is not None)

    def odd_ones(
        self,
        severity: Outcome,
        *,
        says: Callable[[str], str],
        fix: Callable[[str], str] = lambda usual: "",
        persists: bool | None = None,
    ) -> Iterator[Finding]:
        """
        One finding for each value but the most frequent; of two equally frequent ones the larger is the usual.

        Args:
            severity: Of each finding.
            says: From a value to what was observed.
            fix: From the usual value to the command that makes the odd ones alike.
            persists: Whether that command survives a reboot.
        """
        if len(self._members) < 2:
            return
        usual = max(self._members, key=lambda value: (len(self._members[value]), value))
        for value, members in self._members.items():
            if value != usual:
                yield finding(
                    severity,
                    ", ".join(members[:NAMES_MAX]),
                    says(value),
                    f"{usual}, as {len(self._members[usual])} others",
                    fix=fix(usual),
                    persists=persists,
                    evidence=[*self._seen[value][:4], *self._seen[usual][:1]],
                )

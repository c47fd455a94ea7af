"""Time: leases and logs of several nodes must line up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvops.diag.facts.fact import attempt
from kvops.diag.facts.host import HostFacts
from kvops.diag.model import Finding, Outcome, Unseen, finding, warn
from kvops.diag.parsers import misc, sysfs
from kvops.diag.registry import Per, check
from kvops.host import Sight

OFFSET_WARN_S, OFFSET_FAIL_S = 0.100, 1.0  # [E]
SPREAD_WARN_S = 0.200  # [E]


def offset_s(host: HostFacts) -> float | None:
    """Offset of the host's clock: as the collector measured it, else as chrony says; None if unknown."""
    measured = host.meta.get("clock_offset_s")
    if isinstance(measured, int | float):
        return float(measured)
    tracking = attempt(lambda: misc.parse_chrony(host.command("chronyc", "-c", "tracking")))
    return tracking[0] if tracking is not None else None


@check(
    "time.sync",
    title="The clock is synchronised",
    why="Leases and logs of different nodes do not line up.",
    source="chronyc -c tracking, timedatectl show -p NTPSynchronized",
    fix="systemctl enable --now chronyd",
    undo="systemctl disable --now chronyd",
)
def sync(host: HostFacts) -> Iterator[Finding]:
    tracking = attempt(lambda: misc.parse_chrony(host.command("chronyc", "-c", "tracking")))
    fix = "systemctl enable --now chronyd; chronyc makestep"
    if tracking is not None:
        offset, leap = tracking
        evidence = [host.said("chronyc", "-c", "tracking")]
        if "not sync" in leap.lower():
            yield warn("clock", f"chrony: {leap}", "synchronised", fix=fix, persists=True, evidence=evidence)
        elif abs(offset) > OFFSET_WARN_S:
            yield finding(
                Outcome.FAIL if abs(offset) > OFFSET_FAIL_S else Outcome.WARN,
                "clock",
                f"off by {offset * 1e3:.0f} ms",
                f"within {OFFSET_WARN_S * 1e3:.0f} ms",
                fix=fix,
                persists=True,
                evidence=evidence,
            )
        return
    words = misc.parse_properties(host.command("timedatectl"))
    state = words.get("NTPSynchronized")
    if state is None:
        raise Unseen("timedatectl show -p NTPSynchronized", Sight.NOT_COLLECTED)
    if state == "no":
        yield warn(
            "clock", "NTPSynchronized=no", "yes", fix=fix, persists=True, evidence=[host.said("timedatectl")]
        )


@check(
    "time.skew_nodes",
    title="The nodes' clocks agree",
    why="Events of different nodes cannot be ordered.",
    source="offsets of all nodes against the collector, half of the round trip taken off; else chrony",
    fix="synchronise them with one source",
    per=Per.FLEET,
    kind="X",
)
def skew_nodes(nodes: Sequence[HostFacts]) -> Iterator[Finding]:
    offsets = {host.name: value for host in nodes if (value := offset_s(host)) is not None}
    if len(offsets) < 2:
        raise Unseen("clock offsets of two nodes", Sight.NOT_COLLECTED)
    first, last = min(offsets, key=lambda n: offsets[n]), max(offsets, key=lambda n: offsets[n])
    spread = offsets[last] - offsets[first]
    if spread > SPREAD_WARN_S:
        yield warn(
            f"{first} and {last}",
            f"{spread * 1e3:.0f} ms apart",
            f"within {SPREAD_WARN_S * 1e3:.0f} ms",
            fix="chronyc makestep on both",
            persists=True,
            evidence=[h.said("chronyc", "tracking") for h in nodes if h.name in (first, last)],
        )


@check(
    "time.clocksource",
    title="Reading the clock is cheap",
    why="A slow clock source costs microseconds at every timestamp.",
    source="/sys/devices/system/clocksource/clocksource0/current_clocksource, dmesg",
    fix="update the firmware; boot with tsc=reliable only if the TSC is known to be sound",
)
def clocksource(host: HostFacts) -> Iterator[Finding]:
    path = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    unstable = attempt(lambda: host.log_lines(r"Marking clocksource 'tsc.*' as unstable"))
    name = sysfs.parse_word(host.text(path))
    if host.is_bare_metal and name != "tsc" and not name.startswith("arch_sys"):
        yield warn(
            "clock source",
            name,
            "tsc",
            fix="update the firmware, look in dmesg why tsc was dropped",
            persists=True,
            evidence=[host.at(path), *(host.log_evidence(x) for x in (unstable or [])[:1])],
        )
    elif unstable and host.is_bare_metal:
        yield warn(
            "clock source",
            unstable[-1].text[:120],
            "a stable tsc",
            fix="update the firmware",
            persists=True,
            evidence=[host.log_evidence(unstable[-1])],
        )

"""Verdict, causes, exit codes and the printed forms."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import in_browser
from defects import DEFECTS, PORT0
from healthy import HEALTHY
from world import World, judge

from kvops.diag import render, render_html, render_junit, report
from kvops.diag.explain import SYMPTOMS, explain_error
from kvops.diag.model import Outcome
from kvops.diag.profile import checked, derive, differences, dump, load_profile
from kvops.diag.rails import rails_of
from kvops.diag.registry import checks
from kvops.diag.runner import run, select
from kvops.errors import ConfigError


def _broken() -> World:
    world = World()
    world.put(f"{PORT0}/state", "1: DOWN").put(f"{PORT0}/phys_state", "3: Disabled")
    return world.grow("local_ack_timeout_err", 9999)


def test_consequences_are_grouped_under_their_cause() -> None:
    """A port that is down explains the interface, the time-outs and whatever else follows from it."""
    found = report.causes(judge(_broken()))

    assert found[0].check.id == "link.port_state"
    assert {"link.netdev_down", "ctr.timeout_rate"} <= {result.check for result in found[0].explained}


def test_most_harmful_first() -> None:
    """Causes that fail come before causes that warn."""
    world = _broken().put("/proc/sys/kernel/numa_balancing", "1")

    severities = [cause.severity for cause in report.causes(judge(world))]

    assert severities == sorted(severities, key=list(Outcome).index)
    assert severities[-1] == Outcome.WARN


def test_every_loud_result_belongs_to_one_cause() -> None:
    """Nothing that was found is lost or told twice."""
    for defect in DEFECTS[::7]:
        worlds = [World(), World("node-b", 62)][: defect.nodes]
        defect.edit(*worlds)
        results = judge(*worlds)
        told = [r for c in report.causes(results) for r in (*c.results, *c.explained)]
        assert sorted((r.check, r.node) for r in told) == sorted(
            (r.check, r.node) for r in results if r.outcome in ("fail", "warn")
        )


def test_exit_codes() -> None:
    """0 clean, 1 a failing check, 3 something refused; a warning alone is 0 unless asked otherwise."""
    healthy, failing = judge(World()), judge(_broken())
    warning = judge(World().put("/proc/sys/kernel/numa_balancing", "1"))
    refused = judge(HEALTHY["unprivileged"]())

    assert report.exit_code(healthy) == 0
    assert report.exit_code(failing) == 1
    assert report.exit_code(warning) == 0
    assert report.exit_code(warning, fail_on="warn") == 1
    assert report.exit_code(refused) == 3
    assert report.exit_code(refused, fail_on="unknown") == 1


def test_unknown_counts_when_named() -> None:
    """A check that was asked for by id and could not be seen makes exit code 3, also where nobody refused."""
    world = World()
    world.outputs.clear()

    assert report.exit_code(run([world.facts()], select(["pcie.acs_redirect"]), asked=True)) == 3
    assert report.exit_code(run([world.facts()], select(["pcie.acs_redirect"]))) == 0


def test_document_is_json_with_the_promised_keys() -> None:
    """The JSON has the keys that others rely on."""
    world = _broken()
    document = json.loads(json.dumps(report.document([world.facts()], judge(world))))

    assert document["verdict"] == "fail"
    assert {"check", "node", "outcome", "reason", "findings"} <= set(document["results"][0])
    finding = document["causes"][0]["findings"][0]
    assert {"subject", "observed", "expected", "fix", "persists", "evidence"} <= set(finding)


def test_junit_is_xml_with_one_case_a_result() -> None:
    """JUnit counts what is in it, and survives hostile text."""
    world = (
        _broken()
        .put("/proc/sys/kernel/numa_balancing", "1")
        .arg(100, "device_names", "<&\"'\x1b]0;evil\x07>")
    )
    results = judge(world)

    suite = ET.fromstring(render_junit.junit(results).encode())

    assert int(suite.get("tests") or 0) == len(results) == len(suite.findall("testcase"))
    assert int(suite.get("failures") or 0) == len(suite.findall("testcase/failure"))


def test_a_host_not_reached_is_in_every_format() -> None:
    """Nothing says OK of a host that nobody looked at, and each format names it with its reason."""
    missing = [("gpu-9", "no <route> to host")]

    verdicts = [
        render.lines([], [], unreached=missing)[0],
        render.markdown([], [], unreached=missing).splitlines()[0],
        str(report.document([], [], unreached=True)["verdict"]).upper(),
    ]
    suite = ET.fromstring(render_junit.junit([], missing).encode())

    assert all("UNKNOWN" in verdict for verdict in verdicts)
    assert "UNREACHED  gpu-9: no <route> to host" in render.lines([], [], unreached=missing)
    assert "- not reached: gpu-9: no <route> to host" in render.markdown([], [], unreached=missing)
    assert "<b>gpu-9</b> was not reached: no &lt;route&gt; to host" in render_html.page(
        [], [], unreached=missing
    )
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [str(v) for k, v in attrs if k in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_needs_nothing_else() -> None:
    """The HTML page is balanced, loads nothing, escapes what it shows and marks the bad hop."""
    world = _broken().arg(100, "device_names", "<script>alert(1)</script>")
    text = render_html.page([world.facts()], judge(world))

    parser = _Links()
    parser.feed(text)

    assert parser.open == []
    assert [link for link in parser.outside if not link.startswith("#")] == []
    assert all(f'id="{link[1:]}"' in text for link in parser.outside)
    assert "<script" not in text
    assert re.search(r'<li class="fail"><a href="#link.port_state"><b>NIC</b></a><span>mlx5_0/1</span>', text)


def test_terminal_gets_no_control_characters() -> None:
    """Text from a strange machine cannot steer a terminal, and Markdown tables keep their columns."""
    world = World().arg(100, "device_names", "\x1b[2Jmlx5_9|x")
    results = judge(world)

    assert "\x1b" not in "\n".join(render.lines([world.facts()], results, verbose=2))
    assert "\x1b" not in render.markdown([world.facts()], results)


def test_profile_of_a_healthy_node_holds_for_it(tmp_path: Path) -> None:
    """What is derived from a node is accepted again, and the node does not differ from it."""
    path = tmp_path / "site.yaml"
    path.write_text(dump(derive(World().facts())))
    profile = load_profile(path)

    other = World().put(f"{PORT0}/rate", "200 Gb/sec (4X HDR)")
    for device in ("mlx5_0", "mlx5_1"):
        other.put(f"/sys/class/infiniband/{device}/ports/1/rate", "200 Gb/sec (4X HDR)")

    assert differences(profile, derive(World().facts())) == []
    assert [row["key"] for row in differences(profile, derive(other.facts()))] == ["rate_gbps"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [({"roce_prioritty": 3}, "roce_priority"), ({"mtu": "big"}, "int"), ({"lossless": 1}, "bool")],
)
def test_profile_with_a_typo(text: dict[str, object], hint: str) -> None:
    """A typo in a profile names the key and suggests the right one or its type."""
    with pytest.raises(ConfigError) as caught:
        checked(text, "site.yaml")

    assert hint in caught.value.fix


def test_symptoms_name_checks_that_exist() -> None:
    """The index of error texts points to real checks only."""
    assert {name for symptom in SYMPTOMS for name in symptom.checks} <= set(checks())


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("Worker: Process failed for slice (...): transport retry counter exceeded", "ip.arp_flux"),
        ("Failed to modify QP to RTR: Connection timed out [110]", "ip.peer_route"),
        ("Failed to register memory 0x7f: Bad address [14]", "gdr.peermem_loaded"),
        ("Failed to register memory 0x7f: Cannot allocate memory [12]", "mem.memlock_limit"),
        ("No matched device found", "proc.device_names"),
    ],
)
def test_error_texts(text: str, check: str) -> None:
    """An engine's error text leads to the checks that explain it."""
    assert check in {name for symptom in explain_error(text) for name in symptom.checks}


@pytest.mark.process
@pytest.mark.parametrize("width", [360, 1280])
def test_page_in_a_browser(tmp_path: Path, width: int) -> None:
    """On a telephone and on a desk nothing sticks out sideways, no link is dead, and the bad hop leads to its cause."""
    world = _broken().log("x" * 400).swap("dmesg", "x" * 400, "mlx5_core health compromised " + "y" * 400)

    seen = in_browser(render_html.page([world.facts()], judge(world)), width, tmp_path)

    assert width - 20 <= seen["width"] <= width  # a scroll bar takes the rest
    assert (seen["over"], seen["wide"], seen["dead"]) == (0, [], [])
    assert seen["rails"] == 2
    assert seen["bad"] >= 1
    assert seen["links"] >= 1


def test_path_names_the_devices() -> None:
    """The path of the bad rail names function, bridges, node, GID, switch port and peer, and marks the bad hop alone."""
    world = World()
    neighbour = {"chassis": {"leaf-3": {"id": {"type": "mac"}}}, "port": {"id": {"value": "Ethernet7"}}}
    world.say("lldpctl -f json", json.dumps({"lldp": {"interface": [{"ens1": neighbour}]}}))
    world.put(f"{PORT0}/state", "1: DOWN").put(f"{PORT0}/phys_state", "3: Disabled")
    results = judge(world)

    rails = {rail.name: rail for rail in rails_of(world.facts(), results)}

    hops = {hop.stage: hop for hop in rails["mlx5_0/1"].hops}
    assert hops["store"].devices == ("store0",)
    assert hops["PCIe"].devices[0] == "0000:18:00.0"
    assert len(hops["PCIe"].devices) > 1
    assert hops["NUMA"].devices == ("node 0",)
    assert hops["GID"].devices[0].endswith("10.30.0.61")
    assert hops["switch"].devices == ("leaf-3 Ethernet7",)
    assert hops["peer"].devices == ("far",)
    assert hops["NIC"].outcome is Outcome.FAIL
    assert "link.port_state" in hops["NIC"].checks
    assert {hop.outcome for hop in rails["mlx5_1/1"].hops} <= {Outcome.OK, Outcome.UNKNOWN}
    assert "NIC mlx5_0/1 ✗" in report.path_text(world.facts(), results)


def test_what_root_would_see() -> None:
    """Looked at by another user, the report ends with the checks that root would see more for; as root it does not."""
    other = World()
    other.meta["uid"] = 65534
    other.drop("/proc/100/environ")
    other.meta["errors"]["/proc/100/environ"] = "EACCES"
    as_root = World()
    as_root.drop("/proc/100/environ")
    as_root.meta["errors"]["/proc/100/environ"] = "EACCES"

    hidden = report.needs_root([other.facts()], judge(other))
    text = "\n".join(render.lines([other.facts()], judge(other)))

    assert "proc.env_values" in hidden
    assert "ROOT    run as root for " in text
    assert "proc" in text.partition("ROOT")[2]
    assert report.document([other.facts()], judge(other))["needs_root"] == hidden
    assert report.needs_root([as_root.facts()], judge(as_root)) == []

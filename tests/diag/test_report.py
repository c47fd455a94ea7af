"""Verdict, causes, exit codes and the printed forms."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from defects import DEFECTS, PORT0
from healthy import HEALTHY
from world import World, judge

from kvops.diag import render, report
from kvops.diag.explain import SYMPTOMS, explain_error
from kvops.diag.model import Outcome
from kvops.diag.profile import checked, derive, differences, dump, load_profile
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

    suite = ET.fromstring(render.junit(results).encode())

    assert int(suite.get("tests") or 0) == len(results) == len(suite.findall("testcase"))
    assert int(suite.get("failures") or 0) == len(suite.findall("testcase/failure"))


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
    text = render.page([world.facts()], judge(world))

    parser = _Links()
    parser.feed(text)

    assert parser.open == []
    assert parser.outside == []
    assert "<script" not in text
    assert '<li class="fail">NIC' in text


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
def test_page_in_a_browser_does_not_overflow(tmp_path: Path) -> None:
    """On a narrow screen nothing sticks out of the page sideways."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("install chromium")
    script = "<script>document.title=document.documentElement.scrollWidth-innerWidth</script></body>"
    text = render.page([_broken().facts()], judge(_broken())).replace("</body>", script)
    (tmp_path / "p.html").write_text(text)

    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--dump-dom"]
    argv += [f"--user-data-dir={tmp_path}/profile", (tmp_path / "p.html").as_uri()]
    done = subprocess.run(argv, capture_output=True, timeout=90, check=True, text=True)

    title = re.search(r"<title>(-?\d+)", done.stdout)
    assert title is not None
    assert int(title[1]) <= 0

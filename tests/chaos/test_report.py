"""Reports say what happened, whoever reads them, and hold nothing that could break their format."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from functools import cache
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvops.chaos.history import Arm, End, Fault, FaultState, Finish, Run, RunRecord, Step
from kvops.chaos.report import compare, html, journal, junit, text
from kvops.chaos.report.document import document, timeline
from kvops.chaos.verdict import Judgement, RunVerdict, judge
from kvops.errors import UsageError
from tests.chaos.histories import World, changed, record, simulate

SMALL = World(seed=2, blocks=2, rps=20, before_s=3, fault_s=8, after_s=8, window_s=4)
NASTY = "</script><b>&\x1b[31m\x00\"'"


@cache
def small(world: World = SMALL) -> tuple[RunRecord, Judgement]:
    found = simulate(world)
    run = msgspec.structs.replace(
        found.run,
        title="one store of three is killed",
        experiment="store-kill.yaml",
        started_at="2031-05-04T14:02:07Z",
    )
    found = dataclasses.replace(found, run=run)
    return found, judge(found)


def dirty() -> tuple[RunRecord, Judgement]:
    found = record(
        Fault(state=FaultState.INJECTING, t_ns=1, fault="net.cut", target=NASTY, commands=("nft -f -",)),
        Fault(
            state=FaultState.DIRTY, t_ns=9, fault="net.cut", target=NASTY, commands=("nft delete table x",)
        ),
        Finish(t_ns=10, end=End.COMPLETED, undone=False),
        run=Run(title=NASTY, seed=9),
    )
    return found, judge(found)


class Page(HTMLParser):
    """Text and attributes of a page; fails on tags that do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "data", "srcset"):
                self.fetched.append(value or "")
            elif name == "href":
                self.links.append(value or "")
            elif name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += f" {data} "


def test_html_says_what_happened_and_fetches_nothing() -> None:
    """Verdict, numbers, proof, commands with their undo, breakers and seed are on the page; it needs nothing else."""
    source = html.render(*small())
    page = Page(source)

    for wanted in (
        "UNKNOWN",
        "Containment K",
        "one store of three is killed",
        "pidfd readable; its port refuses",
        "kill -KILL 4711",
        "kvops serve store --config store-1.yaml",
        "engine-g1 → store-1",
        "Time to first token",
        "kvops chaos run store-kill.yaml --seed 2",
        "seed 2",
        "5 are needed",
    ):
        assert wanted in page.text, wanted
    assert page.fetched == []
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", source)
    assert json.loads(source.partition('id="run">')[2].partition("</script>")[0])["seed"] == 2


def test_strange_names_stay_text() -> None:
    """A name with markup or control characters changes no page and no XML, and a DIRTY run shows its commands."""
    found, judgement = dirty()
    page = Page(html.render(found, judgement))
    tree = ET.fromstring(junit.render(found, judgement))

    assert judgement.verdict is RunVerdict.DIRTY
    assert "Left behind" in page.text
    assert "nft delete table x" in page.text
    assert tree.find("testsuite") is not None
    assert "nft delete table x" in text.render(found, judgement)


@pytest.mark.process
@pytest.mark.parametrize(("kind", "width"), [("run", 390), ("run", 1280), ("comparison", 390)])
def test_page_fits_its_window(kind: str, width: int, tmp_path: Path) -> None:
    """In a real browser, on a telephone and on a desk, nothing is wider than the window and no script fails."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    # The page in a frame of that width: a headless window has a width of its own below 500.
    if kind == "run":
        source = html.render(*small(changed(SMALL, spread_to=("g2",), hit_loss=0.9)))
    else:
        source = compare.page([side(), side(placement="random", without=("local-first",))])
    inner = escape(
        source.replace("<head>", "<head><script>onerror=(what)=>{parent.bad=what}</script>"), quote=True
    )
    probe = (
        "<script>var bad='none';addEventListener('load',()=>{const f=document.querySelector('iframe');"
        "const d=f.contentDocument.documentElement;document.title=`${d.scrollWidth-d.clientWidth} px too wide, `"
        "+`${f.contentDocument.querySelectorAll('.chart').length} charts, errors ${bad}, ${d.clientWidth}`})</script>"
    )
    file = tmp_path / "frame.html"
    file.write_text(
        f'<!doctype html><title>not loaded</title>{probe}<iframe srcdoc="{inner}" '
        f'style="width:{width}px;height:900px;border:0"></iframe>'
    )
    done = subprocess.run(
        [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000",
            "--virtual-time-budget=4000",
            "--dump-dom",
            file.as_uri(),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )

    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    charts = 3 if kind == "run" else 0
    assert title.startswith(f"0 px too wide, {charts} charts, errors none, "), title + done.stderr[-300:]
    assert width - 20 <= int(title.split()[-1]) <= width  # a scroll bar takes its part


def test_json_has_the_keys_others_rely_on() -> None:
    """The document's stable keys are there, and null stands for what could not be measured."""
    made = json.loads(json.dumps(document(*small())))

    assert {"schema", "verdict", "seed", "containment", "timeline", "checkers", "injected", "undone"} <= set(
        made
    )
    assert {"K", "S", "amplification"} <= set(made["containment"])
    assert (made["injected"], made["undone"], made["verdict"], made["exit_code"]) == (
        True,
        True,
        "UNKNOWN",
        13,
    )
    assert made["timeline"][0] == {
        "at_s": pytest.approx(made["timeline"][0]["at_s"]),
        "time": made["timeline"][0]["time"],
        "what": "injecting",
        "ok": True,
        "text": "process.kill store-1",
        "commands": ["kill -KILL 4711"],
    }
    assert document(*dirty())["containment"]["K"] is None


def test_timeline_is_in_utc_when_the_run_knew_when_it_began() -> None:
    """Entries come in order, with the wall clock's time where the run recorded it and without it elsewhere."""
    found, _ = small()
    entries = timeline(found)
    unknown = timeline(dataclasses.replace(found, run=msgspec.structs.replace(found.run, started_at="")))

    assert [one.at_s for one in entries] == sorted(one.at_s for one in entries)
    assert entries[0].time.startswith("2031-05-04T14:0")
    assert {one.time for one in unknown} == {""}


def test_junit_is_red_without_proof() -> None:
    """The verdict is a case of its own: a run that proved nothing fails there; checkers without data are skipped."""
    suite = ET.fromstring(junit.render(*small())).find("testsuite")
    assert suite is not None
    cases = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}

    assert cases["verdict"] == ["failure"]
    assert cases["S1 integrity"] == []
    assert cases["S4 lease"] == ["skipped"]
    assert cases["C1 containment"] == ["error"]
    assert int(suite.get("tests", 0)) == len(cases)


def test_journal_is_readable_as_the_toolkits() -> None:
    """Status, deviation, steady states, actions and rollbacks lie where a journal's readers look for them."""
    made = journal.journal(*small(changed(SMALL, wrong_share=0.2)))
    left = journal.journal(*dirty())

    assert (made["status"], made["deviated"]) == ("completed", True)
    assert [one["status"] for one in made["run"]] == ["succeeded", "succeeded"]
    assert [one["status"] for one in made["rollbacks"]] == ["succeeded", "succeeded"]
    assert made["start"] < made["end"]
    assert made["steady_states"]["before"]["steady_state_met"] is True
    assert (left["status"], left["run"][0]["status"]) == ("failed", "failed")


def test_text_fits_a_screen() -> None:
    """The text names seed, fault, proof and verdict, shows what is missing, and stays short."""
    lines = text.render(*small()).splitlines()

    assert lines[0].startswith("seed 2  g1  process.kill store-1  33.3 %")
    assert any(line.startswith("active   ✓ 14:0") and "its port refuses" in line for line in lines)
    assert any(line.startswith("UNKNOWN  K ") for line in lines)
    assert lines[-1] == "again: kvops chaos run store-kill.yaml --seed 2"
    assert len(lines) < 40


def side(**changes: Any) -> compare.Side:
    extra = {name: changes.pop(name) for name in ("without", "placement") if name in changes}
    found, _ = small(changed(SMALL, **changes))
    found = dataclasses.replace(found, run=msgspec.structs.replace(found.run, **extra))
    return compare.as_side(found, judge(found))


def test_safeguards_are_compared_side_by_side() -> None:
    """With and without a breaker, both containments are in one table, and a difference beyond chance is called one."""
    sides = [side(), side(hit_loss=0.9, without=("breaker",))]
    shown = compare.render(sides)
    lines = {line.partition("  ")[0]: line.split() for line in shown.splitlines()}

    assert shown.startswith("the same: process.kill on store-1, seed 2, 33.3 % of the capacity")
    assert "all safeguards, local-first" in shown.splitlines()[1]
    assert "without breaker, local-first" in shown.splitlines()[1]
    assert lines["differs: switched off"][-2:] == ["nothing", "breaker"]
    assert "differs: placement" not in lines
    assert "degraded at g1 (hit)" in lines
    assert "degraded at g2" in lines
    assert re.search(
        r"without breaker, local-first: K 2\.\d\d beside [01]\.\d\d: higher, beyond chance", shown
    )
    assert [one["without"] for one in compare.document(sides)["sides"]] == [[], ["breaker"]]


def test_placements_that_do_not_differ_are_not_told_apart() -> None:
    """Two runs whose intervals overlap are evidence for nothing; that placement is all they differ in is said."""
    shown = compare.render([side(), side(placement="random")])

    assert re.search(r"random: K .*: no difference that this run can tell from chance", shown)
    assert [line.split() for line in shown.splitlines() if line.startswith("differs")] == [
        ["differs:", "placement", "local-first", "random"]
    ]


def test_a_run_without_a_baseline_is_no_evidence() -> None:
    """What was not steady, or not had to its end, is compared with nothing, and why is said."""
    unsteady = side(placement="random")
    end = Finish(t_ns=10**13, end=End.NOT_STEADY, why="before the fault: answered in budget is 0.6")
    found = dataclasses.replace(unsteady.record, end=end)
    shown = compare.render([side(), compare.as_side(found, judge(found))])

    assert "random: BASELINE_NOT_STEADY, so it is no evidence (before the fault: answered in budget" in shown
    assert "no difference" not in shown


def test_the_comparison_is_a_page_of_its_own() -> None:
    """Both sides, what they differ in and what that shows are on one page that needs nothing else."""
    page = Page(source := compare.page([side(), side(placement="random")]))

    for wanted in (
        "2 runs side by side",
        "all safeguards, random",
        "placement",
        "K, 95 %",
        "can tell from chance",
    ):
        assert wanted in page.text, wanted
    assert page.fetched == []
    assert json.loads(source.partition('id="comparison">')[2].partition("</script>")[0])["differs"] == {
        "placement": ["local-first", "random"]
    }


def test_only_like_is_compared() -> None:
    """Runs of another seed, fault or scope are refused, and so is one run alone."""
    found, _ = small()
    other = dataclasses.replace(found, run=msgspec.structs.replace(found.run, seed=99))

    with pytest.raises(UsageError, match="differ in seed: 2 and 99"):
        compare.check_comparable([found, other])
    with pytest.raises(UsageError, match="1 runs cannot be compared"):
        compare.check_comparable([found])


def test_what_a_quick_run_did_not_conclude_is_no_nought() -> None:
    """Spread that was not concluded, and a recovery that was not looked on, are said so wherever they are shown."""
    found, judgement = small(
        changed(SMALL, quick=True, blocks=1, arms=(Arm.BASELINE, Arm.FAULT), after_s=0.0, stays_s=0.0)
    )
    page = Page(html.render(found, judgement)).text

    assert "S 0 (not concluded)" in text.render(found, judgement)
    assert "domains outside; not concluded" in page
    assert "not looked on after the undo" in page
    assert "not warm again" not in page
    assert "quick run" in page


def test_each_thing_is_told_once() -> None:
    """A store's event names it once, and a proof is in the timeline once, though the runner says it, too."""
    found, _ = small()
    proof = next(row for row in found.faults if row.state is FaultState.ACTIVE)
    step = Step(t_ns=proof.t_ns, name="active", text="; ".join(proof.proof))
    told = timeline(dataclasses.replace(found, steps=(*found.steps, step)))

    assert sum(entry.what == "active" for entry in told) == sum(
        row.state is FaultState.ACTIVE for row in found.faults
    )
    for entry in told:
        if entry.what.startswith("store."):
            words = entry.text.split()
            assert len(words) == len(set(words)), entry.text


def test_empty_run_has_every_report() -> None:
    """A run of nothing but its first row is shown in every format, as what it is."""
    found = record(run=Run())
    judgement = judge(found)

    assert judgement.verdict is RunVerdict.NOT_INJECTED
    assert "NOT_INJECTED" in Page(html.render(found, judgement)).text
    assert "NOT_INJECTED" in text.render(found, judgement)
    assert ET.fromstring(junit.render(found, judgement)).tag == "testsuites"
    assert journal.journal(found, judgement)["status"] == "failed"
    assert Arm.FAULT not in document(found, judgement)["arms"]

"""``kvops replay``, ``workload`` and ``demo``, on a real group."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvops.cli.replay import detail_text, key_prefix, parse_planned
from kvops.errors import UsageError
from kvops.inference.synth import AGENTIC, CHAT, generate
from kvops.inference.trace import read_trace
from tests.waiting import WAIT_S

from .conftest import Run, Started, environment, runner, wait_prepared


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One master and two small stores for all tests; each leaves them running."""
    folder = tmp_path_factory.mktemp("group")
    env = environment(folder)
    run = runner(env)
    begun = run("start", "--stores", "2", "--segment-size", "128MiB")
    try:
        assert begun.returncode == 0, begun.stderr
        wait_prepared(run)
        yield Started(run, folder, env)
    finally:
        run("stop", "--now")


@pytest.fixture
def group(running: Started) -> Run:
    """How commands are run on it."""
    return running.run


@pytest.mark.parametrize(
    ("text", "action", "target", "at_ms", "at_share"),
    [
        ("30s:kill:store-2", "kill", "store-2", 30_000.0, None),
        ("12.5%:pause:store-0", "pause", "store-0", None, 0.125),
    ],
)
def test_planned_events_are_read(
    text: str, action: str, target: str, at_ms: float | None, at_share: float | None
) -> None:
    """A time of the trace or a share of the requests, what to do, and to whom."""
    planned = parse_planned(text)

    assert (planned.action, planned.target, planned.at_ms, planned.at_share) == (
        action,
        target,
        at_ms,
        at_share,
    )


@pytest.mark.parametrize(
    "text",
    ["", "30s", "30s:kill", "30s:melt:store-2", "30:kill:store-2", "x%:kill:store-2", "101%:kill:store-2"],
)
def test_a_planned_event_that_is_none_shows_how_one_looks(text: str) -> None:
    """The error carries an example."""
    with pytest.raises(UsageError, match="30s:kill:store-2") as caught:
        parse_planned(text)
    assert caught.value.exit_code == 2


def test_keys_of_different_runs_traces_and_page_sizes_never_meet() -> None:
    """Only --warm replays of one trace share pages, also when one of them stops earlier."""
    chat = list(generate(CHAT, requests=100, seed=1))
    agents = list(generate(AGENTIC, requests=100, seed=1))

    def warm(requests: list, page_bytes: int = 64) -> str:
        return key_prefix(requests, page_bytes=page_bytes, warm=True)

    assert warm(chat) == warm(chat[:80]) != warm(agents)
    assert warm(chat) != warm(chat, 128)
    assert key_prefix(chat, page_bytes=64, warm=False) != key_prefix(chat, page_bytes=64, warm=False)


def test_an_events_reason_comes_first() -> None:
    """People read the reason, then the rest by name."""
    told = detail_text({"id": 3, "reason": "silent for 2 s", "objects": 7})

    assert told == "silent for 2 s, id 3, objects 7"
    assert detail_text({"id": 3}) == "id 3"


@pytest.mark.process
def test_a_store_is_killed_in_the_middle_of_a_replay(group: Run, tmp_path: Path) -> None:
    """Every request is answered, no byte is wrong, the report and the figures say what happened."""
    report = tmp_path / "r.html"
    done = group(
        "replay", "--workload", "agentic", "--requests", "120", "--l2-size", "1MiB", "--page-size", "16KiB",
        "--at", "50%:kill:store-1", "--report", str(report), "-o", "json",
    )  # fmt: skip

    figures = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (figures["requests"], figures["failed"], figures["wrong_bytes"]) == (120, 0, 0)
    assert figures["hit_ratio"]["by_tier"]["L3"] > 0
    assert figures["bytes_checked"] > 0
    assert "fault.killed" in [event["event"] for event in figures["events"]]
    assert figures["impact"]["fault"] == "fault.killed store-1"
    assert figures["recomputed_tokens"] == sum(figures["losses"].values())
    assert "store-1 killed" in report.read_text()
    assert "killed, on purpose" in done.stderr
    assert done.stderr.endswith("store-1 is still down: kvops restart store-1\n")
    assert group("status", "-q").returncode == 1
    assert group("restart", "store-1").returncode == 0
    wait_prepared(group)


@pytest.mark.process
def test_pages_stay_for_a_warm_replay_and_are_strangers_to_a_fresh_one(group: Run, tmp_path: Path) -> None:
    """A second --warm replay finds everything in the pool, by tcp between the hosts as well; a plain one nothing."""
    trace = str(tmp_path / "t.jsonl")
    assert group("workload", "agentic", "--requests", "40", "--to", trace).returncode == 0

    def ratio(*more: str) -> float:
        done = group(
            "replay", trace, "--nodes", "1", "--l2-size", "0B", "--page-size", "4KiB", "--deadline", "30s",
            "-o", "json", *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["hit_ratio"]["tokens"])

    first = ratio("--warm")
    assert ratio("--warm", "--transports", "tcp") == 1.0
    assert ratio() == first < 1.0


@pytest.mark.process
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=lambda value: str(value)
)
def test_an_interrupted_replay_leaves_no_engine(running: Started, signum: signal.Signals, code: int) -> None:
    """Ctrl-C and SIGTERM in the middle end all nodes; the exit code says which it was."""
    argv = [sys.executable, "-m", "kvops", "replay", "--workload", "synth", "--speed", "0.001"]
    with subprocess.Popen(argv, env=running.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        engines: list[psutil.Process] = []
        while len(engines) < 2 and process.poll() is None:
            engines = psutil.Process(process.pid).children()
            time.sleep(0.01)  # nothing tells of a child but a look
        process.send_signal(signum)
        _, said = process.communicate(timeout=WAIT_S)

    assert process.returncode == code, said
    assert not [one for one in engines if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.process
def test_a_replay_that_cannot_be_is_refused_at_once(group: Run, tmp_path: Path) -> None:
    """Wrong members, times, files and units: exit 2 with what to do, and nothing was replayed."""
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"timestamp": 0, "input_len')
    synth = ("--workload", "synth", "--requests", "5")
    for args, says in (
        ((), "name a trace file"),
        ((str(cut),), "cut.jsonl:1: not a request"),
        ((str(cut), *synth), "both a trace and a workload"),
        ((*synth, "--at", "50%:kill:store-7"), "no member store-7"),
        ((*synth, "--at", "5h:kill:store-1"), "the trace ends at"),
        ((*synth, "--page-size", "100B"), "multiple of 8"),
        ((*synth, "--page-size", "64"), "unit"),
        ((*synth, "--page-size", "2GiB"), "multiple of 8"),
        ((*synth, "--speed", "nan"), "speed of nan"),
        ((*synth, "--report", str(cut / "r.html")), "cannot be written"),
        ((*synth, "--report", str(tmp_path / "none" / "r.html")), f"there is no folder {tmp_path / 'none'}"),
    ):
        done = group("replay", *args)
        assert (done.returncode, done.stdout) == (2, ""), (args, done.stderr)
        assert says in done.stderr


def test_a_replay_needs_a_group_that_runs(run: Run) -> None:
    """Without a pool the command says so and how to get one."""
    done = run("replay", "--workload", "synth", "--requests", "5", "-o", "json")

    assert done.returncode == 3
    assert "kvops start" in json.loads(done.stdout)["error"]["fix"]


def test_workloads_are_written_and_described(run: Run, tmp_path: Path) -> None:
    """The same seed gives the same file; standard output and a file agree; a file is not replaced unasked."""
    path = tmp_path / "t.jsonl"
    made = run("workload", "synth", "--requests", "50", "--seed", "3", "--to", str(path))
    again = run("workload", "synth", "--requests", "50", "--seed", "3")
    refused = run("workload", "synth", "--to", str(path))
    described = run("workload", "describe", str(path), "-o", "json")

    assert made.returncode == 0, made.stderr
    assert path.read_text() == again.stdout
    assert (refused.returncode, len(read_trace(str(path)))) == (5, 50)
    assert "--force" in refused.stderr
    facts = json.loads(described.stdout)
    assert (facts["schema"], facts["requests"]) == (1, 50)
    assert 0 < facts["token_hit_limit"] < 1
    assert facts["token_hit_limit"] == round(facts["token_hit_limit"], 6)
    assert run("workload", "synth", "--requests", "5", "--to", str(path), "--force").returncode == 0


def test_a_trace_goes_through_a_pipe(run: Run) -> None:
    """What workload writes describe reads, from standard input; a reader that leaves early is no failure."""
    trace = run("workload", "agentic", "--requests", "20").stdout

    described = run("workload", "describe", "-", stdin=trace.encode())

    assert described.returncode == 0
    assert "requests\t20" in described.stdout


@pytest.mark.process
@pytest.mark.slow
def test_the_demo_runs_from_start_to_stop(run: Run, tmp_path: Path) -> None:
    """A store dies, nothing blocks, no byte is wrong, the report is there, and no process or folder is left."""
    report = tmp_path / "report.html"
    done = run("demo", "--requests", "200", "--segment-size", "128MiB", "--report", str(report))

    assert done.returncode == 0, done.stderr
    assert [f"[{step}/5]" in done.stdout + done.stderr for step in range(1, 6)] == [True] * 5
    assert "0 processes left" in done.stdout
    assert "TTFT p99, ms" in done.stdout, "what the fault cost must not be in the report alone"
    assert "store-2 killed in the middle" in report.read_text()
    assert list(tmp_path.glob("kvops-demo-*")) == []
    assert "demo" not in run("--help").stdout

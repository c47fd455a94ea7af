"""A replay with real engine processes; the pool is a folder they share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvops.diag.scrape import scrape
from kvops.errors import KvopsError, Unreachable, UsageError
from kvops.inference import replay as module
from kvops.inference.metrics import ReplayMetrics
from kvops.inference.replay import Planned, Progress, ReplayConfig, replay
from kvops.inference.results import DONE, ReplayEvent, impact, summary
from kvops.inference.synth import AGENTIC, generate
from kvops.inference.trace import Request, describe
from tests.waiting import WAIT_S

pytestmark = pytest.mark.process

REQUESTS = list(generate(AGENTIC, requests=60, seed=1))
MORE_REQUESTS = list(generate(AGENTIC, requests=300, seed=1))  # where something must happen meanwhile


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReplayConfig]:
    """A replay over a fresh folder; engines find the tests' pools through PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    folder = tmp_path / "pool"
    folder.mkdir()

    def make(*, nodes: int = 1, l2_pages: int = 30, **more: Any) -> ReplayConfig:
        return ReplayConfig(
            pool_factory="pools:open_folder",
            pool_options={"folder": str(folder)},
            hosts=tuple(f"host-{i}" for i in range(nodes)),
            page_bytes=64,
            l2_bytes=64 * l2_pages,
            **{"deadline_ms": 30_000, "prefetch_ms_max": 30_000, **more},
        )

    return make


def trouble(config: ReplayConfig, word: str) -> None:
    folder = Path(str(config.pool_options["folder"]))
    (folder.parent / "trouble").write_text(word)
    (folder.parent / "trouble").replace(folder / "trouble")  # engines see all of it or nothing


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """No engine outlives its replay, whatever happened in it."""
    yield
    left = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # gone between two looks
            if child.status() != psutil.STATUS_ZOMBIE:
                left.append(child)
    assert left == []


def test_ctrl_c_while_an_engine_is_started(
    config: Callable[..., ReplayConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was just started when Ctrl-C came has ended, and been collected, before the replay has."""
    started = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)

    with pytest.raises(KeyboardInterrupt):
        replay(REQUESTS, config(nodes=2))

    assert [process.returncode is not None for process in started] == [True]


def test_first_tokens_are_shown_while_a_replay_runs(config: Callable[..., ReplayConfig]) -> None:
    """/metrics counts every answer's time to first token, under a name that ``diagnose watch`` reads."""
    counts = ReplayMetrics()
    with counts.serve("127.0.0.1:0") as server:
        result = replay(REQUESTS, config(), on_answer=counts.answered)

        seen = scrape([f"http://{server.address}/metrics"])
    assert seen.unseen == ()
    assert seen.first_tokens == len(REQUESTS)
    assert seen.first_token_s == pytest.approx(result.rows["ttft_ms"].sum() / 1000)


def test_one_node_reaches_the_traces_limit_and_every_token_is_accounted_for(
    config: Callable[..., ReplayConfig],
) -> None:
    """
    Hits are exactly the possible ones, nothing is lost or wrong, and the figures carry the promised names.
    """
    seen: list[Progress] = []
    result = replay(REQUESTS, config(), on_progress=seen.append)

    figures = summary(result)
    facts = describe(REQUESTS)
    assert (
        figures["hit_ratio"]["tokens"] == figures["hit_ratio"]["possible"] == round(facts.token_hit_limit, 6)
    )
    assert figures["hit_ratio"]["tokens"] == pytest.approx(sum(figures["hit_ratio"]["by_tier"].values()))
    assert min(figures["hit_ratio"]["by_tier"].values()) > 0
    assert (figures["requests"], figures["input_tokens"]) == (60, facts.input_tokens)
    assert (figures["wrong_bytes"], figures["over_deadline"], figures["losses"], figures["failed"]) == (
        0,
        0,
        {},
        0,
    )
    assert {"mean", "p50", "p95", "p99", "max"} == figures["read_ms"].keys() == figures["ttft_ms"].keys()
    assert figures["bytes_checked"] > 0
    assert seen[-1].requests == 60


def test_tokens_add_up_with_several_nodes(config: Callable[..., ReplayConfig]) -> None:
    """Hit, recomputed and new tokens are all there are, and every recomputed one has a reason."""
    result = replay(REQUESTS, config(nodes=3))

    figures = summary(result)
    new = sum(
        int(row["input_tokens"]) - int(seen)
        for row, seen in zip(result.rows, result.seen_tokens, strict=True)
    )
    assert figures["input_tokens"] == figures["hit_tokens"] + new + figures["recomputed_tokens"]
    assert figures["recomputed_tokens"] == sum(figures["losses"].values())
    assert figures["losses"].keys() <= {"IN_FLIGHT"}
    assert sum(node["requests"] for node in figures["nodes"]) == 60
    assert min(node["requests"] for node in figures["nodes"]) > 0


def test_a_pool_that_fails_in_the_middle_costs_hits_and_no_request(
    config: Callable[..., ReplayConfig],
) -> None:
    """
    An event fires at its place in the trace; every request is answered, and the losses name what happened.
    """
    planned = Planned(action="kill", target="store-2", at_share=0.2)
    setup = config(events=(planned,))
    events: list[ReplayEvent] = []

    def launcher(action: str, target: str) -> str:
        trouble(setup, "STORE_DOWN")
        return f"{action} {target}"

    result = replay(MORE_REQUESTS, setup, launcher=launcher, on_event=events.append)

    figures = summary(result)
    assert (result.rows["state"] == DONE).all()
    assert figures["losses"].keys() == {"STORE_DOWN"}
    assert {(e["event"], e["subject"], e["detail"]) for e in figures["events"]} == {
        ("fault.killed", "store-2", "kill store-2"),
        ("loss.first_seen", "node-0", "STORE_DOWN"),
        ("breaker.opened", "store-2", "at node-0"),
    }
    assert events[0].event == "fault.killed"
    assert len(events) == 3
    hit = impact(result)
    assert hit is not None
    assert hit.before.served_share == 1.0
    assert hit.after.hit_ratio < hit.before.hit_ratio
    assert hit.recovered_after_s is None
    assert hit.before.requests + hit.after.requests == 300


def test_wrong_bytes_are_counted_told_and_never_served(config: Callable[..., ReplayConfig]) -> None:
    """A page that the pool calls a hit and that is not its key's is an event, a figure, and a loss: no hit."""
    setup = config(l2_pages=0)
    replay(REQUESTS[:20], setup)
    for page in Path(str(setup.pool_options["folder"])).iterdir():
        page.write_bytes(bytes(64))

    result = replay(REQUESTS[:20], setup)

    figures = summary(result)
    assert figures["hit_tokens"] == 0
    assert (result.rows["wrong_bytes"] > 0).all()
    assert [event["event"] for event in figures["events"]].count("page.corrupted") == 20
    assert figures["losses"].keys() == {"CORRUPT"}


def test_an_event_that_fails_is_reported_and_does_not_end_the_replay(
    config: Callable[..., ReplayConfig],
) -> None:
    """A launcher's expected trouble is an event of its own; nothing counts as "after a fault" then."""

    def launcher(action: str, target: str) -> str:
        raise KvopsError(f"no member {target}", fix="kvops status")

    setup = config(events=(Planned(action="kill", target="store-9", at_ms=1_000.0),))
    result = replay(REQUESTS[:20], setup, launcher=launcher)

    assert [(e.event, e.subject) for e in result.events] == [("fault.failed", "store-9")]
    assert impact(result) is None


def test_a_node_that_dies_hands_its_requests_to_the_others(config: Callable[..., ReplayConfig]) -> None:
    """An engine killed in the middle is an event; all requests are still answered."""

    def launcher(action: str, target: str) -> str:
        engine = min(psutil.Process().children(), key=lambda child: child.pid)
        os.kill(engine.pid, signal.SIGKILL)
        return "killed an engine"

    setup = config(nodes=2, events=(Planned(action="kill", target="node-0", at_share=0.2),))
    result = replay(MORE_REQUESTS, setup, launcher=launcher)

    assert (result.rows["state"] == DONE).all()
    assert "node.lost" in [event.event for event in result.events]


def test_a_hung_engine_is_given_up(
    config: Callable[..., ReplayConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool call that never returns holds the replay for a bounded time; then the node counts as lost."""
    monkeypatch.setattr(module, "SILENCE_S_MAX", 0.5)
    setup = config()
    trouble(setup, "hang")

    with pytest.raises(Unreachable, match="every node died, the last one after 0 of 60"):
        replay(REQUESTS, setup)


def test_when_all_nodes_die_the_replay_says_so(config: Callable[..., ReplayConfig]) -> None:
    """No endless wait for answers that cannot come."""
    setup = config(nodes=2)
    trouble(setup, "crash")

    with pytest.raises(Unreachable, match="every node died"):
        replay(REQUESTS, setup)


def test_a_bug_in_an_engine_comes_with_its_traceback(config: Callable[..., ReplayConfig]) -> None:
    """An unexpected exception is not taken for a dead node: it is raised, with where it happened."""
    setup = config()
    trouble(setup, "bug")

    with pytest.raises(RuntimeError, match=r"(?s)node-0: ZeroDivisionError.*pools\.py"):
        replay(REQUESTS, setup)


def test_an_engine_that_cannot_have_a_pool_says_why(config: Callable[..., ReplayConfig]) -> None:
    """An expected trouble at the start keeps its words and its exit code."""
    with pytest.raises(KvopsError, match="no pool factory nowhere:x") as caught:
        replay(REQUESTS, ReplayConfig(pool_factory="nowhere:x"))
    assert caught.value.exit_code == UsageError.exit_code


def test_ctrl_c_leaves_no_engine(config: Callable[..., ReplayConfig]) -> None:
    """An interrupt in the middle comes out as it is, and the engines are gone (checked after every test)."""

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(REQUESTS, config(nodes=2), on_progress=interrupt)


def test_a_killed_replay_takes_its_engines_with_it(
    config: Callable[..., ReplayConfig], tmp_path: Path
) -> None:
    """SIGKILL of the replaying process, which can clean up nothing: the kernel ends the engines."""
    setup = config(nodes=2, speed=1e-6)
    script = textwrap.dedent(f"""
        import sys
        from kvops.inference.replay import ReplayConfig, replay
        from kvops.inference.synth import AGENTIC, generate
        config = ReplayConfig(
            pool_factory="pools:open_folder",
            pool_options={dict(setup.pool_options)!r},
            hosts=("host-0", "host-1"),
            page_bytes=64,
            speed=1e-6,
        )
        requests = list(generate(AGENTIC, requests=5, seed=1))
        replay(requests, config, on_progress=lambda p: print("up", flush=True))
    """)
    root = Path(module.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ["PYTHONPATH"]])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        engines = psutil.Process(parent.pid).children()
        parent.kill()

    _, alive = psutil.wait_procs(engines, timeout=WAIT_S)
    assert len(engines) == 2
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_a_pace_spreads_the_requests_over_time(config: Callable[..., ReplayConfig]) -> None:
    """With a speed a request is never sent before its time, scaled; how far behind it came is known."""
    speed = 40.0
    result = replay(REQUESTS[:30], config(speed=speed))

    due_s = result.arrival_ms / 1000 / speed
    assert (result.rows["sent_s"] >= due_s - 1e-3).all()
    assert result.lag_s >= 0


def test_engines_start_while_threads_run(config: Callable[..., ReplayConfig]) -> None:
    """Engines are fresh interpreters, not forks: a lock held by a thread of the caller cannot stop them."""
    stop = threading.Event()
    holder = threading.Thread(target=stop.wait)
    holder.start()
    try:
        assert len(replay(REQUESTS[:5], config(nodes=2)).rows) == 5
    finally:
        stop.set()
        holder.join()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speed": -1.0}, "speed of -1"),
        ({"page_bytes": 100}, "pages of 100 bytes"),
        ({"hosts": ()}, "0 nodes"),
        ({"hosts": ("h",) * 65}, "65 nodes"),
        ({"model": "gpt"}, "no GPU model gpt"),
        ({"deadline_ms": 0}, "deadline of 0 ms"),
        ({"events": (Planned(action="melt", target="store-0", at_share=0.1),)}, "cannot melt"),
        ({"events": (Planned(action="kill", target="store-0", at_ms=9e9),)}, "the trace ends at"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    changes: dict[str, Any], says: str
) -> None:
    """Each wrong value is named, with what would be right."""
    with pytest.raises(UsageError, match=says) as caught:
        replay(REQUESTS, ReplayConfig(pool_factory="nowhere:x", **changes), launcher=lambda *_: "")
    assert caught.value.fix


def test_requests_without_shared_prefixes_have_nothing_to_lose(config: Callable[..., ReplayConfig]) -> None:
    """No hit is possible and none is missing: ratios are 0, not errors."""
    requests = [Request(timestamp_ms=i, input_tokens=10, output_tokens=1, hash_ids=(i,)) for i in range(4)]
    figures = summary(replay(requests, config()))

    assert figures["hit_ratio"] == {"tokens": 0.0, "by_tier": {"L2": 0.0, "L3": 0.0}, "possible": 0.0}
    assert figures["read_ms"]["p99"] == 0.0

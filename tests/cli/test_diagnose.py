"""``kvops diagnose`` and ``kvops explain`` as an operator or a scheduler calls them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvops.cli.main import main
from kvops.diag.snapshot import save
from kvops.diag.watch import Watch

sys.path.insert(0, str(Path(__file__).parents[1] / "diag"))
from world import World


def _save(world: World, path: Path) -> Path:
    snapshot = world.snapshot()
    save({**snapshot.files._files, "meta.json": json.dumps(snapshot.meta).encode()}, path)  # type: ignore[attr-defined]
    return path


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_healthy_snapshot_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy snapshot gives exit code 0 and a verdict of ok."""
    assert main(["diagnose", "--from", str(_save(World(), tmp_path / "a")), "-o", "json"]) == 0

    document = _json(capsys)
    assert document["schema"] == 1
    assert document["verdict"] == "ok"
    assert document["causes"] == []


def test_failing_snapshot_names_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failing check gives exit code 1, its cause first, and only the check that was asked for with --only."""
    path = _save(World().put("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN"), tmp_path / "a")

    assert main(["diagnose", "--from", str(path), "-o", "json"]) == 1
    assert _json(capsys)["causes"][0]["check"] == "link.port_state"
    assert main(["diagnose", "--from", str(path), "-o", "json", "--only", "time.sync"]) == 0
    assert [r["check"] for r in _json(capsys)["results"]] == ["time.sync"]


@pytest.mark.parametrize("kind", ["table", "wide", "tsv", "name", "jsonl", "junit", "md", "html"])
def test_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Each format prints the failing check's id and ends with the same exit code."""
    path = _save(World().put("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN"), tmp_path / "a")

    assert main(["diagnose", "--from", str(path), "-o", kind]) == 1
    assert "link.port_state" in capsys.readouterr().out


def test_hosts_like_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A snapshot compared with one that works names the setting that differs, and path draws both."""
    odd = _save(World("node-b", 62).put("/proc/sys/vm/zone_reclaim_mode", "1"), tmp_path / "b")
    good = _save(World(), tmp_path / "a")

    assert main(["diagnose", "--from", str(odd), "--like", str(good), "-o", "json"]) == 0
    assert any(
        r["check"] == "xnode.config_drift" and r["outcome"] == "warn" for r in _json(capsys)["results"]
    )
    assert main(["diagnose", "path", str(good), str(odd), "-o", "json"]) == 0
    assert [node["name"] for node in _json(capsys)["nodes"]] == ["node-a", "node-b"]


def test_diff_with_yesterday(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What got worse since an earlier run is listed and makes exit code 1; nothing changed is 0."""
    assert main(["diagnose", "--from", str(_save(World(), tmp_path / "a")), "-o", "json"]) == 0
    (tmp_path / "old.json").write_text(capsys.readouterr().out)
    worse = _save(World().put("/proc/sys/kernel/numa_balancing", "1"), tmp_path / "b")

    assert main(["diagnose", "--from", str(worse), "--diff", str(tmp_path / "old.json"), "-o", "json"]) == 1
    assert [(c["change"], c["check"]) for c in _json(capsys)["changes"]] == [
        ("worse", "numa.balancing"),
        ("setting", "sysctl kernel.numa_balancing"),
    ]
    assert (
        main(["diagnose", "--from", str(tmp_path / "a"), "--diff", str(tmp_path / "old.json"), "-o", "json"])
        == 0
    )


def test_diff_with_a_snapshot_of_yesterday(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An older snapshot serves as well as an older document; a setting that drifted is listed with both values."""
    old = _save(World().put("/proc/sys/net/core/rmem_max", "212992"), tmp_path / "old")
    new = _save(World().put("/proc/sys/net/core/rmem_max", "4194304"), tmp_path / "new")

    code = main(["diagnose", "--from", str(new), "--diff", str(old), "-o", "json"])
    drifted = [row for row in _json(capsys)["changes"] if row["change"] == "setting"]
    assert code == 0
    assert [(row["check"], row["was"], row["now"]) for row in drifted] == [
        ("sysctl net.core.rmem_max", "212992", "4194304")
    ]
    assert main(["diagnose", "--from", str(old), "-o", "json"]) == 0
    (tmp_path / "old.json").write_text(capsys.readouterr().out)
    assert main(["diagnose", "--from", str(new), "--diff", str(tmp_path / "old.json"), "-o", "json"]) == 0
    assert [row["change"] for row in _json(capsys)["changes"]] == ["setting"]


def test_textfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The textfile for node-exporter holds what is not well, and nothing half-written stays behind."""
    path = _save(World().put("/proc/sys/kernel/numa_balancing", "1"), tmp_path / "a")

    main(["diagnose", "--from", str(path), "--textfile", str(tmp_path / "kvops.prom"), "-o", "name"])

    assert 'check="numa.balancing",node="node-a",outcome="warn"} 1' in (tmp_path / "kvops.prom").read_text()
    assert not (tmp_path / "kvops.prom.new").exists()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["diagnose", "--from", "/no/such"], "/no/such"),
        (["diagnose", "--only", "gid.link_lokal"], "gid.link_local_selected"),
        (["diagnose", "--probe", "icpm", "--peer", "a"], "icpm"),
        (["diagnose", "--probe", "icmp"], "--peer"),
        (["diagnose", "--from", ".", "--host", "a"], "--host"),
        (["explain", "check", "gid"], "14 checks"),
    ],
)
def test_usage_errors(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake gives exit code 2 and names what was wrong and what would be right."""
    assert main(argv) == 2
    assert word in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    """A check is explained; an error text leads to checks; an unknown one says so with exit code 1."""
    assert main(["explain", "check", "mem.memlock_limit"]) == 0
    assert "ibv_reg_mr" in capsys.readouterr().out
    assert main(["explain", "error", "transport retry counter exceeded", "-o", "json"]) == 0
    assert "ip.arp_flux" in _json(capsys)["symptoms"][0]["checks"]
    assert main(["explain", "error", "all is well"]) == 1


def test_list_and_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks are listed by family; a profile made from a healthy node finds the one that differs."""
    assert main(["diagnose", "list", "--family", "gid", "-o", "json"]) == 0
    assert len(_json(capsys)["checks"]) == 14
    assert main(["diagnose", "profile", "init", "--from", str(_save(World(), tmp_path / "a"))]) == 0
    (tmp_path / "site.yaml").write_text(capsys.readouterr().out)
    other = World()
    for device in ("mlx5_0", "mlx5_1"):
        other.put(f"/sys/class/infiniband/{device}/ports/1/rate", "200 Gb/sec (4X HDR)")
    path = str(_save(other, tmp_path / "b"))
    assert (
        main(["diagnose", "profile", "diff", str(tmp_path / "site.yaml"), "--from", path, "-o", "json"]) == 1
    )
    assert main(["diagnose", "--from", path, "--profile", str(tmp_path / "site.yaml"), "-o", "name"]) == 1
    assert "link.rate" in capsys.readouterr().out


def test_watch_tells_when_trouble_starts_and_ends() -> None:
    """One row a port and window; a check that starts to report is an event, and so is its end."""
    from kvops.diag.runner import select

    worlds = [World(), World().grow("local_ack_timeout_err", 9999), World()]

    def collect(window_s: float) -> dict[str, bytes]:
        snapshot = worlds.pop(0).snapshot()
        if not worlds:
            worlds.append(World())
            done.append(True)
        return {**snapshot.files._files, "meta.json": json.dumps(snapshot.meta).encode()}  # type: ignore[attr-defined]

    done: list[bool] = []
    events = []
    watch = Watch(duration_s=60, every_s=1, selected=select(["ctr.timeout_rate"]), collect=collect)
    for row in watch.rows():
        events.append(row["event"])
        if row["event"] == "over":
            break

    assert events == ["rate", "rate", "rate", "rate", "fail", "rate", "rate", "over"]


def test_mute_for_a_while(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A muted check reports as information with its reason; when the mute is over it fails again."""
    path = str(_save(World().put("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN"), tmp_path / "a"))
    state = ["--state-dir", str(tmp_path / "state")]
    only = ["diagnose", "--from", path, "--only", "link.port_state", "-o", "json", *state]

    assert (
        main(["diagnose", "mute", "link.port_state", "--for", "4h", "--reason", "INC-1", "-q", *state]) == 0
    )
    capsys.readouterr()
    assert main(only) == 0
    assert "INC-1" in _json(capsys)["results"][0]["reason"]
    assert main(["diagnose", "mute", "link.port_state", "--for", "0s", "--reason", "done", "-q", *state]) == 0
    assert main(only) == 1
    assert main(["diagnose", "mute", "link", "--for", "900d", "--reason", "x", *state]) == 2

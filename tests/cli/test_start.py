"""Starting with huge pages, refusing without, and what is left behind by neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvops.cli.start import HUGE_PAGES
from kvops.fleet.local import LocalGroup
from kvops.store.topology import read_topology
from tests import huge
from tests.cli.conftest import stop_whatever_runs
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from tests.cli.conftest import Run

pytestmark = pytest.mark.process
MIB = 1 << 20


def left_behind(folder: Path) -> list[str]:
    """Processes and sockets of the group under this folder that still exist."""
    found = [str(LocalGroup(folder / "state", "local").runtime_dir())]
    found = [path for path in found if Path(path).exists()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if os.fsencode(folder / "state") in words:
            found.append(words.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found


def test_huge_pages_that_are_not_there(run: Run, tmp_path: Path) -> None:
    """Refused before anything is started: how many are missing, what reserves them; nothing is left."""
    done = run("start", "--segment-size", "4096GiB", "--hugepages", "1GiB", "--stores", "1")

    assert done.returncode == 5
    assert "4096 huge pages of 1.0 GiB are needed; 0 are free" in done.stderr
    assert "hugepagesz=1G" in done.stderr
    assert left_behind(tmp_path) == []


def test_a_store_in_the_foreground_refuses_without_huge_pages(run: Run, tmp_path: Path) -> None:
    """As a unit would run it: exit code 5, how many are missing and what reserves them, no socket left."""
    config = tmp_path / "store.yaml"
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("ab" * 32)
    config.write_text(
        f"group: g\nmasters: ['127.0.0.1:1']\nsecret_file: {secret}\nstate_dir: {tmp_path}\n"
        f"unix_path: {tmp_path}/s.sock\nsegment_size_bytes: {4096 << 30}\nhuge_page_bytes: {1 << 30}\n"
    )

    done = run("serve", "store", "--config", str(config))

    assert done.returncode == 5, done.stderr
    assert "needs 4096 huge pages of 1024 MiB" in done.stderr
    assert "hugepagesz=1G" in done.stderr
    assert not (tmp_path / "s.sock").exists()


def test_a_segment_is_whole_huge_pages(run: Run) -> None:
    """A size that no number of such pages makes is a usage error."""
    done = run("start", "--segment-size", "3MiB", "--hugepages", "2MiB")

    assert done.returncode == 2
    assert "multiple of 2MiB" in done.stderr


@pytest.fixture
def huge_pages(run: Run, tmp_path: Path) -> Iterator[int]:
    """Sixteen huge pages of 2 MiB, given back once nobody has them any more."""
    with huge.reserved(16) as count:
        try:
            yield count
        finally:
            stop_whatever_runs(run, tmp_path)


def test_huge_pages(run: Run, tmp_path: Path, huge_pages: int) -> None:
    """A store of huge pages serves like any other, and gives every page back when it is stopped or killed."""
    free = huge.free()
    begun = run(
        "start", "--stores", "1", "--numa", "off", "--segment-size", "32MiB", "--hugepages", "2MiB", "-q"
    )
    assert begun.returncode == 0, begun.stderr
    assert run("object", "put", "a", stdin=b"in huge pages").returncode == 0
    assert run("object", "get", "a").stdout == "in huge pages"
    assert huge.free() < free
    assert run("restart", "store-0", "--now").returncode == 0
    assert huge.free() < free

    assert run("stop").returncode == 0

    until(lambda: huge.free() == free, "every page is given back")
    assert left_behind(tmp_path) == []


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory control group of 300 MiB, version 1 or 2, whichever limits memory here; gone afterwards."""
    name = f"kvops-test-{os.getpid()}"
    for parent, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(parent, name)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(300 * MIB))
            subprocess.run(["sh", "-c", f"echo $$ > {folder}/cgroup.procs"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no memory control group can be made: run as root, with /sys/fs/cgroup writable")


def test_a_control_group_with_too_little_memory(
    kvops_env: dict[str, str], tmp_path: Path, small_cgroup: Path
) -> None:
    """A real limit below the segment is found before the start: nobody is killed for want of memory later."""
    kvops = f"{sys.executable} -m kvops start --segment-size 256MiB"
    done = subprocess.run(
        ["sh", "-c", f"echo $$ > {small_cgroup}/cgroup.procs && exec {kvops}"],
        env=kvops_env,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )

    assert done.returncode == 5, done.stderr
    assert f"the memory limit of {small_cgroup} leaves" in done.stderr
    assert "of 300.0 MiB" in done.stderr
    assert left_behind(tmp_path) == []


def test_stopped_while_its_memory_is_prepared(run: Run, tmp_path: Path) -> None:
    """Status tells how far a store is; a stop in the middle ends it and leaves nothing."""
    begun = run("start", "--stores", "1", "--segment-size", "512MiB", "-o", "json")
    document = json.loads(begun.stdout)
    stopped = run("stop", "-o", "json")

    assert document["health"] == "healthy"
    assert 0 < document["stores"][0]["populated_share"] <= 1
    assert [one["how"] for one in json.loads(stopped.stdout)["stopped"]] == ["terminated", "terminated"]
    assert left_behind(tmp_path) == []


def test_a_dry_run_tells_everything_that_is_in_the_way(run: Run, tmp_path: Path) -> None:
    """Each thing that was looked at, with observed, needed and fix; exit code 5; nothing is made."""
    done = run("start", "--dry-run", "--segment-size", "1024TiB", "-o", "json")
    good = run("start", "--dry-run", "--segment-size", "1MiB", "-o", "json")

    rows = {row["check"]: row for row in json.loads(done.stdout)["preflight"]}
    assert done.returncode == 5
    assert rows["memory"]["outcome"] == "fail"
    assert rows["memory"]["needed"].startswith("1024.00 TiB")
    assert rows["memory"]["fix"]
    assert {"addresses", "open files (ulimit -n)", "locked memory (ulimit -l)", "/dev/shm"} <= set(rows)
    assert good.returncode == 0
    assert {row["outcome"] for row in json.loads(good.stdout)["preflight"]} <= {"ok", "note"}
    assert not (tmp_path / "state").exists()


def test_one_store_for_each_numa_node(run: Run) -> None:
    """Without --stores there are as many as nodes, on one logical host; of one it is said that nothing is bound."""
    document = json.loads(run("start", "--dry-run", "-o", "json").stdout)
    nodes = len(read_topology().store_nodes)

    assert sum("run " in step and "serve store" in step for step in document["steps"]) == nodes
    assert bool(document["numa_note"]) == (nodes == 1)


def test_sizes_of_huge_pages_are_what_the_store_takes() -> None:
    """What the option offers the configuration accepts."""
    from kvops.store.topology import HUGE_PAGE_BYTES

    assert set(HUGE_PAGES.values()) == {0, *HUGE_PAGE_BYTES}

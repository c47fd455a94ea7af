"""What checks read is what the collector saves."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from defects import DEFECTS
from world import World, judge

from kvops.diag.collect import agent
from kvops.diag.facts.host import HostFacts
from kvops.host import Sight, SnapshotHost

# Programs that checks understand and the collector does not run by itself, each with its reason.
NOT_RUN = {
    "cma_roce_mode": "makes a folder in configfs; the mode is read from there if it is set up",
    "ib_read_bw": "a benchmark between two hosts: the operator's own record is judged",
    "ib_read_lat": "as ib_read_bw",
    "ib_send_bw": "as ib_read_bw",
    "ib_send_lat": "as ib_read_bw",
    "ib_write_bw": "as ib_read_bw",
    "ib_write_lat": "as ib_read_bw",
    "rping": "as ib_read_bw",
    "iptables-save": "another form of iptables -S",
    "ldd": "runs the loader on a program we do not know",
    "ovs-dpctl": "another form of ovs-appctl dpctl",
    "pip": "another form of pip3",
    "show_gids": "prints what /sys/class/infiniband says",
    "uv": "another form of pip3",
}
# Files that checks look at where they are, and that the collector leaves alone.
NOT_READ = {
    "smaps": "takes seconds under the lock of a terabyte's mappings; numa_maps has the page sizes",
    "mooncake.json": "may hold secrets; options on the command line are read",
}


@cache
def _asked() -> tuple[dict[str, str], frozenset[str], World]:
    """
    Every file that a check read with success in any world (path → where it lies), every program that a check
    asked for, and a world with the files of all.
    """
    paths: dict[str, str] = {}
    programs: set[str] = set()
    everything = World()
    read, argvs = SnapshotHost.read, HostFacts.argvs

    def noted_read(self: SnapshotHost, path: str, **kwargs: Any) -> Any:
        reading = read(self, path, **kwargs)
        if reading.sight is Sight.PRESENT:
            paths[path] = self.resolve(path)
        return reading

    def noted_argvs(self: HostFacts, tool: str, *words: str) -> Any:
        programs.add(tool)
        return argvs(self, tool, *words)

    patch = pytest.MonkeyPatch()
    patch.setattr(SnapshotHost, "read", noted_read)
    patch.setattr(HostFacts, "argvs", noted_argvs)
    try:
        for defect in DEFECTS:
            worlds = [World(), World("node-b", 62)][: defect.nodes]
            defect.edit(*worlds)
            judge(*worlds)
            for path, text in worlds[0].files.items():
                everything.files.setdefault(path, text)
            everything.meta["links"] = {**worlds[0].meta["links"], **everything.meta["links"]}
    finally:
        patch.undo()
    return paths, frozenset(programs), everything


def test_every_program_is_run() -> None:
    """A program whose output a check understands is run by the collector, or there is a reason why not."""
    _, asked, _ = _asked()
    run = {argv[0] for argv in agent._commands(["efa_0"], ["ens1"], ["0000:18:00.0"], ["0000:19:00.0"])}
    run |= {argv[0] for argv in agent._slow_commands(["0000:18:00.0"], ["0000:18:00.0"], True)}
    run |= {argv[0] for argv in agent.probe_commands(agent.PROBES, ["ens1"], ["10.0.0.1"])}
    run |= {
        "arping",
        "aws",
        "journalctl",
        "nstat",
        "ovs-appctl",
        "ovs-vsctl",
        "kubectl",
    }  # run on a condition

    assert asked - run - set(NOT_RUN) == set()
    assert set(NOT_RUN) - asked == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_every_file_is_collected(tmp_path: Path) -> None:
    """On a machine made of the files of every defect, the collector saves each file that any check reads."""
    paths, _, everything = _asked()
    for name, pid in _stores(everything):
        everything.put(f"/proc/{pid}/comm", name)
    _grow(everything, tmp_path)

    collected = _collect_in(tmp_path, [pid for _, pid, *_ in _stores(everything)])

    missed = {
        path
        for path, real in paths.items()
        if not {"root" + path, "root" + real} & collected and not path.endswith(tuple(NOT_READ))
    }
    here = {path for path in missed if (tmp_path / path.lstrip("/")).is_file()}
    assert here == set()


def _stores(world: World) -> list[tuple[str, int]]:
    return [(str(target["name"]), int(target["pid"])) for target in world.meta["targets"]]


def _grow(world: World, folder: Path) -> None:
    """Make the folder look like the root of that machine: files, links, PCI functions where they really are."""
    for path, real in world.meta["realpath"].items():
        _inside(folder, real).mkdir(parents=True, exist_ok=True)
        if path != real:
            _link(folder, path, real)
    for path, target in sorted(world.meta["links"].items()):
        if target.startswith(("/sys/class", "/sys/bus")):
            _inside(folder, target).mkdir(parents=True, exist_ok=True)
        _link(folder, path, target)
    for path, text in world.files.items():
        place = _inside(folder, path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            continue  # two defects disagree on what is a folder


def _link(folder: Path, path: str, target: str) -> None:
    place = _inside(folder, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink() and not place.exists():
        place.symlink_to(os.path.relpath(_inside(folder, target), place.parent.resolve()))


def _inside(folder: Path, path: str) -> Path:
    return folder / PurePosixPath(path).relative_to("/")


def _collect_in(folder: Path, pids: list[int]) -> set[str]:
    script = (
        "import os, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(1).submit(int).result()\n"
        "from kvops.diag.collect import agent\n"
        f"os.chroot({str(folder)!r}); os.chdir('/')\n"
        f"print('\\n'.join(sorted(agent.collect(window_s=0, pids={pids!r}))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.splitlines())

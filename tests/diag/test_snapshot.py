"""Snapshots: what is absent, refused and not collected; what is half-written or hostile."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from world import World, judge, outcomes

from kvops.diag.facts.host import HostFacts
from kvops.diag.runner import run, select
from kvops.diag.snapshot import load, save
from kvops.errors import ConfigError, UsageError
from kvops.host import MemoryFiles, Sight, SnapshotHost


def _host(**meta: object) -> SnapshotHost:
    files = {
        "root/sys/a/b": b"1\n",
        "root.t1/sys/a/b": b"2\n",
        "root/sys/bus/pci/devices/x/vendor": b"0x15b3\n",
    }
    return SnapshotHost(meta={"schema": 1, "scope": ["/sys"], **meta}, files=MemoryFiles(files))


def test_absent_refused_and_not_collected() -> None:
    """Three reasons for an empty hand, never mixed up."""
    host = _host(errors={"/sys/secret": "EACCES"}, not_collected=["/sys/c"])

    assert host.read("/sys/a/b").text == "1\n"
    assert host.read("/sys/a/none").sight is Sight.ABSENT
    assert host.read("/sys/secret").sight is Sight.UNREADABLE
    assert host.read("/sys/c/d").sight is Sight.NOT_COLLECTED
    assert host.read("/proc/x").sight is Sight.NOT_COLLECTED


def test_second_sample_falls_back_to_the_first() -> None:
    """What is missing in the second sample has not changed; what is listed as gone is absent."""
    host = _host(gone=["/sys/bus/pci/devices/x/vendor"])

    assert host.read("/sys/a/b", sample=1).text == "2\n"
    assert host.read("/sys/bus/pci/devices/x/vendor", sample=1).sight is Sight.ABSENT


def test_links_are_followed_component_by_component() -> None:
    """A link to a folder that exists only in the snapshot is followed, and a circle of links ends."""
    host = _host(
        links={
            "/sys/class/net/ens1/device": "/sys/bus/pci/devices/x",
            "/sys/l1": "/sys/l2",
            "/sys/l2": "/sys/l1",
        }
    )

    assert host.read("/sys/class/net/ens1/device/vendor").text == "0x15b3\n"
    assert host.listdir("/sys/class/net").names == ("ens1",)
    assert host.read("/sys/l1/x").sight is Sight.ABSENT


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "{",
        "[]",
        '{"schema": 2}',
        '{"schema": 1, "links": []}',
        '{"schema": 1, "cmd": {"a": 1}}',
        '{"schema": 1, "scope": "x"}',
    ],
)
def test_broken_meta(tmp_path: Path, meta: str) -> None:
    """A half-written or foreign meta.json is refused with a word on what to do."""
    (tmp_path / "meta.json").write_text(meta)

    with pytest.raises(ConfigError) as caught:
        load(tmp_path)

    assert caught.value.fix


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil"])
def test_tar_that_leads_out(tmp_path: Path, name: str) -> None:
    """A member that leads out of the archive is refused."""
    _tar(tmp_path / "x.tar", {name: b"x", "meta.json": b'{"schema": 1}'})

    with pytest.raises(ConfigError, match="leads out"):
        load(tmp_path / "x.tar")


def test_tar_with_a_link(tmp_path: Path) -> None:
    """A link inside an archive is refused, wherever it points."""
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        member = tarfile.TarInfo("root/etc/passwd")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)

    with pytest.raises(ConfigError, match="link"):
        load(tmp_path / "x.tar")


def test_symbolic_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    """A folder snapshot that somebody planted a link in gives nothing from outside."""
    (tmp_path / "meta.json").write_text('{"schema": 1, "scope": ["/etc"]}')
    (tmp_path / "root").mkdir()
    (tmp_path / "root/etc").symlink_to("/etc")

    host = load(tmp_path)[0]

    assert host.read("/etc/passwd").sight is Sight.ABSENT


@pytest.mark.parametrize("suffix", ["", ".tar", ".tar.gz"])
def test_saved_and_loaded_again_gives_the_same_verdict(tmp_path: Path, suffix: str) -> None:
    """A folder, a tar and memory lead to the same results."""
    world = World().put("/proc/sys/kernel/numa_balancing", "1").grow("local_ack_timeout_err", 9999)
    snapshot = world.snapshot()
    assert isinstance(snapshot.files, MemoryFiles)
    files = {**snapshot.files._files, "meta.json": json.dumps(snapshot.meta).encode()}
    save(files, tmp_path / f"s{suffix}")

    again = run([HostFacts(host) for host in load(tmp_path / f"s{suffix}")], select())

    assert outcomes(again) == outcomes(judge(world))


def test_binary_garbage_in_every_file() -> None:
    """Garbage in all files makes no check crash: they say that they could not see."""
    world = World()
    for table in (world.files, world.later):
        for index, path in enumerate(table):
            table[path] = "\x00\ufffd\x7f" * 7 + str(index)
    world.outputs = dict.fromkeys(world.outputs, (0, "�\x00 garbage 1: 2: 3 (", ""))

    assert [r.reason for r in judge(world) if "crashed" in r.reason] == []


def test_huge_file_is_cut(tmp_path: Path) -> None:
    """A hundred megabytes in one file are not read into memory."""
    (tmp_path / "meta.json").write_text('{"schema": 1, "scope": ["/proc"]}')
    (tmp_path / "root/proc").mkdir(parents=True)
    with (tmp_path / "root/proc/modules").open("wb") as file:
        file.truncate(100 << 20)

    reading = load(tmp_path)[0].read("/proc/modules")

    assert len(reading.text) <= 8 << 20


def test_unknown_check_id_suggests() -> None:
    """A typo in a check's id names the nearest ones."""
    with pytest.raises(UsageError) as caught:
        select(["gid.link_local_selectd"])

    assert "gid.link_local_selected" in caught.value.fix


def _tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

"""
Reads and writes saved hosts: a folder or a tar a host, or a cluster of them.

What only a tar needs is imported where a tar is read or written: a folder is the common case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvops.errors import ConfigError
from kvops.host import READ_BYTES_MAX, FolderFiles, MemoryFiles, SnapshotHost

SCHEMA = 1
META_BYTES_MAX = 32 << 20
TAR_BYTES_MAX = 512 << 20  # of all files together, unpacked
TAR_FILES_MAX = 500_000
NODES_MAX = 10_000

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz")


def load(path: Path) -> list[SnapshotHost]:
    """
    Read a snapshot of one host or of a cluster.

    Args:
        path: A folder with ``meta.json``, a tar of one (``.tar``, ``.tar.gz``, ``.tar.zst``), or a folder
            of snapshots.

    Returns:
        The nodes; one unless it is a cluster.

    Raises:
        ConfigError: There is no snapshot, or it is half-written, of another schema, or unsafe to unpack.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist", fix="give a folder or tar made by: kvops diagnose --collect PATH"
        )
    if path.is_file():
        return _load_tar(path)
    if (path / "meta.json").is_file():
        return _load_folder(path)
    inside = sorted(child for child in path.iterdir() if (child / "meta.json").is_file() or _is_tar(child))
    if not inside:
        raise ConfigError(
            f"{path} has no meta.json: this is no snapshot, or a half-written one",
            fix="collect it again with --collect",
        )
    nodes = []
    for child in inside[:NODES_MAX]:
        for node in load(child):
            node.meta.setdefault("node", child.name.partition(".tar")[0])
            nodes.append(node)
    return nodes


def _is_tar(path: Path) -> bool:
    return path.is_file() and path.name.endswith(_TAR_SUFFIXES)


def _load_folder(path: Path) -> list[SnapshotHost]:
    with (path / "meta.json").open("rb") as file:
        meta = parse_meta(file.read(META_BYTES_MAX + 1), f"{path}/meta.json")
    if meta.get("kind") != "cluster":
        return [SnapshotHost(meta=meta, files=FolderFiles(str(path)))]
    nodes = []
    for name in _node_names(meta, path):
        folder = path / "nodes" / name
        if not (folder / "meta.json").is_file():
            raise ConfigError(f"{folder} has no meta.json: half-written", fix="collect the cluster again")
        with (folder / "meta.json").open("rb") as file:
            own = parse_meta(file.read(META_BYTES_MAX + 1), f"{folder}/meta.json")
        own.setdefault("node", name)
        nodes.append(SnapshotHost(meta=own, files=FolderFiles(str(folder))))
    return nodes


def _node_names(meta: dict[str, Any], path: Path) -> list[str]:
    names = meta.get("nodes")
    safe = isinstance(names, list) and all(
        isinstance(n, str) and n and "/" not in n and n != ".." for n in names
    )
    if not safe or not names or len(names) > NODES_MAX:
        raise ConfigError(
            f'{path}/meta.json: "nodes" is not a list of node names', fix="collect the cluster again"
        )
    assert isinstance(names, list)
    return names


def parse_meta(data: bytes, where: str) -> dict[str, Any]:
    """
    Read ``meta.json``.

    Raises:
        ConfigError: It is not JSON (half-written), no object, or of a schema we do not know.
    """
    if len(data) > META_BYTES_MAX:
        raise ConfigError(
            f"{where} is larger than {META_BYTES_MAX >> 20} MiB", fix="this is no snapshot of ours"
        )
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", fix="collect the snapshot again") from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{where} is no object", fix="collect the snapshot again")
    if meta.get("schema") != SCHEMA:
        raise ConfigError(
            f"{where} has schema {meta.get('schema')!r}, this kvops reads {SCHEMA}",
            fix="use the kvops that wrote it",
        )
    return meta


def _load_tar(path: Path) -> list[SnapshotHost]:
    files: dict[str, bytes] = {}
    total = 0
    for name, data in _tar_members(path):
        total += len(data)
        if total > TAR_BYTES_MAX or len(files) >= TAR_FILES_MAX:
            raise ConfigError(
                f"{path} unpacks to more than {TAR_BYTES_MAX >> 20} MiB", fix="this is no snapshot of ours"
            )
        files[name] = data
    return from_files(files, str(path))


def from_files(files: Mapping[str, bytes], where: str) -> list[SnapshotHost]:
    """
    Nodes from files in memory, named as in a snapshot's folder; one common folder above them is allowed.

    Raises:
        ConfigError: There is no ``meta.json``, or it is wrong.
    """
    metas = sorted(
        (name for name in files if name.rpartition("/")[2] == "meta.json"), key=lambda name: name.count("/")
    )
    if not metas:
        raise ConfigError(
            f"{where} has no meta.json: this is no snapshot, or a half-written one", fix="collect it again"
        )
    prefix = metas[0].removesuffix("meta.json")
    inner = {name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)}
    meta = parse_meta(inner["meta.json"], f"{where}: meta.json")
    if meta.get("kind") != "cluster":
        return [SnapshotHost(meta=meta, files=MemoryFiles(inner))]
    nodes = []
    for name in _node_names(meta, Path(where)):
        nodes += from_files(
            {n: d for n, d in inner.items() if n.startswith(f"nodes/{name}/")}, f"{where}: {name}"
        )
        nodes[-1].meta.setdefault("node", name)
    return nodes


def _tar_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """
    Plain files of a tar. A name that leads out, a link or a device is refused, not skipped: somebody made
    it.
    """
    import io
    import tarfile

    try:
        if path.name.endswith(".zst"):
            stream: Any = io.BytesIO(_unzstd(path))
            archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115
        else:
            archive = tarfile.open(path, mode="r:*")  # noqa: SIM115
        with archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if name.startswith("/") or ".." in name.split("/"):
                    raise ConfigError(
                        f"{path}: member {member.name!r} leads out of the archive",
                        fix="do not trust this file",
                    )
                if not member.isfile():
                    raise ConfigError(
                        f"{path}: member {member.name!r} is a link or a device",
                        fix="snapshots hold plain files only",
                    )
                file = archive.extractfile(member)
                yield (
                    name,
                    file.read(READ_BYTES_MAX if not name.endswith("meta.json") else META_BYTES_MAX)
                    if file
                    else b"",
                )
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(
            f"{path} is no readable tar: {str(error).splitlines()[0].rstrip(':')}",
            fix="give a folder or tar made by: kvops diagnose --collect PATH",
        ) from error


def _unzstd(path: Path) -> bytes:
    import shutil
    import subprocess

    tool = shutil.which("zstd")
    if tool is None:
        raise ConfigError(f"{path}: zstd is not installed here", fix="install zstd, or unpack it elsewhere")
    with subprocess.Popen(
        [tool, "-dc", "--memory=256MB", str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        data = run.stdout.read(TAR_BYTES_MAX + 1)
        if len(data) > TAR_BYTES_MAX:
            run.kill()
            raise ConfigError(
                f"{path} unpacks to more than {TAR_BYTES_MAX >> 20} MiB", fix="this is no snapshot of ours"
            )
    if run.returncode != 0:
        raise ConfigError(f"{path} is not readable as zstd", fix="collect the snapshot again")
    return data


def save(files: Mapping[str, bytes], path: Path) -> None:
    """
    Write a snapshot as a folder, or as a tar if the name says so. ``meta.json`` comes last: without it
    there is none.

    Raises:
        ConfigError: The target exists already, or cannot be written.
    """
    ordered = sorted(files, key=lambda name: (name == "meta.json", name))
    if path.name.endswith(_TAR_SUFFIXES):
        _save_tar(files, ordered, path)
        return
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty", fix="give a new folder")
    for name in ordered:
        assert not name.startswith("/")
        assert ".." not in name.split("/")
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files[name])


def _save_tar(files: Mapping[str, bytes], ordered: list[str], path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already", fix="give a new name")
    import io
    import shutil
    import subprocess
    import tarfile

    buffer = io.BytesIO()
    mode = {".gz": "w:gz", "tgz": "w:gz", ".xz": "w:xz"}.get(path.name[-3:], "w:")
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for name in ordered:
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    data = buffer.getvalue()
    if path.name.endswith(".zst"):
        tool = shutil.which("zstd")
        if tool is None:
            raise ConfigError(
                "zstd is not installed here", fix="install zstd, or write a .tar.gz or a folder"
            )
        data = subprocess.run([tool, "-qc"], input=data, stdout=subprocess.PIPE, check=True).stdout
    path.write_bytes(data)

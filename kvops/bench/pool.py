"""A pool for one benchmark: real processes in a temporary directory, gone when it ends, however it ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

import kvops
from kvops.errors import KvopsError, Unreachable
from kvops.limits import ALIGN_BYTES, CHUNK_BYTES, MIB
from kvops.notify import Receiver
from kvops.store.client import Pool
from kvops.store.config import MasterConfig, StoreConfig, write_yaml
from kvops.transfer.layout import footprint_bytes

START_TIMEOUT_S: Final = 30.0
ANNOUNCE_TIMEOUT_S: Final = 300.0  # for millions of objects on a busy machine
STOP_TIMEOUT_S: Final = 5.0
GROUP: Final = "bench"
_LINE_BYTES_MAX: Final = 1 << 20


class ChildFailed(KvopsError):
    """A process of a benchmark ended or said nothing."""


class Child:
    """
    A process of ours (``kvops.bench.child``) that takes one JSON object a line and answers with one.

    It ends when its standard input closes, and the kernel ends it should we be killed.
    """

    def __init__(
        self, role: str, config: dict[str, Any] | list[str], *, log: Path, env: dict[str, str] | None = None
    ):
        self.role = role
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvops.bench.child", role, json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
            )
        self._unread = b""

    def tell(self, **question: Any) -> None:
        """Send a question."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("has ended") from error

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """
        The next answer.

        Raises:
            ChildFailed: None came in time, or the process ended.
        """
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1_000):
                raise self._failed(f"did not answer within {timeout_s:g} s")
            more = os.read(fd, 1 << 16)
            if not more or len(self._unread) > _LINE_BYTES_MAX:
                raise self._failed("has ended")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, timeout_s: float, **question: Any) -> dict[str, Any]:
        """A question and its answer."""
        self.tell(**question)
        return self.hear(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        self.process.send_signal(number)

    def cpu_s(self) -> float:
        """CPU time it has used so far, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Memory it has resident now."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """End it: asked first, then not; whether it was stopped by a signal or not."""
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass  # what it did not read no longer matters
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _failed(self, what: str) -> ChildFailed:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        return ChildFailed(
            f"the benchmark's {self.role} process {what}: {' | '.join(lines)[-600:]}",
            fix="run it again on a quieter machine; report it if that does not help",
        )


class BenchPool:
    """One master, some stores and whatever else a benchmark starts; use it as a context manager."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvops-bench-")
        self.directory = Path(self._directory.name)
        self.children: dict[str, Child] = {}
        self.secret_file = self.directory / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secrets.token_hex(32))
        self.master_addresses: dict[str, str] = {}  # of one master, or of the one that leads
        self.masters: dict[str, dict[str, str]] = {}  # by name, of several

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(list(self.children.values())):  # the master last: the others take leave of it
            child.stop()
        self._directory.cleanup()

    def child(self, name: str, role: str, config: dict[str, Any]) -> Child:
        """Start a process that is neither master nor store."""
        child = self.children[name] = Child(role, config, log=self.directory / f"{name}.stderr")
        return child

    def _serve(self, name: str, role: str, config: Any) -> dict[str, str]:
        """Start a master or a store, wait until it is ready; where it listens."""
        with Receiver(self.directory) as receiver:
            child = self.children[name] = Child(
                role,
                config,
                log=self.directory / f"{name}.stderr",
                env={"NOTIFY_SOCKET": str(receiver.path)},
            )
            poll = select.poll()
            poll.register(receiver, select.POLLIN)
            deadline = time.monotonic() + START_TIMEOUT_S
            while (left := deadline - time.monotonic()) > 0:
                poll.poll(min(left, 0.1) * 1_000)
                notice = receiver.receive()
                if notice is not None and notice.ready:
                    return notice.addresses
                if child.process.poll() is not None:
                    break
            raise child._failed("did not become ready")

    def start_master(self, **settings: Any) -> None:
        """The master; ``settings`` are fields of MasterConfig."""
        config = MasterConfig(
            group=GROUP,
            secret_file=str(self.secret_file),
            state_dir=str(self.directory / "master"),
            unix_path=str(self.directory / "m.sock"),
            log_file=str(self.directory / "master.log"),
            **settings,
        )
        self.master_addresses = self._serve("master", "master", msgspec.to_builtins(config))

    def start_masters(self, etcd: Sequence[Sequence[str]], **settings: Any) -> None:
        """Several masters, each with endpoints of etcd of its own; returns when one leads."""
        for number, endpoints in enumerate(etcd):
            self.start_one_of_several(f"master-{number}", endpoints, **settings)
        self.find_leader()

    def start_one_of_several(self, name: str, endpoints: Sequence[str], **settings: Any) -> None:
        """Start one of several masters, or start it again where it was."""
        known = self.masters.get(name, {})
        config = MasterConfig(
            group=GROUP,
            name=name,
            host=f"host-{name}",
            secret_file=str(self.secret_file),
            state_dir=str(self.directory / name),
            unix_path=str(self.directory / f"{name}.sock"),
            log_file=str(self.directory / f"{name}.log"),
            etcd=list(endpoints),
            listen=known.get("listen", "127.0.0.1:0"),
            control=known.get("control", "127.0.0.1:0"),
            **settings,
        )
        self.masters[name] = self._serve(name, "master", msgspec.to_builtins(config))

    def find_leader(self, *, timeout_s: float = START_TIMEOUT_S, before: int = 0) -> str:
        """The master that leads a term after ``before``; waits for it."""
        found: list[str] = []

        def one_leads() -> bool:
            for name, addresses in self.masters.items():
                try:
                    if metric(addresses["http"], "kvops_master_leads", timeout_s=0.5) and (
                        metric(addresses["http"], "kvops_master_term", timeout_s=0.5) > before
                    ):
                        found.append(name)
                        self.master_addresses = addresses
                        return True
                except (OSError, Unreachable):
                    continue
            return False

        wait_until(one_leads, timeout_s=timeout_s, what="no master leads")
        return found[0]

    def serve_store(self, name: str, *, segment_size_bytes: int) -> tuple[Child, dict[str, str], float]:
        """
        A store node run by ``kvops serve``; returns as soon as the master can allocate from it.

        Returns:
            Its process, where it listens, and the seconds from exec until then.
        """
        config_file = self.directory / f"{name}.yaml"
        write_yaml(config_file, self._store_config(name, "host-0", segment_size_bytes))
        argv = ["serve", "store", "--config", str(config_file)]
        addresses = self._serve(name, "serve", argv)
        ready_s = time.monotonic()
        child = self.children[name]
        return child, addresses, ready_s - child.hear(START_TIMEOUT_S)["exec_s"]

    def drop(self, name: str) -> None:
        """End a process before the pool ends."""
        self.children.pop(name).stop()

    def _store_config(self, name: str, host: str, segment_size_bytes: int) -> StoreConfig:
        return StoreConfig(
            group=GROUP,
            name=name,
            host=host,
            masters=[one["listen"] for one in self.masters.values()] or [self.master_addresses["listen"]],
            secret_file=str(self.secret_file),
            state_dir=str(self.directory / name),
            unix_path=str(self.directory / f"{name}.sock"),
            log_file=str(self.directory / f"{name}.log"),
            segment_size_bytes=segment_size_bytes,
        )

    def start_store(self, number: int, *, segment_size_bytes: int) -> None:
        """A store node, on a logical host of its own; returns when all its memory is prepared."""
        config = self._store_config(f"store-{number}", f"host-{number}", segment_size_bytes)
        addresses = self._serve(config.name, "store", msgspec.to_builtins(config))
        wait_until(
            lambda: metric(addresses["http"], "kvops_store_populated_bytes") >= segment_size_bytes,
            timeout_s=START_TIMEOUT_S,
            what="a store's memory was not prepared",
        )
        wait_until(
            lambda: self.metric("kvops_master_capacity_bytes") >= segment_size_bytes * (number + 1),
            timeout_s=START_TIMEOUT_S,
            what="the master was not told of a store's memory",
        )

    def start_paper(
        self, *, objects: int, capacity_bytes: int, object_bytes: int = 64, prefix: str = "bench"
    ) -> Child:
        """
        A store that announces objects it does not have: what the master does with millions, without the memory.

        Keys are ``paper_key(prefix, number)``. Returns once the master knows them all.
        """
        child = self.child(
            f"paper-{prefix}",
            "paper",
            {
                "masters": [one["listen"] for one in self.masters.values()]
                or [self.master_addresses["listen"]],
                "secret": self.secret_file.read_text(),
                "group": GROUP,
                "objects": objects,
                "capacity_bytes": capacity_bytes,
                "object_bytes": object_bytes,
                "prefix": prefix,
            },
        )
        child.hear(ANNOUNCE_TIMEOUT_S)
        return child

    @property
    def master(self) -> Child:
        """The master's process."""
        return self.children["master"]

    def metric(self, name: str) -> float:
        """One of the master's metrics, now."""
        return metric(self.master_addresses["http"], name)

    def client_config(self, *, host: str = "host-0", **more: Any) -> dict[str, Any]:
        """What ``connect`` needs, as JSON: for a child that is a client."""
        return {
            "masters": [one["listen"] for one in self.masters.values()] or self.master_addresses["unix"],
            "secret_file": str(self.secret_file),
            "group": GROUP,
            "host": host,
            "name": "bench",
            **more,
        }

    def connect(self, **more: Any) -> Pool:
        """A client in this process."""
        config = self.client_config(**more)
        return kvops.connect(config.pop("masters"), **config)


def paper_key(prefix: str, number: int) -> str:
    """Key of a paper store's object."""
    return f"{prefix}/{number:09d}"


def paper_keys(prefix: str, count: int) -> list[str]:
    """All of them."""
    return [f"{prefix}/{number:09d}" for number in range(count)]


def metric(address: str, name: str, *, timeout_s: float = 10.0) -> float:
    """
    One value of a process's /metrics.

    Raises:
        Unreachable: It does not answer, or does not have it.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise Unreachable(f"{address} shows no metric {name}", fix="use processes of this version")
    return float(found[1])


def wait_until(done: Any, *, timeout_s: float, what: str, pause_s: float = 0.02) -> None:
    """
    Wait for something that nobody announces.

    Raises:
        ChildFailed: It did not happen in time.
    """
    poll = select.poll()  # nothing registered: a pause
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline:
            raise ChildFailed(f"{what} within {timeout_s:g} s", fix="run it again on a quieter machine")
        poll.poll(pause_s * 1_000)


@contextmanager
def pool_of(stores: int, *, segment_size_bytes: int = 256 * MIB, **master: Any) -> Iterator[BenchPool]:
    """A pool with so many stores, each on a logical host of its own."""
    with BenchPool() as pool:
        pool.start_master(**master)
        for number in range(stores):
            pool.start_store(number, segment_size_bytes=segment_size_bytes)
        yield pool


@contextmanager
def paper_pool(
    objects: int, *, free_share: float = 0.5, object_bytes: int = 64, **master: Any
) -> Iterator[BenchPool]:
    """A master that knows so many objects of a paper store, of whose memory this share is free."""
    with BenchPool() as pool:
        pool.start_master(**master)
        used = objects * footprint_bytes(object_bytes, CHUNK_BYTES)
        capacity = int(used / (1 - free_share)) // ALIGN_BYTES * ALIGN_BYTES
        pool.start_paper(objects=objects, capacity_bytes=capacity, object_bytes=object_bytes)
        yield pool


def together(children: Sequence[Child], timeout_s: float, **question: Any) -> list[dict[str, Any]]:
    """The same question to several children at once."""
    for child in children:
        child.tell(**question)
    return [child.hear(timeout_s) for child in children]

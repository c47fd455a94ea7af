"""A whole pool of real processes for tests: masters and stores, started, troubled, healed and reaped."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvops
from kvops.errors import KvopsError
from kvops.files import write_private
from kvops.notify import Receiver
from kvops.store.client import Pool
from kvops.store.model import StoreInfo, StoreState
from tests import ports
from tests.waiting import WAIT_S, until

SEGMENT_BYTES = 32 << 20
CALL_MS = 30_000  # a call's deadline where deadlines are not the subject
LEASE_TTL_S = 2  # of a leading master: a busy machine renews it late, and must not lose it for that
ROOT = Path(__file__).parent.parent

# PR_SET_PDEATHSIG: no daemon outlives the test run, whatever becomes of that.
SERVE = """
import ctypes, json, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
import msgspec
from kvops.store import config, master, node
role, text = sys.argv[1:]
serve, kind = (master.serve, config.MasterConfig) if role == "master" else (node.serve, config.StoreConfig)
sys.exit(serve(msgspec.convert(json.loads(text), kind)))
"""


@dataclass(eq=False)
class Member:
    """A process of the pool."""

    name: str
    role: str
    config: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    @property
    def alive(self) -> bool:
        """Whether its process runs, or is stopped."""
        return self.process is not None and self.process.poll() is None

    def answers(self) -> bool:
        """Whether it says over HTTP that it is ready, or why not: its threads run."""
        try:
            urllib.request.urlopen(f"http://{self.addresses['http']}/ready", timeout=WAIT_S).close()
        except urllib.error.HTTPError as answer:
            answer.close()
        except OSError:
            return False
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal; after SIGSTOP and SIGKILL wait until it has taken effect."""
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(WAIT_S)
        elif number is signal.SIGSTOP:
            self.stopped = True
            stat = Path(f"/proc/{self.process.pid}/stat")
            until(lambda: stat.read_text().rpartition(") ")[2][0] == "T", f"{self.name} stops")
        elif number is signal.SIGCONT:
            self.stopped = False


class LocalPool:
    """
    Masters and stores on this machine, each store on a logical host of its own.

    One master by itself, or several by the etcd that is given.
    """

    def __init__(
        self,
        *,
        stores: int = 3,
        masters: int = 1,
        etcd: list[str] | list[list[str]] | None = None,  # for all masters, or for each its own
        ttl_s: int = LEASE_TTL_S,
    ) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvops-"))  # short: it holds Unix sockets
        self.secret_file = self.base / "secret"
        write_private(self.secret_file, os.urandom(32).hex().encode())
        common = {"group": "local", "secret_file": str(self.secret_file)}
        self._held = [
            ports.hold() for _ in range(2 * masters)
        ]  # of a master that is down they are still its own
        free = [f"127.0.0.1:{ports.number(held)}" for held in self._held]
        of_each = [etcd if isinstance(etcd[0], str) else etcd[i] for i in range(masters)] if etcd else []
        self.masters = [
            Member(
                f"master-{i}",
                "master",
                common
                | self._paths(f"master-{i}")
                | ({"etcd": of_each[i], "etcd_ttl_s": ttl_s} if etcd else {})
                | {"name": f"master-{i}", "host": f"host-{i}"}
                | {"listen": free[2 * i], "control": free[2 * i + 1]},
            )
            for i in range(masters)
        ]
        self.master = self.masters[0]
        self.stores = [
            Member(
                f"store-{i}",
                "store",
                common
                | self._paths(f"store-{i}")
                | {"name": f"store-{i}", "host": f"host-{i}", "segment_size_bytes": SEGMENT_BYTES},
            )
            for i in range(stores)
        ]
        self._clients: list[Pool] = []
        try:
            self.start(*self.masters)
            for store in self.stores:
                store.config["masters"] = self.addresses
            self.heal()
        except BaseException:
            self.close()
            raise

    def _paths(self, name: str) -> dict[str, str]:
        return {
            "state_dir": str(self.base / name),
            "unix_path": str(self.base / f"{name}.sock"),
            "log_file": str(self.base / f"{name}.log"),
        }

    # Its life.

    def start(self, *members: Member) -> None:
        """Start processes side by side and wait until each says that it is ready."""
        with Receiver(self.base) as receiver:
            waiting = {}
            for member in members:
                member.process = subprocess.Popen(
                    [sys.executable, "-c", SERVE, member.role, json.dumps(member.config)],
                    env={**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(receiver.path)},
                    stdin=subprocess.DEVNULL,
                )
                member.stopped = False
                waiting[member.process.pid] = member
            deadline = time.monotonic() + WAIT_S
            while waiting:
                for member in waiting.values():
                    assert member.alive, f"{member.name} ended: {self.log(member)}"
                assert time.monotonic() < deadline, f"{member.name} is not ready: {self.log(member)}"
                select.select([receiver], [], [], 0.05)
                while (notice := receiver.receive()) is not None:
                    if notice.ready and notice.pid in waiting:
                        member = waiting.pop(notice.pid)
                        member.addresses = notice.addresses

    @property
    def addresses(self) -> list[str]:
        """Of the masters, on the wire."""
        return [master.addresses["listen"] for master in self.masters]

    def log(self, member: Member) -> str:
        """The last lines of a member's log."""
        try:
            return "\n".join(Path(member.config["log_file"]).read_text().splitlines()[-5:])
        except OSError:
            return "(no log)"

    def heal(self) -> None:
        """Wake what is stopped, start what has ended, and wait until the master serves every store."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        for member in (*self.masters, *self.stores):
            if member.alive and member.stopped:
                member.send(signal.SIGCONT)
                until(member.answers, f"{member.name} goes on")
        self.start(*[master for master in self.masters if not master.alive])
        self.start(*[store for store in self.stores if not store.alive])
        self.wait_ready(*self.stores)

    def heal_master(self) -> None:
        """Wake the master, or start it again where it was."""
        if self.master.alive and self.master.stopped:
            self.master.send(signal.SIGCONT)
        if not self.master.alive:
            self.start(self.master)

    def wait_ready(self, *stores: Member) -> None:
        """Wait until the master serves these stores' processes, with all of their memory."""
        client = self.connect()
        pids = {store.process.pid for store in stores if store.process is not None}

        def whole(info: StoreInfo) -> bool:
            return info.state is StoreState.READY and info.populated_bytes == info.capacity_bytes

        def ready() -> bool:
            try:
                return pids <= {info.pid for info in client.stores() if whole(info)}
            except KvopsError:
                return False

        until(ready, "every store is ready")

    def close(self) -> None:
        """Kill and reap whatever runs, and remove what it left."""
        for client in self._clients:
            client.close()
        for member in (*self.stores, *self.masters):
            if member.process is not None:
                member.process.kill()
                member.process.wait(WAIT_S)
        for held in self._held:
            held.close()
        shutil.rmtree(self.base, ignore_errors=True)

    # Its clients.

    def connect(self, **options: Any) -> Pool:
        """A client, closed with the next ``heal``."""
        options = {"host": "host-0", "deadline_ms": CALL_MS, "secret_file": self.secret_file} | options
        client = kvops.connect(options.pop("address", self.addresses), **options)
        self._clients.append(client)
        return client

    def store_of(self, client: Pool, key: str) -> Member:
        """The store that holds a key."""
        stat = client.stat(key)
        assert stat is not None, f"{key} is readable"
        return next(store for store in self.stores if store.name == stat["store"])

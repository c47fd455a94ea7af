"""A real etcd of three members for tests, tuned as the benchmarks are: killed, stopped, healed and reaped."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.pool import WAIT_S, until

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="needs etcd: apt-get install etcd-server")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


class EtcdCluster:
    """Members by number; ``endpoints`` in the same order."""

    def __init__(self, *, members: int = 3, election_ms: int = 250) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvops-etcd-"))
        ports = free_ports(2 * members)
        self._client, self._peer = ports[:members], ports[members:]
        self._election_ms = election_ms
        self.endpoints = [f"127.0.0.1:{port}" for port in self._client]
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(members):
            self.processes.append(self._start(number))
        for number in range(members):
            until(lambda number=number: self._healthy(number), f"etcd {number} is healthy")

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        assert ETCD is not None
        peers = ",".join(f"e{at}=http://127.0.0.1:{port}" for at, port in enumerate(self._peer))
        client, peer = f"http://127.0.0.1:{self._client[number]}", f"http://127.0.0.1:{self._peer[number]}"
        log = (self.base / f"e{number}.log").open("ab")
        with log:
            return subprocess.Popen(
                [
                    *(ETCD, "--name", f"e{number}", "--data-dir", str(self.base / f"e{number}")),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", peers, "--initial-cluster-token", self.base.name),
                    *("--heartbeat-interval", str(self._election_ms // 5)),
                    *("--election-timeout", str(self._election_ms)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _healthy(self, number: int) -> bool:
        import urllib.request

        try:
            with urllib.request.urlopen(f"http://{self.endpoints[number]}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def leader(self) -> int:
        """The member that leads now."""
        import json
        import urllib.request

        for number, endpoint in enumerate(self.endpoints):
            request = urllib.request.Request(
                f"http://{endpoint}/v3/maintenance/status", data=b"{}", method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=1) as answer:
                    status = json.load(answer)
            except OSError:
                continue
            if status["leader"] == status["header"]["member_id"]:
                return number
        raise AssertionError("etcd has no leader")

    def send(self, number: int, signal_number: signal.Signals) -> None:
        """Send a member a signal."""
        self.processes[number].send_signal(signal_number)
        if signal_number is signal.SIGKILL:
            self.processes[number].wait(WAIT_S)

    def heal(self) -> None:
        """Wake and restart whatever is down, and wait until all are healthy."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[number] = self._start(number)
            else:
                process.send_signal(signal.SIGCONT)
        for number in range(len(self.processes)):
            until(lambda number=number: self._healthy(number), f"etcd {number} is healthy")

    def close(self) -> None:
        """Kill, reap and remove."""
        for process in self.processes:
            process.kill()
            process.wait(WAIT_S)
        shutil.rmtree(self.base, ignore_errors=True)

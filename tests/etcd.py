"""A real etcd of three members for tests, tuned as the benchmarks are: killed, stopped, healed and reaped."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests import ports
from tests.waiting import WAIT_S, until

ETCD = shutil.which("etcd")
# PR_SET_PDEATHSIG, kept by exec: no etcd outlives the test run, whatever becomes of that.
DIES_WITH_US = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
needs_etcd = pytest.mark.skipif(ETCD is None, reason="needs etcd: apt-get install etcd-server")


def authority(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """A certificate authority of our own, and what it vouches for on loopback: files of CA, certificate and key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def issue(
        subject: str, signer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None
    ) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
        issuer, signing = signer or (own, key)
        now = datetime.datetime.now(datetime.UTC)
        loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(own)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
            .add_extension(loopback, critical=False)
            .sign(signing, hashes.SHA256())
        )
        issued.append((own, key))
        pem = serialization.Encoding.PEM
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return certificate.public_bytes(pem), key.private_bytes(pem, *plain)

    issued: list[tuple[x509.Name, ec.EllipticCurvePrivateKey]] = []
    ca, _ = issue(name, None)
    certificate, key = issue(f"{name} etcd", issued[0])
    files = folder / f"{name}-ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem"
    for file, content in zip(files, (ca, certificate, key), strict=True):
        file.write_bytes(content)
    return files


class EtcdCluster:
    """
    Members by number; ``endpoints`` in the same order.

    With ``tls`` clients must know its ``ca``; with ``everywhere`` clients may use any address of loopback.
    """

    def __init__(
        self, *, members: int = 3, election_ms: int = 250, tls: bool = False, everywhere: bool = False
    ) -> None:
        self._listen = "0.0.0.0" if everywhere else "127.0.0.1"
        self.base = Path(tempfile.mkdtemp(prefix="kvops-etcd-"))
        self._scheme = "https" if tls else "http"
        self._context: ssl.SSLContext | None = None
        self._tls: list[str] = []
        if tls:
            self.ca, certificate, key = authority(self.base, "ours")
            self._context = ssl.create_default_context(cafile=str(self.ca))
            self._tls = ["--cert-file", str(certificate), "--key-file", str(key)]
        self._held = [ports.hold() for _ in range(2 * members)]
        numbers = [ports.number(one) for one in self._held]
        self._client, self._peer = numbers[:members], numbers[members:]
        self._election_ms = election_ms
        self.endpoints = [f"127.0.0.1:{port}" for port in self._client]
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(members):
                self.processes.append(self._start(number))
            for number in range(members):
                until(lambda number=number: self._healthy(number), f"etcd {number} is healthy")
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        assert ETCD is not None
        peers = ",".join(f"e{at}=http://127.0.0.1:{port}" for at, port in enumerate(self._peer))
        client = f"{self._scheme}://127.0.0.1:{self._client[number]}"
        listen = client.replace("127.0.0.1", self._listen)
        peer = f"http://127.0.0.1:{self._peer[number]}"
        log = (self.base / f"e{number}.log").open("ab")
        with log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-c", DIES_WITH_US, ETCD),
                    *("--name", f"e{number}", "--data-dir", str(self.base / f"e{number}")),
                    *("--listen-client-urls", listen, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", peers, "--initial-cluster-token", self.base.name),
                    *("--heartbeat-interval", str(self._election_ms // 5)),
                    *("--election-timeout", str(self._election_ms)),
                    *self._tls,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _healthy(self, number: int) -> bool:
        import urllib.request

        try:
            url = f"{self._scheme}://{self.endpoints[number]}/health"
            with urllib.request.urlopen(url, timeout=2, context=self._context) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def leader(self) -> int:
        """The member that leads now."""
        return int(until(self._leads, "etcd has a leader")) - 1

    def _leads(self) -> int:
        """The member that says it leads, counted from 1; 0 when none does."""
        import json
        import urllib.request

        for number, endpoint in enumerate(self.endpoints):
            request = urllib.request.Request(
                f"{self._scheme}://{endpoint}/v3/maintenance/status", data=b"{}", method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=2, context=self._context) as answer:
                    status = json.load(answer)
            except OSError:
                continue
            if status["leader"] == status["header"]["member_id"]:
                return number + 1
        return 0

    def ask(self, path: str, **body: object) -> dict[str, Any]:
        """One call of etcd's JSON gateway at its first member; keys and values are base64 there."""
        import json
        import urllib.request

        url = f"{self._scheme}://{self.endpoints[0]}/v3/{path}"
        request = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=WAIT_S, context=self._context) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def put(self, key: str, value: bytes) -> None:
        """Write a key, as a hostile hand would."""
        self.ask(
            "kv/put", key=base64.b64encode(key.encode()).decode(), value=base64.b64encode(value).decode()
        )

    def delete(self, prefix: str) -> None:
        """Delete every key that begins so."""
        first, end = prefix.encode(), prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])
        self.ask(
            "kv/deleterange", key=base64.b64encode(first).decode(), range_end=base64.b64encode(end).decode()
        )

    def demand_password(self, password: str) -> None:
        """From now on etcd answers only whoever says that it is root."""
        self.ask("auth/user/add", name="root", password=password)
        self.ask("auth/role/add", name="root")
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/enable")

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
        for one in self._held:
            one.close()
        shutil.rmtree(self.base, ignore_errors=True)

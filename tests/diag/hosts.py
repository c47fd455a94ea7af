"""Hosts of a fleet for tests: network namespaces with a real sshd in each, joined by bridges in one more."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvops.chaos import netns
from kvops.host import SshHost
from tests.waiting import WAIT_S

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PORT = 2222  # of every host: also where a test's own user could bind


def needed() -> str:
    """Why these tests cannot run here; nothing if they can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for program, package in ((SSHD, "openssh-server"), ("ip", "iproute2"), ("ssh-keygen", "openssh-client")):
        if shutil.which(program) is None:
            return f"needs {program}: apt-get install {package}"
    done = subprocess.run(["ip", "netns", "add", f"kvt{os.getpid()}probe"], capture_output=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.decode()[:80]}"
    subprocess.run(["ip", "netns", "del", f"kvt{os.getpid()}probe"], check=True)
    return ""


def oldest_python() -> str:
    """The oldest Python from 3.8 on that is installed; our own if there is no other."""
    roots = [Path(root) for root in (os.environ.get("PYENV_ROOT"), "~/.pyenv") if root]
    for minor in range(8, sys.version_info.minor):
        found = [
            str(path)
            for root in roots
            for path in root.expanduser().glob(f"versions/3.{minor}.*/bin/python3")
        ]
        found += filter(None, [shutil.which(f"python3.{minor}")])
        for path in found:
            code = "import sys; print(sys.version_info[1])"
            done = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, check=False)
            if done.stdout.strip() == str(minor):
                return path
    return sys.executable


@dataclass
class Fleet:
    """Hosts ``h01``, ``h02``, …: 10.77.R.N on rail R, reached from the namespace ``hub`` on rail 0."""

    folder: Path
    count: int
    rails: int = 1
    hub: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [f"h{n:02}" for n in range(1, self.count + 1)]

    def address(self, name: str, rail: int = 0) -> str:
        return f"10.77.{rail}.{int(name[1:])}"

    def namespace(self, name: str) -> str:
        return f"{self.hub}{name}"

    @property
    def key(self) -> Path:
        return self.folder / "id"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def inventory(self) -> Path:
        return self.folder / "fleet.yaml"

    def connect(self, name: str) -> SshHost:
        """A connection from the hub to a host."""
        with netns.entered((netns.NAMED / self.hub).stat().st_ino):
            return SshHost(
                self.address(name),
                name=name,
                port=PORT,
                user="root",
                key_file=str(self.key),
                known_hosts=str(self.known_hosts),
            )

    def make(self, *, python: str = "") -> None:
        """Namespaces, wires, keys, an inventory, and every sshd up."""
        self.hub = f"kvt{os.getpid()}"
        lines = [f"netns add {self.hub}"]
        lines += [f"netns add {self.namespace(name)}" for name in self.names]
        _ip(lines)
        inside = ["link set lo up"]
        for rail in range(self.rails):
            inside += [
                f"link add br{rail} type bridge",
                f"link set br{rail} up",
                f"address add 10.77.{rail}.254/24 dev br{rail}",
            ]
        _ip(inside, self.hub)
        wires = []
        for name in self.names:
            for rail in range(self.rails):
                wires += [
                    f"link add r{rail}{name} type veth peer name eth{rail} netns {self.namespace(name)}",
                    f"link set r{rail}{name} master br{rail} up",
                ]
        _ip(wires, self.hub)
        for name in self.names:
            own = ["link set lo up"]
            for rail in range(self.rails):
                own += [f"address add {self.address(name, rail)}/24 dev eth{rail}", f"link set eth{rail} up"]
            _ip(own, self.namespace(name))
        self._keys()
        path = self._path(python)
        for name in self.names:
            self.start(name, path)
        self._wait()
        self.inventory.write_text(
            f"""schema: 1
defaults: {{user: root, port: {PORT}, identity_file: {self.key}, known_hosts_file: {self.known_hosts}}}
groups:
  all:
    roles: [store]
    hosts:
      h[01-{self.count:02}]: {{address: "10.77.0.[1-{self.count}]"}}
"""
        )

    def _keys(self) -> None:
        for name in ("id", "host", "other"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.folder / name)],
                check=True,
            )
        kind, blob, *_ = (self.folder / "host.pub").read_text().split()
        self.known_hosts.write_text(
            "".join(f"[{self.address(name)}]:{PORT} {kind} {blob}\n" for name in self.names)
        )

    def _path(self, python: str) -> str:
        """A PATH for the hosts' shells on which python3 is the one that is wanted."""
        tools = self.folder / "bin"
        tools.mkdir()
        (tools / "python3").symlink_to(python or sys.executable)
        return f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin"

    def start(self, name: str, path: str, key: str = "host") -> None:
        """A host's sshd; its address is all it listens on."""
        config = self.folder / f"{name}.conf"
        pid_file = self.folder / f"{name}.pid"
        pid_file.unlink(missing_ok=True)
        config.write_text(
            f"""Port {PORT}
ListenAddress {self.address(name)}
HostKey {self.folder / key}
AuthorizedKeysFile {self.folder / "id.pub"}
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PidFile {pid_file}
MaxStartups 100
SetEnv PATH={path} HOME={self.folder}
"""
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self.run(name, SSHD, "-f", str(config), "-E", str(self.folder / f"{name}.log"))

    def _wait(self) -> None:
        deadline = time.monotonic() + WAIT_S
        for name in self.names:
            pid_file = self.folder / f"{name}.pid"
            # sshd writes it when it listens; nothing tells of it but the file.
            while not (pid_file.exists() and pid_file.read_text().strip()):
                assert time.monotonic() < deadline, f"{name}: no sshd"
                time.sleep(0.01)
            self.pids[name] = int(pid_file.read_text())

    def run(self, name: str, *argv: str) -> str:
        """Run a program to its end on a host."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace(name), *argv],
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        )
        return done.stdout

    def popen(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        """A program on a host; the caller ends it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(name), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def kvops(self, *args: str, timeout_s: float = 4 * WAIT_S) -> subprocess.CompletedProcess[str]:
        """The command, run where the hosts can be reached."""
        source = Path(__file__).parents[2]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVOPS_", "XDG_"))}
        env |= {
            "PYTHONPATH": str(source),
            "KVOPS_STATE_DIR": str(self.folder / "state"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "NO_COLOR": "1",
        }
        return subprocess.run(
            ["ip", "netns", "exec", self.hub, sys.executable, "-m", "kvops", *args],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=timeout_s,
        )

    def stop(self, name: str) -> None:
        """End a host's sshd: connections are refused once it is gone."""
        process = os.pidfd_open(self.pids.pop(name))
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            ended, _, _ = select.select([process], [], [], WAIT_S)
            assert ended, f"{name}: its sshd does not end"
        finally:
            os.close(process)

    def close(self) -> None:
        """End every process in the namespaces, then remove them."""
        for name in [*self.names, ""]:
            space = self.namespace(name)
            found = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            )
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip(lines: Sequence[str], namespace: str = "") -> None:
    argv = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    subprocess.run(
        argv, input="\n".join(lines) + "\n", text=True, check=True, timeout=WAIT_S, capture_output=True
    )


@contextlib.contextmanager
def fleet_of(folder: Path, count: int, *, rails: int = 1, python: str = "") -> Iterator[Fleet]:
    """A fleet, gone afterwards also when making it fails half-way."""
    reason = needed()
    if reason:
        pytest.skip(reason)
    fleet = Fleet(folder, count, rails)
    try:
        fleet.make(python=python)
        yield fleet
    finally:
        fleet.close()

"""The collector on this very machine, and over SSH with a real server on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket

import paramiko
import pytest
from world import loud, outcomes

from kvops.cli.main import main
from kvops.diag.collect import agent
from kvops.diag.facts.host import HostFacts
from kvops.diag.fleet import gather, split_host
from kvops.diag.model import Outcome
from kvops.diag.runner import run, select
from kvops.diag.snapshot import from_files, load, save
from kvops.host import LocalHost, Sight, SshLogin
from tests import ports
from tests.waiting import WAIT_S


def test_live_and_saved_give_the_same_verdict(tmp_path: Path) -> None:
    """This machine, judged at once and from what was saved, gives the same; no check crashes, whoever we are."""
    files = agent.collect(window_s=0.2)
    save(files, tmp_path / "s.tar.gz")

    live = run([HostFacts(from_files(files, "here")[0])], select())
    saved = run([HostFacts(load(tmp_path / "s.tar.gz")[0])], select())

    assert outcomes(live) == outcomes(saved)
    assert [r.reason for r in live if "crashed" in r.reason] == []


def test_machine_without_rdma_has_no_false_alarm() -> None:
    """On a machine without any RDMA device nothing of the RDMA path may report."""
    if Path("/sys/class/infiniband").exists() and list(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("this machine has an RDMA device")

    results = run([HostFacts(from_files(agent.collect(window_s=0), "here")[0])], select())

    families = ("gid.", "qos.", "link.", "ctr.", "mtu.", "pcie.", "driver.", "xnode.", "gdr.", "k8s.", "ovs.")
    assert {check for check in loud(results) if check.startswith(families)} == set()
    assert any(r.outcome is Outcome.SKIPPED and "no RDMA" in r.reason for r in results)


def test_collector_alone_needs_nothing_of_ours(tmp_path: Path) -> None:
    """The one file runs with a bare interpreter, as it does on a host without kvops, and says which are secrets: none."""
    done = subprocess.run(
        [sys.executable, "-I", "-", json.dumps({"window_s": 0})],
        input=Path(agent.__file__).read_bytes(),
        capture_output=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
    )

    assert done.stdout.startswith(b"KVOPS-SNAPSHOT ")


def test_secrets_are_left_out() -> None:
    """Command lines and environments are saved without tokens and passwords."""
    words = ["x", "--token=abc", "--password", "hunter2", "--url=http://me:pw@host/", "--host=h"]

    assert agent._masked(words) == [
        "x",
        "--token=***",
        "--password",
        "***",
        "--url=http://***@host/",
        "--host=h",
    ]
    assert not agent._KEPT_VARIABLES.match("AWS_SECRET_ACCESS_KEY")


def test_hanging_command_dies_with_its_children() -> None:
    """A command that hangs is killed with its group when its time is over, children that hold the pipe included."""
    began = time.monotonic()
    result = LocalHost().run("sh", "-c", "sleep 600 & echo started; wait", timeout_s=2.0)

    assert result.sight is Sight.TIMED_OUT
    assert result.stdout == "started\n"
    assert time.monotonic() - began < WAIT_S  # not 600


def test_missing_program_and_missing_file() -> None:
    """A program that is not installed and a file that is not there are told apart from failures."""
    host = LocalHost()

    assert host.run("kvops-no-such-program").sight is Sight.NO_TOOL
    assert host.read("/no/such/file").sight is Sight.ABSENT
    assert host.read("/proc/self").sight is Sight.UNREADABLE


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ("a", "me", 22)),
        ("you@b:2222", ("b", "you", 2222)),
        ("[fe80::1]:23", ("fe80::1", "me", 23)),
        ("fe80::1", ("fe80::1", "me", 22)),
    ],
)
def test_split_host(text: str, parts: tuple[str, str, int]) -> None:
    """Names, users and ports are read as ssh reads them."""
    assert split_host(text, "me", 22) == parts


class _Server(paramiko.ServerInterface):
    def __init__(self, hang: bool, answered: threading.Event) -> None:
        self.hang = hang
        self.answered = answered

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        work = (self._hang, (channel,)) if self.hang else (self._run, (channel, command.decode()))
        threading.Thread(target=work[0], args=work[1], daemon=True).start()
        return True

    def _hang(self, channel: paramiko.Channel) -> None:
        self.answered.wait(2 * WAIT_S)
        with contextlib.suppress(EOFError):  # the caller has hung up
            channel.close()

    def _run(self, channel: paramiko.Channel, command: str) -> None:
        data = b""
        while chunk := channel.recv(65536):
            data += chunk
        done = subprocess.run(
            ["/bin/sh", "-c", command], input=data, capture_output=True, timeout=60, check=False
        )
        with contextlib.suppress(EOFError, OSError):
            channel.sendall(done.stdout)
            channel.sendall_stderr(done.stderr)
            channel.send_exit_status(done.returncode)
            channel.close()
        self.answered.set()


@contextmanager
def _ssh_server(
    key: paramiko.PKey, *, hang: bool = False, answered: threading.Event | None = None
) -> Iterator[int]:
    """A host that answers, and says so; or that hangs up when another one has answered."""
    ended = answered or threading.Event()
    listener = socket(AF_INET, SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(32)
    transports: list[paramiko.Transport] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(key)
            transports.append(transport)
            try:
                transport.start_server(server=_Server(hang, ended))
            except (paramiko.SSHException, EOFError, OSError):
                transport.close()  # a client that did not like our key

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(2)
        listener.close()
        for transport in transports:
            transport.close()
        thread.join(WAIT_S)


@pytest.mark.process
def test_fleet_over_ssh(tmp_path: Path) -> None:
    """A good host answers while another one hangs; that one, a refusing one and one with a changed key are named."""
    answered = threading.Event()
    key, other = paramiko.RSAKey.generate(2048), paramiko.RSAKey.generate(2048)
    paramiko.RSAKey.generate(2048).write_private_key_file(str(tmp_path / "id"))
    with (
        ports.hold() as closed,
        _ssh_server(key, answered=answered) as good,
        _ssh_server(key, hang=True, answered=answered) as hung,
        _ssh_server(other) as changed,
    ):
        refusing = ports.number(closed)
        known = "".join(
            f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n" for port in (good, hung, changed)
        )
        (tmp_path / "known_hosts").write_text(known)
        hosts = [f"127.0.0.1:{port}" for port in (good, hung, refusing, changed)]

        logins = [
            SshLogin(
                name=name,
                address="127.0.0.1",
                user="me",
                port=port,
                key_file=str(tmp_path / "id"),
                known_hosts=str(tmp_path / "known_hosts"),
            )
            for name, port in zip(hosts, (good, hung, refusing, changed), strict=True)
        ]
        answers = gather(logins, window_s=0.1, timeout_s=WAIT_S)
        assert answered.is_set()
        answered.clear()
        (silent,) = gather(logins[1:2], window_s=0.1, timeout_s=1)  # nobody hangs up now: its time ends it
        answered.set()

    assert [answer.name for answer in answers] == hosts
    assert answers[0].files is not None, answers[0].error
    assert outcomes(run([HostFacts(from_files(answers[0].files, "a")[0])], select()))
    assert [answer.files for answer in answers[1:]] == [None, None, None]
    assert all(answer.error for answer in answers[1:])
    assert silent.files is None
    assert silent.error
    assert "key" in answers[3].error.lower()


@pytest.mark.process
def test_hosts_are_watched_over_ssh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A watch of named hosts says for each what it sees, window by window, and why it sees nothing of one that refuses."""
    key = paramiko.RSAKey.generate(2048)
    paramiko.RSAKey.generate(2048).write_private_key_file(str(tmp_path / "id"))
    with ports.hold() as closed, _ssh_server(key) as good:
        refusing = ports.number(closed)
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:{good} {key.get_name()} {key.get_base64()}\n")
        code = main(
            [
                *("diagnose", "watch", "--host", f"127.0.0.1:{good},127.0.0.1:{refusing}", "--user", "me"),
                *("--ssh-key", str(tmp_path / "id"), "--known-hosts", str(known)),
                *("--for", "1s", "--every", "1s", "--only", "link.flap", "-o", "jsonl"),
                *("--timeout", f"{WAIT_S:.0f}s"),
            ]
        )

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    said = {
        port: [row["text"] for row in rows if row["host"].endswith(f":{port}")] for port in (good, refusing)
    }
    assert code == 0
    assert any("RDMA port" in text or "Gbit/s" in text for text in said[good])
    assert any("no word about that time" in text for text in said[refusing])

"""The datagrams by which a daemon says that it is ready."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError
from kvops.notify import Receiver, notify, notify_ready, parse_notice


def test_ready_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter learns who is ready and where it listens, with the sender's pid as the kernel saw it."""
    with Receiver(tmp_path) as receiver:
        monkeypatch.setenv("NOTIFY_SOCKET", str(receiver.path))
        sent = notify_ready({"listen": "127.0.0.1:7800"}, status="serving\nX=1")
        notice = receiver.receive()

    assert sent
    assert notice is not None
    assert notice.pid == os.getpid()
    assert notice.ready
    assert notice.status == "serving X=1"
    assert notice.addresses == {"listen": "127.0.0.1:7800"}


def test_nothing_waits(tmp_path: Path) -> None:
    """Looking for a message that has not come returns at once."""
    with Receiver(tmp_path) as receiver:
        assert receiver.receive() is None


def test_socket_is_removed(tmp_path: Path) -> None:
    """A start leaves no socket behind."""
    with Receiver(tmp_path) as receiver:
        assert receiver.path.exists()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all", "@kvops-nobody"])
def test_nobody_listens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon without a supervisor, or with a dead one, goes on."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)

    assert not notify("READY=1")


def test_no_place_for_a_socket(tmp_path: Path) -> None:
    """A folder whose path is too long for a socket is one clear error."""
    with pytest.raises(ConfigError, match="cannot make a socket"):
        Receiver(tmp_path / ("x" * 100))


@given(st.binary(max_size=300))
def test_any_datagram(message: bytes) -> None:
    """Whatever is sent, it is read without an error, and addresses are text by name."""
    notice = parse_notice(message, pid=1)

    assert all(isinstance(text, str) for text in notice.addresses.values())


@pytest.mark.parametrize("value", ["[1]", "nonsense", "{", '{"listen": 7}'])
def test_nonsense_addresses(value: str) -> None:
    """Addresses that are none are passed over."""
    assert parse_notice(f"READY=1\nX_KVOPS_ADDRESSES={value}".encode(), pid=1).addresses == {}

"""What a caller can get wrong, and what a client does without anybody to ask."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvops
from kvops import PutOptions
from kvops.errors import Unreachable, UsageError, WrongBuffer
from kvops.files import default_state_dir, write_private
from kvops.fleet.local import LocalGroup
from kvops.net import wire
from kvops.store.client import Pool
from kvops.store.connect import local_secret
from kvops.store.model import Reason
from tests.net.servers import SECRET, accept_handshake, receive_frame, serve_script
from tests.pool import CALL_MS
from tests.waiting import WAIT_S


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    write_private(path, os.urandom(32).hex().encode())
    return path


@pytest.fixture
def client(secret_file: Path, tmp_path: Path) -> Iterator[Pool]:
    """A client that nobody answers."""
    with kvops.connect(str(tmp_path / "nobody.sock"), secret_file=secret_file) as pool:
        yield pool


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


@pytest.mark.parametrize(
    "buffer",
    [
        np.array([None] * 8),
        np.zeros(2, [("number", "<u4"), ("thing", "O")]),
        np.zeros(8, "M8[s]"),
        np.zeros(16, np.uint8)[::2],
        np.zeros((4, 4), np.float32, order="F"),
        np.zeros((0, 4)),
        released(),
        "text",
        None,
    ],
    ids=[
        "objects",
        "struct-with-object",
        "datetime",
        "strided",
        "fortran",
        "empty-2d",
        "released",
        "text",
        "none",
    ],
)
def test_what_is_no_memory_of_plain_bytes_is_refused(client: Pool, buffer: Any) -> None:
    """Reading into Python objects would break the interpreter; whatever is no flat memory is an error with a fix."""
    for use in (
        lambda: client.batch_get_into(["k"], [buffer]),
        lambda: client.get_range_into("k", buffer, offset=0),
        lambda: client.put("k", buffer),
        lambda: client.put_part("k", buffer, offset=0, total_size=8),
    ):
        with pytest.raises(WrongBuffer) as caught:
            use()
        assert caught.value.fix


@pytest.mark.parametrize("key", [b"bytes", None, 5, "\ud800"], ids=repr)
def test_a_key_is_text(client: Pool, key: Any) -> None:
    """Keys of another type, or that UTF-8 cannot say, are the caller's error in every call."""
    for use in (
        lambda: client.get(key),
        lambda: client.put(key, b"x"),
        lambda: client.remove(key),
        lambda: client.stat(key),
        lambda: client.batch_exists(["good", key]),
        lambda: client.touch([key]),
    ):
        with pytest.raises(UsageError) as caught:
            use()
        assert caught.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_ms": -1},
        {"ttl_ms": 1 << 32},
        {"ttl_ms": 1.5},
        {"tenant": -1},
        {"tenant": 1 << 16},
        {"replicas": 0},
        {"replicas": 9},
        {"replicas": 1.0},
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    """What the wire cannot carry is refused where it is written, not somewhere below."""
    with pytest.raises(UsageError) as caught:
        PutOptions(**options)
    assert caught.value.fix


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.ls(prefix="\ud800"),
        lambda client: client.ls(cursor="²"),
        lambda client: client.ls(cursor="store-0@²"),
        lambda client: client.ls(cursor=f"store-0@{1 << 64}"),
        lambda client: client.ls(limit=0),
        lambda client: client.get("k", deadline_ms=float("nan")),
        lambda client: client.batch_put_from(["k"], [b"x"], depths=[None]),
    ],
    ids=["prefix", "digit", "cursor-digit", "cursor-large", "limit", "nan", "depth"],
)
def test_arguments_that_make_no_sense(client: Pool, use: Callable[[Pool], Any]) -> None:
    """They are the caller's error, whether or not a master answers."""
    with pytest.raises(UsageError) as caught:
        use(client)
    assert caught.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"namespace": b"short"},
        {"transports": []},
        {"transports": ["rdma"]},
        {"host": "\ud800"},
        {"name": "n" * 5_000},
        {"numa_node": -1},
        {"deadline_ms": float("nan")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_connect_says_what_is_wrong(secret_file: Path, options: dict[str, Any]) -> None:
    """What no call could ever succeed with is refused at once."""
    with pytest.raises(UsageError) as caught:
        kvops.connect("127.0.0.1:7800", secret_file=secret_file, **options)
    assert caught.value.fix


@pytest.mark.parametrize("address", ["", "nohost", "host:", "host:²", "host:99999", ":80"])
def test_addresses(secret_file: Path, address: str) -> None:
    """An address that is none is the caller's error."""
    with pytest.raises(UsageError) as caught:
        kvops.connect(address, secret_file=secret_file)
    assert caught.value.fix


@pytest.mark.parametrize("deadline_ms", [0, -5, float("-inf")])
def test_a_call_without_time_says_nothing_about_the_master(client: Pool, deadline_ms: float) -> None:
    """Callers whose time was over before they asked do not open the breaker for those who have some."""
    outcomes = [client.put("k", b"x", deadline_ms=deadline_ms) for _ in range(5)]  # type: ignore[arg-type]

    assert {outcome.reason for outcome in outcomes} == {Reason.TIMEOUT}
    assert client.health()["master"]["breaker"] == "closed"


@pytest.mark.parametrize("deadline_ms", [10**15, float("inf")])
def test_a_deadline_may_be_far_away(client: Pool, deadline_ms: float) -> None:
    """However much time a caller gives, a master that is not there is known at once."""
    assert client.put("k", b"x", deadline_ms=deadline_ms).reason is Reason.MASTER_DOWN  # type: ignore[arg-type]


def test_a_view_that_cannot_be_understood(tmp_path: Path) -> None:
    """A master whose view of the stores is Greek to us costs hits, not exceptions; who must know is told."""
    path = tmp_path / "secret"
    write_private(path, SECRET.hex().encode())

    def script(sock: socket.socket) -> None:
        accept_handshake(sock)
        for _ in range(2):
            frame, _ = receive_frame(sock)
            sock.sendall(wire.pack(wire.reply(frame.kind), b"\xc1", frame.request))

    with (
        serve_script(script) as address,
        kvops.connect(str(address), secret_file=path, group="g", deadline_ms=CALL_MS) as pool,
    ):
        with pytest.raises(Unreachable, match="View"):
            pool.stores()
        assert pool.refresh(time.monotonic() + WAIT_S) is False


@pytest.mark.parametrize(
    "env",
    [
        {"KVOPS_STATE_DIR": "/somewhere"},
        {"KVOPS_STATE_DIR": "~/somewhere"},
        {"KVOPS_STATE_DIR": "", "XDG_STATE_HOME": "/state"},
        {"XDG_STATE_HOME": "relative"},
        {},
    ],
    ids=str,
)
def test_the_secret_lies_where_start_puts_it(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and command line agree on where a local group lives."""
    for name in ("KVOPS_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    assert local_secret("g") == LocalGroup(default_state_dir(), "g").secret_file

"""Logs: JSON lines that never make their writer wait."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError
from kvops.log import LogWriter, _render, configure, log


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Each test leaves logging as it found it."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    structlog.reset_defaults()
    yield
    root.handlers[:] = handlers
    structlog.reset_defaults()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_what_and_who(tmp_path: Path) -> None:
    """Each line is one JSON object with time, level, event, host and role, then what varies."""
    with configure(role="store", host="host-1", path=tmp_path / "log"):
        log.warning("replica.lost", replicas_left=1, segment="s/0")

    [line] = lines(tmp_path / "log")
    assert list(line) == ["time", "level", "event", "host", "role", "replicas_left", "segment"]
    assert line["time"].endswith("Z")
    assert (line["level"], line["event"], line["host"]) == ("warning", "replica.lost", "host-1")


def test_threads_know_host_and_role_too(tmp_path: Path) -> None:
    """A line from another thread names host and role like any other."""
    with configure(role="store", host="host-1", path=tmp_path / "log"):
        thread = threading.Thread(target=lambda: log.info("segment.populated"))
        thread.start()
        thread.join()

    assert lines(tmp_path / "log")[0]["role"] == "store"


def test_levels_and_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a file lines go to stderr, never to stdout; those below the level do not go at all."""
    with configure(role="master", host="h", level="warning"):
        log.info("beat.sent")
        log.error("beat.lost")

    out, err = capfd.readouterr()
    assert out == ""
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["beat.lost"]


def test_no_secret_and_no_payload_gets_out(tmp_path: Path) -> None:
    """Whoever passes a secret or bytes to a log call finds neither in the file."""
    with configure(role="master", host="h", path=tmp_path / "log"):
        log.info("peer.joined", secret="hunter2", data=b"hunter2", view=memoryview(b"hunter2"))

    assert "hunter2" not in (tmp_path / "log").read_text()
    assert lines(tmp_path / "log")[0]["data"] == "[7 bytes]"


def test_exceptions_and_libraries_are_lines_too(tmp_path: Path) -> None:
    """A traceback stays within its line, and what a library warns of is a line of ours."""
    with configure(role="master", host="h", path=tmp_path / "log"):
        try:
            raise ValueError("boom")
        except ValueError:
            log.error("step.failed", exc_info=True)
        logging.getLogger("asyncio").warning("slow %s", "callback")
        logging.getLogger("asyncio").info("not this")

    failed, library = lines(tmp_path / "log")
    assert "ValueError: boom" in failed["exception"]
    assert (library["event"], library["logger"], library["message"]) == (
        "library.logged",
        "asyncio",
        "slow callback",
    )


@given(
    values=st.dictionaries(
        st.text(),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.text()
            | st.binary()
            | st.just(object()),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_any_values_make_a_line(values: dict[str, Any]) -> None:
    """A log call never fails for what is passed to it."""
    line = _render(None, "info", {**values, "event": "thing.happened"})

    assert json.loads(line)["event"] in ("thing.happened", "'thing.happened'")
    assert line.count(b"\n") == 1


def test_in_a_foreign_process(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """In an engine that imports us and configured nothing, nothing of ours goes to its stdout."""
    log.warning("breaker.opened", store="store-2", secret="hunter2")

    assert capfd.readouterr().out == ""
    [record] = caplog.records
    assert record.name == "kvops"
    assert record.getMessage() == 'breaker.opened {"store":"store-2","secret":"[hidden]"}'


def test_events_can_be_captured() -> None:
    """A test that takes a log line for a contract sees it by structlog's own means."""
    with structlog.testing.capture_logs() as captured:
        log.info("store.joined", store="store-1")

    assert captured == [{"event": "store.joined", "log_level": "info", "store": "store-1"}]


def test_rotated_away(tmp_path: Path) -> None:
    """After logrotate moved the file, lines go to a new one under the old name."""
    path = tmp_path / "log"
    with LogWriter(path) as writer:
        writer.write(b'{"n": 1}\n')
        assert writer.flush()
        path.rename(tmp_path / "log.1")
        writer.write(b'{"n": 2}\n')

    assert lines(tmp_path / "log.1") == [{"n": 1}]
    assert lines(path) == [{"n": 2}]


def test_a_stalled_disk_delays_nobody(tmp_path: Path) -> None:
    """While nothing can be written, lines are dropped at once; later the log says how many."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    line = b'{"event": "noise.made", "pad": "' + b"x" * 960 + b'"}\n'
    with LogWriter(fifo, queue_bytes_max=64 << 10) as writer:
        for _ in range(1_000):  # a pipe takes 64 KiB; nobody reads
            writer.write(line)
        os.set_blocking(reader, True)
        received = b""
        while b"log.overrun" not in received:
            received += os.read(reader, 1 << 20)
            writer.write(line)
    os.close(reader)

    assert any(json.loads(text).get("lines", 0) > 800 for text in received.splitlines() if b"overrun" in text)


@pytest.mark.parametrize("level", ["loud", "info"])
def test_what_cannot_be(tmp_path: Path, level: str) -> None:
    """An unknown level and a file that cannot be opened are errors at the start, not silence later."""
    with pytest.raises(ConfigError):
        configure(role="master", host="h", path=tmp_path / "no" / "log", level=level)

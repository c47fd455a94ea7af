"""
Logs as JSON lines that never make their writer wait.

``configure`` once in a process of ours, after any fork; then use ``log`` anywhere. An event is a constant
``noun.past_verb``; what varies is a key; ``host`` and ``role`` are bound once. A thread of its own does the
writing, so that a stalled disk or a full pipe delays no lookup: lines that do not fit its queue meanwhile are
dropped, and counted in a line ``log.overrun``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import structlog

from kvops.errors import ConfigError

QUEUE_BYTES_MAX: Final = 4 << 20
CLOSE_TIMEOUT_S: Final = 1.0  # a disk that hangs must not keep a process from ending

Event = MutableMapping[str, Any]

_STDERR: Final = 2
_HIDDEN_KEYS: Final = frozenset({"secret", "token", "password", "mac", "payload"})


class LogWriter:
    """A bounded queue of lines with a thread behind it that writes them to a file or to stderr."""

    def __init__(self, path: Path | None = None, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        """
        Args:
            path: Appended to, and opened again after somebody moved it away (logrotate); None is stderr.
            queue_bytes_max: Lines beyond this, unwritten, are dropped.

        Raises:
            ConfigError: The file cannot be opened.
        """
        self._path = path
        self._queue_bytes_max = queue_bytes_max
        self._descriptor = _STDERR if path is None else self._open(path)
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._writing = False
        self._closed = False
        self._state = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue one line, its newline included, or drop it; never waits for the file."""
        with self._state:
            if self._closed or self._queued_bytes + len(line) > self._queue_bytes_max:
                self._dropped += 1
                return
            self._lines.append(line)
            self._queued_bytes += len(line)
            if len(self._lines) == 1:
                self._state.notify_all()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until what was queued is written; False when the time ran out first."""
        with self._state:
            return self._state.wait_for(lambda: not self._lines and not self._writing, timeout_s)

    def close(self) -> None:
        """Write what is queued, as far as the time allows, and stop. Later lines are dropped."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._path is not None and not self._thread.is_alive() and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                batch = b"".join(self._lines)
                self._lines.clear()
                self._queued_bytes = 0
                if self._dropped:
                    batch += _overrun_line(self._dropped)
                    self._dropped = 0
                self._writing = True
            self._write_out(batch)
            with self._state:
                self._writing = False
                self._state.notify_all()

    def _write_out(self, batch: bytes) -> None:
        try:
            if self._path is not None and self._moved_away(self._path):
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                    self._descriptor = -1  # should the opening fail, the next line tries again
                self._descriptor = self._open(self._path)
            view = memoryview(batch)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except (OSError, ConfigError):
            # A full disk or a closed pipe: there is nobody left to tell but the next line that gets through.
            with self._state:
                self._dropped += batch.count(b"\n")

    def _moved_away(self, path: Path) -> bool:
        if self._descriptor < 0:
            return True
        try:
            there, ours = path.stat(), os.fstat(self._descriptor)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"the log file {path} cannot be written: {error.strerror}",
                fix="make its folder and let this user write there, or set log_file to another place",
            ) from None


def configure(*, role: str, host: str, path: Path | None = None, level: str = "info") -> LogWriter:
    """
    Send this process's logs, ours and those of the libraries (from "warning" on), to a file or to stderr.

    Args:
        role: Who logs: ``master``, ``store``, ``client``; bound to every line.
        host: The logical host name; bound to every line.
        path: The file; None is stderr.
        level: The lowest that is written: ``debug``, ``info``, ``warning``, ``error``.

    Returns:
        The writer; closed at exit at the latest.

    Raises:
        ConfigError: The file cannot be opened, or there is no such level.
    """
    lowest = logging.getLevelNamesMapping().get(level.upper())
    if lowest is None:
        raise ConfigError(f"there is no log level {level!r}", fix="use debug, info, warning or error")
    writer = LogWriter(path)

    def bind(_logger: object, _method: str, event: Event) -> Event:
        return {"host": host, "role": role, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            bind,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        logger_factory=lambda *_: _Output(writer),
    )
    library = logging.getLogger()
    for handler in library.handlers[:]:
        if isinstance(handler, _LibraryHandler):
            library.removeHandler(handler)
    library.addHandler(_LibraryHandler(logging.WARNING))
    atexit.register(writer.close)
    return writer


class Log:
    """
    What our modules log through.

    In a process of others, such as an engine that imports our client, where nobody set up structlog, lines
    go to the standard library's logger ``kvops``: structlog's own default would print to stdout there.
    """

    def debug(self, event: str, **values: object) -> None:
        """What helps to debug kvops itself."""
        self._log(logging.DEBUG, event, values)

    def info(self, event: str, **values: object) -> None:
        """What happened."""
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: object) -> None:
        """What somebody may have to look at."""
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: object) -> None:
        """What somebody has to look at; ``exc_info=True`` adds the traceback."""
        self._log(logging.ERROR, event, values)

    @staticmethod
    def _log(level: int, event: str, values: dict[str, Any]) -> None:
        if structlog.is_configured():
            structlog.get_logger().log(level, event, **values)
            return
        library = logging.getLogger("kvops")
        if library.isEnabledFor(level):
            exc_info = values.pop("exc_info", None)
            line = _render(None, "", values).decode().rstrip()
            library.log(level, "%s %s", event, line, exc_info=exc_info)


log: Final = Log()


class _Output:
    """What structlog calls with a rendered line, whatever its level."""

    def __init__(self, writer: LogWriter) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = self.msg = writer.write


class _LibraryHandler(logging.Handler):
    """Turns what libraries log (asyncio's "exception was never retrieved", for one) into a line like ours."""

    def emit(self, record: logging.LogRecord) -> None:
        exc_info = record.exc_info if record.exc_info and record.exc_info[0] else None
        structlog.get_logger().log(
            record.levelno,
            "library.logged",
            logger=record.name,
            message=record.getMessage(),
            exc_info=exc_info,
        )


def _render(_logger: object, _method: str, event: Event) -> bytes:
    """One line of JSON: first what every line has. Secrets and payload never get out, whoever passes them."""
    line = {key: event.pop(key) for key in ("time", "level", "event", "host", "role") if key in event}
    for key, value in event.items():
        if key in _HIDDEN_KEYS:
            line[key] = "[hidden]"
        elif isinstance(value, (bytes, bytearray, memoryview)):
            line[key] = f"[{memoryview(value).nbytes} bytes]"
        else:
            line[key] = value
    try:
        return msgspec.json.encode(line, enc_hook=str) + b"\n"
    except (TypeError, ValueError, UnicodeEncodeError):
        # A key that is no text, an int beyond 64 bits, a lone surrogate: a log call never fails for these.
        return msgspec.json.encode({str(key): ascii(value) for key, value in line.items()}) + b"\n"


def _overrun_line(count: int) -> bytes:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return (
        msgspec.json.encode({"time": now, "level": "warning", "event": "log.overrun", "lines": count}) + b"\n"
    )

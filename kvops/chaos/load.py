"""A bounded flood of requests: what many clients that all want the same store at once do to it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from kvops.store.clock import boot_ms

CONNECTIONS_MAX: Final = 512
REQUEST_TIMEOUT_S: Final = 1.0


def many_to_one(settings: dict[str, Any], until_boot_ms: int, ready: Callable[[], None]) -> None:
    """
    Open connections to one address and hold them, each asking again and again.

    Args:
        settings: ``host``, ``port``, ``connections``, and ``rate`` in requests a second over all of them.
        until_boot_ms: When it is over.
        ready: Called once every connection was tried.
    """
    count = min(int(settings["connections"]), CONNECTIONS_MAX)
    rate = float(settings["rate"])
    address = (settings["host"], int(settings["port"]))
    stop = threading.Event()
    request = f"GET /health HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n\r\n".encode()
    tried = threading.Barrier(count + 1)

    def one() -> None:
        first = True
        while not stop.is_set() and boot_ms() < until_boot_ms:
            with contextlib.suppress(OSError), socket.create_connection(address, REQUEST_TIMEOUT_S) as sock:
                if first:
                    first = False
                    with contextlib.suppress(threading.BrokenBarrierError):
                        tried.wait(2.0)
                sock.sendall(request)
                while sock.recv(1 << 14):
                    pass
            stop.wait(count / rate)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        tried.wait(2.0)
    ready()
    while boot_ms() < until_boot_ms:
        stop.wait(0.5)

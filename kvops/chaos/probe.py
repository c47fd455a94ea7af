"""How a target looks from where its neighbours are: one request with a deadline, and how that ended."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvops.chaos import netns
from kvops.chaos.targets import Target

PROBE_TIMEOUT_S: Final = 0.5
ANSWER_BYTES_MAX: Final = 1 << 16
ASKABLE: Final = ("http", "client")
"""Addresses of a target that answer an HTTP request: a member of etcd has ``client``."""


class Ending(StrEnum):
    """How a request ended; each takes another path through a client."""

    ANSWERED = "answered"
    CONNECTED = "connected, then silent"
    REFUSED = "refused"
    RESET = "reset"
    NO_CONNECTION = "no connection in time"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One request."""

    ending: Ending
    connect_ms: float
    total_ms: float
    answer: bytes = b""

    def __str__(self) -> str:
        return f"{self.ending} after {self.total_ms:.0f} ms"


def address_of(target: Target) -> tuple[str, int] | None:
    """Where it answers HTTP; None when it does nowhere."""
    for name in ASKABLE:
        text = target.addresses.get(name, "")
        host, _, port = text.rpartition(":")
        if host and port.isdigit():
            return host.strip("[]"), int(port)
    return None


def ask(
    address: tuple[str, int],
    *,
    path: str = "/health",
    timeout_s: float = PROBE_TIMEOUT_S,
    from_netns: int = 0,
    mark: int = 0,
) -> Probe:
    """
    Send one HTTP request and say how it ended. Any answer counts, whatever its status.

    Args:
        address: Host and port.
        path: What is asked for.
        timeout_s: For all of it.
        from_netns: Inode of the namespace to ask from; 0: ours.
        mark: Of the socket, by which rules may pass it over.
    """

    def do() -> Probe:
        began = time.monotonic()
        connected = began

        def probe(ending: Ending, answer: bytes = b"") -> Probe:
            now = time.monotonic()
            return Probe(
                ending=ending,
                connect_ms=(connected - began) * 1000,
                total_ms=(now - began) * 1000,
                answer=answer,
            )

        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if mark:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            sock.settimeout(timeout_s)
            sock.connect(address)
        except TimeoutError:
            sock.close()
            return probe(Ending.NO_CONNECTION)
        except ConnectionRefusedError:
            sock.close()
            return probe(Ending.REFUSED)
        except ConnectionResetError:
            sock.close()
            return probe(Ending.RESET)
        except OSError:
            sock.close()
            return probe(Ending.UNREACHABLE)
        with sock:
            connected = time.monotonic()
            answer = b""
            try:
                head = f"GET {path} HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n"
                head += "\r\n"
                sock.settimeout(max(0.001, timeout_s - (connected - began)))
                sock.sendall(head.encode())
                while len(answer) < ANSWER_BYTES_MAX:
                    left_s = timeout_s - (time.monotonic() - began)
                    if left_s <= 0:
                        break
                    sock.settimeout(left_s)
                    chunk = sock.recv(1 << 14)
                    if not chunk:
                        break
                    answer += chunk
            except TimeoutError:
                return probe(Ending.ANSWERED if answer else Ending.CONNECTED, answer)
            except OSError:
                return probe(Ending.RESET, answer)
            return probe(Ending.ANSWERED if answer else Ending.RESET, answer)

    return do() if not from_netns else netns.call_in(from_netns, do)


def ask_target(target: Target, *, timeout_s: float = PROBE_TIMEOUT_S, from_netns: int = 0) -> Probe:
    """As ``ask``, of a target that has an address."""
    address = address_of(target)
    assert address is not None, f"{target.name} answers nowhere"
    return ask(address, timeout_s=timeout_s, from_netns=from_netns)

"""Ports of loopback that stay a test's own, also before its server listens there and while that is down."""

from __future__ import annotations

import socket


def hold() -> socket.socket:
    """
    A bound socket that listens on nothing: connections to its port are refused, and nobody is given the port.

    A server that sets SO_REUSEADDR may listen there beside it (socket(7): no conflict while we do not listen).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def number(held: socket.socket) -> int:
    """The port."""
    return int(held.getsockname()[1])

"""Host and port as people write them, for whatever listens or is called."""

from __future__ import annotations

from kvops.errors import UsageError


def split_address(text: str) -> tuple[str, int]:
    """
    Host and port of ``host:port``, ``[v6]:port``; port 0 asks the kernel for a free one.

    Raises:
        UsageError: The text is not an address.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # a bare IPv6 address: where its port begins cannot be told
    if "[" in host or "]" in host:
        colon = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise UsageError(
            f"{text!r} is not an address", fix="write host:port, such as 127.0.0.1:7800 or [::1]:7800"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """``host:port``, which ``split_address`` takes apart again."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""
Mutual proof of the group secret, before any other frame of a connection is read.

::

    caller                                   listener
    HELLO      who I am, nonce_c        →
               ←   CHALLENGE             nonce_l, mac(secret, "listener", hello, nonce_l)
    PROOF      mac(secret, "caller", hello, nonce_l)  →
               ←   WELCOME               what the caller needs to know

Each side proves the secret over both nonces and the caller's whole HELLO, so a proof can neither be replayed
nor moved to another role or identity. Frames after it are not encrypted: the wire belongs on a trusted network.
"""

from __future__ import annotations

import hmac
import os
from typing import Final

import msgspec

from kvops.errors import AuthFailed, WireError
from kvops.net.wire import decode, encode

NONCE_BYTES: Final = 16
SECRET_BYTES_MIN: Final = 16
HANDSHAKE_BYTES_MAX: Final = 4_096


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls."""

    role: str  # client, store, master
    group: str
    name: str
    host: str  # logical
    numa_node: int
    pid: int
    boot_id: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The listener's nonce and proof."""

    group: str
    nonce: bytes
    mac: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's proof."""

    mac: bytes


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller needs to know of the listener."""

    role: str
    name: str
    term: int
    incarnation: int
    boot_id: str
    unix_path: str


class WireTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an ERROR frame: the last one on its connection."""

    code: str
    what: str
    fix: str
    leader: str = ""  # with NotLeader: the wire address of the master that leads, where it is known


def _mac(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"kvops wire v1\0" + side + b"\0" + nonce + hello, "sha256")


class Listener:
    """The listener's half of one handshake; bytes in and out, no socket."""

    def __init__(self, secret: bytes, group: str) -> None:
        self._secret = secret
        self._group = group
        self._nonce = os.urandom(NONCE_BYTES)
        self._hello_body = b""
        self.hello: Hello | None = None

    def challenge(self, body: bytes) -> bytes:
        """Answer a HELLO body with a CHALLENGE body."""
        hello = decode(body, Hello)
        if len(hello.nonce) < NONCE_BYTES:
            raise WireError("a HELLO with a short nonce", fix="")
        if hello.group != self._group:
            raise AuthFailed(
                f"{hello.role} {hello.name} of group {hello.group!r} called group {self._group!r}",
                fix="check the address and the group's name",
            )
        self._hello_body = body
        self.hello = hello
        mac = _mac(self._secret, b"listener", body, self._nonce)
        return encode(Challenge(group=self._group, nonce=self._nonce, mac=mac))

    def accept(self, body: bytes) -> Hello:
        """
        Check a PROOF body.

        Raises:
            AuthFailed: The caller does not hold the secret.
        """
        if self.hello is None:
            raise WireError("a PROOF before its HELLO", fix="")
        proof = decode(body, Proof)
        if not hmac.compare_digest(proof.mac, _mac(self._secret, b"caller", self._hello_body, self._nonce)):
            raise AuthFailed(
                f"{self.hello.role} {self.hello.name} does not hold the secret of group {self._group!r}",
                fix="install the group's secret file on its host",
            )
        return self.hello


class Caller:
    """The caller's half of one handshake; bytes in and out, no socket."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self._secret = secret
        # A nonce of its own for each connection: a challenge that answered another one is no proof.
        fresh = msgspec.structs.replace(hello, nonce=os.urandom(NONCE_BYTES))
        self._body = encode(fresh)

    def hello(self) -> bytes:
        """The HELLO body."""
        return self._body

    def proof(self, body: bytes) -> bytes:
        """
        Answer a CHALLENGE body with a PROOF body.

        Raises:
            AuthFailed: The listener does not hold the secret.
            WireError: Not a CHALLENGE.
        """
        challenge = decode(body, Challenge)
        if len(challenge.nonce) != NONCE_BYTES:  # or it could take in the beginning of another HELLO
            raise WireError(f"a CHALLENGE with a nonce of {len(challenge.nonce)} B", fix="")
        if not hmac.compare_digest(
            challenge.mac, _mac(self._secret, b"listener", self._body, challenge.nonce)
        ):
            raise AuthFailed(
                "the peer does not hold our group secret",
                fix="check the address and --secret-file",
            )
        return encode(Proof(mac=_mac(self._secret, b"caller", self._body, challenge.nonce)))

"""
MACs that prove who made a gRPC call, who answered it, and that neither was seen before.

::

    metadata "kvops-mac-bin", with every call. Little-endian, 57 bytes.
    offset  0  version     u8    1
            1  nonce      16 s   random, never used twice
           17  expires_ms  u64   wall clock (UTC): the only clock that two hosts share
           25  mac        32 s   HMAC-SHA256 over "call", method, nonce, expires_ms, body

    trailing metadata "kvops-reply-bin", with every answer, errors too. 32 bytes.
            0  mac        32 s   HMAC-SHA256 over "reply", method, nonce, status code, error, index, body

    at the end of each message of a stream, as protobuf field 2047 (parsers skip it). 35 bytes.
            0  tag         3 s   fa 7f 20
            3  mac        32 s   the same as a reply's, with the message's index

The key is derived from the group secret, so that no MAC made here means anything in the wire's handshake.
A replay is refused as long as the master that saw the call runs; one that was restarted meanwhile accepts it
until the call expires. So calls that change something must be harmless when repeated, or need mutual TLS.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvops.errors import AuthFailed, Refused

CALL_KEY: Final = "kvops-mac-bin"
REPLY_KEY: Final = "kvops-reply-bin"

CALL_VERSION: Final = 1
CALL: Final = struct.Struct("<B16sQ32s")
assert CALL.size == 57
NONCE_BYTES: Final = 16
MAC_BYTES: Final = 32
SEAL_TAG: Final = b"\xfa\x7f\x20"  # field 2047, length-delimited, 32 bytes
SEAL_BYTES: Final = len(SEAL_TAG) + MAC_BYTES

EXPIRES_IN_MS: Final = 30_000  # a call is good for this long after it was made …
EXPIRES_IN_MS_MAX: Final = 60_000  # … on a clock that may be this much minus that ahead of the server's
NONCES_MAX: Final = 65_536  # calls remembered for one EXPIRES_IN_MS_MAX: 1,000 a second
assert EXPIRES_IN_MS < EXPIRES_IN_MS_MAX

_REPLY_HEAD: Final = struct.Struct("<16sIQI")


def derive_key(secret: bytes) -> bytes:
    """The key of the control plane's MACs, of 32 bytes, from the group secret."""
    return hmac.digest(secret, b"kvops control plane v1", "sha256")


def _call_mac(key: bytes, method: str, nonce: bytes, expires_ms: int, body: bytes) -> bytes:
    name = method.encode()
    head = struct.pack("<4sH", b"call", len(name)) + name + nonce + struct.pack("<Q", expires_ms)
    return hmac.digest(key, head + body, "sha256")


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """A call whose MAC was made or found right; it makes and checks the MACs of its answer."""

    key: bytes
    method: str
    nonce: bytes

    def reply_mac(self, body: bytes, *, code: int = 0, error: bytes = b"", index: int = 0) -> bytes:
        """
        The MAC of an answer.

        Args:
            body: The encoded reply; empty for an error and for a stream's end.
            code: gRPC status, 0 for OK.
            error: The encoded error, with a status other than OK.
            index: Of a message in its stream; at its end how many there were, so that none can be cut off.
        """
        name = self.method.encode()
        head = (
            struct.pack("<5sH", b"reply", len(name))
            + name
            + _REPLY_HEAD.pack(self.nonce, code, index, len(error))
        )
        return hmac.digest(self.key, head + error + body, "sha256")

    def proves(self, mac: bytes, body: bytes, *, code: int = 0, error: bytes = b"", index: int = 0) -> bool:
        """Whether the answer comes from somebody who holds the secret, to this very call."""
        return hmac.compare_digest(mac, self.reply_mac(body, code=code, error=error, index=index))

    def seal(self, message: bytes, index: int) -> bytes:
        """One message of a stream with its MAC at the end."""
        return message + SEAL_TAG + self.reply_mac(message, index=index)

    def unseal(self, data: bytes, index: int) -> bytes | None:
        """The message within, or None when its MAC is missing or wrong."""
        message, tag, mac = data[:-SEAL_BYTES], data[-SEAL_BYTES:-MAC_BYTES], data[-MAC_BYTES:]
        return message if tag == SEAL_TAG and self.proves(mac, message, index=index) else None


def sign_call(secret: bytes, method: str, body: bytes, *, now_ms: int) -> tuple[Call, bytes]:
    """
    Prove that we may make a call.

    Args:
        secret: The group secret.
        method: The full name, such as ``/kvops.v1.Control/Status``.
        body: The encoded request, exactly as it is sent.
        now_ms: Wall clock, in ms since 1970.

    Returns:
        What checks the answer, and the value of the call's metadata ``CALL_KEY``.
    """
    call = Call(derive_key(secret), method, os.urandom(NONCE_BYTES))
    expires_ms = now_ms + EXPIRES_IN_MS
    mac = _call_mac(call.key, method, call.nonce, expires_ms, body)
    return call, CALL.pack(CALL_VERSION, call.nonce, expires_ms, mac)


class CallVerifier:
    """Tells calls of the group from others, and lets each through once. The caller passes the time."""

    def __init__(self, secrets: Sequence[bytes], *, nonces_max: int = NONCES_MAX) -> None:
        """
        Args:
            secrets: Every one that is valid now: two while one replaces the other.
            nonces_max: Calls remembered, so the most that are let through within ``EXPIRES_IN_MS_MAX``.
        """
        assert secrets, "without a secret no call could pass"
        self._keys = tuple(derive_key(secret) for secret in secrets)
        self._nonces_max = nonces_max
        # What came EXPIRES_IN_MS_MAX ago has expired, whatever its expiry said.
        self._seen: set[bytes] = set()
        self._arrivals: deque[tuple[int, bytes]] = deque()

    def verify(self, method: str, body: bytes, token: bytes | None, *, now_ms: int) -> Call:
        """
        Let a call through, once.

        Args:
            method: The full name of what is called.
            body: The request as it came, not yet parsed.
            token: The value of ``CALL_KEY``, None when there was none.
            now_ms: Wall clock, in ms since 1970.

        Raises:
            AuthFailed: No MAC, a wrong one, one that has expired, or one seen before.
            Refused: More calls than can be remembered came within the last minute.
        """
        if token is None or len(token) != CALL.size or token[0] != CALL_VERSION:
            raise AuthFailed(
                f"the call {method} carries no proof of the group secret",
                fix="call with a client that holds the group's secret file",
            )
        _, nonce, expires_ms, mac = CALL.unpack(token)
        for key in self._keys:
            if hmac.compare_digest(mac, _call_mac(key, method, nonce, expires_ms, body)):
                break
        else:
            raise AuthFailed(
                f"the call {method} was signed with another secret, or changed on its way",
                fix="use the secret file of this group, or check which group the address belongs to",
            )
        if not now_ms < expires_ms <= now_ms + EXPIRES_IN_MS_MAX:
            skew_s = (expires_ms - EXPIRES_IN_MS - now_ms) / 1000
            raise AuthFailed(
                f"the call {method} was made {abs(skew_s):.0f} s in the {'past' if skew_s < 0 else 'future'}",
                fix="set the clocks of both hosts (chrony); they may be 30 s apart",
            )
        self._forget(now_ms)
        if nonce in self._seen:
            raise AuthFailed(
                f"the call {method} came a second time", fix="make a new call instead of repeating bytes"
            )
        if len(self._seen) >= self._nonces_max:
            raise Refused(
                f"{self._nonces_max} calls came within {EXPIRES_IN_MS_MAX // 1000} s",
                fix="call less often; find who calls",
            )
        self._seen.add(nonce)
        self._arrivals.append((now_ms, nonce))
        return Call(key, method, nonce)

    def _forget(self, now_ms: int) -> None:
        # A clock that was set back forgets later, never sooner.
        while self._arrivals and self._arrivals[0][0] <= now_ms - EXPIRES_IN_MS_MAX:
            self._seen.remove(self._arrivals.popleft()[1])

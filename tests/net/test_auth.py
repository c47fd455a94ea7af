"""The handshake: both sides prove the secret, and no proof serves twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import AuthFailed, ConfigError, WireError
from kvops.files import read_secret
from kvops.net.auth import Caller, Challenge, Hello, Listener, Proof

SECRET = b"s" * 32
HELLO = Hello(role="client", group="g", name="n", host="h", numa_node=0, pid=1, boot_id="b", nonce=b"n" * 16)


def changed(body: bytes, **fields: object) -> bytes:
    """A HELLO body with other fields."""
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(body, type=Hello), **fields))


def test_both_sides_prove_the_secret() -> None:
    """Caller and listener with one secret accept each other."""
    caller, listener = Caller(SECRET, HELLO), Listener(SECRET, "g")

    accepted = listener.accept(caller.proof(listener.challenge(caller.hello())))

    assert (accepted.role, accepted.name) == ("client", "n")


def test_caller_without_the_secret() -> None:
    """A caller that invents a proof is refused."""
    caller, listener = Caller(SECRET, HELLO), Listener(SECRET, "g")
    listener.challenge(caller.hello())

    with pytest.raises(AuthFailed, match="does not hold the secret"):
        listener.accept(msgspec.msgpack.encode(Proof(mac=b"\0" * 32)))


def test_listener_without_the_secret() -> None:
    """A caller tells nothing to a listener that does not hold the secret."""
    caller, impostor = Caller(SECRET, HELLO), Listener(b"x" * 32, "g")

    with pytest.raises(AuthFailed, match="does not hold our group secret"):
        caller.proof(impostor.challenge(caller.hello()))


def test_proof_cannot_be_replayed() -> None:
    """A recorded proof is worth nothing on the next connection."""
    caller = Caller(SECRET, HELLO)
    first, second = Listener(SECRET, "g"), Listener(SECRET, "g")
    proof = caller.proof(first.challenge(caller.hello()))
    first.accept(proof)
    second.challenge(caller.hello())

    with pytest.raises(AuthFailed):
        second.accept(proof)


def test_challenge_cannot_be_replayed() -> None:
    """A recorded challenge does not pass for the listener's, although the caller says the same of itself."""
    first, second = Caller(SECRET, HELLO), Caller(SECRET, HELLO)
    challenge = Listener(SECRET, "g").challenge(first.hello())
    first.proof(challenge)

    with pytest.raises(AuthFailed):
        second.proof(challenge)


def test_callers_proof_is_no_listeners() -> None:
    """What one side sent cannot be sent back as the other side's."""
    caller, listener = Caller(SECRET, HELLO), Listener(SECRET, "g")
    challenge = msgspec.msgpack.decode(listener.challenge(caller.hello()), type=Challenge)

    with pytest.raises(AuthFailed):
        listener.accept(msgspec.msgpack.encode(Proof(mac=challenge.mac)))


@pytest.mark.parametrize("field", [{"role": "store"}, {"name": "other"}, {"host": "other"}, {"pid": 2}])
def test_proof_is_tied_to_who_said_hello(field: dict[str, object]) -> None:
    """Somebody between the two cannot let a client pass for a store, or for another client."""
    caller, listener = Caller(SECRET, HELLO), Listener(SECRET, "g")
    genuine = Listener(SECRET, "g")
    challenge = listener.challenge(changed(caller.hello(), **field))

    with pytest.raises(AuthFailed):
        caller.proof(challenge)
    with pytest.raises(AuthFailed):
        listener.accept(caller.proof(genuine.challenge(caller.hello())))


def test_nonce_takes_no_part_of_a_hello() -> None:
    """A listener's answer to a HELLO that carries another one inside does not pass as its answer to that."""
    caller, listener = Caller(SECRET, HELLO), Listener(SECRET, "g")
    inner = caller.hello()
    fields = msgspec.msgpack.decode(changed(inner))
    outer = msgspec.msgpack.encode(fields | {"z": inner})
    assert outer.endswith(inner)
    challenge = msgspec.msgpack.decode(listener.challenge(outer), type=Challenge)
    longer = challenge.nonce + outer[: -len(inner)]

    with pytest.raises(WireError):
        caller.proof(msgspec.msgpack.encode(msgspec.structs.replace(challenge, nonce=longer)))


def test_other_group_is_refused_by_name() -> None:
    """A caller of another group learns that it called the wrong one."""
    with pytest.raises(AuthFailed, match="group 'g' called group 'other'"):
        Listener(SECRET, "other").challenge(Caller(SECRET, HELLO).hello())


def test_proof_before_hello() -> None:
    """A PROOF that nobody asked for breaks the protocol."""
    with pytest.raises(WireError):
        Listener(SECRET, "g").accept(msgspec.msgpack.encode(Proof(mac=b"")))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    """No bytes crash a handshake."""
    caller, listener = Caller(SECRET, HELLO), Listener(SECRET, "g")
    listener.challenge(caller.hello())

    for take in (Listener(SECRET, "g").challenge, listener.accept, caller.proof):
        with pytest.raises((AuthFailed, WireError)):
            take(body)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("00" * 32, 0o644), ("zz" * 32, 0o600), ("00" * 8, 0o600), ("\xff", 0o600)],
    ids=["readable by others", "not hexadecimal", "short", "not text"],
)
def test_secret_files_that_are_refused(tmp_path: Path, text: str, mode: int) -> None:
    """A secret that others may read, or that is none, is refused with the file's name."""
    path = tmp_path / "secret"
    path.write_text(text, "latin-1")
    path.chmod(mode)

    with pytest.raises(ConfigError, match="secret"):
        read_secret(path)

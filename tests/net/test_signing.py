"""MACs of calls and answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import AuthFailed, Refused
from kvops.net import signing
from kvops.net.signing import CALL, CallVerifier, sign_call

SECRET = bytes(range(32))
OTHER = bytes(32)
METHOD = "/kvops.v1.Control/Status"
NOW_MS = 1_900_000_000_000


def test_a_signed_call_passes_once() -> None:
    """A call made with the group secret passes; the same bytes again are refused."""
    verifier = CallVerifier([SECRET])
    _, token = sign_call(SECRET, METHOD, b"body", now_ms=NOW_MS)

    assert verifier.verify(METHOD, b"body", token, now_ms=NOW_MS).method == METHOD
    with pytest.raises(AuthFailed, match="second time"):
        verifier.verify(METHOD, b"body", token, now_ms=NOW_MS + 1)


def test_no_replay_at_any_time() -> None:
    """Whenever a call comes again, to the very ms at which its nonce is forgotten, it is refused."""
    for ahead_ms in (0, 15_000, signing.EXPIRES_IN_MS_MAX - signing.EXPIRES_IN_MS):
        _, token = sign_call(SECRET, METHOD, b"", now_ms=NOW_MS + ahead_ms)
        for later_ms in (0, 29_999, 30_000, 45_000, 59_999, 60_000, 60_001):
            verifier = CallVerifier([SECRET])
            verifier.verify(METHOD, b"", token, now_ms=NOW_MS)

            with pytest.raises(AuthFailed):
                verifier.verify(METHOD, b"", token, now_ms=NOW_MS + later_ms)


@given(bit=st.integers(0, CALL.size * 8 - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    """No bit of a call's proof may be changed."""
    _, token = sign_call(SECRET, METHOD, b"body", now_ms=NOW_MS)
    damaged = bytearray(token)
    damaged[bit // 8] ^= 1 << bit % 8

    with pytest.raises(AuthFailed):
        CallVerifier([SECRET]).verify(METHOD, b"body", bytes(damaged), now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("method", "body", "cut", "words"),
    [
        ("/kvops.v1.Control/Drain", b"body", 57, "another secret, or changed"),
        (METHOD, b"bodz", 57, "another secret, or changed"),
        (METHOD, b"body", 56, "no proof"),
        (METHOD, b"body", 0, "no proof"),
    ],
    ids=["other method", "other body", "cut short", "empty"],
)
def test_a_proof_fits_one_call(method: str, body: bytes, cut: int, words: str) -> None:
    """A proof is good for one method and one body, whole."""
    _, token = sign_call(SECRET, METHOD, b"body", now_ms=NOW_MS)

    with pytest.raises(AuthFailed, match=words):
        CallVerifier([SECRET]).verify(method, body, token[:cut], now_ms=NOW_MS)


@pytest.mark.parametrize(("skew_s", "words"), [(-31, "31 s in the past"), (31, "31 s in the future")])
def test_clocks_too_far_apart_are_named(skew_s: int, words: str) -> None:
    """A right secret with a wrong clock is told so, not that the secret were wrong."""
    _, token = sign_call(SECRET, METHOD, b"", now_ms=NOW_MS + skew_s * 1000)

    with pytest.raises(AuthFailed, match=words):
        CallVerifier([SECRET]).verify(METHOD, b"", token, now_ms=NOW_MS)


def test_two_secrets_are_valid_during_a_rotation() -> None:
    """While one secret replaces another, callers with either pass, and get answers that they can check."""
    verifier = CallVerifier([SECRET, OTHER])
    for secret in (SECRET, OTHER):
        mine, token = sign_call(secret, METHOD, b"", now_ms=NOW_MS)
        theirs = verifier.verify(METHOD, b"", token, now_ms=NOW_MS)

        assert mine.proves(theirs.reply_mac(b"answer"), b"answer")


def test_memory_for_calls_is_bounded_and_comes_back() -> None:
    """A flood is refused rather than remembered without end, and after a minute calls pass again."""
    verifier = CallVerifier([SECRET], nonces_max=3)

    def call(now_ms: int) -> None:
        verifier.verify(METHOD, b"", sign_call(SECRET, METHOD, b"", now_ms=now_ms)[1], now_ms=now_ms)

    for _ in range(3):
        call(NOW_MS)
    with pytest.raises(Refused):
        call(NOW_MS)
    call(NOW_MS + signing.EXPIRES_IN_MS_MAX)


def test_an_answer_proves_every_part_of_itself() -> None:
    """An answer's MAC fits neither another call nor another body, status, error or index."""
    call, _ = sign_call(SECRET, METHOD, b"", now_ms=NOW_MS)
    again, _ = sign_call(SECRET, METHOD, b"", now_ms=NOW_MS)
    mac = call.reply_mac(b"body", code=9, error=b"why", index=3)

    assert call.proves(mac, b"body", code=9, error=b"why", index=3)
    assert not again.proves(mac, b"body", code=9, error=b"why", index=3)
    assert not call.proves(mac, b"bodybody", code=9, error=b"why", index=3)
    assert not call.proves(mac, b"body", code=0, error=b"why", index=3)
    assert not call.proves(mac, b"ybody", code=9, error=b"wh", index=3)
    assert not call.proves(mac, b"body", code=9, error=b"why", index=2)


def test_streamed_messages_keep_their_places() -> None:
    """A sealed message opens at its own index only, and stays valid protobuf for who does not check it."""
    from kvops.proto.kvops.v1 import control_pb2

    call, _ = sign_call(SECRET, METHOD, b"", now_ms=NOW_MS)
    message = control_pb2.Event(event="store.joined").SerializeToString()
    sealed = call.seal(message, 1)

    assert call.unseal(sealed, 1) == message
    assert call.unseal(sealed, 0) is None
    assert call.unseal(sealed[1:], 1) is None
    assert call.unseal(b"", 1) is None
    assert control_pb2.Event.FromString(sealed).event == "store.joined"


def test_golden_bytes() -> None:
    """The bytes on the wire are pinned for ever: other versions must agree on them."""
    call = signing.Call(signing.derive_key(SECRET), METHOD, bytes(16))

    assert (
        signing.derive_key(SECRET).hex() == "18bece3e9f44007b3e1333bd49a09653747ff917ea58337cfec44f570eddd280"
    )
    assert (
        signing._call_mac(call.key, METHOD, bytes(16), NOW_MS, b"body").hex()
        == "603014ed7d6edadf29b682a80e574ca2876cedbd63ba69159e1b5cefd5780f07"
    )
    assert (
        call.reply_mac(b"body", code=5, error=b"e", index=1).hex()
        == "55c10f5726ae5047715d55d965b3e68eecc66a9f478a26a8c24f3970f81c4a66"
    )

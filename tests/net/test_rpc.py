"""The one table between our errors and gRPC's status codes."""

import inspect

import pytest

from kvops import errors
from kvops.errors import KvopsError, NotLeader
from kvops.net.rpc import CODES, code_of, decode_error, encode_error
from kvops.proto.kvops.v1 import error_pb2

EVERY_ERROR = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KvopsError)
]


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_error_comes_back_as_itself(kind: type[KvopsError]) -> None:
    """Whatever a server raises, its caller gets the same class with the same words."""
    error = kind("what happened", fix="what to do")
    back = decode_error(encode_error(error), code_of(error))

    assert kind in CODES
    assert type(back) is kind
    assert (back.what, back.fix) == ("what happened", "what to do")


def test_another_leader_is_named() -> None:
    """A call to a standby says who leads, and that nobody does when nobody does."""
    for leader in ("gpu-001:7801", None):
        error = NotLeader("master-1 is a standby", fix="ask the leader", leader=leader)
        back = decode_error(encode_error(error), code_of(error))

        assert isinstance(back, NotLeader)
        assert back.leader == leader


def test_an_error_of_a_newer_server_keeps_its_meaning() -> None:
    """An unknown class becomes one with the same status code, and unreadable bytes still an error of ours."""
    newer = error_pb2.Error(kind="QuotaExceeded", what="tenant 7 is full", fix="ask for more")

    assert isinstance(decode_error(newer.SerializeToString(), CODES[errors.NoSpace]), errors.NoSpace)
    assert isinstance(decode_error(b"\xff", CODES[errors.NoSpace]), errors.NoSpace)


def test_a_subclass_travels_as_its_base() -> None:
    """A class that is private to the server arrives as the nearest one that both sides know."""

    class DiskFull(errors.NoSpace):
        pass

    error = DiskFull("no room", fix="")

    assert type(decode_error(encode_error(error), code_of(error))) is errors.NoSpace

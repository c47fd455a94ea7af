"""A group's keys in a real etcd, as a wrong configuration, a hostile hand and a restarted etcd leave them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvops.errors import AuthFailed, ConfigError, Refused, Unreachable
from kvops.store import coord
from kvops.store.coord import EtcdAccess, GroupKeys
from kvops.store.election import SILENCE, Campaign, Claim, Grant, Look, Members, Op, Seen
from tests.etcd import EtcdCluster, authority, needs_etcd
from tests.waiting import WAIT_S, until

pytestmark = [needs_etcd, pytest.mark.process]
SECRET = b"s" * 32
CLAIM = Claim(name="m", term=1, address="127.0.0.1:7800", control="127.0.0.1:7801")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member, for all tests that leave it running."""
    with closing(EtcdCluster(members=1)) as cluster:
        yield cluster


@pytest.fixture
def keys(etcd: EtcdCluster) -> Iterator[GroupKeys]:
    """A group's, empty."""
    etcd.delete("/kvops/")
    with closing(GroupKeys(EtcdAccess(endpoints=etcd.endpoints), group="g")) as made:
        yield made


def opened(access: EtcdAccess) -> GroupKeys:
    """The group's keys, proved to be reachable and ours."""
    keys = GroupKeys(access, group="g")
    try:
        keys.check(SECRET)
    except BaseException:
        keys.close()
        raise
    return keys


def answered(keys: GroupKeys, op: Op) -> Any:
    """What etcd says: on a busy machine it may not say it at once."""

    def ask() -> tuple[Any] | None:
        said = keys.run(op)
        return None if said is SILENCE else (said,)

    return until(ask, "etcd answers")[0]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "no-such-host.invalid:2379", "192.0.2.1:2379"])
def test_a_wrong_endpoint_is_named(endpoint: str) -> None:
    """Nobody there, no such host, or silence: one error that names the endpoint, in bounded time."""
    began = time.monotonic()
    with pytest.raises(Unreachable, match=f"etcd at {endpoint} does not answer"):
        opened(EtcdAccess(endpoints=[endpoint]))

    assert time.monotonic() - began < WAIT_S


def test_another_groups_secret_is_refused(keys: GroupKeys) -> None:
    """Two groups of one name never share keys unnoticed; the same secret is let in again."""
    keys.check(SECRET)
    keys.check(SECRET)
    with pytest.raises(Refused, match="another secret"):
        keys.check(b"x" * 32)


def test_a_damaged_owner_is_told_from_another_group(etcd: EtcdCluster, keys: GroupKeys) -> None:
    """The way back is one key, not everything under the group's name."""
    etcd.put("/kvops/g/owner", b"junk")
    with pytest.raises(Refused, match=r"/kvops/g/owner .* cannot be read") as caught:
        keys.check(SECRET)

    assert "etcdctl del /kvops/g/owner" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("term", b"junk"),
        ("term", b""),
        ("term", b"\xff\xfe"),
        ("term", b"-5"),
        ("term", b"9" * 30),
        ("leader", b"junk"),
        ("leader", b'{"name":"m","term":1,"address":"nowhere","control":"127.0.0.1:1"}'),
        ("leader", b'{"name":"m","term":-1,"address":"127.0.0.1:1","control":"127.0.0.1:1"}'),
        ("members", b"null"),
        ("members", b"\xff"),
        ("members", b'{"term":-7,"names":["m"]}'),
    ],
)
def test_what_cannot_be_read_is_said(etcd: EtcdCluster, keys: GroupKeys, name: str, value: bytes) -> None:
    """Garbage under a key of ours is an answer that names it: the election goes on, etcd does not count as silent."""
    etcd.put(f"/kvops/g/{name}", value)

    seen = answered(keys, Look())

    assert isinstance(seen, Seen)
    assert f"/kvops/g/{name}" in seen.trouble


def test_a_damaged_term_is_outdone(etcd: EtcdCluster, keys: GroupKeys) -> None:
    """The in-sync set's term stands in for one that cannot be read, and the next leader writes a good one."""
    etcd.put("/kvops/g/members", b'{"term":7,"names":["m"]}')
    etcd.put("/kvops/g/term", b"junk")
    seen, lease = answered(keys, Look()), answered(keys, Grant(60))
    assert isinstance(seen, Seen)
    assert isinstance(lease, int)
    assert seen.term == 7

    assert keys.run(Campaign(lease, CLAIM, Members(term=8, names=["m"]), seen)) is True
    healed = answered(keys, Look())
    assert isinstance(healed, Seen)
    assert not healed.trouble


@pytest.mark.parametrize("how", ["wrong", "missing", "unknown"])
def test_a_password_that_is_wrong_is_told_from_silence(how: str) -> None:
    """etcd's own word is in the error, and what to look at."""
    with closing(EtcdCluster(members=1)) as etcd:
        etcd.demand_password("right")
        user = {"wrong": "root", "missing": "", "unknown": "nobody"}[how]
        access = EtcdAccess(endpoints=etcd.endpoints, user=user, password="wrong" if user else "")
        with pytest.raises(AuthFailed, match="turned us away") as caught:
            opened(access)

    assert "etcd_user" in caught.value.fix


def test_a_late_login_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password that etcd was too busy to look at in time is shown again, not taken for a wrong one."""
    real, asked = coord.etcd3.etcdrpc.AuthStub, []

    class LateAtFirst:
        def __init__(self, channel: Any) -> None:
            self._stub = real(channel)

        def Authenticate(self, request: Any, timeout_s: float) -> Any:
            asked.append(timeout_s)
            return self._stub.Authenticate(request, timeout_s if len(asked) > 1 else 1e-6)

    monkeypatch.setattr(coord.etcd3.etcdrpc, "AuthStub", LateAtFirst)
    with closing(EtcdCluster(members=1)) as etcd:
        etcd.demand_password("right")
        access = EtcdAccess(endpoints=etcd.endpoints, user="root", password="right")
        with closing(opened(access)) as keys:
            answered(keys, Look())

    assert len(asked) >= 2


def test_a_restarted_etcd_is_logged_in_to_again() -> None:
    """etcd forgets its tokens with its process: a master that runs for months must outlive that."""
    with closing(EtcdCluster(members=1)) as etcd:
        etcd.demand_password("right")
        access = EtcdAccess(endpoints=etcd.endpoints, user="root", password="right")
        with closing(opened(access)) as keys:
            answered(keys, Look())
            etcd.send(0, signal.SIGKILL)
            etcd.heal()

            answered(keys, Look())


def test_a_password_that_is_not_asked_for_does_no_harm(etcd: EtcdCluster) -> None:
    """A password may be configured before etcd demands it."""
    access = EtcdAccess(endpoints=etcd.endpoints, user="root", password="early")
    with closing(GroupKeys(access, group="early")) as keys:
        keys.check(SECRET)

        answered(keys, Look())


def test_half_a_login_is_refused(etcd: EtcdCluster) -> None:
    """A user without a password is a mistake in the configuration, not a crash."""
    with pytest.raises(ConfigError, match="etcd_password_file"):
        GroupKeys(EtcdAccess(endpoints=etcd.endpoints, user="root"), group="g")


def test_tls(tmp_path: Path) -> None:
    """The right CA is let in; a wrong one, none, a missing file and a file that is no certificate each say so."""
    wrong, _, _ = authority(tmp_path, "wrong")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    with closing(EtcdCluster(members=1, tls=True)) as etcd:
        with closing(opened(EtcdAccess(endpoints=etcd.endpoints, ca_file=str(etcd.ca)))) as keys:
            answered(keys, Look())
        for bad in (wrong, None):
            with pytest.raises(Unreachable, match="does not answer") as caught:
                opened(EtcdAccess(endpoints=etcd.endpoints, ca_file=str(bad or "")))
            assert "TLS" in caught.value.fix
        for bad in (tmp_path / "nothing.pem", junk):
            with pytest.raises(ConfigError, match=bad.name):
                opened(EtcdAccess(endpoints=etcd.endpoints, ca_file=str(bad)))

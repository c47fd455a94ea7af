"""The way out when every master that had everything is gone for good: an operator lets another one lead."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvops.errors import Refused, Unreachable, UsageError
from kvops.files import read_secret
from kvops.fleet.health import Known, Life, judge
from kvops.store.control import ControlClient
from kvops.store.model import MasterStatus
from tests.etcd import EtcdCluster, needs_etcd
from tests.pool import LocalPool, Member
from tests.waiting import WAIT_S, until

pytestmark = [needs_etcd, pytest.mark.process]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member."""
    with closing(EtcdCluster(members=1)) as cluster:
        yield cluster


@pytest.fixture
def pool(etcd: EtcdCluster) -> Iterator[LocalPool]:
    """Two masters and a store, of a new group."""
    etcd.delete("/kvops/")
    with closing(LocalPool(masters=2, stores=1, etcd=etcd.endpoints)) as made:
        yield made


def ask(pool: LocalPool, master: Member) -> ControlClient:
    """A master's control service."""
    return ControlClient(master.addresses["control"], read_secret(pool.secret_file), timeout_s=WAIT_S)


def status(pool: LocalPool, master: Member) -> MasterStatus | None:
    """What a master says; None when it does not."""
    with ask(pool, master) as control:
        try:
            return control.status()
        except Unreachable:
            return None


def lose_the_set(pool: LocalPool) -> tuple[Member, Member]:
    """Let the standby fall out of the set, kill the only member left, bring the standby back: dead one, living one."""
    first, second = pool.masters
    roles = {
        master.name: until(lambda master=master: status(pool, master), "it answers")
        for master in (first, second)
    }
    dead, living = (first, second) if roles[first.name].role == "leader" else (second, first)
    living.send(signal.SIGKILL)
    until(
        lambda: (said := status(pool, dead)) and said.members == [dead.name], "the set is the leader's alone"
    )
    client = pool.connect()
    for number in range(20):
        until(lambda number=number: client.put(f"k{number}", b"x" * 100).ok, "a put works")
    dead.send(signal.SIGKILL)
    pool.start(living)
    return dead, living


def test_a_master_outside_the_set_leads_when_it_is_told_to(pool: LocalPool) -> None:
    """Not before, not without force; then it keeps all that the living store holds, and the dead one may come back."""
    dead, living = lose_the_set(pool)
    said = until(lambda: (said := status(pool, living)) and said.members and said, "it has looked into etcd")
    known = [
        Known(name=one.name, role="master", life=Life.RUNNING if one is living else Life.ENDED)
        for one in pool.masters
    ]
    reasons = judge(group="local", environment="", known=known, answers={living.name: said}, since={}).reasons
    stuck = next(one for one in reasons if one.code == "master.no_candidate")
    assert f"kvops master promote {living.name} --force in-sync" in stuck.text
    assert stuck.next == f"kvops restart {dead.name}"
    with ask(pool, living) as control:
        with pytest.raises(UsageError, match="unknown check"):
            control.promote(owner="test", force=["everything"])
        until(lambda: control.promote(owner="test", dry_run=True).members == [dead.name], "nobody leads")
        with pytest.raises(Refused, match=f"lacks what {dead.name} acknowledged last"):
            control.promote(owner="test")

        control.promote(owner="test", force=["in-sync"])
        until(lambda: (said := status(pool, living)) and said.role == "leader", "it leads")
        with pytest.raises(Refused, match="leads already"):
            control.promote(owner="test", force=["in-sync"])
    client = pool.connect()
    until(lambda: all(client.get(f"k{number}") == b"x" * 100 for number in range(20)), "everything is there")
    pool.start(dead)
    until(lambda: (said := status(pool, dead)) and said.role == "standby" and said.promotable, "it follows")


def test_nobody_is_promoted_beside_a_leader(pool: LocalPool) -> None:
    """A standby of a group that is led refuses, whatever is forced."""
    roles = {master.name: until(lambda master=master: status(pool, master), "") for master in pool.masters}
    standby = next(master for master in pool.masters if roles[master.name].role == "standby")
    with ask(pool, standby) as control, pytest.raises(Refused, match="leads"):
        control.promote(owner="test", force=["in-sync"])
